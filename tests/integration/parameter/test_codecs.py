"""Every codec end to end: what the wire may cost in precision, and what it must not.

Oracles: the bounds that the codecs state (fp16: 2^-11 relative, 2^-39 of the peak;
bf16: 2^-8 relative; fp32: exact), and plain NumPy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.data.nans import CANONICAL, ODD_NANS, nan_bits
from harness.oracles.optimizers import Oracle

CODECS = ["fp32", "fp16", "bf16", "fp32+lz4", "fp16+lz4", "bf16+lz4"]
RELATIVE = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}
OF_PEAK = {"fp32": 0.0, "fp16": 2.0**-39, "bf16": 0.0}


def _bound(codec: str, values: np.ndarray) -> np.ndarray:
    """What two conversions, gradient in and weights out, may cost."""
    name = codec.removesuffix("+lz4")
    magnitudes = np.abs(values.astype(np.float64))
    return 2.1 * (RELATIVE[name] * magnitudes + OF_PEAK[name] * magnitudes.max())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 3e38])
def test_an_average_comes_back_within_the_bound(cluster, connect, codec, scale) -> None:
    size = 1001
    model = connect(cluster(3), "w0").parameter(
        "average", size=size, optimizer=shardwell.Average(), codec=codec
    )
    values = (np.random.default_rng(2).uniform(-1, 1, size) * scale).astype(np.float32)
    for gradient in (values, np.sort(values), np.zeros(size, np.float32), values[::-1]):
        weights = model.exchange(gradient)
        error = np.abs(weights.astype(np.float64) - gradient)
        assert (error <= _bound(codec, gradient)).all(), error.max()


@pytest.mark.parametrize("codec", CODECS)
def test_exactly_representable_values_are_exact(cluster, connect, codec) -> None:
    size = 3001
    model = connect(cluster(2), "w0").parameter(
        "model", size=size, optimizer=shardwell.SGD(learning_rate=1.0), codec=codec
    )
    first = np.random.default_rng(3).integers(-60, 60, size).astype(np.float32)
    gradient = np.random.default_rng(4).integers(-60, 60, size).astype(np.float32)
    model.init(first)
    np.testing.assert_array_equal(model.exchange(gradient), first - gradient)
    np.testing.assert_array_equal(model.get_weights(), first - gradient)


@pytest.mark.parametrize("codec", ["fp16", "fp16+lz4"])
@pytest.mark.parametrize("small", [2e-8, 1e-9])
def test_small_gradients_beside_large_ones_move_their_weights(
    cluster, connect, codec, small
) -> None:
    """Of AdamW with its own epsilon: each by what it moves in float64, to a thousandth."""
    size, rule = 3000, shardwell.AdamW(learning_rate=0.01, weight_decay=0.0)
    model = connect(cluster(2), "w0").parameter("model", size=size, optimizer=rule, codec=codec)
    model.init(np.zeros(size, np.float32))
    gradient = np.where(np.arange(size) % 100, small, 0.05).astype(np.float32)
    oracle = Oracle(rule, np.zeros(size, np.float32))
    for _ in range(10):
        weights = model.exchange(gradient)
        oracle.update(gradient, 0.01)
    np.testing.assert_allclose(weights, oracle.weights, rtol=1e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_masters_stay_float32(cluster, connect, codec) -> None:
    """A thousandth added a hundred times to 64 vanishes in fp16 and bf16, not in the masters."""
    model = connect(cluster(2), "w0").parameter(
        "model", size=10, optimizer=shardwell.SGD(learning_rate=1.0), codec=codec
    )
    model.init(np.full(10, 64, np.float32))
    for _ in range(64):
        weights = model.exchange(np.full(10, -(2.0**-10), np.float32))
    np.testing.assert_allclose(weights, 64 + 2.0**-4, atol=2 * 64 * RELATIVE[codec[:4]] + 1e-9)
    status = model.exchange(np.full(10, -1, np.float32))
    np.testing.assert_allclose(status, 65 + 2.0**-4, atol=2 * 65 * RELATIVE[codec[:4]] + 1e-9)


@pytest.mark.parametrize("codec", ["fp32+lz4", "fp16+lz4", "bf16+lz4"])
def test_compression_sends_less(cluster, connect, codec) -> None:
    running = cluster(1, chunk_size_bytes=64 * 1024)
    sent = {}
    for name in (codec, codec.removesuffix("+lz4")):
        client = connect(running, name.replace("+", "-"))
        model = client.parameter(
            name.replace("+", "-"), size=50_000, optimizer=shardwell.Average(), codec=name
        )
        weights = model.exchange(np.tile(np.arange(10, dtype=np.float32), 5000))
        np.testing.assert_array_equal(weights, np.tile(np.arange(10, dtype=np.float32), 5000))
        sent[name] = client.traffic.sent_bytes + client.traffic.received_bytes
    assert sent[codec] < sent[codec.removesuffix("+lz4")] / 4


@pytest.mark.parametrize("codec", CODECS)
def test_what_does_not_compress_is_sent_as_it_is(cluster, connect, codec) -> None:
    model = connect(cluster(1, chunk_size_bytes=4096), "w0").parameter(
        "noise", size=5000, optimizer=shardwell.Average(), codec=codec
    )
    noise = np.random.default_rng(7).standard_normal(5000).astype(np.float32)
    error = np.abs(model.exchange(noise).astype(np.float64) - noise)
    assert (error <= _bound(codec, noise)).all()


@pytest.mark.parametrize("codec", CODECS)
def test_non_finite_values_pass_where_they_are_allowed(cluster, connect, codec) -> None:
    model = connect(cluster(2), "w0").parameter(
        "open", size=300, optimizer=shardwell.Average(), codec=codec, allow_non_finite=True
    )
    gradient = np.arange(300, dtype=np.float32) % 64
    gradient[[5, 250]] = np.nan
    gradient[[6, 251]] = np.inf
    gradient[[7, 252]] = -np.inf
    np.testing.assert_array_equal(model.exchange(gradient), gradient)


def test_weights_that_became_infinite_name_the_element(cluster, connect) -> None:
    model = connect(cluster(2), "w0").parameter(
        "model", size=100, optimizer=shardwell.SGD(learning_rate=10.0), codec="fp32"
    )
    model.init(np.zeros(100, np.float32))
    gradient = np.zeros(100, np.float32)
    gradient[77] = 1e38
    with pytest.raises(shardwell.DivergedError, match="weights at version 1") as caught:
        model.exchange(gradient)
    assert caught.value.element_index == 77
    assert caught.value.shard_index == 1


def test_a_step_that_diverged_is_counted_everywhere(cluster, connect) -> None:
    """Whichever chunk it was that overflowed: the next step is the one that the shards expect."""
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    optimizer = shardwell.SGD(learning_rate=10.0)
    model = client.parameter("model", size=1000, optimizer=optimizer, codec="fp32")
    model.init(np.zeros(1000, np.float32))
    gradient = np.ones(1000, np.float32)
    model.exchange(gradient)
    gradient[0] = 1e38
    for step in (1, 2):
        with pytest.raises(shardwell.DivergedError, match=f"weights at version {step + 1}"):
            model.exchange(gradient)
        assert model.next_step == step + 1
        (status,) = {
            (entry.version_min, entry.version_max)
            for shard in client.status()
            for entry in shard.parameters
        }
        assert status == (step + 1, step + 1)
    assert model.put_gradient(np.ones(1000, np.float32)) == 3
    with pytest.raises(shardwell.DivergedError, match="element 0"):
        model.get_weights()

    table = client.table("rows", row_count=40, dim=2, optimizer=optimizer, codec="fp32")
    rows = np.full((40, 2), 1.0, np.float32)
    rows[7] = 1e38
    for step in range(2):
        with pytest.raises(shardwell.DivergedError, match=r"column 0 of row id 7") as caught:
            table.exchange_rows(np.arange(40), rows)
        assert (caught.value.table, table.next_step, table.is_step_begun) == (
            "rows",
            step + 1,
            False,
        )
    others = np.delete(np.arange(40), 7)
    assert table.put_row_gradients(others, rows[others]) == 2
    with pytest.raises(shardwell.DivergedError, match="row id 7"):
        table.get_rows([3, 7])
    assert np.isfinite(table.get_rows(others, min_version=3)).all()


@pytest.mark.parametrize("codec", CODECS)
def test_a_nan_that_comes_back_has_one_pattern(cluster, connect, tmp_path, codec) -> None:
    """Whatever it was sent as: which bits sums leave in it depends on what computed them."""
    running = cluster(2)
    clients = [connect(running, f"w{index}") for index in (0, 1)]
    options = {"size": 64, "codec": codec, "worker_count": 2, "allow_non_finite": True}
    first, second = (
        each.parameter("open", optimizer=shardwell.SGD(1.0, momentum=0.5), **options)
        for each in clients
    )
    first.init(np.where(np.arange(64) % 5 == 0, ODD_NANS[-1], np.float32(1)))
    first.put_gradient(np.resize(ODD_NANS, 64))
    weights = second.exchange(np.resize(ODD_NANS[::-1], 64))
    for found in (weights, first.get_weights()):
        assert nan_bits(found) == {CANONICAL}
    clients[0].save_checkpoint(tmp_path / "saved")
    files = [path for path in sorted((tmp_path / "saved").rglob("*")) if path.suffix != ".json"]
    found = np.concatenate([_values_of(path) for path in files if path.is_file()])
    assert np.isnan(found).sum() >= 2 * 64  # of weights and of momentum
    assert nan_bits(found) == {CANONICAL}


def _values_of(path: Path) -> np.ndarray:
    """The values of a file of safetensors: what follows its header."""
    contents = path.read_bytes()
    start = 8 + int.from_bytes(contents[:8], "little")
    return np.frombuffer(contents, np.uint8)[start:].view("<f4")
