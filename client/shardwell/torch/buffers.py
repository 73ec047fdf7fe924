"""Flat memory that NumPy and torch share, and a model's tensors in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shardwell.errors import ArgumentError
from shardwell.parameter.values import TensorViews
from shardwell.specs.layout import TensorLayout


class FlatTensors:
    """Views of one float32 buffer, as a layout has them: torch's, and NumPy's of the same memory.

    Args:
        layout: Layout of the parameter.
        is_pinned: Whether a GPU copies from and to it without waiting.
    """

    def __init__(self, layout: TensorLayout, *, is_pinned: bool = False) -> None:
        # Named, for a program may have another default device.
        flat = torch.zeros(layout.size, dtype=torch.float32, device="cpu", pin_memory=is_pinned)
        self.views = [flat[t.offset : t.stop].view(t.shape) for t in layout]
        """In the order of the layout."""
        self.arrays = TensorViews(layout, flat.numpy())
        """By name."""


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Returns if a tensor has values.

    Raises:
        ArgumentError: it has none.
    """
    if tensor.device.type == "meta":
        raise ArgumentError(
            f"tensor {name!r} is on device 'meta', which has no values; give the model memory first"
        )


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Returns if a parameter can hold the tensor.

    Raises:
        ArgumentError: its values are no real numbers, or it has no memory that can be read, or not
            all of it is in this process.
    """
    if hasattr(tensor, "full_tensor"):  # DTensor's
        raise ArgumentError(
            f"tensor {name!r} is a DTensor, as of FSDP or tensor parallelism: a part of it is in "
            "each of several processes, and a worker has all of its model; leave the model whole"
        )
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise ArgumentError(
            f"tensor {name!r} has no shape yet, being of a lazy layer; run the model once before"
        )
    if not tensor.is_floating_point():
        raise ArgumentError(
            f"tensor {name!r} is {tensor.dtype}; only floating point is trained; leave it out, or "
            "set requires_grad=False"
        )
    check_readable(name, tensor)
    if tensor.layout != torch.strided:
        raise ArgumentError(f"tensor {name!r} is {tensor.layout}; only dense tensors are trained")


def is_sent_in_place(gradient: torch.Tensor) -> bool:
    """Whether it can be sent from where it lies."""
    return (
        gradient.dtype == torch.float32
        and gradient.device.type == "cpu"
        and bool(gradient.is_contiguous())
    )


def copy_all(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    non_blocking: bool = False,
) -> None:
    """Copies each source to its target; with `non_blocking`, a GPU is to be waited for."""
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def as_float32(name: str, tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    """Floating point values on the CPU, rounded to float32.

    Raises:
        ArgumentError: it has no values, or finite ones beyond float32's largest.
    """
    check_readable(name, tensor)
    own = tensor.detach().cpu()
    values = own.to(torch.float32)
    if own.dtype == torch.float64 and bool((values.isinf() & ~own.isinf()).any()):
        raise ArgumentError(
            f"tensor {name!r} has values beyond {np.finfo(np.float32).max:g}, float32's largest, "
            "in which means are made; make it a buffer with persistent=False, which stays each "
            "worker's own"
        )
    array: npt.NDArray[np.float32] = values.numpy()
    return array
