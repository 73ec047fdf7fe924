"""The records of a client or shard in memory: its spans (docs/adr/0021-trace.md), its bytes."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from functools import cache

from shardwell.process.environment import host_name
from shardwell.process.span_columns import SPAN_COUNT_MAX, Span, to_message
from shardwell.v1 import trace_pb2 as pb

LONG_NS = 100_000
"""The least time for `add_long`: a disk takes longer; to find that nothing is to be written does
not."""
NO_STEP = -1
ALL_CHUNKS = -1
_MESSAGE_BYTES_MAX = 900 * 1024
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


class Traffic:
    """The counters of one client, over all parameters and tables; read them whenever you like.

    Examples:
        >>> before = client.traffic.sent_value_bytes
        >>> net = client.parameter("traffic", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> client.traffic.sent_value_bytes - before  # three float32
        12
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent_bytes = 0
        """Messages of gradients, first weights and ids."""
        self.received_bytes = 0
        """Messages of weights and rows."""
        self.sent_value_bytes = 0
        """Bytes of the sent values as float32."""
        self.received_value_bytes = 0
        """Bytes of the received values as float32."""
        self.shared_bytes = 0
        """What of the bytes sent and received went through memory that is shared with shards or
        ranks of this machine, instead of over the network."""

    def __repr__(self) -> str:
        return f"Traffic(sent_bytes={self.sent_bytes}, received_bytes={self.received_bytes})"

    def add_sent(self, byte_count: int, element_count: int, shared_byte_count: int = 0) -> None:
        """Counts a message that leaves, and what of it is in shared memory."""
        with self._lock:
            self.sent_bytes += byte_count
            self.shared_bytes += shared_byte_count
            self.sent_value_bytes += 4 * element_count

    def add_received(self, byte_count: int, element_count: int, shared_byte_count: int = 0) -> None:
        """Counts a message that came, and what of it was in shared memory."""
        with self._lock:
            self.received_bytes += byte_count
            self.shared_bytes += shared_byte_count
            self.received_value_bytes += 4 * element_count


@cache
def clock_id() -> str:
    """Tells this process's clock from others: the same text, the same clock; empty: not known."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink(_TIME_NAMESPACE)}"
    except OSError:
        return ""
