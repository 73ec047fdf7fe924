"""Names of a model's tensors as the plain model has them: without those of wrappers.

`torch.compile` puts `_orig_mod.` in front of a name, DistributedDataParallel and DataParallel
`module.`. On the cluster a tensor has one name, whatever a worker wraps its model in, and an export
loads into the plain model. A user's own module that is called `module` keeps its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardwell.errors import ArgumentError

_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Children of torch's wrappers, whose names nothing else has."""


class PlainNames:
    """The plain name of each tensor of a model, which may be wrapped."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Returns the plain name of what the model calls so."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._stripped(name)
        return known

    def of(self, named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """The objects that a model's method has named, under plain names."""
        found: dict[str, Any] = {}
        given: dict[str, str] = {}
        for name, value in named:
            plain = self(name)
            if plain in found and found[plain] is not value:
                raise ArgumentError(
                    f"tensors {given[plain]!r} and {name!r} of the model would both be {plain!r} "
                    "without the names of wrappers; rename one"
                )
            found[plain], given[plain] = value, name
        return found

    def _stripped(self, name: str) -> str:
        module: Any = self._model
        kept = []
        for part in name.split("."):
            children: Mapping[str, Any] = getattr(module, "_modules", {})
            child = children.get(part)
            if child is None or not _wraps(module, part):
                kept.append(part)
            module = child
        return ".".join(kept)


def _wraps(module: torch.nn.Module, child: str) -> bool:
    if child in _WRAPPED:
        return True
    if child != "module":
        return False
    parallel: tuple[type, ...] = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    return isinstance(module, parallel)
