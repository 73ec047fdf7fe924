"""Goal: killed after any write, a shard goes on with its tables as if nothing had been.

Method: one training of a synchronous table by two workers, with abandoned steps, evictions and
steps that close in several batches, one of an asynchronous table with more workers than seats,
which go from worker to worker, and one of elastic members, without whom steps close that they had
begun, run on files, of which an image is taken after every write.
From each image a shard goes on: all parts are sent again, as workers do. Oracle: the same training
in memory. What lies below the shard is store/test_killed.py's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardwell
from harness.data.sessions import applicant, contributor, session_of
from harness.inside import tracker_of
from harness.stories.crash import OtherStart, SameMachine
from harness.stories.images import Image, image_of, in_memory, restore
from harness.wire_client.row_messages import part
from shardwell.specs.table import TableSpec
from shardwell_server.config import Durability, Limits, ShardConfig
from shardwell_server.shard import registry
from shardwell_server.shard.crews import Contributor
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table.slice import TableSlice
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

CONFIG = ShardConfig(shard_index=0, shard_count=1, limits=Limits(worker_count_max=2))
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
NOT_REPEATED = {8}
"""Numbers of the calls that are not safe to repeat: a change of the rate."""
LOWEST_WRITE_COUNT = 150
"""A story has more; a hook that is never called would make this test empty."""


class Written(NamedTuple):
    """The files right after one write."""

    point: str
    answered_count: int
    image: Image


def send(
    worker: str, step: int, index: int, ids: list[int], tenure: int = 1, **options: Any
) -> Any:
    """A part of a gradient; the call tells whether it counted."""
    random = np.random.default_rng((ord(worker), tenure, step, index))
    gradients = {row_id: random.integers(-4, 5, 2) for row_id in ids}
    message = part(step, index, gradients, worker=worker, **options)

    def make(table: TableSlice) -> bool:
        deadline = RequestDeadline(0.0)
        payload = np.frombuffer(message.payload, np.uint8)
        return table.contribute(
            contributor(worker, tenure=tenure), message.gradient, payload, deadline
        )

    return make


def join(worker: str, tenure: int = 1, *, anew: bool = False) -> Any:
    """A worker takes its seat."""
    asks = applicant(worker, 0, tenure, begins_anew=anew)

    def make(table: TableSlice) -> bool:
        table.join(worker, seat_for=asks)
        return False

    return make


def end(worker: str) -> Any:
    """A worker's session ends in order."""
    return lambda table: table.end_session(session_of(worker).number)


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


ASYNC_SPEC = dataclasses.replace(SPEC, worker_count=0, mode="async")
ASYNC_STORY: list[Callable[[TableSlice], Any]] = [
    join("a"),
    join("b"),
    send("a", 0, 0, [1, 2], ends=False),
    send("a", 0, 1, [3, 9]),
    send("b", 0, 0, [2, 4], ends=False),
    send("a", 1, 0, [1, 5, 6], ends=False),
    end("a"),
    join("c"),  # in the place of a, in the middle of whose step 1
    send("c", 0, 0, [1, 5]),
    send("b", 0, 1, [7]),
    send("c", 1, 0, [8, 9], ends=False),
    join("c", 2, anew=True),
    send("c", 0, 0, [10, 11], 2, ends=False),
    send("c", 0, 0, [], 2, abandons=True),
    end("b"),
    join("a", 3),
    send("a", 0, 0, [1, 2, 3], 3, ends=False),
    send("a", 0, 1, [12], 3),
    send("c", 1, 0, [], 2),
]
ASYNC_NOT_REPEATED = {*range(12), 14}
"""What a tenure sent that is over, and how it came to its end."""


def member(worker: str, tenure: int, from_step: int) -> Any:
    """An elastic member takes its seat, and is awaited from a step on."""
    session = session_of(worker)
    asks: Contributor[Any] = Contributor(worker, session, tenure, asks=True, from_step=from_step)

    def make(table: TableSlice) -> bool:
        table.join(worker, session.number, seat_for=asks)
        return False

    return make


def leave(worker: str, tenure: int) -> Any:
    """Its tenure is over."""
    return lambda table: table.end_tenure(worker, tenure)


ELASTIC_SPEC = dataclasses.replace(
    SPEC,
    members=shardwell.Elastic(
        min_count=1, max_count=2, member_return_s=3000.0, member_lease_s=3000.0
    ),
)
ELASTIC_STORY: list[Callable[[TableSlice], Any]] = [
    member("a", 1, 0),
    member("b", 1, 0),
    send("a", 0, 0, [1, 2, 3], ends=False),
    send("b", 0, 0, [2, 3, 4], samples=3, ends=False),
    send("a", 0, 1, [5, 6, 7]),
    leave("b", 1),  # in the middle of step 0, which closes: three batches
    send("b", 0, 1, [8]),  # late
    send("a", 1, 0, [1, 8]),
    member("c", 1, 3),  # in the place of b
    send("a", 2, 0, [1, 2]),
    send("a", 3, 0, [1, 4, 9]),
    send("c", 3, 0, [9, 10], ends=False),
    member("c", 2, 4),  # in the middle of step 3, which closes
    send("a", 4, 0, [3]),
    send("c", 4, 0, [], 2, abandons=True),
    send("a", 5, 0, []),
    leave("a", 1),
    send("c", 5, 0, [11, 12, 13], 2, ends=False),
    send("c", 5, 1, [14], 2),
]
ELASTIC_NOT_REPEATED = {0, 1, 8}
"""Tenures that may have been followed by others."""


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
        "positions": [
            (seat.worker_id, seat.tenure, seat.position) for seat in tracker_of(table).crew.seats
        ],
    }


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "rows_per_message_max", lambda spec: BATCH_ROW_COUNT)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as found:
        yield found


SHARDS: list[Shard] = []
"""Those of a test."""


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """Also those of a shard whose files an image was made of, which is closed no other way."""
    yield
    while SHARDS:
        SHARDS.pop()._watch.close()


def opened(
    path: Path | None,
    reached: Callable[[str], None] = lambda point: None,
    *,
    spec: TableSpec = SPEC,
    durability: str = "process",
    boot: type[SameMachine] = SameMachine,
    closes: contextlib.ExitStack | None = None,
) -> TableSlice:
    """The table of a shard that goes on from files, or of one in memory."""
    store = None
    if path is not None:
        kept = Durability(durability)
        store = MmapStore(path, durability=kept, boot=boot(path), reached=reached)
    shard = Shard(CONFIG, store or MemoryStore())
    SHARDS.append(shard)
    if closes is not None:
        closes.callback(shard.close)
    return shard.tables.open(spec)[0]


def written_story(path: Path, story: list[Any] = STORY, **kept: Any) -> list[Written]:
    """Tells it once on files."""
    images: list[Written] = []
    answered = 0

    def reached(point: str) -> None:
        images.append(Written(point, answered, image_of(path)))

    table = opened(path, reached, **kept)
    for call in story:
        call(table)
        answered += 1
    return images


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "story", "not_repeated", "expected", "durability"),
    [
        (SPEC, STORY, NOT_REPEATED, (5, 0), "process"),
        (ASYNC_SPEC, ASYNC_STORY, ASYNC_NOT_REPEATED, (6, 0), "process"),
        (ASYNC_SPEC, ASYNC_STORY, ASYNC_NOT_REPEATED, (6, 0), "step"),  # and the power is lost
        (ELASTIC_SPEC, ELASTIC_STORY, ELASTIC_NOT_REPEATED, (6, 0), "process"),
        (ELASTIC_SPEC, ELASTIC_STORY, ELASTIC_NOT_REPEATED, (6, 0), "step"),
    ],
    ids=["sync", "async", "async and power", "elastic", "elastic and power"],
)
def test_a_shard_goes_on_after_any_write(
    path, spec, story, not_repeated, expected, durability
) -> None:
    in_plain_memory = opened(None, spec=spec)
    results = [call(in_plain_memory) for call in story]
    state = state_of(in_plain_memory)
    assert (state["version"], state["has_sum"]) == expected
    images = written_story(path, story, spec=spec, durability=durability)
    assert len(images) > LOWEST_WRITE_COUNT
    boot = SameMachine if durability == "process" else OtherStart
    for written in images:
        restore(written.image, path)
        with contextlib.ExitStack() as closes:
            table = opened(path, spec=spec, durability=durability, boot=boot, closes=closes)
            for number, call in enumerate(story):
                if number < written.answered_count and number in not_repeated:
                    continue
                found = call(table)
                if number < written.answered_count:
                    assert not found, f"call {number} was answered before {written.point}"
                elif number > written.answered_count:
                    assert found == results[number], written.point
            assert state_of(table) == state, written.point


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
            if number not in NOT_REPEATED or written.answered_count < number:
                call(table)
        assert state_of(table) == expected, written.point
