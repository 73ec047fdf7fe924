"""The contributions of workers to the chunks of a step. Pure: events in, decisions out.

States of a chunk for one worker, where v is the chunk's version (updates applied so far, which is
also the number of its open step) and `last` the last step that the worker contributed there:

    step <= last               DUPLICATE   acknowledge, do not count
    the same, step = last, with another CRC than was counted:
        by the seat's owner    StepOrderError; SUPERSEDED after a refusal of another chunk, and
                               where the tenure is over
        by an earlier owner, or in an earlier tenure of the worker
                               SUPERSEDED  acknowledge, do not count, and say so
    sync:  step == v           COUNT
           step == v + 1       WAIT        if last == v: the worker is one ahead of the others
           step < v            StepOrderError: closed without this worker
           otherwise           StepOrderError: a step was skipped
    open sets, where a step may close without a worker:
           step < v, or the tenure is over, or the step is full     LATE
           step == v + 1, and step v is full                        WAIT
           of a tenure whose seat has another one by now: as the step's set says, see
           `decide_past`; UNKNOWN where nothing tells any more
    async: step == last + 1    COUNT
           otherwise           StepOrderError: a step was skipped

Invariants:
  - `last` of a worker and a chunk never decreases, so a gradient counts once however often it is
    sent.
  - A synchronous step of a chunk closes with exactly worker_count contributions, by as many
    workers, each of whom holds a seat; a seat is taken at a worker's first contribution and kept.
    With open sets it closes when `is_complete` says so for the first time.
  - Versions only grow, by one.

A worker that is killed between two chunks of a step has given some of them. Started again under its
id, it gives all: the same values are DUPLICATE where they were counted, others SUPERSEDED, and the
rest counts. Once `ShardSlice.look_for_lost` finds a member lost, `is_complete` awaits it no longer:
what it gave stays counted, and the other chunks close without it.

The caller holds the chunk's lock around `decide` and `record`, and the parameter's around the rest.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwell.errors import StepOrderError
from shardwell.rpc.session import Session
from shardwell.specs.parameter import ParameterSpec
from shardwell_server.shard.crews import OpenPart, Seat, Tenure, Tracker
from shardwell_server.store.contract import ChunkRecord

if TYPE_CHECKING:
    from shardwell_server.shard.sessions import Sessions


class Decision(enum.Enum):
    """The treatment of a gradient chunk."""

    COUNT = enum.auto()
    DUPLICATE = enum.auto()
    WAIT = enum.auto()
    SUPERSEDED = enum.auto()
    """A duplicate, of which another gradient was counted."""
    LATE = enum.auto()
    """Its step has closed without it, or its worker's tenure is over."""
    UNKNOWN = enum.auto()
    """As late, but it may have counted when it came before: nothing tells any more."""


class ParameterSeat(Seat):
    """A worker's last step per chunk, -1 before the first; `stored_steps` are of any worker."""

    def __init__(
        self,
        worker_id: str,
        index: int,
        stored_steps: list[int],
        owner: Session | None,
        tenure: Tenure,
    ) -> None:
        super().__init__(worker_id, index, owner, tenure)
        self.last_step = [max(step - tenure.first_step, -1) for step in stored_steps]
        self.last_crc32c = array("q", [-1]) * len(self.last_step)
        """CRCs of the owner's payloads that counted, per chunk; -1: unknown."""
        self.earlier_crc32c = array("q", self.last_crc32c)
        """CRCs of an earlier owner's, where the owner's is not known."""
        self.doubtful_step: list[int] | None = None
        """After a restart, where the seat was another worker's: the marks per chunk that are of
        either of them."""

    @property
    def marks(self) -> list[int]:
        return [self.tenure.first_step + step for step in self.last_step]

    @property
    def unused_step(self) -> int:
        # One contribution to a chunk may be under way: its lock is not held here.
        return max(self.last_step, default=-1) + 2

    def forget_checksums(self) -> None:
        for index, crc32c in enumerate(self.last_crc32c):
            if crc32c != -1:
                self.earlier_crc32c[index], self.last_crc32c[index] = crc32c, -1

    def go_on_from(self, earlier: ParameterSeat) -> None:
        self.doubtful_step = earlier.doubtful_step
        earlier.forget_checksums()
        self.earlier_crc32c = array("q", earlier.earlier_crc32c)

    def _forget_marks(self, version: int, *, is_restored: bool) -> None:
        self.doubtful_step = self.last_step if is_restored else None
        self.last_step = [step if step >= version else -1 for step in self.last_step]

    def restore_mark(self, chunk_index: int, step: int) -> None:
        """Restores a contribution that the set of a step says to be this worker's."""
        self.last_step[chunk_index] = max(step, self.last_step[chunk_index])


class StepTracker(Tracker[ParameterSeat]):
    """The contributions to one parameter's slice.

    With `closes_by_norm` the last contribution leaves a step open, and full; see steps.py.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        records: Sequence[ChunkRecord],
        sessions: Sessions,
        worker_count_max: int,
    ) -> None:
        super().__init__(spec, sessions, worker_count_max)
        self.records = list(records)
        self.open_sets: list[list[ParameterSeat]] = (
            [[] for _ in self.records] if self.has_open_sets else []
        )
        """Contributors to each chunk's open step, in order, where sets are open."""
        self._closes_by_norm = spec.closes_by_norm
        self._quorum = spec.min_contributors
        self._has_grace = spec.grace_s > 0

    def make_seat(
        self,
        worker_id: str,
        index: int,
        marks: list[int] | None,
        owner: Session | None,
        tenure: Tenure,
    ) -> ParameterSeat:
        stored = [-1] * len(self.records) if marks is None else marks
        return ParameterSeat(worker_id, index, stored, owner, tenure)

    def version_of(self, part: int | None) -> int:
        assert part is not None
        return self.records[part].version

    def is_spent(self, seat: ParameterSeat) -> bool:
        return all(
            last < record.version for last, record in zip(seat.last_step, self.records, strict=True)
        )

    def decide(
        self,
        seat: ParameterSeat,
        chunk_index: int,
        step: int,
        crc32c: int | None = None,
        *,
        after_refusal: bool = False,
        is_empty: bool = False,
    ) -> Decision:
        """Decides about `seat`'s gradient of `step` for a chunk, by the table above.

        With `is_empty` it only ends the step, and is another gradient than may have counted.
        """
        last, version = seat.last_step[chunk_index], self.records[chunk_index].version
        if step <= last:
            counted = seat.last_crc32c[chunk_index]
            is_own = step == last and counted != -1
            if is_own and crc32c not in (None, counted) and not (after_refusal or seat.is_over):
                raise StepOrderError(
                    f"worker {seat.worker_id!r} sent step {step} of chunk {chunk_index} again, and "
                    f"its gradient is another than was counted (crc32c {crc32c:#010x}, counted "
                    f"{counted:#010x}); send the same gradient again, or open the parameter again "
                    "and go on at its next_step, or, to give up what was counted of the step in "
                    "part, connect anew",
                    worker_id=seat.worker_id,
                )
            return self._decide_again(seat, chunk_index, step, crc32c, is_empty=is_empty)
        if self.has_open_sets and (
            step < version or seat.is_over or (step == version and self.is_full(chunk_index))
        ):
            doubtful = seat.doubtful_step
            is_doubtful = doubtful is not None and step <= doubtful[chunk_index]
            return Decision.UNKNOWN if is_doubtful else Decision.LATE
        # One that was late for a set that is decided, and has not closed, gives the next step.
        is_decided = self.has_open_sets and self.is_full(chunk_index)
        expected = max(last + 1, version + is_decided) if self.is_sync else last + 1
        if step != expected:
            reason = "closed without it" if step < expected else "was not its next"
            raise StepOrderError(
                f"worker {seat.worker_id!r} sent step {step} of chunk {chunk_index}, which {reason}"
                f": expected step {expected}; open the parameter again and go on at its next_step",
                worker_id=seat.worker_id,
            )
        return Decision.COUNT if not self.is_sync or step == version else Decision.WAIT

    def _decide_again(
        self,
        seat: ParameterSeat,
        chunk_index: int,
        step: int,
        crc32c: int | None,
        *,
        is_empty: bool,
    ) -> Decision:
        counted = seat.last_crc32c[chunk_index]
        known = seat.earlier_crc32c[chunk_index] if counted == -1 else counted
        if known == -1 and is_empty:  # what has counted may have had values
            return Decision.SUPERSEDED
        is_same = step < seat.last_step[chunk_index] or crc32c is None or known in (-1, crc32c)
        return Decision.DUPLICATE if is_same else Decision.SUPERSEDED

    def decide_past(
        self,
        worker_id: str,
        chunk_index: int,
        step: int,
        crc32c: int,
        contributors: Sequence[str] | None,
        *,
        is_empty: bool = False,
    ) -> Decision:
        """Decides about an elastic worker's gradient of a tenure that its seat has no longer.

        The worker may have another tenure by now, or no seat. `contributors` is the set that the
        step closed with; None: it is not known any more.
        """
        seat = self.crew.find(worker_id)
        gave = seat is not None and seat.last_step[chunk_index] == step
        if contributors is None and step < self.records[chunk_index].version and not gave:
            return Decision.UNKNOWN
        if not gave:
            is_in = contributors is not None and worker_id in contributors
            again = Decision.SUPERSEDED if is_empty else Decision.DUPLICATE
            return again if is_in else Decision.LATE
        assert seat is not None
        return self._decide_again(seat, chunk_index, step, crc32c, is_empty=is_empty)

    def is_full(self, chunk_index: int) -> bool:
        return self.is_decided(self.records[chunk_index])

    def is_decided(self, record: ChunkRecord) -> bool:
        """Returns `is_full` of a record that a chunk has, or had a moment ago."""
        if self.has_open_sets:
            return record.is_full
        return record.contribution_count >= self.crew.full_count

    def is_complete(
        self,
        chunk_index: int,
        arriving: ParameterSeat | None = None,
        *,
        is_grace_over: bool = False,
    ) -> bool:
        """Returns True if a chunk's open step is to close, with `arriving` in it."""
        crew = self.crew
        count = self.records[chunk_index].contribution_count + (arriving is not None)
        if 0 < self._quorum <= count >= crew.floor and (is_grace_over or not self._has_grace):
            return True
        if count < crew.full_count:
            return False
        return not crew.awaited or all(seat is arriving for seat in self._awaited_by(chunk_index))

    def begins_grace(self, chunk_index: int) -> bool:
        """Returns True if grace begins with a chunk's last contribution."""
        return self._has_grace and self.records[chunk_index].contribution_count == self._quorum

    def has_grace_begun(self, chunk_index: int) -> bool:
        return self._has_grace and self.records[chunk_index].contribution_count >= self._quorum

    def _awaited_by(self, chunk_index: int) -> Iterator[ParameterSeat]:
        version = self.records[chunk_index].version
        for seat in self.crew.awaited:
            first = seat.from_step
            if first is not None and first <= version and seat.last_step[chunk_index] < version:
                yield seat

    def open_parts(self, part: int | None = None) -> Iterator[OpenPart[ParameterSeat]]:
        """Reads chunks whose locks need not be held: it may be a moment old."""
        for index in range(len(self.records)) if part is None else (part,):
            record = self.records[index]
            if not record.is_full:
                awaited = list(self._awaited_by(index))
                yield OpenPart(record.version, record.contribution_count, awaited)

    def following(self, chunk_index: int, sample_count: int, *, closes: bool) -> ChunkRecord:
        """Returns a chunk's record with one contribution more, but for the sum."""
        now = self.records[chunk_index]
        if closes and not self._closes_by_norm:
            return ChunkRecord(now.version + 1)
        count, total = now.contribution_count + 1, now.sample_total + sample_count
        is_full = closes and self.has_open_sets
        return ChunkRecord(now.version, count, total, is_full=is_full)

    def record(
        self,
        seat: ParameterSeat,
        chunk_index: int,
        step: int,
        following: ChunkRecord,
        crc32c: int | None = None,
    ) -> None:
        """Counts a contribution that `decide` said to COUNT, or of an earlier tenure: below 0."""
        seat.last_step[chunk_index] = max(step, -1)
        seat.last_crc32c[chunk_index] = -1 if crc32c is None else crc32c
        if self.has_open_sets:
            seat.counted_count += 1
            self.open_sets[chunk_index].append(seat)
        self.records[chunk_index] = following

    def close(self, chunk_index: int) -> list[ParameterSeat]:
        """Returns the seats of a set whose step has closed, in order, and empties it."""
        closed, self.open_sets[chunk_index] = self.open_sets[chunk_index], []
        return closed

    def next_step(self, worker_id: str) -> int:
        seat = self.crew.find(worker_id)
        if seat is None:
            return self.version_min() if self.is_sync else 0
        if not self.records:
            return 0
        if not self.is_sync:
            return min(seat.last_step) + 1
        return min(
            max(last + 1, record.version)
            for last, record in zip(seat.last_step, self.records, strict=True)
        )

    @property
    def has_counted(self) -> bool:
        return any(record.version or record.contribution_count for record in self.records) or any(
            last >= 0 for seat in self.crew.seats for last in seat.last_step
        )

    def version_min(self) -> int:
        return min((record.version for record in self.records), default=0)

    def version_max(self) -> int:
        return max((record.version for record in self.records), default=0)

    def contributed(self, step: int, part: int | None = None) -> list[str]:
        chunks = slice(None) if part is None else slice(part, part + 1)
        return [
            seat.worker_id
            for seat in self.crew.seats
            if all(last >= step for last in seat.last_step[chunks])
        ]

    def has_begun(self, step: int) -> bool:
        return any(last >= step for seat in self.crew.seats for last in seat.last_step)
