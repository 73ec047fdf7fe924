"""All shards of a cluster, as a client sees them: connected to, and waited for when away."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import grpc

from shardwell.connection.credentials import Credentials
from shardwell.connection.options import KEEPALIVE_PING_MS
from shardwell.errors import (
    ClosedError,
    CorruptChunkError,
    ShardUnavailableError,
    ShardwellError,
    WrongShardError,
)
from shardwell.process.spans import Spans
from shardwell.process.unix_sockets import check_descriptors
from shardwell.rpc.heartbeat import Heartbeats
from shardwell.rpc.retry import Attempts
from shardwell.rpc.session import new_session
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.names import parse_target
from shardwell.threads.calls import CallThreads, current_call
from shardwell.threads.pool import after
from shardwell.threads.spread import CoreThreads
from shardwell.v1 import parameter_server_pb2 as pb

_DESCRIPTOR_COUNT = 16
"""Those that gRPC needs besides its connections, and a few more."""
_END_S = 1.0
"""A shard that does not answer in time notices the client's end otherwise."""
_LOG = logging.getLogger("shardwell")
_SILENCE_S_MAX = 2.0
"""A call that waits longer logs for which shard: shards that are starting answer sooner."""


_MADE: weakref.WeakSet[Shards] = weakref.WeakSet()
"""Those of this process, and of the one that it was forked from."""
_MADE_LOCK = threading.Lock()
_NUMBERS = itertools.count()


class Shards:
    """The shards of a cluster, in order, each with its channel. Any thread may use it.

    Connections close with the last reference to this object, or by `close`; `threads` and
    `core_threads` end then. Threads hold no reference except those of calls that run on them.
    """

    def __init__(
        self,
        addresses: list[str],
        threads: CallThreads,
        *,
        same_host: bool = True,
        credentials: Credentials,
        core_threads: CoreThreads,
    ) -> None:
        self.core_threads = core_threads
        self.session = new_session()
        self.spans = Spans()
        self.channels = [
            ShardChannel(
                i,
                address,
                self.session,
                same_host=same_host,
                credentials=credentials,
                spans=self.spans,
            )
            for i, address in enumerate(addresses)
        ]
        self.heartbeats = Heartbeats(self.channels)
        self.given: set[str] = set()
        """Parameters and tables, "table 'x'", to which this client has given a gradient."""
        self._handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.state_home: Any = None
        """The parameter's `KeptStates` that keeps the state of all that this worker trains."""
        self.resumed: Mapping[str, int] = {}
        """The steps at which a kept state has them, as this worker goes on with it."""
        self.launched_rank: Callable[[int], int | None] = lambda worker_count: None
        """This worker's rank of so many, where a launcher has set it."""
        self.threads = threads
        self._number = next(_NUMBERS)
        with _MADE_LOCK:
            _MADE.add(self)
        self._looked_s = -math.inf
        self._closed = threading.Event()
        closing = partial(_close, self.channels, self._closed, core_threads, self.heartbeats)
        self._end = weakref.finalize(self, threads.close, closing)

    @property
    def worker_id(self) -> str:
        """The id under which the client contributes; empty before it attends."""
        return self.channels[0].worker_id

    def note_handle(self, handle: Any) -> None:
        """Counts a parameter or table among the handles, for as long as it is referred to."""
        self._handles[id(handle)] = handle

    @property
    def handles(self) -> list[Any]:
        """The open ones, while other threads may open more."""
        found = [each() for each in self._handles.valuerefs()]  # which is one step of C
        return [each for each in found if each is not None]

    now_s = staticmethod(time.monotonic)

    def jitter(self) -> float:
        """A random factor of pauses, from 0 to 1."""
        return random.random()  # noqa: S311 (a pause)

    def pause(self, duration_s: float) -> None:
        """Waits, and ends early when the call that this thread runs is cancelled."""
        call = current_call()
        cancelled = self._closed if call is None else call.cancelled
        if cancelled.wait(duration_s) and (call is None or not call.is_expired):
            raise ClosedError("the call was given up, or the client was closed; connect again")

    def await_shard(self, shard_index: int, timeout_s: float) -> bool:
        """Waits as `Surroundings` says; `close` ends it at once."""
        channel, count = self.channels[shard_index], len(self.channels)
        with _telling(channel, count, f"the call gives up in {timeout_s:.3g} s (timeout_s)"):
            is_there = channel.answers(timeout_s)
        if is_there:
            channel.attend()
        return is_there

    def look_for_silence(self, what: str, waited_s: float) -> None:
        """Logs which shards are silent while a call waits: in the background, once in a while."""
        now_s = time.monotonic()
        if now_s < self._looked_s + _SILENCE_S_MAX / 2:
            return
        self._looked_s = now_s
        look = partial(self._look, what, now_s - waited_s)
        with contextlib.suppress(ShardwellError):  # so many calls wait, or the client was closed
            self.threads.start(look, 2 * _SILENCE_S_MAX)

    def _look(self, what: str, began_s: float) -> None:
        with contextlib.suppress(ShardwellError):
            asked = [(channel, channel.question(_SILENCE_S_MAX)) for channel in self.channels]
            for channel, question in asked:
                if channel.is_silent(question) and channel.is_worth_telling():
                    _LOG.warning(
                        "shard %d of %d at %s has answered nothing for %.0f s, and %s has waited "
                        "%.0f s: what this worker sends may fill a slow link, its process may "
                        "stand still, or what lies between dropped the connection, which is made "
                        "anew in up to %.0f s",
                        channel.shard_index,
                        len(self.channels),
                        channel.address,
                        _SILENCE_S_MAX,
                        what,
                        time.monotonic() - began_s,
                        2 * KEEPALIVE_PING_MS / 1000,
                    )

    def describe(self, shard_index: int) -> str:
        """Names a shard in messages."""
        return f"shard {shard_index} at {self.channels[shard_index].address}"

    def replace_older(self) -> bool:
        """Closes older clients; their calls end with ClosedError, which says why."""
        with _MADE_LOCK:
            older = [shards for shards in _MADE if shards._gives_way_to(self)]
        for shards in older:
            _LOG.warning(
                "worker %r: a newer client of this process takes over from an older one, whose "
                "calls end with ClosedError from now on",
                self.worker_id,
            )
            shards.threads.closed = (
                f"a newer client of this process has taken worker {self.worker_id!r} over; open "
                "parameters and tables with that one, or give each client a worker_id of its own"
            )
            shards.end_session()
            shards.close()
        return bool(older)

    def _gives_way_to(self, newer: Shards) -> bool:
        return (
            self._number < newer._number
            and self.threads.owner.is_here
            and not self._closed.is_set()
            and self.worker_id == newer.worker_id
            and self.channels[0].identity == newer.channels[0].identity
            and any(channel.has_seats for channel in self.channels)
        )

    def end_session(self) -> None:
        """Ends the session in order, so that its seats are free at once; blocks for 1 s at most."""
        with contextlib.suppress(ShardwellError):  # it was closed before, or a fork inherited it
            self.threads.run(self._tell_end, _END_S)

    def _tell_end(self) -> None:
        deadline_s = time.monotonic() + _END_S
        calls = []
        for channel in self.channels:
            if not channel.has_seats:
                continue
            with contextlib.suppress(ValueError):  # gRPC's, for a closed channel
                calls.append(channel.end_session(_END_S))
        for call in calls:
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError):
                call.result(max(deadline_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """Ends all connections, the calls on them and all waits. Safe to repeat."""
        self._end()


def _close(
    channels: Sequence[ShardChannel],
    closed: threading.Event,
    core_threads: CoreThreads,
    heartbeats: Heartbeats,
) -> None:
    closed.set()
    heartbeats.close()
    for channel in channels:
        channel.close()
    core_threads.close()


def connect_shards(
    target: str,
    *,
    worker_id: str,
    cluster_id: str | None,
    timeout_s: float,
    same_host: bool = True,
    credentials: Credentials,
    thread_count: int = 1,
) -> Shards:
    """Connects to all shards, checks their identities, then attends on each."""
    __tracebackhide__ = True  # of notebooks and of pytest
    addresses = parse_target(target)
    credentials.check_private(addresses)
    check_descriptors(len(addresses) + _DESCRIPTOR_COUNT, f"a connection to {target:.200}")
    threads = CallThreads("client")
    try:
        return threads.run(
            lambda: _connected(
                Shards(
                    addresses,
                    threads,
                    same_host=same_host,
                    credentials=credentials,
                    core_threads=CoreThreads(thread_count),
                ),
                worker_id,
                cluster_id,
                timeout_s,
            ),
            timeout_s,
        )
    except Exception:  # after Ctrl-C there may be connections, which end by themselves
        threads.close()
        raise


def _connected(shards: Shards, worker_id: str, cluster_id: str | None, timeout_s: float) -> Shards:
    try:
        attempts = Attempts(timeout_s, shards)
        for channel in shards.channels:
            end = f"connect gives up after {timeout_s:g} s (connect_timeout_s)"
            with _telling(channel, len(shards.channels), end):
                _check(channel, shards.channels, cluster_id, attempts)
            channel.worker_id = worker_id
            channel.attend()
    except BaseException:
        shards.close()
        raise
    return shards


@contextlib.contextmanager
def _telling(channel: ShardChannel, shard_count: int, end: str) -> Iterator[None]:
    def tell() -> None:
        if channel.is_worth_telling():
            _LOG.warning(
                "still waiting for shard %d of %d at %s: %s; %s",
                channel.shard_index,
                shard_count,
                channel.address,
                channel.why_absent(),
                end,
            )

    with contextlib.ExitStack() as block:
        with contextlib.suppress(RuntimeError):  # without a further thread nothing is logged
            block.callback(after(_SILENCE_S_MAX, "shardwell-waiting", tell).cancel)
        yield


def _check(
    channel: ShardChannel,
    channels: list[ShardChannel],
    cluster_id: str | None,
    attempts: Attempts,
) -> None:
    def ask(*, waits: bool) -> pb.GetStatusResponse:
        return channel.call(
            "GetStatus",
            pb.GetStatusRequest(identity_only=True),
            pb.GetStatusResponse,
            timeout_s=attempts.rest_s,
            wait_for_ready=waits,
        )

    try:
        try:
            status = ask(waits=False)
        except (ShardUnavailableError, CorruptChunkError):
            # It may not be there yet; but where TLS keeps the two apart, no waiting mends it.
            channel.check_trust(attempts.remaining_s)
            status = attempts.run(lambda: ask(waits=True))
    except (TimeoutError, ShardUnavailableError):
        check_descriptors(1, f"a connection to {channel.address}")
        raise ShardUnavailableError(
            f"shard {channel.shard_index} of {len(channels)} at {channel.address} did not answer "
            f"within {attempts.timeout_s:g} s: {channel.why_absent()}",
            shard_index=channel.shard_index,
        ) from None
    expected_id = cluster_id or channels[0].identity.cluster_id or status.shard.cluster_id
    expected = (channel.shard_index, len(channels), expected_id)
    found = (status.shard.shard_index, status.shard.shard_count, status.shard.cluster_id)
    if found != expected:
        raise WrongShardError(
            f"{channel.address} should be shard {expected[0]} of {expected[1]} of cluster "
            f"{expected[2]!r}; it is shard {found[0]} of {found[1]} of cluster {found[2]!r}; "
            "give all addresses, in the order of the shards",
            shard_index=channel.shard_index,
        )
    channel.identity.CopyFrom(status.shard)
    channel.arenas.server.address = status.arena_address
    channel.unix.address = status.stream_address
