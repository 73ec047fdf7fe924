"""Goal: a cluster's addresses are read in their order, and mistakes are found before connecting.

Method: targets written out.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwell.errors import ArgumentError
from shardwell.specs.names import parse_target


@pytest.mark.parametrize(
    ("target", "addresses"),
    [
        ("h:1", ["h:1"]),
        ("127.0.0.1:7070,127.0.0.1:7071", ["127.0.0.1:7070", "127.0.0.1:7071"]),
        (" b:2 ,\ta:1\n", ["b:2", "a:1"]),
        ("[::1]:65535", ["[::1]:65535"]),
        ("shard-0.shards.svc:7070", ["shard-0.shards.svc:7070"]),
    ],
)
def test_targets_are_lists_of_addresses(target: str, addresses: list[str]) -> None:
    assert parse_target(target) == addresses


@pytest.mark.parametrize(
    "target",
    [
        "",
        ",",
        "h:1,",
        ",h:1",
        "h",
        "h:",
        ":1",
        "h:0",
        "h:65536",
        "h:x",
        "h:1;h:2",
        "h:1 h:2",
        "h:-1",
    ],
)
def test_what_is_no_target(target: str) -> None:
    with pytest.raises(ArgumentError, match=r"HOST:PORT.*SHARDWELL_SHARDS"):
        parse_target(target)


def test_an_address_may_occur_once() -> None:
    with pytest.raises(ArgumentError, match="twice"):
        parse_target("a:1,b:1,a:1")


@pytest.mark.parametrize("target", [None, 7, ["h:1"], b"h:1"])
def test_a_target_is_a_string(target: Any) -> None:
    with pytest.raises(ArgumentError, match="target"):
        parse_target(target)


def test_the_number_of_shards_has_a_limit() -> None:
    addresses = [f"h{index}:1" for index in range(4097)]
    assert len(parse_target(",".join(addresses[:4096]))) == 4096
    with pytest.raises(ArgumentError, match="1 to 4096 addresses") as caught:
        parse_target(",".join(addresses))
    assert len(str(caught.value)) < 400
