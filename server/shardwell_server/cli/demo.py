"""`shardwell demo`."""

from __future__ import annotations

from typing import Any

import click

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
from shardwell_server.demo.digits.config import DemoConfig
from shardwell_server.demo.digits.display import Display
from shardwell_server.demo.digits.run import run_demo
from shardwell_server.demo.digits.worker import STEP_COUNT
from shardwell_server.demo.progress import Progress
from shardwell_server.signals import StoppedError


@click.command()
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
@steps_option(STEP_COUNT, "Steps that each worker makes.")
@mode_option("sync", "")
@sync_option
@codec_option
@running_shards_option
def demo(**fields: Any) -> None:
    """Train on a real cluster, and watch.

    Starts shards and workers on this machine, trains a classifier on scikit-learn's handwritten
    digits, and measures the accuracy on digits that were held out. Exit code 0 if it is at least
    0.95, else 1; 130 after Ctrl-C. No process is left behind.
    """
    signals.hold()
    with usage_errors():
        config = DemoConfig(**fields)
    progress = Progress()
    display = Display(config, progress)
    try:
        with progress:
            result = run_demo(config, display)
        display.conclude(result)
    except StoppedError as stopped:
        exit_stopped(stopped, "shards and workers have ended")
    exit_by_accuracy(result.accuracy)
