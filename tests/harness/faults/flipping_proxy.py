"""A gRPC server before a shard that passes all messages on as they are, except one bit of one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from harness.faults.proxy import PROXY_ADDRESSES

_THREAD_COUNT = 32
_TOKEN_KEY = "authorization"


class FlippingProxy(grpc.GenericRpcHandler):
    """Listens on a port of its own. A context manager.

    Args:
        target: The shard.
    """

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._server = grpc.server(ThreadPoolExecutor(_THREAD_COUNT), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        PROXY_ADDRESSES.add(self.address)
        self._lock = threading.Lock()
        self._change: Callable[[bytes], bytes] | None = None
        self._where = ("", "")
        self._skip_count = 0

    def damage(self, method: str, direction: str, number: int, bit: int) -> None:
        """Flips a bit, counted from 0, of a message of a method.

        Args:
            method: Its name, such as "Exchange".
            direction: "request" or "response".
            number: Number of the message from now on; 0 is the next.
            bit: Where there is none such, the message stays as it is.
        """

        def flipped(message: bytes) -> bytes:
            if bit >= 8 * len(message):
                return message
            changed = bytearray(message)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)

        self.watch(method, direction, number, flipped)

    def watch(
        self, method: str, direction: str, number: int, change: Callable[[bytes], bytes]
    ) -> None:
        """Has `change` make what goes on of a message: see `damage`."""
        with self._lock:
            self._where, self._skip_count, self._change = (method, direction), number, change

    @property
    def is_done(self) -> bool:
        """Whether the message has come."""
        return self._change is None

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        method = path.rpartition("/")[2]

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            sent = self._passed(_until_it_breaks(requests), method, "request")
            brought = [each for each in context.invocation_metadata() if each[0] == _TOKEN_KEY]
            call = self._channel.stream_stream(path)(sent, metadata=brought)
            if not context.add_callback(call.cancel):
                call.cancel()
            try:
                yield from self._passed(call, method, "response")
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata() or ())
                context.abort(error.code(), error.details() or "")

        return grpc.stream_stream_rpc_method_handler(handle)

    def _passed(self, messages: Iterator[bytes], method: str, direction: str) -> Iterator[bytes]:
        for message in messages:
            change = None
            with self._lock:
                if self._where == (method, direction):
                    self._skip_count -= 1
                    if self._skip_count < 0:
                        change, self._change = self._change, None
            yield message if change is None else change(message)

    def __enter__(self) -> FlippingProxy:
        self._server.start()
        return self

    def __exit__(self, *reason: object) -> None:
        PROXY_ADDRESSES.discard(self.address)
        self._server.stop(None).wait()
        self._channel.close()


def _until_it_breaks(messages: Iterator[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(Exception):  # gRPC's: the caller has gone, which ends the call, too
        yield from messages
