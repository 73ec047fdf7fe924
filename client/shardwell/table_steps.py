"""This worker's steps on one table: which is open, and what a call that failed has begun of it.

Invariant: whatever fails, all that shards count of one step comes of one batch, as long as this
object lives: a step that may be counted in part is sent again with the same rows, or abandoned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardwell.errors import StepOrderError
from shardwell.retry import Attempts
from shardwell.row_batches import ShardedIds
from shardwell.row_placement import Ids
from shardwell.row_sums import RowSums
from shardwell.row_transfer import RowFetch, RowPut, RowTransfer
from shardwell.table_opening import Standing, TableOpening
from shardwell.table_spec import TableSpec
from shardwell.table_streams import TableStreams
from shardwell.turns import Turns


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
        transfer: Of its rows; is told how many a message may have.
        opening: Of the table.
        streams: To its shards.
        turns: Its.
        pushed: Told of rows that gradients were sent for.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        transfer: RowTransfer,
        opening: TableOpening,
        streams: TableStreams,
        turns: Turns,
        pushed: Callable[[Ids], None],
    ) -> None:
        self._spec = spec
        self._pushed = pushed
        self._transfer = transfer
        self._opening = opening
        self._streams = streams
        self._turns = turns
        self._has_seat = False
        self._begun: _Begun | None = None
        self.next_step = 0
        """See `Table.next_step`."""
        self.is_begun = False
        """See `Table.is_step_begun`."""

    @property
    def known_version(self) -> int:
        """Steps that every shard has seen: all before this worker's last one.

        A shard counts a step of a worker when those before it have closed; in asynchronous mode
        each that it counts is one.
        """
        return max(self.next_step - 1, 0)

    def open(self, attempts: Attempts) -> int:
        """Opens the table on all shards and goes on where they say; returns their version."""
        self._has_seat = False
        return self._stand(self._opening.open(attempts))

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
            ids: Of the rows.
            sums: Their gradients.
            sample_count: See `Table.put_row_gradients`.
            fetch: What is wanted then.
            attempts: Those of the call.
            take: What is to be done with what came. When it fails, as all else here, even by
                Ctrl-C, the step has not ended for the caller, who makes the same call again.

        Raises:
            ShardwellError: see `Table.put_row_gradients`.
        """
        self._take_seat(attempts)
        put = RowPut(
            ids,
            sums,
            step=self.next_step,
            sample_count=sample_count,
            row_count_max=self._transfer.row_count_max,
        )
        if self._begun is not None:
            self._repeat(self._begun, put)
        if fetch is not None and self._spec.mode == "sync":
            fetch.min_version, fetch.is_exact = put.step + 1, True
        try:
            self._run(put, fetch, attempts)
            self._pushed(ids.ids)
            take()
            return self._end()
        except BaseException:  # Ctrl-C comes anywhere, also in `_end`
            if put.is_sent or put.counted_shards:
                self.next_step = put.step
                self._begun, self.is_begun = _Begun(put.digest(), put.counted_shards), True
            self._pushed(ids.ids)
            raise

    def abandon(self, attempts: Attempts) -> int:
        """See `Table.abandon_step`."""
        self._take_seat(attempts)
        no_ids = ShardedIds(np.empty(0, np.int64), [0] * (self._opening.shard_count + 1))
        put = RowPut(no_ids, None, step=self.next_step, sample_count=0, row_count_max=1)
        self._begun, self.is_begun = _Begun(None, set()), True
        self._run(put, None, attempts)
        return self._end()

    def _run(self, put: RowPut, fetch: RowFetch | None, attempts: Attempts) -> None:
        self._turns.run(attempts, lambda: self._streams.attempt(put, fetch, attempts.rest_s))

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

    def _end(self) -> int:
        self.next_step += 1
        self._begun, self.is_begun = None, False
        return self.next_step - 1

    def _take_seat(self, attempts: Attempts) -> None:
        """Once; only then this worker's steps are the same on all shards for certain.

        What an earlier process of this worker had sent may have been counted since the table was
        opened. The step stays the one that was told then: sent again, it counts once.
        """
        if not self._has_seat:
            told = self.next_step
            standing = self._opening.take_seat(attempts)
            if standing.next_step == told + 1:
                standing = standing._replace(next_step=told, is_begun=True)
            self._stand(standing)
            self._has_seat = True

    def _stand(self, standing: Standing) -> int:
        """Goes on where the shards say."""
        self._transfer.row_count_max = standing.row_count_max
        self._transfer.incarnation = standing.incarnation
        if standing.next_step != self.next_step:
            self._begun = None
        self.next_step = standing.next_step
        self.is_begun = standing.is_begun or self._begun is not None
        return standing.version
