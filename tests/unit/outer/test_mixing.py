"""Goal: the moves are the formulas of the papers, and no work that did not count is lost.

Method: the formulas in float64 on whole numbers, which float32 holds exactly.
"""

from __future__ import annotations

import numpy as np
import pytest

from shardwell.outer import mixing
from shardwell.parameter.feedback import Outcome
from shardwell.placement.slices import Slice

IMAGE, NEW, LOCAL = (np.arange(1, 9) * by for by in (16.0, 8.0, 4.0))


def as_float32(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float32) for array in arrays]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_an_offer_is_what_the_learner_moved(dtype: type) -> None:
    (image,) = as_float32(IMAGE)
    out = np.empty_like(image)
    assert mixing.offer(image, LOCAL.astype(dtype), out) is out
    assert np.array_equal(out, IMAGE - LOCAL)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_the_mix_has_alpha_of_the_local_weights_where_the_offer_counted(alpha: float) -> None:
    uncounted = [Slice(0, 2), Slice(5, 1)]
    mixed = mixing.mix(*as_float32(IMAGE, NEW, LOCAL), alpha, uncounted)
    expected = (1 - alpha) * NEW + alpha * LOCAL
    kept = [0, 1, 5]
    expected[kept] = (NEW + LOCAL - IMAGE)[kept]
    assert mixed.dtype == np.float32
    assert np.array_equal(mixed, expected)


def test_what_did_not_count_is_in_the_next_offer() -> None:
    image, new, local = as_float32(IMAGE, NEW, LOCAL)
    mixed = mixing.mix(image, new, local, 0.5, [Slice(0, 8)])
    again = mixing.offer(new, mixed, np.empty_like(new))
    assert np.array_equal(again, IMAGE - LOCAL)
    assert np.array_equal(mixed, mixing.refresh(image, new, local))


def test_a_take_keeps_the_samples_behind_what_did_not_count() -> None:
    late = Outcome(step=3, size=8, version=7, late=(Slice(0, 2),), superseded=(Slice(6, 2),))
    taken = mixing.take(late, 3, 100)
    assert taken == ((Slice(0, 2), Slice(6, 2)), 50, 3)
    counted = Outcome(step=3, size=8, version=4)
    assert mixing.take(counted, 3, 100) == ((), 0, 0)
    superseded = Outcome(step=3, size=8, version=7, superseded=(Slice(0, 8),))
    assert mixing.take(superseded, 3, 100) == ((Slice(0, 8),), 100, 0)
