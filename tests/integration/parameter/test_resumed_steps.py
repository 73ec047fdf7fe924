"""Goal: a worker that is started again in mid-step sends what its first process would have.

Method: a worker whose gradients depend on all weights ends in a step of which half is counted, and
so half of its chunks have closed; another one of its name goes on. Beside it the same training,
undisturbed. Kills of real processes are in tests/fault/shard/test_kill_nine.py.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import shardwell
from harness.polling import eventually
from harness.threads import together
from shardwell.placement.slices import Slice
from shardwell_server import LocalCluster

SIZE = 3000
Float32 = npt.NDArray[np.float32]


def opened(
    client: shardwell.Client, name: str = "net", worker_count: int = 1, **options
) -> shardwell.Parameter:
    options.setdefault("optimizer", shardwell.SGD(learning_rate=0.5, momentum=0.5))
    net = client.parameter(name, size=SIZE, worker_count=worker_count, **options)
    net.init((np.arange(SIZE) % 7).astype(np.float32))
    return net


def gradient_of(weights: Float32) -> Float32:
    """Another one for any other weights."""
    return np.random.default_rng(zlib.crc32(weights.tobytes())).integers(-4, 5, SIZE).astype("f4")


def counted(client: shardwell.Client, name: str) -> int:
    return sum(
        each.counted_chunk_count
        for shard in client.status()
        for each in shard.parameters
        if each.spec.name == name
    )


def cut_off(client: shardwell.Client, net: shardwell.Parameter, gradient: Float32) -> None:
    """Has the first half of each shard's chunks counted, and not the rest."""
    before = counted(client, net.name)
    begun = net.begin_exchange(gradient)
    for where in net.slices:
        begun.ready(where.offset, where.offset + where.size // 2)
    eventually("a part is counted", lambda: counted(client, net.name) > before)


@pytest.mark.parametrize("codec", ["fp16", "fp32", "fp32+lz4"])
@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("with_files", [True, False])
def test_it_reads_the_version_before_the_step(
    cluster,
    connect,
    tmp_path: Path,
    codec: str,
    same_host: bool,
    with_files: bool,
) -> None:
    running = cluster(2, chunk_size_bytes=256, data_dir=tmp_path if with_files else None)
    first = connect(running, "w0", same_host=same_host)
    net = opened(first, codec=codec)
    weights = net.get_weights()
    for _ in range(3):
        weights = net.exchange(gradient_of(weights))
    cut_off(first, net, gradient_of(weights))
    first.close()

    again = connect(running, "w0", same_host=same_host)
    resumed = opened(again, codec=codec)
    reader = connect(running, "reader").parameter("net")
    assert resumed.next_step == 3
    for read in (resumed.get_weights(), resumed.get_weights(min_version=3)):
        np.testing.assert_array_equal(read, weights)
    assert (reader.get_weights() != weights).any(), "no chunk has closed; the test can't fail"
    found = resumed.exchange(gradient_of(weights))
    assert resumed.outcome == shardwell.Outcome(step=3, size=SIZE, version=4)
    np.testing.assert_array_equal(found, resumed.get_weights())

    whole = opened(again, "whole", codec=codec)
    weights = whole.get_weights()
    for _ in range(4):
        weights = whole.exchange(gradient_of(weights))
    np.testing.assert_array_equal(found, weights)


def test_restarted_shards_have_the_open_step_in_their_files(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(LocalCluster(2, chunk_size_bytes=256, data_dir=tmp_path))
        client = stack.enter_context(shardwell.connect(running.target, worker_id="w0"))
        net = opened(client)
        weights = net.exchange(gradient_of(net.get_weights()))
        cut_off(client, net, gradient_of(weights))
    with (
        LocalCluster(2, chunk_size_bytes=256, data_dir=tmp_path) as running,
        shardwell.connect(running.target, worker_id="w0") as client,
    ):
        net = opened(client)
        np.testing.assert_array_equal(net.get_weights(min_version=net.next_step), weights)
        assert (client.parameter("net").get_weights() == weights).all(), "it is a member's, too"


def test_what_a_file_kept_is_checked(tmp_path: Path, caplog) -> None:
    """A flipped bit there: the newest weights come, and the worker is warned of two versions."""
    with (
        LocalCluster(1, chunk_size_bytes=256, data_dir=tmp_path) as running,
        shardwell.connect(running.target, worker_id="w0") as client,
    ):
        net = opened(client)
        weights = net.exchange(gradient_of(net.get_weights()))
        cut_off(client, net, gradient_of(weights))
    (kept,) = tmp_path.glob("shard-*/*/*/kept")
    content = bytearray(kept.read_bytes())
    content[200] ^= 1  # in the first chunk's payload
    kept.write_bytes(content)
    with (
        LocalCluster(1, chunk_size_bytes=256, data_dir=tmp_path) as running,
        shardwell.connect(running.target, worker_id="w0") as client,
        caplog.at_level(logging.WARNING, "shardwell"),
    ):
        found = opened(client).get_weights()
    chunk = 256 // 2
    assert (found[:chunk] != weights[:chunk]).any()
    np.testing.assert_array_equal(found[chunk:], weights[chunk:])
    assert "these are of versions 1 to 2" in caplog.text


def test_a_resumed_step_with_another_gradient_learns_what_did_not_count(
    cluster, connect, caplog
) -> None:
    running = cluster(2, chunk_size_bytes=256)
    first = connect(running, "w0")
    net = opened(first)
    one, two = np.full(SIZE, 2.0, np.float32), np.full(SIZE, 4.0, np.float32)
    weights = net.get_weights()
    cut_off(first, net, one)
    first.close()
    resumed = opened(connect(running, "w0"))
    with caplog.at_level(logging.WARNING, "shardwell"):
        found = resumed.exchange(two)
    outcome = resumed.outcome
    assert outcome is not None
    assert (outcome.step, outcome.counted) == (0, "part")
    gradient = two.copy()
    for where in outcome.superseded:
        gradient[where.offset : where.stop] = 2.0
    np.testing.assert_array_equal(found, weights - 0.5 * gradient)
    lost = sum(where.size for where in outcome.superseded)
    assert 0 < lost < SIZE
    assert f"{lost} of {SIZE} elements" in caplog.text
    caplog.clear()
    resumed.exchange(two)
    assert resumed.outcome == shardwell.Outcome(step=1, size=SIZE, version=2)
    assert not caplog.records


def test_the_same_with_put_gradient_and_in_asynchronous_mode(cluster, connect) -> None:
    for mode in ("sync", "async"):
        running = cluster(2, chunk_size_bytes=256)
        first = connect(running, "w0")
        net = opened(first, mode=mode)
        cut_off(first, net, np.full(SIZE, 2.0, np.float32))
        first.close()
        resumed = opened(connect(running, "w0"), mode=mode)
        assert resumed.put_gradient(np.full(SIZE, 4.0, np.float32)) == 0
        assert resumed.outcome is not None
        assert resumed.outcome.counted == "part", mode
        # Of an earlier process all of it: another one must not count at all.
        assert sum(each.size for each in resumed.outcome.superseded) < SIZE


def test_several_workers_of_which_one_is_cut_off(cluster, connect) -> None:
    """Chunks close only where both have contributed; the other one goes on when it is back."""
    running = cluster(2, chunk_size_bytes=256)
    clients = [connect(running, f"w{index}") for index in range(2)]
    nets = [opened(client, worker_count=2) for client in clients]
    weights = nets[0].get_weights()
    together([lambda net=net: net.exchange(gradient_of(weights)) for net in nets])
    weights = nets[0].get_weights(min_version=1)
    steady = clients[1].parameter("net").get_weights_async(min_version=2)
    nets[1].put_gradient(gradient_of(weights))
    cut_off(clients[0], nets[0], gradient_of(weights))
    clients[0].close()
    resumed = opened(connect(running, "w0"), worker_count=2)
    assert resumed.next_step == 1
    np.testing.assert_array_equal(resumed.get_weights(), weights)
    found = resumed.exchange(gradient_of(weights))
    np.testing.assert_array_equal(found, steady.result(timeout=20))


def test_a_worker_in_step_reads_the_newest(cluster, connect) -> None:
    """Of the same name beside the one that trains, too, once that one goes on."""
    running = cluster(2, chunk_size_bytes=256)
    net = opened(connect(running, "w0"))
    for step in range(3):
        weights = net.exchange(np.ones(SIZE, np.float32))
        np.testing.assert_array_equal(net.get_weights(), weights)
        beside = connect(running, "reader").parameter("net")
        np.testing.assert_array_equal(beside.get_weights(min_version=step + 1), weights)


@pytest.mark.parametrize("verb", ["exchange", "put_gradient"])
@pytest.mark.parametrize("shard_count", [1, 2])
def test_a_step_that_was_refused_in_part_ends_with_another_gradient(
    cluster, connect, verb: str, shard_count: int
) -> None:
    client = connect(cluster(shard_count, chunk_size_bytes=256), "w0")
    net = client.parameter("net", size=SIZE, codec="fp32", optimizer=shardwell.Adagrad(0.5))
    net.init(np.zeros(SIZE))
    large = np.ones(SIZE, np.float32)
    large[-5:] = 3e38
    with pytest.raises(
        shardwell.NonFiniteError,
        match=r"this part of it is not counted.*; abandon_step\(\) .*parameter with allow_non_f",
    ):
        getattr(net, verb)(large)
    assert net.next_step == 0
    getattr(net, verb)(np.full(SIZE, 2.0, np.float32))
    assert net.outcome is not None
    assert net.outcome.counted == "part"
    assert Slice(SIZE - 5, 5) not in net.outcome.superseded
    assert net.next_step == 1
    np.testing.assert_allclose(net.get_weights(), -0.5)  # Adagrad's first step, whatever its size
    getattr(net, verb)(np.ones(SIZE, np.float32))
    assert net.outcome.counted == "all"


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_step_whose_pieces_have_left_is_abandoned(cluster, connect, is_finished: bool) -> None:
    """They stay counted, and the outcome says so."""
    size = 4_000_000
    running = cluster(2, chunk_size_bytes=1 << 20)
    net = connect(running, "w0").parameter(
        "net", size=size, codec="fp32", optimizer=shardwell.SGD(learning_rate=1.0)
    )
    net.init(np.zeros(size))
    net.exchange(np.ones(size, np.float32))
    reader = connect(running, "reader").parameter("net")
    gradient = np.full(size, 3.0, np.float32)
    begun = net.begin_exchange(gradient)
    begun.ready(0, size - 100)
    eventually("pieces have left", lambda: (reader.get_weights()[: size // 8] == -4).all())
    gradient[-1] = np.nan
    if is_finished:
        with pytest.raises(shardwell.NonFiniteError):
            begun.finish()
    net.abandon_step()
    weights = net.get_weights(min_version=2)
    for each in net.outcome.superseded:
        assert (weights[each.offset : each.stop] == -4).all()
    assert sum(each.size for each in net.outcome.superseded) == (weights == -4).sum() > 0


def test_a_step_is_abandoned(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=256)
    nets = [opened(connect(running, f"w{index}"), worker_count=2, codec="fp32") for index in (0, 1)]
    before = nets[0].get_weights()
    gradient = np.full(SIZE, 3.0, np.float32)
    nets[1].put_gradient(gradient)
    assert nets[0].abandon_step() == 0
    np.testing.assert_array_equal(nets[0].get_weights(min_version=1), before - 0.5 * gradient)
    assert nets[0].next_step == 1


def test_without_a_refusal_a_live_worker_can_t_change_its_gradient(cluster, connect) -> None:
    client = connect(cluster(1, chunk_size_bytes=256), "w0")
    net = opened(client)
    cut_off(client, net, np.full(SIZE, 2.0, np.float32))
    with pytest.raises(shardwell.StepOrderError, match="another than was counted"):
        net.exchange(np.full(SIZE, 4.0, np.float32))
