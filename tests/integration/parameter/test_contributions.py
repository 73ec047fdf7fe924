"""Who contributed to the last steps, as the shards know it: by range, in the order of the sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from shardwell.placement.slices import Slice
from shardwell_server.services import parameter_service
from shardwell_server.shard.parameter.open_sets import STEP_COUNT_MAX

SIZE = 1000
ONES = np.ones(SIZE, np.float32)
ELASTIC = {"members": shardwell.Elastic()}


def opened(client: shardwell.Client, **options: Any) -> shardwell.Parameter[Any]:
    model = client.parameter(
        "m", size=SIZE, optimizer=shardwell.SGD(learning_rate=1.0), codec="fp32", **options
    )
    model.init(np.zeros(SIZE, np.float32))
    return model


def test_sets_come_in_the_order_of_the_gradients(cluster, connect) -> None:
    running = cluster(3)
    first, second = (opened(connect(running, f"w{n}"), **ELASTIC) for n in range(2))
    reader = connect(running, "reader").parameter("m")
    first.exchange(ONES)
    second.get_weights()
    step = second.put_gradient(ONES)
    first.exchange(ONES)
    everything = Slice(0, SIZE)
    assert first.contributions(0) == [(everything, ("w0",))]
    assert reader.contributions(step) == [(everything, ("w1", "w0"))]
    second.leave()
    first.exchange(ONES)
    assert second.contributions(step + 1) == [(everything, ("w0",))]


def test_ranges_with_another_set_are_apart(cluster, connect, monkeypatch) -> None:
    """Of a step that closed in part without one worker; also where an answer has no room for it."""
    running = cluster(2)
    options = {"worker_count": 2, "min_contributors": 1, "grace_s": 0.05}
    early, other = (opened(connect(running, f"w{n}"), **options) for n in range(2))
    begun = early.begin_exchange(ONES)
    begun.ready(0, 200)
    ops = connect(running, "ops")

    def front_has_closed() -> bool:
        return ops.status()[0].parameters[0].version_max == 1

    eventually("the grace of its chunks is over", front_has_closed)
    other.exchange(ONES)
    begun.finish()
    assert other.outcome is not None
    (late,) = other.outcome.late
    expected = [(late, ("w0",)), (Slice(late.stop, SIZE - late.stop), ("w1",))]
    assert late.offset == 0
    assert 0 < late.stop <= 200
    assert other.contributions(0) == expected
    monkeypatch.setattr(parameter_service, "_CONTRIBUTIONS_SIZE_MAX_BYTES", 1)
    assert other.contributions(0) == expected


def test_only_the_last_steps_are_known(cluster, connect) -> None:
    model = opened(connect(cluster(2), "w0"), **ELASTIC)
    for _ in range(STEP_COUNT_MAX + 1):
        model.exchange(ONES)
    assert model.contributions(1) == [(Slice(0, SIZE), ("w0",))]
    for unknown in (0, STEP_COUNT_MAX + 1):
        with pytest.raises(shardwell.StepOrderError, match=f"step {unknown} of parameter 'm'"):
            model.contributions(unknown)


def test_a_shard_that_is_started_again_knows_the_last_step(cluster, connect, tmp_path) -> None:
    running = cluster(2, data_dir=tmp_path, processes=True)
    model = opened(connect(running, "w0"), **ELASTIC)
    for _ in range(3):
        model.exchange(ONES)
    running.children[1].close(0)
    running.start_again(1)
    assert model.contributions(2) == [(Slice(0, SIZE), ("w0",))]
    assert model.contributions(1) == [(Slice(0, 512), ("w0",))]


def test_a_fixed_crew_has_no_sets(cluster, connect) -> None:
    model = opened(connect(cluster(1), "w0"), worker_count=1)
    model.exchange(ONES)
    with pytest.raises(shardwell.ArgumentError, match="has the gradients of 1 worker, so"):
        model.contributions(0)
