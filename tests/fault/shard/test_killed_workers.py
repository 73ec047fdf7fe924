"""A worker killed with SIGKILL in the middle of steps comes back under its name and goes on.

Goal: the final weights are those of undisturbed training, bit for bit. Method: worker processes
whose integer gradients depend on worker and step alone; one is killed again and again at no
particular instant, and started again; the other never notices but by waiting.
"""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest

import shardwell
from harness.oracles.parameter import ModelParameter, integer_gradient
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import TRAINING_WORKER, Program

SIZE = 3000
LAST_STEP = 40
SGD = shardwell.SGD(learning_rate=0.5)


def _worker(target: str, index: int) -> Program:
    return Program(str(TRAINING_WORKER), target, str(index), "2", str(SIZE), str(LAST_STEP))


def _expected() -> np.ndarray:
    oracle = ModelParameter(np.zeros(SIZE), SGD, worker_count=2)
    for step in range(LAST_STEP + 1):
        for index in (0, 1):
            oracle.put(f"w{index}", integer_gradient(index, step, SIZE))
    return oracle.weights


@pytest.mark.exhaustive
def test_killed_twice_in_the_middle_of_steps(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    chance = random.Random(1)
    steady = _worker(running.target, 0)
    with steady:
        for kill_count in range(3):
            with _worker(running.target, 1) as victim:
                first = int(victim.read_line().removeprefix("from "))
                assert (first > 0) == (kill_count > 0)
                if kill_count == 2:
                    assert victim.end() == 0
                    break
                for _ in range(chance.randrange(3, 8)):
                    victim.read_line()
                victim.send(signal.SIGKILL)
                assert victim.end() == -signal.SIGKILL
        assert steady.end() == 0
    model = connect(running, "reader").parameter("model", size=SIZE, optimizer=SGD, worker_count=2)
    weights = model.get_weights(min_version=LAST_STEP + 1)
    np.testing.assert_array_equal(weights, _expected())


def test_a_killed_worker_leaves_half_a_step_that_counts_once(cluster, connect) -> None:
    """The first gradient reaches one shard; the worker dies; its successor sends all of it."""
    from harness.wire_client.worker import WireWorker, sgd, spec
    from shardwell.v1 import parameter_server_pb2 as pb
    from shardwell.v1 import types_pb2

    running = cluster(2, chunk_size_bytes=64)
    size = 100
    gradient = integer_gradient(0, 0, size)
    wire = spec("m", size, codec=types_pb2.CODEC_FP16, optimizer=sgd(0.5), worker_count=2)
    steady = connect(running, "steady").parameter("m", size=size, optimizer=SGD, worker_count=2)
    steady.init(np.zeros(size, np.float32))
    with WireWorker(running.target, "victim") as worker:
        half = worker.create(wire)
        worker.stubs[1].PutGradient(
            iter(half.gradient_messages(pb.PutGradientRequest, 1, gradient)), timeout=PATIENCE_S
        )
        part = half.gradient_messages(pb.PutGradientRequest, 0, gradient)[:1]
        worker.stubs[0].PutGradient(iter(part), timeout=PATIENCE_S)
    back = connect(running, "victim").parameter("m", size=size, optimizer=SGD, worker_count=2)
    assert back.next_step == 0
    back.put_gradient(gradient)
    steady.put_gradient(gradient)
    assert (
        connect(running, "victim")
        .parameter("m", size=size, optimizer=SGD, worker_count=2)
        .next_step
        == 1
    )
    np.testing.assert_array_equal(back.get_weights(min_version=1), -0.5 * gradient)


def test_a_worker_that_is_gone_frees_its_streams(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    observer = connect(running, "observer")
    with _worker(running.target, 0) as lonely:
        lonely.read_line()
        eventually(
            "it waits for the other",
            lambda: all(status.open_stream_count for status in observer.status()),
        )
        lonely.send(signal.SIGKILL)
        lonely.end()
    eventually(
        "its streams are gone",
        lambda: not any(status.open_stream_count for status in observer.status()),
    )
