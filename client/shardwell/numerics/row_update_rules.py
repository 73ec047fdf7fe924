"""The optimizers of tables: rows, their mean gradients and their state, updated in place. Pure.

As `update_rules`, in float32, and out of its parts. The differences: a row has its own count
of updates, so that Adam corrects its bias by the row's count and momentum starts with the row's
first gradient; and two rules look at rows, RowWiseAdagrad and (because nothing else needs it) FTRL.

Invariant: a row comes out with the same bits whichever rows are updated with it, and in whatever
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwell.numerics.codec import Float32
from shardwell.numerics.elementwise import Operations, add_scaled, run
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT
from shardwell.numerics.update_rules import (
    FIRST_SLOT,
    GRADIENT,
    LARGEST,
    TEMPORARY,
    WEIGHTS,
    AnyAdam,
    Slots,
    clips_of,
    decay_add,
    follow_momentum,
    initial_slots_of,
    moments_of,
    powers,
    rule_of,
    square_into,
)
from shardwell.specs import optimizers

Counts: TypeAlias = npt.NDArray[np.int64]
"""(n,) int64: updates that each row has had, this one included."""


class _Rows(NamedTuple):
    weights: Float32
    gradients: Float32
    slots: Slots
    temporary: Float32
    counts: Counts

    def run(self, operations: Operations) -> None:
        arrays = (self.weights, self.gradients, self.temporary, *self.slots)
        of_elements = tuple(array.reshape(-1) for array in arrays)
        run(operations, of_elements, 0, self.weights.size)


_RowStep: TypeAlias = Callable[[_Rows, float], None]
"""(rows, learning_rate): weights and slots are updated, gradients and temporary overwritten."""


class RowUpdateRule:
    """An optimizer ready to run on rows; TypeError: it is none that knows rows."""

    def __init__(self, optimizer: optimizers.Optimizer) -> None:
        self._clips = clips_of(optimizer)
        self.initial_slots = initial_slots_of(optimizer)
        self._of_rows = _row_rule_of(optimizer)
        """None: it does not look at rows, and is the rule of whole parameters, without a count."""
        self._of_elements = rule_of(optimizer) if self._of_rows is None else None
        self.learning_rate: float = getattr(optimizer, "learning_rate", 0.0)

    def operations(self, learning_rate: float) -> Operations | None:
        """The operations that update rows value by value (update_rules.py); None: no such list."""
        if self._of_elements is None:
            return None
        return self._clips + self._of_elements(0, learning_rate)

    def apply(
        self,
        weights: Float32,
        gradients: Float32,
        slots: Slots,
        counts: Counts,
        learning_rate: float,
    ) -> None:
        """Updates rows once. Any thread may call; NaN and infinity go through without a warning.

        `weights`, `gradients` (overwritten) and each of `slots` are (n, dim) float32, C-contiguous;
        a slot of RowWiseAdagrad is (n, 1). `counts` are 1 at a row's first update, and so on.
        """
        assert all(rows.flags.c_contiguous for rows in (weights, gradients, *slots))
        operations = self.operations(learning_rate)
        if operations is not None:
            of_slots = [slot.reshape(-1) for slot in slots]
            arrays = (weights.reshape(-1), gradients.reshape(-1), None, *of_slots)
            run(operations, arrays, 0, weights.size)
            return
        assert self._of_rows is not None
        row_count, dim = weights.shape
        step = max(BLOCK_ELEMENT_COUNT // dim, 1)
        temporary = np.empty((min(step, row_count), dim), np.float32)
        with np.errstate(all="ignore"):
            for start in range(0, row_count, step):
                block = slice(start, start + step)
                gradient = gradients[block]
                rows = _Rows(
                    weights[block],
                    gradient,
                    tuple(slot[block] for slot in slots),
                    temporary[: len(gradient)],
                    counts[block],
                )
                rows.run(self._clips)
                self._of_rows(rows, learning_rate)


def _row_rule_of(optimizer: optimizers.Optimizer) -> _RowStep | None:
    match optimizer:
        case optimizers.SGD() if optimizer.momentum:
            return _sgd_with_momentum(optimizer)
        case optimizers.SGD() | optimizers.Adagrad():
            return None
        case optimizers.RowWiseAdagrad():
            return _row_wise_adagrad(optimizer)
        case optimizers.Adam() | optimizers.AdamW():
            return _adam(optimizer)
        case optimizers.FTRL():
            return _ftrl(optimizer)
    raise TypeError(f"no update rule for rows with {optimizer!r}")


def _sgd_with_momentum(spec: optimizers.SGD) -> _RowStep:
    grows = (
        *add_scaled(GRADIENT, WEIGHTS, spec.weight_decay),
        *decay_add(FIRST_SLOT, spec.momentum, GRADIENT, 1.0 - spec.dampening),
    )

    def step(rows: _Rows, rate: float) -> None:
        rows.run(grows)
        first = np.flatnonzero(rows.counts == 1)
        if first.size:
            rows.slots[0][first] = rows.gradients[first]
        rows.run(follow_momentum(spec, rate))

    return step


def _row_wise_adagrad(spec: optimizers.RowWiseAdagrad) -> _RowStep:
    # Not by einsum, which adds up long rows in another order when there are several.
    squares = (
        *add_scaled(GRADIENT, WEIGHTS, spec.weight_decay),
        square_into(TEMPORARY, GRADIENT),
    )

    def step(rows: _Rows, rate: float) -> None:
        rows.run(squares)
        sums = rows.slots[0].reshape(-1)
        mean = np.add.reduce(rows.temporary, axis=1)
        np.divide(mean, np.float32(rows.gradients.shape[1]), out=mean)
        np.add(sums, mean, out=sums)
        divisors = np.sqrt(sums)
        np.add(divisors, np.float32(spec.epsilon), out=divisors)
        np.divide(rows.gradients, divisors[:, np.newaxis], out=rows.gradients)
        rows.run(add_scaled(WEIGHTS, GRADIENT, -rate))

    return step


def _adam(spec: AnyAdam) -> _RowStep:
    averages = moments_of(spec)

    def step(rows: _Rows, rate: float) -> None:
        rows.run(averages(rate))
        temporary = rows.temporary
        corrections = 1.0 / np.sqrt(1.0 - powers(spec.beta2, rows.counts))
        rates = -rate / (1.0 - powers(spec.beta1, rows.counts))
        np.multiply(temporary, _column(corrections), out=temporary)
        np.add(temporary, np.float32(spec.epsilon), out=temporary)
        np.divide(rows.slots[0], temporary, out=temporary)
        np.multiply(temporary, _column(rates), out=temporary)
        np.add(rows.weights, temporary, out=rows.weights)

    return step


def _ftrl(spec: optimizers.FTRL) -> _RowStep:
    l1 = np.float32(min(spec.l1, LARGEST))

    def step(rows: _Rows, rate: float) -> None:
        assert rate > 0, "FTRL divides by its learning rate"
        weights, gradients, (z, n), temporary, _ = rows
        per_rate = np.float32(min(1.0 / rate, LARGEST))
        np.add(z, gradients, out=z)
        np.multiply(gradients, gradients, out=gradients)
        np.sqrt(n, out=temporary)
        np.add(n, gradients, out=n)
        root = np.sqrt(n, out=gradients)
        # Of roots of what is kept, so that the sum of all these is root / rate, as FTRL wants it.
        np.subtract(root, temporary, out=temporary)
        np.multiply(temporary, per_rate, out=temporary)
        np.multiply(temporary, weights, out=temporary)
        np.subtract(z, temporary, out=z)
        # Now weights = -(z beyond l1) / (root / rate + constant).
        np.clip(z, -l1, l1, out=temporary)
        np.subtract(temporary, z, out=temporary)
        divisors = np.multiply(root, per_rate, out=root)
        constant = np.float32(min(spec.beta / rate + spec.l2, LARGEST))
        if constant > 0:
            np.add(divisors, constant, out=divisors)
            np.divide(temporary, divisors, out=weights)
        else:  # a divisor is 0 before the first gradient whose square float32 can hold
            weights.fill(0.0)
            np.divide(temporary, divisors, out=weights, where=divisors != 0)

    return step


def _column(values: npt.NDArray[np.float64]) -> Float32:
    return values.astype(np.float32)[:, np.newaxis]
