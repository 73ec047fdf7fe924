"""Working memory of a thread, one block a purpose, whatever it works on."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

BLOCK_ELEMENT_COUNT = 128 * 1024
"""Elements that NumPy works on at a time: 512 KiB of float32, so that a block stays in a
second-level cache from one operation to the next and calls cost little beside it. Measured in
benchmarks/codec.py: a fifth faster than 256 KiB, and 1 MiB adds little."""


class Scratch:
    """The working memory for one thread: float32 blocks, reused from call to call."""

    def __init__(self) -> None:
        self.values = np.empty(BLOCK_ELEMENT_COUNT, np.float32)
        self.gradient = np.empty(BLOCK_ELEMENT_COUNT, np.float32)
        self._temporaries: dict[int, npt.NDArray[np.float32]] = {}
        self._payload = np.empty(0, np.uint8)

    def temporary(self, place: int) -> npt.NDArray[np.float32]:
        """A block for a place of `elementwise`, which has no meaning between two runs."""
        if place not in self._temporaries:
            self._temporaries[place] = np.empty(BLOCK_ELEMENT_COUNT, np.float32)
        return self._temporaries[place]

    def payload(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """The memory for a copy of a payload, until the next one is taken."""
        if self._payload.size < size_bytes:
            self._payload = np.empty(size_bytes, np.uint8)
        return self._payload[:size_bytes]


# A global, because memory for each parameter and thread would grow with their product.
_OF_THREAD = threading.local()


def thread_scratch() -> Scratch:
    """The calling thread's; it is freed with the thread."""
    scratch: Scratch | None = getattr(_OF_THREAD, "value", None)
    if scratch is None:
        scratch = _OF_THREAD.value = Scratch()
    return scratch
