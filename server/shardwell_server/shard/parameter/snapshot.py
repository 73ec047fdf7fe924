"""Snapshots of a slice: each chunk as it was at one version, taken while training goes on.

A chunk that is about to leave the version is copied first, into a spool. The reader takes the
other chunks as they lie, when their turn comes. Neither waits for the other.

Invariant: when `Snapshots.under_way` has begun, every chunk is either at or below the version, or
kept in the spool as it was there (or the snapshot has failed, and says why).

A chunk's lock is held around all that concerns it; the list of snapshots is replaced, never
changed, so that closing a step costs one look at it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from shardwell.errors import StepOrderError
from shardwell.numerics.codec import Float32
from shardwell.specs.parameter import ParameterSpec
from shardwell_server.shard import snapshots
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.errors import await_version
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.register import Register
from shardwell_server.shard.snapshots import Copied
from shardwell_server.shard.step_tracker import StepTracker


class Snapshot(snapshots.Snapshot):
    """A snapshot under way; its learning rate is that of the chunk that was taken last."""

    def __init__(
        self,
        version: int,
        *,
        chunk_count: int,
        spool_dir: Path | None,
        is_wanted: Callable[[], bool],
    ) -> None:
        super().__init__("snapshot", version, spool_dir, is_wanted)
        self._is_taken = bytearray(chunk_count)
        self._kept: dict[int, Copied] = {}

    def is_kept(self, chunk_index: int) -> bool:
        return chunk_index in self._kept

    def keep(self, chunk_index: int, arrays: Sequence[Float32], learning_rate: float) -> None:
        """Copies a chunk that is about to leave the version, unless it was taken; never fails."""

        def copy() -> None:
            self._kept[chunk_index] = self._spool.copy(arrays)

        if not self._is_taken[chunk_index] and self._copying(f"chunk {chunk_index}", copy):
            self.note(chunk_index, learning_rate)

    def note(self, chunk_index: int, learning_rate: float) -> None:
        """Notes that a chunk was taken at the version, with the rate of the update that follows."""
        self._is_taken[chunk_index] = True
        self.learning_rate = learning_rate

    def read(self, chunk_index: int, into: Sequence[Float32]) -> None:
        """Reads a kept chunk from the spool."""
        self._read(f"chunk {chunk_index}", self._kept[chunk_index], into)


class Snapshots(snapshots.Snapshots[Snapshot]):
    """The snapshots of one slice that are under way; captures chunks for them."""

    def __init__(
        self,
        spec: ParameterSpec,
        chunks: Sequence[Chunk],
        tracker: StepTracker,
        register: Register,
        *,
        spool_dir: Path | None,
        count_max: int,
    ) -> None:
        super().__init__(f"snapshots of {spec.name!r}", count_max, parameter=spec.name)
        self._spec = spec
        self._chunks = chunks
        self._tracker = tracker
        self._register = register
        self._spool_dir = spool_dir

    def before_close(self, chunk_index: int, learning_rate: float) -> None:
        """Keeps a chunk for snapshots of its version; its lock is held, its step about to close."""
        version = self._tracker.records[chunk_index].version
        for snapshot in self.pending:
            if snapshot.version == version:
                snapshot.keep(chunk_index, self._chunks[chunk_index].arrays, learning_rate)

    @contextlib.contextmanager
    def under_way(self, version: int, is_wanted: Callable[[], bool]) -> Iterator[Snapshot | None]:
        """Yields a snapshot that has every chunk at `version`; asynchronous: None.

        Any thread calls `is_wanted`, which is True while the client still reads.
        """
        self._register.check_initialized()
        if not self._tracker.is_sync:
            yield None
            return
        snapshot = Snapshot(
            version,
            chunk_count=len(self._chunks),
            spool_dir=self._spool_dir,
            is_wanted=is_wanted,
        )
        with self._listed(snapshot):
            for index, chunk in enumerate(self._chunks):
                with chunk.changed.lock:
                    self._check_reachable(snapshot, index)
            yield snapshot

    def capture(
        self,
        chunk_index: int,
        snapshot: Snapshot | None,
        deadline: RequestDeadline,
        into: Sequence[Float32],
    ) -> tuple[int, float]:
        """Copies a chunk's arrays as the snapshot wants them, waiting until it is so far.

        `into` has one array for each of the chunk's. Returns the version, and the learning rate of
        the update that follows.
        """
        chunk, records = self._chunks[chunk_index], self._tracker.records
        with chunk.changed.lock:
            if snapshot is not None and not snapshot.is_kept(chunk_index):
                self._check_reachable(snapshot, chunk_index)
                if records[chunk_index].version != snapshot.version:
                    await_version(
                        self._tracker, snapshot.version, chunk.changed, deadline, chunk_index
                    )
            if snapshot is None or not snapshot.is_kept(chunk_index):
                chunk.verify()
                for source, target in zip(chunk.arrays, into, strict=True):
                    np.copyto(target, source)
                version = records[chunk_index].version
                rate = self._register.rates.at(version)
                if snapshot is not None:
                    snapshot.note(chunk_index, rate)
                return version, rate
        snapshot.read(chunk_index, into)
        return snapshot.version, snapshot.learning_rate

    def _check_reachable(self, snapshot: Snapshot, chunk_index: int) -> None:
        """Refuses a snapshot that is too late for a chunk; its lock is held."""
        if snapshot.failure is not None:
            raise snapshot.failure
        found = self._tracker.records[chunk_index].version
        if found > snapshot.version and not snapshot.is_kept(chunk_index):
            raise StepOrderError(
                f"snapshot of {self._spec.name!r} at version {snapshot.version}: chunk "
                f"{chunk_index} is at {found} already; ask for a later version",
                parameter=self._spec.name,
            )
