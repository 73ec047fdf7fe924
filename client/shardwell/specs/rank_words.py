"""Ranks in messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

RANKS_NAMED_MAX = 16
"""Of more ranks, as many are named and the rest counted."""


def format_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 2", "ranks 0, 1 and 5 more", or "no rank"."""
    if not ranks:
        return "no rank"
    shown = ", ".join(map(str, ranks[:RANKS_NAMED_MAX]))
    more = f" and {len(ranks) - RANKS_NAMED_MAX} more" if len(ranks) > RANKS_NAMED_MAX else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
