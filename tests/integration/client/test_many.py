"""Many at once: parameters, threads, clients, chunks in both directions of a narrow wire."""

from __future__ import annotations

import numpy as np

import shardwell
from harness.oracles.parameter import integer_gradient
from harness.threads import together

SGD = shardwell.SGD(learning_rate=0.5)


def test_several_parameters_from_several_threads(cluster, connect) -> None:
    """One client per worker, one thread per parameter, each in its own rhythm."""
    running = cluster(3, chunk_size_bytes=64)
    sizes = {"a": 1, "b": 50, "c": 333, "d": 1000}
    clients = [connect(running, f"w{index}") for index in (0, 1)]
    models = {
        (name, index): client.parameter(name, size=size, optimizer=SGD, worker_count=2)
        for name, size in sizes.items()
        for index, client in enumerate(clients)
    }

    def train(name: str, index: int) -> np.ndarray:
        model, size = models[name, index], sizes[name]
        model.init(np.zeros(size, np.float32))
        for step in range(5):
            weights = model.exchange(integer_gradient(index, step, size))
        return weights

    keys = list(models)
    results = together([lambda key=key: train(*key) for key in keys])
    for (name, _), weights in zip(keys, results, strict=True):
        total = sum(integer_gradient(i, s, sizes[name]) for i in (0, 1) for s in range(5))
        np.testing.assert_array_equal(weights, -0.25 * total)


def test_threads_of_one_parameter_take_turns(cluster, connect) -> None:
    """Every call is a step of its own; readers in between see whole steps or parts, never junk."""
    model = connect(cluster(2, chunk_size_bytes=64), "w0").parameter("m", size=200, optimizer=SGD)
    model.init(np.zeros(200, np.float32))
    calls_per_thread, thread_count = 5, 4

    def work() -> None:
        for _ in range(calls_per_thread):
            model.put_gradient(np.full(200, 2, np.float32))
            assert set(np.unique(model.get_weights())) <= set(range(-20, 0))

    together([work] * thread_count)
    assert model.next_step == calls_per_thread * thread_count
    np.testing.assert_array_equal(model.get_weights(), -calls_per_thread * thread_count)


def test_twenty_clients_train_one_parameter(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    client_count, size = 20, 150

    def work(index: int) -> np.ndarray:
        model = connect(running, f"w{index}").parameter(
            "m", size=size, optimizer=shardwell.Average(), worker_count=client_count
        )
        for step in range(2):
            weights = model.exchange(
                integer_gradient(index, step, size), sample_count=int(index in (3, 7))
            )
        return weights

    expected = (integer_gradient(3, 1, size) + integer_gradient(7, 1, size)) / 2
    for weights in together([lambda i=i: work(i) for i in range(client_count)]):
        np.testing.assert_array_equal(weights, expected)


def test_readers_among_writers(cluster, connect) -> None:
    """What a reader gets is one version per chunk: all elements of a chunk agree."""
    running = cluster(2, chunk_size_bytes=64)
    writer = connect(running, "writer").parameter("m", size=256, optimizer=SGD)
    writer.init(np.zeros(256, np.float32))
    readers = [connect(running, f"r{n}").parameter("m", size=256, optimizer=SGD) for n in range(3)]

    def write() -> None:
        for _ in range(10):
            writer.exchange(np.full(256, 2, np.float32))

    def read(model: shardwell.Parameter) -> None:
        while model.version < 10:
            chunks = model.get_weights().reshape(-1, 32)
            assert (chunks == chunks[:, :1]).all()
            assert (chunks[:, 0] <= -model.version).all()

    together([write, *(lambda model=model: read(model) for model in readers)])


def test_more_than_the_flow_control_windows_hold(cluster, connect) -> None:
    """Megabytes each way, two parameters at once, while no thread reads the other's stream."""
    running = cluster(2, chunk_size_bytes=64 * 1024)
    size = 600_000
    clients = [connect(running, f"w{index}") for index in (0, 1)]
    models = [
        [
            client.parameter(name, size=size, optimizer=shardwell.Average(), worker_count=2)
            for client in clients
        ]
        for name in ("a", "b")
    ]

    def work(name: int, index: int) -> np.ndarray:
        for step in range(2):
            weights = models[name][index].exchange(np.full(size, step + index, np.float32))
        return weights

    calls = [lambda n=n, i=i: work(n, i) for n in (0, 1) for i in (0, 1)]
    for weights in together(calls):
        np.testing.assert_array_equal(weights, 1.5)


def test_clients_come_and_go(cluster) -> None:
    running = cluster(2)
    for round_ in range(15):
        with shardwell.connect(running.target, worker_id="w0") as client:
            model = client.parameter("m", size=100, optimizer=SGD)
            model.init(np.zeros(100, np.float32))
            np.testing.assert_array_equal(
                model.exchange(np.ones(100, np.float32)), -0.5 * (round_ + 1)
            )


def test_clusters_come_and_go(cluster) -> None:
    for _ in range(5):
        running = cluster(2)
        with shardwell.connect(running.target, worker_id="w0") as client:
            model = client.parameter("m", size=10, optimizer=SGD)
            model.init(np.zeros(10, np.float32))
            model.exchange(np.ones(10, np.float32))
        running.close()
        running.close()
