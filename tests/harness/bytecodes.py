"""How much Python a call costs, in the worker and in shards of this process, in bytecodes.

Exact where times are not: what is done once for each of many things is seen, however fast it is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

REPEAT_COUNT = 5


class Bytecodes:
    """Counts those of Shardwell's code in all threads that start in the block, and in its own."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __enter__(self) -> Bytecodes:
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *reason: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def of(self, call: Callable[[], object]) -> int:
        """The fewest that the call took, of several times: waits differ from time to time."""
        found = []
        for _ in range(REPEAT_COUNT):
            before = sum(self._counts.values())
            call()
            found.append(sum(self._counts.values()) - before)
        return min(found)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "/shardwell" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            thread = threading.get_ident()
            self._counts[thread] = self._counts.get(thread, 0) + 1
        return self._count
