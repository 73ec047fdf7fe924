"""The run as a whole: a cluster, workers that train on it, and someone who measures.

Everything that is started is started in a `with`, so that it ends however this ends.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import dataclass

from shardwell.errors import ArgumentError
from shardwell.specs.parameter import CodecName, ModeName
from shardwell_server import signals
from shardwell_server.demo.cluster import (
    GRACE_S,
    check_shards,
    ended_shards_named,
    without_credentials,
)
from shardwell_server.demo.digits.display import Display
from shardwell_server.demo.digits.evaluator import Evaluator
from shardwell_server.demo.digits.samples import (
    HELD_OUT_COUNT,
    Samples,
    check_installed,
    load_digits,
)
from shardwell_server.demo.digits.worker import ACCURACY_MIN, STEP_COUNT, SyncName, Task
from shardwell_server.demo.progress import Observer, TrainingState, count
from shardwell_server.demo.workers import WorkerPool
from shardwell_server.local_cluster import LocalCluster

WORKER_COUNT_MAX = 32
"""With more, a worker's share of the digits is hardly more than its batch."""
_LOOK_INTERVAL_S = 0.1
_EXAM_INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo runs; checked when made."""

    shard_count: int = 2
    """Shards, each a process."""
    worker_count: int = 4
    """Workers, each a process."""
    codec: CodecName = "fp16"
    """How gradients and weights travel."""
    mode: ModeName = "sync"
    """`sync`: a step is the mean of all workers' gradients; `async`: each as it arrives."""
    step_count: int = STEP_COUNT
    """Steps of each worker."""
    sync: SyncName = "server"
    """Who averages: the shards, the workers in a group, or threads."""
    target: str | None = None
    """A cluster that runs already; None: start one of `shard_count`."""

    def __post_init__(self) -> None:
        if not 1 <= self.worker_count <= WORKER_COUNT_MAX:
            raise ArgumentError(
                f"the demo has work for 1 to {WORKER_COUNT_MAX} workers; got {self.worker_count}"
            )
        if self.step_count < 1:
            raise ArgumentError(f"step_count must be at least 1; got {self.step_count}")
        if self.sync != "server" and self.mode == "async":
            raise ArgumentError(f"only shards average asynchronously; got sync={self.sync!r}")
        if self.sync in ("ring", "tree", "centralized") and "+" in self.codec:
            raise ArgumentError(f"a group's codec is fp32, fp16 or bf16; got {self.codec!r}")

    @property
    def started_shard_count(self) -> int:
        """Shards that the demo starts: a group needs one to meet at, threads none."""
        if self.target is not None or self.sync == "threads":
            return 0
        return self.shard_count if self.sync == "server" else 1

    @property
    def process_count(self) -> int:
        """Processes that train."""
        return 1 if self.sync == "threads" else self.worker_count

    def tasks(self, target: str) -> list[Task]:
        """What each worker is to do. The parameter's name is new, so that nothing is resumed."""
        parameter = f"digits-{uuid.uuid4().hex[:8]}"
        return [
            Task(
                target=target,
                worker_id=f"w{index}",
                worker_index=index,
                worker_count=self.worker_count,
                parameter=parameter,
                step_count=self.step_count,
                codec=self.codec,
                mode=self.mode,
                sync=self.sync,
            )
            for index in range(self.process_count)
        ]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How it went."""

    accuracy: float
    """Of the final weights, on held-out digits."""
    held_out_count: int
    """How many those are."""
    state: TrainingState
    """Of the workers, at the end."""
    duration_s: float
    """Of the whole demo."""

    @property
    def passed(self) -> bool:
        """Whether the accuracy is what the demo promises."""
        return self.accuracy >= ACCURACY_MIN


def run_demo(config: DemoConfig, display: Display) -> Result:
    """Runs it all, and leaves no process behind.

    Raises:
        StoppedError: a signal asked for it.
        DemoError: scikit-learn is missing, or a worker or a shard has ended; it is named.
        ShardwellError: see `LocalCluster` and `Client`.
    """
    start_s = time.monotonic()
    display.introduce()
    check_installed()
    with contextlib.ExitStack() as stack:
        signals.check()
        cluster, target = None, config.target
        if target is None:
            stack.enter_context(without_credentials())
        if config.started_shard_count:
            display.say(f"starting {count(config.started_shard_count, 'shard')}")
            with signals.breaking_off():
                cluster = stack.enter_context(
                    LocalCluster(
                        config.started_shard_count,
                        processes=True,
                        grace_s=GRACE_S,
                        admin_listen="127.0.0.1:0",
                    )
                )
            target = cluster.target
            display.say(f"status page, as long as this runs: {cluster.admin_urls[0]}")
        tasks = config.tasks(target or "none:1")
        signals.check()
        pool = stack.enter_context(WorkerPool(tasks))
        display.say(f"starting {count(config.worker_count, 'worker')}")
        held_out = load_digits().held_out
        with ended_shards_named(cluster):
            state, accuracy = _watch(pool, tasks[0], held_out, display, cluster)
    return Result(
        accuracy=accuracy,
        held_out_count=HELD_OUT_COUNT,
        state=state,
        duration_s=time.monotonic() - start_s,
    )


def _watch(
    pool: WorkerPool,
    task: Task,
    held_out: Samples,
    display: Display,
    cluster: LocalCluster | None,
) -> tuple[TrainingState, float]:
    """Shows and measures until all workers have finished; their last state, and the accuracy."""
    observer = Observer(pool.members)
    with contextlib.ExitStack() as stack:
        evaluator: Evaluator | None = None
        accuracy: float | None = None
        exam_due_s = 0.0
        while True:
            signals.check()
            check_shards(cluster)
            finished = pool.has_finished()
            state = observer.look(time.monotonic())
            if task.sync == "server" and evaluator is None and state.ready_count:
                evaluator = stack.enter_context(Evaluator(task, held_out))
            if evaluator is not None and (finished or time.monotonic() >= exam_due_s):
                accuracy = evaluator.accuracy()
                exam_due_s = time.monotonic() + _EXAM_INTERVAL_S
            elif task.sync != "server":
                accuracy = pool.members[0].measures.get("accuracy")
            display.show(state, accuracy, last=finished)
            if finished:
                assert accuracy is not None
                return state, accuracy
            time.sleep(_LOOK_INTERVAL_S)
