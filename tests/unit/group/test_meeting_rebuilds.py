"""Goal: members of a generation that lost some get the next; a new server takes over what lives.

Method: small scenarios, written from group.proto's comments, with time as an argument.
"""

from __future__ import annotations

import pytest

from harness.group.rendezvous_driver import LEASE_S, Room, group_spec, lost_of
from shardwell import errors
from shardwell.v1 import group_pb2 as pb

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


def test_a_rebuild_waits_for_as_many_replacements_as_it_was_asked() -> None:
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


JOIN_AGAIN = "close the group, and join it again"


def test_one_whose_lease_ended_is_to_join_again() -> None:
    """While the others have not rebuilt, while they do, and when they have."""
    room = Room(3)
    first = room.form("a", "b", "c")
    room.pass_time(2 * LEASE_S, first, ("a", 0), ("c", 2))
    fields = {"previous_generation": first}

    def is_refused() -> None:
        with pytest.raises(errors.WorkerLostError, match=JOIN_AGAIN) as caught:
            room.join("b", 1, **fields)
        assert caught.value.rank == 1
        with pytest.raises(errors.WorkerLostError, match=JOIN_AGAIN):
            room.renew("b", 1, first)

    is_refused()
    assert [(one.rank, one.expired) for one in room.renew("a", 0, first).lost] == [(1, True)]
    room.join("a", 0, **fields)
    is_refused()
    second = room.join("c", 2, **fields).generation
    is_refused()
    for member_id, rank in (("a", 0), ("c", 2)):
        ready = room.join(member_id, rank, **fields, checked_generation=second)
    assert [member.member_id for member in ready.members] == ["a", "c"]
    is_refused()
    assert room.join("b2", 1).missing_ranks  # which it does with another member_id
    assert room.renew("a", 0, second, member_count=2).waiting_count == 0  # rank 1 lives
    room.now_s += 0.1
    room.renew("c", 1, second, member_count=2)
    assert room.renew("a", 0, second, member_count=2).waiting_count == 1


@pytest.mark.parametrize("others", ["left", "died", "another job"])
def test_one_whose_group_is_over_is_not_alone_in_a_new_one(others: str) -> None:
    """It stood still; the others finished or died meanwhile, and none of them is known here."""
    room = Room(3)
    first = room.form("a", "b", "c")
    room.pass_time(2 * LEASE_S, first, ("a", 0), ("c", 2))
    for member_id in ("a", "c"):
        if others == "left":
            room.leave(member_id)
    if others != "left":
        for _ in range(3):
            room.now_s += LEASE_S / 2
            room.join("x", 0, spec=group_spec(1) if others == "another job" else room.spec)
    if others == "died":
        room.leave("x")
    assert (others == "another job") == bool(room.meetings.group_count)
    for _ in range(3):
        with pytest.raises(errors.WorkerLostError, match=JOIN_AGAIN):
            room.join("b", 1, previous_generation=first, replacement_wait_ms=0)
        with pytest.raises(errors.WorkerLostError, match=JOIN_AGAIN):
            room.renew("b", 1, first)
        room.now_s += 1


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
    room.join("b", 1, **fields, checked_generation=second, unreachable=missed)
    room.join("a", 0, **fields)
    with pytest.raises(errors.WorkerUnreachableError):
        room.join("a", 0, **fields)
    with pytest.raises(errors.WorkerUnreachableError):
        room.join("b", 1, **fields, checked_generation=second, unreachable=missed)
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
    assert room.join("c", 2, previous_generation=number).generation > number


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
    assert (formed.generation > 77, len(formed.members)) == (True, 2)


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
    room.now_s += 0.1
    room.renew("a", 0, number)
    with pytest.raises(errors.GroupMismatchError, match="size 2, got 4"):
        room.join("x", 0, spec=group_spec(4))


def test_a_member_that_missed_the_ready_answer_keeps_its_rank() -> None:
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


LIVES = [(1, 2, 3), (3, 2, 1), (2, 3, 1), (2**32 - 1, 0, 5)]
"""Incarnations of three lives of a server, one after another."""


@pytest.mark.parametrize("lives", LIVES)
def test_no_two_lives_give_one_number(lives: tuple[int, ...]) -> None:
    numbers = set()
    for life in lives:
        room = Room(1, incarnation=life)
        for member_id in "abc":
            numbers.add(room.form(member_id))
            room.leave(member_id)
    assert len(numbers) == 9


@pytest.mark.parametrize("lives", LIVES)
@pytest.mark.parametrize("earlier_count", [1, 5])
@pytest.mark.parametrize("asks", ["renew", "join"])
def test_the_older_of_two_lives_ends_no_member(
    lives: tuple[int, ...], earlier_count: int, asks: str
) -> None:
    """Neither life knew the other, so the older one's number may be the larger.

    A member that stood still all through the second life is the first that the third one hears.
    """
    room = Room(3, incarnation=lives[0])
    for _ in range(earlier_count):
        old = room.form("a", "b", "c")
        for member_id in "abc"[: 3 if old >> 32 < earlier_count else 0]:
            room.leave(member_id)
    room.restart(lives[1])
    new = room.form("d", "e", "f")
    with pytest.raises(errors.WorkerLostError):
        room.renew("a", 0, old)
    room.restart(lives[2])

    def ask_late() -> None:
        if asks == "renew":
            room.renew("a", 0, old)
        else:
            room.join("a", 0, previous_generation=old)

    ask_late()
    for _ in range(8):
        room.now_s += LEASE_S / 4
        for rank, member_id in enumerate("def"):
            assert not room.renew(member_id, rank, new).lost
        with pytest.raises(errors.WorkerLostError):
            ask_late()
    for rank, member_id in enumerate("def"):
        answer = room.join(member_id, rank, previous_generation=new)
    assert answer.generation > new


@pytest.mark.parametrize("lives", LIVES)
def test_a_life_that_heard_of_another_goes_on_counting(lives: tuple[int, ...]) -> None:
    room = Room(1, incarnation=lives[0])
    number = room.form("a")
    for life in lives[1:]:
        room.restart(life)
        room.join("a", 0, previous_generation=number)
        following = room.join("a", 0, previous_generation=number).generation
        room.join("a", 0, previous_generation=number, checked_generation=following)
        with pytest.raises(errors.WorkerLostError):
            room.renew("b", 0, number)
        assert following > number
        number = following


def test_a_generation_formed_here_is_not_overthrown() -> None:
    room = Room(1)
    number = room.form("a")
    with pytest.raises(errors.WorkerLostError, match="is not known"):
        room.renew("z", 0, number + 50)
    with pytest.raises(errors.WorkerLostError, match="is not known"):
        room.join("z", 0, previous_generation=number + 50)
    assert not room.renew("a", 0, number).lost
