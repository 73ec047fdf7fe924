"""Tells a user whose workers have more threads together than their machine has cores.

PyTorch starts a thread a core in each process. Two such workers wait for one another's threads at
every layer: a forward pass of 0.3 ms then takes 15 ms.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterable
from typing import Any

import torch

from shardwell.client import Client
from shardwell.errors import ShardwellError
from shardwell.parameter.parameter import Parameter
from shardwell.threads.spread import core_count

_LOG = logging.getLogger("shardwell")
_STEP_COUNT = 3
"""Steps after each of which the shards are asked: they name the workers that have yet to send
their next gradient, and nearly all have while the last weights are fresh."""
_TIMEOUT_S = 2.0


def watch_threads(
    optimizer: torch.optim.Optimizer, client: Client, parameter: Parameter[Any]
) -> None:
    """Counts this machine's workers after an optimizer's first steps, and logs if it is crowded."""
    if torch.get_num_threads() < 2 or parameter.spec.worker_count == 1:
        return
    left = _STEP_COUNT

    def look(*_: Any) -> None:  # which stays: torch walks its hooks, and fails if one leaves then
        nonlocal left
        if left:
            left = 0 if _has_logged(client, parameter.name) else left - 1

    optimizer.register_step_post_hook(look)


def crowding(worker_count: int, thread_count: int, cores: int) -> str:
    """The warning about a machine's workers, each with so many threads; "": they fit."""
    if worker_count < 2 or thread_count < 2 or worker_count * thread_count <= cores:
        return ""
    share = max(cores // worker_count, 1)
    return (
        f"{worker_count} workers of this machine have {thread_count} threads each for its "
        f"{cores} cores, and wait for one another's: a step may take many times as long; set "
        f"OMP_NUM_THREADS={share} for each of them (shardwell run does), or call "
        f"torch.set_num_threads({share})"
    )


def _has_logged(client: Client, parameter: str) -> bool:
    words = crowding(_workers_here(client, parameter), torch.get_num_threads(), core_count())
    if words:
        _LOG.warning("%s", words)
    return bool(words)


def _workers_here(client: Client, parameter: str) -> int:
    names = {client.worker_id}
    with contextlib.suppress(ShardwellError):  # a token without the right to ask, a busy shard
        host = socket.gethostname()
        for shard in client.status(timeout_s=_TIMEOUT_S):
            for found in shard.parameters:
                if found.spec.name == parameter:
                    names.update(_on(host, found.wait.workers))
    return len(names)


def _on(host: str, workers: Iterable[Any]) -> set[str]:
    return {worker.worker_id for worker in workers if worker.host == host and worker.connected}
