"""A worker written from table.proto alone trains tables, and is answered as the .proto says.

Goal: the .proto is enough for any language. Method: harness/wire_client/table.py, which shares
no code with the SDK; the oracle is a table in plain Python in float64 (harness/oracles/table.py).
Values are small integers times powers of two, which every codec and float32 sums hold exactly.
"""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from harness.oracles.table import ModelTable, sgd
from harness.polling import PATIENCE_S
from harness.threads import together
from harness.wire_client import crc as wire_crc
from harness.wire_client.table import WireTable, table_spec, uniform
from harness.wire_client.worker import WireWorker, error_detail
from harness.wire_client.worker import sgd as wire_sgd
from shardwell.v1 import table_pb2 as pb
from shardwell.v1 import types_pb2 as types

DIM = 5
KEYS = [0, 1, 2, -1, -3, 2**40, 2**63 - 1, -(2**63), 123456789, 77, 78, 79]
CODECS = {"fp32": types.CODEC_FP32, "fp16": types.CODEC_FP16, "bf16": types.CODEC_BF16}
CONTENT = pb.ScanRowsRequest


def model_of(worker_count: int, rate: float = 0.5) -> ModelTable:
    return ModelTable(lambda _: [0.0] * DIM, sgd, worker_count, rate)


def gradients_of(worker: int, step: int, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """Some of the ids, other ones each time, and small integers."""
    random = np.random.default_rng((worker, step))
    mine = [ids[place] for place in random.permutation(len(ids))[: len(ids) * 2 // 3]]
    return mine, random.integers(-3, 4, (len(mine), DIM)).astype(np.float32)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("keyed", [False, True], ids=["numbered", "keyed"])
@pytest.mark.parametrize("shard_count", [1, 3])
def test_rows_trained_synchronously_by_the_proto_alone(cluster, shard_count, keyed, codec) -> None:
    """Two workers, whose steps close together; each reads what both have done."""
    running = cluster(shard_count)
    ids = KEYS if keyed else list(range(40))
    spec = table_spec(
        row_count=0 if keyed else 40,
        dim=DIM,
        codec=CODECS[codec],
        optimizer=wire_sgd(0.5),
        worker_count=2,
    )
    oracle = model_of(2)
    for step in range(4):
        for worker in (0, 1):
            mine, gradients = gradients_of(worker, step, ids)
            rows = dict(zip(mine, gradients.astype(np.float64), strict=True))
            oracle.take(f"w{worker}", rows, samples=1, ends=True, first=True)

    def train(worker: int) -> np.ndarray:
        with WireWorker(running.target, f"w{worker}") as connection:
            table = WireTable(connection, spec, take_seat=True)
            for step in range(4):
                mine, gradients = gradients_of(worker, step, ids)
                answers = table.put(mine, gradients, rows_per_part=3, wait_timeout_s=PATIENCE_S)
                assert {answer.counted.step for answer in answers} == {step}
                rows = table.get(ids, min_version=step + 1, wait_timeout_s=PATIENCE_S)
            assert set(table.row_ids()) == set(oracle.rows)
            return rows

    expected = [oracle.value(row_id) for row_id in ids]
    for rows in together([lambda: train(0), lambda: train(1)]):
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("shard_count", [1, 2])
def test_rows_trained_asynchronously_by_the_proto_alone(cluster, shard_count) -> None:
    """Sums of integers: the order in which two workers' gradients come does not matter."""
    running = cluster(shard_count)
    ids, oracle = list(range(30)), model_of(0)
    spec = table_spec(row_count=30, dim=DIM, mode=types.MODE_ASYNC, optimizer=wire_sgd(0.5))

    def train(worker: int) -> None:
        with WireWorker(running.target, f"w{worker}") as connection:
            table = WireTable(connection, spec)
            for step in range(6):
                table.put(*gradients_of(worker, step, ids), rows_per_part=4)

    together([lambda: train(0), lambda: train(1)])
    for worker in (0, 1):
        for step in range(6):
            mine, gradients = gradients_of(worker, step, ids)
            rows = dict(zip(mine, gradients.astype(np.float64), strict=True))
            oracle.take(f"w{worker}", rows, samples=1, ends=True, first=True)
    with WireWorker(running.target, "w0") as connection:
        table = WireTable(connection, spec)
        assert {answer.version for answer in table.answers} == {12}
        assert table.next_step == 6
        np.testing.assert_array_equal(table.get(ids), [oracle.value(row_id) for row_id in ids])


def test_rows_begin_as_the_proto_says(cluster) -> None:
    running = cluster(3)
    spec = table_spec(
        row_count=0,
        dim=DIM,
        initializer=pb.Initializer(uniform=pb.Uniform(low=-2, high=3, seed=2**64 - 5)),
    )
    expected = [uniform(-2, 3, 2**64 - 5, key % 2**64, DIM) for key in KEYS]
    with WireWorker(running.target, "w0") as connection:
        table = WireTable(connection, spec)
        np.testing.assert_array_equal(table.get(KEYS), expected)
        assert table.row_ids() == []  # reading creates nothing
        table.put(KEYS[:4], np.zeros((4, DIM)))
        np.testing.assert_array_equal(table.get(KEYS), expected)
        assert table.row_ids() == sorted(KEYS[:4])
        found = table.scan(CONTENT.CONTENT_VALUES)
        assert found == {key: [float(x) for x in expected[KEYS.index(key)]] for key in KEYS[:4]}


def test_the_same_parts_again_count_once(cluster) -> None:
    """A worker that saw no answer sends everything again, on other streams, or in pieces."""
    running = cluster(1)
    with WireWorker(running.target, "w0") as connection:
        table = WireTable(connection, table_spec())
        parts = table.parts([1, 2, 3], np.ones((3, 3)), rows_per_part=1)
        assert len(parts) == 3
        table.stream(0, parts[:2]).cancel()
        first = list(table.stream(0, parts[:2]))  # no answer before the step ends
        assert first == []
        assert table.open()[0].counted_part_count == 2
        (answer,) = table.stream(0, parts)
        counted = answer.counted
        assert (counted.step, counted.counted_part_count) == (0, 1)
        assert counted.duplicate_part_count == 2
        for _ in range(2):
            (answer,) = table.stream(0, parts)
            assert (answer.counted.counted_part_count, answer.version) == (0, 1)
            assert answer.counted.duplicate_part_count == 3
        np.testing.assert_array_equal(table.get([1, 2, 3]), -np.ones((3, 3)))
        (status,) = table.status()
        assert (status.counted_row_count, status.version) == (3, 1)
        assert status.duplicate_part_count >= 8


def test_a_step_that_is_abandoned_ends_with_what_was_counted(cluster) -> None:
    running = cluster(2)
    with WireWorker(running.target, "w0") as connection:
        table = WireTable(connection, table_spec())
        shard_index = next(index for index, ids in enumerate(table.split([1])) if ids)
        parts = table.parts([1, 1 + 2 * 20], np.ones((2, 3)), rows_per_part=1)
        list(table.stream(shard_index, parts[:1]))
        for answer in table.abandon():
            assert answer.counted.step == 0
            assert answer.version == 1
        for answer in table.abandon(step=0):  # repeated, it changes nothing
            assert answer.counted.duplicate_part_count == 1
        assert {answer.next_step for answer in table.open()} == {1}
        table.put([1], [[1, 2, 3]])
        np.testing.assert_array_equal(table.get([1]), [[-2, -3, -4]])


def test_a_stream_does_what_comes_first_first(cluster) -> None:
    """Gradients and questions on one stream, without waiting for answers; each is answered."""
    running = cluster(1)
    with WireWorker(running.target, "w0") as connection:
        table = WireTable(connection, table_spec(dim=1))
        messages, asked = [table.fetch([4])], [[4]]
        for step in range(3):
            messages += [*table.parts([4], [[1]], step=step), table.fetch([4, 5]), table.fetch([])]
            asked += [[4, 5], []]
        answers = list(table.stream(0, messages))
        assert len(answers) == 10
        assert [a.counted.step for a in answers if a.HasField("counted")] == [0, 1, 2]
        found = [answer for answer in answers if answer.HasField("rows")]
        rows = [table.read(*pair).ravel().tolist() for pair in zip(found, asked, strict=True)]
        assert rows == [[0], [-1, 0], [], [-2, 0], [], [-3, 0], []]
        assert [answer.version for answer in answers] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_means_of_rows_are_weighted_by_samples(cluster) -> None:
    """What one worker alone has a gradient for is divided by the samples of both."""
    running = cluster(1)
    spec = table_spec(dim=1, worker_count=2)
    with WireWorker(running.target, "a") as one, WireWorker(running.target, "b") as two:
        first, second = WireTable(one, spec), WireTable(two, spec)
        first.put([1, 2], [[8], [16]], sample_count=3)
        np.testing.assert_array_equal(first.get([1, 2]), [[0], [0]])
        second.put([2, 3], [[32], [-8]], sample_count=5)
        expected = [[-8 * 3 / 8], [-(16 * 3 + 32 * 5) / 8], [8 * 5 / 8]]
        np.testing.assert_array_equal(first.get([1, 2, 3], min_version=1), expected)
        first.put([1], [[8]], sample_count=0)
        second.put([1], [[8]], sample_count=0)
        np.testing.assert_array_equal(first.get([1, 2, 3], min_version=2), expected)


def test_learning_rates_change_from_a_step_on(cluster) -> None:
    running = cluster(2)
    with WireWorker(running.target, "w0") as connection:
        table = WireTable(connection, table_spec(dim=1))
        table.set_learning_rate(0.5, from_step=2)
        for _ in range(3):
            table.put([1], [[1]])
        np.testing.assert_array_equal(table.get([1]), [[-2.5]])
        table.set_learning_rate(0.25)
        assert {status.learning_rate for status in table.status()} == {0.25}
        table.put([1], [[1]])
        np.testing.assert_array_equal(table.get([1]), [[-2.75]])
        with pytest.raises(grpc.RpcError) as caught:
            table.set_learning_rate(1.0, from_step=3)
        assert error_detail(caught.value).code == types.ERROR_CODE_STEP_ORDER
        for rate in (-1.0, float("nan")):
            with pytest.raises(grpc.RpcError) as caught:
                table.set_learning_rate(rate)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        table = WireTable(connection, table_spec(name="u", dim=1, mode=types.MODE_ASYNC))
        with pytest.raises(grpc.RpcError, match="changes at once; ask without from_step"):
            table.set_learning_rate(1.0, from_step=3)
        table.set_learning_rate(1.0)


def test_old_rows_are_evicted_and_begin_anew(cluster) -> None:
    running = cluster(2)
    with WireWorker(running.target, "w0") as connection:
        table = WireTable(connection, table_spec(dim=1))
        for step in range(4):
            table.put([step, 10 + step, 50], [[1]] * 3)
        assert table.evict(older_than_step=2) == 4
        assert table.evict(older_than_step=2) == 0
        assert table.row_ids() == [2, 3, 12, 13, 50]
        np.testing.assert_array_equal(table.get([0, 2, 50]), [[0], [-1], [-4]])
        table.put([0], [[1]])
        np.testing.assert_array_equal(table.get([0]), [[-1]])
        assert sum(status.row_count for status in table.status()) == 6


def test_rows_are_loaded_by_nobody_in_particular(cluster) -> None:
    """Rows that are loaded have no worker: an opening that names none is taken."""
    running = cluster(1)
    with WireWorker(running.target, "w0") as connection:
        table = WireTable(connection, table_spec(dim=1))
        opening = table.opening(0)
        opening.worker_id = ""
        first = pb.LoadRowsRequest(
            open=wire_crc.seal_message(opening), rows=pb.Rows(), version=5, finish=True
        )
        load = connection.channels[0].stream_unary(
            "/shardwell.v1.TableService/LoadRows",
            response_deserializer=pb.LoadRowsResponse.FromString,
        )
        sealed = wire_crc.seal(first, *wire_crc.rows_load(first))
        assert load(iter([sealed.SerializeToString()]), timeout=PATIENCE_S).row_count == 0
        assert table.status()[0].version == 5


def test_rows_of_the_open_step_stay(cluster) -> None:
    running = cluster(1)
    spec = table_spec(dim=1, worker_count=2)
    with WireWorker(running.target, "a") as one, WireWorker(running.target, "b") as two:
        first, second = WireTable(one, spec), WireTable(two, spec)
        for table in (first, second):
            table.put([1, 2], [[2], [2]])
        first.put([1], [[2]])
        assert first.evict(older_than_step=100) == 1
        second.put([3], [[2]])
        np.testing.assert_array_equal(first.get([1, 2, 3], min_version=2), [[-3], [0], [-1]])
