"""Loss of power, as a disk would have it: what was never synced is gone or scrambled.

Every sync is recorded, and the directory copied: files cut back to what was last synced, mapped
files scrambled, and another start of the machine in boot.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from shardwell_server.config import Durability, ShardConfig
from shardwell_server.server import ShardServer
from shardwell_server.store.files.data_dir import DataDir
from shardwell_server.store.journal import journal
from shardwell_server.store.journal.journal import HEAD_BYTES

T = TypeVar("T")
SIZE = 1000
MAPPED = ("weights", "gradient_sum", "slot-0", "records", "marks", "undo")
OPTIMIZERS = [
    shardwell.SGD(learning_rate=0.5),
    shardwell.SGD(learning_rate=0.5, momentum=0.5),
    shardwell.Average(),
]


class Disk:
    """What a directory's files would be without what was never synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: dict[str, bytes] = {}
        self._lock = threading.Lock()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._recording(getattr(os, name)))
        following_renames(monkeypatch, self._synced)

    def _recording(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def record(file: int) -> None:
            path = os.readlink(f"/proc/self/fd/{file}")
            if os.path.isfile(path):
                with self._lock:
                    self._synced[path] = Path(path).read_bytes()
            sync(file)

        return record

    def holds(self, directory: Path) -> None:
        """Takes what is there for synced: it was on disk when the machine started."""
        for path in directory.rglob("*"):
            if path.is_file():
                self._synced[str(path)] = path.read_bytes()

    def lose_power(self, directory: Path, to: Path) -> None:
        """Copies what would be left, at a moment in which no image is being written."""
        with self._lock:

            def is_copied() -> bool:
                shutil.rmtree(to, ignore_errors=True)
                images = _images(directory)
                with contextlib.suppress(shutil.Error):  # files went away under it
                    shutil.copytree(directory, to)
                    return images == _images(directory)
                return False

            eventually("a copy was made", is_copied)
            for path in to.rglob("*"):
                original = str(directory / path.relative_to(to))
                is_live = path.parent.parent.name == "parameters"
                if path.name.startswith("journal-") or path.name == "events":
                    if is_live:
                        path.write_bytes(self._synced.get(original, b""))
                elif is_live and path.name in MAPPED:
                    path.write_bytes(b"\x5a" * path.stat().st_size)
        start_again(to)


def with_synced(segment: bytes, synced_bytes: int = HEAD_BYTES) -> bytes:
    """A journal's segment of which so much is noted as synced."""
    return journal._head(synced_bytes) + segment[HEAD_BYTES:]


def following_renames(monkeypatch: pytest.MonkeyPatch, by_path: dict[str, T]) -> None:
    """Keeps what is known of a file under the name that it gets."""
    real = os.rename

    def rename(old: str | Path, new: str | Path) -> None:
        real(old, new)
        if str(old) in by_path:
            by_path[str(new)] = by_path.pop(str(old))

    monkeypatch.setattr(os, "rename", rename)


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
