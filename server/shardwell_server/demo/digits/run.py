"""The demo of digits: what it runs, a cluster and workers that train on it, and what it shows.

Everything that is started is started in a `with`, so that it ends however this ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.markup import escape

import shardwell
from shardwell.errors import ArgumentError, DeadlineError, ShardUnavailableError
from shardwell.numerics.codec import CODECS
from shardwell.specs.parameter import GROUP_CODECS
from shardwell_server.demo.cluster import (
    GRACE_S,
    check_shards,
    ended_shards_named,
    without_credentials,
)
from shardwell_server.demo.digits.chaos import Chaos, drawn_plan
from shardwell_server.demo.digits.samples import (
    HELD_OUT_COUNT,
    Samples,
    check_installed,
    load_digits,
)
from shardwell_server.demo.digits.tally import Tally
from shardwell_server.demo.digits.worker import (
    ACCURACY_MIN,
    MODEL,
    Job,
    OuterPlan,
    Task,
)
from shardwell_server.demo.progress import Observer, Progress, TrainingState, count, traffic
from shardwell_server.demo.workers import WorkerPool
from shardwell_server.local_cluster import LocalCluster
from shardwell_server.processes import signals

CHAOS_WORKER_COUNT_MIN = 3
WORKER_COUNT_MAX = 32
"""With more, a worker's share of the digits is hardly more than its batch."""
_LOOK_INTERVAL_S = 0.1
_EXAM_TIMEOUT_S, _LAST_EXAM_TIMEOUT_S = 2.0, 20.0
_EXAM_INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Job):
    """The demo's settings, `is_elastic` with chaos; checked when made."""

    shard_count: int = 2
    seed: int = 0
    target: str | None = None
    """A cluster that runs already; None: start one of `shard_count`."""

    def __post_init__(self) -> None:
        got = f"got sync={self.sync!r}, mode={self.mode!r}"
        is_plain = (self.sync, self.mode) == ("server", "sync")
        is_group = self.sync in ("ring", "tree", "centralized")
        for is_refused, words in (
            (
                not 1 <= self.worker_count <= WORKER_COUNT_MAX,
                f"the demo has work for 1 to {WORKER_COUNT_MAX} workers; got {self.worker_count}",
            ),
            (
                self.outer and (self.is_elastic or not is_plain),
                "outer training has steps of its own; leave out --sync, --mode and --chaos; "
                f"{got}, chaos={self.is_elastic}",
            ),
            (
                self.is_elastic and not is_plain,
                f"chaos is for workers that shards wait for; leave out --sync and --mode; {got}",
            ),
            (
                self.is_elastic and self.worker_count < CHAOS_WORKER_COUNT_MIN,
                f"chaos needs {CHAOS_WORKER_COUNT_MIN} workers to begin with, for two always stay; "
                f"got {self.worker_count}",
            ),
            (
                self.sync != "server" and self.mode == "async",
                f"only shards average asynchronously; got sync={self.sync!r}",
            ),
            (
                is_group and self.codec not in GROUP_CODECS,
                f"a group's codec is one of {', '.join(GROUP_CODECS)}; got {self.codec!r}",
            ),
        ):
            if is_refused:
                raise ArgumentError(words)

    @property
    def started_shard_count(self) -> int:
        """The shards that the demo starts: a group needs one to meet at, threads none."""
        if self.target is not None or self.sync == "threads":
            return 0
        return self.shard_count if self.sync == "server" else 1

    @property
    def process_count(self) -> int:
        """The processes that train."""
        return 1 if self.sync == "threads" else self.worker_count

    def tasks(self, target: str) -> list[Task]:
        """Returns the tasks of workers; the parameter's name is new: nothing is resumed."""
        first = Task(
            target=target,
            worker_id="w0",
            worker_index=0,
            parameter=f"digits-{uuid.uuid4().hex[:8]}",
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Job)},
        )
        return [first.of_worker(index) for index in range(self.process_count)]


def run_demo(config: DemoConfig) -> float:
    """Runs and shows it all, leaves no process behind, and returns the held-out accuracy."""
    start_s = time.monotonic()
    progress = Progress()
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress)
        progress.print(f"[bold]Shardwell[/]: {escape(_described(config))}")
        check_installed()
        signals.check()
        cluster, target = None, config.target
        if target is None:
            stack.enter_context(without_credentials())
        if config.started_shard_count:
            progress.say(f"starting {count(config.started_shard_count, 'shard')}")
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
            progress.say(f"status page, as long as this runs: {cluster.admin_urls[0]}")
        tasks = config.tasks(target or "none:1")
        signals.check()
        pool = stack.enter_context(WorkerPool(tasks))
        progress.say(f"starting {count(config.worker_count, 'worker')}")
        chaos: Chaos | None = None
        if config.is_elastic:
            plan = drawn_plan(config.seed, config.worker_count, config.step_count)
            chaos = Chaos(plan, pool, tasks[0].of_worker, progress.print)
        with ended_shards_named(cluster):
            state, accuracy, counted = _watch(config, progress, tasks[0], pool, cluster, chaos)
    fates = {} if chaos is None else {**chaos.counts, "events to come": chaos.rest_count}
    rows = [*_closing_rows(config, state, accuracy, fates), *counted]
    all_s = time.monotonic() - start_s
    progress.print_tables([*rows, ("in all", f"{all_s:.1f} s, from start to end of all processes")])
    return accuracy


def _watch(
    config: DemoConfig,
    progress: Progress,
    task: Task,
    pool: WorkerPool,
    cluster: LocalCluster | None,
    chaos: Chaos | None,
) -> tuple[TrainingState, float, list[tuple[str, str]]]:
    observer, held_out = Observer(pool.members), load_digits().held_out
    with contextlib.ExitStack() as stack:
        exam: Callable[[float], float] | None = None
        tally: Tally | None = None
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
            if task.sync == "server" and exam is None and state.ready_count:
                reader = stack.enter_context(
                    task.connect(f"{task.parameter}-evaluator", _LAST_EXAM_TIMEOUT_S)
                )
                exam = _exam(reader, task, held_out)
                tally = Tally(reader, task.open_weights(reader)) if task.is_elastic else None
            if tally is not None:
                tally.look(state.step, last=finished)
            if exam is not None and finished:
                accuracy = exam(_LAST_EXAM_TIMEOUT_S)
            elif exam is not None and time.monotonic() >= exam_due_s:
                # Workers wait for a shard that is away; the next look names one that has ended.
                with contextlib.suppress(ShardUnavailableError, DeadlineError):
                    accuracy = exam(_EXAM_TIMEOUT_S)
                exam_due_s = time.monotonic() + _EXAM_INTERVAL_S
            elif task.sync != "server":
                accuracy = pool.members[0].measures.get("accuracy")
            members = () if chaos is None else chaos.taking_part
            _show(progress, config, state, accuracy, members, last=finished)
            if finished:
                assert accuracy is not None
                return state, accuracy, [] if tally is None else [*tally.rows()]
            time.sleep(_LOOK_INTERVAL_S)


def _exam(client: shardwell.Client, task: Task, held_out: Samples) -> Callable[[float], float]:
    """The client is a reader, which takes no worker's seat; a worker has called `init` before."""
    weights = np.empty(MODEL.size, np.float32)
    parts: list[tuple[shardwell.Parameter[Any], Any]]
    if task.outer is None:
        parts = [(task.open_weights(client), weights)]
    else:
        tensors = MODEL.tensors(weights)
        parts = []
        for index in range(task.outer.fragment_count):
            fragment = client.parameter(f"{task.parameter}.fragment-{index}")
            assert fragment.spec.layout is not None
            parts.append((fragment, {name: tensors[name] for name in fragment.spec.layout.by_name}))

    def accuracy(timeout_s: float) -> float:
        for parameter, part in parts:
            parameter.get_weights(out=part, timeout_s=timeout_s)
        return MODEL.accuracy(weights, held_out.images, held_out.labels)

    return accuracy


def _show(
    progress: Progress,
    config: DemoConfig,
    state: TrainingState,
    accuracy: float | None,
    members: Sequence[str],
    *,
    last: bool,
) -> None:
    if state.loss is None:
        if progress.is_live and state.ready_count:
            progress.say(
                f"starting workers, {state.ready_count} of {config.process_count} are ready"
            )
        return
    figures = [f"loss {state.loss:.4f}"]
    if accuracy is not None:
        figures.append(f"accuracy {accuracy:.3f}")
    if not last and config.sync != "threads":
        figures.append(f"{state.bytes_per_s / 1e6:5.1f} MB/s")
    if state.outer:
        figures.append(f"outer step {state.outer['outer_steps']:.0f}")
    if members:
        figures.append(f"members {' '.join(members)}")
    total = config.step_count
    step = f"step {state.step:>{len(str(total))}}/{total}"
    progress.show(step, state.step, total, figures, last=last)


def _closing_rows(
    config: DemoConfig, state: TrainingState, accuracy: float, fates: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    colour = "green" if accuracy >= ACCURACY_MIN else "red"
    yield (
        "held-out accuracy",
        f"[bold {colour}]{accuracy:.3f}[/], "
        f"{round(accuracy * HELD_OUT_COUNT)} of {HELD_OUT_COUNT} digits; "
        f"{ACCURACY_MIN} is needed",
    )
    first, last = (
        "unknown" if loss is None else f"{loss:.4f}" for loss in (state.first_loss, state.loss)
    )
    yield "loss", f"{first} at the first step, {last} at the last"
    if config.is_elastic:
        yield "steps", f"{config.step_count} in {state.training_s:.1f} s"
        known = [f"{number} {what}" for what, number in fates.items() if number]
        yield "workers", f"{config.worker_count} began; {', '.join(known)}"
    else:
        yield (
            "steps",
            f"{config.step_count} by every worker in {state.training_s:.1f} s, "
            f"{state.steps_per_s:.1f} a second",
        )
        if config.outer is not None:
            yield from _outer_rows(config, config.outer, state)
        elif config.sync != "threads":
            seconds = state.training_s or float("nan")
            yield "sent", traffic(state.sent_bytes, seconds)
            yield "received", traffic(state.received_bytes, seconds)
            yield "codec", f"{config.codec}, {state.codec_ratio:.2f} times less than float32"


def _outer_rows(
    config: DemoConfig, plan: OuterPlan, state: TrainingState
) -> Iterator[tuple[str, str]]:
    steps = config.worker_count * config.step_count
    synchronous_bytes = steps * CODECS["fp16"].encoded_bytes(MODEL.size)
    seen = {"outer_steps": 0.0, "waited_s": 0.0, "hidden_s": 0.0, **state.outer}
    yield (
        "outer steps",
        f"{seen['outer_steps']:.0f} of each of {count(plan.fragment_count, 'fragment')}, one in "
        f"{count(plan.sync_every, 'step')}",
    )
    yield (
        "fragments",
        f"travelled {seen['waited_s'] + seen['hidden_s']:.2f} s for each worker: "
        f"{seen['hidden_s']:.2f} s hidden behind its steps, {seen['waited_s']:.2f} s waited",
    )
    for way, byte_count in (("sent", state.sent_bytes), ("received", state.received_bytes)):
        yield way, f"{byte_count / 1e6:.1f} MB by all workers, first weights included (measured)"
    yield (
        "synchronous",
        f"{synchronous_bytes / 1e6:.1f} MB each way for as many digits as fp16 (computed), "
        f"{synchronous_bytes / max(state.sent_bytes, 1):.0f} times as much",
    )


def _described(config: DemoConfig) -> str:
    if config.sync == "threads":
        return f"{count(config.worker_count, 'thread')} of one process"
    workers = count(config.worker_count, "worker")
    if config.sync != "server":
        shape = {"ring": "in a ring", "tree": "in a tree", "centralized": "around rank 0"}
        return f"{workers} among themselves, {shape[config.sync]}, codec {config.codec}"
    where = count(config.shard_count, "shard") if config.target is None else config.target
    if config.outer is not None:
        return (
            f"{workers} on {where}, codec {config.codec}, an outer step every "
            f"{config.outer.sync_every} steps, in {count(config.outer.fragment_count, 'fragment')}"
        )
    if config.is_elastic:
        return (
            f"{workers} that come, leave and die, on {where}, codec {config.codec}, seed "
            f"{config.seed}"
        )
    return f"{workers} on {where}, codec {config.codec}, {config.mode}"
