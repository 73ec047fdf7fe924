"""Elastic groups as programs use them: what each call does while members come and leave.

Method: members are threads with servers of their own. Processes that are killed: tests/fault.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.group.ranks import begun_on_ranks, error_of, joined, on_ranks
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.threads import in_background

LEASE_S = 1.0


@pytest.fixture
def target(cluster) -> str:
    """Where members meet."""
    return str(cluster(1).target)


def elastic(target: str, size: int = 4, **options: Any) -> shardwell.Group:
    """A member; it asks for no rank, unless options do."""
    given = {"lease_s": LEASE_S, "timeout_s": 60.0, "join_timeout_s": 60.0, **options}
    return shardwell.join_group("job", size=size, rendezvous=target, elastic=True, **given)


@pytest.fixture
def members(target) -> Iterator[Callable[..., list[shardwell.Group]]]:
    """Begins groups of as many members, by rank; all are closed at the end."""
    made: list[shardwell.Group] = []

    def begun(count: int, size: int = 4, **options: Any) -> list[shardwell.Group]:
        joining = [in_background(lambda: elastic(target, size, **options)) for _ in range(count)]
        groups = [each.result(PATIENCE_S) for each in joining]
        made.extend(groups)
        assert {group.size for group in groups} == {count}
        return sorted(groups, key=lambda group: group.rank)

    yield begun
    for group in made:
        group.close()


def all_at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, each on a thread of its own."""
    return [each.result(PATIENCE_S) for each in [in_background(call) for call in calls]]


def summed(group: shardwell.Group, size: int = 1000, **options: Any) -> float:
    """The sum of ones over all members."""
    array = np.ones(size, np.float32)
    group.all_reduce(array, **options)
    assert (array == array[0]).all()
    return float(array[0])


def until_waiting(*groups: shardwell.Group) -> None:
    """Returns when the members know that a worker waits."""
    for group in groups:
        eventually("a worker waits", lambda group=group: group.waiting_count)


def coming(target: str, size: int = 4, **options: Any) -> Future[shardwell.Group]:
    """A member that comes later."""
    return in_background(lambda: elastic(target, size, **options))


def test_a_newcomer_comes_in_at_the_next_sum_of_members_without_state(target, members) -> None:
    one, two = members(2)
    first = one.generation
    new = coming(target)
    until_waiting(one, two)

    def newcomer() -> tuple[float, int]:
        with new.result(PATIENCE_S) as group:
            return summed(group), group.rank

    found = all_at_once(lambda: summed(one), lambda: summed(two), newcomer)
    assert found == [3.0, 3.0, (3.0, 2)]
    assert (one.rank, two.rank, one.size) == (0, 1, 3)
    assert one.generation > first
    assert all_at_once(lambda: summed(one), lambda: summed(two)) == [2.0, 2.0], "it has left"


def test_the_state_reaches_a_newcomer_bit_for_bit(target, members) -> None:
    one, two = members(2)
    chance = np.random.default_rng(5)

    def state(is_old: bool) -> dict[str, np.ndarray]:
        odd = np.array([np.nan, np.inf, -0.0, 1e-40], np.float32)
        given = {
            "weights": chance.normal(size=(3, 5)),
            "odd": odd,
            "step": np.array(7, np.int64),
            "flags": np.array([True, False, True]),
            "halves": odd.astype(np.float16),
            "none": np.zeros((0, 3)),
            "large": np.arange(9_000_000, dtype=np.int16),
        }
        return given if is_old else {name: np.zeros_like(each) for name, each in given.items()}

    first, second, third = state(True), state(False), state(False)
    shared = all_at_once(lambda: one.broadcast_state(first), lambda: two.broadcast_state(second))
    assert shared == [False, True]
    new = coming(target)
    until_waiting(one, two)

    def newcomer() -> bool:
        with new.result(PATIENCE_S) as group:
            return group.broadcast_state(third)

    second["step"][...] = 8  # members go on by themselves: what they have is not overwritten
    found = all_at_once(
        lambda: one.broadcast_state(first), lambda: two.broadcast_state(second), newcomer
    )
    assert found == [False, False, True]
    for name, each in first.items():
        assert third[name].tobytes() == each.tobytes(), name
    assert second["step"] == 8
    assert all_at_once(lambda: one.broadcast_state(first), lambda: two.broadcast_state(second)) == [
        False,
        False,
    ]


def test_members_with_state_admit_no_newcomer_at_a_sum(target, members) -> None:
    one, two = members(2)
    states = [{"w": np.full(2, float(rank))} for rank in range(3)]
    share = [
        lambda group=g, state=s: group.broadcast_state(state)
        for g, s in zip((one, two), states, strict=False)
    ]
    all_at_once(*share)
    new = coming(target)
    until_waiting(one, two)
    assert all_at_once(lambda: summed(one), lambda: summed(two)) == [2.0, 2.0]
    assert not new.done()
    newcomer = lambda: new.result(PATIENCE_S).broadcast_state(states[2])  # noqa: E731
    assert all_at_once(*share, newcomer)[2] is True
    assert (states[2]["w"] == 0).all()
    new.result().close()


def test_a_newcomer_with_another_state_leaves_and_the_members_go_on(target, members) -> None:
    one, two = members(2)
    states = [{"w": np.ones(2)}, {"w": np.zeros(2)}]
    share = [
        lambda group=g, state=s: group.broadcast_state(state)
        for g, s in zip((one, two), states, strict=True)
    ]
    all_at_once(*share)
    new = coming(target)
    until_waiting(one, two)

    def newcomer() -> shardwell.ShardwellError:
        group = new.result(PATIENCE_S)
        return error_of(lambda: group.broadcast_state({"w": np.zeros(3)}))

    *found, error = all_at_once(*share, newcomer)
    assert found == [False, False]
    assert isinstance(error, shardwell.GroupMismatchError)
    assert "rank 2" in error.message
    assert "w (3,) float64" in error.message
    assert all_at_once(lambda: summed(one), lambda: summed(two)) == [2.0, 2.0]


def test_calls_that_depend_on_ranks_fail_on_all_where_these_change(members) -> None:
    """Their arrays were for the ranks before; nothing is written, and the next call goes on."""
    one, two, three = members(3)
    two.close()
    arrays = [np.full((3, 2), 1.0 + rank, np.float32) for rank in (0, 2)]
    errors = all_at_once(
        lambda: error_of(lambda: one.all_gather(arrays[0])),
        lambda: error_of(lambda: three.all_gather(arrays[1])),
    )
    for error in errors:
        assert isinstance(error, shardwell.WorkerLostError)
        assert "members of group 'job' changed" in error.message
    assert (arrays[0] == 1).all()
    assert (arrays[1] == 3).all()
    assert (one.size, three.rank) == (2, 1)
    whole = [np.full((2, 2), 1.0 + rank, np.float32) for rank in (0, 1)]
    all_at_once(lambda: one.all_gather(whole[0]), lambda: three.all_gather(whole[1]))
    assert (whole[0] == [[1, 1], [2, 2]]).all()
    assert (whole[0] == whole[1]).all()


def test_sums_in_the_background_go_on_when_a_member_leaves(members) -> None:
    one, two, three = members(3)

    def work(group: shardwell.Group, count: int) -> list[float]:
        arrays = [np.ones(1000, np.float32) for _ in range(count)]
        for future in [group.all_reduce_async(array) for array in arrays]:
            future.result(PATIENCE_S)
        return [float(array[0]) for array in arrays]

    def leaver() -> list[float]:
        with three:
            return work(three, 20)

    found = all_at_once(lambda: work(one, 60), lambda: work(two, 60), leaver)
    assert found[0] == found[1] == [3.0] * 20 + [2.0] * 40
    assert found[2] == [3.0] * 20


def test_a_mean_is_over_those_that_take_part(members) -> None:
    one, two, three = members(3)
    two.close()

    def mean(group: shardwell.Group, value: float, weight: int) -> float:
        array = np.full(10, value, np.float32)
        group.all_reduce(array, "mean", sample_count=weight, codec="fp32", retry=True)
        return float(array[0])

    assert all_at_once(lambda: mean(one, 1.0, 3), lambda: mean(three, 5.0, 1)) == [2.0, 2.0]


def test_below_min_size_a_call_waits_and_names_those_that_are_here(target, members) -> None:
    one, two, three = members(3, min_size=3)
    three.close()
    found = all_at_once(
        *(
            lambda group=group: error_of(lambda: group.barrier(timeout_s=BRIEF_S))
            for group in (one, two)
        )
    )
    for error in found:
        assert isinstance(error, shardwell.WorkersMissingError)
        assert "2 of at least 3 workers (min_size) are here: rank 0 (" in error.message
    new = coming(target, min_size=3)

    def newcomer() -> float:
        with new.result(PATIENCE_S) as group:
            return summed(group)

    assert all_at_once(lambda: summed(one), lambda: summed(two), newcomer) == [3.0] * 3


def test_a_member_that_rebuilds_by_itself_takes_newcomers(target, members) -> None:
    one, two = members(2)
    new = coming(target)
    until_waiting(one, two)
    found = all_at_once(one.rebuild, two.rebuild, lambda: new.result(PATIENCE_S).size)
    assert found[2] == 3
    all_at_once(*(lambda group=group: summed(group) for group in (one, two, new.result())))
    new.result().close()


def test_a_worker_that_waits_says_for_what(target, members, caplog) -> None:
    members(1)
    error = error_of(lambda: elastic(target, join_timeout_s=BRIEF_S))
    assert isinstance(error, shardwell.WorkersMissingError)
    assert "let this worker in at their next call" in error.message
    assert "let this worker in at their next call" in caplog.text


def test_a_spare_waits_for_a_place(target, members) -> None:
    one, two = members(2, size=2)
    spare = coming(target, size=2)
    error = error_of(lambda: elastic(target, 2, join_timeout_s=BRIEF_S))
    assert "all 2 places are taken" in error.message
    assert all_at_once(lambda: summed(one), lambda: summed(two)) == [2.0, 2.0]
    assert one.waiting_count == 0
    two.close()

    def newcomer() -> float:
        with spare.result(PATIENCE_S) as group:
            return summed(group)

    assert all_at_once(lambda: summed(one), newcomer) == [2.0, 2.0]


def test_what_is_refused(target, members) -> None:
    (one,) = members(1)
    with pytest.raises(shardwell.ArgumentError, match=r"leaves with close\(\)"):
        one.join()
    refused: list[Exception] = []
    done = threading.Event()

    def callback(_: Future[None]) -> None:
        try:
            one.all_reduce_async(np.ones(3, np.float32))
        except shardwell.ArgumentError as error:
            refused.append(error)
        done.set()

    one.all_reduce_async(np.ones(2**20, np.float32)).add_done_callback(callback)
    assert done.wait(PATIENCE_S)
    for state in ({"w": [1.0]}, {"w": np.array([None])}, {"w": np.ones((4, 4))[::2, ::2]}, [1]):
        with pytest.raises(shardwell.ArgumentError, match="state"):
            one.broadcast_state(state)  # type: ignore[arg-type]
    for options in ({"min_size": 0}, {"min_size": 5}, {"min_size": 2, "elastic": False}):
        with pytest.raises(shardwell.ArgumentError, match="min_size"):
            joined(target, 0, 4, **{"elastic": True, **options})
    with pytest.raises(shardwell.ArgumentError, match="rank, size and rendezvous"):
        shardwell.join_group("job", size=2, rendezvous=target)


def test_a_fixed_group_shares_a_state_and_refuses_retry(target) -> None:
    def work(group: shardwell.Group) -> tuple[bool, bool, bytes]:
        state = {"w": np.arange(4.0) + group.rank}
        with pytest.raises(shardwell.ArgumentError, match="elastic=True"):
            group.all_reduce(np.ones(3, np.float32), retry=True)
        return group.broadcast_state(state), group.broadcast_state(state), state["w"].tobytes()

    whole = np.arange(4.0).tobytes()
    assert on_ranks(3, target, work) == [(False, False, whole), *[(True, False, whole)] * 2]


def test_ranks_of_a_fixed_group_whose_states_differ(target) -> None:
    def work(group: shardwell.Group) -> str:
        state = {"w": np.zeros(3 if group.rank == 1 else 2)}
        error = error_of(lambda: group.broadcast_state(state))
        assert isinstance(error, shardwell.GroupMismatchError)
        assert (state["w"] == 0).all()
        group.barrier()
        return error.message

    for message in on_ranks(3, target, work):
        assert "rank 1 differ from rank 0's" in message


def test_a_list_of_addresses_needs_a_rank(target) -> None:
    with pytest.raises(shardwell.ArgumentError, match="rank, size and rendezvous"):
        elastic([target, target], 2)


def test_all_ranks_retry_or_none(target, members) -> None:
    one, two = members(2)
    for error in all_at_once(
        lambda: error_of(lambda: summed(one, retry=True)),
        lambda: error_of(lambda: summed(two, retry=False)),
    ):
        assert isinstance(error, shardwell.CollectiveMismatchError)
        assert "retry" in error.message
    assert all_at_once(lambda: summed(one), lambda: summed(two)) == [2.0, 2.0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("strategy", ["ring", "tree(arity=2)", "centralized"])
def test_the_bits_are_those_of_a_fixed_group(target, members, strategy, threads) -> None:
    arrays = [np.random.default_rng(rank).normal(size=400_000) for rank in range(3)]
    arrays = [array.astype(np.float32) for array in arrays]

    def reduced(group: shardwell.Group, **options: Any) -> bytes:
        array = arrays[group.rank].copy()
        group.all_reduce(array, "mean", **options)
        return array.tobytes()

    fixed = [
        each.result(PATIENCE_S)
        for each in begun_on_ranks(3, target, reduced, strategy=strategy, name="fixed")
    ]
    groups = members(3, strategy=strategy, threads=threads)
    found = all_at_once(*(lambda group=group: reduced(group, retry=True) for group in groups))
    assert set(found) == set(fixed)
    assert len(set(found)) == 1
