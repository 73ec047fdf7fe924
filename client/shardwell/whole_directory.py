"""A directory that exists whole or not at all, also after a crash: made beside, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardwell.errors import ArgumentError, ShardwellError
from shardwell.slice_file import file_error

_SUFFIX = ".partial"


@contextlib.contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Gives a directory to fill, which becomes `path` when the block ends without an error.

    Files are the caller's to bring to the disk. Parents are made; what a process that was killed
    left beside `path` is removed.

    Raises:
        ArgumentError: `path` exists, or another process is making it.
        StorageError: it can't be made.
    """
    partial = path.with_name(path.name + _SUFFIX)
    _check_free(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(partial):
            try:
                _clear(partial)
                yield partial
                for directory, _, _ in os.walk(partial):
                    _sync(directory)
                _check_free(path)
                partial.rename(path)
                _sync(path.parent)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        if isinstance(error, ShardwellError):
            raise
        raise file_error(path, error, "making the directory") from None


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise ArgumentError(f"{path} exists already; remove it, or give another directory")


@contextlib.contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Makes a directory, or takes over one that nobody uses any more; a lock keeps others away."""
    while True:
        partial.mkdir(exist_ok=True)
        directory = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(directory, partial)
            if _is_same(directory, partial):
                yield
                return
        finally:
            os.close(directory)


def _is_same(directory: int, path: Path) -> bool:
    """False: another process has finished it in between, and given it its name."""
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
        # File systems without locks: whoever uses one must not make a directory twice at once.


def _clear(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sync(directory: str | Path) -> None:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
