"""Goal: workers that ask for places get them, or an error that says why; who lives keeps it.

Method: small scenarios, written from group.proto's comments, with time as an argument.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from harness.group.rendezvous_driver import LEASE_S, Room, group_spec, lost_of
from shardwell import errors
from shardwell.group.rendezvous.service import GroupService
from shardwell.group.rendezvous.validation import MeetingLimits
from shardwell.v1 import group_pb2 as pb
from shardwell.v1 import types_pb2

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
    room.restart()
    room.spec.name = "other"
    assert room.form("e", "f") < second
    room.spec.name = "job"
    room.join("c", 0, previous_generation=second)
    formed = room.join("d", 1, previous_generation=second)
    assert formed.generation > second


def test_clocks_that_jump_between_starts_order_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead, behind, and the very same millisecond."""
    numbers = []
    for now_s in (2e9, 2e9 + 25 * 3600, 1e9, 1e9, 0.0):
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        service = GroupService()
        request = Room(1).join_request("a", 0, previous_generation=max(numbers, default=0))
        for _ in range(2):
            answer = service.join_group(request, None)  # type: ignore[arg-type]
            request.checked_generation = answer.generation
        assert answer.ready
        numbers.append(answer.generation)
    assert numbers == sorted(set(numbers))
    fresh = [GroupService() for _ in range(100)]
    request = Room(1).join_request("a", 0)
    firsts = [each.join_group(request, None).generation for each in fresh]  # type: ignore[arg-type]
    assert len(set(firsts)) == 100


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
    room.join("b", 1, checked_generation=number, unreachable=missed)
    room.join("c", 2)  # it may have been under way when c died
    room.join("b", 1, checked_generation=number, unreachable=missed)
    for member_id, rank in (
        ("c", 2),
        ("b", 1),
        ("a", 0),
        ("a", 0),  # its answer was lost
    ):
        with pytest.raises(errors.WorkerUnreachableError, match=pattern) as caught:
            room.join(member_id, rank, checked_generation=number)
        assert caught.value.rank == 2
    assert room.form("a2", "b2", "c2") > number


def test_after_an_unreachable_member_one_that_has_not_checked_gets_one_error() -> None:
    room = Room(2)
    room.join("a", 0)
    number = room.join("b", 1).generation
    missed = [pb.UnreachableMember(rank=0, reason="no route")]
    room.join("b", 1, checked_generation=number, unreachable=missed)
    room.join("a", 0)
    with pytest.raises(errors.WorkerUnreachableError):
        room.join("a", 0)
    with pytest.raises(errors.WorkerUnreachableError):
        room.join("b", 1, checked_generation=number, unreachable=missed)
    assert list(room.join("a", 0).missing_ranks) == [1]


@pytest.mark.parametrize("word_count", [0, 1])
def test_one_that_refuses_after_it_has_met_is_waited_for_anew(word_count: int) -> None:
    """A member that was killed has one question under way at most."""
    room = Room(3)
    for rank, member_id in enumerate("abc"):
        number = room.join(member_id, rank).generation
    missed = {"checked_generation": number, "unreachable": [pb.UnreachableMember(rank=2)]}
    room.join("a", 0, **missed)
    for _ in range(word_count):
        room.join("c", 2)
    for _ in range(4):
        room.now_s += LEASE_S / 3
        room.join("a", 0, **missed)
        answer = room.join("b", 1, checked_generation=number)
    assert (answer.generation, list(answer.missing_ranks)) == (0, [2])
    second = room.join("c2", 2).generation
    for rank, member_id in enumerate(("a", "b", "c2")):
        answer = room.join(member_id, rank, checked_generation=second)
    assert answer.ready


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
        ({"codec": types_pb2.CODEC_FP32}, "codec 'fp16', got 'fp32'"),
        ({"allow_non_finite": True}, "allow_non_finite False, got True"),
        (
            {"size": 2, "codec": types_pb2.CODEC_BF16},
            "size 3, got 2, codec 'fp16', got 'bf16'",
        ),
    ],
)
@pytest.mark.parametrize("is_ready", [False, True], ids=["waiting", "member"])
def test_another_spec_is_refused_while_a_member_lives(
    other: dict[str, Any], difference: str, is_ready: bool
) -> None:
    room = Room(3)
    number = room.form("a", "b", "c") if is_ready else 0
    if not is_ready:
        room.join("a", 0)
    wanted = group_spec(**{"size": 3, **other})
    for _ in range(2):
        answer = room.join("x", 1, spec=wanted)
        assert list(answer.missing_ranks) == list(range(wanted.size))
        pattern = f"belongs to rank 0 .*{difference}.*; whether a member"
        assert re.search(pattern, answer.refusals[0])
        room.now_s += 0.1
        if is_ready:
            room.renew("a", 0, number)
        else:
            room.join("a", 0)
        with pytest.raises(errors.GroupMismatchError, match=difference) as caught:
            room.join("x", 1, spec=wanted)
        assert r"rank 0 (on a, at a:7000)" in str(caught.value)
        assert r"rank 1 (on x, at x:7000)" in str(caught.value)
        assert caught.value.rank == 1
    if is_ready:
        for member_id in ("a", "b", "c"):
            room.leave(member_id)
    else:
        refusals = room.join("a", 0).refusals
        assert len(refusals) == 1
        assert "on x" in refusals[0]
        room.leave("a")
    assert not number or room.meetings.group_count == 0
    assert list(room.join("x", 1, spec=wanted).missing_ranks) == [
        rank for rank in range(wanted.size) if rank != 1
    ]


@pytest.mark.parametrize("is_ready", [False, True], ids=["waiting", "member"])
@pytest.mark.parametrize("other", [{"size": 3}, {"strategy": "tree(arity=2)"}], ids=str)
def test_a_job_that_died_frees_its_name_within_a_lease(
    other: dict[str, Any], is_ready: bool
) -> None:
    """All its members; it is started again at once, with other settings."""
    room = Room(2)
    if is_ready:
        room.form("a", "b")
    else:
        room.join("a", 0)
    room.now_s += 1
    began_s = room.now_s
    wanted = group_spec(**{"size": 2, **other})
    formed = 0
    while not formed:
        assert room.now_s - began_s <= LEASE_S
        room.now_s += 0.1
        for rank in range(wanted.size):
            answer = room.join(f"x{rank}", rank, spec=wanted)
        formed = answer.generation
    room.spec = wanted
    for rank in range(wanted.size):
        ready = room.join(f"x{rank}", rank, checked_generation=formed)
    assert (ready.ready, len(ready.members)) == (True, wanted.size)


def test_attempts_now_and_then_do_not_keep_the_dead_alive() -> None:
    """A supervisor that starts the job every 6 s, and gives up soon each time."""
    room = Room(2)
    room.form("a", "b")
    wanted = group_spec(3)
    for attempt in range(3):
        room.now_s += LEASE_S + 1
        for rank in range(3):
            answer = room.join(f"x{attempt}{rank}", rank, spec=wanted)
        if answer.generation:
            break
        for rank in range(3):
            room.leave(f"x{attempt}{rank}")
    assert (attempt, len(answer.members)) == (1, 3)


def test_who_waits_for_the_name_does_not_hold_up_those_who_have_it() -> None:
    room = Room(2)
    room.join("a", 0)
    room.join("x", 0, spec=group_spec(5))
    formed = room.join("b", 1)
    assert [member.member_id for member in formed.members] == ["a", "b"]
    for rank, member_id in enumerate("ab"):
        ready = room.join(member_id, rank, checked_generation=formed.generation)
    assert ready.ready


def test_refusals_are_bounded() -> None:
    room = Room(2, limits=MeetingLimits(refusal_count_max=3))
    room.join("a", 0)
    for n in range(9):
        room.join(f"x{n}", 1, spec=group_spec(5))
        room.now_s += 0.01
        room.join("a", 0)
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


def test_after_a_silence_of_all_living_members_have_time_to_renew() -> None:
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
