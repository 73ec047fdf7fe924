"""Moves the bytes of gradients: into sums, and from the last contribution into the weights.

Stateless; the caller holds the chunk's lock and has checked everything, because nothing here may
fail half way. One block at a time, in which decoding, adding, averaging and updating are one pass
over memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwell.numerics.codec import CODECS, Bytes, Codec, Float32
from shardwell.numerics.elementwise import (
    Arrays,
    Code,
    Operation,
    Operations,
    add_scaled,
    blocks,
    run,
    scale,
)
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT
from shardwell.numerics.update_rules import (
    GRADIENT,
    SECOND_SLOT,
    TEMPORARY,
    Slots,
    TensorRules,
    exact_sum,
)
from shardwell_server.shard.parameter.image import ChunkImage
from shardwell_server.store.contract import ChunkChange, ChunkRecord

_PAYLOAD, _TOTAL, _FIRST, _EXPONENTS = range(SECOND_SLOT + 1, SECOND_SLOT + 5)
"""Places beside those of update rules. _FIRST and _EXPONENTS: `Codec.kept` of the sum's memory."""


class Contribution(NamedTuple):
    """A checked gradient chunk."""

    payload: Bytes
    sample_count: int
    """Its weight in the mean."""

    def summed(self, codec: Codec) -> Contribution:
        """Writes it anew as `codec.summed` does, so that it can be added up."""
        values = np.empty(codec.element_count(self.payload.size), np.float32)
        codec.decode(self.payload, values)
        return self._replace(payload=values.view(np.uint8))

    def factor(self, shift: int) -> float:
        """Returns the factor of its values in a sum that is kept as sum * 2^-shift."""
        return math.ldexp(float(self.sample_count), -shift)


class Total(NamedTuple):
    """The sum in memory of a chunk's open step."""

    factor: float
    """The sum is factor * 2^shift times the stored values; 0: there is none."""
    is_encoded: bool = False
    """True if the first contribution is stored as it was written, not yet as float32:
    `Codec.keep`."""


NOTHING = Total(0.0)


@dataclass(frozen=True)
class ChunkState:
    """The arrays of one chunk: views into the slice's storage, all (n,) float32."""

    offset: int
    """Offset of its first element, from the start of the parameter."""
    weights: Float32
    gradient_sum: Float32 | None
    slots: Slots
    image: ChunkImage | None = None

    def places(
        self, payload: Bytes | None, first: tuple[Bytes | None, Bytes | None] = (None, None)
    ) -> Arrays:
        """Returns an update rule's arrays, with a contribution's; the gradient is a temporary."""
        slots = (*self.slots, None, None)[:2]
        return (self.weights, None, None, *slots, payload, self.gradient_sum, *first)


_FLOATS = CODECS["fp32"]


def add_to_sum(
    contribution: Contribution,
    codec: Codec,
    memory: Float32,
    total: Total,
    change: ChunkChange,
    *,
    shift: int,
    may_stay_encoded: bool,
) -> Total:
    """Adds sample_count * gradient * 2^-shift to a sum; returns the sum in `memory` then.

    The first contribution is stored unweighted: its weight becomes the factor, which the next
    addition applies at no cost. It is stored as it was written, if it may: that takes half the
    memory traffic, and the sum is not needed before the next one comes. With `may_stay_encoded` all
    readers of the sum know that it may be. `weighted_mean.shift_for` chooses `shift`.
    """
    factor = contribution.factor(shift)
    if factor == 0.0:
        return total
    is_first = total.factor == 0.0
    if is_first and may_stay_encoded and codec.item_size < memory.itemsize:
        for _ in change.blocks(memory.size):
            codec.keep(contribution.payload, memory)
        return Total(factor, is_encoded=True)
    if is_first:
        operations = codec.reads(_TOTAL, _PAYLOAD, 1.0)
    else:
        into = TEMPORARY if total.is_encoded else _TOTAL
        operations = codec.reads_kept(into, _FIRST, _EXPONENTS) if total.is_encoded else ()
        operations += scale(into, total.factor)
        operations += codec.reads(GRADIENT, _PAYLOAD, factor) + add_scaled(into, GRADIENT)
        if total.is_encoded:
            operations += (Operation(Code.COPY, _TOTAL, TEMPORARY),)
    first = codec.kept(memory) if total.is_encoded else ()
    arrays = (*(None,) * _PAYLOAD, contribution.payload, memory, *first)
    for start, stop in change.blocks(memory.size):
        run(operations, arrays, start, stop)
    return Total(factor if is_first else 1.0)


def state_overflow(
    contribution: Contribution,
    codec: Codec,
    chunk: ChunkState,
    rules: TensorRules,
    *,
    update_count: int,
    learning_rate: float,
) -> tuple[int, int] | None:
    """Finds the first value of optimizer state that a gradient alone would make infinite or NaN.

    On copies; nothing changes. Returns the array's index, and the element.
    """
    given = np.empty(chunk.weights.size, np.float32)
    codec.decode(contribution.payload, given)
    for start, stop in blocks(chunk.weights.size):
        copied = ChunkState(
            offset=chunk.offset + start,
            weights=chunk.weights[start:stop].copy(),
            gradient_sum=None,
            slots=tuple(slot[start:stop].copy() for slot in chunk.slots),
        )
        gradient = given[start:stop].view(np.uint8)
        reads = _FLOATS.reads(GRADIENT, _PAYLOAD, 1.0)
        arrays = copied.places(gradient)
        for part, updates in rules.operations(
            copied.offset, stop - start, update_count=update_count, learning_rate=learning_rate
        ):
            run(reads + updates, arrays, part.start, part.stop)
        for index, slot in enumerate(copied.slots):
            is_finite = np.isfinite(slot)
            if not is_finite.all():
                return index, start + int(np.argmin(is_finite))
    return None


def close_step(
    contribution: Contribution,
    codec: Codec,
    chunk: ChunkState,
    rules: TensorRules,
    change: ChunkChange,
    *,
    total: Total,
    shift: int,
    sample_total: int,
    update_count: int,
    learning_rate: float,
    is_closed_alike: bool = False,
) -> None:
    """Adds the last contribution, takes the mean and updates the weights.

    The sum is of no meaning afterwards. `sample_total` includes this contribution; with 0 of them
    weights and state stay, and a mean that is no update is 0. `update_count` is 1 at the first
    update. With `is_closed_alike` the result has the bits of `close_full_step` after `add_to_sum`,
    also where values underflow.
    """
    if sample_total == 0 and rules.learning_rate is not None:
        return
    factor, divisor = contribution.factor(shift), math.ldexp(float(sample_total), -shift)
    total_factor = total.factor
    if sample_total == 0:
        divisor = 1.0
    elif total_factor == 0.0:  # a mean of one is that one, whatever its weight
        factor, divisor = 1.0, 1.0
    elif factor == 0.0 and _is_power_of_two(total_factor / divisor):
        total_factor, divisor = total_factor / divisor, 1.0
    elif not is_closed_alike and sample_total & (sample_total - 1) == 0:
        # Dividing by a power of two is exact beforehand.
        factor, total_factor, divisor = factor / divisor, total_factor / divisor, 1.0
    first: tuple[Bytes | None, Bytes | None] = (None, None)
    reads: Operations = ()
    summed = _TOTAL
    if total.is_encoded and chunk.gradient_sum is not None:
        first = codec.kept(chunk.gradient_sum)
        reads, summed = codec.reads_kept(TEMPORARY, _FIRST, _EXPONENTS), TEMPORARY
    mean: Operations
    if sample_total == 0:
        mean = (Operation(Code.FILL, GRADIENT, factor=0.0),)
    elif total_factor == 0.0 or chunk.gradient_sum is None:
        mean = codec.reads(GRADIENT, _PAYLOAD, factor)
    elif factor == 0.0:
        mean = (*reads, Operation(Code.COPY, GRADIENT, summed), *scale(GRADIENT, total_factor))
    else:
        added = add_scaled(GRADIENT, summed, total_factor)
        mean = codec.reads(GRADIENT, _PAYLOAD, factor) + reads + added
    if divisor != 1.0:
        mean += (Operation(Code.MEAN, GRADIENT, divisor=divisor),)
    _update(
        mean,
        chunk,
        chunk.places(contribution.payload, first),
        rules,
        change,
        update_count=update_count,
        learning_rate=learning_rate,
        has_samples=sample_total > 0,
    )


def _update(
    mean: Operations,
    chunk: ChunkState,
    arrays: Arrays,
    rules: TensorRules,
    change: ChunkChange,
    *,
    update_count: int,
    learning_rate: float,
    has_samples: bool,
) -> None:
    """Updates weights and state with the gradient that `mean` computes into GRADIENT."""
    image = chunk.image
    if image is not None:
        image.begin(has_samples=has_samples)
    for start, stop in change.blocks(chunk.weights.size):
        for part, updates in rules.operations(
            chunk.offset + start,
            stop - start,
            update_count=update_count,
            learning_rate=learning_rate,
        ):
            run(mean + updates, arrays, start + part.start, start + part.stop)
        if image is not None:
            image.follow(start, stop)
    if image is not None:
        image.end(update_count)


# Steps that are full, and close without another contribution: steps.py.


def squares_of_mean(
    chunk: ChunkState, rules: TensorRules, record: ChunkRecord, block_size: int
) -> list[float]:
    """Returns the squares of a full step's mean, without frozen tensors: see `squares_of_parts`."""
    operations, squares = _mean_of(record, _IN_TOTAL), [0.0]
    values = np.empty(min(chunk.weights.size, BLOCK_ELEMENT_COUNT), np.float32)
    for start, stop in blocks(chunk.weights.size):
        assert chunk.gradient_sum is not None
        mean = values[: stop - start]
        before = (None,) * GRADIENT
        between = (None,) * (_TOTAL - GRADIENT - 1)
        arrays = (*before, mean, *between, chunk.gradient_sum[start:stop])
        run(operations, arrays, 0, stop - start)
        squares += rules.squares(chunk.offset + start, mean, block_size)
    return exact_sum(squares)


def close_full_step(
    chunk: ChunkState,
    codec: Codec,
    rules: TensorRules,
    change: ChunkChange,
    record: ChunkRecord,
    *,
    clip_factor: float = 1.0,
    learning_rate: float,
) -> None:
    """Updates the weights with a full step's mean, times `clip_factor`; the sum is spent then."""
    if record.sample_total == 0 and rules.learning_rate is not None:
        return
    first: tuple[Bytes | None, Bytes | None] = (None, None)
    total = _IN_TOTAL
    if record.is_encoded and chunk.gradient_sum is not None:
        first = codec.kept(chunk.gradient_sum)
        total = codec.reads_kept(GRADIENT, _FIRST, _EXPONENTS)
    _update(
        _mean_of(record, total) + scale(GRADIENT, clip_factor),
        chunk,
        chunk.places(None, first),
        rules,
        change,
        update_count=record.version + 1,
        learning_rate=learning_rate,
        has_samples=record.sample_total > 0,
    )


_IN_TOTAL: Operations = (Operation(Code.COPY, GRADIENT, _TOTAL),)
"""Takes the sum of contributions into GRADIENT."""


def _mean_of(record: ChunkRecord, total: Operations) -> Operations:
    if record.sample_total == 0 or record.total_factor == 0.0:
        return (Operation(Code.FILL, GRADIENT, factor=0.0),)
    divisor = math.ldexp(record.sample_total, -record.shift)
    if _is_power_of_two(record.total_factor / divisor):  # a mean of one is that one
        return (*total, *scale(GRADIENT, record.total_factor / divisor))
    return (
        *total,
        *scale(GRADIENT, record.total_factor),
        Operation(Code.MEAN, GRADIENT, divisor=divisor),
    )


def _is_power_of_two(factor: float) -> bool:
    return math.frexp(factor)[0] == 0.5
