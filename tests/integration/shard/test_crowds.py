"""Many workers and parameters: seats are decided once, and answers stay within a message."""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.data.sessions import session_of
from harness.polling import BRIEF_S
from harness.threads import together

SGD = shardwell.SGD(learning_rate=1.0)
ONES = np.ones(8, np.float32)


def test_two_shards_never_seat_different_workers(cluster, connect) -> None:
    """More workers than seats begin at once: exactly worker_count get one, on all shards."""
    running = cluster(3)
    workers = [
        connect(running, f"w{index}").parameter("m", size=8, optimizer=SGD, worker_count=2)
        for index in range(6)
    ]
    workers[0].init(np.zeros(8, np.float32))

    def begin(worker: shardwell.Parameter) -> str:
        try:
            worker.put_gradient(ONES)
        except shardwell.SeatsTakenError:
            return "refused"
        return "seated"

    outcomes = together([lambda worker=worker: begin(worker) for worker in workers])
    assert sorted(outcomes) == ["refused"] * 4 + ["seated"] * 2
    np.testing.assert_array_equal(workers[0].get_weights(min_version=1), -ONES)


def test_status_and_connect_with_many_names(cluster, connect) -> None:
    """300 parameters that 30 workers with long names have opened: more than a message holds."""
    running = cluster(1)
    shard = running.servers[0].shard
    spec = shardwell.ParameterSpec(name="p", size=1, optimizer=SGD, worker_count=100)
    for worker in range(30):
        name = f"{'w' * 120}{worker}"
        shard.sessions.attend(name, session_of(name), lambda: None)
    for number in range(300):
        made, _ = shard.parameters.open(
            shardwell.ParameterSpec(
                name=f"{'p' * 100}{number}",
                size=spec.size,
                optimizer=spec.optimizer,
                worker_count=spec.worker_count,
            )
        )
        for worker in range(30):
            name = f"{'w' * 120}{worker}"
            made.join(name, session_of(name).number)
    (status,) = connect(running, "new").status()
    assert len(status.parameters) == 300
    assert all(entry.missing_worker_count == 30 for entry in status.parameters)
    assert all(entry.missing_worker_ids for entry in status.parameters)


def test_hundreds_of_missing_workers(cluster, connect) -> None:
    running = cluster(1)
    model = connect(running, "here").parameter("m", size=8, optimizer=SGD, worker_count=500)
    model.init(np.zeros(8, np.float32))
    known = running.servers[0].shard.parameters.get("m")
    for index in range(400):
        name = f"{'late' * 12}-{index}"
        running.servers[0].shard.sessions.attend(name, session_of(name), lambda: None)
        known.join(name, session_of(name).number)
    with pytest.raises(shardwell.WorkersMissingError, match="99 that never opened") as caught:
        model.exchange(ONES, timeout_s=BRIEF_S)
    assert 10 < len(caught.value.missing_worker_ids) < 400


def test_a_rate_per_step_where_a_slice_is_empty(cluster, connect) -> None:
    model = connect(cluster(2), "w0").parameter("m", size=1, optimizer=SGD)
    model.init(np.zeros(1, np.float32))
    for step in range(80):
        model.set_learning_rate(0.5 if step % 2 else 0.25)
        model.exchange(np.ones(1, np.float32))
    np.testing.assert_array_equal(model.get_weights(), -30)


def test_an_asynchronous_rate_changes_for_everybody(cluster, connect) -> None:
    running = cluster(2)
    first, second = (
        connect(running, name).parameter("m", size=8, optimizer=SGD, mode="async")
        for name in ("w0", "w1")
    )
    first.init(np.zeros(8, np.float32))
    for _ in range(3):
        first.exchange(ONES)
    second.set_learning_rate(0.5)
    np.testing.assert_array_equal(first.exchange(ONES), -3.5)
