"""Goal: who makes a step is declared as a whole, or refused by name.

Method: one value after the other is bad, given to the classes and to the wire's messages.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardwell import SGD, Elastic, ParameterSpec
from shardwell.errors import ArgumentError

GOOD = {"min_count": 2, "max_count": 4, "member_return_s": 1.0, "member_lease_s": 5.0}
BAD_MEMBERS = [
    ("min_count", 0),
    ("min_count", -1),
    ("min_count", 5),
    ("min_count", 1.0),
    ("min_count", True),
    ("max_count", 0),
    ("max_count", 4097),
    ("max_count", 2**31),
    ("reference_count", -1),
    ("reference_count", 4097),
    ("reference_count", 1.5),
    *(
        (name, value)
        for name in ("member_return_s", "member_lease_s")
        for value in (
            math.nan,
            math.inf,
            -1.0,
            0.0,
            0.01,
            3600.0,
            "5",
        )
    ),
]
BAD_QUORUMS: list[tuple[str, dict[str, Any]]] = [
    ("min_contributors", {"min_contributors": 5}),
    ("min_contributors", {"min_contributors": -1}),
    ("min_contributors", {"min_contributors": 1.5}),
    ("grace_s", {"min_contributors": 2, "grace_s": math.nan}),
    ("grace_s", {"min_contributors": 2, "grace_s": -0.1}),
    ("grace_s", {"min_contributors": 2, "grace_s": math.inf}),
    ("grace_s", {"min_contributors": 2, "grace_s": 3600.0}),
    ("grace_s", {"grace_s": 1.0}),
]


def spec(**fields: Any) -> ParameterSpec:
    values = {"worker_count": 4, "optimizer": SGD(learning_rate=1.0), "codec": "fp32", **fields}
    return ParameterSpec(name="p", size=8, **values)


@pytest.mark.parametrize(("name", "value"), BAD_MEMBERS)
def test_bad_members_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        Elastic(**{**GOOD, name: value})


@pytest.mark.parametrize(("name", "value"), BAD_MEMBERS)
def test_bad_members_of_the_wire_are_refused_by_name(name: str, value: Any) -> None:
    message = spec(members=Elastic(**GOOD)).to_proto()
    try:
        setattr(message.members, name, value)
    except (TypeError, ValueError):
        return  # the wire has no such value
    if getattr(message.members, name) == value and isinstance(value, bool):
        return  # nor this one
    with pytest.raises(ArgumentError, match=name):
        ParameterSpec.from_proto(message)


@pytest.mark.parametrize(("name", "fields"), BAD_QUORUMS)
@pytest.mark.parametrize("members", [None, Elastic(**GOOD)])
def test_a_bad_quorum_is_refused_by_name(name: str, fields: dict[str, Any], members: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        spec(members=members, **fields)


def test_a_quorum_is_of_steps_that_wait() -> None:
    with pytest.raises(ArgumentError, match="min_contributors"):
        spec(worker_count=0, mode="async", min_contributors=1)


def test_members_are_of_steps_that_wait() -> None:
    with pytest.raises(ArgumentError, match="sync"):
        spec(worker_count=0, mode="async", members=Elastic(**GOOD))


@pytest.mark.parametrize("members", [4, {"min_count": 1}, "elastic"])
def test_members_that_are_none_are_refused(members: Any) -> None:
    with pytest.raises(ArgumentError, match=r"shardwell\.Elastic"):
        spec(members=members)


def test_worker_count_beside_members_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"worker_count.*members=.*max_count=4"):
        spec(worker_count=3, members=Elastic(**GOOD))


def test_two_specs_that_disagree_on_members_name_them() -> None:
    one = spec(members=Elastic(**GOOD))
    other = spec(members=Elastic(**{**GOOD, "min_count": 1}))
    assert "members" in " ".join(one.differences(other))
    assert ParameterSpec.from_proto(one.to_proto()) == one
