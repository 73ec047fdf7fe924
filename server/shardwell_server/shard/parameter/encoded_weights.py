"""Weights out of one slice, encoded once for all workers that are in step."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from shardwell.errors import ArgumentError, CorruptChunkError, DivergedError
from shardwell.numerics.codec import NonFiniteValueError
from shardwell.numerics.scratch import thread_scratch
from shardwell.process.spans import Spans, now_ns
from shardwell.specs.parameter import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1.trace_pb2 import SPAN_KIND_ENCODE_WEIGHTS
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.shard.errors import diverged
from shardwell_server.shard.parameter.chunk import Chunk


class EncodedWeights:
    """The messages of the chunks that were asked for last. Any thread may call it.

    Args:
        spec: The parameter.
        spans: What the shard did last.
        count_max: Messages that are kept.
        former_names: Names that it had; what was kept under them has CRCs of these.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        spans: Spans,
        *,
        count_max: int,
        former_names: Sequence[str] = (),
    ) -> None:
        self._spec = spec
        self._spans = spans
        self._former_contexts = [checksum.weights_context(name) for name in former_names]
        self._codec = ChunkCodec.of(spec)
        self._context = checksum.weights_context(spec.name)
        self._count_max = count_max
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[int, bytes]] = OrderedDict()

    def leave(self, chunk: Chunk, chunk_index: int, version: int) -> bytes | None:
        """A chunk's message in the version that it is about to leave, kept here no more.

        The chunk's lock is held. None: the weights are not finite, and nobody can have them.
        """
        with self._lock:
            found, message = self._kept.pop(chunk_index, (-1, b""))
        if found == version:
            return message
        with contextlib.suppress(DivergedError):
            return self._encode(chunk, chunk_index, version)
        return None

    def intact(self, chunk: Chunk, chunk_index: int, version: int, message: bytes) -> bytes | None:
        """The message of a chunk in a version, from bytes that an earlier process left.

        None: they are none.
        """
        if self._fits(chunk, chunk_index, version, message, self._context):
            return message
        for context in self._former_contexts:
            if self._fits(chunk, chunk_index, version, message, context):
                header, payload = framing.parse(pb.ExchangeResponse, message)
                start = checksum.weights(self._context, version)
                header.chunk.crc32c = checksum.of_chunk(start, header.chunk, payload)
                sealed = framing.OutgoingMessage(header, payload.size)
                sealed.payload[:] = payload
                return sealed.seal()
        return None

    def _fits(
        self, chunk: Chunk, chunk_index: int, version: int, message: bytes, context: int
    ) -> bool:
        try:
            header, payload = framing.parse(pb.ExchangeResponse, message)
            start = checksum.weights(context, version)
            intact = self._codec.check(header.chunk, payload, start, thread_scratch())
            self._codec.open(intact, chunk.where)
        except (ArgumentError, CorruptChunkError):
            return False
        return (header.version, header.chunk.chunk_index) == (version, chunk_index)

    def message(self, chunk: Chunk, chunk_index: int, version: int) -> bytes:
        """A chunk's message in its version, kept for the next; the chunk's lock is held.

        Raises:
            DivergedError: training diverged; the weights are not finite.
            StorageError: an earlier process left a damaged chunk.
        """
        with self._lock:
            found, message = self._kept.get(chunk_index, (-1, b""))
        if found == version:
            return message
        begin_ns = now_ns()
        chunk.verify()
        message = self._encode(chunk, chunk_index, version)
        with self._lock:
            self._kept[chunk_index] = (version, message)
            self._kept.move_to_end(chunk_index)
            if len(self._kept) > self._count_max:
                self._kept.popitem(last=False)
        self._spans.add(
            SPAN_KIND_ENCODE_WEIGHTS, self._spec.name, version - 1, chunk_index, "", begin_ns
        )
        return message

    def forget(self) -> None:
        """Encodings of other weights are not to be answered."""
        with self._lock:
            self._kept.clear()

    def _encode(self, chunk: Chunk, chunk_index: int, version: int) -> bytes:
        header = pb.ExchangeResponse(version=version)
        try:
            return self._codec.encode(
                header,
                header.chunk,
                chunk.where,
                chunk_index,
                chunk.state.weights,
                thread_scratch(),
                start=checksum.weights(self._context, version),
            )
        except NonFiniteValueError as error:
            raise diverged(self._spec, chunk.where.offset + error.index, version) from None
