"""Goal: a snapshot of a slice holds every chunk as it was at one version, whatever happens then.

Method: a slice of several chunks in memory, gradients of ones and SGD of rate 1, so that weights at
version V are -V and the momentum is known; captured chunks are compared with that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from harness.data.sessions import AllAlive, contributor, enter
from shardwell import SGD, ParameterSpec
from shardwell.errors import (
    DeadlineError,
    LimitError,
    NotInitializedError,
    StepOrderError,
    StorageError,
    WorkersMissingError,
)
from shardwell.numerics.update_rules import UpdateRule
from shardwell.placement.slices import Slice
from shardwell.process.spans import Spans
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.config import Limits
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.parameter.snapshot import Snapshot
from shardwell_server.store import Layout
from shardwell_server.store.memory.store import MemoryStore

SIZE, CHUNK = 40, 16
OPTIMIZER = SGD(learning_rate=1.0, momentum=0.5)


def deadline() -> RequestDeadline:
    return RequestDeadline(0.0)


def make(
    *, mode: str = "sync", spool_dir: Path | None = None, initialized: bool = True
) -> ParameterSlice:
    spec = ParameterSpec(
        name="p",
        size=SIZE,
        optimizer=OPTIMIZER,
        worker_count=1 if mode == "sync" else 0,
        codec="fp32",
        mode=mode,
    )
    rule = UpdateRule(OPTIMIZER)
    layout = Layout(
        name="p",
        slice_size=SIZE,
        chunk_element_count=CHUNK,
        initial_slots=rule.initial_slots,
        with_sum=False,
    )
    made = ParameterSlice(
        spec,
        Slice(0, SIZE),
        MemoryStore().create(layout),
        chunk_element_count=CHUNK,
        is_first_shard=True,
        limits=Limits(snapshot_count_max=2),
        sessions=AllAlive(),
        spans=Spans(),
        spool_dir=spool_dir,
    )
    if initialized:
        made.loading.finish(made.loading.claim("w0", deadline()).epoch)
    return made


def train(into: ParameterSlice, step: int, *chunks: int) -> None:
    """One gradient of ones to some chunks, or to all."""
    codec = ChunkCodec.of(into.spec)
    for index in chunks or range(into.chunk_count):
        where = into.where.chunk(index, CHUNK)
        header = pb.ExchangeRequest()
        header.gradient.step, header.gradient.sample_count = step, 1
        sealed = codec.encode(
            header,
            header.gradient.chunk,
            where,
            index,
            np.ones(where.size, np.float32),
            start=checksum.gradient(
                checksum.gradient_context(into.spec.name, "w0"), header.gradient
            ),
        )
        message = pb.ExchangeRequest.FromString(sealed)
        payload = np.frombuffer(message.payload, np.uint8)
        enter(into, "w0")
        assert into.contribute(contributor("w0"), message.gradient, payload, deadline())


def state_at(version: int) -> tuple[float, float]:
    """Weight and momentum of every element."""
    weight = momentum = 0.0
    for _ in range(version):
        momentum = 0.5 * momentum + 1.0
        weight -= momentum
    return weight, momentum


def captured(
    of: ParameterSlice, index: int, snapshot: Snapshot | None
) -> tuple[int, float, np.ndarray, np.ndarray]:
    size = of.where.chunk(index, CHUNK).size
    into = [np.full(size, np.nan, np.float32) for _ in range(of.loading.array_count)]
    version, rate = of.snapshots.capture(index, snapshot, deadline(), into)
    return version, rate, into[0], into[1]


def check(of: ParameterSlice, index: int, snapshot: Snapshot | None, version: int) -> None:
    found, _, weights, momentum = captured(of, index, snapshot)
    assert found == version
    np.testing.assert_array_equal(weights, np.float32(state_at(version)[0]))
    np.testing.assert_array_equal(momentum, np.float32(state_at(version)[1]))


@contextmanager
def begun(of: ParameterSlice, version: int) -> Iterator[Snapshot | None]:
    with of.snapshots.under_way(version, lambda: True) as snapshot:
        yield snapshot


def test_an_idle_slice_is_taken_as_it_lies(tmp_path: Path) -> None:
    made = make(spool_dir=tmp_path)
    train(made, 0)
    with begun(made, 1) as snapshot:
        for index in range(3):
            check(made, index, snapshot, 1)
    assert made.snapshots.pending == ()


def test_chunks_that_go_on_are_kept_as_they_were(tmp_path: Path) -> None:
    made = make(spool_dir=tmp_path)
    train(made, 0)
    with begun(made, 1) as snapshot:
        check(made, 0, snapshot, 1)
        for step in (1, 2, 3):
            train(made, step)
        for index in (2, 1):
            check(made, index, snapshot, 1)
        assert list(tmp_path.iterdir()) == []  # the spool has no name
    check_now = made.storage.weights
    np.testing.assert_array_equal(check_now, np.float32(state_at(4)[0]))


def test_a_later_version_is_taken_when_it_comes() -> None:
    made = make()
    with begun(made, 2) as snapshot:
        with pytest.raises(WorkersMissingError, match="version 2 of chunk 0"):
            captured(made, 0, snapshot)
        for step in range(5):
            train(made, step, 0)
        train(made, 0, 1, 2)
        train(made, 1, 1, 2)
        for index in range(3):
            check(made, index, snapshot, 2)


def test_a_version_that_a_chunk_has_left_is_refused() -> None:
    made = make()
    train(made, 0)
    train(made, 1, 1)
    with pytest.raises(StepOrderError, match="chunk 1 is at 2 already"), begun(made, 1):
        raise AssertionError
    assert made.snapshots.pending == ()
    with begun(made, 2) as snapshot:
        check(made, 1, snapshot, 2)


def test_two_snapshots_at_once_and_no_more() -> None:
    made = make()
    with begun(made, 0) as first, begun(made, 1) as second:
        with pytest.raises(LimitError, match="snapshot_count_max=2"), begun(made, 1):
            raise AssertionError
        for step in range(3):
            train(made, step)
        for index in range(3):
            check(made, index, first, 0)
            check(made, index, second, 1)
    with begun(made, 3) as third:
        check(made, 0, third, 3)


def test_an_unread_snapshot_is_dropped_and_training_goes_on() -> None:
    made = make()
    wanted = [True]
    with made.snapshots.under_way(0, lambda: wanted[0]) as snapshot:
        train(made, 0, 0)
        wanted[0] = False
        train(made, 0, 1, 2)
        train(made, 1)
        for index in range(3):
            with pytest.raises(DeadlineError, match="not read"):
                captured(made, index, snapshot)
    np.testing.assert_array_equal(made.storage.weights, np.float32(state_at(2)[0]))


def test_a_disk_without_room_fails_the_snapshot_and_not_the_training(tmp_path: Path) -> None:
    made = make(spool_dir=tmp_path / "missing")
    with begun(made, 0) as snapshot:
        train(made, 0)
        with pytest.raises(StorageError, match="copying chunk 0"):
            captured(made, 0, snapshot)
    np.testing.assert_array_equal(made.storage.weights, np.float32(state_at(1)[0]))


def test_the_rate_is_that_of_the_update_that_follows() -> None:
    made = make()
    train(made, 0)
    with begun(made, 1) as snapshot:
        made.change_learning_rate(1, 0.25)
        train(made, 1)
        made.change_learning_rate(2, 0.125)
        train(made, 2)
        assert captured(made, 0, snapshot)[1] == 0.25


def test_asynchronous_chunks_are_taken_as_they_are() -> None:
    made = make(mode="async")
    train(made, 0)
    train(made, 1, 2)
    with begun(made, 17) as snapshot:
        assert snapshot is None
        check(made, 0, snapshot, 1)
        check(made, 2, snapshot, 2)


def test_without_first_weights_there_is_nothing_to_take() -> None:
    with pytest.raises(NotInitializedError), begun(make(initialized=False), 0):
        raise AssertionError


class TestRestoring:
    """First weights that come with optimizer state, a version and a rate."""

    def set_all(self, made: ParameterSlice, epoch: int, weights: float, momentum: float) -> None:
        for index, value in enumerate((weights, momentum)):
            values = np.full(SIZE, value, np.float32)
            made.loading.set(epoch, made.where, values, array_index=index)

    def test_training_goes_on_as_if_it_had_not_stopped(self) -> None:
        made = make(initialized=False)
        epoch = made.loading.claim("w0", deadline()).epoch
        self.set_all(made, epoch, *state_at(7))
        assert made.join("w0").next_step == 0
        assert made.loading.finish(epoch, version=7, with_slots=True) == 7
        answer = made.join("w0")
        assert (answer.next_step, answer.version) == (7, 7)
        train(made, 7)
        np.testing.assert_array_equal(made.storage.weights, np.float32(state_at(8)[0]))

    def test_state_of_a_restore_that_ended_half_way_is_forgotten(self) -> None:
        made = make(initialized=False)
        self.set_all(made, made.loading.claim("w0", deadline()).epoch, 3.0, 4.0)
        epoch = made.loading.claim("w0", deadline()).epoch
        made.loading.set(epoch, made.where, np.zeros(SIZE, np.float32))
        assert made.loading.finish(epoch) == 0
        np.testing.assert_array_equal(made.storage.slots[0], 0)

    def test_a_rate_begins_with_the_weights(self) -> None:
        made = make(initialized=False)
        epoch = made.loading.claim("w0", deadline()).epoch
        self.set_all(made, epoch, 0.0, 0.0)
        made.loading.finish(epoch, version=5, learning_rate=0.25, with_slots=True)
        assert made.describe(8).learning_rate == 0.25
        train(made, 5)
        np.testing.assert_array_equal(made.storage.weights, -0.25)

    def test_a_version_needs_its_state(self) -> None:
        made = make(initialized=False)
        epoch = made.loading.claim("w0", deadline()).epoch
        with pytest.raises(ValueError, match="1 arrays of state"):
            made.loading.finish(epoch, version=5)
        with pytest.raises(ValueError, match="versions are"):
            made.loading.finish(epoch, version=2**63, with_slots=True)
