"""`shardwell cluster`: all shards on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from shardwell_server.cli.stopping import stop_requested
from shardwell_server.local_cluster import LocalCluster

_LOOK_INTERVAL_S = 0.2
_DEATH_COUNT_MAX = 1000
"""Deaths of one shard after which something else must be wrong."""


@click.command()
@click.option(
    "--shards",
    "shard_count",
    type=int,
    default=2,
    show_default=True,
    envvar="SHARDWELL_SHARD_COUNT",
    help="Number of shards, each a process on a free port.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="SHARDWELL_DATA_DIR",
    help="Each shard gets a directory shard-I in it, goes on from it, and is started again when it "
    "dies.",
)
@click.option(
    "--durability",
    default="process",
    show_default=True,
    envvar="SHARDWELL_DURABILITY",
    metavar="process|step|SECONDS",
    help="What acknowledged gradients survive: kill -9; a loss of power; that, but for SECONDS.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    envvar="SHARDWELL_LOG_LEVEL",
    help="The least that the shards log.",
)
def cluster(*, shard_count: int, data_dir: Path | None, durability: str, log_level: str) -> None:
    """Run a whole cluster on this machine until Ctrl-C.

    Prints the line that workers need in their environment.
    """
    stop = stop_requested()
    deaths = [0] * shard_count
    with LocalCluster(
        shard_count, data_dir, processes=True, durability=durability, log_level=log_level
    ) as running:
        click.echo(f"export SHARDWELL_SHARDS={running.target}")
        click.echo(
            f"# cluster {running.cluster_id}: {shard_count} shards are serving; Ctrl-C stops them",
            err=True,
        )
        while not stop.wait(_LOOK_INTERVAL_S):
            for index, child in enumerate(running.children):
                code = child.poll()
                if code is None:
                    continue
                deaths[index] += 1
                if data_dir is None or deaths[index] > _DEATH_COUNT_MAX:
                    raise click.ClickException(
                        f"shard {index} has ended with exit code {code}; the others are stopped"
                    )
                running.start_again(index)
                click.echo(
                    f"# shard {index} had ended with exit code {code}, and goes on from "
                    f"{data_dir / f'shard-{index}'}",
                    err=True,
                )
