"""The journal of one parameter or table under way: when it is synced, and when an image is due."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardwell_server.store.files.mapped import storage_error, sync_directory
from shardwell_server.store.journal import image_files
from shardwell_server.store.journal.image_files import forget_images, image_path, images
from shardwell_server.store.journal.journal import Buffer, Journal, segments, sync_segments


class Journaling:
    """What is done beside the files that serve. To be made when replay is over.

    Args:
        directory: Of the files.
        reached: Called after every write.
        sync_names: Makes names, and what is not mapped, survive a loss of power.
        syncs_each: Whether `make_durable` waits for the disk.

    Raises:
        StorageError: the disk failed.
    """

    def __init__(
        self,
        directory: Path,
        reached: Callable[[str], None],
        sync_names: Callable[[], None],
        *,
        syncs_each: bool,
    ) -> None:
        try:  # an earlier process may have left them with the kernel alone
            sync_names()
            sync_segments(directory)
        except OSError as error:
            raise storage_error(directory, error, "syncing it") from None
        self.journal = Journal(directory, reached)
        self.wants_image = not images(directory) or self.journal.has_failed
        """Whether it is time for an image."""
        self._directory = directory
        self._reached = reached
        self._syncs_each = syncs_each
        self._older_bytes = sum(p.stat().st_size for p in segments(directory).values())

    def begin_segment(self, *, anyway: bool = False) -> int:
        self._older_bytes += self.journal.size_bytes
        return self.journal.begin_segment(anyway=anyway)

    def append(self, parts: Sequence[Buffer], image_bytes: int) -> None:
        """Adds an entry; `image_bytes` is how large an image would be.

        Raises:
            StorageError: it can't be written; nothing changed.
        """
        self.journal.append(parts)
        size_bytes = self._older_bytes + self.journal.size_bytes
        if size_bytes > max(2 * image_bytes, image_files.IMAGE_AT_BYTES_MIN):
            self.wants_image = True

    def make_durable(self) -> None:
        """Returns when all entries may be acknowledged.

        Raises:
            StorageError: the disk failed; they must not be.
        """
        if self._syncs_each:
            self.sync()

    def sync(self) -> None:
        """Returns when all entries are on disk.

        Raises:
            StorageError: the disk failed.
        """
        try:
            self.journal.sync()
        finally:
            self.wants_image = self.wants_image or self.journal.has_failed

    @contextlib.contextmanager
    def imaging(self, number: int) -> Iterator[Path]:
        """A directory for an image, which stands when the block has filled and synced it.

        Args:
            number: Of the segment that was begun with it.

        Raises:
            StorageError: it can't be written; the one before stands.
        """
        image = image_path(self._directory, number)
        making = image.with_suffix(".new")
        try:
            making.mkdir()
            self._reached("image begun")
            yield making
            sync_directory(making)
            self._reached("image written")
            making.rename(image)
            self._reached("image stands")
            sync_directory(self._directory)
        except OSError as error:
            raise storage_error(image, error, "making an image") from None
        finally:
            shutil.rmtree(making, ignore_errors=True)
        self.journal.repaired()
        self.wants_image, self._older_bytes = False, 0
        forget_images(self._directory, self._reached, before=number)

    def close(self) -> None:
        """Syncs and closes. A disk that fails is remembered; the files themselves are enough."""
        with contextlib.suppress(OSError):
            self.journal.close()


def forget_journal(
    directory: Path, reached: Callable[[str], None], sync_files: Callable[[], None]
) -> None:
    """Makes images and journal superfluous, and removes them.

    Args:
        directory: Of the files.
        reached: Called after every write.
        sync_files: Writes the files that serve to disk.

    Raises:
        StorageError: the disk failed.
    """
    if images(directory) or segments(directory):
        try:
            sync_files()
        except OSError as error:
            raise storage_error(directory, error, "writing it to disk") from None
    forget_images(directory, reached)
