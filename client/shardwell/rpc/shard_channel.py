"""The calls of one shard, and their deadlines.

Every call ends in a result or a ShardwellError; whether it is made again is for others to decide.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from shardwell.connection.credentials import NO_CREDENTIALS, Credentials
from shardwell.connection.options import unary_stub
from shardwell.errors import (
    ClosedError,
    CorruptChunkError,
    SessionUnknownError,
    ShardUnavailableError,
    ShardwellError,
    StepOrderError,
    VersionMismatchError,
)
from shardwell.process.spans import Spans
from shardwell.rpc import recording
from shardwell.rpc.held_call import HeldCall
from shardwell.rpc.session import Session, new_session
from shardwell.specs.deadlines import TIMEOUT_S_MIN
from shardwell.specs.formats import software_version
from shardwell.threads.calls import cancelled_by
from shardwell.transport.endpoint import SAID_S, ShardEndpoint
from shardwell.transport.unix_call import CallEndedError
from shardwell.v1 import names_pb2, session_pb2, table_pb2, trace_pb2
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum

_LOG = logging.getLogger("shardwell")
_SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name
_TABLE_SERVICE = table_pb2.DESCRIPTOR.services_by_name["TableService"].full_name
_NAME_SERVICE = names_pb2.DESCRIPTOR.services_by_name["NameService"].full_name
_SESSION_SERVICE = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
EXCHANGE = f"/{_SERVICE}/Exchange"
EXCHANGE_ROWS = f"/{_TABLE_SERVICE}/ExchangeRows"
_HEARTBEAT_CONNECTION = -1
"""Streams have numbers from 0."""
_CERTIFICATES_S = 1.0
"""A client that waits for a shard looks so often whether its certificates have changed."""
_ABSENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

ResponseT = TypeVar("ResponseT", bound=Message)


class ShardChannel(ShardEndpoint):
    """One shard, as a client calls it. Any thread may do so."""

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
        super().__init__(shard_index, address, same_host=same_host, credentials=credentials)
        self.spans = spans or Spans()
        self.session = session or new_session()
        self.worker_id = ""
        """The id under which the client contributes; empty before it attends."""
        self.has_seats = False
        """True if the client may have taken a seat on the shard."""
        self._attended_with = ""
        """The authorization of the call by which it attends."""
        self._logged_s = -SAID_S
        self._bind()
        self._attendance = HeldCall(self._attended, super().translate)
        self._giver = recording.SpanGiver(
            self.spans, lambda: self._channel.current, self._asks_for_recordings, self.translate
        )

    def _bind(self) -> None:
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

    def attend(self) -> None:
        """Ensures that the shard knows, or is about to know, that the client's session lives."""
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
            software_version=software_version(),
        )
        return self._attend(request, wait_for_ready=True)

    def _begin_anew(self) -> None:
        self._attendance.begin_anew()
        self._giver.begin_anew()

    def _asks_for_recordings(self) -> trace_pb2.AwaitRecordingRequest:
        return trace_pb2.AwaitRecordingRequest(
            shard=self.identity, session=self.session.number, worker_id=self.worker_id
        )

    def end_session(self, timeout_s: float) -> Any:
        """Begins to tell the shard that the session has ended in order; returns the call."""
        self._attendance.let_end()
        request = session_pb2.EndSessionRequest(shard=self.identity, session=self.session.number)
        return self._end_session.future(request, timeout=timeout_s)

    def heartbeat(self, request: session_pb2.HeartbeatRequest, timeout_s: float) -> Any:
        """Begins to say that a member lives, over a connection of its own; returns the call."""
        stub = unary_stub(
            self._channel_of(_HEARTBEAT_CONNECTION),
            f"/{_SESSION_SERVICE}/Heartbeat",
            session_pb2.HeartbeatResponse,
        )
        return stub.future(request, timeout=timeout_s)

    def end_tenure(
        self, request: session_pb2.EndTenureRequest, timeout_s: float
    ) -> session_pb2.EndTenureResponse:
        """Ends a member's tenure, or asks the member to leave; blocks up to `timeout_s`."""
        request.shard.CopyFrom(self.identity)
        with self.translated(request.parameter or None, request.table or None):
            call = self.start(
                "EndTenure",
                request,
                session_pb2.EndTenureResponse,
                timeout_s=timeout_s,
                service=_SESSION_SERVICE,
            )
            response: session_pb2.EndTenureResponse = self.result_of(call)
            return response

    def delete(
        self, request: names_pb2.DeleteRequest, timeout_s: float
    ) -> names_pb2.DeleteResponse:
        """Does a stage of a deletion; blocks up to `timeout_s`."""
        request.shard.CopyFrom(self.identity)
        with self.translated():
            call = self.start(
                "Delete",
                request,
                names_pb2.DeleteResponse,
                timeout_s=timeout_s,
                service=_NAME_SERVICE,
            )
            response: names_pb2.DeleteResponse = self.result_of(call)
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
        """Makes a unary call, of TableService on behalf of a table; blocks up to `timeout_s`."""
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
        """Sends a slice that fits into one message; errors are gRPC's. Blocks up to `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        if self.unix.is_there:
            answer = self._asked_here(f"/{_SERVICE}/InitWeights", message, timeout_s)
            if answer is not None:
                return self.received(_parsed(pb.InitWeightsResponse, answer), parameter)
        rest_s = max(until_s - time.monotonic(), TIMEOUT_S_MIN)
        call = self._init_weights_at_once.future(message, timeout=rest_s)
        response: pb.InitWeightsResponse = self.result_of(call, parameter)
        return response

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
        """Begins a unary call; returns a gRPC future for `result_of`."""
        name = f"/{service}/{method}" if service else self._method_name(method, of_table=of_table)
        stub = self._stubs.get(name)
        if stub is None:
            stub = self._stubs[name] = unary_stub(self._channel.current, name, response_type)
        return stub.future(request, timeout=timeout_s, wait_for_ready=wait_for_ready)

    def result_of(self, call: Any, parameter: str | None = None, table: str | None = None) -> Any:
        """Blocks for the answer of a call; grpc.RpcError: it failed, or was cancelled."""
        with cancelled_by(call.cancel):
            try:
                response = call.result()
            except grpc.FutureCancelledError:
                raise CallEndedError.cancelled() from None
        return self.received(response, parameter, table)

    def received(
        self, response: ResponseT | None, parameter: str | None = None, table: str | None = None
    ) -> ResponseT:
        """Checks the answer of a call; None is one that gRPC has lost: its frame was damaged."""
        if response is None:
            raise ShardUnavailableError(
                f"the answer of shard {self.shard_index} at {self.address} was lost; call again",
                shard_index=self.shard_index,
                parameter=parameter,
                table=table,
            )
        try:
            checksum.check_sealed(response)
        except (CorruptChunkError, VersionMismatchError) as error:
            raise type(error)(
                f"shard {self.shard_index} at {self.address} answered: {error.message}",
                shard_index=self.shard_index,
                parameter=parameter,
                table=table,
            ) from None
        return response

    def clock_offset(self, timeout_s: float) -> recording.ClockOffset:
        """Measures the shard's clock against this process's; blocks 4 timeouts at most."""
        with self.translated():
            return recording.clock_offset(self._channel.current, self.identity, timeout_s)

    def record(self, wait_s: float, timeout_s: float) -> Iterator[trace_pb2.RecordResponse]:
        """Yields the shard's last spans, then its clients'; blocks up to `timeout_s` in all."""
        with self.translated():
            yield from recording.record(self._channel.current, self.identity, wait_s, timeout_s)

    def is_worth_telling(self) -> bool:
        """Returns True once a minute: a silent shard is logged no more often, however many wait."""
        now_s = time.monotonic()
        with self._lock:
            is_due = now_s >= self._logged_s + SAID_S
            if is_due:
                self._logged_s = now_s
        return is_due

    def answers(self, timeout_s: float) -> bool:
        """Waits until the shard answers; False if it has not, or the connection broke again.

        Blocks up to `timeout_s`. Nothing is sent before gRPC has a connection, which it tries to
        make all the while.
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
        if not self._channel.renew():
            return False
        self._bind()
        return True

    def _asked(self, timeout_s: float) -> grpc.StatusCode:
        question = self.question(timeout_s)
        code = self._code_of(question)
        if code is grpc.StatusCode.OK and (answer := question.result()) is not None:
            with contextlib.suppress(CorruptChunkError, ShardUnavailableError):
                self.received(_parsed(pb.GetStatusResponse, answer))
        return code

    def question(self, timeout_s: float) -> Any:
        """Begins to ask the shard for its identity; returns the call."""
        stub: Any = self._channel.current.unary_unary(
            f"/{_SERVICE}/GetStatus",
            request_serializer=checksum.sealed,
        )
        question = pb.GetStatusRequest(identity_only=True)
        with self.translated():
            return stub.future(question, timeout=timeout_s, wait_for_ready=True)

    def is_silent(self, question: Any) -> bool:
        """Returns True if no answer to a `question` has come in its time; blocks until then."""
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

    def translate(
        self, error: grpc.RpcError, parameter: str | None = None, table: str | None = None
    ) -> ShardwellError:
        """The Shardwell error of a failed call; attends anew if the session is not known."""
        found = super().translate(error, parameter, table)
        if isinstance(found, SessionUnknownError):
            self._attendance.doubt()
        return found

    def close(self) -> None:
        """Ends the session's calls, and every connection and the calls on it."""
        self._attendance.close()
        self._giver.close()
        super().close()


def _parsed(response_type: type[ResponseT], answer: bytes) -> ResponseT | None:
    try:
        return response_type.FromString(answer)
    except DecodeError:
        return None


def went_on_elsewhere(
    channel: ShardChannel, what: str, worker_id: str, *, expected: int, found: int, **where: Any
) -> StepOrderError:
    """Makes the error for a shard whose version is not that of this process's last step."""
    return StepOrderError(
        f"shard {channel.shard_index} is at version {found} of {what}; expected {expected}, which "
        f"step {expected - 1} of worker {worker_id!r} makes: another process went on under that "
        "worker_id, or other shards lost their newest steps; open it again and go on at its "
        "next_step",
        shard_index=channel.shard_index,
        worker_id=worker_id,
        **where,
    )
