"""Fragments: which there may be, and that their parameters travel and differ with them."""

from __future__ import annotations

from typing import Any

import pytest

from shardwell import SGD, Fragment, ParameterSpec
from shardwell.errors import ArgumentError
from shardwell.specs.fragments import with_fragments
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
    assert found.startswith("fragment: ")
    assert "'strided'" in found
    assert "'balanced'" in found


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
def test_what_can_not_be_is_refused(changes: dict[str, Any], words: str) -> None:
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
def test_a_family_s_name_stands_for_its_fragments(names, found) -> None:
    known = {
        "net.fragment-1": fragment(index=1, count=2),
        "m": None,
        "net.fragment-0": fragment(index=0, count=2),
        "plain.fragment-0": None,
    }
    assert with_fragments(names, known) == found


def test_a_parameter_counts_before_a_family_of_its_name() -> None:
    assert with_fragments(["net"], {"net": None, "net.fragment-0": fragment(index=0)}) == ["net"]


def test_a_family_that_lacks_a_fragment_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'net' lacks 'net.fragment-1', one of its 3"):
        with_fragments(["net"], {"net.fragment-0": fragment(index=0, count=3)})
