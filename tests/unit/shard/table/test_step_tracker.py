"""Goal: the table tracker's table, row by row, and its words to people.

Method: short histories written out; the state machine in test_step_tracker_machine.py has the long
ones.
"""

from __future__ import annotations

import pytest

from harness.data.sessions import applicant, know, noted, session_of, table_tracker, take
from shardwell.errors import LimitError, SeatsTakenError, StepOrderError
from shardwell.specs.members import Elastic
from shardwell_server.shard.crews import Event, seat_event
from shardwell_server.shard.step_tracker import Decision
from shardwell_server.shard.table.step_tracker import TableSeat, TableStepTracker
from shardwell_server.store.contract import Position


def tracker(
    worker_count: int = 2, *, version: int = 0, worker_count_max: int = 9
) -> TableStepTracker:
    return table_tracker(
        version,
        worker_count=worker_count,
        worker_count_max=worker_count_max,
    )


def give(steps: TableStepTracker, seat: TableSeat, step: int, part_count: int = 1) -> None:
    """A whole step."""
    for part in range(part_count):
        assert steps.decide(seat, step, part, ends_step=False) is Decision.COUNT
        steps.record(seat, steps.following(seat, ends_step=part == part_count - 1))


def restored(steps: TableStepTracker, worker_id: str, stored: Position) -> TableSeat:
    """The seat of a worker that an earlier process has logged."""
    return steps.crew.restore_seat(seat_event(take(tracker(), worker_id)), stored)


def give_part(steps: TableStepTracker, seat: TableSeat) -> None:
    steps.record(seat, steps.following(seat, ends_step=False))


def test_a_step_is_complete_when_all_workers_have_ended_it() -> None:
    steps = tracker()
    first, second = take(steps, "w0"), take(steps, "w1")
    give(steps, first, 0, part_count=3)
    assert not steps.is_complete
    give(steps, second, 0)
    assert steps.is_complete
    assert steps.version == 0
    for seat in (first, second):
        assert steps.decide(seat, 0, 0, ends_step=False) is Decision.DUPLICATE
        assert steps.decide(seat, 1, 0, ends_step=False) is Decision.WAIT
    steps.close()
    assert steps.version == 1
    for seat in (first, second):
        assert steps.decide(seat, 0, 5, ends_step=False) is Decision.DUPLICATE
        assert steps.decide(seat, 1, 0, ends_step=False) is Decision.COUNT


def test_parts_count_once_and_in_order() -> None:
    steps = tracker()
    seat = take(steps, "w0")
    give_part(steps, seat)
    give_part(steps, seat)
    assert steps.next_part("w0") == (0, 2)
    assert [steps.decide(seat, 0, part, ends_step=False) for part in range(3)] == [
        Decision.DUPLICATE,
        Decision.DUPLICATE,
        Decision.COUNT,
    ]
    with pytest.raises(
        StepOrderError, match="sent part 3 of step 0, of which 2 are counted here; send part 2"
    ) as caught:
        steps.decide(seat, 0, 3, ends_step=False)
    assert caught.value.worker_id == "w0"


def test_an_end_before_parts_that_were_counted_is_refused() -> None:
    """A worker that came back with fewer rows; acknowledged, the step would stay open."""
    steps = tracker()
    seat = take(steps, "w0")
    for _ in range(3):
        give_part(steps, seat)
    for part in range(3):
        assert steps.decide(seat, 0, part, ends_step=False) is Decision.DUPLICATE
        with pytest.raises(StepOrderError, match=f"part {part}, and 3 parts.*abandon"):
            steps.decide(seat, 0, part, ends_step=True)
    steps.record(seat, steps.following(seat, ends_step=True))
    for part in range(4):
        assert steps.decide(seat, 0, part, ends_step=True) is Decision.DUPLICATE


def test_a_worker_one_ahead_waits_with_its_first_part_and_its_end() -> None:
    steps = tracker()
    first, second = take(steps, "w0"), take(steps, "w1")
    give(steps, first, 0)
    assert steps.decide(first, 1, 0, ends_step=False) is Decision.WAIT
    assert steps.decide_end(first, 1) is Decision.WAIT
    with pytest.raises(StepOrderError, match="part 1 of step 1, of which 0 are counted"):
        steps.decide(first, 1, 1, ends_step=False)
    with pytest.raises(StepOrderError, match="expected step 1"):
        steps.decide(first, 2, 0, ends_step=False)
    give(steps, second, 0)
    steps.close()
    assert steps.decide(first, 1, 0, ends_step=False) is Decision.COUNT


@pytest.mark.parametrize("step", [1, 2, 2**62])
def test_steps_of_a_table_are_not_skipped(step: int) -> None:
    steps = tracker()
    seat = take(steps, "w0")
    for decide in (
        lambda: steps.decide(seat, step, 0, ends_step=False),
        lambda: steps.decide_end(seat, step),
    ):
        with pytest.raises(StepOrderError, match=f"step {step}, which was not its next"):
            decide()
    assert steps.decide(seat, 0, 0, ends_step=False) is Decision.COUNT


def test_an_abandoned_step_ends_with_the_parts_that_were_counted() -> None:
    steps = tracker()
    seat = take(steps, "w0")
    give_part(steps, seat)
    assert steps.decide_end(seat, 0) is Decision.COUNT
    steps.record(seat, steps.following(seat, ends_step=True))
    assert seat.position == Position(0, 1, 0)
    assert steps.decide_end(seat, 0) is Decision.DUPLICATE
    assert steps.decide(seat, 0, 7, ends_step=False) is Decision.DUPLICATE
    assert steps.contributed(0) == ["w0"]


def test_asynchronous_workers_of_a_table_count_for_themselves() -> None:
    steps = tracker(worker_count=0)
    assert not steps.is_sync
    first, second = take(steps, "w0"), take(steps, "w1")
    for step in range(3):
        give(steps, first, step, part_count=2)
    give_part(steps, second)
    assert steps.version == 3
    assert not steps.is_complete
    found = [steps.next_part(worker_id) for worker_id in ("w0", "w1", "new")]
    assert found == [(3, 0), (0, 1), (0, 0)]
    with pytest.raises(StepOrderError, match="expected step 0"):
        steps.decide(second, 3, 0, ends_step=False)
    assert steps.crew.missing(4) == ([], 0)


def test_a_table_s_step_that_closed_without_a_worker_is_refused() -> None:
    """A restored table begins at a version; a worker joins it there."""
    steps = tracker(version=3)
    seat = restored(steps, "w0", Position(0, 1, 2))
    assert (
        steps.decide(seat, 0, 9, ends_step=False)
        is steps.decide(seat, 1, 1, ends_step=False)
        is Decision.DUPLICATE
    )
    for step, part in ((1, 2), (1, 3), (2, 0)):
        with pytest.raises(StepOrderError, match="which closed without it: expected step 3"):
            steps.decide(seat, step, part, ends_step=False)
    with pytest.raises(StepOrderError, match="closed without it"):
        steps.decide_end(seat, 2)
    assert steps.next_part("w0") == steps.next_part("new") == (3, 0)
    give_part(steps, seat)
    assert seat.position == Position(0, 3, 1)
    assert steps.decide(seat, 2, 0, ends_step=False) is Decision.DUPLICATE


def test_a_ledger_that_comes_back_goes_on() -> None:
    steps = tracker(version=5)
    restored(steps, "w0", Position(0, 6))
    second = restored(steps, "w1", Position(1, 5, 4))
    assert [seat.worker_id for seat in steps.crew.seats] == ["w0", "w1"]
    assert steps.next_part("w1") == (5, 4)
    steps.record(second, steps.following(second, ends_step=True))
    assert steps.is_complete


def test_one_worker_completes_alone() -> None:
    steps = tracker(worker_count=1)
    seat = take(steps, "w0")
    for step in range(3):
        give(steps, seat, step)
        assert steps.is_complete
        steps.close()
    assert steps.version == 3


def test_readers_of_a_table_take_no_seat() -> None:
    steps = tracker(worker_count=2, worker_count_max=2)
    for number in range(5):
        know(steps, f"onlooker-{number}")
    assert take(steps, "w0").index == 0
    assert take(steps, "w1").index == 1
    assert take(steps, "w0") is take(steps, "w0")
    with pytest.raises(SeatsTakenError, match="'w0', 'w1'; 'w2' would be one more"):
        take(steps, "w2")
    steps = tracker(worker_count=0, worker_count_max=2)
    for worker_id in ("w0", "w1"):
        take(steps, worker_id)
    with pytest.raises(LimitError, match="worker_count_max=2: 'w2'"):
        take(steps, "w2")


def test_a_new_worker_is_logged_first() -> None:
    """Logging before a worker is taken in may fail, and then it is not taken in."""
    steps = tracker()

    def fail(event: Event) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        steps.crew.seat(applicant("w0"), fail)
    assert [seat.worker_id for seat in steps.crew.seats] == []


def test_missing_workers_of_a_table_are_named_or_counted() -> None:
    steps = tracker(worker_count=4)
    assert steps.crew.missing(0) == ([], 4)
    know(steps, "idle")
    give(steps, take(steps, "w0"), 0)
    give_part(steps, take(steps, "w1"))
    assert steps.contributed(0) == ["w0"]
    assert steps.crew.missing(0) == (["w1", "idle"], 1)
    for worker_id in ("w2", "w3"):
        take(steps, worker_id)
    assert steps.crew.missing(0) == (["w1", "w2", "w3"], 0)


def test_other_rows_in_place_of_those_that_counted_are_refused() -> None:
    steps = tracker(worker_count=1)
    seat = take(steps, "w0")
    for crc32c in (10, 11):
        steps.record(seat, steps.following(seat, ends_step=False), crc32c)
    for part, crc32c in enumerate((10, 11)):
        assert steps.decide(seat, 0, part, ends_step=False, crc32c=crc32c) is Decision.DUPLICATE
        with pytest.raises(StepOrderError, match=f"part {part} of step 0 again with other rows"):
            steps.decide(seat, 0, part, ends_step=False, crc32c=12)
    steps.record(seat, steps.following(seat, ends_step=True), 13)
    with pytest.raises(StepOrderError, match="part 2 of step 0 again"):
        steps.decide(seat, 0, 2, ends_step=True, crc32c=14)
    steps.close()
    steps.record(seat, steps.following(seat, ends_step=True), 20)
    assert steps.decide(seat, 0, 0, ends_step=False, crc32c=99) is Decision.DUPLICATE
    seat.give_to(session_of("w0", life=1))
    assert steps.decide(seat, 1, 0, ends_step=True, crc32c=20) is Decision.DUPLICATE
    assert steps.decide(seat, 1, 0, ends_step=True, crc32c=99) is Decision.SUPERSEDED


# A part that an elastic member sends again is distinguished from one that comes too late, and from
# another one of the same step; and a step awaits who has begun it.


def tracker_of(min_count: int = 1, version: int = 0) -> TableStepTracker:
    return table_tracker(
        version,
        worker_count=4,
        worker_count_max=100,
        members=Elastic(min_count=min_count, max_count=4),
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


def elastic_give(
    tracker: TableStepTracker, seat: TableSeat, crc32c: int, *, ends: bool = True
) -> None:
    """Counts the seat's next part."""
    tracker.record(seat, tracker.following(seat, ends_step=ends), crc32c)


def test_a_part_again_is_a_duplicate_though_its_step_has_closed() -> None:
    tracker = tracker_of()
    seat = member(tracker, "w0", 1, 0)
    elastic_give(tracker, seat, 11)
    assert tracker.is_complete
    tracker.close()
    assert tracker.decide(seat, 0, 0, ends_step=True, crc32c=11) is Decision.DUPLICATE
    assert tracker.decide(seat, 0, 0, ends_step=True, crc32c=12) is Decision.LATE
    assert tracker.decide(seat, 0, 1, ends_step=True, crc32c=11) is Decision.LATE


def test_other_rows_in_one_tenure_and_an_open_step_are_refused() -> None:
    tracker = tracker_of(min_count=2)
    seat = member(tracker, "w0", 1, 0)
    elastic_give(tracker, seat, 11)
    with pytest.raises(StepOrderError, match="other rows or gradients"):
        tracker.decide(seat, 0, 0, ends_step=True, crc32c=12)


def test_a_later_tenure_gives_no_step_of_an_earlier_one() -> None:
    tracker = tracker_of(min_count=2)
    first = member(tracker, "w0", 1, 0)
    elastic_give(tracker, first, 11, ends=False)
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
    elastic_give(tracker, seat, 11, ends=False)
    tracker.crew.end_tenure("w0", 1, noted)
    assert tracker.decide(seat, 0, 0, ends_step=False, crc32c=11) is Decision.DUPLICATE
    assert tracker.decide(seat, 0, 1, ends_step=True, crc32c=12) is Decision.LATE
    assert tracker.decide_end(seat, 0) is Decision.LATE


def test_nothing_counts_once_the_set_is_decided() -> None:
    tracker = tracker_of()
    seat, other = member(tracker, "w0", 1, 0), member(tracker, "w1", 2)
    elastic_give(tracker, seat, 11)
    tracker.is_closing = True
    assert not tracker.is_complete
    assert tracker.decide(other, 0, 0, ends_step=True, crc32c=12) is Decision.LATE
    assert tracker.decide_end(other, 0) is Decision.LATE
    assert tracker.decide(seat, 0, 0, ends_step=True, crc32c=11) is Decision.DUPLICATE


def test_a_step_awaits_who_has_begun_it_whatever_its_first_step() -> None:
    tracker = tracker_of()
    seat, other = member(tracker, "w0", 1, 0), member(tracker, "w1", 2, 5)
    elastic_give(tracker, other, 21, ends=False)
    elastic_give(tracker, seat, 11)
    assert not tracker.is_complete
    assert tracker.crew.missing(0) == (["w1"], 0)
    elastic_give(tracker, other, 22)
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
    elastic_give(tracker, seat, 11, ends=False)
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
    elastic_give(tracker, seat, 11, ends=False)
    seat.last_step, seat.part_crc32cs = -1, {}
    elastic_give(tracker, seat, 12)
    tracker.close()
    assert tracker.decide(seat, 0, 0, ends_step=False, crc32c=11) is Decision.DUPLICATE
    assert tracker.decide(seat, 0, 1, ends_step=True, crc32c=12) is Decision.DUPLICATE
    assert tracker.decide(seat, 0, 2, ends_step=True, crc32c=13) is Decision.LATE


def test_a_step_that_was_ended_before_a_restart_has_counted() -> None:
    tracker = tracker_of(min_count=2)
    seat = member(tracker, "w0", 1, 0)
    elastic_give(tracker, seat, 11, ends=False)
    elastic_give(tracker, seat, 12)
    tracker.crew.end_tenure("w0", 1, noted)
    seat.last_step, seat.part_crc32cs = -1, {}
    for part, crc32c in enumerate((11, 12)):
        found = tracker.decide(seat, 0, part, ends_step=part == 1, crc32c=crc32c)
        assert found is Decision.DUPLICATE


def test_a_part_of_a_tenure_that_its_seat_has_no_longer() -> None:
    tracker = tracker_of(min_count=2)
    seat = member(tracker, "w0", 1, 0)
    elastic_give(tracker, seat, 11)
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
    tracker = table_tracker(
        0,
        worker_count=1,
        worker_count_max=100,
        members=Elastic(min_count=1, max_count=1),
    )
    for number in range(3):
        seat = member(tracker, f"w{number}", number + 1, 2 * number)
        if number < 2:
            for _ in range(2):
                elastic_give(tracker, seat, 11)
                tracker.close()
            tracker.crew.end_tenure(f"w{number}", number + 1, noted)
    (event,) = [seat_event(each) for each in tracker.crew.seats if each is seat]
    assert event["given_at"] == 4
    assert tracker.decide(seat, 1, 0, ends_step=True, crc32c=11) is Decision.LATE
    assert tracker.decide(seat, 3, 0, ends_step=True, crc32c=11) is Decision.LATE
    assert tracker.decide(seat, 4, 0, ends_step=True, crc32c=11) is Decision.COUNT
