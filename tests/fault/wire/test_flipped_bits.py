"""Goal: no single bit that flips in a message between a client and a shard is accepted with a wrong
result.

Method: a worker trains through a proxy that flips one bit of one message: each bit before the
payload (in `make test` every thirteenth, so that all bits of a byte have their turn), and the
payload's first and last. The call fails, or its result is right; made again, it succeeds. In either
case what the shard has then is what undisturbed training has: integers, known beforehand. Beside
what the worker trains are parameters, tables and a worker whose names differ in one bit from those
that are meant.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.faults.flipping_proxy import FlippingProxy
from harness.group.ranks import on_ranks
from harness.inside import channels_of, idle_sets
from harness.polling import PATIENCE_S, eventually
from harness.wire_client import crc as wire_crc
from harness.wire_client.table import WireTable, table_spec
from harness.wire_client.worker import WireWorker, spec
from shardwell.errors import ShardwellError
from shardwell.group.mailbox import Mailbox
from shardwell.parameter.first_weights import FirstWeights
from shardwell.process.spans import Traffic
from shardwell.rpc import retry
from shardwell.rpc.retry import Attempts
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import peer_pb2, session_pb2, table_pb2
from shardwell.wire import messages as framing
from shardwell_server.config import Limits

SIZE, ROW_COUNT, DIM = 24, 40, 2
NAME, NEIGHBOURS = "m", ("l", "o", "i", "e")
WORKER, OTHER_WORKER = "w0", "w1"
DAMAGED_TIMEOUT_S = 1.0
"""Of a call with a damaged message: some are never answered."""
IDS = np.array([3, 4, 9])
SGD = shardwell.SGD(learning_rate=1.0)
ZEROS = shardwell.Zeros()
CLIPPED = shardwell.SGD(learning_rate=1.0, clip_norm=1.0)

KINDS: dict[tuple[str, str], Any] = {
    ("Exchange", "request"): pb.ExchangeRequest,
    ("Exchange", "response"): pb.ExchangeResponse,
    ("InitWeights", "request"): pb.InitWeightsRequest,
    ("Snapshot", "response"): pb.SnapshotResponse,
    ("ExchangeRows", "request"): table_pb2.ExchangeRowsRequest,
    ("ExchangeRows", "response"): table_pb2.ExchangeRowsResponse,
    ("ScanRows", "response"): table_pb2.ScanRowsResponse,
}


@pytest.fixture(autouse=True)
def _no_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged message fails its call, which the test makes again."""
    monkeypatch.setattr(retry, "CORRUPT_RETRY_COUNT_MAX", 0)


class Line:
    """A client whose messages may be damaged, and the shard behind it."""

    def __init__(
        self, running: Any, client: shardwell.Client, proxy: FlippingProxy, stride: int
    ) -> None:
        self.running = running
        self.client = client
        self.stride = stride
        """Of how many bits one is flipped."""
        self._proxy = proxy

    @property
    def shard(self) -> Any:
        return self.running.servers[0].shard

    def flips(
        self,
        method: str,
        direction: str,
        call: Callable[[float | None], Any],
        number: int = 0,
    ) -> Iterator[Any]:
        """Makes a call once for each bit, and again where it fails; its results.

        Args:
            method: The RPC whose message is damaged.
            direction: "request" or "response".
            call: Makes the call; passed its timeout_s.
            number: Number of the message in the call; 0 is the first.
        """
        sizes: list[tuple[int, int]] = []

        def measured(message: bytes) -> bytes:
            kind = KINDS.get((method, direction))
            payload = 0 if kind is None else framing.parse(kind, message)[1].size
            sizes.append((len(message), payload))
            return message

        self.end_streams()
        self._proxy.watch(method, direction, number, measured)
        yield call(None)
        ((size, payload_size),) = sizes
        head = 8 * (size - payload_size)
        assert head
        for bit in (*range(0, head, self.stride), *((head, 8 * size - 1) if payload_size else ())):
            self.end_streams()
            self._proxy.damage(method, direction, number, bit)
            try:
                result = call(DAMAGED_TIMEOUT_S)
            except ShardwellError:
                result = self._made_again(call)
            assert self._proxy.is_done
            yield result

    @property
    def address(self) -> str:
        """Of the proxy."""
        return self._proxy.address

    @property
    def is_done(self) -> bool:
        """Whether the message has come that was to be changed."""
        return self._proxy.is_done

    def watch(
        self, method: str, direction: str, change: Callable[[bytes], bytes], number: int = 0
    ) -> None:
        """Changes one message: see `FlippingProxy.watch`."""
        self._proxy.watch(method, direction, number, change)

    def end_streams(self) -> None:
        """The next call on a parameter or table says again what its stream is for."""
        for of_rows in (False, True):
            for streams in list(idle_sets(self.client, of_rows=of_rows)):
                streams.close()

    def _made_again(self, call: Callable[[float | None], Any]) -> Any:
        """The result of a call, after one that failed, on a busy machine perhaps before its message
        came: then it is this one's that is damaged."""
        if not self._proxy.is_done:
            with contextlib.suppress(ShardwellError):
                return call(None)
        return call(None)


@pytest.fixture(params=[13, pytest.param(1, marks=pytest.mark.exhaustive)], ids="1 in {}".format)
def line(cluster, connect, request) -> Iterator[Line]:
    running = cluster(1, chunk_size_bytes=4096, limits=Limits(table_count_max=4096))
    with FlippingProxy(running.target) as proxy:
        yield Line(running, connect(proxy.address, WORKER), proxy, request.param)


def opened(client: shardwell.Client, name: str = NAME, **options: Any) -> shardwell.Parameter:
    options = {"codec": "fp16", "optimizer": SGD, "size": SIZE, **options}
    parameter = client.parameter(name, **options)
    parameter.init(np.zeros(SIZE, np.float32))
    return parameter


GRADIENT = np.arange(SIZE, dtype=np.float32) * np.float32(2.0**-16)
"""So small that fp16 is scaled; a thousand of them are exact in float32."""


def kept(line: Line, name: str = NAME) -> np.ndarray:
    """The weights as the shard has them."""
    return np.array(line.shard.parameters.get(name).storage.weights)


def neighbours(line: Line, **options: Any) -> Callable[[], None]:
    """Opens parameters whose names differ in a bit; what shows that they are untouched."""
    for name in NEIGHBOURS:
        for _ in range(2):
            opened(line.client, name, **options).put_gradient(np.zeros(SIZE))

    def untouched() -> None:
        for name in NEIGHBOURS:
            assert not kept(line, name).any()

    return untouched


@pytest.mark.parametrize("verb", ["put_gradient", "exchange"])
def test_flipped_bits_of_gradients(line, verb) -> None:
    """After steps that a flipped number could lead back to, which would count as a repeat."""
    untouched = neighbours(line)
    model = opened(line.client)
    for _ in range(2):
        model.put_gradient(np.zeros(SIZE))

    def call(timeout_s: float | None) -> None:
        getattr(model, verb)(GRADIENT, sample_count=3, timeout_s=timeout_s)

    for count, _ in enumerate(line.flips("Exchange", "request", call), start=1):
        np.testing.assert_array_equal(kept(line), -count * GRADIENT)
        # What shards keep is exact; what they send is rounded to fp16.
        np.testing.assert_allclose(model.get_weights(), -count * GRADIENT, rtol=2**-10)
    untouched()


def test_flipped_bits_of_the_samples_of_a_gradient(line) -> None:
    """Each gradient counts with its own batch, of which each sample is dealt once."""
    model = opened(line.client)
    dealt = model.batches(shardwell.Samples(2**20, 1, shuffle=False))
    batches = []

    def call(timeout_s: float | None) -> None:
        if len(batches) == model.next_step:
            batches.append(next(dealt))
        model.put_gradient(GRADIENT, batch=batches[-1], timeout_s=timeout_s)

    for count, _ in enumerate(line.flips("Exchange", "request", call), start=1):
        np.testing.assert_array_equal(kept(line), -count * GRADIENT)
        [account] = line.shard.parameters.get(NAME).samples.describe()
        assert account.done_count == count
    assert [int(each.indices[0]) for each in batches] == list(range(len(batches)))


def test_gradients_of_a_worker_whose_name_differs_in_a_bit(line, connect) -> None:
    """Asynchronous, both at the same step: the shard can't tell by the step whose it is."""
    options = {"mode": "async", "worker_count": None}
    model = opened(line.client, **options)
    other = opened(connect(line.running, OTHER_WORKER), **options)

    def call(timeout_s: float | None) -> None:
        model.put_gradient(GRADIENT, timeout_s=timeout_s)

    for count, _ in enumerate(line.flips("Exchange", "request", call), start=1):
        other.put_gradient(-2 * GRADIENT)
        np.testing.assert_array_equal(kept(line), count * GRADIENT)


def test_the_mean_weighs_as_it_was_meant(line, connect) -> None:
    model = opened(line.client, worker_count=2)
    other = opened(connect(line.running, OTHER_WORKER), worker_count=2)
    other.put_gradient(np.zeros(SIZE), sample_count=3)

    def call(timeout_s: float | None) -> None:
        model.put_gradient(GRADIENT, sample_count=1, timeout_s=timeout_s)

    for count, _ in enumerate(line.flips("Exchange", "request", call), start=1):
        np.testing.assert_array_equal(kept(line), -count * GRADIENT / 4)
        other.put_gradient(np.zeros(SIZE), sample_count=3)


def test_what_a_shard_says_it_has_counted(line) -> None:
    """A client that reads another count sends the gradient again, which is counted once."""
    model = opened(line.client)

    def call(timeout_s: float | None) -> None:
        model.put_gradient(GRADIENT, timeout_s=timeout_s)

    for count, _ in enumerate(line.flips("Exchange", "response", call), start=1):
        np.testing.assert_array_equal(kept(line), -count * GRADIENT)


def test_what_an_open_step_is_answered(line) -> None:
    """The outcome of a gradient comes whole, or the exchange fails, and is made again."""
    model = opened(line.client, codec="fp32", worker_count=2, min_contributors=1, grace_s=0.0)

    def call(timeout_s: float | None) -> shardwell.Outcome | None:
        model.exchange(np.ones(SIZE, np.float32), timeout_s=timeout_s)
        return model.outcome

    for count, outcome in enumerate(line.flips("Exchange", "response", call), start=1):
        assert outcome is not None
        assert outcome.step == count - 1
        assert outcome.contributors == (WORKER,)
        assert not outcome.late
        np.testing.assert_array_equal(kept(line), -count)


@pytest.mark.parametrize("direction", ["request", "response"])
def test_flipped_bits_of_weights(line, direction) -> None:
    """A question that was damaged may reach the shard as one for another parameter."""
    for number, name in enumerate((NAME, *NEIGHBOURS), start=1):
        opened(line.client, name, codec="fp32").put_gradient(np.full(SIZE, number, np.float32))
    model = opened(line.client, codec="fp32")

    def call(timeout_s: float | None) -> np.ndarray:
        return model.get_weights(min_version=1, timeout_s=timeout_s)

    for weights in line.flips("Exchange", direction, call):
        np.testing.assert_array_equal(weights, -1)
        assert model.version == 1


@pytest.mark.parametrize("direction", ["request", "response"])
@pytest.mark.parametrize("number", [1, 2], ids=["asked", "answered"])
def test_norms(line, connect, direction, number) -> None:
    """Of a clipped step: the norm that the shard found, and the one it gets, after a gradient."""
    options = {"codec": "fp32", "worker_count": 2, "optimizer": CLIPPED}
    model = opened(line.client, **options)
    other = opened(connect(line.running, OTHER_WORKER), **options)
    count, is_closed = 0, True

    def call(timeout_s: float | None) -> np.ndarray:
        nonlocal count, is_closed
        if is_closed:
            for each in (model, other):
                each.put_gradient(np.full(SIZE, 2.0))
            count, is_closed = count + 1, False
        weights = model.get_weights(min_version=count, timeout_s=timeout_s)
        is_closed = True
        return weights

    for weights in line.flips("Exchange", direction, call, number):
        np.testing.assert_allclose(weights, -count / math.sqrt(SIZE), rtol=1e-5)


def test_answers_of_exchanges(line) -> None:
    model = opened(line.client, codec="fp32")

    def call(timeout_s: float | None) -> np.ndarray:
        return model.exchange(np.ones(SIZE), timeout_s=timeout_s)

    for count, weights in enumerate(line.flips("Exchange", "response", call), start=1):
        np.testing.assert_array_equal(weights, -count)
        assert model.version == count


COARSE = np.where(np.arange(SIZE) % 2, np.float32(127), np.float32(-127))
"""What int8 writes exactly, and so are its changes of weights."""


@pytest.mark.parametrize("direction", ["request", "response"])
def test_exchanges_in_int8(line, direction) -> None:
    """What each side says that it holds, and what comes of it: changes, all of it, the same."""
    untouched = neighbours(line, codec="int8")
    model = opened(line.client, codec="int8")

    def call(timeout_s: float | None) -> np.ndarray:
        return model.exchange(COARSE, timeout_s=timeout_s)

    for count, weights in enumerate(line.flips("Exchange", direction, call), start=1):
        np.testing.assert_array_equal(weights, -count * COARSE)
        np.testing.assert_array_equal(kept(line), -count * COARSE)
        assert model.version == count
        assert not model.residual.any()
    untouched()


@pytest.mark.parametrize("direction", ["request", "response"])
@pytest.mark.parametrize("missed", [0, 1, 3, 4])
def test_weights_in_int8(line, connect, direction, missed) -> None:
    """Read by one who has missed some versions."""
    other = opened(connect(line.running, OTHER_WORKER), codec="int8")
    reader = line.client.parameter(NAME)
    reader.get_weights()
    count = 0
    is_first = True

    def call(timeout_s: float | None) -> np.ndarray:
        nonlocal count, is_first
        if is_first:
            for _ in range(missed):
                other.put_gradient(COARSE)
                count += 1
        is_first = False
        found = reader.get_weights(timeout_s=timeout_s)
        is_first = True
        return found

    for weights in line.flips("Exchange", direction, call):
        np.testing.assert_array_equal(weights, -count * COARSE)
        assert reader.version == count


@pytest.mark.parametrize("held", [[5], [1, 1], [1] * 10**5, [2**64 - 1], [0]])
def test_a_client_that_says_it_holds_what_it_can_not(line, held) -> None:
    """Is answered all of it, or refused; others have what they had."""
    model = opened(line.client, codec="int8")
    model.exchange(COARSE)
    image = model._transfer.image
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "held_versions", lambda _: held)
        if len(held) == 1:
            np.testing.assert_array_equal(model.get_weights(), -COARSE)
        else:
            words = f"expected 1, one for each chunk of the slice, or none; got {len(held)}"
            with pytest.raises(shardwell.ArgumentError, match=words):
                model.get_weights()
    np.testing.assert_array_equal(model.get_weights(), -COARSE)
    np.testing.assert_array_equal(model.exchange(COARSE), -2 * COARSE)


class Restored:
    """First weights with all that they can have. See FirstValues."""

    size, array_count, version, learning_rate, load_id = SIZE, 2, 3, 0.5, 77
    samples = b""
    states = ()

    def read(self, array_index: int, where: Any) -> np.ndarray:
        return np.full(where.size, 5.0 + array_index, np.float32)


def test_flipped_bits_of_first_weights(line, monkeypatch) -> None:
    """Names count up, so that many differ in one bit from what exists."""
    optimizer = shardwell.SGD(learning_rate=1.0, momentum=0.5)
    names = iter(f"m{number:04d}" for number in range(10**4))
    stands: dict[str, float] = {}
    under_way = [""]

    def call(timeout_s: float | None) -> str:
        if timeout_s is not None or not stands or under_way[0] in stands:
            under_way[0] = next(names)
        name = under_way[0]
        model = line.client.parameter(name, size=SIZE, optimizer=optimizer)
        attempts = Attempts(timeout_s or 20.0, line.client._shards)
        first = FirstWeights(
            model.spec,
            Restored(),
            channels_of(line.client),
            worker_id=WORKER,
            traffic=Traffic(),
            attempts=attempts,
        )
        assert first.settle() == 3
        stands[name] = 1.0
        return name

    for name in line.flips("InitWeights", "request", call):
        found = line.shard.parameters.get(name)
        np.testing.assert_array_equal(found.storage.weights, 5.0)
        np.testing.assert_array_equal(found.storage.slots[0], 6.0)
        status = found.describe(9)
        assert (status.version_min, status.version_max, status.learning_rate) == (3, 3, 0.5)
        assert status.load_id == 77
    for parameter in line.shard.parameters.all():  # what another's damaged stream brought
        assert parameter.spec.name in stands or not parameter.describe(9).initialized


@pytest.mark.parametrize(
    ("direction", "number"), [("request", 0), ("response", 0), ("response", 1)]
)
@pytest.mark.parametrize("method", ["Snapshot", "ScanRows"])
def test_flipped_bits_of_checkpoints(line, tmp_path, method, direction, number) -> None:
    """The checkpoint is byte for byte what an undisturbed client saves."""
    for value, name in enumerate((NAME, *NEIGHBOURS), start=1):
        if method == "Snapshot":
            opened(line.client, name).put_gradient(np.full(SIZE, value, np.float32))
        else:
            rows = np.full((3, DIM), value, np.float32)
            opened_table(line.client, name).put_row_gradients(IDS, rows)
    paths = iter(tmp_path / str(number) for number in range(10**4))
    chosen = {"Snapshot": {"parameters": [NAME], "tables": []}}.get(
        method, {"parameters": [], "tables": [NAME]}
    )

    def call(timeout_s: float | None) -> shardwell.Checkpoint:
        return line.client.save_checkpoint(next(paths), timeout_s=timeout_s, **chosen)

    first = None
    for found in line.flips(method, direction, call, number):
        first = first or found
        assert (found.parameters, found.tables) == (first.parameters, first.tables)


# Tables.


def opened_table(client: shardwell.Client, name: str = NAME, **options: Any) -> shardwell.Table:
    options = {"codec": "fp32", "optimizer": SGD, "initializer": ZEROS, **options}
    return client.table(name, row_count=ROW_COUNT, dim=DIM, **options)


def rows_of(line: Line, name: str = NAME) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for ids, values in line.shard.tables.get(name).scan.values(with_values=True):
        found.update(zip(ids.tolist(), values.tolist(), strict=True))
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gradients_of_rows(line, connect, mode) -> None:
    for name in NEIGHBOURS:
        opened_table(line.client, name, mode=mode)
    options = {"worker_count": 1 if mode == "sync" else None, "mode": mode}
    table = opened_table(line.client, **options)
    other = None
    if mode == "async":
        other = opened_table(connect(line.running, OTHER_WORKER), **options)
    ones = np.ones((3, DIM), np.float32)

    def call(timeout_s: float | None) -> None:
        table.put_row_gradients(IDS, ones, timeout_s=timeout_s)

    for count, _ in enumerate(line.flips("ExchangeRows", "request", call), start=1):
        if other is not None:
            other.put_row_gradients(IDS, np.zeros((3, DIM)))
        assert rows_of(line) == {int(row): [-count] * DIM for row in IDS}
    assert all(rows_of(line, name) == {} for name in NEIGHBOURS)


@pytest.mark.parametrize("direction", ["request", "response"])
def test_flipped_bits_of_rows(line, direction) -> None:
    every = np.arange(ROW_COUNT)
    values = every[:, None] * np.ones(DIM, np.float32)
    for number, name in enumerate((NAME, *NEIGHBOURS), start=1):
        opened_table(line.client, name).put_row_gradients(every, values * number)
    table = opened_table(line.client)

    def call(timeout_s: float | None) -> np.ndarray:
        return table.get_rows(IDS, min_version=1, timeout_s=timeout_s)

    for rows in line.flips("ExchangeRows", direction, call):
        np.testing.assert_array_equal(rows, -values[IDS])
        assert table.version == 1


@pytest.mark.parametrize(
    ("direction", "number"), [("request", 0), ("response", 0), ("response", 1)]
)
def test_ids_of_rows(line, direction, number) -> None:
    for row, name in enumerate((NAME, *NEIGHBOURS)):
        opened_table(line.client, name).put_row_gradients([row], np.ones((1, DIM)))
    table = opened_table(line.client)

    def call(timeout_s: float | None) -> list[int]:
        return table.row_ids(timeout_s=timeout_s).tolist()

    for ids in line.flips("ScanRows", direction, call, number):
        assert ids == [0]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_rows_that_are_loaded(line, number) -> None:
    """The opening, the rows, or the end is damaged; a load that failed is made again."""
    ids, values = IDS.astype("<i8").tobytes(), np.arange(6, dtype="<f4").tobytes()
    states = np.array([4, 4, 4, 2, 2, 2], "<i8").tobytes()
    spec = table_spec(NAME, ROW_COUNT, DIM)
    with WireWorker(line.running.target, WORKER) as worker:
        for name in NEIGHBOURS:
            WireTable(worker, table_spec(name, ROW_COUNT, DIM))
        table = WireTable(worker, spec)
        opening = table_pb2.LoadRowsRequest(
            open=table.opening(0), rows=table_pb2.Rows(), version=5, learning_rate=0.5, load_id=7
        )
        opening.open.incarnation = table.answers[0].incarnation
        rows = table_pb2.LoadRowsRequest(
            rows=table_pb2.Rows(row_count=3), payload=ids + values + states
        )
        end = table_pb2.LoadRowsRequest(rows=table_pb2.Rows(), finish=True)
        messages = [
            wire_crc.seal(message, *wire_crc.rows_load(opening)).SerializeToString()
            for message in (opening, rows, end)
        ]
        load = worker.channels[0].stream_unary(
            "/shardwell.v1.TableService/LoadRows",
            response_deserializer=table_pb2.LoadRowsResponse.FromString,
        )
        payload_size = len(rows.payload) if number == 1 else 0
        for bit in range(0, 8 * (len(messages[number]) - payload_size), line.stride):
            damaged = bytearray(messages[number])
            damaged[bit // 8] ^= 1 << bit % 8
            sent = [*messages[:number], bytes(damaged), *messages[number + 1 :]]
            try:
                assert load(iter(sent), timeout=PATIENCE_S).row_count == 3
            except grpc.RpcError:
                assert load(iter(messages), timeout=PATIENCE_S).row_count == 3
            (status,) = table.status()
            assert (status.version, status.learning_rate, status.load_id) == (5, 0.5, 7)
            assert status.incarnation == table.answers[0].incarnation
            assert rows_of(line) == {3: [0, 1], 4: [2, 3], 9: [4, 5]}
        for name in NEIGHBOURS:
            (status,) = WireTable(worker, table_spec(name, ROW_COUNT, DIM)).status()
            assert (status.loading, status.load_id) == (False, 0)


# Requests without a payload.


def changes_of(line: Line, kind: str, name: str) -> list[tuple[int, float]]:
    """Learning rates and the steps from which they hold, as the shard has them."""
    shard = line.shard
    of = shard.parameters.get(name)._register if kind == "parameter" else shard.tables.get(name)
    rates = of.rates if kind == "parameter" else of.register.rates
    return list(rates.changes)


@pytest.mark.parametrize("kind", ["parameter", "table"])
def test_flipped_bits_of_learning_rates(line, kind) -> None:
    """A rate, a step or a name with another bit is none that a client asked for."""
    open_one = opened if kind == "parameter" else opened_table
    for name in NEIGHBOURS:
        open_one(line.client, name)
    before = {name: changes_of(line, kind, name) for name in NEIGHBOURS}
    changed = open_one(line.client)
    method = {"parameter": "SetLearningRate", "table": "SetTableLearningRate"}[kind]
    rate = 0.75

    def call(timeout_s: float | None) -> None:
        changed.set_learning_rate(rate, timeout_s=timeout_s)

    for _ in line.flips(method, "request", call):
        assert [each for _, each in changes_of(line, kind, NAME)][-1] == rate
        assert len(changes_of(line, kind, NAME)) <= 2
        rate = 1.5 - rate
    assert {name: changes_of(line, kind, name) for name in NEIGHBOURS} == before


def test_flipped_bits_of_evictions(line) -> None:
    """A damaged step or name would take rows that are to stay."""
    ones = np.ones((3, DIM), np.float32)
    for name in (NAME, *NEIGHBOURS):
        table = opened_table(line.client, name)
        for _ in range(3):
            table.put_row_gradients(IDS, ones)
    table = opened_table(line.client)

    def call(timeout_s: float | None) -> int:
        return table.evict(older_than_step=1, timeout_s=timeout_s)

    for count in line.flips("EvictRows", "request", call):
        assert count == 0
        for name in (NAME, *NEIGHBOURS):
            assert rows_of(line, name) == {int(row): [-3] * DIM for row in IDS}


@pytest.mark.parametrize(
    ("kind", "method"),
    [("parameter", "CreateParameter"), ("parameter", "ClaimInit"), ("table", "OpenTable")],
)
def test_flipped_bits_of_openings(line, kind, method) -> None:
    """The parameter has the spec that was meant, and nothing else is made."""
    names = iter(f"m{number:05d}" for number in range(10**5))
    made: list[str] = []
    optimizer = shardwell.Adam(learning_rate=0.5, beta1=0.25)

    def call(timeout_s: float | None) -> None:
        if timeout_s is not None or not made or made[-1] in specs():
            made.append(next(names))
        name = made[-1]
        if kind == "table":
            line.client.table(name, row_count=ROW_COUNT, dim=DIM, optimizer=optimizer)
            return
        model = line.client.parameter(name, size=SIZE, worker_count=3, optimizer=optimizer)
        if method == "ClaimInit":
            model.init(np.ones(SIZE, np.float32), timeout_s=timeout_s)

    def specs() -> dict[str, Any]:
        shard = line.shard
        every = shard.parameters.all() if kind == "parameter" else shard.tables.all()
        return {each.spec.name: each.spec for each in every}

    for _ in line.flips(method, "request", call):
        assert specs().keys() <= {*made}
        assert {spec.optimizer for spec in specs().values()} == {optimizer}
        if kind == "parameter":
            assert {(spec.size, spec.worker_count) for spec in specs().values()} == {(SIZE, 3)}
        else:
            assert {(spec.row_count, spec.dim) for spec in specs().values()} == {(ROW_COUNT, DIM)}
        if method == "ClaimInit":
            assert line.shard.parameters.get(made[-1])._register._first.epoch >> 32 <= 2


# Answers without a payload.


@pytest.mark.parametrize("kind", ["parameter", "table"])
def test_what_openings_answer(line, kind) -> None:
    """Whether a slice is empty, how far training is, and where: never another than it is."""
    if kind == "table":
        with opened_table(line.client) as table:
            for _ in range(2):
                table.put_row_gradients(IDS, np.full((3, DIM), 3, np.float32))
    else:
        with contextlib.closing(opened(line.client, codec="fp32")) as model:
            for _ in range(2):
                model.put_gradient(np.full(SIZE, 3, np.float32))

    def call(timeout_s: float | None) -> Any:
        if kind == "table":
            with line.client.table(
                NAME, row_count=ROW_COUNT, dim=DIM, optimizer=SGD, codec="fp32", initializer=ZEROS
            ) as found:
                return found.get_rows(IDS), found.next_step, found.version
        model = line.client.parameter(NAME, size=SIZE, optimizer=SGD, codec="fp32")
        with contextlib.closing(model) as found:
            out = np.full(SIZE, -123, np.float32)
            return found.get_weights(out=out), found.next_step, found.version

    method = {"parameter": "CreateParameter", "table": "OpenTable"}[kind]
    for values, next_step, version in line.flips(method, "response", call):
        np.testing.assert_array_equal(values, -6)
        assert (next_step, version) == (2, 2)


@pytest.mark.parametrize("method", ["ClaimInit", "InitWeights"])
def test_what_first_weights_are_answered(line, method) -> None:
    names = iter(f"m{number:05d}" for number in range(10**5))
    values = np.arange(SIZE, dtype=np.float32)

    def call(timeout_s: float | None) -> shardwell.Parameter:
        model = line.client.parameter(next(names), size=SIZE, optimizer=SGD, codec="fp32")
        model.init(values, timeout_s=timeout_s)
        return model

    for model in line.flips(method, "response", call):
        np.testing.assert_array_equal(model.get_weights(), values)
        assert (model.version, model.next_step) == (0, 0)


def test_how_many_rows_were_evicted(line) -> None:
    table = opened_table(line.client)

    def call(timeout_s: float | None) -> int:
        return table.evict(older_than_step=table.next_step, timeout_s=timeout_s)

    for _ in line.flips("EvictRows", "response", call):
        assert rows_of(line) == {}
        table.put_row_gradients(IDS, np.ones((3, DIM), np.float32))
        table.put_row_gradients([], np.ones((0, DIM), np.float32))
        assert table.evict(older_than_step=table.next_step) == 3


@pytest.mark.parametrize("direction", ["request", "response"])
def test_who_a_shard_is(line, direction) -> None:
    """A name of the cluster that was damaged would be believed for as long as the client lives."""
    model = opened(line.client, codec="fp32")
    model.put_gradient(np.full(SIZE, 3, np.float32))

    def call(timeout_s: float | None) -> np.ndarray:
        timeout_s = PATIENCE_S if timeout_s is None else timeout_s
        with shardwell.connect(
            line.address, worker_id="reader", connect_timeout_s=timeout_s, timeout_s=PATIENCE_S
        ) as client:
            (status,) = client.status()
            assert [each.version_max for each in status.parameters] == [1]
            return client.parameter(NAME).get_weights()

    for weights in line.flips("GetStatus", direction, call):
        np.testing.assert_array_equal(weights, -3)


@pytest.mark.parametrize("direction", ["request", "response"])
def test_groups_that_meet(line, direction) -> None:
    def call(timeout_s: float | None) -> tuple[int, int, float]:
        values = np.ones(3, np.float32)
        with shardwell.join_group(
            "job", rank=0, size=1, rendezvous=line.address, timeout_s=PATIENCE_S
        ) as group:
            group.all_reduce(values)
            return group.rank, group.size, float(values.sum())

    for found in line.flips("JoinGroup", direction, call):
        assert found == (0, 1, 3.0)


# Sessions.


def test_flipped_bits_of_sessions(line) -> None:
    """A client whose session arrived as another one goes on by itself."""
    opened(line.client, codec="fp32", mode="async", worker_count=None)
    line.client.close()
    count = 0

    def call(timeout_s: float | None) -> None:
        nonlocal count
        with shardwell.connect(line.address, worker_id="w1", timeout_s=PATIENCE_S) as client:
            opened(client, codec="fp32", mode="async", worker_count=None).put_gradient(
                np.ones(SIZE, np.float32)
            )
        count += 1

    for _ in line.flips("Attend", "request", call):
        np.testing.assert_array_equal(kept(line), -count)


@pytest.mark.parametrize("field", ["session", "worker_id"])
def test_a_shard_that_knows_another_session_instead(line, field) -> None:
    """However that came to be: its client ends that call, and makes another one."""

    def changed(message: bytes) -> bytes:
        request = session_pb2.AttendRequest.FromString(message)
        setattr(request, field, {"session": request.session ^ 1, "worker_id": "w7"}[field])
        if field == "worker_id":
            request.session ^= 1
        return bytes(wire_crc.seal_message(request).SerializeToString())

    line.watch("Attend", "request", changed)
    with shardwell.connect(line.address, worker_id="w1", timeout_s=PATIENCE_S) as client:
        opened(client, codec="fp32").put_gradient(np.ones(SIZE, np.float32))
        eventually("the call has come", lambda: line.is_done)
        np.testing.assert_array_equal(kept(line), -1)


def test_sessions_that_end(line) -> None:
    """None but the one that was meant, and never one that goes on."""
    with WireWorker(line.running.target, OTHER_WORKER) as worker:
        model = worker.create(spec(NAME, SIZE))
        model.init(np.zeros(SIZE))
        request = wire_crc.seal_message(
            session_pb2.EndSessionRequest(shard=worker.identities[0], session=worker.session)
        ).SerializeToString()
        end = worker.channels[0].unary_unary("/shardwell.v1.SessionService/EndSession")
        for count, bit in enumerate(range(0, 8 * len(request), line.stride), start=1):
            damaged = bytearray(request)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(grpc.RpcError):
                end(bytes(damaged), timeout=PATIENCE_S)
            model.push(np.ones(SIZE))
            np.testing.assert_array_equal(kept(line), -count)


# Where a step ends.


@pytest.mark.parametrize("field", ["end_of_step", "counts_only", "wait_timeout_ms"])
@pytest.mark.parametrize("number", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("verb", ["put_gradient", "exchange"])
def test_where_a_step_ends(line, verb, number, field) -> None:
    """Of two chunks, one says something else than was sent; the next call finds no step begun."""
    model = line.client.parameter("pair", size=2048, optimizer=SGD, codec="fp32")
    model.init(np.zeros(2048, np.float32))
    getattr(model, verb)(np.ones(2048, np.float32))

    def changed(message: bytes) -> bytes:
        request = pb.ExchangeRequest.FromString(message)
        gradient = request.gradient
        assert gradient.end_of_step == (number == 1)
        setattr(gradient, field, int(not getattr(gradient, field)))
        return bytes(request.SerializeToString())

    line.watch("Exchange", "request", changed, number)
    with pytest.raises(shardwell.CorruptChunkError, match="is damaged"):
        getattr(model, verb)(np.ones(2048, np.float32))
    assert line.is_done
    getattr(model, verb)(np.ones(2048, np.float32))
    np.testing.assert_array_equal(model.get_weights(min_version=2), -2)


# Groups. Every bit of peers' chunks: tests/unit/group/test_refusals.py.


def test_a_verdict_that_was_damaged_mixes_no_mean(cluster, monkeypatch) -> None:
    """One rank gets other sample counts than the others: no rank gets a result."""
    put = Mailbox.put_verdict

    def damaged(self: Mailbox, verdict: peer_pb2.Verdict) -> None:
        if not taken and len(verdict.sample_counts) == 2:
            taken.append(verdict.sample_counts[0])
            verdict.sample_counts[0] ^= 4
        put(self, verdict)

    def mean(group: shardwell.Group) -> str:
        values = np.full(100, group.rank, np.float32)
        try:
            group.all_reduce(values, op="mean", sample_count=1 + group.rank)
        except ShardwellError as error:
            return type(error).__name__
        return f"result {values[0]}"

    taken: list[int] = []
    monkeypatch.setattr(Mailbox, "put_verdict", damaged)
    found = on_ranks(2, cluster(1).target, mean)
    assert taken == [1]
    assert not any(what.startswith("result") for what in found), found
