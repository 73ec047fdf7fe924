"""A parameter or table as a worker holds it: its spec, its calls, its learning rate, its end."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from typing_extensions import override

from shardwell.errors import ArgumentError
from shardwell.process.connected import Closing, Connected
from shardwell.rpc.call_scope import CallScope
from shardwell.rpc.cluster import Shards
from shardwell.rpc.members import ask_steps
from shardwell.rpc.retry import Attempts
from shardwell.rpc.take_over import was_cut_off
from shardwell.specs.optimizers import check_learning_rate
from shardwell.specs.parameter import TrainingSpec
from shardwell.steps.member import Member
from shardwell.steps.opening import Opening, Ranking

SpecT = TypeVar("SpecT", bound=TrainingSpec)
_LOG = logging.getLogger("shardwell")


class Handle(Connected, Closing, Generic[SpecT]):
    """A parameter or table in a worker: a context manager, which closes it in this worker alone."""

    kind: ClassVar[str]
    _ranking: Ranking | None = None
    _opening: Opening[Any, Any]
    _gives_again = False
    """True if an earlier process of this worker has given all of `next_step`."""
    on_give_again: Callable[[], Callable[[], None] | None] = staticmethod(lambda: None)
    """A weak reference to a reader of the weights, called on the way back to such a step."""

    def __init__(
        self, spec: SpecT, opening: Opening[Any, Any], shards: Shards, timeout_s: float
    ) -> None:
        self.spec: SpecT = spec
        """The spec that all workers agreed on."""
        self.name: str = spec.name
        """The name in the cluster."""
        self.on_close: Callable[[], None] = lambda: None
        self._elsewhere = (
            f"connect in the other process, and open the {self.kind} there by its name"
        )
        self._shards = shards
        shards.note_handle(self)
        self._opening = opening
        self._what = opening.what
        self._calls = CallScope(shards, timeout_s, self._what, **opening.of)
        self._member: Member | None = None
        if spec.members is not None:
            self._member = Member(opening, shards.heartbeats, spec.members)
            self._calls.member = self._member

    @property
    @abstractmethod
    def next_step(self) -> int:
        """The step that this worker's next gradient joins; a restarted worker goes on here.

        In asynchronous mode it is this worker's own count, from 0, and from 0 again when the shards
        have given its seat away meanwhile, for want of seats: see `Limits.worker_count_max`.
        """

    def ranking(self, *, timeout_s: float | None = None) -> Ranking:
        """Returns this worker's rank among those that make a step, and their number.

        A worker of a fixed worker_count takes its seat, and the rank stays. An elastic one does not
        join, and the rank is as of now. ArgumentError: asynchronous mode, in which no worker makes
        a step with others. NotInitializedError: the parameter has no first weights, and so no
        seats.
        """
        if self.spec.mode != "sync":
            raise ArgumentError(
                f"{self._what} has mode='async', in which workers have no ranks; set RANK and "
                "WORLD_SIZE for each worker, as torchrun and `shardwell run` do"
            )
        if self._ranking is not None:
            return self._ranking
        is_fixed = self.spec.members is None
        found = self._calls.run(partial(self._opening.rank, takes_seat=is_fixed), timeout_s)
        if is_fixed:
            self._ranking = found
        return found

    @property
    def is_draining(self) -> bool:
        """Returns True when an operator wants this elastic member to leave after its step.

        `shardwell members drain` asks it. A loop that looks here calls `leave`, or closes the
        client.
        """
        return self._member is not None and self._member.is_draining

    # A worker that was started again, see docs/adr/0024.

    @property
    def _keeps_step(self) -> bool:
        """True if its steps need all workers, and come in turn with those of others of the kind."""
        return self.spec.mode == "sync" and not self.spec.has_open_sets

    @property
    def is_untouched(self) -> bool:
        """True if this client has given it nothing, so that a killed worker may go back."""
        return self._keeps_step and not self.is_closed and self._what not in self._shards.given

    @property
    def resumed_step(self) -> int:
        """The step behind the last that an earlier process of this worker has given."""
        return self.next_step + self._gives_again

    def is_step_ahead_of(self, other: Handle[Any]) -> bool:
        """Returns True if this worker came back a step further here, and has given to neither.

        Its earlier process may have ended between its steps of the two.
        """
        return (
            self.resumed_step == other.resumed_step + 1
            and self._what not in self._shards.resumed  # else a kept state says its step
            and self._opening.has_seat
            and self.is_untouched
            and other.is_untouched
        )

    def give_again(self, other: Handle[Any]) -> None:
        """Goes back to the step before, if this worker was killed after it and before `other`'s.

        A gradient of that step counts once. Reading has the version before it.
        """

        def go_back(attempts: Attempts) -> None:
            if self._gives_again or self._what in self._shards.given:
                return
            own, its = (ask_steps(self._shards.channels, e.name, attempts) for e in (self, other))
            takes_part = other._opening.has_seat or its.has_room
            if takes_part and was_cut_off(self._shards.worker_id, own, its):
                self._go_back()
                self._gives_again = True

        self._calls.run(go_back, in_turn=True)
        if self._gives_again:
            _LOG.warning(
                "worker %r was cut off after step %d of %s and before that of %s: it gives the "
                "step again, which counts once",
                self._shards.worker_id,
                self.next_step,
                self._what,
                other._what,
            )
            read_again = self.on_give_again()
            if read_again is not None:
                read_again()

    @abstractmethod
    def _go_back(self, step_count: int = 1) -> None:
        """Makes an earlier step the next, of which all may be counted; -1: a later one again."""

    @property
    def what(self) -> str:
        """The kind and name, as "table 'x'"."""
        return self._what

    @property
    def may_go_back(self) -> bool:
        """True if a worker that is started again may make its last step again."""
        return self._keeps_step and not self.is_closed

    def resume(self) -> None:
        """Goes to the step of this client's kept state, where that knows better.

        It goes back if this worker was killed behind its last step; that step's gradient counts
        once, and reading has the version before it. It goes on again if it went back for another
        one (`give_again`) whose steps do not come in turn with its own.
        """
        step = self._shards.resumed.get(self._what)
        if step is None or not (self.is_untouched and self._opening.has_seat):
            return  # else it is another worker's, or a checkpoint's
        step_count = self.next_step - step
        if step_count != (-1 if self._gives_again else 1):
            return
        self._calls.run(lambda _: self._go_back(step_count), in_turn=True)
        self._gives_again = step_count > 0
        _LOG.warning(
            "worker %r goes on at step %d of %s, of which its state was kept last%s",
            self._shards.worker_id,
            step,
            self._what,
            "; the step's gradient counts once" if self._gives_again else "",
        )
        read_again = self.on_give_again()
        if read_again is not None:
            read_again()

    # Elastic members.

    def join(self, *, waits: bool = True, timeout_s: float | None = None) -> int:
        """Takes part as an elastic member, ahead of its first gradient; returns the step of that.

        Waits until the steps before that one have closed: weights read then are of that version,
        and the others await a gradient of it. A worker that does not call it joins with its first
        gradient: that is of a step that may have closed by then, and no step waits while the worker
        gets ready.

        Args:
            waits: False: it returns at once, for a worker that has what its first gradients are
                computed on, though steps that do not await it close meanwhile.
            timeout_s: See `Client`.

        Raises:
            ArgumentError: it has no elastic members.
            SeatsTakenError: max_count others are members.
            NotInitializedError, WorkerIdInUseError, WorkersMissingError: see the errors.
        """
        member = self._member
        if member is None:
            raise ArgumentError(
                f"{self._what} has {self.spec.crew}, who need not join; open it with "
                "members=shardwell.Elastic(...)"
            )

        def join(attempts: Attempts) -> int:
            if waits:
                self._take_part(member, attempts)
            elif not member.takes_part:
                member.join(attempts)
                member.first_step = None
            return self.next_step

        return self._calls.run(join, timeout_s, in_turn=True, verb="join")

    @abstractmethod
    def _take_part(self, member: Member, attempts: Attempts) -> None:
        """Joins, unless it has, and goes on at the first step that awaits this member."""

    def leave(self, *, timeout_s: float | None = None) -> None:
        """Takes part no more as an elastic member: no step awaits it from now on.

        What it has given counts. Its next gradient, or `join`, takes part anew. Does nothing where
        it is no member. A call that is under way, such as a begun exchange, ends first.

        Args:
            timeout_s: See `Client`.
        """

        def leave(attempts: Attempts) -> None:
            if self._member is not None:
                self._member.leave(attempts)

        self._calls.run(leave, timeout_s, in_turn=True, verb="leave")

    def forget_membership(self) -> None:
        """Ends the heartbeats for it: what this worker took part in was deleted."""
        membership = None if self._member is None else self._member.membership
        if membership is not None:
            self._shards.heartbeats.forget(membership)

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return self._calls.is_closed

    def set_learning_rate(
        self, learning_rate: float, *, now: bool = False, timeout_s: float | None = None
    ) -> None:
        """Changes the optimizer's learning rate on all shards, for all workers.

        Synchronous mode: takes effect at this worker's next step, which is the same update on every
        shard and chunk if this worker takes part. Asynchronous mode, or with `now`: at the first
        step that no chunk or row of a shard has reached, which may be another step on another
        shard.

        Raises:
            ArgumentError: the rate is negative or not finite, 0 with FTRL, or the optimizer has
                none.
            StepOrderError: shards are past this worker's next step; use `now`.
        """
        rate = check_learning_rate("learning_rate", learning_rate, self.spec.optimizer)

        def set_rate(attempts: Attempts) -> None:
            step = None
            if not now and self.spec.mode == "sync":
                step = self._opening.first_step_ahead(self.next_step, attempts)
            self._opening.set_learning_rate(rate, step, attempts)

        self._calls.run(set_rate, timeout_s, in_turn=True)

    @override
    def close(self) -> None:
        """Ends this worker's calls; what it opened lives on in the cluster.

        Calls of other threads end with ClosedError. From any thread; safe to repeat.
        """
        self._calls.close()
        self.on_close()
