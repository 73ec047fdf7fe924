"""Goal: workers with more threads than their machine has cores say so, once, with the cure."""

from __future__ import annotations

import logging
import threading

import pytest

import shardwell
from harness.threads import in_background

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402
from shardwell.threads.spread import core_count  # noqa: E402
from shardwell.torch.threads import crowding  # noqa: E402


@pytest.fixture
def threads_a_core(monkeypatch):
    """As torch has them in a process of its own."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 * core_count())


def server(model, client, **options) -> shardwell.torch.ServerOptimizer:
    """With another hook behind ours, as prepare() registers one."""
    optimizer = shardwell.torch.ServerOptimizer(model, client, shardwell.SGD(0.1), **options)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def step(optimizer, model) -> None:
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_workers_that_share_cores_are_named_once(cluster, connect, caplog, threads_a_core) -> None:
    running = cluster(2)
    has_looked = threading.Event()

    def other() -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = server(model, connect(running, "w1"), worker_count=2)
        step(optimizer, model)
        assert has_looked.wait(60)  # it computes while the first one asks who is to come
        for _ in range(5):
            step(optimizer, model)

    model = torch.nn.Linear(3, 2)
    optimizer = server(model, connect(running, "w0"), worker_count=2)
    with caplog.at_level(logging.WARNING, "shardwell"):
        ended = in_background(other)
        step(optimizer, model)
        has_looked.set()
        for _ in range(5):
            step(optimizer, model)
        ended.result(60)
    lines = [record.message for record in caplog.records if "threads" in record.message]
    # One a worker at the most: the other one may have asked while the first was on its way.
    assert 1 <= len(lines) <= 2
    share = max(core_count() // 2, 1)
    assert lines[0] == crowding(2, 2 * core_count(), core_count())
    assert f"OMP_NUM_THREADS={share} " in lines[0]
    assert f"torch.set_num_threads({share})" in lines[0]


def test_a_single_worker_is_left_alone(cluster, connect, caplog, threads_a_core) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = server(model, connect(cluster(1), "w0"))
    with caplog.at_level(logging.WARNING, "shardwell"):
        for _ in range(4):
            step(optimizer, model)
    assert not [record for record in caplog.records if record.name == "shardwell"]


@pytest.mark.parametrize(
    ("workers", "threads", "cores", "share"),
    [(2, 2, 2, 1), (2, 16, 16, 8), (4, 1, 2, None), (2, 4, 8, None), (1, 8, 2, None), (8, 2, 4, 1)],
)
def test_what_is_too_many(workers, threads, cores, share) -> None:
    words = crowding(workers, threads, cores)
    assert bool(words) == (share is not None)
    assert not words or f"OMP_NUM_THREADS={share} " in words
