"""A worker written from the .proto alone trains together with workers of the SDK.

Goal: the .proto is enough for any language. The evidence is harness/wire_client/worker.py, which
shares no code with the SDK and writes payloads without padding.
"""

from __future__ import annotations

import grpc
import lz4.block
import numpy as np
import pytest

import shardwell
from harness.oracles.parameter import ModelParameter, integer_gradient
from harness.polling import PATIENCE_S, eventually
from harness.threads import together
from harness.wire_client.worker import WireWorker, decode, encode, error_detail, sgd, spec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2 as types

SGD = shardwell.SGD(learning_rate=0.5)
CODECS = {"fp32": types.CODEC_FP32, "fp16": types.CODEC_FP16, "bf16": types.CODEC_BF16}
STEP_COUNT = 4
SIZE = 301


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("initializer", ["wire", "sdk"])
def test_synchronous_training_together(cluster, codec, initializer) -> None:
    """Weights stay below 2^7 in steps of 1/2, which even bfloat16's eight bits hold."""
    running = cluster(3, chunk_size_bytes=64)
    oracle = ModelParameter(np.full(SIZE, 8), SGD, worker_count=2)
    for step in range(STEP_COUNT):
        for index in (0, 1):
            oracle.put(f"w{index}", 2 * integer_gradient(index, step, SIZE, high=2))

    def by_wire() -> np.ndarray:
        with WireWorker(running.target, "wire") as worker:
            model = worker.create(
                spec("m", SIZE, codec=CODECS[codec], optimizer=sgd(0.5), worker_count=2)
            )
            if initializer == "wire":
                model.init(np.full(SIZE, 8))
            else:
                _wait_until_initialized(running.target)
            for step in range(STEP_COUNT):
                gradient = 2 * integer_gradient(0, step, SIZE, high=2)
                if step % 2:
                    weights = model.exchange(gradient)
                else:
                    assert model.push(gradient) == step
                    weights = model.pull(min_version=step + 1, wait_timeout_s=PATIENCE_S)
            return weights

    def by_sdk() -> np.ndarray:
        with shardwell.connect(running.target, worker_id="sdk", timeout_s=PATIENCE_S) as client:
            model = client.parameter("m", size=SIZE, optimizer=SGD, worker_count=2, codec=codec)
            if initializer == "sdk":
                model.init(np.full(SIZE, 8, np.float32))
            else:
                _wait_until_initialized(running.target)
            for step in range(STEP_COUNT):
                weights = model.exchange(2 * integer_gradient(1, step, SIZE, high=2))
            return weights

    wire, sdk = together([by_wire, by_sdk])
    np.testing.assert_array_equal(wire, sdk)
    np.testing.assert_array_equal(wire, oracle.weights)


def _wait_until_initialized(target: str) -> None:
    """As a worker does that has no weights of its own: it claims nothing, it looks."""
    with shardwell.connect(target, worker_id="looking") as client:
        eventually(
            "the weights stand",
            lambda: all(
                status.parameters and status.parameters[0].initialized for status in client.status()
            ),
        )


@pytest.mark.parametrize("codec", CODECS)
def test_asynchronous_training_together(cluster, connect, codec) -> None:
    running = cluster(2, chunk_size_bytes=64)
    model = connect(running, "sdk").parameter(
        "m", size=SIZE, optimizer=SGD, mode="async", codec=codec
    )
    model.init(np.zeros(SIZE, np.float32))

    def by_wire() -> None:
        with WireWorker(running.target, "wire") as worker:
            wire = worker.create(
                spec("m", SIZE, codec=CODECS[codec], mode=types.MODE_ASYNC, optimizer=sgd(0.5))
            )
            for step in range(STEP_COUNT):
                gradient = integer_gradient(0, step, SIZE, high=2)
                if step % 2:
                    wire.exchange(gradient)
                else:
                    wire.push(gradient)

    def by_sdk() -> None:
        for step in range(STEP_COUNT):
            model.exchange(integer_gradient(1, step, SIZE, high=2))

    together([by_wire, by_sdk])
    total = sum(integer_gradient(i, s, SIZE, high=2) for i in (0, 1) for s in range(STEP_COUNT))
    np.testing.assert_array_equal(model.get_weights(min_version=2 * STEP_COUNT), -0.5 * total)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [1e-38, 1e-5, 1.0, 1e5, 1e38, 3.4028e38])
def test_both_read_what_the_other_writes(cluster, connect, codec, scale) -> None:
    """Random values of every magnitude, averaged by two: one rounding each way."""
    running = cluster(2, chunk_size_bytes=128)
    values = np.random.default_rng(11).uniform(-1, 1, (2, SIZE)) * scale
    values = np.clip(values, -3.3e38, 3.3e38).astype(np.float32) / 2
    model = connect(running, "sdk").parameter(
        "m", size=SIZE, optimizer=shardwell.Average(), codec=codec, worker_count=2
    )
    average = types.Optimizer(average=types.Average())
    with WireWorker(running.target, "wire") as worker:
        wire = worker.create(
            spec("m", SIZE, codec=CODECS[codec], optimizer=average, worker_count=2)
        )
        results = together([lambda: wire.exchange(values[0]), lambda: model.exchange(values[1])])
    np.testing.assert_array_equal(results[0], results[1])
    mean = values.astype(np.float64).mean(axis=0)
    relative = {"fp32": 2.0**-23, "fp16": 2.0**-11, "bf16": 2.0**-8}[codec]
    peak = np.abs(values).max()
    allowed = 2.1 * relative * (np.abs(mean) + np.abs(values).max(axis=0)) + peak * 2.0**-18
    allowed = allowed + 2.0**-132  # below float32's normal range all of them are coarser
    assert (np.abs(results[0] - mean) <= allowed).all()


@pytest.mark.parametrize("codec", CODECS)
def test_own_conversions_agree_with_themselves(codec) -> None:
    values = np.array([0, -0.0, 1, -1.5, 2.0**-8, 65504, 1e9, 3.4028235e38], np.float32)
    relative = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}[codec]
    payload = encode(values[:6], CODECS[codec], 4)
    found = decode(payload, CODECS[codec], 4, 6)
    np.testing.assert_allclose(found, values[:6], rtol=relative)
    payload = encode(values, CODECS[codec], 4)
    assert np.isfinite(decode(payload, CODECS[codec], 4, 8)).all()


def test_one_stream_carries_many_steps(cluster) -> None:
    running = cluster(1, chunk_size_bytes=64)
    with WireWorker(running.target, "wire") as worker:
        model = worker.create(spec("m", 40))
        model.init(np.zeros(40))
        messages = [
            message
            for step in range(3)
            for message in model.gradient_messages(pb.ExchangeRequest, 0, np.ones(40), step=step)
        ]
        for message in messages[1:]:
            message.ClearField("open")
        answers = list(worker.stubs[0].Exchange(iter(messages), timeout=PATIENCE_S))
    assert [answer.version for answer in answers] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [answer.chunk.chunk_index for answer in answers] == [0, 1, 2] * 3
    np.testing.assert_array_equal(decode(answers[-1].payload, types.CODEC_FP32, 1, 8), -3)


def test_chunks_may_come_in_any_order(cluster) -> None:
    running = cluster(1, chunk_size_bytes=64)
    with WireWorker(running.target, "wire") as worker:
        model = worker.create(spec("m", 100))
        model.init(np.zeros(100))
        for step, kind in enumerate((pb.PutGradientRequest, pb.ExchangeRequest)):
            messages = model.gradient_messages(kind, 0, np.arange(100), step=step)[::-1]
            messages[0].open.CopyFrom(model.open(0))
            messages[-1].ClearField("open")
            messages[0].gradient.end_of_step = False
            model.seal(messages[0])
            if kind is pb.ExchangeRequest:
                answers = list(worker.stubs[0].Exchange(iter(messages), timeout=PATIENCE_S))
                assert [answer.chunk.chunk_index for answer in answers] == list(range(7))[::-1]
            else:
                answer = worker.stubs[0].PutGradient(iter(messages), timeout=PATIENCE_S)
                assert answer.counted_chunk_count == 7
        np.testing.assert_array_equal(model.pull(), -2 * np.arange(100))


def test_first_weights_in_small_ranges(cluster) -> None:
    running = cluster(2)
    with WireWorker(running.target, "wire") as worker:
        model = worker.create(spec("m", 50))
        epoch = model.claim_init().epoch
        for shard_index in (1, 0):
            messages = model.init_messages(shard_index, np.arange(50), epoch, range_element_count=3)
            worker.stubs[shard_index].InitWeights(iter(messages), timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError, match="no first weights"):
            model.pull()
        model.confirm_init(epoch)
        np.testing.assert_array_equal(model.pull(), np.arange(50))


def test_lz4_blocks_are_read_and_written(cluster) -> None:

    running = cluster(1, chunk_size_bytes=4096)
    with WireWorker(running.target, "wire") as worker:
        model = worker.create(spec("m", 1000, compression=types.COMPRESSION_LZ4))
        model.init(np.zeros(1000))
        (message,) = model.gradient_messages(pb.ExchangeRequest, 0, np.ones(1000))
        packed = lz4.block.compress(message.payload, store_size=False)
        message.payload = packed
        message.gradient.chunk.lz4 = True
        model.seal(message)
        (answer,) = worker.stubs[0].Exchange(iter([message]), timeout=PATIENCE_S)
        assert answer.chunk.lz4
        values = lz4.block.decompress(answer.payload, uncompressed_size=4000)
        np.testing.assert_array_equal(np.frombuffer(values, "<f4"), -1)


# What the .proto says of repeats and refusals.


@pytest.mark.parametrize("mode", [types.MODE_SYNC, types.MODE_ASYNC])
def test_a_step_that_is_sent_again_is_answered_in_full(cluster, mode) -> None:
    """On another stream, all of it, also what was counted: a worker whose first one broke."""
    with WireWorker(cluster(2, chunk_size_bytes=64).target, "w0") as worker:
        model = worker.create(spec("m", 64, mode=mode))
        model.init(np.zeros(64))
        model.exchange(np.ones(64))
        for step in (1, 1, 1):
            model.next_step = step
            np.testing.assert_array_equal(model.exchange(np.ones(64)), -2)
        model.next_step = 1
        with pytest.raises(grpc.RpcError) as caught:
            model.exchange(np.zeros(64))  # with another CRC
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error_detail(caught.value).code == types.ERROR_CODE_STEP_ORDER


@pytest.mark.parametrize("allowed", [False, True])
def test_half_precision_that_decodes_past_float32(cluster, allowed) -> None:
    """65504 times 2^113 is no float32."""
    with WireWorker(cluster(1).target, "w0") as worker:
        options = {"codec": types.CODEC_FP16, "allow_non_finite": allowed}
        model = worker.create(spec("m", 4, optimizer=sgd(1.0), **options))
        model.init(np.zeros(4))
        (message,) = model.gradient_messages(pb.PutGradientRequest, 0, np.ones(4))
        message.payload = np.full(4, 65504, "<f2").tobytes() + bytes([113] * 4)
        model.seal(message)
        put = worker.stubs[0].PutGradient
        if allowed:
            assert put(iter([message]), timeout=PATIENCE_S).counted_chunk_count == 1
            np.testing.assert_array_equal(model.pull(), -np.inf)
            return
        with pytest.raises(grpc.RpcError) as caught:
            put(iter([message]), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_detail(caught.value).code == types.ERROR_CODE_NON_FINITE
        np.testing.assert_array_equal(model.pull(), 0)


def test_racing_claims_of_first_weights_get_the_same_answer(cluster) -> None:
    with WireWorker(cluster(1).target, "w0") as worker:
        model = worker.create(spec("m", 4))
        granted = model.claim_init()
        assert (granted.granted, granted.initialized) == (True, False)
        model.init(np.zeros(4))
        claim = model.claim_init()
        assert (claim.granted, claim.initialized) == (False, True)
        model.worker.open_parameter(model.spec, take_seat=True, must_exist=True)
        for must_exist, code in ((False, "NOT_FOUND"), (True, "FAILED_PRECONDITION")):
            with pytest.raises(grpc.RpcError) as caught:
                worker.open_parameter(spec("other"), take_seat=True, must_exist=must_exist)
            assert caught.value.code().name == code
