"""Shards of the demo that end before it does: an error names the one that has ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from shardwell.connection.credentials import TOKEN_FILE_VARIABLE
from shardwell.connection.tls import VARIABLES
from shardwell.errors import ShardwellError
from shardwell_server.demo.reports import DemoError
from shardwell_server.local_cluster import LocalCluster
from shardwell_server.processes.child import describe_exit

GRACE_S = 0.5
"""The time that the demo's shards give open calls when they stop: workers have ended by then."""


@contextlib.contextmanager
def without_credentials() -> Iterator[None]:
    """Keeps credentials from a block's child processes: the environment's are another cluster's."""
    names = (*VARIABLES, TOKEN_FILE_VARIABLE)
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextlib.contextmanager
def ended_shards_named(cluster: LocalCluster | None) -> Iterator[None]:
    """Names a shard that has ended, rather than its consequences."""
    try:
        yield
    except ShardwellError:
        check_shards(cluster)
        raise


def check_shards(cluster: LocalCluster | None) -> None:
    """Raises DemoError if a shard of the demo's own cluster has ended; it is named."""
    for index, child in enumerate(cluster.children if cluster is not None else ()):
        code = child.poll()
        if code is not None:
            raise DemoError(
                f"shard {index} has ended with {describe_exit(code)}", shard_index=index
            )
