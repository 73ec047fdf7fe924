"""The four moves of outer training on a fragment, in formulas. Pure.

    x, x'   the image: a version's weights as all learners decoded them, and that of a later version
    y, y'   one learner's local weights, before and after
    g       its outer gradient
    S       the elements of g that the shards did not count: late, or superseded

    offer     g  = x - y
    take      x' = OuterOpt(x, mean of g over the learners, weighted by samples)     on the shards
    mix       y' = (1 - alpha) x' + alpha y;    in S:  y' = x' + (y - x)
    refresh   y' = x' + (y - x)                 of a fragment that is not on its way

`offer` and `take` are DiLoCo (Douillard et al., 2023); `mix` is Streaming DiLoCo (Douillard et al.,
2025), whose S is empty. Work in S stays in y' - x', so the next offer has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardwell.numerics.codec import Float32
from shardwell.parameter.feedback import Outcome
from shardwell.placement.slices import Slice


class Taken(NamedTuple):
    """The result of an offer, beside its image."""

    uncounted: tuple[Slice, ...]
    """S."""
    sample_count: int
    """Samples that S was trained on, which weigh in the next offer."""
    missed_count: int
    """Outer steps that the others have made meanwhile without this learner."""


def offer(x: Float32, y: Any, out: Float32) -> Float32:
    """Returns g in `out`; y has any floating point type."""
    with np.errstate(all="ignore"):  # values that are not finite are the caller's to refuse
        g: Float32 = np.subtract(x, y, out=out, casting="same_kind")
    return g


def take(outcome: Outcome, step: int, sample_count: int) -> Taken:
    """Returns what becomes of the work in an offer of a step, trained on that many samples."""
    uncounted = (*outcome.late, *outcome.superseded)
    kept = sum(where.size for where in uncounted)
    missed = outcome.version - step - 1 if outcome.late else 0
    return Taken(uncounted, round(sample_count * kept / outcome.size), missed)


def mix(x: Float32, new: Float32, y: Float32, alpha: float, uncounted: Sequence[Slice]) -> Float32:
    """Returns y', copied; `new` is x'. All are (size,) float32."""
    mixed: Float32 = new.copy()
    if alpha:
        mixed *= np.float32(1.0 - alpha)
        mixed += np.float32(alpha) * y
    for where in uncounted:
        own = slice(where.offset, where.stop)
        mixed[own] = refresh(x[own], new[own], y[own])
    return mixed


def refresh(x: Float32, new: Float32, y: Any) -> Float32:
    """Returns y', copied; `new` is x', and y has any floating point type."""
    moved: Float32 = new + np.subtract(y, x, dtype=np.float32)
    return moved
