"""The register of a slice: seats, learning rates and incarnation, each change of which is logged.

It is in the storage before it takes effect, so that a shard that comes back goes on with it.
Events, as JSON objects:

    {"kind": "seat", "worker_id": W, "session": [N, host, pid, process] or null, "tenure": [T, F]}
                                                 W takes the next seat, in tenure T, from step F on;
                                                 null: its session has ended in order since
    {"kind": "tenure", "seat_index": I, "worker_id": W, "session": ..., "tenure": [T, F]}
                                                 seat I, which was another's or W's, in a new tenure
    {"kind": "owner", "worker_id": W, "session": ...}       its seat's owner from now on
    {"kind": "from", "seat_index": I, "from_step": N}       steps from N on await its elastic member
    {"kind": "over", "seat_index": I}                       none awaits it: its tenure is over
    {"kind": "learning_rate", "from_step": N, "learning_rate": R}
                                                 and "factors": [F, ...], where there are groups
    {"kind": "incarnation", "incarnation": N}                what tells it from others of its name

Those of parameters alone, and of tables, are in parameter/register.py and table/register.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from shardwell.errors import LimitError, StepOrderError, StorageError
from shardwell.specs.grouped_rate import factors_of, rate_of
from shardwell_server.config import Limits
from shardwell_server.shard.crews import Contributor, Crew, Seat, owner_event, owner_of
from shardwell_server.shard.learning_rates import LearningRates
from shardwell_server.store.contract import Event, Storage

SeatT = TypeVar("SeatT", bound=Seat)


def _rate_event(from_step: int, learning_rate: float) -> Event:
    event: Event = {
        "kind": "learning_rate",
        "from_step": from_step,
        "learning_rate": float(learning_rate),
    }
    if factors := factors_of(learning_rate):
        event["factors"] = list(factors)
    return event


class SliceRegister(ABC, Generic[SeatT]):
    """The base of both kinds. For one thread at a time; any thread may read `rates`.

    Each change is in the storage first; StorageError: it can't be noted.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        storage: Storage,
        crew: Crew[SeatT],
        learning_rate: float | None,
        limits: Limits,
    ) -> None:
        self.incarnation = 0
        """The number of CreateParameterResponse and OpenTableResponse; 0: none yet."""
        self._kind = kind
        self._name = name
        self._where: dict[str, Any] = {kind: name}
        self._crew = crew
        self._storage = storage
        self._limits = limits
        self.rates = LearningRates(learning_rate or 0.0)
        """The rate of each update; 0 where the optimizer has none."""

    # Taking part.

    def seat(self, contributor: Contributor[SeatT]) -> SeatT | None:
        """Returns the worker's seat, which is the session's from now on: `Crew.seat`."""
        return self._crew.seat(contributor, self._note_seat)

    def _note_seat(self, event: Event) -> None:
        if event["kind"] == "seat":
            self._storage.add_seat()
        self._storage.compact(self._events())
        self._storage.log(event)

    def end_session(self, number: int) -> list[tuple[str, int]]:
        """Notes that a session has ended in order; returns tenures that end so."""
        ended = []
        for worker_id in self._crew.owned_by(number):
            tenure = self._crew.tenure_of(worker_id)
            if self.end_tenure(worker_id, tenure):
                ended.append((worker_id, tenure))
            self._storage.log(owner_event(worker_id, None))
            self._crew.set_owner(worker_id, None)
        return ended

    def await_from(self, contributor: Contributor[SeatT]) -> bool:
        return self._crew.await_from(contributor, self._note_seat)

    def end_tenure(self, worker_id: str, tenure: int) -> bool:
        return self._crew.end_tenure(worker_id, tenure, self._note_seat)

    def note_incarnation(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            self._storage.log({"kind": "incarnation", "incarnation": incarnation})
            self.incarnation = incarnation
            self._storage.compact(self._events())

    # Learning rates.

    def _change_rate(
        self, from_step: int | None, learning_rate: float, *, reached: int, oldest: int
    ) -> None:
        """Sets the rate from a step on; None: from `reached`, the newest step that anything is at.

        Raises:
            StepOrderError: `from_step` is before `reached`.
            LimitError: too many changes are scheduled.
        """
        first = reached if from_step is None else from_step
        if first < reached:
            raise StepOrderError(
                f"learning rate of {self._name!r} from step {from_step}: the {self._kind} has "
                f"reached step {reached}; ask for a later step, or for none to have it now",
                **self._where,
            )
        self.rates.prune(oldest)
        limit = self._limits.learning_rate_change_count_max
        if len(self.rates) >= limit:
            raise LimitError(
                f"limit learning_rate_change_count_max={limit}: {self._kind} {self._name!r} has as "
                "many changes scheduled; wait until some have taken effect",
                **self._where,
            )
        self._storage.log(_rate_event(first, learning_rate))
        self.rates.change(first, learning_rate)
        self._storage.compact(self._events())

    # Events.

    def _events(self) -> list[Event]:
        events = self._crew.events()
        if self.incarnation:
            events.append({"kind": "incarnation", "incarnation": self.incarnation})
        events += self._own_events()
        events += [_rate_event(from_step, rate) for from_step, rate in self.rates.changes]
        return events

    @abstractmethod
    def _own_events(self) -> list[Event]:
        """Returns the events that only parameters, or only tables, have."""

    @abstractmethod
    def _restore_own(self, event: Event) -> None:
        """Restores an event of `_own_events`; KeyError, TypeError: it is none."""

    def _restore(self, stored: Iterable[Any]) -> None:
        contributed = iter(stored)
        for event in self._storage.events():
            try:
                match event["kind"]:
                    case "seat":
                        self._crew.restore_seat(event, next(contributed))
                    case "owner":
                        self._crew.set_owner(event["worker_id"], owner_of(event))
                    case "tenure":
                        self._crew.restore_tenure(event)
                    case "from":
                        self._crew.restore_from(event["seat_index"], event["from_step"])
                    case "over":
                        self._crew.restore_over(event["seat_index"])
                    case "incarnation":
                        self.incarnation = event["incarnation"]
                    case "learning_rate":
                        rate = rate_of(event["learning_rate"], event.get("factors", ()))
                        self.rates.change(event["from_step"], rate)
                    case _:
                        self._restore_own(event)
            except (IndexError, KeyError, TypeError, StopIteration) as error:
                raise StorageError(
                    f"{self._kind} {self._name!r}: its events hold {event!r}, which this version "
                    f"can't read ({error!r}); run the version that wrote it, or restore a copy",
                    **self._where,
                ) from None
