"""Moves the bytes of gradients: into sums, and from the last contribution into the weights.

Stateless; the caller holds the chunk's lock and has checked everything, because nothing here may
fail half way. One block at a time, so that decoding, adding, averaging and updating share the
cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwell.numerics.codec import Bytes, Codec, Float32, Scratch, blocks
from shardwell.numerics.update_rules import Slots, TensorRules
from shardwell.numerics.weighted_mean import divide
from shardwell_server.store import ChunkChange, ChunkRecord


class Contribution(NamedTuple):
    """A checked gradient chunk."""

    payload: Bytes
    """The codec's bytes."""
    exponent: int
    """Scale: value = written * 2^exponent."""
    sample_count: int
    """Its weight in the mean."""

    def factor(self, shift: int) -> float:
        """What its written values are multiplied with in a sum that is kept as sum * 2^-shift."""
        return math.ldexp(float(self.sample_count), self.exponent - shift)


@dataclass(frozen=True)
class ChunkState:
    """The arrays of one chunk: views into the slice's storage, all (n,) float32."""

    offset: int
    """Of its first element, from the start of the parameter."""
    weights: Float32
    gradient_sum: Float32 | None
    slots: Slots


_FACTOR_MIN, _FACTOR_LIMIT = 2.0**-90, 2.0**127
"""Factors that float32 holds exactly, also after they were scaled down for a heavier gradient."""


def shift_for(sample_count: int, worker_count: int) -> int:
    """How far the sum of a step is scaled down for a contribution of that weight.

    With the largest of these, a sum of worker_count contributions stays below the largest
    gradient, so that it can't overflow where their mean does not.
    """
    return sample_count.bit_length() + worker_count.bit_length()


def add_to_sum(
    contribution: Contribution,
    codec: Codec,
    total: Float32,
    total_factor: float,
    scratch: Scratch,
    change: ChunkChange,
    *,
    shift: int,
) -> float:
    """Adds sample_count * gradient * 2^-shift to a sum that is kept as total_factor * total.

    The first contribution (total_factor 0) is stored as it was written, unscaled and unweighted:
    its scale and weight become the factor, which the next addition applies at no cost.

    Returns:
        The new factor.
    """
    factor = contribution.factor(shift)
    if total_factor == 0.0 and factor == 0.0:
        return 0.0
    payload = contribution.payload
    is_plain = total_factor == 0.0 and _FACTOR_MIN <= factor < _FACTOR_LIMIT
    for start in blocks(total.size):
        into = total[start : start + scratch.values.size]
        stop = start + into.size
        change.before(start, stop)
        if is_plain:
            codec.decode_block(payload, start, 1.0, into)
        elif total_factor == 0.0:
            codec.decode_block(payload, start, math.ldexp(1.0, contribution.exponent), into)
            np.multiply(into, np.float32(math.ldexp(contribution.sample_count, -shift)), out=into)
        else:
            codec.decode_add(payload, factor, into, total_factor, into, scratch, start)
        change.after(start, stop)
    return factor if is_plain else 1.0


def state_overflow(
    contribution: Contribution,
    codec: Codec,
    chunk: ChunkState,
    rules: TensorRules,
    scratch: Scratch,
    *,
    update_count: int,
    learning_rate: float,
) -> tuple[int, int] | None:
    """The first value of optimizer state that a gradient would make infinite or NaN by itself.

    On copies; nothing changes.

    Args:
        contribution: The gradient.
        codec: How it is written.
        chunk: Weights and state.
        rules: The optimizer.
        scratch: This thread's.
        update_count: 1 at the first update.
        learning_rate: The rate of that update.

    Returns:
        Which array, and the element; None: there is none.
    """
    for start in blocks(chunk.weights.size):
        weights = chunk.weights[start : start + scratch.gradient.size].copy()
        stop = start + weights.size
        gradient = scratch.gradient[: weights.size]
        codec.decode_block(
            contribution.payload, start, math.ldexp(1.0, contribution.exponent), gradient
        )
        slots = tuple(slot[start:stop].copy() for slot in chunk.slots)
        rules.apply(
            chunk.offset + start,
            weights,
            gradient,
            slots,
            scratch.values[: weights.size],
            update_count=update_count,
            learning_rate=learning_rate,
        )
        for index, slot in enumerate(slots):
            is_finite = np.isfinite(slot)
            if not is_finite.all():
                return index, start + int(np.argmin(is_finite))
    return None


def close_step(
    contribution: Contribution,
    codec: Codec,
    chunk: ChunkState,
    rules: TensorRules,
    scratch: Scratch,
    change: ChunkChange,
    *,
    total_factor: float,
    shift: int,
    sample_total: int,
    update_count: int,
    learning_rate: float,
) -> None:
    """Adds the last contribution, takes the mean and updates the weights.

    Args:
        contribution: The last one of the step.
        codec: How it is written.
        chunk: Weights and state, updated; the sum is read and then of no meaning.
        rules: The optimizer.
        scratch: This thread's.
        change: Told of every block before and after it is written.
        total_factor: See add_to_sum; 0 if there is no sum.
        shift: See add_to_sum.
        sample_total: Samples of all contributions, this one included; 0 makes the mean 0.
        update_count: 1 at the first update.
        learning_rate: Of this update.
    """
    payload = contribution.payload
    factor, divisor = contribution.factor(shift), math.ldexp(float(sample_total), -shift)
    if sample_total == 0:
        divisor = 1.0
    elif total_factor == 0.0:  # a mean of one is that one, whatever its weight
        factor, divisor = math.ldexp(1.0, contribution.exponent), 1.0
    elif sample_total & (sample_total - 1) == 0:  # dividing by a power of two is exact beforehand
        factor, total_factor, divisor = factor / divisor, total_factor / divisor, 1.0
    for start in blocks(chunk.weights.size):
        weights = chunk.weights[start : start + scratch.gradient.size]
        stop = start + weights.size
        change.before(start, stop)
        mean = scratch.gradient[: weights.size]
        if total_factor == 0.0 or chunk.gradient_sum is None:
            codec.decode_block(payload, start, factor, mean)
        else:
            total = chunk.gradient_sum[start : start + weights.size]
            codec.decode_add(payload, factor, total, total_factor, mean, scratch, start)
        unused = scratch.values[: weights.size]
        if divisor != 1.0:
            divide(mean, divisor, unused)
            mean, unused = unused, mean
        rules.apply(
            chunk.offset + start,
            weights,
            mean,
            tuple(slot[start:stop] for slot in chunk.slots),
            unused,
            update_count=update_count,
            learning_rate=learning_rate,
        )
        change.after(start, stop)


# Steps that are full, and close when the norm of their mean is known: clipping.py.


def squared_mean_norm(
    chunk: ChunkState, rules: TensorRules, scratch: Scratch, record: ChunkRecord
) -> float:
    """The sum of squares of a full step's mean, without frozen tensors."""
    return math.fsum(
        rules.squared_norm(chunk.offset + start, _mean_block(chunk, scratch, record, start))
        for start in blocks(chunk.weights.size)
    )


def close_full_step(
    chunk: ChunkState,
    rules: TensorRules,
    scratch: Scratch,
    change: ChunkChange,
    record: ChunkRecord,
    *,
    clip_factor: float,
    learning_rate: float,
) -> None:
    """Updates the weights with a full step's mean, scaled down. See close_step.

    Args:
        chunk: Weights and state, updated; the sum is read and then of no meaning.
        rules: The optimizer.
        scratch: This thread's.
        change: Told of every block before and after it is written.
        record: Of the chunk: its contributions.
        clip_factor: What the mean is multiplied with.
        learning_rate: Of this update.
    """
    for start in blocks(chunk.weights.size):
        weights = chunk.weights[start : start + scratch.gradient.size]
        stop = start + weights.size
        change.before(start, stop)
        mean = _mean_block(chunk, scratch, record, start)
        if clip_factor != 1.0:
            np.multiply(mean, np.float32(clip_factor), out=mean)
        rules.apply(
            chunk.offset + start,
            weights,
            mean,
            tuple(slot[start:stop] for slot in chunk.slots),
            scratch.values[: weights.size],
            update_count=record.version + 1,
            learning_rate=learning_rate,
        )
        change.after(start, stop)


def _mean_block(chunk: ChunkState, scratch: Scratch, record: ChunkRecord, start: int) -> Float32:
    """The mean of all contributions for the block from `start` on, in the scratch's memory."""
    assert chunk.gradient_sum is not None
    total = chunk.gradient_sum[start : start + scratch.gradient.size]
    mean = scratch.gradient[: total.size]
    if record.sample_total == 0 or record.total_factor == 0.0:
        mean[...] = 0.0
        return mean
    if record.total_factor != 1.0:
        total = np.multiply(total, record.total_factor, out=scratch.values[: total.size])
    divide(total, math.ldexp(float(record.sample_total), -record.shift), mean)
    return mean
