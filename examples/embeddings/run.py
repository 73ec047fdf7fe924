"""The run as a whole: one process trains, then several workers on a cluster, and both are compared.

Everything that is started is started in a `with`, so that it ends however this ends.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import shardwell
from embeddings.display import Display
from embeddings.evaluator import TEST_HITS, TEST_MRR, Evaluator
from embeddings.knowledge_graph import (
    KnowledgeGraph,
    find_data,
    read_graph,
)
from embeddings.negatives import Question, ask_some
from embeddings.worker import (
    BATCH_COUNT,
    DATA_SET,
    MODEL,
    Task,
    open_tables,
)
from shardwell.errors import ArgumentError
from shardwell.specs.parameter import CodecName
from shardwell_server.demo.cluster import (
    GRACE_S,
    check_shards,
    ended_shards_named,
    without_credentials,
)
from shardwell_server.demo.progress import Observer, TrainingState, count
from shardwell_server.demo.workers import WorkerPool
from shardwell_server.local_cluster import LocalCluster
from shardwell_server.processes import signals

RATIO_MIN = 0.98
"""The cluster's MRR as a part of that of one process; below it, the run has failed."""
WORKER_COUNT_MAX = 32
_FOLDER = Path(__file__).resolve().parents[1]
"""The folder that this package lies in."""
_LOOK_INTERVAL_S = 0.1
_EXAM_INTERVAL_S = 0.5
_TIMEOUT_S = 20.0
_QUESTION_COUNT = 4


@dataclass(frozen=True, kw_only=True)
class EmbeddingsConfig:
    """What the demo runs; checked when made."""

    shard_count: int = 2
    """Shards, each a process."""
    worker_count: int = 4
    """Workers, each a process."""
    codec: CodecName = "fp16"
    """How rows and gradients travel."""
    step_count: int | None = None
    """Steps of each worker; None: BATCH_COUNT among them all. One process makes those of all."""
    target: str | None = None
    """A cluster that runs already; None: start one of `shard_count`."""

    def __post_init__(self) -> None:
        if not 1 <= self.worker_count <= WORKER_COUNT_MAX:
            raise ArgumentError(
                f"embeddings are trained by 1 to {WORKER_COUNT_MAX} workers; "
                f"got {self.worker_count}"
            )
        if self.step_count is not None and self.step_count < 1:
            raise ArgumentError(f"step_count must be at least 1; got {self.step_count}")

    @property
    def steps(self) -> int:
        """Steps of each worker."""
        return self.step_count or -(-BATCH_COUNT // self.worker_count)

    @property
    def step_sum(self) -> int:
        """Steps of all workers, and of one process."""
        return self.steps * self.worker_count

    def task_alone(self) -> Task:
        """What one process is to do, without a cluster: the batches of all workers, in order."""
        return Task(target=None, worker_id="alone", step_count=self.step_sum)

    def tasks(self, target: str) -> list[Task]:
        """What each worker is to do. The tables' names are new, so that nothing is resumed."""
        tables = f"{DATA_SET}-{uuid.uuid4().hex[:8]}"
        return [
            Task(
                target=target,
                worker_id=f"w{index}",
                worker_index=index,
                worker_count=self.worker_count,
                step_count=self.steps,
                tables=tables,
                codec=self.codec,
            )
            for index in range(self.worker_count)
        ]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one of the two trainings went."""

    state: TrainingState
    """Of its workers, at the end."""
    measures: Mapping[str, float]
    """Of what they learnt."""

    @property
    def mrr(self) -> float:
        """Filtered, of the test facts."""
        return self.measures[TEST_MRR]

    @property
    def hits_at_10(self) -> float:
        """Filtered, of the test facts."""
        return self.measures[TEST_HITS]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How it went."""

    alone: Outcome
    """One process."""
    together: Outcome
    """The workers on the cluster."""
    questions: list[Question]
    """Some of the test facts, with what the cluster's embeddings answer."""
    duration_s: float
    """Of the whole demo."""

    @property
    def ratio(self) -> float:
        """The cluster's MRR as a part of that of one process."""
        return self.together.mrr / self.alone.mrr

    @property
    def passed(self) -> bool:
        """Whether the cluster learns as well as one process."""
        return self.ratio >= RATIO_MIN


def run_embeddings(config: EmbeddingsConfig, display: Display) -> Result:
    """Runs it all, and leaves no process behind.

    Raises:
        StoppedError: a signal asked for it.
        DemoError: PyKEEN is missing, or a worker or a shard has ended; it is named.
        ShardwellError: see `LocalCluster`, `Client` and `Table`.
    """
    start_s = time.monotonic()
    with signals.breaking_off():
        graph = read_graph(find_data(DATA_SET))
    display.introduce(graph)
    alone = _train_alone(config, display)
    together, questions = _train_together(config, graph, display)
    return Result(
        alone=alone,
        together=together,
        questions=questions,
        duration_s=time.monotonic() - start_s,
    )


def _train_alone(config: EmbeddingsConfig, display: Display) -> Outcome:
    display.begin("one process")
    with WorkerPool([config.task_alone()], _FOLDER) as pool:
        display.say("starting one process")
        (member,) = pool.members
        return _watch(pool, display, lambda last: member.measures)


def _train_together(
    config: EmbeddingsConfig, graph: KnowledgeGraph, display: Display
) -> tuple[Outcome, list[Question]]:
    with contextlib.ExitStack() as stack:
        signals.check()
        display.begin(count(config.worker_count, "worker"))
        cluster, target = None, config.target
        if target is None:
            stack.enter_context(without_credentials())
            display.say(f"starting {count(config.shard_count, 'shard')}")
            with signals.breaking_off():
                cluster = stack.enter_context(
                    LocalCluster(config.shard_count, processes=True, grace_s=GRACE_S)
                )
            target = cluster.target
        signals.check()
        tasks = config.tasks(target)
        with ended_shards_named(cluster):
            reader = f"{tasks[0].tables}-evaluator"
            client = stack.enter_context(
                shardwell.connect(target, worker_id=reader, timeout_s=_TIMEOUT_S)
            )
            evaluator = Evaluator(MODEL, graph, *open_tables(client, tasks[0], graph))
            pool = stack.enter_context(WorkerPool(tasks, _FOLDER))
            display.say(f"starting {count(config.worker_count, 'worker')}")
            outcome = _watch(pool, display, _now_and_then(evaluator), cluster)
            return outcome, ask_some(graph, MODEL, *evaluator.rows(), _QUESTION_COUNT)


def _now_and_then(evaluator: Evaluator) -> Callable[[bool], Mapping[str, float]]:
    """Measures twice a second, and all of it at the end."""
    due_s = 0.0
    latest: Mapping[str, float] = {}

    def measure(last: bool) -> Mapping[str, float]:
        nonlocal due_s, latest
        if last:
            return evaluator.result()
        if time.monotonic() >= due_s:
            latest = evaluator.progress()
            due_s = time.monotonic() + _EXAM_INTERVAL_S
        return latest

    return measure


def _watch(
    pool: WorkerPool,
    display: Display,
    measure: Callable[[bool], Mapping[str, float]],
    cluster: LocalCluster | None = None,
) -> Outcome:
    """Shows and measures until all workers have finished."""
    observer = Observer(pool.members)
    while True:
        signals.check()
        check_shards(cluster)
        finished = pool.has_finished()
        state = observer.look(time.monotonic())
        measures = measure(finished) if state.ready_count else {}
        display.show(state, measures, last=finished)
        if finished:
            return Outcome(state=state, measures=measures)
        time.sleep(_LOOK_INTERVAL_S)
