"""Goal: a place makes the transitions of the table in supervise.py, and no others.

Method: scripted processes, which end when the test says so, beside one real process.
"""

from __future__ import annotations

import signal
from itertools import repeat

import pytest

from harness.polling import eventually
from shardwell_server.processes import supervise
from shardwell_server.processes.child import Child, describe_exit, python
from shardwell_server.processes.supervise import Restarts, State, Supervisor


class Scripted:
    """A process without a system: its end is `code`, its readiness `ready`."""

    def __init__(self, *, ready: bool = True) -> None:
        self.ready = ready
        self.code: int | None = None
        self.is_gone = True
        self.got: list[int] = []
        self._is_asked = False

    def is_ready(self) -> bool:
        return self.ready

    def poll(self) -> int | None:
        return self.code

    def send(self, number: int) -> None:
        self.got.append(number)
        self.is_gone = True

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        if not self._is_asked:
            self.got.append(number)
        self._is_asked = True

    def ask_the_rest(self) -> None:
        pass

    def close(self, grace_s: float) -> None:
        self.ask_to_stop()
        self.code = -signal.SIGKILL if self.code is None else self.code


def _supervised(rule: Restarts = Restarts(), **words: bool):  # noqa: B008
    supervisor: Supervisor = Supervisor(grace_s=60.0)
    place = supervisor.add(lambda _: Scripted(**words), rule)
    return supervisor, place


def _ended(supervisor: Supervisor, place, code: int):
    place.process.code = code
    (change,) = supervisor.look()
    assert change.place is place
    assert change.words == f"has ended with {describe_exit(code)}"
    return change


@pytest.mark.parametrize(("code", "state"), [(0, State.DONE), (7, State.FAILED)])
def test_without_a_rule_nothing_is_started_again(code, state) -> None:
    supervisor, place = _supervised()
    assert (supervisor.look(), supervisor.is_awaited) == ([], True)
    assert _ended(supervisor, place, code).was is State.RUNNING
    assert (place.state, place.code, supervisor.is_awaited) == (state, code, False)
    assert supervisor.look() == []


def test_pauses_double_up_to_the_longest() -> None:
    rule = Restarts(count_max=9, first_pause_s=1.0, pause_s_max=10.0)
    assert [rule.pause_s(count) for count in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_restarts_are_counted() -> None:
    supervisor, place = _supervised(Restarts(count_max=2, done_codes=(0, 143)))
    for count in (1, 2):
        first = place.process
        _ended(supervisor, place, 1)
        assert (place.state, place.restart_count) == (State.PAUSING, count - 1)
        (change,) = supervisor.look()
        assert (change.was, place.state, place.restart_count) == (
            State.PAUSING,
            State.RUNNING,
            count,
        )
        assert place.process is not first
    _ended(supervisor, place, 1)
    assert place.state is State.FAILED


def test_codes_of_the_rule_are_done() -> None:
    supervisor, place = _supervised(Restarts(count_max=2, done_codes=(0, 143)))
    _ended(supervisor, place, 143)
    assert place.state is State.DONE


def test_nothing_is_started_before_the_last_process_is_gone_with_its_group() -> None:
    supervisor, place = _supervised(Restarts(count_max=1))
    ended = place.process
    ended.is_gone = False
    _ended(supervisor, place, 1)
    assert supervisor.look() == []
    assert (place.process, ended.got) == (ended, [signal.SIGTERM, signal.SIGKILL])
    supervisor.look()
    assert place.process is not ended


def test_nothing_is_due_as_long_as_all_run() -> None:
    rule = Restarts(count_max=1, first_pause_s=60.0, pause_s_max=60.0)
    supervisor, place = _supervised(rule)
    supervisor.add(lambda _: Scripted())
    assert supervisor.is_settled
    _ended(supervisor, place, 1)
    assert not supervisor.is_settled  # a restart is
    supervisor, _ = _supervised()
    supervisor.ask_to_stop()
    assert not supervisor.is_settled  # the end of the grace is


def test_a_pause_is_waited_for() -> None:
    supervisor, place = _supervised(Restarts(count_max=1, first_pause_s=60.0, pause_s_max=60.0))
    _ended(supervisor, place, 1)
    assert (supervisor.look(), place.state) == ([], State.PAUSING)


def test_one_that_is_not_ready_ends_by_itself_only_so_often() -> None:
    rule = Restarts(count_max=1000, done_codes=(), unready_count_max=3)
    supervisor, place = _supervised(rule, ready=False)
    for code in (1, -signal.SIGKILL, 0, 1):  # that of others does not count
        assert place.state is State.STARTING
        assert _ended(supervisor, place, code).was is State.STARTING
        assert place.state is State.PAUSING
        supervisor.look()
    _ended(supervisor, place, 1)
    assert place.state is State.FAILED


def test_one_that_was_ready_begins_to_count_anew() -> None:
    rule = Restarts(count_max=1000, done_codes=(), unready_count_max=2)
    supervisor, place = _supervised(rule, ready=False)
    for _ in range(5):
        _ended(supervisor, place, 1)
        supervisor.look()
        place.process.ready = True
        (change,) = supervisor.look()
        assert (change.was, change.words, place.state) == (State.STARTING, "", State.RUNNING)
        _ended(supervisor, place, 1)
        supervisor.look()
        assert place.state is State.STARTING


def test_one_that_is_never_ready_fails() -> None:
    supervisor, place = _supervised(Restarts(ready_s=0.0), ready=False)
    (change,) = supervisor.look()
    assert (change.was, change.words, place.state) == (State.STARTING, "", State.FAILED)


def test_one_that_can_not_be_started_again_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "_NOT_STARTED_PAUSE_S", 0.0)
    supervisor: Supervisor = Supervisor(grace_s=1.0)
    made = iter((Scripted(), OSError("no memory"), Scripted()))

    def start(_: int):
        found = next(made)
        if isinstance(found, OSError):
            raise found
        return found

    place = supervisor.add(start, Restarts(count_max=5))
    _ended(supervisor, place, 1)
    (change,) = supervisor.look()
    assert (change.words, place.state) == ("can't be started: no memory", State.PAUSING)
    assert place.code == 1  # of the process that ended
    supervisor.look()
    assert (place.state, place.restart_count) == (State.RUNNING, 2)


def test_once_it_stops_nothing_is_started_and_no_end_is_a_failure() -> None:
    supervisor: Supervisor = Supervisor(grace_s=60.0)
    rule = Restarts(count_max=5, first_pause_s=60.0, pause_s_max=60.0)
    pausing, running = (supervisor.add(lambda _: Scripted(), rule) for _ in range(2))
    _ended(supervisor, pausing, 1)
    for number in (signal.SIGINT, signal.SIGTERM):
        supervisor.ask_to_stop(number)
    assert running.process.got == [signal.SIGINT]
    assert 0.0 < supervisor.rest_s <= 60.0
    running.process.code = 1
    assert [change.place for change in supervisor.look()] == [pausing, running]
    assert (pausing.state, running.state) == (State.DONE, State.DONE)


@pytest.mark.parametrize("ignores", [True, False])
def test_a_real_process_and_what_it_started(ignores) -> None:
    """It is asked alone, and what it leaves when it has ended; or both are killed."""
    text = (
        "import signal, subprocess, sys, time\n"
        f"handler = signal.SIG_IGN if {ignores} else lambda *_: sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, handler)\n"
        "subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        "print('one\\ntwo', flush=True)\n"
        "print('th', end='', flush=True)\n"
        "while True: time.sleep(0.01)\n"
    )
    with Supervisor(0.0 if ignores else 60.0) as supervisor:
        place = supervisor.add(lambda _: Child(python("-c", text)))
        lines: list[str] = []
        for _ in repeat(None, 1000):
            lines += place.process.read_lines(10.0)
            if len(lines) == 2:
                break
        assert lines == ["one", "two"]
        supervisor.ask_to_stop()
        if not ignores:
            eventually("it has ended", lambda: supervisor.look() or None)
            eventually("the other one, too", lambda: supervisor.is_gone)
            assert (place.state, place.code) == (State.DONE, 3)
    assert place.process.is_gone
    assert place.process.poll() == (-signal.SIGKILL if ignores else 3)
