"""A program that tells the story of a table once for each of its writes, killed right after it.

Usage: killed_table_story.py DIRECTORY FIRST PACE

Of telling n = FIRST, FIRST + PACE, ... it leaves DIRECTORY/n/store, and DIRECTORY/n/answered with
a byte for each step that was answered.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from harness.stories.crash import SameMachine
from harness.stories.killed_parameter import main
from harness.stories.table import make, tell
from shardwell_server.store.mmap.store import MmapStore


def tell_table(path: Path, answered: int, reached: Callable[[str], None]) -> None:
    """Tells it in this process, which ends at one of the writes."""
    store = MmapStore(path / "store", boot=SameMachine(path), reached=reached)
    tell(make(store), reached, lambda: os.write(answered, b".") and None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], tell_table))
