"""Gradients between backward and `step`: their changes, and the backward pass that made them.

It decides nothing: `ServerOptimizer` does, with overlap="auto", and so do the hooks of optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwell.parameter.dealing import Batch

if TYPE_CHECKING:
    from shardwell.torch.loop.shares import SharedBatches

_AGREED = ("sample_count", "learning_rate")
"""Options that must be the same before and after backward."""
_SEEN_COUNT = 1024
"""Elements of a gradient, about, by which a change shows that torch does not count."""


class BackwardWatch:
    """Sees the gradient that a backward pass made last, and so what made those of a step.

    `torch.distributed.checkpoint.state_dict` calls `step` to make an optimizer's state: with
    gradients of zeros that it makes itself, and a rate of 0. That is no step of the training. Zeros
    that a backward pass made are one, for which other workers wait.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor] = (), loader: SharedBatches | None = None
    ) -> None:
        self.loader = loader
        """Batches of the loader that a program has for these tensors, if one was prepared."""
        self._made: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None
        self._hooks = [tensor.register_post_accumulate_grad_hook(self.note) for tensor in tensors]

    def note(self, tensor: torch.Tensor) -> None:
        """Notes the gradient that backward has added to a tensor."""
        if self.loader is not None:
            self.loader.note_backward(tensor)
        if tensor.grad is not None:
            self._made = weakref.ref(tensor), weakref.ref(tensor.grad)

    def feed(self, loader: SharedBatches) -> None:
        """Takes the batches of another loader from now on."""
        if self.loader is not None:
            self.loader.end_all()
        self.loader = loader

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The loader's batches that the gradients were made from, since the last step."""
        return () if self.loader is None else self.loader.used

    def note_given(self, batches: Sequence[Batch]) -> None:
        """Takes note that a step has batches."""
        if self.loader is not None:
            self.loader.note_given(batches)

    def give_back(self) -> None:
        """Gives back batches whose gradient is for no step."""
        if self.loader is not None:
            self.loader.give_back()

    def makes_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if a step only makes an optimizer's state: rate 0, and zeros that were put there."""
        if any(float(group.get("lr", 0.0)) for group in optimizer.param_groups):
            return False
        tensor, gradient = (each() for each in self._made) if self._made else (None, None)
        if tensor is not None and gradient is not None and tensor.grad is gradient:
            return False
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        found = [tensor.grad for tensor in tensors if tensor.grad is not None]
        return bool(found) and not any(bool(each.count_nonzero()) for each in found)

    def close(self) -> None:
        """Takes the hooks off the tensors."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class GradientWatch:
    """The gradients of one step as backward leaves them. Not for several threads at once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[torch.Tensor | None, int, torch.Tensor | None]] = {}
        """By place: the gradient, its version by torch's count, and some of its elements: a
        GradScaler, which scales back, does not count."""
        self._options: Mapping[str, Any] = {}
        self._change: str | None = None

    @property
    def is_empty(self) -> bool:
        """True if no backward pass has run in it."""
        return not self._seen

    def begin_anew(self) -> None:
        """Forgets the gradients, which are for no step."""
        self._seen.clear()
        self._change = None

    def add(
        self,
        place: int,
        gradient: torch.Tensor | None,
        options: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Notes a gradient that backward has made for the tensor of that number."""
        if not self._seen:
            self._options = options()
        if place in self._seen:
            self._change = "gradients of several backward passes accumulate"
        version = -1 if gradient is None else gradient._version
        self._seen[place] = gradient, version, _some_of(gradient)

    def change(
        self, gradients: Sequence[torch.Tensor | None], options: Mapping[str, Any]
    ) -> str | None:
        """Returns the change since backward, in words; None: nothing has changed."""
        if self._change is not None:
            return self._change
        for place, (seen, version, some) in self._seen.items():
            now = gradients[place]
            is_same = now is seen and (now is None or now._version == version)
            if is_same and some is not None:
                is_same = torch.equal(some, _some_of(now))
            if not is_same:
                return "gradients are changed, as by clipping or a GradScaler,"
        if any(options[name] != self._options[name] for name in _AGREED):
            return "sample_count or the learning rate is changed"
        return None


def _some_of(gradient: torch.Tensor | None) -> Any:
    """Returns a copy of some elements; None: it has none of its own in a row."""
    if gradient is None or gradient.layout != torch.strided:
        return None
    flat = gradient.detach().reshape(-1)
    return flat[:: max(len(flat) // _SEEN_COUNT, 1)].nan_to_num()  # as NaN is not equal to itself
