"""Commands on a parameter or table by its name: `shardwell delete`, `table`."""

from __future__ import annotations

from pathlib import Path

import click

from shardwell.checkpoint.export import check_format
from shardwell.errors import ShardwellError
from shardwell.rpc.deletion import KINDS
from shardwell_server.cli import SuggestingGroup
from shardwell_server.cli.options import (
    GivenPath,
    connected,
    option,
    shards_option,
    timeout_option,
    usage_errors,
)
from shardwell_server.operations.cluster_status import size


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@option("--force", "Although workers are connected that use it.", is_flag=True)
@option(
    "--kind",
    "Where two have the same name, as older versions allowed.",
    click.Choice([*KINDS, "family"]),
)
@shards_option
@timeout_option(60.0, "For each name.")
def delete(
    *, names: tuple[str, ...], force: bool, kind: str | None, target: str, timeout_s: float
) -> None:
    """Delete parameters, tables and families, with their files; no way back but a checkpoint.

    The name of a family is that of all its fragments.

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
                few = f"{freed_bytes:,} bytes" if freed_bytes < 100_000 else size(freed_bytes)
                click.echo(f"deleted {name}: {few} are free")
    if has_failed:
        raise click.exceptions.Exit(1)


@click.group(cls=SuggestingGroup)
def table() -> None:
    """Export tables."""


@table.command()
@click.argument("name")
@click.argument("path", type=GivenPath())
@shards_option
@timeout_option(600.0)
def export(*, name: str, path: Path, target: str, timeout_s: float) -> None:
    """Write ids and rows of table NAME, sorted by id, to PATH.

    PATH ends in .safetensors or .parquet (which needs pyarrow), must not exist, and appears when it
    is complete. Training may go on meanwhile; all rows are of one version.
    """
    with usage_errors():
        check_format(path)
    with connected("export", target, timeout_s) as (client, rest_s):
        made = client.export_table(name, path, timeout_s=rest_s)
    click.echo(f"exported {made.row_count} rows of {name} at version {made.version} to {made.path}")
