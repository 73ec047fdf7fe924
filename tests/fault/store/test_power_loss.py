"""Goal: after a loss of power a shard has what its `--durability` promises, no half of anything.

Method: real servers on a data directory, while every sync to disk is recorded; then the directory
is copied as a disk would have it that wrote nothing else (see harness/stories/power.py). A server
goes on from that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.stories.power import (
    OPTIMIZERS,
    SIZE,
    Disk,
    Run,
    failing,
    gradient,
    served,
    start_again,
    trained,
    with_synced,
)
from shardwell.errors import StorageError
from shardwell_server.config import Durability, ShardConfig
from shardwell_server.server import ShardServer
from shardwell_server.store.files.data_dir import DataDir
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.journal import journal
from shardwell_server.store.journal.journal import HEAD_BYTES, Journal

CLIPPED = shardwell.SGD(learning_rate=0.5, momentum=0.5, clip_norm=8.0)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "optimizer", [*OPTIMIZERS, CLIPPED], ids=["SGD", "momentum", "Average", "clipped"]
)
@pytest.mark.parametrize("lost_after", [1, 0, 7])
def test_what_step_acknowledged_survives(
    tmp_path: Path, disk: Disk, optimizer: shardwell.Optimizer, lost_after: int
) -> None:
    expected = trained(tmp_path, 10, optimizer)
    with served(tmp_path / "first", "step") as target:
        run = Run(target, optimizer)
        for step in range(lost_after):
            np.testing.assert_array_equal(run.step(step), expected[step])
        # One worker is ahead: its acknowledged gradient must survive in the open step's sum.
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


def test_what_was_abandoned_survives(tmp_path: Path, disk: Disk) -> None:
    """An asynchronous step that was given up changes nothing, counted again too."""
    options: Any = {"size": SIZE, "optimizer": OPTIMIZERS[1], "mode": "async"}
    with (
        served(tmp_path / "first", "step") as target,
        shardwell.connect(target, worker_id="w0") as client,
    ):
        net = client.parameter("m", **options)
        net.init(np.zeros(SIZE, np.float32))
        net.put_gradient(gradient(0, 0))
        assert net.abandon_step() == 1
        net.put_gradient(gradient(2, 0))
        expected = net.get_weights()
        assert net.abandon_step() == 3
        disk.lose_power(tmp_path / "first", tmp_path / "second")
    with (
        served(tmp_path / "second", "step") as target,
        shardwell.connect(target, worker_id="w0") as client,
    ):
        net = client.parameter("m", **options)
        assert net.next_step == 4
        np.testing.assert_array_equal(net.get_weights(), expected)


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[1], CLIPPED], ids=["momentum", "clipped"])
def test_rates_of_groups_survive(
    tmp_path: Path, disk: Disk, optimizer: shardwell.Optimizer
) -> None:
    """Each step has other factors, and the journal counts all of them again."""
    groups = [shardwell.TensorGroup(name, rate_group=i) for i, name in enumerate("ab", 1)]

    def step(number: int, nets: list[Any], ranks: Sequence[int] = (0, 1)) -> None:
        rate = shardwell.GroupedRate(0.5, [2.0**-number, float(number % 2)])
        for rank in ranks:
            values = gradient(number, rank)
            parts = {"a": values[:300], "b": values[300:]}
            nets[rank].put_gradient(parts, learning_rate=rate)

    def opened(target: str, stack: contextlib.ExitStack) -> list[Any]:
        nets = []
        for rank in range(2):
            client = stack.enter_context(shardwell.connect(target, worker_id=f"w{rank}"))
            net = client.parameter(
                "m",
                tensors={"a": (300,), "b": (SIZE - 300,)},
                groups=groups,
                optimizer=optimizer,
                worker_count=2,
            )
            net.init({"a": np.zeros(300), "b": np.zeros(SIZE - 300)})
            nets.append(net)
        return nets

    def weights(nets: list[Any]) -> Any:
        return np.concatenate(list(nets[0].get_weights(min_version=4).values()))

    with served(tmp_path / "whole", "process") as target, contextlib.ExitStack() as stack:
        nets = opened(target, stack)
        for number in range(4):
            step(number, nets)
        expected = weights(nets)
    with served(tmp_path / "first", "step") as target, contextlib.ExitStack() as stack:
        nets = opened(target, stack)
        for number in range(3):
            step(number, nets)
        nets[0].get_weights(min_version=3)  # the last step has closed
        step(3, nets, [0])
        disk.lose_power(tmp_path / "first", tmp_path / "second")
    with served(tmp_path / "second", "step") as target, contextlib.ExitStack() as stack:
        nets = opened(target, stack)
        assert [net.next_step for net in nets] == [4, 3]
        step(3, nets, [1])
        np.testing.assert_array_equal(weights(nets), expected)


def test_a_norm_that_outlived_its_gradients_is_forgotten(tmp_path: Path, disk: Disk) -> None:
    """It is on disk at once, and they are after seconds: training begins again, with others."""
    others = range(10, 13)
    with served(tmp_path / "undisturbed", "process") as target:
        run = Run(target, CLIPPED)
        expected = [run.step(step) for step in others]
        run.close()
    with served(tmp_path / "first", "3600") as target:
        run = Run(target, CLIPPED)
        for step in range(4):
            run.step(step)
        disk.lose_power(tmp_path / "first", tmp_path / "second")
        run.close()
    with served(tmp_path / "second", "3600") as target:
        run = Run(target, CLIPPED)
        assert [model.next_step for model in run.models] == [0, 0]
        for step, weights in zip(others, expected, strict=True):
            np.testing.assert_array_equal(run.step(step), weights)
        run.close()


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[1], CLIPPED], ids=["momentum", "clipped"])
def test_an_image_made_while_steps_close(
    tmp_path: Path, disk: Disk, optimizer: shardwell.Optimizer
) -> None:
    """Its chunks are of different steps; the journal that makes them one is on disk with it."""
    expected = trained(tmp_path, 6, optimizer)
    config = ShardConfig(
        shard_index=0, shard_count=1, chunk_size_bytes=256, durability=Durability("3600")
    )
    path = tmp_path / "first"
    with DataDir(path, config) as claimed, ShardServer(config, claimed) as server:
        run = Run(server.address, optimizer)
        run.step(0)
        (parameter,) = server.shard.parameters.all()
        copied = 0

        def between() -> bool:
            nonlocal copied
            copied += 1
            if copied in (2, 4):
                run.step(copied // 2)
            return False

        parameter._images.write(between)
        assert copied == parameter.chunk_count > 4
        run.step(3)  # of which nothing is on disk
        disk.lose_power(path, tmp_path / "second")
        run.close()
    with served(tmp_path / "second", "3600") as target:
        run = Run(target, optimizer)
        assert {model.next_step for model in run.models} == {3}
        np.testing.assert_array_equal(run.models[0].get_weights(), expected[2])
        for step in range(3, 6):
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
    expected = trained(tmp_path, 3, OPTIMIZERS[1])
    for number in range(3):
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


def test_a_step_that_next_step_returns_is_synced(tmp_path: Path, disk: Disk) -> None:
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


@pytest.mark.exhaustive
def test_a_journal_cut_anywhere_leaves_a_state_that_was(tmp_path: Path, disk: Disk) -> None:
    expected = trained(tmp_path, 5, OPTIMIZERS[0])
    with served(tmp_path / "first", "step") as target:
        run = Run(target, OPTIMIZERS[0])
        for step in range(4):
            run.step(step)
        disk.lose_power(tmp_path / "first", tmp_path / "whole")
        run.close()
    (journal,) = (tmp_path / "whole").rglob("journal-*")
    data = journal.read_bytes()
    for number, cut in enumerate(range(HEAD_BYTES, len(data), len(data) // 7 + 3)):
        copy = tmp_path / f"cut-{number}"
        shutil.copytree(tmp_path / "whole", copy)
        torn = with_synced(data[:cut])
        (copy / journal.relative_to(tmp_path / "whole")).write_bytes(torn)
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
    first = data[HEAD_BYTES:]
    second = first.index(first[:4], 4)  # an entry's first bytes are always the same
    journal.write_bytes(with_synced(bytes(HEAD_BYTES) + first[second:]))
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
        boot = json.loads((tmp_path / "undisturbed" / "boot.json").read_text())
        assert boot["state"] == "clean"
        start_again(tmp_path / "undisturbed")


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
    """The shard's thread and a setter of first weights may both write one, one after the other."""
    config = ShardConfig(
        shard_index=0, shard_count=1, chunk_size_bytes=256, durability=Durability("step")
    )
    path = tmp_path / "first"
    with DataDir(path, config) as claimed, ShardServer(config, claimed) as server:
        run = Run(server.address, OPTIMIZERS[1])
        expected = run.step(0)
        for parameter in server.shard.parameters.all():
            for _ in range(3):
                parameter._images.write(lambda: False)
        disk.lose_power(path, tmp_path / "second")
        run.close()
    with served(tmp_path / "second", "step") as target:
        run = Run(target, OPTIMIZERS[1])
        assert {model.next_step for model in run.models} == {1}
        np.testing.assert_array_equal(run.models[0].get_weights(), expected)
        run.close()


# A sync or an image that fails costs no more than what it was for, and nothing is believed.
# Method: calls of the system fail for some files, on servers whose syncs are recorded; what a loss
# of power would leave then (see harness/stories/power.py) is served again.


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


@pytest.mark.parametrize("after", ["image begun", "image in place"])
def test_a_sync_that_fails_as_an_image_comes_into_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """It fails in another thread, with an entry that is behind the image's."""
    places: list[str] = []
    written = Journal(tmp_path, places.append)
    fails = failing(monkeypatch, "fdatasync", "/journal-", errno.EIO)

    class Lock:
        real = threading.Lock()

        def __enter__(self) -> None:
            self.real.acquire()

        def __exit__(self, *_: object) -> None:
            self.real.release()
            if after in places and "failed" not in places:
                places.append("failed")
                written.append([b"entry"], 0)
                fails.set()
                with contextlib.suppress(StorageError):
                    written.sync()
                fails.clear()  # the kernel tells of a lost page once

    number = written.begin_segment()
    monkeypatch.setattr(written, "_sync_lock", Lock())
    with written.imaging(number):
        pass
    assert "failed" in places
    with pytest.raises(StorageError, match="syncing it failed"):
        written.sync()
    assert written.wants_image
    assert (tmp_path / "failed-journal").exists()
    with written.imaging(written.begin_segment()):
        pass
    written.append([b"entry"], 0)
    written.sync()
    assert not written.wants_image
    assert not (tmp_path / "failed-journal").exists()


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
