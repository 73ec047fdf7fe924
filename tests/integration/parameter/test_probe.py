"""A probe moves one shard's slice and nothing else; parameters that train are refused."""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from shardwell.parameter.parameter import SliceProbe

SIZE = 1000
OPTIONS = {"size": SIZE, "optimizer": shardwell.SGD(1.0), "mode": "async", "codec": "fp32"}


@pytest.fixture
def model(cluster, connect):
    """An asynchronous parameter of zeros on three shards."""
    made = connect(cluster(3), "w0").parameter("model", **OPTIONS)
    made.init(np.zeros(SIZE, np.float32))
    return made


@pytest.mark.parametrize("verb", ["put_gradient", "exchange"])
@pytest.mark.parametrize("shard_index", [0, 1, 2])
def test_one_slice_is_moved_and_no_other(model, shard_index, verb) -> None:
    probe = SliceProbe(model, shard_index)
    own = model.slices[shard_index]
    expected = np.zeros(SIZE, np.float32)
    expected[own.offset : own.stop] = -1.0
    getattr(probe, verb)(np.ones(SIZE, np.float32))
    np.testing.assert_array_equal(model.get_weights(), expected)
    found = probe.get_weights(out=np.full(SIZE, 7.0, np.float32))
    np.testing.assert_array_equal(found[own.offset : own.stop], -1.0)
    assert (found == 7.0).sum() == SIZE - own.size
    assert probe.traffic.sent_value_bytes == 4 * own.size


def test_probes_in_turns_make_one_step(model) -> None:
    probes = [SliceProbe(model, index) for index in range(3)]
    for step in range(3):
        for probe in probes:
            probe.next_step = model.next_step
            probe.put_gradient(np.ones(SIZE, np.float32))
        model.next_step += 1
        np.testing.assert_array_equal(model.get_weights(), -2.0 * step - 1.0)
        np.testing.assert_array_equal(model.exchange(np.ones(SIZE)), -2.0 * step - 2.0)


def test_a_value_that_is_not_finite_is_named_by_its_place_in_the_whole(model) -> None:
    gradient = np.zeros(SIZE, np.float32)
    gradient[999] = np.nan
    with pytest.raises(shardwell.NonFiniteError, match="999"):
        SliceProbe(model, 2).put_gradient(gradient)
    SliceProbe(model, 0).put_gradient(gradient)  # none of it is that shard's


def test_a_synchronous_parameter_is_refused(cluster, connect) -> None:
    model = connect(cluster(2), "w0").parameter("m", size=9, optimizer=shardwell.SGD(1.0))
    with pytest.raises(shardwell.ArgumentError, match="synchronous"):
        SliceProbe(model, 0)


@pytest.mark.parametrize("shard_index", [1, 2, 5])
def test_a_shard_that_has_nothing_is_refused(cluster, connect, shard_index) -> None:
    model = connect(cluster(3), "w0").parameter("m", **{**OPTIONS, "size": 1})
    with pytest.raises(shardwell.ArgumentError, match=f"shard {shard_index} has no elements"):
        SliceProbe(model, shard_index)
