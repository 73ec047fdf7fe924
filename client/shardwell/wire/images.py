"""Weights on the wire in a codec of blocks: an image whole, or what changes it.

The message is that of any chunk of weights, and says in `image` how its payload is to be read; see
ImageForm in the .proto. What a form means to a worker is parameter/image.py's, how a shard comes to
a change its shard/parameter/image.py's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.numerics.codec import CODECS, Bytes, Float32
from shardwell.placement.slices import Slice
from shardwell.specs.parameter import BLOCK_SIZES
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec, check_chunk
from shardwell.wire.messages import OutgoingMessage

Weights: TypeAlias = pb.ExchangeResponse | pb.GetWeightsResponse
WHOLE = ChunkCodec(CODECS["fp32"])
CHANGE_COUNT_MAX = 3
"""Changes that one message has: those of int8 take fewer bytes than what is whole."""


def kept_bytes(codec_name: str, count: int) -> int:
    """The bytes of changes that a shard keeps of `count` elements; 0 without images."""
    is_of_blocks = codec_name in BLOCK_SIZES
    return CHANGE_COUNT_MAX * CODECS[codec_name].encoded_bytes(count) if is_of_blocks else 0


def whole_message(
    version: int, where: Slice, chunk_index: int, values: Float32, context: int
) -> bytes:
    """Returns a chunk's values, as they are, as a sealed message; all must be finite."""
    header = pb.ExchangeResponse(version=version, image=pb.Image(form=pb.IMAGE_FORM_WHOLE))
    start = checksum.weights(context, version, header.image)
    return WHOLE.encode(header, header.chunk, where, chunk_index, values, start=start)


def change_message(
    version: int, where: Slice, chunk_index: int, payload: Bytes, image: pb.Image, context: int
) -> bytes:
    """A payload of changes, or of IMAGE_FORM_SAME none, as a sealed message."""
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
    values: Float32,
) -> None:
    """Checks a chunk's message of IMAGE_FORM_WHOLE or IMAGE_FORM_MEAN, and decodes it."""
    start = checksum.weights(context, header.version, header.image)
    written = WHOLE if header.image.form == pb.IMAGE_FORM_WHOLE else codec
    written.read(header.chunk, payload, start, where, values)


def read_changes(
    codec: ChunkCodec, header: Weights, payload: Bytes, context: int, where: Slice
) -> list[Bytes]:
    """Returns each change of a chunk's message, IMAGE_FORM_CHANGE or IMAGE_FORM_SAME."""
    chunk, image = header.chunk, header.image
    start = checksum.weights(context, header.version, image)
    intact = check_chunk(chunk, payload, start).payload
    size = codec.codec.encoded_bytes(where.size)
    count = header.version - image.base_version
    is_same = image.form == pb.IMAGE_FORM_SAME
    if (chunk.element_offset, chunk.element_count) != (where.offset, where.size):
        raise ArgumentError(
            f"chunk {chunk.chunk_index} covers {chunk.element_count} elements from "
            f"{chunk.element_offset} on; expected {where.size} from {where.offset} on"
        )
    if count != 0 if is_same else not 1 <= count <= CHANGE_COUNT_MAX:
        raise CorruptChunkError(
            f"chunk {chunk.chunk_index} goes from version {image.base_version} to "
            f"{header.version} in {'no' if is_same else 'its'} changes; expected "
            f"{'the same version' if is_same else f'1 to {CHANGE_COUNT_MAX} of them'}"
        )
    if intact.size != count * size:
        raise CorruptChunkError(
            f"chunk {chunk.chunk_index}: {count} changes of {where.size} elements of "
            f"{codec.codec.name} are {count * size} bytes; the payload has {intact.size}"
        )
    return [intact[index * size : (index + 1) * size] for index in range(count)]
