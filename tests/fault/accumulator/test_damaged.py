"""Goal: a file of a gradient accumulator that was damaged, cut, replaced or is not its own is
refused by name, or the damage does no harm; it never becomes other sums. A full disk fails the call
that needed it, and changes nothing.

Method: every byte that was ever written is damaged, of files that were closed and killed; real
small disks are filled under an accumulator. Oracle: the sums of the story before.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.faults.disks import HINTS, FailingSystem, small_disk
from harness.polling import PATIENCE_S, eventually
from harness.stories import hammered_accumulator
from harness.stories.accumulator import (
    BLOCK_ROW_COUNT,
    DIM,
    ROW_COUNT,
    STATES,
    STORY,
    Sums,
    as_killed,
    die,
    gradients_of,
)
from harness.stories.crash import Written
from harness.stories.images import Image, image_of, in_memory, restore
from harness.stories.killed import STORIES, WritesOf
from shardwell.errors import StorageError
from shardwell_server import MmapGradientAccumulator
from shardwell_server.accumulator import file as gradient_file
from shardwell_server.accumulator import file_layout
from shardwell_server.accumulator.file_layout import UNDO_ENTRY_COUNT, SumLayout

LAYOUT = SumLayout(dim=DIM, row_count=ROW_COUNT)
PAGE = 4096


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


def file_after(path: Path, call_count: int, *, closed: bool, killed_at: str = "") -> bytes:
    """The file after so many calls of the story; or killed at a write of the last of them."""
    images: list[bytes] = []

    def reached(point: str) -> None:
        if point == killed_at:
            images.append((path / "sums").read_bytes())

    with as_killed(path, reached) as telling:
        for call in STORY[:call_count]:
            images.clear()
            telling.make(call)
        if closed:
            telling.accumulator.close()
    return images[-1] if killed_at else (path / "sums").read_bytes()


def outcome(path: Path) -> Sums | str:
    """The sums in a file, or why it is refused."""
    try:
        accumulator = MmapGradientAccumulator(path, DIM, ROW_COUNT)
    except StorageError as error:
        return str(error)
    try:
        return {row: accumulator.get_grad(row).tolist() for row in accumulator.touched_rows()}
    finally:
        die(accumulator)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("closed", "killed_at", "refused_count_min"),
    [(True, "", 300), (False, "", 300), (False, "sums", 500), (False, "undo voided", 300)],
)
def test_every_byte_is_damaged(
    tmp_path: Path, closed: bool, killed_at: str, refused_count_min: int
) -> None:
    story = restore({}, tmp_path / "story")
    good = file_after(story, 3, closed=closed, killed_at=killed_at)
    path = tmp_path / "sums"
    path.write_bytes(good)
    expected = outcome(path)
    assert expected == STATES[2 if killed_at == "sums" else 3]
    refused_count = 0
    written = {index for index, byte in enumerate(good) if byte}
    around = {index & ~7 | offset for index in written for offset in range(8)}
    for index in sorted(around):
        for mask in (1 << index % 8, 0xFF):
            bad = bytearray(good)
            bad[index] ^= mask
            path.write_bytes(bad)
            found = outcome(path)
            if isinstance(found, str):
                assert str(path) in found
                assert "remove it" in found
                refused_count += 1
            else:
                assert found == expected, (index, mask)
    assert refused_count > refused_count_min


def test_pages_that_are_lost(tmp_path: Path) -> None:
    """Of a file that was closed: the disk gives zeros for a page."""
    good = file_after(restore({}, tmp_path / "story"), 3, closed=True)
    path = tmp_path / "sums"
    for offset, told_of in (
        (0, "is no file of a gradient accumulator"),
        (LAYOUT.words_offset, r"sums are missing: it has 0, and had 10"),
        (LAYOUT.sums_offset, "the sum of row 1 was damaged"),
    ):
        path.write_bytes(good[:offset] + bytes(PAGE) + good[offset + PAGE :])
        with pytest.raises(StorageError, match=told_of):
            MmapGradientAccumulator(path, DIM, ROW_COUNT)


def test_sums_of_two_rows_or_files_that_change_places(tmp_path: Path) -> None:
    good = file_after(restore({}, tmp_path / "story"), 3, closed=True)
    other = file_after(restore({}, tmp_path / "other"), 3, closed=True)
    size, start = LAYOUT.row_size_bytes, LAYOUT.sums_offset
    swapped = bytearray(good)
    for array, stride in ((start, size), (LAYOUT.words_offset, 8)):
        one, two = (slice(array + row * stride, array + (row + 1) * stride) for row in (1, 2))
        swapped[one], swapped[two] = good[two], good[one]
    assert swapped != good
    path = tmp_path / "sums"
    for bad in (swapped, good[: LAYOUT.words_offset] + other[LAYOUT.words_offset :]):
        path.write_bytes(bad)
        with pytest.raises(StorageError, match="the sum of row 1 was damaged"):
            MmapGradientAccumulator(path, DIM, ROW_COUNT)


@pytest.mark.parametrize("closed", [True, False])
def test_files_that_were_cut_or_grew(tmp_path: Path, closed: bool) -> None:
    good = file_after(restore({}, tmp_path / "story"), 3, closed=closed)
    path = tmp_path / "sums"
    size = LAYOUT.undo_offset if closed else LAYOUT.size_bytes
    assert len(good) == size
    for length in {1, 20, 100, PAGE, size - PAGE, size - 1, LAYOUT.undo_offset} - {size}:
        path.write_bytes(good[:length])
        with pytest.raises(StorageError, match=r"damaged|was truncated") as caught:
            MmapGradientAccumulator(path, DIM, ROW_COUNT)
        assert str(path) in str(caught.value)
        assert path.read_bytes() == good[:length]
    path.write_bytes(good + bytes(1))
    with pytest.raises(StorageError, match="was truncated"):
        MmapGradientAccumulator(path, DIM, ROW_COUNT)


@pytest.mark.parametrize("contents", [b"", b"something else", bytes(10**5)])
def test_other_files_are_left_alone(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "sums"
    path.write_bytes(contents)
    with pytest.raises(StorageError, match="is no file of a gradient accumulator"):
        MmapGradientAccumulator(path, DIM, ROW_COUNT)
    assert path.read_bytes() == contents
    with pytest.raises(StorageError, match="Is a directory"):
        MmapGradientAccumulator(tmp_path, DIM, ROW_COUNT)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sums"
    with monkeypatch.context() as patch:
        patch.setattr(file_layout, "SUMS", file_layout.SUMS._replace(newest=2))
        MmapGradientAccumulator(path, DIM, ROW_COUNT).close()
    with pytest.raises(StorageError, match=r"has format 2; .* here reads format 1: run"):
        MmapGradientAccumulator(path, DIM, ROW_COUNT)


@pytest.mark.parametrize("boot_id", ["another start", None])
def test_a_machine_that_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot_id: str | None
) -> None:
    """Only what was closed is believed: pages may have been lost, others not."""
    closed = file_after(restore({}, tmp_path / "1"), 3, closed=True)
    killed = file_after(restore({}, tmp_path / "2"), 3, closed=False)
    monkeypatch.setattr(gradient_file, "kernel_boot_id", lambda: boot_id)
    path = tmp_path / "sums"
    path.write_bytes(killed)
    with pytest.raises(StorageError, match="the machine has started again since"):
        MmapGradientAccumulator(path, DIM, ROW_COUNT)
    assert path.read_bytes() == killed
    path.write_bytes(closed)
    assert outcome(path) == STATES[3]


def test_another_process_has_it(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    program = (
        "import sys; from shardwell_server import MmapGradientAccumulator\n"
        f"with MmapGradientAccumulator({str(path)!r}, {DIM}, {ROW_COUNT}):\n"
        "    print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(StorageError, match="in use by another accumulator"):
            MmapGradientAccumulator(path, DIM, ROW_COUNT)
        process.communicate("", timeout=PATIENCE_S)
    assert process.returncode == 0
    with MmapGradientAccumulator(path, DIM, ROW_COUNT, recover=False) as accumulator:
        assert accumulator.touched_rows().size == 0


@pytest.mark.parametrize("left", ["nothing", "no head", "a head"])
def test_what_a_killed_maker_left_is_made_again(tmp_path: Path, left: str) -> None:
    MmapGradientAccumulator(tmp_path / "sums", DIM, ROW_COUNT).close()
    (tmp_path / "sums").rename(tmp_path / "sums.new")
    with (tmp_path / "sums.new").open("r+b") as file:
        if left == "nothing":
            file.truncate(0)
        if left == "no head":
            file.write(bytes(4096))
    with MmapGradientAccumulator(tmp_path / "sums", DIM, ROW_COUNT):
        assert [*image_of(tmp_path)] == ["sums"]


def test_what_the_user_has_under_that_name_stays(tmp_path: Path) -> None:
    """Also another accumulator, which has sums."""
    with MmapGradientAccumulator(tmp_path / "other", DIM, ROW_COUNT) as other:
        other.accumulate(0, np.ones(DIM, np.float32))
    for theirs in (b"mine", b"mine" * 4096, (tmp_path / "other").read_bytes()):
        (tmp_path / "sums.new").write_bytes(theirs)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"sums\.new is in the way.*move it away"):
                MmapGradientAccumulator(tmp_path / "sums", DIM, ROW_COUNT)
        assert (tmp_path / "sums.new").read_bytes() == theirs
        assert not (tmp_path / "sums").exists()


def test_each_call_of_the_system_fails_once_for_an_accumulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call of ours that needed it is refused, changes nothing, and may be made again."""
    system = FailingSystem(monkeypatch)
    refused_count, number = 0, 0
    while True:
        number += 1
        path = restore({}, tmp_path / str(number)) / "sums"
        system.call_count, system.failing = 0, number
        system.error_number = list(HINTS)[number % len(HINTS)]
        errors: list[str] = []

        def again(call: Callable[[], object], errors: list[str] = errors) -> None:
            try:
                call()
            except StorageError as error:
                errors.append(str(error))
                call()

        opened: list[MmapGradientAccumulator] = []
        for count in (1, 2):
            again(
                lambda path=path, opened=opened: opened.append(
                    MmapGradientAccumulator(path, WIDE, ROWS)
                )
            )
            accumulator = opened[-1]
            assert accumulator.was_recovered == (count == 2)
            for rows in ([3], [3, 9000]):
                gradients = np.ones((len(rows), WIDE), np.float32)
                again(lambda a=accumulator, r=rows, g=gradients: a.accumulate_rows(r, g))
            assert accumulator.get_grad(3)[0] == 2 * count
            assert accumulator.get_grad(9000)[0] == count
            if count == 1:
                die(accumulator)
        is_over = system.call_count < number
        system.failing = -1
        accumulator.close()
        assert [*image_of(path.parent)] == ["sums"]
        if is_over:
            break
        (told_of,) = errors
        assert str(path) in told_of
        assert HINTS[system.error_number] in told_of
        refused_count += 1
    assert refused_count > 20


WIDE, ROWS = 256, 20_000
"""Of the tests on small disks: a row is 1 KiB."""


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(StorageError) as caught:
        call()
    return str(caught.value)


def test_an_accumulator_on_a_full_disk_is_whole(tmp_path: Path) -> None:
    """Rows without space are refused; those that have it, reads and applies go on."""
    rows = np.zeros((ROWS, WIDE), np.float32)
    with small_disk(tmp_path / "disk", 2**20) as disk:
        path = disk.path / "sums"
        with MmapGradientAccumulator(path, WIDE, ROWS) as accumulator:
            first = np.ones((60, WIDE), np.float32)
            accumulator.accumulate_rows(range(60), first)
            disk.fill()
            for far in ([10_000], [3, 10_000]):
                batch = first[: len(far)]
                told_of = refused(lambda: accumulator.accumulate_rows(far, batch))  # noqa: B023
                assert "taking disk space for more rows failed" in told_of
                assert "free space on that disk" in told_of
            assert "undo" not in told_of
            assert accumulator.touched_rows().tolist() == [*range(60)]
            for row in (0, 59, 60, 10_000, ROWS - 1):  # holes are not even read
                assert accumulator.get_grad(row)[0] == (row < 60)
            accumulator.accumulate_rows(range(60), first)
            assert accumulator.apply(0.5, rows) == 60
            assert (rows[:60] == -1).all()
            accumulator.accumulate_rows(range(60), first)
            die(accumulator)
        with MmapGradientAccumulator(path, WIDE, ROWS) as accumulator:
            assert accumulator.touched_rows().tolist() == [*range(60)]
            assert shutil.disk_usage(disk.path).free == 0


def test_a_full_disk_at_the_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**18) as disk:
        path = disk.path / "sums"
        with MmapGradientAccumulator(path, WIDE, ROWS) as accumulator:
            accumulator.accumulate(7, np.ones(WIDE, np.float32))
        disk.fill()
        told_of = refused(lambda: MmapGradientAccumulator(disk.path / "other", WIDE, ROWS))
        assert os.strerror(errno.ENOSPC) in told_of
        assert not (disk.path / "other").exists()
        assert not (disk.path / "other.new").exists()
        told_of = refused(lambda: MmapGradientAccumulator(path, WIDE, ROWS))  # undo needs a little
        assert os.strerror(errno.ENOSPC) in told_of
        disk.empty()
        with MmapGradientAccumulator(path, WIDE, ROWS, recover=False) as accumulator:
            assert accumulator.get_grad(7)[0] == 1


def test_a_batch_larger_than_the_disk(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", 2**20) as disk,
        MmapGradientAccumulator(disk.path / "sums", WIDE, ROWS) as accumulator,
    ):
        accumulator.accumulate_rows([5, 6], np.ones((2, WIDE), np.float32))
        batch = np.ones((ROWS, WIDE), np.float32)
        assert "failed" in refused(lambda: accumulator.accumulate_rows(range(ROWS), batch))
        assert accumulator.touched_rows().tolist() == [5, 6]
        assert accumulator.get_grad(5)[0] == 1


# An accumulator whose process was killed is opened for recovery alone, however many threads were
# adding; each of their calls counts whole or not at all. Method: images after each write of a
# story; threads that hammer are killed at drawn moments. Oracle: counts that each thread notes
# when it was answered. Kills after each write: store/test_killed.py.


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
