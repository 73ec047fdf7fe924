"""Tables of HTML, which notebooks show in place of a value's repr. Nothing in them is a script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Link(NamedTuple):
    """A cell that leads somewhere."""

    text: str
    url: str


def html_table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a heading; every text is escaped, as names come from other processes."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f"<div><strong>{html.escape(heading)}</strong><table>"
        f"{f'<tr>{head}</tr>' if head else ''}{body}</table></div>"
    )


def _cell(value: object) -> str:
    if isinstance(value, Link):
        inside = html.escape(value.text)
        if value.url.startswith(("http://", "https://")):
            inside = f'<a href="{html.escape(value.url)}" target="_blank">{inside}</a>'
    else:
        inside = html.escape(str(value))
    return f'<td style="text-align: left">{inside}</td>'
