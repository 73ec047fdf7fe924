"""`shardwell demo`."""

from __future__ import annotations

from typing import Any

import click

from shardwell_server.cli.digits_options import exit_by_accuracy, exit_stopped, training_options
from shardwell_server.demo.digits.run import DemoConfig, run_demo
from shardwell_server.demo.digits.screen import Screen
from shardwell_server.demo.progress import Progress
from shardwell_server.demo.stop import StoppedError, StopRequest


@click.command()
@click.option(
    "--shards",
    "shard_count",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    envvar="SHARDWELL_SHARD_COUNT",
    help="Shards to start, each a process.",
)
@click.option(
    "--workers",
    "worker_count",
    type=int,
    default=4,
    show_default=True,
    envvar="SHARDWELL_WORKER_COUNT",
    help="Workers to start, each a process.",
)
@training_options
@click.option(
    "--target",
    metavar="HOST:PORT,...",
    help="Train on a cluster that runs already instead of starting one.",
)
def demo(**fields: Any) -> None:
    """Train a digits classifier on a real cluster, and watch.

    Starts shards and workers on this machine, trains on scikit-learn's handwritten digits, and
    measures the accuracy on digits that were held out. Exit code 0 if it is at least 0.95, else 1;
    130 after Ctrl-C. No process is left behind.
    """
    stop = StopRequest()
    config = DemoConfig(**fields)
    progress = Progress()
    screen = Screen(config, progress)
    try:
        with progress:
            result = run_demo(config, screen, stop)
        screen.conclude(result)
    except StoppedError:
        exit_stopped(stop, "shards and workers have ended")
    exit_by_accuracy(result.accuracy)
