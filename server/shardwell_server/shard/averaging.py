"""Moves the bytes of gradients: into sums, and from the last contribution into the weights.

Stateless; the caller holds the chunk's lock and has checked everything, because nothing here may
fail half way. One block at a time, so that decoding, adding, averaging and updating share the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numkong
import numpy as np

from shardwell.codec import Bytes, Codec, Float32, Scratch, blocks
from shardwell_server.shard.update_rules import Slots, UpdateRule


@dataclass(frozen=True)
class Contribution:
    """A checked gradient chunk."""

    payload: Bytes
    """The codec's bytes."""
    exponent: int
    """Scale: value = written * 2^exponent."""
    sample_count: int
    """Its weight in the mean."""


@dataclass(frozen=True)
class ChunkState:
    """The arrays of one chunk: views into the slice's storage, all (n,) float32."""

    weights: Float32
    gradient_sum: Float32 | None
    slots: Slots


def add_to_sum(
    contribution: Contribution, codec: Codec, total: Float32, scratch: Scratch, *, is_first: bool
) -> None:
    """total += sample_count * gradient; the first contribution overwrites instead."""
    payload, exponent = contribution.payload, contribution.exponent
    weight = float(contribution.sample_count)
    if not is_first:
        codec.decode_add(payload, exponent, weight, total, scratch)
        return
    stored, factor = codec.stored(payload), math.ldexp(weight, exponent)
    for start in blocks(total.size):
        into = total[start : start + scratch.values.size]
        codec.decode_block(stored, start, factor, into)


def close_step(
    contribution: Contribution,
    codec: Codec,
    chunk: ChunkState,
    rule: UpdateRule,
    scratch: Scratch,
    *,
    sample_total: int,
    is_only: bool,
    update_count: int,
    learning_rate: float,
) -> None:
    """Adds the last contribution, takes the mean and updates the weights.

    Args:
        contribution: The last one of the step.
        codec: How it is written.
        chunk: Weights and state, updated; the sum is read and then of no meaning.
        rule: The optimizer.
        scratch: This thread's.
        sample_total: Samples of all contributions, this one included; 0 makes the mean 0.
        is_only: It is the step's only contribution: there is no sum.
        update_count: 1 at the first update.
        learning_rate: Of this update.
    """
    stored = codec.stored(contribution.payload)
    weight = float(contribution.sample_count)
    factor = math.ldexp(1.0 if is_only else weight, contribution.exponent)
    for start in blocks(chunk.weights.size):
        weights = chunk.weights[start : start + scratch.gradient.size]
        mean = scratch.gradient[: weights.size]
        if sample_total == 0:
            mean[:] = 0.0
        elif is_only or chunk.gradient_sum is None:
            codec.decode_block(stored, start, factor, mean)
        else:
            codec.decode_block(stored, start, 1.0, mean)
            total = chunk.gradient_sum[start : start + weights.size]
            numkong.blend(mean, total, alpha=factor, beta=1.0, out=mean)
            _divide(mean, sample_total)
        slots = tuple(slot[start : start + weights.size] for slot in chunk.slots)
        rule.apply(
            weights,
            mean,
            slots,
            scratch.values[: weights.size],
            update_count=update_count,
            learning_rate=learning_rate,
        )


def _divide(values: Float32, divisor: int) -> None:
    """values /= divisor, correctly rounded; a power of two is an exact product, which is faster."""
    if divisor & (divisor - 1) == 0:
        if divisor != 1:
            np.multiply(values, np.float32(1.0 / divisor), out=values)
    else:
        np.divide(values, np.float32(divisor), out=values)
