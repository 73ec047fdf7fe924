"""What the commands that train the digits classifier have in common: options, and how they end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, NoReturn, get_args

import click

from shardwell.specs import CodecName, ModeName
from shardwell_server.demo.digits.worker import ACCURACY_MIN, STEP_COUNT, SyncName
from shardwell_server.demo.stop import StopRequest


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What the demo and its workers have in common."""
    for option in (
        click.option(
            "--steps",
            "step_count",
            type=click.IntRange(min=1),
            default=STEP_COUNT,
            show_default=True,
            envvar="SHARDWELL_STEPS",
            help="Steps that each worker makes.",
        ),
        click.option(
            "--mode",
            type=click.Choice(get_args(ModeName)),
            default="sync",
            show_default=True,
            envvar="SHARDWELL_MODE",
            help="sync: a step is the mean of all workers' gradients; async: each as it arrives.",
        ),
        click.option(
            "--sync",
            type=click.Choice(get_args(SyncName)),
            default="server",
            show_default=True,
            envvar="SHARDWELL_SYNC",
            help="Who averages: the shards; the workers among themselves, in a ring, a tree or "
            "around one of them; or threads of one process.",
        ),
        click.option(
            "--codec",
            type=click.Choice(get_args(CodecName)),
            default="fp16",
            show_default=True,
            envvar="SHARDWELL_CODEC",
            help="How gradients and weights travel.",
        ),
    ):
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


def exit_stopped(stop: StopRequest, rest: str) -> NoReturn:
    """Ends a command that a signal has stopped; `rest` says what there is to know now."""
    cause = "Ctrl-C" if stop.signal_number == signal.SIGINT else "SIGTERM"
    click.echo(f"Stopped by {cause}; {rest}.", err=True)
    raise click.exceptions.Exit(stop.exit_code)
