"""Who takes part in a parameter or a table, and how many may. Pure.

Workers that opened it are known, so that they can be named when they are missing. Those that send
gradients have a seat, taken at the first one and kept for good; a synchronous one has worker_count
seats. What a worker has contributed stands with its seat, as the kind of ledger needs it.

The caller holds a lock around all that changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from shardwell.errors import LimitError, SeatsTakenError


class Seated(Protocol):
    """What all kinds of seats have."""

    @property
    def worker_id(self) -> str:
        """Who has it."""

    @property
    def index(self) -> int:
        """0-based, in the order in which seats were taken."""


SeatT = TypeVar("SeatT", bound=Seated)


def _nothing() -> None:
    pass


class Seats(ABC, Generic[SeatT]):
    """The part of a ledger that knows workers.

    Args:
        worker_count: Workers that make a synchronous step; 0: asynchronous.
        worker_count_max: Workers that may be known.
    """

    def __init__(self, *, worker_count: int, worker_count_max: int) -> None:
        self._worker_count = worker_count
        self._worker_count_max = worker_count_max
        self._seats: dict[str, SeatT] = {}
        self._known: dict[str, None] = {}

    @abstractmethod
    def _fresh_seat(self, worker_id: str, index: int) -> SeatT:
        """The seat of a worker that has contributed nothing."""

    @property
    def is_sync(self) -> bool:
        """Whether steps need all workers."""
        return self._worker_count > 0

    def remember(self, worker_id: str, on_new: Callable[[], None] = _nothing) -> None:
        """Notes that a worker takes part, so that it can be named when it is missing.

        `on_new` is called before a new one is taken in.

        Raises:
            LimitError: more workers than the limit allows.
        """
        if worker_id not in self._known:
            self._check_room(worker_id)
            on_new()
            self._known[worker_id] = None

    def _check_room(self, worker_id: str) -> None:
        if worker_id not in self._known and len(self._known) >= self._worker_count_max:
            raise LimitError(
                f"limit worker_count_max={self._worker_count_max}: {worker_id!r} is one "
                "worker too many; reuse worker ids or raise the limit",
                worker_id=worker_id,
            )

    def seat(self, worker_id: str, on_new: Callable[[], None] = _nothing) -> SeatT:
        """The seat of a worker, taken now if it has none; then `on_new` is called before.

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
            self._check_room(worker_id)
            on_new()
            seat = self._sit(self._fresh_seat(worker_id, len(self._seats)))
        return seat

    def _sit(self, seat: SeatT) -> SeatT:
        """Gives the next seat to its worker."""
        self._known[seat.worker_id] = None
        self._seats[seat.worker_id] = seat
        return seat

    @property
    def worker_ids(self) -> list[str]:
        """All that are remembered."""
        return list(self._known)

    @property
    def seats(self) -> list[SeatT]:
        """By index."""
        return list(self._seats.values())  # others may join meanwhile

    @property
    def seated_worker_ids(self) -> list[str]:
        """In the order of their seats."""
        return list(self._seats)

    def _missing_beside(self, done: Iterable[str]) -> tuple[list[str], int]:
        """Known workers that are not among `done`, and how many more were never seen."""
        if not self.is_sync:
            return [], 0
        present = set(done)
        full = len(self._seats) >= self._worker_count
        candidates = list(self._seats if full else self._known)
        missing = [worker_id for worker_id in candidates if worker_id not in present]
        return missing, max(self._worker_count - len(present) - len(missing), 0)


def _names(worker_ids: Iterable[str], most: int = 8) -> str:
    names = [repr(worker_id) for worker_id in worker_ids]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
