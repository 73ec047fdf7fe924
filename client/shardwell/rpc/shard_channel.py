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
from google.protobuf.message_factory import GetMessageClass

from shardwell.connection.credentials import NO_CREDENTIALS, Credentials
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
_METHODS = {
    method.name: method
    for module in (names_pb2, pb, session_pb2, table_pb2, trace_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
_PATHS = {
    name: f"/{method.containing_service.full_name}/{name}" for name, method in _METHODS.items()
}
EXCHANGE, EXCHANGE_ROWS = _PATHS["Exchange"], _PATHS["ExchangeRows"]
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
        self._stubs: dict[str, Any] = {}
        self._attendance = HeldCall(self._attended, super().translate)
        self._giver = recording.SpanGiver(
            self.spans, self.unary, self._asks_for_recordings, self.translate
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
        return self.streaming("Attend")(request, wait_for_ready=True)

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
        return self.unary("EndSession").future(request, timeout=timeout_s)

    def heartbeat(self, request: session_pb2.HeartbeatRequest, timeout_s: float) -> Any:
        """Begins to say that a member lives, over a connection of its own; returns the call."""
        stub = _unary(self._channel_of(_HEARTBEAT_CONNECTION), "Heartbeat")
        return stub.future(request, timeout=timeout_s)

    def call(
        self,
        method: str,
        request: Message | bytes,
        response_type: type[ResponseT],
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        **where: Any,
    ) -> ResponseT:
        """Makes a call of one message each way; blocks up to `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        with self.translated(**where):
            if self.unix.is_there and not wait_for_ready:
                answer = self._asked_here(_PATHS[method], _written(request), timeout_s)
                if answer is not None:
                    return self.received(_parsed(response_type, answer), **where)
            rest_s = max(until_s - time.monotonic(), TIMEOUT_S_MIN)
            call = self.unary(method).future(request, timeout=rest_s, wait_for_ready=wait_for_ready)
            response: ResponseT = self.result_of(call, **where)
            return response

    def unary(self, method: str) -> Any:
        """The call by gRPC of one message each way, also where a method takes a stream of them."""
        stubs = self._stubs  # got before the channel: those of an older one are dropped
        if method not in stubs:
            stubs[method] = _unary(self._channel.current, method)
        return stubs[method]

    def streaming(self, method: str) -> Any:
        """The call by gRPC of a method with a stream one way, whose messages are bytes."""
        channel = self._channel.current
        if _METHODS[method].server_streaming:
            return channel.unary_stream(_PATHS[method], request_serializer=checksum.sealed)
        return channel.stream_unary(
            _PATHS[method], response_deserializer=_response_type(method).FromString
        )

    def result_of(self, call: Any, **where: Any) -> Any:
        """Blocks for the answer of a call; grpc.RpcError: it failed, or was cancelled."""
        with cancelled_by(call.cancel):
            try:
                response = call.result()
            except grpc.FutureCancelledError:
                raise CallEndedError.cancelled() from None
        return self.received(response, **where)

    def received(self, response: ResponseT | None, **where: Any) -> ResponseT:
        """Checks the answer of a call; None is one that gRPC has lost: its frame was damaged."""
        if response is None:
            raise ShardUnavailableError(
                f"the answer of shard {self.shard_index} at {self.address} was lost; call again",
                shard_index=self.shard_index,
                **where,
            )
        try:
            checksum.check_sealed(response)
        except (CorruptChunkError, VersionMismatchError) as error:
            raise type(error)(
                f"shard {self.shard_index} at {self.address} answered: {error.message}",
                shard_index=self.shard_index,
                **where,
            ) from None
        return response

    def clock_offset(self, timeout_s: float) -> recording.ClockOffset:
        """Measures the shard's clock against this process's; blocks 4 timeouts at most."""
        with self.translated():
            return recording.clock_offset(self.unary("GetClock"), self.identity, timeout_s)

    def record(self, wait_s: float, timeout_s: float) -> Iterator[trace_pb2.RecordResponse]:
        """Yields the shard's last spans, then its clients'; blocks up to `timeout_s` in all."""
        with self.translated():
            request = trace_pb2.RecordRequest(
                shard=self.identity, wait_timeout_ms=round(wait_s * 1000)
            )
            for message in self.streaming("Record")(request, timeout=timeout_s):
                yield self.received(_parsed(trace_pb2.RecordResponse, message))

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
        self._stubs = {}
        return True

    def _asked(self, timeout_s: float) -> grpc.StatusCode:
        question = self.question(timeout_s)
        code = self._code_of(question)
        if code is grpc.StatusCode.OK:
            with contextlib.suppress(CorruptChunkError, ShardUnavailableError):
                self.received(question.result())
        return code

    def question(self, timeout_s: float) -> Any:
        """Begins to ask the shard for its identity; returns the call."""
        question = pb.GetStatusRequest(identity_only=True)
        with self.translated():
            return self.unary("GetStatus").future(question, timeout=timeout_s, wait_for_ready=True)

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

    def translate(self, error: grpc.RpcError, **where: Any) -> ShardwellError:
        """The Shardwell error of a failed call; attends anew if the session is not known."""
        found = super().translate(error, **where)
        if isinstance(found, SessionUnknownError):
            self._attendance.doubt()
        return found

    def close(self) -> None:
        """Ends the session's calls, and every connection and the calls on it."""
        self._attendance.close()
        self._giver.close()
        super().close()


def _unary(channel: Any, method: str) -> Any:
    return channel.unary_unary(
        _PATHS[method],
        request_serializer=_written,
        response_deserializer=_response_type(method).FromString,
    )


def _response_type(method: str) -> Any:
    return GetMessageClass(_METHODS[method].output_type)


def _written(request: Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else checksum.sealed(request)


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
