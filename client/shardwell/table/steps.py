"""This worker's steps on one table: which is open, and what a call that failed has begun of it.

Invariant: whatever fails, all that shards count of one step comes of one batch, as long as this
object lives: a step that may be counted in part is sent again with the same rows, or abandoned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from shardwell.errors import DivergedError, StepOrderError
from shardwell.rpc.retry import Attempts
from shardwell.specs.table import TableSpec
from shardwell.table.batch import ShardedIds
from shardwell.table.exchange import RowFetch, RowPut, RowTransfer
from shardwell.table.gradient_sums import RowSums
from shardwell.table.membership import Joined, TableOpening
from shardwell.table.view import Moment, TableView

_LOG = logging.getLogger("shardwell")


class _Begun(NamedTuple):
    """A step that a call began and did not bring to its end."""

    digest: tuple[int, ...] | None
    """Of what it sent; None: the step is being abandoned."""
    counted_shards: set[int]
    """Shards that have told that they counted all of it."""


class TableSteps:
    """The caller sees to it that calls take turns.

    Args:
        spec: The table.
        transfer: How rows travel; what the shards say of it is set here.
        opening: The calls about the table as a whole.
        view: What this worker knows of the table; its next step is set here.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        transfer: RowTransfer,
        opening: TableOpening,
        view: TableView,
    ) -> None:
        self._spec = spec
        self._view = view
        self._transfer = transfer
        self._opening = opening
        self._has_seat = False
        self._begun: _Begun | None = None
        self.is_begun = False
        """See `Table.is_step_begun`."""

    def open(self, attempts: Attempts) -> int:
        """Opens the table on all shards and goes on where they say; returns their version."""
        self._has_seat = False
        joined = self._opening.open(attempts)
        return self._resume(joined)

    def put(
        self,
        ids: ShardedIds,
        sums: RowSums,
        sample_count: int,
        fetch: RowFetch | None,
        attempts: Attempts,
        take: Callable[[], None] = lambda: None,
    ) -> int:
        """Ends the next step with a gradient, then fetches rows; returns which step it was.

        Args:
            ids: The rows' ids.
            sums: The rows' gradients.
            sample_count: See `Table.put_row_gradients`.
            fetch: The rows that are wanted then.
            attempts: The call's deadline.
            take: Called when all has come. When it fails, or anything else here, the step has not
                ended for the caller, who makes the same call again.

        Raises:
            DivergedError: the step has ended, and the rows are not finite.
            ShardwellError: see `Table.put_row_gradients`.
        """
        if not self._has_seat:
            self._take_seat(attempts)
        put = RowPut(
            ids,
            sums,
            step=self._view.next_step,
            sample_count=sample_count,
            row_count_max=self._transfer.row_count_max,
        )
        if self._begun is not None:
            self._repeat(self._begun, put)
        if fetch is not None and self._spec.mode == "sync":
            fetch.min_version, fetch.is_exact = put.step + 1, True
        diverged: DivergedError | None = None
        try:
            begun = self._view.begin_step(ids.ids)
            try:
                attempts.run(partial(self._transfer.attempt, put, fetch, attempts))
            except DivergedError as error:  # of a step that is counted, so all of it is to be
                diverged = error
                attempts.run(partial(self._transfer.attempt, put, None, attempts))
            if diverged is None:
                take()
            self._end(begun, None if diverged else fetch)
        except BaseException:
            if put.is_sent or put.counted_shards:
                self._begun, self.is_begun = _Begun(put.digest(), put.counted_shards), True
            self._view.fail_step(put.step, is_begun=self._begun is not None)
            raise
        if diverged is not None:
            raise diverged
        return put.step

    def abandon(self, attempts: Attempts) -> int:
        """See `Table.abandon_step`."""
        if not self._has_seat:
            self._take_seat(attempts)
        no_ids = ShardedIds(np.empty(0, np.int64), [0] * (self._opening.shard_count + 1))
        put = RowPut(no_ids, None, step=self._view.next_step, sample_count=0, row_count_max=1)
        self._begun, self.is_begun = _Begun(None, set()), True
        begun = self._view.begin_step(None)
        attempts.run(partial(self._transfer.attempt, put, None, attempts))
        self._end(begun, None)
        return put.step

    def _end(self, begun: Moment, fetch: RowFetch | None) -> None:
        if fetch is None or not fetch.ids.ids.size:
            self._view.end_step(begun)
        else:
            self._view.end_step(begun, fetch.ids.ids, fetch.rows, int(fetch.version))
        self._begun, self.is_begun = None, False
        superseded = self._transfer.superseded_part_count
        self._transfer.superseded_part_count = 0
        if superseded:
            _LOG.warning(
                "table %r: an earlier process of this worker had sent %d parts of step %d with "
                "other rows or gradients, which were counted; these were not",
                self._spec.name,
                superseded,
                self._view.next_step - 1,
            )

    def _repeat(self, begun: _Begun, put: RowPut) -> None:
        """Lets a step that was begun go on with the same rows only."""
        if begun.digest is None or begun.digest != put.digest():
            failed, way = "began to abandon it", ""
            if begun.digest is not None:
                failed, way = "sent other rows of it", "call again with those rows, or "
            raise StepOrderError(
                f"step {put.step} of table {self._spec.name!r}: a call that failed {failed}, and "
                f"some may be counted; {way}end the step with abandon_step()",
                table=self._spec.name,
            )
        put.counted_shards |= begun.counted_shards

    def _take_seat(self, attempts: Attempts) -> None:
        """Once; only then this worker's steps are the same on all shards for certain.

        What an earlier process of this worker had sent may have been counted since the table was
        opened. The step stays the one of then: sent again, it counts once.
        """
        opened_at = self._view.next_step
        joined = self._opening.take_seat(opened_at, attempts)
        if joined.next_step == opened_at + 1:
            joined = joined._replace(next_step=opened_at, is_begun=True)
        self._resume(joined)
        self._has_seat = True

    def _resume(self, joined: Joined) -> int:
        """Goes on where the shards say."""
        self._transfer.row_count_max = joined.row_count_max
        self._transfer.incarnation = joined.incarnation
        is_other = joined.tenure != self._transfer.tenure
        self._transfer.tenure = joined.tenure
        if is_other or joined.next_step != self._view.next_step:
            self._begun = None
        self._view.resume(
            joined.next_step, is_begun=self._begun is not None, has_seat=joined.has_seat
        )
        self.is_begun = joined.is_begun or self._begun is not None
        return joined.version
