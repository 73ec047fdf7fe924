"""A shard as a running server: gRPC, health and reflection around a Shard."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from shardwell.connection.options import check_fork, listen_on, server_options
from shardwell.connection.tls import TlsFiles
from shardwell.errors import ShardUnavailableError, ShardwellError
from shardwell.group.rendezvous.registry import Owner
from shardwell.group.rendezvous.service import GroupService
from shardwell.process import telemetry
from shardwell.specs.deadlines import check_duration
from shardwell.transport.arena_offers import ArenaOffers
from shardwell.v1 import (
    group_pb2,
    names_pb2,
    parameter_server_pb2,
    session_pb2,
    table_pb2,
    trace_pb2,
)
from shardwell_server.access.access import Access
from shardwell_server.access.audit import AuditLog, no_audit
from shardwell_server.access.ends import Ends
from shardwell_server.access.rights import Right
from shardwell_server.admin.port import AdminPort
from shardwell_server.admin.vitals import ResourceMeter, Vitals, troubles
from shardwell_server.config import ShardConfig
from shardwell_server.services.calls import Call, Calls
from shardwell_server.services.event_loop import EventLoop
from shardwell_server.services.guard import Guard
from shardwell_server.services.health import HealthService
from shardwell_server.services.name_service import NameService
from shardwell_server.services.open_streams import LAST_READS_S, OpenStreams
from shardwell_server.services.parameter_service import ParameterServerService
from shardwell_server.services.sessions import SessionService
from shardwell_server.services.table_service import TableService
from shardwell_server.services.trace_service import TraceService
from shardwell_server.services.unix_streams import UnixStreams
from shardwell_server.services.work_threads import WorkThreads
from shardwell_server.shard.shard import Shard
from shardwell_server.store.files.data_dir import DataDir
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

_LOG = logging.getLogger("shardwell_server")
_WORK_THREAD_COUNT = 32
"""More than cores, as some wait for the disk, which writes for all of them at once."""
_UNARY_CALL_COUNT_MAX = 1024
"""Calls beyond sessions and streams that wait for a thread, or for others: enough for a burst of
workers that start together, too few for a flood."""
_FILE_LOOK_INTERVAL_S = 0.5
"""The time for which acknowledged data may go into removed files."""
_TOKEN_LOOK_INTERVAL_S = 0.5
"""The time for which an ended or revoked token may still be used."""
_IMAGE_LOOK_INTERVAL_S = 0.5
_IMAGE_RETRY_INTERVAL_S = 10.0
_LAST_ANSWERS_S = 0.5
"""The end of the grace, in which streams that wait for other workers are answered."""
_ALIVE_S = 5.0
_ABANDON_S = 10.0
"""The time after the grace for gRPC, which never ends where it got no thread."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"


class ShardServer:
    """One shard, listening. A context manager: started on entry, stopped on exit.

    Args:
        config: Its place and limits.
        data_dir: Its files, which it goes on from; None: it keeps everything in memory.

    Raises:
        ForkedError: see `check_fork`.
        ArgumentError: files of certificates, tokens or keys can't be used, or the audit log.
        StorageError: what the files hold can't be believed; names the file.
        ShardUnavailableError: the address can't be listened on.

    Examples:
        >>> where = {"shard_index": 0, "shard_count": 1, "listen": "127.0.0.1:0"}
        >>> config = shardwell_server.ShardConfig(**where)
        >>> with shardwell_server.ShardServer(config) as server:
        ...     server.address.startswith("127.0.0.1:")
        True
    """

    def __init__(self, config: ShardConfig, data_dir: DataDir | None = None) -> None:
        check_fork()
        self.config = config
        self._stopping: Future[None] | None = None
        self._is_closed = False
        self._is_stuck = False
        self._data_dir = data_dir
        self._lookers: list[Future[None]] = []
        self._threads: list[threading.Thread] = []
        config.durability.check_files(data_dir is not None)
        self.admin: AdminPort | None = None
        with contextlib.ExitStack() as opened:
            if config.admin_listen:  # it tells from here on that files are being read
                self.admin = AdminPort(config)
                opened.callback(self.admin.close)
            if data_dir is None:
                self.shard = Shard(config, MemoryStore())
            else:
                store = MmapStore(data_dir.path, durability=config.durability)
                self.shard = Shard(config, store, data_dir.path, origin=data_dir.origin)
            self._exporter = telemetry.StepExporter(
                self.shard.spans,
                config.shard_index,
                lambda name: self.shard.tables.find(name) is not None,
            )
            self._loop = EventLoop()
            opened.callback(self._close_loop)
            audit = None
            if config.audit_log is not None:
                audit = AuditLog(config.audit_log, shard_index=config.shard_index)
                opened.callback(audit.close)
            self._endpoint, self.address = self._loop.run(self._listening(audit))
            """HOST:PORT that it listens on; the port is the one taken when 0 was asked for."""
            self._opened = opened.pop_all()
        vitals = Vitals(
            self.shard,
            stream_count=lambda: self._endpoint.streams.count,
            arena_bytes=lambda: self._endpoint.arenas.mapped_bytes,
            refusals=lambda: dict(self._endpoint.calls.refusal_counts),
            turned_away_s=lambda: self._endpoint.guard.turned_away_s,
            damages=lambda: list(self._endpoint.calls.damages),
            ends=self._endpoint.ends,
            data_dir=None if data_dir is None else data_dir.path,
            groups=self._endpoint.meetings.describe,
            resources=ResourceMeter(None if data_dir is None else data_dir.path).read,
            head=self._endpoint.service.head,
        )
        self._endpoint.service.troubles = partial(troubles, vitals)
        self._endpoint.service.resources = vitals.resources
        self._endpoint.service.settings = vitals.settings
        if self.admin is not None:
            self.admin.attach(vitals, self._endpoint.access, self.address, self._is_alive)

    async def _listening(self, audit: AuditLog | None) -> tuple[_Endpoint, str]:
        endpoint = _Endpoint(self.shard, audit)
        return endpoint, await endpoint.listen()

    def start(self) -> None:
        """Begins to answer; what an earlier process left is verified meanwhile."""
        self._loop.run(self._endpoint.server.start())
        self._loop.run(self._endpoint.unix_streams.start())
        if self._endpoint.access.asks or self._endpoint.tls is not None:
            self._lookers.append(self._loop.begin(self._look_at_access()))
        self._lookers.append(self._loop.begin(self._export_steps()))
        self._loop.run(self._begin_to_serve())
        durability, data_dir = self.config.durability, self._data_dir
        for name, work, is_needed in (
            ("shardwell-verify", self._verify, True),
            ("shardwell-sync", self._sync, durability.interval_s is not None),
            ("shardwell-image", self._image, not durability.is_process),
            ("shardwell-look", self._look_at_files, data_dir is not None),
        ):
            if is_needed:
                thread = threading.Thread(target=work, name=name)
                thread.start()
                self._threads.append(thread)
        if self.admin is not None:
            self.admin.serves()
        _LOG.info(
            "shard is serving",
            extra={
                "address": self.address,
                "admin": "" if self.admin is None else self.admin.url,
                "shard_index": self.config.shard_index,
                "shard_count": self.config.shard_count,
                "cluster_id": self.config.cluster_id,
                "data_dir": "" if data_dir is None else str(data_dir.path),
                "begins_anew": data_dir is None or data_dir.is_new,
            },
        )

    def stop(self, grace_s: float | None = None) -> None:
        """Stops the server: no new calls; streams end within the grace; then all is released.

        Safe to repeat. Blocks until all is down, which takes no longer than the grace and some
        seconds: calls that gRPC has not ended by then are broken off with the process.
        """
        grace_s = self.config.grace_s if grace_s is None else check_duration("grace_s", grace_s)
        if self.admin is not None:
            self.admin.stops("stopping")
        if self._stopping is None:
            self._stopping = self._loop.begin(self._stop(grace_s))
        try:
            # An interrupted stop goes on, and is waited for by the next.
            self._stopping.result(0.0 if self._is_stuck else grace_s + _ABANDON_S)
        except TimeoutError:
            self._is_stuck = True
            _LOG.error("gRPC does not end its calls, and is left to itself")
        for looker in self._lookers:
            looker.cancel()
        self.shard.stop()
        self._endpoint.arenas.close()
        for thread in self._threads:
            thread.join()
        if not self._is_closed:
            self._is_closed = True
            self._exporter.is_interrupted = True  # one of its threads may wait for a receiver
            self._endpoint.threads.close()
            self._exporter.is_interrupted = False
            telemetry.bounded(partial(self._exporter.export, 0.0))
            self._opened.close()
        self.shard.close()
        _LOG.info("shard has stopped", extra={"shard_index": self.config.shard_index})

    def _close_loop(self) -> None:
        if not self._is_stuck:
            self._loop.close()

    def _is_alive(self) -> bool:
        """Blocks for some seconds if the loop does not turn."""
        try:
            self._loop.begin(asyncio.sleep(0)).result(_ALIVE_S)
        except (TimeoutError, RuntimeError):  # it was closed
            return False
        return True

    async def _stop(self, grace_s: float) -> None:
        self._endpoint.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        stopped = asyncio.gather(
            self._endpoint.server.stop(grace_s), self._endpoint.unix_streams.stop(grace_s)
        )
        self.shard.sessions.stop()
        self.shard.recordings.stop()
        self._endpoint.streams.end_idle(LAST_READS_S)
        answering_s = max(grace_s - _LAST_ANSWERS_S, 0.0)
        reading_s = min(answering_s, LAST_READS_S)
        await asyncio.wait([stopped], timeout=reading_s)
        self._endpoint.streams.end_idle(0.0)
        await asyncio.wait([stopped], timeout=answering_s - reading_s)
        if not stopped.done():  # calls that still wait for workers end with an error
            self.shard.stop()
            self._endpoint.calls.wake_all()
        await stopped

    def _verify(self) -> None:
        """Reads everything once, so that damage is in the log before a worker meets it."""
        for check in self.shard.checks():
            if self.shard.is_stopping():
                return
            try:
                check()
            except ShardwellError as error:
                _LOG.error("what was stored is damaged", extra={"reason": error.message})
                self._endpoint.calls.note_damage(error.message)

    def _look_at_files(self) -> None:
        """Stops serving when the files are gone; every call gets the reason then."""
        while not self.shard.wait_for_stop(_FILE_LOOK_INTERVAL_S):
            try:
                self.shard.look_at_files()
            except ShardwellError as error:
                _LOG.critical("the shard's files are gone", extra={"reason": error.message})
                self._loop.run(self._give_up())
                return

    async def _begin_to_serve(self) -> None:
        self._endpoint.set_health(health_pb2.HealthCheckResponse.SERVING)

    async def _give_up(self) -> None:
        self._endpoint.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._endpoint.calls.wake_all()

    def _sync(self) -> None:
        """Keeps the promise of `--durability SECONDS`."""
        interval_s = self.config.durability.interval_s or 0.0
        due_s = time.monotonic() + interval_s
        while not self.shard.wait_for_stop(max(due_s - time.monotonic(), 0.0)):
            due_s = time.monotonic() + interval_s
            self._logged(self.shard.sync)

    def _image(self) -> None:
        pause_s = _IMAGE_LOOK_INTERVAL_S
        while not self.shard.wait_for_stop(pause_s):
            is_done = self._logged(self.shard.make_images)
            pause_s = _IMAGE_LOOK_INTERVAL_S if is_done else _IMAGE_RETRY_INTERVAL_S

    @staticmethod
    def _logged(act: Callable[[], None]) -> bool:
        """Returns True if it succeeded; the log has a failure, for the operator."""
        try:
            act()
        except ShardwellError as error:
            _LOG.error("could not write to disk", extra={"reason": error.message})
            return False
        return True

    def _refresh_access(self) -> None:
        self._endpoint.access.refresh()
        if self._endpoint.tls is not None:
            self._endpoint.tls.contents()
        self._endpoint.ends.warn()

    async def _look_at_access(self) -> None:
        """Ends calls whose token has ended, or was revoked."""
        while True:
            try:
                await self._endpoint.threads.run(self._refresh_access)
                self.shard.usages.set_quotas(self._endpoint.access.quotas())
                self._endpoint.calls.end_those_without_token()
            except Exception:  # or tokens would be good for ever
                _LOG.exception("could not look whether tokens have ended")
            await asyncio.sleep(_TOKEN_LOOK_INTERVAL_S)

    async def _export_steps(self) -> None:
        """Exports steps to OpenTelemetry, once this process uses it."""
        while True:
            await asyncio.sleep(telemetry.QUIET_S)
            if sys.modules.get(telemetry.MODULE):
                await self._endpoint.threads.run(self._exporter.export)

    def __enter__(self) -> ShardServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Endpoint:
    """A shard's servers and their common parts. Made on the loop that they live on."""

    def __init__(self, shard: Shard, audit: AuditLog | None) -> None:
        config, limits = shard.config, shard.config.limits
        self._config = config
        self.tls = tls = None if config.tls is None else TlsFiles(config.tls)
        self.access = Access.of(config)
        shard.usages.set_quotas(self.access.quotas())
        self.streams = OpenStreams(limits.stream_count_max)
        self.threads = WorkThreads(asyncio.get_running_loop(), _WORK_THREAD_COUNT)
        note = no_audit if audit is None else audit.note
        self.guard = Guard(self.access, shard.usages, note)
        self.calls = Calls(
            self.threads,
            self.streams,
            guard=self.guard,
            shard_index=config.shard_index,
            answer_bytes_max=limits.answer_bytes_max,
        )
        self.server = grpc.aio.server(
            options=server_options(
                config.session_lease_s, config.connection_age_s if config.tls else None
            ),
            maximum_concurrent_rpcs=(
                2 * limits.session_count_max + limits.stream_count_max + _UNARY_CALL_COUNT_MAX
            ),
        )
        self.arenas = ArenaOffers(
            lambda offer: shard.check_identity(offer.shard),
            bytes_max=limits.arena_bytes_max,
            log=_LOG,
        )
        service = ParameterServerService(shard, self.streams, self.arenas)
        self.service = service
        sessions = SessionService(shard, self.calls)
        clients = sessions.certificate_ends
        self.ends = Ends(tls, self.access, lambda: list(clients.values()))
        self.meetings = GroupService(shard_index=config.shard_index, admit=_admit)
        services: dict[Any, Any] = {
            parameter_server_pb2: service,
            table_pb2: TableService(shard),
            session_pb2: sessions,
            trace_pb2: TraceService(shard),
            names_pb2: NameService(shard, self.calls),
            group_pb2: self.meetings,
        }
        names, on_unix = [], {}
        for file, served_by in services.items():
            (of,) = file.DESCRIPTOR.services_by_name.values()
            names.append(of.full_name)
            handlers = self.calls.handlers(of, served_by)
            self.server.add_generic_rpc_handlers(
                [grpc.method_handlers_generic_handler(of.full_name, handlers)]
            )
            for method in of.methods if file in (parameter_server_pb2, table_pb2) else ():
                if method.client_streaming or not method.server_streaming:
                    on_unix[f"/{of.full_name}/{method.name}"] = handlers[method.name]
        self.unix_streams = UnixStreams(on_unix, limits.stream_count_max + _UNARY_CALL_COUNT_MAX)
        self._health_names = ("", *names[:2])
        self.health = HealthService()
        self.server.add_generic_rpc_handlers((self.health.handler(),))
        self.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if config.reflection:
            names += [health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self.server)

    async def listen(self) -> str:
        """Takes the config's address, and returns it; ShardUnavailableError: it can't be had."""
        config = self._config
        host = config.listen.rpartition(":")[0]
        try:
            port = listen_on(self.server, config.listen, self.tls)
        except OSError as error:
            self.threads.close()
            await self.server.stop(None)
            raise ShardUnavailableError(
                f"shard {config.shard_index} can't listen on {config.listen}: "
                f"{error.strerror}; give a free port, or 0 for any, and an address of this machine",
                shard_index=config.shard_index,
            ) from None
        name = _socket_name(config, port)
        self.arenas.start(config.same_host, name)
        self.unix_streams.listen(config.same_host, f"{name}-streams")
        self.service.stream_address = self.unix_streams.address
        return f"{host}:{port}"

    def set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in self._health_names:
            self.health.set(name, status)


def _admit(call: Call, group: str) -> Owner:
    call.check(Right.CONTRIBUTE, "group", group)
    return Owner(call.principal.name, call.principal.quota.members)


def _socket_name(config: ShardConfig, port: int) -> str:
    """Returns the name where a shard takes offers of memory, also after a restart.

    An abstract name has the machine and its network: a client on another one must not find the
    shard's namesake there.
    """
    if config.same_host != "auto":
        return f"shardwell-{config.cluster_id}-{config.shard_index}"
    with contextlib.suppress(OSError):
        boot = Path(_BOOT_ID).read_text() + os.readlink(_NETWORK)
        which = f"{boot}/{config.cluster_id}/{config.shard_index}/{port}"
        return f"shardwell-{hashlib.blake2b(which.encode(), digest_size=16).hexdigest()}"
    return f"shardwell-{secrets.token_hex(16)}"
