"""Goal: a table's journal or image that can't be written or synced costs no more than it was for.

Method: calls of the system fail for journals, or for images, of the story of a table, and of a
table that is served. Oracle: the same story, undisturbed, in memory.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S
from harness.stories.crash import OtherStart
from harness.stories.images import image_of, restore
from harness.stories.killed import TableStory
from harness.stories.power import (
    MAPPED,
    Disk,
    failing,
    many_images,
    scrambled_at,
    served,
    standing_images,
    with_synced,
)
from harness.stories.table import STORY, State, apply, state_of, take_seats, tell
from shardwell.errors import StorageError
from shardwell_server.store.contract import Places
from shardwell_server.store.journal import journal
from shardwell_server.store.journal.journal import HEAD_BYTES

JOURNALED = TableStory("step")
AFTER_POWER_LOSS = TableStory("step", OtherStart)
STATES = JOURNALED.states


@pytest.fixture(autouse=True)
def _many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    many_images(monkeypatch)


def test_a_change_that_cannot_be_journaled_never_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = failing(monkeypatch, "pwritev", "/journal-", errno.ENOSPC)
    path = restore({}, tmp_path / "store")
    storage = JOURNALED.recovered(path)
    take_seats(storage)
    for number, step in enumerate(STORY):
        full.set()
        with pytest.raises(StorageError, match=r"journal-.*free space"):
            apply(storage, step, number + 1)
        full.clear()
        assert state_of(storage) == STATES[number]
        apply(storage, step, number + 1)
        assert state_of(storage) == STATES[number + 1]
        again = scrambled_at(path, tmp_path / "again")
        assert AFTER_POWER_LOSS.state_at(again) == STATES[number + 1]


def test_a_sync_of_rows_that_failed_is_made_good_by_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a lost page the kernel tells once; to ask again and believe it would be a lie."""
    fails = failing(monkeypatch, "fdatasync", "/journal-", errno.EIO)
    path = restore({}, tmp_path / "store")
    storage = JOURNALED.recovered(path)
    take_seats(storage)
    apply(storage, STORY[0], 1)
    fails.set()
    with pytest.raises(StorageError, match=r"journal-\d+: syncing it failed"):
        storage.make_durable()
    with pytest.raises(StorageError, match="beginning it failed"):
        storage.make_image(lambda: False)
    asked = {path.name for path in (path / JOURNALED.directory).glob("journal-*")}
    fails.clear()
    with pytest.raises(StorageError, match="syncing it failed"):
        storage.make_durable()
    again = JOURNALED.recovered(
        restore(image_of(path), tmp_path / "again")
    )  # a process that finds it so
    again.make_durable()
    storage.make_image(lambda: False)
    storage.make_durable()
    (image,) = standing_images(image_of(path))
    for segment in (path / JOURNALED.directory).glob("journal-*"):
        assert segment.name.rpartition("-")[2] >= image.rpartition("-")[2]
        assert segment.name not in asked  # which the disk has lost pages of
    lost = scrambled_at(path, tmp_path / "lost")
    assert AFTER_POWER_LOSS.state_at(lost) == STATES[1]


def test_images_that_fail_leave_the_journal_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = failing(monkeypatch, "posix_fallocate", "/image-", errno.ENOSPC)
    path = restore({}, tmp_path / "store")
    storage = JOURNALED.recovered(path)
    take_seats(storage)
    apply(storage, STORY[0], 1)
    monkeypatch.setattr(storage._journal, "wants_image", True)
    full.set()
    for _ in range(5):
        with pytest.raises(StorageError, match="free space"):
            storage.make_image(lambda: False)
    assert len(list((path / JOURNALED.directory).glob("journal-*"))) <= 3
    assert not list((path / JOURNALED.directory).glob("image-*.new"))
    lost = scrambled_at(path, tmp_path / "lost")
    assert AFTER_POWER_LOSS.state_at(lost) == STATES[1]
    full.clear()
    storage.make_image(lambda: True)  # the shard stops
    assert not list((path / JOURNALED.directory).glob("image-*.new"))
    storage.make_image(lambda: False)
    lost = scrambled_at(path, tmp_path / "lost")
    assert AFTER_POWER_LOSS.state_at(lost) == STATES[1]


def test_an_image_verifies_no_row_that_is_being_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half changed, it would be taken for damaged."""
    path = restore({}, tmp_path / "store")
    tell(JOURNALED.recovered(path))
    storage = JOURNALED.recovered(path)
    verify, found = storage.verify, []

    def checked(places: Places) -> None:
        found.append(storage._lock.locked())  # type: ignore[attr-defined]
        verify(places)

    monkeypatch.setattr(storage, "verify", checked)
    monkeypatch.setattr(storage._journal, "wants_image", True)
    storage.make_image(lambda: False)
    assert found
    assert all(found)


def test_a_gradient_that_cannot_be_journaled_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = failing(monkeypatch, "pwritev", "/journal-", errno.ENOSPC)
    with (
        served(tmp_path / "first", "step") as target,
        shardwell.connect(target, worker_id="w0", timeout_s=PATIENCE_S) as client,
        client.table(
            "t",
            row_count=50_000,
            dim=4,
            optimizer=shardwell.SGD(learning_rate=1.0),
            initializer=shardwell.Zeros(),
            codec="fp32",
        ) as table,
    ):
        ones = np.ones((3, 4), np.float32)
        table.put_row_gradients([1, 2, 3], ones)
        full.set()
        with pytest.raises(StorageError, match=r"journal-.*free space"):
            table.put_row_gradients([3, 4, 5], ones)
        np.testing.assert_array_equal(table.get_rows([1, 2, 3, 4, 5])[:, 0], [-1, -1, -1, 0, 0])
        np.testing.assert_array_equal(table.row_ids(), [1, 2, 3])
        full.clear()
        table.put_row_gradients([3, 4, 5], ones)
        np.testing.assert_array_equal(table.get_rows([1, 2, 3, 4, 5])[:, 0], [-1, -1, -2, -1, -1])
        np.testing.assert_array_equal(table.row_ids(), [1, 2, 3, 4, 5])


# A table with `--durability step` has what was acknowledged after a loss of power, too, and files
# that can't be believed then are refused. Method: the story of a table with a journal (see
# test_killed_journals.py), whose files are changed, and a real server, whose syncs are recorded.
# Oracle: the same story, undisturbed, in memory.


TABLE = JOURNALED.directory


def journal_of(path: Path) -> Path:
    """The longest segment that the newest image needs."""
    return max((path / TABLE).glob("journal-*"), key=lambda segment: segment.stat().st_size)


def told_story(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole story in one segment."""
    monkeypatch.setattr(journal, "IMAGE_AT_BYTES_MIN", 1 << 30)
    tell(JOURNALED.recovered(restore({}, path)))


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
            AFTER_POWER_LOSS.state_at(path)
        assert str(path / TABLE) in str(caught.value)
    for number, start in enumerate(starts[1:]):  # cut off: what was never synced
        for cut in (start, start + 7, start + 150):
            segment.write_bytes(with_synced(data[:cut]))
            path = scrambled_at(tmp_path / "store", tmp_path / "again")
            assert AFTER_POWER_LOSS.state_at(path) in STATES[number : number + 2]
    segment.write_bytes(data)


def test_an_image_newer_than_its_journal_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows may be of changes that no journal has any more."""
    path = tmp_path / "store"
    storage = JOURNALED.recovered(restore({}, path))
    take_seats(storage)
    monkeypatch.setattr(storage._journal, "wants_image", True)
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
        AFTER_POWER_LOSS.state_at(scrambled_at(path, tmp_path / "again"))


def test_without_an_image_what_is_damaged_is_refused(tmp_path: Path) -> None:
    story = TableStory(boot=OtherStart)
    tell(TableStory().recovered(restore({}, tmp_path / "store")))
    image = image_of(tmp_path / "store")
    for name in sorted(MAPPED - {"gradient_sum"}):  # which is a parameter's
        contents = image[f"{TABLE}/{name}"] or b""
        torn = {**image, f"{TABLE}/{name}": b"\x5a" * len(contents)}
        path = restore(torn, tmp_path / "again")

        def use(path: Path = path) -> State:
            found = story.recovered(path)
            found.verify(np.arange(found.record.row_used))
            return state_of(found)

        with pytest.raises(StorageError, match="damaged"):
            use()
    assert story.state_at(restore(image, tmp_path / "again")) == STATES[-1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_table_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Acknowledged steps survive, and workers go on at the step that they were at."""
    disk = Disk(monkeypatch)
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
        disk.lose_power(first, second)
        tables[1].put_row_gradients(ids + 3, gradients)
        following = tables[0].get_rows(np.arange(100))
    with contextlib.ExitStack() as stack:
        tables = opened(stack.enter_context(served(second, "step")), stack)
        assert [table.next_step for table in tables] == [5, 4]
        np.testing.assert_array_equal(tables[0].get_rows(np.arange(100)), expected)
        tables[1].put_row_gradients(ids + 3, gradients)
        np.testing.assert_array_equal(tables[0].get_rows(np.arange(100)), following)
