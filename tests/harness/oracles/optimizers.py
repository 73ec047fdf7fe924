"""The optimizers of types.proto in float64, and how the tests run the real ones beside them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shardwell import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Average,
    Optimizer,
    RMSProp,
    RowWiseAdagrad,
)
from shardwell.numerics.codec import Float32
from shardwell.numerics.update_rules import UpdateRule

Float64 = npt.NDArray[np.float64]

OPTIMIZERS: dict[str, Optimizer] = {
    "average": Average(),
    "average, clip": Average(clip_value=0.75),
    "sgd": SGD(learning_rate=0.1),
    "sgd, decay": SGD(learning_rate=0.1, weight_decay=0.3),
    "sgd, clip": SGD(learning_rate=0.1, clip_value=0.5),
    "sgd, momentum": SGD(learning_rate=0.05, momentum=0.9),
    "sgd, dampening": SGD(learning_rate=0.1, momentum=0.7, dampening=0.4),
    "sgd, full dampening": SGD(learning_rate=0.1, momentum=0.5, dampening=1.0),
    "sgd, dampening without momentum": SGD(learning_rate=0.1, dampening=0.4),
    "sgd, nesterov": SGD(learning_rate=0.05, momentum=0.9, nesterov=True),
    "sgd, all": SGD(
        learning_rate=0.05, momentum=0.8, nesterov=True, weight_decay=0.1, clip_value=1.0
    ),
    "sgd, dampening, decay": SGD(
        learning_rate=0.05, momentum=0.8, dampening=0.25, weight_decay=0.1
    ),
    "sgd, rate 0": SGD(learning_rate=0.0, momentum=0.5),
    "adagrad": Adagrad(learning_rate=0.1),
    "adagrad, all": Adagrad(
        learning_rate=0.1,
        epsilon=1e-3,
        initial_accumulator=0.5,
        weight_decay=0.2,
        clip_value=1.0,
    ),
    "rms_prop": RMSProp(learning_rate=0.01),
    "rms_prop, all": RMSProp(
        learning_rate=0.01,
        decay=0.9,
        epsilon=1e-3,
        momentum=0.6,
        weight_decay=0.2,
        clip_value=1.0,
    ),
    "rms_prop, decay 0": RMSProp(learning_rate=0.01, decay=0.0, epsilon=1e-2),
    "adam": Adam(learning_rate=0.01),
    "adam, all": Adam(
        learning_rate=0.02,
        beta1=0.8,
        beta2=0.95,
        epsilon=1e-3,
        weight_decay=0.2,
        clip_value=1.0,
    ),
    "adam, betas 0": Adam(learning_rate=0.01, beta1=0.0, beta2=0.0, epsilon=1e-2),
    "adam_w": AdamW(learning_rate=0.01),
    "adam_w, all": AdamW(
        learning_rate=0.05,
        beta1=0.85,
        beta2=0.9,
        epsilon=1e-4,
        weight_decay=0.3,
        clip_value=2.0,
    ),
    "adam_w, no decay": AdamW(learning_rate=0.01, weight_decay=0.0),
}


class Oracle:
    """One parameter, or one row, under one optimizer, as the .proto's formulas read."""

    def __init__(self, optimizer: Optimizer, weights: Float32) -> None:
        self.optimizer = optimizer
        self.weights: Float64 = weights.astype(np.float64)
        self._count = 0
        self._m: Float64 = np.zeros_like(self.weights)
        self._a: Float64 = np.full_like(
            self.weights, getattr(optimizer, "initial_accumulator", 0.0)
        )

    def update(self, gradient: Float32, learning_rate: float) -> None:
        g, o, w = gradient.astype(np.float64), self.optimizer, self.weights
        self._count += 1
        if o.clip_value:
            g = np.minimum(np.maximum(g, -o.clip_value), o.clip_value)
        if isinstance(o, Average):
            self.weights = g
            return
        if isinstance(o, FTRL):
            self._follow_the_regularized_leader(o, g, learning_rate)
            return
        if isinstance(o, AdamW):
            w = w - learning_rate * o.weight_decay * w
        else:
            g = g + o.weight_decay * w  # type: ignore[attr-defined]
        self.weights = w - learning_rate * self._direction(g)

    def _direction(self, g: Float64) -> Float64:
        match self.optimizer:
            case SGD() as o:
                if not o.momentum:
                    return g
                first = self._count == 1
                self._m = g if first else o.momentum * self._m + (1 - o.dampening) * g
                return g + o.momentum * self._m if o.nesterov else self._m
            case Adagrad() as o:
                self._a = self._a + g * g
                return g / (np.sqrt(self._a) + o.epsilon)
            case RowWiseAdagrad() as o:
                self._a = self._a + (g * g).sum() / g.size
                return g / (np.sqrt(self._a) + o.epsilon)
            case RMSProp() as o:
                self._a = o.decay * self._a + (1 - o.decay) * g * g
                v = g / (np.sqrt(self._a) + o.epsilon)
                self._m = o.momentum * self._m + v
                return self._m if o.momentum else v
            case Adam() | AdamW() as o:
                self._m = o.beta1 * self._m + (1 - o.beta1) * g
                self._a = o.beta2 * self._a + (1 - o.beta2) * g * g
                m = self._m / (1 - o.beta1**self._count)
                a = self._a / (1 - o.beta2**self._count)
                return m / (np.sqrt(a) + o.epsilon)
        raise TypeError(self.optimizer)

    def _follow_the_regularized_leader(self, o: FTRL, g: Float64, learning_rate: float) -> None:
        n, self._a = self._a, self._a + g * g
        s = (np.sqrt(self._a) - np.sqrt(n)) / learning_rate
        z = self._m = self._m + g - s * self.weights
        divisor = (o.beta + np.sqrt(self._a)) / learning_rate + o.l2
        kept = np.abs(z) > o.l1
        self.weights = np.zeros_like(z)
        self.weights[kept] = (-(z - np.sign(z) * o.l1))[kept] / divisor[kept]


def gradients_of(count: int, size: int, seed: int = 0) -> list[Float32]:
    """Gradients with zeros, both signs, and magnitudes from thousandths to tens."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        gradient = random.standard_normal(size) * np.exp2(random.integers(-10, 4, size))
        gradient[random.random(size) < 0.1] = 0.0
        made.append(gradient.astype(np.float32))
    return made


def run(
    optimizer: Optimizer,
    weights: Float32,
    gradients: Iterable[Float32],
    *,
    rates: Sequence[float] | None = None,
    cuts: Sequence[int] = (),
) -> tuple[Float32, tuple[Float32, ...]]:
    """Weights and state after all gradients, applied block by block between `cuts`."""
    rule = UpdateRule(optimizer)
    weights = weights.copy()
    slots = tuple(np.full(weights.size, start, np.float32) for start in rule.initial_slots)
    edges = [0, *sorted(cuts), weights.size]
    for index, gradient in enumerate(gradients):
        rate = rates[index] if rates is not None else rule.learning_rate or 0.0
        for start, stop in itertools.pairwise(edges):
            rule.apply(
                weights[start:stop],
                gradient[start:stop].copy(),
                tuple(slot[start:stop] for slot in slots),
                update_count=index + 1,
                learning_rate=rate,
            )
    return weights, slots
