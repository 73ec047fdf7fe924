"""What changes rarely about a table on a shard: who takes part, and learning rates.

As shard/parameter/register.py for parameters, without first weights: rows need none. Every change
is logged in the storage before it takes effect. Events, as JSON objects:

    {"kind": "seat", ...}, {"kind": "tenure", ...}, {"kind": "owner", ...}      as there
    {"kind": "learning_rate", "from_step": N, "learning_rate": R}
    {"kind": "incarnation", "incarnation": N}                what the table is told from others by
    {"kind": "load", "load_id": N}                           rows of that load are coming, or came;
                                                             the rate is the spec's again
"""

from __future__ import annotations

from shardwell.errors import ArgumentError, LimitError, StepOrderError, StorageError
from shardwell.specs.table import TableSpec
from shardwell_server.config import Limits
from shardwell_server.shard.learning_rates import LearningRates
from shardwell_server.shard.members import Contributor, owner_event, owner_of
from shardwell_server.shard.table.step_tracker import Seat, TableStepTracker
from shardwell_server.store import Event, TableStorage


class TableRegister:
    """See the module. For one thread at a time, but for `learning_rate`."""

    def __init__(
        self, spec: TableSpec, storage: TableStorage, tracker: TableStepTracker, limits: Limits
    ) -> None:
        self._spec = spec
        self._storage = storage
        self._tracker = tracker
        self._limits = limits
        self.load_id: int
        """Of the newest load; 0: none."""
        self._load_began(0)
        self.incarnation = 0
        """See OpenTableResponse; 0: none yet."""
        self._restore()

    @property
    def has_counted(self) -> bool:
        """Whether any worker's gradient was."""
        return any(at.step or at.part_count for at in self._storage.positions())

    def seat(self, contributor: Contributor[Seat]) -> Seat:
        """The worker's seat, which is the session's from now on.

        Raises:
            SeatsTakenError, WorkerIdInUseError, LimitError, StepOrderError: see `Seats.seat`.
            StorageError: there is no room for it.
        """
        return self._tracker.seat(contributor, self._note_seat)

    def _note_seat(self, event: Event) -> None:
        if event["kind"] == "seat":
            self._storage.add_seat()
        self._storage.compact(self._events())
        self._storage.log(event)

    def end_session(self, number: int) -> None:
        """Notes that a session, by its number, has ended in order.

        Raises:
            StorageError: it can't be noted.
        """
        for worker_id in self._tracker.owned_by(number):
            self._storage.log(owner_event(worker_id, None))
            self._tracker.set_owner(worker_id, None)

    def learning_rate(self, version: int) -> float:
        """The rate of the update that follows `version` steps."""
        return self._rates.at(version)

    def change_learning_rate(self, from_step: int | None, learning_rate: float) -> None:
        """Sets the rate from a step on; None: from the open one.

        Raises:
            ArgumentError: asynchronous steps can't be named beforehand.
            StepOrderError: `from_step` has closed.
            LimitError: too many changes are scheduled.
        """
        name, version = self._spec.name, self._tracker.version
        if from_step is not None and self._spec.mode == "async":
            raise ArgumentError(
                f"table {name!r} is asynchronous: its learning rate changes at once; ask without "
                f"from_step; got {from_step}"
            )
        first = version if from_step is None else from_step
        if first < version:
            raise StepOrderError(
                f"learning rate of {name!r} from step {from_step}: the table has reached step "
                f"{version}; ask for a later step, or for none to have it now",
                table=name,
            )
        self._rates.prune(version)
        if len(self._rates) >= self._limits.learning_rate_change_count_max:
            raise LimitError(
                f"limit learning_rate_change_count_max="
                f"{self._limits.learning_rate_change_count_max}: table {name!r} has as many "
                "changes scheduled; wait until some have taken effect",
                table=name,
            )
        self._storage.log(
            {"kind": "learning_rate", "from_step": first, "learning_rate": learning_rate}
        )
        self._rates.change(first, learning_rate)
        self._storage.compact(self._events())

    def check_incarnation(self, incarnation: int) -> None:
        """Refuses what is meant for another table of this name; 0 is meant for any.

        Raises:
            StepOrderError: this one has another incarnation.
        """
        if incarnation and self.incarnation not in (0, incarnation):
            raise StepOrderError(
                f"table {self._spec.name!r} was made anew on one shard and not on another, or "
                "since it was opened: a shard lost its memory; restore a checkpoint into an empty "
                "cluster, or start the training again under another name",
                table=self._spec.name,
            )

    def note_incarnation(self, incarnation: int) -> None:
        """Sets what the table is told from others by.

        Raises:
            StorageError: it can't be noted.
        """
        if incarnation != self.incarnation:
            self._storage.log({"kind": "incarnation", "incarnation": incarnation})
            self.incarnation = incarnation
            self._storage.compact(self._events())

    def begin_load(self, load_id: int, incarnation: int) -> None:
        """Notes which load begins, and goes back to the spec's learning rate.

        Args:
            load_id: The load's; 0: it has none.
            incarnation: The table's from now on; 0: it keeps its own.

        Raises:
            StorageError: it can't be noted.
        """
        if incarnation:
            self.note_incarnation(incarnation)
        self._storage.log({"kind": "load", "load_id": load_id})
        self._load_began(load_id)
        self._storage.compact(self._events())

    def _load_began(self, load_id: int) -> None:
        self.load_id = load_id
        self._rates = LearningRates(getattr(self._spec.optimizer, "learning_rate", 0.0))

    def _events(self) -> list[Event]:
        """The fewest events that lead to where the register stands."""
        events = self._tracker.events()
        if self.incarnation:
            events.append({"kind": "incarnation", "incarnation": self.incarnation})
        if self.load_id:
            events.append({"kind": "load", "load_id": self.load_id})
        events += [
            {"kind": "learning_rate", "from_step": from_step, "learning_rate": rate}
            for from_step, rate in self._rates.changes
        ]
        return events

    def _restore(self) -> None:
        """Goes on from what was logged."""
        positions = iter(self._storage.positions())
        for event in self._storage.events():
            try:
                match event["kind"]:
                    case "seat":
                        self._tracker.restore_seat(event, next(positions))
                    case "owner":
                        self._tracker.set_owner(event["worker_id"], owner_of(event))
                    case "tenure":
                        self._tracker.restore_tenure(event)
                    case "learning_rate":
                        self._rates.change(event["from_step"], event["learning_rate"])
                    case "incarnation":
                        self.incarnation = event["incarnation"]
                    case "load":
                        self._load_began(event["load_id"])
                    case kind:
                        raise KeyError(kind)
            except (IndexError, KeyError, TypeError, StopIteration) as error:
                raise StorageError(
                    f"table {self._spec.name!r}: its events hold {event!r}, which this version "
                    f"can't read ({error!r}); run the version that wrote it, or restore a copy",
                    table=self._spec.name,
                ) from None
