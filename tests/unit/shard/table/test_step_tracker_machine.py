"""Goal: however parts arrive, each counts once and each step closes with all its workers.

Method: a hypothesis state machine drives TableStepTracker beside a model that only keeps sets:
which (step, part) of whom was counted, who ended which step, which steps closed; every decision is
derived from those sets by the .proto's words.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from harness.data.sessions import know, table_tracker, take
from harness.machines import cases
from shardwell.errors import LimitError, SeatsTakenError, StepOrderError
from shardwell_server.shard.crews import seat_event
from shardwell_server.shard.step_tracker import Decision

WORKERS = ["w0", "w1", "w2", "w3"]
workers = st.sampled_from(WORKERS)


class TableLedgerMachine(RuleBasedStateMachine):
    """`worker_count` 0 is asynchronous."""

    @initialize(
        worker_count=st.integers(0, 3),
        worker_count_max=st.integers(3, 4),
        version=st.sampled_from([0, 0, 7]),
    )
    def open(self, worker_count: int, worker_count_max: int, version: int) -> None:
        self.limits: dict[str, Any] = {
            "worker_count": worker_count,
            "worker_count_max": worker_count_max,
        }
        self.tracker = table_tracker(version, **self.limits)
        self.worker_count, self.worker_count_max = worker_count, worker_count_max
        self.first_version = version
        self.known: list[str] = []
        self.seated: list[str] = []
        self.parts: dict[str, set[tuple[int, int]]] = defaultdict(set)
        self.ended: dict[str, set[int]] = defaultdict(set)
        self.closed_count = 0

    @property
    def version(self) -> int:
        if self.worker_count:
            return self.first_version + self.closed_count
        return self.first_version + sum(len(steps) for steps in self.ended.values())

    def open_step(self, worker: str) -> int:
        """The first that the worker has not ended, and still can."""
        step = self.version if self.worker_count else 0
        while step in self.ended[worker]:
            step += 1
        return step

    def counted(self, worker: str, step: int) -> int:
        return len({part for at, part in self.parts[worker] if at == step})

    def verdict(
        self, worker: str, step: int, part: int | None, *, ends_step: bool
    ) -> Decision | None:
        """What the .proto says of a part, or of an abandoned step's end; None: out of order."""
        steps = self.ended[worker] | {at for at, _ in self.parts[worker]}
        if any(step < later for later in steps) or step in self.ended[worker]:
            return Decision.DUPLICATE
        if part is not None and (step, part) in self.parts[worker]:
            return None if ends_step else Decision.DUPLICATE  # the step has not ended there
        if step != self.open_step(worker):
            return None
        if part is not None and part != self.counted(worker, step):
            return None
        is_ahead = bool(self.worker_count) and step > self.version
        return Decision.WAIT if is_ahead else Decision.COUNT

    @rule(worker=workers)
    def remember(self, worker: str) -> None:
        know(self.tracker, worker)
        if worker not in self.known and len(self.known) < self.worker_count_max:
            self.known.append(worker)

    def take_seat(self, worker: str) -> bool:
        if worker not in self.seated:
            if self.worker_count and len(self.seated) == self.worker_count:
                with pytest.raises(SeatsTakenError):
                    take(self.tracker, worker)
                return False
            if len(self.seated) == self.worker_count_max:
                with pytest.raises(LimitError, match="worker_count_max"):
                    take(self.tracker, worker)
                return False
            self.seated.append(worker)
        seat = take(self.tracker, worker)
        assert (seat.worker_id, seat.index) == (worker, self.seated.index(worker))
        return True

    @rule(
        worker=workers,
        ahead=st.sampled_from([0, 0, 0, 0, 0, 1, 2, -1, -2, 50]),
        part_ahead=st.sampled_from([0, 0, 0, 0, 0, 1, -1, -2, 60000]),
        ends_step=st.booleans(),
    )
    def contribute(self, worker: str, ahead: int, part_ahead: int, ends_step: bool) -> None:
        """A part: the worker's next, or around it."""
        if self.take_seat(worker):
            step = max(self.open_step(worker) + ahead, 0)
            part = max(self.counted(worker, step) + part_ahead, 0)
            self.offer(worker, step, part, ends_step=ends_step)

    @rule(worker=workers, ahead=st.sampled_from([0, 0, 0, 1, -1, 9]))
    def abandon(self, worker: str, ahead: int) -> None:
        if self.take_seat(worker):
            self.offer(worker, max(self.open_step(worker) + ahead, 0), None, ends_step=True)

    @rule(worker=workers, part_count=st.integers(1, 4))
    def contribute_all(self, worker: str, part_count: int) -> None:
        """A whole step, as a client sends it: what is left of it, from next_part on."""
        if self.take_seat(worker):
            step, part = self.tracker.next_part(worker)
            for index in range(part, part + part_count):
                self.offer(worker, step, index, ends_step=index == part + part_count - 1)

    def offer(self, worker: str, step: int, part: int | None, *, ends_step: bool) -> None:
        seat, want = (
            take(self.tracker, worker),
            self.verdict(worker, step, part, ends_step=ends_step),
        )

        def decide() -> Decision:
            if part is None:
                return self.tracker.decide_end(seat, step)
            return self.tracker.decide(seat, step, part, ends_step=ends_step)

        if want is None:
            closed = self.worker_count and step < self.version
            reason = "closed without it" if closed else "was not its next|are counted here"
            with pytest.raises(StepOrderError, match=reason) as caught:
                decide()
            assert caught.value.worker_id == worker
            return
        assert decide() is want
        if want is not Decision.COUNT:
            return
        self.tracker.record(seat, self.tracker.following(seat, ends_step=ends_step))
        if part is not None:
            self.parts[worker].add((step, part))
        if ends_step:
            self.ended[worker].add(step)
        assert decide() is Decision.DUPLICATE

    @precondition(lambda self: self.tracker.is_complete)
    @rule()
    def close(self) -> None:
        self.tracker.close()
        self.closed_count += 1

    @rule()
    def restart(self) -> None:
        """Storage keeps of a tracker its version, the position of each seat, and its owner."""
        before = self.tracker
        self.tracker = table_tracker(before.version, **self.limits)
        for seat in before.crew.seats:
            self.tracker.crew.restore_seat(seat_event(seat), seat.stored_position(seat.position))
        self.known = []
        assert [seat.worker_id for seat in self.tracker.crew.seats] == self.seated

    @invariant()
    def steps_close_with_all_their_workers(self) -> None:
        assert self.tracker.version == self.version
        if not self.worker_count:
            assert not self.tracker.is_complete
            return
        done = [worker for worker in WORKERS if self.version in self.ended[worker]]
        assert self.tracker.is_complete == (len(done) == self.worker_count)
        for step in range(self.first_version, self.version):
            assert sum(step in self.ended[worker] for worker in WORKERS) == self.worker_count
        assert max((step for steps in self.ended.values() for step in steps), default=-1) <= (
            self.version
        )

    @invariant()
    def next_part_is_told(self) -> None:
        for worker in WORKERS:
            step, part = self.tracker.next_part(worker)
            assert step == self.open_step(worker)
            assert part == self.counted(worker, step)

    @invariant()
    def contributed_and_missing_are_named(self) -> None:
        step = self.version
        done = {worker for worker in WORKERS if any(at >= step for at in self.ended[worker])}
        assert set(self.tracker.contributed(step)) == done
        missing, unknown = self.tracker.crew.missing(step)
        if not self.worker_count:
            assert (missing, unknown) == ([], 0)
            return
        is_full = len(self.seated) == self.worker_count
        awaited = dict.fromkeys(self.seated if is_full else [*self.seated, *self.known])
        assert missing == [worker for worker in awaited if worker not in done]
        assert unknown == max(self.worker_count - len(done) - len(missing), 0)


TestTableLedger, TestMoreOfLedger = cases(TableLedgerMachine, max_examples=150, step_count=40)
