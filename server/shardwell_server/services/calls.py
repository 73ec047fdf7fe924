"""The serving of calls: handlers that never wait, and a loop that waits for all of them.

A handler is a generator that yields what it needs, and goes on when that has come:

    message = yield Needs.NEXT        the next message, in the middle of a step; None: there is none
    message = yield Needs.NEXT_STEP   the same, where nothing is under way: the call may end here
    yield answer                      bytes, which are written to the caller
    yield NotYet(...)                 see `shard.deadline`: it goes on when it is to look again
    yield Needs.LONG                  it takes long with what it has, though its call `is_short`
    yield Needs.HELD                  until the call ends, which closes the generator
    return response                   of a call that has one

From one yield to the next it runs on a thread of `WorkThreads`, and may use processor and disk.
Between them a call has no thread, whether it waits for its client, for other workers or for the
line. So idle and waiting calls cost memory alone, and none keeps another from its turn.

A handler that does not wait is a plain function of request and call.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import threading
import time
import urllib.parse
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from shardwell.connection.error_codes import to_status
from shardwell.connection.handlers import parsed, status_of
from shardwell.errors import (
    ArgumentError,
    AuthenticationError,
    LimitError,
    SessionEndedError,
    ShardUnavailableError,
    ShardwellError,
    StorageError,
)
from shardwell.wire import checksum
from shardwell_server.access.audit import Note, no_audit
from shardwell_server.access.rights import ANYBODY, Right
from shardwell_server.services.guard import Guard
from shardwell_server.services.open_streams import OpenStreams
from shardwell_server.services.work_threads import WorkThreads
from shardwell_server.shard.deadline import NotYet
from shardwell_server.shard.quotas import CALL_BYTES, Usage

_LOG = logging.getLogger("shardwell_server")
UNIX_PEER = "unix:"
_BATCH_BYTES = 256 * 1024
_BATCH_COUNT = 4
"""Answers made before they are written; of so many bytes in all, or one larger one."""
SHORT_BYTES_MAX = 257 * 1024
"""A payload of 128 Ki elements in 2 bytes each, and its frame: see `Call.is_short`."""
_ROOM_WAIT_S = 10.0
_REQUEST_S = 10.0
_END_S = 5.0
_GRANTED_COUNT_MAX = 4096
_DAMAGE_COUNT_MAX = 8
_HELD = {"Attend"}
"""RPCs that are open as long as their client is, and no streams of those that are limited."""
_URGENT = {"Attend", "AwaitRecording", "EndSession", "Heartbeat"}
"""RPCs that wait for no rate: others' seats depend on them."""
_UNCOUNTED = {"AwaitRecording"}
"""RPCs that are none of the calls that a token may have open: each session has at most one."""
_WORD = re.compile(r"(?<=.)(?=[A-Z])")


class Needs(enum.Enum):
    """The wish with which a handler goes on, except `NotYet`."""

    NEXT = enum.auto()
    NEXT_STEP = enum.auto()
    HELD = enum.auto()
    LONG = enum.auto()


Handling: TypeAlias = Generator["bytes | NotYet | Needs", "bytes | None", Any]


class Rpc(NamedTuple):
    """One of the calls that a service has."""

    name: str
    begin: Callable[..., Any]
    has_request: bool
    is_stream: bool
    is_urgent: bool
    is_counted: bool


class Call:
    """A call, for its handler."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], rpc: Rpc, note: Note) -> None:
        self.context = context
        self.rpc = rpc
        self.principal = ANYBODY
        self.usage: Usage | None = None
        """None: it has no token."""
        self.session = 0
        self.is_counted = False
        # On the loop's thread, while the call lives: gRPC reads memory that it has freed, and the
        # process may die, where a context is asked for these once its call is over.
        self.peer = context.peer()
        """The client's address as gRPC writes it; `UNIX_PEER`: it calls over the Unix socket."""
        shown = context.auth_context() if note is not no_audit or rpc.name == "Attend" else {}
        self._certificate = _common_name(shown)
        self.certificate_pem = next(iter(shown.get("x509_pem_cert", ())), None)
        self._note = note
        self._granted: set[tuple[Right, str, str]] = set()
        self.unnoted: list[tuple[Right, str, str]] = []
        self.asked: tuple[Right, str, str] | None = None
        """The last right that was asked for, its object, and the caller's name for that."""
        self.moved_bytes = 0
        """Payload, in both directions, since its rate was looked at last."""
        self.changed = asyncio.Event()
        """Set when what was too early may have come."""
        self.is_short = False
        """True if its handler takes less time for a message of up to SHORT_BYTES_MAX, or none, than
        a thread to wake: then it runs on the loop's thread. The handler sets it."""
        self.ending: ShardwellError | None = None
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        deadline_s = context.time_remaining()
        self._deadline_s = None if deadline_s is None else time.monotonic() + deadline_s
        self._is_over = False

    def check(self, right: Right, kind: str, name: str) -> None:
        """Raises AccessDeniedError if the caller lacks the right; checked once a call and name."""
        asked = (right, kind, name)
        if asked in self._granted:
            return
        self.ask(right, kind, name)
        if len(self._granted) < _GRANTED_COUNT_MAX:
            self._granted.add(asked)
        if self._note is not no_audit:
            self.unnoted.append(asked)

    def ask(self, right: Right, kind: str, name: str) -> None:
        """Refuses as `check` does, each time; the audit log has another event for it."""
        self.asked = (right, kind, name)
        self.principal.check(right, kind, name)

    def note_opened(self) -> None:
        opened, self.unnoted = self.unnoted, []
        for right, kind, name in opened:
            self.note("opened", kind=kind, name=name, right=right.word)

    def has_asked_for(self, kind: str, name: str) -> bool:
        """True if it was granted anything of a name, or more names than are kept."""
        granted = list(self._granted)
        return len(granted) >= _GRANTED_COUNT_MAX or any(
            each[1:] == (kind, name) for each in granted
        )

    def note(self, event: str, **fields: Any) -> None:
        if self._note is no_audit:
            return
        self._note(
            event,
            token=self.principal.name,
            certificate=self._certificate,
            remote=urllib.parse.unquote(self.peer),
            method=self.rpc.name,
            **fields,
        )

    @property
    def remaining_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    @property
    def is_active(self) -> bool:
        """True if the client still waits for it; any thread may ask."""
        return not self._is_over

    def wake(self) -> None:
        """Has the call try again. From any thread."""
        with suppress(RuntimeError):  # the loop has ended, and the call with it
            self._loop.call_soon_threadsafe(self.changed.set)

    def end(self, error: ShardwellError) -> None:
        """Ends it with that error, when its handler yields. From any thread."""
        self._loop.call_soon_threadsafe(self.end_now, error)

    def soon(self, act: Callable[[], None]) -> None:
        """Runs a call on the loop's thread. From any thread."""
        self._loop.call_soon_threadsafe(act)

    def note_end(self) -> None:
        self._is_over = True

    def end_now(self, error: ShardwellError) -> None:
        if not self._is_over and self.ending is None:
            self.ending = error
            assert self._task is not None
            self._task.cancel()


class _Step(NamedTuple):
    answers: deque[bytes]
    needs: Any = None
    """None: that the answers are written."""
    response: Any = None
    has_ended: bool = False
    error: Exception | None = None


def _sealed_once(response: Any) -> bytes:
    is_sealed = getattr(response, checksum.CRC_FIELD, 0)
    return bytes(response.SerializeToString()) if is_sealed else checksum.sealed(response)


def _go_on(handling: Handling, message: bytes | None) -> _Step:
    answers: deque[bytes] = deque()
    size = 0
    try:
        while size < _BATCH_BYTES and len(answers) < _BATCH_COUNT:
            needs = handling.send(message)
            message = None
            if not isinstance(needs, bytes):
                return _Step(answers, needs)
            answers.append(needs)
            size += len(needs)
    except StopIteration as end:
        return _Step(answers, response=end.value, has_ended=True)
    except Exception as error:
        return _Step(answers, error=error)
    return _Step(answers)


class _AnswerRoom:
    """The bytes of answers that are being written. For the loop's thread."""

    def __init__(self, bytes_max: int) -> None:
        self.is_full = False
        """True if one more answer, which may be of any size, has no room."""
        self._bytes_max = bytes_max
        self._bytes = 0
        self._freed = asyncio.Event()

    async def enter(self) -> None:
        """Returns when one more has room; LimitError: others did not read theirs."""
        until_s = time.monotonic() + _ROOM_WAIT_S
        while self.is_full:
            self._freed.clear()
            try:
                async with asyncio.timeout(until_s - time.monotonic()):
                    await self._freed.wait()
            except TimeoutError:
                raise LimitError(
                    f"limit answer_bytes_max={self._bytes_max}: so many bytes of answers wait for "
                    "clients that do not read them; call again, or raise it on the shards"
                ) from None

    async def write(self, context: grpc.aio.ServicerContext[Any, Any], answer: bytes) -> None:
        """Returns when gRPC takes the answer for its line, which it does as its reader reads."""
        self._bytes += len(answer)
        self.is_full = self._bytes >= self._bytes_max
        try:
            await context.write(answer)
        finally:
            self._bytes -= len(answer)
            self.is_full = self._bytes >= self._bytes_max
            self._freed.set()


def _common_name(shown: Any) -> str | None:
    names = shown.get("x509_common_name")
    return names[0].decode(errors="replace") if names else None


class Calls:
    """Makes gRPC's handlers from ours. For the loop's thread."""

    def __init__(
        self,
        threads: WorkThreads,
        streams: OpenStreams,
        *,
        guard: Guard,
        shard_index: int,
        answer_bytes_max: int,
    ) -> None:
        self._threads = threads
        self._streams = streams
        self._guard = guard
        self._shard_index = shard_index
        self._room = _AnswerRoom(answer_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._open: set[Call] = set()
        self.damages: list[str] = []
        self.refusal_counts: Counter[str] = Counter()
        """Calls that ended with an error, by its name; any thread may read it."""

    def wake_all(self) -> None:
        for call in self._open:
            call.changed.set()

    def end_those_with_name(self, kind: str, name: str, message: str) -> None:
        """Ends calls that were granted a name, and are made again. Not from the loop's thread."""
        ended = threading.Event()

        def end() -> None:
            for call in list(self._open):
                if call.has_asked_for(kind, name):
                    call.end_now(ShardUnavailableError(message))
            ended.set()

        self._loop.call_soon_threadsafe(end)
        ended.wait(_END_S)

    def end_those_without_token(self) -> None:
        for call in list(self._open):
            try:
                self._guard.check_still(call)
            except AuthenticationError as error:
                call.end(error)

    def end_those_of_session(self, session: int, call: Call, error: ShardwellError) -> None:
        """Ends, soon, other calls by which a session contributes or attends; from any thread."""

        def end() -> None:
            for each in list(self._open):
                if each.session == session:
                    each.end(error)

        call.soon(end)

    # What gRPC takes.

    def handlers(
        self, service: ServiceDescriptor, served_by: Any
    ) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Makes the handlers of a service, by name: `served_by` has a method for each RPC."""
        return {
            method.name: self._handler(
                method, getattr(served_by, _WORD.sub("_", method.name).lower())
            )
            for method in service.methods
        }

    def _handler(
        self, method: MethodDescriptor, handler: Callable[..., Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        has_request = not method.client_streaming
        rpc = Rpc(
            method.name,
            parsed(handler, GetMessageClass(method.input_type)) if has_request else handler,
            has_request=has_request,
            is_stream=(method.client_streaming or method.server_streaming)
            and method.name not in _HELD,
            is_urgent=method.name in _URGENT,
            is_counted=method.name not in _UNCOUNTED,
        )
        # A single message is read here, too: gRPC would wait for it before the caller is known.
        serve = partial(self._served, rpc)
        if method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(serve)
        return grpc.stream_unary_rpc_method_handler(serve, response_serializer=_sealed_once)

    # How they run.

    async def _served(
        self, rpc: Rpc, messages: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        call = Call(context, rpc, self._guard.note)
        self._open.add(call)
        try:
            await self._guard.enter(call)
            begin = partial(rpc.begin, await self._request(call)) if rpc.has_request else rpc.begin
            if rpc.is_stream:
                await self._streams.enter(call)
                response = begin(call)  # that only makes the generator
            else:
                response = await self._threads.run(partial(begin, call))
            if isinstance(response, Generator):
                response = await self._run(call, response)
            call.note_opened()
            if not (rpc.is_stream or rpc.is_urgent) and response is not None:
                call.moved_bytes += response.ByteSize()
                await self._guard.pace(call, free_bytes=CALL_BYTES)  # it has paid for so many
            return response
        except (asyncio.CancelledError, grpc.aio.BaseError):
            # gRPC's error says that the caller has gone, which the task may learn later.
            if call.ending is None:
                raise asyncio.CancelledError from None
            await self._abort(call, call.ending)
        except Exception as error:
            await self._abort(call, error)
        finally:
            call.note_end()
            self._open.discard(call)
            self._streams.leave(call)
            self._guard.leave(call)

    async def _request(self, call: Call) -> bytes:
        try:
            async with asyncio.timeout(_REQUEST_S):
                message = await call.context.read()
        except TimeoutError:
            raise ShardUnavailableError(
                f"the request of {call.rpc.name} did not come within {_REQUEST_S:g} s; call again"
            ) from None
        if message is grpc.aio.EOF:
            raise ArgumentError(f"{call.rpc.name} has a request, and none came")
        request: bytes = message
        call.moved_bytes += len(request)
        return request

    async def _run(self, call: Call, handling: Handling) -> Any:
        is_stream = call.rpc.is_stream
        message: bytes | None = None
        runs = False
        needs: Any = None
        try:
            while True:
                if is_stream and self._room.is_full:
                    await self._room.enter()
                call.changed.clear()
                runs = True
                step: _Step
                if call.is_short and len(message or b"") <= SHORT_BYTES_MAX:
                    step = _go_on(handling, message)
                else:
                    step = await self._threads.run(
                        partial(_go_on, handling, message),
                        partial(self._abandon, handling),
                    )
                has_moved = message is not None or bool(step.answers)
                runs, message, needs = False, None, step.needs
                if call.usage is not None and is_stream and has_moved:
                    await self._guard.pace(call)
                while step.answers:
                    await self._room.write(call.context, step.answers.popleft())
                if step.error is not None:
                    raise step.error
                if call.unnoted:
                    call.note_opened()
                if step.has_ended:
                    return step.response
                del step
                if needs is Needs.NEXT or needs is Needs.NEXT_STEP:
                    if needs is Needs.NEXT_STEP:
                        self._streams.note_idle(call)
                    try:
                        message = await call.context.read()
                    finally:
                        self._streams.note_busy(call)
                    message = None if message is grpc.aio.EOF else message
                elif needs is Needs.LONG:
                    call.is_short = False
                elif needs is Needs.HELD:
                    await call.context.send_initial_metadata(())
                    await asyncio.get_running_loop().create_future()
                elif needs is not None:
                    await self._wait(call, needs)
        finally:
            if isinstance(needs, NotYet):
                needs.forget()
            if not runs:  # else it is closed when it yields
                self._threads.begin(handling.close)

    def _abandon(self, handling: Handling, step: _Step | None) -> None:
        if step is not None and isinstance(step.needs, NotYet):
            step.needs.forget()
        self._threads.begin(handling.close)

    async def _wait(self, call: Call, too_early: NotYet) -> None:
        timer = asyncio.get_running_loop().call_later(
            max(too_early.deadline_s - time.monotonic(), 0), call.changed.set
        )
        try:
            await call.changed.wait()
        finally:
            timer.cancel()
            too_early.forget()

    def note_damage(self, words: str) -> None:
        """Remembers the first damaged pieces of storage. From any thread."""
        if words not in self.damages and len(self.damages) < _DAMAGE_COUNT_MAX:
            self.damages.append(words)

    async def _abort(self, call: Call, error: Exception) -> None:
        if not isinstance(call.ending, SessionEndedError):  # the end of a session refuses nothing
            self.refusal_counts[type(error).__name__] += 1
        if error is call.ending:
            error.shard_index = self._shard_index
            status = to_status(error)
        else:
            status = status_of(
                error,
                _LOG,
                shard_index=self._shard_index,
                place="shard",
                peer=urllib.parse.unquote(call.peer),
            )
        self._guard.refused(call, error)
        if isinstance(error, StorageError) and "damaged" in error.message:
            self.note_damage(error.message)
        error.__traceback__ = None  # it has messages at hand, and gRPC keeps the error
        try:
            await call.context.abort(status.code, status.details, status.trailing_metadata)
        except grpc.aio.AbortError:
            raise  # it has ended as it was asked to
        except grpc.aio.BaseError:
            raise asyncio.CancelledError from None
