"""Disks that fail: calls of the system that fail by number, and small disks that are filled."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.store.files.mapped import Mapping

HINTS = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "raise the quota",
    errno.EROFS: "remount the disk for writing",
    errno.EACCES: "let the shard's user write there",
    errno.EMFILE: "raise the limit of open files",
    errno.EIO: "check the disk",
}
"""What an error says that is to be done."""


class FailingSystem:
    """Calls of the system, of which one, by number, fails."""

    NAMES = ("open", "posix_fallocate", "ftruncate", "pwrite", "replace", "mkdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.call_count = 0
        self.failing = -1
        self.error_number = errno.ENOSPC
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))
        monkeypatch.setattr(Mapping, "__init__", self._wrapped(Mapping.__init__))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.call_count += 1
            if self.call_count == self.failing:
                raise OSError(self.error_number, os.strerror(self.error_number))
            return call(*args, **kwargs)

        return counted


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
    """One of that size at `path`, while the block runs; skips the test where there can be none."""
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
