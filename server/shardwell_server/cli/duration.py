"""The type of all flags that are a length of time."""

from __future__ import annotations

from typing import Any

import click


class Duration(click.ParamType[float]):
    """A length of time in seconds: neither NaN nor infinity.

    Args:
        low_s: The shortest; None: the shortest timeout, which is not 0.
        high_s: The longest; None: the longest of all.
    """

    name = "seconds"

    def __init__(self, low_s: float | None = None, high_s: float | None = None) -> None:
        self._low_s = low_s
        self._high_s = high_s

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The seconds of a flag or variable; a default is as it is."""
        if isinstance(value, float):
            return value
        # Not above: `shardwell health` needs little, and this needs all of the SDK.
        from shardwell.errors import ArgumentError
        from shardwell.specs.deadlines import DURATION_S_MAX, TIMEOUT_S_MIN, check_duration

        low_s = TIMEOUT_S_MIN if self._low_s is None else self._low_s
        high_s = DURATION_S_MAX if self._high_s is None else self._high_s
        try:
            seconds = float(value)
        except ValueError:
            seconds = value
        try:
            return check_duration("it", seconds, low_s, high_s)
        except ArgumentError as error:
            self.fail(error.message, param, ctx)
