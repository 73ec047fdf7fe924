"""Goal: however many threads work on a step, the bits are the same, and nothing counts twice.

Method: workers and shards with one thread and with several do the same steps, of many chunks; then
gradients that are refused in the middle, where chunks behind may have been counted.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.threads import together
from shardwell.parameter.exchange import Transfer
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import messages as framing

CHUNK_BYTES = 2**17
SIZE = 20 * CHUNK_BYTES // 2 + 17
"""With fp16, 20 chunks and a short one; each is large enough for shared memory."""
STEP_COUNT = 3


@pytest.fixture(autouse=True)
def all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For shards of this process; a test says otherwise."""
    monkeypatch.setenv("SHARDWELL_THREADS", "4")


def gradient(worker: int, step: int) -> np.ndarray:
    return np.random.default_rng(100 * worker + step).standard_normal(SIZE).astype("f4")


def core_threads() -> int:
    return sum(each.name == "shardwell-core" for each in threading.enumerate())


@pytest.mark.parametrize("codec", ["fp16", "fp32", "fp16+lz4"])
@pytest.mark.parametrize("optimizer", [shardwell.SGD(0.5, momentum=0.5), shardwell.Adam(0.25)])
@pytest.mark.parametrize("shard_count", [1, 3])
@pytest.mark.parametrize("same_host", [True, False])
def test_threads_of_a_parameter_give_the_same_bits(
    cluster, connect, monkeypatch, codec, optimizer, shard_count, same_host
):
    found = []
    for count in (1, 4):
        monkeypatch.setenv("SHARDWELL_THREADS", str(count))
        running = cluster(shard_count, chunk_size_bytes=CHUNK_BYTES)
        clients = [connect(running, f"w{index}", same_host=same_host) for index in range(2)]
        nets = [
            client.parameter("net", size=SIZE, optimizer=optimizer, codec=codec, worker_count=2)
            for client in clients
        ]
        nets[0].init(np.zeros(SIZE, np.float32))
        for step in range(STEP_COUNT):
            # One after the other, as sums are in the order of arrival.
            nets[1].put_gradient(gradient(1, step))
            weights = nets[0].exchange(gradient(0, step))
        found.append((weights, nets[1].get_weights(min_version=STEP_COUNT)))
        assert nets[0].outcome is not None
        assert nets[0].outcome.step == STEP_COUNT - 1
    for one, four in zip(*found, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), four.view(np.uint32))


@pytest.mark.same_host
def test_threads_work_beside(cluster, connect) -> None:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    client = connect(running, "w0", threads=1)
    net = client.parameter("net", size=SIZE, optimizer=shardwell.SGD(0.5))
    net.init(np.zeros(SIZE, np.float32))
    for step in range(STEP_COUNT):
        net.exchange(gradient(0, step))
    of_shard = core_threads()
    assert 1 <= of_shard <= 3
    another = connect(running, "reader", threads=3).parameter("net")
    another.get_weights()
    assert core_threads() <= of_shard + 2


@pytest.mark.parametrize("threads", [1, 3])
def test_a_gradient_that_is_not_finite_does_not_leave(cluster, connect, threads) -> None:
    """The first value is named, whichever thread found which."""
    client = connect(cluster(2, chunk_size_bytes=CHUNK_BYTES), "w0", threads=threads)
    net = client.parameter("net", size=SIZE, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(SIZE, np.float32))
    bad = gradient(0, 0)
    first = CHUNK_BYTES + 5
    bad[[first, SIZE // 2 + 3, SIZE - 1]] = np.nan
    with pytest.raises(shardwell.NonFiniteError) as caught:
        net.exchange(bad)
    assert caught.value.element_index == first
    assert sum(each.counted_chunk_count for s in client.status() for each in s.parameters) == 0
    np.testing.assert_array_equal(net.exchange(np.ones(SIZE, np.float32)), -1.0)


@pytest.mark.parametrize("with_files", [False, True])
def test_a_chunk_that_is_refused_in_the_middle(cluster, connect, tmp_path: Path, with_files):
    """Of the rest some are counted; another gradient ends the step, each chunk once."""
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES, data_dir=tmp_path if with_files else None)
    client = connect(running, "w0")
    net = client.parameter("net", size=SIZE, optimizer=shardwell.Adam(0.5))
    net.init(np.zeros(SIZE, np.float32))
    too_large = np.ones(SIZE, np.float32)
    too_large[SIZE // 2] = 3e38  # its square is beyond float32
    with pytest.raises(shardwell.NonFiniteError):
        net.exchange(too_large)
    net.exchange(np.ones(SIZE, np.float32))
    (status,) = (each for s in client.status() for each in s.parameters)
    assert (status.version_min, status.version_max) == (1, 1)
    assert status.counted_chunk_count == 21
    assert net.next_step == 1


@pytest.mark.same_host
def test_a_message_with_a_chunk_twice_counts_it_once(cluster, connect, monkeypatch) -> None:
    """As no client of ours sends it."""
    client = connect(cluster(1, chunk_size_bytes=CHUNK_BYTES), "w0")
    net = client.parameter("net", size=SIZE, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(SIZE, np.float32))
    ones = np.ones(SIZE, np.float32)
    net.exchange(ones)  # it has its seat
    made = Transfer._messages

    def twice(*args, **kwargs):
        for message in made(*args, **kwargs):
            headers = [each for each, *_ in framing.parse_all(pb.ExchangeRequest, message)]
            sent = [each.SerializeToString() for each in headers]
            yield framing.joined(pb.ExchangeRequest, [*sent[:2], *sent[1:]])

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "_messages", twice)
        with pytest.raises(shardwell.CorruptChunkError):
            net.exchange(ones, timeout_s=2.0)
    np.testing.assert_array_equal(net.exchange(ones), -2.0)
    (status,) = (each for s in client.status() for each in s.parameters)
    assert (status.version_min, status.version_max) == (2, 2)
    assert status.counted_chunk_count == 2 * 21


def test_workers_that_wait_for_each_other(cluster, connect) -> None:
    """Each worker's answers wait for the other's chunks, on more threads than cores."""
    running = cluster(2, chunk_size_bytes=CHUNK_BYTES)
    nets = []
    for index in range(4):
        client = connect(running, f"w{index}", threads=4)
        nets.append(
            client.parameter("net", size=SIZE, optimizer=shardwell.SGD(1.0), worker_count=4)
        )
    nets[0].init(np.zeros(SIZE, np.float32))
    ones = np.ones(SIZE, np.float32)
    for step in range(STEP_COUNT):
        found = together([lambda net=net: net.exchange(ones) for net in nets])
        for weights in found:
            np.testing.assert_array_equal(weights, -(step + 1.0))


@pytest.mark.parametrize("wrong", [0, -1, 257, 1.5, True, "4"])
def test_no_number_of_threads(cluster, wrong) -> None:
    with pytest.raises(shardwell.ArgumentError, match="threads must be 1 to 256; got"):
        shardwell.connect(cluster(1).target, threads=wrong)
