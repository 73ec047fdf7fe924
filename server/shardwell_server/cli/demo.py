"""`shardwell demo`."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, get_args

import click

from shardwell.specs.parameter import ModeName
from shardwell_server import signals
from shardwell_server.cli.digits_options import (
    codec_option,
    exit_by_accuracy,
    exit_stopped,
    mode_option,
    steps_option,
    sync_option,
)
from shardwell_server.cli.options import running_shards_option, shard_count_option, usage_errors
from shardwell_server.demo.digits.display import Screen as DigitsScreen
from shardwell_server.demo.digits.run import DemoConfig, run_demo
from shardwell_server.demo.digits.worker import STEP_COUNT, SyncName
from shardwell_server.demo.embeddings.display import Screen as EmbeddingsScreen
from shardwell_server.demo.embeddings.knowledge_graph import find_data
from shardwell_server.demo.embeddings.run import (
    RATIO_MIN,
    EmbeddingsConfig,
    Result,
    run_embeddings,
)
from shardwell_server.demo.embeddings.worker import BATCH_COUNT, DATA_SET
from shardwell_server.demo.progress import Progress
from shardwell_server.signals import StoppedError

TaskName = Literal["digits", "embeddings"]


@click.command()
@click.option(
    "--task",
    type=click.Choice(get_args(TaskName)),
    default="digits",
    show_default=True,
    help="digits: a classifier, one dense parameter. embeddings: a knowledge graph, two tables.",
)
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
@steps_option(
    None,
    f"Steps that each worker makes. Default: {STEP_COUNT} for digits; for embeddings, "
    f"{BATCH_COUNT} divided by the workers.",
)
@mode_option(None, "Default: sync for digits; embeddings are async.")
@sync_option
@codec_option
@running_shards_option
def demo(
    *,
    task: TaskName,
    step_count: int | None,
    mode: ModeName | None,
    sync: SyncName,
    **fields: Any,
) -> None:
    """Train on a real cluster, and watch.

    digits: Starts shards and workers on this machine, trains a classifier on scikit-learn's
    handwritten digits, and measures the accuracy on digits that were held out. Exit code 0 if it is
    at least 0.95, else 1.

    embeddings: Trains embeddings of PyKEEN's knowledge graph UMLS, first in one process, then by
    asynchronous workers with their rows on the shards, and compares how well both guess facts that
    were held out. Exit code 0 if the cluster's filtered mean reciprocal rank is at least 0.98 times
    that of one process, else 1.

    130 after Ctrl-C. No process is left behind.
    """
    signals.hold()
    if task == "embeddings":
        if mode == "sync" or sync != "server":
            raise click.UsageError(
                "embeddings are trained asynchronously on shards; leave out --mode and --sync"
            )
        with usage_errors():
            embeddings = EmbeddingsConfig(step_count=step_count, **fields)
        _demo_embeddings(embeddings)
    else:
        with usage_errors():
            digits = DemoConfig(
                step_count=step_count or STEP_COUNT, mode=mode or "sync", sync=sync, **fields
            )
        _demo_digits(digits)


def _demo_digits(config: DemoConfig) -> NoReturn:
    progress = Progress()
    screen = DigitsScreen(config, progress)
    try:
        with progress:
            result = run_demo(config, screen)
        screen.conclude(result)
    except StoppedError as stopped:
        exit_stopped(stopped, "shards and workers have ended")
    exit_by_accuracy(result.accuracy)


def _demo_embeddings(config: EmbeddingsConfig) -> NoReturn:
    find_data(DATA_SET)  # where there is none, no bar is begun
    progress = Progress()
    screen = EmbeddingsScreen(config, progress)
    try:
        with progress:
            result = run_embeddings(config, screen)
        screen.conclude(result)
    except StoppedError as stopped:
        exit_stopped(stopped, "shards and workers have ended")
    _exit_by_ratio(result)


def _exit_by_ratio(result: Result) -> NoReturn:
    told = f"the cluster's filtered MRR is {result.ratio:.4f} times that of one process"
    if result.passed:
        click.secho(f"Passed: {told}, at least {RATIO_MIN}.", fg="green")
        raise click.exceptions.Exit(0)
    click.secho(f"Failed: {told}, below {RATIO_MIN}.", fg="red", err=True)
    raise click.exceptions.Exit(1)
