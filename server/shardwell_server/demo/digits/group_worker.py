"""One worker's training loop without a parameter server: every worker holds the weights.

Each averages its gradient with the others', in a group of processes or among threads, and makes the
same update. The shards serve as the meeting place and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import numpy.typing as npt

import shardwell
from shardwell.specs.parameter import WireName
from shardwell_server.demo.digits.model import FloatArray
from shardwell_server.demo.digits.outer_worker import train_outer
from shardwell_server.demo.digits.samples import Batches, Digits
from shardwell_server.demo.digits.worker import (
    BATCH_SIZE,
    FIRST_WEIGHTS_SEED,
    MODEL,
    OPTIMIZER,
    Task,
    train,
)
from shardwell_server.demo.reports import Report, Reporter

_STRATEGIES: dict[str, shardwell.Strategy] = {
    "ring": shardwell.Ring(),
    "tree": shardwell.Tree(arity=2),
    "centralized": shardwell.Centralized(),
}
_Batch = tuple[FloatArray, npt.NDArray[np.int64]]


def train_by_sync(
    task: Task, digits: Digits, report: Callable[[Report], None], *, report_interval_s: float
) -> npt.NDArray[np.float32]:
    """Trains in the way that the task names; returns the weights after the last step."""
    if task.outer is not None:
        return train_outer(task, digits, report, report_interval_s=report_interval_s)
    if task.sync == "server":
        return train(task, digits, report, report_interval_s=report_interval_s)
    if task.sync == "threads":
        return _train_in_threads(task, digits, report, report_interval_s)
    with shardwell.join_group(
        task.parameter,
        task.worker_index,
        task.worker_count,
        _STRATEGIES[task.sync],
        task.target,
        codec=cast(WireName, task.codec),  # checked there
        timeout_s=task.timeout_s,
        join_timeout_s=task.connect_timeout_s,
    ) as group:
        return _train(task, digits, shardwell.GroupSync(group), report, report_interval_s)


def _train_in_threads(
    task: Task, digits: Digits, report: Callable[[Report], None], report_interval_s: float
) -> npt.NDArray[np.float32]:
    sync = shardwell.ThreadedSync(task.worker_count, timeout_s=task.timeout_s)

    def work(rank: int) -> npt.NDArray[np.float32]:
        sync.take_seat(rank)
        told = report if rank == 0 else lambda _: None
        return _train(task, digits, sync, told, report_interval_s, rank)

    with ThreadPoolExecutor(task.worker_count, thread_name_prefix="demo-worker") as threads:
        weights = list(threads.map(work, range(task.worker_count)))
    return weights[0]


def _train(
    task: Task,
    digits: Digits,
    sync: shardwell.GradientSync,
    report: Callable[[Report], None],
    report_interval_s: float,
    rank: int | None = None,
) -> npt.NDArray[np.float32]:
    index = task.worker_index if rank is None else rank
    batches = Batches(
        digits.training,
        worker_index=index,
        worker_count=task.worker_count,
        batch_size=BATCH_SIZE,
    )

    def gradient_of(weights: FloatArray, batch: _Batch) -> tuple[float, FloatArray]:
        return MODEL.loss_and_gradient(weights, *batch)

    trainer = shardwell.DataParallelTrainer(
        gradient_of, MODEL.first_weights(FIRST_WEIGHTS_SEED), OPTIMIZER, sync, rank=rank
    )

    def measures() -> dict[str, float]:
        images, labels = digits.held_out.images, digits.held_out.labels
        return {"accuracy": MODEL.accuracy(trainer.weights, images, labels)}

    group = getattr(sync, "group", None)
    traffic = shardwell.Traffic() if group is None else group.traffic
    reporter = Reporter(report, traffic, interval_s=report_interval_s)
    reporter.begin(0)
    while trainer.next_step < task.step_count:
        batch = batches[trainer.next_step]
        result = trainer.step_share((batch.images, batch.labels))
        reporter.add(
            trainer.next_step,
            result.loss,
            last=trainer.next_step == task.step_count,
            measure=measures if index == 0 else None,
        )
    return trainer.weights
