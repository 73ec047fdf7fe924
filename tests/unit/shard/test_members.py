"""Goal: an open step of elastic members waits for those that live, and for no others.

Method: shards in this process, without sockets; who lives and what time brings is what a test says
(harness/elastic_shards.py). Each test is one way in which a step could stand still, or could name
a worker that is not in it.
"""

from __future__ import annotations

import contextlib
from array import array
from pathlib import Path

import pytest

from harness.data.sessions import session_of
from harness.elastic_shards import ElasticShard, elastic_spec
from harness.inside import tracker_of
from harness.stories.crash import SameMachine
from shardwell import SGD, ParameterSpec
from shardwell.errors import StorageError
from shardwell_server.config import Durability
from shardwell_server.shard.deadline import NotYet
from shardwell_server.shard.sessions import Sessions
from shardwell_server.store.mmap.store import MmapStore


def begun(**options: object) -> ElasticShard:
    shard = ElasticShard(elastic_spec(**options))
    shard.initialize()
    return shard


def stored_at(path: Path) -> MmapStore:
    return MmapStore(path, durability=Durability("process"), boot=SameMachine(path))


def member(shard: ElasticShard, worker_id: str, tenure: int, from_step: int = 0) -> None:
    shard.ask(worker_id, tenure)
    shard.ask(worker_id, tenure, from_step=from_step)


def test_a_heartbeat_ends_no_seat_of_a_fixed_crew() -> None:
    """Such seats have tenure 0, which any client can name."""
    spec = ParameterSpec(
        name="p", size=32, optimizer=SGD(learning_rate=1.0), worker_count=2, codec="fp32"
    )
    shard = ElasticShard(spec)
    shard.initialize()
    shard.give("w0", 0, 0, 0)
    shard.part.end_tenure("w0", 0)
    assert shard.give("w0", 0, 1, 0) == "counted"


def test_who_asks_for_its_first_step_in_a_tenure_that_is_over_takes_another() -> None:
    """As where a shard found it to be lost between the two rounds."""
    shard = begun()
    shard.ask("w0", 7)
    shard.part.end_tenure("w0", 7)
    assert shard.ask("w0", 7, from_step=1).tenure == 0
    assert shard.ask("w0", 8).tenure == 8
    assert shard.ask("w0", 8, from_step=1).tenure == 8


def test_who_was_connected_for_long_is_not_lost_as_it_takes_its_seat() -> None:
    """It sends no heartbeats before: what it asks for is a sign of life."""
    now_s = 0.0
    sessions = Sessions(count_max=8, lease_s=30.0, return_s=5.0, now_s=lambda: now_s)
    session = session_of("w0")
    sessions.attend("w0", session, lambda: None)
    now_s = 100.0
    sessions.check(session.number, "w0")
    assert sessions.silent_for_s(session.number) == 0.0
    now_s = 103.0
    assert sessions.silent_for_s(session.number) == 3.0


def test_grace_begins_anew_after_a_restart(tmp_path: Path) -> None:
    spec = ParameterSpec(
        name="p",
        size=32,
        optimizer=SGD(learning_rate=1.0),
        worker_count=3,
        min_contributors=2,
        grace_s=1.0,
        codec="fp32",
    )
    shard = ElasticShard(spec, store=stored_at(tmp_path))
    shard.initialize()
    for worker_id in ("w0", "w1"):
        shard.give(worker_id, 0, 0, 0)
    again = ElasticShard(spec, store=stored_at(tmp_path))
    assert again.versions == [0, 0]
    again.timer.fire()
    assert again.versions == [1, 0]


def test_grace_that_was_over_below_the_floor_is_over_above_it() -> None:
    shard = begun(min_count=3, min_contributors=2, grace_s=1.0)
    for number in range(4):
        member(shard, f"w{number}", number + 1)
    shard.give("w0", 1, 0, 0)
    shard.give("w1", 2, 0, 0)
    shard.timer.fire()
    assert shard.versions[0] == 0
    shard.give("w2", 3, 0, 0)
    assert shard.versions[0] == 1


def test_a_newcomer_learns_of_tenures_that_ended_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no client reports them to a shard that awaits one, which reaches that shard alone."""
    shard = begun()
    member(shard, "w0", 1)
    shard.part.end_tenure("w0", 1)
    shard.part._ended.clear()  # a minute has passed
    member(shard, "w1", 2)
    assert ("w0", 1) in shard.part.ended_tenures()


def test_ended_tenures_are_reported_after_a_restart(tmp_path: Path) -> None:
    spec = elastic_spec()
    shard = ElasticShard(spec, store=stored_at(tmp_path))
    shard.initialize()
    member(shard, "w0", 1)
    shard.part.end_tenure("w0", 1)
    again = ElasticShard(spec, store=stored_at(tmp_path))
    again.timer.fire()
    assert ("w0", 1) in again.part.ended_tenures()


def test_a_seat_is_not_given_on_while_its_gradient_is_being_counted() -> None:
    """The mark of one that was checked before the tenure ended comes after that."""
    shard = begun(max_count=1)
    member(shard, "w0", 1)
    member_of_other_seat = tracker_of(shard.part).crew.seats[0]
    shard.part.end_tenure("w0", 1)
    member(shard, "w1", 2, from_step=1)
    shard.part.end_tenure("w1", 2)
    rest = shard.part._come_to_rest

    def counted_meanwhile() -> None:
        member_of_other_seat.last_step[0] = 0
        rest()

    tracker_of(shard.part).crew.come_to_rest = counted_meanwhile
    made = tracker_of(shard.part)
    shard.ask("w2", 3)
    assert made.crew._seats["w2"].index == 1


def test_the_last_set_keeps_its_own_names_after_a_restart(tmp_path: Path) -> None:
    """Though a seat of it is another worker's since."""
    spec = elastic_spec(max_count=1)
    shard = ElasticShard(spec, store=stored_at(tmp_path))
    shard.initialize()
    member(shard, "w0", 1)
    for chunk in (0, 1):
        shard.give("w0", 1, chunk, 0)
    for number in (1, 2):
        shard.part.end_tenure(f"w{number - 1}", number)
        member(shard, f"w{number}", number + 1, from_step=1)
    assert [seat.worker_id for seat in tracker_of(shard.part).crew.seats] == ["w2", "w1"]
    again = ElasticShard(spec, store=stored_at(tmp_path))
    assert "w2" not in again.part.sets.workers(0)


def test_who_comes_back_keeps_what_counted() -> None:
    shard = begun(min_count=2)
    member(shard, "w0", 1)
    assert shard.give("w0", 1, 0, 0) == "counted"
    shard.part.end_tenure("w0", 1)
    assert shard.give("w0", 1, 1, 0) == "over"
    member(shard, "w0", 2)
    assert shard.give("w0", 2, 0, 0) == "duplicate"
    assert shard.give("w0", 2, 0, 0, 5.0) == "superseded"
    assert shard.give("w0", 2, 1, 0) == "counted"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_counted_is_a_duplicate_though_its_tenure_is_over(
    tmp_path: Path, is_restarted: bool
) -> None:
    """Its worker heard nothing of it, and sends it again: before the step closes, and after."""
    spec = elastic_spec()
    shard = ElasticShard(spec, store=stored_at(tmp_path))
    shard.initialize()
    member(shard, "w0", 1)
    member(shard, "w1", 2)
    assert shard.give("w0", 1, 0, 0) == "counted"
    shard.part.end_tenure("w0", 1)
    if is_restarted:
        shard = ElasticShard(spec, store=stored_at(tmp_path))
    assert shard.give("w0", 1, 0, 0) == "duplicate"
    assert shard.give("w0", 1, 1, 0) == "over"
    for step in range(40):
        for chunk in range(2):
            assert shard.give("w1", 2, chunk, step) == "counted"
    assert shard.give("w0", 1, 0, 0) == "duplicate"
    assert shard.give("w0", 1, 1, 0) == "over"
    if not is_restarted:  # else nothing is left that tells the two gradients apart
        assert shard.give("w0", 1, 0, 0, 5.0) == "superseded"


def test_a_gradient_that_counted_is_a_duplicate_in_any_tenure() -> None:
    shard = begun(min_count=2)
    member(shard, "w0", 1)
    member(shard, "w1", 2)
    assert shard.give("w0", 1, 0, 0) == "counted"
    shard.part.end_tenure("w0", 1)
    shard.vanish("w0")
    shard.ask("w0", 3, session=(later := session_of("w0", 1)))
    shard.ask("w0", 3, session=later, from_step=0)
    assert shard.give("w0", 1, 0, 0) == "duplicate"
    assert shard.give("w0", 1, 0, 0, 5.0) == "superseded"
    assert shard.give("w0", 1, 1, 0) == "over"
    shard.give("w1", 2, 0, 0)
    for step in range(1, 4):
        for worker_id, tenure, session in (("w0", 3, later), ("w1", 2, None)):
            assert shard.give(worker_id, tenure, 0, step, session=session) == "counted"
    assert shard.give("w0", 1, 0, 0) == "duplicate"  # by the set of step 0


def test_what_no_set_tells_of_any_more_is_unknown() -> None:
    """The seat has gone to another worker, and later to the same one again."""
    shard = begun(max_count=1)
    member(shard, "w0", 1)
    for chunk in range(2):
        assert shard.give("w0", 1, chunk, 0) == "counted"
    for number in range(1, 5):
        shard.part.end_tenure(f"w{number - 1}", number)
        member(shard, f"w{number}", number + 1, from_step=1)
    assert "w0" not in tracker_of(shard.part).crew._seats
    assert shard.give("w0", 1, 0, 0) == "duplicate"
    assert shard.give("w9", 1, 0, 0) == "over"
    for step in range(1, 20):
        for chunk in range(2):
            assert shard.give("w4", 5, chunk, step) == "counted"
    assert shard.give("w0", 1, 0, 0) == "unknown"
    assert shard.give("w0", 1, 0, 25) == "over"
    shard.part.end_tenure("w4", 5)
    member(shard, "w0", 6, from_step=20)
    assert shard.give("w0", 1, 0, 0) == "unknown"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_newcomer_has_given_nothing_of_what_the_seat_had_before(
    tmp_path: Path, is_restarted: bool
) -> None:
    """Its first gradient is of weights that it has had for a while."""
    spec = elastic_spec(max_count=1)
    shard = ElasticShard(spec, store=stored_at(tmp_path))
    shard.initialize()
    for number in range(3):
        member(shard, f"w{number}", number + 1, from_step=2 * number)
        if number == 2:
            break
        for step in range(2 * number, 2 * number + 2):
            for chunk in range(2):
                assert shard.give(f"w{number}", number + 1, chunk, step) == "counted"
        shard.part.end_tenure(f"w{number}", number + 1)
    if is_restarted:
        shard = ElasticShard(spec, store=stored_at(tmp_path))
    assert {seat.worker_id for seat in tracker_of(shard.part).crew.seats} == {"w1", "w2"}
    # After a restart a mark may be of either worker: the answer does not say that it counted.
    doubtful = "unknown" if is_restarted else "late"
    assert shard.give("w2", 3, 0, 1) == doubtful
    assert shard.give("w2", 3, 0, 3) == "late"
    assert shard.give("w2", 3, 0, 4) == "counted"
    if is_restarted:
        shard = ElasticShard(spec, store=stored_at(tmp_path))
    assert shard.give("w2", 3, 0, 4) == "duplicate"


def test_members_are_looked_after_where_a_hand_over_failed() -> None:
    shard = begun()
    member(shard, "w0", 1)
    with contextlib.suppress(RuntimeError), shard.part.handing_over():
        shard.timer.fire()
        raise RuntimeError
    shard.vanish("w0")
    shard.timer.fire()
    shard.timer.fire()
    assert tracker_of(shard.part).crew.seats[0].is_over


def test_who_was_late_for_a_set_that_is_decided_waits_with_its_next_step() -> None:
    """Where steps close by their norm, the decided one is open still."""
    shard = begun(clip_norm=1.0)
    member(shard, "w0", 1)
    assert shard.give("w0", 1, 0, 0) == "counted"
    member(shard, "w1", 2, from_step=1)
    assert shard.give("w1", 2, 0, 0) == "late"
    with pytest.raises(NotYet):
        shard.give("w1", 2, 0, 1, timeout_s=60.0)


@pytest.mark.parametrize("seat_index", [0, 3, 0xFFFF])
def test_a_set_that_was_damaged_is_not_believed(tmp_path: Path, seat_index: int) -> None:
    """Another seat than that which has contributed, one that contributed twice, and none."""
    spec = elastic_spec(min_count=4)
    shard = ElasticShard(spec, store=stored_at(tmp_path))
    shard.initialize()
    for number in range(4):
        member(shard, f"w{number}", number + 1)
    for number in range(2):
        shard.give(f"w{number}", number + 1, 0, 0)
    shard.part.storage.keep(0, 0, array("H", [0, seat_index]).tobytes())
    with pytest.raises(StorageError, match="step 0 of chunk 0 was damaged"):
        ElasticShard(spec, store=stored_at(tmp_path))
