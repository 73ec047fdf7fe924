"""The journal: counted contributions, in order, in files that are synced to disk.

The image of a parameter or table (store/mmap/storage.py) and the journal since make it again after
its machine lost power. Segments are numbered; an image of number k needs the segments from k on. A
segment:

    magic, bytes that were synced, CRC of both | entries (parameter_entries.py, table_entries.py)

Behind the synced part a loss of power may leave anything, in any order of blocks: there the first
entry that is not whole is the end. Before it, such an entry was damaged, and it and those behind it
had been acknowledged. The synced length is noted after each sync, and so is on disk after the next
one, or when the kernel writes it by itself, within half a minute.

Images lie beside the segments; `Journal` says when one is due:

    image-000003/        one that is committed
    image-000005.new/    one under way, or cut off
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell.numerics.codec import Bytes
from shardwell.specs.formats import JOURNAL
from shardwell_server.store.files.mapped import failing, opened, storage_error, sync_path

Buffer: TypeAlias = "bytes | memoryview[int]"
EntryT = TypeVar("EntryT")
_KIND = b"SWL"
_MAGIC = int.from_bytes(_KIND + b"%d" % JOURNAL.newest, "little")
_HEAD = struct.Struct("<IQ")
_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CRC.size
_PREFIX = "journal-"
_IMAGE = "image-"
_NUMBER = re.compile(r"[0-9]{6,}")
IMAGE_AT_BYTES_MIN = 64 << 20
FAILED_NAME = "failed-journal"
"""A file that exists while a segment may lack what could not be synced."""


def segments(directory: Path) -> dict[int, Path]:
    """Returns the segments of a directory by number, in order."""
    return _numbered(directory, _PREFIX)


def _numbered(directory: Path, prefix: str, suffix: str = "") -> dict[int, Path]:
    """Returns files by number, in order; other names in the directory are the user's."""
    found = {}
    for path in directory.glob(f"{prefix}*{suffix}"):
        number = path.name.removeprefix(prefix).removesuffix(suffix)
        if _NUMBER.fullmatch(number):
            found[int(number)] = path
    return dict(sorted(found.items()))


class NotWholeError(Exception):
    """An entry is missing where it should begin, or not all of it was written."""

    def __init__(self, what: str, *, is_cut: bool) -> None:
        super().__init__(what)
        self.is_cut = is_cut
        """True if it is whole up to the file's end, as a killed process may leave it."""


def read_segment(
    path: Path, of: str, read: Callable[[Bytes, int], tuple[EntryT, int]]
) -> Iterator[tuple[EntryT, int]]:
    """Yields the whole entries of a segment, and the end of each.

    `read` returns the entry at an offset, and its end, or raises NotWholeError. StorageError: the
    synced part was damaged.
    """
    data = _mapped(path)
    synced_bytes = _synced_bytes(path, data)
    start = HEAD_BYTES
    while start < data.size:
        try:
            entry, end = read(data, start)
        except NotWholeError as error:
            if start < synced_bytes and not error.is_cut:
                what = f"the entry at byte {start} ({of}, {error})"
                raise _damaged(path, what, synced_bytes) from None
            return
        yield entry, end
        start = end


def read_head(
    head: struct.Struct, magics: Sequence[int], salt: int, data: Bytes, start: int
) -> tuple[tuple[Any, ...], int]:
    """Returns the fields of an entry's head, the first of `magics`, and its end."""
    end = start + head.size + _CRC.size
    if end > data.size:
        raise NotWholeError("its head", is_cut=True)
    packed = data[start : start + head.size].tobytes()
    fields = head.unpack(packed)
    if fields[0] not in magics or data[start + head.size : end].tobytes() != _CRC.pack(
        crc32.iscsi(packed, salt)
    ):
        raise NotWholeError("its head", is_cut=False)
    return fields, end


def cut_off(path: Path, end: int) -> None:
    """Cuts off the bytes behind the last whole entry that were never synced."""
    with failing(path, "cutting off what was never synced"):
        data = _mapped(path)
        end = max(end, _synced_bytes(path, data))
        if data.size > end:
            os.truncate(path, end)


def sync_segments(directory: Path) -> None:
    """Syncs and notes all that an earlier process wrote; StorageError: a segment was damaged."""
    for path in segments(directory).values():
        sync_path(path)
        size_bytes = path.stat().st_size
        if (directory / FAILED_NAME).exists() or _synced_bytes(path, _mapped(path)) == size_bytes:
            continue
        with opened(path, os.O_WRONLY) as file:
            os.pwrite(file, _head(size_bytes), 0)
            os.fdatasync(file)


def _mapped(path: Path) -> Bytes:
    data: Bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    return data


def _head(synced_bytes: int) -> bytes:
    head = _HEAD.pack(_MAGIC, synced_bytes)
    return head + _CRC.pack(crc32.iscsi(head))


def _synced_bytes(path: Path, data: Bytes) -> int:
    head = data[:HEAD_BYTES].tobytes()
    is_whole = head[_HEAD.size :] == _CRC.pack(crc32.iscsi(head[: _HEAD.size]))
    if is_whole and head.startswith(_KIND) and head[3:4].isdigit():
        JOURNAL.check(path, int(head[3:4]))
    synced_bytes: int = _HEAD.unpack(head[: _HEAD.size])[1] if len(head) == HEAD_BYTES else 0
    if head != _head(synced_bytes):
        raise _damaged(path, "its first bytes", 0)
    if synced_bytes > data.size:
        raise _damaged(path, f"its end (it has {data.size} bytes)", synced_bytes)
    return synced_bytes


def _damaged(path: Path, what: str, synced_bytes: int) -> StorageError:
    synced = f"; {synced_bytes} bytes were synced" if synced_bytes else ""
    return StorageError(
        f"{path}: {what} was damaged{synced}; what was acknowledged from there on would be lost; "
        "restore the directory from a copy, or a checkpoint into an empty one"
    )


class Journal:
    """The journal of one storage, whose segments so far are synced, and its images.

    Any thread may append; the caller orders the entries. With `syncs_each`, `make_durable` waits
    for the disk.
    """

    def __init__(
        self, directory: Path, reached: Callable[[str], None], *, syncs_each: bool = True
    ) -> None:
        self._syncs_each = syncs_each
        self._reached = reached
        self._directory = directory
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._file = -1
        self._let_go: Callable[[], object] = lambda: None
        self._size = HEAD_BYTES
        self._written = 0
        self._synced = 0
        self.has_failed = (directory / FAILED_NAME).exists()
        """True if a sync has failed, also in an earlier process, and no image was made since."""
        self._failure_count = 0
        self.wants_image = not images(directory) or self.has_failed
        self._older_bytes = sum(path.stat().st_size for path in segments(directory).values())
        self.number = 0

    def begin_segment(self, *, anyway: bool = False) -> int:
        """Starts a new segment if this one has entries, or with `anyway`; returns its number."""
        if self._file >= 0 and self._size == HEAD_BYTES and not anyway:
            return self.number
        number = max([self.number, *segments(self._directory)], default=0) + 1
        path = self._path(number)
        making = path.with_suffix(".new")
        file = -1
        try:
            file = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.pwrite(file, _head(HEAD_BYTES), 0)
            os.fdatasync(file)
            making.rename(path)  # so what has a segment's name has a head
            self._reached("journal segment")
            sync_path(self._directory)
        except OSError as error:
            if file >= 0:
                os.close(file)
            with contextlib.suppress(OSError):
                making.unlink()
            raise storage_error(path, error, "beginning it") from None
        with self._sync_lock, self._append_lock:
            if self._file >= 0:
                with contextlib.suppress(OSError):  # the next `sync` raises it
                    self._sync_file()
                    os.fdatasync(self._file)  # what it has noted, too
                self._let_go()
                self._older_bytes += self._size
            self._file, self._size, self.number = file, HEAD_BYTES, number
            self._let_go = weakref.finalize(self, os.close, file)  # when it is dropped, too
        return number

    @property
    def size_bytes(self) -> int:
        return self._size

    def append(self, parts: Sequence[Buffer], image_bytes: float) -> None:
        """Adds an entry, durable after the next `sync`; StorageError: nothing changed."""
        size = sum(len(part) for part in parts)
        with self._append_lock:
            try:
                written = os.pwritev(self._file, parts, self._size)
                while written < size:  # a signal, or a disk that is nearly full
                    rest = b"".join(bytes(part) for part in parts)[written:]
                    written += os.pwrite(self._file, rest, self._size + written)
            except OSError as error:
                os.ftruncate(self._file, self._size)
                raise storage_error(self._path(self.number), error, "writing a gradient") from None
            self._reached("journal entry")
            self._size += size
            self._written += 1
        if self._older_bytes + self._size > max(2 * image_bytes, IMAGE_AT_BYTES_MIN):
            self.wants_image = True

    def make_durable(self) -> None:
        if self._syncs_each:
            self.sync()

    def sync(self) -> None:
        """Syncs earlier entries; threads share a sync. StorageError: acknowledge none of them."""
        wanted = self._written
        if self._synced >= wanted and not self.has_failed:
            return
        with self._sync_lock:
            if self._synced >= wanted and not self.has_failed:
                return
            try:
                self._sync_file()
            except OSError as error:
                raise storage_error(self._path(self.number), error, "syncing it") from None

    def _sync_file(self) -> None:
        """The lock of syncs is held."""
        wanted = self._written
        if self.has_failed:  # the kernel tells of a lost page once
            raise OSError(errno.EIO, "an earlier sync failed, until an image is written")
        self._ask_disk()
        self._synced = wanted

    def _ask_disk(self) -> None:
        size_bytes = self._size
        try:
            os.fdatasync(self._file)
            os.pwrite(self._file, _head(size_bytes), 0)
        except OSError:
            self.has_failed = self.wants_image = True
            self._failure_count += 1
            with contextlib.suppress(OSError):
                (self._directory / FAILED_NAME).touch()
            raise

    @contextlib.contextmanager
    def imaging(self, number: int) -> Iterator[Path]:
        """Yields an image's directory; in force when the block has filled and synced it.

        `number` is that of the segment begun with it. StorageError: the image before stays in
        force.
        """
        image = image_path(self._directory, number)
        making = image.with_suffix(".new")
        try:
            with failing(image, "making an image"):
                making.mkdir()
                self._reached("image begun")
                yield making
                with self._sync_lock:  # parts of the image may be as new as the last entry
                    self._ask_disk()  # whatever failed before: the image needs no other segment
                    failure_count = self._failure_count
                sync_path(making)
                self._reached("image written")
                making.rename(image)
                self._reached("image in place")
                sync_path(self._directory)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        with self._sync_lock:
            self._older_bytes = 0
            if self._failure_count == failure_count:  # else entries behind the image's are lost
                if self.has_failed:
                    (self._directory / FAILED_NAME).unlink(missing_ok=True)
                self.has_failed = self.wants_image = False
        forget_images(self._directory, self._reached, before=number)

    def _path(self, number: int) -> Path:
        return self._directory / f"{_PREFIX}{number:06d}"

    def close(self) -> None:
        """Syncs and closes. A disk that fails is remembered; the files themselves are enough."""
        with self._sync_lock, self._append_lock:
            if self._file >= 0:
                with contextlib.suppress(OSError):
                    self._sync_file()
                self._let_go()
                self._file = -1


def image_path(directory: Path, number: int) -> Path:
    """Returns the path of the image of a number."""
    return directory / f"{_IMAGE}{number:06d}"


def images(directory: Path) -> dict[int, Path]:
    """Returns the committed images by number, in order."""
    return _numbered(directory, _IMAGE)


def forget_images(
    directory: Path, reached: Callable[[str], None], before: int | None = None
) -> None:
    """Removes images and segments of numbers below `before`; None: all."""
    with failing(directory, "removing what is superfluous"):
        older = [p for n, p in images(directory).items() if before is None or n < before]
        for path in older:
            path.rename(path.with_suffix(".new"))  # a part of one is no image
            reached("image forgotten")
        if older:
            sync_path(directory)  # a segment is needed for as long as its image exists
        for number, path in segments(directory).items():
            if before is None or number < before:
                path.unlink()
                reached("segment forgotten")
        for path in _numbered(directory, _IMAGE, ".new").values():
            shutil.rmtree(path)
        for path in _numbered(directory, _PREFIX, ".new").values() if before is None else ():
            path.unlink()  # which a killed process had begun to make


def forget_journal(
    directory: Path, reached: Callable[[str], None], sync_files: Callable[[], None]
) -> None:
    """Removes images and journal, after `sync_files` has written the files that serve to disk."""
    if images(directory) or segments(directory):
        with failing(directory, "writing it to disk"):
            sync_files()
    forget_images(directory, reached)
