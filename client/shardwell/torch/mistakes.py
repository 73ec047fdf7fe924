"""Errors of calls that are written as for torch's own classes, with the line that is meant."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwell.client import connect
from shardwell.errors import ArgumentError
from shardwell.specs.names import neighbour
from shardwell.specs.optimizers import SGD, AdamW

_RULE_OPTIONS = {
    "betas",
    "eps",
    *inspect.signature(AdamW).parameters,
    *inspect.signature(SGD).parameters,
}


def check_call(kind: type, line: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuses arguments that a class does not take; `line` is a right call, for the message."""
    signature = inspect.signature(kind.__init__)  # type: ignore[misc]
    try:
        signature.bind(None, *args, **options)
    except TypeError as error:
        unknown = [name for name in options if name not in signature.parameters]
        where = _place_of(unknown[0], signature.parameters) if unknown else ""
        raise ArgumentError(f"{kind.__name__}: {error}{where}; expected {line}") from None


def _place_of(name: str, known: Iterable[str]) -> str:
    of_client = inspect.signature(connect).parameters
    if name in _RULE_OPTIONS:
        return f"; {name}= is an option of the update rule, as of shardwell.AdamW(3e-4)"
    if meant := neighbour(name, known):
        return meant
    if meant := neighbour(name, of_client):
        return f"; it is of shardwell.connect, which makes the client{meant}"
    return ""


def check_model(model: object, line: str) -> None:
    """Refuses what is no model, such as its parameters."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "model must be the torch.nn.Module, whose parameters have their names on the cluster; "
            f"got {described(model)}; expected {line}"
        )


def described(value: object) -> str:
    """Returns what a value is, by its full name: an object of a class, or the class itself."""
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if name.startswith("shardwell.specs."):  # whose public names are shardwell's
        name = f"shardwell.{kind.__qualname__}"
    return f"the class {name}" if kind is value else name


def torch_optimizer(what: str, given: Any) -> torch.optim.Optimizer:
    """Returns an optimizer of torch's, without a framework's wrapper around it."""
    inner = getattr(given, "optimizer", given)  # Accelerate's and Lightning's have it
    if not isinstance(inner, torch.optim.Optimizer):
        raise ArgumentError(
            f"{what} must be an optimizer of torch, such as "
            f"torch.optim.AdamW(model.parameters()); got {described(given)}"
        )
    return inner
