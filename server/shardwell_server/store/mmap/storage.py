"""How the files of a parameter or table in mapped files come to the disk."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from shardwell_server.store.files.mapped import MappedFile, sync_directory, sync_file
from shardwell_server.store.records.worker_steps import WorkerSteps


class SyncedFiles:
    """What both have of it; the attributes are theirs."""

    directory: Path
    _files: list[MappedFile]
    _marks: WorkerSteps
    _UNMAPPED: ClassVar[tuple[str, ...]]
    """Names of the files that are written, not mapped."""

    def close(self) -> None:
        """Writes everything to disk.

        Raises:
            OSError: the disk failed.
        """
        self._sync_mapped()
        self.sync_names()

    def sync_contents(self) -> None:
        """Makes what the files hold survive a loss of power; names are left to the caller.

        Raises:
            OSError: the disk failed.
        """
        self._sync_mapped()
        self._sync_unmapped()

    def sync_names(self) -> None:
        """Makes what is not mapped survive a loss of power, and the names of all files.

        Raises:
            OSError: the disk failed.
        """
        self._sync_unmapped()
        sync_directory(self.directory)
        sync_directory(self.directory.parent)

    def _sync_mapped(self) -> None:
        for file in self._files:
            file.sync()
        self._marks.sync()

    def _sync_unmapped(self) -> None:
        for name in self._UNMAPPED:
            sync_file(self.directory / name)
