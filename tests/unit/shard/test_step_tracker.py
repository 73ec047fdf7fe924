"""Goal: the tracker's table, row by row, and its words to people.

Method: short histories written out; the state machine in test_step_tracker_machine.py has the long
ones.
"""

from __future__ import annotations

import math

import pytest

from harness.data.sessions import know, session_of, step_tracker, take
from shardwell.errors import LimitError, SeatsTakenError, StepOrderError
from shardwell_server.shard.crews import RETURN_AFTER_END_S
from shardwell_server.shard.sessions import Sessions
from shardwell_server.shard.step_tracker import Decision, ParameterSeat, StepTracker
from shardwell_server.store.contract import ChunkRecord


def tracker(chunk_count: int = 1, worker_count: int = 2, worker_count_max: int = 9) -> StepTracker:
    return step_tracker(
        chunk_count,
        worker_count=worker_count,
        worker_count_max=worker_count_max,
    )


def give(
    tracker: StepTracker, seat: ParameterSeat, step: int, chunk: int = 0, samples: int = 1
) -> None:
    assert tracker.decide(seat, chunk, step) is Decision.COUNT
    closes = tracker.is_complete(chunk, seat)
    tracker.record(seat, chunk, step, tracker.following(chunk, samples, closes=closes))


def test_a_step_closes_with_the_last_worker() -> None:
    steps = tracker()
    first, second = take(steps, "w0"), take(steps, "w1")
    assert not steps.is_complete(0, second)
    give(steps, first, 0, samples=3)
    assert steps.is_complete(0, second)
    assert steps.records[0] == ChunkRecord(contribution_count=1, sample_total=3)
    give(steps, second, 0, samples=4)
    assert steps.records[0] == ChunkRecord(version=1)


def test_a_repeated_gradient_counts_once_before_and_after_the_step_closed() -> None:
    steps = tracker()
    first, second = take(steps, "w0"), take(steps, "w1")
    give(steps, first, 0)
    assert steps.decide(first, 0, 0) is Decision.DUPLICATE
    give(steps, second, 0)
    for seat in (first, second):
        assert steps.decide(seat, 0, 0) is Decision.DUPLICATE


def test_a_worker_one_ahead_waits() -> None:
    steps = tracker()
    first, second = take(steps, "w0"), take(steps, "w1")
    give(steps, first, 0)
    assert steps.decide(first, 0, 1) is Decision.WAIT
    give(steps, second, 0)
    assert steps.decide(first, 0, 1) is Decision.COUNT


@pytest.mark.parametrize("step", [1, 2, 2**63, 2**64 - 1])
def test_steps_are_not_skipped(step: int) -> None:
    steps = tracker()
    seat = take(steps, "w0")
    with pytest.raises(StepOrderError, match=f"step {step} of chunk 0, which was not its next"):
        steps.decide(seat, 0, step)
    assert steps.decide(seat, 0, 0) is Decision.COUNT


def test_a_worker_two_ahead_skips() -> None:
    steps = tracker()
    seat = take(steps, "w0")
    give(steps, seat, 0)
    with pytest.raises(StepOrderError, match="expected step 1"):
        steps.decide(seat, 0, 2)


def test_asynchronous_workers_count_for_themselves() -> None:
    steps = tracker(worker_count=0)
    assert not steps.is_sync
    first, second = take(steps, "w0"), take(steps, "w1")
    for step in range(3):
        assert steps.is_complete(0, first)
        give(steps, first, step)
    give(steps, second, 0)
    assert steps.records[0].version == 4
    assert (steps.next_step("w0"), steps.next_step("w1"), steps.next_step("new")) == (3, 1, 0)
    with pytest.raises(StepOrderError, match="expected step 1"):
        steps.decide(second, 0, 3)
    assert steps.crew.missing(4) == ([], 0)


def test_seats_are_kept_and_their_holders_named() -> None:
    steps = tracker(worker_count=10, worker_count_max=20)
    for index in range(10):
        take(steps, f"w{index}")
    with pytest.raises(SeatsTakenError) as caught:
        take(steps, "w10")
    message = str(caught.value)
    assert "worker_count=10" in message
    assert "'w0', 'w1'" in message
    assert "and 2 more" in message
    assert "'w10' would be one more" in message
    assert take(steps, "w3") is take(steps, "w3")


def test_readers_take_no_seat() -> None:
    steps = tracker(worker_count=0, worker_count_max=2)
    for number in range(5):
        know(steps, f"reader-{number}")
    for worker_id in ("w0", "w1"):
        assert take(steps, worker_id).worker_id == worker_id
    with pytest.raises(LimitError, match="worker_count_max=2: 'w2'"):
        take(steps, "w2")
    assert take(steps, "w0").worker_id == "w0"


def test_a_step_that_closed_without_a_worker_is_refused() -> None:
    """Versions come back from files; a worker that comes later joins where they are."""
    steps = tracker(chunk_count=2)
    steps.records = [ChunkRecord(version=3), ChunkRecord(version=4)]
    seat = take(steps, "w0")
    for chunk, version in enumerate((3, 4)):
        for step in range(version):
            with pytest.raises(StepOrderError, match=f"closed without it: expected step {version}"):
                steps.decide(seat, chunk, step)
        assert steps.decide(seat, chunk, version) is Decision.COUNT
    assert steps.next_step("w0") == steps.next_step("w1") == 3


def test_next_step_after_a_part_of_a_step_is_that_step() -> None:
    steps = tracker(chunk_count=3, worker_count=1)
    seat = take(steps, "w0")
    for step, chunks in ((0, (0, 1, 2)), (1, (0, 2))):
        for chunk in chunks:
            give(steps, seat, step, chunk)
    assert steps.next_step("w0") == 1
    assert [steps.decide(seat, chunk, 1) for chunk in range(3)] == [
        Decision.DUPLICATE,
        Decision.COUNT,
        Decision.DUPLICATE,
    ]
    give(steps, seat, 1, 1)
    assert steps.next_step("w0") == 2


def test_a_newcomer_joins_the_oldest_open_step() -> None:
    steps = tracker(chunk_count=2, worker_count=2)
    first = take(steps, "w0")
    give(steps, first, 0, 0)
    assert steps.next_step("w1") == 0
    assert steps.next_step("w0") == 0
    second = take(steps, "w1")
    give(steps, second, 0, 0)
    assert (steps.version_min(), steps.version_max()) == (0, 1)
    assert steps.next_step("w1") == 0


def test_missing_workers_are_named_or_counted() -> None:
    steps = tracker(chunk_count=2, worker_count=4)
    assert steps.crew.missing(0) == ([], 4)
    know(steps, "idle")
    give(steps, take(steps, "w0"), 0, 0)
    assert steps.crew.missing(0, 0) == (["idle"], 2)
    assert steps.crew.missing(0, 1) == (["w0", "idle"], 2)
    assert steps.crew.missing(0) == (["w0", "idle"], 2)
    assert steps.contributed(0, 0) == ["w0"]
    assert steps.contributed(0) == []


def test_a_reader_is_not_missed_when_all_seats_are_taken() -> None:
    steps = tracker(worker_count=2)
    know(steps, "onlooker")
    give(steps, take(steps, "w0"), 0)
    take(steps, "w1")
    assert steps.crew.missing(0) == (["w1"], 0)


def test_an_empty_slice_has_a_ledger_too() -> None:
    steps = tracker(chunk_count=0, worker_count=2)
    know(steps, "w0")
    assert (steps.version_min(), steps.version_max(), steps.next_step("w0")) == (0, 0, 0)
    assert steps.crew.missing(0) == (["w0"], 1)


def test_a_seat_in_an_empty_slice_has_contributed_all_that_there_is() -> None:
    steps = tracker(chunk_count=0, worker_count=2)
    take(steps, "w0")
    assert steps.next_step("w0") == 0
    assert steps.contributed(0) == ["w0"]
    assert steps.crew.missing(0) == ([], 1)


def test_another_gradient_in_place_of_one_that_counted_is_refused() -> None:
    steps = tracker(chunk_count=2, worker_count=1)
    seat = take(steps, "w0")
    for step in range(2):
        steps.record(seat, 0, step, steps.following(0, 1, closes=True), 10 + step)
    assert steps.decide(seat, 0, 1, 11) is Decision.DUPLICATE
    assert steps.decide(seat, 0, 0, 99) is Decision.DUPLICATE  # only the last one's is known
    assert steps.decide(seat, 0, 1) is Decision.DUPLICATE
    with pytest.raises(StepOrderError, match="step 1 of chunk 0 again, and its") as caught:
        steps.decide(seat, 0, 1, 12)
    assert "0x0000000c, counted 0x0000000b" in caught.value.message
    assert steps.decide(seat, 0, 1, 12, after_refusal=True) is Decision.SUPERSEDED
    assert steps.decide(seat, 0, 1, 11, after_refusal=True) is Decision.DUPLICATE


def test_what_an_earlier_process_counted_with_is_known_to_the_next() -> None:
    steps = tracker(chunk_count=2, worker_count=1)
    seat = take(steps, "w0")
    steps.record(seat, 0, 0, steps.following(0, 1, closes=True), 10)
    for life in (1, 2):  # the second one's process counts nothing
        seat.give_to(session_of("w0", life=life))
        assert steps.decide(seat, 0, 0, 10) is Decision.DUPLICATE
        assert steps.decide(seat, 0, 0, 12) is Decision.SUPERSEDED
        assert steps.decide(seat, 0, 0) is Decision.DUPLICATE
    assert steps.decide(seat, 1, 0, 12) is Decision.COUNT
    steps.record(seat, 0, 1, steps.following(0, 1, closes=True), 20)
    assert steps.decide(seat, 0, 1, 20) is Decision.DUPLICATE
    with pytest.raises(StepOrderError, match="another than was counted"):
        steps.decide(seat, 0, 1, 10)


def test_an_ended_worker_is_expected_back_for_a_while() -> None:
    now_s = [100.0]
    sessions = Sessions(count_max=9, lease_s=10.0, return_s=0.0, now_s=lambda: now_s[0])
    steps = step_tracker(worker_count=3, worker_count_max=9, sessions=sessions)
    calls = {}
    for name in ("w0", "w1", "w2"):
        calls[name] = sessions.attend(name, session_of(name), lambda: None)
        take(steps, name)
    everybody = list(calls)
    assert steps.crew.ended_among(everybody) == ([], math.inf)
    sessions.leave(session_of("w2"), calls["w2"])  # killed, say: it has not ended in order
    for name in ("w0", "w1"):
        sessions.end(session_of(name).number)
        steps.crew.set_owner(name, None)
        now_s[0] += 0.25
    assert steps.crew.ended_among(everybody) == (["w0", "w1"], RETURN_AFTER_END_S - 0.5)
    assert steps.crew.ended_among(["w1", "w2"]) == (["w1"], RETURN_AFTER_END_S - 0.25)
    now_s[0] += RETURN_AFTER_END_S
    assert steps.crew.ended_among(everybody) == (["w0", "w1"], 0.0)
    assert steps.crew.ended_among(["w2"]) == ([], math.inf)
    sessions.attend("w0", session_of("w0", 1), lambda: None)
    # No worker attends that saw w1 end: the training is started again, and w1 is expected, too.
    assert steps.crew.ended_among(everybody) == ([], math.inf)
    take(steps, "w0", 1)
    sessions.end(session_of("w0", 1).number)
    assert steps.crew.ended_among(everybody) == (["w1"], 0.0)  # until that end is noted here, too
