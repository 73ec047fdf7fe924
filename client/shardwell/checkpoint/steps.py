"""Checkpoints of one training side by side, each named for its step: "ckpt/{step}".

A name with `{step}` means all of them: saving gives the new one its place, reading takes the
newest that is whole. Only a checkpoint is removed to make place: a directory with a whole manifest,
and what that names. It gets the name `PATH.removed` first, so that half of it is never met as a
checkpoint. Its manifest goes last: what a killed process leaves there still proves whose it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from shardwell.checkpoint.directory import MARK_NAME, sync_directory
from shardwell.checkpoint.format import Checkpoint, check_crc, entries_of, files_of, load_id_of
from shardwell.checkpoint.manifest import read_checkpoint, read_manifest
from shardwell.checkpoint.stores import (
    MANIFEST_NAME,
    REMOVED_NAME,
    Place,
    StorePath,
    is_half_removed,
    place_of,
    remove_abandoned,
    remove_objects,
)
from shardwell.checkpoint.tensor_files import file_error
from shardwell.errors import ArgumentError, ShardwellError, StorageError
from shardwell.threads.asking import ask_all

_LOG = logging.getLogger("shardwell")
_FIELD = "{step}"
_REMOVED_SUFFIX = ".removed"
_ANY_FIELD = re.compile(r"\{[^{}]*\}")


def inspect_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> Checkpoint:
    """The contents of a checkpoint, after a look whether all its files are there and complete.

    Args:
        path: Its directory; with `{step}` in its name, as "ckpt/{step}", the newest whole one.
        verify: Read all files and compare their CRCs.

    Raises:
        StorageError: it is no checkpoint, was damaged, or was written by a later version; the
            message names the file.

    Examples:
        >>> net = client.parameter("saved", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> saved = client.save_checkpoint("inspected", parameters=["saved"])
        >>> shardwell.inspect_checkpoint("inspected", verify=True).parameters[0].name
        'saved'
    """
    return _read(place_of(path), partial(read_checkpoint, verify=verify))


def _read(place: Place, read: Callable[[Place], Checkpoint]) -> Checkpoint:
    steps = StepPaths.of(place)
    return read(place) if steps is None else steps.newest(read)


def is_there(path: str | os.PathLike[str]) -> bool:
    """Returns True if there is a checkpoint, whole or not; with `{step}`, any."""
    place = place_of(path)
    steps = StepPaths.of(place)
    return _stands(place) if steps is None else bool(steps.steps())


def _stands(place: Place) -> bool:
    if isinstance(place, StorePath):
        return (place / MANIFEST_NAME).exists()
    return os.path.lexists(place)


@contextlib.contextmanager
def verified(path: str | os.PathLike[str]) -> Iterator[tuple[Checkpoint, Path]]:
    """Gives a checkpoint as `inspect_checkpoint` does, and a directory with its intact files.

    Those of an object store are copied into a temporary one, for which there must be room.
    """
    place = place_of(path)
    if isinstance(place, Path):
        checkpoint = _read(place, partial(read_checkpoint, verify=True))
        yield checkpoint, Path(checkpoint.path)
        return
    with tempfile.TemporaryDirectory(prefix="shardwell-") as copied:
        yield _read(place, partial(_fetched, Path(copied))), Path(copied)


def _fetched(directory: Path, place: Place) -> Checkpoint:
    checkpoint = read_checkpoint(place)
    for left in directory.iterdir():  # of one that was damaged
        shutil.rmtree(left)

    def fetch(file: Any) -> None:
        source: Any = checkpoint.path / file.path
        check_crc(source, source.fetch(directory / file.path), file.crc32c)

    try:
        ask_all([file for entry in entries_of(checkpoint) for file in files_of(entry)], fetch)
    except OSError as error:
        if isinstance(error, ShardwellError):
            raise
        raise file_error(directory, error, f"copying {place} into it") from None
    return checkpoint


class StepPaths:
    """All checkpoints that match a path with `{step}`, which is once in its last part."""

    def __init__(self, path: Place) -> None:
        if path.name.count(_FIELD) != 1 or _FIELD in str(path.parent):
            raise ArgumentError(
                f"{_FIELD} must be once in a checkpoint's own name, as in 'ckpt/{_FIELD}'; got "
                f"{str(path)!r}"
            )
        self._path = path
        before, after = map(re.escape, path.name.split(_FIELD))
        self._name = re.compile(f"{before}(0|[1-9][0-9]*){after}")

    @staticmethod
    def of(path: Place) -> StepPaths | None:
        """The checkpoints of a path; None if it has no `{step}`."""
        for part in (path, *path.parents):
            slips = [each for each in _ANY_FIELD.findall(part.name) if each != _FIELD]
            if slips and not (isinstance(part, Path) and part.exists()):
                raise ArgumentError(
                    f"a checkpoint's name has no field {slips[0]}: write {_FIELD} in place of "
                    f"{slips[0]}, or no braces; got {str(path)!r}"
                )
        return StepPaths(path) if _FIELD in str(path) else None

    def at(self, step: int) -> Place:
        """The path of a step's checkpoint."""
        return self._path.with_name(self._path.name.replace(_FIELD, str(step)))

    def steps(self) -> list[int]:
        """The steps that have a directory, newest first."""
        found = (self._name.fullmatch(name) for name in self._beside())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _beside(self) -> list[str]:
        if isinstance(self._path, StorePath):
            return self._path.parent.names()
        try:
            return os.listdir(self._path.parent)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise file_error(self._path.parent, error, "reading it") from None

    def newest(self, read: Callable[[Place], Checkpoint] = read_checkpoint) -> Checkpoint:
        """The newest that `read` takes; the log names newer ones that are damaged."""
        damaged: list[StorageError] = []
        for step in self.steps():
            try:
                return read(self.at(step))
            except StorageError as error:
                _LOG.warning("passed over a checkpoint that can't be used: %s", error.message)
                damaged.append(error)
        why = "; check the path: it has none of that name"
        if damaged:
            why = f"; of the newest: {damaged[0].message}"
        raise StorageError(f"there is no checkpoint that can be used at {self._path}{why}")

    def make_way(self, made: Checkpoint) -> Checkpoint | None:
        """Frees the path of a new checkpoint; returns the one there if its contents are equal.

        Another checkpoint of that step is removed, whole or not. StorageError: the path has
        something that no save made, or it can't be removed.
        """
        if not _stands(made.path):
            return None
        try:
            here = read_checkpoint(made.path)
            if [*map(load_id_of, entries_of(here))] == [*map(load_id_of, entries_of(made))]:
                return here
        except StorageError as error:
            _LOG.warning("replacing a checkpoint that is not whole: %s", error.message)
        try:
            _remove_checkpoint(made.path)
        except StorageError as error:
            raise StorageError(
                f"nothing was saved: {made.path} is not replaced, as a save did not make all of "
                f"it: {error.message}; move {made.path} away, or save to another path"
            ) from None
        return None

    def prune(self, keep: int, newest: int) -> None:
        """Removes all before step `newest` but the last `keep` whole ones, that one included.

        Later ones are of a training that was given up: they stay, and count for nothing. So does
        everything that no save made. A warning in the log names what is not removed.
        """
        whole_count = 0
        try:
            self._sweep(newest)
            for step in self.steps():
                if step > newest:
                    continue
                if whole_count == keep:
                    _or_warn(_remove_checkpoint, self.at(step))
                    continue
                try:
                    read_checkpoint(self.at(step))
                    whole_count += 1
                except StorageError:
                    continue  # newer than what is kept: a user may want to look at it
        except StorageError as error:
            _LOG.warning("old checkpoints were not removed: %s", error.message)

    def _sweep(self, newest: int) -> None:
        """Removes what was being removed when its process was killed."""
        made = self.at(newest)
        if isinstance(made, StorePath):
            now = (made / MANIFEST_NAME).modified_at
            for step in self.steps():
                _or_warn(partial(_sweep_objects, now), self.at(step))
            return
        for name in self._beside():
            if name.endswith(_REMOVED_SUFFIX) and self._name.fullmatch(
                name.removesuffix(_REMOVED_SUFFIX)
            ):
                _or_warn(_finish_removal, self._path.with_name(name))


def _sweep_objects(now: datetime, place: StorePath) -> None:
    if is_half_removed(place):
        remove_objects(place, _names(read_manifest(place, REMOVED_NAME)))
        return
    is_whole = (place / MANIFEST_NAME).exists()
    remove_abandoned(place, _names(read_manifest(place)) if is_whole else (), now)


def _names(checkpoint: Checkpoint) -> list[str]:
    return [file.path for entry in entries_of(checkpoint) for file in files_of(entry)]


def _or_warn(remove: Callable[[Any], None], path: Place) -> None:
    try:
        remove(path)
    except StorageError as error:
        _LOG.warning("keep= left %s as it is: %s", path, error.message)


def _own_checkpoint(path: Path) -> Checkpoint:
    """Reads the checkpoint of a directory that holds nothing else; its files may be damaged."""
    if path.is_symlink():
        raise StorageError(f"{path} is a link, and no checkpoint that a save made")
    found = read_manifest(path)
    strange = _unnamed(path, found)
    if strange is not None:
        raise StorageError(f"{path} has {strange}, which its manifest does not name")
    return found


def _remove_checkpoint(path: Place) -> None:
    """Removes a checkpoint; StorageError: it has something else in it, and nothing was removed."""
    if isinstance(path, StorePath):
        remove_objects(path, _names(read_manifest(path)))
        return
    checkpoint = _own_checkpoint(path)
    gone = path.with_name(path.name + _REMOVED_SUFFIX)
    _finish_removal(gone)
    try:
        path.rename(gone)
    except OSError as error:
        raise file_error(path, error, "removing it") from None
    _remove(gone, checkpoint)


def _finish_removal(gone: Path) -> None:
    """Removes what a killed process left of a removal; anything else stays as it is."""
    if not os.path.lexists(gone):
        return
    try:
        if not gone.is_symlink() and gone.is_dir() and not os.listdir(gone):
            gone.rmdir()
            return
    except OSError as error:
        raise file_error(gone, error, "removing it") from None
    _remove(gone, _own_checkpoint(gone))


def _unnamed(path: Path, checkpoint: Checkpoint) -> Path | None:
    """Returns something in a checkpoint's directory that no save put there."""
    entries = entries_of(checkpoint)
    files = {path / MANIFEST_NAME, path / MARK_NAME}
    files.update(path / file.path for entry in entries for file in files_of(entry))
    directories = {path / f"{number:06d}-{entry.name}" for number, entry in enumerate(entries, 1)}
    for top, directory_names, file_names in os.walk(path, onerror=_reraise):
        for names, expected in ((directory_names, directories), (file_names, files)):
            for found in (Path(top, name) for name in names):
                if found not in expected or found.is_symlink():
                    return found
    return None


def _reraise(error: OSError) -> None:
    raise file_error(Path(str(error.filename)), error, "reading it") from None


def _remove(gone: Path, checkpoint: Checkpoint) -> None:
    """Removes what a manifest names, then the manifest."""
    entries = entries_of(checkpoint)
    try:
        for number, entry in enumerate(entries, 1):
            for file in files_of(entry):
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
