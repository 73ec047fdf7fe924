"""Goal: after a loss of power a shard has what its `--durability` promises, no half of anything.

Method: real servers on a data directory, while every sync to disk is recorded; then the directory
is copied as a disk would have it that wrote nothing else: files cut back to what was last synced,
mapped files scrambled, and another start of the machine in boot.json. A server goes on from that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from shardwell.errors import StorageError
from shardwell_server.app import ShardServer
from shardwell_server.config import Durability, ShardConfig
from shardwell_server.store import image_files
from shardwell_server.store.data_dir import DataDir
from shardwell_server.store.journal import Journal
from shardwell_server.store.mapped_file import MappedFile

SIZE = 1000
MAPPED = ("weights", "gradient_sum", "slot-0", "records", "marks", "undo")


class Disk:
    """What a directory's files would be without what was never synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: dict[str, bytes] = {}
        self._lock = threading.Lock()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._recording(getattr(os, name)))

    def _recording(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def record(file: int) -> None:
            path = os.readlink(f"/proc/self/fd/{file}")
            if os.path.isfile(path):
                with self._lock:
                    self._synced[path] = Path(path).read_bytes()
            sync(file)

        return record

    def holds(self, directory: Path) -> None:
        """Takes what is there for synced: it was on disk when the machine started."""
        for path in directory.rglob("*"):
            if path.is_file():
                self._synced[str(path)] = path.read_bytes()

    def lose_power(self, directory: Path, to: Path) -> None:
        """Copies what would be left, at a moment in which no image is being written."""
        with self._lock:

            def is_copied() -> bool:
                shutil.rmtree(to, ignore_errors=True)
                images = _images(directory)
                with contextlib.suppress(shutil.Error):  # files went away under it
                    shutil.copytree(directory, to)
                    return images == _images(directory)
                return False

            eventually("a copy was made", is_copied)
            for path in to.rglob("*"):
                original = str(directory / path.relative_to(to))
                is_live = path.parent.parent.name == "parameters"
                if path.name.startswith("journal-") or path.name == "events":
                    if is_live:
                        path.write_bytes(self._synced.get(original, b""))
                elif is_live and path.name in MAPPED:
                    path.write_bytes(b"\x5a" * path.stat().st_size)
        boot = json.loads((to / "boot.json").read_text())
        (to / "boot.json").write_text(json.dumps({**boot, "boot_id": "another start"}))


def _images(directory: Path) -> list[str]:
    """The images that are there, one under way included."""
    return sorted(str(path) for path in directory.rglob("image-*"))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@contextlib.contextmanager
def served(path: Path, durability: str) -> Iterator[str]:
    config = ShardConfig(
        shard_index=0, shard_count=1, chunk_size_bytes=256, durability=Durability(durability)
    )
    with DataDir(path, config) as claimed, ShardServer(config, claimed) as server:
        yield server.address


class Run:
    """Two workers of one synchronous parameter, with whole numbers that add up exactly."""

    def __init__(self, target: str, optimizer: shardwell.Optimizer, worker_count: int = 2) -> None:
        self.clients = [
            shardwell.connect(target, worker_id=f"w{i}", timeout_s=30) for i in range(worker_count)
        ]
        self.models = [
            client.parameter("m", size=SIZE, optimizer=optimizer, worker_count=worker_count)
            for client in self.clients
        ]
        self.models[0].init(np.zeros(SIZE, np.float32))

    def step(self, step: int) -> np.ndarray:
        """One step of all workers; the weights after it."""
        results: list[np.ndarray | None] = [None] * len(self.models)

        def work(index: int) -> None:
            results[index] = self.models[index].exchange(gradient(step, index))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(1, len(self.models))]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
        assert results[0] is not None
        return results[0]

    def close(self) -> None:
        for client in self.clients:
            client.close()


def gradient(step: int, worker: int) -> np.ndarray:
    return (np.arange(SIZE) % 5 + step + worker).astype(np.float32)


def trained(tmp_path: Path, steps: int, optimizer: shardwell.Optimizer) -> list[np.ndarray]:
    """The weights after each step of an undisturbed run."""
    with served(tmp_path / "undisturbed", "process") as target:
        run = Run(target, optimizer)
        weights = [run.step(step).copy() for step in range(steps)]
        run.close()
        return weights


OPTIMIZERS = [
    shardwell.SGD(learning_rate=0.5),
    shardwell.SGD(learning_rate=0.5, momentum=0.5),
    shardwell.Average(),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["SGD", "momentum", "Average"])
@pytest.mark.parametrize("lost_after", [0, 1, 7])
def test_what_step_acknowledged_survives(
    tmp_path: Path, disk: Disk, optimizer: shardwell.Optimizer, lost_after: int
) -> None:
    expected = trained(tmp_path, 10, optimizer)
    with served(tmp_path / "first", "step") as target:
        run = Run(target, optimizer)
        for step in range(lost_after):
            np.testing.assert_array_equal(run.step(step), expected[step])
        # One worker is ahead: what it was told must survive in the open step's sum.
        assert run.models[0].put_gradient(gradient(lost_after, 0)) == lost_after
        disk.lose_power(tmp_path / "first", tmp_path / "second")
        run.close()
    with served(tmp_path / "second", "step") as target:
        run = Run(target, optimizer)
        assert [model.next_step for model in run.models] == [lost_after + 1, lost_after]
        run.models[1].put_gradient(gradient(lost_after, 1))
        weights = run.models[0].get_weights(min_version=lost_after + 1)
        np.testing.assert_array_equal(weights, expected[lost_after])
        for step in range(lost_after + 1, 10):
            np.testing.assert_array_equal(run.step(step), expected[step])
        run.close()


@pytest.mark.parametrize("step_count", [0, 2])
def test_what_was_restored_survives(tmp_path: Path, disk: Disk, step_count: int) -> None:
    """Optimizer state, version and rate of a checkpoint are on the disk as soon as they stand."""
    optimizer = OPTIMIZERS[1]
    expected = trained(tmp_path, 8, optimizer)
    with served(tmp_path / "source", "process") as target:
        run = Run(target, optimizer)
        for step in range(4):
            run.step(step)
        run.clients[0].save_checkpoint(tmp_path / "checkpoint")
        run.close()
    with served(tmp_path / "first", "step") as target:
        with shardwell.connect(target, worker_id="restorer") as client:
            client.restore_checkpoint(tmp_path / "checkpoint")
        run = Run(target, optimizer)
        for step in range(4, 4 + step_count):
            np.testing.assert_array_equal(run.step(step), expected[step])
        disk.lose_power(tmp_path / "first", tmp_path / "second")
        run.close()
    with served(tmp_path / "second", "step") as target:
        run = Run(target, optimizer)
        assert {model.next_step for model in run.models} == {4 + step_count}
        for step in range(4 + step_count, 8):
            np.testing.assert_array_equal(run.step(step), expected[step])
        run.close()


def test_power_may_be_lost_again_and_again(tmp_path: Path, disk: Disk) -> None:
    expected = trained(tmp_path, 8, OPTIMIZERS[1])
    for number in range(8):
        disk.holds(tmp_path / f"{number}")
        with served(tmp_path / f"{number}", "step") as target:
            run = Run(target, OPTIMIZERS[1])
            assert {model.next_step for model in run.models} == {number}
            np.testing.assert_array_equal(run.step(number), expected[number])
            disk.lose_power(tmp_path / f"{number}", tmp_path / f"{number + 1}")
            run.close()


@pytest.mark.parametrize("asks", ["again", "next_step"])
def test_what_a_killed_process_left_is_synced_before_it_is_acknowledged(
    tmp_path: Path, disk: Disk, asks: str
) -> None:
    with served(tmp_path / "first", "3600") as target:  # counted, journaled and not synced
        run = Run(target, OPTIMIZERS[0])
        assert run.models[0].put_gradient(gradient(0, 0)) == 0
        shutil.copytree(tmp_path / "first", tmp_path / "second")  # what a kill leaves
        run.close()
    with served(tmp_path / "second", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        assert run.models[0].next_step == 1
        if asks == "again":
            run.models[0].next_step = 0
            assert run.models[0].put_gradient(gradient(0, 0)) == 0
        disk.lose_power(tmp_path / "second", tmp_path / "third")
        run.close()
    with served(tmp_path / "third", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        assert [model.next_step for model in run.models] == [1, 0]
        run.close()


def test_what_is_told_by_next_step_is_synced(tmp_path: Path, disk: Disk) -> None:
    with served(tmp_path / "first", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        run.step(0)
        held, real = threading.Event(), Journal.sync

        def sync(journal: Journal) -> None:
            if not held.is_set():
                raise StorageError("the disk is slow")  # the answer is lost, the gradient counted
            real(journal)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "sync", sync)
            with pytest.raises(StorageError, match="slow"):
                run.models[0].put_gradient(gradient(1, 0))
            held.set()
            run.models[0].reopen()
        assert run.models[0].next_step == 2
        disk.lose_power(tmp_path / "first", tmp_path / "second")
        run.close()
    with served(tmp_path / "second", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        assert [model.next_step for model in run.models] == [2, 1]
        run.close()


def test_seconds_keep_what_was_synced(tmp_path: Path, disk: Disk) -> None:
    expected = trained(tmp_path, 6, OPTIMIZERS[1])
    with served(tmp_path / "first", "0.05") as target:
        run = Run(target, OPTIMIZERS[1])
        for step in range(4):
            run.step(step)

        def synced() -> bool:
            to = tmp_path / "second"
            shutil.rmtree(to, ignore_errors=True)
            disk.lose_power(tmp_path / "first", to)
            journal = [p.stat().st_size for p in to.rglob("journal-*")]
            live = [p.stat().st_size for p in (tmp_path / "first").rglob("journal-*")]
            return journal == live and sum(journal) > 0

        eventually("everything is synced", synced)
        run.close()
    with served(tmp_path / "second", "0.05") as target:
        run = Run(target, OPTIMIZERS[1])
        assert {model.next_step for model in run.models} == {4}
        for step in range(4, 6):
            np.testing.assert_array_equal(run.step(step), expected[step])
        run.close()


def test_a_journal_cut_anywhere_leaves_a_state_that_was(tmp_path: Path, disk: Disk) -> None:
    expected = trained(tmp_path, 5, OPTIMIZERS[0])
    with served(tmp_path / "first", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        for step in range(4):
            run.step(step)
        disk.lose_power(tmp_path / "first", tmp_path / "whole")
        run.close()
    (journal,) = (tmp_path / "whole").rglob("journal-*")
    size = journal.stat().st_size
    for number, cut in enumerate(range(0, size, size // 7 + 3)):
        copy = tmp_path / f"cut-{number}"
        shutil.copytree(tmp_path / "whole", copy)
        os.truncate(copy / journal.relative_to(tmp_path / "whole"), cut)
        with served(copy, "step") as target:
            run = Run(target, OPTIMIZERS[0])
            first = min(model.next_step for model in run.models)
            for step in range(first, 5):  # both send what is missing; what counted is a duplicate
                for index, model in enumerate(run.models):
                    if model.next_step <= step:
                        model.put_gradient(gradient(step, index))
            np.testing.assert_array_equal(run.models[0].get_weights(min_version=5), expected[4])
            run.close()


def test_a_gap_in_the_journal_is_refused(tmp_path: Path, disk: Disk) -> None:
    with served(tmp_path / "first", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        for step in range(3):
            run.step(step)
        disk.lose_power(tmp_path / "first", tmp_path / "second")
        run.close()
    (journal,) = (tmp_path / "second").rglob("journal-*")
    data = journal.read_bytes()
    second = data.index(data[:4], 4)  # an entry's first bytes are always the same
    journal.write_bytes(data[second:])
    with pytest.raises(StorageError, match=r"journal-\d+: chunk \d+ goes on with transition"):
        served(tmp_path / "second", "step").__enter__()


def test_without_image_damage_after_a_loss_of_power_is_refused(tmp_path: Path, disk: Disk) -> None:
    with served(tmp_path / "first", "process") as target:
        run = Run(target, OPTIMIZERS[0])
        run.step(0)
        disk.lose_power(tmp_path / "first", tmp_path / "second")
        run.close()
    with pytest.raises(StorageError, match="was damaged"):
        served(tmp_path / "second", "process").__enter__()


def test_a_clean_stop_needs_no_journal(tmp_path: Path) -> None:
    expected = trained(tmp_path, 3, OPTIMIZERS[1])
    for durability in ("process", "step", "process", "0.5"):
        with served(tmp_path / "undisturbed", durability) as target:
            run = Run(target, OPTIMIZERS[1])
            assert {model.next_step for model in run.models} == {3}
            np.testing.assert_array_equal(run.models[0].get_weights(), expected[-1])
            run.close()
        boot_path = tmp_path / "undisturbed" / "boot.json"
        boot = json.loads(boot_path.read_text())
        assert boot["state"] == "clean"
        boot_path.write_text(json.dumps({**boot, "boot_id": "another start"}))


def failing(monkeypatch: pytest.MonkeyPatch, name: str, part: str, error: int) -> threading.Event:
    """Makes a call of the system on a file whose path holds `part` fail while the event is set."""
    fails, real = threading.Event(), getattr(os, name)

    def call(file: int, *given: int) -> object:
        path = os.readlink(f"/proc/self/fd/{file}")
        if fails.is_set() and part in path:
            raise OSError(error, os.strerror(error), path)
        return real(file, *given)

    monkeypatch.setattr(os, name, call)
    return fails


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
    monkeypatch.setattr(image_files, "IMAGE_AT_BYTES_MIN", 0)
    disk = Disk(monkeypatch)
    with (
        served(tmp_path / "first", "0.05") as target,
        shardwell.connect(target, worker_id="w", timeout_s=30) as client,
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
                shardwell.connect(again, worker_id="w", timeout_s=30) as other,
            ):
                opened = [
                    other.parameter(name, size=SIZE, optimizer=OPTIMIZERS[0]) for name in ("a", "b")
                ]
                return all(model.next_step == 8 for model in opened)

        eventually("both were synced", synced, timeout_s=20)
        segments = list((tmp_path / "first" / "parameters" / "000001").glob("journal-*"))
        assert len(segments) <= 3


def test_without_room_for_an_image_a_parameter_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = failing(monkeypatch, "posix_fallocate", "/image-", errno.ENOSPC)
    with served(tmp_path / "first", "step") as target:
        full.set()
        with shardwell.connect(target, worker_id="w", timeout_s=10) as client:
            for _ in range(2):
                with pytest.raises(StorageError, match="No space left on device"):
                    client.parameter("m", size=SIZE, optimizer=shardwell.Average())
            full.clear()
            model = client.parameter("m", size=SIZE, optimizer=shardwell.Average())
            np.testing.assert_array_equal(model.exchange(gradient(0, 0)), gradient(0, 0))


@pytest.mark.parametrize("loses_power_first", [False, True])
def test_going_back_to_process_loses_nothing(
    tmp_path: Path, disk: Disk, loses_power_first: bool
) -> None:
    """The files themselves are synced before image and journal are removed."""
    expected = trained(tmp_path, 3, OPTIMIZERS[1])
    synced: set[str] = set()
    with served(tmp_path / "first", "step") as target:
        run = Run(target, OPTIMIZERS[1])
        for step in range(3):
            run.step(step)
        if loses_power_first:
            disk.lose_power(tmp_path / "first", tmp_path / "second")
        run.close()
    path = tmp_path / ("second" if loses_power_first else "first")
    real = MappedFile.sync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedFile, "sync", lambda file: (synced.add(file.path.name), real(file)))
        with served(path, "process") as target:
            assert {"weights", "slot-0", "records", "marks"} <= synced
            assert not [*path.rglob("image-*"), *path.rglob("journal-*")]
            run = Run(target, OPTIMIZERS[1])
            assert {model.next_step for model in run.models} == {3}
            np.testing.assert_array_equal(run.models[0].get_weights(), expected[2])
            run.close()


def test_an_image_when_nothing_was_journaled_since_the_last(tmp_path: Path, disk: Disk) -> None:
    """The shard's thread and whoever sets first weights may both write one, one after the other."""
    config = ShardConfig(
        shard_index=0, shard_count=1, chunk_size_bytes=256, durability=Durability("step")
    )
    path = tmp_path / "first"
    with DataDir(path, config) as claimed, ShardServer(config, claimed) as server:
        run = Run(server.address, OPTIMIZERS[1])
        expected = run.step(0)
        for parameter in server.shard.parameters():
            for _ in range(3):
                parameter._write_image(lambda: False)
        disk.lose_power(path, tmp_path / "second")
        run.close()
    with served(tmp_path / "second", "step") as target:
        run = Run(target, OPTIMIZERS[1])
        assert {model.next_step for model in run.models} == {1}
        np.testing.assert_array_equal(run.models[0].get_weights(), expected)
        run.close()
