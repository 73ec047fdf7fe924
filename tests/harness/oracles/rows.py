"""The oracle of tables: rows as a dict, in NumPy float64, from the .proto's formulas alone.

It knows no shards, messages, codecs or threads: whole batches in, whole batches out.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import numpy.typing as npt

import shardwell

Float64 = npt.NDArray[np.float64]
_WORD = 2**64
_HALF = 2**32

OPTIMIZERS = {
    "sgd": shardwell.SGD(learning_rate=0.5),
    "sgd momentum": shardwell.SGD(
        learning_rate=0.1, momentum=0.9, dampening=0.25, weight_decay=0.01
    ),
    "sgd nesterov": shardwell.SGD(learning_rate=0.1, momentum=0.5, nesterov=True, clip_value=2.0),
    "adagrad": shardwell.Adagrad(
        learning_rate=0.1, initial_accumulator=0.1, weight_decay=0.01, clip_value=3.0
    ),
    "row-wise adagrad": shardwell.RowWiseAdagrad(learning_rate=0.1, weight_decay=0.01),
    "adam": shardwell.Adam(learning_rate=0.01, weight_decay=0.01),
    "adamw": shardwell.AdamW(learning_rate=0.01, weight_decay=0.1, clip_value=1.5),
    "ftrl": shardwell.FTRL(learning_rate=0.5, beta=1.0, l1=0.3, l2=0.1),
}


class ModelRows:
    """One table."""

    def __init__(
        self,
        dim: int,
        optimizer: Any,
        *,
        initializer: Any = None,
        worker_count: int = 1,
        mode: str = "sync",
    ) -> None:
        self.rows: dict[int, Float64] = {}
        self.version = 0
        self.learning_rate = optimizer.learning_rate
        self._dim = dim
        self._rule = optimizer
        self._initializer = initializer or shardwell.Zeros()
        self._worker_count = worker_count if mode == "sync" else 1
        self._is_sync = mode == "sync"
        self._state: dict[int, dict[str, Any]] = {}
        self._last_steps: dict[int, int] = {}
        self._open_step: list[tuple[dict[int, Float64], int]] = []

    def put(self, ids: Any, gradients: npt.ArrayLike, sample_count: int = 1) -> None:
        """Adds a worker's gradients to the open step; the last one closes it."""
        batch: dict[int, Float64] = {}
        values = np.array(gradients, np.float64).reshape(-1, self._dim)
        for key, gradient in zip(_keys(ids), values, strict=True):
            batch[key] = batch.get(key, 0.0) + gradient
        if self._is_sync and not sample_count:
            batch = {}
        self._open_step.append((batch, sample_count if self._is_sync else 1))
        if len(self._open_step) == self._worker_count:
            total = sum(count for _, count in self._open_step)
            step, self._open_step = self._open_step, []
            for key in {key for batch, _ in step for key in batch}:
                found = sum(count * batch[key] for batch, count in step if key in batch)
                self._update(key, found / total)
                self._last_steps[key] = self.version
            self.version += 1

    def get(self, ids: Any) -> Float64:
        """The rows, in the order of the ids and their shape."""
        keys = _keys(ids)
        rows = [self.rows[key] if key in self.rows else self.initial(key) for key in keys]
        return np.array(rows, np.float64).reshape(*np.shape(ids), self._dim)

    def evict(self, older_than_step: int) -> int:
        """Forgets rows; how many."""
        old = [key for key, step in self._last_steps.items() if step < older_than_step]
        for key in old:
            del self.rows[key], self._state[key], self._last_steps[key]
        return len(old)

    def initial(self, key: int) -> Float64:
        """A row before its first gradient."""
        rule = self._initializer
        if isinstance(rule, shardwell.Zeros):
            return np.zeros(self._dim)
        units = np.array([_unit(rule.seed, key, column) for column in range(self._dim)])
        if isinstance(rule, shardwell.Uniform):
            return rule.low + (rule.high - rule.low) * units
        normal = statistics.NormalDist()
        return rule.mean + rule.std * np.array([normal.inv_cdf(unit) for unit in units])

    def _update(self, key: int, gradient: Float64) -> None:
        if key not in self.rows:
            self.rows[key], self._state[key] = self.initial(key), {"count": 0}
        self._state[key]["count"] += 1
        rule = self._rule
        if rule.clip_value > 0:
            gradient = np.clip(gradient, -rule.clip_value, rule.clip_value)
        apply = getattr(self, f"_{type(rule).__name__.lower()}")
        self.rows[key] = apply(rule, self.rows[key], gradient, self._state[key])

    def _sgd(self, rule: Any, w: Float64, g: Float64, state: dict[str, Any]) -> Float64:
        g = g + rule.weight_decay * w
        if rule.momentum:
            m = g
            if "m" in state:
                m = rule.momentum * state["m"] + (1 - rule.dampening) * g
            state["m"] = m
            g = g + rule.momentum * m if rule.nesterov else m
        return w - self.learning_rate * g

    def _adagrad(self, rule: Any, w: Float64, g: Float64, state: dict[str, Any]) -> Float64:
        g = g + rule.weight_decay * w
        state["a"] = state.get("a", rule.initial_accumulator) + g * g
        return w - self.learning_rate * g / (np.sqrt(state["a"]) + rule.epsilon)

    def _rowwiseadagrad(self, rule: Any, w: Float64, g: Float64, state: dict[str, Any]) -> Float64:
        g = g + rule.weight_decay * w
        state["a"] = state.get("a", rule.initial_accumulator) + np.mean(g * g)
        return w - self.learning_rate * g / (np.sqrt(state["a"]) + rule.epsilon)

    def _adam(self, rule: Any, w: Float64, g: Float64, state: dict[str, Any]) -> Float64:
        return w - self._adam_step(rule, g + rule.weight_decay * w, state)

    def _adamw(self, rule: Any, w: Float64, g: Float64, state: dict[str, Any]) -> Float64:
        w = w - self.learning_rate * rule.weight_decay * w
        return w - self._adam_step(rule, g, state)

    def _adam_step(self, rule: Any, g: Float64, state: dict[str, Any]) -> Float64:
        state["m"] = rule.beta1 * state.get("m", 0.0) + (1 - rule.beta1) * g
        state["v"] = rule.beta2 * state.get("v", 0.0) + (1 - rule.beta2) * g * g
        m = state["m"] / (1 - rule.beta1 ** state["count"])
        v = state["v"] / (1 - rule.beta2 ** state["count"])
        return self.learning_rate * m / (np.sqrt(v) + rule.epsilon)

    def _ftrl(self, rule: Any, w: Float64, g: Float64, state: dict[str, Any]) -> Float64:
        n, z = state.get("n", np.zeros(self._dim)), state.get("z", np.zeros(self._dim))
        s = (np.sqrt(n + g * g) - np.sqrt(n)) / self.learning_rate
        z, n = z + g - s * w, n + g * g
        state["n"], state["z"] = n, z
        scale = (rule.beta + np.sqrt(n)) / self.learning_rate + rule.l2
        return np.where(np.abs(z) <= rule.l1, 0.0, -(z - np.sign(z) * rule.l1) / scale)


def _keys(ids: Any) -> list[int]:
    return [int(key) for key in np.asarray(ids, np.int64).reshape(-1)]


def _unit(seed: int, key: int, column: int) -> float:
    """The number in (0, 1) that a value is made of."""
    s = _mix((_mix((seed + 0x9E3779B97F4A7C15) % _WORD) + key) % _WORD)
    x = (s % _HALF + column * 0x9E3779B9) % _HALF ^ s >> 32
    x = (x ^ x >> 16) * 0x21F0AAAD % _HALF
    x = (x ^ x >> 15) * 0x735A2D97 % _HALF
    x ^= x >> 15
    return ((x >> 8) + 0.5) / 2**24


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % _WORD
    return x ^ x >> 31
