"""Steps of a crew of workers in NumPy, whatever their options are: what is sent, counts and comes.

From the definitions alone, in float64; in float32 where a codec rounds. It knows no messages, locks
or files. Which elements of a gradient counted is given: each worker's outcome says it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.oracles.codec import bf16_bits
from harness.oracles.int8 import Float32, Int8Means, rounded
from harness.oracles.parameter import ModelParameter

Bools = npt.NDArray[np.bool_]


class Given(NamedTuple):
    """What one worker's gradient is for one step."""

    values: Float32
    """As the shards read them."""
    sample_count: int
    counted: Bools
    """By element."""


class Part(NamedTuple):
    """Elements that are updated alike."""

    where: slice
    rate_factor: float = 1.0
    rate_group: int = 0
    weight_decay: float | None = None
    is_frozen: bool = False


class CrewWorker:
    """What a worker makes of its gradients, and keeps of them."""

    def __init__(self, size: int, codec: str, *, carries: bool, clip: float, parts: Sequence[Part]):
        self._codec = codec.partition("+")[0]
        self._carries = carries
        self._clip = clip
        self._parts = parts
        self.residual: Float32 = np.zeros(size, np.float32)
        self.carried: Float32 = np.zeros(size, np.float32)
        self._offered: Float32 = self.residual

    def sent(self, gradient: Float32) -> Float32:
        """What the shards read of a gradient."""
        clipped = gradient * np.float32(clip_factor(gradient, self._clip, self._parts))
        self._offered = clipped + self.carried + self.residual
        return written(self._codec, self._offered)

    def settle(self, counted: Bools) -> None:
        """Notes which elements of what was sent last have counted."""
        if self._carries:
            self.carried = np.where(counted, np.float32(0), self._offered)
        if self._codec == "int8":
            late = np.float32(0) if self._carries else self.residual
            self.residual = np.where(counted, self._offered - rounded(self._offered), late)


class CrewWeights:
    """Weights and optimizer state of all shards.

    Args:
        first: The first weights.
        optimizer: The update rule.
        parts: All elements; of a part, the same workers count in each step.
        codec: The parameter's.
        clips_mean: Whether the mean is clipped by its norm, and not each gradient.
        reference_count: See `Elastic`; 0: it has no meaning.
        is_sync: Whether gradients are averaged.
    """

    def __init__(
        self,
        first: Float32,
        optimizer: Any,
        parts: Sequence[Part],
        *,
        codec: str,
        clips_mean: bool,
        reference_count: int = 0,
        is_sync: bool = True,
    ) -> None:
        self._parts = parts
        self._clip = optimizer.clip_norm if clips_mean else 0.0
        self._reference_count = reference_count
        self._is_sync = is_sync
        self._models = [ModelParameter(first[p.where], _rule_of(optimizer, p)) for p in parts]
        self._rate = getattr(optimizer, "learning_rate", 0.0)
        is_mean = type(optimizer).__name__ == "Average"
        self._means = [
            Int8Means(model.weights.size) if is_mean and codec == "int8" else None
            for model in self._models
        ]

    def forget(self) -> None:
        """Of an Average: goes on with what a checkpoint has of it, which is nothing."""
        self._means = [m and Int8Means(m.rest.size) for m in self._means]

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """(size,), new."""
        return np.concatenate([model.weights for model in self._models])

    def step(self, given: Sequence[Given], rate: Any = None) -> None:
        """Closes a step; with a rate, it is that of this step and later ones.

        Asynchronously it is one gradient, and the rate is its own.
        """
        of_step = self._rate if rate is None else rate
        if self._is_sync:
            self._rate = of_step
        factors = (1.0, *getattr(of_step, "factors", ()))
        means = [self._mean(part, given) for part in self._parts]
        whole = np.concatenate([mean for _, _, mean in means])
        factor = clip_factor(whole, self._clip, self._parts)
        by_part = zip(self._parts, self._models, self._means, means, strict=True)
        for part, model, int8, (count, total, mean) in by_part:
            own = float(of_step) * part.rate_factor
            own *= factors[part.rate_group] if len(factors) > 1 else 1.0
            if self._reference_count:
                own *= count / self._reference_count
            model.learning_rate = own
            if not part.is_frozen:
                model.put("all", mean * factor, total)
            if int8 is not None and total:
                model.weights = int8.update(model.weights.astype(np.float32)).astype(np.float64)

    def _mean(self, part: Part, given: Sequence[Given]) -> tuple[int, int, Any]:
        """How many counted for a part, their samples, and the mean: (size of the part,) float64."""
        here = []
        for each in given:
            counted = each.counted[part.where]
            assert counted.all() or not counted.any(), "elements of one chunk have one fate"
            if counted.any():
                here.append((each.values[part.where].astype(np.float64), each.sample_count))
        if not self._is_sync:
            ((values, _),) = here
            return 1, 1, values
        total = sum(count for _, count in here)
        zeros = np.zeros(part.where.stop - part.where.start)
        weighted = sum((values * count for values, count in here), zeros)
        return len(here), total, weighted / max(total, 1)


def clip_factor(gradient: Any, clip: float, parts: Sequence[Part]) -> float:
    """What a gradient is scaled with, to have that norm at most over all that is trained."""
    if not clip:
        return 1.0
    trained = [gradient[part.where].astype(np.float64) for part in parts if not part.is_frozen]
    norm = math.sqrt(sum(float(values @ values) for values in trained))
    return min(1.0, clip / (norm + 1e-6))


def written(codec: str, values: Float32) -> Float32:
    """Values as they are read after writing."""
    if codec == "int8":
        return rounded(values)
    if codec == "bf16":
        return (bf16_bits(values).astype(np.uint32) << 16).view(np.float32)
    if codec == "fp16":  # of which the scale leaves 11 bits of all that is not far below the peak
        mantissa, exponent = np.frexp(values)
        return np.ldexp(np.rint(mantissa * 2048) / np.float32(2048), exponent).astype(np.float32)
    return values


def cuts_of(size: int, shard_count: int, chunk_size: int, block_size: int) -> set[int]:
    """Where chunks begin, by the design's formula."""
    task, extra = divmod(-(-size // block_size), shard_count)
    starts = [(i * task + min(i, extra)) * block_size for i in range(shard_count)]
    ends = [*starts[1:], size]
    return {c for a, b in zip(starts, ends, strict=True) for c in range(a, b, chunk_size)}


def cut(parts: Sequence[Part], cuts: set[int]) -> list[Part]:
    """Parts that end where others begin, too."""
    found = []
    for part in parts:
        inside = sorted({c for c in cuts if part.where.start < c < part.where.stop})
        edges = [part.where.start, *inside, part.where.stop]
        found += [part._replace(where=slice(a, b)) for a, b in itertools.pairwise(edges)]
    return found


def _rule_of(optimizer: Any, part: Part) -> Any:
    if part.weight_decay is None:
        return optimizer
    return dataclasses.replace(optimizer, weight_decay=part.weight_decay)
