"""InitWeights: a stream of ranges to the first weights of a slice, checked as it comes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.numerics.codec import CODECS
from shardwell.placement.slices import Slice
from shardwell.specs.optimizers import check_learning_rate
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import ChunkCodec, check_chunk
from shardwell_server.services.calls import Handling, Read
from shardwell_server.shard.errors import non_finite
from shardwell_server.shard.parameter.slice import ParameterSlice

_CODEC = ChunkCodec(CODECS["fp32"], allow_non_finite=True)


def receive_first_weights(
    opened: Callable[[pb.InitWeightsRequest], ParameterSlice],
    count: Callable[[int], None],
) -> Handling:
    """Takes the whole slice, array by array and range by range; returns the version.

    Args:
        opened: The parameter that the first message names, or an error.
        count: Told of the bytes of each payload.

    Raises:
        CorruptChunkError: a message was damaged.
        ArgumentError: the ranges do not follow one another, or do not cover the slice.
        ShardwellError: see `ParameterSlice.set_first_weights` and `finish_init`.
    """
    parameter, opening, array_index, expected = None, pb.InitWeightsRequest(), 0, 0
    context, has_ranges = 0, False
    message = yield Read.NEXT_STEP
    while message is not None:
        request, payload = framing.parse(pb.InitWeightsRequest, message)
        if parameter is None:
            parameter, opening = opened(request), request
            expected = parameter.where.offset
            context = checksum.first_weights_context(opening)
        if not request.HasField("chunk"):
            if payload.size:
                raise CorruptChunkError("a message has a payload and no `chunk`; send it again")
            message = yield Read.NEXT
            continue
        chunk = request.chunk
        start = checksum.first_weights(context, request.array_index)
        intact, has_ranges = check_chunk(chunk, payload, start), True
        where = Slice(chunk.element_offset, chunk.element_count)
        is_next_array = array_index + 1 == request.array_index < parameter.array_count
        if expected == parameter.where.stop and is_next_array:
            array_index, expected = request.array_index, parameter.where.offset
        if (request.array_index, where.offset) != (array_index, expected):
            raise ArgumentError(
                f"first weights must follow one another: expected element {expected} of array "
                f"{array_index}, got {where.offset} of {request.array_index}"
            )
        values = _CODEC.open(intact, where).view(np.float32)
        # Optimizer state may be infinite where no weight is: squares overflow.
        if array_index == 0 and not parameter.spec.allow_non_finite:
            finite = np.isfinite(values)
            if not finite.all():
                index = where.offset + int(np.argmin(finite))
                raise non_finite(parameter.spec, index, "first weights")
        parameter.set_first_weights(opening.epoch, where, values, array_index=array_index)
        count(payload.size)
        expected = where.stop
        message = yield Read.NEXT
    if parameter is None:
        raise ArgumentError("an InitWeights stream must begin with `open`; it was empty")
    if not has_ranges:
        raise ArgumentError(
            "an InitWeights stream must have a `chunk`, whose CRC32C covers `open`: of 0 elements, "
            "if this slice is empty"
        )
    last_array_index = 0 if parameter.where.size == 0 else parameter.array_count - 1
    if expected != parameter.where.stop or array_index not in (0, last_array_index):
        raise ArgumentError(
            f"first weights ended before element {expected} of array {array_index}; this slice "
            f"ends before {parameter.where.stop}, and has {parameter.array_count} arrays; send "
            "all of it"
        )
    rate = opening.learning_rate if opening.HasField("learning_rate") else None
    return parameter.finish_init(
        opening.epoch,
        version=opening.version,
        learning_rate=None if rate is None else check_learning_rate("learning_rate", rate),
        load_id=opening.load_id,
        with_slots=array_index == last_array_index,
    )
