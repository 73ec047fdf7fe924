"""The end of a service's handlers: an answer, or the status of an error.

Whatever a handler raises reaches the caller as one of Shardwell's errors; any other exception is a
defect, and is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shardwell.connection.error_codes import Status, to_status
from shardwell.errors import (
    ArgumentError,
    InternalError,
    LimitError,
    ShardwellError,
)
from shardwell.wire import checksum


class Handlers:
    """The handlers of one service, and of the errors that they raise. Any thread may use them.

    `place` names the process whose log has the details of a defect, for the caller.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        shard_index: int | None,
        place: str,
    ) -> None:
        self._log = logger
        self._shard_index = shard_index
        self._place = place

    def unary(self, call: Callable[..., Any], request_type: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler of one request and one response, over `call(request, context)`."""
        return grpc.unary_unary_rpc_method_handler(
            self.answering(parsed(call, request_type)),
            response_serializer=checksum.sealed,
        )

    def answering(self, call: Callable[..., Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        """The call over a stream of requests, with errors turned into statuses."""

        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return call(request, context)
            except Exception as error:
                self._abort(context, error)

        return handle

    def streaming(
        self, call: Callable[..., Iterator[Any]]
    ) -> Callable[[Any, grpc.ServicerContext], Iterator[Any]]:
        """A handler of a call that yields."""

        def handle(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                yield from call(request, context)
            except Exception as error:
                self._abort(context, error)

        return handle

    def _abort(self, context: grpc.ServicerContext, error: Exception) -> None:
        if not context.is_active():
            context.abort(grpc.StatusCode.CANCELLED, "the caller has gone")
        status = status_of(
            error,
            self._log,
            shard_index=self._shard_index,
            place=self._place,
            peer=context.peer(),
        )
        context.set_trailing_metadata(status.trailing_metadata)
        context.abort(status.code, status.details)


def status_of(
    error: Exception, logger: logging.Logger, *, shard_index: int | None, place: str, peer: str
) -> Status:
    """Returns the status of an error, and logs it with the caller's address, `peer`."""
    if isinstance(error, MemoryError):
        error = LimitError(f"the {place} has no memory left for this call; give it more")
    if not isinstance(error, ShardwellError):
        logger.error("a request failed", exc_info=error)
        error = InternalError(f"{type(error).__name__}: {error}; see the {place}'s log")
    error.shard_index = shard_index
    status = to_status(error)
    # A client that looks a name up asks for a parameter and a table: one of them is not found.
    is_question = status.code is grpc.StatusCode.NOT_FOUND
    logger.log(
        logging.INFO if is_question else logging.WARNING,
        "request refused",
        extra={"code": status.code.name, "reason": status.details, "peer": peer},
    )
    return status


def parsed(call: Callable[..., Any], request_type: Any) -> Callable[..., Any]:
    """The call, given the message's bytes: what is no such message gets an answer of ours."""

    def with_bytes(message: bytes, context: Any) -> Any:
        try:
            request = request_type.FromString(message)
        except DecodeError as error:
            raise ArgumentError(
                f"{len(message)} bytes that are no {request_type.DESCRIPTOR.full_name}: {error}"
            ) from None
        checksum.check_sealed(request)
        return call(request, context)

    return with_bytes
