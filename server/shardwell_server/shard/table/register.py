"""The facts about a table on a shard that change rarely: its members, and the load that it is of.

Events beside those of ../register.py:

    {"kind": "load", "load_id": N}                           rows of that load are coming, or came;
                                                             the rate is the spec's again
    {"kind": "cut_off", "seat_index": I, "step": N, "part_count": C}
                                                             step N of its member has ended, maybe
                                                             with its tenure: C parts are counted
"""

from __future__ import annotations

from shardwell.errors import ArgumentError, OtherIncarnationError
from shardwell.specs.table import TableSpec
from shardwell_server.config import Limits
from shardwell_server.shard.learning_rates import LearningRates
from shardwell_server.shard.register import SliceRegister
from shardwell_server.shard.table.step_tracker import TableSeat, TableStepTracker
from shardwell_server.store.contract import Event, TableStorage


class TableRegister(SliceRegister[TableSeat]):
    """The register of one table. For one thread at a time; any thread may read `rates`."""

    def __init__(
        self, spec: TableSpec, storage: TableStorage, tracker: TableStepTracker, limits: Limits
    ) -> None:
        rate = getattr(spec.optimizer, "learning_rate", None)
        super().__init__("table", spec.name, storage, tracker.crew, rate, limits)
        self.load_id = 0
        """Id of the newest load; 0: none."""
        self._spec = spec
        self._tracker = tracker
        self._positions = storage.positions
        self._restore(storage.positions())

    @property
    def has_counted(self) -> bool:
        return any(at.step or at.part_count for at in self._positions())

    def change_learning_rate(self, from_step: int | None, learning_rate: float) -> None:
        """Sets the rate from a step on; None: from the open one."""
        version = self._tracker.version
        if from_step is not None and self._spec.mode == "async":
            raise ArgumentError(
                f"table {self._name!r} is asynchronous: its learning rate changes at once; ask "
                f"without from_step; got {from_step}"
            )
        self._change_rate(from_step, learning_rate, reached=version, oldest=version)

    def check_incarnation(self, incarnation: int) -> None:
        """Refuses a call that is meant for another table of this name; 0 is meant for any."""
        if incarnation and self.incarnation not in (0, incarnation):
            raise OtherIncarnationError(
                f"table {self._spec.name!r} was made anew on one shard and not on another, or "
                "since it was opened: a shard lost its memory; restore a checkpoint into an empty "
                "cluster, or start the training again under another name",
                table=self._spec.name,
            )

    def begin_load(self, load_id: int, incarnation: int) -> None:
        """Notes a load, and goes back to the spec's rate; an incarnation of 0 keeps the table's."""
        if incarnation:
            self.note_incarnation(incarnation)
        self._storage.log({"kind": "load", "load_id": load_id})
        self._load_began(load_id)
        self._storage.compact(self._events())

    def _load_began(self, load_id: int) -> None:
        self.load_id = load_id
        self.rates = LearningRates(getattr(self._spec.optimizer, "learning_rate", 0.0))

    def cut_off(self, seat: TableSeat) -> None:
        """Notes how much of its open step a member has given whose tenure is over.

        Its position says only that the step has ended, once it has.
        """
        _, step, part_count = seat.position
        self._storage.log(_cut_off_event(seat.index, step, part_count))
        seat.ended_at = step, part_count
        self._storage.compact(self._events())

    def _own_events(self) -> list[Event]:
        events: list[Event] = [
            _cut_off_event(seat.index, *seat.ended_at)
            for seat in self._crew.seats
            if seat.ended_at is not None
        ]
        return [*events, {"kind": "load", "load_id": self.load_id}] if self.load_id else events

    def _restore_own(self, event: Event) -> None:
        if event["kind"] == "cut_off":
            given = event["step"], event["part_count"]
            self._crew.seats[event["seat_index"]].ended_at = given
            return
        if event["kind"] != "load":
            raise KeyError(event["kind"])
        self._load_began(event["load_id"])


def _cut_off_event(seat_index: int, step: int, part_count: int) -> Event:
    return {"kind": "cut_off", "seat_index": seat_index, "step": step, "part_count": part_count}
