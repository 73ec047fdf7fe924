"""Fragments: which there may be, and that their parameters travel and differ with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from shardwell import SGD, Fragment, ParameterSpec
from shardwell.errors import ArgumentError
from shardwell.specs.fragments import Grouped, first_fragment, grouped, versions_words
from shardwell.v1 import types_pb2


def fragment(**changes: Any) -> Fragment:
    values: dict[str, Any] = {"family": "net", "index": 1, "count": 4, "assignment": "strided"}
    return Fragment(**{**values, **changes})


def spec(**changes: Any) -> ParameterSpec:
    values: dict[str, Any] = {
        "name": "net.fragment-1",
        "size": 10,
        "optimizer": SGD(0.7, momentum=0.9),
        "worker_count": 2,
        "fragment": fragment(),
    }
    return ParameterSpec(**{**values, **changes})


def test_it_travels_with_its_parameter() -> None:
    sent = spec()
    message = types_pb2.ParameterSpec.FromString(sent.to_proto().SerializeToString())
    assert (message.fragment.family, message.fragment.index) == ("net", 1)
    assert (message.fragment.count, message.fragment.assignment) == (4, "strided")
    assert ParameterSpec.from_proto(message) == sent
    plain = spec(name="m", fragment=None)
    assert not plain.to_proto().HasField("fragment")
    assert ParameterSpec.from_proto(plain.to_proto()).fragment is None


def test_another_deal_is_another_spec() -> None:
    (found,) = spec().differences(spec(fragment=fragment(assignment="balanced")))
    assert found == "fragment.assignment: 'strided' exists, 'balanced' was asked for"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "a/b"}, "family must be"),
        ({"count": 0}, "fragment count"),
        ({"count": 4097}, "fragment count"),
        ({"index": 4}, "fragment index"),
        ({"index": -1}, "fragment index"),
        ({"assignment": ""}, "assignment is text of 1 to 128"),
        ({"assignment": "x" * 129}, "assignment is text of 1 to 128"),
        ({"assignment": 3}, "assignment is text of 1 to 128"),
    ],
)
def test_impossible_fragments_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fragment(**changes)


def test_a_parameter_has_the_name_of_its_fragment() -> None:
    with pytest.raises(ArgumentError, match=r"is parameter 'net\.fragment-1'; got the name 'net'"):
        spec(name="net")
    with pytest.raises(ArgumentError, match="fragment must be"):
        spec(fragment="net")
    message = spec().to_proto()
    message.fragment.count = 1
    with pytest.raises(ArgumentError, match="fragment index"):
        ParameterSpec.from_proto(message)


class Part(NamedTuple):
    """A thing of a parameter."""

    name: str
    fragment: Fragment | None


def parts(*fragments: Fragment) -> list[Part]:
    return [Part(each.parameter, each) for each in fragments]


def groups(found: Iterable[Part]) -> Grouped[Part]:
    return grouped(found, lambda part: part)


def test_fragments_are_grouped_by_their_family() -> None:
    own = parts(*(fragment(index=index) for index in (3, 0, 1, 2, 2)))
    other = parts(fragment(family="a", index=1, count=2))
    alone = Part("m", None)
    found = groups([*own, alone, *other, alone])
    assert found.alone == {"m": [alone, alone]}
    assert list(found.families) == ["a", "net"]
    net, a = found.families["net"], found.families["a"]
    assert net.names == [f"net.fragment-{index}" for index in range(4)]
    assert [len(each) for each in net.parts.values()] == [1, 1, 2, 1]
    assert net.all == sorted(own, key=lambda part: part.name)
    assert (net.lacking, net.damage) == ([], "")
    assert (a.lacking, a.damage) == ([0], "lacks fragment 0 of 2")
    assert first_fragment("net") == net.names[0]


def test_a_family_says_what_is_wrong_with_it() -> None:
    several = parts(fragment(index=0), fragment(index=1, assignment="balanced"))
    mixed = groups(several).families["net"]
    assert mixed.damage == "has fragments of several deals, 'balanced' into 4 and 'strided' into 4"
    few = groups(parts(fragment(index=0, count=99))).families["net"]
    assert few.damage == "lacks fragment 1, 2, 3, 4, 5, 6, 7, 8 and 90 more of 99"


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ([7], "version 7"),
        ([12, 12, None, 11], "versions 12 12 - 11"),
        ([3] * 20, "versions 3 to 3 of 20 fragments"),
        ([3, None] * 10, "versions 3 to 3 of 20 fragments, of which 10 are missing"),
    ],
)
def test_versions_in_words(versions: list[int | None], words: str) -> None:
    assert versions_words(versions) == words


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["net"], ["net.fragment-0", "net.fragment-1"]),
        (["m", "net"], ["m", "net.fragment-0", "net.fragment-1"]),
        (["net.fragment-1", "net"], ["net.fragment-1", "net.fragment-0"]),
        (["gone", "m", "m"], ["gone", "m"]),
        (["plain.fragment-0"], ["plain.fragment-0"]),
        ([], []),
    ],
)
def test_a_family_s_name_means_its_fragments(names: list[str], found: list[str]) -> None:
    known = [
        *parts(fragment(index=1, count=2), fragment(index=0, count=2)),
        Part("m", None),
        Part("plain.fragment-0", None),
    ]
    assert groups(known).names_of(names, "here") == found


def test_a_parameter_counts_before_a_family_of_its_name() -> None:
    known = [Part("net", None), *parts(fragment(index=0))]
    assert groups(known).names_of(["net"], "here") == ["net"]


def test_a_family_that_lacks_a_fragment_is_refused() -> None:
    with pytest.raises(ArgumentError, match="here lacks fragment 1, 2 of 3 of family 'net'"):
        groups(parts(fragment(index=0, count=3))).names_of(["net"], "here")
