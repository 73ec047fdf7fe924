"""Goal: each session that asks learns of a recording once, gives once, and delays no other.

Method: the state machine's events in the orders that matter, with a deadline that is over or not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import pytest

from shardwell.errors import LimitError
from shardwell.v1 import trace_pb2 as pb
from shardwell_server.shard.deadline import NotYet, RequestDeadline
from shardwell_server.shard.recordings import RECORDING_COUNT_MAX, Recordings

ALL = range(10)


def later() -> RequestDeadline:
    return RequestDeadline(60.0)


def over() -> RequestDeadline:
    return RequestDeadline(0.0)


def asking(recordings: Recordings, session: int) -> AbstractContextManager[None]:
    return recordings.asking(session, lambda: None)


def of(worker_id: str) -> pb.ProcessSpans:
    return pb.ProcessSpans(worker_id=worker_id)


def test_a_session_that_asks_gets_one_answer_and_gives_once() -> None:
    recordings = Recordings()
    with asking(recordings, 1), pytest.raises(NotYet):
        recordings.news(1, later())
    with asking(recordings, 1):
        number = recordings.begin(ALL, 60.0)
        assert recordings.news(1, later()) == number
        with pytest.raises(NotYet):
            recordings.news(1, later())
        with pytest.raises(NotYet):
            recordings.next(number, later())
        recordings.give(number, 1, of("w1"))
        recordings.give(number, 1, of("w1 again"))
        assert recordings.next(number, later()) == of("w1")
        assert recordings.next(number, later()) is None
        assert recordings.end(number) == {1}
        with pytest.raises(NotYet):
            recordings.news(1, later())  # it is over


def test_who_asks_is_woken() -> None:
    recordings, woken = Recordings(), []
    with pytest.raises(NotYet):
        recordings.news(1, RequestDeadline(60.0, wake=lambda: woken.append("asks")))
    number = recordings.begin(ALL, 60.0)
    assert woken == ["asks"]
    assert recordings.news(1, later()) == number
    assert recordings.next(number, later()) is None  # no session is sure to give
    recordings.give(number, 1, of("w1"))  # who came later may
    assert recordings.next(number, later()) == of("w1")


def test_who_gives_wakes_who_records() -> None:
    recordings, woken = Recordings(), []
    with asking(recordings, 1), asking(recordings, 2):
        number = recordings.begin(ALL, 60.0)
        recordings.news(1, later())
        with pytest.raises(NotYet):
            recordings.next(number, RequestDeadline(60.0, wake=lambda: woken.append("records")))
        recordings.give(number, 1, of("w1"))
        assert woken == ["records"]
        assert recordings.next(number, later()) == of("w1")
        with pytest.raises(NotYet):
            recordings.next(number, later())  # for session 2
        assert recordings.next(number, over()) is None
        assert recordings.end(number) == {1}


def test_what_is_unasked_or_late_is_dropped() -> None:
    recordings = Recordings()
    with asking(recordings, 1):
        number = recordings.begin(ALL, 60.0)
        recordings.give(number, 1, of("not known yet"))
        recordings.give(number + 1, 1, of("no such recording"))
        assert recordings.next(number, over()) is None
        recordings.news(1, later())
        assert recordings.end(number) == set()
        recordings.give(number, 1, of("late"))
        another = recordings.begin(ALL, 60.0)
        assert recordings.next(another, over()) is None


def test_two_at_once_have_all_spans_each() -> None:
    recordings = Recordings()
    with asking(recordings, 1):
        numbers = [recordings.begin(ALL, 60.0), recordings.begin(ALL, 60.0)]
        assert [recordings.news(1, later()), recordings.news(1, later())] == numbers
        for number in reversed(numbers):
            recordings.give(number, 1, of("w1"))
        assert [recordings.next(number, later()) for number in numbers] == [of("w1")] * 2


def test_not_too_many_at_once() -> None:
    recordings = Recordings()
    numbers = [recordings.begin(ALL, 60.0) for _ in range(RECORDING_COUNT_MAX)]
    with pytest.raises(LimitError, match=f"{RECORDING_COUNT_MAX} recordings"):
        recordings.begin(ALL, 60.0)
    recordings.end(numbers[0])
    assert recordings.begin(ALL, 60.0) not in numbers


def test_who_stopped_asking_is_not_waited_for() -> None:
    recordings = Recordings()
    with asking(recordings, 1):
        pass
    assert recordings.next(recordings.begin(ALL, 60.0), later()) is None


def test_a_session_that_pauses_after_an_answer_is_waited_for() -> None:
    recordings = Recordings()
    with asking(recordings, 1):
        first = recordings.begin(ALL, 60.0)
        recordings.news(1, later())
    recordings.give(first, 1, of("w1"))
    recordings.end(first)
    second = recordings.begin(ALL, 60.0)
    with pytest.raises(NotYet):
        recordings.next(second, later())
    assert recordings.news(1, later()) == second


def test_who_has_left_is_not_waited_for() -> None:
    recordings = Recordings()
    with asking(recordings, 1), asking(recordings, 2):
        number = recordings.begin({2}, 60.0)
        recordings.news(2, later())
        recordings.give(number, 2, of("w2"))
        assert recordings.next(number, later()) == of("w2")
        assert recordings.next(number, later()) is None


def test_a_stopping_shard_ends_all_waits() -> None:
    recordings, woken = Recordings(), []
    with pytest.raises(NotYet):
        recordings.news(1, RequestDeadline(60.0, wake=lambda: woken.append(1)))
    recordings.stop()
    assert woken == [1]
    assert recordings.news(1, later()) == 0


def test_a_session_asks_by_one_call() -> None:
    """Of two, one is on a connection that has broken: its answer would be lost."""
    recordings, ended = Recordings(), []
    with ExitStack() as earlier:
        earlier.enter_context(recordings.asking(1, lambda: ended.append("first")))
        with recordings.asking(1, lambda: ended.append("second")):
            assert ended == ["first"]
            earlier.close()
            with pytest.raises(NotYet):  # the second still asks
                recordings.next(recordings.begin(ALL, 60.0), later())
        assert recordings.next(recordings.begin(ALL, 60.0), later()) is None
    assert ended == ["first"]


def test_who_reads_nothing_makes_room_when_time_is_over(monkeypatch) -> None:
    monkeypatch.setattr("shardwell_server.shard.recordings._READ_S", 0.0)
    recordings = Recordings()
    kept = [recordings.begin(ALL, 60.0) for _ in range(RECORDING_COUNT_MAX - 1)]
    unread = recordings.begin(ALL, 0.0)
    another = recordings.begin(ALL, 60.0)
    assert recordings.next(unread, later()) is None
    assert recordings.end(unread) == set()
    with pytest.raises(LimitError):
        recordings.begin(ALL, 60.0)
    for number in (*kept, another):
        recordings.end(number)


def test_unread_spans_do_not_pile_up(monkeypatch) -> None:
    size = of("w1").ByteSize()
    monkeypatch.setattr("shardwell_server.shard.recordings._WAITING_BYTES_MAX", 2 * size)
    recordings = Recordings()
    with ExitStack() as stack:
        for session in (1, 2, 3):
            stack.enter_context(asking(recordings, session))
        number = recordings.begin(ALL, 60.0)
        for session in (1, 2, 3):
            recordings.news(session, later())
            recordings.give(number, session, of(f"w{session}"))
        assert recordings.next(number, later()) == of("w1")
        recordings.give(number, 3, of("w3"))  # there is room now
        assert [recordings.next(number, over()) for _ in range(3)] == [of("w2"), of("w3"), None]
        assert recordings.end(number) == {1, 2, 3}
        another = recordings.begin(ALL, 60.0)
        for session in (1, 2, 3):
            recordings.news(session, later())
            recordings.give(another, session, of(f"w{session}"))
        assert recordings.end(another) == {1, 2}
