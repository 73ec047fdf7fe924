"""Goal: a parameter with tensors is the same vector underneath, and speaks names everywhere.

Method: two shards with small chunks, so that tensors cross chunks and shards; every result is
compared with that of a vector.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S
from harness.threads import together
from shardwell_server import LocalCluster

SHAPES = {"w": (20, 64), "empty": (0,), "b": (64,), "scale": ()}
SIZE = 20 * 64 + 64 + 1
SGD = shardwell.SGD(learning_rate=0.5)


def tensors_of(vector: np.ndarray, shapes: Any = SHAPES) -> dict[str, np.ndarray]:
    layout = shardwell.TensorLayout.of(shapes)
    return {t.name: vector[t.offset : t.stop].reshape(t.shape).copy() for t in layout}


FIRST = np.arange(SIZE, dtype=np.float32)
GRADIENT = 2 * (np.arange(SIZE, dtype=np.float32) % 5 - 2)
"""Which fp16 holds exactly, and what comes of it, too."""


def assert_same(tensors: dict[str, np.ndarray], vector: np.ndarray, shapes: Any = SHAPES) -> None:
    expected = tensors_of(vector, shapes)
    assert list(tensors) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[name], array, err_msg=name)
        assert tensors[name].shape == array.shape


@pytest.fixture
def client(cluster, connect) -> shardwell.Client:
    return connect(cluster(2, chunk_size_bytes=64), "w0")


def test_verbs_take_and_return_tensors(client) -> None:
    vector = client.parameter("vector", size=SIZE, optimizer=SGD)
    net = client.parameter("net", tensors=SHAPES, optimizer=SGD)
    for parameter, of in ((vector, np.copy), (net, tensors_of)):
        assert parameter.init(of(FIRST)) == 0
        parameter.exchange(of(GRADIENT))
        assert parameter.put_gradient(of(GRADIENT), sample_count=3) == 1
    expected = vector.get_weights(min_version=2)
    assert_same(net.get_weights(min_version=2), expected)
    assert_same(net.get_weights_async(min_version=2).result(PATIENCE_S), expected)
    out = tensors_of(np.zeros(SIZE, np.float32))
    assert net.get_weights(out=out) is out
    assert_same(out, expected)
    again = net.exchange(out, out=net.get_weights())
    assert_same(again, vector.exchange(expected))
    assert net.version == 3
    assert repr(net) == f"Parameter('net', size={SIZE}, 4 tensors, mode='sync')"


def test_a_step_in_place_copies_no_tensor(client) -> None:
    net = client.parameter("net", tensors=SHAPES, optimizer=SGD)
    net.init(tensors_of(FIRST))
    weights, gradient = net.get_weights(), net.get_weights()
    before = weights["w"].ctypes.data
    result = net.exchange(gradient, out=weights)
    assert result["w"].ctypes.data == before
    assert_same(weights, FIRST - 0.5 * FIRST)
    with pytest.raises(shardwell.ArgumentError, match="out must not overlap the gradient"):
        net.exchange(weights, out=weights)
    assert_same(net.exchange(gradient), FIRST - 0.5 * FIRST - 0.5 * FIRST)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "fp16+lz4"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ">f4"])
def test_tensors_that_lie_apart_have_the_bits_of_a_vector(cluster, connect, codec, dtype) -> None:
    """Large ones are read and written where they lie, small ones between them are copied."""
    client = connect(cluster(2, chunk_size_bytes=1 << 18), "w0")
    shapes = {"first": (7,), "w": (600, 512), "none": (0,), "b": (64,), "v": (270000,), "scale": ()}
    size = sum(math.prod(shape) for shape in shapes.values())
    vector = client.parameter("vector", size=size, optimizer=SGD, codec=codec)
    net = client.parameter("net", tensors=shapes, optimizer=SGD, codec=codec)
    random = np.random.default_rng(1)
    first = random.standard_normal(size).astype(np.float32)
    vector.init(first)
    net.init(tensors_of(first, shapes))
    out = tensors_of(first, shapes)
    for _ in range(3):
        gradient = random.standard_normal(size).astype(dtype)
        expected = vector.exchange(gradient)
        assert net.exchange(tensors_of(gradient, shapes), out=out) is out
        assert_same(out, expected, shapes)
    for overlaps in ("w", "v"):
        with pytest.raises(shardwell.ArgumentError, match="out must not overlap the gradient"):
            net.exchange(tensors_of(gradient, shapes) | {overlaps: out[overlaps]}, out=out)
    for name, index in (("b", 3), ("v", 269999)):
        given = tensors_of(gradient, shapes)
        given[name][index] = np.nan
        words = f"element {index} of tensor '{name}' is nan"
        with pytest.raises(shardwell.NonFiniteError, match=words) as caught:
            net.exchange(given, out=out)
        assert caught.value.element_index == net.spec.layout.by_name[name].offset + index
    assert net.next_step == 3
    assert_same(net.get_weights(), expected, shapes)


def test_a_reader_opens_it_by_name(cluster, connect) -> None:
    running = cluster(2)
    connect(running, "w0").parameter("net", tensors=SHAPES, optimizer=SGD).init(tensors_of(FIRST))
    reader = connect(running, "reader").parameter("net")
    assert [tensor.name for tensor in reader.spec.layout] == list(SHAPES)
    assert_same(reader.get_weights(), FIRST)
    assert connect(running, "third").parameter("net", size=SIZE).spec == reader.spec


def test_another_layout_is_refused_by_name(cluster, connect) -> None:
    running = cluster(2)
    connect(running, "w0").parameter("net", tensors=SHAPES, optimizer=SGD)
    other = connect(running, "w1")
    for change, words in (
        (
            {"tensors": {**SHAPES, "w": (64, 20)}},
            r"tensor 'w' has shape \(20, 64\); \(64, 20\) was",
        ),
        ({"tensors": {**SHAPES, "c": (1,)}}, "no tensor 'c', which was asked for"),
        ({"size": SIZE}, "4 tensors exist, a flat vector was asked for"),
    ):
        with pytest.raises(shardwell.SpecMismatchError, match=words) as caught:
            other.parameter("net", **change, optimizer=SGD)
        assert caught.value.parameter == "net"
    with pytest.raises(shardwell.SpecMismatchError, match="no tensor 'c'"):
        other.parameter("net", tensors={**SHAPES, "c": (1,)})
    with pytest.raises(shardwell.ArgumentError, match=f"that of all tensors, {SIZE}; got 3"):
        other.parameter("more", tensors=SHAPES, size=3, optimizer=SGD)


def test_what_does_not_fit_is_refused_before_anything_is_sent(client) -> None:
    net = client.parameter("net", tensors=SHAPES, optimizer=SGD)
    net.init(tensors_of(FIRST))
    sent_bytes = client.traffic.sent_bytes
    gradient = tensors_of(GRADIENT)
    bad = {**gradient, "b": gradient["b"].copy()}
    bad["b"][5] = np.nan
    for refused, kind, words in (
        ({**gradient, "w": gradient["w"].T}, shardwell.ArgumentError, "tensor 'w' must have shape"),
        ({"w": gradient["w"]}, shardwell.ArgumentError, "lacks 'empty', 'b', 'scale'"),
        ({**gradient, "x": gradient["w"]}, shardwell.ArgumentError, "has 'x', which"),
        (GRADIENT, shardwell.ArgumentError, "must map the names"),
        (bad, shardwell.NonFiniteError, "element 5 of tensor 'b' is nan"),
    ):
        for verb in (net.exchange, net.put_gradient):
            with pytest.raises(kind, match=words):
                verb(refused)
    assert client.traffic.sent_bytes == sent_bytes
    assert net.next_step == 0
    assert_same(net.exchange(gradient), FIRST - 0.5 * GRADIENT)


def test_an_error_of_the_shard_names_the_tensor(client) -> None:
    net = client.parameter(
        "net", tensors=SHAPES, optimizer=shardwell.SGD(3e38), codec="fp32", allow_non_finite=False
    )
    net.init(tensors_of(FIRST))
    gradient = tensors_of(np.zeros(SIZE, np.float32))
    gradient["b"][7] = 1e30
    with pytest.raises(shardwell.DivergedError, match="element 7 of tensor 'b' is not finite"):
        net.exchange(gradient)


def test_workers_make_a_step_of_tensors(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    gradients = [tensors_of(GRADIENT), tensors_of(3 * GRADIENT)]

    def work(rank: int) -> dict[str, np.ndarray]:
        net = connect(running, f"w{rank}").parameter(
            "net", tensors=SHAPES, optimizer=SGD, worker_count=2, codec="fp32"
        )
        net.init(tensors_of(FIRST))
        return net.exchange(gradients[rank])

    for result in together([lambda: work(0), lambda: work(1)]):
        assert_same(result, FIRST - np.float32(0.5) * (2 * GRADIENT))


def test_status_has_it_and_is_asked_on_where_an_answer_has_no_room() -> None:
    wide = {f"layer{i:04d}.{'x' * 200}": (2, 3) for i in range(1000)}  # some 210 kB as it travels
    with LocalCluster(2) as cluster, shardwell.connect(cluster.target, worker_id="w0") as client:
        for number in range(7):
            client.parameter(f"net{number}", tensors=wide, optimizer=SGD)
        for shard in client.status():
            assert [entry.spec.name for entry in shard.parameters] == [
                f"net{number}" for number in range(7)
            ]
            assert all(list(entry.spec.layout.by_name) == list(wide) for entry in shard.parameters)
        assert client.parameter("net6").spec.layout == client.parameter("net0").spec.layout


def test_a_shard_that_comes_back_has_it_still(tmp_path) -> None:
    with (
        LocalCluster(2, tmp_path, processes=True, cluster_id="c") as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        net = client.parameter("net", tensors=SHAPES, optimizer=SGD)
        net.init(tensors_of(FIRST))
        cluster.children[1].kill()
        cluster.start_again(1)
        assert_same(net.exchange(tensors_of(GRADIENT)), FIRST - 0.5 * GRADIENT)
    with (
        LocalCluster(2, tmp_path) as cluster,
        shardwell.connect(cluster.target, worker_id="w1") as client,
    ):
        assert_same(client.parameter("net").get_weights(), FIRST - 0.5 * GRADIENT)


def test_groups_are_updated_in_their_own_way(cluster, connect) -> None:
    """As parameters of their own would be, with the same options."""
    running = cluster(3, chunk_size_bytes=64)
    client = connect(running, "w0")
    adam = shardwell.AdamW(learning_rate=0.1, weight_decay=0.5)
    groups = [
        shardwell.TensorGroup("b", weight_decay=0.0),
        shardwell.TensorGroup("scale", frozen=True),
        shardwell.TensorGroup("*", learning_rate_factor=0.5),
    ]
    net = client.parameter("net", tensors=SHAPES, groups=groups, optimizer=adam, codec="fp32")
    first, gradient = tensors_of(FIRST), tensors_of(GRADIENT)
    net.init(first)
    alone = {
        "w": shardwell.AdamW(learning_rate=0.05, weight_decay=0.5),
        "b": shardwell.AdamW(learning_rate=0.1, weight_decay=0.0),
    }
    parts = {
        name: client.parameter(name, tensors={name: SHAPES[name]}, optimizer=of, codec="fp32")
        for name, of in alone.items()
    }
    for name, part in parts.items():
        part.init({name: first[name]})
    for step in range(3):
        if step == 2:
            net.set_learning_rate(0.01)
            parts["w"].set_learning_rate(0.005)
            parts["b"].set_learning_rate(0.01)
        weights = net.exchange(gradient)
        for name, part in parts.items():
            expected = part.exchange({name: gradient[name]})[name]
            np.testing.assert_array_equal(weights[name], expected, err_msg=name)
    assert weights["scale"] == first["scale"]
    reader = connect(running, "reader").parameter("net")
    assert reader.spec.layout.by_name["b"].options.weight_decay == 0.0
    other = connect(running, "w1")
    with pytest.raises(shardwell.SpecMismatchError, match=r"tensor 'b'.weight_decay: 0.0 exists"):
        other.parameter("net", tensors=SHAPES, groups=groups[1:], optimizer=adam, codec="fp32")
    with pytest.raises(shardwell.ArgumentError, match="groups= are of tensors"):
        other.parameter("net", size=SIZE, groups=groups, optimizer=adam)
