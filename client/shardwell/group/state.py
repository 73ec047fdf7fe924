"""The state that members of a group have in common, as a sequence of bytes that travels in pieces.

Two bytes travel as one float32, which is exact: so bits of any dtype arrive as they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwell.errors import ArgumentError
from shardwell.numerics.codec import Float32

_PIECE_SIZE_BYTES = 2**24
"""One call moves it: 32 MiB of float32."""


class SharedState:
    """The arrays of one member; views, written by `write` alone."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state must map names to arrays; got {type(state).__name__}")
        self.arrays = [_bytes_of(name, array) for name, array in state.items()]
        self.description = ", ".join(
            f"{name} {array.shape} {array.dtype}" for name, array in state.items()
        )
        self._digest = hashlib.blake2b(self.description.encode(), digest_size=32).digest()
        self.size_bytes = sum(array.size for array in self.arrays)

    @cached_property
    def _staged(self) -> npt.NDArray[np.uint8]:
        return np.empty(self.size_bytes, np.uint8)  # a member that has the state needs none

    def digest_words(self) -> Float32:
        """Names, shapes and dtypes, so that ranks can compare them; a copy."""
        return np.frombuffer(self._digest, "<u2").astype(np.float32)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """The begin and end of what each call moves."""
        for start in range(0, self.size_bytes, _PIECE_SIZE_BYTES):
            yield start, min(start + _PIECE_SIZE_BYTES, self.size_bytes)

    def words(self, start: int, stop: int) -> Float32:
        """The bytes from `start` to `stop`, two a number; a copy."""
        found = np.zeros(-(-(stop - start) // 2) * 2, np.uint8)
        for where, array in self._within(start, stop):
            found[where - start : where - start + array.size] = array
        return found.view("<u2").astype(np.float32)

    def take(self, start: int, words: Float32) -> None:
        """Keeps a piece apart, which `words` made of another member's arrays."""
        data = words.astype("<u2").view(np.uint8)
        stop = min(start + data.size, self.size_bytes)
        self._staged[start:stop] = data[: stop - start]

    def write(self) -> None:
        """Writes the pieces, all of which have been taken, to the arrays."""
        begin = 0
        for array in self.arrays:
            array[...] = self._staged[begin : begin + array.size]
            begin += array.size

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        begin = 0
        for array in self.arrays:
            first, last = max(start, begin), min(stop, begin + array.size)
            if first < last:
                yield first, array[first - begin : last - begin]
            begin += array.size


def _bytes_of(name: str, array: Any) -> npt.NDArray[np.uint8]:
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentError(f"state {name!r} must be a NumPy array of numbers; got {got}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ArgumentError(f"state {name!r} must be C-contiguous and writable; pass a copy of it")
    return array.reshape(-1).view(np.uint8)
