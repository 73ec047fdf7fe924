"""The gradients and weights of callers: accepted, converted or refused with a reason."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.ma  # here, and not at its first use on a thread: see connection/options.py
import numpy.typing as npt

from shardwell.errors import ArgumentError, NonFiniteError
from shardwell.numerics.codec import Float32, first_non_finite

_FLOAT32 = np.dtype(np.float32)
_ACCEPTED = (np.float32, np.float64, np.float16)


def as_array(what: str, values: Any) -> npt.NDArray[Any]:
    """An array of what offers one, uncopied where it can be; bfloat16 becomes float32."""
    if type(values) is np.ndarray:
        return values
    given = values
    try:
        if hasattr(given, "detach"):  # a torch tensor, which gives no array while it has a gradient
            given = given.detach()
        if str(getattr(given, "dtype", "")) == "torch.bfloat16":  # which NumPy does not know
            given = given.float()
        if hasattr(given, "__array__"):
            array = np.asarray(given)
            return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        if hasattr(given, "__dlpack__"):
            return np.from_dlpack(given)
        return np.asarray(memoryview(given))
    except Exception as error:  # of several kinds: on a GPU, sparse, a list
        remedy = "pass np.asarray(values, np.float32)"
        if hasattr(values, "detach"):
            is_sparse = str(getattr(values, "layout", "torch.strided")) != "torch.strided"
            remedy = f"pass {'tensor.to_dense()' if is_sparse else 'tensor.detach().cpu()'}"
        raise ArgumentError(
            f"{what} must be a NumPy array of float32, or a tensor on the CPU; got "
            f"{_described(values)}, which gives none: {error}; {remedy}"
        ) from None


def _listed(what: str, values: Any) -> npt.NDArray[np.float32]:
    try:
        array = np.asarray(values)
        if array.dtype.kind in "iuf":
            with np.errstate(over="ignore"):  # what comes of it is refused, as of an array
                return array.astype(np.float32)
        reason = f"its elements are {array.dtype}"
    except Exception as error:  # of several kinds: rows of unlike lengths, tensors on a GPU
        reason = str(error)
    raise ArgumentError(
        f"{what} must be an array of float32, or a list of numbers; got a {type(values).__name__} "
        f"that is none ({reason:.200}); pass numbers alone, in rows of one length"
    )


def as_floats(what: str, values: Any) -> npt.NDArray[Any]:
    """The values as an array of floating point numbers of any shape, or ArgumentError."""
    array = _listed(what, values) if type(values) in (list, tuple) else as_array(what, values)
    if array.dtype.type not in _ACCEPTED:
        raise ArgumentError(
            f"{what} must be float32 (float64 and float16 are converted); got {array.dtype}; "
            "convert it with .astype(np.float32)"
        )
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ArgumentError(f"{what} has masked elements; fill them with .filled(0)")
    return array


def as_flat(what: str, values: Any, size: int | None) -> npt.NDArray[Any]:
    """The values as one dimension of floating point numbers, uncopied where they are contiguous."""
    if type(values) is np.ndarray and values.shape == (size,) and values.dtype == np.float32:
        return values
    array = as_floats(what, values)
    if size is not None and array.size != size:
        raise ArgumentError(
            f"{what} must have {size} elements; got {array.size} in shape {array.shape}"
        )
    return array.reshape(-1)


def as_output(out: Any, size: int | None, what: str = "out") -> Float32:
    """The caller's `out=` as one dimension of float32 that can be written in place."""
    is_plain = type(out) is np.ndarray and out.dtype is _FLOAT32 and out.flags.carray
    if is_plain and (size is None or out.size == size):
        flat: Float32 = out.reshape(-1)
        return flat
    given = out
    if hasattr(out, "detach"):
        with contextlib.suppress(Exception):  # on another device, sparse: refused below
            out = out.detach().numpy()
    if (
        not isinstance(out, np.ndarray)
        or out.dtype != np.float32
        or not out.dtype.isnative
        or (size is not None and out.size != size)
        or not out.flags.c_contiguous
        or not out.flags.aligned
        or not out.flags.writeable
    ):
        found = (
            f"{out.dtype} of shape {out.shape}, contiguous={out.flags.c_contiguous}, "
            f"writeable={out.flags.writeable}"
            if isinstance(out, np.ndarray)
            else _described(given)
        )
        length = "" if size is None else f" of {size} elements"
        raise ArgumentError(
            f"{what} must be a writable C-contiguous float32 NumPy array{length}, or such a tensor "
            f"on the CPU; got {found}"
        )
    return np.asarray(out).reshape(-1)


def _described(values: Any) -> str:
    kind, dtype = type(values).__name__, getattr(values, "dtype", None)
    return kind if dtype is None else f"{kind} of {dtype!s:.40}"


OF_PARAMETER = "skip or mend the step, or open the parameter with allow_non_finite=True"
"""The remedy for a caller that opened the parameter itself."""
REFUSED_STEP = "abandon_step() ends the step; or open the {} with allow_non_finite=True"
"""The SDK's addition to the text of a shard that refused a part, for the caller that opened it."""


def check_finite(
    what: str,
    values: npt.NDArray[Any],
    parameter: str | None,
    offset: int = 0,
    remedy: str = OF_PARAMETER,
    name_of: Callable[[int], str] = "element {}".format,
    rank: int | None = None,
) -> None:
    """Refuses values that are no finite float32; `offset` is the first one's index for messages."""
    index = first_non_finite(values)
    if index is not None:
        element = name_of(offset + index)
        raise NonFiniteError(
            f"{what}: {element} is {values[index]}, which is not a finite float32; {remedy}",
            element_index=offset + index,
            parameter=parameter,
            rank=rank,
        )


def check_integer(what: str, value: Any, low: int, high: int) -> int:
    """Returns an integer, of any integer type, from `low` to `high`; ArgumentError: it is none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)) or not low <= number <= high:
        raise ArgumentError(f"{what} must be an integer from {low} to {high}; got {value!r:.80}")
    return number
