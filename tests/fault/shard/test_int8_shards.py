"""Goal: shards that are killed, or lose steps with their machine, leave all with the shards' bits.

Method: `shardwell serve` with files, killed in mid-training; and files as they were some steps
before, in place of those that a machine lost. Oracle: harness.oracles.int8.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.data.int8_training import RATE, SIZE, assert_bits, gradient_of, opened
from harness.oracles.int8 import BLOCK, Int8Weights, Int8Worker, sgd
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import ServingShard
from harness.threads import in_background

STEP_COUNT = 16


class Shards:
    """Two of them, on ports that stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._running = [self._serve(index) for index in (0, 1)]
        self.addresses = [shard.address() for shard in self._running]

    @property
    def target(self) -> str:
        return ",".join(self.addresses)

    def _serve(self, index: int, port: int = 0) -> ServingShard:
        flags = (f"--data-dir={self.path / str(index)}",)
        return ServingShard(*flags, index=index, count=2, port=port)

    def kill(self, index: int) -> None:
        self._running[index].close()

    def start(self, index: int) -> None:
        port = int(self.addresses[index].rpartition(":")[2])
        self._running[index] = self._serve(index, port)
        assert self._running[index].address() == self.addresses[index]

    def close(self) -> None:
        for shard in self._running:
            shard.close()


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Shards]:
    with contextlib.closing(Shards(tmp_path / "shards")) as running:
        yield running


def test_shards_that_are_killed_change_no_bit(
    shards: Shards, connect: Callable[..., shardwell.Client]
) -> None:
    nets = [
        opened(connect(shards.target, f"w{rank}", timeout_s=PATIENCE_S), worker_count=2)
        for rank in range(2)
    ]
    reader = connect(shards.target, "reader", timeout_s=PATIENCE_S).parameter("net")
    workers, weights = [Int8Worker(SIZE) for _ in nets], Int8Weights(np.zeros(SIZE, np.float32))
    images = [weights.image.copy()]
    for step in range(STEP_COUNT):
        sent = [each.sent(gradient_of(rank, step)) for rank, each in enumerate(workers)]
        mean = (sent[0] + sent[1]) / np.float32(2)
        images.append(weights.update(sgd(RATE)(weights.weights, mean)).copy())

    def train(rank: int) -> None:
        for step in range(STEP_COUNT):
            assert_bits(nets[rank].exchange(gradient_of(rank, step)), images[step + 1])

    training = [in_background(partial(train, rank)) for rank in (0, 1)]
    for kill_count, index in enumerate((1, 0, 1), start=1):
        eventually("it trains", lambda n=kill_count: nets[0].next_step >= 3 * n)
        shards.kill(index)
        shards.start(index)
        found = reader.get_weights()
        for start in range(0, SIZE, BLOCK):  # each block of some version
            part = slice(start, start + BLOCK)
            assert any((found[part] == image[part]).all() for image in images)
    for each in training:
        each.result(PATIENCE_S)
    assert_bits(reader.get_weights(min_version=STEP_COUNT), images[-1])
    for net, worker in zip(nets, workers, strict=True):
        assert_bits(net.residual, worker.residual)


def test_a_step_without_a_gradient_that_a_killed_shard_had_counted_is_no_other(
    shards: Shards, connect: Callable[..., shardwell.Client]
) -> None:
    """The shard knows the step again, and no longer that it came without values."""
    clients = [connect(shards.target, f"w{rank}", timeout_s=PATIENCE_S) for rank in range(2)]
    nets = [opened(client, worker_count=2) for client in clients]
    gradients = [in_background(partial(net.exchange, gradient_of(0, 0))) for net in nets]
    for each in gradients:
        each.result(PATIENCE_S)
    waiting = in_background(partial(nets[0].exchange, None))
    eventually(
        "both shards have counted it",
        lambda: all(
            each.parameters[0].contributed_worker_ids == ("w0",) for each in clients[1].status()
        ),
    )
    shards.kill(0)
    shards.start(0)
    nets[1].exchange(gradient_of(1, 1))
    waiting.result(PATIENCE_S)
    assert nets[0].outcome.superseded == ()
    worker = Int8Worker(SIZE)
    worker.sent(gradient_of(0, 0))
    assert_bits(nets[0].residual, worker.residual)


@pytest.mark.parametrize("ahead", [-1, 0, 1, 2, 3, 4])
@pytest.mark.parametrize("lost", ["one shard", "both shards"])
def test_steps_that_were_lost_and_made_anew(
    shards: Shards,
    connect: Callable[..., shardwell.Client],
    tmp_path: Path,
    ahead: int,
    lost: str,
) -> None:
    """Who holds an image of them has no change from it: not of the same version either."""
    first = opened(connect(shards.target, "w0"), mode="async", worker_count=2)
    readers = [connect(shards.target, f"r{number}").parameter("net") for number in range(2)]
    for step in range(3):
        first.exchange(gradient_of(0, step))
    shutil.copytree(shards.path, tmp_path / "before")
    for step in range(3, 6):
        first.exchange(gradient_of(0, step))
    held = first.get_weights()
    for reader in readers:
        assert_bits(reader.get_weights(), held)
    indexes = [1] if lost == "one shard" else [0, 1]
    for index in indexes:
        shards.kill(index)
        shutil.rmtree(shards.path / str(index))
        shutil.copytree(tmp_path / "before" / str(index), shards.path / str(index))
        shards.start(index)
    other = opened(connect(shards.target, "w1"), mode="async", worker_count=2)
    for step in range(3 + ahead):
        other.exchange(gradient_of(1, step))
    expected = connect(shards.target, "new").parameter("net").get_weights()
    assert (expected != held).any()
    for reader in (*readers, other):
        assert_bits(reader.get_weights(), expected)
    assert_bits(first.get_weights(), expected)
