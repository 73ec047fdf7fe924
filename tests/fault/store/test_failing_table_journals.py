"""Goal: a table's journal or image that can't be written or synced costs no more than it was for.

Method: calls of the system fail for journals, or for images, of the story of a table, and of a
table that is served. Oracle: the same story, undisturbed, in memory.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S
from harness.stories.crash import OtherStart
from harness.stories.images import image_of, in_memory, restore
from harness.stories.killed import TableStory
from harness.stories.power import failing, many_images, scrambled_at, served, standing_images
from harness.stories.table import STORY, apply, state_of, take_seats, tell
from shardwell.errors import StorageError
from shardwell_server.store.contract import Places

JOURNALED = TableStory("step")
AFTER_POWER_LOSS = TableStory("step", OtherStart)
STATES = JOURNALED.states


@pytest.fixture(autouse=True)
def _many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    many_images(monkeypatch)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


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
    monkeypatch.setattr(storage._journaling, "wants_image", True)
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
    monkeypatch.setattr(storage._journaling, "wants_image", True)
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
