"""Goal: whatever instruction a shard is killed at, its files hold each chunk before or after the
call that was under way, all that was answered, and a training that goes on to the same bits.

Method: one training (harness/stories/parameter.py) is told again and again, cut off after each
single write of the store: by SIGKILL to a process of its own, and, for what lies between two
writes, by images of the files in which a write is there in part. Oracle: the same training,
undisturbed, in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwell_server.store
from harness.stories import killed_parameter as killed_story
from harness.stories.crash import (
    SameMachine,
    Undisturbed,
    Written,
    go_on,
    recovered,
    state_at,
    undisturbed_story,
    writes_of_story,
)
from harness.stories.images import Image, image_of, in_memory, restore, torn
from harness.stories.parameter import short_blocks, state_of, story
from shardwell_server.store import ChunkRecord, Layout, Transition
from shardwell_server.store.mmap.store import MmapStore
from shardwell_server.store.mmap.undo import ENTRY_COUNT_MAX

STORY = story()
KILLS_TIMEOUT_S = 60.0
PART_COUNT = 8
LOWEST_WRITE_COUNT = 300
"""The story has more; a hook that is never called would make these tests empty."""

TABLE_MODULES = {"mmap/table.py", "mmap/row_undo.py"}
"""Their writes are those of test_killed_tables.py."""


@pytest.fixture(autouse=True)
def _short_blocks() -> Iterator[None]:
    with short_blocks():
        yield


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    return undisturbed_story()


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    """Images after every write of the story, told once."""
    found = writes_of_story(tmp_path_factory.mktemp("story"))
    assert len(found) > LOWEST_WRITE_COUNT
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(PART_COUNT))
def test_killed_after_each_write(tmp_path: Path, undisturbed: Undisturbed, part: int) -> None:
    """Every eighth write; all of them in one test would take too long on a busy machine."""
    told = subprocess.run(
        [sys.executable, killed_story.__file__, str(tmp_path), str(1 + part), str(PART_COUNT)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OPENBLAS_NUM_THREADS": "1",  # a process that forks has no other threads
        },
        capture_output=True,
        text=True,
        timeout=KILLS_TIMEOUT_S,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    last = int(told.stdout)
    assert last > LOWEST_WRITE_COUNT
    for number in range(1 + part, last + 1, PART_COUNT):  # the last was told to its end
        path = tmp_path / str(number)
        answered_count = len((path / "answered").read_bytes())
        with recovered(path / "store") as shard:
            assert state_of(shard) in undisturbed.states[answered_count : answered_count + 2]
            go_on(shard, answered_count, undisturbed)
        assert state_at(path / "store") == undisturbed.states[-1]
    assert answered_count == len(STORY)


def test_a_write_that_is_there_in_part(
    tmp_path: Path, undisturbed: Undisturbed, writes: list[Written]
) -> None:
    torn_count = 0
    for before, after in itertools.pairwise(writes):
        assert after.answered_count - before.answered_count in (0, 1)
        for name in after.image:
            if ".new" in name or name.endswith("events"):  # written by calls of the system
                continue
            for contents in torn(before.image, after.image, name):
                torn_count += 1
                path = restore({**before.image, name: contents}, tmp_path / "torn")
                n = after.answered_count
                assert state_at(path) in undisturbed.states[n : n + 2], (after.point, name)
    assert torn_count > LOWEST_WRITE_COUNT


@pytest.mark.exhaustive
def test_killed_again_after_each_write_of_a_recovery(
    tmp_path: Path, undisturbed: Undisturbed, writes: list[Written]
) -> None:
    seen: set[int] = set()
    points: set[str] = set()
    for written in writes:
        path = restore(written.image, tmp_path / "first")
        images: list[Image] = []

        def reached(point: str, path: Path = path, images: list[Image] = images) -> None:
            points.add(point)
            images.append(image_of(path))

        state = state_at(path, reached)
        assert state in undisturbed.states[written.answered_count : written.answered_count + 2]
        for image in images:
            key = hash(tuple(image.items()))
            if image != written.image and key not in seen:
                seen.add(key)
                assert state_at(restore(image, tmp_path / "second")) == state, written.point
    assert {"taken back", "undo done", "undo voided", "mark", "mark's check"} <= points
    assert len(seen) > 20


def test_several_chunks_were_being_changed(tmp_path: Path) -> None:
    """By as many threads as may at once: each chunk is taken back, or stands, by itself."""
    size, chunk_size = 80, 16
    path, images = tmp_path / "store", []
    store = MmapStore(
        path,
        boot=SameMachine(path),
        reached=lambda _: images.append((set(committed), image_of(path))),
    )
    committed: set[int] = set()
    path.mkdir()
    with contextlib.closing(store), contextlib.ExitStack() as changes:
        store.recover()
        asked = Layout(name="p", slice_size=size, chunk_element_count=chunk_size, with_sum=True)
        storage = store.create(asked)
        storage.add_seat()
        storage.log({"kind": "seat", "worker_id": "w0"})
        images.clear()
        begun = {
            index: changes.enter_context(storage.change(index, Transition.CLOSE))
            for index in range(ENTRY_COUNT_MAX)
        }
        for start in range(0, chunk_size, 8):
            for index, change in begun.items():
                change.before(start, start + 8)
                at = index * chunk_size + start
                storage.weights[at : at + 8] = index + 1
                change.after(start, start + 8)
        for index in (2, 0):
            begun[index].commit(ChunkRecord(version=1), 0, 0)
            committed.add(index)
        images.append((set(committed), image_of(path)))
    taken_back_count = 0
    for done, image in images:
        again = MmapStore(restore(image, tmp_path / "again"), boot=SameMachine(path))
        with contextlib.closing(again):
            ((_, found),) = again.recover()
            standing = {index for index, record in enumerate(found.records()) if record.version}
            assert standing >= done
            assert len(standing - done) <= 1
            for index in range(5):
                found.verify(index)
                value = index + 1 if index in standing else 0
                part = slice(index * chunk_size, (index + 1) * chunk_size)
                assert (found.weights[part] == value).all()
            assert found.last_steps() == [[0 if i in standing else -1 for i in range(5)]]
            taken_back_count = max(taken_back_count, found.rolled_back_count)
    assert taken_back_count == ENTRY_COUNT_MAX


def test_the_story_reaches_every_point_of_the_store(writes: list[Written]) -> None:
    source = Path(shardwell_server.store.__file__).parent
    named = set()
    for path in source.rglob("*.py"):
        if str(path.relative_to(source)) in TABLE_MODULES:
            continue
        named.update(re.findall(r'reached\("([^"]+)"\)', path.read_text()))
    recovering = {"taken back", "undo done"}
    journaled = {"journal segment", "journal entry", "image begun", "image written"}
    journaled |= {"image stands", "segment forgotten", "image forgotten", "file restored"}
    assert named - recovering - journaled == {written.point for written in writes}
