"""A shard's directory: whose it is, and that one process at a time uses it.

The directory itself is locked, which nothing but its own removal can undo. One that has files, and
no whole shard.json, is not Shardwell's: it is refused, and neither its mode nor anything in it
changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell.process.connected import Closing
from shardwell.specs.formats import DIRECTORY, software_version
from shardwell_server.config import ShardConfig
from shardwell_server.store.files.mapped import identity_of, is_at, replace_file

_LOG = logging.getLogger("shardwell_server")
_MODE = 0o700
_FORMAT_NAME, _VERSION_NAME = "format_version", "shardwell_version"
_IDENTITY_NAME = "shard.json"
_NEW_IDENTITY_NAME = "shard.json.new"
_VOLUME_NAMES = ("lost+found", ".snapshot")
"""Entries that file systems themselves put into an empty volume."""
_CHECK_NAME = "crc32c"


class DataDirError(StorageError):
    """A data directory can't be used; the message says which file, and the remedy."""


class DataDirInUseError(DataDirError):
    """Another process, which may be about to end, has the directory."""


def _close_to_others(directory: int, found: os.stat_result, path: Path) -> None:
    if not found.st_mode & ~_MODE & 0o777:
        return
    try:
        os.fchmod(directory, _MODE)
    except OSError as error:  # it is another user's, as volumes of containers may be
        _LOG.warning(
            "other users may look into the data directory",
            extra={"data_dir": str(path), "reason": error.strerror},
        )


def kept_cluster_id(path: Path) -> str | None:
    """Returns the cluster of a directory; None if it can't be read."""
    try:
        return str(read_record(path / _IDENTITY_NAME)[0]["cluster_id"])
    except (OSError, ValueError, DataDirError):
        return None


def kept_shard_count(path: Path) -> int | None:
    """Returns the shard count of the cluster in a directory; None if it can't be read."""
    for each in sorted(path.glob(f"shard-*/{_IDENTITY_NAME}")):
        with contextlib.suppress(OSError, ValueError, DataDirError):
            return int(read_record(each)[0]["shard_count"])
    return None


def read_record(path: Path) -> tuple[dict[str, Any], int]:
    """Returns a file's fields, and the format; ValueError: damaged; DataDirError: other format."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or _FORMAT_NAME not in found:
        raise ValueError(f"it holds no JSON object with a {_FORMAT_NAME}")
    try:
        DIRECTORY.check(path, found[_FORMAT_NAME], found.get(_VERSION_NAME))
    except StorageError as error:
        raise DataDirError(error.message) from None
    check = found.pop(_CHECK_NAME, None)
    if check != _check_of(found):
        raise ValueError(f"it was damaged: {_CHECK_NAME} {check!r}, expected {_check_of(found)}")
    number: int = found.pop(_FORMAT_NAME)
    found.pop(_VERSION_NAME, None)
    return found, number


def _check_of(identity: Mapping[str, object]) -> int:
    return crc32.iscsi(json.dumps(identity).encode())


def _text_of(identity: Mapping[str, object]) -> str:
    fields = {_FORMAT_NAME: DIRECTORY.newest, _VERSION_NAME: software_version(), **identity}
    return json.dumps({**fields, _CHECK_NAME: _check_of(fields)}, indent=2) + "\n"


def write_record(path: Path, fields: Mapping[str, object]) -> None:
    """Writes a file of a few fields, with their checksum: all of it, or nothing."""
    try:
        replace_file(path, _text_of(fields))
    except OSError as error:
        raise DataDirError(
            f"{path} can't be written: {error.strerror}; free space on that disk, or give a "
            "directory that this user can write to"
        ) from None


def _check_not_the_users(directory: int, path: Path, identity: dict[str, Any]) -> None:
    """Refuses a directory that has files, and no identity; one with an identity is read later."""
    names = sorted(set(os.listdir(directory)).difference(_VOLUME_NAMES))
    if not names or _IDENTITY_NAME in names:
        return
    if not {"parameters", "tables"}.isdisjoint(names):
        raise DataDirError(
            f"{path / _IDENTITY_NAME} is missing, and beside it is the data of a shard, expected "
            f"to be {_in_words(identity)}; restore it, or give another directory"
        )
    if names == [_NEW_IDENTITY_NAME]:
        begun = path / _NEW_IDENTITY_NAME
        if begun.is_file() and _text_of(identity).encode().startswith(begun.read_bytes()):
            return  # a process was killed while it wrote the identity
    raise DataDirError(
        f"data directory {path} has {names[0]!r}, and no {_IDENTITY_NAME}: it is none of "
        "Shardwell's, and stays as it is; give an empty directory, or a new one"
    )


def _in_words(identity: dict[str, Any]) -> str:
    return (
        f"shard {identity['shard_index']} of {identity['shard_count']} of cluster "
        f"{identity['cluster_id']!r}"
    )


class DataDir(Closing):
    """A directory claimed for one shard by this process, until `close`."""

    def __init__(self, path: Path, config: ShardConfig) -> None:
        self.path = path
        identity_path = path / _IDENTITY_NAME
        identity = {
            "cluster_id": config.cluster_id,
            "shard_index": config.shard_index,
            "shard_count": config.shard_count,
        }
        self._directory = self._locked(path, identity)
        try:
            self.is_new = self._check_or_write(identity_path, identity)
            """True if it was empty, so that the shard begins without parameters and tables."""
            _close_to_others(self._directory, os.fstat(self._directory), path)
        except BaseException:
            self.close()
            raise

    @property
    def origin(self) -> str:
        """The state of its files when the shard began, for errors about things that it lacks."""
        if self.is_new:
            return f"its data directory {self.path} was empty when it started"
        return f"its data directory {self.path} has no files of it: they are older, or another's"

    @staticmethod
    def _locked(path: Path, identity: dict[str, object]) -> int:
        try:
            while True:
                path.mkdir(mode=_MODE, parents=True, exist_ok=True)
                directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _check_not_the_users(directory, path, identity)
                    os.utime(directory)  # refused where nothing can be written
                    found = os.fstat(directory)
                    if is_at(identity_of(found), path):
                        return directory
                except BaseException:
                    os.close(directory)
                    raise
                os.close(directory)  # it was moved away meanwhile
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise DataDirInUseError(
                    f"data directory {path} is in use by another process; a shard has its own"
                ) from None
            if error.errno in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):
                raise DataDirError(
                    f"data directory {path} can't be locked ({error.strerror}), so that a second "
                    "process could use it unnoticed; give one on a local file system"
                ) from None
            raise DataDirError(
                f"data directory {path}: {error.strerror}; give a directory that this user can "
                "write to"
            ) from None

    @staticmethod
    def _check_or_write(path: Path, identity: dict[str, object]) -> bool:
        """Returns True if it wrote the identity: a new one, or one over an older format's.

        The new number goes first: nothing newer is written under an older one.
        """
        try:
            found, number = read_record(path)
        except FileNotFoundError:
            write_record(path, identity)
            return True
        except (OSError, ValueError) as error:
            raise DataDirError(
                f"{path} can't be read ({error}); restore it, or give another directory"
            ) from None
        if found != identity:
            raise DataDirError(
                f"{path} belongs to another shard: expected {_in_words(identity)}, found "
                f"{_in_words(found)}; start the shard that it belongs to, or give another directory"
            )
        if number != DIRECTORY.newest:
            write_record(path, identity)
            _LOG.warning(
                "the data directory has a newer format from now on, which earlier versions refuse",
                extra={"data_dir": str(path.parent), "was": number, "is": DIRECTORY.newest},
            )
        return False

    def close(self) -> None:
        """Unlocks it, though a process that was forked meanwhile has it open."""
        fcntl.flock(self._directory, fcntl.LOCK_UN)
        os.close(self._directory)
