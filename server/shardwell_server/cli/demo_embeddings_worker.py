"""One worker of the demo's embeddings, which the demo starts."""

from __future__ import annotations

import os
from typing import Any, get_args

import click

from shardwell.errors import ShardwellError
from shardwell.specs.parameter import CodecName
from shardwell_server.cli.duration import Duration
from shardwell_server.cli.options import running_shards_option
from shardwell_server.demo.embeddings.knowledge_graph import find_data, read_graph
from shardwell_server.demo.embeddings.worker import DATA_SET, WORKER_COMMAND, Task, run_worker
from shardwell_server.demo.reports import error_line
from shardwell_server.processes import stop_when_parent_ends

_REPORT_INTERVAL_S = 0.1
_MEASURE_INTERVAL_S = 0.5
"""Of a worker that measures too, which takes the time of some steps."""


@click.command(WORKER_COMMAND, hidden=True)
@running_shards_option
@click.option("--worker-id", required=True)
@click.option("--worker-index", type=int, required=True)
@click.option("--worker-count", type=int, required=True)
@click.option("--steps", "step_count", type=int, required=True)
@click.option("--tables", required=True)
@click.option("--codec", type=click.Choice(get_args(CodecName)), required=True)
@click.option("--timeout-s", type=Duration(), required=True)
@click.option("--connect-timeout-s", type=Duration(), required=True)
@click.option("--exit-with-parent", is_flag=True)
def demo_embeddings_worker(*, exit_with_parent: bool, **fields: Any) -> None:
    """Be one worker of the demo's embeddings; reports go to standard output."""
    if exit_with_parent:
        stop_when_parent_ends(lambda: os._exit(1))
    task = Task(**fields)
    try:
        run_worker(
            task,
            read_graph(find_data(DATA_SET)),
            lambda report: click.echo(report.to_line()),
            report_interval_s=_MEASURE_INTERVAL_S if task.target is None else _REPORT_INTERVAL_S,
        )
    except ShardwellError as error:
        click.echo(error_line(error.message))
        raise click.exceptions.Exit(1) from None
