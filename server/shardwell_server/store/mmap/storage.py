"""The common part of a parameter and a table in mapped files: seats, events, and the disk.

Beside the files that serve and survive the process there may be what survives the machine, too:

    image-000003/      the same files as they were at some moment, all of it on disk
    journal-000003     what has changed since image 3 was begun (store/journal/)
    journal-000004     and so on; image 5, when it is whole, makes these superfluous

After a loss of power the newest image replaces the files, and the journal is gone through again.
"""

from __future__ import annotations

import copy
import os
import shutil
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from shardwell_server.store.contract import Event, Layout, Storage, TableLayout, check_not_retired
from shardwell_server.store.files.layout import Home, write_layout
from shardwell_server.store.files.mapped import MappedFile, failing, sync_path
from shardwell_server.store.files.presence import NamedFile, NamedFiles, Presence
from shardwell_server.store.journal.journal import (
    Journal,
    forget_journal,
    images,
    sync_segments,
)
from shardwell_server.store.records.event_log import EventLog
from shardwell_server.store.records.worker_steps import WorkerSteps, recover_marks, seat_count

FileT = TypeVar("FileT", bound=MappedFile)


class MmapStorage(Storage):
    """The common base of both kinds."""

    def __init__(self, home: Home, *, is_new: bool) -> None:
        self.home = home
        self.layout = home.layout
        self.presence: Presence | None = None
        self._salt = home.salt
        self._reached = home.reached
        self._is_new = is_new
        self._files: list[MappedFile] = []
        self._marks = WorkerSteps(home)
        self._events = EventLog(home.path / "events", home.salt, home.reached)
        self._seat_count = 0
        self.is_torn = False
        """True if the machine lost power, and the journal was not replayed since."""
        self.has_image = False
        self.rolled_back_count = 0
        """Chunks or rows of cut-off changes that `recover` took back."""
        self._journal: Journal | None = None

    def _opened(self, kind: type[FileT], name: str, size_bytes: int) -> FileT:
        path = self.home.path / name
        file = kind.create(path, size_bytes) if self._is_new else kind.open(path, size_bytes)
        if self._is_new:
            self._reached("file")
        self._files.append(file)
        return file

    @classmethod
    def create(cls, home: Home) -> Self:
        """Makes files in an empty directory; OSError, OverflowError: they can't be made."""
        made = cls(home, is_new=True)
        made._fill()
        (home.path / "marks").touch()
        home.reached("file")
        made._marks.open()
        made._events.create()
        write_layout(home.path / home.layout_name, home.layout, home.salt)
        return made

    @abstractmethod
    def _fill(self) -> None:
        """Writes the first contents of new files."""

    @classmethod
    def recover(cls, home: Home, *, is_torn: bool = False) -> Self:
        """Opens an earlier process's files, and takes back the change that was under way.

        `is_torn`: power was lost, and an image replaces the files. StorageError: a file was
        damaged.
        """
        has_image = is_torn and cls._restore_image(home)
        made = cls(home, is_new=False)
        made.is_torn, made.has_image = is_torn, has_image
        latest = made._take_back()
        made._seat_count = seat_count(made._events.read())
        recover_marks(made._marks, made._seat_count, latest, is_torn=is_torn)
        return made

    @abstractmethod
    def _take_back(self) -> list[tuple[int, int]]:
        """Takes back cut-off changes; returns seat and mark of each record, seat -1 for none."""

    def renamed(self, layout: Layout | TableLayout) -> Self:
        path = self.home.path / self.home.layout_name
        written = path.with_suffix(".new")
        with failing(path, "writing its new name"):
            write_layout(written, layout, self._salt)
            sync_path(written)
            self._reached("new layout")
            os.replace(written, path)
            self._reached("new layout's name")
            sync_path(self.home.path)
        made = copy.copy(self)
        made.home = self.home._replace(layout=layout)
        made.layout, made.is_retired = layout, False
        made.is_torn = False  # what the machine lost was replayed before
        return made

    @cached_property
    def named_files(self) -> NamedFiles:
        names = (self.home.layout_name, "marks", "events")
        return NamedFiles(self.home.path, self._files_in_use(), names)

    def _files_in_use(self) -> Sequence[NamedFile]:
        return self._files

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Returns facts of its recovery, for the log."""

    @classmethod
    def _restore_image(cls, home: Home) -> bool:
        newest = list(images(home.path).values())[-1:]
        with failing(home.path, "going back to its image"):
            for image in newest:
                for path in image.iterdir():
                    if path.name not in ("events", home.layout_name):
                        cls._copy_file(path, home.path / path.name)
                        home.reached("file restored")
        return bool(newest)

    @staticmethod
    def _copy_file(source: Path, target: Path) -> None:
        shutil.copyfile(source, target)  # without holes, so that there is room for what follows

    # Seats and events.

    def events(self) -> Sequence[Event]:
        return self._events.read()

    def log(self, event: Event) -> None:
        check_not_retired(self)
        self._events.append(event)
        self._seat_count += event.get("kind") == "seat"

    def compact(self, events: Sequence[Event]) -> None:
        self._events.compact(events)

    def add_seat(self) -> None:
        self._marks.make_room(self._seat_count + 1)
        self._marks.begin(self._seat_count)

    # The journal.

    def start_journal(self, *, syncs_each: bool, is_new: bool = False) -> None:
        """Begins to journal, when replay is over, once; `is_new`: everything is on disk already."""
        self._events.is_synced = True
        with failing(self.home.path, "syncing it"):
            if not is_new:  # an earlier process may have left them with the kernel alone
                self._sync_unmapped()
                self._sync_directories()
            sync_segments(self.home.path)
        journal = Journal(self.home.path, self._reached, syncs_each=syncs_each)
        self._begin_segment(journal)
        self._journal = journal

    def _begin_segment(self, journal: Journal) -> int:
        """Starts a new segment, unless this one is as good; returns its number."""
        return journal.begin_segment()

    def make_durable(self) -> None:
        if self.presence is not None:
            self.presence.check()
        if self._journal is not None:
            self._journal.make_durable()

    def sync(self) -> None:
        if self._journal is not None:
            self._journal.sync()

    def drop_journal(self) -> None:
        forget_journal(self.home.path, self._reached, self._sync_all)

    # The disk.

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._sync_all()

    def sync_contents(self) -> None:
        """Makes the files' contents survive a loss of power; names are left to the caller."""
        for file in self._files:
            file.sync()
        self._marks.sync()
        self._sync_unmapped()

    def _sync_all(self) -> None:
        self.sync_contents()
        self._sync_directories()

    def _sync_directories(self) -> None:
        sync_path(self.home.path)
        sync_path(self.home.path.parent)

    def _sync_unmapped(self) -> None:
        for name in (self.home.layout_name, "events"):
            sync_path(self.home.path / name)
