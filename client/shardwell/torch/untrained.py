"""What a model has beside what is trained: buffers, and parameters that stay as they are.

The first worker's are everyone's at the start; then buffers are each worker's own, until all make
them their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwell.client import Client
from shardwell.errors import ArgumentError
from shardwell.parameter.parameter import Parameter
from shardwell.parameter.values import NamedArrays
from shardwell.specs.optimizers import SGD, Average
from shardwell.specs.parameter import ModeName
from shardwell.torch.buffers import as_arrays

_NO_UPDATE = SGD(learning_rate=0.0)
"""Of what is only handed from the first worker to the others."""


class Untrained:
    """One model's, beside the parameter `name`.

    Args:
        model: The model.
        trained: Its tensors that are trained, by name.
        client: The worker's.
        name: Of the parameter that has those.
        worker_count: Its workers.
        mode: Its mode.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Mapping[str, torch.Tensor],
        client: Client,
        name: str,
        *,
        worker_count: int,
        mode: ModeName,
    ) -> None:
        self._model = model
        self._mode = mode
        shared = _shared_of(model, trained)
        self._buffer_mean: Parameter[NamedArrays] | None = None
        options: dict[str, Any] = {"worker_count": worker_count, "mode": mode}
        if shared:
            first = client.parameter(
                f"{name}.first",
                tensors=shared,
                optimizer=_NO_UPDATE,
                codec="fp32",
                allow_non_finite=True,
                **options,
            )
            first.init(as_arrays(shared))
            with torch.no_grad():
                for tensor_name, array in first.get_weights().items():
                    shared[tensor_name].copy_(torch.from_numpy(array))
            first.close()
        if self._buffers() and mode == "sync":
            self._buffer_mean = client.parameter(
                f"{name}.buffers",
                tensors=self._buffers(),
                optimizer=Average(),
                codec="fp32",
                allow_non_finite=True,
                **options,
            )
            last = self._buffer_mean.get_weights()
            if self._buffer_mean.version:  # it starts again: those that were averaged last
                self._put_buffers(last)

    def average(self, timeout_s: float | None) -> None:
        """See `ServerOptimizer.average_buffers`."""
        if self._buffer_mean is None:
            if self._mode == "async":
                raise ArgumentError("buffers are averaged in mode='sync' alone")
            return
        mean = self._buffer_mean.exchange(as_arrays(self._buffers()), timeout_s=timeout_s)
        self._put_buffers(mean)

    def _put_buffers(self, arrays: NamedArrays) -> None:
        with torch.no_grad():
            for buffer_name, buffer in self._buffers().items():
                found = torch.from_numpy(arrays[buffer_name])
                buffer.copy_(found if buffer.is_floating_point() else found.round())

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Those that a checkpoint of the model has."""
        saved = set(self._model.state_dict(keep_vars=True))
        buffers = self._model.named_buffers()
        return {name: each for name, each in buffers if name in saved and each.numel()}


def _shared_of(
    model: torch.nn.Module, trained: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a checkpoint of the model has and is not trained."""
    state = model.state_dict(keep_vars=True)
    ids = {id(tensor) for tensor in trained.values()}
    return {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and tensor.numel() and id(tensor) not in ids
    }
