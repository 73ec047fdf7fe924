"""Snapshots of a table: its rows as they were at one version, taken while training goes on.

As shard/parameter/snapshot.py for parameters, by rows: whoever is about to write rows that a
snapshot has not passed copies them first into a spool. The reader takes the others as they lie, and
then what is in the spool. Rows that are created later are none of its.

Invariant: of a snapshot that has begun, each row of its version was either given to the reader, is
in the spool, or lies in the storage as it was then; of one that has not begun, the table has not
reached the version.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwell.errors import (
    DeadlineError,
    LimitError,
    ShardwellError,
    StepOrderError,
    StorageError,
)
from shardwell.specs.table import TableSpec
from shardwell.wire.row_state import RowState, empty_state
from shardwell_server.shard.spool import Copied, Spool
from shardwell_server.store.contract import Places


class _Kept(NamedTuple):
    """Rows in the spool."""

    row_count: int
    copied: Copied


class TableSnapshot:
    """One of them, under way.

    Args:
        spec: The table.
        version: That of all rows.
        spool_dir: Where copies are kept; None: the system's temporary directory.
        is_wanted: Whether somebody still reads it; any thread calls it.
    """

    def __init__(
        self,
        spec: TableSpec,
        version: int,
        spool_dir: Path | None,
        is_wanted: Callable[[], bool],
    ) -> None:
        self.version = version
        self.learning_rate = 0.0
        """Of the update that follows."""
        self.failure: ShardwellError | None = None
        """Why it can't be had any more."""
        self._spec = spec
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self._left: npt.NDArray[np.bool_] | None = None
        self._kept: list[_Kept] = []
        self._spool = Spool(spool_dir)

    @property
    def has_begun(self) -> bool:
        """Whether the version was reached."""
        return self._left is not None

    @property
    def place_count(self) -> int:
        """Places below it have its rows."""
        return 0 if self._left is None else self._left.size

    def begin(self, update_counts: npt.NDArray[np.int64], learning_rate: float) -> None:
        """The table is at the version; nobody writes to it now.

        Args:
            update_counts: Of all places in use. A row without an update was created by a gradient
                of the open step, which is no part of the version.
            learning_rate: Of the update that follows.
        """
        self.learning_rate = learning_rate
        self._left = update_counts > 0

    def claim(self, places: Places) -> Places:
        """Those of some places that nobody has passed; the caller has."""
        with self._lock:
            return self._claim(places)

    def _claim(self, places: Places) -> Places:
        if self.failure is not None:
            raise self.failure
        left = self._left
        if left is None:
            return places[:0]
        places = places[places < left.size]
        places = places[left[places]]
        left[places] = False
        return places

    def keep(self, places: Places, rows: Callable[[Places], RowState]) -> None:
        """Copies rows that are about to be written, unless they were passed; never fails."""
        if self.failure is not None or not self.has_begun:
            return
        if not self._is_wanted():
            self.drop(DeadlineError("the scan was not read before its deadline; call again"))
            return
        try:
            with self._lock:
                wanted = self._claim(places)
                if wanted.size:
                    state = rows(wanted)
                    self._kept.append(_Kept(wanted.size, self._spool.copy(state.arrays)))
        except OSError as error:
            self.drop(
                StorageError(
                    f"{self._spool.where}: copying rows of table {self._spec.name!r} for a scan "
                    f"failed: {error.strerror}; free space on that disk, or make checkpoints while "
                    "nobody trains",
                    table=self._spec.name,
                )
            )
        except ShardwellError as error:
            self.drop(error)

    def kept(self) -> Iterator[RowState]:
        """The rows in the spool, batch by batch; to be called when all places were claimed.

        Raises:
            StorageError: the spool can't be read, or was damaged.
        """
        with self._lock:
            if self.failure is not None:
                raise self.failure
            batches = list(self._kept)
        for batch in batches:
            yield self._read(batch)

    def drop(self, failure: ShardwellError) -> None:
        """Ends it and frees its disk space. Safe to repeat."""
        with self._lock:
            self.failure = self.failure or failure
            self._spool.close()
            self._left = None if self._left is None else self._left[:0]

    def _read(self, batch: _Kept) -> RowState:
        state = empty_state(self._spec, batch.row_count)
        with self._lock:
            if self.failure is not None:
                raise self.failure
            is_whole = self._spool.read(batch.copied, state.arrays)
        if not is_whole:
            raise StorageError(
                f"a copy of rows of table {self._spec.name!r} was damaged on its way through a "
                f"file in {self._spool.where}; check that disk, then call "
                "again",
                table=self._spec.name,
            )
        return state


class TableSnapshots:
    """Those of one table that are under way. What changes the table's rows calls it.

    Args:
        spec: The table.
        spool_dir: See TableSnapshot.
        count_max: How many there may be.
    """

    def __init__(self, spec: TableSpec, *, spool_dir: Path | None, count_max: int) -> None:
        self.pending: tuple[TableSnapshot, ...] = ()
        """Whoever writes rows looks here; mostly empty."""
        self._spec = spec
        self._spool_dir = spool_dir
        self._count_max = count_max
        self._lock = threading.Lock()

    def before_write(self, places: Places, rows: Callable[[Places], RowState]) -> None:
        """Keeps rows for whom they matter. One thread writes at a time; it calls this before."""
        for snapshot in self.pending:
            snapshot.keep(places, rows)

    def begin_at(
        self, version: int, update_counts: npt.NDArray[np.int64], learning_rate: float
    ) -> None:
        """The table has reached a version; nobody writes to it now."""
        for snapshot in self.pending:
            if snapshot.version < version and not snapshot.has_begun:
                snapshot.drop(too_late(self._spec, snapshot.version, version))
            elif snapshot.version == version and not snapshot.has_begun:
                snapshot.begin(update_counts, learning_rate)

    @contextlib.contextmanager
    def under_way(self, version: int, is_wanted: Callable[[], bool]) -> Iterator[TableSnapshot]:
        """While it lasts, `begin_at` and `before_write` know of a snapshot.

        Raises:
            LimitError: too many are under way.
        """
        snapshot = TableSnapshot(self._spec, version, self._spool_dir, is_wanted)
        with self._lock:
            if len(self.pending) >= self._count_max:
                raise LimitError(
                    f"limit snapshot_count_max={self._count_max}: as many scans with state of "
                    f"table {self._spec.name!r} are under way; call again when one has ended",
                    table=self._spec.name,
                )
            self.pending = (*self.pending, snapshot)
        try:
            yield snapshot
        finally:
            with self._lock:
                self.pending = tuple(other for other in self.pending if other is not snapshot)
            snapshot.drop(StorageError("the scan has ended"))


def too_late(spec: TableSpec, version: int, found: int) -> StepOrderError:
    """Why rows can't be had at a version."""
    return StepOrderError(
        f"scan of table {spec.name!r} at version {version}: it is at {found} already, or in the "
        "middle of the step that follows; ask for a later version",
        table=spec.name,
    )
