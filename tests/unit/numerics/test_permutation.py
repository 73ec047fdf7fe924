"""Goal: an epoch's order has each sample once, is another in each epoch, and has the same bits on
every machine.

Method: all of short orders; places of long ones; numbers that were written down once.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.numerics.permutation import Int64, permuted

BILLION = 10**9


def order(length: int, seed: int = 0, epoch: int = 0) -> Int64:
    return permuted(np.arange(length), length, seed, epoch)


@given(st.integers(1, 700), st.integers(0, 2**64 - 1), st.integers(0, 2**62))
def test_each_sample_comes_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(order(length, seed, epoch)) == [*range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 2**12 - 1, 2**12, 2**12 + 1, 99_991])
def test_each_sample_comes_once_around_powers_of_two(length: int) -> None:
    found = order(length, 7)
    assert np.array_equal(np.sort(found), np.arange(length))


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "expected"),
    [
        (1, 0, 0, [0]),
        (4, 0, 0, [0, 2, 3, 1]),
        (4, 0, 1, [2, 1, 0, 3]),
        (10, 1, 0, [5, 4, 0, 1]),
        (1000, 2**64 - 1, 3, [117, 364, 849, 328]),
        (BILLION, 42, 0, [417237567, 890897000, 343806589, 239460886]),
        (2**48, 7, 2**40, [69397792123384, 85055032139355, 109425186215257, 69067136406202]),
    ],
)
def test_the_order_is_what_was_written_down(
    length: int, seed: int, epoch: int, expected: list[int]
) -> None:
    places = np.arange(min(length, 4)) * max((length - 1) // 3, 1)
    assert permuted(places, length, seed, epoch).tolist() == expected


def test_places_may_be_asked_for_in_any_pieces() -> None:
    whole = order(1000, 5, 2)
    parts = [permuted(np.arange(i, i + 125), 1000, 5, 2) for i in range(0, 1000, 125)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_epochs_and_seeds_have_other_orders() -> None:
    orders = [order(1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    for index, one in enumerate(orders):
        for other in orders[:index]:
            assert (one == other).mean() < 0.02


def test_neighbours_do_not_stay_together() -> None:
    """As in a random order, where a difference has the mean of a third of the length."""
    distance = np.abs(np.diff(order(10_000)))
    assert abs(distance.mean() / 10_000 - 1 / 3) < 0.02
    assert (distance == 1).mean() < 0.01


def test_a_billion_samples_need_no_table() -> None:
    places = np.arange(BILLION - 1000, BILLION)
    found = permuted(places, BILLION, 3, 9)
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < BILLION
