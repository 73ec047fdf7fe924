"""Takes a checkpoint of a cluster: each parameter and table at one version, while training goes on.

Of each, all shards begin a snapshot at one version: the newest V of any shard; when one is past it,
a little later, at V + 1, V + 2, V + 4, ...; when training paused, so that a later version was not
reached soon, the newest again. A snapshot that has begun everywhere can be read at leisure: a
parameter's slices in pieces of 1 MiB, each into its file. Rows of a table come in no order and in
unknown number, so a shard's are gathered until they fill a file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import grpc
import numpy as np

from shardwell.checkpoint.cluster import Cluster, newest_version
from shardwell.checkpoint.format import (
    CheckpointParameter,
    CheckpointTable,
    RowsFile,
    SliceFile,
    StateFile,
    rows_path,
    slice_path,
    state_path,
)
from shardwell.checkpoint.tensor_files import (
    WEIGHTS_NAME,
    TensorsWriter,
    slice_tensors,
    write_bytes,
    write_rows,
)
from shardwell.errors import (
    ArgumentError,
    CorruptChunkError,
    DeadlineError,
    LimitError,
    ShardwellError,
    StepOrderError,
    WorkersMissingError,
)
from shardwell.numerics.codec import CODECS, canonical_nans
from shardwell.placement.slices import Slice, slice_of
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.deadlines import wait_milliseconds, with_answer
from shardwell.specs.names import check_name
from shardwell.specs.parameter import STATE_SIZE_MAX_BYTES, STEP_MAX, ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell.transport.call_group import CallGroup
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import table_pb2
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import ChunkCodec, check_chunk
from shardwell.wire.row_state import RowState, RowStateCodec

_LOG = logging.getLogger("shardwell")
FILE_SIZE_BYTES = 32 * 2**20
"""So much of a shard's rows, about, goes to a file, and is in memory before."""
_FIRST_WAIT_S = 1.0
"""The first wait for a version, which training may never reach; doubled each time."""
_LIMIT_PAUSE_S = 0.25
_AHEAD_MAX = 2**20
# The shards refuse weights that the spec refuses.
_CODEC = ChunkCodec(CODECS["fp32"], allow_non_finite=True)

SpecT = TypeVar("SpecT", ParameterSpec, TableSpec)


class _Taken(NamedTuple):
    """The part of one shard."""

    files: tuple[Any, ...]
    version_min: int
    version_max: int
    learning_rate: float
    more: Mapping[str, Any] = MappingProxyType({})
    """Fields of the entry besides those that both kinds have."""


class Capture(ABC, Generic[SpecT]):
    """One parameter or table, from all shards into files."""

    _kind: ClassVar[str]
    _verb: ClassVar[str]
    """The word of messages for the call: "snapshot" or "scan"."""
    _method: ClassVar[str]
    _request: ClassVar[Any]
    _asked: ClassVar[dict[str, Any]] = {}
    """Fields of a request besides those that both kinds have."""
    _entry: ClassVar[Any]

    def __init__(
        self, spec: SpecT, cluster: Cluster, parts: Sequence[Any], directory: Path, number: int
    ) -> None:
        self._spec: SpecT = spec
        self._cluster = cluster
        self._channels: Sequence[ShardChannel] = cluster.channels
        self.known_version: int | None = newest_version(spec, parts)
        """The newest version, of `parts`; None: it is to be asked, as they are of before."""
        self._directory = directory
        self._number = number
        self._traffic = cluster.traffic
        self._attempts = cluster.attempts.beside()
        self._where: dict[str, Any] = {self._kind: spec.name}

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """The bytes to be written, about."""

    def take_repeatedly(self) -> Any:
        """Does `take`, and again where a shard went away, until the deadline."""
        return self._attempts.run(self.take)

    def take(self) -> Any:
        """Takes all shards' parts at one version; blocks until all files are on the disk."""
        ahead, later, wait_s = 0, 1, _FIRST_WAIT_S
        while True:
            version = self._newest_version() + ahead
            left_s = self._remaining_s()
            try:
                return self._attempt(version, min(wait_s, left_s / 2) if ahead else left_s)
            except StepOrderError:  # too late
                ahead, later = later, min(2 * later, _AHEAD_MAX)
            except WorkersMissingError:  # perhaps too early: training has ended
                if not ahead:
                    raise
                ahead, wait_s = 0, 2 * wait_s
            except LimitError:  # perhaps of attempts that the shards have not seen the end of yet
                if self._remaining_s() <= _LIMIT_PAUSE_S:
                    raise
                self._attempts.pause(_LIMIT_PAUSE_S)

    def _newest_version(self) -> int:
        known, self.known_version = self.known_version, None
        return self._cluster.newest_version(self._spec) if known is None else known

    def _attempt(self, version: int, wait_s: float) -> Any:
        with CallGroup() as call_group:
            calls = []
            for channel in self._channels:
                request = self._request(
                    shard=channel.identity,
                    version=version,
                    wait_timeout_ms=wait_milliseconds(wait_s),
                    **self._where,
                    **self._asked,
                )
                with channel.translated(**self._where):
                    call = channel.streaming(self._method)(
                        request, timeout=with_answer(self._remaining_s())
                    )
                calls.append(call_group.add(channel, call))
            reads = [
                partial(self._next, channel, call, call_group)
                for channel, call in zip(self._channels, calls, strict=True)
            ]
            firsts = [read() for read in reads]  # that a shard has begun
            taken = call_group.read_all(
                partial(self._receive, channel, version, first, read)
                for channel, first, read in zip(self._channels, firsts, reads, strict=True)
            )
        rate = getattr(self._spec.optimizer, "learning_rate", None)
        return self._entry(
            spec=self._saved_spec(),
            version=min(each.version_min for each in taken),
            version_max=max(each.version_max for each in taken),
            learning_rate=None if rate is None else taken[0].learning_rate,
            files=tuple(file for each in taken for file in each.files),
            **taken[0].more,
        )

    @abstractmethod
    def _receive(
        self,
        channel: ShardChannel,
        version: int,
        message: bytes | None,
        read: Callable[[], bytes | None],
    ) -> _Taken:
        """Writes one shard's answers to files: `message`, then those of `read` up to None."""

    def _saved_spec(self) -> SpecT:
        return self._spec

    def _next(self, channel: ShardChannel, call: Any, call_group: CallGroup) -> bytes | None:
        try:
            message: bytes | None = next(call, None)
        except grpc.RpcError as error:
            first_channel, first = call_group.failure(channel, error)
            raise first_channel.translate(first, **self._where) from None
        return message

    def _whole(self, channel: ShardChannel, message: bytes | None) -> bytes:
        if message is None:
            raise self._corrupt(channel, "the end of its answer, too early")
        return message

    def _corrupt(self, channel: ShardChannel, what: str) -> CorruptChunkError:
        return CorruptChunkError(
            f"shard {channel.shard_index} answered a {self._verb} of {self._spec.name!r} with "
            f"{what}",
            shard_index=channel.shard_index,
            **self._where,
        )

    def _remaining_s(self) -> float:
        remaining_s = self._attempts.remaining_s
        if remaining_s <= 0:
            raise DeadlineError(
                f"no {self._verb} of {self._kind} {self._spec.name!r} within "
                f"{self._attempts.timeout_s:g} s; raise timeout_s",
                **self._where,
            )
        return remaining_s

    def _fresh(self, name: str) -> Path:
        """Removes what an attempt before may have left of a file; returns the path."""
        path = self._directory / name
        path.unlink(missing_ok=True)
        return path


class ParameterCapture(Capture[ParameterSpec]):
    """Captures a parameter."""

    _kind, _verb, _method = "parameter", "snapshot", "Snapshot"
    _request, _entry = pb.SnapshotRequest, CheckpointParameter

    def __init__(self, spec: ParameterSpec, cluster: Cluster, *rest: Any) -> None:
        super().__init__(spec, cluster, *rest)
        count = len(cluster.channels)
        self._slices = [slice_of(spec.size, i, count, spec.slice_unit) for i in range(count)]
        self._channels = [e for e in cluster.channels if self._slices[e.shard_index].size]
        self._context = checksum.context(checksum.Kind.SNAPSHOT, spec.name)
        self._names = (WEIGHTS_NAME, *spec.slot_names)

    def _saved_spec(self) -> ParameterSpec:
        return dataclasses.replace(self._spec, cuts_blocks=False)  # it is cut anew when restored

    @property
    def size_bytes(self) -> int:
        """The bytes of all its arrays."""
        return 4 * self._spec.size * len(self._names)

    def _receive(
        self,
        channel: ShardChannel,
        version: int,
        message: bytes | None,
        read: Callable[[], bytes | None],
    ) -> _Taken:
        header, _ = framing.parse(pb.SnapshotResponse, self._whole(channel, message))
        if header.array_count != len(self._names) or header.HasField("chunk"):
            raise self._corrupt(
                channel, f"{header.array_count} arrays, expected {len(self._names)}"
            )
        where = self._slices[channel.shard_index]
        name = slice_path(self._number, self._spec.name, channel.shard_index)
        metadata = {
            "format": "shardwell-slice",
            "parameter": self._spec.name,
            "offset": str(where.offset),
            "parameter_size": str(self._spec.size),
        }
        tensors = slice_tensors(self._names, where.size)
        expected = [where.offset] * len(self._names)
        version_min, version_max, rate = STEP_MAX, 0, 0.0
        more: dict[str, Any] = {}
        with TensorsWriter(self._fresh(name), tensors, metadata) as writer:
            while min(expected) < where.stop:
                message = self._whole(channel, read())
                header, payload = framing.parse(pb.SnapshotResponse, message)
                index, chunk = header.array_index, header.chunk
                try:
                    intact = check_chunk(chunk, payload, checksum.snapshot(self._context, header))
                except CorruptChunkError as error:
                    raise self._corrupt(channel, error.message) from None
                part = Slice(chunk.element_offset, chunk.element_count)
                if header.samples and not part.size:
                    more["samples"] = self._account(channel, header.samples)
                    continue
                late = self._spec.mode == "sync" and header.version != version
                fits = index < len(expected) and part.offset == expected[index]
                if late or not fits or not part.size or part.stop > where.stop:
                    raise self._corrupt(
                        channel,
                        f"elements {part.offset} to {part.stop - 1} of array {index} at version "
                        f"{header.version}; expected those from {expected} on at {version}",
                    )
                try:
                    stored = _CODEC.open(intact, part)
                except ShardwellError as error:
                    raise self._corrupt(channel, error.message) from None
                values = stored.view(np.float32)
                if self._spec.allow_non_finite:
                    values = values.copy()
                    canonical_nans(values)
                writer.put(self._names[index], part.offset - where.offset, values)
                self._traffic.add_received(len(message), part.size)
                expected[index] = part.stop
                version_min = min(version_min, header.version)
                version_max = max(version_max, header.version)
                rate = header.learning_rate
            size_bytes, crc = writer.finish()
        states = list(self._states(channel, read))
        if states:
            more["states"] = tuple(states)
        file = SliceFile(
            path=name, offset=where.offset, size=where.size, size_bytes=size_bytes, crc32c=crc
        )
        return _Taken((file,), version_min, version_max, rate, more)

    def _states(
        self, channel: ShardChannel, read: Callable[[], bytes | None]
    ) -> Iterator[StateFile]:
        messages = (self._state_message(channel, message) for message in iter(read, None))
        for index, first in enumerate(messages):
            parts, whose = [first.state], (first.worker_id, first.state_step)
            for number in range(1, 1 + first.state_page_count):
                page = next(messages, first)
                if page.state_page != number or whose != (page.worker_id, page.state_step):
                    raise self._corrupt(channel, f"a part of a state of {whose[0]!r} left out")
                parts.append(page.state)
                if sum(map(len, parts)) > STATE_SIZE_MAX_BYTES:
                    most = STATE_SIZE_MAX_BYTES
                    raise self._corrupt(channel, f"a state of more than {most} bytes")
            if first.state_page:
                raise self._corrupt(channel, "a page of no state")
            if first.state_step < first.version:
                _LOG.warning(
                    "checkpoint of parameter %r: worker %r has not begun step %d, so what it keeps "
                    "beside the weights is that of step %d: without what its loop does between",
                    self._spec.name,
                    first.worker_id,
                    first.version,
                    first.state_step,
                )
            where, data = state_path(self._number, self._spec.name, index), b"".join(parts)
            crc = write_bytes(self._fresh(where), data)
            yield StateFile(
                path=where,
                worker_id=first.worker_id,
                step=first.state_step,
                size_bytes=len(data),
                crc32c=crc,
            )

    def _state_message(self, channel: ShardChannel, message: bytes) -> pb.SnapshotResponse:
        header, payload = framing.parse(pb.SnapshotResponse, message)
        try:
            check_chunk(header.chunk, payload, checksum.snapshot(self._context, header))
            check_name("worker_id", header.worker_id)
        except (ArgumentError, CorruptChunkError) as error:
            raise self._corrupt(channel, error.message) from None
        if not header.state or header.state_step > header.version:
            raise self._corrupt(channel, "a message behind its end")
        return header

    def _account(self, channel: ShardChannel, written: bytes) -> dict[str, Any]:
        try:
            found = json.loads(written)
            if isinstance(found, dict):
                return found
        except ValueError:
            pass
        raise self._corrupt(channel, "an account of samples that is no JSON object")


class TableCapture(Capture[TableSpec]):
    """Captures a table."""

    _kind, _verb, _method = "table", "scan", "ScanRows"
    _request, _entry = table_pb2.ScanRowsRequest, CheckpointTable
    _asked: ClassVar[dict[str, Any]] = {"content": table_pb2.ScanRowsRequest.CONTENT_STATE}

    def __init__(self, spec: TableSpec, cluster: Cluster, parts: Sequence[Any], *rest: Any) -> None:
        super().__init__(spec, cluster, parts, *rest)
        self._row_count: int = sum(each.row_count for each in parts)
        self._codec = RowStateCodec(spec)
        self._context = checksum.context(
            checksum.Kind.ROWS_SCAN, spec.name, table_pb2.ScanRowsRequest.CONTENT_STATE
        )

    @property
    def size_bytes(self) -> int:
        """The bytes of about as many rows."""
        return self._row_count * (24 + 4 * sum((self._spec.dim, *self._spec.slot_widths)))

    def _receive(
        self,
        channel: ShardChannel,
        version: int,
        message: bytes | None,
        read: Callable[[], bytes | None],
    ) -> _Taken:
        files: list[RowsFile] = []
        states: list[RowState] = []
        self._whole(channel, message)
        size_bytes, found, rate = 0, 0, 0.0
        while message is not None:
            header, payload = framing.parse(table_pb2.ScanRowsResponse, message)
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
            message = read()
        if states:
            files.append(self._write(channel, len(files), states))
        return _Taken(tuple(files), found, found, rate)

    def _opened(
        self, channel: ShardChannel, header: table_pb2.ScanRowsResponse, payload: Any
    ) -> RowState:
        start = checksum.rows_scan(self._context, header)
        try:
            return self._codec.open(header.rows, payload, start=start)
        except (ArgumentError, CorruptChunkError) as error:
            raise self._corrupt(channel, error.message) from None

    def _write(self, channel: ShardChannel, part: int, states: list[RowState]) -> RowsFile:
        name = rows_path(self._number, self._spec.name, channel.shard_index, part)
        size_bytes, crc = write_rows(self._fresh(name), self._spec, states)
        row_count = sum(state.ids.size for state in states)
        return RowsFile(path=name, row_count=row_count, size_bytes=size_bytes, crc32c=crc)
