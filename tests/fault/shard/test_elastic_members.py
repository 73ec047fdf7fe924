"""Elastic members that come, die, stand still and come back, as real processes on real shards."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.programs.elastic_worker import NAME, ElasticWorker, gradient_of, opened
from harness.threads import in_background
from shardwell_server import LocalCluster

SIZE = 3000
MANY = 100_000
"""Steps of a worker that is killed before it has made them."""


def next_such(worker: ElasticWorker, is_such: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The worker's next outcome of a kind."""
    return eventually(
        "such an outcome comes", lambda: is_such(found := worker.read_outcome()) and found
    )


def with_set(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda found: found["contributors"] == list(names)


def test_a_worker_that_dies_costs_the_others_a_second() -> None:
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        first = stack.enter_context(ElasticWorker(target, "w0", SIZE, MANY))
        second = stack.enter_context(ElasticWorker(target, "w1", SIZE, MANY))
        next_such(first, with_set("w0", "w1"))
        second.process.kill()
        assert next_such(first, with_set("w0"))["counted"] == "all"
        third = stack.enter_context(ElasticWorker(target, "w1", SIZE, MANY))
        next_such(third, with_set("w0", "w1"))


def test_a_stopped_worker_is_lost_and_comes_back() -> None:
    bounds = {"member_return_s": 0.3, "member_lease_s": 1.0}
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        first = stack.enter_context(ElasticWorker(target, "w0", SIZE, MANY, **bounds))
        second = stack.enter_context(ElasticWorker(target, "w1", SIZE, MANY, **bounds))
        next_such(first, with_set("w0", "w1"))
        second.send(signal.SIGSTOP)
        next_such(first, with_set("w0"))
        second.send(signal.SIGCONT)
        next_such(
            first, with_set("w0", "w1")
        )  # what it gave before it stood still may have counted
        back = next_such(second, with_set("w0", "w1"))
        assert back["counted"] == "all"


def test_one_that_leaves_is_not_awaited_and_may_come_back() -> None:
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(shardwell.connect(cluster.target, worker_id=f"w{n}"))
            for n in range(2)
        ]
        first, second = (opened(client, SIZE, {}) for client in clients)
        gradient = np.ones(SIZE, np.float32)
        first.exchange(gradient)
        for _ in range(2):
            second.get_weights()
            second.put_gradient(gradient)
            first.exchange(gradient)
            assert first.outcome is not None
            assert first.outcome.contributors == ("w0", "w1")
            second.leave()
            first.exchange(gradient)
            assert first.outcome.contributors == ("w0",)


def test_below_the_floor_all_wait_by_name() -> None:
    with (
        LocalCluster(shard_count=2) as cluster,
        shardwell.connect(cluster.target, worker_id="w0", timeout_s=2.0) as client,
    ):
        model = opened(client, SIZE, {"min_count": 2})
        with pytest.raises(shardwell.WorkersMissingError, match="2 to 64 members"):
            model.exchange(np.ones(SIZE, np.float32))
        with ElasticWorker(cluster.target, "w1", SIZE, MANY, min_count=2) as other:
            weights = model.exchange(np.ones(SIZE, np.float32), timeout_s=40.0)
            assert model.outcome is not None
            assert model.outcome.contributors == ("w0", "w1")
            mean = (1.0 + gradient_of("w1", 0)) / 2
            assert set(weights.tolist()) == {-mean}
            assert other.read_outcome()["contributors"] == ["w0", "w1"]


def test_who_joins_waits_for_a_shard_that_is_away(cluster, connect, tmp_path) -> None:
    """As for any call: though it asks the shards each second, whether an open step needs it."""
    running = cluster(2, data_dir=tmp_path, processes=True)
    first, second = (opened(connect(running, f"w{n}"), SIZE, {}) for n in range(2))
    gradient = np.ones(SIZE, np.float32)
    first.exchange(gradient)
    joining = in_background(second.join)
    eventually("it has its seats", lambda: len(connect(running, "ops").members(NAME)) == 2)
    running.children[1].kill()
    with pytest.raises(FutureTimeoutError):
        joining.result(2.0)  # twice as long as one look takes
    running.start_again(1)
    first.exchange(gradient)
    assert joining.result(PATIENCE_S) == first.version


def test_a_quorum_closes_without_the_slow_one() -> None:
    spec = {"min_contributors": 1, "grace_s": 0.05}
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        slow = stack.enter_context(ElasticWorker(target, "w0", SIZE, MANY, pause_s=0.5, **spec))
        fast = stack.enter_context(ElasticWorker(target, "w1", SIZE, MANY, **spec))
        next_such(fast, with_set("w1"))
        late = next_such(slow, lambda found: found["counted"] == "none")
        assert late["version"] > late["step"]


def test_clip_norm_with_members_that_come_and_go() -> None:
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        first = stack.enter_context(ElasticWorker(target, "w0", SIZE, MANY, clip_norm=1.0))
        second = stack.enter_context(ElasticWorker(target, "w1", SIZE, MANY, clip_norm=1.0))
        next_such(first, with_set("w0", "w1"))
        second.process.kill()
        next_such(first, with_set("w0"))


def test_a_full_step_whose_members_are_all_gone_is_closed_by_the_next_one() -> None:
    """Shards wait for the norm of a step that is full, and no client is left to send it."""
    gradient = np.zeros(SIZE, np.float32)
    gradient[0] = 4.0
    with LocalCluster(shard_count=2, chunk_size_bytes=1024) as cluster:
        with shardwell.connect(cluster.target, worker_id="w0") as client:
            opened(client, SIZE, {"clip_norm": 1.0}).put_gradient(gradient)
        with shardwell.connect(cluster.target, worker_id="w1", timeout_s=20.0) as client:
            net = opened(client, SIZE, {"clip_norm": 1.0})
            assert net.join() == 1
            assert net.get_weights()[0] == pytest.approx(-1.0)
