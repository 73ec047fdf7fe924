"""A slice in mapped files that survives its machine: an image on disk, and a journal since.

Beside the files of parameter.py, which serve and survive the process:

    image-000003/      the same files as they were at one moment of each chunk, all of it on disk
    journal-000003     contributions since image 3 was begun (store/journal/journal.py)
    journal-000004     and so on; image 5, when it stands, makes these superfluous

After a loss of power the newest image replaces the files and the journal is counted again.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwell.errors import StorageError
from shardwell.numerics.codec import Bytes
from shardwell_server.store.contract import JournalEntry
from shardwell_server.store.files.mapped import storage_error
from shardwell_server.store.files.presence import Presence
from shardwell_server.store.journal.image_files import image_path, images
from shardwell_server.store.journal.journal import HEAD_BYTES, cut_off, segments
from shardwell_server.store.journal.journaling import Journaling, forget_journal
from shardwell_server.store.journal.parameter_entries import pack_entry, read_entries
from shardwell_server.store.mmap.parameter import MmapParameter


def restore_image(directory: Path, reached: Callable[[str], None]) -> bool:
    """Puts the newest image in the place of the files; False if there is none.

    Raises:
        StorageError: it can't be done.
    """
    newest = list(images(directory).values())[-1:]
    try:
        for image in newest:
            for path in image.iterdir():
                if path.name not in ("events", "parameter.json"):
                    shutil.copyfile(path, directory / path.name)
                    reached("file restored")
    except OSError as error:
        raise storage_error(directory, error, "going back to its image") from None
    return bool(newest)


class JournaledParameter(MmapParameter):
    """See the module."""

    presence: Presence | None = None
    """Of the store that it belongs to."""
    _journaling: Journaling | None = None

    def begin(self, *, syncs_each: bool, is_new: bool = False) -> None:
        """Begins to journal; to be called once, when replay is over.

        Args:
            syncs_each: Whether `make_durable` waits for the disk.
            is_new: Whether it was just made, and everything is on the disk.

        Raises:
            StorageError: the journal can't be written.
        """
        self._events.is_synced = True
        self._journaling = Journaling(
            self.directory,
            self._reached,
            (lambda: None) if is_new else self.sync_names,
            syncs_each=syncs_each,
        )
        self._journaling.begin_segment()

    @property
    def wants_image(self) -> bool:
        return self._journaling is not None and self._journaling.wants_image

    def journal(
        self,
        chunk_index: int,
        seat_index: int,
        step: int,
        sample_count: int,
        exponent: int,
        learning_rate: float,
        payload: Bytes,
    ) -> None:
        if self._journaling is None:
            return
        sequence = self._stored[chunk_index].sequence + 1
        entry = JournalEntry(
            chunk_index, seat_index, sequence, step, sample_count, exponent, learning_rate, payload
        )
        self._journaling.append(pack_entry(entry, self._salt), self._layout.size_bytes)

    def make_durable(self) -> None:
        if self.presence is not None:
            self.presence.check()
        if self._journaling is not None:
            self._journaling.make_durable()

    def sync(self) -> None:
        if self._journaling is not None:
            self._journaling.sync()

    def replay(self) -> Iterator[JournalEntry]:
        if not self.is_torn:
            return
        paths, name = segments(self.directory), self._layout.name
        counted: dict[tuple[int, int], tuple[int, int]] = {}
        for number, path in paths.items():
            end = HEAD_BYTES
            for entry, end in read_entries(path, name, self._salt):
                counted[entry.chunk_index, entry.sequence] = (number, end)
            cut_off(path, end)
        for number, path in paths.items():
            for entry, end in read_entries(path, name, self._salt):
                if entry.chunk_index >= self._layout.chunk_count:
                    raise StorageError(f"{path} has an entry of chunk {entry.chunk_index}")
                expected = self._stored[entry.chunk_index].sequence + 1
                if counted[entry.chunk_index, entry.sequence] != (number, end):
                    continue  # the shard was killed before it counted
                if entry.sequence > expected:
                    raise StorageError(
                        f"{path}: chunk {entry.chunk_index} goes on with transition "
                        f"{entry.sequence}; expected {expected}: a part of the journal is gone; "
                        "restore a checkpoint",
                        parameter=self._layout.name,
                    )
                if entry.sequence == expected:
                    yield entry

    @contextlib.contextmanager
    def imaging(self) -> Iterator[Callable[[int], None]]:
        journaling = self._journaling
        if journaling is None:
            yield lambda chunk_index: None
            return
        number = journaling.begin_segment()
        if image_path(self.directory, number).exists():
            # Nothing was journaled since, but first weights may have come.
            number = journaling.begin_segment(anyway=True)
        with journaling.imaging(number) as path:
            image = MmapParameter.create(path, self._layout, self._salt, self._reached)
            yield lambda chunk_index: image.copy_chunk(self, chunk_index)
            image.sync_contents()

    def stop_journaling(self) -> None:
        """Makes image and journal superfluous, and removes them.

        Raises:
            StorageError: the disk failed.
        """
        forget_journal(self.directory, self._reached, super().close)

    def close(self) -> None:
        if self._journaling is not None:
            self._journaling.close()
        super().close()
