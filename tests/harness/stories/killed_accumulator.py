"""A program that tells an accumulator's story once for each of its writes, killed right after it.

Usage: killed_accumulator.py DIRECTORY FIRST PACE

Of telling n = FIRST, FIRST + PACE, ... it leaves DIRECTORY/n/store, and DIRECTORY/n/answered with
a byte for each call that was answered.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from harness.stories.accumulator import STORY, Telling
from harness.stories.killed_parameter import main


def tell_accumulator(path: Path, answered: int, reached: Callable[[str], None]) -> None:
    """Tells it in this process, which ends at one of the writes."""
    telling = Telling(path / "store", reached)
    for call in STORY:
        telling.make(call)
        os.write(answered, b".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], tell_accumulator))
