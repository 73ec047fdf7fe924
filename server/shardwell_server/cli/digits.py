"""Commands that train the digits classifier: the demo, its workers, and those of docker compose."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn, get_args

import click

from shardwell.errors import ArgumentError, ShardwellError
from shardwell.outer.outer import DEFAULT_CODEC
from shardwell.specs.parameter import CodecName, ModeName
from shardwell_server import signals
from shardwell_server.cli.options import (
    Decorator,
    running_shards_option,
    shard_count_option,
    shards_option,
    usage_errors,
)
from shardwell_server.cli.quantities import Duration
from shardwell_server.demo.digits.chaos import CHAOS_STEP_COUNT
from shardwell_server.demo.digits.group_worker import train_by_sync
from shardwell_server.demo.digits.outer_worker import OUTER_STEP_COUNT
from shardwell_server.demo.digits.samples import Samples, load_digits
from shardwell_server.demo.digits.worker import (
    ACCURACY_MIN,
    MODEL,
    STEP_COUNT,
    WORKER_COMMAND,
    OuterPlan,
    SyncName,
    Task,
)
from shardwell_server.demo.reports import Report, error_line
from shardwell_server.processes import stop_when_parent_ends
from shardwell_server.signals import StoppedError

_REPORT_INTERVAL_S = 0.1
_LINE_INTERVAL_S = 2.0


def steps_option(default: int | None, told: str) -> Decorator:
    """--steps, as `step_count`."""
    return click.option(
        "--steps",
        "step_count",
        type=click.IntRange(min=1),
        default=default,
        show_default=default is not None,
        envvar="SHARDWELL_STEPS",
        help=told,
    )


def mode_option(default: ModeName | None, told: str) -> Decorator:
    """--mode; `told` follows what the modes are."""
    what = "sync: a step is the mean of all workers' gradients; async: each as it arrives."
    return click.option(
        "--mode",
        type=click.Choice(get_args(ModeName)),
        default=default,
        show_default=default is not None,
        envvar="SHARDWELL_MODE",
        help=f"{what} {told}".rstrip(),
    )


sync_option: Decorator = click.option(
    "--sync",
    type=click.Choice(get_args(SyncName)),
    default="server",
    show_default=True,
    envvar="SHARDWELL_SYNC",
    help="Who averages: the shards; the workers among themselves, in a ring, a tree or around one "
    "of them; or threads of one process.",
)


def codec_option_of(default: CodecName | None, shown: str) -> Decorator:
    """--codec, with a default and how it is shown."""
    return click.option(
        "--codec",
        type=click.Choice(get_args(CodecName)),
        default=default,
        show_default=shown,
        envvar="SHARDWELL_CODEC",
        help="How gradients and weights travel.",
    )


codec_option: Decorator = codec_option_of("fp16", "fp16")


def outer_options(*, hidden: bool) -> Decorator:
    """--outer-steps, --fragments and --overlap, as `outer`: a plan, or None without any of them."""
    plan = OuterPlan()
    options = [
        click.option(
            flag,
            name,
            type=click.IntRange(min=low),
            show_default=str(getattr(plan, name)),
            hidden=hidden,
            help=f"With --outer: {told}",
        )
        for flag, name, low, told in (
            ("--overlap", "overlap", 0, "steps that a fragment may travel in."),
            ("--fragments", "fragment_count", 1, "parts in which the model is sent, in turn."),
            ("--outer-steps", "sync_every", 1, "steps of each worker for one outer step."),
        )
    ]

    def with_plan(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def planned(**fields: Any) -> None:
            names = ("sync_every", "fragment_count", "overlap")
            given = {name: fields.pop(name) for name in names}
            given = {name: value for name, value in given.items() if value is not None}
            with usage_errors():
                outer = OuterPlan(**given) if given else None
            command(outer=outer, **fields)

        made: Callable[..., Any] = planned
        for option in options:
            made = option(made)
        return made

    return with_plan


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """All of these, as workers of the digits classifier have them."""
    steps = steps_option(STEP_COUNT, "Steps that each worker makes.")
    for option in (steps, mode_option("sync", ""), sync_option, codec_option):
        command = option(command)
    return command


def exit_by_accuracy(accuracy: float) -> NoReturn:
    """Ends the command with what the accuracy says: exit code 0 if it is enough, else 1."""
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
@click.option(
    "--workers",
    "worker_count",
    type=int,
    default=4,
    show_default=True,
    envvar="SHARDWELL_WORKER_COUNT",
    help="Workers to start, each a process.",
)
@steps_option(
    None,
    f"Steps that each worker makes; default: {STEP_COUNT}, {CHAOS_STEP_COUNT} with --chaos, and "
    f"{OUTER_STEP_COUNT} with --outer.",
)
@mode_option("sync", "")
@sync_option
@codec_option_of(None, f"fp16; with --outer: {DEFAULT_CODEC}")
@click.option(
    "--outer",
    "is_outer",
    is_flag=True,
    help="Outer training (DiLoCo): workers make steps of their own, and send once in many.",
)
@outer_options(hidden=False)
@click.option(
    "--chaos",
    "has_chaos",
    is_flag=True,
    help="Workers come, leave in order (SIGTERM) and die (kill -9) while the training goes on.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="With --chaos: of who comes and goes, and when.",
)
@running_shards_option
def demo(
    step_count: int | None,
    codec: CodecName | None,
    has_chaos: bool,
    is_outer: bool,
    outer: OuterPlan | None,
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
    with usage_errors():
        if outer is not None and not is_outer:
            raise ArgumentError("--outer-steps, --fragments and --overlap are for --outer; give it")
        if step_count is None:
            step_count = CHAOS_STEP_COUNT if has_chaos else STEP_COUNT
            step_count = OUTER_STEP_COUNT if is_outer else step_count
        config = DemoConfig(
            step_count=step_count,
            has_chaos=has_chaos,
            codec=codec or (DEFAULT_CODEC if is_outer else "fp16"),
            outer=outer or OuterPlan() if is_outer else None,
            **fields,
        )
    try:
        result = run_demo(config)
    except StoppedError as stopped:
        exit_stopped(stopped, "shards and workers have ended")
    exit_by_accuracy(result.accuracy)


def _worker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of a worker, which the command gets as one Task."""

    @functools.wraps(command)
    def with_task(
        *, worker_id: str, worker_index: int | None, worker_count: int, **fields: Any
    ) -> None:
        try:
            if worker_index is None:
                worker_index = index_of(worker_id, worker_count)
        except ArgumentError as error:
            raise click.UsageError(error.message) from None
        command(
            exit_with_parent=fields.pop("exit_with_parent"),
            task=Task(
                worker_id=worker_id,
                worker_index=worker_index,
                worker_count=worker_count,
                **fields,
            ),
        )

    with_options: Callable[..., Any] = with_task
    for option in (
        click.option("--exit-with-parent", is_flag=True, hidden=True),
        click.option(
            "--connect-timeout-s",
            type=Duration(),
            default=60.0,
            show_default=True,
            envvar="SHARDWELL_CONNECT_TIMEOUT_S",
            help="How long shards are waited for.",
        ),
        click.option(
            "--timeout-s",
            type=Duration(),
            default=60.0,
            show_default=True,
            envvar="SHARDWELL_TIMEOUT_S",
            help="Bound of each call, waiting for other workers included.",
        ),
        click.option(
            "--parameter",
            default="digits",
            show_default=True,
            envvar="SHARDWELL_PARAMETER",
            help="Name of the model's weights in the cluster.",
        ),
        training_options,
        outer_options(hidden=True),
        click.option(
            "--elastic",
            "is_elastic",
            is_flag=True,
            help="Workers come and go, and --worker-count says nothing; SIGTERM ends this one "
            "after its step.",
        ),
        click.option(
            "--worker-count",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            envvar="SHARDWELL_WORKER_COUNT",
            help="Workers that train together.",
        ),
        click.option(
            "--worker-index",
            type=int,
            envvar="SHARDWELL_WORKER_INDEX",
            help="Which share of the digits, from 0. Default: the number at the end of the worker "
            "id, modulo the worker count.",
        ),
        click.option(
            "--worker-id",
            required=True,
            envvar="SHARDWELL_WORKER_ID",
            help="Unique in the cluster, and the same after a restart.",
        ),
        shards_option,
    ):
        with_options = option(with_options)
    return with_options


@click.command()
@_worker_options
def train_digits(*, task: Task, exit_with_parent: bool) -> None:
    """Be one worker that trains the digits classifier on a cluster.

    Start as many as --worker-count says, each with an id of its own. A worker that is started
    again goes on where it was. Each ends by measuring the held-out accuracy: exit code 0 if it is
    at least 0.95, else 1.
    """
    if exit_with_parent:
        stop_when_parent_ends(lambda: os._exit(1))

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
        weights = train_by_sync(task, digits, say, report_interval_s=_LINE_INTERVAL_S)
    except StoppedError as stopped:
        exit_stopped(stopped, "start it again to go on")
    exit_by_accuracy(_accuracy(weights, digits.held_out))


@click.command(WORKER_COMMAND, hidden=True)
@_worker_options
def demo_worker(*, task: Task, exit_with_parent: bool) -> None:
    """Be one worker of the demo; reports go to standard output."""
    if exit_with_parent:
        stop_when_parent_ends(lambda: os._exit(1))
    try:
        train_by_sync(
            task,
            load_digits(),
            lambda report: click.echo(report.to_line()),
            report_interval_s=_REPORT_INTERVAL_S,
        )
    except ShardwellError as error:
        click.echo(error_line(error.message))
        raise click.exceptions.Exit(1) from None


def index_of(worker_id: str, worker_count: int) -> int:
    """A worker's index from its id: "w3" is 3. Modulo the count, so ids may count from 1.

    Raises:
        ArgumentError: the id does not end in a number.
    """
    number = re.search(r"\d+$", worker_id)
    if number is None:
        raise ArgumentError(
            f"worker id {worker_id!r} does not end in a number; give --worker-index, from 0 to "
            f"{worker_count - 1}"
        )
    return int(number[0]) % worker_count


def _accuracy(weights: Any, held_out: Samples) -> float:
    return MODEL.accuracy(weights, held_out.images, held_out.labels)
