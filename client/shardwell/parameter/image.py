"""The image of a parameter's weights in a worker, with a codec of blocks.

It is what all workers hold that took a version. Shards send what changes it, from a version that
the worker says it holds, or all of it. Invariant: a chunk's values here are, bit by bit, those that
its shard has as the image of that version, or the worker says that it holds none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from fastcrc import crc32

from shardwell.errors import CorruptChunkError
from shardwell.numerics.codec import Bytes, Float32
from shardwell.placement.slices import Slice
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import images
from shardwell.wire.chunks import ChunkCodec

_LOCK_COUNT = 16


class Image:
    """The image of one parameter; `context` is the checksum's. Any thread may use it."""

    def __init__(self, spec: ParameterSpec, context: int) -> None:
        self._is_mean = isinstance(spec.optimizer, Average)
        self._codec = ChunkCodec.of(spec)
        self._context = context
        self._values: Float32 = np.zeros(0 if self._is_mean else spec.size, np.float32)
        """(size,), whose untouched pages use no memory; of an Average (0,)."""
        self._versions: dict[int, int] = {}
        """Versions of held chunks, by their number in the parameter."""
        self._locks = [threading.Lock() for _ in range(_LOCK_COUNT)]

    def held(self, number: int) -> int | None:
        """Returns the version in which a chunk is held; None: it is not."""
        return self._versions.get(number)

    def held_versions(self, numbers: Sequence[int]) -> list[int]:
        """Returns the held versions of some chunks, for a WeightsFetch; empty if none is held."""
        found = [self._versions.get(number, -1) + 1 for number in numbers]
        return found if any(found) else []

    def forget(self) -> None:
        """Drops all chunks: the parameter's past may be another one."""
        self._versions.clear()

    def take(
        self,
        number: int,
        where: Slice,
        header: images.Weights,
        payload: Bytes,
        out: Float32,
        known: int | None = None,
    ) -> int:
        """Takes a chunk, and fills `out` with it or with a later version that is here.

        `known` is the version that was held when the shard was asked.

        Returns the version of `out`. CorruptChunkError: it was damaged, or does not go on from the
        held version; a repeated call has all of it. ArgumentError: another chunk, or no known form.
        """
        form = header.image.form
        if form in (pb.IMAGE_FORM_CHANGE, pb.IMAGE_FORM_SAME):
            return self._change(number, where, header, payload, out)
        if form != pb.IMAGE_FORM_WHOLE and not (self._is_mean and form == pb.IMAGE_FORM_MEAN):
            raise CorruptChunkError(
                f"chunk {number} has the image form {form}, and a parameter "
                f"{'that averages' if self._is_mean else 'with weights'} has none such; run the "
                "same version everywhere"
            )
        images.read(self._codec, header, payload, self._context, where, out)
        version = int(header.version)
        if self._is_mean:  # nothing goes on from it
            return version
        with self._locks[number % _LOCK_COUNT]:
            held = self._versions.get(number)
            if held is not None and held > version and held != known:  # another call has taken it
                np.copyto(out, self._values[where.offset : where.stop])
                return held
            self._versions.pop(number, None)  # until it is whole
            self._values[where.offset : where.stop] = out
            self._versions[number] = version
        return version

    def _change(
        self, number: int, where: Slice, header: images.Weights, payload: Bytes, out: Float32
    ) -> int:
        changes = images.read_changes(self._codec, header, payload, self._context, where)
        base, version = int(header.image.base_version), int(header.version)
        with self._locks[number % _LOCK_COUNT]:
            held = self._versions.get(number)
            if held is None or held < base:
                raise CorruptChunkError(
                    f"chunk {number} changes the image of version {base}, and this worker holds "
                    f"{'none' if held is None else f'version {held}'} of it; call again"
                )
            values = self._values[where.offset : where.stop]
            np.copyto(out, values)
            if held > version:  # another call has taken a later one
                return held
            with np.errstate(all="ignore"):
                for change in changes[held - base :]:  # another call may have taken some
                    self._codec.codec.decode(change, scratch := np.empty_like(out))
                    np.add(out, scratch, out=out)
            found = crc32.iscsi(out.view(np.uint8).data)
            self._versions.pop(number)  # until it is whole
            if found != header.image.crc32c:
                raise CorruptChunkError(
                    f"chunk {number} of the image of version {version} has the CRC32C "
                    f"{found:#010x} here, and {header.image.crc32c:#010x} on its shard, which may "
                    "have lost its newest steps with its machine; call again"
                )
            if changes:
                np.copyto(values, out)
            self._versions[number] = version
            return version
