r"""Bytes of a tree of plain values and arrays, such as what `state_dict()` returns. Pure.

    SWST1\n   length of the JSON, 4 bytes   JSON   bytes of the arrays, one behind the other

The JSON is the tree; what JSON has not is an object of one key:

    {"d": [[key, value], ...]}      a dict, whose keys are plain values; {"c": ...} a Counter
    {"t": [...]}                    a tuple; a list is a list
    {"f": "nan"}                    a number that is not finite
    {"b": size}                     bytes
    {"a": [dtype, shape]}           an array of NumPy; {"n": dtype} a scalar of it
    {"x": [form, dtype, shape]}     another library's array, which its `ArrayForm` makes

Nothing of it is believed when it is read, and nothing in it can run. On its way it is cut into
pages, at the first array too: so arrays that workers have alike are in pages that are alike.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardwell.errors import ArgumentError, CorruptChunkError

_MAGIC = b"SWST1\n"
_DEPTH_MAX = 64
_KINDS = "biufc"
"""Kinds of dtypes whose values are plain numbers."""


class ArrayForm(Protocol):
    """Another library's arrays."""

    name: str

    def parts(self, value: Any) -> tuple[str, tuple[int, ...], bytes | memoryview] | None:
        """Returns dtype, shape and bytes of an array; None: the value is no such array.

        The bytes are copied before the value may change.
        """

    def made(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
        """Returns the array; ValueError: there is none."""


def packed(tree: Any, what: str, forms: Sequence[ArrayForm] = ()) -> bytes:
    """Returns the bytes of a tree; ArgumentError names what in `what` has none."""
    arrays: list[bytes | memoryview] = []
    text = json.dumps(_packed(tree, what, forms, arrays, 0), separators=(",", ":")).encode()
    return b"".join((_MAGIC, len(text).to_bytes(4, "little"), text, *arrays))


def _packed(
    value: Any, where: str, forms: Sequence[ArrayForm], arrays: list[bytes | memoryview], depth: int
) -> Any:
    if depth > _DEPTH_MAX:
        raise ArgumentError(f"{where:.200} is nested deeper than {_DEPTH_MAX}")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"f": str(value)}
    if isinstance(value, Mapping):
        pairs = [
            [
                _packed(key, f"a key of {where}", forms, arrays, depth + 1),
                _packed(each, f"{where}[{key!r:.60}]", forms, arrays, depth + 1),
            ]
            for key, each in value.items()
        ]
        return {"c" if isinstance(value, Counter) else "d": pairs}
    if type(value) in (list, tuple):
        found = [
            _packed(each, f"{where}[{index}]", forms, arrays, depth + 1)
            for index, each in enumerate(value)
        ]
        return found if type(value) is list else {"t": found}
    if type(value) in (bytes, bytearray):
        arrays.append(bytes(value))
        return {"b": len(value)}
    for form in forms:
        parts = form.parts(value)
        if parts is not None:
            arrays.append(parts[2])
            return {"x": [form.name, parts[0], list(parts[1])]}
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        array = _as_array(value)
        if array is not None and array.dtype.kind in _KINDS:
            little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
            arrays.append(little.tobytes())
            if isinstance(value, np.generic):
                return {"n": little.dtype.str}
            return {"a": [little.dtype.str, list(array.shape)]}
    raise ArgumentError(
        f"{where:.200} is a {type(value).__module__}.{type(value).__qualname__}, which the shards "
        "do not keep: give an object whose state has numbers, strings, lists, dicts and arrays"
    )


def pages_of(data: bytes, size_max: int) -> list[memoryview]:
    """Cuts the bytes of a tree into pages of at most that many bytes, which are views of it."""
    if len(data) <= size_max:
        return [memoryview(data)]
    start = len(_MAGIC) + 4
    stop = min(start + int.from_bytes(data[len(_MAGIC) : start], "little"), len(data))
    cuts = [*range(0, stop, size_max), *range(stop, len(data), size_max), len(data)]
    return [memoryview(data)[begin:end] for begin, end in itertools.pairwise(cuts)]


def digest_of(page: bytes | memoryview) -> bytes:
    """Returns the digest by which a page is known."""
    return sha256(page).digest()


def _as_array(value: Any) -> npt.NDArray[Any] | None:
    try:
        return np.asarray(value)
    except TypeError:  # such as keys of JAX, which are no numbers
        return None


def unpacked(data: bytes, forms: Sequence[ArrayForm] = ()) -> Any:
    """Returns the tree; CorruptChunkError: the bytes are none."""
    try:
        start = len(_MAGIC) + 4
        stop = start + int.from_bytes(data[len(_MAGIC) : start], "little")
        if data[: len(_MAGIC)] != _MAGIC or stop > len(data):
            raise ValueError("its head")
        reader = _Reader(data, stop, {form.name: form for form in forms})
        found = reader.value(json.loads(data[start:stop]), 0)
        if reader.at != len(data):
            raise ValueError(f"{len(data) - reader.at} bytes too many")
    except (ValueError, LookupError, TypeError, SyntaxError, RecursionError) as error:
        raise CorruptChunkError(
            f"{len(data)} bytes are no state of a training ({error}); use the version that "
            "wrote them"
        ) from None
    return found


class _Reader:
    def __init__(self, data: bytes, at: int, forms: Mapping[str, ArrayForm]) -> None:
        self._data = data
        self.at = at
        self._forms = forms

    def value(self, node: Any, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise ValueError("it is nested too deep")
        if isinstance(node, list):
            return [self.value(each, depth + 1) for each in node]
        if not isinstance(node, dict):
            return node
        ((kind, given),) = node.items()
        match kind:
            case "d":
                return dict(self._pairs(given, depth))
            case "c":
                return Counter(dict(self._pairs(given, depth)))
            case "t":
                return tuple(self.value(each, depth + 1) for each in given)
            case "f":
                return float({"nan": "nan", "inf": "inf", "-inf": "-inf"}[given])
            case "b":
                return self._bytes(given)
            case "a":
                return self._array(given[0], _shape(given[1]))
            case "n":
                return self._array(given, ())[()]
            case "x":
                name, dtype, shape = given[0], str(given[1]), _shape(given[2])
                if name not in self._forms:
                    raise ValueError(f"it has arrays of {name!r:.40}, which this program has not")
                rest = self._data[self.at :]
                made = self._forms[name].made(dtype, shape, rest)
                self._bytes(int(made.nbytes))
                return made
        raise ValueError(f"a value of kind {kind!r:.40}")

    def _pairs(self, given: Any, depth: int) -> Iterator[tuple[Any, Any]]:
        for key, value in given:
            yield self.value(key, depth + 1), self.value(value, depth + 1)

    def _bytes(self, size: Any) -> bytes:
        if type(size) is not int or not 0 <= size <= len(self._data) - self.at:
            raise ValueError(f"{size!r:.40} bytes, which it has not")
        start, self.at = self.at, self.at + size
        return self._data[start : self.at]

    def _array(self, name: Any, shape: tuple[int, ...]) -> Any:
        dtype = np.dtype(str(name))
        if dtype.kind not in _KINDS or dtype.hasobject:
            raise ValueError(f"an array of {name!r:.40}")
        data = self._bytes(math.prod(shape) * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(shape).copy()


def _shape(given: Any) -> tuple[int, ...]:
    if not all(type(each) is int and each >= 0 for each in given) or len(given) > _DEPTH_MAX:
        raise ValueError(f"a shape {given!r:.60}")
    return tuple(given)
