"""grpc.health.v1, which everybody may ask: so it must not be what keeps others out.

gRPC's own waits without bound for requests, and holds a lock while it writes to who may not read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

_CALL_COUNT_MAX = 64
"""Open calls, those that watch among them; each is one of those that a shard takes."""
_WATCH_COUNT_MAX = 16
_REQUEST_S = 10.0
_Status = health_pb2.HealthCheckResponse


class HealthService:
    """Handlers, one method an RPC. For the loop's thread."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._call_count = self._watch_count = 0

    def set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        self._changed.set()  # who waits has this one
        self._changed = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.stream_unary_rpc_method_handler(
                self._check, response_serializer=_Status.SerializeToString
            ),
            "Watch": grpc.stream_stream_rpc_method_handler(
                self._watch, response_serializer=_Status.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)

    async def _check(self, messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with self._request(context) as request:
            status = self._statuses.get(request.service)
            if status is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
            return _Status(status=status)

    async def _watch(self, messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with self._request(context) as request:
            if self._watch_count >= _WATCH_COUNT_MAX:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{_WATCH_COUNT_MAX} calls watch already; ask again and again (Check) instead",
                )
            self._watch_count += 1
            written = None
            try:
                while True:
                    changed = self._changed
                    status = self._statuses.get(request.service, _Status.SERVICE_UNKNOWN)
                    if status != written:
                        written = status
                        await context.write(_Status(status=status))
                    await changed.wait()
            finally:
                self._watch_count -= 1

    @contextlib.asynccontextmanager
    async def _request(
        self, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckRequest]:
        if self._call_count >= _CALL_COUNT_MAX:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_CALL_COUNT_MAX} calls ask already"
            )
        self._call_count += 1
        try:
            try:
                async with asyncio.timeout(_REQUEST_S):
                    message: Any = await context.read()
                request = health_pb2.HealthCheckRequest.FromString(message)
            except (TimeoutError, DecodeError, TypeError):  # TypeError: gRPC's end of a stream
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no request")
            yield request
        finally:
            self._call_count -= 1
