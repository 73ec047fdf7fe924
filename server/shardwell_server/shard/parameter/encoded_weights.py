"""Weights out of one slice, encoded once for all workers that are in step."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from shardwell.errors import ArgumentError, CorruptChunkError, DivergedError
from shardwell.numerics.codec import Bytes, NonFiniteValueError
from shardwell.numerics.scratch import thread_scratch
from shardwell.process.spans import Spans, now_ns
from shardwell.specs.parameter import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1.trace_pb2 import SPAN_KIND_ENCODE_WEIGHTS
from shardwell.wire import checksum, images
from shardwell.wire import messages as framing
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.shard.errors import diverged
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.image import ChunkImage
from shardwell_server.store.contract import ParameterStorage


class _Form(NamedTuple):
    form: pb.ImageForm
    base_version: int = 0
    """The version that a change goes on from."""


_PLAIN = _Form(pb.IMAGE_FORM_UNSPECIFIED)
"""Of a parameter without an image."""
_WHOLE = _Form(pb.IMAGE_FORM_WHOLE)


class EncodedWeights:
    """The messages of the chunks that were asked for last. Any thread may call it."""

    def __init__(
        self, spec: ParameterSpec, storage: ParameterStorage, spans: Spans, *, count_max: int
    ) -> None:
        self._spec = spec
        self._storage = storage
        self._spans = spans
        self._codec = ChunkCodec.of(spec)
        self._context = checksum.context(checksum.Kind.WEIGHTS, spec.name)
        self._count_max = count_max
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, _Form], tuple[int, bytes]] = OrderedDict()
        """Version and message, by chunk and form."""

    def leave(self, chunk: Chunk, chunk_index: int, version: int) -> None:
        """Keeps a chunk's message in the version that it is about to leave in the storage.

        The chunk's lock is held. Weights that are not finite no reader may have, and none is kept.
        """
        form = _WHOLE if self._spec.has_image else _PLAIN
        with self._lock:
            found, message = self._kept.pop((chunk_index, form), (-1, b""))
        with contextlib.suppress(DivergedError):
            if found != version:
                message = self._encode(chunk, chunk_index, version, form)
            self._storage.keep(chunk_index, version, message)

    def fits(self, chunk: Chunk, chunk_index: int, version: int, message: bytes) -> bool:
        """Returns True if bytes of an earlier process are the message of a chunk in a version."""
        try:
            header, payload = framing.parse(pb.ExchangeResponse, message)
            image = header.image if header.HasField("image") else None
            if (image is not None) != self._spec.has_image:
                return False
            codec = self._codec if image is None else images.WHOLE
            start = checksum.weights(self._context, version, image)
            intact = codec.check(header.chunk, payload, start, thread_scratch())
            codec.open(intact, chunk.where)
        except (ArgumentError, CorruptChunkError):
            return False
        return (header.version, header.chunk.chunk_index) == (version, chunk_index)

    def message(
        self, chunk: Chunk, chunk_index: int, version: int, held_version: int | None = None
    ) -> bytes:
        """Returns a chunk's message in its version, kept for the next; the chunk's lock is held.

        With an image, it goes on from the version that the receiver holds, if it can.
        """
        image = chunk.state.image
        form = _PLAIN if image is None else _form(image, version, held_version)
        key = chunk_index, form
        with self._lock:
            found, message = self._kept.get(key, (-1, b""))
        if found == version:
            return message
        begin_ns = now_ns()
        if not chunk.is_verified:
            chunk.verify()
        message = self._encode(chunk, chunk_index, version, form)
        with self._lock:
            self._kept[key] = (version, message)
            self._kept.move_to_end(key)
            if len(self._kept) > self._count_max:
                self._kept.popitem(last=False)
        self._spans.add(
            SPAN_KIND_ENCODE_WEIGHTS, self._spec.name, version - 1, chunk_index, "", begin_ns
        )
        return message

    def forget(self) -> None:
        """Forgets all messages, which are of other weights."""
        with self._lock:
            self._kept.clear()

    def _encode(self, chunk: Chunk, chunk_index: int, version: int, form: _Form) -> bytes:
        header, image = pb.ExchangeResponse(version=version), chunk.state.image
        try:
            if image is not None and form == _WHOLE:
                return images.whole_message(
                    version, chunk.where, chunk_index, image.sent, self._context
                )
            if image is not None:
                return images.change_message(
                    version,
                    chunk.where,
                    chunk_index,
                    *_changed(image, version, form),
                    self._context,
                )
            return self._codec.encode(
                header,
                header.chunk,
                chunk.where,
                chunk_index,
                chunk.state.weights,
                start=checksum.weights(self._context, version),
            )
        except NonFiniteValueError as error:
            raise diverged(self._spec, chunk.where.offset + error.index, version) from None


def _form(image: ChunkImage, version: int, held_version: int | None) -> _Form:
    if image.is_mean:
        has_mean = image.changes(version - 1, version)
        return _Form(pb.IMAGE_FORM_MEAN) if has_mean else _WHOLE
    if held_version is None or held_version > version:
        return _WHOLE
    if held_version == version:
        return _Form(pb.IMAGE_FORM_SAME, held_version)
    if image.changes(held_version, version):
        return _Form(pb.IMAGE_FORM_CHANGE, held_version)
    return _WHOLE


def _changed(image: ChunkImage, version: int, form: _Form) -> tuple[Bytes, pb.Image]:
    if form.form == pb.IMAGE_FORM_MEAN:
        (payload,) = image.changes(version - 1, version)
        return payload, pb.Image(form=form.form)
    said = pb.Image(form=form.form, base_version=form.base_version, crc32c=image.crc(version))
    payloads = image.changes(form.base_version, version)
    return np.concatenate(payloads) if payloads else np.empty(0, np.uint8), said
