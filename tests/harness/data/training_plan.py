"""What the workers of a test train: whole numbers as gradients, so that any order adds up alike."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

import shardwell
from harness.oracles.parameter import integer_gradient
from shardwell.specs.parameter import CodecName, ModeName

Float32 = npt.NDArray[np.float32]
SGD = shardwell.SGD(learning_rate=0.5)
CALL_TIMEOUT_S = 60.0
_PATTERN_SIZE = 4099
"""Prime, so that no two chunks get the same."""
_PAUSE_S = 0.01
RATE_STEP_COUNT = 8
"""With `changes_rate`, every so many steps comes another learning rate."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A parameter named "model", and what each worker does with it."""

    size: int = 3000
    worker_count: int = 2
    mode: ModeName = "sync"
    codec: CodecName = "fp16"
    optimizer: shardwell.Optimizer = SGD
    verb: str = "exchange"
    """Or "put_get": put_gradient, then get_weights of that step; or "pieces": begin_exchange, and a
    pause between what is ready first and the rest, so that kills fall into the middle of steps."""
    depends: bool = False
    """Whether gradients depend on all weights: then a worker that reads parts of two versions sends
    others. Synchronous mode."""
    changes_rate: bool = False
    """Worker 0 also changes the learning rate, as part of some of its steps."""

    def train(
        self,
        target: str,
        worker_index: int,
        last_step: int,
        say: Callable[[str], None] = partial(print, flush=True),  # noqa: B008
    ) -> None:
        """A worker: goes on where it was, and says "step N" after each."""
        with self.opened(target, f"w{worker_index}") as model:
            model.init(self.first_weights())
            say(f"from {model.next_step}")
            weights = model.get_weights(min_version=model.next_step) if self.depends else None
            while model.next_step <= last_step:
                step = model.next_step
                if self.changes_rate and worker_index == 0 and step % RATE_STEP_COUNT == 0:
                    model.set_learning_rate(self.rate(step))
                weights = self._step(model, worker_index, step, weights)
                say(f"step {step}")

    @contextlib.contextmanager
    def opened(self, target: str, worker_id: str) -> Iterator[shardwell.Parameter]:
        """The parameter, as a worker has it."""
        with shardwell.connect(
            target,
            worker_id=worker_id,
            timeout_s=CALL_TIMEOUT_S,
            connect_timeout_s=CALL_TIMEOUT_S,
        ) as client:
            yield client.parameter(
                "model",
                size=self.size,
                optimizer=self.optimizer,
                worker_count=self.worker_count,
                codec=self.codec,
                mode=self.mode,
            )

    def _step(
        self, model: shardwell.Parameter, worker_index: int, step: int, weights: Float32 | None
    ) -> Float32:
        gradient = self.gradient(worker_index, step)
        if self.depends:
            assert weights is not None
            gradient += zlib.crc32(weights.tobytes()) % 7 - 3
        sample_count = self.sample_count(worker_index)
        if self.verb == "exchange":
            return model.exchange(gradient, sample_count=sample_count)
        if self.verb == "pieces":
            begun = model.begin_exchange(gradient, sample_count=sample_count)
            for where in model.slices:
                begun.ready(where.offset, where.offset + where.size // 2)
            threading.Event().wait(_PAUSE_S)
            for where in model.slices:
                begun.ready(where.offset + where.size // 2, where.stop)
            return begun.finish()
        joined = model.put_gradient(gradient, sample_count=sample_count)
        assert joined == step
        return model.get_weights(min_version=step + 1 if self.mode == "sync" else 0)

    def gradient(self, worker_index: int, step: int) -> Float32:
        """Small whole numbers; a worker can repeat them. A pattern, made fast."""
        pattern = integer_gradient(worker_index, step, min(self.size, _PATTERN_SIZE))
        return np.resize(pattern, self.size)

    def sample_count(self, worker_index: int) -> int:
        """The last worker's makes the sum a power of two, by which division is exact."""
        if worker_index < self.worker_count - 1:
            return 1
        others = self.worker_count - 1
        return (1 << others.bit_length()) - others

    def rate(self, step: int) -> float:
        """Of a step: powers of two in turns."""
        if not self.changes_rate:
            return self.optimizer.learning_rate
        return 0.5 ** (step // RATE_STEP_COUNT % 4)

    def first_weights(self) -> Float32:
        """Whole numbers."""
        return (np.arange(self.size) % 7).astype(np.float32)
