"""Goal: the state that a worker is given is of the step that it goes on with, also after a kill.

Method: any story of puts, snapshots, restarts and losses of power, beside a model that keeps all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwell
from harness.data.sessions import stored_bytes
from harness.stories.crash import SameMachine
from harness.stories.images import image_of, restore
from shardwell.errors import ArgumentError, LimitError, StorageError
from shardwell.specs.fragments import Fragment
from shardwell.specs.members import Elastic
from shardwell.specs.parameter import STATE_PAGE_MAX_BYTES, ParameterSpec
from shardwell.wire.state_tree import digest_of
from shardwell_server.shard.deadline import NotYet, RequestDeadline
from shardwell_server.shard.parameter.training_states import Given, Held, Missing, TrainingStates
from shardwell_server.shard.quotas import OwnedBytes
from shardwell_server.store.contract import Layout
from shardwell_server.store.mmap.store import MmapStore
from shardwell_server.store.records.event_log import EventLog

NAMES = ("w0", "w1", "w2")
ROOM = 64
"""Bytes of a page's place; those of these tests are smaller."""


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

    def put_page(self, place: int, page: bytes) -> None:
        path = self.log.path.with_suffix(".pages")
        data = bytearray(path.read_bytes() if path.exists() else b"")
        data[place * ROOM :] = data[place * ROOM :] or bytes(place * ROOM - len(data))
        data[place * ROOM : place * ROOM + len(page)] = page
        path.write_bytes(data)

    def page(self, place: int, size_bytes: int) -> bytes:
        data = self.log.path.with_suffix(".pages").read_bytes()
        return data[place * ROOM : place * ROOM + size_bytes]


def states_in(
    path: Path,
    *,
    is_torn: bool = False,
    is_elastic: bool = False,
    stored: OwnedBytes | None = None,
    seated: Collection[str] = (),
    fragment: Fragment | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> TrainingStates:
    storage: Any = Storage(path)
    storage.is_torn = is_torn
    crew = {"worker_count": 64, "members": Elastic()} if is_elastic else {"worker_count": 3}
    name = "net" if fragment is None else fragment.parameter
    spec = ParameterSpec(name=name, size=4, optimizer=shardwell.SGD(0.1), fragment=fragment, **crew)
    found = TrainingStates(spec, storage, stored or stored_bytes(), lambda: seated, now_s)
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


@pytest.mark.parametrize("size", [0, STATE_PAGE_MAX_BYTES + 1])
def test_sizes_that_can_not_be_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ArgumentError, match=f"{size} bytes; expected 1 to"):
        states_in(tmp_path / "states").put(Given("w0", 0, bytes(size)))
    with pytest.raises(ArgumentError, match=f"{size} bytes; expected 1 to"):
        states_in(tmp_path / "states").put_page(bytes(size), 0)


@pytest.mark.parametrize("pages", [[b"short"], [bytes(32)] * 66])
def test_digests_that_can_not_be_are_refused(tmp_path: Path, pages: list[bytes]) -> None:
    with pytest.raises(ArgumentError, match=r"32 bytes|67 parts; expected 1 to 66"):
        states_in(tmp_path / "states").put(Given("w0", 0, b"?", tuple(pages)))


def large(name: str, step: int, *contents: int) -> tuple[Given, list[bytes]]:
    """A state with pages, which are of other workers too where contents are alike."""
    pages = [f"page {each}".encode() * 3 for each in contents]
    return Given(name, step, f"{name} {step}".encode(), tuple(map(digest_of, pages))), pages


def bring(states: TrainingStates, given: Given, pages: list[bytes]) -> int:
    """Returns the pages that it lacked."""
    count = 0
    while (missing := states.put(given)) != Missing():
        for index in missing.own:
            states.put_page(pages[index], given.step)
            count += 1
    return count


def fetched(states: TrainingStates, found: Given) -> list[bytes]:
    return [states.page(each) for each in found.pages]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(NAMES), st.lists(st.integers(0, 6), max_size=4)),
            st.sampled_from(["restart", "snapshot", "torn"]),
        ),
        max_size=30,
    )
)
def test_each_kept_state_has_its_pages(
    tmp_path_factory: pytest.TempPathFactory, story: list[Any]
) -> None:
    """`torn`: pages came, and their shard ended before their state."""
    path = tmp_path_factory.mktemp("states") / "states"
    stored = stored_bytes()
    states = states_in(path, stored=stored)
    known: dict[str, list[tuple[Given, list[bytes]]]] = {name: [] for name in NAMES}
    with contextlib.ExitStack() as stack:
        held: list[Held] = []
        for event in story:
            if event in ("restart", "torn"):
                if event == "torn":
                    states.put_page(b"torn", max(map(len, known.values())))
                held.clear()
                stored = stored_bytes()
                states = states_in(path, stored=stored)
            elif event == "snapshot":
                version = max(map(len, known.values()))
                held.append(stack.enter_context(states.held(version)))
            else:
                name, contents = event
                own, pages = large(name, len(known[name]), *contents)
                bring(states, own, pages)
                known[name].append((own, pages))
            bytes_kept, digests = 0, set[bytes]()
            for name, given_ones in known.items():
                for given_one, pages in given_ones[-2:]:
                    assert states.get(name, given_one.step) == given_one
                    assert fetched(states, given_one) == pages
                    bytes_kept += len(given_one.state)
                    digests |= {*pages}
            for each in (each for of in held for each in of.by_worker.values()):
                _, pages = known[each.worker_id][each.step]
                assert fetched(states, each) == pages
                digests |= {*pages}
            assert stored.count >= bytes_kept + sum(map(len, digests))
            if not held:
                assert stored.count == bytes_kept + sum(map(len, digests))


def test_workers_share_what_they_have_alike(tmp_path: Path) -> None:
    """Each page comes once, and a worker that is asked and does not bring it, is not for good."""
    now_s = 0.0
    states = states_in(tmp_path / "states", now_s=lambda: now_s)
    ones, pages = large("w0", 0, *range(20))
    others, _ = large("w1", 0, *range(20))
    first, second = states.put(ones), states.put(others)
    assert (first.own, second.own) == ([*range(8)], [*range(8, 16)])
    for index in first.own:
        states.put_page(pages[index], 0)
    assert states.put(ones) == Missing([16, 17, 18, 19], are_others_awaited=True)
    for index in range(16, 20):
        states.put_page(pages[index], 0)
    assert states.put(ones) == Missing([], are_others_awaited=True)
    now_s = 3.0
    assert states.put(ones) == Missing([*range(8, 16)], are_others_awaited=False)
    assert bring(states, ones, pages) == 8
    assert states.put(others) == Missing()
    assert fetched(states, others) == pages
    unchanged = ones._replace(step=1, state=b"step 1")
    assert states.put(unchanged) == Missing(), "pages that are as they were do not come again"


def test_pages_of_no_state_are_bounded(tmp_path: Path) -> None:
    stored = stored_bytes(800)
    states = states_in(tmp_path / "states", stored=stored)
    for index in range(10):
        states.put_page(f"{index:050}".encode(), 0)
    with pytest.raises(LimitError, match="stored_bytes_max=800"):
        states.put_page(bytes(301), 0)
    for step in range(3):  # which lets them go as steps pass
        states.put(state("w0", step))
    assert stored.count == 2 * len(state("w0", 1).state)


def test_a_state_whose_pages_are_damaged_is_left_out(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "states"
    states = states_in(path)
    for step in range(2):
        bring(states, *large("w0", step, step))
    data = bytearray(path.with_suffix(".pages").read_bytes())
    place = data.index(b"page 1")
    data[place] ^= 1
    path.with_suffix(".pages").write_bytes(data)
    found = states_in(path)
    assert found.get("w0", 1) == large("w0", 0, 0)[0]
    assert "worker 'w0' are damaged, which is left out" in caplog.text
    path.with_suffix(".pages").write_bytes(b"")
    assert states_in(path).get("w0", 1) is None


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


def test_a_kill_at_any_write_leaves_whole_states(tmp_path: Path) -> None:
    """Real files: after each write a copy of them is opened, as a killed shard would find them."""
    path, kept, seen = tmp_path / "store", -1, list[str]()

    def look(point: str) -> None:
        if not seen:
            return
        seen.append(point)
        copy = restore(image_of(path), tmp_path / "copy")
        with contextlib.closing(MmapStore(copy, boot=SameMachine(copy))) as again:
            ((_, storage),) = again.recover()
            found = TrainingStates(spec, storage, stored_bytes(), lambda: ())
            found.restore()
            newest = found.get("w0", 9)
            assert (-1 if newest is None else newest.step) in (kept, kept + 1), seen
            for each in (found.get("w0", at) for at in (kept, 9) if kept >= 0):
                assert each is not None
                _, pages = large("w0", each.step, 7, 2 * each.step, 2 * each.step + 1)
                assert fetched(found, each) == pages, seen

    store = MmapStore(path, boot=SameMachine(path), reached=look)
    path.mkdir()
    asked = Layout(name="net", slice_size=4, chunk_element_count=4, with_sum=False)
    spec = ParameterSpec(name="net", size=4, optimizer=shardwell.SGD(0.1), worker_count=1)
    with contextlib.closing(store):
        store.recover()
        states = TrainingStates(spec, store.create(asked), stored_bytes(), lambda: ())
        seen.append("begun")
        for step in range(4):
            bring(states, *large("w0", step, 7, 2 * step, 2 * step + 1))
            kept = step
        assert {"room for a page of a state", "a page of a state", "event"} <= {*seen}
        seen.clear()
    assert kept == 3


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"worker_id": "a/b"},
        {"state": "?"},
        {"x": 1},
        {"pages": [["00", 0, 0]]},
        {"pages": 3},
        {"pages": [["zz", 0, 1]]},
    ],
)
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
