"""Goal: a table with `--durability step` has what was acknowledged after a loss of power, too.

Method: the story of a table with a journal and images, changes between an image's blocks as well.
After each write an image of the files, gone on from as the same machine, and as one that lost
power: then mapped files are scrambled, and journals cut back to what was synced. Oracle: the same
story, undisturbed, in memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.stories.crash import OtherStart
from harness.stories.images import Image, image_of, in_memory, restore
from harness.stories.power import served, start_again, with_synced
from harness.stories.table import STORY, State, apply, state_of, take_seats, tell
from harness.stories.table_power import (
    MAPPED,
    STATES,
    STEP,
    TABLE,
    Synced,
    Written,
    go_on,
    many_images,
    recovered,
    scrambled_at,
    standing_images,
)
from shardwell.errors import StorageError
from shardwell_server.config import Durability
from shardwell_server.store import TableStorage
from shardwell_server.store.journal import journal
from shardwell_server.store.journal.journal import HEAD_BYTES


@pytest.fixture(autouse=True)
def _many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    many_images(monkeypatch)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    with (
        in_memory(tmp_path_factory.mktemp("story")) as path,
        pytest.MonkeyPatch.context() as patch,
    ):
        many_images(patch)
        synced = Synced(patch)
        found: list[Written] = []
        answered_count = 0

        def reached(point: str) -> None:
            sizes = {os.path.relpath(name, path): size for name, size in synced.sizes.items()}
            found.append(Written(point, answered_count, image_of(path), sizes))

        def answered() -> None:
            nonlocal answered_count
            answered_count += 1

        go_on(recovered(path, reached), answered)
        reached("end")
        # Many, and all alike to who comes back: an image under way, or one that goes, is none.
        return [written for written in found if written.point not in ("file", "image forgotten")]


def assert_has(storage: TableStorage, written: Written) -> None:
    """The table holds what was answered, or one step more."""
    state, n = state_of(storage), written.answered_count
    if n == 0 and not state["keys"]:
        state["positions"] = STATES[0]["positions"]  # seats may be missing
    assert state in STATES[n : n + 2], written.point


def test_the_story_writes_journals_and_images(writes: list[Written]) -> None:
    points = [written.point for written in writes]
    assert points.count("journal entry") > len(STORY)
    assert points.count("image stands") > 2
    expected = {"journal segment", "image begun", "image written", "segment forgotten"}
    assert expected <= set(points)
    between = [
        writes[number - 1].point
        for number, written in enumerate(writes)
        if written.answered_count > writes[number - 1].answered_count
        and any(".new" in name and "/image-" in name for name in written.image)
    ]
    assert between  # changes while an image was under way


def test_power_lost_after_each_write(tmp_path: Path, writes: list[Written]) -> None:
    for written in writes:
        path = restore(written.after_power_loss(), tmp_path / "store")
        storage = recovered(path, boot=OtherStart)
        assert_has(storage, written)
        go_on(storage)
        assert state_of(storage) == STATES[-1]


@pytest.mark.exhaustive
def test_killed_and_then_power_lost(tmp_path: Path, writes: list[Written]) -> None:
    """What was journaled before the kill and never stood must not stand after the other."""
    for written in writes:
        path = restore(written.image, tmp_path / "store")
        storage = recovered(path)
        assert_has(storage, written)
        state = state_of(storage)
        at_once = scrambled_at(path, tmp_path / "again")
        if standing_images(image_of(at_once)):
            assert state_of(recovered(at_once, boot=OtherStart)) == state, written.point
        go_on(storage)
        assert state_of(storage) == STATES[-1]
        later = scrambled_at(path, tmp_path / "again")
        assert state_of(recovered(later, boot=OtherStart)) == STATES[-1], written.point


@pytest.mark.exhaustive
def test_power_lost_again_after_each_write_of_a_recovery(
    tmp_path: Path, writes: list[Written]
) -> None:
    for written in writes[:: max(len(writes) // 25, 1)]:
        images: list[Image] = []
        path = restore(written.after_power_loss(), tmp_path / "first")

        def reached(_: str, path: Path = path, images: list[Image] = images) -> None:
            images.append(image_of(path))

        state = state_of(recovered(path, reached, boot=OtherStart))
        for image in images[:: max(len(images) // 12, 1)]:
            sizes = {name: len(contents or b"") for name, contents in image.items()}
            second = restore(Written("", 0, image, sizes).after_power_loss(), tmp_path / "second")
            assert state_of(recovered(second, boot=OtherStart)) == state, written.point


def test_going_back_to_process_forgets_images(tmp_path: Path, writes: list[Written]) -> None:
    process = Durability("process")
    path = restore(writes[-1].image, tmp_path / "store")
    images: list[Image] = []
    recovered(path, lambda _: images.append(image_of(path)), durability=process)
    assert not [name for name in image_of(path) if "/image-" in name or "/journal-" in name]
    for image in images:  # killed in between: it goes on from its files, as it was
        again = recovered(restore(image, tmp_path / "again"), durability=process)
        assert state_of(again) == STATES[-1]
    storage = recovered(path, durability=STEP)  # and forward again
    assert state_of(storage) == STATES[-1]
    assert state_of(recovered(scrambled_at(path, tmp_path / "last"), boot=OtherStart)) == STATES[-1]


def journal_of(path: Path) -> Path:
    """The longest segment that the newest image needs."""
    return max((path / TABLE).glob("journal-*"), key=lambda segment: segment.stat().st_size)


def told_story(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole story in one segment."""
    monkeypatch.setattr(journal, "IMAGE_AT_BYTES_MIN", 1 << 30)
    go_on(recovered(restore({}, path)))


def test_a_journal_with_a_part_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_story(tmp_path / "store", monkeypatch)
    segment = journal_of(tmp_path / "store")
    data = segment.read_bytes()
    starts = [at for at in range(len(data)) if data.startswith(b"SWT1", at)]
    assert len(starts) == 1 + len(STORY)  # a mark, and each change
    for gone, what in ((0, "does not begin with a mark"), (1, "goes on with change 2; expected 1")):
        segment.write_bytes(with_synced(data[: starts[gone]] + data[starts[gone + 1] :]))
        path = scrambled_at(tmp_path / "store", tmp_path / "again")
        with pytest.raises(StorageError, match=what) as caught:
            recovered(path, boot=OtherStart)
        assert str(path / TABLE) in str(caught.value)
    for number, start in enumerate(starts[1:]):  # cut off: what was never synced
        for cut in (start, start + 7, start + 150):
            segment.write_bytes(with_synced(data[:cut]))
            path = scrambled_at(tmp_path / "store", tmp_path / "again")
            assert state_of(recovered(path, boot=OtherStart)) in STATES[number : number + 2]
    segment.write_bytes(data)


def test_an_image_newer_than_its_journal_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows may be of changes that nobody knows of any more."""
    path = tmp_path / "store"
    storage = recovered(restore({}, path))
    take_seats(storage)
    monkeypatch.setattr(storage._journaling, "wants_image", True)
    steps = iter(range(len(STORY)))

    def one() -> bool:
        number = next(steps)
        apply(storage, STORY[number], number + 1)
        return False

    for _ in range(3):
        one()
    storage.make_image(one)
    assert next(steps) > 4
    segment = journal_of(path)
    data = segment.read_bytes()
    second = data.index(b"SWT1", HEAD_BYTES + 4)
    segment.write_bytes(with_synced(data[:second]))
    with pytest.raises(StorageError, match=r"it ends with change 3; the image has [5-9]"):
        recovered(scrambled_at(path, tmp_path / "again"), boot=OtherStart)


def test_without_an_image_what_is_damaged_is_refused(tmp_path: Path) -> None:
    process = Durability("process")
    storage = recovered(restore({}, tmp_path / "store"), durability=process)
    tell(storage)
    image = image_of(tmp_path / "store")
    for name in sorted(MAPPED):
        contents = image[f"{TABLE}/{name}"] or b""
        torn = {**image, f"{TABLE}/{name}": b"\x5a" * len(contents)}
        path = restore(torn, tmp_path / "again")

        def use(path: Path = path) -> State:
            found = recovered(path, boot=OtherStart, durability=process)
            found.verify(np.arange(found.record.row_used))
            return state_of(found)

        with pytest.raises(StorageError, match="damaged"):
            use()
    assert state_of(recovered(restore(image, tmp_path / "again"), boot=OtherStart)) == STATES[-1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_table_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """What was answered to workers is there, and they go on at the step that they were at."""
    synced = Synced(monkeypatch)
    first, second = tmp_path / "first", tmp_path / "second"
    ids = np.arange(0, 90, 3)
    gradients = np.arange(ids.size * 4, dtype=np.float32).reshape(-1, 4)

    def opened(target: str, stack: contextlib.ExitStack) -> list[shardwell.Table]:
        """Of two workers."""
        return [
            stack.enter_context(
                stack.enter_context(shardwell.connect(target, worker_id=f"w{number}")).table(
                    "t",
                    row_count=50_000,
                    dim=4,
                    optimizer=shardwell.SGD(learning_rate=1.0, momentum=0.5),
                    initializer=shardwell.Uniform(low=-1, high=1, seed=7),
                    worker_count=2,
                    codec="fp32",
                    mode=mode,
                )
            )
            for number in range(2)
        ]

    with contextlib.ExitStack() as stack:
        tables = opened(stack.enter_context(served(first, "step")), stack)
        for step in range(4):
            for number, table in enumerate(tables):
                assert table.put_row_gradients(ids + number, gradients * step) == step
        tables[0].put_row_gradients(ids + 2, gradients)  # sync: in an open step's sums
        expected = tables[0].get_rows(np.arange(100))
        sizes = {os.path.relpath(name, first): size for name, size in synced.sizes.items()}
        restore(Written("", 0, image_of(first), sizes).after_power_loss(), second)
        tables[1].put_row_gradients(ids + 3, gradients)
        following = tables[0].get_rows(np.arange(100))
    start_again(second)
    with contextlib.ExitStack() as stack:
        tables = opened(stack.enter_context(served(second, "step")), stack)
        assert [table.next_step for table in tables] == [5, 4]
        np.testing.assert_array_equal(tables[0].get_rows(np.arange(100)), expected)
        tables[1].put_row_gradients(ids + 3, gradients)
        np.testing.assert_array_equal(tables[0].get_rows(np.arange(100)), following)
