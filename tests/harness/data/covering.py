"""Rows of options in which each two values, or three, that may be together are so in one row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def covering(
    options: Mapping[str, Sequence[Any]], is_allowed: Callable[[Row], bool], *, count: int = 2
) -> list[Row]:
    """Makes the rows: greedily, and the same ones each time.

    Args:
        options: The values of each option.
        is_allowed: Whether values may be together, of a row or of a part of it.
        count: How many values are to be together.
    """
    groups = [
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(options, count)
        for values in itertools.product(*(options[name] for name in names))
    ]
    wanted = {frozenset(group) for group in groups if is_allowed(dict(group))}
    rows: list[Row] = []
    by_size = sorted(options, key=lambda name: -len(options[name]))
    for group in groups:
        if frozenset(group) not in wanted:
            continue
        row: Row = dict(group)
        for name in by_size:
            if name not in row:
                rest = list(itertools.combinations(row.items(), count - 1))
                allowed = [(name, v) for v in options[name] if is_allowed({**row, name: v})]
                gains = [sum(frozenset((*r, each)) in wanted for r in rest) for each in allowed]
                row[name] = allowed[gains.index(max(gains))][1]
        wanted -= {frozenset(each) for each in itertools.combinations(row.items(), count)}
        rows.append({name: row[name] for name in options})
    return rows
