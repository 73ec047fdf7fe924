"""Weights on the wire in a codec of blocks: an image whole, or what changes it.

The message is that of any chunk of weights, and says in `image` how its payload is to be read; see
ImageForm in the .proto. What a form means to a worker is parameter/image.py's, how a shard comes to
a change its shard/parameter/image.py's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from shardwell.errors import ArgumentError
from shardwell.numerics.codec import CODECS, Bytes, Float32
from shardwell.numerics.scratch import thread_scratch
from shardwell.placement.slices import Slice
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec, check_chunk
from shardwell.wire.messages import OutgoingMessage

Weights: TypeAlias = pb.ExchangeResponse | pb.GetWeightsResponse
WHOLE = ChunkCodec(CODECS["fp32"])
"""Of IMAGE_FORM_WHOLE."""


def whole_message(
    version: int, where: Slice, chunk_index: int, values: Float32, context: int
) -> bytes:
    """A chunk's values, as they are, as a sealed message.

    Raises:
        NonFiniteValueError: one of them is not finite.
    """
    header = pb.ExchangeResponse(version=version, image=pb.Image(form=pb.IMAGE_FORM_WHOLE))
    start = checksum.weights(context, version, header.image)
    return WHOLE.encode(
        header, header.chunk, where, chunk_index, values, thread_scratch(), start=start
    )


def change_message(
    version: int, where: Slice, chunk_index: int, payload: Bytes, image: pb.Image, context: int
) -> bytes:
    """A payload that is there, or of IMAGE_FORM_SAME nothing, as a sealed message."""
    header = pb.ExchangeResponse(version=version, image=image)
    chunk: Any = header.chunk
    chunk.chunk_index, chunk.element_offset = chunk_index, where.offset
    chunk.element_count = where.size
    start = checksum.weights(context, version, image)
    chunk.crc32c = checksum.of_chunk(start, chunk, payload)
    message = OutgoingMessage(header, payload.size)
    message.payload[:] = payload
    return message.seal()


def read(
    codec: ChunkCodec,
    header: Weights,
    payload: Bytes,
    context: int,
    where: Slice,
    values: Float32 | None,
) -> None:
    """Checks a chunk's message, and decodes its payload into `values`.

    Args:
        codec: The parameter's, in which changes and means are.
        header: What came.
        payload: The same.
        context: Of the parameter's weights: see checksum.py.
        where: The range where its index belongs.
        values: (where.size,), filled; None: of IMAGE_FORM_SAME, which has none.

    Raises:
        CorruptChunkError, ArgumentError: see `ChunkCodec.read`.
    """
    chunk: types_pb2.Chunk = header.chunk
    start = checksum.weights(context, header.version, header.image)
    if values is None:
        check_chunk(chunk, payload, start)
        if (chunk.element_offset, chunk.element_count) != (where.offset, where.size):
            raise ArgumentError(
                f"chunk {chunk.chunk_index} covers {chunk.element_count} elements from "
                f"{chunk.element_offset} on; expected {where.size} from {where.offset} on"
            )
    else:
        written = WHOLE if header.image.form == pb.IMAGE_FORM_WHOLE else codec
        written.read(chunk, payload, start, where, values)
