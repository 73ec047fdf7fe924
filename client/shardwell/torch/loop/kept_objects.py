"""The objects that `prepare` and `DiLoCo` keep beside the weights: see `Parameter.keep_state`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwell.errors import ArgumentError

_LOG = logging.getLogger("shardwell")
_DTYPES = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""Those whose values are not quantized."""
_BUFFERS_SIZE_MAX_BYTES = 2**19


class TensorForm:
    """Tensors in the trees of `wire/state_tree.py`; read, they are on the CPU."""

    name = "torch"

    def parts(self, value: Any) -> tuple[str, tuple[int, ...], memoryview] | None:
        """Returns a strided tensor's dtype, shape and bytes; None: it is none."""
        if not isinstance(value, torch.Tensor) or str(value.dtype) not in _DTYPES:
            return None
        if value.layout is not torch.strided:
            return None
        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().data

    def made(self, dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
        """Returns the tensor that the data begin with."""
        if dtype not in _DTYPES:
            raise ValueError(f"a tensor of {dtype!r:.40}")
        kind = _DTYPES[dtype]
        size = math.prod(shape) * kind.itemsize
        if size > len(data):
            raise ValueError(f"a tensor of {shape}, and {len(data)} bytes")
        if not size:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(bytearray(data[:size]), dtype=kind).reshape(shape)


class Rates:
    """The options of an optimizer's groups, which schedules change."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns the groups without their tensors."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Sets the options, if there are as many groups."""
        groups = self._optimizer.param_groups
        if len(state) != len(groups):
            raise ArgumentError(f"{len(state)} groups; the optimizer has {len(groups)}")
        for group, given in zip(groups, state, strict=True):
            group.update(given)


class Buffers:
    """A model's buffers that its state_dict has, such as the statistics of BatchNorm."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @property
    def _buffers(self) -> dict[str, torch.Tensor]:
        """The tensors as they are now: a model that moves to a device has others."""
        return {
            f"{name}.{key}": each
            for name, module in self._model.named_modules()
            for key, each in module._buffers.items()
            if each is not None and key not in module._non_persistent_buffers_set
        }

    @staticmethod
    def of(model: torch.nn.Module) -> Buffers | None:
        """Returns them if batches change some and all are small; None: they are not kept."""
        buffers = Buffers(model)
        found = buffers._buffers
        if not any(key.endswith("running_mean") for key in found):
            return None  # as only batch and instance normalization change them
        size = sum(each.nbytes for each in found.values())
        if size <= _BUFFERS_SIZE_MAX_BYTES:
            return buffers
        _LOG.warning(
            "the model's buffers have %d bytes, and %d are kept for a worker that is started "
            "again: with prepare it goes on with those of the first worker, so call "
            "optimizer.average_buffers() before an evaluation; with DiLoCo with its own, anew",
            size,
            _BUFFERS_SIZE_MAX_BYTES,
        )
        return None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the buffers by name."""
        return self._buffers

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Writes to the buffers, if they have these names and shapes."""
        buffers = self._buffers
        shapes = [{key: each.shape for key, each in of.items()} for of in (state, buffers)]
        if shapes[0] != shapes[1]:
            raise ArgumentError("other buffers than the model has")
        for key, each in buffers.items():
            each.copy_(state[key])


def objects_of(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedules: Iterable[Any],
    scaler: Any,
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns what `Parameter.keep_state` takes; empty: nothing need be kept."""
    found: dict[str, Any] = {f"schedule{index or ''}": each for index, each in enumerate(schedules)}
    if scaler is not None:
        found["scaler"] = scaler
    buffers = Buffers.of(model)
    if buffers is not None:
        found["buffers"] = buffers
    if not found and not state:
        return {}
    found |= {f"rates{index or ''}": Rates(each) for index, each in enumerate(optimizers)}
    taken = found.keys() & state.keys()
    if taken:
        raise ArgumentError(
            f"state has {min(taken)!r}, which this training keeps by itself; call it otherwise"
        )
    return {**found, **state}


def attached(schedules: Any, plain: torch.optim.Optimizer, optimizer: Any) -> list[Any]:
    """Returns schedules, made those of the optimizer that steps in place of the plain one."""
    listed = schedules_of(schedules)
    for each in listed:
        _attach(each, plain, optimizer)
    return listed


def schedules_of(given: Any) -> list[Any]:
    """Returns what a program gives as `schedule=`, as a list."""
    listed = [] if given is None else given
    listed = list(listed) if isinstance(listed, list | tuple) else [listed]
    for each in listed:
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ArgumentError(
                f"schedule must be a scheduler of torch, or a list of them; got {each!r:.100}"
            )
    return listed


def _attach(schedule: Any, plain: torch.optim.Optimizer, optimizer: Any) -> None:
    if getattr(schedule, "optimizer", None) is plain:
        schedule.optimizer = optimizer
        step: Callable[..., Any] = optimizer.step
        if not hasattr(step, "_wrapped_by_lr_sched"):  # as schedules look whether it is theirs

            def stepped(*args: Any, **kwargs: Any) -> Any:
                optimizer._opt_called = True
                return step(*args, **kwargs)

            stepped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            optimizer.step = stepped
    for inner in getattr(schedule, "_schedulers", ()):  # of a SequentialLR or ChainedScheduler
        _attach(inner, plain, optimizer)
