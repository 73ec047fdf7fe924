"""Snapshot: the chunks of a slice at one version as a stream of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shardwell.numerics.codec import CODECS, Float32, NonFiniteValueError
from shardwell.numerics.scratch import thread_scratch
from shardwell.placement.slices import Slice
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES, ChunkCodec
from shardwell_server.services.calls import Handling
from shardwell_server.shard.deadline import RequestDeadline, until
from shardwell_server.shard.errors import diverged
from shardwell_server.shard.parameter.slice import ParameterSlice

_RANGE_ELEMENT_COUNT = PAYLOAD_SIZE_MAX_BYTES // 4


def snapshot_messages(
    parameter: ParameterSlice,
    version: int,
    deadline: RequestDeadline,
    is_wanted: Callable[[], bool],
    count: Callable[[int], None],
) -> Handling:
    """A first message when every chunk is sure to be had, then all chunks in order.

    Holds one chunk's arrays at a time.

    Args:
        parameter: The slice.
        version: Of every chunk; asynchronous mode has no use for it.
        deadline: Bounds the waits for other workers.
        is_wanted: Whether the stream is still read; any thread calls it.
        count: Told of the bytes of each message.

    Raises:
        DivergedError: training diverged; weights or optimizer state are not finite.
        ShardwellError: see `Snapshots.under_way` and `Snapshots.capture`.
    """
    context = checksum.snapshot_context(parameter.spec.name)
    codec = ChunkCodec(CODECS["fp32"], allow_non_finite=parameter.spec.allow_non_finite)
    names = ("weights", *(f"optimizer's {n!r}" for n in parameter.spec.optimizer.slot_names))
    element_count = min(parameter.chunk_element_count, parameter.where.size)
    buffers = [np.empty(element_count, np.float32) for _ in range(parameter.array_count)]
    with parameter.snapshots.under_way(version, is_wanted) as snapshot:
        yield pb.SnapshotResponse(
            version=version, array_count=parameter.array_count
        ).SerializeToString()
        for index in range(parameter.chunk_count):
            where = parameter.where.chunk(index, parameter.chunk_element_count)
            arrays = [buffer[: where.size] for buffer in buffers]
            found, rate = yield from until(
                parameter.snapshots.capture, index, snapshot, deadline, arrays
            )
            parameter.make_durable()
            for array_index, array in enumerate(arrays):
                header = pb.SnapshotResponse(
                    version=found, array_index=array_index, learning_rate=rate
                )
                start = checksum.snapshot(context, header)
                try:
                    for message in _ranges(codec, header, where, index, array, start):
                        count(len(message))
                        yield message
                except NonFiniteValueError as error:
                    raise diverged(
                        parameter.spec, where.offset + error.index, found, names[array_index]
                    ) from None


def _ranges(
    codec: ChunkCodec,
    header: pb.SnapshotResponse,
    where: Slice,
    index: int,
    array: Float32,
    start: int,
) -> Iterator[bytes]:
    """The messages of one array of a chunk."""
    for number in range(where.chunk_count(_RANGE_ELEMENT_COUNT)):
        part = where.chunk(number, _RANGE_ELEMENT_COUNT)
        first = part.offset - where.offset
        values = array[first : first + part.size]
        try:
            yield codec.encode(
                header, header.chunk, part, index, values, thread_scratch(), start=start
            )
        except NonFiniteValueError as error:
            raise NonFiniteValueError(first + error.index, error.value) from None
