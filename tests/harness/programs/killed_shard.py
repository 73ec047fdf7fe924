"""A shard that kills itself right after one of its writes to files."""

from __future__ import annotations

import os
import signal
from functools import partial

from shardwell_server import server
from shardwell_server.store.mmap.store import MmapStore


def serve(kill_at: int, *flags: str) -> None:
    """The command `shardwell serve`, killed after the write of that number, from 1; 0: never."""
    from shardwell_server.cli.serve import serve

    count = 0

    def reached(point: str) -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    server.MmapStore = partial(MmapStore, reached=reached)  # type: ignore[misc, assignment]
    serve.main(list(flags))
