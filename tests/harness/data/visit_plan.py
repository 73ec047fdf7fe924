"""A fixed crew whose weights count how often each sample has counted."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

import shardwell

NAME = "visits"
SIGN = shardwell.Adam(1.0, beta1=0.0, beta2=0.0)
"""Without memory Adam's step is the gradient's sign, whatever a step's mean divides by."""
CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class VisitPlan:
    """A parameter with an element for each sample in even epochs and one in odd ones, in `copies`.

    A gradient has -worker_count at the samples of its batch; SGD of rate 1 takes the mean. Where
    steps are skipped, the mean is of fewer, so `SIGN` moves an element by 1 instead.
    """

    length: int = 1000
    batch_size: int = 8
    worker_count: int = 3
    copies: int = 2
    skip_chance: float = 0.0
    """The chance of a step without a gradient, whose batch is given back."""

    def train(
        self,
        target: str,
        worker_index: int,
        epochs: int,
        skip_chance: float = 0.0,
        say: Callable[[str], None] = partial(print, flush=True),  # noqa: B008
    ) -> None:
        """A worker: goes on where the crew is, up to so many epochs; says "step N" after each."""
        samples = shardwell.Samples(self.length, self.batch_size, seed=3)
        with self.opened(target, f"w{worker_index}") as net:
            net.init(np.zeros(net.size, np.float32))
            for batch in net.batches(samples, epochs=epochs):
                step = net.next_step
                skips = random.Random(f"{worker_index} {step}").random() < skip_chance
                gradient = np.zeros((self.copies, 2, self.length), np.float32)
                positions = np.concatenate([np.arange(*each) for each in batch.ranges])
                where = positions // self.length % 2, batch.indices
                gradient[:, *where] = -float(self.worker_count)
                net.exchange(None if skips else gradient.reshape(-1), batch=batch)
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
                NAME,
                size=2 * self.copies * self.length,
                optimizer=SIGN if self.skip_chance else shardwell.SGD(1.0),
                worker_count=self.worker_count,
                codec="fp32",
            )

    def visits(self, stored: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(copies, length): how often each sample has counted."""
        found: npt.NDArray[np.float32] = stored.reshape(self.copies, 2, self.length).sum(axis=1)
        return found.round(3)
