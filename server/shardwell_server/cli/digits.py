"""Commands that train the digits classifier: the demo, its workers, and those of docker compose."""

from __future__ import annotations

import os
import re
from typing import Any, NoReturn, get_args

import click

from shardwell.errors import ArgumentError, ShardwellError
from shardwell.outer.outer import DEFAULT_CODEC
from shardwell.specs.parameter import CodecName, ModeName
from shardwell_server.cli.options import (
    Decorator,
    option,
    running_shards_option,
    setting,
    shard_count_option,
    shards_option,
    usage_errors,
)
from shardwell_server.cli.quantities import Duration
from shardwell_server.demo.digits.chaos import CHAOS_STEP_COUNT
from shardwell_server.demo.digits.samples import load_digits
from shardwell_server.demo.digits.worker import (
    ACCURACY_MIN,
    MODEL,
    OUTER_STEP_COUNT,
    STEP_COUNT,
    WORKER_COMMAND,
    OuterPlan,
    SyncName,
    Task,
    Training,
)
from shardwell_server.demo.reports import Report, error_line
from shardwell_server.processes import signals
from shardwell_server.processes.own import stop_when_parent_ends
from shardwell_server.processes.signals import StoppedError

_REPORT_INTERVAL_S = 0.1
_LINE_INTERVAL_S = 2.0


def steps_option(default: int | None, what: str) -> Decorator:
    """Makes an option --steps, as `step_count`."""
    return setting("--steps", what, click.IntRange(min=1), default=default, name="step_count")


def codec_option_of(default: CodecName | None, shown: str) -> Decorator:
    """Makes an option --codec, with a default and its text."""
    kind = click.Choice(get_args(CodecName))
    return setting(
        "--codec", "How gradients and weights travel.", kind, default=default, show_default=shown
    )


codec_option: Decorator = codec_option_of("fp16", "fp16")
_mode_option = setting(
    "--mode",
    "sync: a step is the mean of all workers' gradients; async: each as it arrives.",
    click.Choice(get_args(ModeName)),
    default="sync",
)
_sync_option = setting(
    "--sync",
    "Who averages: the shards; the workers among themselves, in a ring, a tree or around one "
    "of them; or threads of one process.",
    click.Choice(get_args(SyncName)),
    default="server",
)


def _outer_option(flag: str, name: str, least: int, what: str) -> Decorator:
    shown = str(getattr(OuterPlan(), name))
    kind = click.IntRange(min=least)
    return option(flag, f"With --outer: {what}", kind, name=name, show_default=shown)


def _exit_by_accuracy(accuracy: float) -> NoReturn:
    if accuracy >= ACCURACY_MIN:
        click.secho(
            f"Passed: held-out accuracy {accuracy:.3f} is at least {ACCURACY_MIN}.", fg="green"
        )
        raise click.exceptions.Exit(0)
    click.secho(
        f"Failed: held-out accuracy {accuracy:.3f} is below {ACCURACY_MIN}.", fg="red", err=True
    )
    raise click.exceptions.Exit(1)


def exit_stopped(stopped: StoppedError, rest: str) -> NoReturn:
    """Ends a command that a signal has stopped; `rest` says what there is to know now."""
    click.echo(f"Stopped by {stopped.cause}; {rest}.", err=True)
    raise click.exceptions.Exit(stopped.exit_code) from None


@click.command()
@shard_count_option("Shards to start, each a process.")
@setting(
    "--workers",
    "Workers to start, each a process.",
    int,
    default=4,
    name="worker_count",
    envvar="SHARDWELL_WORKER_COUNT",
)
@steps_option(
    None,
    f"Steps that each worker makes; default: {STEP_COUNT}, {CHAOS_STEP_COUNT} with --chaos, and "
    f"{OUTER_STEP_COUNT} with --outer.",
)
@_mode_option
@_sync_option
@codec_option_of(None, f"fp16; with --outer: {DEFAULT_CODEC}")
@option(
    "--outer",
    "Outer training (DiLoCo): workers make steps of their own, and send once in many.",
    name="is_outer",
    is_flag=True,
)
@_outer_option("--outer-steps", "sync_every", 1, "steps of each worker for one outer step.")
@_outer_option("--fragments", "fragment_count", 1, "parts in which the model is sent, in turn.")
@_outer_option("--overlap", "overlap", 0, "steps that a fragment may travel in.")
@option(
    "--chaos",
    "Workers come, leave in order (SIGTERM) and die (kill -9) while the training goes on.",
    name="is_elastic",
    is_flag=True,
)
@option("--seed", "With --chaos: of who comes and goes, and when.", int, default=0)
@running_shards_option
def demo(
    *,
    step_count: int | None,
    codec: CodecName | None,
    is_elastic: bool,
    is_outer: bool,
    **fields: Any,
) -> None:
    """Train on a real cluster, and watch.

    Starts shards and workers on this machine, trains a classifier on scikit-learn's handwritten
    digits, and measures the accuracy on digits that were held out. Exit code 0 if it is at least
    0.95, else 1; 130 after Ctrl-C. No process is left behind.
    """
    # Workers, who share this module, need none of these.
    from shardwell_server.demo.digits.run import DemoConfig, run_demo

    signals.hold()
    of_plan = {name: fields.pop(name) for name in ("sync_every", "fragment_count", "overlap")}
    given = {name: value for name, value in of_plan.items() if value is not None}
    with usage_errors():
        plan = OuterPlan(**given)
        if given and not is_outer:
            raise ArgumentError("--outer-steps, --fragments and --overlap are for --outer; give it")
        if step_count is None:
            step_count = CHAOS_STEP_COUNT if is_elastic else STEP_COUNT
            step_count = OUTER_STEP_COUNT if is_outer else step_count
        config = DemoConfig(
            step_count=step_count,
            is_elastic=is_elastic,
            codec=codec or (DEFAULT_CODEC if is_outer else "fp16"),
            outer=plan if is_outer else None,
            **fields,
        )
    try:
        accuracy = run_demo(config)
    except StoppedError as stopped:
        exit_stopped(stopped, "shards and workers have ended")
    _exit_by_accuracy(accuracy)


@click.command()
@shards_option
@setting("--worker-id", "Unique in the cluster, and the same after a restart.", required=True)
@setting(
    "--worker-index",
    "Which share of the digits, from 0. Default: the number at the end of the worker id, modulo "
    "the worker count.",
    int,
)
@setting("--worker-count", "Workers that train together.", click.IntRange(min=1), default=1)
@option(
    "--elastic",
    "Workers come and go, and --worker-count says nothing; SIGTERM ends this one after its step.",
    name="is_elastic",
    is_flag=True,
)
@codec_option
@_sync_option
@_mode_option
@steps_option(STEP_COUNT, "Steps that each worker makes.")
@setting("--parameter", "Name of the model's weights in the cluster.", default="digits")
@setting(
    "--timeout-s",
    "Bound of each call, waiting for other workers included.",
    Duration(),
    default=60.0,
)
@setting("--connect-timeout-s", "How long shards are waited for.", Duration(), default=60.0)
def train_digits(*, worker_index: int | None, **fields: Any) -> None:
    """Be one worker that trains the digits classifier on a cluster.

    Start as many as --worker-count says, each with an id of its own. A worker that is started
    again goes on where it was. Each ends by measuring the held-out accuracy: exit code 0 if it is
    at least 0.95, else 1.
    """
    with usage_errors():
        if worker_index is None:
            worker_index = index_of(fields["worker_id"], fields["worker_count"])
        task = Task(worker_index=worker_index, **fields)

    def say(report: Report) -> None:
        if report.loss is None:
            click.echo(
                f"worker {task.worker_id} ({task.worker_index} of {task.worker_count}) is "
                f"connected to {task.target}; step {report.step} of {task.step_count}"
            )
        else:
            click.echo(f"step {report.step}/{task.step_count}  loss {report.loss:.4f}")

    try:
        digits = load_digits()
        training = Training(
            task=task, digits=digits, report=say, report_interval_s=_LINE_INTERVAL_S
        )
        weights = training.run()
    except StoppedError as stopped:
        exit_stopped(stopped, "start it again to go on")
    _exit_by_accuracy(MODEL.accuracy(weights, digits.held_out.images, digits.held_out.labels))


@click.command(WORKER_COMMAND, hidden=True)
@click.argument("task")
@click.option("--exit-with-parent", is_flag=True)
def demo_worker(*, task: str, exit_with_parent: bool) -> None:
    """Be one worker of the demo; reports go to standard output."""
    if exit_with_parent:
        stop_when_parent_ends(lambda: os._exit(1))
    try:
        Training(
            task=Task.parsed(task),
            digits=load_digits(),
            report=lambda report: click.echo(report.to_line()),
            report_interval_s=_REPORT_INTERVAL_S,
        ).run()
    except ShardwellError as error:
        click.echo(error_line(error.message))
        raise click.exceptions.Exit(1) from None


def index_of(worker_id: str, worker_count: int) -> int:
    """Returns a worker's index from its id: "w3" is 3, modulo the count, so ids may begin at 1."""
    number = re.search(r"\d+$", worker_id)
    if number is None:
        raise ArgumentError(
            f"worker id {worker_id!r} does not end in a number; give --worker-index, from 0 to "
            f"{worker_count - 1}"
        )
    return int(number[0]) % worker_count
