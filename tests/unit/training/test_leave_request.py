"""Goal: SIGTERM is noted where it would end the process, by the main thread alone, and once.

Method: signals to this process, where they are noted; to processes of their own, where they kill.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from harness.polling import PATIENCE_S
from harness.threads import in_background
from shardwell import LeaveRequest
from shardwell.errors import ShardUnavailableError, WorkersMissingError
from shardwell.process import ending
from shardwell.training import leave_request


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leave_request, "_open", weakref.WeakSet())  # without those of other tests
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    children = signal.getsignal(signal.SIGCHLD)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGCHLD, children)
    ending.leaving.clear()


def handler() -> object:
    return signal.getsignal(signal.SIGTERM)


def step(request: LeaveRequest) -> None:
    with request.ending_after_step():
        pass


def test_a_signal_that_a_launcher_passes_on_is_noted_once() -> None:
    with LeaveRequest() as first, LeaveRequest() as second:
        first.check()
        assert handler() is not signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)
        assert first.has_come
        assert second.has_come
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            first.check()
        assert caught.value.code == 143
    with LeaveRequest() as third:
        assert not third.has_come
        assert handler() is not signal.SIG_DFL


def test_the_last_that_closes_restores_what_was() -> None:
    first, second = LeaveRequest(), LeaveRequest()
    first.open()
    second.open()
    first.open()
    first.close()
    assert handler() is not signal.SIG_DFL
    second.close()
    second.close()
    assert handler() is signal.SIG_DFL


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_handler_of_the_program_is_left_alone(when) -> None:
    seen = []

    def own(number: int, frame: object) -> None:
        seen.append(number)

    request = LeaveRequest()
    if when == "meanwhile":
        request.open()
    signal.signal(signal.SIGTERM, own)
    request.open()
    signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGTERM]
    assert not request.has_come
    request.close()
    assert handler() is own


def test_a_handler_that_calls_what_was_installed_decides_what_follows() -> None:
    """As that of Lightning does."""
    request = LeaveRequest()
    request.open()
    inner, seen = handler(), []

    def composed(number: int, frame: object) -> None:
        assert callable(inner)
        inner(number, frame)
        seen.append(number)

    signal.signal(signal.SIGTERM, composed)
    signal.raise_signal(signal.SIGTERM)
    assert request.has_come
    request.close()
    signal.raise_signal(signal.SIGTERM)  # which is not read, and would kill else
    assert len(seen) == 2
    assert handler() is composed


def test_another_thread_notes_nothing() -> None:
    request = LeaveRequest()
    in_background(request.open).result(PATIENCE_S)
    assert handler() is signal.SIG_DFL
    request.open()
    in_background(request.close).result(PATIENCE_S)
    with LeaveRequest():
        pass
    assert handler() is signal.SIG_DFL


def test_the_step_under_way_ends_as_ever_and_the_next_one_ends_the_program() -> None:
    with LeaveRequest() as request:
        step(request)
        with request.ending_after_step():
            signal.raise_signal(signal.SIGTERM)
        assert request.has_come
        made = []
        with pytest.raises(SystemExit) as caught, request.ending_after_step():
            made.append(1)
        assert made == [1]
        assert caught.value.code == 143


def test_a_signal_between_two_steps() -> None:
    with LeaveRequest() as request:
        step(request)
        signal.raise_signal(signal.SIGTERM)
        step(request)
        with pytest.raises(SystemExit):
            step(request)


def test_a_step_that_the_others_have_left_before() -> None:
    """All are asked to leave, and one of them had ended its step a moment earlier."""
    with LeaveRequest() as request:
        with pytest.raises(WorkersMissingError), request.ending_after_step():
            raise WorkersMissingError("w1 has ended")
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(ShardUnavailableError), request.ending_after_step():
            raise ShardUnavailableError("a shard is away")
        with pytest.raises(SystemExit) as caught, request.ending_after_step():
            raise WorkersMissingError("w1 has ended")
        assert caught.value.code == 143
        assert isinstance(caught.value.__context__, WorkersMissingError)


def fail(number: int, frame: object) -> None:
    raise RuntimeError("DataLoader worker is killed by signal: Terminated.")


@pytest.mark.parametrize("first", ["SIGTERM", "SIGCHLD"])
def test_errors_at_the_end_of_a_leaving_process_are_held_back(first) -> None:
    with LeaveRequest() as request:
        if first == "SIGTERM":
            signal.signal(signal.SIGCHLD, fail)
            signal.raise_signal(signal.SIGTERM)
            with request.ending_after_step():
                signal.raise_signal(signal.SIGCHLD)
        else:
            meanwhile = []

            def fail_first(number: int, frame: object) -> None:
                meanwhile.append(in_background(lambda: os.kill(os.getpid(), signal.SIGTERM)))
                fail(number, frame)

            signal.signal(signal.SIGCHLD, fail_first)
            with request.ending_after_step():
                signal.raise_signal(signal.SIGCHLD)
            meanwhile[0].result(PATIENCE_S)
        assert request.has_come


def test_what_the_end_of_a_process_raises_without_a_request_is_raised(monkeypatch) -> None:
    monkeypatch.setattr(leave_request, "REPEAT_S", 0.05)
    signal.signal(signal.SIGCHLD, fail)
    with LeaveRequest() as request:
        with pytest.raises(RuntimeError, match="Terminated"), request.ending_after_step():
            signal.raise_signal(signal.SIGCHLD)
        assert not request.has_come


def test_an_error_that_ends_the_program_after_the_request_has_its_exit_code() -> None:
    """As that of an executor of processes whose workers got the signal as well."""
    program = (
        "import os, signal\nfrom shardwell import LeaveRequest\n"
        "with LeaveRequest() as request:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    raise RuntimeError('a pool is broken')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], timeout=PATIENCE_S, check=False, capture_output=True
    )
    assert ended.returncode == 143
    assert ended.stderr.decode().endswith("RuntimeError: a pool is broken\n")


ENDED = {
    "dropped": "request = None",
    "closed": "request.close()",
    "second": "while True: os.kill(os.getpid(), signal.SIGTERM)",  # a second later at most
    "forked": "pid = os.fork()\nif pid: sys.exit(-os.WTERMSIG(os.waitpid(pid, 0)[1]) == -15)",
}


@pytest.mark.parametrize("how", ENDED)
def test_an_unread_request_ends_the_process(how) -> None:
    program = (
        "import os, signal, sys\nfrom shardwell import LeaveRequest\n"
        f"request = LeaveRequest()\nrequest.open()\n{ENDED[how]}\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nsys.exit(7)"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False)
    assert ended.returncode == (1 if how == "forked" else -signal.SIGTERM)
