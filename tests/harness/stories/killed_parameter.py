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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from harness.stories.crash import SameMachine
from harness.stories.parameter import CONFIG, short_blocks, story
from shardwell_server.shard.shard import Shard
from shardwell_server.store.mmap.store import MmapStore

Tell: TypeAlias = Callable[[Path, int, Callable[[str], None]], None]
"""Tells a story in a directory; takes a file for what is answered, and a hook for writes."""


def tell_training(path: Path, answered: int, reached: Callable[[str], None]) -> None:
    """Tells the story of harness/stories/parameter.py."""
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


def main(arguments: Sequence[str], tell: Tell = tell_training) -> int:
    """Prints the number of the telling that came to its end."""
    directory, number, pace = Path(arguments[0]), int(arguments[1]), int(arguments[2])
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
            print(number)
            return status
        number += pace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
