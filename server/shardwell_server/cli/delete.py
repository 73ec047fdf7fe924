"""`shardwell delete`: parameters and tables that nobody needs any more, off all shards."""

from __future__ import annotations

import click

from shardwell.errors import ShardwellError
from shardwell.rpc.name_change import KINDS
from shardwell_server.cli.duration import Duration
from shardwell_server.cli.options import connected, shards_option
from shardwell_server.cluster_status import size


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--force", is_flag=True, help="Although workers are connected that use it.")
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    help="Where a parameter and a table have the same name, as older versions allowed.",
)
@shards_option
@click.option(
    "--timeout-s", type=Duration(), default=60.0, show_default=True, help="For each name."
)
def delete(
    *, names: tuple[str, ...], force: bool, kind: str | None, target: str, timeout_s: float
) -> None:
    """Delete parameters and tables, with their files; there is no way back but a checkpoint.

    What workers are connected to is refused without --force; with it they get an error that says
    so. A deletion that was cut off, by a shard that was away, say, is finished by the same command.

    Exit code 1 if one of them could not be deleted; the others are.
    """
    has_failed = False
    with connected("delete", target, timeout_s) as (client, _):
        for name in dict.fromkeys(names):
            try:
                freed_bytes = client.delete(name, kind=kind, force=force, timeout_s=timeout_s)
            except ShardwellError as error:
                has_failed = True
                click.secho(f"shardwell: {error.message}", fg="red", err=True)
            else:
                click.echo(f"deleted {name}: {size(freed_bytes)} are free")
    if has_failed:
        raise click.exceptions.Exit(1)
