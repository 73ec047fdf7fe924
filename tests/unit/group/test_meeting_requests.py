"""Goal: a rendezvous has limits, and believes nothing that group.proto does not allow."""

from __future__ import annotations

from typing import Any

import pytest

from harness.group.rendezvous_driver import LEASE_S, Room, group_spec
from shardwell import errors
from shardwell.group.rendezvous.registry import Meetings, Owner
from shardwell.group.rendezvous.validation import MeetingLimits
from shardwell.v1 import group_pb2 as pb


def test_group_count_max() -> None:
    room = Room(2, limits=MeetingLimits(group_count_max=2))
    for name in ("one", "two"):
        room.join("a", 0, spec=group_spec(2, name=name))
    with pytest.raises(errors.LimitError, match=r"group_count_max=2.*'three'"):
        room.join("a", 0, spec=group_spec(2, name="three"))
    with pytest.raises(errors.LimitError, match="group_count_max=2"):
        room.renew("a", 0, 5, spec=group_spec(2, name="three"))
    room.now_s += 2 * LEASE_S + 1
    room.join("a", 0, spec=group_spec(2, name="three"))
    assert room.meetings.group_count == 1


def test_applicant_count_max() -> None:
    room = Room(3, limits=MeetingLimits(applicant_count_max=2))
    room.join("a", 0)
    room.join("b", 1)
    with pytest.raises(errors.LimitError, match="applicant_count_max=2"):
        room.join("c", 2)
    room.join("a", 0)


CI, OTHER = Owner("ci", 2), Owner("other", 1)


def test_a_token_s_members() -> None:
    """Of all groups together; those that died make room when their leases end."""
    room = Room(2)
    for life in range(3):
        room.meetings.join(room.join_request(f"a{life}", 0), room.now_s, CI)
        room.meetings.join(room.join_request(f"b{life}", 1), room.now_s, CI)
        room.meetings.join(room.join_request(f"a{life}", 0), room.now_s, CI)
        with pytest.raises(errors.LimitError, match=r"token 'ci' is at its limit members=2"):
            room.meetings.join(
                room.join_request("c", 0, spec=group_spec(1, name="h")), room.now_s, CI
            )
        other = room.join_request(f"o{life}", 0, spec=group_spec(1, name="h"))
        room.meetings.join(other, room.now_s, OTHER)
        room.now_s += 2 * LEASE_S + 1  # all were killed


def test_a_token_s_members_of_a_generation_that_died() -> None:
    room = Room(2)
    room.meetings.join(room.join_request("a", 0), room.now_s, CI)
    room.meetings.join(room.join_request("b", 1), room.now_s, CI)
    room.form("a", "b")
    room.now_s += 2 * LEASE_S + 1
    room.meetings.join(room.join_request("c", 0), room.now_s, CI)
    room.meetings.join(room.join_request("d", 1), room.now_s, CI)
    with pytest.raises(errors.LimitError, match="members=2"):
        room.meetings.join(room.join_request("e", 1), room.now_s, CI)


def test_group_size_max() -> None:
    room = Room(limits=MeetingLimits(group_size_max=4))
    with pytest.raises(errors.LimitError, match="group_size_max=4"):
        room.join("a", 0, spec=group_spec(5))


SPECS = {
    "name": group_spec(name="../x"),
    "size": group_spec(0),
    "strategy": group_spec(strategy=""),
    "strategy ": group_spec(strategy="Ring"),
    "strategy  ": group_spec(strategy="r" * 65),
    "codec": group_spec(codec=0),
    "codec ": group_spec(codec=99),
}
MEMBERS = {
    "member_id": pb.Member(address="h:1"),
    "member_id ": pb.Member(member_id="a/b", address="h:1"),
    "member_id  ": pb.Member(member_id="a" * 65, address="h:1"),
    "address": pb.Member(member_id="a", address="h"),
    "address ": pb.Member(member_id="a", address="h:99999"),
    "address  ": pb.Member(member_id="a", address="h" * 400 + ":1"),
    "description": pb.Member(member_id="a", address="h:1", description="x" * 201),
    "description ": pb.Member(member_id="a", address="h:1", description="a\nb"),
}
JOINS: list[tuple[str, dict[str, Any]]] = [
    *((what, {"spec": spec}) for what, spec in SPECS.items()),
    *((what, {"member": member}) for what, member in MEMBERS.items()),
    ("rank", {"rank": 3}),
    ("lease_ms", {"lease_ms": 99}),
    ("lease_ms", {"lease_ms": 600_001}),
    ("previous_generation", {"previous_generation": 2**63}),
    ("checked_generation", {"checked_generation": 2**64 - 1}),
    ("replacement_wait_ms", {"replacement_wait_ms": 2**32 - 1}),
    ("lost_ranks", {"previous_generation": 1, "lost_ranks": [3]}),
    ("lost_ranks", {"lost_ranks": [0] * 4}),
    ("previous_member_count", {"previous_member_count": 4}),
    ("rank", {"previous_generation": 1, "previous_member_count": 2, "rank": 2}),
    ("unreachable", {"unreachable": [pb.UnreachableMember()] * 4}),
    ("unreachable", {"unreachable": [pb.UnreachableMember(rank=3)]}),
    ("unreachable", {"unreachable": [pb.UnreachableMember(reason="x" * 2001)]}),
]
RENEWALS: list[tuple[str, dict[str, Any]]] = [
    *((what, {"spec": spec}) for what, spec in SPECS.items()),
    *((what, {"member": member}) for what, member in MEMBERS.items()),
    ("generation", {"generation": 0}),
    ("generation", {"generation": 2**64 - 1}),
    ("member_count", {"member_count": 0}),
    ("member_count", {"member_count": 4}),
    ("rank", {"rank": 2, "member_count": 2}),
    ("lease_ms", {"lease_ms": 0}),
]


@pytest.mark.parametrize(("what", "fields"), JOINS)
def test_joins_that_are_not_believed(what: str, fields: dict[str, Any]) -> None:
    room = Room(3)
    with pytest.raises(errors.ArgumentError, match=what.strip()):
        room.join("a", **{"rank": 0, **fields})
    assert room.meetings.group_count == 0


@pytest.mark.parametrize(("what", "fields"), RENEWALS)
def test_renewals_that_are_not_believed(what: str, fields: dict[str, Any]) -> None:
    room = Room(3)
    with pytest.raises(errors.ArgumentError, match=what.strip()):
        room.renew("a", **{"rank": 0, "generation": 7, **fields})
    assert room.meetings.group_count == 0


def test_leaving_that_is_not_believed() -> None:
    for fields in ({"group": "", "member_id": "a"}, {"group": "g", "member_id": "a" * 65}):
        with pytest.raises(errors.ArgumentError):
            Meetings().leave(pb.LeaveGroupRequest(**fields), 0.0)


def test_numbers_that_others_name_leave_room_for_larger_ones() -> None:
    room = Room(1)
    room.join("a", 0, previous_generation=2**62)
    number = room.join("a", 0, previous_generation=2**62).generation
    assert number > 2**62
    assert room.join("a", 0, previous_generation=2**62, checked_generation=number).ready
    assert not room.renew("a", 0, number).lost


def test_errors_fit_into_what_grpc_carries() -> None:
    """Its headers are bounded by 8 KiB, and it writes each byte that is not ASCII as three."""
    room = Room(2)
    members = [
        pb.Member(member_id=name, address=f"{'h' * 290}:1", description="\N{SNOWMAN}" * 200)
        for name in "ab"
    ]
    for _ in range(2):
        for rank, member in enumerate(members):
            formed = room.join("", rank, member=member)
    missed = [pb.UnreachableMember(rank=1, reason="\N{SNOWMAN}" * 2000)]
    room.join("", 0, member=members[0], checked_generation=formed.generation, unreachable=missed)
    room.join("", 1, member=members[1])
    with pytest.raises(errors.WorkerUnreachableError) as caught:
        room.join("", 1, member=members[1])
    assert 3 * len(str(caught.value).encode()) < 7000
