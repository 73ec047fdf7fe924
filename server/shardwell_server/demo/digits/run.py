"""The run as a whole: a cluster, workers that train on it, and someone who measures.

Everything that is started is started in a `with`, so that it ends however this ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time

from shardwell.errors import DeadlineError, ShardUnavailableError
from shardwell_server import signals
from shardwell_server.demo.cluster import (
    GRACE_S,
    check_shards,
    ended_shards_named,
    without_credentials,
)
from shardwell_server.demo.digits.chaos import Chaos, drawn_plan
from shardwell_server.demo.digits.config import DemoConfig, Result
from shardwell_server.demo.digits.display import Display
from shardwell_server.demo.digits.evaluator import Evaluator
from shardwell_server.demo.digits.samples import (
    HELD_OUT_COUNT,
    Samples,
    check_installed,
    load_digits,
)
from shardwell_server.demo.digits.worker import Task
from shardwell_server.demo.progress import Observer, TrainingState, count
from shardwell_server.demo.workers import WorkerPool
from shardwell_server.local_cluster import LocalCluster

_LOOK_INTERVAL_S = 0.1
_EXAM_TIMEOUT_S = 2.0
_EXAM_INTERVAL_S = 0.5


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
        chaos: Chaos | None = None
        if config.has_chaos:
            plan = drawn_plan(config.seed, config.worker_count, config.step_count)
            chaos = Chaos(plan, pool, tasks[0].of_worker, display.tell)
        with ended_shards_named(cluster):
            state, accuracy = _watch(pool, tasks[0], held_out, display, cluster, chaos)
    return Result(
        accuracy=accuracy,
        held_out_count=HELD_OUT_COUNT,
        state=state,
        duration_s=time.monotonic() - start_s,
        chaos_counts={} if chaos is None else {**chaos.counts, "events to come": chaos.rest_count},
    )


def _watch(
    pool: WorkerPool,
    task: Task,
    held_out: Samples,
    display: Display,
    cluster: LocalCluster | None,
    chaos: Chaos | None,
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
            if chaos is not None:
                chaos.go_on()
                state = dataclasses.replace(state, step=chaos.step)
            if task.sync == "server" and evaluator is None and state.ready_count:
                evaluator = stack.enter_context(Evaluator(task, held_out))
            if evaluator is not None and finished:
                accuracy = evaluator.accuracy()
            elif evaluator is not None and time.monotonic() >= exam_due_s:
                # Workers wait for a shard that is away; the next look names one that has ended.
                with contextlib.suppress(ShardUnavailableError, DeadlineError):
                    accuracy = evaluator.accuracy(_EXAM_TIMEOUT_S)
                exam_due_s = time.monotonic() + _EXAM_INTERVAL_S
            elif task.sync != "server":
                accuracy = pool.members[0].measures.get("accuracy")
            members = () if chaos is None else chaos.taking_part
            display.show(state, accuracy, last=finished, members=members)
            if finished:
                assert accuracy is not None
                return state, accuracy
            time.sleep(_LOOK_INTERVAL_S)
