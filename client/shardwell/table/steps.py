"""This worker's steps on one table: which is open, and what a call that failed has begun of it.

    state       the shards have of the step          a call that ends it
    next        nothing                              any rows, or none: it ends; failing after it
                                                     has sent, begun; failing before, next
    begun       parts of one batch                   the same rows, of which each counts once, or
                                                     `abandon`: it ends; other rows are refused
    abandoned   parts, and maybe that it is to end   `abandon` alone
    ended       all of it

A member that takes part anew begins with the state next: what it had begun ended with its tenure.
Invariant: whatever fails, all that shards count of one step comes of one batch, as long as this
object lives: a step that may be counted in part is sent again with the same rows, or abandoned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from shardwell.errors import DivergedError, StepOrderError
from shardwell.process.html_table import html_table
from shardwell.rpc.retry import Attempts
from shardwell.specs.table import TableSpec
from shardwell.steps.member import Member
from shardwell.table.batch import RowSums, ShardedIds
from shardwell.table.exchange import RowFetch, RowPut, RowTransfer
from shardwell.table.opening import Joined, TableOpening
from shardwell.table.view import Moment, TableView

_LOG = logging.getLogger("shardwell")


@dataclass(frozen=True, kw_only=True)
class RowOutcome:
    """The part that the shards counted of the rows that this worker gave last.

    Examples:
        >>> crew, rule = shardwell.Elastic(), shardwell.Adagrad(lr=0.1)
        >>> items = client.table("items", row_count=None, dim=2, optimizer=rule, members=crew)
        >>> items.join()
        >>> rows = items.exchange_rows([7], np.ones((1, 2)))
        >>> items.outcome.counted, items.outcome.contributors
        ('all', ('w0',))
    """

    step: int
    """The step that they were of."""
    row_count: int
    """Rows that it had gradients for, each once."""
    version: int
    """Steps that every shard had closed when it answered."""
    counted: str
    """How much counted: "all", a "part" or "none". A batch without rows counts, too."""
    late_row_count: int = 0
    """Rows of shards on which the step had closed before they came, or on which this member's
    tenure was over. They were not counted."""
    superseded_row_count: int = 0
    """Rows of messages for which others of the step had been counted before, that an earlier
    process of this worker, or an earlier tenure of it, had sent. They were not counted."""
    unknown_row_count: int = 0
    """Rows of which no shard knows any more whether they had counted when they came before: see
    `Outcome.unknown`. They were not counted again."""
    contributors: tuple[str, ...] = ()
    """Workers in the step's set on any shard, sorted; so far, where it is open still."""

    def _repr_html_(self) -> str:
        names = ("step", "rows", "counted", "late", "superseded", "unknown", "contributors")
        counts = (self.late_row_count, self.superseded_row_count, self.unknown_row_count)
        rest = (self.counted, *counts, ", ".join(self.contributors))
        return html_table("what counted of rows", names, [(self.step, self.row_count, *rest)])


class _Begun(NamedTuple):
    digest: tuple[int, ...] | None
    """The digest of the sent rows; None: the step is being abandoned."""
    counted_shards: set[int]


@dataclass(eq=False)
class TableSteps:
    """The steps of this worker on one table; its calls take turns."""

    spec: TableSpec
    transfer: RowTransfer
    opening: TableOpening
    view: TableView
    member: Member | None
    outcome: RowOutcome | None = None
    """The counted rows of this elastic member's last gradient; None: it has given none."""
    is_begun: bool = False
    """True if shards may have counted some of the next step."""
    _begun: _Begun | None = None
    _has_seat: bool = False
    """True once this worker of a fixed crew has its seat; a member joins anew, if it has to."""

    def open(self, attempts: Attempts) -> int:
        """Opens the table on all shards and goes on where they say; returns their version."""
        self._has_seat = False
        if self.member is not None:
            self.member.forget()
        joined = self.opening.open(attempts)
        return self._resume(joined)

    def go_back(self, step_count: int) -> None:
        """Makes an earlier step the next: another process may have given all of it."""
        self.is_begun = True
        self.view.resume(self.view.next_step - step_count, is_begun=False, has_seat=True)

    def join(self, member: Member, attempts: Attempts) -> None:
        """Takes part as an elastic member, if it does not: nothing that it has begun goes on."""
        if not member.takes_part:
            member.join(attempts)
            self._begun, self.is_begun = None, False
            self.view.resume(self.view.next_step, is_begun=False, has_seat=False)

    def _take_part(self, attempts: Attempts) -> None:
        if self.member is not None:
            self.join(self.member, attempts)
        else:
            self._take_seat(attempts)

    def read_first(self, member: Member, attempts: Attempts) -> int | None:
        """Waits until every shard is at the first step that awaits this member.

        Returns its version; None: it had waited before.
        """

        def read(step: int, part: Attempts) -> int:
            count, rows = self.opening.shard_count, np.empty((0, self.spec.dim), np.float32)
            nothing, places = no_ids(count), np.zeros(1, np.int64)
            fetch = RowFetch(
                nothing, rows, places[:0], places, 1, min_version=step, every_shard=count
            )
            part.run(partial(self.transfer.attempt, None, fetch, part))
            return int(fetch.version)

        version = member.read_first(read, attempts)
        if version is not None:
            self.view.go_on_at(version)
        return version

    def put(
        self,
        ids: ShardedIds,
        sums: RowSums,
        sample_count: int,
        fetch: RowFetch | None,
        attempts: Attempts,
        take: Callable[[], None] = lambda: None,
    ) -> int:
        """Ends the next step with a gradient, then fetches rows; returns the step that it was.

        `take` is called when all has come. When it or anything else here fails, the step has not
        ended for the caller, who makes the same call again; but a DivergedError ends it: the rows
        are not finite.
        """
        if not self._has_seat:
            self._take_part(attempts)
        put = RowPut(ids, sums, self.view.next_step, sample_count, self.transfer.row_count_max)
        if self._begun is not None:
            self._repeat(self._begun, put)
        if fetch is not None and self.spec.mode == "sync":
            fetch.min_version = put.step + 1
            fetch.unless_late = self.member is not None
            fetch.is_exact = self.member is None
        diverged: DivergedError | None = None
        try:
            begun = self.view.begin_step(ids.ids)
            try:
                attempts.run(partial(self.transfer.attempt, put, fetch, attempts))
            except DivergedError as error:  # of a step that is counted, so all of it is to be
                diverged = error
                attempts.run(partial(self.transfer.attempt, put, None, attempts))
            if diverged is None:
                take()
            self._end(put, begun, None if diverged else fetch)
        except BaseException:
            if put.is_sent or put.counted_shards:
                self._begun, self.is_begun = _Begun(put.digest(), put.counted_shards), True
            self.view.fail_step(put.step, is_begun=self._begun is not None)
            raise
        if diverged is not None:
            raise diverged
        return put.step

    def abandon(self, attempts: Attempts) -> int:
        """Ends the next step without a gradient; returns the step."""
        if not self._has_seat:
            self._take_part(attempts)
        nothing = no_ids(self.opening.shard_count)
        put = RowPut(nothing, None, self.view.next_step, sample_count=0, row_count_max=1)
        self._begun, self.is_begun = _Begun(None, set()), True
        begun = self.view.begin_step(None)
        attempts.run(partial(self.transfer.attempt, put, None, attempts))
        self._end(put, begun, None)
        return put.step

    def _end(self, put: RowPut, begun: Moment, fetch: RowFetch | None) -> None:
        next_step = put.step + 1
        if self.member is not None:
            self.outcome = _outcome(put, self.opening.shard_count)
            next_step = _next_step(put)
            is_whole = self.outcome.counted == "all"
            self.member.end_step(put.outcomes.values(), is_whole=is_whole)
        if fetch is None or not fetch.ids.ids.size:
            self.view.end_step(begun, next_step=next_step)
        else:
            version = int(fetch.version)
            self.view.end_step(begun, fetch.ids.ids, fetch.rows, version, next_step=next_step)
        self._begun, self.is_begun = None, False
        superseded = self.transfer.superseded_part_count
        self.transfer.superseded_part_count = 0
        if superseded:
            _LOG.warning(
                "table %r: an earlier process of this worker had sent %d parts of step %d with "
                "other rows or gradients, which were counted; these were not",
                self.spec.name,
                superseded,
                put.step,
            )

    def _repeat(self, begun: _Begun, put: RowPut) -> None:
        if begun.digest is None or begun.digest != put.digest():
            failed, way = "began to abandon it", ""
            if begun.digest is not None:
                failed, way = "sent other rows of it", "call again with those rows, or "
            raise StepOrderError(
                f"step {put.step} of table {self.spec.name!r}: a call that failed {failed}, and "
                f"some may be counted; {way}end the step with abandon_step()",
                table=self.spec.name,
            )
        put.is_again = True
        if self.member is None:
            put.counted_shards |= begun.counted_shards

    def _take_seat(self, attempts: Attempts) -> None:
        """Takes a seat, once; only then this worker's steps are certain to agree on all shards.

        Gradients of an earlier process of this worker may have been counted since the table was
        opened. The step stays the one of then: sent again, it counts once.
        """
        opened_at = self.view.next_step
        joined = self.opening.take_seat(opened_at, attempts)
        if joined.next_step == opened_at + 1:
            joined = joined._replace(next_step=opened_at, is_begun=True)
        self._resume(joined)
        self._has_seat = True

    def _resume(self, joined: Joined) -> int:
        self.transfer.row_count_max = joined.row_count_max
        opening = self.opening
        is_other = joined.tenure != opening.tenure
        opening.incarnation, opening.tenure = joined.incarnation, joined.tenure
        if is_other or joined.next_step != self.view.next_step:
            self._begun = None
        self.view.resume(
            joined.next_step, is_begun=self._begun is not None, has_seat=joined.has_seat
        )
        self.is_begun = joined.is_begun or self._begun is not None
        return joined.version


def no_ids(shard_count: int) -> ShardedIds:
    """Returns the ids of a batch that has none."""
    return ShardedIds(np.empty(0, np.int64), [0] * (shard_count + 1))


def _next_step(put: RowPut) -> int:
    """Returns the step that follows an elastic member's last one.

    It is the lowest version that the member has seen of any shard, and at least one more than the
    last. But a step that was late on a shard where it is open still, as the tenure was over there,
    is next again.
    """
    outcomes = put.outcomes.values()
    is_past = all(each.version > put.step for each in outcomes if each.late_part_indexes)
    return max(min(int(each.version) for each in outcomes), put.step + is_past)


def _outcome(put: RowPut, shard_count: int) -> RowOutcome:
    row_counts = {"late": 0, "superseded": 0, "unknown": 0}
    part_count = lost_part_count = 0
    for shard_index in range(shard_count):
        parts, found = put.parts(shard_index), put.outcomes[shard_index]
        part_count += len(parts)
        late = "unknown" if found.late_may_have_counted and put.is_again else "late"
        lost = {late: found.late_part_indexes, "superseded": found.superseded_part_indexes}
        for fate, indexes in lost.items():
            lost_part_count += len(indexes)
            row_counts[fate] += sum(parts[index].stop - parts[index].start for index in indexes)
    outcomes = put.outcomes.values()
    counted = "part" if lost_part_count < part_count else "none"
    return RowOutcome(
        step=put.step,
        row_count=put.ids.ids.size,
        version=min(int(each.version) for each in outcomes),
        counted=counted if lost_part_count else "all",
        contributors=tuple(sorted({name for each in outcomes for name in each.contributor_ids})),
        **{f"{fate}_row_count": count for fate, count in row_counts.items()},
    )
