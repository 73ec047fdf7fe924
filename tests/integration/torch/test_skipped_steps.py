"""Goal: a step that one worker skips, as a GradScaler does, is a step without that worker.

Method: two workers with batches of their own on one cluster, and torch alone on the mean of the
gradients that are to count; fp32. No step may be waited for longer than it takes.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

import shardwell
from harness.threads import together
from harness.torch_models import assert_same

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402
from harness.torch_seeds import seeded  # noqa: E402

SGD = shardwell.SGD(learning_rate=0.1, momentum=0.9)
STEPS = 6


@seeded(1)
def net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))


torch.manual_seed(7)
BATCHES = [
    [(torch.randn(16, 20), torch.randint(0, 3, (16,))) for _ in range(STEPS)] for _ in range(2)
]


def loss_of(model: Any, rank: int, step: int) -> Any:
    inputs, targets = BATCHES[rank][step]
    return torch.nn.functional.cross_entropy(model(inputs), targets)


def expected_of(counted: list[list[int]]) -> list[Any]:
    """What torch makes of the mean over those ranks, step by step; a step of none is none."""
    model = net()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, ranks in enumerate(counted):
        if ranks:
            for rank in ranks:
                (loss_of(model, rank, step) / len(ranks)).backward()
            theirs.step()
            theirs.zero_grad()
    return list(model.parameters())


def workers(cluster, connect, **options: Any) -> list[tuple[Any, Any]]:
    running = cluster(2, chunk_size_bytes=256)
    found = []
    for rank in range(2):
        model = net()
        given = {"codec": "fp32", "worker_count": 2, "timeout_s": 20.0, **options}
        client = connect(running, f"w{rank}")
        found.append((model, shardwell.torch.ServerOptimizer(model, client, SGD, **given)))
    return found


def check(made: list[tuple[Any, Any]], counted: list[list[int]]) -> None:
    assert [optimizer.next_step for _, optimizer in made] == [len(counted)] * 2
    for model, _ in made:
        for mine, its in zip(model.parameters(), expected_of(counted), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("overlap", ["auto", False])
def test_a_scaler_that_skips_on_one_worker(cluster, connect, overlap, unscales) -> None:
    """On rank 1 the first two scales are too large, on rank 0 that of step 3 alone."""
    made = workers(cluster, connect, overlap=overlap)

    def run(rank: int) -> None:
        model, optimizer = made[rank]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if rank else 1024.0)
        for step in range(STEPS):
            scaler.scale(2 * loss_of(model, rank, step)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            for each in model.parameters():  # of a loss that was doubled
                each.grad.div_(2)
            scaler.step(optimizer)
            scaler.update(2.0**127 if (rank, step + 1) in {(1, 1), (0, 3)} else 64.0)
            optimizer.zero_grad()

    together([lambda: run(0), lambda: run(1)])
    check(made, [[0], [0], [0, 1], [1], [0, 1], [0, 1]])


def test_a_step_that_all_skip_changes_nothing(cluster, connect) -> None:
    made = workers(cluster, connect)

    def run(rank: int) -> None:
        model, optimizer = made[rank]
        for step in range(3):
            if step == 1:
                optimizer.skip_step()
                continue
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    together([lambda: run(0), lambda: run(1)])
    check(made, [[0, 1], [], [0, 1]])


def test_a_skipped_step_that_failed_is_made_good_by_the_next(cluster, connect) -> None:
    made = workers(cluster, connect)
    (model, optimizer), (other, others) = made
    optimizer.timeout_s = 2.0
    with pytest.raises(shardwell.WorkersMissingError, match="w1"):
        optimizer.skip_step()
    optimizer.timeout_s = 20.0

    def first() -> None:
        optimizer.step()  # makes good for the one that failed
        loss_of(model, 0, 1).backward()
        optimizer.step()

    def second() -> None:
        for step in range(2):
            others.zero_grad()
            loss_of(other, 1, step).backward()
            others.step()

    together([first, second])
    check(made, [[1], [0, 1]])


def test_what_had_left_of_a_skipped_step_counts_and_is_logged(cluster, connect, caplog) -> None:
    made = workers(cluster, connect, overlap=True)
    (model, optimizer), (other, others) = made
    caplog.set_level(logging.WARNING, "shardwell")

    def first() -> None:
        loss_of(model, 0, 0).backward()
        has_left = optimizer._step.state == "leaving"
        optimizer.skip_step()
        assert has_left == any("a part of its gradients had left" in m for m in caplog.messages)
        optimizer.zero_grad()
        loss_of(model, 0, 1).backward()
        optimizer.step()

    def second() -> None:
        for step in range(2):
            loss_of(other, 1, step).backward()
            others.step()
            others.zero_grad()

    together([first, second])
    assert [each.next_step for _, each in made] == [2, 2]
    assert_same(model, other)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_of_one_worker_alone(cluster, connect, unscales) -> None:
    """It scales gradients back between backward and step, in a way that torch does not count."""
    client = connect(cluster(2), "w0")
    model, expected = net(), net()
    optimizer = shardwell.torch.ServerOptimizer(model, client, SGD, codec="fp32")
    its = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        scaler.scale(loss_of(model, 0, step)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss_of(expected, 0, step).backward()
        its.step()
        its.zero_grad()
    assert_same(model, expected, rtol=1e-4, atol=1e-6)
