"""The heartbeats of members of elastic parameters and tables to each shard; docs/adr/0036.

They say every second that members live, and which tenures they know to be over; each answer has
those that the shard knows. So all shards come to know what one has found, and this client when a
tenure of its own is over.

The heartbeats have connections of their own, whose sockets no gradient fills. The process's timer
sends them, until no tenure is left or the channels are no longer in use.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import grpc

from shardwell.errors import ClosedError, CorruptChunkError
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.threads.pool import Later, after
from shardwell.v1 import session_pb2 as pb
from shardwell.wire import checksum

PERIOD_S = 1.0
"""Between two heartbeats, where no member's lease asks for more."""
_PER_LEASE = 5
_TOLD_S = 60.0
"""The time for which a tenure that is over is passed on."""
_ENDED_COUNT_MAX = 1024
_ANSWER_S = 10.0
"""The time for an answer; later heartbeats do not wait for it."""
_FAILED = (grpc.RpcError, grpc.FutureCancelledError, CorruptChunkError)


class Membership(NamedTuple):
    """A tenure of this worker's in a parameter or table."""

    kind: str
    """"parameter" or "table"."""
    name: str
    incarnation: int
    worker_id: str
    tenure: int

    def to_proto(self) -> pb.EndedTenure:
        """Returns the form in which heartbeats name one that is over."""
        fields = self._asdict()
        fields[fields.pop("kind")] = fields.pop("name")
        return pb.EndedTenure(**fields)

    @staticmethod
    def from_proto(message: pb.EndedTenure) -> Membership:
        """Reads the tenure that a heartbeat names."""
        return Membership(
            kind="parameter" if message.parameter else "table",
            name=message.parameter or message.table,
            incarnation=message.incarnation,
            worker_id=message.worker_id,
            tenure=message.tenure,
        )


class TakesPart(Protocol):
    """This worker as a member of one parameter or table."""

    is_settled: bool
    """True once a gradient of its tenure has counted whole."""

    @property
    def membership(self) -> Membership | None:
        """The tenure; None: it has none."""

    def give_way(self) -> None:
        """Ends its tenure, for something else that this worker is a member of. Never waits."""


class Heartbeats:
    """The heartbeats of one client to all shards. Any thread may use it."""

    def __init__(self, channels: Sequence[ShardChannel]) -> None:
        self._channels = [weakref.ref(channel) for channel in channels]
        self._lock = threading.Lock()
        self._beating = threading.Lock()
        self._own: dict[Membership, float] = {}
        """Tenures of this worker that go on, and the seconds between their heartbeats."""
        self._ended: dict[Membership, float] = {}
        """Tenures of any worker that are over, and the time at which this client learned it."""
        self._asked: dict[int, Any] = {}
        """Heartbeats under way, by shard."""
        self.members: weakref.WeakSet[TakesPart] = weakref.WeakSet()
        """This worker, as a member of each parameter and table that it has opened so."""
        self._next: Later | None = None
        self._closed = False

    @property
    def is_of_one(self) -> bool:
        """True if this worker is a member of one parameter or table at the most."""
        return len(self._own) <= 1

    def give_way(self, waiting: TakesPart) -> None:
        """Has this worker give up what else it is a member of, where others may wait for that.

        A worker that comes while others make a step of several parameters or tables in turn may
        wait in one for workers that wait for it in another. It does not once it has given each a
        whole gradient: it is in step with them.
        """
        others = [each for each in list(self.members) if each is not waiting and each.membership]
        if others and not all(each.is_settled for each in (waiting, *others)):
            for each in others:
                each.give_way()

    def end_soon(self, membership: Membership) -> None:
        """Tells all shards that a tenure of this worker's is over, with the next heartbeat."""
        with self._lock:
            self._ended[membership] = time.monotonic()
            self._own.pop(membership, None)
            if self._next is not None:
                self._beat_after(0.0)

    def begin(self, membership: Membership, lease_s: float) -> None:
        """Begins to say that a member lives."""
        with self._lock:
            if self._closed:
                return
            self._own[membership] = min(PERIOD_S, lease_s / _PER_LEASE)
            self._beat_after(0.0)

    def is_over(self, membership: Membership) -> bool:
        """Returns True once a shard has said that a tenure is over."""
        return membership in self._ended

    def forget(self, membership: Membership) -> None:
        """Ends the heartbeats of a tenure, which its worker has given up."""
        with self._lock:
            self._own.pop(membership, None)

    def end(self, membership: Membership, timeout_s: float) -> list[int]:
        """Tells all shards that a tenure is over; blocks, and returns those that did not answer."""
        self.forget(membership)
        with self._lock:
            self._ended[membership] = time.monotonic()
        until_s = time.monotonic() + timeout_s
        silent = []
        calls = [(channel, self._call(channel, timeout_s)) for channel in self._living()]
        for channel, call in calls:
            try:
                self._take(channel, call.result(max(until_s - time.monotonic(), 0.0)))
            except (grpc.FutureTimeoutError, *_FAILED):
                silent.append(channel.shard_index)
        return silent

    def close(self) -> None:
        """Ends the heartbeats. Safe to repeat."""
        with self._lock:
            self._closed = True
            self._own.clear()
            if self._next is not None:
                self._next.cancel()
                self._next = None

    def _living(self) -> Iterable[ShardChannel]:
        found = (each() for each in self._channels)
        return [channel for channel in found if channel is not None]

    def _beat_after(self, delay_s: float) -> None:
        """Schedules the next heartbeats; the lock is held."""
        if self._next is not None:
            self._next.cancel()
        self._next = after(delay_s, "shardwell-heartbeats", self._beat_all)

    def _beat_all(self) -> None:
        with self._beating:
            channels = self._living()
            with self._lock:
                if self._closed or not self._own or not channels:
                    self._next = None
                    return
                self._beat_after(min(self._own.values()))
            for channel in channels:
                self._beat(channel)

    def _beat(self, channel: ShardChannel) -> None:
        asked = self._asked.get(channel.shard_index)
        if asked is not None and not asked.done():
            return
        if asked is not None:
            with contextlib.suppress(*_FAILED):
                self._take(channel, asked.result())
        # gRPC's, for a closed channel; Python's, for a thread as the process ends.
        with contextlib.suppress(ValueError, RuntimeError, ClosedError):
            self._asked[channel.shard_index] = self._call(channel, _ANSWER_S)

    def _call(self, channel: ShardChannel, timeout_s: float) -> Any:
        now_s = time.monotonic()
        with self._lock:
            self._ended = {k: s for k, s in self._ended.items() if now_s - s < _TOLD_S}
            ended = list(self._ended)[-_ENDED_COUNT_MAX:]
        request = pb.HeartbeatRequest(
            shard=channel.identity,
            session=channel.session.number,
            ended=[each.to_proto() for each in ended],
        )
        return channel.heartbeat(request, timeout_s)

    def _take(self, channel: ShardChannel, response: pb.HeartbeatResponse) -> None:
        checksum.check_sealed(response)
        now_s = time.monotonic()
        with self._lock:
            for each in response.ended:
                found = Membership.from_proto(each)
                self._ended.setdefault(found, now_s)
                self._own.pop(found, None)
