"""Goal: a table that is loaded with a load's id has that load's rows, whatever ended when.

Method: a load replaces another; after each write of the second the files are taken as kill -9
leaves them, and as a loss of power does, which keeps of journals and events what was synced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.stories.crash import OtherStart, SameMachine
from harness.stories.images import image_of, restore
from shardwell.specs.table import TableSpec
from shardwell.wire.row_state import RowState
from shardwell_server.config import Durability, ShardConfig
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table.slice import TableSlice
from shardwell_server.store.mmap.store import MmapStore

IDS = np.arange(10)
VALUES = {1: 7.0, 2: 9.0}
SPEC = TableSpec(
    name="t",
    dim=2,
    row_count=100,
    optimizer=shardwell.SGD(learning_rate=1.0),
    initializer=shardwell.Zeros(),
    codec="fp32",
    mode="async",
    worker_count=0,
    allow_non_finite=False,
)


def shard_on(
    path: Path,
    durability: str,
    *,
    boot: Any = SameMachine,
    reached: Callable[[str], None] = lambda _: None,
) -> Shard:
    kept = Durability(durability)
    config = ShardConfig(shard_index=0, shard_count=1, durability=kept)
    return Shard(config, MmapStore(path, boot=boot(path), durability=kept, reached=reached))


def load(table: TableSlice, load_id: int, *, learning_rate: float | None = None) -> None:
    number = table.loading.begin(load_id)
    rows = np.full((IDS.size, 2), VALUES[load_id], np.float32)
    counts = np.ones(IDS.size, np.int64)
    table.loading.add(number, RowState(IDS, rows, (), counts, counts))
    table.loading.finish(number, 5, learning_rate)
    table.make_durable()


class Synced:
    """The contents of each file when it was synced last."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        self.files: dict[str, bytes] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def note(file: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{file}"))
            if path.is_file() and path.is_relative_to(self._path):
                self.files[str(path.relative_to(self._path))] = path.read_bytes()
            sync(file)

        return note


@pytest.mark.parametrize(
    ("durability", "power"), [("process", False), ("step", False), ("step", True)]
)
def test_every_write_of_a_load(tmp_path, monkeypatch, durability, power) -> None:
    path, again = tmp_path / "store", tmp_path / "again"
    path.mkdir()
    synced = Synced(path, monkeypatch)
    images: list[tuple[str, Any, dict[str, bytes]]] = []
    is_on = False

    def reached(point: str) -> None:
        if is_on:
            images.append((point, image_of(path), dict(synced.files)))

    shard = shard_on(path, durability, reached=reached)
    table, _ = shard.tables.open(SPEC)
    load(table, 1)
    is_on = True
    load(table, 2)
    is_on = False
    shard.close()
    assert len(images) > 20
    seen = set()
    for point, image, files in images:
        shutil.rmtree(again, ignore_errors=True)
        restore(image, again)
        for file in again.rglob("*"):
            if power and (file.name.startswith("journal-") or file.name == "events"):
                file.write_bytes(files.get(str(file.relative_to(again)), b""))
        shard = shard_on(again, durability, boot=OtherStart if power else SameMachine)
        table = shard.tables.get("t")
        status = table.describe(10)
        seen.add((status.loading, status.load_id))
        if not status.loading:
            rows = np.empty((IDS.size, 2), np.float32)
            table._rows.read(IDS, rows)
            np.testing.assert_array_equal(rows, VALUES[status.load_id], err_msg=point)
        shard.close()
    assert {(False, 1), (True, 2)} <= seen


@pytest.mark.parametrize("durability", ["process", "step"])
def test_the_rate_of_a_load_that_was_replaced_stays_forgotten(tmp_path, durability) -> None:
    shard = shard_on(tmp_path, durability)
    table, _ = shard.tables.open(SPEC)
    load(table, 1, learning_rate=0.5)
    assert table.learning_rate == 0.5
    load(table, 2)
    assert table.learning_rate == 1.0
    shard.close()
    shard = shard_on(tmp_path, durability)
    assert shard.tables.get("t").learning_rate == 1.0
    shard.close()
