"""Removes checkpoints, and nothing else: directories with a whole manifest, and what that names.

A directory that is removed gets the name `PATH.removed` first, so that half of it is never met as a
checkpoint. Its manifest goes last: what a killed process leaves there still proves whose it is.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwell.checkpoint.directory import MARK_NAME, sync_directory
from shardwell.checkpoint.format import Checkpoint, CheckpointParameter, CheckpointTable
from shardwell.checkpoint.manifest import MANIFEST_NAME, read_manifest
from shardwell.checkpoint.tensor_files import file_error
from shardwell.errors import StorageError

REMOVED_SUFFIX = ".removed"


def own_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory that holds nothing else; its files may be damaged or missing.

    Raises:
        StorageError: the directory has no whole manifest, or something that the manifest does not
            name; the message names it.
    """
    if path.is_symlink():
        raise StorageError(f"{path} is a link, and no checkpoint that a save made")
    found = read_manifest(path)
    strange = _unnamed(path, found)
    if strange is not None:
        raise StorageError(f"{path} has {strange}, which its manifest does not name")
    return found


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint.

    Raises:
        StorageError: it is no checkpoint, or has something else in it; nothing was removed. Or the
            file system failed.
    """
    checkpoint = own_checkpoint(path)
    gone = path.with_name(path.name + REMOVED_SUFFIX)
    finish_removal(gone)
    try:
        path.rename(gone)
    except OSError as error:
        raise file_error(path, error, "removing it") from None
    _remove(gone, checkpoint)


def finish_removal(gone: Path) -> None:
    """Removes what a killed process left of a removal; an empty directory, too.

    Raises:
        StorageError: it is something else, and stays as it is; or the file system failed.
    """
    if not os.path.lexists(gone):
        return
    try:
        is_empty = not gone.is_symlink() and gone.is_dir() and not os.listdir(gone)
        if is_empty:
            gone.rmdir()
            return
    except OSError as error:
        raise file_error(gone, error, "removing it") from None
    _remove(gone, own_checkpoint(gone))


def _entries(checkpoint: Checkpoint) -> list[CheckpointParameter | CheckpointTable]:
    """In the order of their numbers."""
    return [*checkpoint.parameters, *checkpoint.tables]


def _unnamed(path: Path, checkpoint: Checkpoint) -> Path | None:
    """Something in a checkpoint's directory that no save put there."""
    entries = _entries(checkpoint)
    files = {path / MANIFEST_NAME, path / MARK_NAME}
    files.update(path / file.path for entry in entries for file in entry.files)
    directories = {path / f"{number:06d}-{entry.name}" for number, entry in enumerate(entries, 1)}
    for top, directory_names, file_names in os.walk(path, onerror=_reraise):
        for name in directory_names:
            found = Path(top, name)
            if found not in directories or found.is_symlink():
                return found
        for name in file_names:
            found = Path(top, name)
            if found not in files or found.is_symlink():
                return found
    return None


def _reraise(error: OSError) -> None:
    raise file_error(Path(str(error.filename)), error, "reading it") from None


def _remove(gone: Path, checkpoint: Checkpoint) -> None:
    """Removes what a manifest names, then the manifest."""
    entries = _entries(checkpoint)
    try:
        for number, entry in enumerate(entries, 1):
            for file in entry.files:
                (gone / file.path).unlink(missing_ok=True)
            directory = gone / f"{number:06d}-{entry.name}"
            if directory.exists():
                directory.rmdir()
        (gone / MARK_NAME).unlink(missing_ok=True)
        sync_directory(gone)  # so that the manifest goes last
        (gone / MANIFEST_NAME).unlink()
        gone.rmdir()
    except OSError as error:
        raise file_error(gone, error, "removing it") from None
