"""A file system that is soon full: a tmpfs, where this user may mount one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A file system of its own, which is filled and emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Leaves no byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        assert shutil.disk_usage(self.path).free == 0

    def empty(self) -> None:
        """Gives back what `fill` took."""
        self._filler.unlink()

    def remount(self, how: str) -> None:
        """`ro` or `rw`."""
        subprocess.run(["mount", "-o", f"remount,{how}", self.path], check=True)


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mounts one at a directory that it makes; skips the test where that is not allowed."""
    path.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount a small disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
