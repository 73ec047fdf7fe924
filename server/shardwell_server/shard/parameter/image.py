"""The image of a chunk's weights in a codec of blocks, kept so that rounding loses nothing.

Of weights: the values that all readers of a version hold. An update brings them as near to the
weights as its codec can; the next one starts from there, so what rounding took off one change is
in the next. Of an Average: what rounding took off its means, which is added to the next one; the
weights are then what all decode. A step without samples gives zeros, and no rest.

The array lies in the storage beside the optimizer's, is changed by the same transition, and so is
whole after a kill. The last changes are in memory alone: after a restart the image is sent whole.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from fastcrc import crc32

from shardwell.numerics.codec import BlockCodec, Bytes, Float32
from shardwell.wire.images import CHANGE_COUNT_MAX

_PEAK_SAFE = 2.0**110
"""A change below it rounds off less than half the spacing of float32's largest values, so that the
image of finite weights is finite."""


class ChunkImage:
    """The image of one chunk, whose values are in the storage; callers hold the chunk's lock."""

    def __init__(
        self, values: Float32, weights: Float32, codec: BlockCodec, *, is_mean: bool
    ) -> None:
        self.values = values
        self._codec = codec
        self.is_mean = is_mean
        self._changes: deque[tuple[int, Bytes]] = deque(maxlen=CHANGE_COUNT_MAX)
        """Versions and the payloads that led to them, in order."""
        self._weights = weights
        self._crc: tuple[int, int] | None = None
        """A version, and its CRC."""
        self._payload: Bytes | None = None
        self._is_finite = True
        self._has_samples = True

    @property
    def sent(self) -> Float32:
        """The values to send where they have to be whole."""
        return self._weights if self.is_mean else self.values

    def crc(self, version: int) -> int:
        """Returns the CRC32C of `sent` in the version that it has now."""
        if self._crc is None or self._crc[0] != version:
            self._crc = version, crc32.iscsi(self.sent.view(np.uint8).data)
        return self._crc[1]

    def changes(self, base_version: int, version: int) -> list[Bytes]:
        """Returns the payloads from one version to another, in order; none if one is missing."""
        found = [payload for each, payload in self._changes if base_version < each <= version]
        return found if len(found) == version - base_version else []

    def begin_first(self) -> None:
        """Begins with the first weights, exactly."""
        self.values[:] = 0 if self.is_mean else self._weights
        self._changes.clear()
        self._crc = None

    # An update: begin, block by block, end.

    def begin(self, *, has_samples: bool = True) -> None:
        """Begins an update of the weights; without samples a mean is 0."""
        self._crc, self._has_samples = None, has_samples
        self._payload = np.empty(self._codec.encoded_bytes(self.values.size), np.uint8)
        self._is_finite = True

    def follow(self, start: int, stop: int) -> None:
        """Follows changed weights, elements [start, stop): whole blocks of the codec."""
        assert self._payload is not None
        weights, values = self._weights[start:stop], self.values[start:stop]
        arithmetic, payload = self._codec.arithmetic, self._payload
        with np.errstate(all="ignore"):  # what overflows is found where weights are encoded
            wanted = weights + values if self.is_mean else weights - values
            if not self._has_samples:
                wanted = weights.copy()
            peak = arithmetic.quantize(wanted, payload, start)
            if not np.isfinite(peak):
                self._is_finite = False
                values[:] = 0 if self.is_mean else weights
            elif self.is_mean:
                arithmetic.dequantize(payload, weights, start)
                if self._has_samples:
                    np.subtract(wanted, weights, out=values)
            else:
                arithmetic.dequantize(payload, wanted, start)
                np.add(values, wanted, out=values)
                if peak >= _PEAK_SAFE and not np.isfinite(values).all():
                    self._is_finite = False
                    values[:] = weights

    def end(self, version: int) -> None:
        """Ends the update that led to a version."""
        assert self._payload is not None
        if self._is_finite:
            while self._changes and self._changes[-1][0] >= version:  # it was not committed
                self._changes.pop()
            self._changes.append((version, self._payload))
        else:
            self._changes.clear()
        self._payload = None
