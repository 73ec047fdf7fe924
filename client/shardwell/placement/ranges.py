"""Sets of numbers as ranges, such as the samples that have counted. Pure.

A set is a tuple of (start, stop), ascending, none empty, none touching the next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TypeAlias

from shardwell.errors import ArgumentError
from shardwell.specs.samples import POSITION_MAX

NumberRanges: TypeAlias = tuple[tuple[int, int], ...]
"""A set of numbers: (start, stop) each."""
_start, _stop = itemgetter(0), itemgetter(1)
_FEW = 8


def united(*sets: Iterable[tuple[int, int]]) -> NumberRanges:
    """Returns the numbers that are in any of the sets, which may be in any order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(each for given in sets for each in given):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def added(ranges: NumberRanges, more: NumberRanges) -> NumberRanges:
    """Returns the numbers that are in either, as `united`, but goes through `more` alone."""
    if len(more) > _FEW:
        return united(ranges, more)
    for start, stop in more:
        first = bisect_left(ranges, start, key=_stop)
        last = bisect_right(ranges, stop, key=_start)
        if first < last:
            start, stop = min(start, ranges[first][0]), max(stop, ranges[last - 1][1])
        ranges = (*ranges[:first], (start, stop), *ranges[last:])
    return ranges


def without(ranges: NumberRanges, taken: NumberRanges) -> NumberRanges:
    """Returns the numbers of `ranges` that are not in `taken`."""
    return tuple(_left(ranges, taken))


def _left(ranges: NumberRanges, taken: NumberRanges) -> Iterator[tuple[int, int]]:
    for start, stop in ranges:
        index = bisect_right(taken, start, key=_stop)
        while index < len(taken) and taken[index][0] < stop:
            begin, end = taken[index]
            if start < begin:
                yield start, begin
            start, index = end, index + 1
        if start < stop:
            yield start, stop


def common(ranges: NumberRanges, others: NumberRanges) -> NumberRanges:
    """Returns the numbers that are in both."""
    found = []
    for start, stop in ranges:
        index = bisect_right(others, start, key=_stop)
        while index < len(others) and others[index][0] < stop:
            begin, end = others[index]
            found.append((max(start, begin), min(stop, end)))
            index += 1
    return tuple(found)


def size_of(ranges: Iterable[tuple[int, int]]) -> int:
    """Returns how many numbers there are."""
    return sum(stop - start for start, stop in ranges)


def first_of(ranges: NumberRanges, count: int) -> NumberRanges:
    """Returns the `count` lowest numbers, or all."""
    found = []
    for start, stop in ranges:
        if count <= 0:
            break
        stop = min(stop, start + count)
        found.append((start, stop))
        count -= stop - start
    return tuple(found)


def between(ranges: NumberRanges, first: int, stop: int) -> NumberRanges:
    """Returns the numbers at places `first` to `stop` - 1 of the set, counted from its lowest."""
    found = []
    for start, end in ranges:
        low, high = max(start, start + first), min(end, start + stop)
        if low < high:
            found.append((low, high))
        first, stop = first - (end - start), stop - (end - start)
        if stop <= 0:
            break
    return tuple(found)


def place_of(ranges: NumberRanges, number: int) -> int:
    """Returns how many numbers of the set are below one."""
    return sum(min(stop, number) - start for start, stop in ranges if start < number)


def paired(numbers: Sequence[int]) -> NumberRanges:
    """Returns the set that a message has, as start and size of each range.

    ArgumentError: it is none, or has a number that is not below POSITION_MAX.
    """
    found, end = [], -1
    for index in range(0, len(numbers) - 1, 2):
        start, size = numbers[index], numbers[index + 1]
        if start <= end or size < 1 or start + size > POSITION_MAX:
            break
        end = start + size
        found.append((start, end))
    if len(numbers) != 2 * len(found):
        raise ArgumentError(
            "ranges of samples must ascend without touching, none empty, to at most "
            f"{POSITION_MAX}; got {list(numbers[:8])}"
        )
    return tuple(found)


def flat(ranges: NumberRanges) -> list[int]:
    """Returns a set as a message has it: start and size of each range."""
    return [number for start, stop in ranges for number in (start, stop - start)]
