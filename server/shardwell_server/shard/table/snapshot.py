"""Snapshots of a table: its rows as they were at one version, taken while training goes on.

As shard/parameter/snapshot.py for parameters, by rows: a thread that is about to write rows that a
snapshot has not passed copies them first into a spool. The reader takes the others as they lie, and
then those in the spool. Rows that are created later do not belong to it.

Invariant: of a snapshot that has begun, each row of its version was either given to the reader, is
in the spool, or lies in the storage as it was then; of one that has not begun, the table has not
reached the version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwell.errors import ShardwellError, StepOrderError
from shardwell.specs.table import TableSpec
from shardwell.wire.row_state import RowState, empty_state
from shardwell_server.shard.snapshots import Copied, Snapshot, Snapshots
from shardwell_server.store.contract import Places


class _Kept(NamedTuple):
    row_count: int
    copied: Copied


class TableSnapshot(Snapshot):
    """A snapshot of one table, under way."""

    def __init__(
        self,
        spec: TableSpec,
        version: int,
        spool_dir: Path | None,
        is_wanted: Callable[[], bool],
    ) -> None:
        super().__init__("scan", version, spool_dir, is_wanted, table=spec.name)
        self._spec = spec
        self._left: npt.NDArray[np.bool_] | None = None
        self._kept: list[_Kept] = []

    @property
    def has_begun(self) -> bool:
        """True if the table has reached the version."""
        return self._left is not None

    @property
    def place_count(self) -> int:
        """The number of places that may have its rows, from 0 on."""
        return 0 if self._left is None else self._left.size

    def begin(self, update_counts: npt.NDArray[np.int64], learning_rate: float) -> None:
        """Begins at the table's version; no call writes to it now.

        A row without an update was created by a gradient of the open step, which is no part of the
        version.
        """
        self.learning_rate = learning_rate
        self._left = update_counts > 0

    def claim(self, places: Places) -> Places:
        """Returns those of some places that were not passed, and marks them passed."""
        with self._lock:
            return self._claim(places)

    def _claim(self, places: Places) -> Places:
        self._check()
        left = self._left
        if left is None:
            return places[:0]
        places = places[places < left.size]
        places = places[left[places]]
        left[places] = False
        return places

    def keep(self, places: Places, rows: Callable[[Places], RowState]) -> None:
        """Copies rows that are about to be written, unless they were passed; never fails."""

        def copy() -> None:
            wanted = self._claim(places)
            if wanted.size:
                self._kept.append(_Kept(wanted.size, self._spool.copy(rows(wanted).arrays)))

        if self.has_begun:
            self._copying(f"rows of table {self._spec.name!r}", copy)

    def kept(self) -> Iterator[RowState]:
        """Yields the rows in the spool, batch by batch; all places were claimed before."""
        with self._lock:
            self._check()
            batches = list(self._kept)
        for batch in batches:
            state = empty_state(self._spec, batch.row_count)
            self._read(f"rows of table {self._spec.name!r}", batch.copied, state.arrays)
            yield state

    def drop(self, failure: ShardwellError) -> None:
        super().drop(failure)
        self._left = None if self._left is None else self._left[:0]


class TableSnapshots(Snapshots[TableSnapshot]):
    """The snapshots of one table that are under way. Code that changes its rows calls it."""

    def __init__(self, spec: TableSpec, *, spool_dir: Path | None, count_max: int) -> None:
        super().__init__(f"scans with state of table {spec.name!r}", count_max, table=spec.name)
        self._spec = spec
        self._spool_dir = spool_dir

    def before_write(self, places: Places, rows: Callable[[Places], RowState]) -> None:
        """Keeps rows for the snapshots that want them; the one writing thread calls it first."""
        for snapshot in self.pending:
            snapshot.keep(places, rows)

    def begin_at(
        self, version: int, update_counts: npt.NDArray[np.int64], learning_rate: float
    ) -> None:
        """Notes that the table has reached a version; no call writes to it now."""
        for snapshot in self.pending:
            if snapshot.version < version and not snapshot.has_begun:
                snapshot.drop(too_late(self._spec, snapshot.version, version))
            elif snapshot.version == version and not snapshot.has_begun:
                snapshot.begin(update_counts, learning_rate)

    @contextlib.contextmanager
    def under_way(self, version: int, is_wanted: Callable[[], bool]) -> Iterator[TableSnapshot]:
        """Yields a snapshot that `begin_at` and `before_write` know of in the block."""
        snapshot = TableSnapshot(self._spec, version, self._spool_dir, is_wanted)
        with self._listed(snapshot):
            yield snapshot


def too_late(spec: TableSpec, version: int, found: int) -> StepOrderError:
    """Returns the refusal of a scan at a version that the table has left."""
    return StepOrderError(
        f"scan of table {spec.name!r} at version {version}: it is at {found} already, or in the "
        "middle of the step that follows; ask for a later version",
        table=spec.name,
    )
