"""Optimizers of torch as update rules of the shards, with the same hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from shardwell.errors import ArgumentError
from shardwell.specs.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from shardwell.torch.param_groups import OPTIONS

_SHARED = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "epsilon"}
_OFF = ("maximize", "differentiable", "amsgrad", "centered", "lr_decay")
"""Options that no update rule has; one that is set keeps an optimizer on the workers."""
_OF_GROUPS = ("lr", "weight_decay")


_Kind: TypeAlias = tuple[Callable[..., Optimizer], Mapping[str, str]]
"""An update rule, and its options by those of torch."""
_ADAM = {**_SHARED, "betas": "betas"}
_SGD = {name: name for name in ("weight_decay", "momentum", "dampening", "nesterov")}
_KINDS: dict[type[torch.optim.Optimizer], _Kind] = {
    torch.optim.SGD: (SGD, {"lr": "learning_rate", **_SGD}),
    torch.optim.Adagrad: (Adagrad, {**_SHARED, "initial_accumulator_value": "initial_accumulator"}),
    torch.optim.RMSprop: (RMSProp, {**_SHARED, "alpha": "decay", "momentum": "momentum"}),
    torch.optim.Adam: (Adam, _ADAM),
    torch.optim.AdamW: (AdamW, _ADAM),
}


class ShardsRule(NamedTuple):
    """An optimizer of torch as the shards run it."""

    rule: Optimizer
    """With the first group's learning rate and weight decay."""
    param_groups: list[dict[str, Any]]
    """As `ServerOptimizer` takes them, with each group's own."""


def shards_rule(optimizer: torch.optim.Optimizer) -> ShardsRule | str:
    """The update rule of an optimizer; or, in words, why the shards have none."""
    name = type(optimizer).__name__
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        return f"the shards have no update rule for {name}"
    make, options = kind
    first = optimizer.param_groups[0]
    for option in _OFF:
        if any(group.get(option) for group in optimizer.param_groups):
            return f"the shards' {name} has no {option}"
    for option in options:
        if option not in _OF_GROUPS and any(
            group[option] != first[option] for group in optimizer.param_groups
        ):
            return f"groups of {name} differ in {option}, which the shards have once"
    if first.get("decoupled_weight_decay"):  # Adam's name of AdamW
        make = AdamW
    given = {options[option]: first[option] for option in options}
    if "betas" in given:
        given["beta1"], given["beta2"] = given.pop("betas")
    given["learning_rate"] = float(first["lr"]) or float(first.get("initial_lr", 0.0))
    try:
        rule = make(
            **{
                key: value if isinstance(value, bool) else float(value)
                for key, value in given.items()
            }
        )
    except ArgumentError as error:
        return f"the shards can't run this {name}: {error}"
    kept = [
        {key: value for key, value in group.items() if key in _OF_GROUPS or key not in OPTIONS}
        for group in optimizer.param_groups
    ]
    return ShardsRule(rule, kept)
