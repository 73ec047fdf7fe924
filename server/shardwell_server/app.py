"""A shard as a running server: gRPC, health and reflection around a Shard."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shardwell.errors import ShardUnavailableError
from shardwell.framing import MESSAGE_SIZE_MAX_BYTES
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server.config import ShardConfig
from shardwell_server.services.parameter_server import ParameterServerService
from shardwell_server.services.streams import OpenStreams
from shardwell_server.shard.shard import Shard
from shardwell_server.store import MemoryStore

_LOG = logging.getLogger("shardwell_server")
_UNARY_THREAD_COUNT = 32
"""Threads beyond those of streams, so that status and health are answered when all streams are."""
_LAST_ANSWERS_S = 0.5
"""The end of the grace, in which streams that wait for other workers are answered."""
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_SIZE_MAX_BYTES),
    ("grpc.max_send_message_length", MESSAGE_SIZE_MAX_BYTES),
    ("grpc.so_reuseport", 0),  # a second shard on the same port is an error, not a lottery
    # A worker whose machine vanished is noticed within half a minute, and its streams end.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class ShardServer:
    """One shard, listening. A context manager: started on entry, stopped on exit.

    Raises:
        ShardUnavailableError: the address can't be listened on.
    """

    def __init__(self, config: ShardConfig) -> None:
        limits = config.limits
        self.config = config
        self.shard = Shard(config, MemoryStore())
        self._streams = OpenStreams(limits.stream_count_max)
        thread_count = limits.stream_count_max + _UNARY_THREAD_COUNT
        self._threads = ThreadPoolExecutor(
            thread_count,
            thread_name_prefix="shardwell-rpc",
        )
        self._server = grpc.server(
            self._threads, options=_OPTIONS, maximum_concurrent_rpcs=thread_count
        )
        service = ParameterServerService(self.shard, self._streams)
        self._server.add_generic_rpc_handlers((service.handler(),))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if config.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        host = config.listen.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(config.listen)
        except RuntimeError as error:
            self._threads.shutdown()
            raise ShardUnavailableError(
                f"shard {config.shard_index} can't listen on {config.listen}: {error}; "
                "is the port taken?",
                shard_index=config.shard_index,
            ) from None
        self.address = f"{host}:{port}"
        """HOST:PORT that it listens on; the port is the one that was taken when 0 was asked for."""

    def start(self) -> None:
        """Begins to answer."""
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        _LOG.info(
            "shard is serving",
            extra={
                "address": self.address,
                "shard_index": self.config.shard_index,
                "shard_count": self.config.shard_count,
                "cluster_id": self.config.cluster_id,
            },
        )

    def stop(self, grace_s: float | None = None) -> None:
        """Stops: no new calls, open streams finish within the grace, then everything is released.

        Safe to repeat. Blocks until all is down.
        """
        grace_s = self.config.grace_s if grace_s is None else grace_s
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        stopped = self._server.stop(grace_s)
        self._streams.end_idle()
        if not stopped.wait(max(grace_s - _LAST_ANSWERS_S, 0.0)):
            self.shard.stop()  # what still waits for other workers is told so, not cut off
        stopped.wait()
        self._threads.shutdown()
        self.shard.close()
        _LOG.info("shard has stopped", extra={"shard_index": self.config.shard_index})

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        self._health.set("", status)
        self._health.set(SERVICE_NAME, status)

    def __enter__(self) -> ShardServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
