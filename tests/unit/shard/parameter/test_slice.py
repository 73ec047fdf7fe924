"""Goal: a gradient that a slice has taken is applied whole, whatever its values do to the weights.

Method: chunks written by ChunkCodec go to a slice in memory, from one thread; nothing waits.
Warnings are errors here, as they may be where LocalCluster runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.data.sessions import AllAlive, contributor, enter, session_of
from shardwell import SGD, Adagrad, Adam, AdamW, Average, Optimizer, ParameterSpec, RMSProp
from shardwell.errors import (
    DivergedError,
    InitSupersededError,
    NonFiniteError,
    NotInitializedError,
    OtherIncarnationError,
)
from shardwell.numerics.update_rules import SAFE_MAGNITUDE, UpdateRule
from shardwell.placement.slices import Slice
from shardwell.process.spans import Spans
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.config import Limits
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.store import Layout
from shardwell_server.store.memory.store import MemoryStore

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
    made = ParameterSlice(
        spec,
        Slice(0, size),
        storage,
        chunk_element_count=16,
        is_first_shard=True,
        limits=Limits(),
        sessions=AllAlive(),
        spans=Spans(),
    )
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
            checksum.gradient_context(into.spec.name, worker_id), header.gradient
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
        Slice(0, 4),
        MemoryStore().create(
            Layout(name="p", slice_size=4, chunk_element_count=16, with_sum=False)
        ),
        chunk_element_count=16,
        is_first_shard=True,
        limits=Limits(),
        sessions=AllAlive(),
        spans=Spans(),
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
        Slice(4, 4),
        MemoryStore().create(
            Layout(name="p", slice_size=4, chunk_element_count=16, with_sum=False)
        ),
        chunk_element_count=16,
        is_first_shard=False,
        limits=Limits(),
        sessions=AllAlive(),
        spans=Spans(),
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
