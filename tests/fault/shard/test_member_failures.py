"""Goal: each failure of a member costs the others a moment, by the failure's name.

Method: real processes on real shards; one worker's way to one shard goes through a proxy, or a
client of the .proto does what a process that dies leaves behind.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Proxy
from harness.programs.elastic_worker import NAME, SIZE, ElasticWorker, opened
from harness.threads import together
from harness.wire_client.worker import WireParameter, WireWorker
from shardwell.specs.members import Elastic
from shardwell.specs.parameter import ParameterSpec
from shardwell_server import LocalCluster

BOUNDS = {"member_return_s": 0.3, "member_lease_s": 1.0}


def wire_member(
    worker: WireWorker, spec: ParameterSpec, tenure: int, from_step: int = 0
) -> WireParameter:
    """A member that is awaited from a step on."""
    made = worker.create(spec.to_proto())
    for fields in ({}, {"from_step": from_step}):
        worker.open_parameter(made.spec, take_seat=True, tenure=tenure, **fields)
    made.tenure, made.next_step = tenure, from_step
    return made


def spec_of(**elastic: Any) -> ParameterSpec:
    """What `opened` declares."""
    members = Elastic(**BOUNDS, **elastic)
    return ParameterSpec(
        name=NAME,
        size=SIZE,
        optimizer=shardwell.SGD(learning_rate=1.0),
        worker_count=members.max_count,
        members=members,
        codec="fp32",
    )


@pytest.mark.parametrize("way", ["cut", "stall"])
def test_w_reaches_all_but_a_for_longer_than_the_lease(way: str) -> None:
    """B hears of it, and awaits it: it waits for A's weights. A says it is over, and all know."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(shard_count=2))
        shard_a, shard_b = cluster.target.split(",")
        proxy = stack.enter_context(Proxy(shard_a))
        first = stack.enter_context(ElasticWorker(cluster.target, "w0", **BOUNDS))
        cut_off = f"{proxy.address},{shard_b}"
        second = stack.enter_context(ElasticWorker(cut_off, "w1", same_host=False, **BOUNDS))
        first.next_with("w0", "w1")
        if way == "cut":
            proxy.cut(refuse=True)
        else:
            proxy.stall()
        alone = first.next_with("w0")
        for _ in range(20):  # and goes on
            assert first.read_outcome()["step"] > alone["step"]
        if way == "cut":
            proxy.accept()
        else:
            proxy.resume()
        first.next_with("w0", "w1")
        second.next_with("w0", "w1")


def test_a_joiner_dies_between_two_shards_join() -> None:
    """A awaits it, and B never heard of it."""
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        client = stack.enter_context(
            shardwell.connect(cluster.target, worker_id="w0", timeout_s=40.0)
        )
        model = opened(client, **BOUNDS)
        gradient = np.ones(SIZE, np.float32)
        model.exchange(gradient)
        joiner = WireWorker(cluster.target, "w1")
        spec = spec_of()
        request = {"take_seat": True, "tenure": 5}
        joiner.open_parameter(spec.to_proto())
        joiner.open_parameter(spec.to_proto(), **request)
        joiner.stubs, joiner.identities = joiner.stubs[:1], joiner.identities[:1]
        joiner.open_parameter(spec.to_proto(), **request, from_step=2)
        joiner.close()
        for _ in range(3):
            model.exchange(gradient)
            assert model.outcome is not None
            assert (model.outcome.counted, model.outcome.contributors) == ("all", ("w0",))


@pytest.mark.parametrize("min_count", [1, 2])
def test_all_members_are_lost_with_a_chunk_partly_in(min_count: int) -> None:
    """A has w's gradient of the step, B has none: newcomers take part from B's open step."""
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(
                shardwell.connect(cluster.target, worker_id=f"n{number}", timeout_s=40.0)
            )
            for number in range(min_count)
        ]
        options = {**BOUNDS, "min_count": min_count}
        models = [opened(client, **options) for client in clients]
        spec = spec_of(min_count=min_count)
        lost = [WireWorker(cluster.target, f"w{number}") for number in range(2)]
        made = [wire_member(worker, spec, number + 1) for number, worker in enumerate(lost)]
        made[0].slices = made[0].slices[:1]  # it dies before it sends the rest
        made[0].push(np.ones(SIZE, np.float32))
        for worker in lost:
            worker.close()
        gradient = np.ones(SIZE, np.float32)
        for step in range(3):
            together([partial(model.exchange, gradient) for model in models])
            assert all(model.version > step for model in models)


def test_two_processes_with_one_worker_id() -> None:
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        first = stack.enter_context(ElasticWorker(cluster.target, "w0", **BOUNDS))
        first.next_with("w0")
        client = stack.enter_context(
            shardwell.connect(cluster.target, worker_id="w0", timeout_s=20.0)
        )
        model = opened(client, **BOUNDS)
        with pytest.raises(shardwell.WorkerIdInUseError, match="'w0' is in use"):
            model.exchange(np.ones(SIZE, np.float32))
        first.next_with("w0")


# TensorFlow's cases, by its names.


def test_worker_preempted_between_steps() -> None:
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        first = stack.enter_context(ElasticWorker(target, "w0", **BOUNDS))
        slow = stack.enter_context(ElasticWorker(target, "w1", pause_s=0.5, **BOUNDS))
        slow.next_with("w0", "w1")
        slow.process.kill()  # it pauses now
        first.next_with("w0")


def test_two_workers_preempted() -> None:
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        crew = [
            stack.enter_context(ElasticWorker(target, f"w{number}", **BOUNDS))
            for number in range(3)
        ]
        crew[0].next_with("w0", "w1", "w2")
        for worker in crew[1:]:
            worker.process.kill()
        crew[0].next_with("w0")
        again = [
            stack.enter_context(ElasticWorker(target, f"w{number}", **BOUNDS)) for number in (1, 2)
        ]
        for worker in (crew[0], *again):
            worker.next_with("w0", "w1", "w2")


def test_worker_preempted_in_a_step() -> None:
    """Of its gradient, one shard has all and the other nothing."""
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        client = stack.enter_context(
            shardwell.connect(cluster.target, worker_id="w0", timeout_s=40.0)
        )
        model = opened(client, **BOUNDS)
        worker = WireWorker(cluster.target, "w1")
        model.exchange(np.ones(SIZE, np.float32))
        made = wire_member(worker, spec_of(), 1, from_step=1)
        whole, made.slices = made.slices, made.slices[:1]
        made.push(np.full(SIZE, 3, np.float32))
        worker.close()
        weights = model.exchange(np.ones(SIZE, np.float32))
        border = whole[1].offset
        np.testing.assert_array_equal(weights[:border], -1.0 - 2.0)
        np.testing.assert_array_equal(weights[border:], -1.0 - 1.0)
        assert model.outcome is not None
        assert model.outcome.contributors == ("w0", "w1")


@pytest.mark.parametrize("shard_index", [0, 1])
def test_parameter_server_preempted(cluster: Any, tmp_path: Path, shard_index: int) -> None:
    """Within 5 s members come back to it, and are members as before."""
    running = cluster(2, data_dir=tmp_path, processes=True)
    with ExitStack() as stack:
        crew = [
            stack.enter_context(ElasticWorker(running.target, f"w{number}", **BOUNDS))
            for number in range(2)
        ]
        crew[0].next_with("w0", "w1")
        running.children[shard_index].kill()
        running.start_again(shard_index)
        begun = max(worker.read_outcome()["step"] for worker in crew)
        for worker in crew:
            worker.next_such(lambda found: found["step"] > begun + 100)
            worker.next_with("w0", "w1")
