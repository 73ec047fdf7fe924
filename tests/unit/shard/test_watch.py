"""The thread of a shard that does what no call asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shardwell_server.shard.watch import Watch

PATIENCE_S = 30.0


@pytest.fixture
def watch() -> Iterator[Watch]:
    with_thread = Watch()
    yield with_thread
    with_thread.close()


def test_what_an_act_fails_with_stops_no_other(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("a defect")

    watch.after(0.0, fail)
    watch.after(0.01, done.set)
    assert done.wait(PATIENCE_S)
    assert "a defect" in caplog.text


def test_an_act_is_called_again_after_what_it_says(watch: Watch) -> None:
    calls: list[int] = []
    done = threading.Event()

    def act() -> float | None:
        calls.append(len(calls))
        if len(calls) < 3:
            return 0.0
        done.set()
        return None

    watch.after(0.0, act)
    assert done.wait(PATIENCE_S)
    assert calls == [0, 1, 2]


def test_a_closed_watch_calls_nothing(watch: Watch) -> None:
    called = threading.Event()
    watch.close()
    watch.after(0.0, called.set)
    assert not called.wait(0.1)
