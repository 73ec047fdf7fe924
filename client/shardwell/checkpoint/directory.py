"""Directories beside a path in which something is made that is to appear whole or not at all.

Such a directory has one name, `PATH.partial`: what a process that was killed left there is taken
over by the next one that makes the same thing. A lock on it keeps two from making it at once. A
mark in it, which comes first and goes last, tells it from a directory of the user's, which is
refused and stays as it is; an empty directory may be taken.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwell.checkpoint.tensor_files import file_error
from shardwell.errors import ArgumentError, ShardwellError, StorageError
from shardwell.threads.asking import ask_all

_SUFFIX = ".partial"
MARK_NAME = ".shardwell-partial"
"""The file that says whose a directory is; a kill may leave it in one that got its name."""
_MARK = b"A killed process of Shardwell left this directory; the next one removes what is in it.\n"


@contextlib.contextmanager
def whole_directory(path: Path, becomes: Callable[[], Path | None] | None = None) -> Iterator[Path]:
    """Gives a directory to fill, which becomes `path` when the block ends without an error.

    The caller brings the files to the disk; then the directories are brought there, and `becomes`
    is asked for another name beside `path`. None: the directory becomes nothing.
    """
    _check_free(path)
    with working_directory(path) as partial:
        yield partial
        ask_all([directory for directory, _, _ in os.walk(partial)], sync_directory)
        final = path if becomes is None else becomes()
        if final is not None:
            _check_free(final)
            partial.rename(final)
            (final / MARK_NAME).unlink()
            ask_all([final, final.parent], sync_directory)


@contextlib.contextmanager
def working_directory(path: Path) -> Iterator[Path]:
    """Gives an empty directory beside `path` to make it in; what is left in it is removed."""
    partial = path.with_name(path.name + _SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(partial) as directory:
            try:
                _clear(partial)
                yield partial
            finally:
                if _is_same(directory, partial):  # not if it was renamed
                    with contextlib.suppress(OSError):
                        _clear(partial)
                        (partial / MARK_NAME).unlink()
                        partial.rmdir()
    except OSError as error:
        if isinstance(error, ShardwellError):
            raise
        raise file_error(path, error, "making it") from None


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise ArgumentError(f"{path} exists already; remove it, or give another directory")


@contextlib.contextmanager
def _claimed(partial: Path) -> Iterator[int]:
    """Makes a directory, or takes over one of a dead process; gives a descriptor that locks it."""
    while True:
        with contextlib.suppress(FileExistsError):
            partial.mkdir()
        try:
            directory = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # another process has removed it in between
            continue
        except NotADirectoryError:
            raise StorageError(
                f"{partial} is in the way of making it: it is no directory that Shardwell made; "
                "move it away, or give another path"
            ) from None
        try:
            _lock(directory, partial)
            if _is_same(directory, partial):
                _mark(partial)
                try:
                    yield directory
                finally:  # a process that was forked meanwhile has it open, and would lock it
                    with contextlib.suppress(OSError):
                        fcntl.flock(directory, fcntl.LOCK_UN)
                return
        finally:
            os.close(directory)


def _is_same(directory: int, path: Path) -> bool:
    """Returns False once another process has removed it, or given it its final name."""
    try:
        return os.path.samestat(os.fstat(directory), path.stat())
    except FileNotFoundError:
        return False


def _lock(directory: int, partial: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise ArgumentError(f"{partial} is being written by another process") from None
        # On file systems without locks, callers must not make a directory twice at once.


def _mark(partial: Path) -> None:
    names = os.listdir(partial)
    if MARK_NAME in names:
        return
    if names:
        raise StorageError(
            f"{partial} has {names[0]!r}, and no {MARK_NAME}: it is no directory that Shardwell "
            "made; move it away, or give another path"
        )
    (partial / MARK_NAME).write_bytes(_MARK)


def _clear(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.name == MARK_NAME:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def sync_directory(directory: str | Path) -> None:
    """Brings the names in a directory to the disk; OSError: it can't be."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
