"""Goal: a stream whose caller has gone ends, and asyncio has nothing to log about it.

Method: the shard's own listener, with a handler that answers many times when its caller has gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.polling import PATIENCE_S
from harness.wire_client.crc import WIRE_VERSION
from shardwell.process.unix_sockets import connected
from shardwell.v1 import unix_stream_pb2
from shardwell.wire.frames import FrameKind, head
from shardwell_server.services.unix_streams import UnixStreams

METHOD = "/shardwell.v1.ParameterServerService/Exchange"
pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="no Unix streams here")


@pytest.mark.parametrize("size", [100, 1_000_000])
@pytest.mark.parametrize("end", ["write", "abort"])
def test_answers_to_a_caller_that_has_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str, size: int
) -> None:
    caplog.set_level(logging.WARNING)

    async def story() -> tuple[int, bool]:
        begun, gone = asyncio.Event(), asyncio.Event()
        written, was_cancelled = 0, False

        async def answer_often(_: Any, context: Any) -> None:
            nonlocal written, was_cancelled
            begun.set()
            try:
                await gone.wait()
                for _ in range(20):  # without a pause in which it could be cancelled
                    if end == "abort":
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "the shard stops")
                    else:
                        await context.write(bytes(size))
                    written += 1
            except asyncio.CancelledError:
                was_cancelled = True
                raise

        handler = grpc.stream_stream_rpc_method_handler(answer_often)
        streams = UnixStreams({METHOD: handler}, 4)
        streams.listen(str(tmp_path), "shard")
        await streams.start()
        caller = connected(streams.address, socket.SOCK_STREAM, PATIENCE_S)
        opens = unix_stream_pb2.UnixStreamOpen(method=METHOD, wire_version=WIRE_VERSION)
        opening = opens.SerializeToString()
        caller.sendall(head(FrameKind.OPEN, len(opening)) + opening)
        async with asyncio.timeout(PATIENCE_S):
            await begun.wait()
            caller.close()
            gone.set()
        await streams.stop(PATIENCE_S)
        return written, was_cancelled

    written, was_cancelled = asyncio.run(story())
    assert [record for record in caplog.records if record.name == "asyncio"] == []
    if end == "write":
        assert was_cancelled
        assert written <= 2
