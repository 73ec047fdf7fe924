"""Goal: pieces are done once, by whichever thread is free; what they raise comes to the caller.

Method: pieces that wait for each other where threads must be free, and record who did them.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from harness.polling import PATIENCE_S
from shardwell.errors import ArgumentError
from shardwell.threads import spread as spread_module
from shardwell.threads.spread import (
    THREAD_COUNT_DEFAULT_MAX,
    THREADS_VARIABLE,
    CoreThreads,
    core_count,
    thread_count,
)


@pytest.fixture
def three():
    threads = CoreThreads(3)
    yield threads
    threads.close()


def test_two_threads_help_the_caller(three) -> None:
    """Three pieces that end only when all three are under way."""
    meeting = threading.Barrier(3)
    found: list[threading.Thread] = []

    def piece() -> None:
        meeting.wait(PATIENCE_S)
        found.append(threading.current_thread())

    with three.spread() as spread:
        for _ in range(3):
            spread.give(piece)
    assert len(set(found)) == 3
    assert threading.current_thread() in found
    assert {each.name for each in found} - {threading.current_thread().name} == {"shardwell-core"}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_piece_is_done_once(count) -> None:
    threads = CoreThreads(count)
    try:
        for _ in range(20):
            done: list[int] = []
            with threads.spread() as spread:
                for number in range(50):
                    spread.give(done.append, number)
            assert sorted(done) == list(range(50))
    finally:
        threads.close()


def test_one_thread_is_the_caller() -> None:
    threads = CoreThreads(1)
    before = threading.active_count()
    found: list[threading.Thread] = []
    with threads.spread() as spread:
        for _ in range(3):
            spread.give(lambda: found.append(threading.current_thread()))
    assert set(found) == {threading.current_thread()}
    assert threading.active_count() == before


def test_the_first_error_in_the_order_of_giving_counts(three) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def late() -> None:
        begun.set()
        goes_on.wait(PATIENCE_S)
        raise ValueError("the first")

    def last() -> None:
        goes_on.set()
        raise ValueError("the last")

    def give_all() -> None:
        with three.spread() as spread:
            spread.give(late)
            assert begun.wait(PATIENCE_S)
            spread.give(last)

    with pytest.raises(ValueError, match="the first"):
        give_all()


def test_an_error_of_the_block_itself_stays(three) -> None:
    done: list[int] = []

    def give_and_fail() -> None:
        with three.spread() as spread:
            spread.give(done.append, 1)
            raise KeyError("the block's")

    with pytest.raises(KeyError):
        give_and_fail()
    assert done == [1]


def test_all_have_ended_when_the_block_has(three) -> None:
    ended: list[bool] = []
    goes_on = threading.Event()

    def slow() -> None:
        goes_on.wait(PATIENCE_S)
        ended.append(True)

    timer = threading.Timer(0.05, goes_on.set)
    timer.start()
    with three.spread() as spread:
        spread.give(slow)
        spread.give(slow)
    assert ended == [True, True]
    timer.join()


def test_after_its_end_callers_do_their_own(three) -> None:
    three.close()
    found: list[threading.Thread] = []
    with three.spread() as spread:
        spread.give(lambda: found.append(threading.current_thread()))
    assert found == [threading.current_thread()]


def test_a_forked_process_has_no_threads(three) -> None:
    with three.spread() as spread:
        spread.give(lambda: None)
    child = os.fork()
    if not child:
        found: list[int] = []
        with three.spread() as spread:
            spread.give(lambda: found.append(threading.get_ident()))
        os._exit(0 if found == [threading.get_ident()] else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"cpu.max": "max 100000\n"}, 6),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "900000 100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu.max": "nonsense"}, 6),
        ({}, 6),
    ],
)
def test_cores_of_a_container(monkeypatch, tmp_path: Path, files, count) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert core_count(tmp_path) == count


def test_how_many_threads_a_process_has(monkeypatch) -> None:
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    for cores, count in ((1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (64, THREAD_COUNT_DEFAULT_MAX)):
        monkeypatch.setattr(spread_module, "core_count", lambda cores=cores: cores)
        assert thread_count(None) == count
    assert thread_count(7) == 7
    monkeypatch.setenv(THREADS_VARIABLE, " 12\r\n")
    assert thread_count(None) == 12
    assert thread_count(1) == 1
    for wrong in (0, -1, 257, True, 2.0):
        with pytest.raises(ArgumentError, match="threads must be 1 to 256; got"):
            thread_count(wrong)
    for wrong in ("0", "-1", "many", "1e3", "257"):
        monkeypatch.setenv(THREADS_VARIABLE, wrong)
        with pytest.raises(ArgumentError, match=r"\$SHARDWELL_THREADS must be 1 to 256; got"):
            thread_count(None)
