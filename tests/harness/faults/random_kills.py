"""SIGKILL at random moments for shards and workers that train, round after round.

A round is so many more steps of all workers. While they last, a seeded generator draws whom to kill
and when: the moment that an element changes in a shard's files, which is in the middle of a chunk;
soon after a step, in the middle of the next; soon after the last blow, when the victims are still
starting; or at any time. Who was killed is started again at once and goes on. At the end of a round
the shards must hold the weights or rows of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import enum
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.data.first_weights_plan import FirstWeightsPlan
from harness.data.table_plan import TablePlan
from harness.data.training_plan import TrainingPlan
from harness.data.visit_plan import NAME as VISITS
from harness.data.visit_plan import VisitPlan
from harness.oracles.expected_weights import expected_weights
from harness.polling import readable
from harness.programs.forked_cluster import SERVING, ForkedCluster
from harness.programs.forkserver import ForkedCall, ForkedCalls

ROUND_TIMEOUT_S = 90.0
"""A round that takes longer hangs."""
_PROGRESS_TIMEOUT_S = 2.0
"""After that long without a step the next blow falls anyway."""


_TAKEN_BACK = re.compile("taken_back_(chunk|row)_count")
_CHANGE_TIMEOUT_S = 0.2
"""So long is looked for a change."""


class Victims(enum.Enum):
    """Who is killed by one blow."""

    SHARD = enum.auto()
    ALL_SHARDS = enum.auto()
    WORKER = enum.auto()
    SHARD_AND_WORKER = enum.auto()
    EVERYBODY = enum.auto()


class Moment(enum.Enum):
    """When a blow falls."""

    IN_A_CHANGE = enum.auto()
    """The moment that an element of weights, sums or optimizer state changes."""
    IN_A_STEP = enum.auto()
    """Soon after a worker's step."""
    AT_ONCE = enum.auto()
    """While the last victims may be recovering."""
    ANY_TIME = enum.auto()
    """While workers may be connecting again."""


PAUSES_S_MAX = {
    Moment.IN_A_CHANGE: 0.02,
    Moment.IN_A_STEP: 0.02,
    Moment.AT_ONCE: 0.025,
    Moment.ANY_TIME: 0.3,
}


class Blow(NamedTuple):
    """What the generator draws, all at once, so that a seed gives the same blows."""

    victims: Victims
    moment: Moment
    pause_s: float
    which: float
    """0 to 1: which shard, which worker."""
    where: float
    """0 to 1: which element of its files."""

    @staticmethod
    def drawn(chance: random.Random) -> Blow:
        """The next one."""
        victims = chance.choices(list(Victims), weights=[5, 2, 3, 3, 3])[0]
        moment = chance.choices(list(Moment), weights=[6, 4, 3, 2])[0]
        pause_s = chance.uniform(0, PAUSES_S_MAX[moment])
        return Blow(victims, moment, pause_s, chance.random(), chance.random())


@dataclass
class Toll:
    """What random kills have done."""

    shard_kill_count: int = 0
    worker_kill_count: int = 0
    starting_kill_count: int = 0
    """Kills of shards that were not serving yet."""
    seen_change_count: int = 0
    """Blows that fell when an element had changed that moment."""
    taken_back_count: int = 0
    """Chunks and rows whose change a kill had cut in two, and that the next process took back."""
    round_count: int = 0
    step_count: int = 0

    @property
    def kill_count(self) -> int:
        """All of them."""
        return self.shard_kill_count + self.worker_kill_count

    def __add__(self, other: Toll) -> Toll:
        total = Counter(vars(self))
        total.update(vars(other))
        return Toll(**total)


class RandomKills:
    """One cluster and its workers under blows.

    Args:
        forked: Starts all processes.
        directory: For the shards' files.
        seed: Gives the blows.
        shard_count: See LocalCluster.
        chunk_size_bytes: See LocalCluster.
        durability: See LocalCluster.
    """

    def __init__(
        self,
        forked: ForkedCalls,
        directory: Path,
        *,
        seed: int,
        shard_count: int = 2,
        chunk_size_bytes: int = 1024,
        durability: str = "process",
    ) -> None:
        self.toll = Toll()
        self.cluster = ForkedCluster(
            forked,
            directory,
            shard_count=shard_count,
            chunk_size_bytes=chunk_size_bytes,
            durability=durability,
        )
        self._forked = forked
        self._chance = random.Random(seed)
        self._workers: dict[int, ForkedCall] = {}
        self._start_worker: Callable[[int], ForkedCall]
        self._serving: set[ForkedCall] = set(self.cluster.shards)
        self._progress_count = 0
        self._kill_count_max = 0

    def train(self, plan: TrainingPlan | TablePlan, *, steps: int, kill_count: int) -> None:
        """Rounds of `steps` until so many were killed, and one at least.

        Raises:
            AssertionError: the weights are not those of an undisturbed run, or a process failed.
        """
        expected = expected_weights(plan)
        last_step = -1
        self._kill_count_max = kill_count
        try:
            while last_step < 0 or self.toll.kill_count < kill_count:
                last_step += steps
                self._round(
                    range(plan.worker_count),
                    lambda index, last=last_step: self._forked.start(
                        plan.train, self.cluster.target, index, last
                    ),
                )
                self.toll.step_count += steps
                is_table = isinstance(plan, TablePlan)
                np.testing.assert_array_equal(
                    plan.stored(self.cluster.target) if is_table else self.cluster.stored("model"),
                    expected.after(last_step),
                    f"after step {last_step}",
                )
        finally:
            expected.close()

    def set_first_weights(self, plan: FirstWeightsPlan, *, kill_count: int) -> None:
        """As `train`, with a new parameter in each round."""
        self._kill_count_max = kill_count
        while self.toll.kill_count < kill_count:
            name = f"model-{self.toll.round_count}"
            self._round(
                range(plan.worker_count),
                lambda index, name=name: self._forked.start(
                    plan.set_all, self.cluster.target, index, name
                ),
            )
            stored = self.cluster.stored(name)
            assert any(
                (stored == plan.weights(index, name)).all() for index in range(plan.worker_count)
            ), f"{name} has no worker's first weights: {stored[:5]} ... {stored[-5:]}"

    def count_visits(self, plan: VisitPlan, *, kill_count: int) -> None:
        """As `train`, in rounds of an epoch: each sample has counted as often as there were rounds.

        With skipped steps, a few may be left over that an epoch has not enough of for all workers:
        they count in the next. The last round skips none.
        """
        self._kill_count_max = kill_count
        epochs = 0
        while not epochs or self.toll.kill_count < kill_count:
            epochs += 1
            self._visit(plan, epochs, plan.skip_chance)
            missing = epochs - self._visits(plan)
            left = missing[0].sum()
            assert ((missing == 0) | (missing == 1)).all(), np.argwhere(missing)
            assert left < plan.worker_count if plan.skip_chance else not left, np.argwhere(missing)
        self._visit(plan, epochs + 1, 0.0)
        np.testing.assert_array_equal(self._visits(plan), epochs + 1)

    def _visits(self, plan: VisitPlan) -> npt.NDArray[np.float32]:
        return plan.visits(self.cluster.stored(VISITS))

    def _visit(self, plan: VisitPlan, epochs: int, skip_chance: float) -> None:
        self._round(
            range(plan.worker_count),
            lambda index: self._forked.start(
                plan.train, self.cluster.target, index, epochs, skip_chance
            ),
        )

    def _round(self, workers: Iterable[int], start: Callable[[int], ForkedCall]) -> None:
        deadline_s = time.monotonic() + ROUND_TIMEOUT_S
        self._start_worker = start
        self._workers = {index: start(index) for index in workers}
        while self._workers and self.toll.kill_count < self._kill_count_max:
            blow = Blow.drawn(self._chance)
            self._await_moment(blow)
            self._strike(blow)
            assert time.monotonic() < deadline_s, f"a round of over {ROUND_TIMEOUT_S:g} s"
        self._watch(max(deadline_s - time.monotonic(), 0))
        assert not self._workers, f"a round of over {ROUND_TIMEOUT_S:g} s; {self._story()}"
        self.toll.round_count += 1

    def _await_moment(self, blow: Blow) -> None:
        if blow.moment in (Moment.IN_A_STEP, Moment.IN_A_CHANGE):
            seen = self._progress_count
            self._watch(_PROGRESS_TIMEOUT_S, lambda: self._progress_count > seen)
        self._watch(blow.pause_s)
        if blow.moment is Moment.IN_A_CHANGE and self._workers:
            self.toll.seen_change_count += self.cluster.await_change(
                int(blow.which * len(self.cluster.shards)),
                blow.where,
                timeout_s=_CHANGE_TIMEOUT_S,
            )

    def _watch(self, duration_s: float, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Reads what all processes say, for that long, or while workers run."""
        end_s = time.monotonic() + duration_s
        while self._workers and not is_enough():
            everybody = [*self.cluster.shards, *self._workers.values()]
            talking = readable(everybody, end_s - time.monotonic())
            for process in talking:
                self._read(process)
            if not talking:
                return

    def _read(self, process: ForkedCall) -> None:
        lines = process.read_lines()
        if lines is None:
            code = process.reap()
            if code != 0 or process in self.cluster.shards:
                raise AssertionError(f"a process ended with code {code} by itself; {self._story()}")
            self._workers = {i: each for i, each in self._workers.items() if each is not process}
            return
        for line in lines:
            if line.startswith("step "):
                self._progress_count += 1
            elif line.startswith(SERVING):
                self._serving.add(process)
            elif (taken_back := _TAKEN_BACK.search(line)) is not None:
                self.toll.taken_back_count += json.loads(line)[taken_back[0]]

    def _strike(self, blow: Blow) -> None:
        shard_count = len(self.cluster.shards)
        first = int(blow.which * shard_count)  # the one in which a change was seen just now
        shards: list[int] = []
        if blow.victims in (Victims.ALL_SHARDS, Victims.EVERYBODY):
            shards = [first, *(set(range(shard_count)) - {first})]
        elif blow.victims in (Victims.SHARD, Victims.SHARD_AND_WORKER):
            shards = [first]
        workers: list[int] = []
        if blow.victims is Victims.EVERYBODY:
            workers = list(self._workers)
        elif blow.victims in (Victims.WORKER, Victims.SHARD_AND_WORKER) and self._workers:
            workers = [sorted(self._workers)[int(blow.which * len(self._workers))]]
        for index in shards:
            self._kill_shard(self.cluster.shards[index])
        restart = [index for index in workers if self._kill_worker(index)]
        for index in shards:
            self.cluster.start(index)
        for index in restart:
            self._workers[index] = self._start_worker(index)

    def _kill_shard(self, shard: ForkedCall) -> None:
        code = shard.kill()
        if code != -9:
            raise AssertionError(f"a shard had ended by itself with code {code}; {self._story()}")
        self.toll.shard_kill_count += 1
        if shard in self._serving:
            self._serving.remove(shard)
        else:
            self.toll.starting_kill_count += 1

    def _kill_worker(self, index: int) -> bool:
        """Whether it ran until then."""
        worker = self._workers.pop(index)
        code = worker.kill()
        if code not in (0, -9):
            raise AssertionError(f"worker {index} ended with {code}: {list(worker.lines)}")
        self.toll.worker_kill_count += code == -9
        return code == -9

    def _story(self) -> str:
        said = [
            *(f"shard {i}: {list(each.lines)}" for i, each in enumerate(self.cluster.shards)),
            *(f"worker {i}: {list(each.lines)}" for i, each in self._workers.items()),
        ]
        return "\n".join([f"{self.toll}", *said])

    def close(self) -> None:
        """Kills everybody."""
        for worker in self._workers.values():
            worker.kill()
        self.cluster.close()

    def __enter__(self) -> RandomKills:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class KillCase:
    """Processes that are killed at random."""

    name: str
    plan: TrainingPlan | TablePlan | FirstWeightsPlan | VisitPlan
    steps: int = 40
    """Of a round."""
    shard_count: int = 2
    chunk_size_bytes: int = 1024
    durability: str = "process"

    def run(self, forked: ForkedCalls, directory: Path, *, seed: int, kill_count: int) -> Toll:
        """Random kills, from nothing; an AssertionError names the seed."""
        try:
            with RandomKills(
                forked,
                directory,
                seed=seed,
                shard_count=self.shard_count,
                chunk_size_bytes=self.chunk_size_bytes,
                durability=self.durability,
            ) as kills:
                if isinstance(self.plan, VisitPlan):
                    kills.count_visits(self.plan, kill_count=kill_count)
                elif isinstance(self.plan, FirstWeightsPlan):
                    kills.set_first_weights(self.plan, kill_count=kill_count)
                else:
                    kills.train(self.plan, steps=self.steps, kill_count=kill_count)
                return kills.toll
        except AssertionError as error:
            raise AssertionError(
                f"case {self.name!r}, seed {seed}, files in {directory}; the same blows again: "
                f"SHARDWELL_TEST_SEED={seed}\n{error}"
            ) from error
