"""The fate of the calls of a generation that is over, in an elastic group. Pure.

Each rank counts, per generation, calls that have ended and calls that may have written data. At the
start of the next generation all ranks take the largest of these counts, and each call then has the
same fate on every rank that made it: see docs/adr/0037-elastic-groups.md.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwell.errors import ArgumentError
from shardwell.v1 import peer_pb2 as pb

STANDING_COUNT_MAX = 64


class Counts(NamedTuple):
    """The progress of one generation's calls."""

    made: int = 0
    moved: int = 0
    """Calls below this one have a verdict, so that data may have been written."""


Standings = Mapping[int, Counts]


class Fate(enum.Enum):
    """The fate of a call whose generation is over."""

    MADE = enum.auto()
    """It has ended on a member: its result is whole here as well."""
    AGAIN = enum.auto()
    FAILED = enum.auto()


def fate_of(index: int, counts: Counts, *, is_prepared: bool, retries: bool) -> Fate:
    """Decides a call's fate by the largest counts that a member of the next generation knows."""
    if index < counts.made:
        return Fate.MADE if is_prepared else Fate.FAILED
    if index < counts.moved:
        return Fate.AGAIN if retries else Fate.FAILED
    return Fate.AGAIN


def merged(standings: Iterable[Standings]) -> dict[int, Counts]:
    """The largest counts of each generation."""
    found: dict[int, Counts] = {}
    for each in standings:
        for number, counts in each.items():
            known = found.get(number, Counts())
            found[number] = Counts(*map(max, known, counts))
    return found


def to_message(standings: Standings) -> pb.Standings:
    """The message of the newest generations' counts."""
    return pb.Standings(
        standings=[
            pb.Standing(generation=number, made_count=made, moved_count=moved)
            for number, (made, moved) in sorted(standings.items())[-STANDING_COUNT_MAX:]
        ]
    )


def from_message(message: pb.Standings) -> dict[int, Counts]:
    """The counts in another rank's message; ArgumentError: it can't know so much."""
    if len(message.standings) > STANDING_COUNT_MAX:
        raise ArgumentError(
            f"standings must be at most {STANDING_COUNT_MAX}; got {len(message.standings)}"
        )
    for each in message.standings:
        if each.made_count > each.moved_count:
            raise ArgumentError(
                f"made_count of generation {each.generation} must be at most moved_count="
                f"{each.moved_count}; got {each.made_count}"
            )
    return {
        each.generation: Counts(each.made_count, each.moved_count) for each in message.standings
    }
