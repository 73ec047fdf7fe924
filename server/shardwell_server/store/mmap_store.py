"""A store in memory-mapped files under one directory: what is acknowledged survives kill -9.

parameters/000001/    a parameter, numbered, so that no path is made from a name
parameters/000002.new/    one whose making was cut off; removed at the next start
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from shardwell.errors import StorageError
from shardwell_server.config import Durability
from shardwell_server.store.boot import Boot
from shardwell_server.store.journaled_parameter import JournaledParameter, restore_image
from shardwell_server.store.layout_file import read_layout
from shardwell_server.store.mapped_file import storage_error, sync_directory
from shardwell_server.store.mmap_parameter import MmapParameter
from shardwell_server.store.store import Layout, ParameterStorage
from shardwell_server.store.table_storage import TableLayout, TableStorage

_LOG = logging.getLogger("shardwell_server")


def _nothing(point: str) -> None:
    pass


class MmapStore:
    """See Store.

    Args:
        path: A directory that belongs to this process (see data_dir.py).
        durability: What an acknowledged gradient survives beside the process.
        boot: Whether the machine lost power; default: as the directory and the kernel say.
        reached: Called after every write with its name, for tests that stop there.
    """

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability | None = None,
        boot: Boot | None = None,
        reached: Callable[[str], None] = _nothing,
    ) -> None:
        self._path = path / "parameters"
        self._durability = durability or Durability()
        self._boot = boot or Boot(path)
        self._reached = reached
        self._open: list[JournaledParameter] = []
        self._names: set[str] = set()
        self._next_number = 1

    def recover(self) -> list[tuple[Layout, ParameterStorage]]:
        """See Store."""
        found: list[tuple[Layout, ParameterStorage]] = []
        try:
            self._path.mkdir(exist_ok=True)
            entries = sorted(self._path.iterdir())
            is_torn = self._boot.is_torn()
            self._boot.mark("recovering" if is_torn else "running")
        except OSError as error:
            raise storage_error(self._path, error, "reading it") from None
        for entry in entries:
            number = entry.name.removesuffix(".new")
            if not (number.isdecimal() and entry.is_dir()):
                raise StorageError(f"{entry} is none of shardwell's files; move it away")
            self._next_number = max(self._next_number, int(number) + 1)
            if entry.name.endswith(".new"):
                try:
                    shutil.rmtree(entry)
                except OSError as error:
                    raise storage_error(entry, error, "removing what was never made") from None
                continue
            layout, salt = read_layout(entry / "parameter.json")
            if layout.name in self._names:
                raise StorageError(
                    f"{entry} holds parameter {layout.name!r}, as another directory does; move the "
                    "one that was copied there away"
                )
            has_image = is_torn and restore_image(entry, self._reached)
            storage = JournaledParameter.recover(
                entry, layout, salt, self._reached, is_torn=is_torn
            )
            self._names.add(layout.name)
            self._open.append(storage)
            found.append((layout, storage))
            if is_torn:
                _LOG.warning(
                    "the machine lost power: the parameter goes on from its image and journal"
                    if has_image
                    else "the machine lost power: what was acknowledged in the last seconds may "
                    "be missing; all chunks are verified",
                    extra={"parameter": layout.name},
                )
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

    def recovered(self) -> None:
        """See Store."""
        for storage in self._open:
            self._begin(storage)
        self._boot.mark("running")

    def _begin(self, storage: JournaledParameter) -> None:
        if self._durability.is_process:
            storage.stop_journaling()  # both would be older than the files from now on
        else:
            storage.begin(syncs_each=self._durability.is_step)

    def create(self, layout: Layout) -> JournaledParameter:
        """See Store."""
        if layout.name in self._names:
            raise ValueError(f"storage of {layout.name!r} exists")
        directory = self._path / f"{self._next_number:06d}"
        at = making = directory.with_suffix(".new")
        salt = secrets.randbits(32)
        try:
            self._path.mkdir(exist_ok=True)
            shutil.rmtree(making, ignore_errors=True)  # removing one may have failed before
            making.mkdir()
            made = MmapParameter.create(making, layout, salt, self._reached)
            self._reached("files")
            if not self._durability.is_process:
                made.close()
                sync_directory(making)
            os.replace(making, directory)
            at = directory
            if not self._durability.is_process:
                sync_directory(self._path)
            self._reached("files' name")
            storage = JournaledParameter.recover(directory, layout, salt, self._reached)
            self._begin(storage)
        except (OSError, StorageError) as error:
            if at is directory:
                with contextlib.suppress(OSError):
                    os.replace(directory, making)
            shutil.rmtree(making, ignore_errors=True)
            if isinstance(error, StorageError):
                raise
            raise storage_error(
                directory, error, f"making the {layout.size_bytes} bytes of {layout.name!r}"
            ) from None
        self._next_number += 1
        self._names.add(layout.name)
        self._open.append(storage)
        return storage

    def recover_tables(self) -> list[tuple[TableLayout, TableStorage]]:
        """See Store: not yet."""
        return []

    def create_table(self, layout: TableLayout) -> TableStorage:
        """See Store: not yet."""
        raise StorageError(f"table {layout.name!r} can't be kept in files yet", table=layout.name)

    def close(self) -> None:
        """See Store. The files stay; they are unmapped when nobody uses the arrays any more.

        Raises:
            StorageError: the disk failed; what it lacks is on it only if the machine stays up.
        """
        opened, self._open = self._open, []
        if not opened:
            return
        failed: OSError | None = None
        for storage in opened:
            try:
                storage.close()
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise storage_error(self._path, failed, "writing everything to disk")
        self._boot.mark("clean")
