"""A table in a worker: rows by id, gradients of rows out, updated rows in.

Calls block until they are done or their deadline has passed; meanwhile a shard that went away is
waited for, and what it has not acknowledged is sent again. A Table may be used by several threads:
calls that send gradients take turns, fetches run beside them. Arrays are the caller's: nothing is
kept of them after a call returns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import check_integer
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids, RowPlacement
from shardwell.process.spans import Traffic
from shardwell.rpc.cluster import Shards
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_status import TableStatus
from shardwell.specs.parameter import SAMPLE_COUNT_MAX, STEP_MAX
from shardwell.specs.table import TableSpec
from shardwell.steps.handle import Handle
from shardwell.steps.member import Member
from shardwell.table.batch import RowBatch, RowSums, as_gradients, as_ids, as_row_output
from shardwell.table.cache import RowCache
from shardwell.table.exchange import RowTransfer
from shardwell.table.opening import TableOpening
from shardwell.table.reader import RowReading
from shardwell.table.steps import RowOutcome, TableSteps
from shardwell.table.view import TableView
from shardwell.transport.stream_pool import IdleStreams, StreamPool


class Table(Handle[TableSpec]):
    """A table of rows on the shards, made by `Client.table`; leaving the context closes it here.

    Examples:
        >>> rule = shardwell.Adagrad(lr=0.1)
        >>> users = client.table("users", row_count=None, dim=2, optimizer=rule)
        >>> ids = np.array([7, 123_456])
        >>> rows = users.get_rows(ids)
        >>> step = users.put_row_gradients(ids, np.ones((2, 2)))
        >>> users.row_ids()
        array([     7, 123456])
    """

    kind = "table"
    _opening: TableOpening

    def __init__(
        self,
        spec: TableSpec,
        shards: Shards,
        *,
        timeout_s: float,
        traffic: Traffic,
        idle_streams: IdleStreams,
        caching: tuple[int, int] = (0, 0),
    ) -> None:
        opening = TableOpening(spec, shards.channels, shards.worker_id)
        super().__init__(spec, opening, shards, timeout_s)
        self.caching = caching
        """Rows that are kept here, and for how many steps."""
        self._placement = RowPlacement(spec.row_count, len(shards.channels))
        pool = StreamPool(idle_streams, opening.what, **opening.of)
        transfer = RowTransfer(opening, pool, shards, traffic)
        cache = RowCache(caching[0], spec.dim, caching[1]) if caching[0] else None
        is_elastic = spec.members is not None
        self._view = TableView(cache, is_sync=spec.mode == "sync", is_elastic=is_elastic)
        every_shard = len(shards.channels) if is_elastic else 0
        self._reading = RowReading(spec.dim, every_shard, transfer, self._calls, self._view)
        self._steps = TableSteps(spec, transfer, opening, self._view, self._member)
        self._view.version = self._calls.run(self._steps.open)

    def __repr__(self) -> str:
        return (
            f"Table({self.name!r}, row_count={self.row_count}, dim={self.dim}, "
            f"mode={self.spec.mode!r})"
        )

    @property
    def dim(self) -> int:
        """The number of values of a row."""
        return self.spec.dim

    @property
    def row_count(self) -> int | None:
        """Ids are 0 to below it; None: any 64-bit integer is one."""
        return self.spec.row_count

    @property
    @override
    def next_step(self) -> int:
        return self._view.next_step

    @property
    def version(self) -> int:
        """The number of steps that all rows of the last answer have seen.

        Asynchronous mode: steps, of all workers, that had been counted on the shards when the rows
        were fetched; the fewest of them. Where threads share a Table, it is of the call that ended
        last.
        """
        return self._view.version

    @property
    def is_step_begun(self) -> bool:
        """Returns True when shards may have counted some of `next_step`.

        True after a call that failed, or when an earlier process of this worker has begun the step.
        Then send the same rows again, of which each counts once, or call `abandon_step`: with other
        rows the step would be made of both.
        """
        return self._steps.is_begun

    @property
    def outcome(self) -> RowOutcome | None:
        """The part that the shards counted of the rows that this elastic member gave last.

        None: it gave none; or the table has a fixed crew, whose gradients all count.
        """
        return self._steps.outcome

    @property
    def cache_hit_rate(self) -> float:
        """The part of the rows, each once a call, that the worker's cache had; 0 without one."""
        return self._view.cache_hit_rate

    def get_rows(
        self,
        ids: Any,
        *,
        out: Float32 | None = None,
        min_version: int = 0,
        timeout_s: float | None = None,
    ) -> Float32:
        """The rows, as the shards have them now, or as a prefetch or the cache has.

        Only shards that have some of the rows are asked. A row without a gradient so far is what
        the initializer says; fetching changes nothing. Rows of one shard that travel in one
        message are of one moment. Threads may fetch beside one another and beside gradients.

        Args:
            ids: Integers of any dtype, shape and order, an array, a list or one integer; each
                travels once, however often it occurs. With `row_count`, 0 to row_count - 1;
                without, any 64-bit integers: unsigned ones from 2^63 on are the signed ones of the
                same bits.
            out: Where to put the rows, a writable C-contiguous float32 array of the result's
                shape; default: a new one. Its contents are undefined after an error.
            min_version: Synchronous mode: wait until so many steps have closed on every shard that
                is asked: `step + 1` for the result of `step`. The cache is not used then.
                Asynchronous mode needs no such thing: what `put_row_gradients` sent is in the rows
                when it returns.
            timeout_s: See `Client`.

        Returns:
            (*ids.shape, dim) float32, in the order of the ids; `out` if given.

        Raises:
            ArgumentError: the ids or `out` can't be used.
            WorkersMissingError: `min_version` was not reached in time; names who is missing.
            OtherIncarnationError: a shard has lost what this worker has sent.
            DeadlineError, ShardUnavailableError: a shard did not answer, or did not come back.
        """

        def get(attempts: Attempts) -> Float32:
            flat, shape = as_ids(ids, self.spec.row_count)
            wanted = self._min_version(min_version)
            # `out` is checked before anything is taken.
            room = None if out is None else self._room(out, shape)
            found = self._reading.prefetched(flat, wanted, attempts)
            if found is None:
                rows, target = room or self._room(None, shape)
                batch = RowBatch(flat, shape, self._placement)
                version = self._reading.read(batch, target, wanted, attempts)
            elif room is None:
                rows, version = found.rows.reshape(*shape, self.dim), found.version
            else:
                (rows, target), version = room, found.version
                target[...] = found.rows
            if version is not None:
                self._view.version = version
            return rows

        return self._calls.run(get, timeout_s, verb="get_rows")

    def prefetch_rows(self, ids: Any, *, min_version: int = 0) -> None:
        """Begins to fetch rows on a thread of the client's; returns at once.

        The next `get_rows` of the same ids, in the same order, takes the result, or waits for it.
        So the rows of the next batch travel while this one is computed with. They are of the time
        between this call and its end: beyond `min_version`, they may lack whatever is sent after
        this call, this worker's own gradients too. The cache is filled, but not asked. One that
        fails is forgotten, and one that `get_rows` has waited for until its deadline, too;
        `get_rows` then asks anew, for a moment at least. The newest 4 results wait, each while at
        most 16 other calls fetch or send rows of this Table.

        Args:
            ids: See `get_rows`. Copied.
            min_version: See `get_rows`, whose own must be as high at the most.

        Raises:
            ArgumentError: the ids can't be used.
        """
        wanted = self._min_version(min_version)
        flat, shape = as_ids(ids, self.spec.row_count)
        kept = flat.copy()
        self._reading.prefetch(RowBatch(kept, shape, self._placement), kept, wanted)

    def put_row_gradients(
        self, ids: Any, gradients: Any, *, sample_count: int = 1, timeout_s: float | None = None
    ) -> int:
        """Adds gradients to this worker's next step; returns when all shards have counted it.

        Gradients of an id that occurs more than once add up. The step ends with this call, on
        all shards: a batch without ids is a contribution, too, that changes no row. Synchronous
        mode: a row's update is with the mean over all workers, where a worker that did not send the
            row counts as 0; this does not wait for them,
            except for a step before this one. Asynchronous mode:
        each message is applied as it arrives.

        After an error the step is still this worker's next: call again with the same rows, of
        which each counts once whatever had been counted; or call `abandon_step`. After Ctrl-C
        (KeyboardInterrupt) look at `next_step`: if it is the next one, the step has ended all the
        same.

        Args:
            ids: See `get_rows`.
            gradients: (*ids.shape, dim) float32; float64 and float16 are converted. Read until the
                call returns.
            sample_count: Weight in the step's mean, 0 to 2^24: sum(n_i * g_i) / sum(n_i). With 0
                no row counts. Has no effect in asynchronous mode.
            timeout_s: See `Client`.

        Returns:
            The step that it joined; synchronous mode: `get_rows(min_version=step + 1)` has its
            effect.

        Raises:
            ArgumentError, NonFiniteError: ids or gradients can't be used; nothing was sent.
            StepOrderError: a call that failed has begun the step with other rows; or see the error.
            SeatsTakenError: worker_count other workers contribute.
            LimitError, StorageError: a shard has no room for the rows; it is named.
            WorkersMissingError: an earlier step did not close in time.
            DeadlineError, ShardUnavailableError: a shard did not answer, or did not come back.
        """

        def put(attempts: Attempts) -> int:
            batch, sums, count = self._checked(ids, gradients, sample_count)
            self._shards.given.add(self._what)
            if self._shards.state_home is not None:
                self._shards.state_home.send(attempts)
            return self._steps.put(batch.distinct, sums, count, None, attempts)

        return self._calls.run(put, timeout_s, in_turn=True, verb="put_row_gradients")

    def exchange_rows(
        self,
        ids: Any,
        gradients: Any,
        next_ids: Any = None,
        *,
        sample_count: int = 1,
        out: Float32 | None = None,
        timeout_s: float | None = None,
    ) -> Float32:
        """Gives gradients of rows and gets the rows that come of them, in one round trip.

        Synchronous mode: waits for the other workers. The cache is filled, but not asked.

        Args:
            ids: See `get_rows`.
            gradients: See `put_row_gradients`.
            next_ids: The rows that are wanted, such as those of the next batch; default: `ids`.
            sample_count: See `put_row_gradients`.
            out: See `get_rows`.
            timeout_s: See `Client`.

        Returns:
            The rows after this step: (*next_ids.shape, dim) float32, `out` if given.

        Raises:
            DivergedError: the gradients are counted, and the step has ended; the rows that are
                wanted are not finite.
            ShardwellError: as `put_row_gradients` and `get_rows`. The step is still this worker's
                next, after Ctrl-C too, also where only the rows did not come: call again with the
                same gradients, which count once. See `put_row_gradients`.
        """

        def exchange(attempts: Attempts) -> Float32:
            batch, sums, count = self._checked(ids, gradients, sample_count)
            wanted = batch
            if next_ids is not None:
                wanted = RowBatch(*as_ids(next_ids, self.spec.row_count), self._placement)
            rows, target = self._room(out, wanted.shape)
            if np.may_share_memory(target, sums.gradients):
                raise ArgumentError("out must not overlap the gradients; pass another array")
            fetch = self._reading.question(wanted, target)

            def take() -> None:
                self._reading.finish(wanted, fetch, target)
                if wanted.distinct.ids.size:
                    self._view.version = int(fetch.version)

            self._shards.given.add(self._what)
            if self._shards.state_home is not None:
                self._shards.state_home.send(attempts)
            self._steps.put(batch.distinct, sums, count, fetch, attempts, take)
            first = None
            if self._member is not None and self._member.has_joined():
                first = self._steps.read_first(self._member, attempts)
            if first is not None:  # it has joined with this gradient: the rows of its first step
                found = self._reading.read(wanted, target, first, attempts)
                self._view.version = first if found is None else found
            return rows

        return self._calls.run(exchange, timeout_s, in_turn=True, verb="exchange_rows")

    def abandon_step(self, *, timeout_s: float | None = None) -> int:
        """Ends `next_step` on all shards with what was counted of it; returns which it was.

        The way out after a call that failed, if its rows can't or needn't be sent again. Some of
        the rows may have been updated, others not. Synchronous mode: the step of all workers goes
        on with what was counted; if nothing was, it is as if this worker had put no rows.

        Raises:
            DeadlineError, ShardUnavailableError: a shard did not answer, or did not come back;
                call again.
        """

        def abandon(attempts: Attempts) -> int:
            self._shards.given.add(self._what)
            return self._steps.abandon(attempts)

        return self._calls.run(abandon, timeout_s, in_turn=True)

    def row_ids(self, *, timeout_s: float | None = None) -> Ids:
        """Returns the ids of rows that have had a gradient, of all shards: (n,) int64, ascending.

        Not of one moment where gradients come in meanwhile.
        """
        return self._calls.run(self._opening.row_ids, timeout_s)

    def evict(self, *, older_than_step: int, timeout_s: float | None = None) -> int:
        """Drops rows whose last gradient joined a step before `older_than_step`, on all shards.

        Such a row is again what the initializer says, and its next gradient is its first. In
        asynchronous mode a step is one of any worker, counted by `version`. Safe to repeat.

        Returns:
            The number of dropped rows; of a repeated call, perhaps fewer than were dropped.
        """
        step = check_integer("older_than_step", older_than_step, 0, STEP_MAX)
        try:
            return self._calls.run(partial(self._opening.evict, step), timeout_s)
        finally:  # some shards may have done it
            self._reading.forget()

    def status(self, *, timeout_s: float | None = None) -> list[TableStatus]:
        """Returns what each shard holds of the table, in the order of the shards."""
        return self._calls.run(self._opening.status, timeout_s)

    @override
    def _take_part(self, member: Member, attempts: Attempts) -> None:
        self._steps.join(member, attempts)
        version = self._steps.read_first(member, attempts)
        if version is not None:
            self._reading.forget()  # what others changed meanwhile
            self._view.version = version

    def reopen(self) -> None:
        """Asks the shards again for this worker's step, and goes on at that `next_step`."""

        def reopened(attempts: Attempts) -> None:
            self._gives_again = False
            self._reading.forget()
            self._view.version = self._steps.open(attempts)

        self._calls.run(reopened, in_turn=True)

    @override
    def _go_back(self, step_count: int = 1) -> None:
        self._steps.go_back(step_count)
        self._reading.forget()

    @override
    def close(self) -> None:
        super().close()
        self._reading.forget()

    # What the verbs share.

    def _checked(
        self, ids: Any, gradients: Any, sample_count: int
    ) -> tuple[RowBatch, RowSums, int]:
        batch = RowBatch(*as_ids(ids, self.spec.row_count), self._placement)
        values = as_gradients(gradients, batch.shape, self.spec.dim, self.name)
        count = check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX)
        sums = RowSums(batch, values, self.name, allow_non_finite=self.spec.allow_non_finite)
        return batch, sums, count

    def _room(self, out: Any, shape: tuple[int, ...]) -> tuple[Float32, Float32]:
        rows = as_row_output(out, (*shape, self.spec.dim))
        return rows, rows.reshape(-1, self.spec.dim)

    def _min_version(self, min_version: int) -> int:
        found = check_integer("min_version", min_version, 0, STEP_MAX)
        return found if self.spec.mode == "sync" else 0
