"""Arrays of several workers in one memory, reduced in place, block by block. Pure.

Not for arrays that travel: those are reduced chunk by chunk as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from shardwell.numerics.codec import Float32
from shardwell.numerics.elementwise import add_scaled, run
from shardwell.numerics.weighted_mean import MeanFactors, divide

ReductionName = Literal["sum", "mean", "max", "min"]
REDUCTIONS: tuple[str, ...] = get_args(ReductionName)

_LINE_ELEMENT_COUNT = 16
"""A cache line of 64 bytes: two threads' parts never share one."""


def part_of(element_count: int, part_count: int, index: int) -> tuple[int, int]:
    """Returns (start, stop) of a part of an array that is cut evenly, at cache lines."""
    line_count = -(-element_count // _LINE_ELEMENT_COUNT)
    size = -(-line_count // part_count) * _LINE_ELEMENT_COUNT
    return min(index * size, element_count), min((index + 1) * size, element_count)


def reduce_block(
    buffers: Sequence[Float32], reduction: str, weights: MeanFactors, total: Float32
) -> None:
    """Writes the reduction of one block of all buffers, which are by rank, into all of them."""
    with np.errstate(all="ignore"):
        match reduction:
            case "mean":
                _mean(buffers, weights, total)
            case "sum":
                _fold(np.add, buffers, total)
            case "max" | "min":
                _fold(partial(pick, reduction), buffers, total)
            case _:
                raise AssertionError(reduction)
    for buffer in buffers:
        np.copyto(buffer, total)


def pick(reduction: str, first: Float32, second: Float32, out: Float32) -> None:
    """Writes the larger or smaller of two arrays' elements; 0 is larger than -0, unlike NumPy's."""
    is_max = reduction == "max"
    are_equal = first == second
    both = np.bitwise_and if is_max else np.bitwise_or
    signed = both(first.view(np.uint32), second.view(np.uint32)).view(np.float32)
    (np.maximum if is_max else np.minimum)(first, second, out=out)
    np.copyto(out, signed, where=are_equal)


def _fold(function: Callable[..., Any], buffers: Sequence[Float32], total: Float32) -> None:
    first, *others = buffers
    if not others:
        np.copyto(total, first)
        return
    function(first, others[0], out=total)
    for other in others[1:]:
        function(total, other, out=total)


def _mean(buffers: Sequence[Float32], weights: MeanFactors, total: Float32) -> None:
    is_first = True
    for rank, buffer in enumerate(buffers):
        factor = weights.factor(rank)
        if factor == 0.0:
            continue
        if is_first:
            np.multiply(buffer, np.float32(factor), out=total)
            is_first = False
        else:
            run(add_scaled(0, 1, factor), (total, buffer), 0, total.size)
    if is_first:
        total.fill(0.0)
    elif weights.divisor != 1.0:
        divide(total.copy(), weights.divisor, total)
