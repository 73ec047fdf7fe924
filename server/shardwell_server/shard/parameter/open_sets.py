"""The contributors to each chunk's steps, where a step may close without a worker.

Of an open step they are in the tracker, and in files in `kept` before each counts, in the order of
the sum; of one that has closed, in memory for the last steps, and in the contribution log.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence

from shardwell.errors import StorageError
from shardwell.specs.parameter import ParameterSpec
from shardwell_server.shard.contribution_log import ClosedSet
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.register import Register
from shardwell_server.shard.step_tracker import ParameterSeat, StepTracker
from shardwell_server.store.contract import ParameterStorage

STEP_COUNT_MAX = 16
"""Closed steps that are known."""

Contributors = tuple[str, ...]


class OpenSets:
    """The sets of one slice. Any thread may call it, with the lock of the chunk that it names."""

    def __init__(
        self,
        spec: ParameterSpec,
        storage: ParameterStorage,
        tracker: StepTracker,
        register: Register,
        chunks: Sequence[Chunk],
        log: Callable[[ClosedSet], None] | None,
    ) -> None:
        self._spec = spec
        self._storage = storage
        self._tracker = tracker
        self._register = register
        self._chunks = chunks
        self._log = log
        self.is_restoring = True
        """True while sets that are noted may have been noted by an earlier process."""
        self._lock = threading.Lock()
        self._by_step: dict[int, dict[int, Contributors]] = {}
        self._known: tuple[int, int, list[str]] = (-1, 0, [])
        """Workers that `_workers` found last, of how many chunks of which step."""
        self._last: Contributors = ()
        """The set that came last: mostly the next one has the same members, and needs no memory."""
        self.grace_over = [-1] * len(chunks)
        """Of each chunk: the last step whose grace was over."""

    def keep(self, index: int, *arriving: ParameterSeat) -> None:
        """Notes a contributor in its place of a chunk's open set, before it counts."""
        if not self._storage.is_in_memory:
            seats = [each.index for each in (*self._tracker.open_sets[index], *arriving)]
            version = self._tracker.records[index].version
            self._storage.keep(index, version, array("H", seats).tobytes())

    def closed(self, index: int, step: int) -> None:
        """Closes a chunk's step with the open set that it has."""
        seats = self._tracker.close(index)
        self._note(step, index, tuple(seat.worker_id for seat in seats))

    def _note(self, step: int, index: int, found: Contributors) -> None:
        with self._lock:
            if found == self._last:
                found = self._last
            self._last = found
            chunks = self._by_step.get(step)
            if chunks is None:
                chunks = self._by_step[step] = {}
                while len(self._by_step) > STEP_COUNT_MAX:
                    del self._by_step[min(self._by_step)]
            chunks[index] = found
        if self._log is not None:
            incarnation, where = self._register.incarnation, self._chunks[index].where
            name, again = self._spec.name, self.is_restoring
            self._log(ClosedSet(name, incarnation, index, where, step, found, again))

    def of_step(self, step: int) -> dict[int, Contributors]:
        """Returns the contributors to each chunk that has closed a step; empty: no longer known."""
        with self._lock:
            return dict(self._by_step.get(step, {}))

    def _workers(self, step: int) -> list[str]:
        with self._lock:
            chunks = self._by_step.get(step, {})
            known_step, count, found = self._known
            if (known_step, count) != (step, len(chunks)):  # each of its workers asks
                sets = set(chunks.values())
                found = sorted({worker_id for each in sets for worker_id in each})
                self._known = step, len(chunks), found
            return found

    def workers(self, step: int) -> list[str]:
        """Returns the sorted workers whose gradients a step has in any chunk, closed or open."""
        closed = self._workers(step)
        if self._tracker.version_min() > step:
            return closed
        found = set(closed)
        for index, record in enumerate(list(self._tracker.records)):
            if record.version == step:
                found.update(seat.worker_id for seat in list(self._tracker.open_sets[index]))
        return sorted(found)

    def give_on(self, seat: ParameterSeat) -> None:
        """Forgets closed sets that a seat is in: after a restart they would name its next worker.

        Takes the chunks' locks.
        """
        for index, record in enumerate(list(self._tracker.records)):
            closed = record.version - 1
            with self._chunks[index].changed.lock:
                kept = self._storage.kept(index, closed) if closed >= 0 else None
                if kept and seat.index in array("H", kept):
                    self._storage.keep(index, closed, b"")

    def restore(self) -> None:
        """Goes on from the open sets that were kept, and notes the last closed ones again."""
        if not self._tracker.has_open_sets:
            return
        seats, tracker = self._tracker.crew.seats, self._tracker
        for index, record in enumerate(tracker.records):
            kept = array("H", self._storage.kept(index, record.version) or b"")
            count = record.contribution_count
            if len(kept) < count:  # of files of an earlier version
                kept = array("H", [s.index for s in seats if s.last_step[index] == record.version])
            found = [seats[each] for each in set(kept[:count]) if each < len(seats)]
            for seat in found:
                if seat.doubtful_step is not None:
                    seat.restore_mark(index, seat.doubtful_step[index])
            if [s.last_step[index] for s in found] != [record.version] * count:
                raise StorageError(
                    f"parameter {self._spec.name!r}: what is kept of step {record.version} of "
                    f"chunk {index} was damaged: seats {kept[:count].tolist()} are not the {count} "
                    "that have contributed to it; restore the directory from a copy or a "
                    "checkpoint",
                    parameter=self._spec.name,
                )
            tracker.open_sets[index] = [seats[each] for each in kept[:count]]
            closed = array("H", self._storage.kept(index, record.version - 1) or b"")
            if closed:  # a kill may have come before it was noted
                members = [seats[each] for each in closed if each < len(seats)]
                for seat in members:
                    if seat.doubtful_step is not None:
                        seat.restore_mark(index, min(seat.doubtful_step[index], record.version - 1))
                names = tuple(seat.worker_id for seat in members)
                self._note(record.version - 1, index, names)
