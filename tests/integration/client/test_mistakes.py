"""Goal: what users get wrong in a first program is named, with the thing that they meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell
from shardwell_server import LocalCluster

SGD = shardwell.SGD(lr=0.5)
SHAPES = {"weight": (3,), "bias": (2,)}


def _refused(call: Any) -> str:
    with pytest.raises(shardwell.ArgumentError) as caught:
        call()
    return caught.value.message


def test_a_mistyped_name_gets_a_suggestion(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    net = client.parameter("net", tensors=SHAPES, optimizer=SGD)
    net.init({"weight": [0.0] * 3, "bias": [0, 0]})
    gradient = {"wieght": np.ones(3), "bias": np.ones(2)}
    message = _refused(lambda: net.exchange(gradient))
    assert "lacks 'weight'" in message
    assert message.endswith("has 'wieght'; did you mean 'weight'?")
    message = _refused(
        lambda: client.parameter(
            "other",
            tensors=SHAPES,
            optimizer=SGD,
            groups=[shardwell.TensorGroup("bais", weight_decay=0.0)],
        )
    )
    assert message.endswith("; did you mean 'bias'?")
    with pytest.raises(shardwell.UnknownParameterError, match=r"did you mean 'net'\?"):
        client.parameter("nett")
    with pytest.raises(shardwell.UnknownTableError, match=r"open it when another worker has$"):
        client.table("users")


def test_lists_of_numbers_are_gradients_and_weights(cluster, connect) -> None:
    net = connect(cluster(2), "w0").parameter("net", tensors=SHAPES, optimizer=SGD)
    net.init({"weight": [0.0] * 3, "bias": (0, 0)})
    found = net.exchange({"weight": [2, 4, 6], "bias": (1.0, -1.0)})
    assert found["weight"].tolist() == [-1.0, -2.0, -3.0]
    assert found["bias"].tolist() == [-0.5, 0.5]


def test_first_weights_that_are_not_finite_leave_nothing(cluster, connect) -> None:
    net = connect(cluster(1), "w0").parameter("net", size=2, optimizer=SGD)
    with pytest.raises(shardwell.NonFiniteError, match=r"element 1 is nan, .*; mend them first$"):
        net.init([1.0, float("nan")])


def test_what_is_no_target_says_what_to_pass(cluster) -> None:
    running = cluster(1)
    assert "got int 7070" in _refused(lambda: shardwell.connect(7070))  # type: ignore[arg-type]
    message = _refused(lambda: shardwell.connect(running.addresses))  # type: ignore[arg-type]
    assert message.endswith("; pass ','.join(addresses)")
    message = _refused(lambda: shardwell.connect(running))  # type: ignore[arg-type]
    assert message.endswith("; pass the LocalCluster's .target")


@pytest.mark.parametrize("count", ["2", 2.0, None, 0, True])
def test_a_number_of_shards_that_is_none(count) -> None:
    message = _refused(lambda: LocalCluster(count))
    assert message == f"shard_count must be an integer from 1 to 64; got {count!r}"


def test_what_is_no_parameter() -> None:
    message = _refused(lambda: shardwell.ServerSync("net"))  # type: ignore[arg-type]
    assert message == "parameter must be made by Client.parameter(...); got 'net'"
