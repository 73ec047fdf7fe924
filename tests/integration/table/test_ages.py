"""How old rows are, in every combination of cache, prefetch, min_version, exchange and threads.

Goal: no answer is older than it says: neither than `min_version`, nor than `table.version`, nor
than the cache's staleness or the prefetch allow; and none lacks this worker's own steps.

Method: worker "a" has a cache, worker "b" none. Column 0 is moved by b, column 1 by a, by 1 a step,
so a row's values say how many steps of each it has seen. A plain model keeps what every row was
after each step, and what of it was true when each of a's steps began.
"""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import shardwell
from harness.inside import prefetched
from harness.polling import BRIEF_S, Stopwatch
from harness.threads import together
from shardwell.table.reader import PREFETCH_CALL_COUNT_MAX, PREFETCH_COUNT_MAX
from shardwell_server.config import Limits

pytestmark = pytest.mark.timeout(170)

ROW_COUNT = 8
EVERY = np.arange(ROW_COUNT)
IDS = st.lists(st.integers(0, ROW_COUNT - 1), min_size=1, max_size=6)


def _gradients(ids: list[int], column: int, worker_count: int) -> np.ndarray:
    """Move the rows by 1 in a column, as often as their ids are there."""
    gradients = np.zeros((len(ids), 2), np.float32)
    gradients[:, column] = -worker_count
    return gradients


def _open(client: shardwell.Client, name: str, mode: str, **caching: int) -> shardwell.Table:
    return client.table(
        name,
        row_count=ROW_COUNT,
        dim=2,
        optimizer=shardwell.SGD(learning_rate=1.0),
        initializer=shardwell.Zeros(),
        codec="fp32",
        mode=mode,
        worker_count=2,
        **caching,
    )


class AgeMachine(RuleBasedStateMachine):
    """See the module. `times` has the rows as they were, an entry for each step that counted."""

    one: shardwell.Client
    other: shardwell.Client
    number = 0

    @initialize(
        mode=st.sampled_from(["sync", "async"]),
        staleness=st.integers(0, 3),
        cache_row_count=st.sampled_from([0, 1, 4, 100]),
    )
    def make(self, mode, staleness, cache_row_count) -> None:
        AgeMachine.number += 1
        self.caching = {
            "cache_row_count": cache_row_count,
            "cache_staleness_steps": staleness,
        }
        self.mode, self.staleness = mode, staleness
        self.name = f"t{AgeMachine.number}"
        self.a = _open(self.one, self.name, mode, **self.caching)
        self.b = _open(self.other, self.name, mode)
        self.weight = 2 if mode == "sync" else 1
        self.times = [np.zeros((ROW_COUNT, 2))]
        self.by_version = [self.times[0]]
        self.sent: dict[str, list[list[int]]] = {"a": [], "b": []}
        self.clock_times = [0]
        self.has_put = False
        self.prefetches: list[tuple[list[int], int, int]] = []
        self.call_count = 0

    def teardown(self) -> None:
        if hasattr(self, "a"):
            self.a.close()
            self.b.close()

    # What happens.

    def _ahead(self) -> int:
        return len(self.sent["a"]) - len(self.sent["b"])

    def _counted(self, worker: str, ids: list[int]) -> None:
        """Brings the model to where the shards are."""
        self.sent[worker].append(ids)
        after = self.times[-1].copy()
        if self.mode == "async":
            np.add.at(after[:, "ba".index(worker)], ids, 1)
            self.by_version.append(after)
        elif self._ahead() == 0:
            # An abandoned step weighs nothing, so that the mean is the other worker's alone.
            np.add.at(after[:, 0], self.sent["b"][-1], 1 if self.sent["a"][-1] else 2)
            np.add.at(after[:, 1], self.sent["a"][-1], 1)
            self.by_version.append(after)
        self.times.append(after)

    def _step_ended(self, began: int) -> None:
        self.clock_times.append(began)
        self.has_put = True
        self.call_count += 1

    @precondition(lambda self: self.mode == "async" or self._ahead() <= 0)
    @rule(ids=IDS)
    def put(self, ids) -> None:
        began = len(self.times) - 1
        self.a.put_row_gradients(ids, _gradients(ids, 1, self.weight))
        self._counted("a", ids)
        self._step_ended(began)

    @precondition(lambda self: self.mode == "async" or self._ahead() <= 0)
    @rule()
    def abandon(self) -> None:
        began = len(self.times) - 1
        self.a.abandon_step()
        self._counted("a", [])
        self._step_ended(began)

    @precondition(lambda self: self.mode == "async" or self._ahead() >= 0)
    @rule(ids=IDS)
    def other_puts(self, ids) -> None:
        self.b.put_row_gradients(ids, _gradients(ids, 0, self.weight))
        self._counted("b", ids)

    @precondition(lambda self: self.mode == "async" or self._ahead() < 0)
    @rule(ids=IDS, next_ids=IDS)
    def exchange(self, ids, next_ids) -> None:
        began = len(self.times) - 1
        rows = self.a.exchange_rows(ids, _gradients(ids, 1, self.weight), next_ids)
        self._counted("a", ids)
        self._step_ended(began)
        np.testing.assert_array_equal(rows, self.times[-1][next_ids])
        self._check_version(next_ids, rows)

    @rule(ids=IDS, waits=st.booleans())
    def prefetch(self, ids, waits) -> None:
        self.a.prefetch_rows(ids)
        self.prefetches.append((ids, len(self.times) - 1, self.call_count))
        del self.prefetches[:-PREFETCH_COUNT_MAX]
        if waits:
            prefetched(self.a)[-1].future.result(20)

    @rule()
    def reopen(self) -> None:
        assert _open(self.one, self.name, self.mode, **self.caching) is self.a
        self.prefetches.clear()
        self.clock_times = [len(self.times) - 1] * len(self.clock_times)

    @rule(ids=IDS, data=st.data())
    def get(self, ids, data) -> None:
        newest = len(self.by_version) - 1
        wanted = 0
        if self.mode == "sync" and data.draw(st.booleans()):
            wanted = data.draw(st.integers(0, newest))
        if not self.has_put:
            self.clock_times.append(len(self.times) - 1)
        self.has_put = False
        oldest = self.call_count - PREFETCH_CALL_COUNT_MAX
        waiting = [n for n, entry in enumerate(self.prefetches) if entry[2] >= oldest]
        taken = next((n for n in waiting if self.prefetches[n][0] == ids), None)
        rows = self.a.get_rows(ids, min_version=wanted)
        self.call_count += 1
        floor = self.times[self.clock_times[max(len(self.clock_times) - 1 - self.staleness, 0)]]
        own_floor = self.times[-1]
        if not self.caching["cache_row_count"] or wanted:
            floor = self.times[-1]
        if taken is not None:
            floor = own_floor = self.times[self.prefetches.pop(taken)[1]]
        assert (rows[:, 0] >= np.maximum(floor, self.by_version[wanted])[ids, 0]).all()
        assert (rows[:, 1] >= np.maximum(own_floor, self.by_version[wanted])[ids, 1]).all()
        assert (rows <= self.times[-1][ids]).all()
        assert self.a.version >= wanted
        self._check_version(ids, rows)

    def _check_version(self, ids: list[int], rows: np.ndarray) -> None:
        assert (rows >= self.by_version[self.a.version][ids]).all()


@pytest.mark.exhaustive
def test_no_answer_is_older_than_it_says(cluster, connect) -> None:
    running = cluster(2, limits=Limits(table_count_max=100_000))
    AgeMachine.one, AgeMachine.other = connect(running, "a"), connect(running, "b")
    run_state_machine_as_test(
        AgeMachine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )


def test_rows_of_a_prefetch_are_not_out_of_the_cache(cluster, connect) -> None:
    """The cache has a row of version 0, and a prefetch is at version 5."""
    running = cluster(2)
    a = _open(connect(running, "a"), "t", "sync", cache_row_count=64, cache_staleness_steps=100)
    b = _open(connect(running, "b"), "t", "sync")
    a.get_rows([1])
    for _ in range(5):
        b.put_row_gradients([1], _gradients([1], 0, 2))
        a.put_row_gradients([5], _gradients([5], 1, 2))
    assert (a.get_rows([1])[0, 0], a.version) == (0, 0)
    a.prefetch_rows([1, 2])
    prefetched(a)[-1].future.result(20)
    assert a.get_rows([1, 2], min_version=5)[:, 0].tolist() == [5, 0]
    assert a.version == 5


def test_an_eviction_that_failed_half_way_is_seen(cluster, connect) -> None:
    """One shard has evicted its rows, the other one does not answer."""
    running = cluster(2, processes=True)
    table = _open(
        connect(running, "a"), "t", "async", cache_row_count=64, cache_staleness_steps=100
    )
    table.put_row_gradients(EVERY, _gradients(EVERY.tolist(), 1, 1))
    table.get_rows(EVERY)
    running.children[1].kill()
    with pytest.raises(shardwell.ShardUnavailableError):
        table.evict(older_than_step=9, timeout_s=BRIEF_S)
    first = EVERY[table._placement.shards_of(EVERY) == 0]
    assert first.size
    assert table.get_rows(first)[:, 1].tolist() == [0] * first.size


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_threads_see_what_has_ended(cluster, connect, mode) -> None:
    """One thread puts or exchanges, some get and prefetch; the other worker moves column 0.

    What both have put before a call began is noted by the test; each answer is held against that.
    """
    running = cluster(2)
    staleness, steps = 2, 60
    a = _open(
        connect(running, "a"), "t", mode, cache_row_count=100, cache_staleness_steps=staleness
    )
    b = _open(connect(running, "b"), "t", mode)
    weight = 2 if mode == "sync" else 1
    own, other = Counter[int](), Counter[int]()  # of steps that have ended
    has_ended = threading.Event()
    watch = Stopwatch()

    def trains() -> None:
        generator = np.random.default_rng(1)
        try:
            for step in range(steps):
                ids = generator.integers(0, ROW_COUNT, 3).tolist()
                if step % 2:
                    rows = a.exchange_rows(ids, _gradients(ids, 1, weight), EVERY)
                    own.update(ids)
                    assert rows[:, 1].tolist() == [own[key] for key in EVERY.tolist()]
                else:
                    a.put_row_gradients(ids, _gradients(ids, 1, weight))
                    if mode == "sync":  # on each shard it counts when the other one has put, too
                        a.get_rows(EVERY, min_version=step + 1)
                    own.update(ids)
        finally:
            has_ended.set()

    def moves() -> None:
        generator = np.random.default_rng(2)
        for step in range(steps):
            ids = generator.integers(0, ROW_COUNT, 3).tolist()
            b.put_row_gradients(ids, _gradients(ids, 0, weight))
            if mode == "sync":
                b.get_rows(EVERY, min_version=step + 1)
            other.update(ids)

    def reads(seed: int) -> int:
        generator = np.random.default_rng(seed)
        before: list[list[int]] = []
        count = 0
        while (not has_ended.is_set() or count < 20) and watch.elapsed_s < 60:
            ids = generator.integers(0, ROW_COUNT, 4)
            own_floor = [own[key] for key in EVERY.tolist()]
            before.append([other[key] for key in EVERY.tolist()])
            # A thread's own calls move the clock at least every second time.
            floor = before[max(len(before) - 1 - 2 * (staleness + 1), 0)]
            if seed % 2:
                a.prefetch_rows(ids)
            rows = a.get_rows(ids)
            for key, (others, owns) in zip(ids.tolist(), rows.tolist(), strict=True):
                assert owns >= own_floor[key]
                assert others >= floor[key]
            count += 1
        return count

    together([trains, moves, lambda: reads(1), lambda: reads(2), lambda: reads(4)], timeout_s=120)
    assert sum(other.values()) == 3 * steps
    np.testing.assert_array_equal(
        b.get_rows(EVERY, min_version=steps if mode == "sync" else 0),
        [[other[key], own[key]] for key in EVERY.tolist()],
    )
