"""The command `shardwell`. Flags stand over $SHARDWELL_* variables, which stand over defaults."""

from __future__ import annotations

import sys

import click

import shardwell
from shardwell.errors import ShardwellError
from shardwell_server.cli.cluster import cluster
from shardwell_server.cli.serve import serve
from shardwell_server.cli.status import status


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(shardwell.__version__, prog_name="shardwell")
def commands() -> None:
    """A sharded parameter server for training on commodity machines."""


commands.add_command(serve)
commands.add_command(cluster)
commands.add_command(status)


def main() -> None:
    """Entry point; errors that a user can act on are one line and exit code 1."""
    try:
        commands()
    except ShardwellError as error:
        click.secho(f"shardwell: {error.message}", fg="red", err=True)
        sys.exit(1)
