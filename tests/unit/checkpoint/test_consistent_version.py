"""Goal: what is known of a version saves a question once, whatever becomes of the questions after.

Method: questions that fail and succeed in turn, as shards do that go away and come back.
"""

from __future__ import annotations

import itertools

import pytest

from shardwell.checkpoint.consistent_version import known_first
from shardwell.errors import ShardUnavailableError


def test_what_is_known_is_given_once_and_failures_end_nothing() -> None:
    count = itertools.count(1)

    def ask() -> int:
        number = next(count)
        if number % 2:
            raise ShardUnavailableError(f"away {number}")
        return number

    newest = known_first(7, ask)
    assert newest() == 7
    for number in (2, 4, 6):
        with pytest.raises(ShardUnavailableError):
            newest()
        assert newest() == number
