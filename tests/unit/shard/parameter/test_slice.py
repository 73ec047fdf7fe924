"""Goal: a gradient that a slice has taken is applied whole, whatever its values do to the weights.

Method: chunks written by ChunkCodec go to a slice in memory, from one thread; nothing waits.
Warnings are errors here, as they may be where LocalCluster runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.data.sessions import contributor, enter, session_of, shared_parts, stored_bytes
from shardwell import SGD, Adagrad, Adam, AdamW, Average, Optimizer, ParameterSpec, RMSProp
from shardwell.errors import (
    DeadlineError,
    DivergedError,
    InitSupersededError,
    LimitError,
    NonFiniteError,
    NotInitializedError,
    OtherIncarnationError,
    StepOrderError,
    StorageError,
    WorkersMissingError,
)
from shardwell.numerics.update_rules import SAFE_MAGNITUDE, UpdateRule
from shardwell.placement.slices import Slice
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.parameter.snapshot import Snapshot
from shardwell_server.store.contract import Layout
from shardwell_server.store.memory import MemoryStore

OPTIMIZERS = [
    Average(),
    SGD(learning_rate=1.0, momentum=0.9, weight_decay=0.5),
    Adagrad(learning_rate=1.0),
    RMSProp(learning_rate=1.0, momentum=0.5),
    Adam(learning_rate=1.0),
    AdamW(learning_rate=1.0),
]


def slice_of(
    optimizer: Optimizer, size: int = 4, worker_count: int = 1, **fields: Any
) -> ParameterSlice:
    spec = ParameterSpec(
        name="p",
        size=max(size, 1),
        optimizer=optimizer,
        worker_count=worker_count,
        **{"codec": "fp32", **fields},
    )
    rule = UpdateRule(optimizer)
    storage = MemoryStore().create(
        Layout(
            name="p",
            slice_size=size,
            chunk_element_count=16,
            initial_slots=rule.initial_slots,
            with_sum=worker_count > 1,
        )
    )
    config = None if size else ShardConfig(shard_index=1, shard_count=2)
    made = ParameterSlice(spec, storage, stored_bytes(), shared_parts(config))
    if not isinstance(optimizer, Average):
        made.loading.finish(made.loading.claim("w0", deadline()).epoch)
    return made


def deadline() -> RequestDeadline:
    return RequestDeadline(0.0)


def give(into: ParameterSlice, worker_id: str, step: int, *values: float) -> bool:
    header = pb.ExchangeRequest()
    header.gradient.step, header.gradient.sample_count = step, 1
    gradient = np.array(values, np.float32)
    sealed = ChunkCodec.of(into.spec).encode(
        header,
        header.gradient.chunk,
        into.where,
        0,
        gradient,
        start=checksum.gradient(
            checksum.context(checksum.Kind.GRADIENT, into.spec.name, worker_id), header.gradient
        ),
    )
    message = pb.ExchangeRequest.FromString(sealed)
    payload = np.frombuffer(message.payload, np.uint8)
    enter(into, worker_id)
    return into.contribute(contributor(worker_id), message.gradient, payload, deadline())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("worker_count", [1, 2, 3])
def test_an_overflow_does_not_stop_an_update_half_way(
    optimizer: Optimizer, worker_count: int
) -> None:
    made = slice_of(optimizer, worker_count=worker_count, allow_non_finite=True)
    for step in range(3):
        for worker in range(worker_count):
            assert give(made, f"w{worker}", step, 3e38, -1e30, 1e-40, 0.0)
            assert not give(made, f"w{worker}", step, 3e38, -1e30, 1e-40, 0.0)
    assert made.is_ready(0, 3)
    assert made.storage.weights[3] == 0.0


STATE = [one for one in OPTIMIZERS if one.slot_names]


@pytest.mark.parametrize("optimizer", STATE, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("worker_count", [1, 2])
def test_a_gradient_that_state_can_not_take_is_refused(optimizer, codec, worker_count) -> None:
    """It would freeze its weight: a step of 0 for ever after. The next one counts instead."""
    made = slice_of(optimizer, worker_count=worker_count, codec=codec)
    made.storage.slots[-1][1] = np.finfo(np.float32).max / 2
    for worker in range(worker_count - 1):
        give(made, f"w{worker}", 0, 1.0, 1.0, 1.0, 1.0)
    last = f"w{worker_count - 1}"
    if isinstance(optimizer, SGD):
        give(made, last, 0, 1.0, 3e38, 1.0, 1.0)
        with pytest.raises(NonFiniteError, match="'momentum_buffer' of element 1 would be"):
            give(made, "w0", 1, 1.0, 3e38, 1.0, 1.0)
        return
    slot_name = optimizer.slot_names[-1] if isinstance(optimizer, (Adam, AdamW)) else "s"
    with pytest.raises(NonFiniteError, match=rf"gradient of '{last}'.*'{slot_name}") as caught:
        give(made, last, 0, 1.0, -1e20, 1.0, 1.0)
    assert (caught.value.element_index, caught.value.parameter) == (1, "p")
    assert give(made, last, 0, 1.0, 1.0, 1.0, 1.0)
    assert made.is_ready(0, 1)
    assert np.isfinite([*made.storage.slots, made.storage.weights]).all()


def give_all(into: ParameterSlice, step: int, worker_count: int, *values: float) -> None:
    for worker in range(worker_count):
        give(into, f"w{worker}", step, *values)


@pytest.mark.parametrize("optimizer", STATE, ids=lambda o: type(o).__name__)
def test_gradients_below_the_bound_never_take_state_beyond_float32(optimizer) -> None:
    """The check is left out for them: state at its largest stays finite, step by step."""
    made = slice_of(optimizer)
    largest = np.finfo(np.float32).max
    below = np.nextafter(np.float32(SAFE_MAGNITUDE), np.float32(0))
    for slot in made.storage.slots:
        slot[:] = largest
    for step in range(20):
        with np.errstate(all="ignore"):
            made.storage.weights[:] = 0.0
            give(made, "w0", step, below, -below, below, -below)
        assert np.isfinite(made.storage.slots).all()


def test_a_large_gradient_that_is_clipped_counts() -> None:
    made = slice_of(Adagrad(learning_rate=1.0, clip_value=2.0))
    assert give(made, "w0", 0, 3e38, 1.0, 1.0, 1.0)
    assert made.storage.slots[0].tolist() == [4.0, 1.0, 1.0, 1.0]


def test_weights_that_diverged_are_named() -> None:
    made = slice_of(SGD(learning_rate=1.0))
    for step in range(2):
        give(made, "w0", step, 1.0, 3e38, 0.0, 0.0)
    with pytest.raises(DivergedError, match="weights at version 2") as caught:
        made.weights_message(0, 2, deadline())
    assert caught.value.element_index == 1


def test_nothing_is_taken_before_the_first_weights() -> None:
    made = ParameterSlice(
        ParameterSpec(name="p", size=4, optimizer=SGD(learning_rate=1.0), worker_count=1),
        MemoryStore().create(
            Layout(name="p", slice_size=4, chunk_element_count=16, with_sum=False)
        ),
        stored_bytes(),
        shared_parts(),
    )
    with pytest.raises(NotInitializedError, match="init"):
        give(made, "w0", 0, 1.0, 2.0, 3.0, 4.0)
    with pytest.raises(NotInitializedError, match="init"):
        made.weights_message(0, 0, deadline())


def test_an_empty_slice_can_be_described_after_a_worker_opened_a_stream() -> None:
    made = slice_of(Average(), size=0, worker_count=2)
    made.join("w0", session_of("w0").number)
    status = made.describe(10)
    assert (status.slice_size, status.version_min, status.version_max) == (0, 0, 0)
    assert (list(status.contributed_worker_ids), list(status.missing_worker_ids)) == ([], ["w0"])
    assert status.unknown_worker_count == 1


def test_weights_that_stand_elsewhere_are_confirmed() -> None:
    made = ParameterSlice(
        ParameterSpec(name="p", size=8, optimizer=SGD(learning_rate=1.0), worker_count=1),
        MemoryStore().create(
            Layout(name="p", slice_size=4, chunk_element_count=16, with_sum=False)
        ),
        stored_bytes(),
        shared_parts(ShardConfig(shard_index=1, shard_count=2)),
    )
    with pytest.raises(OtherIncarnationError, match="epoch 1 is refused"):
        made.loading.confirm(1)
    made.loading.set(1, Slice(4, 4), np.ones(4, np.float32))
    made.loading.finish(1)
    with pytest.raises(NotInitializedError):  # shard 0 has not accepted them yet
        made.weights_message(0, 0, deadline())
    made.loading.set(3, Slice(4, 2), np.zeros(2, np.float32))  # a later claim, half sent
    for epoch in (1, 3):
        with pytest.raises(OtherIncarnationError):
            made.loading.confirm(epoch)
    made.loading.set(3, Slice(4, 4), np.full(4, 3, np.float32))
    made.loading.finish(3)
    assert made.loading.confirm(3) == made.loading.confirm(3) == 0
    for epoch, error in ((1, InitSupersededError), (5, OtherIncarnationError)):
        with pytest.raises(error):
            made.loading.set(epoch, Slice(4, 4), np.zeros(4, np.float32))
        with pytest.raises(OtherIncarnationError):
            made.loading.confirm(epoch)
    made.loading.set(3, Slice(4, 4), np.zeros(4, np.float32))
    np.testing.assert_array_equal(made.storage.weights, 3)


# A snapshot of a slice holds every chunk as it was at one version, whatever happens then. Method:
# a slice of several chunks in memory, gradients of ones and SGD of rate 1, so that weights at
# version V are -V and the momentum is known; captured chunks are compared with that.


SIZE, CHUNK = 40, 16
OPTIMIZER = SGD(learning_rate=1.0, momentum=0.5)


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
        MemoryStore().create(layout),
        stored_bytes(),
        shared_parts(
            ShardConfig(shard_index=0, shard_count=1, limits=Limits(snapshot_count_max=2)),
            spool_dir=spool_dir,
        ),
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
                checksum.context(checksum.Kind.GRADIENT, into.spec.name, "w0"), header.gradient
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
