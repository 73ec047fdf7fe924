"""Goal: a gradient that comes piece by piece has the effect of the same gradient at once.

Method: many small chunks, of which some are announced before `finish`, in any order; beside it a
parameter that is exchanged whole.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwell
from harness.polling import eventually
from harness.threads import together
from shardwell_server import LocalCluster

SHAPES = {"a": (40, 20), "b": (30,), "c": (9, 9), "d": (500,)}
SIZE = 800 + 30 + 81 + 500
LAYOUT = shardwell.TensorLayout.of(SHAPES)
SGD = shardwell.SGD(learning_rate=0.5, momentum=0.5)


def opened(client: shardwell.Client, name: str = "net", **options) -> shardwell.Parameter:
    net = client.parameter(name, tensors=SHAPES, optimizer=SGD, codec="fp32", **options)
    net.init({shape: np.zeros(SHAPES[shape]) for shape in SHAPES})
    return net


def gradient_of(seed: int) -> dict[str, np.ndarray]:
    """Views of one buffer."""
    flat = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
    return {t.name: flat[t.offset : t.stop].reshape(t.shape) for t in LAYOUT}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_pieces_are_exchanged_while_the_rest_is_computed(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    net, whole = opened(client), opened(client, "whole")
    gradient, out = net.get_weights(), net.get_weights()
    given = gradient_of(1)
    begun = net.begin_exchange(gradient, out=out)
    received = client.traffic.received_bytes
    for name in ("b", "a", "c"):
        gradient[name][...] = given[name]
        begun.ready(LAYOUT.by_name[name].offset, LAYOUT.by_name[name].stop)
    gradient["d"][:300] = given["d"][:300]
    begun.ready(LAYOUT.by_name["d"].offset, LAYOUT.by_name["d"].offset + 300)
    eventually("pieces come back", lambda: client.traffic.received_bytes > received + 2000)
    assert net.next_step == 0
    assert out["a"].any()
    gradient["d"][300:] = given["d"][300:]
    assert begun.finish() is out
    assert (net.next_step, net.version) == (1, 1)
    assert_same(out, whole.exchange(given))


def test_whatever_is_announced_in_whatever_order(cluster, connect) -> None:
    client = connect(cluster(3, chunk_size_bytes=256), "w0")
    net, whole = opened(client), opened(client, "whole")

    @settings(max_examples=30)
    @given(st.permutations(list(LAYOUT)), st.integers(0, len(LAYOUT)), st.integers(0, 9))
    def check(order: list[shardwell.TensorSpec], announced: int, seed: int) -> None:
        gradient = gradient_of(seed)
        begun = net.begin_exchange(gradient)
        for tensor in order[:announced]:
            begun.ready(tensor.offset, tensor.stop)
        assert_same(begun.finish(), whole.exchange(gradient))

    check()


def test_workers_whose_pieces_differ(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)

    def work(rank: int) -> dict[str, np.ndarray]:
        net = opened(connect(running, f"w{rank}"), worker_count=3)
        weights = None
        for step in range(4):
            gradient = gradient_of(step)
            begun = net.begin_exchange(gradient, sample_count=rank + 1, learning_rate=0.25)
            for tensor in list(LAYOUT)[: rank + 1]:
                begun.ready(tensor.offset, tensor.stop)
            weights = begun.finish()
        return weights

    results = together([lambda rank=rank: work(rank) for rank in range(3)])
    alone = opened(connect(running, "alone"), "alone")
    for step in range(4):
        expected = alone.exchange(gradient_of(step), learning_rate=0.25)
    for found in results:
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_not_finite_raises_and_can_be_mended(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    net, whole = opened(client), opened(client, "whole")
    gradient = gradient_of(1)
    good = gradient["d"].copy()
    gradient["d"][7] = np.nan
    begun = net.begin_exchange(gradient)
    for tensor in LAYOUT:
        begun.ready(tensor.offset, tensor.stop)
    for _ in range(2):
        with pytest.raises(shardwell.NonFiniteError, match="element 7 of tensor 'd' is nan"):
            begun.finish()
    assert net.next_step == 0
    gradient["d"][...] = good
    assert_same(begun.finish(), whole.exchange(gradient_of(1)))
    assert_same(net.exchange(gradient_of(2)), whole.exchange(gradient_of(2)))


def test_what_has_not_left_is_forgotten(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    net = opened(client)
    gradient = gradient_of(1)
    first = {name: array.copy() for name, array in gradient.items()}
    begun = net.begin_exchange(gradient)
    assert not begun.has_left
    received = client.traffic.received_bytes
    begun.ready(0, SIZE - 100)
    eventually("pieces come back", lambda: client.traffic.received_bytes > received + 1000)
    assert begun.has_left
    begun.forget()
    weights = begun.finish()
    assert net.next_step == 1
    np.testing.assert_array_equal(weights["a"][0], -0.5 * first["a"][0])
    assert not weights["d"][-50:].any()


def test_a_piece_that_was_refused_is_forgotten(cluster, connect) -> None:
    """Chunks that are not finite can't have left: they count as zeros, the rest as it is."""
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    net, whole = opened(client), opened(client, "whole")
    gradient = gradient_of(1)
    gradient["c"][0, 7] = np.nan
    begun = net.begin_exchange(gradient)
    begun.ready(0, SIZE - 100)
    with pytest.raises(shardwell.NonFiniteError, match="'c'"):
        begun.finish()
    assert begun.has_left
    begun.forget()
    finished = begun.finish()
    assert net.next_step == 1
    counted = {name: np.where(np.isfinite(each), each, 0) for name, each in gradient.items()}
    assert np.flatnonzero(counted["c"]).size == 81 - 32  # the chunk of the one that was NaN
    assert np.flatnonzero(counted["b"]).size == 30
    assert_same(finished, whole.exchange(counted))


def test_a_piece_that_waited_in_vain_goes_on_with_the_same_gradient(cluster, connect) -> None:
    """It was counted, and was not answered; how it is cut the next time makes no difference."""
    running = cluster(2, chunk_size_bytes=64)
    one = opened(connect(running, "w0"), worker_count=2)
    other = opened(connect(running, "w1"), worker_count=2)
    begun = one.begin_exchange(gradient_of(1), timeout_s=0.5)
    begun.ready(0, SIZE - 10)
    for _ in range(2):
        with pytest.raises(shardwell.DeadlineError):  # whose time the piece may have taken
            begun.finish(0.5)
    with pytest.raises(shardwell.WorkersMissingError, match="w1"):
        begun.finish(5.0)
    results = together([lambda: begun.finish(30.0), lambda: other.exchange(gradient_of(1))])
    alone = opened(connect(running, "alone"), "alone").exchange(gradient_of(1))
    for found in results:
        assert_same(found, alone)


def test_a_rest_that_diverges_ends_the_step(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    net = client.parameter("net", size=SIZE, optimizer=shardwell.SGD(3e38), codec="fp32")
    net.init(np.zeros(SIZE, np.float32))
    gradient = np.zeros(SIZE, np.float32)
    begun = net.begin_exchange(gradient)
    received = client.traffic.received_bytes
    begun.ready(0, SIZE - 200)
    eventually("pieces come back", lambda: client.traffic.received_bytes > received + 1000)
    gradient[-1] = 1e30
    with pytest.raises(shardwell.DivergedError):
        begun.finish()
    assert net.next_step == 1


def test_a_shard_that_is_killed_meanwhile(tmp_path) -> None:
    with (
        LocalCluster(2, tmp_path, processes=True, chunk_size_bytes=64) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        net, whole = opened(client), opened(client, "whole")
        begun = net.begin_exchange(gradient_of(1))
        begun.ready(0, SIZE // 4)
        begun.ready(SIZE // 2, SIZE)
        cluster.children[0].kill()
        cluster.start_again(0)
        begun.ready(SIZE // 4, SIZE // 2)
        assert_same(begun.finish(), whole.exchange(gradient_of(1)))


def test_weights_that_diverge_in_a_piece_end_the_step(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    net = client.parameter("net", tensors=SHAPES, optimizer=shardwell.SGD(3e38), codec="fp32")
    net.init({name: np.zeros(shape) for name, shape in SHAPES.items()})
    gradient = {name: array * 1e30 for name, array in gradient_of(1).items()}
    flat = net.get_weights()
    for name, array in gradient.items():
        flat[name][...] = array
    begun = net.begin_exchange(flat)
    begun.ready(0, SIZE)
    with pytest.raises(shardwell.DivergedError):
        begun.finish()
    assert net.next_step == 1


def test_what_can_not_be_begun(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    net = opened(client)
    gradient = gradient_of(1)
    apart = {name: array.copy() for name, array in gradient.items()}
    with pytest.raises(shardwell.ArgumentError, match="must lie in one buffer"):
        net.begin_exchange(apart)
    with pytest.raises(shardwell.ArgumentError, match="out must not overlap"):
        net.begin_exchange(gradient, out=gradient)
    begun = net.begin_exchange(gradient)
    begun.ready(0, 100)
    with pytest.raises(shardwell.ArgumentError, match=r"elements 0 to 99 .* announced before"):
        begun.ready(0, 100)
    net.close()
    with pytest.raises(shardwell.ClosedError):
        begun.finish()
