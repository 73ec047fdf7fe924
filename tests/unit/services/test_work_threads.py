"""Goal: work is done on threads that are started for it, and what has begun comes to its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from harness.polling import PATIENCE_S
from shardwell_server.services.work_threads import WorkThreads

COUNT_MAX = 4


def on_loop(body: Any) -> Any:
    """Runs `body(threads)`, a coroutine function, and closes the threads."""

    async def run() -> Any:
        threads = WorkThreads(asyncio.get_running_loop(), COUNT_MAX)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await body(threads)
        finally:
            await asyncio.to_thread(threads.close)

    return asyncio.run(run())


def thread_count() -> int:
    return sum(thread.name == "shardwell-work" for thread in threading.enumerate())


def test_results_and_errors_come_back() -> None:
    async def body(threads: WorkThreads) -> None:
        assert await threads.run(lambda: threading.current_thread().name) == "shardwell-work"
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        assert await threads.run(lambda: 7) == 7

    on_loop(body)


def test_as_many_threads_as_there_is_work_for() -> None:
    together = threading.Barrier(COUNT_MAX)

    async def body(threads: WorkThreads) -> None:
        for _ in range(10):
            await threads.run(int)
        assert thread_count() == 1
        meetings: list[Coroutine[Any, Any, Any]] = [
            threads.run(lambda: together.wait(PATIENCE_S)) for _ in range(3 * COUNT_MAX)
        ]
        await asyncio.gather(*meetings)
        assert thread_count() == COUNT_MAX

    on_loop(body)
    assert thread_count() == 0


def test_work_one_after_the_other_is_one_thread_s() -> None:
    """However many there are, and whichever of them had work before."""
    together = threading.Barrier(COUNT_MAX)

    async def body(threads: WorkThreads) -> None:
        meetings = [threads.run(lambda: together.wait(PATIENCE_S)) for _ in range(COUNT_MAX)]
        await asyncio.gather(*meetings)
        assert len({await threads.run(threading.get_ident) for _ in range(200)}) == 1

    on_loop(body)


def test_without_further_threads_work_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(threads: WorkThreads) -> None:
        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            numbers = await asyncio.gather(
                *(threads.run(lambda n=n: n) for n in range(50))  # type: ignore[misc]
            )
        assert numbers == list(range(50))

    on_loop(body)


def test_what_was_abandoned_says_when_it_has_ended() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), asyncio.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    async def body(threads: WorkThreads) -> None:
        task = asyncio.ensure_future(threads.run(work, lambda result: ended.set()))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not ended.is_set()
        go_on.set()
        await ended.wait()

    on_loop(body)


def test_what_was_begun_ends_before_the_threads_do() -> None:
    done: list[int] = []

    async def body(threads: WorkThreads) -> None:
        for number in range(100):
            threads.begin(lambda number=number: done.append(number))  # type: ignore[misc]

    on_loop(body)
    assert sorted(done) == list(range(100))


def test_a_call_abandoned_as_it_returns_reports_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled between the result's coming and its being taken."""
    results: list[Any] = []

    async def body(threads: WorkThreads) -> None:
        task = asyncio.ensure_future(threads.run(lambda: 7, results.append))
        deliver = threads._deliver

        def deliver_and_cancel(*arguments: Any) -> None:
            deliver(*arguments)
            task.cancel()

        monkeypatch.setattr(threads, "_deliver", deliver_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    on_loop(body)
    assert results == [7]


def test_after_the_end_what_is_begun_is_done_at_once() -> None:
    async def body(threads: WorkThreads) -> WorkThreads:
        return threads

    done: list[int] = []
    on_loop(body).begin(lambda: done.append(1))
    assert done == [1]


def test_closed_while_a_thread_is_started_it_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one must not take what was meant to end another."""
    go_on, start = threading.Event(), threading.Thread.start

    async def body(threads: WorkThreads) -> None:
        threads.begin(lambda: go_on.wait(PATIENCE_S))
        closer = threading.Thread(target=threads.close, daemon=True)

        def start_beside_the_end(thread: threading.Thread) -> None:
            start(closer)
            time.sleep(0.1)  # for what may be done beside the start
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start_beside_the_end)
            threads.begin(int)
        await asyncio.sleep(0.1)  # in which the new one takes what there is
        go_on.set()
        await asyncio.to_thread(closer.join, PATIENCE_S / 2)
        assert not closer.is_alive()

    on_loop(body)
    assert thread_count() == 0
