"""Sessions for tests that call a slice or a tracker themselves: one a worker, always the same."""

from __future__ import annotations

import math
import zlib
from collections.abc import Container
from typing import Any

from shardwell import SGD, Adagrad, Elastic, ParameterSpec, Zeros
from shardwell.process.spans import Spans
from shardwell.rpc.session import Session
from shardwell.specs.parameter import ModeName
from shardwell.specs.table import TableSpec
from shardwell_server.config import ShardConfig
from shardwell_server.shard.crews import Contributor, Event, Tracker
from shardwell_server.shard.quotas import ByteBudget, OwnedBytes, Usage
from shardwell_server.shard.sessions import Sessions
from shardwell_server.shard.slice import SharedParts
from shardwell_server.shard.step_tracker import StepTracker
from shardwell_server.shard.table.step_tracker import TableStepTracker
from shardwell_server.store.contract import ChunkRecord


def session_of(worker_id: str, life: int = 0) -> Session:
    """The session of a worker; another `life` is that of another process of it."""
    return Session(zlib.crc32(f"{worker_id}/{life}".encode()) + 1, "test-host", 1000 + life)


TENURE = 1
"""Of all seats that are asynchronous, where a test has no other."""


def contributor(worker_id: str, life: int = 0, tenure: int = TENURE) -> Contributor[Any]:
    """A stream of it."""
    return Contributor(worker_id, session_of(worker_id, life), tenure)


def applicant(
    worker_id: str, life: int = 0, tenure: int = TENURE, *, begins_anew: bool = False
) -> Contributor[Any]:
    """The same as it asks for its seat."""
    session = session_of(worker_id, life)
    return Contributor(worker_id, session, tenure, asks=True, begins_anew=begins_anew)


def enter(into: Any, worker_id: str) -> None:
    """Takes a worker's seat in a slice of a parameter or table whose gradients take none."""
    if into.spec.mode == "async":
        into.join(worker_id, seat_for=applicant(worker_id))


class AllAlive:
    """Every session attends."""

    def alive_for_s(self, number: int, process: str = "") -> float:
        return math.inf

    def spare_in_s(self, number: int) -> float:
        return math.inf

    def gone_for_s(self, number: int) -> float:
        return 0.0

    def attends_for_s(self, worker_ids: Container[str]) -> float | None:
        return math.inf

    def attends_as(self, worker_id: str) -> bool:
        return True

    def all_as(self, worker_id: str) -> list[Session]:
        return [session_of(worker_id)]

    def now_s(self) -> float:
        return 0.0


def shared_parts(config: ShardConfig | None = None, **parts: Any) -> SharedParts:
    """The parts of a shard whose sessions all attend."""
    config = config or ShardConfig(shard_index=0, shard_count=1)
    alive: Any = AllAlive()
    return SharedParts(config=config, sessions=alive, spans=Spans(), **parts)


def stored_bytes(limit_bytes: int = 2**40) -> OwnedBytes:
    """The bytes of a parameter or table whose owner has no quota."""
    return OwnedBytes(ByteBudget(limit_bytes), Usage(""))


def step_tracker(
    chunk_count: int = 1,
    *,
    worker_count: int,
    worker_count_max: int = 9,
    sessions: Sessions | AllAlive | None = None,
) -> StepTracker:
    """The tracker of a new parameter's slice; `worker_count` 0: asynchronous."""
    mode: ModeName = "sync" if worker_count else "async"
    optimizer = SGD(learning_rate=1.0)
    spec = ParameterSpec(
        name="p", size=8, optimizer=optimizer, worker_count=worker_count, mode=mode
    )
    records = [ChunkRecord()] * chunk_count
    return StepTracker(spec, records, sessions or AllAlive(), worker_count_max)  # type: ignore[arg-type]


def table_tracker(
    version: int = 0,
    *,
    worker_count: int,
    worker_count_max: int = 9,
    members: Elastic | None = None,
) -> TableStepTracker:
    """The tracker of a table at a version; `worker_count` 0: asynchronous."""
    spec = TableSpec(
        name="t",
        row_count=8,
        dim=2,
        optimizer=Adagrad(learning_rate=1.0),
        initializer=Zeros(),
        worker_count=worker_count,
        mode="sync" if worker_count else "async",
        members=members,
    )
    return TableStepTracker(spec, version, AllAlive(), worker_count_max)  # type: ignore[arg-type]


def noted(event: Event) -> None:
    """Takes note of nothing."""


def take(tracker: Tracker[Any], worker_id: str, life: int = 0) -> Any:
    """The seat of a worker in a tracker."""
    return tracker.crew.seat(applicant(worker_id, life), noted)


def know(tracker: Tracker[Any], worker_id: str, life: int = 0) -> None:
    """Has a tracker remember a worker that opened it."""
    tracker.crew.remember(worker_id, session_of(worker_id, life).number)
