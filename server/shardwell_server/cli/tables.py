"""Tables as commands print them."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 200
"""Columns where there is no terminal: nothing is cut off or wrapped."""
_WHOLE = ("address", "state")
"""Columns that are copied or looked for as one word: a narrow terminal folds others first."""


def table(title: str, *columns: str) -> Table:
    """A table that fits a narrow terminal; a column that begins with ">" has numbers.

    Its title, if it is to have one, is wrapped to its width.
    """
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        numeric = column.startswith(">")
        made.add_column(
            column.removeprefix(">"),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=column in _WHOLE,
        )
    return made


def console() -> Console:
    """Where they go."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
