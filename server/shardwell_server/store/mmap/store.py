"""A store in memory-mapped files under one directory: what is acknowledged survives kill -9.

parameters/000001/    a parameter (parameter.py)
tables/000001/        a table (table.py)
names                 which names were deleted, or are about to be (shard/deletions.py)

Directories are numbered (store/files/atomic_directory.py); `names` is made with the first deletion.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from shardwell.errors import StorageError
from shardwell.threads.asking import ask_all
from shardwell_server.config import Durability
from shardwell_server.store.contract import (
    Begin,
    Event,
    Layout,
    ParameterStorage,
    Store,
    TableLayout,
    TableStorage,
)
from shardwell_server.store.files.atomic_directory import AtomicDirectories
from shardwell_server.store.files.boot import Boot
from shardwell_server.store.files.layout import Home, read_layout
from shardwell_server.store.files.mapped import failing, storage_error, sync_path
from shardwell_server.store.files.presence import Presence
from shardwell_server.store.mmap.parameter import MmapParameter
from shardwell_server.store.mmap.storage import MmapStorage
from shardwell_server.store.mmap.table import MmapTable
from shardwell_server.store.records.event_log import EventLog

_LOG = logging.getLogger("shardwell_server")
_NAMES_SALT = 0
LayoutT = TypeVar("LayoutT", Layout, TableLayout)
StorageT = TypeVar("StorageT", bound=MmapStorage)


def _drop(storage: MmapStorage | None) -> None:
    if storage is not None:
        with contextlib.suppress(OSError, MemoryError):
            storage.close()


def _closed(storage: MmapStorage) -> OSError | None:
    try:
        storage.close()
    except OSError as error:
        return error
    return None


class _Kind(Generic[LayoutT, StorageT]):
    """All parameters of a store, or all tables."""

    def __init__(
        self,
        directories: AtomicDirectories,
        storage: type[StorageT],
        layout: type[LayoutT],
        reached: Callable[[str], None],
    ) -> None:
        self.open: dict[str, StorageT] = {}
        self.directories = directories
        self._storage = storage
        self._layout: type[LayoutT] = layout
        self._reached = reached

    def recover(self, presence: Presence, *, is_torn: bool) -> list[tuple[LayoutT, StorageT]]:
        what = self._layout.kind
        for entry in self.directories.existing():
            layout, salt = read_layout(entry / f"{what}.json", self._layout)
            if layout.name in self.open:
                raise StorageError(
                    f"{entry} holds {what} {layout.name!r}, as another directory does; move "
                    "the one that was copied there away"
                )
            home = Home(entry, layout, salt, self._reached)
            storage = self._storage.recover(home, is_torn=is_torn)
            storage.presence = presence
            self.open[layout.name] = storage
            named = {what: layout.name}
            if is_torn:
                _LOG.warning(
                    f"the machine lost power: the {what} goes on from its image and journal"
                    if storage.has_image
                    else "the machine lost power: what was acknowledged in the last seconds may "
                    f"be missing from the {what}; what it has is verified",
                    extra=named,
                )
            _LOG.info(f"{what} recovered", extra=named | storage.facts())
        return [(storage.layout, storage) for storage in self.open.values()]

    def create(
        self, layout: LayoutT, presence: Presence, start: Callable[[StorageT], None]
    ) -> StorageT:
        if layout.name in self.open:
            raise ValueError(f"storage of {layout.kind} {layout.name!r} exists")
        salt = secrets.randbits(32)

        def fill(path: Path) -> None:
            made = self._storage.create(Home(path, layout, salt, self._reached))
            if self.directories.is_synced:
                made.sync_contents()

        try:
            with self.directories.making(fill, f"making {layout.contents}") as directory:
                storage = self._storage.recover(Home(directory, layout, salt, self._reached))
                self.open[layout.name] = storage
                start(storage)
        except BaseException as error:
            _drop(self.open.pop(layout.name, None))
            if isinstance(error, StorageError):
                setattr(error, layout.kind, layout.name)
            raise
        storage.presence = presence
        return storage

    def remove(self, name: str) -> None:
        self.directories.remove(self.open[name].home.path)
        del self.open[name]


class MmapStore(Store):
    """The store in memory-mapped files, which survive the process."""

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability | None = None,
        boot: Boot | None = None,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._path = path
        self._durability = durability or Durability()
        self._boot = boot or Boot(path)
        self._is_torn = False
        self._presence = Presence(path)
        self._reached = reached
        self._names = EventLog(path / "names", _NAMES_SALT, reached, is_synced=True)
        self._has_names = False
        self._look_lock = threading.Lock()
        """Held while names of files are looked at, or removed."""

        def directories(name: str) -> AtomicDirectories:
            return AtomicDirectories(
                path / name, reached, is_synced=not self._durability.is_process
            )

        self._parameters = _Kind(directories("parameters"), MmapParameter, Layout, reached)
        self._tables = _Kind(directories("tables"), MmapTable, TableLayout, reached)

    def recover(self) -> list[tuple[Layout, ParameterStorage]]:
        with failing(self._path, "reading it"):
            self._presence.begin()
            self._is_torn = self._boot.is_torn()
            self._boot.mark("recovering" if self._is_torn else "running")
        return [*self._parameters.recover(self._presence, is_torn=self._is_torn)]

    def recover_tables(self) -> list[tuple[TableLayout, TableStorage]]:
        return [*self._tables.recover(self._presence, is_torn=self._is_torn)]

    def recovered(self) -> None:
        if self._durability.is_process:
            for storage in self._all():
                self._start(storage)
        else:
            ask_all(self._all(), self._start)  # each waits for the disk, which takes many at once
        self._boot.mark("running")

    def check_present(self) -> None:
        self._presence.check()

    def look(self) -> None:
        with self._look_lock:
            self._presence.look(
                ("boot.json", "parameters", "tables"),
                [each.named_files for each in self._all() if each.presence is not None],
            )

    def _start(self, storage: MmapStorage, *, is_new: bool = False) -> None:
        if self._durability.is_process:
            if not is_new:  # image and journal would be older than the files from now on
                storage.drop_journal()
        else:
            storage.start_journal(syncs_each=self._durability.is_step, is_new=is_new)

    def _all(self) -> list[MmapStorage]:
        return [*self._parameters.open.values(), *self._tables.open.values()]

    def _kind_of(self, layout: Layout | TableLayout) -> _Kind[Any, Any]:
        return self._parameters if isinstance(layout, Layout) else self._tables

    def create(self, layout: Layout | TableLayout, begin: Begin = lambda storage: None) -> Any:
        def start(storage: MmapStorage) -> None:
            self._start(storage, is_new=True)
            begin(storage)

        return self._kind_of(layout).create(layout, self._presence, start)

    def rename(self, name: str, layout: Layout | TableLayout) -> MmapStorage:
        self._presence.check()
        kind = self._kind_of(layout)
        with self._look_lock:
            made: MmapStorage = kind.open[name].renamed(layout)
            del kind.open[name]
            kind.open[layout.name] = made
        return made

    def remove(self, layout: Layout | TableLayout) -> None:
        self._presence.check()
        with self._look_lock:
            self._kind_of(layout).remove(layout.name)

    def name_events(self) -> Sequence[Event]:
        self._has_names = (self._path / "names").exists()
        return self._names.read() if self._has_names else []

    def log_name(self, event: Event, compacted: Sequence[Event]) -> None:
        with failing(self._path / "names", "writing it"):
            self._parameters.directories.sync()
            self._tables.directories.sync()
            if not self._has_names:
                self._begin_names(event)
                return
        self._names.append(event)
        self._names.compact(compacted)

    def _begin_names(self, event: Event) -> None:
        making = self._path / "names.new"
        EventLog(making, _NAMES_SALT, self._reached, is_synced=True).create([event])
        os.replace(making, self._path / "names")
        self._reached("log of names")
        sync_path(self._path)
        self._names.read()  # how far it goes
        self._has_names = True

    def close(self) -> None:
        """Closes the journals; files stay mapped until the last reference to the arrays is gone."""
        opened = self._all()
        self._parameters.open, self._tables.open = {}, {}
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
