"""What changes rarely about a parameter's slice: who takes part, whose first weights stand, rates.

Every change is logged in the storage before it takes effect, so that a shard that comes back goes
on with it. Events, as JSON objects:

    {"kind": "seat", "worker_id": W, "session": [N, host, pid] or null, "tenure": [T, F]}
                                                 W takes the next seat, in tenure T, from step F on;
                                                 null: its session has ended in order since
    {"kind": "tenure", "seat_index": I, "worker_id": W, "session": ..., "tenure": [T, F]}
                                                 seat I, which was another's or W's, in a new tenure
    {"kind": "owner", "worker_id": W, "session": ...}       its seat's owner from now on
    {"kind": "first_weights", "epoch": E, "staged_epoch": S, "standing": B,
     "learning_rate": R or null,         and "from_step": N when R is the rate from step N on
     "load_id": N}                       what the values are of; 0: nothing to tell
    {"kind": "learning_rate", "from_step": N, "learning_rate": R}
    {"kind": "incarnation", "incarnation": N}                what tells it from others of its name
"""

from __future__ import annotations

import contextlib
import copy
import secrets
import threading
import time
from collections.abc import Iterator

from shardwell.errors import (
    ArgumentError,
    LimitError,
    NotInitializedError,
    StepOrderError,
    StorageError,
)
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server.config import Limits
from shardwell_server.shard.deadline import Changes, RequestDeadline
from shardwell_server.shard.learning_rates import LearningRates
from shardwell_server.shard.members import Contributor, owner_event, owner_of
from shardwell_server.shard.parameter.first_weights import FirstWeightsState
from shardwell_server.shard.step_tracker import Seat, StepTracker
from shardwell_server.store import Event, ParameterStorage

_CLAIM_LOOK_S = 0.2
"""How soon a client that waits for first weights sees that their sender has had his time."""


class Register:
    """See the module. Any thread may call it; never with a chunk's lock held."""

    def __init__(
        self,
        spec: ParameterSpec,
        storage: ParameterStorage,
        tracker: StepTracker,
        *,
        learning_rate: float | None,
        is_first_shard: bool,
        limits: Limits,
    ) -> None:
        self.lock = threading.Lock()
        """Guards all of it, and the seats of the tracker."""
        self._spec = spec
        self._storage = storage
        self._tracker = tracker
        self._limits = limits
        self._has_rate = learning_rate is not None
        self._rates = LearningRates(learning_rate or 0.0)
        self._init_changed = Changes(self.lock)
        self._is_first_shard = is_first_shard
        self.incarnation = 0
        """See CreateParameterResponse; 0: none yet."""
        self._first = FirstWeightsState(
            spec.name, is_first_shard=is_first_shard, claim_s=limits.init_claim_s
        )
        if isinstance(spec.optimizer, Average):
            self._first.stand_without()
        self._restore()

    # Taking part.

    def seat(self, contributor: Contributor[Seat]) -> Seat:
        """The worker's seat, which is the session's from now on; the lock is held.

        Raises:
            NotInitializedError: there are no first weights.
            SeatsTakenError, WorkerIdInUseError, LimitError, StepOrderError: see `Seats.seat`.
            StorageError: there is no room for it.
        """
        self.check_initialized()
        return self._tracker.seat(contributor, self._note_seat)

    def _note_seat(self, event: Event) -> None:
        if event["kind"] == "seat":
            self._storage.add_seat()
        self._storage.compact(self._events())
        self._log(event)

    def end_session(self, number: int) -> None:
        """Notes that a session, by its number, has ended in order; the lock is held.

        Raises:
            StorageError: it can't be noted.
        """
        for worker_id in self._tracker.owned_by(number):
            self._log(owner_event(worker_id, None))
            self._tracker.set_owner(worker_id, None)

    # Which parameter of its name it is.

    @property
    def has_begun(self) -> bool:
        """Whether first weights stand, or a gradient was counted where none are needed."""
        if isinstance(self._spec.optimizer, Average):
            return self._tracker.has_counted
        return self._first.standing

    def meet_incarnation(self, incarnation: int) -> int:
        """Takes over an incarnation before anything has begun; returns the parameter's own.

        The lock is held. Shard 0 draws it at the first call.

        Args:
            incarnation: That of shard 0; 0: nobody knows.

        Raises:
            StepOrderError: it has begun with another one.
            StorageError: it can't be noted.
        """
        if self._is_first_shard and not self.incarnation:
            incarnation = incarnation or secrets.randbits(63) + 1
        if incarnation and incarnation != self.incarnation:
            if self.incarnation and self.has_begun:
                raise StepOrderError(
                    f"parameter {self._spec.name!r} was made anew on shard 0, and this shard has "
                    "what was trained before: shard 0 lost its memory; stop it and start it with "
                    "its files, or start the training again under another name",
                    parameter=self._spec.name,
                )
            self._log({"kind": "incarnation", "incarnation": incarnation})
            self.incarnation = incarnation
        return self.incarnation

    # First weights.

    @property
    def is_standing(self) -> bool:
        """Whether first weights stand, so that gradients are taken."""
        return self._first.standing

    @property
    def standing_epoch(self) -> int:
        return self._first.standing_epoch

    @property
    def standing_load_id(self) -> int:
        """The load_id of the first weights that stand; 0 if they have none, or none stand."""
        return self._first.load_id if self._first.standing else 0

    def check_initialized(self) -> None:
        """Refuses to go on without first weights.

        Raises:
            NotInitializedError: there are none.
        """
        if not self._first.standing:
            raise NotInitializedError(
                f"parameter {self._spec.name!r} has no first weights; call init() in one worker",
                parameter=self._spec.name,
            )

    def claim(
        self, worker_id: str, deadline: RequestDeadline, *, above_epoch: int = 0
    ) -> pb.ClaimInitResponse:
        """Grants the right to set the first weights, or waits until another has set them.

        Raises:
            ArgumentError: no epoch is above `above_epoch`.
        """
        with self.lock:
            if not self._first.standing:
                with self._changing_first() as first:
                    epoch = first.claim(
                        worker_id,
                        now_s=time.monotonic(),
                        drawn=secrets.randbits(32),
                        above=above_epoch,
                    )
                if epoch is not None:
                    return pb.ClaimInitResponse(granted=True, epoch=epoch)
                deadline.wait(self._init_changed, look_s=_CLAIM_LOOK_S)
            return pb.ClaimInitResponse(
                initialized=self._first.standing,
                epoch=self._first.standing_epoch,
                version=self._tracker.version_min(),
            )

    def take_first(self, epoch: int) -> bool:
        """Whether first weights of an epoch are to be written; the lock is held.

        Raises:
            InitSupersededError, StepOrderError: see FirstWeightsState.take.
        """
        with self._changing_first() as first:
            return first.take(epoch)

    def finish_first(self, epoch: int, learning_rate: float | None, load_id: int = 0) -> None:
        """All of them are written, and the tracker has their version; the lock is held."""
        with self._changing_first() as first:
            first.finish(epoch, learning_rate, load_id)
        self._init_changed.notify_all()

    def confirm_first(self, epoch: int) -> None:
        """Shard 0 stands with that epoch; the lock is held.

        Raises:
            StepOrderError: this shard has no complete values of that epoch.
        """
        with self._changing_first() as first:
            first.confirm(epoch)
        self._init_changed.notify_all()

    @contextlib.contextmanager
    def _changing_first(self) -> Iterator[FirstWeightsState]:
        """A copy to change, which takes effect when it is logged."""
        changed = copy.copy(self._first)
        yield changed
        if changed.facts() != self._first.facts():
            event: Event = {"kind": "first_weights", **changed.facts()}
            rate = changed.learning_rate
            if rate is not None and changed.standing and not self._first.standing:
                # It came with the values, and is theirs from this event on.
                event["from_step"] = self._tracker.version_max()
            self._log(event)
            if rate is not None and "from_step" in event:
                self._rates.change(event["from_step"], rate)
        self._first = changed

    # Learning rates.

    def learning_rate(self, version: int) -> float:
        """The rate of the update that follows `version` updates; 0 where there is none."""
        return self._rates.at(version)

    def change_learning_rate(self, from_step: int | None, learning_rate: float) -> None:
        """Sets the rate from a step on; None: from the first that no chunk has reached.

        Raises:
            ArgumentError: the optimizer has no rate.
            StepOrderError: a chunk has passed `from_step`.
            LimitError: too many changes are scheduled.
        """
        name = self._spec.name
        if not self._has_rate:
            raise ArgumentError(
                f"parameter {name!r}: {self._spec.optimizer!r} has no learning rate"
            )
        with self.lock:
            version_max = self._tracker.version_max()
            first = version_max if from_step is None else from_step
            if first < version_max:
                raise StepOrderError(
                    f"learning rate of {name!r} from step {from_step}: chunks have reached step "
                    f"{version_max}; ask for a later step, or for none to have it now",
                    parameter=name,
                )
            oldest = self._tracker.version_min() if self._tracker.records else first
            self._rates.prune(oldest)
            if len(self._rates) >= self._limits.learning_rate_change_count_max:
                raise LimitError(
                    f"limit learning_rate_change_count_max="
                    f"{self._limits.learning_rate_change_count_max}: parameter {name!r} has as "
                    "many changes scheduled; wait until some have taken effect",
                    parameter=name,
                )
            self._log({"kind": "learning_rate", "from_step": first, "learning_rate": learning_rate})
            self._rates.change(first, learning_rate)
            self._storage.compact(self._events())

    # Events.

    def _log(self, event: Event) -> None:
        self._storage.log(event)

    def _events(self) -> list[Event]:
        """The fewest events that lead to where the register stands; the lock is held."""
        events = self._tracker.events()
        if self.incarnation:
            events.append({"kind": "incarnation", "incarnation": self.incarnation})
        events.append({"kind": "first_weights", **self._first.facts()})
        events += [
            {"kind": "learning_rate", "from_step": from_step, "learning_rate": rate}
            for from_step, rate in self._rates.changes
        ]
        return events

    def _restore(self) -> None:
        """Goes on from what was logged."""
        marks = iter(self._storage.last_steps())
        for event in self._storage.events():
            try:
                match event["kind"]:
                    case "seat":
                        self._tracker.restore_seat(event, next(marks))
                    case "owner":
                        self._tracker.set_owner(event["worker_id"], owner_of(event))
                    case "tenure":
                        self._tracker.restore_tenure(event)
                    case "first_weights":
                        facts = {key: value for key, value in event.items() if key != "kind"}
                        from_step = facts.pop("from_step", None)
                        self._first.restore(**facts)
                        if from_step is not None:
                            self._rates.change(from_step, facts["learning_rate"])
                    case "incarnation":
                        self.incarnation = event["incarnation"]
                    case "learning_rate":
                        self._rates.change(event["from_step"], event["learning_rate"])
                    case kind:
                        raise KeyError(kind)
            except (IndexError, KeyError, TypeError, StopIteration) as error:
                raise StorageError(
                    f"parameter {self._spec.name!r}: its events hold {event!r}, which this version "
                    f"can't read ({error!r}); run the version that wrote it, or restore a copy",
                    parameter=self._spec.name,
                ) from None
