"""Loss of power, as a disk would have it: what was never synced is gone or scrambled.

Every sync is recorded: logs are cut back to what was last synced, mapped files scrambled, and
another start of the machine is in boot.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.stories.images import Image, image_of, restore
from harness.stories.table import LAYOUT
from shardwell_server.config import Durability, ShardConfig
from shardwell_server.server import ShardServer
from shardwell_server.store.files.data_dir import DataDir
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.journal import journal
from shardwell_server.store.journal.journal import HEAD_BYTES
from shardwell_server.store.mmap import table as mapped_table

SIZE = 1000
MAPPED = {"weights", "gradient_sum", "slot-0", "slot-1", "sums", "has_sum", "keys"}
MAPPED |= {"update_counts", "last_steps", "row_checks", "key_checks", "sum_checks"}
MAPPED |= {"records", "marks", "undo"}
"""Files of parameters and tables."""
OPTIMIZERS = [
    shardwell.SGD(learning_rate=0.5),
    shardwell.SGD(learning_rate=0.5, momentum=0.5),
    shardwell.Average(),
]


class Disk:
    """The contents of a disk for good: those of files when they were last synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: dict[str, bytes] = {}
        self._lock = threading.Lock()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._recording(getattr(os, name)))
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._following(getattr(os, name)))
        sync = MappedFile.sync

        def sync_mapped(file: MappedFile) -> None:
            with self._lock:
                self._synced[str(file.path)] = file.data.tobytes()
            sync(file)

        monkeypatch.setattr(MappedFile, "sync", sync_mapped)

    def _recording(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def record(file: int) -> None:
            path = os.readlink(f"/proc/self/fd/{file}")
            if os.path.isfile(path):
                with self._lock:
                    self._synced[path] = Path(path).read_bytes()
            sync(file)

        return record

    def _following(self, rename: Callable[..., None]) -> Callable[..., None]:
        """Keeps what is known of files under the name that they, or their directory, get."""

        def follow(old: str | Path, new: str | Path, **given: Any) -> None:
            rename(old, new, **given)
            with self._lock:
                for path in [*self._synced]:
                    if path == str(old) or path.startswith(f"{old}/"):
                        self._synced[f"{new}{path[len(str(old)) :]}"] = self._synced.pop(path)

        return follow

    def holds(self, directory: Path) -> None:
        """Takes existing files for synced: they were on disk when the machine started."""
        for path in directory.rglob("*"):
            if path.is_file():
                self._synced[str(path)] = path.read_bytes()

    def synced_below(self, directory: Path) -> dict[str, bytes]:
        """Contents by path relative to the directory."""
        start = f"{directory}/"
        with self._lock:
            return {
                path[len(start) :]: contents
                for path, contents in self._synced.items()
                if path.startswith(start)
            }

    def lose_power(self, directory: Path, to: Path) -> None:
        """Copies what would be left, at a moment in which no image is being written."""
        left: list[Image] = []

        def is_seen() -> bool:
            images = _images(directory)
            left[:] = [after_power_loss(image_of(directory), self.synced_below(directory))]
            return images == _images(directory)

        eventually("it was seen", is_seen)
        restore(left[0], to)
        start_again(to)


def after_power_loss(image: Image, synced: Mapping[str, bytes]) -> Image:
    """What another start of the machine finds of files.

    Mapped files are scrambled where there is an image to go back to, even if they were synced once;
    all else is what was synced of it. Images are whole, or begun and left behind.
    """
    imaged = {name.split("/image-")[0] for name in standing_images(image)}
    found = dict(image)
    for name, contents in image.items():
        directory, _, file = name.rpartition("/")
        if "/image-" in name:
            continue
        if contents and (file.startswith("journal-") or file in ("events", "samples")):
            found[name] = synced.get(name, b"")
        elif contents and file in MAPPED:
            scrambled = b"\x5a" * len(contents)
            found[name] = scrambled if directory in imaged else synced.get(name, scrambled)
    return found


def standing_images(image: Image) -> list[str]:
    """The directories of those that are whole."""
    return [
        name
        for name, contents in image.items()
        if contents is None and "/image-" in name and not name.endswith(".new")
    ]


def scrambled_at(path: Path, to: Path) -> Path:
    """What another start of the machine finds when all logs were synced."""
    image = image_of(path)
    whole = {name: contents for name, contents in image.items() if contents is not None}
    return restore(after_power_loss(image, whole), to)


def many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an image after each change, in a table's case in blocks of two rows."""
    monkeypatch.setattr(journal, "IMAGE_AT_BYTES_MIN", 0)
    monkeypatch.setattr(mapped_table, "_BLOCK_BYTES", 2 * LAYOUT.row_size_bytes)


def with_synced(segment: bytes, synced_bytes: int = HEAD_BYTES) -> bytes:
    """A journal's segment of which so much is noted as synced."""
    return journal._head(synced_bytes) + segment[HEAD_BYTES:]


def _images(directory: Path) -> list[str]:
    """The images that are there, one under way included."""
    return sorted(str(path) for path in directory.rglob("image-*"))


def start_again(directory: Path) -> None:
    """Makes files those of an earlier start of the machine."""
    boot = json.loads((directory / "boot.json").read_text())
    (directory / "boot.json").write_text(json.dumps({**boot, "boot_id": "another start"}))


def failing(monkeypatch: pytest.MonkeyPatch, name: str, part: str, error: int) -> threading.Event:
    """Makes a call of the system on a file whose path holds `part` fail while the event is set."""
    fails, real = threading.Event(), getattr(os, name)

    def call(file: int, *given: int) -> object:
        path = os.readlink(f"/proc/self/fd/{file}")
        if fails.is_set() and part in path:
            raise OSError(error, os.strerror(error), path)
        return real(file, *given)

    monkeypatch.setattr(os, name, call)
    return fails


@contextlib.contextmanager
def served(path: Path, durability: str) -> Iterator[str]:
    config = ShardConfig(
        shard_index=0, shard_count=1, chunk_size_bytes=256, durability=Durability(durability)
    )
    with DataDir(path, config) as claimed, ShardServer(config, claimed) as server:
        yield server.address


class Run:
    """Two workers of one synchronous parameter, with whole numbers that add up exactly."""

    def __init__(self, target: str, optimizer: shardwell.Optimizer, worker_count: int = 2) -> None:
        self.clients = [
            shardwell.connect(target, worker_id=f"w{i}", timeout_s=PATIENCE_S)
            for i in range(worker_count)
        ]
        self.models = [
            client.parameter("m", size=SIZE, optimizer=optimizer, worker_count=worker_count)
            for client in self.clients
        ]
        self.models[0].init(np.zeros(SIZE, np.float32))

    def step(self, step: int) -> np.ndarray:
        """One step of all workers; the weights after it."""
        results: list[np.ndarray | None] = [None] * len(self.models)

        def work(index: int) -> None:
            results[index] = self.models[index].exchange(gradient(step, index))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(1, len(self.models))]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
        assert results[0] is not None
        return results[0]

    def close(self) -> None:
        for client in self.clients:
            client.close()


def gradient(step: int, worker: int) -> np.ndarray:
    return (np.arange(SIZE) % 5 + step + worker).astype(np.float32)


def trained(tmp_path: Path, steps: int, optimizer: shardwell.Optimizer) -> list[np.ndarray]:
    """The weights after each step of an undisturbed run."""
    with served(tmp_path / "undisturbed", "process") as target:
        run = Run(target, optimizer)
        weights = [run.step(step).copy() for step in range(steps)]
        run.close()
        return weights
