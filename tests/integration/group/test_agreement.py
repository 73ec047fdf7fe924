"""Ranks that do not agree: every one gets the same error, nothing is written, the group goes on.

Also those that come late, and those that have nothing more to contribute and wait in join().
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.group.ranks import STRATEGIES, begun_on_ranks, error_of, joined, on_ranks
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.threads import in_background

Call = Callable[[shardwell.Group, np.ndarray], object]


@pytest.fixture
def place(cluster) -> str:
    """Where groups meet."""
    return str(cluster(1).target)


def goes_on(group: shardwell.Group) -> None:
    array = np.full(5, 1.0, np.float32)
    group.all_reduce(array)
    assert (array == group.size).all()


REDUCE: Call = lambda group, array: group.all_reduce(array)  # noqa: E731
DISAGREEMENTS: dict[str, tuple[Call, Call, tuple[str, ...]]] = {
    "length": (
        REDUCE,
        lambda group, array: group.all_reduce(np.ones(11, np.float32)),
        ("10 elements", "11 elements"),
    ),
    "dtype": (
        REDUCE,
        lambda group, array: group.all_reduce(np.ones(10, np.float64)),
        ("rank 1", "float64"),
    ),
    "not contiguous": (
        REDUCE,
        lambda group, array: group.all_reduce(np.ones((20, 2), np.float32)[::4, 0]),
        ("rank 1", "contiguous"),
    ),
    "no array": (REDUCE, lambda group, array: group.all_reduce([1.0] * 10), ("rank 1", "list")),
    "read-only": (
        REDUCE,
        lambda group, array: group.all_reduce(np.frombuffer(bytes(40), np.float32)),
        ("rank 1", "writeable=False"),
    ),
    "op": (REDUCE, lambda group, array: group.all_reduce(array, "max"), ("op sum", "op max")),
    "no such op": (REDUCE, lambda group, array: group.all_reduce(array, "median"), ("median",)),
    "codec": (
        REDUCE,
        lambda group, array: group.all_reduce(array, codec="bf16"),
        ("codec fp16", "codec bf16"),
    ),
    "root": (
        lambda group, array: group.reduce(array, root=0),
        lambda group, array: group.reduce(array, root=2),
        ("root 0", "root 2"),
    ),
    "no such root": (
        lambda group, array: group.broadcast(array, root=0),
        lambda group, array: group.broadcast(array, root=3),
        ("rank 1", "root"),
    ),
    "order": (REDUCE, lambda group, array: group.barrier(), ("all_reduce", "barrier", "order")),
    "order of collectives": (
        REDUCE,
        lambda group, array: group.all_gather(array),
        ("all_reduce", "all_gather"),
    ),
    "weight without a mean": (
        REDUCE,
        lambda group, array: group.all_reduce(array, sample_count=2),
        ("rank 1", "sample_count"),
    ),
}


@pytest.mark.parametrize("which", DISAGREEMENTS)
def test_a_disagreement_is_the_same_error_everywhere(place, which) -> None:
    usual, other, words = DISAGREEMENTS[which]

    def work(group: shardwell.Group) -> tuple[type, str]:
        array = np.arange(10, dtype=np.float32) + group.rank
        call = other if group.rank == 1 else usual
        error = error_of(lambda: call(group, array))
        assert (array == np.arange(10) + group.rank).all()
        goes_on(group)
        return type(error), error.message

    watch = Stopwatch()
    outcomes = on_ranks(3, place, work, strategy=STRATEGIES[len(which) % 4])
    assert len(set(outcomes)) == 1, outcomes
    assert outcomes[0][0] is shardwell.CollectiveMismatchError
    for word in words:
        assert word in outcomes[0][1], outcomes[0][1]
    assert watch.elapsed_s < PATIENCE_S


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_values_that_are_not_finite_are_refused_everywhere(place, strategy, value) -> None:
    def work(group: shardwell.Group) -> tuple[int, str]:
        array = np.ones(600_000, np.float32)
        if group.rank == 2:
            array[555_555] = value
        before = array.copy()
        error = error_of(lambda: group.all_reduce(array))
        assert isinstance(error, shardwell.NonFiniteError)
        assert array.tobytes() == before.tobytes()
        goes_on(group)
        return error.element_index, error.message

    outcomes = on_ranks(3, place, work, strategy=strategy)
    assert outcomes[0][0] == 555_555
    assert "rank 2" in outcomes[0][1]
    assert len(set(outcomes)) == 1


def test_values_that_are_not_finite_where_all_allow_them(place) -> None:
    def work(group: shardwell.Group) -> np.ndarray:
        array = np.ones(5, np.float32)
        array[group.rank] = (np.nan, np.inf)[group.rank]
        group.all_reduce(array)
        return array

    for found in on_ranks(2, place, work, allow_non_finite=True):
        np.testing.assert_array_equal(found, [np.nan, np.inf, 2, 2, 2])


def test_ranks_that_differ_in_what_they_allow(place) -> None:
    """A rank that refuses NaN never comes into a group with one that contributes it."""

    def work(rank: int) -> Any:
        options = {"allow_non_finite": rank == 1, "join_timeout_s": 2.0, "lease_s": 1.0}
        return error_of(lambda: joined(place, rank, 2, **options).close())

    outcomes = [in_background(lambda rank=rank: work(rank)) for rank in (0, 1)]
    errors = [future.result(20) for future in outcomes]
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds == ["GroupMismatchError", "WorkersMissingError"]
    for error in errors:
        assert re.search("allow_non_finite (False, got True|True, got False)", error.message)


def test_a_disagreement_among_calls_under_way(place) -> None:
    """The one call fails; those before and behind it are as if it had not been made."""

    def work(group: shardwell.Group) -> list[str]:
        arrays = [np.full(100, group.rank, np.float32) for _ in range(9)]
        if group.rank == 1:
            arrays[4] = np.full(99, 1, np.float32)
        futures = [group.all_reduce_async(array) for array in arrays]
        errors = [type(future.exception(20)).__name__ for future in futures]
        assert all((a == (group.rank if i == 4 else 3)).all() for i, a in enumerate(arrays))
        return errors

    for errors in on_ranks(3, place, work):
        assert errors == ["NoneType"] * 4 + ["CollectiveMismatchError"] + ["NoneType"] * 4


def test_a_late_rank_is_waited_for_then_named(place) -> None:
    may_call = threading.Event()

    def work(group: shardwell.Group) -> tuple[str, tuple[int, ...]]:
        array = np.full(7, group.rank, np.float32)
        group.barrier()
        if group.rank == 1:
            may_call.wait(PATIENCE_S)
        error = error_of(lambda: group.all_reduce(array, timeout_s=BRIEF_S))
        may_call.set()
        assert (array == group.rank).all()
        assert isinstance(error, shardwell.WorkersMissingError)
        goes_on(group)
        return error.message, error.missing_ranks

    outcomes = on_ranks(3, place, work)
    assert {ranks for _, ranks in outcomes} == {(1,)}
    assert len({message for message, _ in outcomes}) == 1
    assert re.match(rf"rank 1 did not call all_reduce .*within {BRIEF_S:g} s", outcomes[0][0])


def test_a_rank_that_comes_within_the_deadline(place) -> None:
    waits = threading.Event()

    def work(group: shardwell.Group) -> None:
        if group.rank == 0:
            assert not waits.wait(1.0)  # no thread sets it: this rank is slow
        goes_on(group)

    on_ranks(3, place, work)


def test_a_rank_that_polls_for_others_for_long(place) -> None:
    """Many calls that fail for want of a rank, which then makes as many: they still match."""
    count = 40
    behind = threading.Event()

    def work(group: shardwell.Group) -> None:
        if group.rank == 2:
            behind.wait(PATIENCE_S)
        for _ in range(count):
            error = error_of(lambda: group.barrier(timeout_s=0.02))
            assert isinstance(error, shardwell.WorkersMissingError)
            assert error.missing_ranks[-1] == 2
        behind.set()
        goes_on(group)

    on_ranks(3, place, work)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_workers_with_fewer_batches_join(place, strategy) -> None:
    """Rank r has 2 + 3 r batches: means count who is still in; the last one is named to all."""

    def work(group: shardwell.Group) -> tuple[list[float], int]:
        means = []
        for _ in range(2 + 3 * group.rank):
            array = np.full(5000, group.rank + 1.0, np.float32)
            group.all_reduce(array, "mean")
            means.append(float(array[-1]))
        last = group.join()
        goes_on(group)
        final = np.full(3, group.rank, np.float32)
        group.broadcast(final, root=last)
        assert (final == last).all()
        return means, last

    outcomes = on_ranks(4, place, work, strategy=strategy)
    expected = [2.5] * 2 + [3.0] * 3 + [3.5] * 3 + [4.0] * 3
    for rank, (means, last) in enumerate(outcomes):
        assert means == expected[: 2 + 3 * rank]
        assert last == 3


def test_join_while_calls_of_others_wait(place) -> None:
    """A call that waits for a rank is decided without it when that rank joins."""
    called = threading.Event()

    def work(group: shardwell.Group) -> float:
        array = np.full(4, group.rank + 1.0, np.float32)
        if group.rank == 0:
            called.wait(PATIENCE_S)
        else:
            future = group.all_reduce_async(array, "mean", sample_count=group.rank)
            called.set()
            future.result(PATIENCE_S)
        group.join()
        return float(array[0])

    assert on_ranks(3, place, work) == [1.0, *[pytest.approx(8 / 3, abs=1e-2)] * 2]


def test_join_names_who_does_not_come_and_may_be_called_again(place) -> None:
    """Rank 0 gives up, rank 2 waits on, rank 1 comes: then rank 0 need only ask again."""
    given_up, all_in = threading.Event(), threading.Event()

    def work(group: shardwell.Group) -> int:
        if group.rank == 1:
            given_up.wait(PATIENCE_S)
        if group.rank == 0:
            error = error_of(lambda: group.join(timeout_s=BRIEF_S))
            assert isinstance(error, shardwell.WorkersMissingError)
            assert 1 in error.missing_ranks
            given_up.set()
            misuse = error_of(lambda: goes_on(group))
            assert isinstance(misuse, shardwell.ArgumentError)
            assert "join()" in misuse.message
            all_in.wait(PATIENCE_S)
        last = group.join()
        all_in.set()
        goes_on(group)
        group.join()
        goes_on(group)
        return last

    assert on_ranks(3, place, work) == [1, 1, 1]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_segments_while_a_rank_is_out(place, strategy) -> None:
    """They are cut among the others; the segment of the rank that is out goes to no rank."""

    def work(group: shardwell.Group) -> np.ndarray:
        found = np.empty(0, np.float32)
        if group.rank != 2:
            array = np.arange(7, dtype=np.float32) + group.rank
            found = group.reduce_scatter(array)
            assert np.shares_memory(found, array)
            gathered = np.full(7, 5.0, np.float32)
            error = error_of(lambda: group.all_gather(gathered))
            assert isinstance(error, shardwell.CollectiveMismatchError)
            assert error.rank == 2
            assert "rank 2 called join()" in error.message
            assert (gathered == 5).all()
        group.join()
        gathered = np.full(7, np.nan, np.float32)
        group.segment(gathered)[:] = group.rank
        group.all_gather(gathered)
        assert gathered.tolist() == [0, 0, 0, 1, 1, 2, 2]
        return found

    total = 2 * np.arange(7) + 1
    ranks = on_ranks(3, place, work, strategy=strategy, codec="fp32")
    assert [found.tolist() for found in ranks] == [total[:4].tolist(), total[4:].tolist(), []]


def test_join_when_another_leaves_without(place) -> None:
    """It will never come: ranks that wait fail at once, not after an hour."""
    both_know = threading.Barrier(2)

    def work(group: shardwell.Group) -> str:
        goes_on(group)
        if group.rank == 1:
            return ""
        error = error_of(group.join)
        both_know.wait(PATIENCE_S)  # else one of them is the next that has left
        assert isinstance(error, shardwell.WorkerLostError)
        assert error.rank == 1
        return error.message

    watch = Stopwatch()
    outcomes = on_ranks(3, place, work)
    assert "left" in outcomes[0]
    assert "left" in outcomes[2]
    assert watch.elapsed_s < PATIENCE_S


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_call_when_another_has_left(place, leaver) -> None:
    """And after it the group is rebuilt without the one that left."""
    have_gone_on = threading.Barrier(3)

    def work(group: shardwell.Group) -> int:
        goes_on(group)
        have_gone_on.wait(PATIENCE_S)  # a rebuild would end a call that is under way
        if group.rank == leaver:
            return 0
        array = np.ones(4, np.float32)
        error = error_of(lambda: group.all_reduce(array))
        assert isinstance(error, shardwell.WorkerLostError)
        # The later rank may hear of the other's rebuild first.
        assert error.rank == leaver or "asked to rebuild" in error.message
        assert (array == 1).all()
        group.rebuild()
        goes_on(group)
        return group.size

    assert sorted(on_ranks(3, place, work)) == [0, 2, 2]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_block_that_ends_with_an_exception(place, failing) -> None:
    """The others fail at once, and know why."""
    all_there = threading.Barrier(3)

    def work(group: shardwell.Group) -> str:
        goes_on(group)
        all_there.wait(PATIENCE_S)
        if group.rank == failing:
            raise KeyError("no such batch")
        error = error_of(group.barrier)
        assert isinstance(error, shardwell.WorkerLostError)
        assert error.rank == failing
        return error.message

    watch = Stopwatch()
    futures = begun_on_ranks(3, place, work)
    assert isinstance(futures[failing].exception(20), KeyError)
    for rank in {0, 1, 2} - {failing}:
        assert "no such batch" in futures[rank].result(PATIENCE_S)
    assert watch.elapsed_s < PATIENCE_S


def test_a_closed_group(place) -> None:
    def work(group: shardwell.Group) -> None:
        future = group.all_reduce_async(np.ones(3, np.float32))
        group.close()
        group.close()
        assert future.result(0) is None
        for call in (group.barrier, group.join, group.rebuild):
            assert isinstance(error_of(call), shardwell.ClosedError)

    on_ranks(2, place, work)


# Workers that meet: those that wait learn who is missing, and who is refused and why.


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
