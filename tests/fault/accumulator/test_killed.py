"""Goal: an accumulator whose process was killed is opened for recovery alone, however many threads
were adding; each of their calls counts whole or not at all.

Method: images after each write of a story; threads that hammer are killed at drawn moments. Oracle:
counts that each thread notes when it was answered. Kills after each write: store/test_killed.py.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.polling import PATIENCE_S, eventually
from harness.stories import hammered_accumulator
from harness.stories.accumulator import (
    BLOCK_ROW_COUNT,
    DIM,
    ROW_COUNT,
    STATES,
    STORY,
    as_killed,
    gradients_of,
)
from harness.stories.crash import Written
from harness.stories.images import Image, image_of, in_memory, restore
from harness.stories.killed import STORIES, WritesOf
from shardwell.errors import StorageError
from shardwell_server import MmapGradientAccumulator
from shardwell_server.accumulator.file_layout import UNDO_ENTRY_COUNT


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.fixture
def writes(writes_of: WritesOf) -> list[Written]:
    return writes_of(STORIES["accumulator"])


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

    with as_killed(tmp_path, reached) as telling:
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
    with as_killed(restore(image, tmp_path.with_name("again"))) as telling:
        assert telling.sums() == before


def test_the_story_applies_several_blocks(tmp_path: Path) -> None:
    applied = [sums for call, sums in zip(STORY, STATES, strict=False) if call.kind == "apply"]
    assert max(len(sums) for sums in applied) > 2 * BLOCK_ROW_COUNT
    with as_killed(tmp_path) as telling:
        assert telling.accumulator._open_sums()._block_row_count == BLOCK_ROW_COUNT


@pytest.mark.parametrize("seed", [1, 2])
def test_hammering_threads_are_killed(tmp_path: Path, seed: int) -> None:
    """Each thread has a column of its own, so that its calls can be distinguished in any row."""
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
