"""Goal: sets as ranges have the numbers of Python's sets, and one form each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.errors import ArgumentError
from shardwell.placement.ranges import (
    NumberRanges,
    added,
    between,
    common,
    first_of,
    flat,
    paired,
    place_of,
    size_of,
    united,
    without,
)
from shardwell.specs.samples import POSITION_MAX

MOST = 30
sets = st.frozensets(st.integers(0, MOST - 1))
counts = st.integers(-2, MOST + 2)


def ranges_of(numbers: frozenset[int] | set[int] | list[int]) -> NumberRanges:
    """Ranges of a set, one number after another."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return tuple(found)


@given(sets, sets, sets)
def test_sets_are_united_common_and_taken_away(
    one: frozenset[int], other: frozenset[int], third: frozenset[int]
) -> None:
    a, b, c = ranges_of(one), ranges_of(other), ranges_of(third)
    assert united(a, b, c) == ranges_of(one | other | third)
    assert added(a, b) == ranges_of(one | other)
    assert common(a, b) == ranges_of(one & other)
    assert without(a, b) == ranges_of(one - other)
    assert size_of(a) == len(one)


@given(st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST))))
def test_ranges_in_any_order_that_overlap_are_one_set(given_ranges: list[tuple[int, int]]) -> None:
    numbers = {number for start, stop in given_ranges for number in range(start, stop)}
    assert united(given_ranges) == ranges_of(numbers)


@given(sets, counts, counts)
def test_places_count_from_the_lowest_number(numbers: frozenset[int], low: int, high: int) -> None:
    ranges, ordered = ranges_of(numbers), sorted(numbers)
    first, stop = max(low, 0), max(high, 0)
    assert first_of(ranges, high) == ranges_of(ordered[:stop])
    assert between(ranges, low, high) == ranges_of(ordered[first:stop])
    assert place_of(ranges, high) == sum(number < high for number in numbers)


@given(sets)
def test_a_message_has_start_and_size_of_each(numbers: frozenset[int]) -> None:
    ranges = ranges_of(numbers)
    assert flat(ranges) == [n for start, stop in ranges for n in (start, stop - start)]
    assert paired(flat(ranges)) == ranges


@pytest.mark.parametrize(
    "numbers",
    [
        [3],
        [3, 1, 9],
        [3, 0],
        [3, 1, 2, 1],
        [3, 2, 5, 1],
        [3, 2, 4, 1],
        [POSITION_MAX, 1],
        [0, POSITION_MAX + 1],
    ],
    ids=[
        "no size",
        "no second size",
        "empty",
        "descending",
        "touching",
        "overlapping",
        "beyond",
        "too large",
    ],
)
def test_what_is_no_set_is_refused_with_what_is_one(numbers: list[int]) -> None:
    with pytest.raises(
        ArgumentError, match=f"ascend without touching, none empty, to at .* {POSITION_MAX}"
    ):
        paired(numbers)
