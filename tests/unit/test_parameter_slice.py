"""Goal: a gradient that a slice has taken is applied whole, whatever its values do to the weights.

Method: chunks written by ChunkCodec go to a slice in memory, from one thread; nothing waits.
Warnings are errors here, as they may be where LocalCluster runs.
"""

from __future__ import annotations

import numpy as np
import pytest

from shardwell import SGD, Adagrad, Adam, AdamW, Average, Optimizer, ParameterSpec, RMSProp
from shardwell.chunk_codec import ChunkCodec
from shardwell.codec import Scratch
from shardwell.errors import (
    InitSupersededError,
    NonFiniteError,
    NotInitializedError,
    StepOrderError,
)
from shardwell.partition import Slice
from shardwell.update_rules import UpdateRule
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server.config import Limits
from shardwell_server.shard.parameter_slice import ParameterSlice
from shardwell_server.shard.patience import Patience
from shardwell_server.store import Layout, MemoryStore

OPTIMIZERS = [
    Average(),
    SGD(learning_rate=1.0, momentum=0.9, weight_decay=0.5),
    Adagrad(learning_rate=1.0),
    RMSProp(learning_rate=1.0, momentum=0.5),
    Adam(learning_rate=1.0),
    AdamW(learning_rate=1.0),
]


def slice_of(optimizer: Optimizer, size: int = 4, worker_count: int = 1) -> ParameterSlice:
    spec = ParameterSpec(
        name="p", size=max(size, 1), optimizer=optimizer, worker_count=worker_count, codec="fp32"
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
        rule,
        chunk_element_count=16,
        is_first_shard=True,
        limits=Limits(),
    )
    if not isinstance(optimizer, Average):
        made.finish_init(made.claim_init("w0", patience()).epoch)
    return made


def patience() -> Patience:
    return Patience(0.0, is_active=lambda: True, is_stopping=lambda: False)


def give(into: ParameterSlice, worker_id: str, step: int, *values: float) -> bool:
    header = pb.ExchangeRequest()
    header.gradient.step, header.gradient.sample_count = step, 1
    gradient = np.array(values, np.float32)
    sealed = ChunkCodec.of(into.spec).encode(
        header, header.gradient.chunk, into.where, 0, gradient, Scratch()
    )
    message = pb.ExchangeRequest.FromString(sealed)
    payload = np.frombuffer(message.payload, np.uint8)
    return into.contribute(worker_id, message.gradient, payload, patience())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("worker_count", [1, 2, 3])
def test_an_overflow_does_not_stop_an_update_half_way(
    optimizer: Optimizer, worker_count: int
) -> None:
    made = slice_of(optimizer, worker_count=worker_count)
    for step in range(3):
        for worker in range(worker_count):
            assert give(made, f"w{worker}", step, 3e38, -1e30, 1e-40, 0.0)
            assert not give(made, f"w{worker}", step, 3e38, -1e30, 1e-40, 0.0)
    assert made.is_ready(0, 3)
    assert made.storage.weights[3] == 0.0


def test_weights_that_diverged_are_named() -> None:
    made = slice_of(SGD(learning_rate=1.0))
    for step in range(2):
        give(made, "w0", step, 1.0, 3e38, 0.0, 0.0)
    with pytest.raises(NonFiniteError, match="weights at version 2") as caught:
        made.weights_message(0, 2, patience())
    assert caught.value.element_index == 1


def test_nothing_is_taken_before_the_first_weights() -> None:
    made = ParameterSlice(
        ParameterSpec(name="p", size=4, optimizer=SGD(learning_rate=1.0), worker_count=1),
        Slice(0, 4),
        MemoryStore().create(
            Layout(name="p", slice_size=4, chunk_element_count=16, with_sum=False)
        ),
        UpdateRule(SGD(learning_rate=1.0)),
        chunk_element_count=16,
        is_first_shard=True,
        limits=Limits(),
    )
    with pytest.raises(NotInitializedError, match="init"):
        give(made, "w0", 0, 1.0, 2.0, 3.0, 4.0)
    with pytest.raises(NotInitializedError, match="init"):
        made.weights_message(0, 0, patience())


def test_an_empty_slice_can_be_described_after_a_worker_opened_a_stream() -> None:
    made = slice_of(Average(), size=0, worker_count=2)
    made.join("w0")
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
        UpdateRule(SGD(learning_rate=1.0)),
        chunk_element_count=16,
        is_first_shard=False,
        limits=Limits(),
    )
    with pytest.raises(StepOrderError, match="epoch 1 is refused"):
        made.confirm_init(1)
    made.set_first_weights(1, Slice(4, 4), np.ones(4, np.float32))
    made.finish_init(1)
    with pytest.raises(NotInitializedError):  # shard 0 has not accepted them yet
        made.weights_message(0, 0, patience())
    made.set_first_weights(3, Slice(4, 2), np.zeros(2, np.float32))  # a later claim, half sent
    for epoch in (1, 3):
        with pytest.raises(StepOrderError):
            made.confirm_init(epoch)
    made.set_first_weights(3, Slice(4, 4), np.full(4, 3, np.float32))
    made.finish_init(3)
    assert made.confirm_init(3) == made.confirm_init(3) == 0
    for epoch, error in ((1, InitSupersededError), (5, StepOrderError)):
        with pytest.raises(error):
            made.set_first_weights(epoch, Slice(4, 4), np.zeros(4, np.float32))
        with pytest.raises(StepOrderError):
            made.confirm_init(epoch)
    made.set_first_weights(3, Slice(4, 4), np.zeros(4, np.float32))
    np.testing.assert_array_equal(made.storage.weights, 3)
