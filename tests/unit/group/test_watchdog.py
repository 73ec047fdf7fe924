"""Goal: a block that takes too long is noticed once, one that ends in time never is.

Method: real threads, with events in place of sleeps and a deadline on every wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from harness.threads import in_background
from shardwell.group.transport import server
from shardwell.group.transport.server import Watchdog

PATIENCE_S = 30.0


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    before = set(threading.enumerate())
    made = Watchdog()
    yield made
    made.close()
    assert set(threading.enumerate()) <= before


def test_a_block_that_is_too_long_is_acted_upon_once(watchdog: Watchdog) -> None:
    acted, calls = threading.Event(), []

    def act() -> None:
        calls.append(threading.current_thread())
        acted.set()

    with watchdog.watch(0.0, act) as watch:
        assert acted.wait(PATIENCE_S)
        assert watch.expired
        # Another watch expires after it, so the thread has looked again.
        again = threading.Event()
        with watchdog.watch(0.0, again.set):
            assert again.wait(PATIENCE_S)
    assert len(calls) == 1
    assert calls[0] is not threading.current_thread()


def test_only_late_watches_expire(watchdog: Watchdog) -> None:
    early, late = threading.Event(), threading.Event()
    with watchdog.watch(math.inf, late.set) as patient, watchdog.watch(0.0, early.set):
        assert early.wait(PATIENCE_S)
        assert not patient.expired
    assert not late.is_set()


def test_a_block_that_has_ended_is_forgotten(watchdog: Watchdog) -> None:
    ended, later = threading.Event(), threading.Event()
    with watchdog.watch(0.05, ended.set) as watch:
        pass
    with watchdog.watch(0.1, later.set):
        assert later.wait(PATIENCE_S)
    assert not watch.expired
    assert not ended.is_set()


def test_a_block_that_fails_is_forgotten(watchdog: Watchdog) -> None:
    acted, later = threading.Event(), threading.Event()
    with pytest.raises(KeyError), watchdog.watch(0.05, acted.set):
        raise KeyError
    with watchdog.watch(0.1, later.set):
        assert later.wait(PATIENCE_S)
    assert not acted.is_set()


def test_it_wakes_again_after_having_had_nothing_to_do(watchdog: Watchdog) -> None:
    for _ in range(3):
        acted = threading.Event()
        with watchdog.watch(0.0, acted.set):
            assert acted.wait(PATIENCE_S)


def test_many_threads_have_one_watchdog_thread(watchdog: Watchdog) -> None:
    acted = [threading.Event() for _ in range(20)]

    def work(event: threading.Event) -> None:
        with watchdog.watch(0.0, event.set):
            event.wait(PATIENCE_S)

    threads = [threading.Thread(target=work, args=(event,)) for event in acted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(event.is_set() for event in acted)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("shardwell-watchdog") == 1


def test_an_unused_watchdog_has_no_thread() -> None:
    before = threading.active_count()
    watchdog = Watchdog()
    assert threading.active_count() == before
    watchdog.close()
    watchdog.close()


def test_a_closed_watchdog_watches_nothing() -> None:
    watchdog = Watchdog()
    acted = threading.Event()
    with watchdog.watch(math.inf, acted.set):
        watchdog.close()
    with watchdog.watch(0.0, acted.set) as watch:
        assert not acted.wait(0.3)
    assert not watch.expired
    assert "shardwell-watchdog" not in [thread.name for thread in threading.enumerate()]


def test_it_ends_where_it_is_closed_while_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looking, go_on = threading.Event(), threading.Event()

    def now() -> float:
        if threading.current_thread().name == "shardwell-watchdog":
            looking.set()
            assert go_on.wait(PATIENCE_S)
        return time.monotonic()

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=now))
    watchdog = Watchdog()
    with watchdog.watch(math.inf, go_on.set):
        pass
    assert looking.wait(PATIENCE_S)
    closing = in_background(watchdog.close)
    threading.Timer(0.2, go_on.set).start()
    closing.result(PATIENCE_S)
