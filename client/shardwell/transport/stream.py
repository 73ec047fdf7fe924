"""One stream to one shard, kept open from step to step.

Opening a stream costs as much as a small step, so it outlives the step. It carries whatever
messages it is given and hands out the answers in order; it knows nothing of what they say. After
any failure it is dead, and the next step opens another.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from shardwell.transport.arena import Arena
from shardwell.transport.call_group import CallGroup
from shardwell.transport.endpoint import ShardEndpoint
from shardwell.transport.unix_call import ENDED, CallEndedError, UnixCall


class ShardStream:
    """One stream. `submit` and `read` are for one thread at a time."""

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
        # Holds at most one step's messages and the end: the caller waits for the answers.
        self._work: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._arena: Arena | None = None
        self._unix_call = unix_call
        self._call: Any = unix_call or channel.stream(method, connection)(self._messages())
        # Bound once: on this machine no layer lies between a message and its socket.
        self.submit: Callable[..., None] = self._submit if unix_call is None else unix_call.send
        """Sends messages, each made as it leaves; if few and small, `is_short`, on this thread."""
        self.read: Callable[[], bytes] = self._read if unix_call is None else unix_call.read
        """Returns the next answer; blocks. Raises grpc.RpcError when the stream has failed."""
        if not self._call.add_callback(self._end_messages):
            self._end_messages()
        call_group.add(channel, self._call)

    def _submit(self, messages: Iterator[bytes], *, is_short: bool = False) -> None:
        del is_short  # gRPC writes on a thread of its own
        self._work.put(messages)

    def _read(self) -> bytes:
        answer = next(self._call, None)
        if answer is None:
            raise CallEndedError(grpc.StatusCode.UNAVAILABLE, ENDED)
        return answer  # type: ignore[no-any-return]

    def arena(self, wanted_bytes: int, timeout_s: float) -> Arena | None:
        """Returns memory that the shard shares, for so many bytes of payloads; None: there is none.

        It may have less room. Blocks up to `timeout_s`. To be called when all answers to what was
        sent are read, for it is used from its start again.
        """
        if not wanted_bytes:
            return None
        if self._arena is None or not self._arena.holds(wanted_bytes):
            self._arena = self.channel.arenas.arena(wanted_bytes, timeout_s) or self._arena
        return self._arena

    @property
    def is_open(self) -> bool:
        """True if the stream is alive, as a look shows; for its reader alone."""
        if self._unix_call is not None:
            return self._unix_call.receive()
        return bool(self._call.is_active())

    @property
    def failure(self) -> BaseException | None:
        """The failure that ended the making of messages, if any."""
        return self._failure if self._unix_call is None else self._unix_call.failure

    def close(self) -> None:
        """Ends the stream at once. Safe to repeat, from any thread."""
        self._call.cancel()
        self._end_messages()

    def _messages(self) -> Iterator[bytes]:
        while (messages := self._work.get()) is not None:
            try:
                yield from messages
            except Exception as error:
                self._failure = error
                self._call.cancel()
                return

    def _end_messages(self) -> None:
        self._arena = None  # a kept stream, or its error, keeps no memory
        self._work.put(None)
