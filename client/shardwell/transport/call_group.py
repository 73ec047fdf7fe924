"""Calls to several shards on behalf of one request: when one fails, none is waited for any more.

Answers are read shard by shard; without this, a shard that died would go unnoticed while the reader
waits at another one, perhaps for the same reason.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc

from shardwell.errors import DeadlineError, ShardwellError
from shardwell.threads.asking import done_at_once
from shardwell.threads.calls import cancelled_by, current_call
from shardwell.transport.endpoint import ShardEndpoint

T = TypeVar("T")


def _is_own_deadline(call: Any) -> bool:
    """True if the client's deadline ended a call, not an answer.

    The others have the same deadline; the one that was waited for is the one to name.
    """
    return call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not call.trailing_metadata()


class CallGroup:
    """The calls of one request, or the streams of one set; they end with the block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Any] = []
        self._first: tuple[ShardEndpoint, grpc.RpcError] | None = None
        self._is_cancelled = False
        self.has_ended = False
        self._block = contextlib.ExitStack()

    def __enter__(self) -> CallGroup:
        self._block.enter_context(cancelled_by(self.cancel))
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        self._block.close()

    def add(self, channel: ShardEndpoint, call: Any) -> Any:
        """Takes a call in; returns it. It is cancelled when another one has failed."""
        with self._lock:
            self._calls.append(call)
            failed = self._first is not None or self._is_cancelled
        if failed or not call.add_callback(lambda: self._ended(channel, call)):
            self._ended(channel, call)
        return call

    def failure(self, channel: ShardEndpoint, error: grpc.RpcError) -> tuple[ShardEndpoint, Any]:
        """Finds the call that failed first, given one that failed."""
        with self._lock:
            if self._first is None:
                self._first = (channel, error)
            return self._first

    def error_of(
        self, channel: ShardEndpoint, error: grpc.RpcError, **where: str
    ) -> ShardwellError:
        """The error of the call that failed first; or this shard's, which let time pass."""
        call = current_call()
        if call is None or not call.is_expired:
            first_channel, first = self.failure(channel, error)
            return first_channel.translate(first, **where)
        what = ", ".join(f"{kind} {name!r}" for kind, name in where.items())
        return DeadlineError(
            f"shard {channel.shard_index} at {channel.address} did not answer for {what} in time; "
            "check the network, or raise timeout_s",
            shard_index=channel.shard_index,
            **where,
        )

    def cancel(self) -> None:
        """Ends all calls, and those that are added later. Safe to repeat."""
        with self._lock:
            self._is_cancelled = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def read_all(self, readers: Iterable[Callable[[], T]]) -> list[T]:
        """Reads all calls' answers at once, each by its reader; the first error ends the others."""
        return done_at_once("shardwell-reader", list(readers), lambda reader: reader(), self.cancel)

    def _ended(self, channel: ShardEndpoint, call: Any) -> None:
        self.has_ended = True
        if call.is_active():  # another call failed before this one was added
            call.cancel()
            return
        if call.code() is grpc.StatusCode.OK or _is_own_deadline(call):
            return
        with self._lock:
            if self._first is not None:
                return
            self._first = (channel, call)
        self.cancel()
