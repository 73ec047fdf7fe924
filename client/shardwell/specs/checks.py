"""Checks that the fields of specs share, and their values in messages."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from shardwell.errors import ArgumentError

_BRIEF_MAX = 200
"""Characters: twice those of the longest optimizer's repr."""
_NUMBER_MAX = float(2**1023)  # what comes here is turned into a float


class NotGiven(enum.Enum):
    """Stands for an argument that was left out, where None would be a value."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return self.name


def check_number(what: str, value: float, *, low: float = 0.0, below: float = math.inf) -> None:
    """Refuses a value that is no finite real number in [low, below)."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (good and low <= value < below and value <= _NUMBER_MAX):
        limit = f"in [{low:g}, {below:g})"
        if below == math.inf:
            limit = "" if low == -math.inf else f"at least {low:g}"
        raise ArgumentError(f"{what} must be a finite number {limit}; got {value!r}")


def check_whole_number(what: str, value: int, low: int, high: int) -> None:
    """Refuses a value that is no int from low to high."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ArgumentError(f"{what} must be an integer from {low} to {high}; got {value!r}")


def brief(value: Any) -> str:
    """Returns the repr for a message, cut off at a length that is still read."""
    text = repr(value)
    return text if len(text) <= _BRIEF_MAX else f"{text[: _BRIEF_MAX - 3]}..."


def differences_of(path: str, mine: Any, theirs: Any) -> list[str]:
    """The differences of two values, each as "path: mine exists, theirs was asked for".

    Of two values of one dataclass these are in its fields; of two dataclasses, their names.
    """
    if mine == theirs:
        return []
    if type(mine) is type(theirs) and dataclasses.is_dataclass(mine):
        return [
            each
            for field in dataclasses.fields(mine)
            for each in differences_of(
                f"{path}.{field.name}", getattr(mine, field.name), getattr(theirs, field.name)
            )
        ]
    here, asked = (
        type(each).__name__ if dataclasses.is_dataclass(each) else brief(each)
        for each in (mine, theirs)
    )
    return [f"{path}: {here} exists, {asked} was asked for"]
