"""Takes a checkpoint of a cluster: every parameter at one version, while training goes on.

For each parameter, all shards begin a snapshot at one version (consistent_version.py). What has
begun everywhere can be read at leisure, slice by slice, in pieces of 1 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from shardwell.checkpoint.consistent_version import at_one_version
from shardwell.checkpoint.format import CheckpointParameter, SliceFile, slice_path
from shardwell.checkpoint.slice_file import WEIGHTS_NAME, SliceWriter
from shardwell.errors import (
    CorruptChunkError,
    DeadlineError,
    ShardwellError,
)
from shardwell.numerics.arguments import wait_milliseconds
from shardwell.numerics.codec import CODECS
from shardwell.placement.slices import Slice, slice_of
from shardwell.rpc.call_group import CallGroup
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.parameter import STEP_MAX, ParameterSpec
from shardwell.traffic import Traffic
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import ChunkCodec, check_chunk

# The shards refuse weights that the spec refuses.
_CODEC = ChunkCodec(CODECS["fp32"], allow_non_finite=True)


class _Taken(NamedTuple):
    """What came of one shard."""

    file: SliceFile
    version_min: int
    version_max: int
    learning_rate: float


class ParameterSnapshot:
    """One parameter's, from all shards into files."""

    def __init__(
        self,
        spec: ParameterSpec,
        channels: Sequence[ShardChannel],
        newest_version: Callable[[], int],
        directory: Path,
        *,
        number: int,
        traffic: Traffic,
        attempts: Attempts,
    ) -> None:
        self._spec = spec
        self._parts = [
            (channel, where)
            for channel in channels
            if (where := slice_of(spec.size, channel.shard_index, len(channels))).size
        ]
        self._newest_version = newest_version
        self._directory = directory
        self._number = number
        self._traffic = traffic
        self._attempts = attempts
        self._context = checksum.snapshot_context(spec.name)
        self._names = (WEIGHTS_NAME, *spec.optimizer.slot_names)

    @property
    def size_bytes(self) -> int:
        """Of all its arrays."""
        return 4 * self._spec.size * len(self._names)

    def take_repeatedly(self) -> CheckpointParameter:
        """As `take`, and again where a shard went away, until the deadline.

        Raises:
            ShardwellError: see `take`.
        """
        return self._attempts.run(self.take)

    def take(self) -> CheckpointParameter:
        """Blocks until all files are on the disk.

        Raises:
            WorkersMissingError: some chunks wait for workers; names them.
            DeadlineError: training was too fast, or the deadline too near.
            ShardwellError: a shard refuses, or a file can't be written.
        """
        return at_one_version(
            self._attempt, self._newest_version, self._remaining_s, self._attempts
        )

    def _attempt(self, version: int, wait_s: float) -> CheckpointParameter:
        with CallGroup() as call_group:
            calls = [
                call_group.add(channel, self._call(channel, version, wait_s))
                for channel, _ in self._parts
            ]
            for (channel, _), call in zip(self._parts, calls, strict=True):
                self._begin(channel, call, call_group)
            taken = call_group.read_all(
                partial(self._receive, channel, where, version, call, call_group)
                for (channel, where), call in zip(self._parts, calls, strict=True)
            )
        rate = getattr(self._spec.optimizer, "learning_rate", None)
        return CheckpointParameter(
            spec=self._spec,
            version=min(each.version_min for each in taken),
            version_max=max(each.version_max for each in taken),
            learning_rate=None if rate is None else taken[0].learning_rate,
            files=tuple(each.file for each in taken),
        )

    def _call(self, channel: ShardChannel, version: int, wait_s: float) -> Any:
        with channel.translated(self._spec.name):
            return channel.snapshot(
                pb.SnapshotRequest(
                    shard=channel.identity,
                    parameter=self._spec.name,
                    version=version,
                    wait_timeout_ms=wait_milliseconds(wait_s),
                ),
                timeout=self._remaining_s(),
            )

    def _begin(self, channel: ShardChannel, call: Any, call_group: CallGroup) -> None:
        """Reads the message that says that a shard has begun."""
        header, _ = framing.parse(pb.SnapshotResponse, self._next(channel, call, call_group))
        if header.array_count != len(self._names) or header.HasField("chunk"):
            raise self._corrupt(
                channel, f"{header.array_count} arrays, expected {len(self._names)}"
            )

    def _receive(
        self, channel: ShardChannel, where: Slice, version: int, call: Any, call_group: CallGroup
    ) -> _Taken:
        """Writes what one shard sends to its file."""
        name = slice_path(self._number, self._spec.name, channel.shard_index)
        path = self._directory / name
        path.unlink(missing_ok=True)  # of an attempt before
        metadata = {
            "format": "shardwell-slice",
            "parameter": self._spec.name,
            "offset": str(where.offset),
            "parameter_size": str(self._spec.size),
        }
        expected = [where.offset] * len(self._names)
        version_min, version_max, rate = STEP_MAX, 0, 0.0
        with SliceWriter(path, self._names, where.size, metadata) as writer:
            while min(expected) < where.stop:
                message = self._next(channel, call, call_group)
                header, payload = framing.parse(pb.SnapshotResponse, message)
                index, chunk = header.array_index, header.chunk
                try:
                    intact = check_chunk(chunk, payload, checksum.snapshot(self._context, header))
                except CorruptChunkError as error:
                    raise self._corrupt(channel, error.message) from None
                part = Slice(chunk.element_offset, chunk.element_count)
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
                writer.write(index, part.offset - where.offset, stored.view(np.float32))
                self._traffic.add_received(len(message), part.size)
                expected[index] = part.stop
                version_min = min(version_min, header.version)
                version_max = max(version_max, header.version)
                rate = header.learning_rate
            size_bytes, crc = writer.finish()
        return _Taken(
            SliceFile(
                path=name,
                offset=where.offset,
                size=where.size,
                size_bytes=size_bytes,
                crc32c=crc,
            ),
            version_min,
            version_max,
            rate,
        )

    def _next(self, channel: ShardChannel, call: Any, call_group: CallGroup) -> bytes:
        """The next message; an answer that ends early is an error too."""
        try:
            message: bytes | None = next(call, None)
        except grpc.RpcError as error:
            first_channel, first = call_group.failure(channel, error)
            raise first_channel.translate(first, self._spec.name) from None
        if message is None:
            raise self._corrupt(channel, "the end of its answer, too early")
        return message

    def _corrupt(self, channel: ShardChannel, what: str) -> CorruptChunkError:
        return CorruptChunkError(
            f"shard {channel.shard_index} answered a snapshot of {self._spec.name!r} with {what}",
            shard_index=channel.shard_index,
            parameter=self._spec.name,
        )

    def _remaining_s(self) -> float:
        remaining_s = self._attempts.remaining_s
        if remaining_s <= 0:
            raise DeadlineError(
                f"no snapshot of {self._spec.name!r} in time; raise timeout_s",
                parameter=self._spec.name,
            )
        return remaining_s
