"""Checkpoints in object stores: s3://, gs:// and az://, by the package obstore.

    s3://bucket/runs/1000/manifest.json                     put last: then the checkpoint is whole
    s3://bucket/runs/1000/3f9a01c2/000001-NAME/slice-...    files, under a number of their save
    s3://bucket/runs/1000/3f9a01c2/.shardwell-partial       as long as that save goes on

States of a checkpoint (docs/adr/0044-stores.md):

    state     event                                                            next
    absent    a save puts its mark, then its files                             partial
    partial   its manifest is put, which only one of several saves can do      whole
    partial   another save was faster, or it fails                             absent: its files go
    partial   its process is killed; a day later a save with keep= finds it    absent
    whole     it is removed: its manifest is copied to manifest.removed, and
              goes, then its files                                             removed
    removed   manifest.removed goes last; a save with keep= goes on with it    absent

Invariants: a file is written once, under a number that no other save has; nothing is removed that
no manifest names, and that has no mark of ours beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from fastcrc import crc32

from shardwell.checkpoint.directory import MARK_NAME
from shardwell.checkpoint.tensor_files import file_error
from shardwell.errors import ArgumentError, StorageError
from shardwell.process.environment import install_command
from shardwell.process.local_paths import local_path
from shardwell.threads.asking import ask_all

_LOG = logging.getLogger("shardwell")
_URL = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]*)(?:/(.*))?")
MANIFEST_NAME = "manifest.json"
REMOVED_NAME = "manifest.removed"
_MARK = b"A save of Shardwell goes on here, or was killed; a later one removes what it left.\n"
_PART_BYTES = 16 * 2**20
_RETRY_S = timedelta(seconds=60)
_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")
"""How names of variables begin by which stores are found."""
_ABANDONED = timedelta(days=1)
"""No save takes so long: what it has left then may go."""


@dataclass(frozen=True)
class StorePath:
    """A name in an object store, as a path of this machine is one: "s3://bucket/runs/1000"."""

    root: str
    """Up to the bucket, without a slash behind it."""
    key: str
    """The rest, without slashes at its ends."""

    def __str__(self) -> str:
        return f"{self.root}/{self.key}"

    def __fspath__(self) -> str:
        return str(self)

    def __truediv__(self, more: str) -> StorePath:
        return StorePath(self.root, f"{self.key}/{more}" if self.key else more)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The path without the last part of the key."""
        return StorePath(self.root, self.key.rpartition("/")[0])

    @property
    def parents(self) -> list[StorePath]:
        """All above, below the bucket."""
        above = self.parent
        return [above, *above.parents] if above.key else []

    def with_name(self, name: str) -> StorePath:
        """Returns the path with another last part."""
        return self.parent / name

    @property
    def _store(self) -> Any:
        known = (each for each in os.environ.items() if each[0].startswith(_VARIABLES))
        return _store_of(self.root, tuple(sorted(known)))

    # Objects.

    @contextlib.contextmanager
    def failing(self, doing: str) -> Iterator[None]:
        """Turns a failure of the store into a StorageError that names it."""
        try:
            yield
        except (OSError, _obstore().exceptions.BaseError) as error:
            if isinstance(error, StorageError):
                raise
            words = str(error).split("\n", 1)[0]
            raise StorageError(
                f"{self}: {doing} failed: {words:.400}; check the bucket, the credentials and "
                "the way to the store"
            ) from None

    def read(self, size_max: int) -> bytes | None:
        """Returns an object's bytes, one more than `size_max` at most; None: it is not there."""
        with self.failing("reading it"):
            try:
                found = _obstore().get(self._store, self.key)
            except FileNotFoundError:
                return None
            if found.meta["size"] > size_max:
                return bytes(size_max + 1)
            return bytes(found.bytes())

    def exists(self) -> bool:
        """Returns True if there is an object of just this name."""
        with self.failing("looking for it"):
            try:
                _obstore().head(self._store, self.key)
            except FileNotFoundError:
                return False
            return True

    @property
    def modified_at(self) -> datetime:
        """The time at which the store got the object, by its clock."""
        with self.failing("looking for it"):
            found: datetime = _obstore().head(self._store, self.key)["last_modified"]
            return found

    def put(self, data: bytes | Path) -> None:
        """Puts an object, of a file in parts at once."""
        more = {} if isinstance(data, bytes) else {"chunk_size": _PART_BYTES, "max_concurrency": 4}
        with self.failing("writing it"):
            _obstore().put(self._store, self.key, data, **more)

    def create(self, data: bytes) -> bool:
        """Puts an object; False: there is one."""
        exists = _obstore().exceptions
        with self.failing("writing it"):
            try:
                _obstore().put(self._store, self.key, data, mode="create", use_multipart=False)
            except (exists.AlreadyExistsError, exists.PreconditionError, FileExistsError):
                return False
            return True

    def fetch(self, path: Path) -> int:
        """Writes an object to a new file; returns its CRC32C."""

        def write(part: memoryview) -> None:
            try:
                file.write(part)
            except OSError as error:  # of this machine's disk, not of the store
                raise file_error(path, error, f"copying {self} to it") from None

        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            return self.crc(write)

    def crc(self, take: Callable[[memoryview], object] = lambda part: None) -> int:
        """Reads an object, in parts; returns its CRC32C."""
        crc = 0
        with self.failing("reading it"):
            for part in _obstore().get(self._store, self.key).stream(min_chunk_size=2**20):
                view = memoryview(part)
                take(view)
                crc = crc32.iscsi(view, crc)
        return crc

    def below(self) -> dict[str, Any]:
        """Returns all objects below, by the rest of their keys; each with "size" and more."""
        with self.failing("listing it"):
            found = _obstore().list(self._store, self.key or None)
            skipped = len(self.key) + 1 if self.key else 0
            return {each["path"][skipped:]: each for page in found for each in page}

    def names(self) -> list[str]:
        """Returns the names right below, of objects and of what has some below it."""
        with self.failing("listing it"):
            found = _obstore().list_with_delimiter(self._store, self.key or None)
            keys = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
            return [key.rstrip("/").rpartition("/")[2] for key in keys]

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects below, in no order; those that are not there do not matter."""
        keys = [(self / name).key for name in names]
        with self.failing("removing it"):
            if keys:
                _obstore().delete(self._store, keys)

    def copy_to(self, other: StorePath) -> None:
        """Copies an object within its store."""
        with self.failing("copying it"):
            _obstore().copy(self._store, self.key, other.key)


Place: TypeAlias = Path | StorePath
"""Where a checkpoint is."""


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place that a user has given: a path of this machine, or a URL of a store.

    Raises:
        ArgumentError: it is another URL, or obstore is not installed.
    """
    given = os.fspath(path)
    found = _URL.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        return Path(os.path.abspath(local_path(path)))
    key = (found[3] or "").strip("/")
    if not key or any(part in ("", ".", "..") for part in key.split("/")):
        raise ArgumentError(
            f"{given!r} names no place in the bucket: give {found[1]}://{found[2]}/NAME, as in "
            f"{found[1]}://{found[2]}/runs/{{step}}"
        )
    _obstore()
    return StorePath(f"{found[1]}://{found[2]}", key)


@cache
def _obstore() -> Any:
    try:
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError:
        raise ArgumentError(
            "checkpoints in object stores need obstore; run: "
            f"{install_command('obstore>=0.8')}, or give a local path"
        ) from None


@lru_cache(8)
def _store_of(root: str, variables: tuple[tuple[str, str], ...]) -> Any:
    """Opens a store, as these variables of the process, or the roles of its machine, say.

    A store that is away, or starts again, is asked for a minute.
    """
    backoff = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=3)}
    retries = {"max_retries": 1000, "retry_timeout": _RETRY_S, "backoff": {**backoff, "base": 2}}
    options = {
        "timeout": timedelta(minutes=10),
        "connect_timeout": timedelta(seconds=10),
        "allow_http": any(
            "ENDPOINT" in name and of.startswith("http://") for name, of in variables
        ),
    }
    with StorePath(root, "").failing("opening it"):
        return _obstore().store.from_url(root, client_options=options, retry_config=retries)


@contextlib.contextmanager
def whole_objects(final: Callable[[], StorePath | None]) -> Iterator[tuple[Path, str]]:
    """Gives a local directory to fill, and the name below which its files will be.

    When the block ends without an error, `final` is asked where to put them; None: nowhere. The
    manifest, beside that name, goes last.
    """
    number = secrets.token_hex(4)
    with tempfile.TemporaryDirectory(prefix="shardwell-") as made:
        directory = Path(made)
        (directory / number).mkdir()
        yield directory, number
        place = final()
        if place is not None:
            _put_all(place, directory, number)


def _put_all(place: StorePath, directory: Path, number: str) -> None:
    files = [each for each in (directory / number).rglob("*") if each.is_file()]
    sizes = {each.relative_to(directory).as_posix(): each.stat().st_size for each in files}
    mark = f"{number}/{MARK_NAME}"
    may_be_whole = False
    try:
        (place / mark).put(_MARK)
        ask_all(list(sizes), lambda name: (place / name).put(directory / name))
        found = place.below()
        for name, size in sizes.items():
            if name not in found or found[name]["size"] != size:
                raise StorageError(f"{place / name} is not there as it was put; save again")
        manifest = (directory / MANIFEST_NAME).read_bytes()
        may_be_whole = True
        may_be_whole = _is_made(place / MANIFEST_NAME, manifest)
        if not may_be_whole:
            raise ArgumentError(
                f"{place} exists already, or another process was faster; remove it, or give "
                "another name"
            )
    except BaseException:
        if not may_be_whole:
            with contextlib.suppress(StorageError):
                place.delete([*sizes, mark])
        raise
    with contextlib.suppress(StorageError):  # it is whole; a mark beside its files says nothing
        place.delete([mark])


def _is_made(manifest: StorePath, data: bytes) -> bool:
    """Puts a manifest; False: there is another. After a failure it asks what there is."""
    try:
        if manifest.create(data):
            return True
    except StorageError:  # perhaps of the answer alone
        found = manifest.read(len(data))
        if found is None:
            raise
    else:
        found = manifest.read(len(data))
    return found == data


def remove_objects(place: StorePath, names: Iterable[str]) -> None:
    """Removes a checkpoint whose manifest names these files, and nothing else. Safe to repeat."""
    if (place / MANIFEST_NAME).exists():
        (place / MANIFEST_NAME).copy_to(place / REMOVED_NAME)
    place.delete([MANIFEST_NAME])
    place.delete(names)
    place.delete([REMOVED_NAME])


def is_half_removed(place: StorePath) -> bool:
    """Returns True where a removal was cut off."""
    return (place / REMOVED_NAME).exists() and not (place / MANIFEST_NAME).exists()


def remove_abandoned(place: StorePath, named: Iterable[str], now: datetime) -> None:
    """Removes what killed saves have left there a day ago, but for the files that are `named`.

    `now` is by the store's clock.
    """
    found = place.below()
    numbers = {
        name.partition("/")[0]
        for name, each in found.items()
        if name.endswith(f"/{MARK_NAME}") and now - each["last_modified"] > _ABANDONED
    }
    numbers -= {name.partition("/")[0] for name in named}
    place.delete([name for name in found if name.partition("/")[0] in numbers])
