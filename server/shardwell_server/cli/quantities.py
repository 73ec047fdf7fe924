"""The types of flags with a unit, a length of time, size or rate: "7B", "64MB", "1Gbit/s"."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import click

ELEMENT_COUNT_MAX = 2**48
"""A model with more elements is a slip of the hand."""
_INT64_MAX = 2**63 - 1
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BYTES = {
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_FLOAT32 = {unit: count / 4 for unit, count in _BYTES.items()}
_RATES = {
    "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8,
    "MB/s": 1e6, "GB/s": 1e9,
}  # fmt: skip
NumberT = TypeVar("NumberT", int, float)


class Quantity(click.ParamType[NumberT]):
    """Parses a number with a unit; a default is as it is."""

    expected: str  # in a refusal, after "is no"

    def parse(self, text: str) -> NumberT | None:
        """Returns the number; None: the text is none."""
        raise NotImplementedError

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> NumberT:
        """Returns the number; see click."""
        parsed: NumberT | None = self.parse(value) if isinstance(value, str) else value
        if parsed is None:
            self.fail(f"{value!r} is no {self.expected}", param, ctx)
        return parsed


class ModelSize(Quantity[int]):
    """Parses elements of a model: a number ("650", "100M", "7B"), or float32 bytes ("64MB")."""

    name = "size"
    expected = (
        "size of a model: give elements, as 650, 100M or 7B, or bytes of float32, as 64MB or "
        "28GiB; at least one element, at most 280T"
    )

    def parse(self, text: str) -> int | None:  # noqa: D102 (see Quantity)
        number, unit = _split(text)
        count = number * {**_COUNTS, **_FLOAT32}.get(unit, 0.0)
        return int(count) if 1 <= count <= ELEMENT_COUNT_MAX else None


class ByteCount(Quantity[int]):
    """Parses a number of bytes: "1048576", "50MB", "2GiB"; with `per_second` also "2GiB/s".

    Without `low` the setting itself checks the least later.
    """

    name = "bytes"

    def __init__(self, low: int = -_INT64_MAX, *, per_second: bool = False) -> None:
        self._low = low
        self._suffix = "/s" if per_second else ""
        units = ", ".join(_BYTES)
        self.expected = f"number of bytes: give one, or one with {units}, as 50MB{self._suffix}"

    def parse(self, text: str) -> int | None:  # noqa: D102 (see Quantity)
        try:
            count = int(text)
        except ValueError:
            number, unit = _split(text)
            unit = unit.removesuffix(self._suffix)
            if unit not in _BYTES:
                return None
            count = int(number * _BYTES[unit])
        return count if self._low <= count <= _INT64_MAX else None


class Rate(Quantity[float]):
    """Parses bytes a second, of a link ("1Gbit/s", which is 125 MB/s) or of work ("0.4GB/s")."""

    name = "rate"
    expected = f"rate: give a number with {', '.join(_RATES)}, as 1Gbit/s"

    def parse(self, text: str) -> float | None:  # noqa: D102 (see Quantity)
        number, unit = _split(text)
        return number * _RATES[unit] if unit in _RATES and number > 0 else None


class Duration(click.ParamType[float]):
    """Parses finite seconds, by default at least the shortest timeout, which is not 0."""

    name = "seconds"

    def __init__(self, low_s: float | None = None, high_s: float | None = None) -> None:
        self._low_s = low_s
        self._high_s = high_s

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Returns the seconds of a flag or variable; a default is as it is."""
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


def _split(value: str) -> tuple[float, str]:
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z/]*)\s*", str(value))
    return (float(found[1]), found[2]) if found else (0.0, "?")


def in_units(amount: float, units: tuple[str, ...], step: float = 1e3) -> str:
    """Formats an amount in three digits and the unit in which it is at least 1, if one is."""
    for unit in units[:-1]:
        if amount < 0.9995 * step:
            return f"{digits(amount)} {unit}"
        amount /= step
    return f"{digits(amount)} {units[-1]}"


def digits(amount: float) -> str:
    """Formats three digits, as people write them: 0.04, 3.14, 31.4, 314."""
    if amount >= 99.95:
        return f"{amount:,.0f}"
    return f"{amount:.1f}" if amount >= 9.995 else f"{amount:.2f}"


def bytes_words(count: float) -> str:
    """Formats a size as people say it: 3.20 MB."""
    if count < 1e3:
        return f"{count:.0f} B"
    return in_units(count / 1e3, ("kB", "MB", "GB", "TB", "PB"))


def seconds_words(seconds: float) -> str:
    """Formats a time as people say it: 3.20 ms."""
    if seconds == 0.0:
        return "0 s"
    if seconds >= 0.9995:
        for unit, length_s in (("s", 1), ("min", 60), ("h", 3600)):
            if seconds < 999.5 * length_s:
                return f"{digits(seconds / length_s)} {unit}"
        return f"{digits(seconds / 86400)} d"
    return in_units(seconds * 1e6, ("us", "ms"))


def link_words(bytes_per_s: float) -> str:
    """Formats a link's rate as people say it: 1.00 Gbit/s."""
    return in_units(bytes_per_s * 8 / 1e6, ("Mbit/s", "Gbit/s", "Tbit/s"))
