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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from shardwell_server.store.contract import Event, Layout, TableLayout, check_not_retired
from shardwell_server.store.files.layout import write_layout
from shardwell_server.store.files.mapped import (
    MappedFile,
    storage_error,
    sync_directory,
    sync_file,
)
from shardwell_server.store.files.presence import NamedFiles, Presence
from shardwell_server.store.journal.journal import Journaling, forget_journal, images
from shardwell_server.store.records.event_log import EventLog
from shardwell_server.store.records.worker_steps import WorkerSteps


class MmapStorage(ABC):
    """The common base of both kinds; `unit_count` units have a last step of each worker."""

    LAYOUT_NAME: ClassVar[str]

    def __init__(
        self,
        directory: Path,
        layout: Any,
        unit_count: int,
        salt: int,
        reached: Callable[[str], None],
    ) -> None:
        self.directory = directory
        self.layout = layout
        self.is_retired = False
        self.presence: Presence | None = None
        self._salt = salt
        self._reached = reached
        self._files: list[MappedFile] = []
        self._marks = WorkerSteps(directory / "marks", unit_count, salt, reached)
        self._events = EventLog(directory / "events", salt, reached)
        self._seat_count = 0
        self.is_torn = False
        """True if the machine lost power, and the journal was not replayed since."""
        self.has_image = False
        self.rolled_back_count = 0
        """Chunks or rows of cut-off changes that `recover` took back."""
        self._journaling: Journaling | None = None

    def _complete(self, layout: Layout | TableLayout) -> None:
        (self.directory / "marks").touch()
        self._reached("file")
        self._marks.open()
        self._events.create()
        write_layout(self.directory / self.LAYOUT_NAME, layout, self._salt)

    def renamed(self, layout: Layout | TableLayout) -> Self:
        path = self.directory / self.LAYOUT_NAME
        written = path.with_suffix(".new")
        try:
            write_layout(written, layout, self._salt)
            sync_file(written)
            self._reached("new layout")
            os.replace(written, path)
            self._reached("new layout's name")
            sync_directory(self.directory)
        except OSError as error:
            raise storage_error(path, error, "writing its new name") from None
        made = copy.copy(self)
        made.layout, made.is_retired = layout, False
        made.is_torn = False  # what the machine lost was replayed before
        return made

    @cached_property
    def named_files(self) -> NamedFiles:
        return NamedFiles(self.directory, self._files, (self.LAYOUT_NAME, "marks", "events"))

    @classmethod
    @abstractmethod
    def create(
        cls, directory: Path, layout: Any, salt: int, reached: Callable[[str], None]
    ) -> Self:
        """Makes files in an empty directory; OSError, OverflowError: they can't be made."""

    @classmethod
    @abstractmethod
    def recover(
        cls,
        directory: Path,
        layout: Any,
        salt: int,
        reached: Callable[[str], None],
        *,
        is_torn: bool = False,
    ) -> Self:
        """Opens an earlier process's files, and takes back the change that was under way.

        `is_torn`: power was lost, and an image replaces the files. StorageError: a file was
        damaged.
        """

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Returns facts of its recovery, for the log."""

    @classmethod
    def _restore_image(cls, directory: Path, reached: Callable[[str], None]) -> bool:
        newest = list(images(directory).values())[-1:]
        try:
            for image in newest:
                for path in image.iterdir():
                    if path.name not in ("events", cls.LAYOUT_NAME):
                        cls._copy_file(path, directory / path.name)
                        reached("file restored")
        except OSError as error:
            raise storage_error(directory, error, "going back to its image") from None
        return bool(newest)

    @staticmethod
    @abstractmethod
    def _copy_file(source: Path, target: Path) -> None:
        """Copies a file of an image over the one that serves."""

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
        journaling = Journaling(
            self.directory,
            self._reached,
            (lambda: None) if is_new else self.sync_names,
            syncs_each=syncs_each,
        )
        self._begin_segment(journaling)
        self._journaling = journaling

    @abstractmethod
    def _begin_segment(self, journaling: Journaling) -> int:
        """Starts a new segment, unless this one is as good; returns its number."""

    def make_durable(self) -> None:
        if self.presence is not None:
            self.presence.check()
        if self._journaling is not None:
            self._journaling.make_durable()

    def sync(self) -> None:
        if self._journaling is not None:
            self._journaling.sync()

    def drop_journal(self) -> None:
        forget_journal(self.directory, self._reached, self._sync_all)

    # The disk.

    def close(self) -> None:
        if self._journaling is not None:
            self._journaling.close()
        self._sync_all()

    def sync_contents(self) -> None:
        """Makes the files' contents survive a loss of power; names are left to the caller."""
        for file in self._files:
            file.sync()
        self._marks.sync()
        self._sync_unmapped()

    def sync_names(self) -> None:
        """Makes all names, and what is not mapped, survive a loss of power."""
        self._sync_unmapped()
        sync_directory(self.directory)
        sync_directory(self.directory.parent)

    def _sync_all(self) -> None:
        self.sync_contents()
        sync_directory(self.directory)
        sync_directory(self.directory.parent)

    def _sync_unmapped(self) -> None:
        for name in (self.LAYOUT_NAME, "events"):
            sync_file(self.directory / name)
