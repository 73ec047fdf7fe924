"""Goal: whatever happens to processes, machines and shards, one session at a time has a worker's
seat, a restarted worker has it at once, and one that comes too late gets an error.

Method: worker processes that are killed and stopped, shards that are killed, lines that are cut;
the weights show which gradients counted: every element is minus their sum.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal

import pytest

import shardwell
from harness.faults.proxy import Proxy
from harness.faults.standing_still import stop, stopped
from harness.polling import Stopwatch, eventually
from harness.programs.session_worker import SessionWorker, Subject
from shardwell_server import LocalCluster
from shardwell_server.shard import shard as shard_module

pytestmark = pytest.mark.timeout(120)

KINDS = pytest.mark.parametrize("kind", ["parameter", "table"])
MODES = pytest.mark.parametrize("mode", ["sync", "async"])
LEASE_S = 6.0


def attending(running: LocalCluster) -> list[int]:
    return [server.shard.sessions.count for server in running.servers]


@pytest.mark.sampled(1)
@KINDS
@MODES
def test_a_killed_worker_is_back_at_once(cluster, connect, kind, mode) -> None:
    """Although its lease is an hour: the kernel ends a killed process's connections."""
    running = cluster(2, session_lease_s=3600)
    for life in range(4):
        with SessionWorker(running.target, "w0", kind, mode) as worker:
            assert worker.ask("put 1") == f"step {2 * life}"
            assert worker.ask("put 1") == f"step {2 * life + 1}"
            worker.send(signal.SIGKILL)
            worker.end()
    assert Subject(connect(running, "reader"), kind, mode).values() == {-8.0}


@pytest.mark.sampled(1)
@KINDS
@MODES
def test_a_stopped_worker_is_replaced_within_its_lease_and_gets_an_error(
    cluster, connect, kind, mode
) -> None:
    """A machine that vanished, as far as the shards can see; then it comes back."""
    running = cluster(2, session_lease_s=LEASE_S)
    successor = Subject(connect(running, "w0"), kind, mode)
    with SessionWorker(running.target, "w0", kind, mode) as late:
        assert late.ask("put 1") == "step 0"
        stop(late.pid)
        late.begin("put 100")  # it will be sent when the process goes on
        with pytest.raises(shardwell.WorkerIdInUseError, match=f"process {late.pid}") as caught:
            successor.put(2)
        assert caught.value.retryable
        assert caught.value.worker_id == "w0"

        def takes_over() -> bool:
            try:
                return successor.put(2) == 1
            except shardwell.WorkerIdInUseError:
                return False

        watch = Stopwatch()
        eventually("the successor takes over", takes_over, timeout_s=60)
        assert watch.elapsed_s < 50
        late.send(signal.SIGCONT)
        answer = late.read_line()
        assert answer.startswith("WorkerIdInUseError"), answer
        assert f"process {os.getpid()}" in answer
        assert "taken over" in answer or "in use" in answer
        assert late.ask("put 100").startswith("WorkerIdInUseError")
        assert successor.put(3) == 2
        assert late.ask("open") == "at 3"
        assert late.ask("put 100").startswith("WorkerIdInUseError")
        successor.client.close()
        assert late.ask("put 4") == "step 3"
    assert Subject(connect(running, "reader"), kind, mode).values() == {-10.0}


@pytest.mark.sampled(1)
@KINDS
@MODES
def test_an_owner_keeps_its_place_over_a_restart_of_its_shards(
    cluster, connect, tmp_path, kind, mode
) -> None:
    running = cluster(2, data_dir=tmp_path, processes=True)
    owner = Subject(connect(running, "w0"), kind, mode)
    step = 0
    with SessionWorker(running.target, "w0", kind, mode) as other:
        for shard_index in (0, 1, 0):
            assert owner.put(1) == step
            step += 1
            running.children[shard_index].kill()
            running.start_again(shard_index)
            answer = other.ask("put 100")
            assert answer.startswith("WorkerIdInUseError"), answer
            assert "is in use" in answer
    assert owner.put(1) == step
    assert owner.values() == {-float(step + 1)}


@pytest.mark.sampled(1)
@KINDS
def test_who_died_with_the_shards_is_replaced_after_a_while(
    cluster, connect, tmp_path, kind
) -> None:
    """A whole job is killed and started again: the first call waits for those who do not come."""
    running = cluster(2, data_dir=tmp_path, processes=True, session_lease_s=LEASE_S)
    with SessionWorker(running.target, "w0", kind, "sync") as worker:
        assert worker.ask("put 1") == "step 0"
        for child in running.children:
            child.kill()
        worker.send(signal.SIGKILL)
        worker.end()
    for index in range(2):
        running.start_again(index)
    again = Subject(connect(running, "w0"), kind, "sync")
    assert again.put(1) == 1
    assert again.values() == {-2.0}


@pytest.mark.sampled(1)
@KINDS
def test_a_local_process_that_died_with_the_shards_is_not_awaited(
    cluster, connect, tmp_path, monkeypatch, kind
) -> None:
    """Shards that wait for others for an hour give its place to the next one."""
    monkeypatch.setattr(shard_module, "RETURN_S_MAX", 3600.0)
    running = cluster(2, data_dir=tmp_path, session_lease_s=3600)
    with SessionWorker(running.target, "w0", kind, "sync") as worker:
        assert worker.ask("put 1") == "step 0"
        with stopped(worker.pid):
            running.close()
            worker.send(signal.SIGKILL)
        worker.end()
    again = Subject(
        connect(cluster(2, data_dir=tmp_path, session_lease_s=3600), "w0"), kind, "sync"
    )
    assert again.put(1) == 1
    assert again.values() == {-2.0}


@pytest.mark.sampled(1)
@KINDS
def test_a_process_that_lives_is_waited_for(cluster, connect, tmp_path, monkeypatch, kind) -> None:
    monkeypatch.setattr(shard_module, "RETURN_S_MAX", 3600.0)
    running = cluster(2, data_dir=tmp_path, session_lease_s=3600)
    with SessionWorker(running.target, "w0", kind, "sync") as worker:
        assert worker.ask("put 1") == "step 0"
        with stopped(worker.pid):
            running.close()
            again = cluster(2, data_dir=tmp_path, session_lease_s=3600)
            second = Subject(connect(again, "w0", timeout_s=1.0), kind, "sync")
            with pytest.raises(shardwell.WorkerIdInUseError, match=f"process {worker.pid}"):
                second.put(1)


@pytest.mark.sampled(1)
@KINDS
def test_who_had_closed_is_replaced_at_once_after_a_restart(
    cluster, connect, tmp_path, kind
) -> None:
    running = cluster(2, data_dir=tmp_path, processes=True, session_lease_s=3600)
    first = connect(running, "w0")
    Subject(first, kind, "async").put(1)
    first.close()
    for index, child in enumerate(running.children):
        child.kill()
        running.start_again(index)
    again = Subject(connect(running, "w0"), kind, "async")
    assert all(list(status.done_worker_ids) == ["w0"] for status in again.statuses())
    assert again.put(1) == 1
    assert not any(list(status.done_worker_ids) for status in again.statuses())
    assert again.values() == {-2.0}


@pytest.mark.sampled(1)
@KINDS
def test_an_idle_client_attends_again_by_itself(cluster, connect, kind) -> None:
    running = cluster(2)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(address)) for address in running.addresses]
        target = ",".join(proxy.address for proxy in proxies)
        client = stack.enter_context(
            shardwell.connect(target, worker_id="w0", timeout_s=20, same_host=False)
        )
        owner = Subject(client, kind, "sync")
        owner.put(1)
        for _ in range(3):
            before = [proxy.connection_count for proxy in proxies]
            for proxy in proxies:
                proxy.cut()

            def is_back(before: list[int] = before) -> bool:
                connected = [proxy.connection_count for proxy in proxies]
                return attending(running) == [1, 1] and all(
                    now > then for now, then in zip(connected, before, strict=True)
                )

            eventually("it attends again", is_back, timeout_s=20)
        with SessionWorker(running.target, "w0", kind, "sync") as other:
            assert other.ask("put 100").startswith("WorkerIdInUseError")
        assert owner.put(1) == 1
        assert owner.values() == {-2.0}


def test_close_does_not_wait_for_a_shard_that_is_away(cluster) -> None:
    running = cluster(2, processes=True)
    client = shardwell.connect(running.target, worker_id="w0", timeout_s=20)
    Subject(client, "parameter", "sync").put(1)
    running.children[0].kill()
    with stopped(running.children[1].pid):
        watch = Stopwatch()
        client.close()
        assert watch.elapsed_s < 10


def test_a_client_that_is_dropped_leaves_nothing_on_the_shards(cluster) -> None:
    running = cluster(1)
    for _ in range(3):
        client = shardwell.connect(running.target, worker_id="w0")
        assert client.status()
        del client
        gc.collect()
        eventually("it is gone", lambda: attending(running) == [0])
