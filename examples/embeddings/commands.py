"""The commands: `python -m embeddings run`, and `worker`, which that starts."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn, get_args

import click

from embeddings.display import Display
from embeddings.knowledge_graph import find_data, read_graph
from embeddings.run import RATIO_MIN, EmbeddingsConfig, Result, run_embeddings
from embeddings.worker import BATCH_COUNT, DATA_SET, WORKER_COMMAND, Task, run_worker
from shardwell.errors import ShardwellError
from shardwell.specs.parameter import CodecName
from shardwell_server.cli.digits import codec_option, exit_stopped, steps_option
from shardwell_server.cli.options import running_shards_option, shard_count_option, usage_errors
from shardwell_server.cli.quantities import Duration
from shardwell_server.demo.progress import Progress
from shardwell_server.demo.reports import error_line
from shardwell_server.processes import signals
from shardwell_server.processes.own import stop_when_parent_ends
from shardwell_server.processes.signals import StoppedError

_REPORT_INTERVAL_S = 0.1
_MEASURE_INTERVAL_S = 0.5
"""Of a worker that measures too, which takes the time of some steps."""


@click.group()
def commands() -> None:
    """Embeddings of a knowledge graph, on a cluster and in one process."""


@commands.command()
@shard_count_option("Shards to start, each a process.")
@click.option(
    "--workers",
    "worker_count",
    type=int,
    default=4,
    show_default=True,
    envvar="SHARDWELL_WORKER_COUNT",
    help="Workers to start, each a process.",
)
@steps_option(None, f"Steps of each worker. Default: {BATCH_COUNT} divided by the workers.")
@codec_option
@running_shards_option
def run(**fields: Any) -> None:
    """Train on a real cluster, and watch.

    Trains embeddings of PyKEEN's knowledge graph UMLS, first in one process, then by asynchronous
    workers with their rows on the shards, and compares how well both guess facts that were held
    out. Exit code 0 if the cluster's filtered mean reciprocal rank is at least 0.98 times that of
    one process, else 1; 130 after Ctrl-C. No process is left behind.
    """
    with usage_errors():
        config = EmbeddingsConfig(**fields)
    find_data(DATA_SET)  # where there is none, no bar is begun
    progress = Progress()
    display = Display(config, progress)
    try:
        with progress:
            result = run_embeddings(config, display)
        display.conclude(result)
    except StoppedError as stopped:
        exit_stopped(stopped, "shards and workers have ended")
    _exit_by_ratio(result)


@commands.command(WORKER_COMMAND, hidden=True)
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
def worker(*, exit_with_parent: bool, **fields: Any) -> None:
    """Be one worker of the embeddings; reports go to standard output."""
    signals.break_off()
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


def _exit_by_ratio(result: Result) -> NoReturn:
    told = f"the cluster's filtered MRR is {result.ratio:.4f} times that of one process"
    if result.passed:
        click.secho(f"Passed: {told}, at least {RATIO_MIN}.", fg="green")
        raise click.exceptions.Exit(0)
    click.secho(f"Failed: {told}, below {RATIO_MIN}.", fg="red", err=True)
    raise click.exceptions.Exit(1)


def main() -> NoReturn:
    """Runs a command; errors that a user can act on are one line and exit code 1."""
    signals.hold()
    try:
        code = commands.main(standalone_mode=False) or 0
    except StoppedError as stopped:
        click.echo(f"Stopped by {stopped.cause}.", err=True)
        code = stopped.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except ShardwellError as error:
        click.secho(f"embeddings: {error.message}", fg="red", err=True)
        code = 1
    sys.exit(code)
