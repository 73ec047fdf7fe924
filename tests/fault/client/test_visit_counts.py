"""Goal: each sample counts once an epoch, in every weight, whatever befalls workers and shards.

Method: real processes under faults drawn from a seed: SIGKILL of workers and shards, workers that
stand still for longer than their lease, cut and stalled connections, crews of 2 that become 8 and
3, or fixed crews with a quorum, gradients that come late. Weights count visits. At the end each of
them is 1 for each sample and epoch, and may be 0 only where shard 0 names the sample as one that
counted in some chunks alone: of one gradient at most for each worker that was killed, each tenure
that ended against its worker's will, and each gradient that was late for some shards. In a fixed
crew samples that were given back last may stay free, with 0 in all weights.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.elastic_storm import Storm
from harness.faults.proxy import Proxy
from harness.polling import PATIENCE_S
from harness.programs.forked_cluster import ForkedCluster
from harness.programs.forkserver import ForkedCalls
from harness.programs.visiting_worker import (
    IN_PART,
    SEED,
    VisitingWorker,
    opened,
    visited,
)
from harness.threads import in_background
from shardwell.numerics.permutation import permuted

SHARD_COUNT = 3
CREWS = (2, 8, 3)
SOAK_MINUTES = float(os.environ.get("SHARDWELL_SOAK_MINUTES") or 10)
PLAN: dict[str, Any] = {
    "length": 600,
    "batch_size": 5,
    "epochs": 2,
    "copies": SHARD_COUNT,
    "min_count": 1,
    "max_count": 16,
    "member_return_s": 0.2,
    "member_lease_s": 0.6,
    "pause_s": 0.01,
}
LONG_PLAN = {
    **PLAN,
    "length": 100_000,
    "batch_size": 250,
    "epochs": 10,
    "member_lease_s": 1.0,
    "pause_s": 0.0,
}
LONG_CREWS: list[dict[str, Any]] = [{}, {"min_contributors": 1, "grace_s": 0.2}]
LONG_CREWS.append({**LONG_CREWS[1], "late": "carry"})
KILLS = ("kill", "replace", "two", "lose", "shard", "nothing")
FIXED_KINDS = ("kill", "two", "shard", "nothing", "stop")
FIXED = {"worker_count": 3, "min_contributors": 1, "grace_s": 0.02, "epochs": 3}
LONG_FIXED = {**FIXED, "worker_count": 8, "grace_s": 0.2, "epochs": 10}
QUORUM = {"min_contributors": 1, "grace_s": 0.002}
_STALL_S = 1.2
_FINISH_S = 900.0


class Account:
    """The samples that counted in part, by the log of shard 0: its status says the last ones."""

    def __init__(self, shard_directory: Path) -> None:
        self._directory = shard_directory
        self.partial: set[tuple[str, int, tuple[tuple[int, int], ...]]] = set()

    def look(self) -> None:
        """Reads it, as often as it may be compacted."""
        for path in self._directory.glob("parameters/*[0-9]/samples"):
            data = path.read_bytes()
            for line in data[: int(data.split()[3])].splitlines()[1:]:
                event = json.loads(line[9:])
                found = event["partial"] if event["kind"] == "state" else []
                if event["kind"] == "partial":
                    found = [(event["worker_id"], event["step"], event["ranges"])]
                self.partial |= {(w, s, tuple(map(tuple, ranges))) for w, s, ranges in found}

    def partial_samples(self, plan: dict[str, Any]) -> np.ndarray:
        """(epochs, length): how often each counted in part."""
        found, length = np.zeros((plan["epochs"], plan["length"]), int), plan["length"]
        for _, _, ranges in self.partial:
            for start, stop in ranges:
                for position in range(start, stop):
                    epoch = position // length
                    place = np.array([position - epoch * length])
                    found[epoch, permuted(place, length, SEED, epoch)] += 1
        return found


class Visits:
    """Shards, a crew in a storm, and what has counted."""

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        plan: dict[str, Any],
        seed: int,
        kinds: Any,
        shard_count: int,
    ) -> None:
        self._stack, self._plan = stack, plan
        forked = stack.enter_context(ForkedCalls())
        self.cluster = stack.enter_context(
            ForkedCluster(
                forked,
                directory,
                shard_count=shard_count,
                chunk_size_bytes=2048 if plan["length"] <= PLAN["length"] else 64 * 1024,
            )
        )
        addresses = self.cluster.target.split(",")
        self._proxies = [stack.enter_context(Proxy(each)) for each in addresses]
        self._chance = random.Random(seed)
        self.storm: Storm[VisitingWorker] = Storm(
            self._start_worker,
            self._start_shard_again,
            shard_count=shard_count,
            seed=seed,
            kinds=kinds,
            more={} if "stop" not in kinds else {"cut": self._cut, "stall": self._stall},
        )
        self.client = stack.enter_context(
            shardwell.connect(self.cluster.target, worker_id="last", timeout_s=40.0)
        )
        self.account = Account(directory / "shard-0")
        self._started: list[VisitingWorker] = []

    def _start_worker(self, worker_id: str) -> VisitingWorker:
        """Every second one by proxies."""
        plan, target = self._plan, self.cluster.target
        if self._chance.random() < 0.5:
            plan = {**plan, "same_host": False}
            target = ",".join(proxy.address for proxy in self._proxies)
        self._started.append(self._stack.enter_context(VisitingWorker(target, worker_id, plan)))
        return self._started[-1]

    def _start_shard_again(self, index: int) -> None:
        self.cluster.shards[index].kill()
        self.cluster.start(index)

    def _cut(self, chance: random.Random) -> None:
        chance.choice(self._proxies).cut()

    def _stall(self, chance: random.Random) -> None:
        proxy = chance.choice(self._proxies)
        proxy.stall()
        time.sleep(chance.uniform(0.0, _STALL_S))
        proxy.resume()

    def _drop_ended(self) -> None:
        """Takes those out of the crew that have found all samples counted."""
        for worker in [each for each in self.storm.workers if each.process.poll() is not None]:
            self.storm.workers.remove(worker)
            assert worker.end() == 0, "\n".join([worker.worker_id, *worker.log])

    @property
    def _crew_size(self) -> int:
        return int(self._plan.get("worker_count", 0))

    def weather(self, seconds: float, crews: Sequence[int] = CREWS, pause_s: float = 0.0) -> None:
        """Has things happen for so long, or until all samples have counted."""
        crews = (self._crew_size,) if self._crew_size else crews
        for crew in crews:
            phase_end_s = time.monotonic() + seconds / len(crews)
            self.storm.resize(crew)
            while self.storm.workers and time.monotonic() < phase_end_s:
                self.storm.blow()
                self.account.look()
                time.sleep(pause_s)
                self._drop_ended()
                if len(self.storm.workers) < min(crews) and not self._crew_size:
                    self.storm.start()

    def finish(self) -> np.ndarray:
        """Has all end, and a last worker with them; (copies, epochs, length): the visits."""
        net = opened(self.client, self._plan)
        if not self._crew_size:
            for _ in visited(net, self._plan):
                pass
        for worker in self.storm.workers:
            assert worker.end(_FINISH_S) == 0, "\n".join([worker.worker_id, *worker.log])
        self.account.look()
        shape = (self._plan["copies"], self._plan["epochs"], self._plan["length"])
        found: np.ndarray = np.asarray(net.get_weights()).reshape(shape)
        return found

    def ends(self) -> dict[str, int]:
        """How often a gradient may have come to count in part."""
        lines = [line for worker in self._started for line in worker.log]
        lost_count = sum("shards lost worker" in line for line in lines)
        late_count = sum(line == IN_PART for line in lines) if "grace_s" in self._plan else 0
        return {"killed": self.storm.lost_count, "lost": lost_count, "late": late_count}

    def check(self, *, unnamed_count_max: int = 0) -> None:
        """Compares the visits with what shard 0 says.

        `unnamed_count_max`: so many samples may be missing in some weights without being named.
        """
        visits, blows = self.finish(), self.storm.blows
        kinds = self.ends()
        partial = self.account.partial_samples(self._plan)
        missing = np.rint(1.0 - visits).astype(int)
        np.testing.assert_allclose(visits, 1 - missing, atol=1e-3, err_msg=f"{blows}")
        print(
            f"{len(self.cluster.shards)} shards, batches of {self._plan['batch_size']}; {blows}; "
            f"{kinds}; {visits[0].size} samples in "
            f"{self._plan['epochs']} epochs: {len(self.account.partial)} gradients in part, of "
            f"{partial.sum()} samples, {(missing > 0).any(0).sum()} of them not in all weights, "
            f"{missing.all(0).sum()} in none"
        )
        assert missing.min() >= 0, (blows, np.argwhere(missing < 0)[:9])
        assert len(self.account.partial) <= sum(kinds.values()), (blows, kinds)
        if self._crew_size:
            missing = missing * ~missing.all(axis=0)
        unnamed = np.argwhere((missing > partial).any(axis=0))
        assert len(unnamed) <= unnamed_count_max, (blows, unnamed[:9])
        assert partial.max() <= 1, (blows, np.argwhere(partial > 1)[:9])


@contextmanager
def visiting(
    directory: Path, seed: int, kinds: Any, plan: dict[str, Any], shard_count: int = SHARD_COUNT
) -> Iterator[Visits]:
    with ExitStack() as stack:
        yield Visits(stack, directory, plan, seed, kinds, shard_count)


def restored_in_a_storm(
    directory: Path, seed: int, plan: dict[str, Any], seconds: float, **pauses: float
) -> None:
    """Saves while members train, and goes on with other shards, workers and samples of a batch."""
    kinds = (*KILLS, "stop")
    with visiting(directory / "first", seed, kinds, plan) as first:
        first.weather(seconds / 2, CREWS[:2], **pauses)
        first.client.save_checkpoint(directory / "saved")
        # The save may come before the shards have learned that these are lost.
        unsettled_count = plan["batch_size"] * first.storm.lost_count
        first.weather(seconds / 8, CREWS[2:], **pauses)
    plan = {**plan, "batch_size": plan["batch_size"] * 3 // 5}
    with visiting(directory / "second", seed + 1, kinds, plan, shard_count=2) as second:
        second.client.restore_checkpoint(directory / "saved")
        second.weather(seconds * 3 / 8, (6, 2), **pauses)
        second.check(unnamed_count_max=unsettled_count)


def test_kills_count_each_sample_once(tmp_path: Path) -> None:
    with visiting(tmp_path, 1, KILLS, PLAN) as visits:
        visits.weather(3.0)
        visits.check()


def test_killed_shards_alone_cost_no_sample(tmp_path: Path) -> None:
    with visiting(tmp_path, 4, ("shard", "nothing"), {**PLAN, "member_lease_s": 5.0}) as visits:
        visits.weather(3.0, (3,))
        visits.check()
        assert not visits.account.partial


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_more_faults_count_each_sample_once(tmp_path: Path, late: str) -> None:
    with visiting(tmp_path, 2, (*KILLS, "stop"), {**PLAN, **QUORUM, "late": late}) as visits:
        visits.weather(3.0)
        visits.check()


def test_a_state_is_of_the_step_of_the_weights(tmp_path: Path) -> None:
    """One member lives; the others, who take its state, are killed, and so are shards."""
    plan = {**PLAN, "keeps_state": True, "member_lease_s": 2.0}
    with visiting(tmp_path, 6, KILLS, plan) as visits:
        net, progress = opened(visits.client, plan), {"steps": 0}
        survivor = in_background(lambda: [time.sleep(plan["pause_s"]) for _ in visited(net, plan)])
        visits.weather(3.0, (2, 5, 3))
        assert survivor.result(PATIENCE_S)
        net.end_state()
        net.close()
        visits.check()
        net = opened(visits.client, plan)
        net.keep_state({"progress": progress})
        assert progress["steps"] == net.next_step > 0


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_a_quorum_counts_each_sample_once(tmp_path: Path, late: str) -> None:
    with visiting(tmp_path, 7, FIXED_KINDS[:-1], {**PLAN, **FIXED, "late": late}) as visits:
        visits.weather(3.0)
        visits.check()


def test_a_restore_into_other_shards_counts_each_sample_once(tmp_path: Path) -> None:
    restored_in_a_storm(tmp_path, 3, PLAN, 3.0)


@pytest.mark.soak
@pytest.mark.timeout(60 * SOAK_MINUTES + 900)
def test_long_storms_count_each_sample_once(tmp_path: Path) -> None:
    """A crew of 2, 8 and 3, a fault each 2 s, 10 epochs of 100,000, as long as the minutes last."""
    until_s, seed = time.monotonic() + 60 * SOAK_MINUTES, 0
    while (rest_s := until_s - time.monotonic()) > 0:
        plan = {**LONG_PLAN, **LONG_CREWS[seed % 3]}
        with visiting(tmp_path / f"{seed}", seed, (*KILLS, "stop"), plan) as visits:
            visits.weather(rest_s, CREWS * max(round(rest_s / 60), 1), pause_s=2.0)
            visits.check()
        seed += 1


@pytest.mark.soak
@pytest.mark.timeout(60 * SOAK_MINUTES + 900)
@pytest.mark.parametrize("late", ["drop", "carry"])
def test_a_quorum_in_a_long_storm_counts_each_sample_once(tmp_path: Path, late: str) -> None:
    plan = {**LONG_PLAN, **LONG_FIXED, "late": late}
    with visiting(tmp_path, 300, FIXED_KINDS, plan) as visits:
        visits.weather(60 * SOAK_MINUTES, pause_s=2.0)
        visits.check()


@pytest.mark.soak
@pytest.mark.timeout(60 * SOAK_MINUTES + 900)
def test_a_restore_in_a_long_storm_counts_each_sample_once(tmp_path: Path) -> None:
    restored_in_a_storm(tmp_path, 200, LONG_PLAN, 60 * SOAK_MINUTES, pause_s=2.0)
