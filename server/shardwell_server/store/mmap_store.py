"""A store in memory-mapped files under one directory: what is acknowledged survives kill -9.

parameters/000001/    a parameter, numbered, so that no path is made from a name
parameters/000002.new/    one whose making was cut off; removed at the next start
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from shardwell.errors import StorageError
from shardwell_server.store.mapped_file import storage_error
from shardwell_server.store.mmap_parameter import MmapParameter, read_layout
from shardwell_server.store.store import Layout, ParameterStorage

_LOG = logging.getLogger("shardwell_server")


def _nothing(point: str) -> None:
    pass


class MmapStore:
    """See Store.

    Args:
        path: A directory that belongs to this process (see data_dir.py).
        reached: Called after every write with its name, for tests that stop there.
    """

    def __init__(self, path: Path, *, reached: Callable[[str], None] = _nothing) -> None:
        self._path = path / "parameters"
        self._reached = reached
        self._names: set[str] = set()
        self._next_number = 1

    def recover(self) -> list[tuple[Layout, ParameterStorage]]:
        """See Store."""
        found: list[tuple[Layout, ParameterStorage]] = []
        try:
            self._path.mkdir(exist_ok=True)
            entries = sorted(self._path.iterdir())
        except OSError as error:
            raise storage_error(self._path, error, "reading it") from None
        for entry in entries:
            number = entry.name.removesuffix(".new")
            if not (number.isdecimal() and entry.is_dir()):
                raise StorageError(f"{entry} is none of shardwell's files; move it away")
            self._next_number = max(self._next_number, int(number) + 1)
            if entry.name.endswith(".new"):
                shutil.rmtree(entry)
                continue
            layout, salt = read_layout(entry / "parameter.json")
            if layout.name in self._names:
                raise StorageError(
                    f"{entry} holds parameter {layout.name!r}, as another directory does; move the "
                    "one that was copied there away"
                )
            storage = MmapParameter.recover(entry, layout, salt, self._reached)
            self._names.add(layout.name)
            found.append((layout, storage))
            _LOG.info(
                "parameter recovered",
                extra={
                    "parameter": layout.name,
                    "size": layout.slice_size,
                    "version_min": min((r.version for r in storage.records()), default=0),
                    "version_max": max((r.version for r in storage.records()), default=0),
                    "taken_back_chunk_count": storage.rolled_back_count,
                },
            )
        return found

    def create(self, layout: Layout) -> MmapParameter:
        """See Store."""
        if layout.name in self._names:
            raise ValueError(f"storage of {layout.name!r} exists")
        directory = self._path / f"{self._next_number:06d}"
        making = directory.with_suffix(".new")
        try:
            self._path.mkdir(exist_ok=True)
            making.mkdir()
            MmapParameter.create(making, layout, secrets.randbits(32), self._reached)
            self._reached("files")
            os.replace(making, directory)
            self._reached("files' name")
        except OSError as error:
            shutil.rmtree(making, ignore_errors=True)
            raise storage_error(
                directory, error, f"making the {layout.size_bytes} bytes of {layout.name!r}"
            ) from None
        self._next_number += 1
        self._names.add(layout.name)
        _, salt = read_layout(directory / "parameter.json")
        return MmapParameter.recover(directory, layout, salt, self._reached)

    def close(self) -> None:
        """See Store. The files stay; they are unmapped when nobody uses the arrays any more."""
