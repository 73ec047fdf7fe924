"""A shard that kills itself right after one of its writes to files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shardwell_server import server
from shardwell_server.store.mmap.store import MmapStore
from shardwell_server.store.records import event_log


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


def serve_with_log(name: str, kill_at: int, *flags: str) -> None:
    """The same, killed after a write of its logs of that name, which are made short early."""
    from shardwell_server.cli.serve import serve

    count = 0
    begin = event_log.EventLog.__init__

    def reached(point: str) -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def begun(log: Any, path: Path, salt: int, told: Callable[[str], None], **more: Any) -> None:
        begin(log, path, salt, reached if path.name == name else told, **more)

    event_log._COMPACT_BYTES = 600
    event_log.EventLog.__init__ = begun  # type: ignore[method-assign]
    serve.main(list(flags))
