"""What a stream of Exchange carries beside exchanges: gradients that are only counted, and fetches.

Goal: each of them alone does what PutGradient and GetWeights do, in any order on one stream, and
what is wrong is refused with nothing counted. The worker shares no code with the SDK.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from harness.polling import PATIENCE_S
from harness.wire_client import crc as wire_crc
from harness.wire_client.worker import WireParameter, WireWorker, error_detail, sgd, spec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2 as types

SIZE, CHUNK_COUNT = 40, 3
ONES = np.ones(SIZE, np.float32)


class Stream:
    """A stream of Exchange that stays open."""

    def __init__(self, worker: WireWorker) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers = worker.stubs[0].Exchange(iter(self._messages.get, None), timeout=PATIENCE_S)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._messages.put(message)

    def weights(self, model: WireParameter, min_version: int = 0) -> np.ndarray:
        """The answers to a fetch."""
        found = np.full(SIZE, np.nan, np.float32)
        model.take(
            model.slices[0], [next(self.answers) for _ in range(CHUNK_COUNT)], found, min_version
        )
        return found

    def error(self) -> grpc.RpcError:
        """How it ends, after answers or none."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self.answers)
        return caught.value

    def end(self) -> None:
        self._messages.put(None)
        assert not list(self.answers)


@pytest.fixture
def worker(cluster) -> Iterator[WireWorker]:
    with WireWorker(cluster(1, chunk_size_bytes=64).target, "w") as worker:
        yield worker


def created(worker: WireWorker, name: str = "m", **fields: Any) -> WireParameter:
    model = worker.create(spec(name, SIZE, optimizer=sgd(1.0), **fields))
    model.init(np.zeros(SIZE))
    return model


def counting(model: WireParameter, step: int, value: float = 1.0) -> list[Any]:
    """A gradient of which only the counts are wanted."""
    messages = model.gradient_messages(pb.ExchangeRequest, 0, value * ONES, step=step)
    for message in messages:
        message.gradient.counts_only = True
    return messages


def test_all_of_them_on_one_stream(worker) -> None:
    first, second = created(worker), created(worker, "n")
    stream = Stream(worker)
    stream.send(first.fetch(0))
    np.testing.assert_array_equal(stream.weights(first), 0)
    stream.send(*counting(first, 0))
    counted = next(stream.answers).counted
    assert (counted.counted_chunk_count, counted.duplicate_chunk_count) == (CHUNK_COUNT, 0)
    stream.send(*counting(first, 0))
    counted = next(stream.answers).counted
    assert (counted.counted_chunk_count, counted.duplicate_chunk_count) == (0, CHUNK_COUNT)
    stream.send(second.fetch(0))
    np.testing.assert_array_equal(stream.weights(second), 0)
    stream.send(*first.gradient_messages(pb.ExchangeRequest, 0, ONES, step=1), first.fetch(0))
    assert stream.weights(first, 2)[0] == -2
    np.testing.assert_array_equal(stream.weights(first, 2), -2)
    stream.end()


def test_a_step_of_both_kinds(worker) -> None:
    """Weights come for those chunks that ask for them; the count is of the others."""
    model = created(worker)
    stream = Stream(worker)
    messages = counting(model, 0)
    messages[1].gradient.counts_only = False
    stream.send(*messages)
    assert next(stream.answers).chunk.chunk_index == 1
    assert next(stream.answers).counted.counted_chunk_count == CHUNK_COUNT - 1
    np.testing.assert_array_equal(model.pull(min_version=1), -1)
    stream.end()


def test_the_last_chunk_alone_asks_for_weights(worker) -> None:
    """The others are counted, and said to be, nevertheless."""
    model = created(worker)
    stream = Stream(worker)
    messages = counting(model, 0)
    messages[-1].gradient.counts_only = False
    stream.send(*messages, model.fetch(0))
    assert next(stream.answers).chunk.chunk_index == CHUNK_COUNT - 1
    assert next(stream.answers).counted.counted_chunk_count == CHUNK_COUNT - 1
    np.testing.assert_array_equal(stream.weights(model, 1), -1)
    stream.end()


def test_a_fetch_waits_for_other_workers_and_names_them(worker, cluster) -> None:
    model = created(worker, worker_count=2)
    stream = Stream(worker)
    stream.send(*counting(model, 0), model.fetch(0, min_version=1, wait_timeout_s=0.2))
    assert next(stream.answers).counted.counted_chunk_count == CHUNK_COUNT
    error = stream.error()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error_detail(error).code == types.ERROR_CODE_WORKERS_MISSING


def test_who_only_fetches_needs_no_session(worker) -> None:
    model = created(worker)
    stream = Stream(worker)
    question = model.fetch(0)
    question.open.session = 0
    stream.send(question)
    np.testing.assert_array_equal(stream.weights(model), 0)
    stream.send(*counting(model, 0)[1:])  # which do not open it again
    assert stream.error().code() is grpc.StatusCode.UNAVAILABLE
    assert model.pull()[0] == 0


def test_a_gradient_alone_opens_its_stream_once(worker) -> None:
    model = created(worker)
    messages = model.gradient_messages(pb.PutGradientRequest, 0, ONES)
    messages[1].open.CopyFrom(model.open(0))
    with pytest.raises(grpc.RpcError) as caught:
        worker.stubs[0].PutGradient(iter(messages), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "`open` came in the middle of a step" in caught.value.details()
    np.testing.assert_array_equal(model.exchange(ONES), -1)


def damaged(model: WireParameter) -> Any:
    question = model.fetch(0)
    question.fetch.min_version = 1
    return question


def of_another(model: WireParameter) -> Any:
    question = model.fetch(0)
    question.fetch.crc32c = wire_crc.of_fetch("another", question.fetch)
    return question


def with_gradient(model: WireParameter) -> Any:
    question = model.fetch(0)
    question.gradient.CopyFrom(counting(model, 0)[0].gradient)
    return question


def with_close(model: WireParameter) -> Any:
    question = closing(model)
    question.fetch.CopyFrom(model.fetch(0).fetch)
    return question


def with_payload(model: WireParameter) -> Any:
    question = model.fetch(0)
    question.payload = b"something"
    return question


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (damaged, grpc.StatusCode.DATA_LOSS),
        (of_another, grpc.StatusCode.DATA_LOSS),
        (with_gradient, grpc.StatusCode.INVALID_ARGUMENT),
        (with_close, grpc.StatusCode.INVALID_ARGUMENT),
        (with_payload, grpc.StatusCode.DATA_LOSS),
    ],
)
def test_a_fetch_that_is_none(worker, made: Callable[[WireParameter], Any], code) -> None:
    model = created(worker)
    stream = Stream(worker)
    stream.send(made(model))
    assert stream.error().code() is code
    np.testing.assert_array_equal(model.exchange(ONES), -1)


def closing(model: WireParameter, **fields: Any) -> pb.ExchangeRequest:
    """What asks to close step 0 of a clipped parameter."""
    close = pb.CloseStepRequest(
        shard=model.worker.identities[0], parameter=model.spec.name, wait_timeout_ms=200, **fields
    )
    close.crc32c = wire_crc.of_message(close)
    return pb.ExchangeRequest(open=model.open(0), close=close)


def test_a_step_that_is_clipped_closes_on_a_stream(cluster) -> None:
    """And a reader of one of which gradients are missing gets the missing workers' names."""
    target = cluster(1, chunk_size_bytes=64).target
    optimizer = sgd(1.0)
    optimizer.clip_norm = 1.0
    fields = {"optimizer": optimizer, "worker_count": 2}
    with WireWorker(target, "one") as one, WireWorker(target, "two") as two:
        mine, other = (each.create(spec("m", SIZE, **fields)) for each in (one, two))
        mine.init(np.zeros(SIZE))
        stream = Stream(one)
        stream.send(*counting(mine, 0), closing(mine))
        assert next(stream.answers).counted.counted_chunk_count == CHUNK_COUNT
        error = stream.error()
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "two" in (error.details() or "") or "1 worker" in (error.details() or "")
        other.push(ONES)
        stream = Stream(one)
        stream.send(closing(mine))
        closed = next(stream.answers).closed
        assert list(closed.squares) == [SIZE]
        assert closed.crc32c == wire_crc.of_message(closed)
        stream.send(closing(mine, norm=SIZE**0.5), mine.fetch(0, min_version=1))
        assert next(stream.answers).closed.norm == SIZE**0.5
        np.testing.assert_allclose(stream.weights(mine, 1), -(SIZE**-0.5), rtol=1e-5)
        stream.end()


@pytest.mark.parametrize("what", ["damaged", "another", "with a gradient", "not clipped"])
def test_what_does_not_close_a_step(worker, what) -> None:
    model = created(worker)
    request, code = closing(model), grpc.StatusCode.INVALID_ARGUMENT
    if what == "damaged":
        request.close.step, code = 1, grpc.StatusCode.DATA_LOSS
    elif what == "another":
        request.close.parameter = "another"
        request.close.crc32c = wire_crc.of_message(request.close)
    elif what == "with a gradient":
        request.gradient.CopyFrom(counting(model, 0)[0].gradient)
    stream = Stream(worker)
    stream.send(request)
    assert stream.error().code() is code
    np.testing.assert_array_equal(model.exchange(ONES), -1)


def test_a_fetch_in_the_middle_of_a_step(worker) -> None:
    model = created(worker)
    stream = Stream(worker)
    question = model.fetch(0)
    question.ClearField("open")
    stream.send(counting(model, 0)[0], question)
    error = stream.error()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "in the middle of a step" in (error.details() or "")
    np.testing.assert_array_equal(model.exchange(ONES), -1)


def test_a_fetch_into_an_arena_that_is_not_there(worker) -> None:
    """The weights come inline."""
    model = created(worker)
    stream = Stream(worker)
    question = model.fetch(0)
    question.fetch.in_arena = True
    question.fetch.crc32c = wire_crc.of_fetch("m", question.fetch)
    stream.send(question)
    np.testing.assert_array_equal(stream.weights(model), 0)
    stream.end()
