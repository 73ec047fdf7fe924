"""Groups of real members: every operation, strategy, size and codec, against plain float64.

Method: ranks are threads, each with its own server; they meet at shard 0 of a cluster, or at rank
0's address. Whatever the strategy and codec, all ranks must end with the same bits, and a run that
is repeated with the same bits again.
"""

from __future__ import annotations

import concurrent.futures
import socket
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.nans import CANONICAL, ODD_NANS, nan_bits
from harness.group.ranks import STRATEGIES, begun_on_ranks, error_of, on_ranks
from harness.polling import PATIENCE_S, Stopwatch, eventually
from harness.threads import in_background
from shardwell.group.agreement.matching import FAILURE_COUNT_MAX, UNDER_WAY_COUNT_MAX

CODECS = ("fp32", "fp16", "bf16")
TOLERANCES = {"fp32": 1e-6, "fp16": 2**-10, "bf16": 2**-7}
"""Of one rounding, relative to the largest value."""
SIZES = (1, 2, 5)
LONG = 2**23
"""32 MiB: more chunks a segment than a window has."""


@pytest.fixture
def place(cluster) -> str:
    """Where groups meet."""
    return str(cluster(1).target)


def values(rank: int, size: int, *, seed: int = 0) -> np.ndarray:
    chance = np.random.default_rng([seed, rank, size])
    return chance.normal(size=size).astype(np.float32)


def close_to(actual: np.ndarray, expected: np.ndarray, codec: str, rank_count: int) -> None:
    """Each hop rounds once, at most."""
    largest = np.abs(expected).max(initial=1.0) + rank_count
    atol = TOLERANCES[codec] * largest * (rank_count + 1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_operation_on_every_strategy(place, strategy, size, codec) -> None:
    arrays = [values(rank, 1003) for rank in range(size)]
    exact = np.stack(arrays).astype(np.float64)
    root = size - 1

    def work(group: shardwell.Group) -> dict[str, np.ndarray]:
        own = arrays[group.rank]
        found = {}
        for op in ("sum", "mean", "max", "min"):
            found[op] = own.copy()
            group.all_reduce(found[op], op)
        found["reduce"] = own.copy()
        group.reduce(found["reduce"], root=root)
        found["broadcast"] = own.copy()
        group.broadcast(found["broadcast"], root=root)
        scattered = own.copy()
        found["reduce_scatter"] = group.reduce_scatter(scattered).copy()
        found["all_gather"] = own.copy()
        group.all_gather(found["all_gather"])
        group.barrier()
        return found

    options = {"strategy": strategy, "codec": codec}
    ranks, again = (on_ranks(size, place, work, **options) for _ in range(2))
    expected = {
        "sum": exact.sum(0),
        "mean": exact.mean(0),
        "max": exact.max(0),
        "min": exact.min(0),
        "broadcast": exact[root],
        "all_gather": np.concatenate(
            [np.array_split(row, size)[rank] for rank, row in enumerate(exact)]
        ),
    }
    for name, wanted in expected.items():
        close_to(ranks[0][name], wanted, codec, size)
        for rank in range(size):
            assert ranks[rank][name].tobytes() == ranks[0][name].tobytes(), (name, rank)
    for rank in range(size):
        wanted = exact.sum(0) if rank == root else exact[rank]
        close_to(ranks[rank]["reduce"], wanted, codec, size if rank == root else 0)
        segment = np.array_split(exact.sum(0), size)[rank]
        close_to(ranks[rank]["reduce_scatter"], segment, codec, size)
        for name in ranks[rank]:
            assert ranks[rank][name].tobytes() == again[rank][name].tobytes(), (name, rank)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        *((shardwell.Centralized(), size) for size in (1, 2, 4)),
        *((shardwell.Tree(arity=2), size) for size in (3, 5)),
        *((shardwell.Ring(), size) for size in (2, 3, 5)),
    ],
    ids=str,
)
def test_large_arrays_are_sent_in_chunks(place, strategy, size) -> None:
    """Many chunks, with a last one that is short; integers, so that fp16 is exact."""
    length = LONG + 77

    def work(group: shardwell.Group) -> tuple[bool, int]:
        array = (np.arange(length) % 64 + group.rank).astype(np.float32)
        group.all_reduce(array)
        expected = (np.arange(length) % 64) * size + size * (size - 1) // 2
        return bool((array == expected).all()), group.traffic.sent_bytes

    results = on_ranks(size, place, work, strategy=strategy)
    assert all(right for right, _ in results)
    assert (max(sent for _, sent in results) > length) == (size > 1)


@pytest.mark.parametrize("name", ["join", "all_reduce", "reduce_scatter"])
def test_a_call_that_was_given_up_is_no_success(place, name) -> None:
    """As when Ctrl-C ends a `close` that waits for another thread's call."""

    def work(group: shardwell.Group) -> bool:
        arguments = () if name == "join" else (np.ones(4, np.float32),)
        if group.rank == 0:
            assert given_up.wait(PATIENCE_S)
            getattr(group, name)(*arguments)
            return True
        call = in_background(lambda: getattr(group, name)(*arguments))
        eventually("it is under way", lambda: group._threads._threads.running)
        group._threads.cancel_scope(None)
        with pytest.raises(shardwell.ClosedError, match="group"):
            call.result(PATIENCE_S)
        given_up.set()
        return True

    given_up = threading.Event()
    assert all(on_ranks(2, place, work))


@pytest.mark.parametrize("kind", ["matrix", pytest.param("tensor", marks=pytest.mark.extras)])
def test_a_segment_of_another_array_is_a_plain_view(place, kind) -> None:
    if kind == "tensor":
        torch = pytest.importorskip("torch")

    def work(group: shardwell.Group) -> bool:
        array = torch.ones(6) if kind == "tensor" else np.ones((2, 3), np.float32).view(np.matrix)
        segment = group.reduce_scatter(array)
        assert type(segment) is np.ndarray
        assert segment.tolist() == [2.0] * 3
        assert np.shares_memory(segment, np.asarray(array))
        return True

    assert all(on_ranks(2, place, work))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 2, 4, 524_288, 524_289, 3 * 524_288])
def test_lengths_about_the_edges_of_segments_and_chunks(place, strategy, length) -> None:
    def work(group: shardwell.Group) -> bool:
        array = np.full(length, group.rank + 1.0, np.float32)
        group.all_reduce(array)
        right = bool((array == 6).all())
        gathered = np.full(length, group.rank + 1.0, np.float32)
        group.all_gather(gathered)
        parts = [np.full(len(p), r + 1.0) for r, p in enumerate(np.array_split(gathered, 3))]
        segment = group.reduce_scatter(np.ones(length, np.float32))
        return right and bool((gathered == np.concatenate(parts)).all() and (segment == 3).all())

    assert on_ranks(3, place, work, strategy=strategy) == [True] * 3


@pytest.mark.parametrize("shape", [(), (1, 1), (4, 3), (2, 0, 3), (2, 3, 4, 5)])
def test_any_shape_in_place(place, shape) -> None:
    def work(group: shardwell.Group) -> np.ndarray:
        array = np.full(shape, group.rank + 1.0, np.float32)
        group.all_reduce(array)
        return array

    for array in on_ranks(2, place, work):
        assert array.shape == shape
        assert (array == 3).all()


@pytest.mark.sampled(11)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("counts", [(1, 2, 5), (0, 3, 0), (0, 0, 0), (2**24, 1, 2**24 - 1)])
def test_a_group_s_mean_is_weighted_by_samples(place, strategy, codec, counts) -> None:
    arrays = [values(rank, 257, seed=1) for rank in range(3)]

    def work(group: shardwell.Group) -> np.ndarray:
        array = arrays[group.rank].copy()
        group.all_reduce(array, "mean", sample_count=counts[group.rank])
        return array

    results = on_ranks(3, place, work, strategy=strategy, codec=codec)
    weights = np.array(counts) / max(sum(counts), 1)
    expected = (np.stack(arrays).astype(np.float64) * weights[:, None]).sum(0)
    close_to(results[0], expected, codec, 3)
    assert len({array.tobytes() for array in results}) == 1
    assert any(counts) or not results[0].any()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_fp16_never_overflows_silently(place, strategy, scale) -> None:
    def work(group: shardwell.Group) -> np.ndarray:
        array = (values(group.rank, 100) * scale).astype(np.float32)
        group.all_reduce(array)
        return array

    results = on_ranks(3, place, work, strategy=strategy)
    exact = np.sum([values(rank, 100) * scale for rank in range(3)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(results[0] / scale, exact / scale, rtol=0, atol=0.03)
    assert len({array.tobytes() for array in results}) == 1


def test_a_codec_for_one_call(place) -> None:
    def work(group: shardwell.Group) -> np.ndarray:
        array = np.full(3, 1 + 2**-20, np.float32)
        group.broadcast(array, codec="fp32")
        return array

    assert all((array == np.float32(1 + 2**-20)).all() for array in on_ranks(2, place, work))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_many_small_calls_under_way(place, strategy) -> None:
    """More than may be under way at once, of lengths that all differ: matched by order."""
    count = 300

    def work(group: shardwell.Group) -> bool:
        arrays = [np.full(1 + i % 13, i + group.rank, np.float32) for i in range(count)]
        futures = [group.all_reduce_async(array) for array in arrays]
        assert not concurrent.futures.wait(futures, 30).not_done
        assert [future.result() for future in futures] == [None] * count
        return all((array == 3 * i + 3).all() for i, array in enumerate(arrays))

    assert on_ranks(3, place, work, strategy=strategy) == [True] * 3


def test_calls_of_several_kinds_under_way_with_large_ones(place) -> None:
    def work(group: shardwell.Group) -> bool:
        large = [np.full(2**21, group.rank + i, np.float32) for i in range(4)]
        futures = [group.all_reduce_async(array) for array in large]
        group.barrier()
        small = np.full(2, group.rank, np.float32)
        group.broadcast(small, root=2)
        assert all(future.done() for future in futures)  # calls are made in order
        return bool((small == 2).all()) and all((a == 3 + 3 * i).all() for i, a in enumerate(large))

    assert on_ranks(3, place, work) == [True] * 3


def test_close_finishes_what_was_called(place) -> None:
    """The block ends with futures outstanding, and is left in any order: all are fulfilled."""

    def work(group: shardwell.Group) -> tuple[list[np.ndarray], list[concurrent.futures.Future]]:
        arrays = [np.full(2**18, group.rank + i, np.float32) for i in range(8)]
        return arrays, [group.all_reduce_async(array) for array in arrays]

    for strategy in STRATEGIES:
        for arrays, futures in on_ranks(4, place, work, strategy=strategy):
            for number, (array, future) in enumerate(zip(arrays, futures, strict=True)):
                assert future.result(0) is None
                assert (array == 6 + 4 * number).all()


def test_ranks_leave_as_soon_as_they_are_done(place) -> None:
    """At once after the last call, again and again: no rank's last call is cut off."""

    def reduced(group: shardwell.Group) -> bool:
        array = np.full(50_000, group.rank, np.float32)
        group.all_reduce(array)
        return bool((array == 10).all())

    def broadcast(group: shardwell.Group) -> bool:
        array = np.full(50_000, group.rank, np.float32)
        group.broadcast(array, root=group.rank and 0)
        return bool((array == 0).all())

    for number in range(6):
        for work in (reduced, broadcast):
            options = {"strategy": STRATEGIES[number % 4]}
            assert on_ranks(5, place, work, **options) == [True] * 5


def test_two_groups_in_one_process_at_once(place) -> None:
    def work(offset: int, group: shardwell.Group) -> float:
        for _ in range(20):
            array = np.full(3000, group.rank + offset, np.float32)
            group.all_reduce(array)
        return float(array[0])

    one = begun_on_ranks(3, place, partial(work, 0), name="one")
    two = begun_on_ranks(3, place, partial(work, 10), name="two", strategy=shardwell.Tree())
    assert [future.result(PATIENCE_S) for future in one] == [3.0] * 3
    assert [future.result(PATIENCE_S) for future in two] == [33.0] * 3


def test_a_list_of_addresses_needs_no_cluster() -> None:
    addresses = []
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    for holder in holders:
        addresses.append(f"127.0.0.1:{holder.getsockname()[1]}")
        holder.close()

    def work(group: shardwell.Group) -> float:
        array = np.full(10, group.rank, np.float32)
        group.all_reduce(array)
        return float(array[0])

    watch = Stopwatch()
    assert on_ranks(3, addresses, work) == [3.0] * 3
    assert watch.elapsed_s < PATIENCE_S


def test_a_rebuild_of_a_group_that_is_well(place) -> None:
    """One asks for it, the others learn of it; no rank is taken for dead, again and again."""
    all_done = threading.Barrier(3)

    def work(group: shardwell.Group) -> None:
        generations = [group.generation]
        for number in range(8):
            if group.rank != number % 3:
                error = error_of(group.barrier)
                assert isinstance(error, shardwell.WorkerLostError)
                assert error.rank == number % 3
                assert "asked to rebuild" in error.message
            group.rebuild()
            assert group.size == 3
            generations.append(group.generation)
            array = np.full(4, group.rank, np.float32)
            group.all_reduce(array)
            assert (array == 3).all()
            all_done.wait(PATIENCE_S)
        assert generations == sorted(set(generations))

    on_ranks(3, place, work)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_a_nan_has_one_pattern_on_all_ranks(cluster, size, codec, op) -> None:
    def reduce(group: shardwell.Group) -> set[int]:
        values = np.resize(np.roll(ODD_NANS[:-1], group.rank), 50)  # NumPy warns of the last one
        group.all_reduce(values, op=op)
        assert np.isnan(values).all()
        return nan_bits(values)

    found = on_ranks(size, cluster(1).target, reduce, codec=codec, allow_non_finite=True)
    assert found == [{CANONICAL}] * size


# Several threads that use one group, and a rank that is as far ahead as it may be.


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
