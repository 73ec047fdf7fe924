"""The use that a shard's process makes of its machine: processor, memory, disk by its files."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardwell.threads.spread import core_count
from shardwell.v1 import parameter_server_pb2 as pb

_KEPT_S = 30.0
"""The bytes of files are remembered for so long: each file is looked at to learn them."""
_BLOCK_BYTES = 512
"""The unit of stat for files, whatever the disk's blocks are."""
_STATM = Path("/proc/self/statm")


class ResourceMeter:
    """Reads the process's use of its machine. Any thread may call it."""

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._lock = threading.Lock()
        self._measured_s = -_KEPT_S
        self._disk_used_bytes: int | None = None
        self._core_count = core_count()

    def read(self) -> pb.Resources:
        """Reads all that the machine reports."""
        found = pb.Resources(cpu_s=time.process_time(), core_count=self._core_count)
        with suppress(OSError, ValueError, IndexError):  # not Linux
            found.memory_bytes = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if self._data_dir is not None:
            with suppress(OSError):  # the directory is gone, which /ready tells
                disk = shutil.disk_usage(self._data_dir)
                found.disk_size_bytes, found.disk_free_bytes = disk.total, disk.free
                used_bytes = self._files(self._data_dir)
                if used_bytes is not None:
                    found.disk_used_bytes = used_bytes
        return found

    def _files(self, data_dir: Path) -> int | None:
        """Returns the files' bytes; one caller looks at a time, as a disk may hang."""
        if time.monotonic() - self._measured_s >= _KEPT_S and self._lock.acquire(blocking=False):
            try:
                self._disk_used_bytes = sum(_occupied(os.fspath(data_dir)))
                self._measured_s = time.monotonic()
            finally:
                self._lock.release()
        return self._disk_used_bytes


def _occupied(directory: str) -> Iterator[int]:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _occupied(entry.path)
            else:
                yield entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
