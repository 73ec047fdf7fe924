"""Goal: whatever instruction a process is killed at, the file of its gradient accumulator holds
each call whole or not at all, and all that were answered; `apply` leaves one block in doubt.

Method: one story (harness/stories/accumulator.py) is told again and again, cut off after each
single write: by SIGKILL to a process of its own, and, for what lies between two writes, by images
of the files in which a write is there in part. Then threads that hammer are killed at drawn
moments.
Oracle: the story in plain Python; counts that each thread notes when it was answered.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import shardwell_server.accumulator
from harness.polling import PATIENCE_S, eventually
from harness.stories import hammered_accumulator, killed_accumulator
from harness.stories.accumulator import (
    BLOCK_ROW_COUNT,
    DIM,
    RATE,
    ROW_COUNT,
    STATES,
    STORY,
    Sums,
    blocks_left,
    gradients_of,
    told,
)
from harness.stories.images import Image, image_of, in_memory, restore, torn
from shardwell.errors import StorageError
from shardwell_server import MmapGradientAccumulator
from shardwell_server.accumulator.file_layout import UNDO_ENTRY_COUNT
from shardwell_server.store.mmap import row_undo

KILLS_TIMEOUT_S = 60.0
PART_COUNT = 4
LOWEST_WRITE_COUNT = 90
"""The story has more; a hook that is never called would make these tests empty."""


class Written(NamedTuple):
    """The files right after one write."""

    point: str
    answered_count: int
    image: Image


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    """Images after every write of the story, told once."""
    path = tmp_path_factory.mktemp("story")
    found: list[Written] = []
    answered_count = 0

    def reached(point: str) -> None:
        found.append(Written(point, answered_count, image_of(path)))

    with told(path, reached) as telling:
        for answered_count, call in enumerate(STORY):  # noqa: B007 - read by `reached`
            telling.make(call)
    assert len(found) > LOWEST_WRITE_COUNT
    return found


def rows_after(answered_count: int) -> np.ndarray:
    """What the rows are when so many calls were answered."""
    rows = np.zeros((ROW_COUNT, DIM))
    for call, sums in zip(STORY[:answered_count], STATES, strict=False):
        if call.kind == "apply":
            for row, values in sums.items():
                rows[row] -= RATE * np.array(values)
    return rows


def assert_applied_but_for_a_block(
    answered_count: int, before: Sums, found: Sums, rows: np.ndarray
) -> None:
    """Rows without a sum were applied; of those with one, at most a block's."""
    old = rows_after(answered_count)
    doubtful_count = 0
    for block, _ in blocks_left(before, found):
        is_doubtful = False
        for row in block:
            new = old[row] - RATE * np.array(before[row])
            if row in found:
                assert ((rows[row] == old[row]) | (rows[row] == new)).all()
                is_doubtful |= bool((rows[row] != old[row]).any())
            else:
                np.testing.assert_array_equal(rows[row], new)
        doubtful_count += is_doubtful
    assert doubtful_count <= 1


def assert_goes_on(path: Path, answered_count: int, where: str) -> None:
    """The files hold what was answered, or one call more; and the rest can be told."""
    with told(path) as telling:
        found, before = telling.sums(), STATES[answered_count]
        if answered_count < len(STORY):
            call = STORY[answered_count]
            assert call.may_leave(before, found), where
            if call.kind == "apply":
                assert_applied_but_for_a_block(answered_count, before, found, telling.rows)
            else:
                np.testing.assert_array_equal(telling.rows, rows_after(answered_count))
            is_done = found != before and call.kind != "apply"
        else:
            assert found == before, where
            is_done = False
        for call in STORY[answered_count + is_done :]:
            telling.make(call)
        assert telling.sums() == STATES[-1], where
    with told(path) as telling:
        assert telling.sums() == STATES[-1], where


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(PART_COUNT))
def test_killed_after_each_write(tmp_path: Path, part: int) -> None:
    """Every fourth write; all of them in one test would take too long on a busy machine."""
    told_all = subprocess.run(
        [
            sys.executable,
            killed_accumulator.__file__,
            str(tmp_path),
            str(1 + part),
            str(PART_COUNT),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=KILLS_TIMEOUT_S,
        check=False,
    )
    assert told_all.returncode == 0, told_all.stderr
    last = int(told_all.stdout)
    assert last > LOWEST_WRITE_COUNT
    for number in range(1 + part, last + 1, PART_COUNT):  # the last was told to its end
        path = tmp_path / str(number)
        answered_count = len((path / "answered").read_bytes())
        assert_goes_on(path / "store", answered_count, str(number))
    assert answered_count == len(STORY)


def test_a_write_that_is_there_in_part(tmp_path: Path, writes: list[Written]) -> None:
    torn_count = 0
    for before, after in itertools.pairwise(writes):
        for name in after.image:
            if name.endswith(".new"):  # not yet the file
                continue
            for contents in torn(before.image, after.image, name):
                torn_count += 1
                path = restore({**before.image, name: contents}, tmp_path / "torn")
                assert_goes_on(path, after.answered_count, f"{after.point} {name}")
    assert torn_count > LOWEST_WRITE_COUNT


def test_killed_again_after_each_write_of_a_recovery(tmp_path: Path, writes: list[Written]) -> None:
    points: set[str] = set()
    for number, written in enumerate(writes):
        path = restore(written.image, tmp_path / f"first-{number}")
        images: list[Image] = []

        def reached(point: str, path: Path = path, images: list[Image] = images) -> None:
            points.add(point)
            images.append(image_of(path))

        with told(path, reached) as telling:
            sums = telling.sums()
        for image in images:
            with told(restore(image, tmp_path / "second")) as telling:
                assert telling.sums() == sums, written.point
    assert {"rows taken back", "words cleared", "state"} <= points


def test_the_story_reaches_every_point(writes: list[Written]) -> None:
    sources = [*Path(shardwell_server.accumulator.__file__).parent.glob("*.py")]
    sources.append(Path(row_undo.__file__))
    named = set()
    for source in sources:
        named.update(re.findall(r'reached\("([^"]+)"\)', source.read_text()))
    assert named - {"rows taken back"} == {written.point for written in writes}


def refusal_of(path: Path) -> str | None:
    """Why the file can't be opened without recovery; None if it can."""
    try:
        with MmapGradientAccumulator(path, DIM, ROW_COUNT, recover=False) as accumulator:
            assert not accumulator.was_recovered
    except StorageError as error:
        return str(error)
    return None


def test_without_recover_only_what_was_closed_is_opened(
    tmp_path: Path, writes: list[Written]
) -> None:
    refused_count = 0
    for written in writes[:: len(writes) // 40]:
        path = restore(written.image, tmp_path / "again") / "sums"
        before = path.read_bytes() if path.exists() else b""
        refusal = refusal_of(path)
        if refusal is None:
            continue
        refused_count += 1
        assert re.search(r"sums was not closed: .* open it with recover=True", refusal)
        assert path.read_bytes() == before
        with MmapGradientAccumulator(path, DIM, ROW_COUNT) as accumulator:
            assert accumulator.was_recovered
        assert refusal_of(path) is None
    assert refused_count > 20


def test_several_threads_were_adding(tmp_path: Path) -> None:
    """As many as may at once: each batch is taken back by itself."""
    together = threading.Barrier(UNDO_ENTRY_COUNT)
    images: list[Image] = []

    def reached(point: str) -> None:
        if point == "sums" and threading.current_thread() is not threading.main_thread():
            together.wait(PATIENCE_S)
            if together.wait(PATIENCE_S) == 0:
                images.append(image_of(tmp_path))
            together.wait(PATIENCE_S)

    with told(tmp_path, reached) as telling:
        accumulator = telling.accumulator
        old = [*range(0, 8 * UNDO_ENTRY_COUNT, 8)]
        accumulator.accumulate_rows(old, gradients_of(old, 1))
        before = telling.sums()

        def add(first: int) -> None:
            rows = [first, first + 1, first + 2]
            accumulator.accumulate_rows(rows, gradients_of(rows, 2))

        threads = [threading.Thread(target=add, args=(first,)) for first in old]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        after = telling.sums()
    assert len(after) == 3 * UNDO_ENTRY_COUNT
    (image,) = images
    with told(restore(image, tmp_path.with_name("again"))) as telling:
        assert telling.sums() == before


def test_the_story_applies_several_blocks(tmp_path: Path) -> None:
    applied = [sums for call, sums in zip(STORY, STATES, strict=False) if call.kind == "apply"]
    assert max(len(sums) for sums in applied) > 2 * BLOCK_ROW_COUNT
    with told(tmp_path) as telling:
        assert telling.accumulator._open_sums()._block_row_count == BLOCK_ROW_COUNT


@pytest.mark.parametrize("seed", [1, 2])
def test_hammering_threads_are_killed(tmp_path: Path, seed: int) -> None:
    """Each thread has a column of its own, so that its calls can be told apart in any row."""
    moment = random.Random(seed)
    expected = np.zeros((hammered_accumulator.ROW_COUNT, hammered_accumulator.THREAD_COUNT))
    for round_number in range(2):
        notes = tmp_path / f"notes-{round_number}"
        process = subprocess.Popen(
            [sys.executable, hammered_accumulator.__file__, str(tmp_path / "sums"), str(notes)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            wanted = moment.randrange(5, 400)
            eventually(
                "the threads have begun",
                lambda notes=notes, wanted=wanted: (
                    notes.exists() and hammered_accumulator.counts(notes).sum() >= wanted
                ),
                timeout_s=PATIENCE_S,
            )
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
        counts = hammered_accumulator.counts(notes)
        with hammered_accumulator.opened(tmp_path / "sums") as accumulator:
            assert accumulator.was_recovered
            found = np.array([accumulator.get_grad(row) for row in range(accumulator.row_count)])
        for thread, count in enumerate(counts.tolist()):
            for call in range(count):
                expected[hammered_accumulator.rows_of(thread, call), thread] += 1
            one_more = expected[:, thread].copy()
            one_more[hammered_accumulator.rows_of(thread, count)] += 1
            if found[:, thread].tolist() == one_more.tolist():  # it had no time to note it
                expected[:, thread] = one_more
            assert found[:, thread].tolist() == expected[:, thread].tolist()
