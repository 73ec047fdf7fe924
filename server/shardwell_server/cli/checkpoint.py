"""`shardwell checkpoint`: save parameters to a directory, restore them, see what there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import shardwell
from shardwell_server.cli.tables import console, table


@click.group()
def checkpoint() -> None:
    """Save parameters to a directory, restore them into a cluster, or look at them."""


def _cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What commands that need a cluster share."""
    for option in (
        click.option(
            "--timeout-s", type=float, default=600.0, show_default=True, help="For all of it."
        ),
        click.option(
            "--parameter",
            "parameters",
            multiple=True,
            metavar="NAME",
            help="Only this one; may be given several times. Default: all.",
        ),
        click.option(
            "--shards",
            "target",
            envvar="SHARDWELL_SHARDS",
            required=True,
            metavar="HOST:PORT[,...]",
            help="The cluster; default: $SHARDWELL_SHARDS.",
        ),
    ):
        command = option(command)
    return command


_DIRECTORY = click.argument("directory", type=click.Path(path_type=Path))


@checkpoint.command()
@_DIRECTORY
@_cluster_options
def save(*, directory: Path, target: str, parameters: tuple[str, ...], timeout_s: float) -> None:
    """Write parameters and optimizer state to DIRECTORY, each at one version.

    Training may go on meanwhile. DIRECTORY must not exist; it appears when it is complete.
    """
    with _connected(target) as client:
        made = client.save_checkpoint(directory, parameters or None, timeout_s=timeout_s)
    _print(made)


@checkpoint.command()
@_DIRECTORY
@_cluster_options
def restore(*, directory: Path, target: str, parameters: tuple[str, ...], timeout_s: float) -> None:
    """Create parameters as DIRECTORY has them, in a cluster with any number of shards.

    Before workers start: a parameter that has weights already is refused. The whole checkpoint is
    verified first.
    """
    with _connected(target) as client:
        made = client.restore_checkpoint(directory, parameters or None, timeout_s=timeout_s)
        shard_count = client.shard_count
    names = {entry.name for entry in made.select(parameters or None)}
    click.echo(
        f"restored {', '.join(sorted(names)) or 'nothing'} from {made.path} into {shard_count} "
        f"shards; workers go on at next_step"
    )


@checkpoint.command()
@_DIRECTORY
@click.option("--verify", is_flag=True, help="Read all files and compare their CRCs.")
def inspect(*, directory: Path, verify: bool) -> None:
    """Show what DIRECTORY holds; needs no cluster.

    Exit code 1 if it is incomplete or damaged.
    """
    _print(shardwell.inspect_checkpoint(directory, verify=verify))
    if verify:
        click.echo("verified: every file is as it was written")


def _connected(target: str) -> shardwell.Client:
    return shardwell.connect(target, worker_id=f"checkpoint-{os.getpid()}")


def _print(made: shardwell.Checkpoint) -> None:
    title = (
        f"{made.path}: cluster {made.cluster_id}, {made.shard_count} shards, "
        f"shardwell {made.software_version}, {made.size_bytes / 1e6:.1f} MB"
    )
    parameters = table(title, "parameter", ">size", ">version", "optimizer", "tensors", ">files")
    for entry in made.parameters:
        is_one = entry.version == entry.version_max
        rate = "" if entry.learning_rate is None else f" {entry.learning_rate:g}"
        parameters.add_row(
            entry.name,
            str(entry.size),
            str(entry.version) if is_one else f"{entry.version} to {entry.version_max}",
            f"{type(entry.spec.optimizer).__name__}{rate}",
            ", ".join(entry.tensor_names),
            str(len(entry.files)),
        )
    console().print(parameters)
