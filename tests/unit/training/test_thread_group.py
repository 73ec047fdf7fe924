"""Goal: threads get the reduction that float64 says, the same bits each, or the same error each.

Method: real threads that race, every size and many lengths; then what threads do wrong: other
arrays, other operations, two with one rank, one that never comes, one that comes late. After each,
arrays are looked at and the object is used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.threads import in_background, together
from shardwell import ThreadedSync
from shardwell.numerics.reduction import REDUCTIONS
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT

LENGTHS = [*range(101), 1000, 4097, BLOCK_ELEMENT_COUNT - 1, 3 * BLOCK_ELEMENT_COUNT + 17]


def arrays(count: int, size: Any, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(size).astype(np.float32) for _ in range(count)]


def outcomes(calls: list[Callable[[], object]]) -> list[BaseException | None]:
    """What each call raised, all made at once."""

    def caught(call: Callable[[], object]) -> BaseException | None:
        try:
            call()
        except Exception as error:
            return error
        return None

    return together([lambda call=call: caught(call) for call in calls])


def sync_all(sync: ThreadedSync, given: list[np.ndarray], **options: Any) -> list[Any]:
    return outcomes(
        [
            lambda rank=rank, array=array: sync.sync_gradients(array, rank=rank, **options)
            for rank, array in enumerate(given)
        ]
    )


def assert_works(sync: ThreadedSync) -> None:
    given = [np.full(50, 2 * rank, np.float32) for rank in range(sync.worker_count)]
    assert sync_all(sync, given) == [None] * sync.worker_count
    for array in given:
        np.testing.assert_array_equal(array, np.float32(sync.worker_count - 1))


@pytest.mark.parametrize("worker_count", range(1, 9))
def test_every_length_is_the_mean_with_the_same_bits(worker_count: int) -> None:
    sync = ThreadedSync(worker_count)
    given = {size: arrays(worker_count, size, seed=size) for size in LENGTHS}
    expected = {size: np.mean(np.float64(given[size]), axis=0) for size in LENGTHS}

    def work(rank: int) -> None:
        sync.take_seat(rank)
        for size in LENGTHS:
            sync.sync_gradients(given[size][rank])

    together([lambda rank=rank: work(rank) for rank in range(worker_count)])
    for size in LENGTHS:
        for array in given[size]:
            np.testing.assert_array_equal(array, given[size][0])
            np.testing.assert_allclose(array, expected[size], rtol=0, atol=1e-6)
    assert (sync.is_distributed, sync.worker_count) == (worker_count > 1, worker_count)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 0, 4), (BLOCK_ELEMENT_COUNT + 1, 2)])
def test_every_operation_on_every_shape(op: Any, shape: tuple[int, ...]) -> None:
    sync, given = ThreadedSync(3), [np.asarray(array) for array in arrays(3, shape)]
    reduce = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[op]
    expected = reduce(np.float64(given), axis=0)
    together([lambda r=r: sync.all_reduce(given[r], op, rank=r) for r in range(3)])
    for array in given:
        np.testing.assert_array_equal(array, given[0])
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("counts", [(1, 3, 4), (0, 8, 0), (2**24, 1, 0), (0, 0, 0), (32, 32, 32)])
def test_threads_means_are_weighted_by_samples(counts: tuple[int, ...]) -> None:
    sync, given = ThreadedSync(3), arrays(3, 1000)
    expected = np.average(np.float64(given), axis=0, weights=counts) if any(counts) else 0
    lone = [rank for rank in range(3) if counts[rank] == sum(counts)]
    original = [array.copy() for array in given]
    together(
        [
            lambda r=r: sync.sync_gradients(given[r], sample_count=counts[r], rank=r)
            for r in range(3)
        ]
    )
    for array in given:
        np.testing.assert_array_equal(array, given[0])
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-6)
        if len(lone) == 1:
            np.testing.assert_array_equal(array, original[lone[0]])


def test_sums_are_taken_in_order_of_rank() -> None:
    """2^25 - 2^25 + 1 is 1, and in other orders it may be 0: order shows in the bits."""
    sync = ThreadedSync(3)
    values = [np.float32(2**25), np.float32(-(2**25)), np.float32(1)]
    for late in range(3):
        given = [np.full(100, value) for value in values]
        early = [
            in_background(lambda r=r, given=given: sync.all_reduce(given[r], rank=r))
            for r in range(3)
            if r != late
        ]
        eventually("two gather", lambda: len(sync._under_way) == 2)
        sync.all_reduce(given[late], rank=late)
        for future in early:
            future.result(PATIENCE_S)
        np.testing.assert_array_equal(given, 1.0)


@pytest.mark.parametrize("worker_count", [2, 3, 8])
def test_many_generations_never_mix(worker_count: int) -> None:
    """Each adds 1 a generation to what the one before gave; any mixture shows."""
    sync, generation_count = ThreadedSync(worker_count), 500

    def work(rank: int) -> None:
        sync.take_seat(rank)
        array = np.zeros(33 + BLOCK_ELEMENT_COUNT // 16, np.float32)
        for generation in range(1, generation_count + 1):
            array += np.float32(1 + rank - (worker_count - 1) / 2)
            sync.sync_gradients(array)
            assert array[0] == array[-1] == generation
            assert array.min() == array.max()

    together([lambda rank=rank: work(rank) for rank in range(worker_count)])


def test_lengths_that_differ_are_everyones_error_and_nothing_is_written() -> None:
    sync, given = ThreadedSync(3), [np.full(n, n, np.float32) for n in (5, 4, 5)]
    errors = sync_all(sync, given)
    assert {type(error) for error in errors} == {shardwell.CollectiveMismatchError}
    (message,) = {str(error) for error in errors}
    assert "mean of 5 elements (ranks 0, 2), mean of 4 elements (rank 1)" in message
    for array in given:
        np.testing.assert_array_equal(array, array.size)
    assert_works(sync)


@pytest.mark.parametrize(
    "odd",
    [
        np.ones((5, 2), np.float32),
        np.ones(10, np.float64),
        np.ones(20, np.float32)[::2],
        np.frombuffer(bytes(40), np.float32),
        np.ones(10, ">f4"),
        [1.0] * 10,
        None,
    ],
    ids=["shape", "float64", "strided", "read-only", "big-endian", "list", "none"],
)
def test_an_array_of_another_kind_is_everyones_error(odd: Any) -> None:
    sync, good = ThreadedSync(2), np.ones(10, np.float32)
    errors = sync_all(sync, [good, odd])
    assert {type(error) for error in errors} == {shardwell.CollectiveMismatchError}
    assert len({str(error) for error in errors}) == 1
    assert "(rank 1)" in str(errors[0])
    np.testing.assert_array_equal(good, 1.0)
    assert_works(sync)


def test_useless_arrays_are_an_argument_error() -> None:
    sync = ThreadedSync(2)
    errors = sync_all(sync, [np.ones(3), np.ones(3)])
    assert {type(error) for error in errors} == {shardwell.ArgumentError}
    assert "writable C-contiguous float32" in str(errors[0])
    errors = sync_all(sync, arrays(2, 3), sample_count=-1)
    assert "sample_count" in str(errors[0])
    errors = outcomes([lambda r=r: sync.all_reduce(np.ones(1), "median", rank=r) for r in (0, 1)])
    assert "'median'" in str(errors[1])
    assert_works(sync)


def test_other_operations_are_everyones_error() -> None:
    sync, given = ThreadedSync(2), [np.ones(4, np.float32) for _ in range(2)]
    errors = outcomes(
        [
            lambda: sync.all_reduce(given[0], "max", rank=0),
            lambda: sync.all_reduce(given[1], "sum", rank=1),
        ]
    )
    assert {type(error) for error in errors} == {shardwell.CollectiveMismatchError}
    assert "max of 4 elements (rank 0), sum of 4 elements (rank 1)" in str(errors[0])
    np.testing.assert_array_equal(given, 1.0)
    assert_works(sync)


def test_arrays_that_share_memory_are_refused() -> None:
    sync, whole = ThreadedSync(2), np.ones(10, np.float32)
    errors = sync_all(sync, [whole[:6], whole[4:]])
    assert {str(error) for error in errors} == {
        "the arrays of ranks 0 and 1 overlap; give each its own"
    }
    assert sync_all(sync, [whole[:5], whole[5:]]) == [None, None]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_everyones_error(bad: float) -> None:
    sync, given = ThreadedSync(2), [np.ones(9, np.float32) for _ in range(2)]
    given[1][7] = bad
    errors = sync_all(sync, given)
    assert {type(error) for error in errors} == {shardwell.NonFiniteError}
    assert [(error.rank, error.element_index) for error in errors] == [(1, 7)] * 2
    np.testing.assert_array_equal(given[0], 1.0)
    assert_works(sync)
    permissive = ThreadedSync(2, allow_non_finite=True)
    assert sync_all(permissive, given) == [None, None]
    assert np.isfinite(given[0][:7]).all()
    assert not np.isfinite(given[0][7])


def test_what_has_no_samples_counts_for_nothing_whatever_it_is() -> None:
    sync = ThreadedSync(2, allow_non_finite=True)
    given = [np.full(5, np.nan, np.float32), np.arange(5, dtype=np.float32)]
    together(
        [
            lambda: sync.sync_gradients(given[0], sample_count=0, rank=0),
            lambda: sync.sync_gradients(given[1], sample_count=3, rank=1),
        ]
    )
    np.testing.assert_array_equal(given, [np.arange(5)] * 2)


def test_a_thread_that_does_not_come_is_named_and_reset_mends_it() -> None:
    sync = ThreadedSync(4, timeout_s=BRIEF_S)
    given = [np.full(5, rank, np.float32) for rank in range(4)]
    watch = Stopwatch()
    errors = sync_all(sync, given[:2])
    assert watch.elapsed_s < PATIENCE_S
    assert {type(error) for error in errors} == {shardwell.WorkersMissingError}
    assert [error.missing_ranks for error in errors] == [(2, 3)] * 2
    for rank in (2, 1):  # the late one, and one of the others again
        with pytest.raises(shardwell.WorkerLostError, match=r"broken.*ranks 2, 3.*reset\(\)"):
            sync.sync_gradients(given[rank], rank=rank)
    for rank, array in enumerate(given):
        np.testing.assert_array_equal(array, rank)
    sync.reset()
    for _ in range(3):
        assert_works(sync)


def test_reset_ends_calls_that_wait() -> None:
    sync, array = ThreadedSync(2), np.ones(3, np.float32)
    waiting = in_background(lambda: sync.sync_gradients(array, rank=1))
    eventually("it waits", lambda: sync._under_way)
    sync.reset()
    assert isinstance(waiting.exception(10), shardwell.WorkerLostError)
    np.testing.assert_array_equal(array, 1.0)
    assert_works(sync)


def test_a_thread_that_is_interrupted_ends_the_call_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exception comes where Ctrl-C would: within the arithmetic of one thread's part."""
    sync = ThreadedSync(3)
    given = [np.ones(10 * BLOCK_ELEMENT_COUNT, np.float32) for _ in range(3)]
    import shardwell.training.thread_group as module

    reduce_block, once = module.reduce_block, threading.Lock()

    def interrupted(*arguments: Any) -> None:
        if once.acquire(blocking=False):
            raise KeyboardInterrupt
        reduce_block(*arguments)

    monkeypatch.setattr(module, "reduce_block", interrupted)
    futures = [
        in_background(lambda r=r: sync.all_reduce(given[r], "mean", rank=r)) for r in range(3)
    ]
    errors = [future.exception(20) for future in futures]
    lost = [error for error in errors if isinstance(error, shardwell.WorkerLostError)]
    (interrupted_rank,) = [r for r in range(3) if isinstance(errors[r], KeyboardInterrupt)]
    assert [error.rank for error in lost] == [interrupted_rank] * 2
    np.testing.assert_array_equal(given, 1.0)
    sync.reset()
    assert_works(sync)


def test_two_threads_with_one_rank() -> None:
    sync, given = ThreadedSync(2), arrays(3, 10)
    first = in_background(lambda: sync.sync_gradients(given[0], rank=0))
    eventually("it waits", lambda: sync._under_way)
    with pytest.raises(shardwell.ArgumentError, match="rank 0 is used by two threads at once"):
        sync.sync_gradients(given[1], rank=0)
    sync.sync_gradients(given[2], rank=1)
    first.result(PATIENCE_S)
    np.testing.assert_array_equal(given[0], given[2])


def test_seats_are_kept_given_up_and_freed_by_their_threads_end() -> None:
    sync = ThreadedSync(2)
    sync.take_seat(1)
    sync.take_seat(1)
    assert sync.rank == 1
    assert in_background(lambda: sync.rank).result(PATIENCE_S) == 0
    eventually("its thread has ended", lambda: not sync._seats[0].is_alive())
    in_background(lambda: sync.take_seat(0)).result(PATIENCE_S)
    eventually("its thread has ended", lambda: not sync._seats[0].is_alive())
    sync.take_seat(0)
    assert sync.rank == 0
    with pytest.raises(shardwell.ArgumentError, match="rank 0 is the seat of thread 'MainThread'"):
        in_background(lambda: sync.take_seat(0)).result(PATIENCE_S)
    sync.leave_seat()
    sync.leave_seat()
    in_background(lambda: sync.take_seat(0)).result(PATIENCE_S)
    for rank in (2, -1, "0", True):
        with pytest.raises(shardwell.ArgumentError, match="rank must be an integer from 0 to 1"):
            sync.take_seat(rank)


def test_threads_take_the_lowest_seats_and_one_too_many_is_refused() -> None:
    sync, given = ThreadedSync(3), [np.full(4, value, np.float32) for value in (1, 2, 6)]
    ranks: list[int] = []
    done = threading.Event()

    def work(array: np.ndarray) -> None:
        sync.sync_gradients(array)
        ranks.append(sync.rank)
        done.wait(PATIENCE_S)

    futures = [in_background(lambda array=array: work(array)) for array in given]
    eventually("all are through", lambda: len(ranks) == 3)
    with pytest.raises(shardwell.ArgumentError, match="all 3 seats are taken"):
        sync.sync_gradients(np.ones(4, np.float32))
    done.set()
    for future in futures:
        future.result(PATIENCE_S)
    assert sorted(ranks) == [0, 1, 2]
    np.testing.assert_array_equal(given, 3.0)


def test_threads_of_later_rounds_sit_where_those_that_ended_sat() -> None:
    sync = ThreadedSync(3)
    for _ in range(3):
        given = [np.full(4, value, np.float32) for value in (1, 2, 6)]
        threads = [
            threading.Thread(target=sync.sync_gradients, args=(array,), daemon=True)
            for array in given
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        np.testing.assert_array_equal(given, 3.0)


@pytest.mark.parametrize("worker_count", [0, 1025, 1.5, True])
def test_counts_that_can_not_be_are_refused(worker_count: Any) -> None:
    with pytest.raises(shardwell.ArgumentError, match="worker_count must be an integer"):
        ThreadedSync(worker_count)
    with pytest.raises(shardwell.ArgumentError, match="timeout_s"):
        ThreadedSync(2, timeout_s=0)
