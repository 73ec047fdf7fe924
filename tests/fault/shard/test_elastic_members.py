"""Goal: members of an elastic parameter or table come, die, stand still and leave; the others go
on, and each value is what the sets of its steps say.

Method: real processes on real shards. Oracle: the mean of `gradient_of` over the contributors that
outcomes name, in float64.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Proxy
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import ServingShard
from harness.programs.elastic_worker import (
    IDS,
    NAME,
    SIZE,
    ElasticWorker,
    Member,
    gradient_of,
    opened,
    opened_table,
    rows_of,
)
from harness.threads import in_background, together
from harness.wire_client.worker import WireParameter, WireWorker
from shardwell.specs.members import Elastic
from shardwell.specs.parameter import ParameterSpec
from shardwell_server import LocalCluster

each_kind = pytest.mark.parametrize("kind", ["parameter", "table"])


def check_values(seen: list[dict[str, Any]]) -> None:
    """Each value is the one before less the mean of the step's set.

    A worker that is killed may have given its last step to one shard alone, whichever that was.
    """
    for before, after, following in zip(seen, seen[1:], [*seen[2:], seen[-1]], strict=False):
        assert after["step"] == before["step"] + 1
        names = set(after["contributors"])
        means = [
            np.mean([gradient_of(name, after["step"]) for name in each])
            for each in (names, names & set(following["contributors"]))
        ]
        found = before["value"] - after["value"]
        assert any(found == pytest.approx(mean, abs=1e-3) for mean in means)


@pytest.mark.parametrize(
    ("kind", "has_files"), [("parameter", False), ("table", False), ("table", True)]
)
def test_a_worker_that_dies_costs_the_others_a_second(
    tmp_path: Path, kind: str, has_files: bool
) -> None:
    """One that joins later is in the next steps' sets, from the first that awaits it on."""
    data_dir = tmp_path if has_files else None
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2, data_dir=data_dir)).target
        first = stack.enter_context(ElasticWorker(target, "w0", kind=kind))
        first.next_with("w0")
        second = stack.enter_context(ElasticWorker(target, "w1", kind=kind))
        first.next_with("w0", "w1")
        second.process.kill()
        assert first.next_with("w0")["counted"] == "all"
        third = stack.enter_context(ElasticWorker(target, "w1", kind=kind))
        assert kind == "parameter" or third.read_outcome()["counted"] == "all"
        assert third.next_with("w0", "w1")["counted"] == "all"
        first.next_with("w0", "w1")
    check_values(first.seen)


@each_kind
def test_a_stopped_worker_is_lost_and_comes_back(kind: str) -> None:
    plan = {"kind": kind, "member_return_s": 0.3, "member_lease_s": 1.0}
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        first = stack.enter_context(ElasticWorker(target, "w0", **plan))
        second = stack.enter_context(ElasticWorker(target, "w1", **plan))
        first.next_with("w0", "w1")
        second.send(signal.SIGSTOP)
        first.next_with("w0")
        second.send(signal.SIGCONT)
        first.next_with("w0", "w1")  # what it gave before it stood still may have counted
        assert second.next_with("w0", "w1")["counted"] == "all"


@each_kind
def test_one_that_leaves_is_not_awaited_and_may_come_back(kind: str) -> None:
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(shardwell.connect(cluster.target, worker_id=f"w{n}"))
            for n in range(2)
        ]
        first, second = (Member(client, kind) for client in clients)
        first.handle.join()
        thread = stack.enter_context(ThreadPoolExecutor(1))
        value = 0.0

        def take_part_once() -> None:
            second.handle.join()
            second.exchange(2.0)
            second.handle.leave()

        for _ in range(2):
            sets, done = [], thread.submit(take_part_once)
            while not done.done():
                values = first.exchange(1.0)
                sets.append(first.contributors)
                value -= 1.0 if sets[-1] == ("w0",) else 1.5
                assert set(values.tolist()) == {value}
            done.result()
            assert second.handle.outcome.counted == "all"
            assert sets.count(("w0", "w1")) == 1
            assert set(sets) == {("w0",), ("w0", "w1")}


@each_kind
def test_below_the_floor_all_wait_by_name(kind: str) -> None:
    with (
        LocalCluster(shard_count=2) as cluster,
        shardwell.connect(cluster.target, worker_id="w0", timeout_s=2.0) as client,
    ):
        member = Member(client, kind, min_count=2)
        with pytest.raises(shardwell.WorkersMissingError, match="2 to 64 members"):
            member.exchange(1.0)
        with ElasticWorker(cluster.target, "w1", kind=kind, min_count=2) as other:
            values = member.exchange(1.0, timeout_s=40.0)
            assert member.contributors == ("w0", "w1")
            assert set(values.tolist()) == {-(1.0 + gradient_of("w1", 0)) / 2}
            assert other.read_outcome()["contributors"] == ["w0", "w1"]


def test_who_joins_waits_for_a_shard_that_is_away(cluster, connect, tmp_path) -> None:
    """As for any call: though it asks the shards each second, whether an open step needs it."""
    running = cluster(2, data_dir=tmp_path, processes=True)
    first, second = (opened(connect(running, f"w{n}")) for n in range(2))
    gradient = np.ones(SIZE, np.float32)
    first.exchange(gradient)
    joining = in_background(second.join)
    eventually("it has its seats", lambda: len(connect(running, "ops").members(NAME)) == 2)
    running.children[1].kill()
    with pytest.raises(FutureTimeoutError):
        joining.result(2.0)  # twice as long as one look takes
    running.start_again(1)
    first.exchange(gradient)
    assert joining.result(PATIENCE_S) == first.version


def test_a_quorum_closes_without_the_slow_one() -> None:
    spec = {"min_contributors": 1, "grace_s": 0.05}
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        slow = stack.enter_context(ElasticWorker(target, "w0", pause_s=0.5, **spec))
        fast = stack.enter_context(ElasticWorker(target, "w1", **spec))
        fast.next_with("w1")
        late = slow.next_such(lambda found: found["counted"] == "none")
        assert late["version"] > late["step"]


def test_clip_norm_with_members_that_come_and_go() -> None:
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        first = stack.enter_context(ElasticWorker(target, "w0", clip_norm=1.0))
        second = stack.enter_context(ElasticWorker(target, "w1", clip_norm=1.0))
        first.next_with("w0", "w1")
        second.process.kill()
        first.next_with("w0")


def test_a_full_step_whose_members_are_all_gone_is_closed_by_the_next_one() -> None:
    """Shards wait for the norm of a step that is full, and no client is left to send it."""
    gradient = np.zeros(SIZE, np.float32)
    gradient[0] = 4.0
    with LocalCluster(shard_count=2, chunk_size_bytes=1024) as cluster:
        with shardwell.connect(cluster.target, worker_id="w0") as client:
            opened(client, clip_norm=1.0).put_gradient(gradient)
        with shardwell.connect(cluster.target, worker_id="w1", timeout_s=20.0) as client:
            net = opened(client, clip_norm=1.0)
            assert net.join() == 1
            assert net.get_weights()[0] == pytest.approx(-1.0)


def test_a_step_that_an_earlier_process_gave_is_not_given_anew() -> None:
    """It is in the set with what that one gave, and the outcome of the later one says so."""
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        floor = {"min_count": 2}
        gone = shardwell.connect(cluster.target, worker_id="w1")
        opened_table(gone, **floor).put_row_gradients(IDS, rows_of(2.0))
        gone.close()
        back = opened_table(
            stack.enter_context(shardwell.connect(cluster.target, worker_id="w1")), **floor
        )
        back.reopen()
        assert not back.is_step_begun
        keeper = stack.enter_context(shardwell.connect(cluster.target, worker_id="w0"))
        first = opened_table(keeper, **floor)
        rows = first.exchange_rows(IDS, rows_of(4.0))
        assert first.outcome is not None
        assert (first.outcome.step, first.outcome.contributors) == (0, ("w0", "w1"))
        assert set(rows.reshape(-1).tolist()) == {-3.0}


def test_a_shard_killed_in_a_step_closes_it_without_the_lost(tmp_path: Path) -> None:
    """It knows nothing of that worker but its files, and hears of its end from the others."""
    with ExitStack() as stack:

        def serve(index: int, port: int = 0) -> ServingShard:
            flags = (f"--data-dir={tmp_path}/{index}",)
            return stack.enter_context(ServingShard(*flags, index=index, count=2, port=port))

        shards = [serve(0), serve(1)]
        addresses = [shard.address() for shard in shards]
        first = stack.enter_context(ElasticWorker(",".join(addresses), "w0", kind="table"))
        second = stack.enter_context(ElasticWorker(",".join(addresses), "w1", kind="table"))
        first.next_with("w0", "w1")
        second.send(signal.SIGSTOP)
        shards[1].close()
        second.process.kill()
        serve(1, int(addresses[1].rpartition(":")[2]))
        assert first.next_with("w0")["counted"] == "all"
        for _ in range(3):
            first.read_outcome()
    check_values(first.seen)


def test_a_worker_killed_between_parts_of_a_step_has_ended_it_with_those() -> None:
    """What the shard had counted is in the rows, with its whole weight; the next one goes on."""
    row_count, dim = 3000, 1024
    shape = {"row_count": row_count, "dim": dim}  # a dozen messages a step
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=1)).target
        client = stack.enter_context(shardwell.connect(target, worker_id="w0", timeout_s=40.0))
        table = opened_table(client, **shape)
        worker = stack.enter_context(ElasticWorker(target, "w1", kind="table", **shape))

        def counted() -> int:
            return table.status()[0].counted_row_count

        def is_cut_off() -> bool:
            """Stops the worker, and lets it go on if it is between two steps."""
            before = counted()
            eventually("it goes on", lambda: counted() > before)
            worker.send(signal.SIGSTOP)
            last = -1
            while (now := counted()) != last:
                last = now
            if now % row_count:
                return True
            worker.send(signal.SIGCONT)
            return False

        eventually("it stands still in the middle of a step", is_cut_off)
        step = table.status()[0].version
        worker.process.kill()
        eventually("the step closes", lambda: table.status()[0].version == step + 1)
        rows = table.get_rows(np.arange(row_count))
        before = sum(gradient_of("w1", each) for each in range(step))
        expected = np.full((row_count, dim), -before, np.float64)
        expected[: counted() - step * row_count] -= gradient_of("w1", step)
        np.testing.assert_allclose(rows, expected)
        assert table.join() == step + 1
        rows = table.exchange_rows(np.arange(row_count), np.ones((row_count, dim), np.float32))
        np.testing.assert_allclose(rows, expected - 1.0)


def test_a_member_that_was_removed_is_late_and_takes_part_again() -> None:
    """Late rows are no error: the newest rows come, and the next ones count."""
    with (
        LocalCluster(shard_count=2) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
        shardwell.connect(cluster.target, worker_id="admin") as operator,
    ):
        table = opened_table(client)
        table.join()
        table.exchange_rows(IDS, rows_of(1.0))
        operator.drain("w0")
        table.exchange_rows(IDS, rows_of(1.0))
        assert table.is_draining
        operator.remove_member("w0")
        rows = table.exchange_rows(IDS, rows_of(8.0))
        assert table.outcome is not None
        assert (table.outcome.counted, table.outcome.late_row_count) == ("none", len(IDS))
        assert set(rows.reshape(-1).tolist()) == {-2.0}
        assert [status.late_part_count for status in table.status()] == [1, 1]
        rows = table.exchange_rows(IDS, rows_of(1.0))
        assert (table.outcome.counted, table.is_draining) == ("all", False)
        assert set(rows.reshape(-1).tolist()) == {-3.0}


def test_only_members_join_and_leave() -> None:
    with (
        LocalCluster(shard_count=1) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        table = client.table(
            "fixed",
            row_count=4,
            dim=1,
            optimizer=shardwell.SGD(learning_rate=1.0),
            initializer=shardwell.Zeros(),
            worker_count=1,
        )
        with pytest.raises(shardwell.ArgumentError, match="table 'fixed' has 1 worker, who need"):
            table.join()
        table.leave()
        table.exchange_rows([1], np.ones((1, 1), np.float32))
        assert table.outcome is None


# Each failure of a member costs the others a moment, by the failure's name. Method: real processes
# on real shards; one worker's way to one shard goes through a proxy, or a client of the .proto
# does what a process that dies leaves behind.


BOUNDS = {"member_return_s": 0.3, "member_lease_s": 1.0}


def wire_member(
    worker: WireWorker, spec: ParameterSpec, tenure: int, from_step: int = 0
) -> WireParameter:
    """A member that is awaited from a step on."""
    made = worker.create(spec.to_proto())
    for fields in ({}, {"from_step": from_step}):
        worker.open_parameter(made.spec, take_seat=True, tenure=tenure, **fields)
    made.tenure, made.next_step = tenure, from_step
    return made


def spec_of(**elastic: Any) -> ParameterSpec:
    """What `opened` declares."""
    members = Elastic(**BOUNDS, **elastic)
    return ParameterSpec(
        name=NAME,
        size=SIZE,
        optimizer=shardwell.SGD(learning_rate=1.0),
        worker_count=members.max_count,
        members=members,
        codec="fp32",
    )


@pytest.mark.parametrize("way", ["cut", "stall"])
def test_w_reaches_all_but_a_for_longer_than_the_lease(way: str) -> None:
    """B hears of it, and awaits it: it waits for A's weights. A says it is over, and all know."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(shard_count=2))
        shard_a, shard_b = cluster.target.split(",")
        proxy = stack.enter_context(Proxy(shard_a))
        first = stack.enter_context(ElasticWorker(cluster.target, "w0", **BOUNDS))
        cut_off = f"{proxy.address},{shard_b}"
        second = stack.enter_context(ElasticWorker(cut_off, "w1", same_host=False, **BOUNDS))
        first.next_with("w0", "w1")
        if way == "cut":
            proxy.cut(refuse=True)
        else:
            proxy.stall()
        alone = first.next_with("w0")
        for _ in range(20):  # and goes on
            assert first.read_outcome()["step"] > alone["step"]
        if way == "cut":
            proxy.accept()
        else:
            proxy.resume()
        first.next_with("w0", "w1")
        second.next_with("w0", "w1")


def test_a_joiner_dies_between_two_shards_join() -> None:
    """A awaits it, and B never heard of it."""
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        client = stack.enter_context(
            shardwell.connect(cluster.target, worker_id="w0", timeout_s=40.0)
        )
        model = opened(client, **BOUNDS)
        gradient = np.ones(SIZE, np.float32)
        model.exchange(gradient)
        joiner = WireWorker(cluster.target, "w1")
        spec = spec_of()
        request = {"take_seat": True, "tenure": 5}
        joiner.open_parameter(spec.to_proto())
        joiner.open_parameter(spec.to_proto(), **request)
        joiner.stubs, joiner.identities = joiner.stubs[:1], joiner.identities[:1]
        joiner.open_parameter(spec.to_proto(), **request, from_step=2)
        joiner.close()
        for _ in range(3):
            model.exchange(gradient)
            assert model.outcome is not None
            assert (model.outcome.counted, model.outcome.contributors) == ("all", ("w0",))


@pytest.mark.parametrize("min_count", [1, 2])
def test_all_members_are_lost_with_a_chunk_partly_in(min_count: int) -> None:
    """A has w's gradient of the step, B has none: newcomers take part from B's open step."""
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(
                shardwell.connect(cluster.target, worker_id=f"n{number}", timeout_s=40.0)
            )
            for number in range(min_count)
        ]
        options = {**BOUNDS, "min_count": min_count}
        models = [opened(client, **options) for client in clients]
        spec = spec_of(min_count=min_count)
        lost = [WireWorker(cluster.target, f"w{number}") for number in range(2)]
        made = [wire_member(worker, spec, number + 1) for number, worker in enumerate(lost)]
        made[0].slices = made[0].slices[:1]  # it dies before it sends the rest
        made[0].push(np.ones(SIZE, np.float32))
        for worker in lost:
            worker.close()
        gradient = np.ones(SIZE, np.float32)
        for step in range(3):
            together([partial(model.exchange, gradient) for model in models])
            assert all(model.version > step for model in models)


def test_two_processes_with_one_worker_id() -> None:
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        first = stack.enter_context(ElasticWorker(cluster.target, "w0", **BOUNDS))
        first.next_with("w0")
        client = stack.enter_context(
            shardwell.connect(cluster.target, worker_id="w0", timeout_s=20.0)
        )
        model = opened(client, **BOUNDS)
        with pytest.raises(shardwell.WorkerIdInUseError, match="'w0' is in use"):
            model.exchange(np.ones(SIZE, np.float32))
        first.next_with("w0")


# TensorFlow's cases, by its names.


def test_worker_preempted_between_steps() -> None:
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        first = stack.enter_context(ElasticWorker(target, "w0", **BOUNDS))
        slow = stack.enter_context(ElasticWorker(target, "w1", pause_s=0.5, **BOUNDS))
        slow.next_with("w0", "w1")
        slow.process.kill()  # it pauses now
        first.next_with("w0")


def test_two_workers_preempted() -> None:
    with ExitStack() as stack:
        target = stack.enter_context(LocalCluster(shard_count=2)).target
        crew = [
            stack.enter_context(ElasticWorker(target, f"w{number}", **BOUNDS))
            for number in range(3)
        ]
        crew[0].next_with("w0", "w1", "w2")
        for worker in crew[1:]:
            worker.process.kill()
        crew[0].next_with("w0")
        again = [
            stack.enter_context(ElasticWorker(target, f"w{number}", **BOUNDS)) for number in (1, 2)
        ]
        for worker in (crew[0], *again):
            worker.next_with("w0", "w1", "w2")


def test_worker_preempted_in_a_step() -> None:
    """Of its gradient, one shard has all and the other nothing."""
    with LocalCluster(shard_count=2) as cluster, ExitStack() as stack:
        client = stack.enter_context(
            shardwell.connect(cluster.target, worker_id="w0", timeout_s=40.0)
        )
        model = opened(client, **BOUNDS)
        worker = WireWorker(cluster.target, "w1")
        model.exchange(np.ones(SIZE, np.float32))
        made = wire_member(worker, spec_of(), 1, from_step=1)
        whole, made.slices = made.slices, made.slices[:1]
        made.push(np.full(SIZE, 3, np.float32))
        worker.close()
        weights = model.exchange(np.ones(SIZE, np.float32))
        border = whole[1].offset
        np.testing.assert_array_equal(weights[:border], -1.0 - 2.0)
        np.testing.assert_array_equal(weights[border:], -1.0 - 1.0)
        assert model.outcome is not None
        assert model.outcome.contributors == ("w0", "w1")


@pytest.mark.parametrize("shard_index", [0, 1])
def test_parameter_server_preempted(cluster: Any, tmp_path: Path, shard_index: int) -> None:
    """Within 5 s members come back to it, and are members as before."""
    running = cluster(2, data_dir=tmp_path, processes=True)
    with ExitStack() as stack:
        crew = [
            stack.enter_context(ElasticWorker(running.target, f"w{number}", **BOUNDS))
            for number in range(2)
        ]
        crew[0].next_with("w0", "w1")
        running.children[shard_index].kill()
        running.start_again(shard_index)
        begun = max(worker.read_outcome()["step"] for worker in crew)
        for worker in crew:
            worker.next_such(lambda found: found["step"] > begun + 100)
            worker.next_with("w0", "w1")
