"""The oracle: a parameter server as a dict, in NumPy float64, from the definitions alone.

It knows no slices, chunks, codecs or threads. Update rules are written from the .proto's formulas
and the papers, one whole vector at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


class ModelParameter:
    """One parameter: whole vectors in, whole vectors out."""

    def __init__(
        self, weights: npt.ArrayLike, optimizer: Any, *, worker_count: int = 1, mode: str = "sync"
    ) -> None:
        self.weights: Float64 = np.array(weights, np.float64)
        self.version = 0
        self.learning_rate = getattr(optimizer, "learning_rate", 0.0)
        self._optimizer = optimizer
        self._worker_count = 1 if mode == "async" else worker_count
        self._is_sync = mode == "sync"
        self._open_step: dict[str, tuple[Float64, int]] = {}
        self._state: dict[str, Any] = {}

    def put(self, worker_id: str, gradient: npt.ArrayLike, sample_count: int = 1) -> None:
        """Adds a worker's gradient to the open step; the last one closes it."""
        assert worker_id not in self._open_step, "a worker has one gradient a step"
        self._open_step[worker_id] = (np.array(gradient, np.float64), sample_count)
        if len(self._open_step) == self._worker_count:
            contributions = list(self._open_step.values())
            self._open_step = {}
            self._update(self._mean(contributions))

    def _mean(self, contributions: list[tuple[Float64, int]]) -> Float64 | None:
        """None: no gradient has any weight."""
        if not self._is_sync:
            return contributions[0][0]
        total = sum(count for _, count in contributions)
        if total == 0:
            return None
        weighted = [gradient * count for gradient, count in contributions]
        return np.sum(weighted, axis=0) / total

    def _update(self, gradient: Float64 | None) -> None:
        self.version += 1
        rule = self._optimizer
        if gradient is None:
            if type(rule).__name__ != "Average":
                return
            gradient = np.zeros_like(self.weights)
        if rule.clip_value > 0:
            gradient = np.clip(gradient, -rule.clip_value, rule.clip_value)
        getattr(self, f"_{type(rule).__name__.lower()}")(rule, gradient)

    def _decayed(self, rule: Any, gradient: Float64) -> Float64:
        return gradient + rule.weight_decay * self.weights

    def _average(self, rule: Any, gradient: Float64) -> None:
        self.weights = gradient

    def _sgd(self, rule: Any, gradient: Float64) -> None:
        g = self._decayed(rule, gradient)
        if rule.momentum:
            if self.version == 1:
                m = g
            else:
                before = self._state.get("m", np.zeros_like(g))  # none, after a step of no samples
                m = rule.momentum * before + (1 - rule.dampening) * g
            self._state["m"] = m
            g = g + rule.momentum * m if rule.nesterov else m
        self.weights = self.weights - self.learning_rate * g

    def _adagrad(self, rule: Any, gradient: Float64) -> None:
        g = self._decayed(rule, gradient)
        a = self._state.get("a", np.full_like(g, rule.initial_accumulator)) + g * g
        self._state["a"] = a
        self.weights = self.weights - self.learning_rate * g / (np.sqrt(a) + rule.epsilon)

    def _rmsprop(self, rule: Any, gradient: Float64) -> None:
        g = self._decayed(rule, gradient)
        a = rule.decay * self._state.get("a", np.zeros_like(g)) + (1 - rule.decay) * g * g
        self._state["a"] = a
        v = g / (np.sqrt(a) + rule.epsilon)
        if rule.momentum:
            v = rule.momentum * self._state.get("m", np.zeros_like(g)) + v
            self._state["m"] = v
        self.weights = self.weights - self.learning_rate * v

    def _adam(self, rule: Any, gradient: Float64) -> None:
        self._adam_step(rule, self._decayed(rule, gradient))

    def _adamw(self, rule: Any, gradient: Float64) -> None:
        self.weights = self.weights - self.learning_rate * rule.weight_decay * self.weights
        self._adam_step(rule, gradient)

    def _adam_step(self, rule: Any, g: Float64) -> None:
        zeros = np.zeros_like(g)
        m = rule.beta1 * self._state.get("m", zeros) + (1 - rule.beta1) * g
        v = rule.beta2 * self._state.get("v", zeros) + (1 - rule.beta2) * g * g
        self._state.update(m=m, v=v)
        m_hat = m / (1 - rule.beta1**self.version)
        v_hat = v / (1 - rule.beta2**self.version)
        self.weights = self.weights - self.learning_rate * m_hat / (np.sqrt(v_hat) + rule.epsilon)


def integer_gradient(worker_index: int, step: int, size: int, *, high: int = 8) -> npt.NDArray[Any]:
    """Small whole numbers that depend on worker and step alone: a worker can repeat them."""
    generator = np.random.default_rng([worker_index, step, size])
    return generator.integers(-high, high + 1, size).astype(np.float32)
