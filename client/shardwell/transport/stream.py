"""One stream to one shard, kept open from step to step.

Opening a stream costs as much as a small step, so it outlives the step. It carries whatever
messages it is given and hands out the answers in order; it knows nothing of what they say. After
any failure it is dead, and the next step opens another.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc

from shardwell.transport.arena import Arena
from shardwell.transport.call_group import CallGroup
from shardwell.transport.endpoint import ShardEndpoint
from shardwell.transport.unix_call import UnixCall


class ShardStream:
    """One stream. `submit` and `read` are for one thread at a time.

    Args:
        channel: The shard.
        method: What it is a call of, as gRPC names it.
        call_group: The streams that it ends with.
        unix_call: The call, on this machine; None: over gRPC.
    """

    def __init__(
        self,
        channel: ShardEndpoint,
        method: str,
        call_group: CallGroup,
        unix_call: UnixCall | None = None,
        *,
        connection: int = 0,
    ) -> None:
        self.channel = channel
        self.failure: BaseException | None = None
        """What went wrong while messages were made, if anything."""
        # Holds at most one step's messages and the end: the caller waits for the answers.
        self._work: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        self._arena: Arena | None = None
        self._unix_call = unix_call
        self._call: Any = unix_call or channel.stream(method, connection)(self._messages())
        if not self._call.add_callback(self._end_messages):
            self._end_messages()
        call_group.add(channel, self._call)

    def submit(self, messages: Iterator[bytes], *, is_short: bool = False) -> None:
        """Sends messages; they are made one by one as they leave, on another thread.

        Args:
            messages: To be sent.
            is_short: Whether they and their answers are few and small; this thread may send them.
        """
        if self._unix_call is None:
            self._work.put(messages)
        else:
            self._unix_call.send(messages, self._failed, is_short=is_short)

    def arena(self, wanted_bytes: int, timeout_s: float) -> Arena | None:
        """Memory that the shard shares, for so many bytes of payloads; None: there is none.

        It may have less room. Blocks up to `timeout_s`. To be called when all answers to what was
        sent are read, for it is used from its start again.
        """
        if not wanted_bytes:
            return None
        if self._arena is None or not self._arena.holds(wanted_bytes):
            self._arena = self.channel.arenas.arena(wanted_bytes, timeout_s) or self._arena
        return self._arena

    def read(self) -> bytes:
        """The next answer; blocks.

        Raises:
            grpc.RpcError: the stream has failed.
        """
        if self._unix_call is not None:
            return self._unix_call.read()
        answer = next(self._call, None)
        if answer is None:
            raise StreamEndedError
        return answer  # type: ignore[no-any-return]

    @property
    def is_open(self) -> bool:
        """Whether the stream is alive, as a look shows; for who may read it."""
        if self._unix_call is not None:
            return self._unix_call.receive()
        return bool(self._call.is_active())

    @property
    def has_ended(self) -> bool:
        """Whether it is known to be dead, without looking."""
        return not self._call.is_active()

    def close(self) -> None:
        """Ends the stream at once. Safe to repeat, from any thread."""
        self._call.cancel()
        self._end_messages()

    def _messages(self) -> Iterator[bytes]:
        while (messages := self._work.get()) is not None:
            try:
                yield from messages
            except Exception as error:
                self._failed(error)
                self._call.cancel()
                return

    def _failed(self, error: Exception) -> None:
        self.failure = error

    def _end_messages(self) -> None:
        self._arena = None  # whoever keeps the stream, or its error, keeps no memory with it
        self._work.put(None)


class StreamEndedError(grpc.RpcError):
    """The shard ended the stream without an error; to the caller it went away."""

    def code(self) -> grpc.StatusCode:
        """As for a shard that went away."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """What happened."""
        return "it ended the stream"

    def trailing_metadata(self) -> tuple[()]:
        """Has none."""
        return ()
