"""Goal: killed after any write, a shard goes on with its tables as if nothing had been.

Method: one training of a synchronous table by two workers, with abandoned steps, evictions and
steps that close in several batches, is told on files, of which an image is taken after every write.
From each image a shard goes on: all parts are sent again, as workers do. Oracle: the same training
in memory. What lies below the shard is test_killed_tables.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardwell
from harness.images import Image, image_of, in_memory, restore
from harness.table_messages import part
from harness.telling import OtherStart, SameMachine
from shardwell.table_spec import TableSpec
from shardwell_server.config import Durability, ShardConfig
from shardwell_server.shard import tables
from shardwell_server.shard.patience import Patience
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table_slice import TableSlice
from shardwell_server.store import MemoryStore, MmapStore

pytestmark = pytest.mark.timeout(120)

CONFIG = ShardConfig(shard_index=0, shard_count=1)
SPEC = TableSpec(
    name="t",
    row_count=30,
    dim=2,
    optimizer=shardwell.Adagrad(learning_rate=0.5),
    initializer=shardwell.Uniform(low=-1, high=1, seed=1),
    worker_count=2,
    codec="fp32",
)
BATCH_ROW_COUNT = 3
RATE_CHANGE = 8
"""Number of the only call that is not safe to repeat."""
LOWEST_WRITE_COUNT = 250
"""The story has more; a hook that is never called would make this test empty."""


class Written(NamedTuple):
    """The files right after one write."""

    point: str
    answered_count: int
    image: Image


def send(worker: str, step: int, index: int, ids: list[int], **options: Any) -> Any:
    """A part of a gradient; the call tells whether it counted."""
    random = np.random.default_rng((ord(worker), step, index))
    gradients = {row_id: random.integers(-4, 5, 2) for row_id in ids}
    message = part(step, index, gradients, **options)

    def make(table: TableSlice) -> bool:
        patience = Patience(0.0, is_active=lambda: True, is_stopping=lambda: False)
        payload = np.frombuffer(message.payload, np.uint8)
        return table.contribute(worker, message.gradient, payload, patience)

    return make


STORY: list[Callable[[TableSlice], Any]] = [
    send("a", 0, 0, [1, 2, 3], ends=False),
    send("b", 0, 0, [2, 3, 4], samples=3),
    send("a", 0, 1, [5, 6, 7]),  # closes step 0: three batches
    send("b", 1, 0, [1, 8]),
    send("a", 1, 0, [1, 2], ends=False),
    send("a", 1, 0, [], abandons=True),
    lambda table: bool(table.evict(1)),
    send("a", 2, 0, [3, 9, 10], samples=0),
    lambda table: table.change_learning_rate(3, 0.25),
    send("b", 2, 0, []),
    send("b", 3, 0, [1, 3, 4], ends=False),
    send("b", 3, 1, [5, 10, 11], ends=False),
    send("b", 3, 2, [12]),
    send("a", 3, 0, [1, 12, 13]),
    send("b", 4, 0, [], abandons=True),
    send("a", 4, 0, [], abandons=True),
]


def state_of(table: TableSlice) -> dict[str, Any]:
    """All that a table is."""
    storage, rows = table.storage, {}
    for ids, values in table.scan.values(with_values=True):
        rows.update(zip(ids.tolist(), values.tolist(), strict=True))
    used = storage.record.row_used
    live = np.flatnonzero(storage.update_counts[:used] >= 0)
    state = {
        int(storage.keys[place]): (
            int(storage.update_counts[place]),
            int(storage.last_steps[place]),
            storage.slots[0][place].tolist(),
        )
        for place in live
    }
    status = table.describe(9)
    return {
        "rows": rows,
        "state": state,
        "has_sum": int(np.count_nonzero(storage.has_sum[:used])),
        "version": status.version,
        "row_count": status.row_count,
        "rate": status.learning_rate,
        "positions": [(seat.worker_id, seat.position) for seat in table._ledger.seats],
    }


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "rows_per_message_max", lambda spec: BATCH_ROW_COUNT)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as found:
        yield found


def opened(
    path: Path | None,
    reached: Callable[[str], None] = lambda point: None,
    *,
    durability: str = "process",
    boot: type[SameMachine] = SameMachine,
) -> TableSlice:
    """The table of a shard that goes on from files, or of one in memory."""
    store = None
    if path is not None:
        kept = Durability(durability)
        store = MmapStore(path, durability=kept, boot=boot(path), reached=reached)
    table, _ = Shard(CONFIG, store or MemoryStore()).tables.open(SPEC)
    return table


def written_story(path: Path, **kept: Any) -> list[Written]:
    """Tells it once on files."""
    images: list[Written] = []
    answered = 0

    def reached(point: str) -> None:
        images.append(Written(point, answered, image_of(path)))

    table = opened(path, reached, **kept)
    for call in STORY:
        call(table)
        answered += 1
    return images


def test_a_shard_goes_on_after_any_write(path) -> None:
    in_plain_memory = opened(None)
    results = [call(in_plain_memory) for call in STORY]
    expected = state_of(in_plain_memory)
    assert (expected["version"], expected["has_sum"]) == (5, 0)
    images = written_story(path)
    assert len(images) > LOWEST_WRITE_COUNT
    for written in images:
        table = opened(restore(written.image, path))
        for number, call in enumerate(STORY):
            if number < written.answered_count and number == RATE_CHANGE:
                continue  # it was for a step that is over
            found = call(table)
            if number < written.answered_count:
                assert not found, f"call {number} was answered before {written.point}"
            elif number > written.answered_count:
                assert found == results[number], written.point
        assert state_of(table) == expected, written.point


def test_a_killed_shard_still_survives_a_loss_of_power(path) -> None:
    """What it did when it came back from the kill, such as closing a step, is journaled too."""
    in_plain_memory = opened(None)
    for call in STORY:
        call(in_plain_memory)
    expected = state_of(in_plain_memory)
    images = written_story(path, durability="step")
    closing = [written for written in images if written.answered_count in (2, 13)]
    assert len(closing) > 50
    for written in closing[::4]:
        restore(written.image, path)
        table = opened(path, durability="step")
        for call in STORY[written.answered_count : written.answered_count + 2]:
            call(table)
        table = opened(path, durability="step", boot=OtherStart)
        for number, call in enumerate(STORY):
            if number != RATE_CHANGE or written.answered_count < RATE_CHANGE:
                call(table)
        assert state_of(table) == expected, written.point
