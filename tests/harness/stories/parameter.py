"""A training as a list of calls to one shard, each safe to repeat, as clients repeat them.

No sockets and no threads. Values are small integers and rates powers of two, so that float32 is
exact; chunks and blocks are so short that every part of a chunk's way is walked.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from harness.data.sessions import TENURE, applicant, contributor, session_of
from harness.inside import register_of, tracker_of
from shardwell import SGD, Adagrad, ParameterSpec
from shardwell.numerics import elementwise
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.parameter.averaging import ChunkState
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.shard import Shard
from shardwell_server.store.records import event_log

CONFIG = ShardConfig(
    shard_index=0,
    shard_count=1,
    cluster_id="story",
    chunk_size_bytes=64,
    limits=Limits(worker_count_max=4),
)
"""Chunks of 16 elements of fp32; no more workers than the story has at once."""
BLOCK_ELEMENT_COUNT = 8
COMPACT_BYTES = 400

SYNC = ParameterSpec(
    name="sync",
    size=37,
    optimizer=SGD(learning_rate=1.0, momentum=0.5),
    worker_count=3,
    codec="fp32",
)
ASYNC = ParameterSpec(
    name="async",
    size=20,
    optimizer=Adagrad(learning_rate=0.5, initial_accumulator=1.0),
    worker_count=0,
    mode="async",
    codec="fp32",
)
CLIPPED = ParameterSpec(
    name="clipped",
    size=12,
    optimizer=SGD(learning_rate=0.5, momentum=0.5, clip_norm=3.0),
    worker_count=2,
    codec="fp32",
)
"""One chunk, so that its steps close whole or not at all."""
State = dict[str, Any]


@contextlib.contextmanager
def short_blocks() -> Iterator[None]:
    """Several blocks in each chunk, and event logs that are compacted early."""
    old = elementwise.BLOCK_ELEMENT_COUNT, event_log._COMPACT_BYTES
    elementwise.BLOCK_ELEMENT_COUNT, event_log._COMPACT_BYTES = BLOCK_ELEMENT_COUNT, COMPACT_BYTES
    try:
        yield
    finally:
        elementwise.BLOCK_ELEMENT_COUNT, event_log._COMPACT_BYTES = old


def deadline() -> RequestDeadline:
    return RequestDeadline(0.0)


def contribute(
    into: ParameterSlice,
    worker_id: str,
    chunk_index: int,
    step: int,
    gradient: np.ndarray,
    sample_count: int = 1,
    *,
    tenure: int = TENURE,
) -> bool:
    """Sends one chunk; whether it was counted now."""
    where = into.where.chunk(chunk_index, into.chunk_element_count)
    header = pb.ExchangeRequest()
    header.gradient.step, header.gradient.sample_count = step, sample_count
    sealed = ChunkCodec.of(into.spec).encode(
        header,
        header.gradient.chunk,
        where,
        chunk_index,
        gradient,
        start=checksum.gradient(
            checksum.context(checksum.Kind.GRADIENT, into.spec.name, worker_id), header.gradient
        ),
    )
    message = pb.ExchangeRequest.FromString(sealed)
    payload = np.frombuffer(message.payload, np.uint8)
    return into.contribute(
        contributor(worker_id, tenure=tenure), message.gradient, payload, deadline()
    )


def initialize(into: ParameterSlice, worker_id: str, values: np.ndarray) -> bool:
    """Sets first weights in two parts, unless some stand; whether it did."""
    claim = into.loading.claim(worker_id, deadline())
    if not claim.granted:
        return False
    half = values.size // 2
    for start, stop in ((0, half), (half, values.size)):
        where = type(into.where)(into.where.offset + start, stop - start)
        into.loading.set(claim.epoch, where, values[start:stop])
    into.loading.finish(claim.epoch)
    return True


class Call(NamedTuple):
    """One call of a client."""

    name: str
    make: Callable[[Shard], bool]
    """Makes it; whether it changed anything. Called again, it changes nothing."""
    is_repeated: bool = True
    """Whether a client may send it again after it was answered."""


def _create(spec: ParameterSpec, shard: Shard) -> bool:
    return shard.parameters.open(spec)[1]


def _initialize(name: str, shard: Shard) -> bool:
    made = shard.parameters.get(name)
    return initialize(made, "w0", np.arange(made.where.size, dtype=np.float32) - 7)


def _join(name: str, worker_id: str, life: int, shard: Shard, *, tenure: int = TENURE) -> bool:
    shard.parameters.get(name).join(worker_id, seat_for=applicant(worker_id, life, tenure))
    return False


def _begin_anew(name: str, worker_id: str, tenure: int, shard: Shard) -> bool:
    asks = applicant(worker_id, 0, tenure, begins_anew=True)
    shard.parameters.get(name).join(worker_id, seat_for=asks)
    return False


def _end(worker_id: str, life: int, shard: Shard) -> bool:
    shard.end_session(session_of(worker_id, life).number)
    return False


def _rate(name: str, from_step: int, rate: float, shard: Shard) -> bool:
    shard.parameters.get(name).change_learning_rate(from_step, rate)
    return True


def _contribute(
    name: str,
    worker: int,
    chunk_index: int,
    step: int,
    samples: int,
    shard: Shard,
    *,
    tenure: int = TENURE,
) -> bool:
    made = shard.parameters.get(name)
    size = made.where.chunk(chunk_index, made.chunk_element_count).size
    gradient = (np.arange(size, dtype=np.float32) % 5 - worker - step) * (chunk_index + 1)
    return contribute(made, f"w{worker}", chunk_index, step, gradient, samples, tenure=tenure)


def _close(name: str, step: int, shard: Shard) -> bool:
    """As a client does that gets the norm, or learns that it is too late."""
    steps = shard.parameters.get(name).steps
    squares, _ = steps.measure(step, deadline())
    if squares is None:
        return False
    return steps.close(step, math.sqrt(math.fsum(squares))) is not None


def story() -> list[Call]:
    """Everything that changes a store, in an order that real clients could have."""
    calls: list[Call] = []

    def add(
        action: Callable[..., bool], *given: Any, repeated: bool = True, **options: Any
    ) -> None:
        text = f"{action.__name__.strip('_')}{given}"
        calls.append(Call(text, partial(action, *given, **options), repeated))

    def step(number: int, *shares: tuple[int, int], chunks: tuple[int, ...] = (0, 1, 2)) -> None:
        for worker, samples in shares:
            for chunk_index in chunks:
                add(_contribute, "sync", worker, chunk_index, number, samples)

    add(_create, SYNC)
    add(_initialize, "sync")
    add(_join, "sync", "w0", 0)
    add(_join, "sync", "w1", 0)
    step(0, (0, 2), (1, 2))
    add(_join, "sync", "w2", 0)
    step(0, (2, 4))
    add(_rate, "sync", 1, 0.5, repeated=False)
    step(1, (2, 0), (0, 3), chunks=(2, 0, 1))  # a first contribution of no samples
    add(_rate, "sync", 2, 2.0, repeated=False)
    step(1, (1, 1))
    add(_rate, "sync", 3, 0.25, repeated=False)
    add(_create, ASYNC)
    add(_initialize, "async")
    add(_join, "async", "w0", 0)
    add(_join, "async", "w1", 0)
    for worker, number in ((0, 0), (1, 0), (0, 1), (0, 2)):
        for chunk_index in (0, 1):
            add(_contribute, "async", worker, chunk_index, number, 1)
    step(2, (1, 2), chunks=(0, 1))  # stays open
    step(2, (2, 2), chunks=(0,))
    add(_join, "async", "moves", 0, repeated=False)  # a place that goes from process to process
    add(_end, "moves", 0)
    add(_join, "async", "moves", 1, repeated=False)
    add(_end, "moves", 1)
    add(_join, "async", "moves", 2)
    # A seat that goes from worker to worker: what a tenure counted can't be sent again after it.
    given: dict[str, Any] = {"repeated": False}
    add(_join, "async", "w7", 0, **given)
    for chunk_index, number in ((0, 0), (1, 0), (1, 1), (1, 2)):
        add(_contribute, "async", 7, chunk_index, number, 1, **given)
    add(_end, "w7", 0, **given)
    add(_join, "async", "w8", 0, **given)
    for chunk_index, number in ((0, 0), (0, 1)):
        add(_contribute, "async", 8, chunk_index, number, 1, **given)
    add(_begin_anew, "async", "w8", 2, **given)
    add(_contribute, "async", 8, 1, 0, 1, tenure=2, **given)
    add(_end, "w8", 0, **given)
    add(_join, "async", "w7", 0, tenure=3)
    for chunk_index, number in ((0, 0), (1, 0), (1, 1), (0, 1)):
        add(_contribute, "async", 7, chunk_index, number, 1, tenure=3)
    add(_create, CLIPPED)
    add(_initialize, "clipped")
    add(_join, "clipped", "w0", 0)
    add(_join, "clipped", "w1", 0)
    for number, samples in ((0, (1, 3)), (1, (0, 2)), (2, (0, 0))):
        for worker in (0, 1):
            add(_contribute, "clipped", worker, 0, number, samples[worker])
        if number == 0:
            add(_rate, "clipped", 1, 0.25, repeated=False)
        add(_close, "clipped", number)
    add(_contribute, "clipped", 1, 0, 3, 1)
    add(_contribute, "clipped", 0, 0, 3, 1)  # full, and open
    return calls


def state_of(shard: Shard) -> State:
    """All that a store must keep, in plain values; checked against damage on the way."""
    return {
        found.spec.name: _state_of(found)
        for found in shard.parameters.all()  # by name
    }


def _image_of(state: ChunkState) -> bytes | None:
    return None if state.image is None else state.image.values.tobytes()


def _state_of(found: ParameterSlice) -> State:
    tracker, register = tracker_of(found), register_of(found)
    chunks = []
    for index in range(found.chunk_count):
        found.verify(index)
        record, state = tracker.records[index], found._chunks[index].state
        has_sum = record.total_factor != 0.0
        chunks.append(
            {
                "record": record,
                "marks": [seat.last_step[index] for seat in tracker.crew._seats.values()],
                "weights": state.weights.tobytes() if register.is_initialized else None,
                "sum": state.gradient_sum.tobytes() if has_sum else None,
                "slots": [slot.tobytes() for slot in state.slots],
                "image": _image_of(state) if register.is_initialized else None,
            }
        )
    return {
        "spec": found.spec,
        "initialized": register.is_initialized,
        "seats": [(seat.worker_id, seat.owner, seat.tenure) for seat in tracker.crew.seats],
        "rates": [register.rates.at(tracker.version_min() + ahead) for ahead in range(5)],
        "chunks": chunks,
    }
