"""How calls are served: handlers that never wait, and a loop that waits for all of them.

A handler is a generator that yields what it needs, and goes on when it is there:

    message = yield Read.NEXT        the next message, in the middle of a step; None: there is none
    message = yield Read.NEXT_STEP   the same, where nothing is under way: the call may end here
    yield answer                     bytes, which are written to the caller
    yield NotYet(...)                see `shard.deadline`: it goes on when it is to look again
    yield LONG                       it takes long with what it has, though its call `is_short`
    yield HELD                       until the call ends, which closes the generator
    return response                  of a call that has one

From one yield to the next it runs on a thread of `WorkThreads`, and may use processor and disk.
Between them a call has no thread, whether it waits for its client, for other workers or for the
line. So idle and waiting calls cost memory alone, and none keeps another from its turn.

A handler that does not wait is a plain function of request and call.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
import urllib.parse
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import grpc

from shardwell.connection.credentials import authorization_of
from shardwell.connection.error_codes import to_status
from shardwell.connection.handlers import parsed, status_of
from shardwell.errors import (
    AccessDeniedError,
    ArgumentError,
    AuthenticationError,
    LimitError,
    SessionEndedError,
    ShardUnavailableError,
    ShardwellError,
)
from shardwell.wire import checksum
from shardwell_server.access.access import Access
from shardwell_server.access.audit import Note, no_audit
from shardwell_server.access.rights import ANYBODY, Right
from shardwell_server.services.open_streams import OpenStreams
from shardwell_server.services.work_threads import WorkThreads
from shardwell_server.shard.deadline import NotYet
from shardwell_server.shard.quotas import CALL_BYTES, Usage, Usages

_LOG = logging.getLogger("shardwell_server")
_BATCH_BYTES = 256 * 1024
_BATCH_COUNT = 4
"""Answers that are made at once before they are written: so many of so many bytes in all. One may
be larger, and have its payload elsewhere."""
SHORT_BYTES_MAX = 257 * 1024
"""See `Call.is_short`: a payload of 128 Ki elements in 2 bytes each, and what is around it."""
_ROOM_WAIT_S = 10.0
"""How long a call waits for others' answers to be read, before it is refused."""
_REQUEST_S = 10.0
"""For the message of a call that has one."""
_END_S = 5.0
"""For the loop to end calls; it turns within that, or is not well."""
_GRANTED_COUNT_MAX = 4096
"""Rights that a call is known to have; others are looked at each time."""


class Read(enum.Enum):
    """A handler wants a message."""

    NEXT = enum.auto()
    NEXT_STEP = enum.auto()


class Held(enum.Enum):
    """A handler wants nothing but that its call stays open."""

    HELD = enum.auto()


class Long(enum.Enum):
    """A handler will take long with what it has, though its call `is_short`."""

    LONG = enum.auto()


HELD = Held.HELD
LONG = Long.LONG
Handling: TypeAlias = Generator["bytes | NotYet | Read | Held | Long", "bytes | None", Any]


class Call:
    """A call, for its handler.

    Args:
        context: gRPC's.
        method: Name of the RPC.
        note: Takes lines of the audit log.
    """

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], method: str, note: Note = no_audit
    ) -> None:
        self.context = context
        """gRPC's."""
        self.method = method
        """Name of the RPC."""
        self.principal = ANYBODY
        """Who makes it."""
        self.usage: Usage | None = None
        """What the token of that uses; None: nobody's token."""
        self.session = 0
        """By which it contributes, or attends; 0: by none, so far."""
        self.is_counted = False
        """Whether it counts among the open calls of that token."""
        self._note = note
        self._granted: set[tuple[Right, str, str]] = set()
        self.moved_bytes = 0
        """Payload that it brought, or was answered, since its rate was looked at last."""
        self.changed = asyncio.Event()
        """Set when what was too early may be there."""
        self.is_short = False
        """Whether its handler, going on from a message of up to SHORT_BYTES_MAX or none, takes less
        time than a thread to be woken: then it runs on the loop's thread. The handler says so."""
        self.ending: ShardwellError | None = None
        """Why the server ends it, if it does."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        deadline_s = context.time_remaining()
        self._deadline_s = None if deadline_s is None else time.monotonic() + deadline_s
        self._is_over = False

    def check(self, right: Right, kind: str, name: str) -> None:
        """Refuses what whoever makes the call may not do; looked at once a call and name.

        Args:
            right: What for.
            kind: "parameter", "table" or "group".
            name: Of that.

        Raises:
            AccessDeniedError: no such right.
        """
        asked = (right, kind, name)
        if asked in self._granted:
            return
        self.principal.check(right, kind, name)
        if len(self._granted) < _GRANTED_COUNT_MAX:
            self._granted.add(asked)
        self.note("opened", kind=kind, name=name, right=right.word)

    def has_asked_for(self, kind: str, name: str) -> bool:
        """Whether it was granted anything of a name, or so many that nobody knows."""
        granted = list(self._granted)
        return len(granted) >= _GRANTED_COUNT_MAX or any(
            each[1:] == (kind, name) for each in granted
        )

    def note(self, event: str, **fields: Any) -> None:
        """Adds a line to the audit log, with who makes the call."""
        if self._note is no_audit:
            return
        shown: Any = self.context.auth_context()
        certificate = shown.get("x509_common_name")
        self._note(
            event,
            token=self.principal.name,
            certificate=certificate[0].decode(errors="replace") if certificate else None,
            remote=urllib.parse.unquote(self.context.peer()),
            method=self.method,
            **fields,
        )

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the caller's deadline; None if there is none."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    @property
    def is_active(self) -> bool:
        """Whether somebody still waits for it; any thread may ask."""
        return not self._is_over

    def wake(self) -> None:
        """What was too early may be there. From any thread."""
        with suppress(RuntimeError):  # the loop has ended, and the call with it
            self._loop.call_soon_threadsafe(self.changed.set)

    def end(self, error: ShardwellError) -> None:
        """Ends it with that error, when its handler yields. From any thread."""
        self._loop.call_soon_threadsafe(self.end_now, error)

    def soon(self, act: Callable[[], None]) -> None:
        """Runs something on the loop's thread. From any thread."""
        self._loop.call_soon_threadsafe(act)

    def note_end(self) -> None:
        """Nobody waits for it any more."""
        self._is_over = True

    def end_now(self, error: ShardwellError) -> None:
        """The same, from the loop's thread."""
        if not self._is_over and self.ending is None:
            self.ending = error
            assert self._task is not None
            self._task.cancel()


class _Step(NamedTuple):
    """What came of a handler's going on until it needed something."""

    answers: deque[bytes]
    needs: Any = None
    """None: that the answers are written."""
    response: Any = None
    has_ended: bool = False
    error: Exception | None = None


def _method_of(handler: Callable[..., Any]) -> str:
    """The RPC's name, by that of its handler."""
    return "".join(word.capitalize() for word in handler.__name__.split("_"))


def _sealed_once(response: Any) -> bytes:
    """The bytes of a response; its CRC is computed here, unless its handler has, on a thread."""
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


class _GoneIsCancelled:
    """Takes gRPC's errors for what they mean: the caller has gone, which may be told later."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, grpc.aio.AbortError):
            return  # it has ended as it was asked to
        if isinstance(error, grpc.aio.BaseError):
            raise asyncio.CancelledError from None


_GONE_IS_CANCELLED = _GoneIsCancelled()


class _AnswerRoom:
    """Bytes of answers that are being written. For the loop's thread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._freed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for one more, which may be of any size."""
        return self._bytes >= self._bytes_max

    async def enter(self) -> None:
        """Returns when there is room.

        Raises:
            LimitError: others did not read theirs.
        """
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
        """Returns when gRPC has taken it for its line, which it does as its reader reads."""
        self._bytes += len(answer)
        try:
            with _GONE_IS_CANCELLED:
                await context.write(answer)
        finally:
            self._bytes -= len(answer)
            self._freed.set()


class Calls:
    """Makes gRPC's handlers of ours. For the loop's thread.

    Args:
        threads: Where handlers run.
        streams: Counts calls that are streams.
        access: Who is let in.
        usages: What the owners of tokens use.
        note: Takes lines of the audit log.
        shard_index: Which shard answers, for the errors.
        answer_bytes_max: Bytes of answers that wait to be written, except one a thread.
    """

    def __init__(
        self,
        threads: WorkThreads,
        streams: OpenStreams,
        *,
        access: Access,
        usages: Usages,
        note: Note = no_audit,
        shard_index: int,
        answer_bytes_max: int,
    ) -> None:
        self._threads = threads
        self._streams = streams
        self._access = access
        self._usages = usages
        self._note = note
        self._shard_index = shard_index
        self._room = _AnswerRoom(answer_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._open: set[Call] = set()
        self.refusal_counts: Counter[str] = Counter()
        """Calls that ended with an error, by its name; any thread may read it."""
        self.turned_away_s: float | None = None
        """When somebody was refused last for want of a token or right; None: nobody was."""

    def wake_all(self) -> None:
        """Has all calls look again that wait for other workers: the shard stops, say."""
        for call in self._open:
            call.changed.set()

    def end_those_with_name(self, kind: str, name: str, message: str) -> None:
        """Ends calls that were granted a name, to be made again by their client.

        From any thread but the loop's. What their handlers still come to is answered to nobody.

        Args:
            kind: "parameter" or "table".
            name: Of that.
            message: Why they end.
        """
        ended = threading.Event()

        def end() -> None:
            for call in list(self._open):
                if call.has_asked_for(kind, name):
                    call.end_now(ShardUnavailableError(message))
            ended.set()

        self._loop.call_soon_threadsafe(end)
        ended.wait(_END_S)

    def end_those_without_token(self) -> None:
        """Ends calls whose token has ended meanwhile, or changed: their client has another one."""
        for call in list(self._open):
            try:
                self._access.check_still(call.principal)
            except AuthenticationError as error:
                call.end(error)

    def end_those_of_session(self, session: int, call: Call, error: ShardwellError) -> None:
        """Ends, soon, calls by which a session contributes or attends; from any thread.

        Args:
            session: Its number.
            call: The one that asks for it.
            error: Why.
        """

        def end() -> None:
            for each in list(self._open):
                if each.session == session:
                    each.end(error)

        call.soon(end)

    # What gRPC takes.

    def unary(
        self,
        handler: Callable[[Any, Call], Any],
        request_type: Any,
        *,
        is_urgent: bool = False,
        is_counted: bool = True,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """One request, one response; `handler(request, call)` may be a plain function.

        An urgent one waits for no rate: others' seats depend on it. One that is not counted is none
        of the calls that a token may have open, as each session has one at the most.
        """
        begin = parsed(handler, request_type)

        async def serve(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            return await self._served(
                context,
                handler,
                begin,
                has_request=True,
                is_urgent=is_urgent,
                is_counted=is_counted,
            )

        # Whose one message is read here: gRPC would wait for it before anybody knows who calls.
        return grpc.stream_unary_rpc_method_handler(serve, response_serializer=_sealed_once)

    def held(
        self, handler: Callable[[Any, Call], Handling], request_type: Any
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """One request, and no answer as long as the call is open; it is not counted as a stream."""
        begin = parsed(handler, request_type)

        async def serve(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await self._served(context, handler, begin, has_request=True, is_urgent=True)

        return grpc.stream_stream_rpc_method_handler(serve)

    def answers(
        self, handler: Callable[[Any, Call], Handling], request_type: Any
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """One request, a stream of answers."""
        begin = parsed(handler, request_type)

        async def serve(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await self._served(context, handler, begin, is_stream=True, has_request=True)

        return grpc.stream_stream_rpc_method_handler(serve)

    def messages(self, handler: Callable[[Call], Handling]) -> grpc.RpcMethodHandler[Any, Any]:
        """A stream of messages, one response."""

        async def serve(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            return await self._served(context, handler, handler, is_stream=True)

        return grpc.stream_unary_rpc_method_handler(serve, response_serializer=_sealed_once)

    def both(self, handler: Callable[[Call], Handling]) -> grpc.RpcMethodHandler[Any, Any]:
        """A stream of messages, a stream of answers."""

        async def serve(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await self._served(context, handler, handler, is_stream=True)

        return grpc.stream_stream_rpc_method_handler(serve)

    # How they run.

    async def _served(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        handler: Callable[..., Any],
        begin: Callable[..., Any],
        *,
        is_stream: bool = False,
        has_request: bool = False,
        is_urgent: bool = False,
        is_counted: bool = True,
    ) -> Any:
        """The response; or the call has ended with the status that stands for its error.

        Args:
            context: gRPC's.
            handler: Whose name says which RPC it is.
            begin: Given the call; before it the request, if it has one.
            is_stream: Whether it counts as a stream.
            has_request: Whether it has one message, which comes at once.
            is_urgent: Whether it waits for no rate.
            is_counted: Whether it is one of the calls that its token may have open.
        """
        call = Call(context, _method_of(handler), self._note)
        self._open.add(call)
        try:
            if self._access.asks:
                await self._identify(call, is_urgent=is_urgent, is_counted=is_counted)
            if has_request:
                begin = partial(begin, await self._request(call))
            if is_stream:
                await self._streams.enter(call)
            response = await self._run(call, begin, is_stream=is_stream)
            if not (is_stream or is_urgent) and response is not None:
                call.moved_bytes += response.ByteSize()
                await self._paced(call, free_bytes=CALL_BYTES)  # it has paid for so many
            return response
        except asyncio.CancelledError:
            if call.ending is None:
                raise
            await self._abort(call, call.ending)
        except Exception as error:
            await self._abort(call, error)
        finally:
            call.note_end()
            self._open.discard(call)
            self._streams.leave(call)
            if call.is_counted and call.usage is not None:
                call.usage.add("calls", -1)

    async def _identify(self, call: Call, *, is_urgent: bool, is_counted: bool) -> None:
        """Finds out who makes a call, and counts it; returns when it may begin.

        Raises:
            AuthenticationError: nobody who is let in.
            LimitError: the token's quota is used up.
        """
        metadata: Any = call.context.invocation_metadata()
        call.principal = principal = self._access.principal(authorization_of(metadata))
        if principal.name:
            call.usage = usage = self._usages.of(principal.name, principal.quota)
            if not is_urgent:
                usage.check_rate()
            if is_counted:
                usage.take("calls")
                call.is_counted = True
            delay_s = usage.delay_s(CALL_BYTES)
            if delay_s > 0 and not is_urgent:
                await asyncio.sleep(delay_s)

    async def _paced(self, call: Call, *, free_bytes: int = 0) -> None:
        """Counts what has passed, and returns when no more of it has than the quota allows."""
        if call.usage is None or call.usage.quota.bytes_per_s is None:
            return
        delay_s = call.usage.delay_s(max(call.moved_bytes, CALL_BYTES) - free_bytes)
        call.moved_bytes = 0
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def _request(self, call: Call) -> bytes:
        """The message of a call that has one.

        Raises:
            ArgumentError: there is none.
            ShardUnavailableError: it does not come.
        """
        try:
            async with asyncio.timeout(_REQUEST_S):
                with _GONE_IS_CANCELLED:
                    message = await call.context.read()
        except TimeoutError:
            raise ShardUnavailableError(
                f"the request of {call.method} did not come within {_REQUEST_S:g} s; call again"
            ) from None
        if message is grpc.aio.EOF:
            raise ArgumentError(f"{call.method} has a request, and none came")
        request: bytes = message
        call.moved_bytes += len(request)
        return request

    async def _run(self, call: Call, begin: Callable[[Call], Any], *, is_stream: bool) -> Any:
        # Of a stream that only makes the generator.
        begun = begin(call) if is_stream else await self._threads.run(lambda: begin(call))
        if not isinstance(begun, Generator):
            return begun
        handling: Handling = begun
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
                if is_stream and has_moved:
                    await self._paced(call)
                while step.answers:
                    await self._room.write(call.context, step.answers.popleft())
                if step.error is not None:
                    raise step.error
                if step.has_ended:
                    return step.response
                del step
                if needs is LONG:
                    call.is_short = False
                elif needs is not None:
                    message = await self._what(call, needs)
        finally:
            if isinstance(needs, NotYet):
                needs.forget()
            if not runs:  # else it is closed when it yields
                self._threads.begin(handling.close)

    def _abandon(self, handling: Handling, step: _Step | None) -> None:
        """Ends a handler whose call was cancelled while it ran."""
        if step is not None and isinstance(step.needs, NotYet):
            step.needs.forget()
        self._threads.begin(handling.close)

    def _what(self, call: Call, needs: Any) -> Awaitable[bytes | None]:
        if isinstance(needs, NotYet):
            return self._wait(call, needs)
        if isinstance(needs, Read):
            return self._read(call, needs)
        assert needs is HELD
        return self._hold(call)

    async def _wait(self, call: Call, too_early: NotYet) -> None:
        """Returns when it may not be too early any more."""
        timer = asyncio.get_running_loop().call_later(
            max(too_early.deadline_s - time.monotonic(), 0), call.changed.set
        )
        try:
            await call.changed.wait()
        finally:
            timer.cancel()
            too_early.forget()

    async def _read(self, call: Call, what: Read) -> bytes | None:
        if what is Read.NEXT_STEP:
            self._streams.note_idle(call)
        try:
            with _GONE_IS_CANCELLED:
                message = await call.context.read()
        finally:
            self._streams.note_busy(call)
        return None if message is grpc.aio.EOF else message

    async def _hold(self, call: Call) -> None:
        with _GONE_IS_CANCELLED:
            await call.context.send_initial_metadata(())
        await asyncio.get_running_loop().create_future()

    async def _abort(self, call: Call, error: Exception) -> None:
        """Ends a call with the status that stands for `error`."""
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
                peer=urllib.parse.unquote(call.context.peer()),
            )
        if isinstance(error, AuthenticationError | AccessDeniedError):
            if error is not call.ending:
                self.turned_away_s = time.monotonic()
            event = "ended" if error is call.ending else "refused"
            kind = "parameter" if error.parameter else "table" if error.table else None
            name = error.parameter or error.table
            call.note(event, kind=kind, name=name, reason=error.message)
        error.__traceback__ = None  # it has messages at hand, and gRPC keeps the error
        with _GONE_IS_CANCELLED:
            await call.context.abort(status.code, status.details, status.trailing_metadata)
