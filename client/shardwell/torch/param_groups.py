"""Torch's parameter groups as a parameter's options by tensor, and their rates as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwell.errors import ArgumentError
from shardwell.specs.grouped_rate import RATE_GROUP_COUNT_MAX, GroupedRate
from shardwell.specs.layout import TensorGroup, TensorOptions
from shardwell.specs.optimizers import Adam, AdamW, Optimizer, check_learning_rate

_RATE_TOLERANCE = 1e-6
"""The difference that rates of groups may have from their ratios; schedulers round."""
OPTIONS = (
    *("weight_decay", "momentum", "dampening", "nesterov", "betas", "eps", "alpha", "centered"),
    *("amsgrad", "maximize", "lr_decay", "initial_accumulator_value", "decoupled_weight_decay"),
)
"""Options that the shards would have to know of; all other keys of a group are the user's."""


class GroupRates:
    """An optimizer's groups as the shards know them: rates, and options that stay."""

    def __init__(self, optimizer: Optimizer, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._factors = [_factor_of(optimizer, group) for group in param_groups]
        """The ratio of each group's rate to the parameter's, as long as no schedule changes it."""
        self._options = [_fixed_options(group) for group in param_groups]
        self._numbers = list(range(1, len(param_groups) + 1))
        if len(param_groups) == 1 or len(param_groups) > RATE_GROUP_COUNT_MAX:
            self._numbers = [0] * len(param_groups)
        self.tensor_options = [
            TensorOptions(
                learning_rate_factor=factor,
                weight_decay=_decay_of(optimizer, group),
                rate_group=number,
            )
            for group, factor, number in zip(
                param_groups, self._factors, self._numbers, strict=True
            )
        ]

    def tensor_groups(self, names: Sequence[Sequence[str]]) -> list[TensorGroup]:
        """Returns the groups as a parameter takes them; groups without a tensor have no number."""
        used = [number for number, own in zip(self._numbers, names, strict=True) if own and number]
        self._numbers = [
            used.index(number) + 1 if number in used else 0 for number in self._numbers
        ]
        return [
            TensorGroup(own, **{**dataclasses.asdict(options), "rate_group": number})
            for own, options, number in zip(names, self.tensor_options, self._numbers, strict=True)
            if own and dataclasses.replace(options, rate_group=number) != TensorOptions()
        ]

    def rate(self, param_groups: Sequence[Mapping[str, Any]]) -> float:
        """Returns one number where all groups have their first ratios, else a GroupedRate."""
        rate = 0.0
        own_rates = []
        for number, group in enumerate(param_groups):
            if _fixed_options(group) != self._options[number]:
                raise ArgumentError(
                    f"param_groups[{number}] has {_fixed_options(group)}; the shards have "
                    f"{self._options[number]} since the start; only lr may change (a "
                    "OneCycleLR needs cycle_momentum=False)"
                )
            own = check_learning_rate(f"lr of param_groups[{number}]", float(group["lr"]))
            own_rates.append(own)
            rate = rate or own / self._factors[number]
        apart = [
            number
            for number, (own, factor) in enumerate(zip(own_rates, self._factors, strict=True))
            if abs(own - rate * factor) > _RATE_TOLERANCE * max(own, rate * factor)
        ]
        if not apart:
            return rate
        if not any(self._numbers):
            raise ArgumentError(
                f"param_groups[{apart[0]}] has lr {own_rates[apart[0]]:g}, and "
                f"{rate * self._factors[apart[0]]:g} is in its ratio to the first; rates of more "
                f"than {RATE_GROUP_COUNT_MAX} groups can't change apart: make fewer groups, or "
                "give them a schedule that scales all alike"
            )
        factors = [1.0] * max(self._numbers)
        for own, factor, number in zip(own_rates, self._factors, self._numbers, strict=True):
            if number:
                factors[number - 1] = own / (rate * factor)
        return GroupedRate(rate, factors)


def _fixed_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in OPTIONS if key in group}


def groups_of(
    model: torch.nn.Module,
    param_groups: Iterable[Any] | None,
    optimizer: Optimizer,
) -> list[dict[str, Any]]:
    """Returns torch's groups of a model."""
    if param_groups is None:
        return [{"params": [tensor for tensor in model.parameters() if tensor.requires_grad]}]
    given = list(param_groups)
    if given and all(isinstance(each, torch.Tensor | tuple) for each in given):  # as torch, too
        given = [{"params": given}]
    for each in given:
        if not isinstance(each, Mapping) or "params" not in each:
            raise ArgumentError(
                "param_groups must be tensors, or dicts with 'params'; got "
                f"{type(each).__name__} among them"
            )
    groups = [dict(group) for group in given]
    for number, group in enumerate(groups):
        known = torch_options(optimizer)
        for key in OPTIONS:
            if key == "weight_decay" or key not in group:
                continue
            value, expected = group[key], known.get(key, False)
            if (tuple(value) if isinstance(value, list) else value) != expected:
                has = repr(known[key]) if key in known else "none"
                raise ArgumentError(
                    f"param_groups[{number}] has {key!r} {value!r}, and "
                    f"{type(optimizer).__name__} has {has} for all tensors; leave it out of the "
                    "group, which may have lr, weight_decay and keys of your own"
                )
            if isinstance(value, list):
                group[key] = tuple(value)
    return groups


def rate_of(optimizer: Optimizer) -> float:
    """The update rule's learning rate."""
    return float(getattr(optimizer, "learning_rate", 0.0))


def torch_options(optimizer: Optimizer) -> dict[str, Any]:
    """The update rule's options under torch's names, for who reads `param_groups`."""
    found = {
        field.name: getattr(optimizer, field.name)
        for field in dataclasses.fields(optimizer)
        if field.name in ("weight_decay", "momentum", "dampening", "nesterov")
    }
    if isinstance(optimizer, Adam | AdamW):
        found["betas"] = (optimizer.beta1, optimizer.beta2)
    if hasattr(optimizer, "epsilon"):
        found["eps"] = optimizer.epsilon
    return found


def _factor_of(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    base = rate_of(optimizer)
    own = check_learning_rate("lr of a group", float(group["lr"]))
    return own / base if own and base and own != base else 1.0


def _decay_of(optimizer: Optimizer, group: Mapping[str, Any]) -> float | None:
    decay = float(group.get("weight_decay", 0.0))
    return decay if decay != getattr(optimizer, "weight_decay", 0.0) else None
