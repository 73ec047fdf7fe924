"""One worker's loop of outer training: steps of its own, and an outer step once in fifty."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import shardwell
from shardwell_server.demo.digits.model import FloatArray
from shardwell_server.demo.digits.samples import Batches, Digits
from shardwell_server.demo.digits.worker import BATCH_SIZE, FIRST_WEIGHTS_SEED, MODEL, Task
from shardwell_server.demo.reports import Report, Reporter

INNER_OPTIMIZER = shardwell.Adam(learning_rate=1e-3)
"""Optimizer of each worker's own steps. Outer steps have the default of `shardwell.Outer`."""
OUTER_STEP_COUNT = 600
"""Inner steps: twelve outer steps of fifty."""
_Batch = tuple[FloatArray, npt.NDArray[np.int64]]


def open_outer(client: shardwell.Client, task: Task) -> shardwell.Outer:
    """The model's fragments in the cluster, as all who open them must agree."""
    assert task.outer is not None
    tensors = MODEL.tensors(np.empty(MODEL.size, np.float32))
    return shardwell.Outer(
        client,
        task.parameter,
        tensors={name: tensor.shape for name, tensor in tensors.items()},
        sync_every=task.outer.sync_every,
        fragments=task.outer.fragment_count,
        overlap=task.outer.overlap,
        codec=task.codec,
        worker_count=task.worker_count,
    )


def train_outer(
    task: Task, digits: Digits, report: Callable[[Report], None], *, report_interval_s: float
) -> npt.NDArray[np.float32]:
    """Trains until this worker has made its inner steps; returns its weights after the last."""
    batches = Batches(
        digits.training,
        worker_index=task.worker_index,
        worker_count=task.worker_count,
        batch_size=BATCH_SIZE,
    )

    def gradient_of(weights: FloatArray, batch: _Batch) -> tuple[float, FloatArray]:
        return MODEL.loss_and_gradient(weights, *batch)

    with (
        shardwell.connect(
            task.target,
            worker_id=task.worker_id,
            timeout_s=task.timeout_s,
            connect_timeout_s=task.connect_timeout_s,
        ) as client,
        open_outer(client, task) as outer,
    ):
        first = MODEL.first_weights(FIRST_WEIGHTS_SEED)  # the same from every worker
        trainer = shardwell.DataParallelTrainer(gradient_of, first, INNER_OPTIMIZER)
        weights = MODEL.tensors(trainer.weights)
        _copy(outer.init(weights), weights)
        reporter = Reporter(report, client.traffic, interval_s=report_interval_s)
        reporter.begin(outer.inner_step)
        while outer.inner_step < task.step_count:
            batch = batches[outer.inner_step]
            result = trainer.step_share((batch.images, batch.labels))
            _copy(outer.after_step(weights, sample_count=len(batch)), weights)
            reporter.add(
                outer.inner_step,
                result.loss,
                last=outer.inner_step >= task.step_count,
                outer={
                    "outer_steps": min(fragment.version for fragment in outer.fragments),
                    "waited_s": outer.waited_s,
                    "hidden_s": outer.hidden_s,
                },
            )
        return trainer.weights


def _copy(new: dict[str, npt.NDArray[np.float32]], weights: dict[str, FloatArray]) -> None:
    for name, tensor in new.items():
        weights[name][...] = tensor
