"""Goal: however many threads a rank's calls use, the bits are the same, and so are the errors.

Method: real groups whose ranks have one thread, several, or as many as they like; every verb, with
memory shared and over TCP; then a value that is not finite, and a chunk that is damaged.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.group.ranks import error_of, joined, on_ranks
from harness.polling import eventually
from harness.threads import in_background
from shardwell.group.engine import Engine
from shardwell.group.transport.peers import Incoming, Received

SIZE = 2_500_000
"""With fp16, two chunks for each of three ranks; five where there are no segments."""
RANK_COUNT = 3
_NUMBERS = itertools.count()


@pytest.fixture
def place(cluster) -> str:
    return str(cluster(1).target)


def core_threads() -> int:
    return sum(each.name == "shardwell-core" for each in threading.enumerate())


@functools.cache
def drawn(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(SIZE, np.float32)


def values(rank: int, magnitude: float = 1.0) -> np.ndarray:
    return drawn(rank) * np.float32(magnitude)


def called(group: shardwell.Group) -> list[str]:
    """What each verb leaves in the array, in short."""
    found = []

    def note(array: np.ndarray) -> None:
        found.append(hashlib.blake2b(array.tobytes()).hexdigest())

    for codec in ("fp32", "fp16", "bf16"):
        given: dict[str, Any] = {"codec": codec}
        for op in ("sum", "mean", "max"):
            array = values(group.rank)
            group.all_reduce(array, op, **given)
            note(array)
        array = values(group.rank)
        note(group.reduce_scatter(array, "mean", sample_count=group.rank + 1, **given))
        group.all_gather(array, **given)
        note(array)
        array = values(group.rank, 1e-20)
        group.reduce(array, 1, **given)
        note(array)
        group.broadcast(array, 2, **given)
        note(array)
    return found


def on_threads(place: str, counts: tuple[int, ...], **options: Any) -> list[list[str]]:
    """What each rank comes to, with so many threads."""
    name = f"threads-{next(_NUMBERS)}"

    def run(rank: int) -> list[str]:
        given = {"name": name, "threads": counts[rank], **options}
        with joined(place, rank, RANK_COUNT, **given) as group:
            return called(group)

    futures = [in_background(lambda rank=rank: run(rank)) for rank in range(RANK_COUNT)]
    return [future.result(90) for future in futures]


@pytest.mark.timeout(170)
@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("strategy", ["ring", "tree(arity=2)", "centralized"])
def test_threads_of_a_group_give_the_same_bits(place, monkeypatch, strategy, same_host) -> None:
    rounds: list[int] = []
    made_beside = Engine._made_beside

    def noted(engine: Engine, moving: Any, arithmetics: Any) -> Any:
        rounds.append(len(arithmetics))
        return made_beside(engine, moving, arithmetics)

    monkeypatch.setattr(Engine, "_made_beside", noted)
    options = {"strategy": strategy, "same_host": same_host}
    expected = on_threads(place, (1, 1, 1), **options)
    assert not rounds
    for counts in ((2, 2, 2), (4, 4, 4), (7, 7, 7), (1, 4, 2)):
        rounds.clear()
        assert on_threads(place, counts, **options) == expected
        assert 2 <= max(rounds) <= max(counts)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_begin_when_they_are_needed_and_end_with_the_group(place, threads) -> None:
    before = core_threads()

    def work(group: shardwell.Group) -> None:
        group.all_reduce(np.ones(1000, np.float32))
        group.barrier()
        assert core_threads() == before
        group.barrier()
        for _ in range(3):
            group.all_reduce(values(group.rank))
        assert (core_threads() > before) == (threads > 1)
        assert core_threads() <= before + 2 * (threads - 1)
        group.barrier()

    on_ranks(2, place, work, threads=threads)
    eventually("they end", lambda: core_threads() == before)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("strategy", ["ring", "centralized"])
def test_nothing_that_is_not_finite_leaves(place, threads, strategy) -> None:
    """The first value is named, whichever thread found which; the group goes on."""
    first = SIZE // 2 + 17

    def work(group: shardwell.Group) -> None:
        array = values(group.rank)
        if group.rank == 1:
            array[[first, SIZE - 300_000, SIZE - 1]] = np.inf, np.nan, -np.inf
        before = array.tobytes()
        error = error_of(lambda: group.all_reduce(array, "mean"))
        assert isinstance(error, shardwell.NonFiniteError)
        assert error.element_index == first
        assert array.tobytes() == before
        assert group.traffic.sent_bytes == 0
        ones = np.ones(SIZE, np.float32)
        group.all_reduce(ones)
        assert (ones == 2.0).all()

    on_ranks(2, place, work, threads=threads, strategy=strategy)


@pytest.mark.same_host
@pytest.mark.parametrize("strategy", ["ring", "tree(arity=2)", "centralized"])
def test_a_damaged_chunk_ends_the_call_and_leaves_values_or_results(
    place, monkeypatch, strategy
) -> None:
    """No thread writes to an array whose call has failed; a rank that was done by then is done."""
    real, count = Incoming._received, itertools.count()

    def damaging(self: Incoming, *message: Any) -> Received:
        received = real(self, *message)
        if not received.payload.size or next(count) != 5:
            return received
        payload = received.payload.copy()
        payload[100] ^= 1
        return received._replace(payload=payload)

    monkeypatch.setattr(Incoming, "_received", damaging)

    def work(group: shardwell.Group) -> str:
        array = np.full(SIZE, group.rank + 1.0, np.float32)
        try:
            group.all_reduce(array)
        except shardwell.ShardwellError as error:
            assert np.isin(array, [group.rank + 1.0, 6.0]).all()
            return error.message
        assert (array == 6.0).all()
        return ""

    messages = set(on_ranks(3, place, work, threads=4, strategy=strategy)) - {""}
    assert messages
    assert all("CRC32C" in message for message in messages), messages


def test_how_many_threads_a_group_has(place, monkeypatch) -> None:
    for wrong in (0, -1, 257, True, 1.5, "4"):
        with pytest.raises(shardwell.ArgumentError, match="threads must be 1 to 256; got"):
            joined(place, 0, 1, threads=wrong)
    monkeypatch.setenv("SHARDWELL_THREADS", "none")
    with pytest.raises(shardwell.ArgumentError, match=r"\$SHARDWELL_THREADS must be 1 to 256"):
        joined(place, 0, 1)
    monkeypatch.setenv("SHARDWELL_THREADS", "3")
    before = core_threads()

    def work(group: shardwell.Group) -> None:
        group.all_reduce(values(group.rank))
        assert before < core_threads() <= before + 4
        group.barrier()

    on_ranks(2, place, work)
