"""Goal: who was here is looked for soon, and who never was, or has left, is left alone."""

from __future__ import annotations

import types

import pytest

from shardwell.transport import neighbour
from shardwell.transport.neighbour import PAUSE_S, Neighbour


class Clock:
    def __init__(self) -> None:
        self.time_s = 1000.0

    def monotonic(self) -> float:
        return self.time_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(neighbour, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    return clock


def paused_s(clock: Clock, server: Neighbour) -> float:
    """For how long it is left alone after no process listens; as long has passed then."""
    began_s = clock.time_s
    server.note_missing()
    while not server.is_there:
        clock.time_s += 0.5
    return clock.time_s - began_s


def test_who_was_never_here(clock: Clock) -> None:
    server = Neighbour("@one", is_wanted=True)
    assert server.is_there
    assert [paused_s(clock, server) for _ in range(3)] == [PAUSE_S] * 3


def test_who_was_here_and_leaves(clock: Clock) -> None:
    server = Neighbour("@one", is_wanted=True)
    for _ in range(2):
        server.note_reached()
        found = [paused_s(clock, server) for _ in range(63)]
        assert found == [1.0] * 60 + [PAUSE_S] * 3
