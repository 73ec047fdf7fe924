"""A program that tells the story again and again, and is killed after a later write each time.

Usage: killed_story.py DIRECTORY FIRST PACE

Tellings are cut off after write n = FIRST, FIRST + PACE, ... until one comes to its end. Each
leaves DIRECTORY/n/store, and DIRECTORY/n/answered with a byte for each call that was answered. A
process of its own, so that it can fork: nothing else runs in it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from harness.story import CONFIG, short_blocks, story
from harness.telling import SameMachine
from shardwell_server.shard.shard import Shard
from shardwell_server.store import MmapStore

Tell: TypeAlias = Callable[[Path, int, Callable[[str], None]], None]
"""Tells a story in a directory; takes a file for what is answered, and a hook for writes."""


def tell_training(path: Path, answered: int, reached: Callable[[str], None]) -> None:
    """Tells the story of harness/story.py."""
    with short_blocks():
        shard = Shard(CONFIG, MmapStore(path / "store", boot=SameMachine(path), reached=reached))
        for call in story():
            call.make(shard)
            os.write(answered, b".")


def tell_killed(tell: Tell, path: Path, killed_after: int) -> None:
    """Tells it in this process, which ends at the write of that number, 1 being the first."""
    write_count = 0

    def reached(point: str) -> None:
        nonlocal write_count
        write_count += 1
        if write_count == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    (path / "store").mkdir(parents=True)
    tell(path, os.open(path / "answered", os.O_WRONLY | os.O_CREAT), reached)


def main(directory: Path, tell: Tell = tell_training, *, first: int = 1, pace: int = 1) -> int:
    """Prints n - 1 of the telling that came to its end: at a pace of 1, how many were cut off."""
    number = first
    while True:
        child = os.fork()
        if child == 0:
            try:
                tell_killed(tell, directory / str(number), number)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            print(number - 1)
            return status
        number += pace


if __name__ == "__main__":
    first, pace = map(int, sys.argv[2:])
    sys.exit(main(Path(sys.argv[1]), first=first, pace=pace))
