"""A shard: its parameters and tables by name, who it is, and the limits over all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from shardwell.errors import (
    OtherIncarnationError,
    StorageError,
    WrongShardError,
)
from shardwell.process.spans import Spans
from shardwell.threads.spread import CoreThreads, thread_count
from shardwell.v1 import types_pb2
from shardwell_server.config import ShardConfig
from shardwell_server.shard.contribution_log import ContributionLog
from shardwell_server.shard.deletions import Deletions
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.quotas import ByteBudget, Usages
from shardwell_server.shard.recordings import Recordings
from shardwell_server.shard.registry import Parameters, Registry, Tables
from shardwell_server.shard.sessions import RETURN_S_MAX, Sessions
from shardwell_server.shard.slice import SharedParts
from shardwell_server.shard.table.slice import TableSlice
from shardwell_server.shard.watch import Watch
from shardwell_server.store.contract import Store

_Part: TypeAlias = ParameterSlice | TableSlice


def _look_once(part: _Part) -> None:
    part.look_for_lost()


class PayloadBytes:
    """The payload bytes in and out, counted by all streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.received_bytes = 0
        self.sent_bytes = 0

    def add(self, *, received: int = 0, sent: int = 0) -> None:
        with self._lock:
            self.received_bytes += received
            self.sent_bytes += sent


class Shard:
    """The state of one server process; it goes on with what the store kept. Any thread may call it.

    `spool_dir` has the copies of snapshots; None: the system's. `origin` is the state of its files
    at the start, for errors about what it lacks.

    Raises:
        StorageError: the state that it kept can't be believed.
        ArgumentError: the contribution log can't be written.
    """

    def __init__(
        self,
        config: ShardConfig,
        store: Store,
        spool_dir: Path | None = None,
        *,
        origin: str = "it keeps everything in memory",
    ) -> None:
        self.config = config
        self._origin = origin
        self.traffic = PayloadBytes()
        self.started_s = time.monotonic()
        self.copied_s: float | None = None
        """The last copy of a whole parameter or table for a checkpoint, if any."""
        self._store = store
        self._stored_bytes = ByteBudget(config.limits.stored_bytes_max)
        self.usages = Usages()
        self._stopping = threading.Event()
        self.sessions = Sessions(
            count_max=config.limits.session_count_max,
            lease_s=config.session_lease_s,
            return_s=min(config.session_lease_s, RETURN_S_MAX),
        )
        self._watch = Watch()
        self.spans = Spans()
        self.recordings = Recordings()
        self.contribution_log: ContributionLog | None = None
        if config.contribution_log is not None:
            self.contribution_log = ContributionLog(config.contribution_log, config.shard_index)
        lock = threading.Lock()
        parameters, tables = store.recover(), store.recover_tables()
        shared = SharedParts(
            config=config,
            sessions=self.sessions,
            spans=self.spans,
            timer=self._watch,
            log=None if self.contribution_log is None else self.contribution_log.take,
            spool_dir=spool_dir,
        )
        common = (shared, store, lock, self._stored_bytes, self.usages, Deletions(store))
        self.core_threads = CoreThreads(thread_count(config.threads))
        """Threads that take pieces of its calls' work."""
        self.parameters = Parameters(*common)
        self.parameters.recover(parameters)
        self.tables = Tables(*common)
        self.tables.recover(tables)
        self.parameters.beside, self.tables.beside = self.tables, self.parameters
        store.recovered()
        self.parameters.finish_deletions()
        self.tables.finish_deletions()
        for table in self.tables.all():
            table.go_on()
        for part in self.parts:
            part.go_on_after_start()
        self.sessions.on_left = self._session_left
        self.make_images()

    def check_identity(self, meant: types_pb2.ShardIdentity) -> None:
        """Refuses a request that is meant for another shard, and all once the files are gone."""
        self._store.check_present()
        config = self.config
        asked = (meant.cluster_id, meant.shard_index, meant.shard_count)
        here = (config.cluster_id, config.shard_index, config.shard_count)
        if asked != here:
            raise WrongShardError(
                f"this is shard {here[1]} of {here[2]} of cluster {here[0]!r}; the request is for "
                f"shard {asked[1]} of {asked[2]} of cluster {asked[0]!r}; check the order of the "
                "addresses",
                shard_index=config.shard_index,
            )

    def check_files(self) -> None:
        """Raises StorageError once the files are gone."""
        self._store.check_present()

    def lost_memory(self, kind: str, name: str) -> OtherIncarnationError:
        """Returns the error for one that others have trained and this shard lacks."""
        where: dict[str, Any] = {kind: name}
        return OtherIncarnationError(
            f"{kind} {name!r} has begun on other shards, and shard {self.config.shard_index} does "
            f"not have it: it lost its memory ({self._origin}); stop it and start it with its "
            "files, or restore a checkpoint into an empty cluster, or start the training again "
            "under another name",
            **where,
        )

    @property
    def parts(self) -> list[_Part]:
        """The parameters and the tables."""
        return [*self.parameters.all(), *self.tables.all()]

    def registry(self, kind: str) -> Registry[Any, Any, Any, Any]:
        """Returns the parameters, or for "table" the tables."""
        return self.parameters if kind == "parameter" else self.tables

    @property
    def stored_bytes(self) -> int:
        return self._stored_bytes.count

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yields calls that raise StorageError where a piece of the kept state was damaged."""
        for parameter in self.parameters.all():
            for index in range(parameter.chunk_count):
                yield partial(self._unless_deleted, parameter, partial(parameter.verify, index))
        for table in self.tables.all():
            for check in table.checks():
                yield partial(self._unless_deleted, table, check)

    def look_at_files(self) -> None:
        """Checks that the files are there; if not, nothing is acknowledged any more."""
        self._store.look()

    def sync(self) -> None:
        self._do_all(lambda part: part.sync())

    def make_images(self) -> None:
        self._do_all(lambda part: part.make_image(self.is_stopping))

    def end_session(self, number: int, owner: str = "") -> bool:
        """Notes that a session has ended in order: its seats are free. False: it was not here.

        A StorageError of one parameter or table is raised when all others are done.
        """
        if not self.sessions.end(number, owner):
            return False
        self._do_all(lambda part: part.end_session(number))
        return True

    def elastic_parts_of(self, session_number: int) -> Iterator[_Part]:
        """Yields those whose elastic members a session is among, or was just now."""
        for part in self.parts:
            if part.spec.members is not None and part.had_session(session_number):
                yield part

    def _session_left(self, number: int) -> None:
        """Looks, once a member has had time to come back, whether it is lost."""
        for part in self.elastic_parts_of(number):
            assert part.spec.members is not None
            self._watch.after(part.spec.members.member_return_s, partial(_look_once, part))

    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def ends_waits(self) -> bool:
        """Returns True once `stop` was called; StorageError: gone files end waits, too."""
        self._store.check_present()
        return self.is_stopping()

    def wait_for_stop(self, timeout_s: float) -> bool:
        return self._stopping.wait(timeout_s)

    def stop(self) -> None:
        """Ends waits for other workers; running additions finish."""
        self._stopping.set()

    def close(self) -> None:
        """Lets go of the store and of threads, when no request is left."""
        self._watch.close()
        if self.contribution_log is not None:
            self.contribution_log.close()
        self.core_threads.close()
        self._store.close()

    def _do_all(self, act: Callable[[_Part], None]) -> None:
        """Acts on each parameter and table, and raises the first StorageError at the end."""
        failed: StorageError | None = None
        for part in self.parts:
            try:
                self._unless_deleted(part, partial(act, part))
            except StorageError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _unless_deleted(self, part: _Part, act: Callable[[], None]) -> None:
        """Acts, and ignores that the files of one that was deleted meanwhile are gone."""
        try:
            act()
        except StorageError:
            if self.registry(part.kind).find(part.spec.name) is part:
                raise
