"""Goal: Ctrl-C, and once more while the call is taken back, leaves each call whole or not at all.

Method: KeyboardInterrupt at each moment at which a batch can be interrupted; and after each of its
writes, and then at each moment of taking it back. Then the file is opened as a kill would leave it,
and as `close` does. Oracle: the sums before and after the batch.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.faults.interrupts import Interrupt
from harness.stories.accumulator import DIM, ROW_COUNT, Call, Sums, gradients_of, short_blocks
from harness.stories.images import in_memory
from shardwell.errors import StorageError
from shardwell_server import MmapGradientAccumulator

FILES = ("accumulator/sums.py", "store/row_undo.py", "store/row_arrays.py")
CLEARING_FILES = (
    "accumulator/accumulator.py",
    "accumulator/file.py",
    "accumulator/file_layout.py",
)
ROWS = [1, 2, 3, 5, 8, 13]  # two blocks, of rows with sums and without
OLD_ROWS = [2, 5, 9]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


def opened(
    path: Path, *, recover: bool = False, reached: Callable[[str], None] = lambda point: None
) -> MmapGradientAccumulator:
    return MmapGradientAccumulator(path, DIM, ROW_COUNT, recover=recover, reached=reached)


def sums_of(accumulator: MmapGradientAccumulator) -> Sums:
    rows = accumulator.touched_rows().tolist()
    return {row: accumulator.get_grad(row).tolist() for row in rows}


def sums_in(path: Path, *, recover: bool) -> Sums:
    with opened(path, recover=recover) as accumulator:
        return sums_of(accumulator)


def expected(rows: list[int], value: int, before: Sums) -> Sums:
    return Call("accumulate_rows", rows, value).change(before)


BEFORE = expected(OLD_ROWS, 1, {})
AFTER = expected(ROWS, 2, BEFORE)


class Batch:
    """A file with old rows, and a batch that is interrupted.

    Args:
        path: Path of the file, made anew.
        at_write: Number of the write after which it is interrupted; None: not by this.
        then: An interrupt that is counted from there on, or from the start.
    """

    def __init__(self, path: Path, at_write: int | None, then: Interrupt) -> None:
        path.unlink(missing_ok=True)
        self.write_count = 0

        def reached(point: str) -> None:
            self.write_count += 1
            if self.write_count - 1 == at_write:
                then.begin()
                raise KeyboardInterrupt

        self._path = path
        self._reached: Callable[[str], None] = lambda point: None
        self.accumulator = opened(path, reached=lambda point: self._reached(point))
        self.accumulator.accumulate_rows(OLD_ROWS, gradients_of(OLD_ROWS, 1))
        self._reached = reached
        if at_write is None:
            then.run(self._send)
        else:
            with pytest.raises(KeyboardInterrupt):
                self._send()
            sys.setprofile(None)
        self._reached = lambda point: None

    def _send(self) -> None:
        self.accumulator.accumulate_rows(ROWS, gradients_of(ROWS, 2))

    def check(self) -> bool:
        """The batch is in the file as a whole or not at all. Returns whether it is."""
        copy = self._path.with_name("copy")
        shutil.copyfile(self._path, copy)
        found = sums_in(copy, recover=True)
        assert found in (BEFORE, AFTER)
        zeros, is_told = np.zeros((1, DIM), np.float32), True
        try:
            assert sums_of(self.accumulator) == found
        except StorageError:
            is_told = False
            sums, rows = self.accumulator._sums, np.array([9])
            assert sums is not None
            for call in (
                lambda: self.accumulator.get_grad(9),
                lambda: self.accumulator.accumulate_rows([9], zeros),
                lambda: self.accumulator.apply(0.5, np.zeros((ROW_COUNT, DIM), np.float32)),
                self.accumulator.zero_grad,
                lambda: sums.add(rows, zeros),  # of a thread that came before
            ):
                with pytest.raises(StorageError, match="close the accumulator"):
                    call()
        else:
            self.accumulator.accumulate_rows([9], zeros)
        self.accumulator.close()
        assert sums_in(self._path, recover=False) == found
        return is_told


@pytest.fixture(autouse=True)
def blocks() -> Iterator[None]:
    with short_blocks():
        yield


def test_ctrl_c_at_any_moment(tmp_path: Path) -> None:
    for number in itertools.count():
        interrupt = Interrupt(FILES, number)
        batch = Batch(tmp_path / "sums", None, interrupt)
        assert batch.check()
        if not interrupt.place:
            break
    assert number > 50


def test_ctrl_c_while_all_sums_are_taken_away(tmp_path: Path) -> None:
    """Sums that are added afterwards remain."""
    path, copy = tmp_path / "sums", tmp_path / "copy"
    for number in itertools.count():
        path.unlink(missing_ok=True)
        interrupt = Interrupt([*FILES, *CLEARING_FILES], number)
        with opened(path) as accumulator:
            accumulator.accumulate_rows(OLD_ROWS, gradients_of(OLD_ROWS, 1))
            interrupt.run(accumulator.zero_grad)
            accumulator.accumulate_rows(ROWS, gradients_of(ROWS, 2))
            shutil.copyfile(path, copy)
            found = sums_of(accumulator)
        assert found in (AFTER, expected(ROWS, 2, {}))
        assert sums_in(copy, recover=True) == found
        if not interrupt.place:
            break
    assert number > 20


def test_ctrl_c_while_a_call_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    write_count = Batch(path, None, Interrupt(FILES, 10**6)).write_count
    assert write_count > 7
    refused_count = 0
    for at_write in range(write_count):
        for number in itertools.count():
            interrupt = Interrupt(FILES, number)
            refused_count += not Batch(path, at_write, interrupt).check()
            if not interrupt.place:
                break
    assert refused_count > 20
