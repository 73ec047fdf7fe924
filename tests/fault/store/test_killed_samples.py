"""Goal: whatever write a shard is killed at, or loses its power after, each sample counts once.

Method: weights count the visits of samples: a sample's gradient is -1 there, with a rate of 1. A
shard's process kills itself after a write of its log of samples, its journal or its records, and
another one goes on with the same workers; a loss of power is staged as harness/stories/power.py
does. Logs are damaged by hand.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, readable
from harness.programs import killed_shard
from harness.programs.forkserver import ForkedCalls
from harness.programs.ports import free_port
from harness.stories.power import Disk, served
from harness.threads import in_background
from shardwell.errors import StorageError
from shardwell_server import LocalCluster
from shardwell_server.store.records import event_log

LENGTH = 100
"""Two chunks of 256 bytes."""
SAMPLES = shardwell.Samples(LENGTH, 13, seed=5)
WORKERS = ["w0", "w1"]
ELASTIC = shardwell.Elastic(min_count=1, max_count=4, reference_count=1)
CREWS: dict[str, dict[str, Any]] = {
    "fixed": {"worker_count": len(WORKERS)},
    "elastic": {"members": ELASTIC},
}
CREW = pytest.mark.parametrize("crew", CREWS)
POLL_S = 0.02
PART_COUNT = 16
"""Every sixteenth write; all of them in one test would take too long on a busy machine."""
WRITE_COUNT_MIN = 60


def opened(client: shardwell.Client, crew: str) -> Any:
    """The parameter whose weights count visits."""
    net = client.parameter(
        "visits", size=LENGTH, optimizer=shardwell.SGD(lr=1.0), codec="fp32", **CREWS[crew]
    )
    net.init(np.zeros(LENGTH))
    return net


def work(target: str, worker_id: str, crew: str, *, epochs: int, most: int | None = None) -> None:
    """Trains as one worker; `most` batches."""
    factor = len(WORKERS) if crew == "fixed" else 1
    with shardwell.connect(target, worker_id=worker_id, timeout_s=PATIENCE_S) as client:
        net = opened(client, crew)
        for number, batch in enumerate(net.batches(SAMPLES, epochs=epochs), 1):
            gradient = np.zeros(LENGTH, np.float32)
            gradient[batch.indices] = -factor
            net.exchange(gradient, batch=batch)
            if number == most:
                return


def train(target: str, crew: str, *, epochs: int, most: int | None = None) -> None:
    """Trains as all workers at once."""
    running = [
        in_background(lambda name=name: work(target, name, crew, epochs=epochs, most=most))
        for name in WORKERS
    ]
    for each in running:
        each.result(PATIENCE_S)


def visits(target: str, crew: str) -> list[int]:
    """How often each sample has counted."""
    with shardwell.connect(target, worker_id="reader", timeout_s=PATIENCE_S) as client:
        found: list[int] = opened(client, crew).get_weights().astype(int).tolist()
        return found


def log_of(path: Path) -> Path:
    [found] = path.glob("parameters/*[0-9]/samples")
    return found


def check(path: Path, found: list[int], epochs: int) -> None:
    """Each sample has counted once an epoch, but for those of late gradients that chunks split."""
    data = log_of(path).read_bytes()
    events = [json.loads(line[9:]) for line in data[: int(data.split()[3])].splitlines()[1:]]
    partial = [e["ranges"] for e in events if e["kind"] == "partial"]
    partial += [each[2] for e in events if e["kind"] == "state" for each in e["partial"]]
    split_count = sum(stop - start for ranges in partial for start, stop in ranges)
    assert max(found) <= epochs
    assert epochs * LENGTH - sum(found) <= split_count, found


@pytest.fixture
def forked() -> Iterator[ForkedCalls]:
    with ForkedCalls() as started:
        yield started


def killed_at(
    forked: ForkedCalls, path: Path, crew: str, durability: str, number: int
) -> tuple[bool, list[int]]:
    """Trains an epoch under a shard that is killed after a write; whether it was, the visits."""
    address = f"127.0.0.1:{free_port()}"
    flags = (
        "--shard-count=1",
        "--shard-index=0",
        f"--listen={address}",
        f"--data-dir={path}",
        "--chunk-size-bytes=256",
        f"--durability={durability}",
    )
    shard = forked.start(killed_shard.serve, number, *flags)
    training = in_background(lambda: train(address, crew, epochs=1))
    was_killed = False
    while not training.done():
        if readable([shard], POLL_S) and shard.read_lines() is None:
            assert shard.kill() == -signal.SIGKILL
            was_killed = True
            shard = forked.start(killed_shard.serve, 0, *flags)
    training.result(0)
    found = visits(address, crew)
    shard.kill()
    return was_killed, found


@pytest.mark.sampled(1)
@CREW
@pytest.mark.parametrize("durability", ["process", "step"])
@pytest.mark.parametrize("part", range(PART_COUNT))
def test_each_sample_counts_once_whatever_write_a_shard_is_killed_at(
    tmp_path: Path, forked: ForkedCalls, crew: str, durability: str, part: int
) -> None:
    number, was_killed = 1 + part, True
    while was_killed:
        path = tmp_path / str(number)
        was_killed, found = killed_at(forked, path, crew, durability, number)
        check(path, found, 1)
        number += PART_COUNT
    assert number > WRITE_COUNT_MIN


@CREW
@pytest.mark.parametrize("durability", ["step", "3600"])
def test_each_sample_counts_once_after_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crew: str, durability: str
) -> None:
    """With 3600 seconds all steps are lost, and the log of samples is not."""
    disk = Disk(monkeypatch)
    with served(tmp_path / "first", durability) as target:
        train(target, crew, epochs=2, most=3)
        before = visits(target, crew)
        disk.lose_power(tmp_path / "first", tmp_path / "second")
    with served(tmp_path / "second", durability) as target:
        assert visits(target, crew) == (before if durability == "step" else [0] * LENGTH)
        train(target, crew, epochs=2)
        check(tmp_path / "second", visits(target, crew), 2)


def trained(path: Path, crew: str) -> None:
    with served(path, "process") as target:
        train(target, crew, epochs=1, most=2)


@CREW
def test_a_torn_tail_of_the_log_is_what_never_came(tmp_path: Path, crew: str) -> None:
    trained(tmp_path, crew)
    log = log_of(tmp_path)
    data = log.read_bytes()
    end = int(data.split()[3])
    log.write_bytes(data[:end] + b'12345678 {"kind": "cou')
    with served(tmp_path, "process") as target:
        train(target, crew, epochs=1)
        check(tmp_path, visits(target, crew), 1)


@CREW
def test_a_damaged_line_of_the_log_is_refused_by_name(tmp_path: Path, crew: str) -> None:
    trained(tmp_path, crew)
    log = log_of(tmp_path)
    data = bytearray(log.read_bytes())
    data[data.index(b'"length"') + 1] ^= 1
    log.write_bytes(data)
    with (
        pytest.raises(StorageError, match="samples: line 2 was damaged; restore the directory"),
        served(tmp_path, "process"),
    ):
        pass


@CREW
def test_a_log_of_many_events_is_made_short_and_says_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crew: str
) -> None:
    monkeypatch.setattr(event_log, "_COMPACT_BYTES", 500)
    names: list[str] = []
    compact = event_log.EventLog.compact

    def compacted(log: Any, events: Any) -> None:
        names.append(log.path.name)
        compact(log, events)

    monkeypatch.setattr(event_log.EventLog, "compact", compacted)
    for epochs in (1, 2, 3):
        with served(tmp_path, "process") as target:
            train(target, crew, epochs=epochs)
            check(tmp_path, visits(target, crew), epochs)
    assert names.count("samples") > 2


def test_a_log_of_another_shard_is_made_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has an event of each member and step, and deals nothing."""
    monkeypatch.setattr(event_log, "_COMPACT_BYTES", 500)
    with LocalCluster(2, data_dir=tmp_path, chunk_size_bytes=64) as running:
        train(running.target, "elastic", epochs=40)
        logs = [log_of(tmp_path / f"shard-{index}").read_bytes() for index in range(2)]
    assert int(logs[1].split()[3]) < 2000


@CREW
def test_a_directory_without_a_log_of_samples_gets_one(tmp_path: Path, crew: str) -> None:
    """As one of an earlier release, whose training goes on."""
    with served(tmp_path, "process") as target:
        assert visits(target, crew) == [0] * LENGTH
    assert not [*tmp_path.glob("parameters/*/samples")]
    with served(tmp_path, "process") as target:
        train(target, crew, epochs=1)
        check(tmp_path, visits(target, crew), 1)
    assert log_of(tmp_path).stat().st_size
