"""Goal: many threads at once lose nothing, see nothing half done, and wait only for their stripes.

Method: values are small integers, whose float32 sums are exact in any order; threads that wait are
seen in the locks. Oracle: `np.add.at` in float64, and pairs of rows that only change together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from harness.polling import eventually
from harness.stories.images import in_memory
from shardwell_server import MmapGradientAccumulator

THREAD_COUNT = 8
ROW_COUNT = 1000
DIM = 5
TIMEOUT_S = 30.0


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    with in_memory(tmp_path) as directory:
        yield directory / "sums" if request.param == "file" else None


def in_threads(work: Callable[[int], object]) -> None:
    """Runs it for each number at once; raises what one of them raises."""
    start = threading.Barrier(THREAD_COUNT)

    def run(number: int) -> None:
        start.wait(TIMEOUT_S)
        work(number)

    with ThreadPoolExecutor(THREAD_COUNT) as threads:
        for done in [threads.submit(run, number) for number in range(THREAD_COUNT)]:
            done.result(TIMEOUT_S)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows_per_lock", [1, 64, ROW_COUNT])
def test_a_hammer_loses_nothing(path: Path | None, rows_per_lock: int) -> None:
    """All that was added is in the sums or was applied, while some apply and read."""
    call_count = 40
    calls = []
    for number in range(THREAD_COUNT):
        rng = np.random.default_rng(number)
        for _ in range(call_count):
            ids = rng.zipf(1.2, 64) % ROW_COUNT
            calls.append((ids, rng.integers(-9, 10, (64, DIM)).astype(np.float32)))
    expected = np.zeros((ROW_COUNT, DIM))
    for ids, gradients in calls:
        np.add.at(expected, ids, gradients)
        expected[ids[0]] += gradients[0]
    rows = np.zeros((ROW_COUNT, DIM), np.float32)
    with MmapGradientAccumulator(path, DIM, ROW_COUNT, rows_per_lock) as accumulator:

        def work(number: int) -> None:
            for index in range(number * call_count, (number + 1) * call_count):
                ids, gradients = calls[index]
                accumulator.accumulate_rows(ids, gradients)
                accumulator.accumulate(ids[0], gradients[0])
                accumulator.get_grad(ids[1])
                if index % 16 == 0:
                    accumulator.apply(0.5, rows)
                if index % 16 == 8:
                    accumulator.touched_rows()

        in_threads(work)
        for row in accumulator.touched_rows():
            rows[row] -= 0.5 * accumulator.get_grad(row)
    np.testing.assert_array_equal(rows, -0.5 * expected)


def test_apply_is_a_clean_cut(path: Path | None) -> None:
    """Both rows of a pair get the same in one call; so they are equal after each apply."""
    rows = np.zeros((ROW_COUNT, DIM), np.float32)
    far = ROW_COUNT // 2
    done = threading.Event()
    with MmapGradientAccumulator(path, DIM, ROW_COUNT, 4) as accumulator:

        def add(number: int) -> None:
            rng = np.random.default_rng(number)
            for _ in range(100):
                ids = rng.permutation(far)[:20]
                gradients = rng.integers(1, 9, (20, DIM)).astype(np.float32)
                accumulator.accumulate_rows([*ids, *(ids + far)], np.tile(gradients, (2, 1)))

        def apply() -> int:
            count = 0
            while not done.is_set():
                count += accumulator.apply(0.5, rows) > 0
                np.testing.assert_array_equal(rows[:far], rows[far:])
                touched = accumulator.touched_rows()
                half = touched.size // 2
                np.testing.assert_array_equal(touched[:half] + far, touched[half:])
            return count

        with ThreadPoolExecutor(1) as other:
            applying = other.submit(apply)
            try:
                in_threads(add)
            finally:
                done.set()
            assert applying.result(TIMEOUT_S) > 1
        accumulator.apply(0.5, rows)
    np.testing.assert_array_equal(rows[:far], rows[far:])
    assert rows.any()


class Waiting:
    """A call in a thread of its own."""

    def __init__(self, accumulator: MmapGradientAccumulator, call: Callable[[], object]) -> None:
        self._locks = accumulator._locks
        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def waits(self) -> bool:
        """Whether it comes to wait, rather than end; that is waited for."""
        eventually(
            "the call waits or ends",
            lambda: self._locks.waiting_count or not self._thread.is_alive(),
        )
        return self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


@pytest.mark.parametrize(
    ("rows_per_lock", "row", "waits"),
    [(64, 63, True), (64, 64, False), (1, 1, False), (100, 99, True), (10**6, 999, True)],
)
def test_stripes_are_as_wide_as_they_should_be(
    path: Path | None, rows_per_lock: int, row: int, waits: bool
) -> None:
    gradient = np.ones(DIM, np.float32)
    with MmapGradientAccumulator(path, DIM, ROW_COUNT, rows_per_lock) as accumulator:
        stripes = accumulator._touched.stripes_of(np.array([0]))
        for call in (
            lambda: accumulator.accumulate(row, gradient),
            lambda: accumulator.accumulate_rows([row, 999], np.ones((2, DIM))),
            lambda: accumulator.get_grad(row),
        ):
            with accumulator._locks.exclusive(stripes):
                waiting = Waiting(accumulator, call)
                assert waiting.waits() == waits
            waiting.end()


def test_readers_share_and_apply_takes_what_was_touched(path: Path | None) -> None:
    gradient = np.ones(DIM, np.float32)
    rows = np.zeros((ROW_COUNT, DIM), np.float32)
    with MmapGradientAccumulator(path, DIM, ROW_COUNT, 10) as accumulator:
        accumulator.accumulate(5, gradient)
        stripe = np.array([0])
        with accumulator._locks.shared(stripe):
            for call, waits in (
                (lambda: accumulator.get_grad(5), False),
                (accumulator.touched_rows, False),
                (lambda: accumulator.accumulate(15, gradient), False),
                (lambda: accumulator.accumulate(5, gradient), True),
            ):
                waiting = Waiting(accumulator, call)
                assert waiting.waits() == waits
        waiting.end()
        for other, waits in ((0, True), (7, False)):
            accumulator.accumulate(5, gradient)
            with accumulator._locks.shared(np.array([other])):
                waiting = Waiting(accumulator, lambda: accumulator.apply(1.0, rows))
                assert waiting.waits() == waits
            waiting.end()
        assert rows[5].tolist() == [-4.0] * DIM
        with accumulator._locks.shared(np.array([7])):
            waiting = Waiting(accumulator, accumulator.zero_grad)
            assert waiting.waits()
        waiting.end()
