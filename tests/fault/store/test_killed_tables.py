"""Goal: whatever instruction a shard is killed at, a table's files hold each change whole or not at
all, all that was answered, and go on to the same bits.

Method: one story (harness/stories/table.py) is told again and again, cut off after each single
write, also of rows: by SIGKILL to a process of its own, and, for what lies between two writes, by
images of the files in which a write is there in part. Oracle: the same story, undisturbed, in
memory.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import shardwell_server.store
from harness.stories import killed_table as killed_table_story
from harness.stories.crash import SameMachine
from harness.stories.images import Image, image_of, in_memory, restore, torn
from harness.stories.table import STORY, State, make, state_of, tell
from shardwell_server.store import TableStorage
from shardwell_server.store.memory.store import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

KILLS_TIMEOUT_S = 60.0
PART_COUNT = 4
LOWEST_WRITE_COUNT = 150
"""The story has more; a hook that is never called would make these tests empty."""
MODULES = ("mmap/table", "mmap/row_undo")


class Written(NamedTuple):
    """The files right after one write."""

    point: str
    answered_count: int
    image: Image


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


def _nothing(point: str) -> None:
    pass


def recovered(path: Path, reached: Callable[[str], None] = _nothing) -> TableStorage:
    """The table as a new process finds it."""
    return make(MmapStore(path, boot=SameMachine(path), reached=reached))


def undisturbed_states() -> list[State]:
    """Of the story in memory: before it, and after each of its steps."""
    storage = make(MemoryStore())
    states: list[State] = []
    tell(storage, answered=lambda: states.append(state_of(storage)))
    blank = make(MemoryStore())
    for _ in range(2):
        blank.add_seat()
    return [state_of(blank), *states]


STATES = undisturbed_states()


def assert_goes_on(path: Path, answered_count: int, where: str) -> None:
    """The files hold what was answered, or one step more; and the rest can be told."""
    storage = recovered(path)
    state = state_of(storage)
    if answered_count == 0:  # seats may be missing
        state["positions"] = (
            STATES[0]["positions"] if not any(state["keys"]) else state["positions"]
        )
    assert state in STATES[answered_count : answered_count + 2], where
    tell(storage)
    assert state_of(storage) == STATES[-1], where
    assert state_of(recovered(path)) == STATES[-1], where


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    """Images after every write of the story, told once."""
    path = tmp_path_factory.mktemp("story")
    found: list[Written] = []
    answered_count = 0

    def reached(point: str) -> None:
        found.append(Written(point, answered_count, image_of(path)))

    def answered() -> None:
        nonlocal answered_count
        answered_count += 1

    tell(recovered(path, reached), reached, answered)
    assert len(found) > LOWEST_WRITE_COUNT
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(PART_COUNT))
def test_killed_after_each_write(tmp_path: Path, part: int) -> None:
    """Every fourth write; all of them in one test would take too long on a busy machine."""
    told = subprocess.run(
        [
            sys.executable,
            killed_table_story.__file__,
            str(tmp_path),
            str(1 + part),
            str(PART_COUNT),
        ],
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
        assert_goes_on(path / "store", answered_count, f"kill {number}")
    assert answered_count == len(STORY)


def test_a_write_that_is_there_in_part(tmp_path: Path, writes: list[Written]) -> None:
    torn_count = 0
    for before, after in itertools.pairwise(writes):
        for name in after.image:
            if ".new" in name or name.endswith("events"):  # written by calls of the system
                continue
            for contents in torn(before.image, after.image, name):
                torn_count += 1
                path = restore({**before.image, name: contents}, tmp_path / "torn")
                storage = recovered(path)
                n = after.answered_count
                assert len(storage.positions()) == 2
                assert state_of(storage) in STATES[n : n + 2], (after.point, name)
    assert torn_count > LOWEST_WRITE_COUNT


@pytest.mark.exhaustive
def test_killed_again_after_each_write_of_a_recovery(tmp_path: Path, writes: list[Written]) -> None:
    seen: set[int] = set()
    points: set[str] = set()
    for written in writes:
        path = restore(written.image, tmp_path / "first")
        images: list[Image] = []

        def reached(point: str, path: Path = path, images: list[Image] = images) -> None:
            points.add(point)
            images.append(image_of(path))

        state = state_of(recovered(path, reached))
        for image in images:
            key = hash(tuple(image.items()))
            if image != written.image and key not in seen:
                seen.add(key)
                found = state_of(recovered(restore(image, tmp_path / "second")))
                assert found == state, written.point
    assert {"rows taken back", "undo voided", "mark", "mark's check"} <= points
    assert len(seen) > 20


def test_the_story_reaches_every_point_of_tables(writes: list[Written]) -> None:
    source = Path(shardwell_server.store.__file__).parent
    named: set[str] = set()
    for module in MODULES:
        text = (source / f"{module}.py").read_text()
        named.update(re.findall(r'reached\("([^"]+)"\)', text))
    assert len(named) > 8
    assert named - {"rows taken back"} <= {written.point for written in writes}
