"""A shard's directory: whose it is, and that one process at a time uses it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from shardwell.closing import Closing
from shardwell.errors import StorageError
from shardwell_server.config import ShardConfig

_FORMAT_VERSION = 1
_IDENTITY_NAME = "shard.json"


class DataDirError(StorageError):
    """A data directory can't be used; the message says which file, and what to do."""


def kept_cluster_id(path: Path) -> str | None:
    """The cluster that a directory belongs to; None if it belongs to none, or can't be read."""
    try:
        found = json.loads((path / _IDENTITY_NAME).read_text())["cluster_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


class DataDir(Closing):
    """A directory claimed for one shard by this process, until `close`.

    Raises:
        DataDirError: it can't be written, belongs to another shard, is newer, or is in use.
    """

    def __init__(self, path: Path, config: ShardConfig) -> None:
        self.path = path
        identity_path = path / _IDENTITY_NAME
        identity = {
            "format_version": _FORMAT_VERSION,
            "cluster_id": config.cluster_id,
            "shard_index": config.shard_index,
            "shard_count": config.shard_count,
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock_file = (path / "lock").open("a")
        except OSError as error:
            raise DataDirError(
                f"data directory {path}: {error.strerror}; give a directory that this user can "
                "write to"
            ) from None
        try:
            self._lock(path)
            self._check_or_write(identity_path, identity)
        except BaseException:
            self._lock_file.close()
            raise

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataDirError(
                f"data directory {path} is in use by another process; a shard has its own"
            ) from None

    @staticmethod
    def _check_or_write(path: Path, identity: dict[str, object]) -> None:
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            DataDir._write(path, identity)
            return
        except (OSError, ValueError) as error:
            raise DataDirError(
                f"{path} can't be read ({error}); restore it, or move the directory away"
            ) from None
        if found != identity:
            raise DataDirError(
                f"{path} belongs to another shard: expected {identity}, found {found}; start the "
                "shard that it belongs to, or give another directory"
            )

    @staticmethod
    def _write(path: Path, identity: dict[str, object]) -> None:
        if any((path.parent / name).exists() for name in ("parameters", "tables")):
            raise DataDirError(
                f"{path} is missing, and beside it is the data of a shard, expected to be "
                f"{identity}; restore it, or give another directory"
            )
        written = path.with_suffix(".json.new")
        try:
            with written.open("w") as file:
                file.write(json.dumps(identity, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(written, path)
        except OSError as error:
            raise DataDirError(
                f"{path} can't be written: {error.strerror}; free space on that disk, or give a "
                "directory that this user can write to"
            ) from None

    def close(self) -> None:
        """Lets another process have it."""
        self._lock_file.close()
