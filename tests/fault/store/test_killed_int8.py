"""Goal: whatever write a shard is killed at, int8's weights and image go on with the same bits.

Method: a training of two parameters, run on files, of which each write leaves an image; a shard
goes on from each, on the same machine or on one that lost power since, and comes to the end of the
same training in memory. Beside it the replay of harness.oracles.int8 for what it comes to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from harness.data.sessions import applicant
from harness.oracles.int8 import BLOCK, Int8Weights, rounded
from harness.stories.crash import OtherStart, SameMachine
from harness.stories.images import Image, image_of, in_memory, restore
from harness.stories.parameter import CONFIG, contribute, deadline, initialize, state_of
from shardwell import SGD, AdamW, ParameterSpec, StorageError
from shardwell.numerics import elementwise
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import messages as framing
from shardwell_server.config import Durability
from shardwell_server.shard.shard import Shard
from shardwell_server.store.contract import Store
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

SIZE = 2 * BLOCK + 30
SYNC = ParameterSpec(
    name="sync", size=SIZE, optimizer=SGD(learning_rate=0.5), worker_count=2, codec="int8"
)
ASYNC = ParameterSpec(
    name="async", size=50, optimizer=AdamW(0.01), worker_count=0, mode="async", codec="int8"
)
"""With three arrays beside the weights."""
STEP_COUNT = 3
CHUNKS = {"sync": 2, "async": 1}
WORKERS = {"sync": ("w0", "w1"), "async": ("w0",)}


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks in the first chunk, of which each is changed, and saved, by itself."""
    monkeypatch.setattr(elementwise, "BLOCK_ELEMENT_COUNT", BLOCK)


def shard_on(store: Store) -> Shard:
    return Shard(replace(CONFIG, chunk_size_bytes=8 * BLOCK), store)


def on_files(
    path: Path, durability: str, boot: type[SameMachine], reached: Callable[[str], None]
) -> Shard:
    kept = Durability(durability)
    return shard_on(MmapStore(path, durability=kept, boot=boot(path), reached=reached))


def gradient_of(name: str, worker_id: str, chunk: int, step: int, size: int) -> np.ndarray:
    random = np.random.default_rng([len(name), int(worker_id[1:]), chunk, step])
    return random.standard_normal(size).astype(np.float32)


def give(name: str, worker_id: str, chunk: int, step: int, shard: Shard) -> None:
    into = shard.parameters.get(name)
    size = into.where.chunk(chunk, into.chunk_element_count).size
    contribute(into, worker_id, chunk, step, gradient_of(name, worker_id, chunk, step, size))


def begin(spec: ParameterSpec, shard: Shard) -> None:
    shard.parameters.open(spec)


def set_first(spec: ParameterSpec, shard: Shard) -> None:
    values = np.linspace(-1, 1, spec.size, dtype=np.float32)
    initialize(shard.parameters.get(spec.name), "w0", values)


def join(name: str, worker_id: str, shard: Shard) -> None:
    shard.parameters.get(name).join(worker_id, seat_for=applicant(worker_id))


def calls() -> list[Callable[[Shard], None]]:
    """Each may be made again."""
    found: list[Callable[[Shard], None]] = []
    for spec in (SYNC, ASYNC):
        found += [partial(begin, spec), partial(set_first, spec)]
        found += [partial(join, spec.name, worker_id) for worker_id in WORKERS[spec.name]]
    for step in range(STEP_COUNT):
        for name, workers in WORKERS.items():
            found += [
                partial(give, name, worker_id, chunk, step)
                for worker_id in workers
                for chunk in range(CHUNKS[name])
            ]
    return found


class Written(NamedTuple):
    """What a write leaves."""

    answered_count: int
    files: Image


def trained(shard: Shard, answered: Callable[[], None], first: int = 0) -> None:
    for call in calls()[first:]:
        call(shard)
        for each in shard.parameters.all():
            each.make_durable()
        answered()
        shard.make_images()


def whole(shard: Shard, name: str) -> np.ndarray:
    """What a reader is sent who holds nothing, or a version that the shard has no change from."""
    found = shard.parameters.get(name)
    parts = []
    for index in range(found.chunk_count):
        for held in (None, found.version_min - 1):
            message = found.weights_message(index, 0, deadline(), held_version=held)
            header, payload = framing.parse(pb.ExchangeResponse, message)
            if header.image.form == pb.IMAGE_FORM_WHOLE:
                values = payload.view("<f4").copy()
        parts.append(values)
    return np.concatenate(parts)


def test_the_story_comes_to_what_the_replay_does() -> None:
    shard = shard_on(MemoryStore())
    trained(shard, lambda: None)
    weights = Int8Weights(np.linspace(-1, 1, SIZE, dtype=np.float32))
    for step in range(STEP_COUNT):
        sent = [
            np.concatenate(
                [
                    rounded(gradient_of("sync", worker, 0, step, 2 * BLOCK)),
                    rounded(gradient_of("sync", worker, 1, step, 30)),
                ]
            )
            for worker in WORKERS["sync"]
        ]
        mean = (sent[0] + sent[1]) / np.float32(2)
        weights.update(weights.weights - np.float32(0.5) * mean)
    found = shard.parameters.get("sync").storage
    np.testing.assert_array_equal(found.weights, weights.weights)
    np.testing.assert_array_equal(found.slots[-1], weights.image)
    np.testing.assert_array_equal(whole(shard, "sync"), weights.image)
    assert len(shard.parameters.get("async").storage.slots) == 3


@pytest.mark.parametrize(
    ("durability", "boot"),
    [("process", SameMachine), ("step", SameMachine), ("step", OtherStart)],
    ids=["process, killed", "step, killed", "step, without power"],
)
def test_int8_killed_after_each_write(
    tmp_path: Path, durability: str, boot: type[SameMachine]
) -> None:
    undisturbed = shard_on(MemoryStore())
    states = [state_of(undisturbed)]
    trained(undisturbed, lambda: states.append(state_of(undisturbed)))

    written: list[Written] = []
    answered_count = 0

    def answered() -> None:
        nonlocal answered_count
        answered_count += 1

    with in_memory(tmp_path) as path:
        store = path / "store"
        store.mkdir()

        def reached(_: str) -> None:
            written.append(Written(answered_count, image_of(store)))

        trained(on_files(store, durability, SameMachine, reached), answered)
        assert len(written) > 100
        for number, (count, files) in enumerate(written[:: 1 if boot is SameMachine else 2]):
            again = restore(files, path / "again")
            shard = on_files(again, durability, boot, lambda _: None)
            assert state_of(shard) in states[count : count + 2], number
            trained(shard, lambda: None, count)
            assert state_of(shard) == states[-1], number
            for name in WORKERS:
                np.testing.assert_array_equal(whole(shard, name), whole(undisturbed, name))


@pytest.mark.parametrize("name", ["weights", "slot-0", "slot-1", "slot-2"])
def test_a_damaged_array_is_named(tmp_path: Path, name: str) -> None:
    """Of three beside the weights, of which the last is the image."""
    store = tmp_path / "store"
    store.mkdir()
    shard = on_files(store, "process", SameMachine, lambda _: None)
    trained(shard, lambda: None)
    (directory,) = [
        path.parent for path in store.rglob("slot-2") if (path.parent / "slot-1").exists()
    ]
    contents = bytearray((directory / name).read_bytes())
    contents[17] ^= 4
    (directory / name).write_bytes(contents)
    again = on_files(store, "process", SameMachine, lambda _: None)
    with pytest.raises(StorageError, match=name):
        again.parameters.get("async").weights_message(0, 0, deadline())
    assert whole(again, "sync").size == SIZE
