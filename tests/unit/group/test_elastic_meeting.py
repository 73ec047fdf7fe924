"""Goal: where an elastic group meets, workers come and go, and members keep their order.

Method: small scenarios, written from group.proto's comments, with time as an argument. A state
machine of elastic groups: test_meeting_machine.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.group.rendezvous_driver import LEASE_S, Room, group_spec
from shardwell import errors
from shardwell.v1 import group_pb2 as pb


def elastic_room(size: int = 4, min_size: int = 1) -> Room:
    room = Room(size)
    room.spec = group_spec(size, min_size=min_size)
    return room


def ids_of(answer: pb.JoinGroupResponse) -> list[str]:
    return [member.member_id for member in answer.members]


def begun(room: Room, *member_ids: str) -> int:
    """A generation of these, which wished for the ranks of their order; its number."""
    for member_id in member_ids:
        room.join(member_id, 0)
    room.now_s += LEASE_S - 0.1
    for rank, member_id in enumerate(member_ids):
        room.join(member_id, rank)
    room.now_s += 0.2
    return checked(room, {member_id: {} for member_id in member_ids})


def checked(room: Room, fields: dict[str, dict[str, Any]], rank: int = 0) -> int:
    """All these reach one another; the number of their generation."""
    for member_id, each in fields.items():
        answer = room.join(member_id, each.pop("rank", rank), **each)
    for member_id, each in fields.items():
        done = room.join(
            member_id, each.pop("rank", rank), **each, checked_generation=answer.generation
        )
    assert done.ready, done
    return done.generation


def test_it_begins_when_all_places_are_taken() -> None:
    room = elastic_room(2)
    assert not room.join("a", 0).members
    assert ids_of(room.join("b", 0)) == ["a", "b"], "the second has the rank that is free"


@pytest.mark.parametrize("min_size", [1, 2, 3])
def test_it_begins_with_min_size_when_a_lease_has_passed(min_size: int) -> None:
    room = elastic_room(4, min_size)
    room.join("a", 0)
    room.now_s += LEASE_S - 1
    room.join("a", 0)
    assert not room.join("b", 1).members
    room.now_s += 1
    answer = room.join("a", 0)
    assert ids_of(answer) == (["a", "b"] if min_size < 3 else [])
    if min_size == 3:
        assert list(answer.missing_ranks) == [2]
        assert "2 of at least 3 workers (min_size) are here: rank 0 (on a" in answer.refusals[0]


def test_members_keep_their_order_and_newcomers_come_behind() -> None:
    room = elastic_room()
    number = begun(room, "a", "b", "c")
    room.leave("a")
    assert not room.join("new", 0).members
    assert room.renew("b", 1, number, member_count=3).waiting_count == 1
    back = {"previous_generation": number, "previous_member_count": 3}
    room.join("c", 2, **back)
    assert ids_of(room.join("b", 1, **back)) == ["b", "c", "new"]


def test_newcomers_stay_out_where_one_member_says_so() -> None:
    room = elastic_room(4, 3)
    number = begun(room, "a", "b", "c")
    room.leave("c")
    room.join("new", 0)
    back = {"previous_generation": number, "previous_member_count": 3}
    room.join("a", 0, **back, without_newcomers=True)
    assert ids_of(room.join("b", 1, **back)) == ["a", "b"], "with fewer than min_size"
    note = room.join("new", 0).refusals[0]
    assert "formed without this worker" in note or "let this worker in at their next call" in note


def test_fewer_than_min_size_wait_for_newcomers() -> None:
    room = elastic_room(4, 3)
    number = begun(room, "a", "b", "c")
    room.leave("c")
    back = {"previous_generation": number, "previous_member_count": 3}
    room.join("a", 0, **back)
    answer = room.join("b", 1, **back)
    assert not answer.members
    assert "2 of at least 3 workers (min_size) are here" in answer.refusals[0]
    room.join("new", 0)
    assert ids_of(room.join("a", 0, **back)) == ["a", "b", "new"]


def test_a_spare_waits_for_a_rank_and_no_member_regroups_for_it() -> None:
    room = elastic_room(2)
    number = begun(room, "a", "b")
    answer = room.join("spare", 1)
    assert "all 2 places are taken" in answer.refusals[0]
    room.now_s += 1
    assert room.renew("a", 0, number, member_count=2).waiting_count == 0
    assert "all 2 places are taken" in room.join("spare", 1).refusals[0], "it is not refused"
    room.leave("b")
    assert room.renew("a", 0, number, member_count=2).waiting_count == 1
    back = {"previous_generation": number, "previous_member_count": 2}
    assert ids_of(room.join("a", 0, **back)) == ["a", "spare"]


def test_members_do_not_wait_for_the_lease_of_a_newcomer_that_died() -> None:
    room = elastic_room()
    number = begun(room, "a", "b")
    room.join("dead", 0)
    back = {"previous_generation": number, "previous_member_count": 2}
    room.join("a", 0, **back)
    formed = room.join("b", 1, **back)
    assert ids_of(formed) == ["a", "b", "dead"]
    missed = [pb.UnreachableMember(rank=2, reason="nobody listens")]
    again = room.join("a", 0, **back, checked_generation=formed.generation, unreachable=missed)
    assert ids_of(again) == ["a", "b"]
    with pytest.raises(errors.WorkerUnreachableError, match="nobody listens"):
        room.join("dead", 0)


def test_a_newcomer_that_does_not_reach_a_member_is_refused_alone() -> None:
    room = elastic_room()
    number = begun(room, "a", "b")
    room.join("new", 0)
    back = {"previous_generation": number, "previous_member_count": 2}
    room.join("a", 0, **back)
    formed = room.join("b", 1, **back)
    missed = [pb.UnreachableMember(rank=1, reason="no way")]
    room.join("new", 0, checked_generation=formed.generation, unreachable=missed)
    for _ in range(3):
        answer = room.join("b", 1, **back)
        room.join("a", 0, **back)
    assert ids_of(answer) == ["a", "b"]
    with pytest.raises(errors.WorkerUnreachableError, match="no way"):
        room.join("new", 0)


def test_a_newcomer_does_not_begin_a_group_that_still_lives() -> None:
    room = elastic_room()
    number = begun(room, "a", "b")
    room.restart()
    room.join("new", 0)
    room.now_s += LEASE_S - 0.5
    assert not room.join("new", 0).members
    assert room.renew("a", 0, number, member_count=2).waiting_count == 1
    room.now_s += LEASE_S / 2
    assert not room.join("new", 0).members


def test_settings_differ_in_min_size() -> None:
    room = elastic_room(4, 2)
    number = begun(room, "a", "b")
    room.join("x", 0, spec=group_spec(4))
    room.now_s += 1
    room.renew("a", 0, number, member_count=2)
    with pytest.raises(errors.GroupMismatchError, match="min_size 2, got 0"):
        room.join("x", 0, spec=group_spec(4))
    with pytest.raises(errors.ArgumentError, match="min_size must be 0 to 4; got 5"):
        room.join("x", 0, spec=group_spec(4, min_size=5))
