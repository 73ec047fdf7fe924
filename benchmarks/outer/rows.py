"""One line of the table."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """What was measured, beside what is to be reached."""

    what: str
    goal: str
    found: str
