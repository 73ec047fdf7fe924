"""Torch's parameter groups as a parameter's options by tensor, and their rates as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwell.errors import ArgumentError
from shardwell.specs.layout import TensorGroup, TensorOptions
from shardwell.specs.optimizers import Adam, AdamW, Optimizer

_RATE_TOLERANCE = 1e-6
"""By which rates of groups may differ from their ratios; schedulers round."""


class GroupRates:
    """What the shards know of an optimizer's groups: their ratios, and options that stay.

    Args:
        optimizer: The update rule, whose rate the ratios are to.
        param_groups: As torch has them.

    Raises:
        ArgumentError: a group has a rate, and the optimizer none.
    """

    def __init__(self, optimizer: Optimizer, param_groups: Sequence[Mapping[str, Any]]) -> None:
        found = [_options_of(optimizer, group) for group in param_groups]
        self._factors = [factor for factor, _ in found]
        self._options = [_fixed_options(group) for group in param_groups]
        self.tensor_options = [options for _, options in found]
        """How each group's tensors differ from the rest."""

    def tensor_groups(self, names: Sequence[Sequence[str]]) -> list[TensorGroup]:
        """The same as a parameter takes it; `names` are those of each group's tensors."""
        return [
            TensorGroup(own, **dataclasses.asdict(options))
            for own, options in zip(names, self.tensor_options, strict=True)
            if options != TensorOptions()
        ]

    def rate(self, param_groups: Sequence[Mapping[str, Any]]) -> float:
        """The parameter's learning rate as the groups have it now.

        Raises:
            ArgumentError: groups are not in their ratios any more, or have other options.
        """
        rate: float | None = None
        for number, (group, factor) in enumerate(zip(param_groups, self._factors, strict=True)):
            if _fixed_options(group) != self._options[number]:
                raise ArgumentError(
                    f"param_groups[{number}] has {_fixed_options(group)}; the shards have "
                    f"{self._options[number]} since the start; only lr may change (a "
                    "OneCycleLR needs cycle_momentum=False)"
                )
            own = float(group["lr"])
            if rate is None and factor:
                rate = own / factor
            expected = 0.0 if not factor else (rate or 0.0) * factor
            if abs(own - expected) > _RATE_TOLERANCE * max(abs(own), abs(expected)):
                raise ArgumentError(
                    f"param_groups[{number}] has lr {own:g}, and {expected:g} is in its ratio to "
                    "the first; a schedule must scale all groups alike"
                )
        return 0.0 if rate is None else rate


def _fixed_options(group: Mapping[str, Any]) -> dict[str, Any]:
    free = ("params", "lr", "initial_lr", "max_lr", "min_lr", "param_names")
    return {key: value for key, value in group.items() if key not in free}


def groups_of(
    model: torch.nn.Module, param_groups: Iterable[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Torch's groups of a model."""
    if param_groups is None:
        return [{"params": [tensor for tensor in model.parameters() if tensor.requires_grad]}]
    given = list(param_groups)
    if given and all(isinstance(each, torch.Tensor) for each in given):  # as torch takes it, too
        given = [{"params": given}]
    for each in given:
        if not isinstance(each, Mapping) or "params" not in each:
            raise ArgumentError(
                "param_groups must be tensors, or dicts with 'params'; got "
                f"{type(each).__name__} among them"
            )
    groups = [dict(group) for group in given]
    for number, group in enumerate(groups):
        unknown = sorted(set(group) - {"params", "lr", "weight_decay"})
        if unknown:
            raise ArgumentError(
                f"param_groups[{number}] has {unknown[0]!r}, which is the same for all tensors of "
                "a parameter; a group may have params, lr and weight_decay"
            )
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


def _options_of(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[float, TensorOptions]:
    """How a group's tensors differ from the rest: the rate's factor, and as a parameter has it."""
    base, own = rate_of(optimizer), float(group["lr"])
    if own != base and not base:
        raise ArgumentError(f"a group has lr {own:g}, and the optimizer 0: there is no ratio")
    factor = own / base if own != base else 1.0
    decay = float(group.get("weight_decay", 0.0))
    differs = decay != getattr(optimizer, "weight_decay", 0.0)
    return factor, TensorOptions(
        learning_rate_factor=factor, weight_decay=decay if differs else None
    )
