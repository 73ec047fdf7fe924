"""Several threads that use one group, and a rank that is as far ahead as it may be."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.group.ranks import begun_on_ranks, error_of, on_ranks
from harness.polling import PATIENCE_S, Stopwatch
from harness.threads import in_background
from shardwell.group.agreement.matching import FAILURE_COUNT_MAX, UNDER_WAY_COUNT_MAX


@pytest.fixture
def place(cluster) -> str:
    """Where groups meet."""
    return str(cluster(1).target)


def test_two_threads_rebuild_at_once(place) -> None:
    """One of them does it; that of the other would end what the first has begun."""

    def work(group: shardwell.Group) -> int:
        other = in_background(group.rebuild) if group.rank == 1 else None
        group.rebuild()
        if other is not None:
            other.result(PATIENCE_S)
        array = np.full(3, group.rank + 1.0, np.float32)
        group.all_reduce(array)
        assert (array == 3).all()
        return group.generation

    first, second = on_ranks(2, place, work)
    assert first == second


def test_a_callback_that_waits_for_another_call(place) -> None:
    """It would wait for itself, and without end; that is said to it."""
    is_added = threading.Event()

    def work(group: shardwell.Group) -> str:
        array = np.ones(3, np.float32)
        if group.rank == 1:
            assert is_added.wait(PATIENCE_S)
            group.all_reduce(array)
            return ""
        caught: list[shardwell.ShardwellError] = []
        future = group.all_reduce_async(array)
        future.add_done_callback(lambda _: caught.append(error_of(group.barrier)))
        is_added.set()
        future.result(PATIENCE_S)
        group.close()  # after the callback
        assert isinstance(caught[0], shardwell.ArgumentError)
        return caught[0].message

    assert "a callback of all_reduce_async waits" in on_ranks(2, place, work)[0]


def test_a_rank_that_was_too_far_ahead_goes_on(place) -> None:
    """What rank 0 refuses of its own calls has no place among them."""
    ahead_count = FAILURE_COUNT_MAX + UNDER_WAY_COUNT_MAX + 1
    refused, caught_up = threading.Event(), threading.Event()

    def work(group: shardwell.Group) -> None:
        if group.rank == 0:
            for _ in range(ahead_count):
                late = error_of(lambda: group.barrier(timeout_s=0.001))
                assert isinstance(late, shardwell.WorkersMissingError)
            error = error_of(group.barrier)
            assert isinstance(error, shardwell.ArgumentError)
            assert "ahead of the slowest" in error.message
            refused.set()
            assert caught_up.wait(PATIENCE_S)
        else:
            assert refused.wait(PATIENCE_S)
            for _ in range(ahead_count):
                error_of(group.barrier)
            caught_up.set()
        group.barrier()

    watch = Stopwatch()
    for future in begun_on_ranks(2, place, work):
        future.result(max(40 - watch.elapsed_s, 0.1))


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1, "soon", True])
def test_a_wait_for_replacements_that_is_none(place, wait_s) -> None:
    """The group goes on: nothing was ended for it."""

    def work(group: shardwell.Group) -> None:
        error = error_of(lambda: group.rebuild(replacement_wait_s=wait_s))
        assert isinstance(error, shardwell.ArgumentError)
        assert "replacement_wait_s must be a number of seconds from 0 to 3600" in error.message
        group.barrier()

    on_ranks(1, place, work)


def test_a_callback_that_makes_too_many_calls_gets_an_error(place) -> None:
    """It runs where calls are made, so it can't wait until one of them ends."""
    under_way = 64

    def work(group: shardwell.Group) -> str:
        array, more = np.ones(4, np.float32), np.ones(4, np.float32)
        if group.rank == 1:
            for _ in range(under_way + 1):
                group.all_reduce(np.ones(4, np.float32))
            return ""
        caught: list[str] = []
        followed: list[Any] = []

        def follow(_: object) -> None:
            followed.append(group.all_reduce_async(more))
            try:
                group.all_reduce_async(array)
            except shardwell.LimitError as error:
                caught.append(error.message)

        first = group.all_reduce_async(np.ones(4, np.float32))
        first.add_done_callback(follow)
        rest = [group.all_reduce_async(np.ones(4, np.float32)) for _ in range(under_way - 1)]
        go.set()
        for future in (first, *rest):
            future.result(PATIENCE_S)
        followed[0].result(PATIENCE_S)
        assert more[0] == 2.0
        return caught[0]

    go = threading.Event()

    def after_the_first(group: shardwell.Group) -> str:
        if group.rank == 1:
            assert go.wait(PATIENCE_S)
        return work(group)

    assert "under_way_count_max=64" in on_ranks(2, place, after_the_first)[0]
