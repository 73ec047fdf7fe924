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

from shardwell.codec import Bytes, Codec, Float32, Scratch, blocks
from shardwell_server.shard.update_rules import Slots, UpdateRule


class Contribution(NamedTuple):
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
    contribution: Contribution,
    codec: Codec,
    total: Float32,
    total_factor: float,
    scratch: Scratch,
) -> float:
    """Adds sample_count * gradient to a sum that is kept as total_factor * total.

    The first contribution (total_factor 0) is stored as it was written, unscaled and unweighted:
    its scale and weight become the factor, which the next addition applies at no cost.

    Returns:
        The new factor.
    """
    factor = math.ldexp(float(contribution.sample_count), contribution.exponent)
    if total_factor == 0.0:
        if factor == 0.0:
            return 0.0
        codec.decode(contribution.payload, 0, total)
        return factor
    codec.decode_add(contribution.payload, factor, total, total_factor, total, scratch)
    return 1.0


def close_step(
    contribution: Contribution,
    codec: Codec,
    chunk: ChunkState,
    rule: UpdateRule,
    scratch: Scratch,
    *,
    total_factor: float,
    sample_total: int,
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
        total_factor: See add_to_sum; 0 if there is no sum.
        sample_total: Samples of all contributions, this one included; 0 makes the mean 0.
        update_count: 1 at the first update.
        learning_rate: Of this update.
    """
    payload = contribution.payload
    factor = math.ldexp(float(contribution.sample_count), contribution.exponent)
    divisor = sample_total
    if sample_total == 0:
        divisor = 1
    elif total_factor == 0.0:  # a mean of one is that one, whatever its weight
        factor, divisor = math.ldexp(1.0, contribution.exponent), 1
    elif sample_total & (sample_total - 1) == 0:  # dividing by a power of two is exact beforehand
        factor, total_factor, divisor = factor / sample_total, total_factor / sample_total, 1
    for start in blocks(chunk.weights.size):
        weights = chunk.weights[start : start + scratch.gradient.size]
        mean = scratch.gradient[: weights.size]
        if total_factor == 0.0 or chunk.gradient_sum is None:
            codec.decode_block(payload, start, factor, mean)
        else:
            total = chunk.gradient_sum[start : start + weights.size]
            codec.decode_add(payload, factor, total, total_factor, mean, scratch, start)
        if divisor != 1:
            np.divide(mean, np.float32(divisor), out=mean)
        rule.apply(
            weights,
            mean,
            tuple(slot[start : start + weights.size] for slot in chunk.slots),
            scratch.values[: weights.size],
            update_count=update_count,
            learning_rate=learning_rate,
        )
