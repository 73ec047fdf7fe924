"""The optimizers: one block of weights, its mean gradient and its state, updated in place. Pure.

All arithmetic is float32, as in torch.optim. A rule may be applied to any partition of a parameter,
block by block, because none looks beyond an element. Rows of tables, which have counts of their
own, are updated by `row_update_rules`, out of the same parts.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numkong
import numpy as np

from shardwell.numerics.codec import Float32
from shardwell.specs import optimizers
from shardwell.specs.layout import TensorLayout

Slots: TypeAlias = tuple[Float32, ...]
Step: TypeAlias = Callable[[Float32, Float32, Slots, Float32, int, float], None]
"""(weights, gradient, slots, temporary, update_count, learning_rate): weights and slots are
updated, gradient and temporary overwritten; update_count is 1 at a parameter's first update."""

AnyAdam: TypeAlias = optimizers.Adam | optimizers.AdamW

SAFE_MAGNITUDE = 2.0**50
"""Gradients below it, what weight decay adds to them included, can't take finite state beyond
float32: rules add at most their squares, which are below half of what tells float32's largest
numbers apart."""

_SMALLEST, LARGEST = 2.0**-149, float(np.finfo(np.float32).max)
_DOT_ELEMENT_COUNT = 4096
"""Squares that are added in float32; sums of those, in float64."""
_CLIP_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


def squared_norm(values: Float32) -> float:
    """The sum of squares of a block, (n,) float32."""
    total = 0.0
    with np.errstate(over="ignore"):
        for start in range(0, values.size, _DOT_ELEMENT_COUNT):
            part = values[start : start + _DOT_ELEMENT_COUNT]
            total += float(np.dot(part, part))
        if not math.isfinite(total):  # squares of what is large
            wide = values.astype(np.float64)
            total = float(np.dot(wide, wide))
    return total


def clip_factor(norm: float, clip_norm: float) -> float:
    """What a gradient of that norm is multiplied with; NaN where the norm is."""
    factor = clip_norm / (norm + _CLIP_EPSILON)
    return 1.0 if factor > 1.0 else factor


class UpdateRule:
    """An optimizer ready to run: how many arrays of state it keeps, and its arithmetic."""

    def __init__(self, optimizer: optimizers.Optimizer) -> None:
        self._clip_value = clip_value_of(optimizer)
        self.learning_rate: float | None = getattr(optimizer, "learning_rate", None)
        """The spec's rate; None where there is none."""
        self.initial_slots, self._step = rule_of(optimizer)
        """What each array of state is filled with at the start."""

    def apply(
        self,
        weights: Float32,
        gradient: Float32,
        slots: Slots,
        temporary: Float32,
        *,
        update_count: int,
        learning_rate: float,
    ) -> None:
        """Updates one block. All arrays are (n,) float32, contiguous; see Step."""
        if self._clip_value > 0:
            np.clip(gradient, -self._clip_value, self._clip_value, out=gradient)
        self._step(weights, gradient, slots, temporary, update_count, learning_rate)


class TensorRules:
    """What updates a parameter: an UpdateRule for each run of tensors with the same options.

    Args:
        optimizer: The parameter's.
        layout: Its tensors, if there are any.
    """

    def __init__(self, optimizer: optimizers.Optimizer, layout: TensorLayout | None = None) -> None:
        rule = UpdateRule(optimizer)
        self.initial_slots = rule.initial_slots
        """See UpdateRule."""
        self.learning_rate = rule.learning_rate
        """See UpdateRule."""
        self.decay_into_state = decay_into_state(optimizer)
        """How much of a weight is added to its gradient before optimizer state sees it, at most."""
        self._starts: list[int] = []
        self._runs: list[tuple[UpdateRule | None, float]] = []
        """The rule (None: nothing changes) and the rate's factor, from each start on."""
        rules: dict[float | None, UpdateRule] = {None: rule}
        for tensor in layout or ():
            options = tensor.options
            if options.weight_decay not in rules:
                changes: Any = {"weight_decay": options.weight_decay}
                own = dataclasses.replace(optimizer, **changes)
                rules[options.weight_decay] = UpdateRule(own)
                self.decay_into_state = max(self.decay_into_state, decay_into_state(own))
            rule_of_run = None if options.frozen else rules[options.weight_decay]
            run = (rule_of_run, options.learning_rate_factor)
            if not self._runs or run != self._runs[-1]:
                self._starts.append(tensor.offset)
                self._runs.append(run)
        if not self._runs:
            self._starts, self._runs = [0], [(rule, 1.0)]

    def apply(
        self,
        offset: int,
        weights: Float32,
        gradient: Float32,
        slots: Slots,
        temporary: Float32,
        *,
        update_count: int,
        learning_rate: float,
    ) -> None:
        """Updates one block, which begins at element `offset`. See UpdateRule.apply."""
        for run, rule, factor in self._trained(offset, weights.size):
            rule.apply(
                weights[run],
                gradient[run],
                tuple(slot[run] for slot in slots),
                temporary[run],
                update_count=update_count,
                learning_rate=learning_rate * factor,
            )

    def squared_norm(self, offset: int, gradient: Float32) -> float:
        """The sum of squares of a block of a gradient, as far as it is trained."""
        runs = self._trained(offset, gradient.size)
        return math.fsum(squared_norm(gradient[run]) for run, _, _ in runs)

    def _trained(self, offset: int, size: int) -> Iterator[tuple[slice, UpdateRule, float]]:
        """The runs of a block that are not frozen: where they are in it, rule, rate's factor."""
        first, end = offset, offset + size
        number = bisect.bisect_right(self._starts, offset) - 1
        while offset < end:
            is_last = number + 1 == len(self._runs)
            stop = end if is_last else min(self._starts[number + 1], end)
            rule, factor = self._runs[number]
            if rule is not None:
                yield slice(offset - first, stop - first), rule, factor
            offset, number = stop, number + 1


def clip_value_of(optimizer: optimizers.Optimizer) -> np.float32:
    """Where gradients are clipped; 0: nowhere.

    A bound that float32 can't hold is the nearest that it can, and never "no bound".
    """
    if not optimizer.clip_value:
        return np.float32(0.0)
    return np.float32(min(max(optimizer.clip_value, _SMALLEST), LARGEST))


def decay_into_state(optimizer: optimizers.Optimizer) -> float:
    """How much of a weight is added to its gradient before optimizer state sees it."""
    if isinstance(optimizer, optimizers.AdamW) or not optimizer.slot_names:
        return 0.0
    return float(getattr(optimizer, "weight_decay", 0.0))


def peak_of(values: Float32) -> float:
    """The largest magnitude of contiguous values, 0 of none; infinite or NaN if one is."""
    if not values.size:
        return 0.0
    return float(max(np.max(values), -np.min(values)))


def rule_of(optimizer: optimizers.Optimizer) -> tuple[tuple[float, ...], Step]:
    """What state starts with, and the arithmetic, without clipping."""
    match optimizer:
        case optimizers.Average():
            return (), _average
        case optimizers.SGD():
            return (() if optimizer.momentum == 0 else (0.0,)), _sgd(optimizer)
        case optimizers.Adagrad():
            return (optimizer.initial_accumulator,), _adagrad(optimizer)
        case optimizers.RMSProp():
            return ((0.0,) if optimizer.momentum == 0 else (0.0, 0.0)), _rms_prop(optimizer)
        case optimizers.Adam() | optimizers.AdamW():
            return (0.0, 0.0), _adam(optimizer)
    raise TypeError(f"no update rule for {optimizer!r}")


def add_scaled(target: Float32, source: Float32, factor: float) -> None:
    """Target += factor * source, in one pass."""
    numkong.blend(source, target, alpha=factor, beta=1.0, out=target)


def decay_add(target: Float32, keep: float, source: Float32, factor: float) -> None:
    """Sets target to keep * target + factor * source.

    In two passes: in one, numkong rounds the last elements of an array in another way than the
    others, and results would depend on how a parameter is cut.
    """
    np.multiply(target, np.float32(keep), out=target)
    add_scaled(target, source, factor)


def _average(
    weights: Float32, gradient: Float32, slots: Slots, temporary: Float32, count: int, rate: float
) -> None:
    np.copyto(weights, gradient)


def _sgd(spec: optimizers.SGD) -> Step:
    def plain(
        weights: Float32,
        gradient: Float32,
        slots: Slots,
        temporary: Float32,
        count: int,
        rate: float,
    ) -> None:
        if spec.weight_decay:
            add_scaled(gradient, weights, spec.weight_decay)
        add_scaled(weights, gradient, -rate)

    def with_momentum(
        weights: Float32,
        gradient: Float32,
        slots: Slots,
        temporary: Float32,
        count: int,
        rate: float,
    ) -> None:
        (momentum,) = slots
        if spec.weight_decay:
            add_scaled(gradient, weights, spec.weight_decay)
        if count == 1:
            np.copyto(momentum, gradient)
        else:
            decay_add(momentum, spec.momentum, gradient, 1.0 - spec.dampening)
        follow_momentum(spec, weights, gradient, momentum, rate)

    return plain if spec.momentum == 0 else with_momentum


def follow_momentum(
    spec: optimizers.SGD, weights: Float32, gradient: Float32, momentum: Float32, rate: float
) -> None:
    """Moves weights along their momentum, or along where it leads; gradient is overwritten."""
    if spec.nesterov:
        add_scaled(gradient, momentum, spec.momentum)
        add_scaled(weights, gradient, -rate)
    else:
        add_scaled(weights, momentum, -rate)


def _adagrad(spec: optimizers.Adagrad) -> Step:
    def step(
        weights: Float32,
        gradient: Float32,
        slots: Slots,
        temporary: Float32,
        count: int,
        rate: float,
    ) -> None:
        (squares,) = slots
        if spec.weight_decay:
            add_scaled(gradient, weights, spec.weight_decay)
        np.multiply(gradient, gradient, out=temporary)
        np.add(squares, temporary, out=squares)
        np.sqrt(squares, out=temporary)
        np.add(temporary, np.float32(spec.epsilon), out=temporary)
        np.divide(gradient, temporary, out=temporary)
        add_scaled(weights, temporary, -rate)

    return step


def _rms_prop(spec: optimizers.RMSProp) -> Step:
    def step(
        weights: Float32,
        gradient: Float32,
        slots: Slots,
        temporary: Float32,
        count: int,
        rate: float,
    ) -> None:
        squares = slots[0]
        if spec.weight_decay:
            add_scaled(gradient, weights, spec.weight_decay)
        np.multiply(gradient, gradient, out=temporary)
        decay_add(squares, spec.decay, temporary, 1.0 - spec.decay)
        np.sqrt(squares, out=temporary)
        np.add(temporary, np.float32(spec.epsilon), out=temporary)
        np.divide(gradient, temporary, out=temporary)
        if spec.momentum:
            momentum = slots[1]
            decay_add(momentum, spec.momentum, temporary, 1.0)
            temporary = momentum
        add_scaled(weights, temporary, -rate)

    return step


def _adam(spec: AnyAdam) -> Step:
    def step(
        weights: Float32,
        gradient: Float32,
        slots: Slots,
        temporary: Float32,
        count: int,
        rate: float,
    ) -> None:
        first, _ = slots
        decay_and_average(spec, weights, gradient, slots, temporary, rate)
        correction = math.sqrt(1.0 - spec.beta2**count)
        np.multiply(temporary, np.float32(1.0 / correction), out=temporary)
        np.add(temporary, np.float32(spec.epsilon), out=temporary)
        np.divide(first, temporary, out=temporary)
        add_scaled(weights, temporary, -rate / (1.0 - spec.beta1**count))

    return step


def decay_and_average(
    spec: AnyAdam,
    weights: Float32,
    gradient: Float32,
    slots: Slots,
    temporary: Float32,
    rate: float,
) -> None:
    """What Adam does before it corrects bias; leaves the root of the second moment in temporary."""
    first, second = slots
    if spec.weight_decay and isinstance(spec, optimizers.AdamW):
        np.multiply(weights, np.float32(1.0 - rate * spec.weight_decay), out=weights)
    elif spec.weight_decay:
        add_scaled(gradient, weights, spec.weight_decay)
    decay_add(first, spec.beta1, gradient, 1.0 - spec.beta1)
    np.multiply(gradient, gradient, out=temporary)
    decay_add(second, spec.beta2, temporary, 1.0 - spec.beta2)
    np.sqrt(second, out=temporary)
