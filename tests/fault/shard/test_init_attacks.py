"""Streams of first weights that break the .proto: refused, and weights that stand still stand."""

from __future__ import annotations

import shutil
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S
from harness.wire_client.alterations import Alteration, altered, with_altered
from harness.wire_client.worker import WireParameter, WireWorker, error_detail, spec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2 as types

SIZE = 60  # 30 elements on each of two shards
INVALID = ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
CORRUPT = ("DATA_LOSS", "CORRUPT_CHUNK")


def beyond(messages: list[Any]) -> Any:
    """One range more, which is the next shard's."""
    last = messages[-1]
    return altered(last, chunk={"element_offset": last.chunk.element_offset + 10})


def before(messages: list[Any]) -> list[Any]:
    offset = 0 if messages[1].chunk.element_offset else 59
    return with_altered(messages, 1, chunk={"element_offset": offset})


def overlapping(messages: list[Any]) -> list[Any]:
    offset = messages[2].chunk.element_offset - 1
    return with_altered(messages, 2, chunk={"element_offset": offset})


def flipped(messages: list[Any]) -> list[Any]:
    payload = messages[2].payload
    payload = payload[:7] + bytes((payload[7] ^ 8,)) + payload[8:]
    return with_altered(messages, 2, payload=payload)


def not_finite(messages: list[Any]) -> list[Any]:
    values = np.frombuffer(messages[2].payload, "<f4").copy()
    values[3] = np.nan
    return with_altered(messages, 2, payload=values.tobytes())


ATTACKS: dict[str, tuple[Alteration, str, str]] = {
    "swap": (lambda m: [m[0], m[2], m[1], *m[3:]], *INVALID),
    "repeat": (lambda m: [*m[:2], *m[1:]], *INVALID),
    "leave_gap": (lambda m: [*m[:2], *m[3:]], *INVALID),
    "end_early": (lambda m: m[:-1], *INVALID),
    "go_on": (lambda m: [*m, beyond(m)], *INVALID),
    "overlap": (overlapping, *INVALID),
    "before": (before, *INVALID),
    "far_out": (lambda m: with_altered(m, 1, chunk={"element_offset": 2**64 - 10}), *INVALID),
    "flip": (flipped, *CORRUPT),
    "count_more": (lambda m: with_altered(m, 1, chunk={"element_count": 11}), *CORRUPT),
    # The range says what it carries, and that leaves the slice.
    "count_beyond": (
        lambda m: with_altered(m, -1, payload=bytes(44), chunk={"element_count": 11}),
        *INVALID,
    ),
    "no_epoch": (lambda m: with_altered(m, 0, epoch=0), "ABORTED", "INIT_SUPERSEDED"),
    "compressed": (lambda m: with_altered(m, 1, chunk={"lz4": True}), *INVALID),
    "nan": (not_finite, "INVALID_ARGUMENT", "NON_FINITE"),
}


def _attacked(parameter: WireParameter, shard_index: int, epoch: int, alter: Alteration) -> Any:
    messages = parameter.init_messages(shard_index, np.full(SIZE, 9), epoch, range_element_count=10)
    messages = alter(messages)
    if alter is not flipped:
        parameter.seal_first_weights(messages)
    with pytest.raises(grpc.RpcError) as caught:
        parameter.worker.stubs[shard_index].InitWeights(iter(messages), timeout=PATIENCE_S)
    return caught.value


@pytest.mark.sampled(20)
@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize("attack", ATTACKS)
def test_before_there_are_weights(cluster, attack, shard_index) -> None:
    """Refused; not initialized by it; the rightful first weights stand afterwards."""
    alter, status, code = ATTACKS[attack]
    with WireWorker(cluster(2).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE))
        epoch = parameter.claim_init().epoch
        error = _attacked(parameter, shard_index, epoch, alter)
        assert error.code().name == status, error.details()
        detail = error_detail(error)
        assert types.ErrorCode.Name(detail.code) == f"ERROR_CODE_{code}"
        assert detail.shard_index == shard_index
        if code == "NON_FINITE":
            assert detail.element_index == 30 * shard_index + 13
        with pytest.raises(grpc.RpcError, match="first weights"):
            parameter.pull()
        parameter.init(np.arange(SIZE))
        np.testing.assert_array_equal(parameter.pull(), np.arange(SIZE))


@pytest.mark.parametrize("attack", ATTACKS)
def test_after_training_began(cluster, attack) -> None:
    with WireWorker(cluster(2).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE))
        parameter.init(np.arange(SIZE))
        parameter.push(np.ones(SIZE))
        for shard_index in (0, 1):
            for epoch in (1, 5):
                _attacked(parameter, shard_index, epoch, ATTACKS[attack][0])
        np.testing.assert_array_equal(parameter.pull(), np.arange(SIZE) - 1)
        np.testing.assert_array_equal(parameter.exchange(np.ones(SIZE)), np.arange(SIZE) - 2)


def test_before_training_began_a_broken_repeat_changes_nothing(cluster) -> None:
    """Initialized, step 0 open: a stream of the same epoch that fails half way."""
    with WireWorker(cluster(2).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE))
        parameter.init(np.arange(SIZE))
        for shard_index in (0, 1):
            _attacked(parameter, shard_index, 1, flipped)
        np.testing.assert_array_equal(parameter.pull(), np.arange(SIZE))


def test_an_epoch_that_was_never_granted(cluster) -> None:
    """Shard 0 grants epochs, so it knows them; a forged one must not lock the rightful out."""
    with WireWorker(cluster(2).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE))
        messages = parameter.init_messages(0, np.full(SIZE, 9), 2**64 - 1, range_element_count=10)
        with pytest.raises(grpc.RpcError):
            worker.stubs[0].InitWeights(iter(messages[:-1]), timeout=PATIENCE_S)
        parameter.init(np.arange(SIZE))
        np.testing.assert_array_equal(parameter.pull(), np.arange(SIZE))


@pytest.mark.parametrize("ahead_count", [0, 1, 1000, 2**20 - 1])
def test_an_epoch_far_ahead_on_another_shard(cluster, connect, ahead_count) -> None:
    """As of a shard 0 that has forgotten what it granted: the next claim is above it."""
    running = cluster(3)
    sgd = shardwell.SGD(learning_rate=1.0)
    with WireWorker(running.target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE, codec=types.CODEC_FP32))
        epoch = parameter.claim_init().epoch + (ahead_count << 32)
        for shard_index in (1, 2):
            parameter.init_shard(shard_index, np.full(SIZE, 9), epoch)
        assert parameter.claim_init().epoch >> 32 == 2
    model = connect(running, "w0").parameter("m", size=SIZE, optimizer=sgd, codec="fp32")
    model.init(np.arange(SIZE, dtype=np.float32))
    np.testing.assert_array_equal(model.get_weights(), np.arange(SIZE))


@pytest.mark.parametrize("epoch", [2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_an_epoch_that_shard_0_never_grants(cluster, epoch) -> None:
    with WireWorker(cluster(2).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE))
        for shard_index in (0, 1):
            with pytest.raises(grpc.RpcError, match=f"epoch {epoch} is refused") as caught:
                parameter.init_shard(shard_index, np.full(SIZE, 9), epoch)
            assert caught.value.code().name == "FAILED_PRECONDITION"
        parameter.init(np.arange(SIZE))
        np.testing.assert_array_equal(parameter.pull(), np.arange(SIZE))


@pytest.mark.parametrize("above", [2**63 - 2**32, 2**63, 2**64 - 1])
def test_no_claim_is_above_the_last_epoch(cluster, above) -> None:
    with WireWorker(cluster(1).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE))
        request = pb.ClaimInitRequest(
            shard=worker.identities[0], parameter="m", worker_id="w0", above_epoch=above
        )
        with pytest.raises(grpc.RpcError, match="no epoch is above") as caught:
            worker.stubs[0].ClaimInit(request, timeout=5)
        assert caught.value.code().name == "INVALID_ARGUMENT"
        parameter.init(np.arange(SIZE))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("claim_count", [1, 4])
def test_shard_0_goes_back_to_old_files(tmp_path, cluster, connect, claim_count) -> None:
    """It grants again what it has granted; no two claims' values are ever mixed."""
    running = cluster(2, data_dir=tmp_path, processes=True, chunk_size_bytes=2**20)
    sgd = shardwell.SGD(learning_rate=1.0)
    options: dict[str, Any] = {"size": SIZE, "optimizer": sgd, "codec": "fp32"}
    connect(running, "w0").parameter("m", **options)
    connect(running, "w0").parameter("n", **options)
    running.children[0].kill()
    shutil.copytree(tmp_path / "shard-0", tmp_path / "old")
    running.start_again(0)
    with WireWorker(running.target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE, codec=types.CODEC_FP32))
        for _ in range(claim_count):
            parameter.init_shard(1, np.full(SIZE, 9), parameter.claim_init().epoch)
    connect(running, "w0").parameter("n", **options).init(np.full(SIZE, 9.0))
    running.children[0].kill()
    shutil.rmtree(tmp_path / "shard-0")
    (tmp_path / "old").rename(tmp_path / "shard-0")
    running.start_again(0)
    client = connect(running, "w1")
    model = client.parameter("m", **options)
    model.init(np.arange(SIZE, dtype=np.float32))
    np.testing.assert_array_equal(model.get_weights(), np.arange(SIZE))
    # Shard 1 has what was trained; shard 0 is too old to know.
    with pytest.raises(shardwell.OtherIncarnationError, match="epoch"):
        client.parameter("n", **options).init(np.arange(SIZE, dtype=np.float32))


def test_an_average_has_no_first_weights(cluster) -> None:
    average = types.Optimizer(average=types.Average())
    with WireWorker(cluster(2).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE, optimizer=average))
        assert parameter.claim_init().initialized
        error = _attacked(parameter, 0, 1, list)
        assert error_detail(error).code == types.ERROR_CODE_INVALID_ARGUMENT
        np.testing.assert_array_equal(parameter.exchange(np.ones(SIZE)), 1)
