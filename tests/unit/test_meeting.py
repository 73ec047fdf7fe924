"""Goal: workers that ask for places get them, or an error that says why; who lives keeps it.

Method: small scenarios, written from group.proto's comments, with time as an argument.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.meeting_room import LEASE_S, Room, group_spec
from shardwell import errors
from shardwell.group.requests import MeetingLimits
from shardwell.v1 import group_pb2 as pb
from shardwell.v1 import types_pb2


def lost_of(answer: pb.RenewLeaseResponse) -> dict[int, str]:
    return {member.rank: member.reason for member in answer.lost}


# Forming.


def test_a_generation_is_formed_checked_and_ready() -> None:
    room = Room(3)
    assert list(room.join("a", 0).missing_ranks) == [1, 2]
    waiting = room.join("b", 2)
    assert (waiting.generation, list(waiting.members), waiting.ready) == (0, [], False)
    assert list(waiting.missing_ranks) == [1]
    formed = room.join("c", 1)
    assert formed.generation >= 1000
    assert [member.member_id for member in formed.members] == ["a", "c", "b"]
    assert (formed.rank, formed.ready, list(formed.missing_ranks)) == (1, False, [0, 1, 2])
    for member_id, rank, missing in (("c", 1, [0, 2]), ("a", 0, [2])):
        checked = room.join(member_id, rank, checked_generation=formed.generation)
        assert (checked.ready, list(checked.missing_ranks)) == (False, missing)
    ready = room.join("b", 2, checked_generation=formed.generation)
    assert (ready.ready, ready.rank, ready.generation) == (True, 2, formed.generation)
    for member_id, rank in (("a", 0), ("b", 2), ("c", 1), ("a", 0)):
        again = room.join(member_id, rank, checked_generation=formed.generation)
        assert (again.ready, again.rank, again.members) == (True, rank, formed.members)


def test_a_group_of_one() -> None:
    room = Room(1)
    formed = room.join("a", 0)
    assert list(formed.missing_ranks) == [0]
    assert room.join("a", 0, checked_generation=formed.generation).ready


def test_numbers_grow_over_groups_restarts_and_what_joiners_name() -> None:
    room = Room(2)
    first = room.form("a", "b")
    for member_id in ("a", "b"):
        room.leave(member_id)
    assert room.meetings.group_count == 0
    second = room.form("c", "d")
    assert second > first
    room.restart(first_generation=1)
    room.spec.name = "other"
    assert room.form("e", "f") < second
    room.spec.name = "job"
    room.join("c", 0, previous_generation=second)
    formed = room.join("d", 1, previous_generation=second)
    assert formed.generation > second


def test_one_that_waits_and_leaves_or_dies_is_missed() -> None:
    room = Room(3)
    room.join("a", 0)
    room.join("b", 1)
    room.leave("b")
    assert list(room.join("a", 0).missing_ranks) == [1, 2]
    room.join("b2", 1)
    for _ in range(4):
        room.now_s += LEASE_S / 3
        answer = room.join("a", 0)
    assert list(answer.missing_ranks) == [1, 2]
    assert room.join("b2", 1).missing_ranks == [2]  # it only was slow


def test_one_that_dies_while_all_check_is_waited_for_anew() -> None:
    room = Room(2)
    room.join("a", 0)
    first = room.join("b", 1).generation
    for _ in range(4):
        room.now_s += LEASE_S / 3
        answer = room.join("a", 0, checked_generation=first)
    assert (answer.generation, list(answer.missing_ranks)) == (0, [1])
    second = room.join("b2", 1).generation
    assert second > first
    room.join("b2", 1, checked_generation=second)
    assert not room.join("a", 0, checked_generation=first).ready
    assert room.join("a", 0, checked_generation=second).ready


def test_one_that_leaves_while_all_check_is_waited_for_anew() -> None:
    room = Room(2)
    room.join("a", 0)
    first = room.join("b", 1).generation
    room.leave("b")
    assert room.join("a", 0, checked_generation=first).generation == 0
    assert room.join("c", 1).generation > first


def test_an_unreachable_member_fails_the_attempt_for_all() -> None:
    room = Room(3)
    for rank, member_id in enumerate("abc"):
        formed = room.join(member_id, rank)
    number = formed.generation
    room.join("a", 0, checked_generation=number)
    missed = [pb.UnreachableMember(rank=2, reason="connection refused")]
    pattern = (
        r"rank 1 \(on b, at b:7000\) can't reach rank 2 \(on c, at c:7000\): connection refused"
    )
    for member_id, rank, extra in (
        ("b", 1, {"unreachable": missed}),
        ("a", 0, {}),
        ("c", 2, {}),
        ("a", 0, {}),  # its answer was lost
    ):
        with pytest.raises(errors.WorkerUnreachableError, match=pattern) as caught:
            room.join(member_id, rank, checked_generation=number, **extra)
        assert caught.value.rank == 2
    assert room.form("a2", "b2", "c2") > number


def test_after_an_unreachable_member_who_has_not_checked_is_told_once() -> None:
    room = Room(2)
    room.join("a", 0)
    number = room.join("b", 1).generation
    missed = [pb.UnreachableMember(rank=0, reason="no route")]
    with pytest.raises(errors.WorkerUnreachableError):
        room.join("b", 1, checked_generation=number, unreachable=missed)
    with pytest.raises(errors.WorkerUnreachableError):
        room.join("a", 0)
    assert list(room.join("a", 0).missing_ranks) == [1]


def test_a_whole_job_started_again_at_once_forms_within_a_lease() -> None:
    room = Room(2)
    first = room.form("a", "b")
    room.now_s += 1
    began_s = room.now_s
    answer = room.join("a2", 0)
    assert list(answer.missing_ranks) == [0, 1]
    assert "rank 0 belongs to rank 0 (on a, at a:7000)" in answer.refusals[0]
    while not answer.generation:
        room.now_s += 0.1
        room.join("a2", 0)
        answer = room.join("b2", 1)
    assert answer.generation > first
    assert room.now_s - began_s <= LEASE_S
    with pytest.raises(errors.WorkerLostError, match="is over"):
        room.renew("a", 0, first)


# Whose rank it is.


@pytest.mark.parametrize("is_ready", [False, True], ids=["waiting", "member"])
def test_the_rank_of_one_that_lives_is_refused(is_ready: bool) -> None:
    room = Room(2)
    number = room.form("a", "b") if is_ready else 0
    room.join("a", 0)
    room.now_s += 1
    for _ in range(2):
        assert 0 in room.join("x", 0).missing_ranks
        room.now_s += 0.1
    if is_ready:
        room.renew("a", 0, number)
    else:
        assert not room.join("a", 0).refusals[1:]
    with pytest.raises(errors.RankTakenError, match=r"belongs to rank 0 \(on a, at a:70") as caught:
        room.join("x", 0)
    assert caught.value.rank == 0
    assert "rank 0 (on x, at x:7000)" in str(caught.value)
    if not is_ready:
        assert any("on x" in text for text in room.join("a", 0).refusals)


@pytest.mark.parametrize("is_ready", [False, True], ids=["waiting", "member"])
def test_the_rank_of_one_that_died_is_given_to_who_wants_it(is_ready: bool) -> None:
    room = Room(2)
    if is_ready:
        number = room.form("a", "b")
    else:
        room.join("a", 0)
    answer = room.join("x", 0)
    while 0 in answer.missing_ranks:
        room.now_s += 0.2
        if is_ready:
            lost = lost_of(room.renew("b", 1, number))
        answer = room.join("x", 0)
        assert room.now_s < 100 + LEASE_S + 0.3
    assert room.now_s >= 100 + LEASE_S
    if is_ready:
        assert lost == {0: "its lease of 5 s ended"}
        assert room.renew("b", 1, number).waiting_count == 1
        with pytest.raises(errors.WorkerLostError, match=r"rank 0 \(on a, .*lease of 5 s ended"):
            room.renew("a", 0, number)
        with pytest.raises(errors.WorkerLostError, match="declared lost"):
            room.join("a", 0)
        assert room.join("b", 1, previous_generation=number).generation > number
    else:
        assert room.join("b", 1).generation


def test_the_earliest_of_those_who_want_a_dead_ones_rank_gets_it() -> None:
    room = Room(2)
    room.join("a", 0)
    for member_id in ("x", "y"):
        room.now_s += 0.1
        room.join(member_id, 0)
    while 0 in room.join("x", 0).missing_ranks:
        assert 0 in room.join("y", 0).missing_ranks
        room.now_s += 0.2
    with pytest.raises(errors.RankTakenError, match="on x"):
        room.join("y", 0)
    assert list(room.join("x", 0).missing_ranks) == [1]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"size": 4}, "size 3, got 4"),
        ({"strategy": "tree(arity=2)"}, r"strategy 'ring', got 'tree\(arity=2\)'"),
        ({"codec": types_pb2.CODEC_FP32}, "codec CODEC_FP16, got CODEC_FP32"),
        (
            {"size": 2, "codec": types_pb2.CODEC_BF16},
            "size 3, got 2, codec CODEC_FP16, got CODEC_B",
        ),
    ],
)
@pytest.mark.parametrize("is_ready", [False, True], ids=["waiting", "member"])
def test_another_spec_is_refused_while_somebody_is_there(
    other: dict[str, Any], difference: str, is_ready: bool
) -> None:
    room = Room(3)
    number = room.form("a", "b", "c") if is_ready else 0
    if not is_ready:
        room.join("a", 0)
    wanted = group_spec(**{"size": 3, **other})
    for _ in range(2):
        with pytest.raises(errors.GroupMismatchError, match=difference) as caught:
            room.join("x", 1, spec=wanted)
        assert r"rank 0 (on a, at a:7000)" in str(caught.value)
        assert r"rank 1 (on x, at x:7000)" in str(caught.value)
    if is_ready:
        for member_id in ("a", "b", "c"):
            room.leave(member_id)
    else:
        refusals = room.join("a", 0).refusals
        assert len(refusals) == 1
        assert "on x" in refusals[0]
        room.leave("a")
    assert not number or room.meetings.group_count == 0
    assert 0 in room.join("x", 1, spec=wanted).missing_ranks


def test_refusals_are_bounded() -> None:
    room = Room(2, limits=MeetingLimits(refusal_count_max=3))
    room.join("a", 0)
    for n in range(9):
        with pytest.raises(errors.GroupMismatchError):
            room.join(f"x{n}", 1, spec=group_spec(5))
    refusals = room.join("a", 0).refusals
    assert [f"on x{n}" in refusals[n - 6] for n in (6, 7, 8)] == [True] * 3
    assert len(refusals) == 3


# Leases.


def test_who_renews_lives_and_who_does_not_is_lost_for_good() -> None:
    room = Room(3)
    number = room.form("a", "b", "c")
    room.pass_time(3 * LEASE_S, number, ("a", 0), ("c", 2))
    assert lost_of(room.renew("a", 0, number)) == {1: "its lease of 5 s ended"}
    assert lost_of(room.renew("c", 2, number)) == {1: "its lease of 5 s ended"}
    for _ in range(2):
        with pytest.raises(errors.WorkerLostError, match="lease of 5 s ended") as caught:
            room.renew("b", 1, number)
        assert caught.value.rank == 1


def test_one_that_leaves_is_lost_to_the_others() -> None:
    room = Room(3)
    number = room.form("a", "b", "c")
    room.leave("b")
    room.leave("b")
    assert lost_of(room.renew("a", 0, number)) == {1: "it left the group"}
    room.leave("a")
    assert set(lost_of(room.renew("c", 2, number))) == {0, 1}
    room.leave("c")
    assert room.meetings.group_count == 0
    room.leave("c")


def test_when_nobody_was_heard_of_who_lives_has_the_time_to_say_so() -> None:
    """The server, or the way to it, was away: not all can have died at once."""
    room = Room(3)
    number = room.form("a", "b", "c")
    room.now_s += 50 * LEASE_S
    assert lost_of(room.renew("a", 0, number)) == {}
    room.now_s += LEASE_S / 4
    room.renew("b", 1, number)
    room.now_s += LEASE_S / 4
    room.renew("b", 1, number)
    assert lost_of(room.renew("a", 0, number)) == {2: "its lease of 5 s ended"}


# Rebuilding.


def test_a_rebuild_waits_for_all_who_live_and_for_replacements() -> None:
    room = Room(4)
    number = room.form("a", "b", "c", "d")
    room.leave("b")
    fields = {"previous_generation": number, "replacement_wait_ms": 2000}
    assert list(room.join("a", 0, **fields).missing_ranks) == [1, 2, 3]
    room.join("c", 2, **{**fields, "replacement_wait_ms": 0})
    room.now_s += 3
    assert list(room.join("c", 2, **{**fields, "replacement_wait_ms": 0}).missing_ranks) == [1, 3]
    room.join("a", 0, **fields)
    formed = room.join("d", 3, **fields)
    assert [member.member_id for member in formed.members] == ["a", "c", "d"]
    assert (formed.rank, formed.generation > number) == (2, True)
    for member_id, rank in (("a", 0), ("d", 3)):
        room.join(member_id, rank, **fields, checked_generation=formed.generation)
    fields["replacement_wait_ms"] = 0
    ready = room.join("c", 2, **fields, checked_generation=formed.generation)
    assert (ready.ready, ready.rank) == (True, 1)
    with pytest.raises(errors.WorkerLostError, match="succeeded by generation"):
        room.renew("b", 1, number, member_count=4)
    assert not room.renew("d", 2, ready.generation, member_count=3).lost


def test_a_rebuild_does_not_wait_for_replacements_beyond_what_it_was_asked() -> None:
    room = Room(3)
    number = room.form("a", "b", "c")
    room.leave("c")
    fields = {"previous_generation": number, "replacement_wait_ms": 2000}
    room.join("a", 0, **fields)
    room.join("b", 1, **fields)
    room.now_s += 1.9
    assert list(room.join("a", 0, **fields).missing_ranks) == [2]
    room.now_s += 0.1
    assert len(room.join("a", 0, **fields).members) == 2


def test_a_replacement_takes_the_lost_rank() -> None:
    room = Room(3)
    number = room.form("a", "b", "c")
    room.leave("b")
    assert list(room.join("b2", 1).missing_ranks) == [0, 2]
    assert room.renew("a", 0, number).waiting_count == 1
    fields = {"previous_generation": number, "replacement_wait_ms": 60_000}
    room.join("a", 0, **fields)
    formed = room.join("c", 2, **fields)
    assert [member.member_id for member in formed.members] == ["a", "b2", "c"]


def test_ranks_that_survivors_know_to_be_lost_are_not_waited_for() -> None:
    room = Room(3)
    number = room.form("a", "b", "c")
    room.join("a", 0, previous_generation=number, lost_ranks=[1])
    assert set(lost_of(room.renew("c", 2, number))) == {1}
    assert "on a" in lost_of(room.renew("c", 2, number))[1]
    with pytest.raises(errors.WorkerLostError, match="found it lost"):
        room.renew("b", 1, number)
    formed = room.join("c", 2, previous_generation=number, lost_ranks=[1])
    assert [member.member_id for member in formed.members] == ["a", "c"]


def test_one_that_is_said_to_be_lost_may_come_back() -> None:
    """Two members that can't reach each other any more each say that the other is lost."""
    room = Room(3)
    number = room.form("a", "b", "c")
    fields = {"previous_generation": number, "replacement_wait_ms": 1000}
    room.join("a", 0, lost_ranks=[1], **fields)
    room.join("b", 1, lost_ranks=[0], **fields)
    formed = room.join("c", 2, **fields)
    assert [member.member_id for member in formed.members] == ["a", "b", "c"]


def test_rebuilding_without_a_loss_ends_the_generation_for_all() -> None:
    room = Room(2)
    number = room.form("a", "b")
    room.join("b", 1, previous_generation=number)
    assert lost_of(room.renew("a", 0, number)) == {1: "it asked to rebuild the group"}
    assert room.join("a", 0, previous_generation=number, lost_ranks=[1]).generation > number


def test_all_members_lost_may_still_come_back() -> None:
    room = Room(3)
    number = room.form("a", "b", "c")
    for _ in range(3):
        room.now_s += LEASE_S / 2
        room.join("x", 0)
    fields = {"previous_generation": number, "replacement_wait_ms": 1000}
    assert list(room.join("b", 1, **fields).missing_ranks) == [2]
    room.leave("x")
    assert list(room.join("b", 1, **fields).missing_ranks) == [0, 2]
    room.now_s += 1
    formed = room.join("b", 1, **fields)
    assert [member.member_id for member in formed.members] == ["b"]


def test_one_that_was_succeeded_wants_its_rank_back() -> None:
    room = Room(2)
    first = room.form("a", "b")
    room.join("a", 0, previous_generation=first, lost_ranks=[1])
    second = room.join("a", 0, previous_generation=first).generation
    assert room.join("a", 0, previous_generation=first, checked_generation=second).ready
    assert list(room.join("b", 1, previous_generation=first).missing_ranks) == [0]
    assert room.renew("a", 0, second, member_count=1).waiting_count == 1
    assert room.join("a", 0, previous_generation=second).members[1].member_id == "b"


def test_who_replaces_a_worker_after_ranks_closed_up_gets_a_free_one() -> None:
    room = Room(3)
    first = room.form("a", "b", "c")
    room.leave("a")
    for _ in range(2):
        room.join("b", 1, previous_generation=first)
        second = room.join("c", 2, previous_generation=first).generation
    for member_id, rank in (("b", 1), ("c", 2)):
        room.join(member_id, rank, previous_generation=first, checked_generation=second)
    room.join("a2", 0)
    room.now_s += 0.1
    room.renew("b", 0, second, member_count=2)
    assert not room.join("a2", 0).members  # rank 0 lives, but was another's when "a" was there
    assert room.renew("c", 1, second, member_count=2).waiting_count == 1
    room.join("b", 0, previous_generation=second)
    third = room.join("c", 1, previous_generation=second)
    assert [member.member_id for member in third.members] == ["b", "c", "a2"]
    room.join("late", 1)
    room.now_s += 0.1
    room.join("c", 1, previous_generation=second)
    with pytest.raises(errors.RankTakenError, match="ranks that are free: none"):
        room.join("late", 1)


def test_a_rebuild_whose_attempt_fails_can_be_repeated() -> None:
    room = Room(3)
    first = room.form("a", "b", "c")
    room.leave("c")
    fields = {"previous_generation": first}
    room.join("a", 0, **fields)
    second = room.join("b", 1, **fields).generation
    missed = [pb.UnreachableMember(rank=0, reason="no route")]
    with pytest.raises(errors.WorkerUnreachableError):
        room.join("b", 1, **fields, checked_generation=second, unreachable=missed)
    with pytest.raises(errors.WorkerUnreachableError):
        room.join("a", 0, **fields)
    room.join("a", 0, **fields)
    third = room.join("b", 1, **fields).generation
    assert third > second


# A server that was started anew.


def test_a_generation_is_taken_over_from_its_renewals() -> None:
    room = Room(3)
    number = room.form("a", "b", "c")
    room.restart()
    assert not room.renew("c", 2, number).lost
    assert list(room.join("x", 1).missing_ranks) == [0, 1, 2]
    room.now_s += 1
    assert not room.renew("b", 1, number).lost
    with pytest.raises(errors.RankTakenError, match=r"rank 1 \(on b"):
        room.join("x", 1)
    room.pass_time(LEASE_S, number, ("b", 1), ("c", 2))
    assert lost_of(room.renew("b", 1, number)) == {0: "its lease of 5 s ended"}
    with pytest.raises(errors.WorkerLostError):
        room.renew("a", 0, number)
    room.join("b", 1, previous_generation=number)
    assert room.join("c", 2, previous_generation=number).generation >= 5000


def test_a_generation_is_taken_over_from_a_rebuild() -> None:
    room = Room(3)
    number = room.form("a", "b", "c")
    room.restart()
    assert list(room.join("a", 0, previous_generation=number, lost_ranks=[2]).missing_ranks) == [
        1,
        2,
    ]
    formed = room.join("b", 1, previous_generation=number)
    assert [member.member_id for member in formed.members] == ["a", "b"]


def test_a_rebuild_waits_for_as_many_as_there_were() -> None:
    room = Room(3)
    room.restart()
    fields = {"previous_generation": 77, "previous_member_count": 2}
    room.join("a", 0, **fields)
    formed = room.join("b", 1, **fields)
    assert (formed.generation, len(formed.members)) == (5000, 2)


def test_a_generation_that_lives_stops_one_that_forms() -> None:
    room = Room(2)
    number = room.form("a", "b")
    room.restart()
    room.join("x", 0)
    forming = room.join("y", 1).generation
    room.renew("a", 0, number)
    answer = room.join("y", 1, checked_generation=forming)
    assert (answer.generation, list(answer.missing_ranks)) == (0, [0, 1])
    room.now_s += 0.1
    room.renew("a", 0, number)
    with pytest.raises(errors.RankTakenError):
        room.join("x", 0)


def test_a_generation_of_another_spec_that_lives_refuses_who_waits() -> None:
    room = Room(2)
    number = room.form("a", "b")
    room.restart()
    room.join("x", 0, spec=group_spec(4))
    room.renew("a", 0, number)
    with pytest.raises(errors.GroupMismatchError, match="size 2, got 4"):
        room.join("x", 0, spec=group_spec(4))


def test_who_was_not_told_that_its_generation_is_ready_keeps_its_place() -> None:
    room = Room(3)
    for rank, member_id in enumerate("abc"):
        formed = room.join(member_id, rank)
    number = formed.generation
    for rank, member_id in enumerate("abc"):
        ready = room.join(member_id, rank, checked_generation=number)
    assert ready.ready
    room.restart()
    assert not room.join("a", 0, checked_generation=number).ready
    room.renew("c", 2, number)
    assert list(room.join("a", 0, checked_generation=number).missing_ranks) == [1]
    answer = room.join("b", 1, checked_generation=number)
    assert (answer.ready, answer.rank, answer.members) == (True, 1, formed.members)
    assert room.join("a", 0, checked_generation=number).ready
    assert not room.renew("c", 2, number).lost


def test_an_older_generation_does_not_come_back() -> None:
    room = Room(1)
    first = room.form("a")
    room.join("a", 0, previous_generation=first)
    second = room.join("a", 0, previous_generation=first).generation
    room.join("a", 0, previous_generation=first, checked_generation=second)
    room.restart()
    room.renew("a", 0, second)
    with pytest.raises(errors.WorkerLostError, match=f"succeeded by generation {second}"):
        room.renew("a", 0, first)
    with pytest.raises(errors.ArgumentError, match="is none of them"):
        room.renew("z", 0, second)


def test_a_generation_formed_here_is_not_overthrown() -> None:
    room = Room(1)
    number = room.form("a")
    with pytest.raises(errors.WorkerLostError, match="is not known"):
        room.renew("z", 0, number + 50)
    room.join("z", 0, previous_generation=number + 50)
    assert not room.renew("a", 0, number).lost
