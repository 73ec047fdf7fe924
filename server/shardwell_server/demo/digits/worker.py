"""One worker's training loop, in each way that the demo shows; `docker compose` runs it, too.

`Training._on_server` is the example to copy: all that a program needs to train on the shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np

import shardwell
from shardwell.numerics.codec import Float32
from shardwell.outer.schedule import Schedule
from shardwell.placement.fragments import deal_fragments
from shardwell.specs.parameter import CodecName, ModeName, WireName
from shardwell_server.demo.digits.model import FloatArray, Perceptron
from shardwell_server.demo.digits.samples import (
    CLASS_COUNT,
    IMAGE_SIZE,
    Batches,
    Digits,
    Samples,
)
from shardwell_server.demo.reports import Report, Reporter

MODEL = Perceptron(input_size=IMAGE_SIZE, hidden_size=1024, class_count=CLASS_COUNT)
"""76 810 weights: more than digits need, so that there is something to send."""
OPTIMIZER = shardwell.Adam(learning_rate=5e-4)
"""Half the usual rate: eight asynchronous workers, each some steps behind, still converge."""
INNER_OPTIMIZER = shardwell.Adam(learning_rate=1e-3)
"""The optimizer of each worker's own steps; outer steps have the default of `shardwell.Outer`."""
WORKER_COMMAND = "demo-worker"
BATCH_SIZE = 32
STEP_COUNT = 500
"""Enough for one worker alone; more workers see more digits in as many steps."""
OUTER_STEP_COUNT = 600
"""Inner steps: twelve outer steps of fifty."""
MEMBER_COUNT_MAX = 64
ACCURACY_MIN = 0.95
FIRST_WEIGHTS_SEED = 22
_SAMPLES_SEED = 23
SyncName: TypeAlias = Literal["server", "ring", "tree", "centralized", "threads"]
"""The averaging side: the shards, the workers among themselves, or the threads of one process."""
_STRATEGIES: dict[str, shardwell.Strategy] = {
    "ring": shardwell.Ring(),
    "tree": shardwell.Tree(arity=2),
    "centralized": shardwell.Centralized(),
}


@dataclass(frozen=True, kw_only=True)
class OuterPlan:
    """The rhythm and the parts in which a worker sends its weights."""

    sync_every: int = 50
    fragment_count: int = 2
    overlap: int = 2

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(MODEL.tensors(np.empty(MODEL.size)), 1)
        count = len(deal_fragments(sizes, self.fragment_count))
        Schedule(sync_every=self.sync_every, fragment_count=count, overlap=self.overlap)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a training, which all its workers share."""

    worker_count: int
    step_count: int = STEP_COUNT
    codec: CodecName = "fp16"
    mode: ModeName = "sync"
    sync: SyncName = "server"
    is_elastic: bool = False
    """True if workers come and go; a worker's worker_count says nothing then."""
    outer: OuterPlan | None = None


@dataclass(frozen=True, kw_only=True)
class Task(Job):
    """The task of one worker. All workers share everything but `worker_id` and `worker_index`."""

    target: str
    worker_id: str
    """Kept over a restart, so that the worker goes on where it was."""
    worker_index: int
    parameter: str = "digits"
    timeout_s: float = 60.0
    """A minute, for workers that are still starting."""
    connect_timeout_s: float = 60.0

    def of_worker(self, index: int) -> Task:
        """Returns the task of another worker."""
        return dataclasses.replace(self, worker_id=f"w{index}", worker_index=index)

    def command(self) -> list[str]:
        """Returns the command of the task, as arguments of Python."""
        return ["-m", "shardwell_server", WORKER_COMMAND, json.dumps(dataclasses.asdict(self))]

    @staticmethod
    def parsed(text: str) -> Task:
        """Returns the task that `command` passes to the worker."""
        fields = json.loads(text)
        outer = fields.pop("outer")
        return Task(outer=outer and OuterPlan(**outer), **fields)

    def connect(self, worker_id: str, timeout_s: float) -> shardwell.Client:
        """Connects to the shards."""
        return shardwell.connect(
            self.target,
            worker_id=worker_id,
            timeout_s=timeout_s,
            connect_timeout_s=self.connect_timeout_s,
        )

    def open_weights(self, client: shardwell.Client) -> shardwell.Parameter[Any]:
        """Opens the model's weights in the cluster, as all workers must."""
        members = shardwell.Elastic(max_count=MEMBER_COUNT_MAX) if self.is_elastic else None
        worker_count = None if self.is_elastic else self.worker_count
        return client.parameter(
            self.parameter,
            size=MODEL.size,
            optimizer=OPTIMIZER,
            **shardwell.Elastic.crew(worker_count, members),
            codec=self.codec,
            mode=self.mode,
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """A task with its data, and a place for its reports."""

    task: Task
    digits: Digits
    report: Callable[[Report], None]
    report_interval_s: float

    def run(self) -> Float32:
        """Trains until its steps, or the cluster's, are made; returns the last weights."""
        task = self.task
        if task.sync == "threads":
            sync = shardwell.ThreadedSync(task.worker_count, timeout_s=task.timeout_s)
            with ThreadPoolExecutor(task.worker_count, thread_name_prefix="demo-worker") as threads:
                work = [
                    threads.submit(self._as_thread(rank)._by_sync, sync, rank)
                    for rank in range(task.worker_count)
                ]
                weights = [each.result() for each in work]
            return weights[0]
        if task.sync != "server":
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
                return self._by_sync(shardwell.GroupSync(group))
        with task.connect(task.worker_id, task.timeout_s) as client:
            return self._on_server(client) if task.outer is None else self._outer(client)

    def _on_server(self, client: shardwell.Client) -> Float32:
        task = self.task
        with contextlib.ExitStack() as stack:
            request = shardwell.LeaveRequest()
            if task.is_elastic:
                stack.enter_context(request)
            model = task.open_weights(client)
            model.init(MODEL.first_weights(FIRST_WEIGHTS_SEED))  # equal from every worker
            weights: Float32 = model.get_weights(min_version=model.next_step)
            training = self.digits.training

            def step(given: shardwell.Batch | Samples) -> tuple[float, dict[str, Any]]:
                request.check()
                dealt = () if isinstance(given, Samples) else given
                batch = given if isinstance(given, Samples) else training[given.indices]
                loss, gradient = MODEL.loss_and_gradient(weights, batch.images, batch.labels)
                model.report(loss=loss)
                model.exchange(gradient, sample_count=len(batch), out=weights, batch=dealt)
                outcome = model.outcome
                return loss, {"contributors": () if outcome is None else outcome.contributors}

            batches = None  # asynchronous shards deal none
            if task.mode == "sync":
                samples = shardwell.Samples(len(training), BATCH_SIZE, seed=_SAMPLES_SEED)
                batches = model.batches(samples)
            self._loop(step, lambda: model.next_step, client.traffic, batches)
            request.check()
            return weights

    def _outer(self, client: shardwell.Client) -> Float32:
        task, plan = self.task, self.task.outer
        assert plan is not None
        trainer = _trainer(INNER_OPTIMIZER)
        weights = MODEL.tensors(trainer.weights)
        with shardwell.Outer(
            client,
            task.parameter,
            tensors={name: tensor.shape for name, tensor in weights.items()},
            sync_every=plan.sync_every,
            fragments=plan.fragment_count,
            overlap=plan.overlap,
            codec=task.codec,
            worker_count=task.worker_count,
        ) as outer:
            _copy(outer.init(weights), weights)

            def step(batch: Samples) -> tuple[float, dict[str, Any]]:
                loss = trainer.step_share((batch.images, batch.labels)).loss
                _copy(outer.after_step(weights, sample_count=len(batch)), weights)
                steps = min(fragment.version for fragment in outer.fragments)
                waits = {"waited_s": outer.waited_s, "hidden_s": outer.hidden_s}
                return loss, {"outer": {"outer_steps": steps, **waits}}

            self._loop(step, lambda: outer.inner_step, client.traffic)
        return trainer.weights

    def _by_sync(self, sync: shardwell.GradientSync, rank: int | None = None) -> Float32:
        if rank is not None:
            cast(shardwell.ThreadedSync, sync).take_seat(rank)
        trainer = _trainer(OPTIMIZER, sync, rank)
        held_out = self.digits.held_out

        def measures() -> dict[str, float]:
            return {"accuracy": MODEL.accuracy(trainer.weights, held_out.images, held_out.labels)}

        def step(batch: Samples) -> tuple[float, dict[str, Any]]:
            loss = trainer.step_share((batch.images, batch.labels)).loss
            return loss, {"measure": measures if self.task.worker_index == 0 else None}

        group = getattr(sync, "group", None)
        traffic = shardwell.Traffic() if group is None else group.traffic
        self._loop(step, lambda: trainer.next_step, traffic)
        return trainer.weights

    def _as_thread(self, rank: int) -> Training:
        quiet = self.report if rank == 0 else lambda report: None
        task = dataclasses.replace(self.task, worker_index=rank)
        return dataclasses.replace(self, task=task, report=quiet)

    def _shares(self, next_step: Callable[[], int]) -> Iterator[Samples]:
        """Yields batches of this worker's share of the digits, one for each step."""
        batches = Batches(
            self.digits.training,
            worker_index=self.task.worker_index,
            worker_count=self.task.worker_count,
            batch_size=BATCH_SIZE,
        )
        return (batches[next_step()] for _ in itertools.count())

    def _loop(
        self,
        step: Callable[[Any], tuple[float, dict[str, Any]]],
        next_step: Callable[[], int],
        traffic: shardwell.Traffic,
        batches: Iterator[Any] | None = None,
    ) -> None:
        batches = self._shares(next_step) if batches is None else batches
        reporter = Reporter(self.report, traffic, interval_s=self.report_interval_s)
        reporter.begin(next_step())
        while next_step() < self.task.step_count:
            loss, more = step(next(batches))
            reporter.add(next_step(), loss, last=next_step() >= self.task.step_count, **more)


def _trainer(
    optimizer: shardwell.Adam, sync: shardwell.GradientSync | None = None, rank: int | None = None
) -> shardwell.DataParallelTrainer:
    first = MODEL.first_weights(FIRST_WEIGHTS_SEED)
    return shardwell.DataParallelTrainer(
        lambda weights, batch: MODEL.loss_and_gradient(weights, *batch),
        first,
        optimizer,
        sync,
        rank=rank,
    )


def _copy(new: dict[str, Float32], weights: dict[str, FloatArray]) -> None:
    for name, tensor in new.items():
        weights[name][...] = tensor
