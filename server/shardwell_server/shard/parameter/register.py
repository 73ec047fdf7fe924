"""The facts about a parameter's slice that change rarely: its members, and its first weights.

Events beside those of ../register.py:

    {"kind": "first_weights", "epoch": E, "staged_epoch": S, "is_committed": B,
     "learning_rate": R or null,         and "from_step": N when R is the rate from step N on
     "load_id": N}                       what the values are of; 0: nothing to tell
    {"kind": "norm", "step": N, "norm": H}   with which a step closes; H as float.hex has it
"""

from __future__ import annotations

import contextlib
import copy
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from shardwell.errors import NotInitializedError, OtherIncarnationError, StepOrderError
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server.config import Limits
from shardwell_server.shard.crews import Contributor
from shardwell_server.shard.deadline import Changes, RequestDeadline
from shardwell_server.shard.parameter.first_weights import FirstWeightsState
from shardwell_server.shard.register import SliceRegister
from shardwell_server.shard.step_tracker import ParameterSeat, StepTracker
from shardwell_server.store.contract import Event, ParameterStorage

_CLAIM_LOOK_S = 0.2
"""A client that waits for first weights looks so often for a sender whose time is over."""


class Register(SliceRegister[ParameterSeat]):
    """The register of one slice. Any thread may call it; never with a chunk's lock held."""

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
        super().__init__("parameter", spec.name, storage, tracker.crew, learning_rate, limits)
        self.lock = threading.Lock()
        """Guards all of it, and the crew."""
        self._spec = spec
        self._tracker = tracker
        self._brought: dict[int, tuple[float, str]] = {}
        """Rates that came with gradients, by step; of steps that are not over."""
        self._norms: dict[int, float] = {}
        """Norms by step: that of the last step with one, and of the last such step when an image
        was made, whose chunks may lie before and behind that step's end."""
        self._kept_norm_step = -1
        self._init_changed = Changes(self.lock)
        self._is_first_shard = is_first_shard
        self._first = FirstWeightsState(
            spec.name, is_first_shard=is_first_shard, claim_s=limits.init_claim_s
        )
        if isinstance(spec.optimizer, Average):
            self._first.commit_without()
        self._restore(storage.last_steps())

    # Taking part. The lock is held.

    def seat(self, contributor: Contributor[ParameterSeat]) -> ParameterSeat | None:
        """Finds a contributor's seat, which needs first weights."""
        self.check_initialized()
        return super().seat(contributor)

    # Which parameter of its name it is.

    @property
    def has_begun(self) -> bool:
        """True if there are first weights, or a gradient was counted where none are needed."""
        if isinstance(self._spec.optimizer, Average):
            return self._tracker.has_counted
        return self._first.is_committed

    def meet_incarnation(self, incarnation: int) -> int:
        """Takes over an incarnation before anything has begun; returns the parameter's own.

        The lock is held. Shard 0 draws it at the first call; elsewhere 0 means unknown.
        """
        if self._is_first_shard and not self.incarnation:
            incarnation = incarnation or secrets.randbits(63) + 1
        if incarnation and incarnation != self.incarnation:
            if self.incarnation and self.has_begun:
                raise OtherIncarnationError(
                    f"parameter {self._spec.name!r} was made anew on shard 0, and this shard has "
                    "what was trained before: shard 0 lost its memory; stop it and start it with "
                    "its files, or start the training again under another name",
                    parameter=self._spec.name,
                )
            self.note_incarnation(incarnation)
        return self.incarnation

    # First weights.

    @property
    def is_initialized(self) -> bool:
        """True if first weights are committed, so that gradients are taken."""
        return self._first.is_committed

    @property
    def committed_epoch(self) -> int:
        return self._first.committed_epoch

    @property
    def committed_load_id(self) -> int:
        """The load_id of the first weights; 0 if they have none, or none are committed."""
        return self._first.load_id if self._first.is_committed else 0

    def check_initialized(self) -> None:
        """Refuses a call that needs first weights while there are none."""
        if not self._first.is_committed:
            raise NotInitializedError(
                f"parameter {self._spec.name!r} has no first weights; call init() in one worker",
                parameter=self._spec.name,
            )

    def claim(
        self, worker_id: str, deadline: RequestDeadline, above_epoch: int = 0
    ) -> pb.ClaimInitResponse:
        """Grants the right to set the first weights, or waits until another has set them."""
        with self.lock:
            if not self._first.is_committed:
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
                initialized=self._first.is_committed,
                epoch=self._first.committed_epoch,
                version=self._tracker.version_min(),
            )

    def take_first(self, epoch: int) -> bool:
        """Returns True if first weights of an epoch are to be written; the lock is held."""
        with self._changing_first() as first:
            return first.take(epoch)

    def finish_first(self, epoch: int, learning_rate: float | None, load_id: int = 0) -> None:
        """Notes that all are written, and the tracker has their version; the lock is held."""
        with self._changing_first() as first:
            first.finish(epoch, learning_rate, load_id)
        self._init_changed.notify_all()

    def confirm_first(self, epoch: int) -> None:
        """Commits the epoch that shard 0 has committed; the lock is held."""
        with self._changing_first() as first:
            first.confirm(epoch)
        self._init_changed.notify_all()

    @contextlib.contextmanager
    def _changing_first(self) -> Iterator[FirstWeightsState]:
        """Yields a copy to change, which takes effect when it is logged."""
        changed = copy.copy(self._first)
        yield changed
        if changed.facts() != self._first.facts():
            event: Event = {"kind": "first_weights", **changed.facts()}
            rate = changed.learning_rate
            if rate is not None and changed.is_committed and not self._first.is_committed:
                # It came with the values, and is theirs from this event on.
                event["from_step"] = self._tracker.version_max()
            self._storage.log(event)
            if rate is not None and "from_step" in event:
                self.rates.change(event["from_step"], rate)
        self._first = changed

    # Learning rates.

    def change_learning_rate(self, from_step: int | None, learning_rate: float) -> None:
        """Sets the rate from a step on; None: from the first that no chunk has reached."""
        self._spec.check_has_rate()
        with self.lock:
            newest = self._tracker.version_max()
            oldest = self._tracker.version_min()
            if not self._tracker.records:  # of an empty slice, which no gradient moves on
                oldest = newest if from_step is None else from_step
            self._change_rate(from_step, learning_rate, reached=newest, oldest=oldest)

    def bring_learning_rate(
        self, contributor: Contributor[ParameterSeat], step: int, learning_rate: float
    ) -> None:
        """Sets the rate from a step on that a gradient brings, before it is counted.

        All workers bring the same, so all but the first change nothing; nor do gradients that come
        again after their step has closed.
        """
        if self._brought.get(step, (None, ""))[0] == learning_rate:  # nearly always
            return
        with self.lock:
            self._crew.check(contributor)
            if contributor.is_over:
                return  # it is late, and brings nothing
            oldest, reached = self._tracker.version_min(), self._tracker.version_max()
            # A gradient of a step that is over, or that skips one, is not counted.
            if not oldest <= step <= reached + 1:
                return
            differs = self.rates.at(step) != learning_rate
            is_known = step < reached or step in self._brought
            if differs and is_known and self._tracker.has_open_sets:
                return  # the first one decides: who comes late, or later, may count steps otherwise
            if differs and is_known:
                whose = self._brought.get(step, (0.0, ""))[1]
                raise StepOrderError(
                    f"step {step} of parameter {self._name!r} has learning rate "
                    f"{self.rates.at(step)!r}{whose and f', which {whose!r} has brought'}; the "
                    f"gradient of {contributor.worker_id!r} brings {learning_rate!r}; give all "
                    "workers the same, or decide with set_learning_rate of the parameter",
                    parameter=self._name,
                )
            if differs:
                self._change_rate(step, learning_rate, reached=reached, oldest=oldest)
            brought = {k: rate for k, rate in self._brought.items() if k >= oldest}
            self._brought = {**brought, step: (learning_rate, contributor.worker_id)}

    def _change_rate(
        self, from_step: int | None, learning_rate: float, *, reached: int, oldest: int
    ) -> None:
        super()._change_rate(from_step, learning_rate, reached=reached, oldest=oldest)
        # It is the rate of later steps, too, none of whose gradients is counted yet: those that
        # have brought another must wait, and bring it again.
        first = reached if from_step is None else from_step
        self._brought = {k: rate for k, rate in self._brought.items() if k < first}

    # Norms; see steps.py.

    def agree_on_norm(self, step: int, norm: float) -> float | None:
        """Returns the norm that a step closes with, the first it gets; None: it is long over."""
        with self.lock:
            if step > max(self._norms, default=-1):
                self._storage.log({"kind": "norm", "step": step, "norm": norm.hex()})
                kept = {k: v for k, v in self._norms.items() if k == self._kept_norm_step}
                self._norms = {**kept, step: norm}
                self._storage.compact(self._events())
        return self.norm_of(step)

    def norm_of(self, step: int) -> float | None:
        """The norm that a step closes with; None: it is long over, or no norm has come yet."""
        return self._norms.get(step)

    def keep_norm(self) -> None:
        """Keeps the last norm until the next image: this one may have chunks that need it."""
        self._kept_norm_step = max(self._norms, default=-1)

    def restore_norm(self, step: int, norm: float) -> None:
        """Takes over a norm that a journal has."""
        self._norms[step] = norm

    def forget_norms(self, is_too_early: Callable[[int], bool]) -> None:
        """Forgets the norms of steps that are to be made again."""
        self._norms = {k: v for k, v in self._norms.items() if not is_too_early(k)}
        self._kept_norm_step = min(self._norms, default=-1)

    # Events.

    def _own_events(self) -> list[Event]:
        events: list[Event] = [{"kind": "first_weights", **self._first.facts()}]
        for step, norm in self._norms.items():
            events.append({"kind": "norm", "step": step, "norm": norm.hex()})
        return events

    def _restore_own(self, event: Event) -> None:
        if event["kind"] == "norm":
            self.restore_norm(event["step"], float.fromhex(event["norm"]))
            return
        if event["kind"] != "first_weights":
            raise KeyError(event["kind"])
        facts = {key: value for key, value in event.items() if key != "kind"}
        from_step = facts.pop("from_step", None)
        self._first.restore(**facts)
        if from_step is not None:
            self.rates.change(from_step, facts["learning_rate"])
