"""What happens to a gradient accumulator and the rows that it is applied to, as a list of calls.

Both are in files, so that what a killed process leaves can be compared with a model in plain
Python. Gradients are small integers, so that sums are exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from shardwell_server import MmapGradientAccumulator
from shardwell_server.accumulator import sums as stored_sums

DIM = 3
ROW_COUNT = 40
BLOCK_ROW_COUNT = 4
RATE = 0.5
Sums = dict[int, list[float]]
"""The rows that have a sum, and their sums."""


def short_blocks() -> contextlib.AbstractContextManager[Any]:
    """While it lasts, accumulators are made that work on a few rows at a time."""
    return mock.patch.object(stored_sums, "BLOCK_ELEMENT_COUNT", DIM * BLOCK_ROW_COUNT)


def gradients_of(rows: Sequence[int], value: int) -> np.ndarray:
    """(n, DIM) float32: one gradient for each of the rows; another value, other gradients."""
    return np.array([[value, row, value * row] for row in rows], np.float32).reshape(-1, DIM)


class Call(NamedTuple):
    """One call."""

    kind: str
    """accumulate, accumulate_rows, apply, zero_grad, reopen."""
    rows: Sequence[int] = ()
    value: int = 0

    def change(self, sums: Sums) -> Sums:
        """The sums after it."""
        if self.kind in ("apply", "zero_grad"):
            return {}
        after = {row: list(values) for row, values in sums.items()}
        for row, gradient in zip(self.rows, gradients_of(self.rows, self.value), strict=True):
            old = after.get(row, [0.0] * DIM)
            after[row] = [a + float(b) for a, b in zip(old, gradient, strict=True)]
        return after

    def may_leave(self, sums: Sums, found: Sums) -> bool:
        """Whether a process that was killed in it, with these sums before, may leave others."""
        if found in (sums, self.change(sums)):
            return True
        if self.kind != "apply" or not found.items() <= sums.items():
            return False
        # Blocks were cleared one after the other, the last one perhaps in part.
        left = [share for _, share in blocks_left(sums, found)]
        return left == sorted(left) and sum(0 < share < 1 for share in left) <= 1


def blocks_left(sums: Sums, found: Sums) -> list[tuple[tuple[int, ...], float]]:
    """The blocks in which rows are applied, each with the share of them that have a sum still."""
    rows = sorted(sums)
    blocks = [rows[i : i + BLOCK_ROW_COUNT] for i in range(0, len(rows), BLOCK_ROW_COUNT)]
    return [(tuple(b), sum(row in found for row in b) / len(b)) for b in blocks]


STORY = [
    Call("accumulate", [5], 1),
    Call("accumulate_rows", [13, 1, 2, 3, 5, 7, 9, 1, 11, 21], 2),  # in blocks
    Call("accumulate_rows", [39, 5], 3),
    Call("apply"),
    Call("accumulate_rows", [*range(12)], 4),  # old sums have no meaning
    Call("zero_grad"),
    Call("accumulate_rows", [3, 3, 8], 5),
    Call("reopen"),
    Call("accumulate_rows", [8, 9], 6),
    Call("apply"),
    Call("accumulate", [8], 7),
    Call("reopen"),
]


def states_of(story: list[Call]) -> list[Sums]:
    """Before the story, and after each call."""
    states: list[Sums] = [{}]
    for call in story:
        states.append(call.change(states[-1]))
    return states


STATES = states_of(STORY)


def die(accumulator: MmapGradientAccumulator) -> None:
    """Gives up its file as a killed process does, unless it is closed."""
    sums, accumulator._sums = accumulator._sums, None
    if sums is not None and accumulator._file is not None:
        accumulator._file.close()


class Telling:
    """An accumulator and the rows that it is applied to, in a directory; as a process has them."""

    def __init__(self, path: Path, reached: Callable[[str], None] = lambda point: None) -> None:
        self._path = path
        self._reached = reached
        self.accumulator = self._open()
        rows = path / "rows"
        if not rows.exists():
            rows.write_bytes(bytes(4 * ROW_COUNT * DIM))
        self.rows = np.memmap(rows, np.float32, "r+", shape=(ROW_COUNT, DIM))

    def make(self, call: Call) -> None:
        """Makes a call."""
        match call.kind:
            case "accumulate":
                gradient = gradients_of(call.rows, call.value)[0]
                self.accumulator.accumulate(call.rows[0], gradient)
            case "accumulate_rows":
                gradients = gradients_of(call.rows, call.value)
                self.accumulator.accumulate_rows(call.rows, gradients)
            case "apply":
                self.accumulator.apply(RATE, self.rows)
            case "zero_grad":
                self.accumulator.zero_grad()
            case "reopen":
                self.accumulator.close()
                self.accumulator = self._open()

    def sums(self) -> Sums:
        """All sums."""
        rows = self.accumulator.touched_rows().tolist()
        found = {row: self.accumulator.get_grad(row).tolist() for row in rows}
        for row in set(range(ROW_COUNT)).difference(rows):
            assert not self.accumulator.get_grad(row).any()
        return found

    def die(self) -> None:
        """Gives up the file as a killed process does."""
        die(self.accumulator)

    def _open(self) -> MmapGradientAccumulator:
        with short_blocks():
            return MmapGradientAccumulator(
                self._path / "sums", DIM, ROW_COUNT, rows_per_lock=8, reached=self._reached
            )


@contextlib.contextmanager
def as_killed(path: Path, reached: Callable[[str], None] = lambda point: None) -> Iterator[Telling]:
    """The contents of a directory, as a process has it that is killed at the end of the `with`."""
    telling = Telling(path, reached)
    try:
        yield telling
    finally:
        telling.die()
