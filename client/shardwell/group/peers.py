"""The other members of a group, as one of them calls them: PeerService's client side."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from shardwell.channel import CHANNEL_OPTIONS
from shardwell.traffic import Traffic
from shardwell.v1 import group_pb2, peer_pb2
from shardwell.v1 import peer_pb2 as pb

PENDING_COUNT_MAX = 16
"""Chunks that wait to be sent to one rank, in calls where chunks go one way."""

SERVICE_NAME = peer_pb2.DESCRIPTOR.services_by_name["PeerService"].full_name


class Peer:
    """The connection to one other member. Any thread may call it."""

    def __init__(self, member: group_pb2.Member) -> None:
        self.member = member
        self._channel = grpc.insecure_channel(member.address, options=CHANNEL_OPTIONS)
        self.agree: Any = self._channel.stream_stream(
            f"/{SERVICE_NAME}/Agree",
            request_serializer=pb.AgreeRequest.SerializeToString,
            response_deserializer=pb.AgreeResponse.FromString,
        )
        self.send_chunks: Any = self._channel.stream_unary(f"/{SERVICE_NAME}/SendChunks")

    def greet(self, group: str, timeout_s: float) -> str | None:
        """Asks who is there; None if it is this member, else what is wrong. Blocks."""
        greet: Any = self._channel.unary_unary(
            f"/{SERVICE_NAME}/Greet", request_serializer=pb.GreetRequest.SerializeToString
        )
        try:
            greet(pb.GreetRequest(group=group, member_id=self.member.member_id), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {timeout_s:.3g} s"
            return str(error.details() or error.code().name)[:200]
        return None

    def close(self) -> None:
        """Ends the connection and every call on it."""
        self._channel.close()


class Outgoing:
    """The stream of chunks to one rank of a generation.

    Args:
        peer: The member that has the rank.
        opening: The first message.
        traffic: Counts what is sent.
        on_failure: Called from gRPC's thread when the stream breaks; with what happened.
    """

    def __init__(
        self, peer: Peer, opening: bytes, traffic: Traffic, on_failure: Callable[[str], None]
    ) -> None:
        self._on_failure = on_failure
        self._opening = opening
        self._traffic = traffic
        # Bounded by the calls: see `collective.py`, and `await_room`.
        self._messages: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        self._taken = threading.Condition()
        self._pending_count = 0
        self._closed = False
        self._call = peer.send_chunks.future(self._outgoing())
        self._call.add_done_callback(self._ended)

    def send(self, message: bytes, element_count: int) -> None:
        """Sends a chunk; does not block."""
        with self._taken:
            self._pending_count += 1
        self._messages.put((message, element_count))

    def await_room(self, timeout_s: float) -> bool:
        """Blocks while many chunks wait to be sent; whether there is room now."""
        deadline_s = time.monotonic() + timeout_s
        with self._taken:
            while self._pending_count >= PENDING_COUNT_MAX and not self._closed:
                rest_s = deadline_s - time.monotonic()
                if rest_s <= 0:
                    return False
                self._taken.wait(rest_s)
        return True

    def finish(self, timeout_s: float) -> None:
        """Waits until everything has been received, and ends the stream; or cuts it in time."""
        self._messages.put(None)
        # Whoever leaves has no use for the reason of a failure; the others see it themselves.
        with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
            self._call.result(timeout=timeout_s)
        self.cut()

    def cut(self) -> None:
        """Ends the stream at once. Safe to repeat, from any thread."""
        with self._taken:
            self._closed = True
            self._taken.notify_all()
        self._messages.put(None)
        self._call.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        yield self._opening
        while (entry := self._messages.get()) is not None:
            message, element_count = entry
            with self._taken:
                self._pending_count -= 1
                self._taken.notify_all()
            self._traffic.add_sent(len(message), element_count)
            yield message

    def _ended(self, call: Any) -> None:
        self._messages.put(None)
        if self._closed or call.code() == grpc.StatusCode.OK:
            return
        self._on_failure(str(call.details() or call.code().name)[:200])
