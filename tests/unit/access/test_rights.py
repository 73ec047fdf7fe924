"""Goal: a right is on the names that begin with its prefix, and on no other; the larger includes
the smaller.

Method: every right against every deed, and prefixes that are nearly the same.
"""

from __future__ import annotations

import pytest

from shardwell.errors import AccessDeniedError, ArgumentError
from shardwell_server.access.rights import Grant, Principal, Right, seconds_of, time_of

LADDER = list(Right)


def principal(*grants: str) -> Principal:
    return Principal(name="ci", grants=tuple(map(Grant.parse, grants)))


@pytest.mark.parametrize("has", LADDER)
@pytest.mark.parametrize("needs", LADDER)
@pytest.mark.parametrize("kind", ["parameter", "table", "group"])
def test_each_right_for_each_deed(has, needs, kind) -> None:
    who = principal(f"{has.word}:prod-")
    if has >= needs:
        who.check(needs, kind, "prod-a")
    else:
        with pytest.raises(
            AccessDeniedError, match=f"may .* {kind} 'prod-a', not .*{needs.word!r}"
        ):
            who.check(needs, kind, "prod-a")
    for other in ("prod", "pro-", "Prod-a", "xprod-a", "", "test-a"):
        with pytest.raises(
            AccessDeniedError, match=f"has no right to {kind} {other!r}; .* a right"
        ):
            who.check(needs, kind, other)


def test_the_most_of_several_counts() -> None:
    who = principal("read", "create:prod-", "contribute:prod-a")
    assert who.best("x") is Right.READ
    assert who.best("prod-b") is Right.CREATE
    assert who.best("prod-a") is Right.CREATE
    assert principal("read:a").best("b") is None


def test_long_names_of_strangers_make_no_long_messages() -> None:
    with pytest.raises(AccessDeniedError) as caught:
        principal("read:a").check(Right.READ, "parameter", "x" * 10_000)
    assert len(caught.value.message) < 400
    assert len(str(caught.value.parameter)) < 200


@pytest.mark.parametrize("text", ["read", "contribute:prod-", "create:a.b_c-1", "admin:0"])
def test_a_right_is_printed_as_it_is_read(text) -> None:
    assert str(Grant.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "reads", "READ", "read:a b", "read:-a", "read:/", ":a", 5, None]
)
def test_what_is_no_right(text) -> None:
    with pytest.raises(ArgumentError, match="a right is RIGHT:PREFIX"):
        Grant.parse(text)


def test_times_are_read_in_any_zone() -> None:
    assert time_of(seconds_of("2027-01-31T12:00:00Z")) == "2027-01-31T12:00:00Z"
    assert time_of(seconds_of("2027-01-31T14:00:00+02:00")) == "2027-01-31T12:00:00Z"


@pytest.mark.parametrize(
    "text", ["2027-01-31", "2027-01-31T12:00:00", "0001-01-01T00:00:00+14:00", "soon", 5, None]
)
def test_what_is_no_time(text) -> None:
    with pytest.raises(ArgumentError, match="must be a time with its zone"):
        seconds_of(text)
