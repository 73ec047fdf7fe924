"""Goal: whatever training does, a version is found that all shards can give.

Method: a snapshot whose attempts are answered by a model of training: its version at each moment.
Each attempt takes 10 ms of a clock that is the test's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwell import SGD, ParameterSpec, Traffic
from shardwell.checkpoint import save
from shardwell.checkpoint.capture import ParameterCapture
from shardwell.checkpoint.cluster import Cluster, Contents
from shardwell.checkpoint.format import CheckpointParameter
from shardwell.errors import DeadlineError, LimitError, StepOrderError, WorkersMissingError
from shardwell.rpc.retry import Attempts
from shardwell.v1.parameter_server_pb2 import ParameterStatus

SPEC = ParameterSpec(name="p", size=1, optimizer=SGD(learning_rate=1.0), worker_count=1)
DONE = CheckpointParameter(spec=SPEC, version=0, version_max=0, learning_rate=1.0, files=())


class Clock:
    """See Surroundings: no shard is ever away."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def jitter(self) -> float:
        return 0.5

    def pause(self, duration_s: float) -> None:
        self.time_s += duration_s

    def replace_older(self) -> bool:
        return False

    def await_shard(self, shard_index: int, timeout_s: float) -> bool:
        return True

    def describe(self, shard_index: int) -> str:
        return f"shard {shard_index}"


class Modelled(ParameterCapture):
    """Asks a model instead of shards."""

    def __init__(
        self, newest: Callable[[], int], answer: Callable[[int], None], timeout_s: float = 20.0
    ) -> None:
        self._clock = Clock()
        self.question_count = 0

        def ask(cluster: Cluster, spec: object) -> int:
            self.question_count += 1
            return newest()

        cluster = type("Modelled", (Cluster,), {"newest_version": ask})(
            channels=[], worker_id="w", traffic=Traffic(), attempts=Attempts(timeout_s, self._clock)
        )
        super().__init__(SPEC, cluster, [ParameterStatus(version_max=newest())], Path(), 1)
        self.asked: list[int] = []
        self._answer = answer

    def _attempt(self, version: int, wait_s: float) -> CheckpointParameter:
        self.asked.append(version)
        self._clock.time_s += 0.01
        self._answer(version)
        return DONE


def test_an_idle_cluster_gives_its_newest_version() -> None:
    snapshot = Modelled(lambda: 7, lambda version: None)
    assert snapshot.take() is DONE
    assert snapshot.asked == [7]
    assert snapshot.question_count == 0  # it was known
    assert snapshot.take() is DONE
    assert snapshot.question_count == 1


@pytest.mark.parametrize("speed", [1, 3, 100])
def test_training_that_runs_is_caught_up_with(speed) -> None:
    """By the time that a request arrives, `speed` steps have been taken."""
    now = [0]

    def newest() -> int:
        return now[0]

    def answer(version: int) -> None:
        now[0] += speed
        if now[0] > version:
            raise StepOrderError("too late")

    snapshot = Modelled(newest, answer)
    assert snapshot.take() is DONE
    assert len(snapshot.asked) <= 2 + speed.bit_length()


def test_training_that_ends_meanwhile_is_taken_where_it_ended() -> None:
    now = [3]

    def answer(version: int) -> None:
        if len(snapshot.asked) < 3:
            now[0] += 10
            raise StepOrderError("too late")
        if version > now[0]:
            raise WorkersMissingError("nobody trains")

    snapshot = Modelled(lambda: now[0], answer)
    assert snapshot.take() is DONE
    assert snapshot.asked == [3, 14, 25, 23]


def test_a_chunk_that_stays_behind_the_newest_is_an_error() -> None:
    def answer(version: int) -> None:
        raise WorkersMissingError("w1 is missing", missing_worker_ids=("w1",))

    snapshot = Modelled(lambda: 7, answer)
    with pytest.raises(WorkersMissingError, match="w1"):
        snapshot.take()
    assert snapshot.asked == [7]


def test_it_ends_at_the_deadline() -> None:
    def answer(version: int) -> None:
        raise StepOrderError("too late")

    with pytest.raises(DeadlineError, match="raise timeout_s"):
        Modelled(lambda: 7, answer, timeout_s=0.05).take()


def test_others_that_take_snapshots_are_waited_for_a_while() -> None:
    def answer(version: int) -> None:
        raise LimitError("as many are under way")

    snapshot = Modelled(lambda: 7, answer, timeout_s=2.0)
    with pytest.raises(LimitError):
        snapshot.take()
    assert 5 <= len(snapshot.asked) <= 10


def test_a_later_batch_asks_for_the_newest_version(tmp_path: Path, monkeypatch) -> None:
    """What the shards said before the first batch is old by then."""
    known: list[int | None] = []

    class Large(ParameterCapture):
        size_bytes = 2**30

        def take_repeatedly(self) -> CheckpointParameter:
            known.append(self.known_version)
            return DONE

    monkeypatch.setattr(save, "ParameterCapture", Large)
    specs = [dataclasses.replace(SPEC, name=name) for name in "abc"]
    held = {spec.name: ParameterStatus(version_max=7) for spec in specs}
    attempts = Attempts(20.0, Clock())
    cluster = Cluster(channels=[], worker_id="w", traffic=Traffic(), attempts=attempts)
    save.capture_all(cluster, [Contents(0, "0.2.0", held, {})], specs, tmp_path)
    assert known == [7, None, None]
