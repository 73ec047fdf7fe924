"""Goal: the state that a worker is given is of the step that it goes on with, also after a kill.

Method: any story of puts, snapshots, restarts and losses of power, beside a model that keeps all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwell
from harness.data.sessions import stored_bytes
from shardwell.errors import ArgumentError, LimitError, StorageError
from shardwell.specs.fragments import Fragment
from shardwell.specs.members import Elastic
from shardwell.specs.parameter import STATE_SIZE_MAX_BYTES, ParameterSpec
from shardwell_server.shard.deadline import NotYet, RequestDeadline
from shardwell_server.shard.parameter.training_states import Given, TrainingStates
from shardwell_server.shard.quotas import OwnedBytes
from shardwell_server.store.records.event_log import EventLog

NAMES = ("w0", "w1", "w2")


class Storage:
    """A log in a file, which is compacted early."""

    def __init__(self, path: Path) -> None:
        self.log = EventLog(path, 7, lambda _: None)
        self.is_torn = False
        if not path.exists():
            self.log.begin()

    def note(self, log: str, event: Any) -> None:
        assert log == "states"
        self.log.append(event)

    def noted(self, log: str) -> Any:
        return self.log.read(is_cut_off=self.is_torn)

    def compact_notes(self, log: str, events: Any) -> None:
        if self.log._end > 2000:
            self.log._compact_at = 0
            self.log.compact(events())


def states_in(
    path: Path,
    *,
    is_torn: bool = False,
    is_elastic: bool = False,
    stored: OwnedBytes | None = None,
    seated: Collection[str] = (),
    fragment: Fragment | None = None,
) -> TrainingStates:
    storage: Any = Storage(path)
    storage.is_torn = is_torn
    crew = {"worker_count": 64, "members": Elastic()} if is_elastic else {"worker_count": 3}
    name = "net" if fragment is None else fragment.parameter
    spec = ParameterSpec(name=name, size=4, optimizer=shardwell.SGD(0.1), fragment=fragment, **crew)
    found = TrainingStates(spec, storage, stored or stored_bytes(), lambda: seated)
    found.restore()
    return found


def state(name: str, step: int) -> Given:
    return Given(name, step, f"{name} {step}".encode() * 20)


@given(st.lists(st.sampled_from([*NAMES, "restart", "snapshot"]), max_size=60))
def test_each_worker_has_its_newest_and_the_one_before(
    tmp_path_factory: pytest.TempPathFactory, story: list[str]
) -> None:
    path = tmp_path_factory.mktemp("states") / "states"
    states = states_in(path)
    steps = dict.fromkeys(NAMES, -1)
    held: list[tuple[Any, dict[str, int]]] = []
    with contextlib.ExitStack() as stack:
        for event in story:
            if event == "restart":
                held.clear()
                states = states_in(path)
            elif event == "snapshot":
                version = max(steps.values())
                if version >= 0:
                    own = {key: min(step, version) for key, step in steps.items() if step >= 0}
                    held.append((stack.enter_context(states.held(version)), own))
            else:
                steps[event] += 1
                states.put(state(event, steps[event]))
                for one, known in held:
                    if steps[event] <= one.version:
                        known[event] = steps[event]
            for name, step in steps.items():
                if step >= 0:
                    assert states.get(name, step) == state(name, step)
                    assert states.get(name, step + 1) == state(name, step)
                if step > 0:
                    assert states.get(name, step - 1) == state(name, step - 1)
            for one, known in held:
                assert {key: each.step for key, each in one.by_worker.items()} == known


def test_a_worker_without_one_has_the_newest_of_all(tmp_path: Path) -> None:
    states = states_in(tmp_path / "states")
    assert states.get("w9", 0) is None
    for name, step in (("w1", 3), ("w0", 4), ("w2", 4)):
        states.put(state(name, step))
    assert states.get("w9", 4) == state("w0", 4)
    assert states.get("w1", 4) == state("w1", 3), "of a fixed crew its own, to make step 3 again"
    elastic = states_in(tmp_path / "states", is_elastic=True)
    assert elastic.get("w1", 4) == state("w0", 4)
    assert elastic.get("w1", 3) == state("w1", 3)


def test_states_of_many_members_do_not_grow(tmp_path: Path) -> None:
    states = states_in(tmp_path / "states", is_elastic=True)
    for step in range(100):
        states.put(state(f"w{step}", step))
    for found in (states, states_in(tmp_path / "states", is_elastic=True)):
        assert found.get("new", 99) == state("w99", 99)
        with found.held(99) as held:
            assert len(held.by_worker) == 16


def test_seated_workers_keep_theirs_whatever_ids_others_give(tmp_path: Path) -> None:
    states = states_in(tmp_path / "states", seated={"w0", "w1"})
    for name in ("w0", "w1"):
        states.put(state(name, 4))
    for index in range(100):
        states.put(state(f"other{index}", 5))
    for found in (states, states_in(tmp_path / "states", seated={"w0", "w1"})):
        assert [found.get(name, 4) for name in ("w0", "w1")] == [state("w0", 4), state("w1", 4)]
        with found.held(5) as held:
            assert len(held.by_worker) == 16 + 3


def test_a_checkpoint_of_many_ranks_gives_a_small_crew_the_first_of_them(tmp_path: Path) -> None:
    states = states_in(tmp_path / "states")
    for rank in range(40):
        states.put(state(f"w{rank:02}", 7))
    assert [states.get(f"w{rank:02}", 7) for rank in range(3)] == [
        state(f"w{rank:02}", 7) for rank in range(3)
    ]


def test_bytes_count_as_long_as_they_are_kept(tmp_path: Path) -> None:
    path, stored = tmp_path / "states", stored_bytes(3000)
    states = states_in(path, stored=stored)
    for step in range(9):
        states.put(Given("w0", step, bytes(1000)))
        assert stored.count == min(1 + step, 2) * 1000
    with pytest.raises(LimitError, match=r"stored_bytes_max=3000: a state .* needs 1001 bytes"):
        states.put(Given("w0", 9, bytes(1001)))
    assert states.get("w0", 9) == Given("w0", 8, bytes(1000))
    again = stored_bytes(10)
    states_in(path, stored=again)
    assert again.count == 2000, "what is there counts, whatever the limit is"


def test_a_snapshot_waits_for_those_on_their_way(tmp_path: Path) -> None:
    states = states_in(tmp_path / "states")
    states.put(state("w0", 5))
    states.put(state("w1", 4))
    with states.held(5) as held:
        with pytest.raises(NotYet):
            states.whole(held, {"w0", "w1"}, RequestDeadline(60.0))
        assert states.whole(held, {"w0"}, RequestDeadline(60.0)) == [state("w0", 5), state("w1", 4)]
        assert states.whole(held, {"w1"}, RequestDeadline(0.0)) == [state("w0", 5), state("w1", 4)]
        states.put(state("w1", 5))
        states.put(state("w0", 6))
        whole = states.whole(held, {"w0", "w1"}, RequestDeadline(60.0))
        assert whole == [state("w0", 5), state("w1", 5)]


@pytest.mark.parametrize("size", [0, STATE_SIZE_MAX_BYTES + 1])
def test_sizes_that_can_not_be_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ArgumentError, match=f"{size} bytes; expected 1 to"):
        states_in(tmp_path / "states").put(Given("w0", 0, bytes(size)))


def test_power_is_lost_in_the_middle_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "states"
    states = states_in(path)
    for step in range(3):
        states.put(state("w0", step))
    data = bytearray(path.read_bytes())
    place = data.rindex(b'"step": 2')
    data[place - 40 : place] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(StorageError, match="line 4 was damaged"):
        states_in(path)
    found = states_in(path, is_torn=True)
    assert found.get("w0", 2) == state("w0", 1)
    found.put(state("w0", 2))
    assert states_in(path).get("w0", 2) == state("w0", 2)


@pytest.mark.parametrize("change", [{"step": -1}, {"worker_id": "a/b"}, {"state": "?"}, {"x": 1}])
def test_a_log_that_this_version_can_not_read_is_named(tmp_path: Path, change: Any) -> None:
    storage = Storage(tmp_path / "states")
    event = {"worker_id": "w0", "step": 1, "state": "MQ=="}
    if "x" in change:
        del event["state"]
    storage.note("states", {**event, **change})
    with pytest.raises(StorageError, match="its log of states holds"):
        states_in(tmp_path / "states")


def test_power_is_lost_before_the_log_is_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "states"
    states_in(path).put(state("w0", 0))
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(StorageError, match="its first line was damaged"):
        states_in(path)
    found = states_in(path, is_torn=True)
    assert found.get("w0", 0) is None
    found.put(state("w0", 1))
    assert states_in(path).get("w0", 1) == state("w0", 1)


def test_a_call_that_comes_late_takes_no_newer_state_away(tmp_path: Path) -> None:
    states = states_in(tmp_path / "states")
    for step in (4, 5, 4):
        states.put(state("w0", step), 6)
    assert states.get("w0", 6) == state("w0", 5)
    states.put(state("w0", 2), 3)  # power was lost, and steps with it
    assert states.get("w0", 3) == state("w0", 2)


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_learner_is_given_the_state_behind_the_offer_that_counted(
    tmp_path: Path, is_elastic: bool
) -> None:
    fragment = Fragment(family="net", index=0, count=1, assignment="strided")
    states = states_in(tmp_path / "log", is_elastic=is_elastic, fragment=fragment)
    states.put(state("w0", 3))
    states.put(state("w0", 4))  # ahead of its offer of step 3
    assert states.get("w0", 3) == state("w0", 3)
    assert states.get("w0", 4) == state("w0", 4)
    assert states.get("w1", 3) == state("w0", 3)  # a newcomer, which that offer does not reach
    states.put(state("w0", 4)._replace(state=b"late"))  # its offer was late: as it was before
    assert states.get("w0", 4) == Given("w0", 4, b"late")
