"""One line of the table."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A measurement, beside its goal."""

    what: str
    goal: str
    found: str
