"""`shardwell table`: what can be done with a table from outside."""

from __future__ import annotations

from pathlib import Path

import click

from shardwell.checkpoint.export import check_format
from shardwell_server.cli.duration import Duration
from shardwell_server.cli.options import GivenPath, connected, shards_option, usage_errors


@click.group()
def table() -> None:
    """Export tables."""


@table.command()
@click.argument("name")
@click.argument("path", type=GivenPath())
@shards_option
@click.option(
    "--timeout-s", type=Duration(), default=600.0, show_default=True, help="For all of it."
)
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
