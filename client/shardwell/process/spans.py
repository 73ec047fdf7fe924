"""The latest spans of this process, in memory: see docs/adr/0021-trace.md."""

from __future__ import annotations

import os
import time
from collections import deque
from functools import cache

from shardwell.process.environment import host_name
from shardwell.process.span_columns import SPAN_COUNT_MAX, Span, to_message
from shardwell.v1 import trace_pb2 as pb

LONG_NS = 100_000
"""See `add_long`. A disk takes longer; to find that nothing is to be written does not."""
NO_STEP = -1
ALL_CHUNKS = -1
"""Of a span that is of no chunk in particular."""
_MESSAGE_BYTES_MAX = 900 * 1024
"""Most bytes of spans in a message; older ones are left out."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_TIME_NAMESPACE = "/proc/self/ns/time"

now_ns = time.monotonic_ns


class Spans:
    """The last spans of one client or shard. Any thread may use it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str, int, int, str, int, int]] = deque(maxlen=SPAN_COUNT_MAX)

    def add(self, kind: int, subject: str, step: int, chunk: int, peer: str, begin_ns: int) -> int:
        """Notes a span that ends now; returns when that is, as the next one may begin there."""
        end_ns = now_ns()
        self._kept.append((kind, subject, step, chunk, peer, begin_ns, end_ns))
        return end_ns

    def add_long(self, kind: int, subject: str, begin_ns: int) -> None:
        """Notes a span of no step or chunk, only if it took as long as is worth looking at."""
        if now_ns() - begin_ns >= LONG_NS:
            self.add(kind, subject, NO_STEP, ALL_CHUNKS, "", begin_ns)

    def all(self) -> list[Span]:
        """The kept spans, in order."""
        return [Span(*span) for span in self._kept.copy()]

    def since(self, begin_ns: int, subject: str) -> list[Span]:
        """The kept spans of a subject that began since then, in order."""
        found = []
        for span in reversed(self._kept.copy()):
            if span[6] < begin_ns:  # ends are in order, but for threads that race
                break
            if span[1] == subject and span[5] >= begin_ns:
                found.append(Span(*span))
        return found[::-1]

    def to_proto(self) -> pb.ProcessSpans:
        """All that is kept, or of very much the last, as a message."""
        kept = list(self._kept)
        while True:
            message = to_message(kept)
            message.host, message.pid, message.now_ns = host_name(), os.getpid(), now_ns()
            if message.ByteSize() <= _MESSAGE_BYTES_MAX:
                return message
            kept = kept[len(kept) // 2 :]


@cache
def clock_id() -> str:
    """Tells this process's clock from others: the same text, the same clock; empty: not known."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink(_TIME_NAMESPACE)}"
    except OSError:
        return ""
