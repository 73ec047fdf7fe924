"""Goal: worker ids that come and go never fill an asynchronous parameter or table, and no gradient
counts twice, or is dropped without a word, where seats go from worker to worker.

Method: real clusters with very few seats; SDK clients that close, processes that are killed, wire
workers that come back too late, shards that are killed. The weights show which gradients counted:
every element, of both shards, is minus their sum.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.faults.standing_still import stop
from harness.polling import until_accepted
from harness.programs.commands import ServingShard
from harness.programs.session_worker import SIZE, SessionWorker, Subject
from harness.wire_client.table import WireTable, table_spec
from harness.wire_client.worker import WireWorker, error_detail, spec
from shardwell.v1 import types_pb2 as types
from shardwell_server import Limits

pytestmark = pytest.mark.timeout(120)

KINDS = pytest.mark.parametrize("kind", ["parameter", "table"])
LIMITS = Limits(worker_count_max=2)
FLAGS = ["--worker-count-max=2", "--session-lease-s=1"]
IDS = list(range(SIZE))


def put_once(target: str, worker_id: str, kind: str, value: float = 1) -> int:
    """A worker that comes, contributes and closes; which step that was."""
    with shardwell.connect(target, worker_id=worker_id) as client:
        return Subject(client, kind, "async").put(value)


def values_of(target: str, kind: str) -> set[float]:
    with shardwell.connect(target, worker_id="reader") as client:
        return Subject(client, kind, "async").values()


class Wire:
    """A wire worker's subject of either kind, as `Subject` has it."""

    def __init__(self, worker: WireWorker, kind: str) -> None:
        self.worker = worker
        options: dict[str, Any] = {"mode": types.MODE_ASYNC}
        self.subject: Any
        if kind == "parameter":
            self.subject = worker.create(spec("subject", SIZE, **options))
            self.subject.init(np.zeros(SIZE, np.float32))
        else:
            self.subject = WireTable(worker, table_spec("subject", SIZE, 1, **options))

    def put(self, value: float, step: int) -> None:
        if isinstance(self.subject, WireTable):
            self.subject.put(IDS, np.full((SIZE, 1), value), step=step)
        else:
            self.subject.next_step = step
            self.subject.push(np.full(SIZE, value))

    def take_seat_on(self, shard_index: int) -> None:
        """On that shard alone."""
        stubs, identities = self.worker.stubs, self.worker.identities
        kept = slice(shard_index, shard_index + 1)
        self.worker.stubs, self.worker.identities = stubs[kept], identities[kept]
        try:
            if isinstance(self.subject, WireTable):
                tables = self.subject.stubs
                self.subject.stubs = tables[kept]
                self.subject.open(take_seat=True)
                self.subject.stubs = tables
            else:
                self.worker.open_parameter(self.subject.spec, take_seat=True)
        finally:
            self.worker.stubs, self.worker.identities = stubs, identities


@contextlib.contextmanager
def wire(target: str, worker_id: str, kind: str) -> Iterator[Wire]:
    with WireWorker(target, worker_id) as worker:
        yield Wire(worker, kind)


@KINDS
@pytest.mark.parametrize("on_files", [False, True])
def test_ids_that_come_and_close_never_fill_it(cluster, tmp_path, kind, on_files) -> None:
    options = {"data_dir": tmp_path if on_files else None, "limits": LIMITS}
    running, count = cluster(2, **options), 0
    for life in range(1 + on_files):
        for number in range(8):
            assert put_once(running.target, f"w{life}-{number}", kind) == 0
            count += 1
        assert values_of(running.target, kind) == {-float(count)}
        if on_files:
            running.close()
            running = cluster(2, **options)
    assert values_of(running.target, kind) == {-float(count)}


@KINDS
def test_ids_that_are_dropped_free_their_seats_after_the_lease(cluster, kind) -> None:
    """Killed processes; meanwhile the error names the limit, and when to come again."""
    running = cluster(2, limits=LIMITS, session_lease_s=2)
    for number in range(2):
        with SessionWorker(running.target, f"killed-{number}", kind, "async") as worker:
            assert worker.ask("put 1") == "step 0"
            worker.send(signal.SIGKILL)
            worker.end()
    refusals: list[str] = []
    for number in range(2):

        def put(number: int = number) -> int:
            try:
                return put_once(running.target, f"w{number}", kind)
            except shardwell.LimitError as error:
                refusals.append(error.message)
                raise

        assert until_accepted(put, shardwell.LimitError) == 0
    assert all("worker_count_max=2" in refusal for refusal in refusals)
    assert values_of(running.target, kind) == {-4.0}


@KINDS
def test_who_lives_keeps_its_place(cluster, connect, kind) -> None:
    running = cluster(2, limits=LIMITS, session_lease_s=1)
    subjects = [Subject(connect(running, f"w{number}"), kind, "async") for number in range(2)]
    for step in range(3):
        assert [subject.put(1) for subject in subjects] == [step, step]
        with pytest.raises(shardwell.LimitError, match=r"worker_count_max=2: 'late' .* close cl"):
            put_once(running.target, "late", kind)
    subjects[1].client.close()
    for number in range(4):
        assert put_once(running.target, f"late-{number}", kind) == 0
        assert subjects[0].put(1) == 3 + number
    assert subjects[0].values() == {-14.0}


@KINDS
@pytest.mark.parametrize("ends", ["in order", "without a word"])
def test_a_gradient_that_comes_again_too_late_is_refused(cluster, kind, ends) -> None:
    """It was counted, which its worker never heard; another one has the seat now."""
    running = cluster(2, limits=LIMITS, session_lease_s=1)
    with contextlib.ExitStack() as stack:
        late = stack.enter_context(wire(running.target, "late", kind))
        late.put(1, step=0)
        if ends == "in order":
            late.worker.end_session()
        for call in late.worker.attendances:
            call.cancel()
        others = [
            stack.enter_context(wire(running.target, f"w{number}", kind)) for number in range(2)
        ]
        others[0].put(10, step=0)
        until_accepted(lambda: others[1].put(10, step=0), grpc.RpcError)
        if ends == "in order":
            late.worker.session += 1  # as a worker that connects again
        late.worker.attendances = [late.worker.attend(index) for index in range(2)]
        for step in (0, 1):
            with pytest.raises(grpc.RpcError) as caught:
                late.put(1, step=step)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert error_detail(caught.value).code == types.ERROR_CODE_STEP_ORDER
            assert "given to a newcomer" in caught.value.details()
        assert values_of(running.target, kind) == {-21.0}
        others[1].worker.end_session()
        late.subject.take_seat()
        assert late.subject.next_step == 0
        late.put(100, step=0)
        late.put(100, step=0)  # in its new tenure it is a duplicate again
        others[0].put(10, step=1)
    assert values_of(running.target, kind) == {-131.0}


@KINDS
def test_a_process_that_wakes_after_its_lease_gets_an_error(cluster, connect, kind) -> None:
    """As a machine that was out of reach. Opened again, it goes on as a new worker."""
    running = cluster(2, limits=LIMITS, session_lease_s=2)
    here = Subject(connect(running, "here"), kind, "async")
    here.put(1)
    with SessionWorker(running.target, "asleep", kind, "async") as asleep:
        assert [asleep.ask("put 1") for _ in range(2)] == ["step 0", "step 1"]
        stop(asleep.pid)
        asleep.begin("put 1000")
        until_accepted(lambda: put_once(running.target, "newcomer", kind), shardwell.LimitError)
        asleep.send(signal.SIGCONT)
        answer = asleep.read_line()
        assert answer.startswith(
            "StepOrderError: worker 'asleep' has not, or not any more, the seat"
        )
        assert asleep.ask("put 1000").startswith("StepOrderError")
        assert here.values() == {-4.0}
        assert asleep.ask("open") == "at 0"
        assert asleep.ask("put 1") == "step 0"
        assert asleep.ask("put 1") == "step 1"
    assert here.values() == {-6.0}


@KINDS
@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize("step_count", [1, 3])
def test_shards_that_gave_different_places_away(
    cluster, connect, kind, shard_index, step_count
) -> None:
    """Who comes back by its name begins anew on both: where its seat was lost, and where not."""
    running = cluster(2, limits=LIMITS)
    first = connect(running, "back")
    subject = Subject(first, kind, "async")
    for _ in range(step_count):
        subject.put(1)
    first.close()
    for number in range(2):
        with wire(running.target, f"w{number}", kind) as other:
            other.take_seat_on(shard_index)
            other.worker.end_session()
    again = Subject(connect(running, "back"), kind, "async")
    assert again.handle.next_step == 0
    assert [again.put(10) for _ in range(3)] == [0, 1, 2]
    assert again.values() == {-30.0 - step_count}
    again.open()
    assert again.handle.next_step == 3
    assert again.put(10) == 3
    assert again.values() == {-40.0 - step_count}


@KINDS
def test_a_worker_whose_seat_was_given_away_gets_an_error(cluster, connect, kind) -> None:
    running = cluster(2, limits=Limits(worker_count_max=1))
    assert put_once(running.target, "w0", kind) == 0
    opened = Subject(connect(running, "w0"), kind, "async")
    assert opened.handle.next_step == 1
    put_once(running.target, "newcomer", kind)
    for _ in range(2):
        with pytest.raises(shardwell.StepOrderError, match="was given to another one; open it ag"):
            opened.put(100)
    opened.open()
    assert opened.handle.next_step == 0
    assert [opened.put(1), opened.put(1)] == [0, 1]
    assert opened.values() == {-4.0}


@KINDS
def test_a_synchronous_seat_is_never_given_away(cluster, connect, kind) -> None:
    running = cluster(1, limits=LIMITS)
    with shardwell.connect(running.target, worker_id="w0") as client:
        Subject(client, kind, "sync").put(1)
    newcomer = Subject(connect(running, "newcomer"), kind, "sync")
    with pytest.raises(shardwell.SeatsTakenError, match="'w0'"):
        newcomer.put(1)
    assert Subject(connect(running, "w0"), kind, "sync").put(1) == 1


@pytest.mark.sampled(1)
@KINDS
def test_kills_while_workers_come_and_go(tmp_path, kind) -> None:
    """The shard is killed after every few of them, and waits for no worker when it is back."""
    flags, port, count = [*FLAGS, f"--data-dir={tmp_path}"], 0, 0
    for life in range(3):
        with ServingShard(*flags, port=port) as shard:
            target = shard.address()
            port = int(target.rpartition(":")[2])
            with SessionWorker(target, "stays", kind, "async") as stays:
                assert stays.ask("put 1") == f"step {life}"
                for number in range(5):
                    put = partial(put_once, target, f"w{life}-{number}", kind)
                    assert until_accepted(put, shardwell.LimitError) == 0
                count += 6
                assert stays.ask("close") == "closed"
            assert values_of(target, kind) == {-float(count)}
            shard.send(signal.SIGKILL)
            shard.end()
