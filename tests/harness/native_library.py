"""Native code as the package's build makes it, for one set of instructions or another."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shardwell.numerics import native

ROOT = Path(__file__).parents[2]


def builder() -> ModuleType:
    """The package's hook."""
    pytest.importorskip("hatchling")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import build_native
    finally:
        sys.path.pop(0)
    return build_native


def built(to: Path, *flags: str) -> Path:
    """The library, built to a file; skips the test where there is no compiler."""
    build_native = builder()
    if build_native.compiler()[0] == sys.executable:
        pytest.skip("no C compiler here")
    build_native.build(ROOT, to, flags=flags)
    return to


def library_of(folder: Path, flags: str) -> native.Library:
    """The library, built with flags or "", and loaded; skips the test where there can be none."""
    if os.environ.get(native.NATIVE_VARIABLE) == "off":
        pytest.skip("native code is off")
    if flags and platform.machine() != "x86_64":
        pytest.skip("one set of instructions")
    found, missing = native.load(built(folder / "kernels.so", *flags.split()))
    if found is None:
        pytest.skip(missing)
    assert "AVX512" not in flags or found.variant == "AVX2"
    return found
