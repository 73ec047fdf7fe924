"""Sessions for tests that call a slice or a tracker themselves: one a worker, always the same."""

from __future__ import annotations

import math
import zlib
from collections.abc import Container
from typing import Any

from shardwell.rpc.session import Session
from shardwell_server.shard.crews import Contributor, Event, Tracker


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


def noted(event: Event) -> None:
    """Takes note of nothing."""


def take(tracker: Tracker[Any], worker_id: str, life: int = 0) -> Any:
    """The seat of a worker in a tracker."""
    return tracker.crew.seat(applicant(worker_id, life), noted)


def know(tracker: Tracker[Any], worker_id: str, life: int = 0) -> None:
    """Has a tracker remember a worker that opened it."""
    tracker.crew.remember(worker_id, session_of(worker_id, life).number)
