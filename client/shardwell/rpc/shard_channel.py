"""The connection to one shard: its address, its calls and their deadlines.

Every call ends in a result or a ShardwellError; whether it is made again is for others to decide.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from shardwell.errors import (
    AccessDeniedError,
    AuthenticationError,
    ClosedError,
    CorruptChunkError,
    LimitError,
    SessionUnknownError,
    ShardUnavailableError,
    ShardwellError,
    StepOrderError,
)
from shardwell.process.descriptors import check_descriptors
from shardwell.process.spans import Spans
from shardwell.process.unix_sockets import connected
from shardwell.rpc import recording
from shardwell.rpc.absence import why_absent
from shardwell.rpc.arena import Arenas
from shardwell.rpc.calls import cancelled_by
from shardwell.rpc.channel import Channel
from shardwell.rpc.credentials import NO_CREDENTIALS, Credentials
from shardwell.rpc.error_codes import from_rpc_error
from shardwell.rpc.held_call import HeldCall
from shardwell.rpc.neighbour import Neighbour
from shardwell.rpc.options import unary_stub
from shardwell.rpc.session import Session, new_session
from shardwell.rpc.tls import check_trust
from shardwell.rpc.unix_call import UnixCall, UnixCalls
from shardwell.rpc.unix_questions import UnixQuestions
from shardwell.specs.deadlines import TIMEOUT_S_MIN
from shardwell.v1 import arena_pb2, names_pb2, session_pb2, table_pb2, trace_pb2, types_pb2
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum

_LOG = logging.getLogger("shardwell")
_SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name
_TABLE_SERVICE = table_pb2.DESCRIPTOR.services_by_name["TableService"].full_name
_NAME_SERVICE = names_pb2.DESCRIPTOR.services_by_name["NameService"].full_name
_SESSION_SERVICE = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
EXCHANGE = f"/{_SERVICE}/Exchange"
EXCHANGE_ROWS = f"/{_TABLE_SERVICE}/ExchangeRows"
_DESCRIPTOR_RESERVE = 64
"""Descriptors that streams on this machine leave to the process; further ones go over gRPC."""
_LOOKING = threading.Lock()
"""For who looks whether they are there, which takes them for a moment."""
_CONNECT_S = 2.0
"""How long a shard on this machine may take to let a stream in."""
_CERTIFICATES_S = 1.0
"""How often a client that waits for a shard looks whether its certificates have changed."""
_SAID_S = 60.0
"""How often it is logged that a token is not believed, or that the shard does not answer."""
_ABSENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

ResponseT = TypeVar("ResponseT", bound=Message)


class CallCancelledError(grpc.RpcError):
    """A call was cancelled on this side."""

    def code(self) -> grpc.StatusCode:
        """Says so."""
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        """Says what happened."""
        return "the call was given up"

    def trailing_metadata(self) -> tuple[()]:
        """Has none."""
        return ()


class ShardChannel:
    """One shard, as a client sees it. Any thread may call it."""

    def __init__(
        self,
        shard_index: int,
        address: str,
        session: Session | None = None,
        *,
        same_host: bool = True,
        credentials: Credentials = NO_CREDENTIALS,
        spans: Spans | None = None,
    ) -> None:
        self.shard_index = shard_index
        self.address = address
        self.name = f"shard {shard_index}"
        """For people."""
        self.spans = spans or Spans()
        """What the client did last, with all shards."""
        self.identity = types_pb2.ShardIdentity()
        self.arenas = Arenas(
            self.name,
            lambda: arena_pb2.ArenaOffer(shard=self.identity),
            is_wanted=same_host,
        )
        """Memory to be shared with the shard, if it is on this machine."""
        self.unix = Neighbour("", is_wanted=same_host)
        """Where it takes streams of this machine."""
        self._unix_calls: weakref.WeakSet[UnixCall] = weakref.WeakSet()
        this = weakref.ref(self)  # which the connections are not to keep

        def connection(timeout_s: float) -> socket.socket:
            channel = this()
            if channel is None:
                raise ConnectionAbortedError("the client was dropped")
            return channel._unix_connection(timeout_s)

        self._questions = UnixQuestions(connection)
        self.session = session or new_session()
        """Of the client."""
        self.worker_id = ""
        """Under which the client contributes; empty before it attends."""
        self.has_seats = False
        """Whether the client may have taken a seat on the shard."""
        self._closed = False
        self._attended_with = ""
        """What the call brought by which it attends."""
        self._said = ""
        """Why the token is not believed any more, as it was logged last."""
        self._said_s = 0.0
        """When."""
        self._told_s = -_SAID_S
        """When it was logged last that the shard does not answer."""
        self._tls = credentials.tls
        self._token = credentials.token
        self._credentials = credentials
        self._channel = Channel(address, credentials)
        self._others: dict[int, Channel] = {}
        """Connections beside that, by number."""
        self._lock = threading.Lock()
        self._bind()
        self._attendance = HeldCall(self._attended, self._translate)
        self._giver = recording.SpanGiver(
            self.spans, lambda: self._channel.current, self._asks_for_recordings, self.translate
        )

    def _bind(self) -> None:
        """Makes what calls the shard over the channel that is used now."""
        channel = self._channel.current
        self._stubs: dict[str, Any] = {}
        self.init_weights: Any = channel.stream_unary(
            f"/{_SERVICE}/InitWeights",
            response_deserializer=pb.InitWeightsResponse.FromString,
        )
        self._init_weights_at_once: Any = channel.unary_unary(
            f"/{_SERVICE}/InitWeights",
            response_deserializer=pb.InitWeightsResponse.FromString,
        )
        """A stream of one message, which needs no thread that writes it."""
        self.snapshot: Any = channel.unary_stream(
            f"/{_SERVICE}/Snapshot",
            request_serializer=checksum.sealed,
        )
        self.scan_rows: Any = channel.unary_stream(
            f"/{_TABLE_SERVICE}/ScanRows",
            request_serializer=checksum.sealed,
        )
        self.load_rows: Any = channel.stream_unary(
            f"/{_TABLE_SERVICE}/LoadRows",
            response_deserializer=table_pb2.LoadRowsResponse.FromString,
        )
        self._attend: Any = channel.unary_stream(
            f"/{_SESSION_SERVICE}/Attend",
            request_serializer=checksum.sealed,
        )
        self._end_session: Any = unary_stub(
            channel, f"/{_SESSION_SERVICE}/EndSession", session_pb2.EndSessionResponse
        )

    def stream(self, method: str, connection: int = 0) -> Any:
        """What opens a stream over gRPC.

        Args:
            method: As gRPC names it.
            connection: Which one it goes over: 0 is that of all other calls.

        Raises:
            ClosedError: the client was closed.
        """
        if connection == 0:
            return self._channel.current.stream_stream(method)
        with self._lock:
            if self._closed:
                raise ClosedError("the client was closed; connect again")
            if connection not in self._others:
                self._others[connection] = Channel(self.address, self._credentials)
            other = self._others[connection]
        other.renew()
        return other.current.stream_stream(method)

    def unix_call(self, method: str, calls: UnixCalls, timeout_s: float) -> UnixCall:
        """A stream to the shard, on this machine. Blocks up to `timeout_s`, and mostly not at all.

        Raises:
            OSError: it takes none now.
        """
        call = UnixCall(self._unix_connection(timeout_s), method, calls, self._authorization())
        self._unix_calls.add(call)
        return call

    def _unix_connection(self, timeout_s: float) -> socket.socket:
        """A connection to the shard, on this machine.

        Raises:
            OSError: it takes none now.
        """
        if self._closed:
            raise ConnectionAbortedError("the client was closed")
        timeout_s = max(min(timeout_s, _CONNECT_S), 0.001)
        try:
            with _LOOKING:
                check_descriptors(_DESCRIPTOR_RESERVE, "a stream to a shard on this machine")
        except LimitError as error:
            raise OSError(error.message) from None
        try:
            connection = connected(self.unix.address, socket.SOCK_STREAM, timeout_s)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError | FileNotFoundError):
                self.unix.note_missing()
            elif not isinstance(error, BlockingIOError):  # as many come at once as it lets wait
                self.unix.pause()
            _LOG.debug("shard %d takes no streams here: %s", self.shard_index, error)
            raise
        self.unix.note_reached()
        return connection

    def note_end(self, *, is_away: bool) -> None:
        """A call has ended that may have used this machine; `is_away`: for want of the shard."""
        self.arenas.server.note_end(is_away=is_away)
        self.unix.note_end(is_away=is_away)

    def attend(self) -> None:
        """Sees to it that the shard knows, or is about to know, that the client's session lives.

        Raises:
            LimitError: too many clients are connected.
        """
        if self.worker_id and self._attended_with != self._authorization():
            self._begin_anew()  # its session is that of the token by which it attends
        if self.worker_id:
            self._attendance.ensure()
        if self.worker_id and self.shard_index == 0:
            self._giver.ensure()

    def _attended(self) -> Any:
        self._renew()  # also of a client that does nothing the connections end
        self._attended_with = self._authorization()
        request = session_pb2.AttendRequest(
            shard=self.identity,
            worker_id=self.worker_id,
            session=self.session.number,
            host=self.session.host,
            pid=self.session.pid,
            process=self.session.process,
        )
        return self._attend(request, wait_for_ready=True)

    def _begin_anew(self) -> None:
        """Makes what is held open over the channel, and with the token, that is used now."""
        self._attendance.begin_anew()
        self._giver.begin_anew()

    def _asks_for_recordings(self) -> trace_pb2.AwaitRecordingRequest:
        return trace_pb2.AwaitRecordingRequest(
            shard=self.identity, session=self.session.number, worker_id=self.worker_id
        )

    def _authorization(self) -> str:
        """What calls bring now; empty: nothing."""
        return "" if self._token is None else self._token.authorization()

    def end_session(self, timeout_s: float) -> Any:
        """Tells the shard that the session has ended in order: a call that is under way."""
        self._attendance.let_end()
        request = session_pb2.EndSessionRequest(shard=self.identity, session=self.session.number)
        return self._end_session.future(request, timeout=timeout_s)

    def change_name(
        self, request: names_pb2.DeleteRequest | names_pb2.RenameRequest, timeout_s: float
    ) -> names_pb2.DeleteResponse | names_pb2.RenameResponse:
        """Does a stage of a deletion or renaming; blocks up to `timeout_s`."""
        request.shard.CopyFrom(self.identity)
        is_deletion = isinstance(request, names_pb2.DeleteRequest)
        with self.translated():
            call = self.start(
                "Delete" if is_deletion else "Rename",
                request,
                names_pb2.DeleteResponse if is_deletion else names_pb2.RenameResponse,
                timeout_s=timeout_s,
                service=_NAME_SERVICE,
            )
            response: names_pb2.DeleteResponse | names_pb2.RenameResponse = self.result_of(call)
            return response

    def call(
        self,
        method: str,
        request: Any,
        response_type: type[ResponseT],
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        parameter: str | None = None,
        table: str | None = None,
    ) -> ResponseT:
        """A unary call, of TableService on behalf of a table; blocks up to `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        with self.translated(parameter, table):
            if self.unix.is_there and not wait_for_ready:
                name = self._method_name(method, of_table=table is not None)
                answer = self._asked_here(name, checksum.sealed(request), timeout_s)
                if answer is not None:
                    return self.received(_parsed(response_type, answer), parameter, table)
            call = self.start(
                method,
                request,
                response_type,
                timeout_s=max(until_s - time.monotonic(), TIMEOUT_S_MIN),
                wait_for_ready=wait_for_ready,
                of_table=table is not None,
            )
            response: ResponseT = self.result_of(call, parameter, table)
            return response

    def set_first_weights(
        self, message: bytes, timeout_s: float, parameter: str
    ) -> pb.InitWeightsResponse:
        """InitWeights of a slice that fits into one message; blocks up to `timeout_s`.

        Raises:
            grpc.RpcError: it failed; see `translated`.
        """
        until_s = time.monotonic() + timeout_s
        if self.unix.is_there:
            answer = self._asked_here(f"/{_SERVICE}/InitWeights", message, timeout_s)
            if answer is not None:
                return self.received(_parsed(pb.InitWeightsResponse, answer), parameter)
        rest_s = max(until_s - time.monotonic(), TIMEOUT_S_MIN)
        call = self._init_weights_at_once.future(message, timeout=rest_s)
        response: pb.InitWeightsResponse = self.result_of(call, parameter)
        return response

    def _asked_here(self, method: str, request: bytes, timeout_s: float) -> bytes | None:
        """The answer of a shard on this machine; None: call over gRPC."""
        return self._questions.ask(method, request, self._authorization(), timeout_s)

    @staticmethod
    def _method_name(method: str, *, of_table: bool) -> str:
        return f"/{_TABLE_SERVICE if of_table else _SERVICE}/{method}"

    def start(
        self,
        method: str,
        request: Any,
        response_type: type[ResponseT],
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        of_table: bool = False,
        service: str = "",
    ) -> Any:
        """The same without waiting: a gRPC future; see `result_of`."""
        name = f"/{service}/{method}" if service else self._method_name(method, of_table=of_table)
        stub = self._stubs.get(name)
        if stub is None:
            stub = self._stubs[name] = unary_stub(self._channel.current, name, response_type)
        return stub.future(request, timeout=timeout_s, wait_for_ready=wait_for_ready)

    def result_of(self, call: Any, parameter: str | None = None, table: str | None = None) -> Any:
        """What a call with one answer returns; blocks.

        Raises:
            grpc.RpcError: it failed, or was cancelled.
            ShardUnavailableError: gRPC has no answer, because its frame was damaged on its way.
        """
        with cancelled_by(call.cancel):
            try:
                response = call.result()
            except grpc.FutureCancelledError:
                raise CallCancelledError from None
        return self.received(response, parameter, table)

    def received(
        self, response: ResponseT | None, parameter: str | None = None, table: str | None = None
    ) -> ResponseT:
        """The answer of a call that succeeded.

        Raises:
            ShardUnavailableError: gRPC has none, because its frame was damaged on its way.
            CorruptChunkError: its CRC does not fit.
        """
        if response is None:
            raise ShardUnavailableError(
                f"the answer of shard {self.shard_index} at {self.address} was lost; call again",
                shard_index=self.shard_index,
                parameter=parameter,
                table=table,
            )
        try:
            checksum.check_sealed(response)
        except CorruptChunkError as error:
            raise CorruptChunkError(
                f"shard {self.shard_index} answered: {error.message}",
                shard_index=self.shard_index,
                parameter=parameter,
                table=table,
            ) from None
        return response

    def clock_offset(self, timeout_s: float) -> recording.ClockOffset:
        """How far the shard's clock is ahead of this process's; blocks 4 timeouts at most."""
        with self.translated():
            return recording.clock_offset(self._channel.current, self.identity, timeout_s)

    def record(self, wait_s: float, timeout_s: float) -> Iterator[trace_pb2.RecordResponse]:
        """What the shard did last, then what its clients did; blocks up to `timeout_s` in all.

        Args:
            wait_s: How long clients have to give theirs; 0: they are not asked.
            timeout_s: For all of it.
        """
        with self.translated():
            yield from recording.record(self._channel.current, self.identity, wait_s, timeout_s)

    def is_worth_telling(self) -> bool:
        """Whether to log that it does not answer: not again for a minute, however many wait."""
        now_s = time.monotonic()
        with self._lock:
            is_due = now_s >= self._told_s + _SAID_S
            if is_due:
                self._told_s = now_s
        return is_due

    def answers(self, timeout_s: float) -> bool:
        """Waits until the shard answers; False if it has not, or the connection broke again.

        Blocks up to `timeout_s`, sending nothing before there is a connection, which gRPC tries to
        make all the while.

        Raises:
            ClosedError: the channel was closed, before or meanwhile.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            if self._renew():
                self._begin_anew()
            rest_s = max(until_s - time.monotonic(), 0.0)
            # Without certificates there is nothing to look at meanwhile.
            part_s = rest_s if self._tls is None else min(rest_s, _CERTIFICATES_S)
            code = self._asked(part_s)
            if code is not grpc.StatusCode.DEADLINE_EXCEEDED or part_s == rest_s:
                # Any other status is an answer, and says more when the call itself is made again.
                return code not in _ABSENT

    def _renew(self) -> bool:
        """Goes on over another channel, if certificates have changed; whether they have."""
        if not self._channel.renew():
            return False
        self._bind()
        return True

    def _asked(self, timeout_s: float) -> grpc.StatusCode:
        """How it ended to ask the shard who it is."""
        return self._code_of(self.question(timeout_s))

    def question(self, timeout_s: float) -> Any:
        """Asks the shard who it is: a call that is under way.

        Raises:
            ClosedError: the channel was closed.
        """
        stub: Any = self._channel.current.unary_unary(
            f"/{_SERVICE}/GetStatus",
            request_serializer=checksum.sealed,
        )
        question = pb.GetStatusRequest(identity_only=True)
        with self.translated():
            return stub.future(question, timeout=timeout_s, wait_for_ready=True)

    def is_silent(self, question: Any) -> bool:
        """Whether the shard has answered nothing in the time of a `question`; blocks until then.

        Raises:
            ClosedError: the channel was closed, before or meanwhile.
        """
        return self._code_of(question) is grpc.StatusCode.DEADLINE_EXCEEDED

    def _code_of(self, call: Any) -> grpc.StatusCode:
        try:
            with cancelled_by(call.cancel):
                error = call.exception()
        except grpc.FutureCancelledError as cancelled:
            error = cancelled
        if self._closed:
            raise ClosedError("the client was closed; connect again")
        return grpc.StatusCode.OK if error is None else call.code()

    def why_absent(self, timeout_s: float = 1.0) -> str:
        """What is at the shard's address, once it has not answered; see the function."""
        return why_absent(self.address, timeout_s, speaks_tls=self._tls is not None)

    def check_trust(self, timeout_s: float) -> None:
        """Looks why the shard can't be called, once a call has failed. Blocks up to `timeout_s`.

        Raises:
            AuthenticationError: it is there, and TLS keeps the two sides apart.
        """
        try:
            check_trust(f"shard {self.shard_index}", self.address, self._tls, timeout_s)
        except AuthenticationError as error:
            error.shard_index = self.shard_index
            raise

    @contextlib.contextmanager
    def translated(self, parameter: str | None = None, table: str | None = None) -> Iterator[None]:
        """Turns gRPC's errors in the block into Shardwell's."""
        try:
            yield
        except grpc.RpcError as error:
            raise self.translate(error, parameter, table) from None
        except ValueError as error:  # what gRPC raises for a closed channel
            if not self._closed:
                raise
            raise ClosedError(f"the client was closed ({error}); connect again") from None

    def translate(
        self, error: grpc.RpcError, parameter: str | None = None, table: str | None = None
    ) -> ShardwellError:
        """The Shardwell error that a failed call of this shard stands for.

        LimitError where this process has no descriptor left, so that it is not the shard's doing.
        """
        found = self._translate(error, parameter, table)
        if isinstance(found, SessionUnknownError):
            self._attendance.doubt()
        return found

    def _translate(
        self, error: grpc.RpcError, parameter: str | None = None, table: str | None = None
    ) -> ShardwellError:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            try:
                check_descriptors(1, f"a connection to {self.address}")
            except LimitError as lacking:
                return lacking
        found = from_rpc_error(
            error,
            shard_index=self.shard_index,
            address=self.address,
            parameter=parameter,
            table=table,
        )
        if isinstance(found, AuthenticationError | AccessDeniedError):
            return self._refused(found)
        return found

    def _refused(self, error: ShardwellError) -> ShardwellError:
        """The same error, with what only this side knows."""
        whose = "" if self._token is None else f" (of {self._token.path})"
        told = type(error)(
            f"shard {self.shard_index} at {self.address}: {error.message}{whose}",
            shard_index=self.shard_index,
            parameter=error.parameter,
            table=error.table,
        )
        # Whom it let in before has had a token that was good: another one may come in its file.
        is_known = bool(self.identity.cluster_id) and self._token is not None
        told.retryable = isinstance(told, AuthenticationError) and is_known
        now_s = time.monotonic()
        if told.retryable and (told.message != self._said or now_s - self._said_s > _SAID_S):
            self._said, self._said_s = told.message, now_s
            _LOG.warning("%s; calls wait for another one there, until their deadline", told.message)
        return told

    def close(self) -> None:
        """Ends the connection and every call on it."""
        with self._lock:
            self._closed = True
            others = list(self._others.values())
        self._attendance.close()
        self._giver.close()
        for channel in (self._channel, *others):
            channel.close()
        for call in list(self._unix_calls):
            call.cancel()
        self._questions.close()


def _parsed(response_type: type[ResponseT], answer: bytes) -> ResponseT | None:
    """An answer as gRPC would have it; None: it was damaged on its way."""
    try:
        return response_type.FromString(answer)
    except DecodeError:
        return None


class ToldOf:
    """Tells shards that are on this machine, as far as is known, how the block ended."""

    __slots__ = ("_channels",)

    def __init__(self, channels: Iterable[ShardChannel]) -> None:
        self._channels = channels

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        away = None
        if isinstance(error, ShardUnavailableError) and not isinstance(error, SessionUnknownError):
            away = error.shard_index  # and who does not know a session has answered
        for channel in self._channels:
            channel.note_end(is_away=channel.shard_index == away)


def went_on_elsewhere(
    channel: ShardChannel, what: str, worker_id: str, *, expected: int, found: int, **where: Any
) -> StepOrderError:
    """A worker's step had closed before, and steps after it, which need that worker."""
    return StepOrderError(
        f"shard {channel.shard_index} is at version {found} of {what}; expected {expected}, which "
        f"step {expected - 1} of worker {worker_id!r} makes: another process went on under that "
        "worker_id, or other shards lost their newest steps; open it again and go on at its "
        "next_step",
        shard_index=channel.shard_index,
        worker_id=worker_id,
        **where,
    )
