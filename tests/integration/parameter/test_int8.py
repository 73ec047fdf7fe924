"""Goal: with int8 all workers have the bits of a replay in NumPy, and each gradient counts whole.

Whatever the verbs, the optimizer, the shards: what rounding takes off is in the next one. Errors in
between are in tests/fault/client/test_int8_errors.py.

Method: the replay of harness.oracles.int8, which knows neither shards nor messages; for optimizers
with state, a parameter in fp32 beside, which is given what shards of the int8 one add up.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.int8_training import RATE, SIZE, Float32, assert_bits
from harness.oracles.int8 import BLOCK, Int8Means, Int8Weights, Int8Worker, sgd
from harness.threads import together
from shardwell.numerics import native
from shardwell.transport import arena


def gradient_of(worker: int, step: int, size: int = SIZE) -> Float32:
    """Blocks of different magnitudes, so that each has a scale of its own."""
    random = np.random.default_rng([worker, step])
    magnitudes = np.exp2(random.integers(-6, 6, -(-size // BLOCK))).repeat(BLOCK)[:size]
    found: Float32 = (random.standard_normal(size) * magnitudes).astype(np.float32)
    return found


def first_weights(size: int = SIZE) -> Float32:
    return np.random.default_rng(7).standard_normal(size).astype(np.float32)


def opened(
    client: shardwell.Client,
    name: str = "net",
    *,
    optimizer: shardwell.Optimizer | None = None,
    codec: str = "int8",
    size: int = SIZE,
    **options: Any,
) -> shardwell.Parameter[Float32]:
    net = client.parameter(
        name,
        size=size,
        optimizer=optimizer or shardwell.SGD(learning_rate=RATE),
        codec=codec,
        **options,
    )
    if not isinstance(optimizer, shardwell.Average):
        net.init(first_weights(size))
    return net


@pytest.fixture(params=["native", "NumPy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that is computed in this process."""
    if request.param == "NumPy":
        monkeypatch.setattr(native, "LIBRARY", None)


# Bits.


def steps_of_both(nets: list[Any]) -> None:
    """Two workers' steps, of which both count, with the bits of the replay."""
    workers, weights = [Int8Worker(SIZE) for _ in nets], Int8Weights(first_weights())
    for step in range(5):
        sent = [each.sent(gradient_of(rank, step)) for rank, each in enumerate(workers)]
        mean = (sent[0] + sent[1]) / np.float32(2)
        expected = weights.update(sgd(RATE)(weights.weights, mean))
        found = together(
            [
                lambda rank=rank, net=net: net.exchange(gradient_of(rank, step))  # noqa: B023
                for rank, net in enumerate(nets)
            ]
        )
        for net, worker, each in zip(nets, workers, found, strict=True):
            assert_bits(each, expected)
            assert_bits(net.residual, worker.residual)
            assert (net.version, net.outcome.counted) == (step + 1, "all")


@pytest.mark.same_host
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shard_count", [1, 3])
@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("chunk_size_bytes", [256, 2**20])
def test_two_workers_have_the_bits_of_a_replay(
    cluster, connect, monkeypatch, shard_count: int, same_host: bool, chunk_size_bytes: int
) -> None:
    monkeypatch.setattr(arena, "SHARED_BYTES_MIN", 1)
    running = cluster(shard_count, chunk_size_bytes=chunk_size_bytes)
    nets = [
        opened(connect(running, f"w{rank}", same_host=same_host), worker_count=2)
        for rank in range(2)
    ]
    steps_of_both(nets)


def whole(net: Any, gradient: Float32, **options: Any) -> Float32:
    return net.exchange(gradient, **options)


def in_background(net: Any, gradient: Float32, **options: Any) -> Float32:
    return net.exchange_async(gradient, **options).result(60)


def put_and_got(net: Any, gradient: Float32, **options: Any) -> Float32:
    return net.get_weights(min_version=net.put_gradient(gradient, **options) + 1)


def in_pieces(net: Any, gradient: Float32, **options: Any) -> Float32:
    """Of which the last one is announced by `finish`."""
    begun = net.begin_exchange(gradient, **options)
    for start in (3 * BLOCK, 0, BLOCK):
        begun.ready(start, start + BLOCK)
    return begun.finish()


def as_float64(net: Any, gradient: Float32, **options: Any) -> Float32:
    return net.exchange(gradient.astype(np.float64), **options)


def in_place(net: Any, gradient: Float32, **options: Any) -> Float32:
    out = np.full(SIZE, np.nan, np.float32)
    assert net.exchange(gradient, out=out, **options) is out
    return out


@pytest.mark.parametrize(
    "give", [whole, in_background, put_and_got, in_pieces, as_float64, in_place]
)
def test_every_verb_has_the_same_bits(cluster, connect, give) -> None:
    net = opened(connect(cluster(3), "w0"))
    worker, weights = Int8Worker(SIZE), Int8Weights(first_weights())
    for step in range(4):
        gradient = gradient_of(0, step)
        found = give(net, gradient.copy())
        sent = worker.sent(gradient)
        assert_bits(found, weights.update(sgd(RATE)(weights.weights, sent)))
        assert_bits(net.residual, worker.residual)


def test_tensors_have_the_bits_of_their_vector(cluster, connect) -> None:
    """Also where they lie apart, and none begins with a block."""
    shapes = {"a": (50, 40), "b": (7,), "c": (3, 1000), "d": (SIZE - 5007,)}
    layout = shardwell.TensorLayout.of(shapes)
    client = connect(cluster(3), "w0")
    net = client.parameter(
        "net", tensors=shapes, optimizer=shardwell.SGD(learning_rate=RATE), codec="int8"
    )

    def apart(values: Float32) -> dict[str, Float32]:
        return {t.name: values[t.offset : t.stop].reshape(t.shape).copy() for t in layout}

    def flat(values: dict[str, Float32]) -> Float32:
        return np.concatenate([values[t.name].ravel() for t in layout])

    net.init(apart(first_weights()))
    worker, weights = Int8Worker(SIZE), Int8Weights(first_weights())
    for step in range(4):
        sent = worker.sent(gradient_of(0, step))
        expected = weights.update(sgd(RATE)(weights.weights, sent))
        assert_bits(flat(net.exchange(apart(gradient_of(0, step)))), expected)
        assert_bits(flat(net.get_weights(out=apart(np.zeros(SIZE, np.float32)))), expected)
    assert_bits(net.residual, worker.residual)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("shard_count", [1, 3])
def test_sizes_around_a_block(cluster, connect, size: int, shard_count: int) -> None:
    """Some shards own nothing."""
    net = opened(connect(cluster(shard_count), "w0"), size=size)
    worker, weights = Int8Worker(size), Int8Weights(first_weights(size))
    assert [where.offset % BLOCK for where in net.slices if where.size] == [0] * min(
        -(-size // BLOCK), shard_count
    )
    for step in range(3):
        sent = worker.sent(gradient_of(0, step, size))
        expected = weights.update(sgd(RATE)(weights.weights, sent))
        assert_bits(net.exchange(gradient_of(0, step, size)), expected)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("shard_count", [1, 3])
def test_an_average_loses_nothing(cluster, connect, mode: str, shard_count: int) -> None:
    count = 2 if mode == "sync" else 1
    running = cluster(shard_count)
    average = shardwell.Average()
    nets = [
        opened(connect(running, f"w{rank}"), optimizer=average, worker_count=2, mode=mode)
        for rank in range(count)
    ]
    workers, means = [Int8Worker(SIZE) for _ in nets], Int8Means(SIZE)
    given = np.zeros(SIZE, np.float64)
    taken = np.zeros(SIZE, np.float64)
    for step in range(6):
        offered = [gradient_of(rank, step) for rank in range(count)]
        sent = [each.sent(offered[rank]) for rank, each in enumerate(workers)]
        mean = (sent[0] + sent[-1]) / np.float32(2) if count == 2 else sent[0]
        expected = means.update(mean)
        found = together(
            [
                lambda rank=rank, net=net: net.exchange(offered[rank])  # noqa: B023
                for rank, net in enumerate(nets)
            ]
        )
        for each in found:
            assert_bits(each, expected)
        assert_bits(connect(running, f"reader-{step}").parameter("net").get_weights(), expected)
        given += np.mean(offered, axis=0, dtype=np.float64)
        taken += expected
    left = np.mean([net.residual for net in nets], axis=0, dtype=np.float64) + means.rest
    np.testing.assert_allclose(taken + left, given, atol=1e-3 * np.abs(given).max() / 127)


def none(net: Any) -> Any:
    return net.exchange(None)


def no_samples(net: Any) -> Any:
    return net.exchange(gradient_of(0, 9), sample_count=0)


def no_samples_put(net: Any) -> Any:
    return net.get_weights(min_version=net.put_gradient(gradient_of(0, 9), sample_count=0) + 1)


@pytest.mark.parametrize("give", [none, no_samples, no_samples_put])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"worker_count": 2},
        {"worker_count": 2, "optimizer": shardwell.Average(clip_value=0.7, clip_norm=1e9)},
        {"worker_count": 2, "min_contributors": 2},
        {"members": shardwell.Elastic(min_count=2)},
    ],
    ids=str,
)
def test_an_average_of_no_samples_is_zeros(cluster, connect, options: Any, give: Any) -> None:
    """As with any codec; what rounding has left is in the next mean that has samples."""
    running, options = cluster(2), {"optimizer": shardwell.Average(clip_value=0.7), **options}
    count = 2 if "members" in options else options.get("worker_count", 1)
    nets = [opened(connect(running, f"w{rank}"), **options) for rank in range(count)]
    worker, means = Int8Worker(SIZE), Int8Means(SIZE)
    for step in range(4):
        if step % 2:
            calls = [lambda net=net: give(net) for net in nets]
            expected = np.zeros(SIZE, np.float32)
        else:
            given = gradient_of(0, step)
            calls = [lambda net=net, given=given: net.exchange(given) for net in nets]
            expected = means.update(np.clip(worker.sent(given), -0.7, 0.7))
            assert means.rest.any()
        for found in together(calls):
            assert_bits(found, expected)
    assert_bits(connect(running, "reader").parameter("net").get_weights(), expected)


OPTIMIZERS = {
    "momentum": shardwell.SGD(RATE, momentum=0.9),
    "nesterov": shardwell.SGD(RATE, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": shardwell.AdamW(0.01),
    "adagrad": shardwell.Adagrad(0.01),
    "clip_value": shardwell.SGD(RATE, clip_value=0.7),
    "clip_norm": shardwell.SGD(RATE, momentum=0.5, clip_norm=3.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shard_count", [1, 3])
def test_weights_are_those_of_what_was_sent(cluster, connect, name, shard_count) -> None:
    """Bit by bit: an fp32 parameter beside counts what is read of each contribution."""
    running = cluster(shard_count)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    both = [
        [
            opened(each, codec, codec=codec, optimizer=OPTIMIZERS[name], worker_count=2)
            for codec in ("int8", "fp32")
        ]
        for each in clients
    ]
    workers, weights = [Int8Worker(SIZE) for _ in clients], Int8Weights(first_weights())
    for step in range(6):
        options = {"learning_rate": 0.02} if step == 3 else {}
        calls = []
        for rank, (net, beside) in enumerate(both):
            gradient = gradient_of(rank, step)
            if (rank, step) == (1, 2) or step == 4:  # one worker has none, then none has
                calls += [
                    lambda net=net: net.exchange(None),
                    lambda net=beside: net.exchange(None),
                ]
                continue
            sent = workers[rank].sent(gradient)
            options["sample_count"] = rank + 1
            calls += [
                lambda net=net, g=gradient, o=dict(options): net.exchange(g, **o),
                lambda net=beside, g=sent, o=dict(options): net.exchange(g, **o),
            ]
        found = together(calls)
        image = weights.image if step == 4 else weights.update(found[1])
        for rank, (net, _) in enumerate(both):
            assert_bits(found[2 * rank], image)
            assert_bits(found[2 * rank + 1], found[1])
            assert_bits(net.residual, workers[rank].residual)


def test_one_worker_clips_what_it_is_given_and_not_what_was_left(cluster, connect) -> None:
    client = connect(cluster(3), "w0")
    net = opened(client, optimizer=shardwell.SGD(RATE, clip_norm=3.0))
    worker, weights = Int8Worker(SIZE), Int8Weights(first_weights())
    for step in range(4):
        gradient = gradient_of(0, step)
        norm = float(np.sqrt((gradient.astype(np.float64) ** 2).sum()))
        assert norm > 3.0
        sent = worker.sent(gradient * np.float32(3.0 / norm))
        expected = weights.update(sgd(RATE)(weights.weights, sent))
        # The factor's last bit depends on how squares are summed.
        np.testing.assert_allclose(net.exchange(gradient), expected, atol=1e-5)
        np.testing.assert_allclose(net.residual, worker.residual, atol=1e-5)
        assert np.abs(worker.residual).max() > 1e-4


@pytest.mark.parametrize("sample_count", [0, 1, 5])
def test_an_asynchronous_gradient_counts_whatever_its_weight(
    cluster, connect, sample_count: int
) -> None:
    """So what rounding took off it is kept, too."""
    net = opened(connect(cluster(2), "w0"), mode="async", worker_count=4)
    worker, weights = Int8Worker(SIZE), Int8Weights(first_weights())
    for step in range(4):
        sent = worker.sent(gradient_of(0, step))
        expected = weights.update(sgd(RATE)(weights.weights, sent))
        assert_bits(net.exchange(gradient_of(0, step), sample_count=sample_count), expected)
        assert_bits(net.residual, worker.residual)


def test_a_gradient_of_no_samples_neither_takes_nor_leaves_anything(cluster, connect) -> None:
    net = opened(connect(cluster(2), "w0"))
    worker, weights = Int8Worker(SIZE), Int8Weights(first_weights())
    expected = weights.update(sgd(RATE)(weights.weights, worker.sent(gradient_of(0, 0))))
    assert_bits(net.exchange(gradient_of(0, 0)), expected)
    assert_bits(net.exchange(gradient_of(0, 1), sample_count=0), expected)
    assert_bits(net.residual, worker.residual)


def test_a_quorum_of_all_has_the_same_bits(cluster, connect) -> None:
    """Where each step begins with another chunk."""
    running = cluster(2)
    nets = [
        opened(connect(running, f"w{rank}"), worker_count=2, min_contributors=2)
        for rank in range(2)
    ]
    steps_of_both(nets)


# Readers.


class Training:
    """A worker that goes on, and what all have of each version."""

    def __init__(self, client: shardwell.Client, **options: Any) -> None:
        self.net = opened(client, **options)
        self._worker, self._weights = Int8Worker(SIZE), Int8Weights(first_weights())
        self.images = [first_weights()]

    def step(self) -> None:
        sent = self._worker.sent(gradient_of(0, self.net.next_step))
        update = self._weights.update
        self.images.append(update(sgd(RATE)(self._weights.weights, sent)).copy())
        self.net.exchange(gradient_of(0, self.net.next_step))


@pytest.mark.parametrize("shard_count", [1, 3])
def test_readers_have_the_same_bits_whatever_they_missed(cluster, connect, shard_count) -> None:
    running = cluster(shard_count)
    training = Training(connect(running, "w0"))
    clients = {every: connect(running, f"r{every}") for every in range(1, 6)}
    readers = {every: client.parameter("net") for every, client in clients.items()}
    for every, reader in readers.items():
        assert_bits(reader.get_weights(), first_weights())
        assert clients[every].traffic.received_bytes > 4 * SIZE
    before = {every: client.traffic.received_bytes for every, client in clients.items()}
    for _ in range(60):
        training.step()
        version = training.net.next_step
        for every, reader in readers.items():
            if version % every == 0:
                assert_bits(reader.get_weights(), training.images[version])
                assert reader.version == version
        if version % 7 == 0:  # nothing is new
            assert_bits(readers[1].get_weights(), training.images[version])
    read = {
        every: (client.traffic.received_bytes - before[every]) * every / 60 / SIZE
        for every, client in clients.items()
    }
    for every in (1, 2, 3):  # a byte an element for each version
        assert every * 1 < read[every] < every * 1.1
    for every in (4, 5):  # the image as it is
        assert 4 < read[every] < 4.3


def test_first_weights_are_exact_for_all(cluster, connect) -> None:
    running = cluster(3)
    net = opened(connect(running, "w0"))
    assert_bits(net.get_weights(), first_weights())
    assert_bits(opened(connect(running, "w1")).get_weights(), first_weights())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_reads_beside_exchanges_have_the_bits_of_a_version(cluster, connect, mode: str) -> None:
    """Whatever comes in between, they share what the worker holds."""
    running = cluster(3)
    training = Training(connect(running, "w0"), mode=mode, worker_count=1)
    other = connect(running, "reader").parameter("net")
    ended = threading.Event()
    found: list[tuple[int, Float32]] = []

    def read(net: Any) -> None:
        while not ended.is_set():
            futures = [net.get_weights_async() for _ in range(4)]
            found.extend((0, each.result(60)) for each in futures)

    def train() -> None:
        try:
            for _ in range(40):
                training.step()
        finally:
            ended.set()

    together([train, lambda: read(training.net), lambda: read(other)])
    # A read is of one version in each chunk, of which each shard has two.
    stacked = np.stack(training.images)
    assert len(found) > 20
    for _, weights in found:
        for start in range(0, SIZE, BLOCK):
            part = slice(start, start + BLOCK)
            assert (stacked[:, part] == weights[part]).all(axis=1).any()
    for net in (training.net, other):
        assert_bits(net.get_weights(), training.images[-1])


def test_asynchronous_workers_have_the_bits_of_their_order(cluster, connect) -> None:
    """One after the other, each some steps behind what it holds."""
    running = cluster(2)
    nets = [opened(connect(running, f"w{rank}"), mode="async", worker_count=3) for rank in range(3)]
    workers, weights = [Int8Worker(SIZE) for _ in nets], Int8Weights(first_weights())
    order = np.random.default_rng(1).integers(0, 3, 40)
    for rank in order:
        gradient = gradient_of(int(rank), nets[rank].next_step)
        sent = workers[rank].sent(gradient)
        expected = weights.update(sgd(RATE)(weights.weights, sent))
        assert_bits(nets[rank].exchange(gradient), expected)
    for net, worker in zip(nets, workers, strict=True):
        assert_bits(net.get_weights(), expected)
        assert_bits(net.residual, worker.residual)


# A worker's residual.


def test_a_worker_that_keeps_its_residual_goes_on_as_if_nothing_had_been(cluster, connect) -> None:
    running = cluster(3)
    residual = None
    worker, weights = Int8Worker(SIZE), Int8Weights(first_weights())
    for step in range(4):
        with shardwell.connect(running.target, worker_id="w0") as client:
            net = opened(client)
            assert net.residual is None
            net.load_residual(residual)
            sent = worker.sent(gradient_of(0, step))
            expected = weights.update(sgd(RATE)(weights.weights, sent))
            assert_bits(net.exchange(gradient_of(0, step)), expected)
            residual = net.residual
            residual[:] += 0  # a copy, which may be changed
            assert_bits(residual, worker.residual)


@pytest.mark.parametrize(
    "residual",
    [
        np.zeros(SIZE - 1, np.float32),
        np.zeros((SIZE, 1), np.float32),
        np.full(SIZE, np.nan),
        np.full(SIZE, 1e39),
        "abc",
    ],
    ids=["short", "two axes", "NaN", "too large", "text"],
)
def test_a_residual_that_is_none_is_refused(cluster, connect, residual: Any) -> None:
    net = opened(connect(cluster(1), "w0"))
    with pytest.raises(shardwell.ArgumentError, match="residual of parameter 'net'"):
        net.load_residual(residual)
    assert net.residual is None


def test_only_int8_has_a_residual(cluster, connect) -> None:
    net = opened(connect(cluster(1), "w0"), codec="fp16")
    net.exchange(gradient_of(0, 0))
    assert net.residual is None
    net.load_residual(None)
    with pytest.raises(shardwell.ArgumentError, match="codec fp16, which keeps no residual"):
        net.load_residual(np.zeros(SIZE, np.float32))


def test_sums_of_what_counted_are_sums_of_what_was_given(cluster, connect) -> None:
    """Less what the worker still has: of a thousandth of a rounding step, given many times."""
    net = opened(connect(cluster(2), "w0"), optimizer=shardwell.SGD(learning_rate=1.0))
    given = np.full(SIZE, 1e-5, np.float32)
    given[::BLOCK] = 1.0
    for _ in range(400):
        net.exchange(given)
    total = net.get_weights().astype(np.float64) - first_weights()
    error = total + 400 * given.astype(np.float64)
    # Half a step of a gradient, half one of a change, and what float32 loses of sums.
    assert np.abs(error).max() < 2 * 0.5 / 127 + 400 * 2.0**-22
    assert np.abs(error - net.residual).max() < 400 * 2.0**-22 + 1e-4


# What refuses it.


def test_who_can_not_have_it_says_so(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    with pytest.raises(shardwell.ArgumentError, match=r"codec='int8'.*allow_non_finite"):
        opened(client, allow_non_finite=True)
    with pytest.raises(shardwell.ArgumentError, match=r"table 't': codec int8 is of parameters"):
        client.table(
            "t", row_count=9, dim=2, optimizer=shardwell.SGD(learning_rate=1.0), codec="int8"
        )
    with pytest.raises(shardwell.ArgumentError, match=r"codec must be one of fp32, fp16, bf16;"):
        shardwell.join_group("g", rank=0, size=1, rendezvous="localhost:1", codec="int8")
    with pytest.raises(shardwell.ArgumentError, match="codec"):
        opened(client, codec="int8+lz4")


def test_another_codec_is_another_parameter(cluster, connect) -> None:
    running = cluster(1)
    opened(connect(running, "w0"))
    with pytest.raises(shardwell.SpecMismatchError, match=r"codec.*int8"):
        opened(connect(running, "w1"), codec="fp16")
