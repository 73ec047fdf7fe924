"""Tables as commands print them."""

from __future__ import annotations

from rich import box
from rich.table import Table

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
