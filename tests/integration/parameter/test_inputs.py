"""What callers may pass as gradients and weights, and that a refusal leaves no trace.

Goal: every accepted kind has the effect of the same numbers in contiguous float32; everything else
is an ArgumentError before a byte is sent.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.data.memory import at_byte
from harness.polling import PATIENCE_S

SIZE = 60
SGD = shardwell.SGD(learning_rate=1.0)
PLAIN = np.arange(SIZE, dtype=np.float32) - 7


def _read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def _strided(array: np.ndarray) -> np.ndarray:
    wide = np.zeros(3 * array.size, array.dtype)
    wide[1::3] = array
    return wide[1::3]


ACCEPTED = {
    "float32": PLAIN,
    "float64": PLAIN.astype(np.float64),
    "float16": PLAIN.astype(np.float16),
    "big-endian": PLAIN.astype(">f4"),
    "list": PLAIN.tolist(),
    "strided": _strided(PLAIN),
    "strided float64": _strided(PLAIN.astype(np.float64)),
    "reversed": PLAIN[::-1].copy()[::-1],
    "read-only": _read_only(PLAIN),
    "unaligned": at_byte(1, PLAIN),
    "matrix": PLAIN.reshape(6, 10),
    "column-major": np.asfortranarray(PLAIN.reshape(6, 10)),
    "transposed": np.ascontiguousarray(PLAIN.reshape(6, 10).T).T,
    "masked, nothing hidden": np.ma.masked_array(PLAIN, mask=np.zeros(SIZE, bool)),
}

REFUSED = {
    "too short": PLAIN[:-1],
    "too long": np.append(PLAIN, np.float32(1)),
    "empty": np.empty(0, np.float32),
    "int": np.arange(SIZE),
    "bool": np.zeros(SIZE, bool),
    "complex": PLAIN.astype(np.complex64),
    "object": PLAIN.astype(object),
    "text": np.full(SIZE, "1"),
    "list of text": ["1"] * SIZE,
    "None": None,
    "number": 1.0,
    "masked": np.ma.masked_array(PLAIN, mask=np.arange(SIZE) == 3),
}


@pytest.fixture
def model(cluster, connect) -> shardwell.Parameter:
    parameter = connect(cluster(2, chunk_size_bytes=64), "w0").parameter(
        "model", size=SIZE, optimizer=SGD
    )
    parameter.init(np.zeros(SIZE, np.float32))
    return parameter


@pytest.mark.parametrize("kind", ACCEPTED)
def test_gradients_of_every_kind(model, kind) -> None:
    before = np.array(ACCEPTED[kind])
    np.testing.assert_array_equal(model.exchange(ACCEPTED[kind]), -PLAIN)
    model.put_gradient(ACCEPTED[kind])
    np.testing.assert_array_equal(model.get_weights(), -2 * PLAIN)
    np.testing.assert_array_equal(np.array(ACCEPTED[kind]), before)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_first_weights_of_every_kind(cluster, connect, kind) -> None:
    parameter = connect(cluster(2), "w0").parameter("model", size=SIZE, optimizer=SGD)
    parameter.init(ACCEPTED[kind])
    np.testing.assert_array_equal(parameter.get_weights(), PLAIN)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_before_anything_is_sent(cluster, connect, kind) -> None:
    client = connect(cluster(2), "w0")
    parameter = client.parameter("model", size=SIZE, optimizer=SGD)
    with pytest.raises(shardwell.ArgumentError):
        parameter.init(REFUSED[kind])
    parameter.init(np.zeros(SIZE, np.float32))
    sent_bytes = client.traffic.sent_bytes
    verbs = [parameter.put_gradient]
    if kind != "None":  # an exchange without a gradient is a step of the weight 0
        verbs.append(parameter.exchange)
    for verb in verbs:
        with pytest.raises(shardwell.ArgumentError):
            verb(REFUSED[kind])
    assert client.traffic.sent_bytes == sent_bytes
    assert parameter.next_step == 0
    np.testing.assert_array_equal(parameter.exchange(PLAIN), -PLAIN)


@pytest.mark.parametrize(
    "out",
    [
        np.empty(SIZE - 1, np.float32),
        np.empty(SIZE, np.float64),
        np.empty(SIZE, ">f4"),
        np.empty(2 * SIZE, np.float32)[::2],
        _read_only(PLAIN),
        [0.0] * SIZE,
        np.asfortranarray(np.empty((6, 10), np.float32)),
    ],
    ids=["length", "dtype", "byte order", "stride", "read-only", "list", "column-major"],
)
def test_an_out_that_cannot_be_filled(model, out) -> None:
    with pytest.raises(shardwell.ArgumentError, match="out must be"):
        model.get_weights(out=out)
    with pytest.raises(shardwell.ArgumentError, match="out must be"):
        model.exchange(PLAIN, out=out)
    with pytest.raises(shardwell.ArgumentError, match="out must be"):
        model.get_weights_async(out=out).result(PATIENCE_S)
    assert model.next_step == 0
    np.testing.assert_array_equal(model.exchange(PLAIN), -PLAIN)


@pytest.mark.parametrize("sample_count", [-1, 2**24 + 1, 1.5, "2", True, None, float("nan")])
def test_sample_counts_that_are_none(model, sample_count) -> None:
    for verb in (model.exchange, model.put_gradient):
        with pytest.raises(shardwell.ArgumentError, match="sample_count"):
            verb(PLAIN, sample_count=sample_count)
    assert model.next_step == 0


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 31 * 86400, True, "1"])
def test_timeouts_that_are_none(model, timeout_s) -> None:
    calls = [
        lambda: model.get_weights(timeout_s=timeout_s),
        lambda: model.exchange(PLAIN, timeout_s=timeout_s),
        lambda: model.put_gradient(PLAIN, timeout_s=timeout_s),
        lambda: model.init(PLAIN, timeout_s=timeout_s),
    ]
    for call in calls:
        with pytest.raises(shardwell.ArgumentError, match="timeout_s"):
            call()


@pytest.mark.parametrize("min_version", [-1, True, 1.5, "1", None])
def test_versions_that_are_none(model, min_version) -> None:
    with pytest.raises(shardwell.ArgumentError, match="min_version"):
        model.get_weights(min_version=min_version, timeout_s=0.2)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("element", [0, 29, 30, SIZE - 1])
@pytest.mark.parametrize("verb", ["exchange", "put_gradient"])
def test_a_value_that_is_not_finite_sends_nothing(cluster, connect, value, element, verb) -> None:
    """Another worker's view, the step and every byte count stay as they were."""
    running = cluster(2, chunk_size_bytes=64)
    client = connect(running, "w0")
    model = client.parameter("model", size=SIZE, optimizer=SGD)
    other = connect(running, "other").parameter("model", size=SIZE, optimizer=SGD)
    model.init(PLAIN)
    received = [status.received_payload_bytes for status in client.status()]
    gradient = np.ones(SIZE, np.float32)
    gradient[element] = value
    with pytest.raises(shardwell.NonFiniteError, match=f"element {element}") as caught:
        getattr(model, verb)(gradient)
    assert (caught.value.element_index, caught.value.parameter) == (element, "model")
    assert model.next_step == 0
    assert [status.received_payload_bytes for status in client.status()] == received
    np.testing.assert_array_equal(other.get_weights(), PLAIN)
    assert other.version == 0
    np.testing.assert_array_equal(model.exchange(np.ones(SIZE, np.float32)), PLAIN - 1)


def test_a_float64_beyond_float32_is_not_finite(model) -> None:
    gradient = PLAIN.astype(np.float64)
    gradient[33] = 1e300
    with pytest.raises(shardwell.NonFiniteError) as caught:
        model.exchange(gradient)
    assert caught.value.element_index == 33


def test_first_weights_that_are_not_finite_are_refused(cluster, connect) -> None:
    parameter = connect(cluster(2), "w0").parameter("model", size=SIZE, optimizer=SGD)
    weights = PLAIN.copy()
    weights[41] = np.nan
    with pytest.raises(shardwell.NonFiniteError) as caught:
        parameter.init(weights)
    assert caught.value.element_index == 41
    with pytest.raises(shardwell.NotInitializedError):
        parameter.get_weights()
