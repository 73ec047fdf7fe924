"""A parameter server written by hand for one model, and the check of its result.

The first half of the ranks are workers, the others servers, each with a slice of the weights. A
worker sends its gradient, piece by piece, and takes the weights into its own array; a server adds
up what came, takes a step of SGD, and sends its piece back while the next ones come. Float32; no
checks, and nothing that is lost comes again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from turns import Bench, Order

Array = npt.NDArray[np.float32]
LEARNING_RATE = 0.01
BLOCK = 2**16


class HandWritten(Bench):
    """One rank. See Bench.

    Args:
        rank: Its own.
        size: Number of all ranks, workers and servers; even.
        megabytes: Float32 of the whole model.
    """

    piece_size = 2**18
    """Elements; of 2**16 to a whole slice what is fastest."""

    def __init__(self, rank: int, size: int, megabytes: int) -> None:
        self._half = size // 2
        self._is_worker = rank < self._half
        self._step_count = 0
        slice_size = megabytes * 10**6 // 4 // self._half
        rng = np.random.default_rng(0)
        self._pattern = rng.standard_normal(BLOCK, np.float32) * np.float32(0.01)
        self._cuts = [
            slice(start, min(start + self.piece_size, slice_size))
            for start in range(0, slice_size, self.piece_size)
        ]
        if self._is_worker:
            own = np.tile(self._pattern, -(-slice_size // BLOCK))[:slice_size]
            own *= np.float32(rank + 1)
            self._gradients = [own.copy() for _ in range(self._half)]
            self._weights = [np.zeros(slice_size, np.float32) for _ in range(self._half)]
        else:
            self._gradients = [np.zeros(slice_size, np.float32) for _ in range(self._half)]
            self._weights = [np.zeros(slice_size, np.float32)]

    def send(self, array: Array, rank: int, piece: int) -> Any:
        """Begins to send; something to wait for."""
        raise NotImplementedError

    def receive(self, array: Array, rank: int, piece: int) -> Any:
        """Begins to receive; something to wait for."""
        raise NotImplementedError

    def wait(self, pending: list[Any]) -> None:
        """Waits for all of these."""
        raise NotImplementedError

    def prepare(self, order: Order) -> None:
        """Nothing."""

    def act(self) -> None:
        if self._is_worker:
            self._exchange()
        else:
            self._serve()
        self._step_count += 1

    def finish(self) -> dict[str, Any]:
        if self._is_worker:
            mean = self._pattern * np.float32((self._half + 1) / 2)
            expected = mean * np.float32(-LEARNING_RATE * self._step_count)
            for found in self._weights:
                assert np.allclose(found[:BLOCK], expected[: found.size], rtol=1e-3, atol=1e-6)
        return {}

    def _exchange(self) -> None:
        pending = []
        for do, arrays in ((self.receive, self._weights), (self.send, self._gradients)):
            for piece, cut in enumerate(self._cuts):
                for server, array in enumerate(arrays):
                    pending.append(do(array[cut], self._half + server, piece))
        self.wait(pending)

    def _serve(self) -> None:
        coming = [
            [
                self.receive(array[cut], worker, piece)
                for worker, array in enumerate(self._gradients)
            ]
            for piece, cut in enumerate(self._cuts)
        ]
        going = []
        total, *others = self._gradients
        factor = np.float32(LEARNING_RATE / self._half)
        for piece, cut in enumerate(self._cuts):
            self.wait(coming[piece])
            weights = self._weights[0][cut]
            for other in others:
                total[cut] += other[cut]
            total[cut] *= factor
            weights -= total[cut]
            going += [self.send(weights, worker, piece) for worker in range(self._half)]
        self.wait(going)
