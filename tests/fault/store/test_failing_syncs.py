"""Goal: a sync or an image that fails costs no more than what it was for, and nothing is believed.

Method: calls of the system fail for some files, on servers whose syncs are recorded; what a loss of
power would leave then (see harness/stories/power.py) is served again.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.stories.power import OPTIMIZERS, SIZE, Disk, Run, failing, gradient, served
from shardwell.errors import StorageError
from shardwell_server.store.journal import journal


def test_a_sync_that_failed_is_made_good_by_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a lost page the kernel tells once; to ask again and believe it would be a lie."""
    disk = Disk(monkeypatch)
    fails = failing(monkeypatch, "fdatasync", "/journal-", errno.EIO)
    with served(tmp_path / "first", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        expected = run.step(0)
        fails.set()
        with pytest.raises(StorageError, match=r"journal-\d+: syncing it failed"):
            run.models[0].put_gradient(gradient(1, 0))
        fails.clear()

        # Not by asking again, but by the image that a thread of the shard writes now.
        def is_taken() -> bool:
            with contextlib.suppress(StorageError):
                return run.models[0].put_gradient(gradient(1, 0)) == 1
            return False

        eventually("an image was made", is_taken)
        assert not list((tmp_path / "first").rglob("failed-journal"))
        disk.lose_power(tmp_path / "first", tmp_path / "second")
        run.close()
    with served(tmp_path / "second", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        assert [model.next_step for model in run.models] == [2, 1]
        np.testing.assert_array_equal(run.models[0].get_weights(), expected)
        run.close()


def test_a_failed_sync_is_remembered_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    with served(tmp_path / "first", "3600") as target:
        run = Run(target, OPTIMIZERS[0])
        run.step(0)
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        run.close()
    (kept,) = (tmp_path / "second" / "parameters").iterdir()
    (kept / "failed-journal").touch()  # as the process that is gone left it
    with served(tmp_path / "second", "step") as target:
        assert not (kept / "failed-journal").exists()
        (image,) = kept.glob("image-*")
        (journal,) = kept.glob("journal-*")
        assert image.name.rpartition("-")[2] == journal.name.rpartition("-")[2]
        run = Run(target, OPTIMIZERS[0])
        assert {model.next_step for model in run.models} == {1}
        disk.lose_power(tmp_path / "second", tmp_path / "third")
        run.close()
    with served(tmp_path / "third", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        assert {model.next_step for model in run.models} == {1}
        run.close()


def test_one_image_that_fails_stops_no_other_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "IMAGE_AT_BYTES_MIN", 0)
    disk = Disk(monkeypatch)
    with (
        served(tmp_path / "first", "0.05") as target,
        shardwell.connect(target, worker_id="w", timeout_s=PATIENCE_S) as client,
    ):
        models = [client.parameter(name, size=SIZE, optimizer=OPTIMIZERS[0]) for name in ("a", "b")]
        for model in models:
            model.init(np.zeros(SIZE, np.float32))
        full = failing(monkeypatch, "posix_fallocate", "/000001/image-", errno.ENOSPC)
        full.set()
        for _ in range(8):
            for model in models:
                model.exchange(gradient(0, 0))

        def synced() -> bool:
            to = tmp_path / "second"
            shutil.rmtree(to, ignore_errors=True)
            disk.lose_power(tmp_path / "first", to)
            with (
                served(to, "process") as again,
                shardwell.connect(again, worker_id="w", timeout_s=PATIENCE_S) as other,
            ):
                opened = [
                    other.parameter(name, size=SIZE, optimizer=OPTIMIZERS[0]) for name in ("a", "b")
                ]
                return all(model.next_step == 8 for model in opened)

        eventually("both were synced", synced, timeout_s=PATIENCE_S)
        segments = list((tmp_path / "first" / "parameters" / "000001").glob("journal-*"))
        assert len(segments) <= 3


def test_without_room_for_an_image_a_parameter_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = failing(monkeypatch, "posix_fallocate", "/image-", errno.ENOSPC)
    with served(tmp_path / "first", "step") as target:
        full.set()
        with shardwell.connect(target, worker_id="w", timeout_s=PATIENCE_S) as client:
            for _ in range(2):
                with pytest.raises(StorageError, match="No space left on device"):
                    client.parameter("m", size=SIZE, optimizer=shardwell.Average())
            full.clear()
            model = client.parameter("m", size=SIZE, optimizer=shardwell.Average())
            np.testing.assert_array_equal(model.exchange(gradient(0, 0)), gradient(0, 0))
