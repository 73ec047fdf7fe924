"""Workers that meet: those that wait learn who is missing, and who is refused and why."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest

import shardwell
from harness.group.ranks import error_of, joined, on_ranks
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.threads import in_background


@pytest.fixture
def place(cluster) -> str:
    """Where groups meet."""
    return str(cluster(1).target)


def refused(place: str, rank: int, size: int, **options: Any) -> shardwell.ShardwellError:
    return error_of(lambda: joined(place, rank, size, **options).close())


def test_who_is_missing(place) -> None:
    watch = Stopwatch()
    waiting = [
        in_background(lambda rank=rank: refused(place, rank, 4, join_timeout_s=BRIEF_S))
        for rank in (0, 2)
    ]
    for future in waiting:
        error = future.result(PATIENCE_S)
        assert isinstance(error, shardwell.WorkersMissingError)
        assert {1, 3} <= set(error.missing_ranks) <= {0, 1, 2, 3}
        assert f"did not come within {BRIEF_S:g} s" in error.message
    assert watch.elapsed_s < PATIENCE_S


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 4}, ("size 3, got 4",)),
        ({"size": 2}, ("size 3, got 2",)),
        ({"strategy": shardwell.Tree()}, ("strategy 'ring', got 'tree(arity=2)'",)),
        ({"strategy": shardwell.Centralized()}, ("strategy 'ring', got 'centralized'",)),
        ({"codec": "fp32"}, ("codec 'fp16', got 'fp32'",)),
        ({"allow_non_finite": True}, ("allow_non_finite False, got True",)),
    ],
)
def test_other_settings_are_refused_by_name(place, options, words) -> None:
    """To the one that has them, at once, and to those that wait for it."""
    first = in_background(lambda: refused(place, 0, 3, join_timeout_s=2 * BRIEF_S))

    def is_known() -> bool:
        error = refused(place, 2, 3, join_timeout_s=0.2)
        return getattr(error, "missing_ranks", None) == (1,)

    eventually("rank 0 waits", is_known)
    given = dict(options)
    error = refused(place, 1, given.pop("size", 3), **given)
    assert isinstance(error, shardwell.GroupMismatchError)
    waited = first.result(PATIENCE_S)
    assert isinstance(waited, shardwell.WorkersMissingError)
    assert "refused" in waited.message
    for word in words:
        assert word in error.message
        assert word in waited.message


def test_a_second_worker_of_a_rank_is_refused_by_name(place) -> None:
    """While the first waits, and while the group works; both have names."""
    release = threading.Event()

    def work(group: shardwell.Group) -> None:
        group.barrier()
        if group.rank == 0:
            error = refused(place, 1, 2, name=group.name)
            assert isinstance(error, shardwell.RankTakenError), error
            assert error.rank == 1
            assert "which lives" in error.message
            release.set()
        release.wait(PATIENCE_S)
        group.barrier()

    on_ranks(2, place, work)
    first = in_background(lambda: refused(place, 1, 3, join_timeout_s=BRIEF_S))
    second = in_background(lambda: refused(place, 1, 3, join_timeout_s=BRIEF_S))
    errors = sorted(
        (first.result(PATIENCE_S), second.result(PATIENCE_S)), key=lambda e: type(e).__name__
    )
    assert isinstance(errors[0], shardwell.RankTakenError)
    assert isinstance(errors[1], shardwell.WorkersMissingError)
    assert "refused: rank 1" in errors[1].message
    assert "correct those that were refused" in errors[1].message


def test_no_server_at_the_meeting_place() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    error = refused(address, 0, 2, join_timeout_s=0.5)
    assert isinstance(error, shardwell.ShardUnavailableError)
    assert address in error.message


def test_another_shard_than_the_first(cluster) -> None:
    second = cluster(2).target.split(",")[1]
    error = refused(second, 0, 2, join_timeout_s=5.0)
    assert isinstance(error, shardwell.WrongShardError)


def test_a_list_of_addresses_of_which_one_is_silent() -> None:
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    addresses = [f"127.0.0.1:{holder.getsockname()[1]}" for holder in holders]
    for holder in holders:
        holder.close()
    waiting = [
        in_background(lambda rank=rank: refused(addresses, rank, 3, join_timeout_s=BRIEF_S))
        for rank in (0, 1)
    ]
    error = waiting[0].result(PATIENCE_S)
    assert isinstance(error, shardwell.WorkersMissingError)
    assert 2 in error.missing_ranks
    other = waiting[1].result(PATIENCE_S)
    assert isinstance(other, shardwell.WorkersMissingError | shardwell.ShardUnavailableError)


def test_a_member_s_port_that_is_taken(place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        error = refused(place, 0, 1, listen=address)
    assert isinstance(error, shardwell.ShardUnavailableError)
    assert address in error.message


def test_a_group_again_and_again_under_one_name(place) -> None:
    generations = []
    for _ in range(5):
        generations += on_ranks(2, place, lambda group: group.generation, name="again")
    assert generations == sorted(generations)
    assert len(set(generations)) == 5


@pytest.mark.parametrize(
    ("rank", "size", "options"),
    [
        (-1, 2, {}),
        (2, 2, {}),
        (0, 0, {}),
        (0, 257, {}),
        (0, 2, {"strategy": "star"}),
        (0, 2, {"codec": "fp8"}),
        (0, 2, {"lease_s": 0.01}),
        (0, 2, {"name": "a b"}),
        (0, 2, {"advertise": "nowhere"}),
        (0, 2, {"timeout_s": -1}),
    ],
)
def test_arguments_that_can_not_be_used(place, rank, size, options) -> None:
    assert isinstance(refused(place, rank, size, **options), shardwell.ArgumentError)


def test_a_worker_that_is_started_again_as_it_was_comes_in(place) -> None:
    """Its rank has gone to another meanwhile; it takes a free one, when the others rebuild."""
    joining = [in_background(lambda rank=rank: joined(place, rank, 3)) for rank in range(3)]
    groups = [future.result(PATIENCE_S) for future in joining]
    with contextlib.ExitStack() as stack:
        for group in groups:
            stack.callback(group.close)
        groups[1].close()
        living = [groups[0], groups[2]]
        for group in living:
            with pytest.raises(shardwell.WorkerLostError):
                group.barrier()
        together = [in_background(group.rebuild) for group in living]
        for future in together:
            future.result(PATIENCE_S)
        assert [group.rank for group in living] == [0, 1]
        again = in_background(lambda: joined(place, 1, 3))
        eventually("it waits", lambda: all(group.waiting_count == 1 for group in living))
        together = [in_background(group.rebuild) for group in living]
        for future in together:
            future.result(PATIENCE_S)
        newcomer = again.result(PATIENCE_S)
        stack.callback(newcomer.close)
        assert (newcomer.rank, newcomer.size) == (2, 3)
        sums = [in_background(group.barrier) for group in (*living, newcomer)]
        for future in sums:
            future.result(PATIENCE_S)
