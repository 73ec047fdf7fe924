"""Who has contributed what to which chunk of which step. Pure: events in, decisions out.

States of a chunk for one worker, where v is the chunk's version (updates applied so far, which is
also the number of its open step) and `last` the last step that the worker contributed there:

    step <= last               DUPLICATE   acknowledge, do not count
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
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shardwell.errors import LimitError, SeatsTakenError, StepOrderError


class Decision(enum.Enum):
    """What is to be done with a gradient chunk."""

    COUNT = enum.auto()
    DUPLICATE = enum.auto()
    WAIT = enum.auto()


class Seat:
    """One worker's marks: the last step that it contributed, per chunk; -1 before the first."""

    def __init__(self, worker_id: str, chunk_count: int) -> None:
        self.worker_id = worker_id
        self.last_step: npt.NDArray[np.int64] = np.full(chunk_count, -1, np.int64)


class StepLedger:
    """The contributions to one parameter's slice. `worker_count` 0 means asynchronous."""

    def __init__(self, *, chunk_count: int, worker_count: int, worker_count_max: int) -> None:
        self.versions: npt.NDArray[np.int64] = np.zeros(chunk_count, np.int64)
        self.contribution_counts: npt.NDArray[np.int64] = np.zeros(chunk_count, np.int64)
        self.sample_totals: npt.NDArray[np.int64] = np.zeros(chunk_count, np.int64)
        self._worker_count = worker_count
        self._worker_count_max = worker_count_max
        self._seats: dict[str, Seat] = {}
        self._known: dict[str, None] = {}

    @property
    def is_sync(self) -> bool:
        """Whether steps need all workers."""
        return self._worker_count > 0

    def remember(self, worker_id: str) -> None:
        """Notes that a worker opened the parameter, so that it can be named when it is missing.

        Raises:
            LimitError: more workers than the limit allows.
        """
        if worker_id not in self._known:
            if len(self._known) >= self._worker_count_max:
                raise LimitError(
                    f"limit worker_count_max={self._worker_count_max}: {worker_id!r} is one "
                    "worker too many; reuse worker ids or raise the limit",
                    worker_id=worker_id,
                )
            self._known[worker_id] = None

    def seat(self, worker_id: str) -> Seat:
        """The seat of a worker, taken now if it has none.

        Raises:
            SeatsTakenError: worker_count others have contributed already.
            LimitError: see `remember`.
        """
        seat = self._seats.get(worker_id)
        if seat is None:
            if self.is_sync and len(self._seats) >= self._worker_count:
                raise SeatsTakenError(
                    f"worker_count={self._worker_count} workers contribute already: "
                    f"{_names(self._seats)}; {worker_id!r} would be one more; a replacement must "
                    "use the worker_id of the worker that it replaces",
                    worker_id=worker_id,
                )
            self.remember(worker_id)
            seat = self._seats[worker_id] = Seat(worker_id, len(self.versions))
        return seat

    def decide(self, seat: Seat, chunk_index: int, step: int) -> Decision:
        """What to do with `seat`'s gradient of `step` for a chunk.

        Raises:
            StepOrderError: see the table above.
        """
        last, version = int(seat.last_step[chunk_index]), int(self.versions[chunk_index])
        if step <= last:
            return Decision.DUPLICATE
        expected = max(last + 1, version) if self.is_sync else last + 1
        if step != expected:
            reason = "closed without it" if step < expected else "was not its next"
            raise StepOrderError(
                f"worker {seat.worker_id!r} sent step {step} of chunk {chunk_index}, which {reason}"
                f": expected step {expected}; open the parameter again and go on at its next_step",
                worker_id=seat.worker_id,
            )
        return Decision.COUNT if not self.is_sync or step == version else Decision.WAIT

    def completes(self, chunk_index: int) -> bool:
        """Whether the next contribution to a chunk closes its step."""
        return int(self.contribution_counts[chunk_index]) + 1 >= max(self._worker_count, 1)

    def record(self, seat: Seat, chunk_index: int, step: int, sample_count: int) -> None:
        """Counts a contribution for which `decide` said COUNT; closes the step if it completes."""
        closes = self.completes(chunk_index)
        seat.last_step[chunk_index] = step
        if closes:
            self.contribution_counts[chunk_index] = 0
            self.sample_totals[chunk_index] = 0
            self.versions[chunk_index] += 1
        else:
            self.contribution_counts[chunk_index] += 1
            self.sample_totals[chunk_index] += sample_count

    def next_step(self, worker_id: str) -> int:
        """The first step that a worker has not contributed to every chunk, and still can."""
        seat = self._seats.get(worker_id)
        if seat is None:
            return self.version_min() if self.is_sync else 0
        if not len(self.versions):
            return 0
        following = seat.last_step + 1
        return int((np.maximum(following, self.versions) if self.is_sync else following).min())

    def version_min(self) -> int:
        """The fewest updates that a chunk has seen; 0 for an empty slice."""
        return int(self.versions.min(initial=np.iinfo(np.int64).max)) if len(self.versions) else 0

    def version_max(self) -> int:
        """The most updates that a chunk has seen."""
        return int(self.versions.max(initial=0))

    def contributed(self, step: int, chunk_index: int | None = None) -> list[str]:
        """Workers that contributed `step`, to one chunk or to all."""
        chunks = slice(None) if chunk_index is None else slice(chunk_index, chunk_index + 1)
        return [
            seat.worker_id
            for seat in list(self._seats.values())  # others may join meanwhile
            if (seat.last_step[chunks] >= step).all()
        ]

    def missing(self, step: int, chunk_index: int | None = None) -> tuple[list[str], int]:
        """Known workers that have not contributed `step`, and how many more were never seen."""
        if not self.is_sync:
            return [], 0
        done = set(self.contributed(step, chunk_index))
        full = len(self._seats) >= self._worker_count
        candidates = list(self._seats if full else self._known)
        missing = [worker_id for worker_id in candidates if worker_id not in done]
        return missing, max(self._worker_count - len(done) - len(missing), 0)


def _names(worker_ids: Iterable[str], most: int = 8) -> str:
    names = [repr(worker_id) for worker_id in worker_ids]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
