"""What the demo and the commands that train its digits have in common: options, and their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, get_args

import click

from shardwell.specs.parameter import CodecName, ModeName
from shardwell_server.cli.options import Decorator
from shardwell_server.demo.digits.worker import ACCURACY_MIN, STEP_COUNT, SyncName
from shardwell_server.signals import StoppedError


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
codec_option: Decorator = click.option(
    "--codec",
    type=click.Choice(get_args(CodecName)),
    default="fp16",
    show_default=True,
    envvar="SHARDWELL_CODEC",
    help="How gradients and weights travel.",
)


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
