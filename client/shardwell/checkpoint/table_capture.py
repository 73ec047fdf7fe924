"""Takes a checkpoint of a table: all rows of all shards, with state, into files.

As capture.py for parameters. Rows come in no order and nobody knows how many there will be, so a
shard's are gathered until they fill a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from shardwell.checkpoint.consistent_version import at_one_version
from shardwell.checkpoint.format import CheckpointTable, RowsFile, rows_path
from shardwell.checkpoint.rows_file import write_rows
from shardwell.errors import ArgumentError, CorruptChunkError, DeadlineError
from shardwell.numerics.arguments import wait_milliseconds
from shardwell.rpc.call_group import CallGroup
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.table import TableSpec
from shardwell.traffic import Traffic
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.row_state import RowState, RowStateCodec

FILE_SIZE_BYTES = 32 * 2**20
"""About that much of a shard's rows goes to a file, and is in memory before."""


class _Taken(NamedTuple):
    """What came of one shard."""

    files: list[RowsFile]
    version: int
    learning_rate: float


class TableSnapshot:
    """One table's, from all shards into files."""

    def __init__(
        self,
        spec: TableSpec,
        channels: Sequence[ShardChannel],
        newest_version: Callable[[], int],
        directory: Path,
        *,
        number: int,
        row_count: int,
        traffic: Traffic,
        attempts: Attempts,
    ) -> None:
        """`row_count`: About how many rows there are."""
        self._spec = spec
        self._channels = channels
        self._newest_version = newest_version
        self._directory = directory
        self._number = number
        self._row_count = row_count
        self._traffic = traffic
        self._attempts = attempts
        self._codec = RowStateCodec(spec)
        self._context = checksum.rows_scan_context(spec.name, pb.ScanRowsRequest.CONTENT_STATE)

    @property
    def size_bytes(self) -> int:
        """About as much is to be written."""
        return self._row_count * (24 + 4 * sum((self._spec.dim, *self._spec.slot_widths)))

    def take_repeatedly(self) -> CheckpointTable:
        """As `take`, and again where a shard went away, until the deadline.

        Raises:
            ShardwellError: see `take`.
        """
        return self._attempts.run(self.take)

    def take(self) -> CheckpointTable:
        """Blocks until all files are on the disk.

        Raises:
            WorkersMissingError: the shards wait for workers; names them.
            DeadlineError: training was too fast, or the deadline too near.
            ShardwellError: a shard refuses, or a file can't be written.
        """
        return at_one_version(
            self._attempt, self._newest_version, self._remaining_s, self._attempts
        )

    def _attempt(self, version: int, wait_s: float) -> CheckpointTable:
        with CallGroup() as call_group:
            calls = [
                call_group.add(channel, self._call(channel, version, wait_s))
                for channel in self._channels
            ]
            firsts = [
                self._next(channel, call, call_group)
                for channel, call in zip(self._channels, calls, strict=True)
            ]
            taken = call_group.read_all(
                partial(self._receive, channel, first, version, call, call_group)
                for channel, first, call in zip(self._channels, firsts, calls, strict=True)
            )
        rate = getattr(self._spec.optimizer, "learning_rate", None)
        return CheckpointTable(
            spec=self._spec,
            version=min(each.version for each in taken),
            version_max=max(each.version for each in taken),
            learning_rate=None if rate is None else taken[0].learning_rate,
            files=tuple(file for each in taken for file in each.files),
        )

    def _call(self, channel: ShardChannel, version: int, wait_s: float) -> Any:
        with channel.translated(table=self._spec.name):
            return channel.scan_rows(
                pb.ScanRowsRequest(
                    shard=channel.identity,
                    table=self._spec.name,
                    content=pb.ScanRowsRequest.CONTENT_STATE,
                    version=version,
                    wait_timeout_ms=wait_milliseconds(wait_s),
                ),
                timeout=self._remaining_s(),
            )

    def _receive(
        self,
        channel: ShardChannel,
        message: bytes | None,
        version: int,
        call: Any,
        call_group: CallGroup,
    ) -> _Taken:
        """Writes what one shard sends to its files."""
        files: list[RowsFile] = []
        states: list[RowState] = []
        if message is None:
            raise self._corrupt(channel, "the end of its answer, too early")
        size_bytes, found, rate = 0, 0, 0.0
        while message is not None:
            header, payload = framing.parse(pb.ScanRowsResponse, message)
            state = self._opened(channel, header, payload)
            if self._spec.mode == "sync" and header.version != version:
                raise self._corrupt(
                    channel, f"rows at version {header.version}; expected {version}"
                )
            found, rate = header.version, header.learning_rate
            if state.ids.size:
                states.append(state)
                self._traffic.add_received(len(message), state.weights.size)
                size_bytes += payload.size
            if size_bytes >= FILE_SIZE_BYTES:
                files.append(self._write(channel, len(files), states))
                states, size_bytes = [], 0
            message = self._next(channel, call, call_group)
        if states:
            files.append(self._write(channel, len(files), states))
        return _Taken(files, found, rate)

    def _opened(self, channel: ShardChannel, header: pb.ScanRowsResponse, payload: Any) -> RowState:
        start = checksum.rows_scan(self._context, header)
        try:
            return self._codec.open(header.rows, payload, start=start)
        except (ArgumentError, CorruptChunkError) as error:
            raise self._corrupt(channel, error.message) from None

    def _write(self, channel: ShardChannel, part: int, states: list[RowState]) -> RowsFile:
        name = rows_path(self._number, self._spec.name, channel.shard_index, part)
        path = self._directory / name
        path.unlink(missing_ok=True)  # of an attempt before
        size_bytes, crc = write_rows(path, self._spec, states)
        row_count = sum(state.ids.size for state in states)
        return RowsFile(path=name, row_count=row_count, size_bytes=size_bytes, crc32c=crc)

    def _next(self, channel: ShardChannel, call: Any, call_group: CallGroup) -> bytes | None:
        """The next message; None at the end."""
        try:
            message: bytes | None = next(call, None)
        except grpc.RpcError as error:
            first_channel, first = call_group.failure(channel, error)
            raise first_channel.translate(first, table=self._spec.name) from None
        return message

    def _corrupt(self, channel: ShardChannel, what: str) -> CorruptChunkError:
        return CorruptChunkError(
            f"shard {channel.shard_index} answered a scan of {self._spec.name!r} with {what}",
            shard_index=channel.shard_index,
            table=self._spec.name,
        )

    def _remaining_s(self) -> float:
        remaining_s = self._attempts.remaining_s
        if remaining_s <= 0:
            raise DeadlineError(
                f"no scan of table {self._spec.name!r} in time; raise timeout_s",
                table=self._spec.name,
            )
        return remaining_s
