"""The optimizers: one block of weights, its mean gradient and its state, updated in place. Pure.

All arithmetic is float32, as in torch.optim. A rule may be applied to any partition of a parameter,
block by block, because none looks beyond an element. Rows of tables, which have counts of their
own, are updated by `row_update_rules`, out of the same parts.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwell.numerics.codec import Float32
from shardwell.numerics.elementwise import (
    Code,
    Operation,
    Operations,
    add_scaled,
    run,
    scale,
)
from shardwell.specs import optimizers
from shardwell.specs.grouped_rate import factors_of
from shardwell.specs.layout import TensorLayout
from shardwell.specs.parameter import block_size_of

Slots: TypeAlias = tuple[Float32, ...]
Step: TypeAlias = Callable[[int, float], Operations]
"""(update_count, learning_rate): what updates WEIGHTS and slots, and overwrites GRADIENT and
TEMPORARY; update_count is 1 at a parameter's first update."""

WEIGHTS, GRADIENT, TEMPORARY, FIRST_SLOT, SECOND_SLOT = range(5)

AnyAdam: TypeAlias = optimizers.Adam | optimizers.AdamW

SAFE_MAGNITUDE = 2.0**50
"""Gradients below it, what weight decay adds to them included, can't take finite state beyond
float32: rules add at most their squares, which are below half of what tells float32's largest
numbers apart."""

_SMALLEST, LARGEST = 2.0**-149, float(np.finfo(np.float32).max)
_SQUARE_COUNT = 32 * 1024
"""Squares that are computed at a time, which stay in cache; whole blocks of any size."""
_SUM_COUNT = 1024
_CLIP_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


def clip(values: Float32, clip_norm: float) -> None:
    """Scales a gradient down to a norm, in place: a whole parameter, (n,), nothing of it frozen."""
    factor = clip_factor(math.sqrt(squared_norm(values)), clip_norm)
    with np.errstate(all="ignore"):
        np.multiply(values, np.float32(factor), out=values)


def squared_norm(values: Float32) -> float:
    """The sum of squares of a whole parameter, (n,) float32."""
    block_size = block_size_of(values.size)
    return math.fsum(squares_of_parts(values, [slice(0, values.size)], 0, block_size))


def squares_of_parts(
    values: Float32, runs: Iterable[slice], offset: int, block_size: int
) -> list[float]:
    """Returns numbers that add up exactly to the sum of squares of runs of (n,) float32.

    A part is what a run has of a block of the parameter. Products are exact in float64. NumPy adds
    those of a part in an order that depends on their number alone, where BLAS adds in that of the
    processor's vectors; parts are added exactly. So cuts between blocks make no difference.
    `values` begin at the parameter's element `offset`.
    """
    squares, sums = np.empty(min(values.size, _SQUARE_COUNT), np.float64), [0.0]
    for each in runs:
        start = each.start
        while start < each.stop:
            size = min(block_size - (offset + start) % block_size, each.stop - start)
            is_whole = size == block_size
            count = min(each.stop - start, _SQUARE_COUNT) // size if is_whole else 1
            found = squares[: size * count]
            np.copyto(found, values[start : start + found.size])
            np.multiply(found, found, out=found)
            sums += np.add.reduce(found.reshape(count, size), axis=1).tolist()
            start += found.size
            if len(sums) > _SUM_COUNT:
                sums = exact_sum(sums)
    return exact_sum(sums)


def exact_sum(numbers: list[float]) -> list[float]:
    """Returns numbers of the same exact sum, each the rounded sum of itself and those behind it.

    At most 16 for squares of float32; one where the sum is 0, infinite or NaN.
    """
    found: list[float] = []
    while rest := math.fsum([*numbers, *(-each for each in found)]):
        if not math.isfinite(rest):
            return [rest]
        found.append(rest)
    return found or [0.0]


def clip_factor(norm: float, clip_norm: float) -> float:
    """The factor of a gradient of that norm; NaN where the norm is."""
    factor = clip_norm / (norm + _CLIP_EPSILON)
    return 1.0 if factor > 1.0 else factor


class UpdateRule:
    """An optimizer ready to run: how many arrays of state it keeps, and its arithmetic."""

    def __init__(self, optimizer: optimizers.Optimizer) -> None:
        self._clips = clips_of(optimizer)
        self.learning_rate: float | None = getattr(optimizer, "learning_rate", None)
        self.initial_slots = initial_slots_of(optimizer)
        self._step = rule_of(optimizer)

    def operations(self, *, update_count: int, learning_rate: float) -> Operations:
        """The operations that update WEIGHTS and slots with the mean in GRADIENT; see Step."""
        return self._clips + self._step(update_count, learning_rate)

    def apply(
        self,
        weights: Float32,
        gradient: Float32,
        slots: Slots,
        *,
        update_count: int,
        learning_rate: float,
    ) -> None:
        """Updates weights and slots, overwrites the gradient: all (n,) float32, contiguous."""
        operations = self.operations(update_count=update_count, learning_rate=learning_rate)
        run(operations, (weights, gradient, None, *slots), 0, weights.size)


class TensorRules:
    """The rules of a parameter: one for each run of tensors with the same options."""

    def __init__(self, optimizer: optimizers.Optimizer, layout: TensorLayout | None = None) -> None:
        rule = UpdateRule(optimizer)
        self.initial_slots = rule.initial_slots
        self.learning_rate = rule.learning_rate
        self.decay_into_state = decay_into_state(optimizer)
        """The largest part of a weight that is added to its gradient before state sees it."""
        self._starts: list[int] = []
        self._runs: list[tuple[UpdateRule | None, float, int]] = []
        """The rule (None: nothing changes), the rate's factor and its group, from each start on."""
        rules: dict[float | None, UpdateRule] = {None: rule}
        for tensor in layout or ():
            options = tensor.options
            if options.weight_decay not in rules:
                changes: Any = {"weight_decay": options.weight_decay}
                own = dataclasses.replace(optimizer, **changes)
                rules[options.weight_decay] = UpdateRule(own)
                self.decay_into_state = max(self.decay_into_state, decay_into_state(own))
            rule_of_run = None if options.frozen else rules[options.weight_decay]
            run = (rule_of_run, options.learning_rate_factor, options.rate_group)
            if not self._runs or run != self._runs[-1]:
                self._starts.append(tensor.offset)
                self._runs.append(run)
        if not self._runs:
            self._starts, self._runs = [0], [(rule, 1.0, 0)]

    def operations(
        self, offset: int, size: int, *, update_count: int, learning_rate: float
    ) -> Iterator[tuple[slice, Operations]]:
        """The operations of the trained parts of a block that begins at element `offset`."""
        by_group = (1.0, *factors_of(learning_rate))
        for part, rule, factor, group in self._trained(offset, size):
            rate = learning_rate * factor
            if len(by_group) > 1:
                rate *= by_group[group]
            yield part, rule.operations(update_count=update_count, learning_rate=rate)

    def squares(self, offset: int, gradient: Float32, block_size: int) -> list[float]:
        """Returns `squares_of_parts` of the trained parts of a gradient that begins at `offset`."""
        runs = (run for run, *_ in self._trained(offset, gradient.size))
        return squares_of_parts(gradient, runs, offset, block_size)

    def _trained(self, offset: int, size: int) -> Iterator[tuple[slice, UpdateRule, float, int]]:
        """The runs of a block that are not frozen: where in it, rule, rate's factor and group."""
        first, end = offset, offset + size
        number = bisect.bisect_right(self._starts, offset) - 1
        while offset < end:
            is_last = number + 1 == len(self._runs)
            stop = end if is_last else min(self._starts[number + 1], end)
            rule, factor, group = self._runs[number]
            if rule is not None:
                yield slice(offset - first, stop - first), rule, factor, group
            offset, number = stop, number + 1


def clips_of(optimizer: optimizers.Optimizer) -> Operations:
    """The operations that clip GRADIENT; a bound beyond float32 is the nearest that it holds."""
    if not optimizer.clip_value:
        return ()
    bound = min(max(optimizer.clip_value, _SMALLEST), LARGEST)
    return (Operation(Code.CLIP, GRADIENT, factor=bound),)


def decay_into_state(optimizer: optimizers.Optimizer) -> float:
    """The part of a weight that is added to its gradient before optimizer state sees it."""
    if isinstance(optimizer, optimizers.AdamW) or not optimizer.slot_names:
        return 0.0
    return float(getattr(optimizer, "weight_decay", 0.0))


def initial_slots_of(optimizer: optimizers.Optimizer) -> tuple[float, ...]:
    """The value that each array of optimizer state begins with."""
    return (getattr(optimizer, "initial_accumulator", 0.0),) * len(optimizer.slot_names)


def rule_of(optimizer: optimizers.Optimizer) -> Step:
    """The arithmetic, without clipping."""
    match optimizer:
        case optimizers.Average():
            return lambda count, rate: (Operation(Code.COPY, WEIGHTS, GRADIENT),)
        case optimizers.SGD():
            return _sgd(optimizer)
        case optimizers.Adagrad():
            return _adagrad(optimizer)
        case optimizers.RMSProp():
            return _rms_prop(optimizer)
        case optimizers.Adam() | optimizers.AdamW():
            return _adam(optimizer)
    raise TypeError(f"no update rule for {optimizer!r}")


def decay_add(to: int, keep: float, source: int, factor: float) -> Operations:
    """The operations that set `to` to keep * to + factor * source."""
    return scale(to, keep) + add_scaled(to, source, factor)


def square_into(to: int, source: int) -> Operation:
    """The operation that sets `to` to the square of `source`."""
    return Operation(Code.MULTIPLY, to, source, source)


def _sgd(spec: optimizers.SGD) -> Step:
    decays = add_scaled(GRADIENT, WEIGHTS, spec.weight_decay)

    def plain(count: int, rate: float) -> Operations:
        return decays + add_scaled(WEIGHTS, GRADIENT, -rate)

    def with_momentum(count: int, rate: float) -> Operations:
        if count == 1:
            grows: Operations = (Operation(Code.COPY, FIRST_SLOT, GRADIENT),)
        else:
            grows = decay_add(FIRST_SLOT, spec.momentum, GRADIENT, 1.0 - spec.dampening)
        return decays + grows + follow_momentum(spec, rate)

    return plain if spec.momentum == 0 else with_momentum


def follow_momentum(spec: optimizers.SGD, rate: float) -> Operations:
    """The operations that move weights along their momentum, or along where it leads."""
    if spec.nesterov:
        looks_ahead = add_scaled(GRADIENT, FIRST_SLOT, spec.momentum)
        return looks_ahead + add_scaled(WEIGHTS, GRADIENT, -rate)
    return add_scaled(WEIGHTS, FIRST_SLOT, -rate)


def _by_root(squares: int, epsilon: float) -> Operations:
    return (
        Operation(Code.SQUARE_ROOT, TEMPORARY, squares),
        Operation(Code.ADD_CONSTANT, TEMPORARY, factor=epsilon),
        Operation(Code.DIVIDE, TEMPORARY, GRADIENT, TEMPORARY),
    )


def _adagrad(spec: optimizers.Adagrad) -> Step:
    accumulates = (
        *add_scaled(GRADIENT, WEIGHTS, spec.weight_decay),
        square_into(TEMPORARY, GRADIENT),
        *add_scaled(FIRST_SLOT, TEMPORARY),
        *_by_root(FIRST_SLOT, spec.epsilon),
    )
    return lambda count, rate: accumulates + add_scaled(WEIGHTS, TEMPORARY, -rate)


def _rms_prop(spec: optimizers.RMSProp) -> Step:
    averages = (
        *add_scaled(GRADIENT, WEIGHTS, spec.weight_decay),
        square_into(TEMPORARY, GRADIENT),
        *decay_add(FIRST_SLOT, spec.decay, TEMPORARY, 1.0 - spec.decay),
        *_by_root(FIRST_SLOT, spec.epsilon),
    )
    moved_by = TEMPORARY
    if spec.momentum:
        averages += decay_add(SECOND_SLOT, spec.momentum, TEMPORARY, 1.0)
        moved_by = SECOND_SLOT
    return lambda count, rate: averages + add_scaled(WEIGHTS, moved_by, -rate)


def _adam(spec: AnyAdam) -> Step:
    averages = moments_of(spec)
    divides = (
        Operation(Code.ADD_CONSTANT, TEMPORARY, factor=spec.epsilon),
        Operation(Code.DIVIDE, TEMPORARY, FIRST_SLOT, TEMPORARY),
    )

    def step(count: int, rate: float) -> Operations:
        correction = math.sqrt(1.0 - power(spec.beta2, count))
        return (
            averages(rate)
            + scale(TEMPORARY, 1.0 / correction)
            + divides
            + add_scaled(WEIGHTS, TEMPORARY, -rate / (1.0 - power(spec.beta1, count)))
        )

    return step


def moments_of(spec: AnyAdam) -> Callable[[float], Operations]:
    """Returns Adam's operations up to bias correction; TEMPORARY is the second moment's root."""
    averages = (
        *decay_add(FIRST_SLOT, spec.beta1, GRADIENT, 1.0 - spec.beta1),
        square_into(TEMPORARY, GRADIENT),
        *decay_add(SECOND_SLOT, spec.beta2, TEMPORARY, 1.0 - spec.beta2),
        Operation(Code.SQUARE_ROOT, TEMPORARY, SECOND_SLOT),
    )
    if isinstance(spec, optimizers.AdamW):
        return lambda rate: scale(WEIGHTS, 1.0 - rate * spec.weight_decay) + averages
    decayed = add_scaled(GRADIENT, WEIGHTS, spec.weight_decay) + averages
    return lambda rate: decayed


def powers(base: float, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number of 0 to 1 to the power of each count, which is at least 0.

    The same bits everywhere, unlike those of pow: a product of one exact power, rounded once, for
    each digit of a count to the base 256.
    """
    found, level = np.take(_powers_of_digits(base, 0), counts & 255), 0
    while (counts := counts >> 8).any():
        level += 1
        found *= np.take(_powers_of_digits(base, level), counts & 255)
    return found


@functools.lru_cache(maxsize=1024)
def power(base: float, count: int) -> float:
    """Returns `powers` of one count."""
    return float(powers(base, np.array([count], np.int64))[0])


@functools.lru_cache(maxsize=256)
def _powers_of_digits(base: float, level: int) -> npt.NDArray[np.float64]:
    """Returns base^(n * 256^level) by digit n, from integers, with 128 bits of fraction."""
    numerator, denominator = base.as_integer_ratio()
    one = 1 << 128
    step = numerator * one // denominator
    for _ in range(8 * level):
        step = step * step // one
    found = itertools.accumulate(range(255), lambda last, _: last * step // one, initial=one)
    return np.array([each / one for each in found])
