"""How commands that do one thing connect to a cluster: within the time that they are given."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import shardwell

_CONNECT_TIMEOUT_S = 30.0
"""Shards that are starting are waited for so long, if the command has more time than that."""
_REST_S_MIN = 0.05
"""What is begun at all is given so long."""


@contextlib.contextmanager
def connected(
    command: str, target: str, timeout_s: float
) -> Iterator[tuple[shardwell.Client, float]]:
    """A client, and what is left of `timeout_s` once it is connected.

    Args:
        command: What the worker is called, beside the process id.
        target: See `shardwell.connect`.
        timeout_s: For all of the command.

    Raises:
        ShardwellError: see `shardwell.connect`.
    """
    began_s = time.monotonic()
    with shardwell.connect(
        target,
        worker_id=f"{command}-{os.getpid()}",
        connect_timeout_s=min(timeout_s, _CONNECT_TIMEOUT_S),
    ) as client:
        yield client, max(timeout_s - (time.monotonic() - began_s), _REST_S_MIN)
