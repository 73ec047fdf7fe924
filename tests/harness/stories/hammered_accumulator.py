"""A program whose threads add to an accumulator until it is killed, noting what was answered.

Usage: hammered_accumulator.py FILE NOTES

Thread t adds 1.0 in column t of some rows, others in each call. NOTES has a count of answered calls
for each thread, in memory shared with the kernel, so that it survives the process.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

from shardwell_server import MmapGradientAccumulator

THREAD_COUNT = 3
ROW_COUNT = 500
ROWS_PER_CALL_MAX = 120


def opened(path: Path) -> MmapGradientAccumulator:
    """The accumulator, in this process."""
    return MmapGradientAccumulator(path, THREAD_COUNT, ROW_COUNT, rows_per_lock=16)


def rows_of(thread: int, call: int) -> np.ndarray:
    """The rows of a call, without repeats."""
    chance = np.random.default_rng([thread, call])
    return chance.permutation(ROW_COUNT)[: chance.integers(1, ROWS_PER_CALL_MAX)]


def counts(notes: Path) -> np.ndarray:
    """(THREAD_COUNT,) int64: calls that were answered."""
    found = np.frombuffer(notes.read_bytes(), np.int64)
    return found if found.size else np.zeros(THREAD_COUNT, np.int64)


def main(path: Path, notes: Path) -> None:
    """Never returns."""
    with opened(path) as accumulator:
        answered = np.memmap(notes, np.int64, "w+", shape=(THREAD_COUNT,))

        def add(thread: int) -> None:
            call = 0
            while True:
                rows = rows_of(thread, call)
                gradients = np.zeros((rows.size, THREAD_COUNT), np.float32)
                gradients[:, thread] = 1.0
                accumulator.accumulate_rows(rows, gradients)
                call += 1
                answered[thread] = call

        threads = [threading.Thread(target=add, args=(t,)) for t in range(THREAD_COUNT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
