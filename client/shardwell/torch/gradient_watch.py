"""What happens to gradients between backward and `step`, seen in one step in which nothing leaves.

It decides nothing: `ServerOptimizer` does, with overlap="auto".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_AGREED = ("sample_count", "learning_rate")
"""Options that must be the same before and after backward."""


class GradientWatch:
    """Gradients of one step as backward leaves them. Not for several threads at once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[torch.Tensor | None, int]] = {}
        """By place: the gradient, and its version by torch's count."""
        self._options: Mapping[str, Any] = {}
        self._change: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no backward pass has run in it."""
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
        """Notes a gradient that backward has made.

        Args:
            place: Number of its tensor.
            gradient: The gradient as the tensor has it.
            options: Returns how the step is exchanged; called at the first gradient.
        """
        if not self._seen:
            self._options = options()
        if place in self._seen:
            self._change = "gradients of several backward passes accumulate"
        self._seen[place] = gradient, -1 if gradient is None else gradient._version

    def change(
        self, gradients: Sequence[torch.Tensor | None], options: Mapping[str, Any]
    ) -> str | None:
        """What has changed since backward, in words; None: nothing.

        Args:
            gradients: The gradients that the tensors have now, by number.
            options: How the step is exchanged now.
        """
        if self._change is not None:
            return self._change
        for place, (seen, version) in self._seen.items():
            now = gradients[place]
            if now is not seen or (now is not None and now._version != version):
                return "gradients are changed, as by clipping or a GradScaler,"
        if any(options[name] != self._options[name] for name in _AGREED):
            return "sample_count or the learning rate is changed"
        return None
