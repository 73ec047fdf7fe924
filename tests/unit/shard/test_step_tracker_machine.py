"""Goal: however contributions arrive, each counts once and each step closes with all its workers.

Method: a hypothesis state machine drives StepTracker beside a model that only keeps sets of who
contributed what (chunk, step) and how often each chunk closed; every decision is derived from those
sets by the .proto's words.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.data.sessions import know, step_tracker, take
from harness.machines import cases
from shardwell.errors import LimitError, SeatsTakenError, StepOrderError
from shardwell_server.shard.step_tracker import Decision

WORKERS = ["w0", "w1", "w2", "w3", "w4"]
workers = st.sampled_from(WORKERS)
CHUNK_COUNT_MAX = 3


class LedgerMachine(RuleBasedStateMachine):
    """`worker_count` 0 is asynchronous; the model's marks are `self.given`."""

    @initialize(
        chunk_count=st.integers(1, CHUNK_COUNT_MAX),
        worker_count=st.integers(0, 3),
        worker_count_max=st.integers(3, 5),
    )
    def open(self, chunk_count: int, worker_count: int, worker_count_max: int) -> None:
        self.tracker = step_tracker(
            chunk_count,
            worker_count=worker_count,
            worker_count_max=worker_count_max,
        )
        self.chunk_count, self.worker_count = chunk_count, worker_count
        self.worker_count_max = worker_count_max
        self.known: set[str] = set()
        self.seated: list[str] = []
        self.given: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.samples: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
        self.closed_count = [0] * chunk_count

    def marks(self, worker: str, chunk: int) -> set[int]:
        return self.given[(worker, chunk)]

    def verdict(self, worker: str, chunk: int, step: int) -> Decision | None:
        """What the .proto says of a chunk's gradient; None: it is out of order."""
        given, version = self.marks(worker, chunk), self.closed_count[chunk]
        if step in given or any(step < mark for mark in given):
            return Decision.DUPLICATE
        if not self.worker_count:
            return Decision.COUNT if step == len(given) else None
        if step == version:
            return Decision.COUNT
        return Decision.WAIT if step == version + 1 and version in given else None

    @rule(worker=workers)
    def remember(self, worker: str) -> None:
        know(self.tracker, worker)
        if len(self.known) < self.worker_count_max:
            self.known.add(worker)

    def take_seat(self, worker: str) -> bool:
        if worker not in self.seated:
            if self.worker_count and len(self.seated) == self.worker_count:
                with pytest.raises(SeatsTakenError) as caught:
                    take(self.tracker, worker)
                assert caught.value.worker_id == worker
                assert all(repr(other) in str(caught.value) for other in self.seated)
                return False
            if len(self.seated) == self.worker_count_max:
                with pytest.raises(LimitError, match="worker_count_max") as refused:
                    take(self.tracker, worker)
                assert refused.value.worker_id == worker
                return False
            self.seated.append(worker)
        seat = take(self.tracker, worker)
        assert seat is take(self.tracker, worker)
        assert seat.worker_id == worker
        return True

    @rule(
        worker=workers,
        chunk=st.integers(0, CHUNK_COUNT_MAX - 1),
        ahead=st.sampled_from([0, 0, 0, 0, 1, 1, 2, -1, -2, 50]),
        sample_count=st.integers(0, 2**24),
    )
    def contribute(self, worker: str, chunk: int, ahead: int, sample_count: int) -> None:
        """One chunk, at the worker's next step for it or around it."""
        if chunk >= self.chunk_count or not self.take_seat(worker):
            return
        mine = len(self.marks(worker, chunk))
        step = max(max(mine, self.closed_count[chunk] if self.worker_count else 0) + ahead, 0)
        self.offer(worker, chunk, step, sample_count)

    @rule(worker=workers, sample_count=st.integers(0, 9))
    def contribute_all(self, worker: str, sample_count: int) -> None:
        """A whole step, as a client sends it: next_step to every chunk."""
        if self.take_seat(worker):
            step = self.tracker.next_step(worker)
            for chunk in range(self.chunk_count):
                self.offer(worker, chunk, step, sample_count)

    def offer(self, worker: str, chunk: int, step: int, sample_count: int) -> None:
        seat, want = take(self.tracker, worker), self.verdict(worker, chunk, step)
        if want is None:
            with pytest.raises(StepOrderError, match=rf"step {step} of chunk {chunk}") as caught:
                self.tracker.decide(seat, chunk, step)
            assert caught.value.worker_id == worker
            return
        assert self.tracker.decide(seat, chunk, step) is want
        if want is not Decision.COUNT:
            return
        shares = self.samples[
            (chunk, len(self.marks(worker, chunk)) if not self.worker_count else step)
        ]
        closes = not self.worker_count or len(shares) + 1 == self.worker_count
        assert self.tracker.is_complete(chunk, seat) == closes
        following = self.tracker.following(chunk, sample_count, closes=closes)
        assert (following.version > self.tracker.records[chunk].version) == closes
        self.tracker.record(seat, chunk, step, following)
        self.marks(worker, chunk).add(step)
        shares[worker] = sample_count
        self.closed_count[chunk] += closes
        assert self.tracker.decide(seat, chunk, step) is Decision.DUPLICATE

    @invariant()
    def versions_count_closed_steps(self) -> None:
        assert [record.version for record in self.tracker.records] == self.closed_count
        assert self.tracker.version_min() == min(self.closed_count)
        assert self.tracker.version_max() == max(self.closed_count)

    @invariant()
    def closed_steps_had_worker_count_workers(self) -> None:
        if not self.worker_count:
            return
        for shares in self.samples.values():
            assert len(shares) <= self.worker_count
            assert set(shares) <= set(self.seated)
        for chunk, closed in enumerate(self.closed_count):
            for step in range(closed):
                assert len(self.samples[(chunk, step)]) == self.worker_count

    @invariant()
    def open_steps_have_their_counts_and_samples(self) -> None:
        for chunk, version in enumerate(self.closed_count):
            shares = self.samples[(chunk, version)] if self.worker_count else {}
            assert self.tracker.records[chunk].contribution_count == len(shares)
            assert self.tracker.records[chunk].sample_total == sum(shares.values())

    @invariant()
    def next_step_can_be_sent_to_every_chunk(self) -> None:
        for worker in WORKERS:
            step = self.tracker.next_step(worker)
            chunks = range(self.chunk_count)
            if worker not in self.seated:
                assert step == (min(self.closed_count) if self.worker_count else 0)
                continue
            verdicts = [self.verdict(worker, chunk, step) for chunk in chunks]
            assert None not in verdicts
            assert set(verdicts) != {Decision.DUPLICATE}
            if step:
                earlier = {self.verdict(worker, chunk, step - 1) for chunk in chunks}
                assert earlier == {Decision.DUPLICATE}

    @invariant()
    def contributed_and_missing_are_named(self) -> None:
        step = min(self.closed_count)
        for chunk in (None, *range(self.chunk_count)):
            chunks = range(self.chunk_count) if chunk is None else [chunk]
            done = [
                worker
                for worker in self.seated
                if all(step <= max(self.marks(worker, c), default=-1) for c in chunks)
            ]
            assert self.tracker.contributed(step, chunk) == done
            missing, unknown = self.tracker.crew.missing(step, chunk)
            if not self.worker_count:
                assert (missing, unknown) == ([], 0)
                continue
            full = len(self.seated) == self.worker_count
            awaited = self.seated if full else {*self.seated, *self.known}
            assert sorted(missing) == sorted(set(awaited) - set(done))
            assert unknown == max(self.worker_count - len(done) - len(missing), 0)


TestLedger, TestMoreOfLedger = cases(LedgerMachine, max_examples=60, step_count=40)
