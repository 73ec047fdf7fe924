"""One worker's training loop on a parameter server: what a program needs, and nothing else.

The demo runs it in processes of its own, docker compose in containers; `train` is the example to
copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

import shardwell
from shardwell.outer.schedule import Schedule
from shardwell.placement.fragments import deal_fragments
from shardwell.specs.parameter import CodecName, ModeName
from shardwell_server.demo.digits.model import Perceptron
from shardwell_server.demo.digits.samples import CLASS_COUNT, IMAGE_SIZE, Batches, Digits
from shardwell_server.demo.reports import Report, Reporter

MODEL = Perceptron(input_size=IMAGE_SIZE, hidden_size=1024, class_count=CLASS_COUNT)
"""76 810 weights: more than digits need, so that there is something to send."""
OPTIMIZER = shardwell.Adam(learning_rate=5e-4)
"""Half the usual rate: eight asynchronous workers, each some steps behind, still converge."""
WORKER_COMMAND = "demo-worker"
"""The hidden command that runs one worker and prints its reports."""
BATCH_SIZE = 32
STEP_COUNT = 500
"""Enough for one worker alone; more workers see more digits in as many steps."""
MEMBER_COUNT_MAX = 64
ACCURACY_MIN = 0.95
FIRST_WEIGHTS_SEED = 22


@dataclass(frozen=True, kw_only=True)
class OuterPlan:
    """Outer training: how often, and in how many parts, a worker sends what it has learnt."""

    sync_every: int = 50
    """Inner steps of an outer step."""
    fragment_count: int = 2
    overlap: int = 2
    """Inner steps that a part may travel while the worker goes on."""

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(MODEL.tensors(np.empty(MODEL.size)), 1)
        count = len(deal_fragments(sizes, self.fragment_count))
        Schedule(sync_every=self.sync_every, fragment_count=count, overlap=self.overlap)

    def flags(self) -> list[str]:
        """The worker's flags for it."""
        return [
            f"--outer-steps={self.sync_every}",
            f"--fragments={self.fragment_count}",
            f"--overlap={self.overlap}",
        ]


SyncName: TypeAlias = Literal["server", "ring", "tree", "centralized", "threads"]
"""The averaging side: the shards, the workers among themselves, or the threads of one process."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of one worker. All workers share everything but `worker_id` and `worker_index`."""

    target: str
    worker_id: str
    """Kept over a restart, so that the worker goes on where it was."""
    worker_index: int
    """The worker's share of the digits, 0 to worker_count - 1."""
    worker_count: int
    parameter: str = "digits"
    step_count: int = STEP_COUNT
    codec: CodecName = "fp16"
    mode: ModeName = "sync"
    sync: SyncName = "server"
    is_elastic: bool = False
    """True if workers come and go; worker_count says nothing then."""
    outer: OuterPlan | None = None
    """Outer training; None: each step is exchanged."""
    timeout_s: float = 60.0
    """Bound of each call. A minute, for workers that are still starting."""
    connect_timeout_s: float = 60.0
    """The longest wait for shards."""

    def of_worker(self, index: int) -> Task:
        """The task of another worker."""
        return dataclasses.replace(self, worker_id=f"w{index}", worker_index=index)

    def command(self) -> list[str]:
        """The command that does it, as arguments of Python."""
        return [
            "-m",
            "shardwell_server",
            WORKER_COMMAND,
            f"--shards={self.target}",
            f"--worker-id={self.worker_id}",
            f"--worker-index={self.worker_index}",
            f"--worker-count={self.worker_count}",
            f"--parameter={self.parameter}",
            f"--steps={self.step_count}",
            f"--codec={self.codec}",
            f"--mode={self.mode}",
            f"--sync={self.sync}",
            *(["--elastic"] if self.is_elastic else []),
            *(self.outer.flags() if self.outer else []),
            f"--timeout-s={self.timeout_s}",
            f"--connect-timeout-s={self.connect_timeout_s}",
        ]


def open_weights(client: shardwell.Client, task: Task) -> shardwell.Parameter:
    """The model's weights in the cluster, as all who open them must agree."""
    members = shardwell.Elastic(max_count=MEMBER_COUNT_MAX) if task.is_elastic else None
    worker_count = None if task.is_elastic else task.worker_count
    weights: shardwell.Parameter = client.parameter(
        task.parameter,
        size=MODEL.size,
        optimizer=OPTIMIZER,
        **shardwell.Elastic.crew(worker_count, members),
        codec=task.codec,
        mode=task.mode,
    )
    return weights


def train(
    task: Task, digits: Digits, report: Callable[[Report], None], *, report_interval_s: float
) -> npt.NDArray[np.float32]:
    """Trains until this worker has made its steps; returns the weights after its last.

    Where workers come and go, steps are the cluster's, and SIGTERM ends this one after its step.
    """
    batches = Batches(
        digits.training,
        worker_index=task.worker_index,
        worker_count=None if task.is_elastic else task.worker_count,
        batch_size=BATCH_SIZE,
    )
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(
            shardwell.connect(
                task.target,
                worker_id=task.worker_id,
                timeout_s=task.timeout_s,
                connect_timeout_s=task.connect_timeout_s,
            )
        )
        request = shardwell.LeaveRequest()
        if task.is_elastic:
            stack.enter_context(request)
        model = open_weights(client, task)
        model.init(MODEL.first_weights(FIRST_WEIGHTS_SEED))  # the same from every worker
        weights = model.get_weights(min_version=model.next_step)
        reporter = Reporter(report, client.traffic, interval_s=report_interval_s)
        reporter.begin(model.next_step)
        while model.next_step < task.step_count:
            batch = batches[model.next_step]
            loss, gradient = MODEL.loss_and_gradient(weights, batch.images, batch.labels)
            model.report(loss=loss)
            model.exchange(gradient, sample_count=len(batch), out=weights)
            reporter.add(
                model.next_step,
                loss,
                last=model.next_step >= task.step_count,
                contributors=() if model.outcome is None else model.outcome.contributors,
            )
            request.check()
        return weights
