"""A store in memory-mapped files under one directory: what is acknowledged survives kill -9.

parameters/000001/    a parameter (parameter.py)
tables/000001/        a table (table.py)

Both are numbered (store/files/atomic_directory.py).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from shardwell.errors import StorageError
from shardwell.rpc.asking import ask_all
from shardwell_server.config import Durability
from shardwell_server.store.contract import Begin, Layout, ParameterStorage, nothing
from shardwell_server.store.files.atomic_directory import AtomicDirectories
from shardwell_server.store.files.boot import Boot
from shardwell_server.store.files.layout import read_layout
from shardwell_server.store.files.mapped import storage_error
from shardwell_server.store.files.presence import Presence
from shardwell_server.store.mmap.journaled_parameter import JournaledParameter, restore_image
from shardwell_server.store.mmap.journaled_table import JournaledTable, restore_table_image
from shardwell_server.store.mmap.parameter import MmapParameter
from shardwell_server.store.mmap.table import MmapTable
from shardwell_server.store.table_contract import TableLayout, TableStorage

_LOG = logging.getLogger("shardwell_server")


def _nothing(point: str) -> None:
    pass


def _drop(storage: JournaledParameter | JournaledTable | None) -> None:
    """Closes the journal of one whose files are gone."""
    if storage is not None:
        with contextlib.suppress(OSError, MemoryError):
            storage.close()


def _closed(storage: JournaledParameter | JournaledTable) -> OSError | None:
    """Closes it; what failed, so that the others are closed all the same."""
    try:
        storage.close()
    except OSError as error:
        return error
    return None


class MmapStore:
    """See Store.

    Args:
        path: A directory that belongs to this process (see store/files/data_dir.py).
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
        self._path = path
        self._durability = durability or Durability()
        self._boot = boot or Boot(path)
        self._reached = reached
        self._is_torn = False
        self._presence = Presence(path)
        self._open: dict[str, JournaledParameter] = {}
        self._open_tables: dict[str, JournaledTable] = {}
        is_synced = not self._durability.is_process
        self._parameters = AtomicDirectories(path / "parameters", reached, is_synced=is_synced)
        self._tables = AtomicDirectories(path / "tables", reached, is_synced=is_synced)

    def recover(self) -> list[tuple[Layout, ParameterStorage]]:
        found: list[tuple[Layout, ParameterStorage]] = []
        try:
            self._presence.begin()
            self._is_torn = is_torn = self._boot.is_torn()
            self._boot.mark("recovering" if is_torn else "running")
        except OSError as error:
            raise storage_error(self._path, error, "reading it") from None
        for entry in self._parameters.standing():
            layout, salt = read_layout(entry / "parameter.json", Layout)
            if layout.name in self._open:
                raise StorageError(
                    f"{entry} holds parameter {layout.name!r}, as another directory does; move the "
                    "one that was copied there away"
                )
            has_image = is_torn and restore_image(entry, self._reached)
            storage = JournaledParameter.recover(
                entry, layout, salt, self._reached, is_torn=is_torn
            )
            storage.presence = self._presence
            self._open[layout.name] = storage
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
        if self._durability.is_process:
            for storage in self._all():
                self._begin(storage)
        else:
            ask_all(self._all(), self._begin)  # each waits for the disk, which takes many at once
        self._boot.mark("running")

    def check_present(self) -> None:
        """Refuses to go on where `look` has found something missing."""
        self._presence.check()

    def look(self) -> None:
        """Looks at the names of all files that are mapped, and of the directory."""
        self._presence.look(
            ("boot.json", "parameters", "tables"),
            [each.named_files for each in self._all() if each.presence is not None],
        )

    def _begin(self, storage: JournaledParameter | JournaledTable, *, is_new: bool = False) -> None:
        if self._durability.is_process:
            storage.stop_journaling()  # both would be older than the files from now on
        else:
            storage.begin(syncs_each=self._durability.is_step, is_new=is_new)

    def _all(self) -> list[JournaledParameter | JournaledTable]:
        return [*self._open.values(), *self._open_tables.values()]

    def create(
        self, layout: Layout, begin: Begin[ParameterStorage] = nothing
    ) -> JournaledParameter:
        if layout.name in self._open:
            raise ValueError(f"storage of {layout.name!r} exists")
        salt = secrets.randbits(32)

        def fill(path: Path) -> None:
            made = MmapParameter.create(path, layout, salt, self._reached)
            if not self._durability.is_process:
                made.sync_contents()

        doing = f"making the {layout.size_bytes} bytes of {layout.name!r}"
        try:
            with self._parameters.making(fill, doing) as directory:
                storage = JournaledParameter.recover(directory, layout, salt, self._reached)
                self._open[layout.name] = storage
                self._begin(storage, is_new=True)
                begin(storage)
        except BaseException:
            _drop(self._open.pop(layout.name, None))
            raise
        storage.presence = self._presence
        return storage

    def recover_tables(self) -> list[tuple[TableLayout, TableStorage]]:
        found: list[tuple[TableLayout, TableStorage]] = []
        for entry in self._tables.standing():
            layout, salt = read_layout(entry / "table.json", TableLayout)
            if layout.name in self._open_tables:
                raise StorageError(
                    f"{entry} holds table {layout.name!r}, as another directory does; move the one "
                    "that was copied there away"
                )
            has_image = self._is_torn and restore_table_image(entry, self._reached)
            storage = JournaledTable.recover(
                entry, layout, salt, self._reached, is_torn=self._is_torn
            )
            if has_image:
                storage.replay()
            storage.presence = self._presence
            self._open_tables[layout.name] = storage
            found.append((layout, storage))
            if self._is_torn:
                _LOG.warning(
                    "the machine lost power: the table goes on from its image and journal"
                    if has_image
                    else "the machine lost power: what was acknowledged in the last seconds may be "
                    "missing from the table; its rows are verified",
                    extra={"table": layout.name},
                )
            _LOG.info(
                "table recovered",
                extra={
                    "table": layout.name,
                    "row_used": storage.record.row_used,
                    "version": storage.record.version,
                    "taken_back_row_count": storage.rolled_back_row_count,
                },
            )
        return found

    def create_table(
        self, layout: TableLayout, begin: Begin[TableStorage] = nothing
    ) -> JournaledTable:
        if layout.name in self._open_tables:
            raise ValueError(f"storage of table {layout.name!r} exists")
        salt = secrets.randbits(32)

        def fill(path: Path) -> None:
            made = MmapTable.create(path, layout, salt, self._reached)
            if not self._durability.is_process:
                made.sync_contents()

        try:
            with self._tables.making(fill, f"making table {layout.name!r}") as directory:
                storage = JournaledTable.recover(directory, layout, salt, self._reached)
                self._open_tables[layout.name] = storage
                self._begin(storage, is_new=True)
                begin(storage)
        except BaseException as error:
            _drop(self._open_tables.pop(layout.name, None))
            if isinstance(error, StorageError):
                error.table = layout.name
            raise
        storage.presence = self._presence
        return storage

    def close(self) -> None:
        """See Store. The files stay; they are unmapped when nobody uses the arrays any more.

        Raises:
            StorageError: the disk failed; what it lacks is on it only if the machine stays up.
        """
        opened = self._all()
        self._open, self._open_tables = {}, {}
        if self._presence.is_gone:  # nothing may be written where others' files may be now
            for storage in opened:
                _drop(storage)
            self._presence.check()
        if not opened:
            return
        failed = next(filter(None, ask_all(opened, _closed)), None)
        if failed is not None:
            raise storage_error(self._path, failed, "writing everything to disk")
        self._boot.mark("clean")
