"""`MmapGradientAccumulator`: many threads add gradients to rows of a file, one applies them.

Role: arguments, locks and lifetime; the bytes are `StoredSums`', the file `GradientFile`'s.
Invariant: a row's sum, word and flag are read and written only by who holds its stripe.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from shardwell.errors import ArgumentError, ClosedError, NonFiniteError, StorageError
from shardwell.numerics.arguments import as_flat, as_output, check_finite, check_integer
from shardwell.numerics.codec import Float32
from shardwell.numerics.row_sums import Rows, first_bad_cell, merge_repeats
from shardwell.process.connected import Closing, OwnerProcess
from shardwell.process.local_paths import local_path
from shardwell.specs.optimizers import check_learning_rate
from shardwell.specs.table import DIM_MAX
from shardwell_server.accumulator.file import GradientFile
from shardwell_server.accumulator.file_layout import State, SumLayout
from shardwell_server.accumulator.stripe_locks import StripeLocks
from shardwell_server.accumulator.sums import StoredSums, SumMemory, TouchedRows

ROW_COUNT_MAX = 2**40
SIZE_BYTES_MAX = 2**46
"""Most bytes of all that is mapped; half of the address space of a process."""
_ROW_ID_MAX = 2**128
_RATE_MAX = float(np.finfo(np.float32).max)


class MmapGradientAccumulator(Closing):
    """The sums of gradients by row, in a file that survives kill -9. A context manager.

    Any thread may call anything. A call on rows waits only for calls on the same stripes:
    `rows_per_lock` neighbouring rows have one reader-writer lock, waiting is in the order of
    arrival, and so a waiting writer goes before readers that come later. A batch takes all its
    stripes at once, in a few passes over arrays: neither rows nor stripes cost Python each, but
    every stripe some nanoseconds. `apply` and `touched_rows` see a clean cut: each call of
    `accumulate_rows` whole or not at all.

    After kill -9, at any instruction, opening the file finds each call of `accumulate`,
    `accumulate_rows` and `zero_grad` whole or not at all; see `apply` for what it leaves. The
    kernel keeps what a killed process wrote, but not what a machine that loses power had not
    written to disk: a file that was not closed then is refused. `close` puts everything on disk.

    Ctrl-C in such a call takes it back, unless it was done. Where Ctrl-C comes once more meanwhile,
    every further call is refused (StorageError) but `close`, which takes it back; and if that fails
    or is not called, opening the file with `recover` does.

    Disk space is taken as rows are first touched, in pieces of 64 KiB, because most of the rows of
    a sparse table get no gradient between two `apply`: a file of 10 million rows takes the pages
    that were touched. It stays with the file. Where there is none, the call that needs it fails,
    before anything has changed.

    Examples:
        >>> import numpy as np
        >>> from shardwell_server import MmapGradientAccumulator
        >>> weights = np.ones((1000, 2), np.float32)
        >>> with MmapGradientAccumulator(None, dim=2, max_rows=1000) as accumulator:
        ...     accumulator.accumulate(7, np.array([1.0, 2.0], np.float32))
        ...     accumulator.accumulate_rows([7, 9, 7], np.ones((3, 2), np.float32))
        ...     accumulator.touched_rows().tolist()
        ...     accumulator.get_grad(7).tolist()
        ...     accumulator.apply(learning_rate=0.5, rows=weights)
        ...     accumulator.touched_rows().tolist()
        [7, 9]
        [3.0, 4.0]
        2
        []
        >>> weights[7].tolist(), weights[8].tolist()
        ([-0.5, -1.0], [1.0, 1.0])

    Args:
        path: The file. It is made where there is none; what is in one that exists is checked and
            stays: its head has CRC32C, every sum a check of its own. None: plain memory, gone with
            the process.
        dim: Values of a row, 1 to 65536. An existing file must have been made for it.
        max_rows: Rows are numbered from 0 to below it. An existing file must have been made for it.
        rows_per_lock: Rows that exclude each other. Fewer: threads wait less for each other; more:
            batches have fewer stripes. `max_rows` or more: one lock.
        recover: What becomes of a file that was not closed, because its process was killed: True
            (default) takes back the calls that were under way, False refuses it. A damaged file
            is refused in any case, and so is one that another accumulator has open.
        reached: Called after every write, with what was written; for tests.

    Raises:
        ArgumentError: an argument is out of range.
        ForkedError: a method is called in a process that was forked from the one that made it.
        StorageError: the file is damaged, in use, was made for another dim or max_rows, was not
            closed (see `recover`), or can't be made or opened; the message says what to do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        dim: int,
        max_rows: int,
        rows_per_lock: int = 64,
        *,
        recover: bool = True,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._layout = SumLayout(
            dim=check_integer("dim", dim, 1, DIM_MAX),
            row_count=check_integer("max_rows", max_rows, 1, ROW_COUNT_MAX),
        )
        if self._layout.size_bytes > SIZE_BYTES_MAX:
            raise ArgumentError(
                f"max_rows x dim is too large: {max_rows} x {dim} would map "
                f"{self._layout.size_bytes} bytes; at most {SIZE_BYTES_MAX} can be"
            )
        stripe = min(check_integer("rows_per_lock", rows_per_lock, 1, 2**62), self.row_count)
        self._touched = TouchedRows(self.row_count, stripe)
        self._locks = StripeLocks(self._touched.stripe_count)
        self._reached = reached
        self._owner = OwnerProcess("gradient accumulator")
        self._was_recovered = False
        self._file: GradientFile | None = None
        self._sums: StoredSums | None = None
        if path is None:
            memory = SumMemory(self._layout.size_bytes)
            self._sums = StoredSums(memory, self._layout, secrets.randbits(32), reached)
        else:
            self._file = GradientFile.open_or_make(
                local_path(path), self._layout, reached, recover=bool(recover)
            )
            try:
                self._sums = self._opened(self._file)
            except BaseException:
                self._file.close()
                raise

    def _opened(self, file: GradientFile) -> StoredSums:
        sums = StoredSums(file, self._layout, file.salt, self._reached)
        state = file.state.get()
        sums.take_back()
        rows = sums.find()
        if state is State.CLEARING:
            sums.clear(rows)
            rows = rows[:0]
        bad = sums.first_damaged(rows)
        if bad is not None:
            raise StorageError(
                f"{file.path}: the sum of row {bad} was damaged; restore it from a copy, or "
                "remove it"
            )
        if state is State.CLOSED and sums.summary(rows) != file.state.summary:
            raise StorageError(
                f"{file.path}: sums are missing: it has {rows.size}, and had "
                f"{file.state.summary.row_count} when it was closed; restore it from a copy, or "
                "remove it"
            )
        file.begin()
        self._was_recovered = file.was_open
        self._touched.touch(rows, self._touched.stripes_of(rows))
        return sums

    @property
    def dim(self) -> int:
        """The values of a row."""
        return self._layout.dim

    @property
    def row_count(self) -> int:
        """The rows that there are, with a gradient or without: `max_rows`."""
        return self._layout.row_count

    @property
    def was_recovered(self) -> bool:
        """True if the file had not been closed by its last process."""
        return self._was_recovered

    def accumulate(self, row_id: int, gradient: Any) -> None:
        """Adds a gradient to a row's sum. It is kept, also after kill -9, when the call returns.

        Many gradients at once are many times faster: see `accumulate_rows`.

        Args:
            row_id: From 0 to below `row_count`, of any integer type.
            gradient: A NumPy array (or what offers one) of `dim` values, float32, or float64 or
                float16, which are converted.

        Raises:
            ArgumentError: the row is out of range, or the gradient has another length or dtype.
            NonFiniteError: the gradient has NaN or infinity; `element_index` is the first one's
                place. Or the row's sum would be beyond float32: -1.
            StorageError: there is no disk space for the row.
            ClosedError: the accumulator is closed.
        """
        row = check_integer("row_id", row_id, 0, self.row_count - 1)
        values = _finite(f"gradient of row {row}", gradient, (1, self.dim), "skip it, or mend it")
        self._add(np.array([row]), values)

    def accumulate_rows(self, row_ids: Any, gradients: Any) -> None:
        """Adds gradients to rows' sums: all of them, or, when it raises, none.

        Args:
            row_ids: (n,), or of any shape: an array of any integer dtype, or a list, in any order.
                Repeated ids add up, first among themselves, in segments of 8.
            gradients: (n, dim), or the shape of `row_ids` and `dim`: as in `accumulate`.

        Raises:
            ArgumentError: as `accumulate`; the shapes don't fit. Names the first place.
            NonFiniteError: as `accumulate`; names the row where it is a sum.
            StorageError: there is no disk space for the rows, or to take the call back.
            ClosedError: the accumulator is closed.
        """
        rows, merged = _batch(row_ids, gradients, self.row_count, self.dim)
        if rows.size:
            self._add(rows, merged)

    def _add(self, rows: Rows, gradients: Float32) -> None:
        self._owner.check()
        stripes = self._touched.stripes_of(rows)
        with self._locks.exclusive(stripes):
            sums = self._open_sums()
            sums.reserve(rows)
            self._touched.touch(rows, stripes)
            sums.add(rows, gradients)

    def apply(self, learning_rate: float, rows: Any) -> int:
        """Subtracts learning_rate * sum from each row that has a sum, and takes the sum from it.

        Only those rows are read or written; they are found by a flag a stripe and a flag a row.
        The product is rounded to float32, then the difference.

        Killed in the middle, the file has lost the sums of all rows that were applied, except
        those of one block (512 KiB of rows): these may have been applied, in whole or in part, and
        still have their sums. So a program that keeps `rows` in a file, too, and goes on with
        both, may apply one block twice.

        Args:
            learning_rate: Finite, at least 0.
            rows: (row_count, dim) float32, C-contiguous and writable: the caller's, changed in
                place. No other thread may write it meanwhile.

        Returns:
            How many rows had a sum.

        Raises:
            ArgumentError: an argument can't be used.
            NonFiniteError: a product is beyond float32; `element_index` is its place in `rows`.
                Blocks before it were applied, and their sums are gone; call again with a smaller
                rate for the others.
            ClosedError: the accumulator is closed.
        """
        if check_learning_rate("learning_rate", learning_rate) > _RATE_MAX:
            raise ArgumentError(f"learning_rate {learning_rate!r} is beyond float32")
        rate = np.float32(learning_rate)
        as_output(rows, self.row_count * self.dim, "rows")
        if rows.shape != (self.row_count, self.dim):
            shape = (self.row_count, self.dim)
            raise ArgumentError(f"rows must have shape {shape}; got {rows.shape}")
        target: Float32 = np.asarray(rows)
        self._owner.check()
        with self._locks.cut(self._touched.stripes, is_shared=False) as hold:
            sums = self._open_sums()
            touched = self._touched.rows_of(hold.stripes)
            found = sums.with_sum(touched)
            for part, products in sums.blocks(found):
                with np.errstate(over="ignore"):
                    np.multiply(products, rate, out=products)
                bad = first_bad_cell(products)
                if bad is not None:
                    raise NonFiniteError(
                        f"row {part[bad.row]}: learning_rate times its sum is {products[bad]} in "
                        f"column {bad.column}; use a smaller learning_rate, or zero_grad()",
                        element_index=int(part[bad.row]) * self.dim + bad.column,
                    )
                target[part] -= products
                self._reached("rows applied")
                sums.clear(part)
            self._touched.clear(touched, hold.stripes)
            return int(found.size)

    def zero_grad(self) -> None:
        """Takes the sums from all rows: from all of them, or, if it is killed early, from none.

        Raises:
            ClosedError: the accumulator is closed.
        """
        self._owner.check()
        with self._locks.everything():
            sums = self._open_sums()
            rows = self._touched.rows_of(None)
            if self._file is None:
                sums.clear(rows)
            else:
                self._file.clearing(lambda: sums.clear(rows))
            self._touched.clear(rows, None)

    def get_grad(self, row_id: int) -> Float32:
        """The sum of a row's gradients: (dim,) float32, a copy; zeros where it has none.

        Raises:
            ArgumentError: the row is out of range.
            ClosedError: the accumulator is closed.
        """
        row = check_integer("row_id", row_id, 0, self.row_count - 1)
        self._owner.check()
        with self._locks.shared(self._touched.stripes_of(np.array([row]))):
            return self._open_sums().get(row)

    def touched_rows(self) -> Rows:
        """Returns the rows that have a sum: (n,) int64, ascending, a copy.

        Raises:
            ClosedError: the accumulator is closed.
        """
        self._owner.check()
        with self._locks.cut(self._touched.stripes, is_shared=True) as hold:
            return self._open_sums().with_sum(self._touched.rows_of(hold.stripes))

    def grad_offset(self, row_id: int) -> int | None:
        """The place of a row's sum in the file, in bytes; None: out of range, or without a file.

        The sum is `dim` float32 in the machine's byte order, and has a meaning only while the row
        has a gradient.

        Raises:
            ArgumentError: `row_id` is no integer.
        """
        row = check_integer("row_id", row_id, -_ROW_ID_MAX, _ROW_ID_MAX)
        if self._file is None or not 0 <= row < self.row_count:
            return None
        return self._layout.sums_offset + row * self._layout.row_size_bytes

    def close(self) -> None:
        """Puts everything on disk and lets others open the file. Waits for calls under way.

        Safe to repeat. Without it, the file counts as that of a killed process. In a process that
        was forked from the one that made it, it does nothing.

        Raises:
            StorageError: the disk failed; the file counts as not closed.
        """
        if not self._owner.is_here:
            return
        with self._locks.everything():
            sums, self._sums = self._sums, None
            if sums is not None and self._file is not None:
                try:
                    if sums.is_torn:
                        sums.take_back()
                    summary = sums.summary(sums.with_sum(self._touched.rows_of(None)))
                except BaseException:  # who opens it next takes back what is left
                    self._file.close()
                    raise
                self._file.end(summary)

    def _open_sums(self) -> StoredSums:
        if self._sums is None:
            raise ClosedError("the gradient accumulator is closed; open another one")
        self._sums.check_whole()
        return self._sums


def _batch(row_ids: Any, gradients: Any, row_count: int, dim: int) -> tuple[Rows, Float32]:
    ids = np.asarray(row_ids)
    if ids.size == 0 and not hasattr(row_ids, "dtype"):
        ids = ids.astype(np.int64)  # an empty list
    if ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"row_ids must be integers; got {ids.dtype}; convert them with .astype(np.int64)"
        )
    shape, found = (*ids.shape, dim), getattr(gradients, "shape", None)
    if found is not None and tuple(found) != shape:
        raise ArgumentError(
            f"gradients must have shape {shape}, that of row_ids {ids.shape} and dim; got "
            f"{tuple(found)}"
        )
    flat = ids.reshape(-1)
    if flat.size and not (flat.min() >= 0 and flat.max() < row_count):
        first = int(np.argmax((flat < 0) | (flat >= row_count)))
        raise ArgumentError(
            f"row_ids must be from 0 to {row_count - 1}; got {flat[first]} at place {first}"
        )
    values = _finite("gradients", gradients, (flat.size, dim), "skip the batch, or mend it")
    rows, merged = merge_repeats(np.require(flat, np.int64, ("C", "A", "E")), values)
    bad = None if merged is values else first_bad_cell(merged)
    if bad is not None:
        raise NonFiniteError(
            f"the gradients of row {rows[bad.row]} add up to {merged[bad]} in column "
            f"{bad.column}, beyond float32; scale them down"
        )
    return rows, merged


def _finite(what: str, values: Any, shape: tuple[int, int], remedy: str) -> Float32:
    flat = as_flat(what, values, shape[0] * shape[1])
    check_finite(what, flat, None, remedy=remedy)
    return np.require(flat, np.float32, ("C", "A", "E")).reshape(shape)
