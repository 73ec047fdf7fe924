"""A worker as an elastic member of a parameter or table: it joins, leaves, is lost, joins anew.

See docs/adr/0036. Calls of its handle, which take turns, use it; heartbeats say meanwhile whether a
shard has found its tenure to be over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from shardwell.errors import DeadlineError, ShardUnavailableError
from shardwell.rpc.heartbeat import Heartbeats, Membership
from shardwell.rpc.retry import Attempts
from shardwell.specs.members import Elastic
from shardwell.steps.opening import Opening

_LOG = logging.getLogger("shardwell")
_ASK_S = 1.0
"""The interval at which a member that waits for its first step asks if an open step needs it."""
_LEAVE_S = 1.0


class Member:
    """This worker as an elastic member, whose tenure `opening` owns."""

    def __init__(
        self, opening: Opening[Any, Any], heartbeats: Heartbeats, members: Elastic
    ) -> None:
        self._opening = opening
        self._heartbeats = heartbeats
        self._lease_s = members.member_lease_s
        self._gave_way: Membership | None = None
        """The tenure that it ended last for another parameter or table."""
        heartbeats.members.add(self)
        self._has_tenure = False
        """True if the tenure of `opening` goes on, by all that this worker has heard."""
        self.is_settled = False
        """True once a gradient of its tenure has counted whole."""
        self.is_draining = False
        """True if an operator wants it to leave after its step."""
        self.first_step: int | None = None
        """The step from which on shards await it, until it has the data of that step."""

    @property
    def membership(self) -> Membership | None:
        """The tenure, by all that this worker has heard; None: it has none."""
        return self._opening.membership if self._has_tenure else None

    def give_way(self) -> None:
        """Ends its tenure for another membership of this worker: see `Heartbeats.give_way`."""
        membership = self.membership
        if membership is not None:
            _LOG.warning(
                "%s %r: worker %r waits elsewhere for workers that may wait for it here, and gives "
                "way; it takes part again with its next gradient",
                membership.kind,
                membership.name,
                membership.worker_id,
            )
            self._gave_way = membership
            self._heartbeats.end_soon(membership)

    def has_joined(self) -> bool:
        """True if it is to wait now for the data of its first step.

        Not where it is a member elsewhere, where it may be waited for: its data are of a step that
        may close before its gradient comes, which is late then.
        """
        if self.first_step is not None and not self._heartbeats.is_of_one:
            self.first_step = None
        return self.first_step is not None

    @property
    def takes_part(self) -> bool:
        """True if it has a tenure; notes one that a shard has found to be over."""
        membership = self.membership
        if membership is not None and self._heartbeats.is_over(membership):
            self.lose()
        return self._has_tenure

    def join(self, attempts: Attempts) -> None:
        """Takes a seat on all shards, and agrees with them from which step on it is awaited."""
        self.forget()
        self.first_step = self._opening.join_members(attempts)
        self._has_tenure = True
        self._beat()

    def read_first(self, read: Callable[[int, Attempts], int], attempts: Attempts) -> int | None:
        """Reads the data of its first step, waiting for the steps before.

        `read` makes one attempt to read data that have seen so many steps, and returns how many
        they have. Returns the version that was read; None: the member has it already.
        """
        version: int | None = None
        while self.first_step is not None:
            step, part = self.first_step, attempts.within(_ASK_S)
            try:
                version = read(step, part)
            except (DeadlineError, ShardUnavailableError):  # of the part's time alone
                if attempts.remaining_s <= 0:
                    raise
                before = self.membership
                self.first_step = self._opening.join_members(attempts, step)
                if before is not None and before != self.membership:  # a shard had ended it
                    self._heartbeats.forget(before)
                    self._beat()
                continue
            self.first_step = None
        return version

    def _beat(self) -> None:
        membership = self.membership
        if membership is not None:
            self._heartbeats.begin(membership, self._lease_s)

    def leave(self, attempts: Attempts) -> None:
        """Ends its tenure: no step awaits it from now on. Does nothing where it is no member."""
        membership = self.forget()
        if membership is not None:
            self._heartbeats.end(membership, min(_LEAVE_S, attempts.rest_s))

    def end_step(self, outcomes: Collection[Any], *, is_whole: bool) -> None:
        """Takes what shards say of its tenure with a step's outcome; `is_whole`: all counted."""
        self.is_settled |= is_whole
        if any(each.tenure_is_over for each in outcomes):
            self.lose()
        self.is_draining = any(each.is_draining for each in outcomes)

    def lose(self) -> None:
        """Notes that its tenure is over against its will."""
        membership = self.forget()
        if membership is not None and membership != self._gave_way:
            _LOG.warning(
                "%s %r: shards lost worker %r and went on without it; it takes part again with "
                "its next gradient",
                membership.kind,
                membership.name,
                membership.worker_id,
            )

    def forget(self) -> Membership | None:
        """Drops its tenure, so that it joins anew, and returns it."""
        membership, self._has_tenure = self.membership, False
        self.first_step, self.is_settled = None, False
        if membership is not None:
            self._heartbeats.forget(membership)
        return membership
