"""Ranks as messages name them."""

from __future__ import annotations

import pytest

from shardwell.specs.rank_words import format_ranks


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "no rank"),
        ([0], "rank 0"),
        ((1, 5), "ranks 1, 5"),
        (range(16), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15"),
        (range(4, 23), "ranks 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 3 more"),
    ],
)
def test_many_are_counted(ranks, words) -> None:
    assert format_ranks(ranks) == words
