"""Builds client/shardwell/numerics/native when the package is built: hatchling's hook.

With the machine's C compiler, or with ziglang's where there is none. Where neither builds it, the
package is as good without, and slower; that is said once (pip shows it with -v). For another
machine:

    SHARDWELL_WHEEL_TARGET=aarch64-linux-gnu.2.17 pip wheel --no-deps .
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("client/shardwell/numerics/native")
LIBRARY_NAME = "kernels.so"
TARGET_VARIABLE = "SHARDWELL_WHEEL_TARGET"
PLATFORMS = {
    "x86_64-linux-gnu.2.17": "manylinux_2_17_x86_64",
    "aarch64-linux-gnu.2.17": "manylinux_2_17_aarch64",
    "x86_64-macos.11.0": "macosx_11_0_x86_64",
    "aarch64-macos.11.0": "macosx_11_0_arm64",
}
"""Zig's targets, and what wheels for them are called."""
FLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    # Each product and sum rounds by itself, as NumPy's do; no code reads errno and exceptions.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
X86_64 = {
    "shardwell_avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"),
        "-mprefer-vector-width=512",
    ),
    "shardwell_avx2": ("-mavx2", "-mf16c"),
}
CRCS_X86_64 = {
    "shardwell_crc_512": ("-mavx512f", "-mavx512dq", "-mpclmul", "-mvpclmulqdq", "-msse4.2"),
    "shardwell_crc_128": ("-mavx2", "-mpclmul", "-msse4.2"),
}
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": X86_64,
    "amd64": X86_64,
    "aarch64": {"shardwell_neon": ()},
    "arm64": {"shardwell_neon": ()},
}
"""By processor: what kernels.c is compiled as, and for which instructions."""
CRCS_ARM64 = {"shardwell_crc_128": ("-mcpu=generic+crc+crypto",)}
CRCS = {
    "x86_64": CRCS_X86_64,
    "amd64": CRCS_X86_64,
    "aarch64": CRCS_ARM64,
    "arm64": CRCS_ARM64,
}
"""The same of crc.c."""


def compiler(target: str = "") -> list[str]:
    """The command that compiles C."""
    if target:
        return [sys.executable, "-m", "ziglang", "cc", "-target", target]
    found = os.environ.get("CC") or shutil.which("cc")
    return shlex.split(found) if found else [sys.executable, "-m", "ziglang", "cc"]


def build(root: Path, to: Path, *, target: str = "", flags: tuple[str, ...] = ()) -> None:
    """Compiles the library to `to`.

    Args:
        root: The repository's.
        to: A file.
        target: One of PLATFORMS; empty: this machine.
        flags: Besides.

    Raises:
        RuntimeError: it can't be built; says why.
    """
    machine = _machine(target)
    if machine not in VARIANTS:
        raise RuntimeError(f"there are no kernels for {machine}")
    command = [*compiler(target), *FLAGS, *flags]
    if "ziglang" in command:
        command.append("-fno-sanitize=undefined")  # on by default there, and ends the process
    sources = root / SOURCES
    with tempfile.TemporaryDirectory() as folder:
        parts = {f"{name}.o": (source, (f"-DVARIANT={name}", *instructions))
                 for source, variants in (("kernels.c", VARIANTS), ("crc.c", CRCS))
                 for name, instructions in variants.get(machine, {}).items()}  # fmt: skip
        parts |= {
            f"{name}.o": (f"{name}.c", ()) for name in ("dispatch", "objects", "rows", "tensors")
        }
        for name, (source, options) in parts.items():
            _run([*command, *options, "-c", str(sources / source), "-o", f"{folder}/{name}"])
        made = Path(folder, LIBRARY_NAME)
        _run([*command, "-shared", *(f"{folder}/{name}" for name in parts), "-o", str(made)])
        # Whole for processes that load it meanwhile; one that has the library before goes on with
        # that.
        whole = to.with_name(f"{to.name}.{os.getpid()}")
        try:
            shutil.copyfile(made, whole)
            whole.replace(to)
        except OSError:
            with contextlib.suppress(OSError):
                whole.unlink(missing_ok=True)
            raise


def _machine(target: str) -> str:
    return (target.split("-")[0] if target else platform.machine()).lower()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")


class NativeCode(BuildHookInterface[Any]):
    """The build hook, which compiles native code into a wheel."""

    _folder = ""
    """Of a library that goes into a wheel."""

    def dependencies(self) -> list[str]:
        """What pip is to fetch for the build."""
        target = os.environ.get(TARGET_VARIABLE, "")
        wants = self._is_wheel and _machine(target) in VARIANTS and "ziglang" in compiler(target)
        return ["ziglang>=0.13"] if wants else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Of a wheel: beside the sources where they are used as they lie, else in the wheel."""
        if not self._is_wheel:
            return
        target = os.environ.get(TARGET_VARIABLE, "")
        if target and target not in PLATFORMS:
            raise ValueError(f"{TARGET_VARIABLE} must be one of {', '.join(PLATFORMS)}: {target!r}")
        is_editable = version == "editable"
        if is_editable:
            library = Path(self.root, SOURCES, LIBRARY_NAME)
        else:
            self._folder = tempfile.mkdtemp()
            library = Path(self._folder, LIBRARY_NAME)
        try:
            build(Path(self.root), library, target=target)
        except (RuntimeError, OSError) as error:
            if target:
                raise
            with contextlib.suppress(OSError):  # a folder that may not be written has its own
                library.unlink(missing_ok=True)
            self.app.display_warning(
                f"no native code was built, so that NumPy computes, a little slower: {error}"
            )
            return
        if not is_editable:
            build_data["force_include"][str(library)] = "shardwell/numerics/native/" + LIBRARY_NAME
            build_data["pure_python"] = False
            name = PLATFORMS.get(target) or sysconfig.get_platform()
            build_data["tag"] = "py3-none-" + name.replace("-", "_").replace(".", "_")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leaves nothing behind."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _is_wheel(self) -> bool:
        return bool(self.target_name == "wheel")
