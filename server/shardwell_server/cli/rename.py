"""`shardwell rename`: another name for a parameter or table, on all shards."""

from __future__ import annotations

import click

from shardwell.rpc.name_change import KINDS
from shardwell_server.cli.duration import Duration
from shardwell_server.cli.options import connected, shards_option


@click.command()
@click.argument("name", metavar="NAME")
@click.argument("new_name", metavar="NEW_NAME")
@click.option("--force", is_flag=True, help="Although workers are connected that use it.")
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    help="Where a parameter and a table have the same name, as older versions allowed.",
)
@shards_option
@click.option("--timeout-s", type=Duration(), default=60.0, show_default=True)
def rename(
    *, name: str, new_name: str, force: bool, kind: str | None, target: str, timeout_s: float
) -> None:
    """Give a parameter or table another name; workers that open that go on where they were.

    What workers are connected to is refused without --force; with it they get an error that has the
    new name. A renaming that was cut off, by a shard that was away, say, is finished by the same
    command.
    """
    with connected("rename", target, timeout_s) as (client, _):
        client.rename(name, new_name, kind=kind, force=force, timeout_s=timeout_s)
    click.echo(f"renamed {name} to {new_name}")
