"""Native code for arithmetic, rows and tensors, where it was built with the package.

It is never needed: where it is missing, or the processor is none that it knows, NumPy computes the
same. SHARDWELL_NATIVE=off leaves it unused.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NATIVE_VARIABLE = "SHARDWELL_NATIVE"
LIBRARY_NAME = "kernels.so"
INTERFACE = 6
"""The number in dispatch.c. It changes when operations or the arguments of `run` change, so that a
library that an older version built is not used."""
_FOLDER = Path(__file__).parent


class Library(SimpleNamespace):
    """The functions of the library, by their names in `_CALLS`.

    They are given objects that have memory, and let go of the GIL where they take long.
    """

    variant: str
    checks: bool
    """True if operations check, in one pass with others."""


_OBJECT, _NUMBER, _CRC = ctypes.py_object, ctypes.c_uint64, ctypes.c_uint32
_CALLS: dict[str, tuple[Any, ...]] = {
    # See dispatch.c; the arguments are operations, their count, arrays, start, stop and CRC.
    "run": (ctypes.c_char_p, _NUMBER, _OBJECT, _NUMBER, _NUMBER, _CRC),
    # See rows.c.
    "check_ids": (_OBJECT, _NUMBER, _NUMBER, _NUMBER),
    "find": (_OBJECT, _NUMBER, _OBJECT, _NUMBER, _OBJECT),
    "sort_ids": (_OBJECT, _NUMBER, _NUMBER, _OBJECT),
    "gather": (_OBJECT, _NUMBER, _OBJECT, _OBJECT, _NUMBER),
    "scatter": (_OBJECT, _NUMBER, _OBJECT, _OBJECT, _NUMBER),
    "spread": (
        *(ctypes.c_char_p, _OBJECT, _NUMBER, _OBJECT, _OBJECT, _NUMBER, _NUMBER, _OBJECT, _CRC),
    ),
    "add_up": (_OBJECT, _NUMBER, _OBJECT, _OBJECT, _OBJECT, _OBJECT),
    "update": (
        *(ctypes.c_char_p, _NUMBER, _OBJECT, _OBJECT, _NUMBER),
        *(_OBJECT, _OBJECT, _NUMBER, _OBJECT, _OBJECT),
    ),
    "hash_rows": (_OBJECT, _NUMBER, _NUMBER, _NUMBER, _OBJECT, _OBJECT),
    # See tensors.c.
    "look_over": (_OBJECT, _OBJECT, _OBJECT, _OBJECT),
    "move": (_OBJECT, _OBJECT, _OBJECT, _NUMBER, _NUMBER, _OBJECT, _NUMBER),
}
_PYTHONS = (
    "PyObject_GetBuffer",
    "PyBuffer_Release",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "PyTuple_Size",
    "PyTuple_GetItem",
    "PyObject_Type",
    "Py_DecRef",
)
"""The names of Python's stable interface that the library uses: see objects.h."""


def load(path: Path) -> tuple[Library | None, str]:
    """The library of a file, and why there is none."""
    setting = os.environ.get(NATIVE_VARIABLE, "").strip()
    if setting.lower() in ("off", "0", "no", "false"):
        return None, f"{NATIVE_VARIABLE}={setting}"
    try:
        library = ctypes.PyDLL(str(path))
        if library.shardwell_interface() != INTERFACE:
            return None, "built for another version"
        library.shardwell_variant.restype = ctypes.c_char_p
        variant = library.shardwell_variant()
        checks = bool(library.shardwell_checks())
        calls = {name: getattr(library, f"shardwell_{name}") for name in _CALLS}
        pythons = [
            ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in _PYTHONS
        ]
        library.shardwell_attach(*pythons, ctypes.c_void_p(id(None)))
    except (OSError, AttributeError):
        return None, "no native code was built" if not path.exists() else f"can't load {path.name}"
    if not variant:
        return None, "a processor without AVX2"
    for name, call in calls.items():
        call.restype = ctypes.c_int64
        call.argtypes = _CALLS[name]
    return Library(variant=variant.decode(), checks=checks, **calls), ""


LIBRARY, _MISSING = load(_FOLDER / LIBRARY_NAME)


def describe() -> str:
    """The code that computes in this process, in a few words."""
    return f"NumPy ({_MISSING})" if LIBRARY is None else f"native code ({LIBRARY.variant})"
