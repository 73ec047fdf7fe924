"""Goal: results have the same bits on every machine, and however a process there computes them.

Method: tests/data/digests.json has a digest of each kind of result (harness/digests.py). Each
machine that runs the tests compares its own: in this process, and in some that have instructions
of other processors (in native code, NumPy, BLAS and libc), other threads, places in memory and
transports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.digests import OFFSET_VARIABLE, RECORD, current
from harness.native_library import library_of
from shardwell.numerics.native import LIBRARY_NAME

FOUND = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
"""The sets of instructions, besides a baseline, that NumPy has code for and this machine has."""
WIDE = [name for name in FOUND if "512" in name or name == "X86_V4"]
LIBC = "glibc.cpu.hwcaps=" + ",".join(
    f"-{name}{form}"  # the latter before glibc 2.33
    for name in ("AVX512F", "AVX2", "FMA", "FMA4")
    for form in ("", "_Usable")
)
ANY_BLAS = ("Prescott", "Nehalem")
"""Which OpenBLAS may be made to compute as if on: others only where the processor can."""
OLD, OLDEST = " ".join(WIDE), " ".join(FOUND)
SETTINGS = {
    "NumPy": ("Zen", {"SHARDWELL_NATIVE": "off", "OPENBLAS_NUM_THREADS": "4"}),
    "NumPy, no AVX-512": (
        *("Haswell",),
        {"SHARDWELL_NATIVE": "off", "NPY_DISABLE_CPU_FEATURES": OLD, OFFSET_VARIABLE: "3"},
    ),
    "NumPy, its baseline": (
        *("Prescott",),
        {"SHARDWELL_NATIVE": "off", "NPY_DISABLE_CPU_FEATURES": OLDEST, "GLIBC_TUNABLES": LIBC},
    ),
    "native code, NumPy's baseline": (
        *("Nehalem",),
        {"NPY_DISABLE_CPU_FEATURES": OLDEST, "GLIBC_TUNABLES": LIBC, "OPENBLAS_NUM_THREADS": "1"},
    ),
    "native code, no AVX-512": ("Sandybridge", {OFFSET_VARIABLE: "1"}),
    "gRPC alone, threads": ("SkylakeX", {"SHARDWELL_SAME_HOST": "off", "SHARDWELL_THREADS": "4"}),
}


def test_digests_of_this_process() -> None:
    check("this process", current())


@pytest.mark.parametrize("name", SETTINGS)
def test_in_a_process_with(name: str, tmp_path: Path) -> None:
    blas, variables = SETTINGS[name]
    inherited = {key: value for key, value in os.environ.items() if "SHARDWELL" not in key}
    needed = WIDE if blas == "SkylakeX" else FOUND
    if blas in ANY_BLAS or needed:
        variables = {"OPENBLAS_CORETYPE": blas, **variables}
    command = [sys.executable, "-m", "harness.digests"]
    if name == "native code, no AVX-512":
        library_of(tmp_path, "-DWITHOUT_AVX512")
        command += ["--native", str(tmp_path / LIBRARY_NAME)]
    printed = subprocess.run(
        command, env=inherited | variables, cwd=RECORD.parents[1], text=True, capture_output=True
    )
    assert printed.returncode == 0, printed.stderr
    shown = " ".join(f"{key}='{value}'" for key, value in variables.items())
    check(f"{shown} PYTHONPATH=tests {' '.join(command)}", json.loads(printed.stdout))


def check(how: str, found: dict[str, str]) -> None:
    kept = json.loads(RECORD.read_text())
    differ = [
        f"  {case}: {digest} here, {kept.get(case, 'none')} kept"
        for case, digest in found.items()
        if kept.get(case) != digest
    ]
    differ += [f"  {case}: not computed here" for case in kept.keys() - found.keys()]
    if differ:
        pytest.fail(
            f"{len(differ)} of {len(kept)} results have other bits, by {how}:\n"
            + "\n".join(differ[:20])
            + "\nIf this change was to give them other bits everywhere (docs/guarantees.md says "
            "which may), write them down: PYTHONPATH=tests .venv/bin/python -m harness.digests "
            "--write. Else find what this setting computes differently."
        )
