"""Goal: only names that are safe in files, logs and shells are accepted.

Method: the alphabet is spelled out here, character by character, over all of ASCII and beyond.
"""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.errors import ArgumentError
from shardwell.specs.names import NAME_LENGTH_MAX, check_name, format_ranks

FIRST = string.ascii_letters + string.digits
REST = FIRST + "._-"


@given(st.text(REST, min_size=1, max_size=NAME_LENGTH_MAX))
def test_names_of_the_alphabet(name: str) -> None:
    if name[0] in FIRST:
        assert check_name("worker_id", name) == name
    else:
        with pytest.raises(ArgumentError):
            check_name("worker_id", name)


@given(st.text(max_size=5))
def test_any_text_is_a_name_or_refused(name: str) -> None:
    good = bool(name) and name[0] in FIRST and all(letter in REST for letter in name)
    if good:
        assert check_name("worker_id", name) == name
    else:
        with pytest.raises(ArgumentError, match="worker_id must be 1 to 128"):
            check_name("worker_id", name)


def test_every_ascii_character_as_first_and_later() -> None:
    for letter in map(chr, range(128)):
        for name, alphabet in ((letter, FIRST), (letter + "a", FIRST), ("a" + letter, REST)):
            if letter in alphabet:
                assert check_name("name", name) == name
            else:
                with pytest.raises(ArgumentError):
                    check_name("name", name)


def test_the_length_has_a_limit() -> None:
    assert check_name("name", "a" * 128) == "a" * 128
    with pytest.raises(ArgumentError) as caught:
        check_name("name", "a" * 100_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", [None, 7, b"model", ["model"], "model\n", "../model", "m o", "é"])
def test_what_is_no_name(name: object) -> None:
    with pytest.raises(ArgumentError, match="parameter name must be"):
        check_name("parameter name", name)


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
def test_many_ranks_are_counted(ranks, words) -> None:
    assert format_ranks(ranks) == words
