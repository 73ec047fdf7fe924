"""A model that a training shares with other workers: its tensors, its hooks, its leave.

`ServerOptimizer` and `DiLoCo` stand on it; `mean_gradients`, which has an optimizer and no model,
takes the functions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwell.client import Client
from shardwell.errors import ArgumentError
from shardwell.specs.parameter import ParameterSpec
from shardwell.torch.plain_names import PlainNames
from shardwell.training.leave_request import LeaveRequest, go_on_without

_LOG = logging.getLogger("shardwell")


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training as all its workers give it."""

    client: Client
    name: str
    options: Mapping[str, Any]
    timeout_s: float | None


class TrainedModel:
    """The tensors of a model that are trained, and whatever is attached to it for that."""

    def __init__(
        self,
        model: torch.nn.Module,
        names: PlainNames,
        tensors: Mapping[str, torch.nn.Parameter],
        kind: str,
        left_out: Collection[str] = (),
    ) -> None:
        self.model = model
        self.names = names
        self.tensors = tensors
        self._kind = kind
        self._left_out = left_out
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._hooks: list[Any] = []
        self._leave = LeaveRequest()

    @property
    def is_leaving(self) -> bool:
        """True if SIGTERM or an operator has asked this worker to leave."""
        return self._leave.has_come

    def attach(self, hooks: Iterable[Any], spec: ParameterSpec, leaves: bool | None) -> None:
        """Keeps handles of hooks, and notes SIGTERM from now on; None: where others go on alone."""
        self._hooks = list(hooks)
        if go_on_without(spec) if leaves is None else leaves:
            self._leave.open()

    def close(self) -> None:
        """Takes the hooks off, and does not note SIGTERM any more."""
        self._leave.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextlib.contextmanager
    def step(self, is_draining: Callable[[], bool]) -> Iterator[None]:
        """A step, as its block; see `LeaveRequest.ending_after_step`."""
        with self._leave.ending_after_step():
            yield
            self._leave.has_come |= is_draining()

    def named(self) -> dict[str, torch.nn.Parameter]:
        """The model's parameters as it is now, trained or not, in its order."""
        return self.names.of(self.model.named_parameters())

    def check(self) -> None:
        """Refuses a model that is not the one that all agreed on."""
        anew = f"close() this {self._kind}, and make another, with another name"
        now = self.named()
        for name, tensor in now.items():
            known = self.tensors.get(name)
            if known is None:
                if tensor.requires_grad and name not in self._left_out:
                    raise ArgumentError(
                        f"tensor {name!r} was added to the model, or unfrozen, after the start; "
                        f"{anew}"
                    )
            elif tensor is not known or tensor.shape != self.shapes[name]:
                raise ArgumentError(
                    f"tensor {name!r} of the model was replaced after the start: it has shape "
                    f"{tuple(tensor.shape)}, expected {self.shapes[name]}; {anew}"
                )
        gone = self.tensors.keys() - now.keys()
        if gone:
            raise ArgumentError(
                f"tensor {min(gone)!r} of the model is gone since the start; {anew}"
            )


def close_earlier(hooks: Iterable[Any], kind: type, close: Callable[[Any], None]) -> None:
    """Closes other owners of hooks, once each, as after a notebook's cell ran twice."""
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    for owner in {id(each): each for each in owners if isinstance(each, kind)}.values():
        close(owner)


@torch.no_grad()
def scale_back(tensors: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    """Divides gradients by a GradScaler's scale, where they lie."""
    inverse = scale.double().reciprocal().float()
    for tensor in tensors:
        if tensor.grad is not None:
            tensor.grad.mul_(inverse.to(tensor.grad.device))
