"""Goal: whatever instruction a process is killed at, its files hold each change whole or not at
all, and all that was answered; and what goes on from them comes to the same end, bit for bit.

Method: a story each of a parameter, a table and an accumulator is run again and again, cut off
after each single write: by SIGKILL to a process of its own, and, for what lies between two writes,
by images of the files in which a write is done in part. Oracles: the same stories, undisturbed, in
memory or plain Python (harness/stories/killed.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.stories import killed
from harness.stories.crash import SameMachine
from harness.stories.images import Image, image_of, restore, torn
from harness.stories.killed import STORIES, WritesOf
from shardwell.numerics import elementwise
from shardwell_server.store.contract import ChunkRecord, Layout, Transition
from shardwell_server.store.mmap.store import MmapStore
from shardwell_server.store.mmap.undo import ENTRY_COUNT_MAX

KILLS_TIMEOUT_S = 60.0
PART_COUNT = 4
"""Every fourth write; all of them in one test would take too long on a busy machine."""
STORY = pytest.mark.parametrize("name", STORIES)


@pytest.mark.sampled(3)
@STORY
@pytest.mark.parametrize("part", range(PART_COUNT))
def test_killed_after_each_write(tmp_path: Path, name: str, part: int) -> None:
    story = STORIES[name]
    ran = subprocess.run(
        [sys.executable, killed.__file__, name, str(tmp_path), str(1 + part), str(PART_COUNT)],
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
    assert ran.returncode == 0, ran.stderr
    last = int(ran.stdout)
    assert last > story.write_count_min
    for number in range(1 + part, last + 1, PART_COUNT):  # the last ran to its end
        path = tmp_path / str(number)
        answered_count = len((path / "answered").read_bytes())
        story.check_goes_on(path / "store", answered_count, f"kill {number}")
        story.check(path / "store", story.call_count, f"kill {number}, gone on with")
    assert answered_count == story.call_count


@STORY
def test_a_write_that_is_done_in_part(tmp_path: Path, writes_of: WritesOf, name: str) -> None:
    story, torn_count = STORIES[name], 0
    for before, after in itertools.pairwise(writes_of(STORIES[name])):
        for file in after.image:
            if ".new" in file or file.endswith("events"):  # written by calls of the system
                continue
            for contents in torn(before.image, after.image, file):
                torn_count += 1
                path = restore({**before.image, file: contents}, tmp_path / "torn")
                story.check(path, after.answered_count, f"{after.point} {file}")
    assert torn_count > story.write_count_min


@pytest.mark.exhaustive
@STORY
def test_killed_again_after_each_write_of_a_recovery(
    tmp_path: Path, writes_of: WritesOf, name: str
) -> None:
    story, seen, points = STORIES[name], set[int](), set[str]()
    for written in writes_of(STORIES[name]):
        path = restore(written.image, tmp_path / "first")
        images: list[Image] = []

        def reached(point: str, path: Path = path, images: list[Image] = images) -> None:
            points.add(point)
            images.append(image_of(path))

        state = story.state_at(path, reached)
        for image in images:
            key = hash(tuple(image.items()))
            if image != written.image and key not in seen:
                seen.add(key)
                again = restore(image, tmp_path / "second")
                assert story.state_at(again) == state, written.point
    assert story.recovery_points <= points
    assert len(seen) > 20


@STORY
def test_the_story_reaches_every_point(writes_of: WritesOf, name: str) -> None:
    found = {written.point for written in writes_of(STORIES[name])}
    expected = STORIES[name].points()
    assert len(expected) > 8
    assert expected <= found


def test_parameters_and_accumulators_write_nothing_without_a_name(writes_of: WritesOf) -> None:
    """Tables' rows are written by the story itself."""
    for name in ("parameter", "accumulator"):
        assert {written.point for written in writes_of(STORIES[name])} <= killed.all_points()


def test_several_chunks_were_being_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By as many threads as may at once: each chunk is taken back, or kept, by itself."""
    monkeypatch.setattr(elementwise, "BLOCK_ELEMENT_COUNT", 8)
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
        blocks = {index: iter(change.blocks(chunk_size)) for index, change in begun.items()}
        for _ in range(0, chunk_size, 8):
            for index, of_chunk in blocks.items():
                start, stop = next(of_chunk)
                storage.weights[index * chunk_size :][start:stop] = index + 1
        assert [*itertools.chain(*blocks.values())] == []
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
