"""A shard as a running server: gRPC, health and reflection around a Shard."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shardwell.connection import SERVER_OPTIONS
from shardwell.errors import ShardUnavailableError, ShardwellError
from shardwell.group.group_service import GROUP_SERVICE_NAME, GroupService
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import table_pb2
from shardwell_server.config import ShardConfig
from shardwell_server.services.parameter_server import ParameterServerService
from shardwell_server.services.streams import OpenStreams
from shardwell_server.services.table_service import TableService
from shardwell_server.shard.shard import Shard
from shardwell_server.store import MemoryStore, MmapStore
from shardwell_server.store.data_dir import DataDir

_LOG = logging.getLogger("shardwell_server")
_UNARY_THREAD_COUNT = 32
"""Threads beyond those of streams, so that status and health are answered when all streams are."""
_QUEUED_CALL_COUNT_MAX = 1024
"""Calls that wait for a thread: a burst of workers that start together is served, not refused."""
_IMAGE_LOOK_INTERVAL_S = 0.5
_IMAGE_RETRY_INTERVAL_S = 10.0
"""After an image could not be written: mostly a full disk."""
_LAST_ANSWERS_S = 0.5
"""The end of the grace, in which streams that wait for other workers are answered."""
_LAST_READS_S = 0.25
"""What a client is given to read the last answers, before a stream without work is ended."""
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name
TABLE_SERVICE_NAME = table_pb2.DESCRIPTOR.services_by_name["TableService"].full_name


class ShardServer:
    """One shard, listening. A context manager: started on entry, stopped on exit.

    Args:
        config: Its place and limits.
        data_dir: Its files, which it goes on from; None: it keeps everything in memory.

    Raises:
        StorageError: what the files hold can't be believed; names the file.
        ShardUnavailableError: the address can't be listened on.
    """

    def __init__(self, config: ShardConfig, data_dir: DataDir | None = None) -> None:
        limits = config.limits
        self.config = config
        store = (
            MmapStore(data_dir.path, durability=config.durability) if data_dir else MemoryStore()
        )
        self.shard = Shard(config, store, None if data_dir is None else data_dir.path)
        self._syncer = threading.Thread(target=self._sync, name="shardwell-sync")
        self._imager = threading.Thread(target=self._image, name="shardwell-image")
        self._verifier = threading.Thread(target=self._verify, name="shardwell-verify")
        self._streams = OpenStreams(limits.stream_count_max)
        thread_count = limits.stream_count_max + _UNARY_THREAD_COUNT
        self._threads = ThreadPoolExecutor(
            thread_count,
            thread_name_prefix="shardwell-rpc",
        )
        self._server = grpc.server(
            self._threads,
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=thread_count + _QUEUED_CALL_COUNT_MAX,
        )
        service = ParameterServerService(self.shard, self._streams)
        tables = TableService(self.shard, self._streams)
        meetings = GroupService(shard_index=config.shard_index)
        self._server.add_generic_rpc_handlers(
            (service.handler(), tables.handler(), meetings.handler())
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if config.reflection:
            names = (
                SERVICE_NAME,
                TABLE_SERVICE_NAME,
                GROUP_SERVICE_NAME,
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
            )
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
        """Begins to answer; what an earlier process left is verified meanwhile."""
        self._server.start()
        self._verifier.start()
        if self.config.durability.interval_s is not None:
            self._syncer.start()
        if not self.config.durability.is_process:
            self._imager.start()
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
        self._streams.end_idle(_LAST_READS_S)
        answering_s = max(grace_s - _LAST_ANSWERS_S, 0.0)
        reading_s = min(answering_s, _LAST_READS_S)
        stopped.wait(reading_s)
        self._streams.end_idle(0.0)
        if not stopped.wait(answering_s - reading_s):
            self.shard.stop()  # what still waits for other workers is told so, not cut off
        stopped.wait()
        self.shard.stop()
        self._threads.shutdown()
        for thread in (self._verifier, self._syncer, self._imager):
            if thread.ident is not None:
                thread.join()
        self.shard.close()
        _LOG.info("shard has stopped", extra={"shard_index": self.config.shard_index})

    def _verify(self) -> None:
        """Reads everything once, so that damage is in the log before a worker meets it."""
        for check in self.shard.checks():
            if self.shard.is_stopping():
                return
            try:
                check()
            except ShardwellError as error:
                _LOG.error("what was stored is damaged", extra={"reason": error.message})

    def _sync(self) -> None:
        """Keeps the promise of `--durability SECONDS`."""
        interval_s = self.config.durability.interval_s or 0.0
        due_s = time.monotonic() + interval_s
        while not self.shard.wait_for_stop(max(due_s - time.monotonic(), 0.0)):
            due_s = time.monotonic() + interval_s
            self._logged(self.shard.sync)

    def _image(self) -> None:
        """Keeps journals short."""
        pause_s = _IMAGE_LOOK_INTERVAL_S
        while not self.shard.wait_for_stop(pause_s):
            is_done = self._logged(self.shard.make_images)
            pause_s = _IMAGE_LOOK_INTERVAL_S if is_done else _IMAGE_RETRY_INTERVAL_S

    @staticmethod
    def _logged(act: Callable[[], None]) -> bool:
        """Whether it succeeded; an operator reads it where not."""
        try:
            act()
        except ShardwellError as error:
            _LOG.error("could not write to disk", extra={"reason": error.message})
            return False
        return True

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        self._health.set("", status)
        self._health.set(SERVICE_NAME, status)
        self._health.set(TABLE_SERVICE_NAME, status)

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
