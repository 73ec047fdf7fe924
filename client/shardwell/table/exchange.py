"""One table's streams to all shards: one attempt of fetching rows, putting gradients, or both.

Everything leaves for all shards before any answer is awaited. Whether another attempt is made, and
from where on, is for the caller: works know how far they have come.
"""

from __future__ import annotations

import grpc

from shardwell.errors import DeadlineError, NonFiniteError
from shardwell.numerics.arguments import wait_milliseconds
from shardwell.rpc.calls import current_call
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.stream import ShardStream
from shardwell.rpc.stream_pool import StreamPool, StreamSet
from shardwell.table.transfer import Asked, RowFetch, RowPut, RowTransfer


class TableStreams:
    """Any thread may fetch rows; gradients are for one thread at a time.

    Args:
        channels: The shards, in order.
        transfer: Of the table's rows.
        pool: Lanes of the table's calls.
    """

    def __init__(
        self, channels: list[ShardChannel], transfer: RowTransfer, pool: StreamPool
    ) -> None:
        self._channels = channels
        self._transfer = transfer
        self._pool = pool

    def attempt(self, put: RowPut | None, fetch: RowFetch | None, attempts: Attempts) -> None:
        """Sends and fetches what is left of a call."""
        every = [
            Asked(
                channel,
                [] if put is None else put.rest(channel.shard_index),
                [] if fetch is None else fetch.missing(channel.shard_index),
            )
            for channel in self._channels
        ]
        asked = [one for one in every if one.answer_count]
        if asked:
            with self._pool.borrowed(attempts.rest_s) as streams:
                self._run(asked, streams, put, fetch, wait_milliseconds(attempts.rest_s))

    def _run(
        self,
        asked: list[Asked],
        streams: StreamSet,
        put: RowPut | None,
        fetch: RowFetch | None,
        wait_ms: int,
    ) -> None:
        opened: list[ShardStream] = []
        subject = (self._pool.name, self._transfer.tenure)
        for one in asked:
            stream, opens = streams.stream(one.channel, subject)
            opened.append(stream)
            if put is not None and one.parts:
                put.is_sent = True
            stream.submit(self._transfer.messages(one, put, fetch, wait_ms, opens=opens))
        # In turns, so that no shard's stream stands still while another's is read.
        for number in range(max(one.answer_count for one in asked)):
            for one, stream in zip(asked, opened, strict=True):
                if number >= one.answer_count:
                    continue
                message = self._read(one.channel, stream, streams, put)
                question = number - bool(one.parts)
                if question < 0:
                    assert put is not None
                    self._transfer.take_counted(one, message, put)
                else:
                    assert fetch is not None
                    self._transfer.take_rows(one, message, fetch, one.questions[question])

    def _read(
        self, channel: ShardChannel, stream: ShardStream, streams: StreamSet, put: RowPut | None
    ) -> bytes:
        """The next answer of a shard."""
        try:
            return stream.read()
        except grpc.RpcError as error:
            table = self._pool.name
            call = current_call()
            if call is not None and call.is_expired:
                raise DeadlineError(
                    f"shard {channel.shard_index} at {channel.address} did not answer for table "
                    f"{table!r} in time; check the network, or raise timeout_s",
                    shard_index=channel.shard_index,
                    table=table,
                ) from None
            first_channel, first = streams.call_group.failure(channel, error)
            told = first_channel.translate(first, table=table)
            if isinstance(told, NonFiniteError) and put is not None:
                told.element_index = put.element_index(
                    first_channel.shard_index, told.element_index
                )
            raise told from None
