"""Goal: a part that an elastic member sends again is distinguished from one that comes too late,
and from another one of the same step; and a step awaits who has begun it.

Method: TableStepTracker is called as a slice calls it. The orders of events are
test_elastic_slice_machine.py's.
"""

from __future__ import annotations

import pytest

from harness.data.sessions import AllAlive, applicant, noted
from shardwell.errors import StepOrderError
from shardwell.specs.members import Elastic
from shardwell_server.shard.crews import seat_event
from shardwell_server.shard.step_tracker import Decision
from shardwell_server.shard.table.step_tracker import TableSeat, TableStepTracker


def tracker_of(min_count: int = 1, version: int = 0) -> TableStepTracker:
    return TableStepTracker(
        version,
        worker_count=4,
        worker_count_max=100,
        sessions=AllAlive(),
        elastic=Elastic(min_count=min_count, max_count=4),
    )


def member(
    tracker: TableStepTracker, worker_id: str, tenure: int, from_step: int | None = None
) -> TableSeat:
    asks = applicant(worker_id, tenure=tenure)
    seat = tracker.crew.seat(asks, noted)
    assert seat is not None
    asks.from_step = from_step
    tracker.crew.await_from(asks, noted)
    return seat


def give(tracker: TableStepTracker, seat: TableSeat, crc32c: int, *, ends: bool = True) -> None:
    """Counts the seat's next part."""
    tracker.record(seat, tracker.following(seat, ends_step=ends), crc32c)


def test_a_part_again_is_a_duplicate_though_its_step_has_closed() -> None:
    tracker = tracker_of()
    seat = member(tracker, "w0", 1, 0)
    give(tracker, seat, 11)
    assert tracker.is_complete
    tracker.close()
    assert tracker.decide(seat, 0, 0, ends_step=True, crc32c=11) is Decision.DUPLICATE
    assert tracker.decide(seat, 0, 0, ends_step=True, crc32c=12) is Decision.LATE
    assert tracker.decide(seat, 0, 1, ends_step=True, crc32c=11) is Decision.LATE


def test_other_rows_in_one_tenure_and_an_open_step_are_refused() -> None:
    tracker = tracker_of(min_count=2)
    seat = member(tracker, "w0", 1, 0)
    give(tracker, seat, 11)
    with pytest.raises(StepOrderError, match="other rows or gradients"):
        tracker.decide(seat, 0, 0, ends_step=True, crc32c=12)


def test_a_later_tenure_gives_no_step_of_an_earlier_one() -> None:
    tracker = tracker_of(min_count=2)
    first = member(tracker, "w0", 1, 0)
    give(tracker, first, 11, ends=False)
    tracker.crew.end_tenure("w0", 1, noted)
    (cut_off,) = tracker.cut_off
    tracker.record(cut_off, tracker.following(cut_off, ends_step=True))
    assert tracker.contributed(0) == ["w0"]
    assert not tracker.cut_off
    second = member(tracker, "w0", 2, 0)
    assert tracker.decide(second, 0, 0, ends_step=False, crc32c=11) is Decision.DUPLICATE
    assert tracker.decide(second, 0, 0, ends_step=False, crc32c=12) is Decision.SUPERSEDED
    assert tracker.decide(second, 0, 1, ends_step=True, crc32c=13) is Decision.SUPERSEDED
    assert tracker.decide(second, 1, 0, ends_step=True, crc32c=14) is Decision.WAIT


def test_rows_of_an_ended_tenure_are_late_unless_they_counted() -> None:
    tracker = tracker_of(min_count=2)
    seat = member(tracker, "w0", 1, 0)
    give(tracker, seat, 11, ends=False)
    tracker.crew.end_tenure("w0", 1, noted)
    assert tracker.decide(seat, 0, 0, ends_step=False, crc32c=11) is Decision.DUPLICATE
    assert tracker.decide(seat, 0, 1, ends_step=True, crc32c=12) is Decision.LATE
    assert tracker.decide_end(seat, 0) is Decision.LATE


def test_nothing_counts_once_the_set_is_decided() -> None:
    tracker = tracker_of()
    seat, other = member(tracker, "w0", 1, 0), member(tracker, "w1", 2)
    give(tracker, seat, 11)
    tracker.is_closing = True
    assert not tracker.is_complete
    assert tracker.decide(other, 0, 0, ends_step=True, crc32c=12) is Decision.LATE
    assert tracker.decide_end(other, 0) is Decision.LATE
    assert tracker.decide(seat, 0, 0, ends_step=True, crc32c=11) is Decision.DUPLICATE


def test_a_step_awaits_who_has_begun_it_whatever_its_first_step() -> None:
    tracker = tracker_of()
    seat, other = member(tracker, "w0", 1, 0), member(tracker, "w1", 2, 5)
    give(tracker, other, 21, ends=False)
    give(tracker, seat, 11)
    assert not tracker.is_complete
    assert tracker.crew.missing(0) == (["w1"], 0)
    give(tracker, other, 22)
    assert tracker.is_complete
    assert tracker.contributors(0) == ["w0", "w1"]


def test_who_joins_is_needed_where_the_open_step_can_not_reach_the_floor() -> None:
    tracker = tracker_of(min_count=2, version=7)
    member(tracker, "w0", 1, 7)
    assert tracker.crew.missing(7) == (["w0"], 1)
    assert tracker.crew.needed_step("w1") == 7
    member(tracker, "w1", 2, 7)
    assert tracker.crew.needed_step("w2") is None


def test_who_left_and_the_first_step_outlive_a_restart() -> None:
    tracker = tracker_of()
    member(tracker, "w0", 1, 3)
    member(tracker, "w1", 2, 0)
    tracker.crew.end_tenure("w1", 2, noted)
    again = tracker_of()
    for seat in tracker.crew.seats:
        again.crew.restore_seat(seat_event(seat), seat.stored_position(seat.position))
    assert [(seat.worker_id, seat.from_step) for seat in again.crew.awaited] == [("w0", 3)]


@pytest.mark.parametrize("is_known", [True, False])
def test_what_counted_before_a_member_was_cut_off_is_a_duplicate(is_known: bool) -> None:
    """A restart forgets checksums, and not how many parts of the step had counted."""
    tracker = tracker_of(min_count=2)
    seat = member(tracker, "w0", 1, 0)
    give(tracker, seat, 11, ends=False)
    tracker.crew.end_tenure("w0", 1, noted)
    (cut_off,) = tracker.cut_off
    cut_off.ended_at = (0, 1)
    tracker.record(cut_off, tracker.following(cut_off, ends_step=True))
    if not is_known:
        seat.last_step, seat.part_crc32cs = -1, {}
    assert tracker.decide(seat, 0, 0, ends_step=False, crc32c=11) is Decision.DUPLICATE
    assert tracker.decide(seat, 0, 1, ends_step=True, crc32c=13) is Decision.LATE


def test_a_part_from_before_a_restart_has_counted_in_a_step_that_went_on() -> None:
    """The shard knows the checksums of what came after it alone."""
    tracker = tracker_of()
    seat = member(tracker, "w0", 1, 0)
    give(tracker, seat, 11, ends=False)
    seat.last_step, seat.part_crc32cs = -1, {}
    give(tracker, seat, 12)
    tracker.close()
    assert tracker.decide(seat, 0, 0, ends_step=False, crc32c=11) is Decision.DUPLICATE
    assert tracker.decide(seat, 0, 1, ends_step=True, crc32c=12) is Decision.DUPLICATE
    assert tracker.decide(seat, 0, 2, ends_step=True, crc32c=13) is Decision.LATE


def test_a_step_that_was_ended_before_a_restart_has_counted() -> None:
    tracker = tracker_of(min_count=2)
    seat = member(tracker, "w0", 1, 0)
    give(tracker, seat, 11, ends=False)
    give(tracker, seat, 12)
    tracker.crew.end_tenure("w0", 1, noted)
    seat.last_step, seat.part_crc32cs = -1, {}
    for part, crc32c in enumerate((11, 12)):
        found = tracker.decide(seat, 0, part, ends_step=part == 1, crc32c=crc32c)
        assert found is Decision.DUPLICATE


def test_a_part_of_a_tenure_that_its_seat_has_no_longer() -> None:
    tracker = tracker_of(min_count=2)
    seat = member(tracker, "w0", 1, 0)
    give(tracker, seat, 11)
    tracker.crew.end_tenure("w0", 1, noted)
    member(tracker, "w0", 2, 0)
    assert tracker.decide_past("w0", 0, 0, 11, ["w0"]) is Decision.DUPLICATE
    assert tracker.decide_past("w0", 0, 0, 12, ["w0"]) is Decision.LATE
    for worker_id, step, contributors, expected in (
        ("w9", 0, ["w9"], Decision.UNKNOWN),
        ("w9", 0, ["w0"], Decision.LATE),
        ("w9", 0, None, Decision.UNKNOWN),
        ("w9", 1, None, Decision.LATE),
    ):
        assert tracker.decide_past(worker_id, step, 0, 11, contributors) is expected


def test_a_newcomer_has_given_no_rows_of_what_the_seat_had_before() -> None:
    tracker = TableStepTracker(
        0,
        worker_count=1,
        worker_count_max=100,
        sessions=AllAlive(),
        elastic=Elastic(min_count=1, max_count=1),
    )
    for number in range(3):
        seat = member(tracker, f"w{number}", number + 1, 2 * number)
        if number < 2:
            for _ in range(2):
                give(tracker, seat, 11)
                tracker.close()
            tracker.crew.end_tenure(f"w{number}", number + 1, noted)
    (event,) = [seat_event(each) for each in tracker.crew.seats if each is seat]
    assert event["given_at"] == 4
    assert tracker.decide(seat, 1, 0, ends_step=True, crc32c=11) is Decision.LATE
    assert tracker.decide(seat, 3, 0, ends_step=True, crc32c=11) is Decision.LATE
    assert tracker.decide(seat, 4, 0, ends_step=True, crc32c=11) is Decision.COUNT
