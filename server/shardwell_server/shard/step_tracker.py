"""Who has contributed what to which chunk of which step. Pure: events in, decisions out.

States of a chunk for one worker, where v is the chunk's version (updates applied so far, which is
also the number of its open step) and `last` the last step that the worker contributed there:

    step <= last               DUPLICATE   acknowledge, do not count
    the same, step = last, with another CRC than was counted:
        by the seat's owner    StepOrderError; SUPERSEDED after a refusal of another chunk
        by an earlier owner    SUPERSEDED  acknowledge, do not count, and say so
    sync:  step == v           COUNT
           step == v + 1       WAIT        if last == v: the worker is one ahead of the others
           step < v            StepOrderError: closed without this worker
           otherwise           StepOrderError: a step was skipped
    async: step == last + 1    COUNT
           otherwise           StepOrderError: a step was skipped

Invariants:
  - `last` of a worker and a chunk never decreases, so a gradient counts once however often it is
    sent.
  - A synchronous step of a chunk closes with exactly worker_count contributions, by as many
    workers, each of whom holds a seat; a seat is taken at a worker's first contribution and kept.
  - Versions only grow, by one.

The caller holds the chunk's lock around `decide` and `record`, and the parameter's around the rest.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

from shardwell.errors import StepOrderError
from shardwell.rpc.session import Session
from shardwell_server.shard import members as seats
from shardwell_server.shard.members import Event, Liveness, Seats, Tenure, owner_of, tenure_of
from shardwell_server.store import ChunkRecord


class Decision(enum.Enum):
    """What is to be done with a gradient chunk."""

    COUNT = enum.auto()
    DUPLICATE = enum.auto()
    WAIT = enum.auto()
    SUPERSEDED = enum.auto()
    """A duplicate, of which another gradient was counted."""


class Seat(seats.Seat):
    """One worker's marks: the last step that it contributed, per chunk; -1 before the first.

    Args:
        worker_id: Who.
        index: Of the seat.
        stored_steps: The last step per chunk in the storage, whoever's; -1: none.
        owner: See `seats.Seat`.
        tenure: The same.
    """

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
        """CRC of the owner's payload that `last_step` was counted with, per chunk; -1: unknown."""
        self.earlier_crc32c = array("q", self.last_crc32c)
        """The same of an earlier owner, where the owner's is not known."""

    @property
    def unused_step(self) -> int:
        # One contribution to a chunk may be under way: its lock is not held here.
        return max(self.last_step, default=-1) + 2

    def forget_checksums(self) -> None:
        for index, crc32c in enumerate(self.last_crc32c):
            if crc32c != -1:
                self.earlier_crc32c[index], self.last_crc32c[index] = crc32c, -1


class StepTracker(Seats[Seat]):
    """The contributions to one parameter's slice. `worker_count` 0 means asynchronous.

    With `closes_by_norm` the last contribution leaves a step open, and full; see clipping.py.
    """

    def __init__(
        self,
        records: Sequence[ChunkRecord],
        *,
        worker_count: int,
        worker_count_max: int,
        sessions: Liveness,
        closes_by_norm: bool = False,
    ) -> None:
        super().__init__(
            worker_count=worker_count, worker_count_max=worker_count_max, sessions=sessions
        )
        self.records = list(records)
        """Where each chunk stands."""
        self._closes_by_norm = closes_by_norm

    def _fresh_seat(self, worker_id: str, index: int, owner: Session, tenure: Tenure) -> Seat:
        return Seat(worker_id, index, [-1] * len(self.records), owner, tenure)

    def _seat_after(
        self, seat: Seat, worker_id: str, owner: Session | None, tenure: Tenure
    ) -> Seat:
        stored = [seat.stored(step) for step in seat.last_step]
        return Seat(worker_id, seat.index, stored, owner, tenure)

    def restore_seat(self, event: Event, stored_steps: list[int]) -> Seat:
        index, owner, tenure = len(self._seats), owner_of(event), tenure_of(event)
        return self._sit(Seat(event["worker_id"], index, stored_steps, owner, tenure))

    def decide(
        self,
        seat: Seat,
        chunk_index: int,
        step: int,
        crc32c: int | None = None,
        *,
        after_refusal: bool = False,
    ) -> Decision:
        """What to do with `seat`'s gradient of `step` for a chunk; `crc32c` is its payload's.

        `after_refusal`: see GradientChunk.

        Raises:
            StepOrderError: see the table above.
        """
        last, version = seat.last_step[chunk_index], self.records[chunk_index].version
        if step <= last:
            counted, earlier = seat.last_crc32c[chunk_index], seat.earlier_crc32c[chunk_index]
            if step < last or crc32c is None or crc32c == counted:
                return Decision.DUPLICATE
            if counted == -1:
                return Decision.DUPLICATE if earlier in (-1, crc32c) else Decision.SUPERSEDED
            if not after_refusal:
                raise StepOrderError(
                    f"worker {seat.worker_id!r} sent step {step} of chunk {chunk_index} again, and "
                    f"its gradient is another than was counted (crc32c {crc32c:#010x}, counted "
                    f"{counted:#010x}); send the same gradient again, or open the parameter again "
                    "and go on at its next_step, or, to give up what was counted of the step in "
                    "part, connect anew",
                    worker_id=seat.worker_id,
                )
            return Decision.SUPERSEDED
        expected = max(last + 1, version) if self.is_sync else last + 1
        if step != expected:
            reason = "closed without it" if step < expected else "was not its next"
            raise StepOrderError(
                f"worker {seat.worker_id!r} sent step {step} of chunk {chunk_index}, which {reason}"
                f": expected step {expected}; open the parameter again and go on at its next_step",
                worker_id=seat.worker_id,
            )
        return Decision.COUNT if not self.is_sync or step == version else Decision.WAIT

    def is_full(self, chunk_index: int) -> bool:
        """Whether all have contributed to a chunk's step, which is open still."""
        return self.records[chunk_index].contribution_count >= max(self._worker_count, 1)

    def following(self, chunk_index: int, sample_count: int) -> ChunkRecord:
        """A chunk's record with one contribution more, as far as it does not depend on the sum.

        The next version, if the contribution closes the chunk's step.
        """
        now = self.records[chunk_index]
        count = now.contribution_count + 1
        if not self._closes_by_norm and count >= max(self._worker_count, 1):
            return ChunkRecord(now.version + 1)
        return ChunkRecord(now.version, count, now.sample_total + sample_count)

    def record(
        self,
        seat: Seat,
        chunk_index: int,
        step: int,
        following: ChunkRecord,
        crc32c: int | None = None,
    ) -> None:
        """Counts a contribution for which `decide` said COUNT, or of an earlier tenure: below 0."""
        seat.last_step[chunk_index] = max(step, -1)
        seat.last_crc32c[chunk_index] = -1 if crc32c is None else crc32c
        self.records[chunk_index] = following

    def next_step(self, worker_id: str) -> int:
        """The first step that a worker has not contributed to every chunk, and still can."""
        seat = self._seats.get(worker_id)
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
        """Whether any gradient was counted."""
        return any(record.version or record.contribution_count for record in self.records) or any(
            last >= 0 for seat in self.seats for last in seat.last_step
        )

    def version_min(self) -> int:
        """The fewest updates that a chunk has seen; 0 for an empty slice."""
        return min((record.version for record in self.records), default=0)

    def version_max(self) -> int:
        """The most updates that a chunk has seen."""
        return max((record.version for record in self.records), default=0)

    def contributed(self, step: int, chunk_index: int | None = None) -> list[str]:
        """Workers that contributed `step`, to one chunk or to all."""
        chunks = slice(None) if chunk_index is None else slice(chunk_index, chunk_index + 1)
        return [
            seat.worker_id
            for seat in self.seats
            if all(last >= step for last in seat.last_step[chunks])
        ]

    def has_begun(self, step: int) -> bool:
        """Whether any worker has contributed `step` to any chunk."""
        return any(last >= step for seat in self.seats for last in seat.last_step)

    def missing(self, step: int, chunk_index: int | None = None) -> tuple[list[str], int]:
        """Known workers that have not contributed `step`, and how many more were never seen."""
        return self._missing_beside(self.contributed(step, chunk_index))
