"""Puts a table of a checkpoint into a cluster of any number of shards.

The files are read once, block by block, and each row goes to the stream of its shard. All shards
have begun, and refuse gradients, before the first finishes; the first finishes after all have all
rows. When a shard or the restoring client fails, any client restores again: on the shards that had
not finished, if the others have finished this checkpoint, where workers may have gone on meanwhile;
else on all, which take it as long as no gradient was counted.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from shardwell.checkpoint.format import CheckpointTable, load_id_of
from shardwell.checkpoint.tensor_files import RowsReader
from shardwell.errors import ArgumentError, DeadlineError, StorageError
from shardwell.placement.rows import RowPlacement
from shardwell.process.spans import Traffic
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.threads.asking import ask_all
from shardwell.transport.call_group import CallGroup
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.row_state import RowState, RowStateCodec, empty_state

_WAITING_COUNT_MAX = 4
"""Messages of up to 1 MiB that wait for a shard."""
_LOOK_S = 0.2
"""How often a thread that waits for a shard looks whether one has failed."""


class TableRestore:
    """One table's, from files into all shards, on which it was created.

    Args:
        path: The checkpoint's directory.
        entry: The table.
        channels: Channels of the shards, in order.
        worker_id: The worker that restores.
        incarnation: Incarnation of the table; see OpenTableResponse.
        status: Asks a shard what it has of the table.
        traffic: Counts it.
        attempts: Attempts of the call.
    """

    def __init__(
        self,
        path: Path,
        entry: CheckpointTable,
        channels: Sequence[ShardChannel],
        *,
        worker_id: str,
        incarnation: int,
        status: Callable[[ShardChannel], pb.TableStatus],
        traffic: Traffic,
        attempts: Attempts,
    ) -> None:
        self._path = path
        self._entry = entry
        self._channels = channels
        self._status = status
        self._traffic = traffic
        self._attempts = attempts
        self._codec = RowStateCodec(entry.spec)
        self._placement = RowPlacement(entry.spec.row_count, len(channels))
        specified = getattr(entry.spec.optimizer, "learning_rate", None)
        self._header = pb.LoadRowsRequest(
            open=pb.TableOpen(table=entry.name, worker_id=worker_id, incarnation=incarnation),
            version=entry.version,
            learning_rate=None if entry.learning_rate == specified else entry.learning_rate,
            load_id=load_id_of(entry),
        )
        self._context = checksum.rows_load_context(self._header)

    def restore(self) -> None:
        """One attempt; blocks until the table is committed on all shards.

        Raises:
            StorageError: a file can't be read.
            ArgumentError: it has rows that can't be.
            ShardwellError: a shard refuses.
        """
        unfinished = self._unfinished()
        for beginning in unfinished:
            ask_all(beginning, self._begin)
        channels = [channel for beginning in unfinished for channel in beginning]
        streams: list[_UploadStream] = []
        with CallGroup() as call_group:
            try:
                for channel in channels:
                    streams.append(
                        _UploadStream(channel, self._opening(channel), self._timeout_s())
                    )
                    call_group.add(channel, streams[-1].call)
                for file in self._entry.files:
                    path = self._path / file.path
                    with RowsReader(path, self._entry.spec, file.row_count) as reader:
                        self._send(reader, file.row_count, streams, call_group)
                end = self._message(
                    pb.LoadRowsRequest(finish=True), empty_state(self._entry.spec, 0)
                )
                for stream in streams:
                    self._put(stream, end, call_group)
                    self._put(stream, None, call_group)
                for stream in streams:
                    self._check_count(stream, self._result(stream, call_group))
            finally:
                for stream in streams:
                    stream.stop()

    def _unfinished(self) -> list[list[ShardChannel]]:
        """The shards that it is to be done on; those of one list may begin at once.

        Those that stand and have a past come first: if they have counted gradients, they refuse
        before any other has begun, so that no later restore takes those for what one left that was
        cut off.
        """
        every = list(zip(self._channels, ask_all(self._channels, self._status), strict=True))
        if all(status.load_id == self._header.load_id for _, status in every):
            begun = [channel for channel, status in every if status.loading]
            if begun:
                return [begun]

        def turn(one: tuple[ShardChannel, pb.TableStatus]) -> tuple[bool, bool]:
            return one[1].loading, not _has_past(one[1])

        return [
            [channel for channel, _ in group]
            for _, group in itertools.groupby(sorted(every, key=turn), turn)
        ]

    def _begin(self, channel: ShardChannel) -> None:
        """Makes a shard take no gradients, by a stream that only opens."""
        with channel.translated(table=self._entry.name):
            channel.result_of(
                channel.load_rows.future(iter([self._opening(channel)]), timeout=self._timeout_s())
            )

    def _check_count(self, stream: _UploadStream, row_count: int) -> None:
        if row_count != stream.row_count:
            raise StorageError(
                f"table {self._entry.name!r} has {row_count} rows on shard "
                f"{stream.channel.shard_index} after it was restored; {stream.row_count} were sent",
                shard_index=stream.channel.shard_index,
                table=self._entry.name,
            )

    def _opening(self, channel: ShardChannel) -> bytes:
        header = pb.LoadRowsRequest()
        header.CopyFrom(self._header)
        header.open.shard.CopyFrom(channel.identity)
        checksum.seal(header.open)
        return self._message(header, empty_state(self._entry.spec, 0))

    def _message(self, header: pb.LoadRowsRequest, state: RowState) -> bytes:
        start = checksum.rows_load(self._context, finish=header.finish)
        return self._codec.encode(header, header.rows, state, start=start)

    def _send(
        self,
        reader: RowsReader,
        row_count: int,
        streams: list[_UploadStream],
        call_group: CallGroup,
    ) -> None:
        """Sends the rows of one file to their shards."""
        block = self._codec.row_count_max * self._placement.shard_count
        for start in range(0, row_count, block):
            state = reader.read(start, min(start + block, row_count))
            self._check_ids(state)
            shards = self._placement.shards_of(state.ids)
            for stream in streams:
                index = stream.channel.shard_index
                part = state.take(shards == index) if self._placement.shard_count > 1 else state
                stream.row_count += part.ids.size
                for piece in part.pieces(self._codec.row_count_max):
                    message = self._message(pb.LoadRowsRequest(), piece)
                    self._put(stream, message, call_group)
                    self._traffic.add_sent(len(message), piece.weights.size)

    def _check_ids(self, state: RowState) -> None:
        row_count = self._placement.row_count
        if row_count is not None:
            is_bad = (state.ids < 0) | (state.ids >= row_count)
            if is_bad.any():
                raise ArgumentError(
                    f"{self._path}: table {self._entry.name!r} has row id {state.ids[is_bad][0]}; "
                    f"its ids are 0 to {row_count - 1}",
                    table=self._entry.name,
                )

    def _put(self, stream: _UploadStream, message: bytes | None, call_group: CallGroup) -> None:
        """Hands a message to a stream, waiting as long as none has failed."""
        while not stream.offer(message):
            if not stream.call.is_active():
                self._result(stream, call_group)
            self._timeout_s()

    def _result(self, stream: _UploadStream, call_group: CallGroup) -> int:
        try:
            answer = stream.channel.received(stream.call.result(), table=self._entry.name)
            row_count: int = answer.row_count
        except grpc.RpcError as error:
            channel, first = call_group.failure(stream.channel, error)
            raise channel.translate(first, table=self._entry.name) from None
        except grpc.FutureCancelledError:
            channel, first = call_group.failure(stream.channel, stream.call)
            raise channel.translate(first, table=self._entry.name) from None
        return row_count

    def _timeout_s(self) -> float:
        remaining_s = self._attempts.remaining_s
        if remaining_s <= 0:
            raise DeadlineError(
                f"table {self._entry.name!r} was not restored within "
                f"{self._attempts.timeout_s:g} s; raise timeout_s",
                table=self._entry.name,
            )
        return remaining_s


def _has_past(status: pb.TableStatus) -> bool:
    """Whether anything ever came into a table on a shard."""
    return bool(status.load_id or status.version or status.row_count)


class _UploadStream:
    """The stream to one shard; gRPC takes messages from it on a thread of its own."""

    def __init__(self, channel: ShardChannel, opening: bytes, timeout_s: float) -> None:
        self.channel = channel
        self.row_count = 0
        """Rows that it was given."""
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING_COUNT_MAX)
        self._is_stopped = False
        with channel.translated():
            self.call: Any = channel.load_rows.future(self._messages(opening), timeout=timeout_s)

    def offer(self, message: bytes | None) -> bool:
        """Takes a message, None being the end; False if there is no room yet."""
        try:
            self._waiting.put(message, timeout=_LOOK_S)
        except queue.Full:
            return False
        return True

    def stop(self) -> None:
        """Lets go of gRPC's thread."""
        self._is_stopped = True

    def _messages(self, opening: bytes) -> Iterator[bytes]:
        yield opening
        while not self._is_stopped:
            try:
                message = self._waiting.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if message is None:
                return
            yield message
