"""One table's streams to all shards: one attempt of fetching rows, putting gradients, or both.

Everything leaves for all shards before any answer is awaited. Whether another attempt is made, and
from where on, is for the caller: works know how far they have come.
"""

from __future__ import annotations

import grpc

from shardwell.channel import ANSWER_MARGIN_S, ShardChannel
from shardwell.errors import DeadlineError, NonFiniteError
from shardwell.lane import Lane
from shardwell.row_lanes import IdleLanes, LanePool, LaneSet
from shardwell.row_transfer import Asked, RowFetch, RowPut, RowTransfer
from shardwell.values import milliseconds
from shardwell.watchdog import Watch, Watchdog


class TableStreams:
    """Any thread may fetch rows; gradients are for one thread at a time."""

    def __init__(
        self,
        table: str,
        channels: list[ShardChannel],
        transfer: RowTransfer,
        *,
        watchdog: Watchdog,
        idle_lanes: IdleLanes,
    ) -> None:
        self._table = table
        self._channels = channels
        self._transfer = transfer
        self._watchdog = watchdog
        self._pool = LanePool(table, idle_lanes)

    def attempt(self, put: RowPut | None, fetch: RowFetch | None, wait_s: float) -> None:
        """Sends and fetches what is left of a call.

        On failure the lanes are closed, so that no late answer can be mistaken for another's.
        """
        every = [
            Asked(
                channel,
                [] if put is None else put.rest(channel.shard_index),
                [] if fetch is None else fetch.missing(channel.shard_index),
            )
            for channel in self._channels
        ]
        asked = [one for one in every if one.answer_count]
        if not asked:
            return
        with self._pool.borrowed(wait_s) as lanes:
            with self._watchdog.watch(wait_s + ANSWER_MARGIN_S, lanes.close) as watch:
                try:
                    self._run(asked, lanes, put, fetch, milliseconds(wait_s), watch)
                except BaseException:
                    if lanes.failure is not None:
                        raise lanes.failure from None
                    raise
            if watch.expired:  # it may act only now, and must not end another call's
                lanes.close()

    def close(self) -> None:
        """Ends all lanes, and lets no call begin. From any thread; safe to repeat."""
        self._pool.close()

    def _run(
        self,
        asked: list[Asked],
        lanes: LaneSet,
        put: RowPut | None,
        fetch: RowFetch | None,
        wait_ms: int,
        watch: Watch,
    ) -> None:
        opened: list[Lane] = []
        for one in asked:
            lane, opens = lanes.lane(one.channel, self._table)
            opened.append(lane)
            if put is not None and one.parts:
                put.is_sent = True
            lane.submit(self._transfer.messages(one, put, fetch, wait_ms, opens=opens))
        # In turns, so that no shard's stream stands still while another's is read.
        for number in range(max(one.answer_count for one in asked)):
            for one, lane in zip(asked, opened, strict=True):
                if number >= one.answer_count:
                    continue
                message = self._read(one.channel, lane, lanes, put, watch)
                question = number - bool(one.parts)
                if question < 0:
                    assert put is not None
                    self._transfer.take_counted(one, message, put)
                else:
                    assert fetch is not None
                    self._transfer.take_rows(one, message, fetch, one.questions[question])

    def _read(
        self, channel: ShardChannel, lane: Lane, lanes: LaneSet, put: RowPut | None, watch: Watch
    ) -> bytes:
        """The next answer of a shard."""
        try:
            return lane.read()
        except grpc.RpcError as error:
            if watch.expired:
                raise DeadlineError(
                    f"shard {channel.shard_index} at {channel.address} did not answer for table "
                    f"{self._table!r} in time; check the network, or raise timeout_s",
                    shard_index=channel.shard_index,
                    table=self._table,
                ) from None
            first_channel, first = lanes.siblings.failure(channel, error)
            told = first_channel.translate(first, table=self._table)
            if isinstance(told, NonFiniteError) and put is not None:
                told.element_index = put.element_index(
                    first_channel.shard_index, told.element_index
                )
            raise told from None
