"""Goal: a worker's values of a version are its shard's image of it, bit by bit, or it is an error.

Method: shards and workers without sockets, in any order of updates, reads, and steps that a shard
loses with its machine and makes anew with other weights; then answers that a shard never gives.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.oracles.int8 import BLOCK, rounded
from harness.threads import together
from shardwell import SGD, Average, ParameterSpec
from shardwell.errors import ArgumentError, CorruptChunkError, DivergedError
from shardwell.numerics.codec import CODECS
from shardwell.parameter.image import Image
from shardwell.placement.slices import Slice
from shardwell.process.spans import Spans
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum, images
from shardwell.wire import messages as framing
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.encoded_weights import EncodedWeights
from shardwell_server.store.contract import Layout
from shardwell_server.store.memory import MemoryStore

SIZE = BLOCK + 50
WHERE = Slice(0, SIZE)
SPEC = ParameterSpec(
    name="p", size=SIZE, optimizer=SGD(learning_rate=1.0), worker_count=1, codec="int8"
)
MEANS = ParameterSpec(name="p", size=SIZE, optimizer=Average(), worker_count=1, codec="int8")
CONTEXT = checksum.context(checksum.Kind.WEIGHTS, "p")


class Shard:
    """One that owns all of a parameter, in one chunk."""

    def __init__(self, spec: ParameterSpec = SPEC) -> None:
        self.spec = spec
        self.version = 0
        self._start(np.zeros(SIZE, np.float32), None)

    def _start(self, weights: np.ndarray, image: np.ndarray | None) -> None:
        layout = Layout(
            name="p",
            slice_size=SIZE,
            chunk_element_count=2 * BLOCK,
            with_sum=False,
            initial_slots=(0.0,),
        )
        storage = MemoryStore().create(layout)
        self.chunk = Chunk(WHERE, 0, 0, storage, self.spec)
        self.chunk.is_verified = True
        self._encoded = EncodedWeights(self.spec, storage, Spans(), count_max=8)
        self.chunk.state.weights[:] = weights
        self.image.begin_first()
        if image is not None:
            self.image.values[:] = image

    @property
    def image(self) -> Any:
        return self.chunk.state.image

    def update(self, weights: np.ndarray, *, is_committed: bool = True) -> None:
        before = [array.copy() for array in self.chunk.arrays]
        self.image.begin()
        for start, stop in ((0, BLOCK), (BLOCK, SIZE)):
            self.chunk.state.weights[start:stop] = weights[start:stop]
            self.image.follow(start, stop)
        self.image.end(self.version + 1)
        self.version += is_committed
        if not is_committed:  # its file system failed: the store takes it back
            for array, old in zip(self.chunk.arrays, before, strict=True):
                array[:] = old

    def kept(self) -> tuple[int, list[np.ndarray]]:
        """What a disk has."""
        return self.version, [array.copy() for array in self.chunk.arrays]

    def restart(self, version: int, arrays: list[np.ndarray]) -> None:
        self.version = version
        self._start(arrays[0], arrays[-1])

    def answer(self, held: int | None = None) -> tuple[pb.ExchangeResponse, np.ndarray]:
        message = self._encoded.message(self.chunk, 0, self.version, held)
        return framing.parse(pb.ExchangeResponse, message)


def read(worker: Image, shard: Shard, *, attempts: int = 1) -> tuple[int, np.ndarray]:
    """As a call does, which is made again after a damaged chunk."""
    out = np.full(SIZE, np.nan, np.float32)
    for attempt in range(attempts):
        try:
            known = worker.held(0)
            return worker.take(0, WHERE, *shard.answer(known), out, known), out
        except CorruptChunkError:
            assert attempt < attempts - 1
    raise AssertionError


class Reading(RuleBasedStateMachine):
    """A shard that loses steps, and workers that miss some; answers may come late."""

    @initialize()
    def begin(self) -> None:
        self.shard = Shard()
        self.workers = [Image(SPEC, CONTEXT) for _ in range(3)]
        self.on_disk = self.shard.kept()
        self.images = {0: self.shard.image.values.copy()}
        self.under_way: list[tuple[int, Any, int, int | None]] = []
        self.past = 0

    @rule(seed=st.integers(0, 2**32 - 1), magnitude=st.sampled_from([1e-30, 1.0, 1e30]))
    def updated(self, seed: int, magnitude: float) -> None:
        random = np.random.default_rng(seed)
        moved = (random.standard_normal(SIZE) * magnitude).astype(np.float32)
        expected = self.shard.image.values + rounded(
            self.shard.chunk.state.weights + moved - self.shard.image.values
        )
        self.shard.update(self.shard.chunk.state.weights + moved)
        assert self.shard.image.values.tobytes() == expected.tobytes()
        self.images[self.shard.version] = expected

    @rule()
    def failed(self) -> None:
        self.shard.update(np.ones(SIZE, np.float32), is_committed=False)

    @rule()
    def synced(self) -> None:
        self.on_disk = self.shard.kept()

    @rule()
    def lost_power(self) -> None:
        self.shard.restart(*self.on_disk)
        version = self.on_disk[0]
        self.images = {each: image for each, image in self.images.items() if each <= version}
        self.under_way.clear()  # with its connections
        self.past += 1

    @rule(number=st.integers(0, 2))
    def has_read(self, number: int) -> None:
        version, values = read(self.workers[number], self.shard, attempts=1 + (self.past > 0))
        assert version == self.shard.version
        assert values.tobytes() == self.images[version].tobytes()

    @rule(number=st.integers(0, 2))
    def asked(self, number: int) -> None:
        """An answer that comes when others may have."""
        known = self.workers[number].held(0)
        self.under_way.append((number, self.shard.answer(known), self.shard.version, known))

    @rule(place=st.integers(0, 9))
    def answered(self, place: int) -> None:
        if not self.under_way:
            return
        number, answer, asked, known = self.under_way.pop(place % len(self.under_way))
        held = self.workers[number].held(0)
        out = np.full(SIZE, np.nan, np.float32)
        try:
            version = self.workers[number].take(0, WHERE, *answer, out, known)
        except CorruptChunkError:
            assert self.past or held is None
            return
        assert version >= asked
        if version in self.images and self.past == 0:
            assert out.tobytes() == self.images[version].tobytes()

    @rule(number=st.integers(0, 2))
    def opened_again(self, number: int) -> None:
        self.workers[number].forget()

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "shard"):
            return
        for worker in self.workers:
            held = worker.held(0)
            if held == self.shard.version and self.past == 0:
                assert worker._values.tobytes() == self.shard.image.values.tobytes()


TestReading = Reading.TestCase


def test_an_answer_that_others_came_before_adds_what_is_new() -> None:
    shard, worker = Shard(), Image(SPEC, CONTEXT)
    read(worker, shard)
    answers = []
    for step in range(3):
        shard.update(np.linspace(-step, 1, SIZE, dtype=np.float32))
        answers.append((shard.answer(0), shard.image.values.copy()))
    out = np.empty(SIZE, np.float32)
    for place, version in ((0, 1), (2, 3), (1, 3)):
        answer, _ = answers[place]
        assert worker.take(0, WHERE, *answer, out) == version
        assert out.tobytes() == answers[version - 1][1].tobytes()


def test_an_old_image_that_comes_late_takes_no_newer_one_away() -> None:
    """As of a read that was asked for before a step, and answered after it."""
    shard, worker = Shard(), Image(SPEC, CONTEXT)
    late = shard.answer(worker.held(0))
    shard.update(np.linspace(-1, 1, SIZE, dtype=np.float32))
    read(worker, shard)
    known = worker.held(0)
    shard.update(np.linspace(-2, 1, SIZE, dtype=np.float32))
    change, out = shard.answer(known), np.empty(SIZE, np.float32)
    assert worker.take(0, WHERE, *late, out, None) == 1
    assert worker.take(0, WHERE, *change, out, known) == 2
    assert out.tobytes() == shard.image.values.tobytes()


def test_a_change_that_was_not_committed_is_not_sent() -> None:
    shard, worker = Shard(), Image(SPEC, CONTEXT)
    shard.update(np.linspace(-1, 1, SIZE, dtype=np.float32))
    read(worker, shard)
    for _ in range(2):
        shard.update(np.ones(SIZE, np.float32), is_committed=False)
        assert shard.answer(0)[0].image.form == pb.IMAGE_FORM_CHANGE
    for step in range(2):
        shard.update(np.linspace(-1, 2 + step, SIZE, dtype=np.float32))
    header, _ = shard.answer(worker.held(0))
    assert header.image.form == pb.IMAGE_FORM_CHANGE
    assert read(worker, shard)[1].tobytes() == shard.image.values.tobytes()


def test_chunks_that_come_at_once_are_all_held() -> None:
    """The first ones, by several threads."""
    spec = replace(SPEC, size=4 * BLOCK)
    values = np.ones(BLOCK, np.float32)
    for _ in range(100):
        worker, barrier = Image(spec, CONTEXT), threading.Barrier(4)

        def take(number: int, worker: Image = worker, barrier: Any = barrier) -> None:
            where = Slice(number * BLOCK, BLOCK)
            message = images.whole_message(1, where, number, values, CONTEXT)
            header, payload = framing.parse(pb.ExchangeResponse, message)
            barrier.wait(60)
            worker.take(number, where, header, payload, np.empty(BLOCK, np.float32))

        together([lambda number=number, take=take: take(number) for number in range(4)])
        assert worker.held_versions(range(4)) == [2] * 4
        assert worker._values.all()


# Weights that are not finite, or nearly so.


def test_the_image_of_finite_weights_is_finite() -> None:
    """Also where the nearest change would take it beyond float32."""
    largest = np.float32(np.finfo(np.float32).max)
    shard, worker = Shard(), Image(SPEC, CONTEXT)
    rows = np.linspace(0.9, 1, 400, dtype=np.float32) * largest
    for step in range(12):
        weights = np.resize(rows[step:], SIZE) * np.float32(-1 if step % 3 == 2 else 1)
        shard.update(weights)
        assert np.isfinite(shard.image.values).all()
        version, values = read(worker, shard)
        assert (version, values.tobytes()) == (step + 1, shard.image.values.tobytes())
        # Off by half a step of the largest change that there is.
        error = np.abs(values.astype(np.float64) - weights)
        assert error.max() <= float(largest) * 2 / 127


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("spec", [SPEC, MEANS], ids=["weights", "means"])
def test_weights_that_are_not_finite_fail_all_readers(spec: ParameterSpec, bad: float) -> None:
    """And those that are finite again go on from what they are."""
    shard, worker = Shard(spec), Image(spec, CONTEXT)
    shard.update(np.ones(SIZE, np.float32))
    read(worker, shard)
    weights = np.full(SIZE, 2, np.float32)
    weights[77] = bad
    shard.update(weights)
    for held in (None, 0, 1, 3):  # no reader holds version 2
        with pytest.raises(DivergedError, match="element 77"):
            shard.answer(held)
    if spec is SPEC:
        shard.update(np.full(SIZE, 3, np.float32))
        version, values = read(worker, shard)
        assert version == 3
        assert values.tobytes() == shard.image.values.tobytes()
        np.testing.assert_array_equal(values, 3)


# Answers that no shard gives.


def sealed(
    form: int, *, version: int = 2, base: int = 1, payload: bytes = b"", crc: int = 0, **chunk: Any
) -> tuple[pb.ExchangeResponse, np.ndarray]:
    """An answer with a CRC that fits."""
    header = pb.ExchangeResponse(version=version)
    header.image.form, header.image.base_version, header.image.crc32c = form, base, crc
    header.chunk.element_count = SIZE
    for name, value in chunk.items():
        setattr(header.chunk, name, value)
    stored = np.frombuffer(payload, np.uint8)
    start = checksum.weights(CONTEXT, version, header.image)
    header.chunk.crc32c = checksum.of_chunk(start, header.chunk, stored)
    return header, stored


CHANGE_BYTES = CODECS["int8"].encoded_bytes(SIZE)
WRONG: dict[str, dict[str, Any]] = {
    "no form": {"form": 0, "payload": bytes(4 * SIZE)},
    "a form of later": {"form": 9, "payload": bytes(4 * SIZE)},
    "a mean of weights": {"form": 4, "payload": bytes(CHANGE_BYTES)},
    "all of nothing": {"form": 1},
    "all, as a change is written": {"form": 1, "payload": bytes(CHANGE_BYTES)},
    "all, elsewhere": {"form": 1, "payload": bytes(4 * SIZE), "element_offset": BLOCK},
    "all, compressed": {"form": 1, "payload": bytes(40), "lz4": True},
    "a change of nothing": {"form": 2},
    "a change as all is written": {"form": 2, "payload": bytes(4 * SIZE)},
    "a change from itself": {"form": 2, "base": 2},
    "a change back": {"form": 2, "base": 3, "payload": bytes(CHANGE_BYTES)},
    "a change from what it does not hold": {
        "form": 2,
        "version": 8,
        "base": 7,
        "payload": bytes(CHANGE_BYTES),
    },
    "too many changes": {"form": 2, "version": 5, "payload": bytes(4 * CHANGE_BYTES)},
    "fewer changes than versions": {"form": 2, "version": 3, "payload": bytes(CHANGE_BYTES)},
    "more changes than versions": {"form": 2, "payload": bytes(2 * CHANGE_BYTES)},
    "a change with another image": {"form": 2, "payload": bytes(CHANGE_BYTES), "crc": 1},
    "a change elsewhere": {"form": 2, "payload": bytes(CHANGE_BYTES), "element_count": 50},
    "a change to the largest version": {
        "form": 2,
        "version": 2**64 - 1,
        "base": 2**64 - 2,
        "payload": bytes(CHANGE_BYTES),
    },
    "the same with a payload": {"form": 3, "version": 1, "payload": bytes(CHANGE_BYTES)},
    "the same of another version": {"form": 3},
    "the same of what it does not hold": {"form": 3, "version": 7, "base": 7},
    "the same with another image": {"form": 3, "version": 1, "crc": 1},
    "a change that is not finite": {
        "form": 2,
        "payload": np.full(2, np.nan, "<f4").tobytes() + bytes(SIZE),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_no_shard_gives_is_refused(name: str) -> None:
    shard, worker = Shard(), Image(SPEC, CONTEXT)
    shard.update(np.linspace(-1, 1, SIZE, dtype=np.float32))
    read(worker, shard)
    with pytest.raises((CorruptChunkError, ArgumentError)):
        worker.take(0, WHERE, *sealed(**WRONG[name]), np.empty(SIZE, np.float32))
    shard.update(np.linspace(-1, 2, SIZE, dtype=np.float32))
    version, values = read(worker, shard)
    assert (version, values.tobytes()) == (2, shard.image.values.tobytes())


@pytest.mark.parametrize("form", [0, 2, 3, 9])
def test_an_average_has_no_changes(form: int) -> None:
    shard, worker = Shard(MEANS), Image(MEANS, CONTEXT)
    shard.update(np.linspace(-1, 1, SIZE, dtype=np.float32))
    read(worker, shard)
    payload = bytes(CHANGE_BYTES) if form != 3 else b""
    version = 1 if form == 3 else 2
    with pytest.raises((CorruptChunkError, ArgumentError)):
        worker.take(
            0, WHERE, *sealed(form, version=version, payload=payload), np.empty(SIZE, np.float32)
        )


@pytest.mark.parametrize("held", [1, 5, 2**62, 2**64 - 2])
def test_a_worker_that_says_it_holds_what_is_not_there_has_all_of_it(held: int) -> None:
    shard = Shard()
    header, payload = shard.answer(held)
    assert header.image.form == pb.IMAGE_FORM_WHOLE
    assert payload.size == 4 * SIZE


@pytest.mark.parametrize("missed", range(1, 6))
def test_up_to_three_changes_come_as_such(missed: int) -> None:
    shard, worker = Shard(), Image(SPEC, CONTEXT)
    read(worker, shard)
    for step in range(missed):
        shard.update(np.linspace(-step, 1, SIZE, dtype=np.float32))
    header, payload = shard.answer(worker.held(0))
    is_whole = missed > 3
    assert header.image.form == (pb.IMAGE_FORM_WHOLE if is_whole else pb.IMAGE_FORM_CHANGE)
    assert payload.size == (4 * SIZE if is_whole else missed * CHANGE_BYTES)
    assert read(worker, shard)[1].tobytes() == shard.image.values.tobytes()
