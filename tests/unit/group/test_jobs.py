"""Goal: jobs on different chunks may be done beside each other, in any order: no bit changes.

Method: ranks without sockets take what has come in rounds, as an engine does: they decide about
several chunks, do their jobs in an order that a seed draws, and send what comes of them in the
order in which they were decided. Payloads go through memory whose places are used again, as those
that ranks of one machine share. Oracle: the same call, one message at a time, and no such memory.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from fastcrc import crc32

from harness.group.plans import plan_of
from harness.oracles.codec import encoded
from harness.oracles.reductions import bits, normal
from harness.oracles.reductions import run as run_one_by_one
from shardwell.errors import CorruptChunkError
from shardwell.group.schedule.arithmetic import ChunkArithmetic, Reduction
from shardwell.group.schedule.collective import Arrival, Collective, Job, Sending
from shardwell.group.schedule.plan import Operation, Plan
from shardwell.group.schedule.strategies import Centralized, Ring, Strategy, Tree
from shardwell.numerics.codec import SUMMED_CODECS, Bytes, Computed, Float32
from shardwell.numerics.elementwise import add_scaled
from shardwell.numerics.weighted_mean import MeanFactors
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire import messages as framing
from shardwell.wire.messages import Room

SIZE = 4
CHUNK = 40
LENGTH = 7 * SIZE * CHUNK + 13
CONTEXT = 11
PLACE_COUNT = 3


class Link:
    """Messages under way from one rank to another, with as many places as `peers._Places` has."""

    def __init__(self) -> None:
        self.messages: deque[Sending] = deque()
        self._places = [np.zeros(4 * CHUNK, np.uint8) for _ in range(PLACE_COUNT)]
        self._put_count = self._copied_count = 0

    def room(self, size_bytes: int) -> Room | None:
        """As `peers._Places.room`: places are taken in the order of the messages."""
        if self._put_count - self._copied_count == PLACE_COUNT:
            return None
        place = self._put_count % PLACE_COUNT
        self._put_count += 1
        return Room(place, self._places[place][:size_bytes])

    def arrival(self, source: int) -> Arrival:
        sending = self.messages.popleft()
        header, payload = framing.parse(pb.ReceiveChunksResponse, sending.message)
        if sending.shared_bytes:
            payload = self._places[header.chunk.shared.offset][: sending.shared_bytes]
            return Arrival(
                source, header, payload, sending.message, sending.shared_bytes, self.give
            )
        return Arrival(source, header, payload, sending.message)

    def give(self) -> None:
        """The place of what came first is free, and the next payload will be there."""
        self._places[self._copied_count % PLACE_COUNT][:] = 0xFF
        self._copied_count += 1


class Rank:
    """One that works in rounds."""

    def __init__(
        self, plan: Plan, array: Float32, links: dict[tuple[int, int], Link], **options
    ) -> None:
        self.plan = plan
        self.links = links
        self.most_chunks = 0
        self.arithmetics = [ChunkArithmetic(array, **options) for _ in range(7)]
        self.collective = Collective(
            plan,
            self.arithmetics[0],
            room_of=lambda target, size_bytes: links[plan.rank, target].room(size_bytes),
        )

    def act(self, chance: random.Random) -> bool:
        """A round of up to so many chunks; False: there is nothing to do."""
        chunk_count = chance.randint(1, len(self.arithmetics))
        decided: list[Job] = []
        by_chunk: dict[int, list[int]] = {}
        while len(by_chunk) < chunk_count:
            come = [source for source in self.plan.sources if self.link(source).messages]
            if self.collective.may_enter:
                job = self.collective.begin()
            elif come:
                source = chance.choice(come)
                job = self.collective.admit(self.link(source).arrival(source))
            else:
                break
            by_chunk.setdefault(job.chunk_index, []).append(len(decided))
            decided.append(job)
        made: dict[int, list[Sending]] = {}
        pieces = list(enumerate(by_chunk.values()))
        chance.shuffle(pieces)
        for place, numbers in pieces:
            for number in numbers:
                made[number] = self.collective.made(decided[number], self.arithmetics[place])
        for job in decided:
            if job.arrival is not None and job.arrival.release is not None:
                job.arrival.release()
        for number in range(len(decided)):
            for sending in made[number]:
                self.links[self.plan.rank, sending.rank].messages.append(sending)
        self.most_chunks = max(self.most_chunks, len(by_chunk))
        return bool(decided)

    def link(self, source: int) -> Link:
        return self.links[source, self.plan.rank]


def run_in_rounds(
    operation: Operation,
    strategy: Strategy,
    arrays: list[Float32],
    codec: str,
    reduction: Reduction,
    seed: int,
) -> tuple[list[Float32], int]:
    """What each rank ends with, and how many chunks were in one round."""
    chance = random.Random(seed)
    counts = [rank + 1 for rank in range(SIZE)]
    weights = MeanFactors(counts)
    is_mean = reduction is Reduction.MEAN
    links = {(source, to): Link() for source in range(SIZE) for to in range(SIZE)}
    results = [array.copy() for array in arrays]
    ranks = [
        Rank(
            plan_of(rank, SIZE, LENGTH, CHUNK, operation=operation, strategy=strategy, root=2),
            array,
            links,
            call_index=0,
            context=CONTEXT,
            codec_name=codec,
            reduction=reduction,
            factor=weights.factor(rank) if is_mean else 1.0,
            divisor=weights.divisor if is_mean else 1.0,
        )
        for rank, array in enumerate(results)
    ]
    while True:
        turn = chance.sample(ranks, SIZE)
        if not any(rank.act(chance) for rank in turn):
            break
    assert all(rank.collective.is_done for rank in ranks)
    assert not any(link.messages for link in links.values())
    return results, max(rank.most_chunks for rank in ranks)


@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.MEAN, Reduction.MAX])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("strategy", [Ring(), Tree(2), Tree(3), Centralized()], ids=str)
@pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.value)
def test_no_bit_depends_on_rounds(operation, strategy, codec, reduction) -> None:
    arrays = normal(SIZE, LENGTH)
    expected = run_one_by_one(
        operation,
        strategy,
        arrays,
        root=2,
        codec=codec,
        reduction=reduction,
        sample_counts=[rank + 1 for rank in range(SIZE)],
        chunk=CHUNK,
    )
    most = 0
    for seed in range(4):
        found, chunk_count = run_in_rounds(operation, strategy, arrays, codec, reduction, seed)
        assert [bits(array) for array in found] == [bits(array) for array in expected]
        most = max(most, chunk_count)
    assert most > 1


def test_a_damaged_message_of_a_round_is_refused() -> None:
    """By the job, and by its CRC32C: its place alone was looked at before."""
    (array,) = normal(1, CHUNK)
    plan = plan_of(1, 2, CHUNK, CHUNK, operation=Operation.BROADCAST)
    options = {"call_index": 0, "context": CONTEXT, "codec_name": "fp32"}
    sender = ChunkArithmetic(array, reduction=Reduction.SUM, **options)
    (message,) = sender.finish(0, plan.chunks[0][0], None, [None])
    header, payload = framing.parse(pb.ReceiveChunksResponse, message)
    into = np.zeros(CHUNK, np.float32)
    arithmetic = ChunkArithmetic(into, reduction=Reduction.SUM, **options)
    damaged = payload.copy()
    damaged[-1] ^= 1
    collective = Collective(plan, arithmetic)
    job = collective.admit(Arrival(0, header, damaged, message))
    with pytest.raises(CorruptChunkError, match="CRC32C"):
        collective.made(job, arithmetic)
    assert not into.any()
    for field, value, why in (
        ("chunk_index", 1, "CRC32C"),  # where there is no such chunk
        ("crc32c", header.chunk.crc32c ^ 1, "CRC32C"),
    ):
        other = pb.ReceiveChunksResponse()
        other.CopyFrom(header)
        setattr(other.chunk, field, value)
        collective = Collective(plan, arithmetic)
        with pytest.raises(CorruptChunkError, match=why):
            collective.made(collective.admit(Arrival(0, other, payload, message)), arithmetic)
    assert not into.any()
    collective = Collective(plan, arithmetic)
    collective.made(collective.admit(Arrival(0, header, payload, message)), arithmetic)
    np.testing.assert_array_equal(into, array)


# Where payloads lie changes no bit, and what changes under a reader's eyes is not believed.
# Method: collectives of real messages whose payloads lie in memory that a test plays with; what is
# computed while it is written is held against what is written from an array.


PAYLOAD_LENGTH = 30_011
PAYLOAD_CHUNK = 5_003


class Places:
    """Shared memory that grows: a room for each payload, or for each second one."""

    def __init__(self, every: int) -> None:
        self.rooms: dict[int, Bytes] = {}
        self._every = every
        self._asked_count = 0

    def room(self, rank: int, size_bytes: int) -> Room | None:
        self._asked_count += 1
        if not self._every or self._asked_count % self._every:
            return None
        room = Room(64 * (len(self.rooms) + 1), np.zeros(size_bytes, np.uint8))
        self.rooms[room.offset] = room.memory
        return room

    def arrival(self, source: int, sending: Sending) -> Arrival:
        header, payload = framing.parse(pb.ReceiveChunksResponse, sending.message)
        assert header.chunk.HasField("shared") == bool(sending.shared_bytes)
        if sending.shared_bytes:
            payload = self.rooms[header.chunk.shared.offset]
            assert header.chunk.shared.size == payload.size == sending.shared_bytes
        return Arrival(source, header, payload, sending.message, sending.shared_bytes)


def reduced(
    strategy: Strategy, codec: str, reduction: Reduction, every: int, size: int = 4
) -> tuple[list[Float32], int]:
    """What each rank ends with, and how many payloads were shared; spoiled once they were read."""
    places = Places(every)
    weights = MeanFactors([rank + 1 for rank in range(size)])
    is_mean = reduction is Reduction.MEAN
    arrays = normal(size, PAYLOAD_LENGTH)
    ranks = [
        Collective(
            plan_of(rank, size, PAYLOAD_LENGTH, PAYLOAD_CHUNK, strategy=strategy),
            ChunkArithmetic(
                array,
                call_index=3,
                context=5,
                codec_name=codec,
                reduction=reduction,
                factor=weights.factor(rank) if is_mean else 1.0,
                divisor=weights.divisor if is_mean else 1.0,
            ),
            room_of=places.room,
        )
        for rank, array in enumerate(arrays)
    ]
    waiting: list[tuple[int, Sending]] = []
    while not all(each.is_done for each in ranks):
        for rank, collective in enumerate(ranks):
            while collective.may_enter:
                waiting += [(rank, sending) for sending in collective.enter()]
        source, sending = waiting.pop(0)
        arrival = places.arrival(source, sending)
        waiting += [(sending.rank, each) for each in ranks[sending.rank].receive(arrival)]
        if sending.shared_bytes:
            arrival.payload[:] = 0xFF  # as when its place has been given back
    return arrays, len(places.rooms)


@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.MEAN, Reduction.MAX])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("strategy", [Ring(), Tree(2), Centralized()], ids=str)
def test_no_bit_depends_on_where_payloads_lie(
    strategy: Strategy, codec: str, reduction: Reduction
) -> None:
    expected, _ = reduced(strategy, codec, reduction, 0)
    for every in (1, 2):
        found, shared_count = reduced(strategy, codec, reduction, every)
        assert shared_count
        assert [bits(array) for array in found] == [bits(array) for array in expected]


def test_what_changes_after_it_was_checked_is_not_used() -> None:
    array = normal(1, PAYLOAD_CHUNK)[0]
    arithmetic = ChunkArithmetic(
        array.copy(), call_index=3, context=5, codec_name="fp16", reduction=Reduction.SUM
    )
    plan = plan_of(0, 2, PAYLOAD_CHUNK, PAYLOAD_CHUNK)
    where = plan.chunks[0][0]
    payload = np.zeros(arithmetic.payload_bytes(where), np.uint8)
    message = arithmetic.contribution(0, where, Room(64, payload))
    header, _ = framing.parse(pb.ReceiveChunksResponse, message)
    stored = arithmetic.opened(arithmetic.checked(header, payload), where)
    kept = arithmetic.kept(stored)
    before = payload.copy()
    payload[:] ^= 0xFF
    np.testing.assert_array_equal(stored, before)
    with pytest.raises(CorruptChunkError, match="CRC32C"):
        arithmetic.checked(header, payload)
    np.testing.assert_array_equal(kept, before)


@pytest.mark.parametrize("spoiled", [None, np.nan, np.inf, -np.inf, 3e38, 7e4, 1e-30])
@pytest.mark.parametrize("where", [0, 70_000])
@pytest.mark.parametrize("size", [1, 4096, 4097, 65_537, 200_001])
@pytest.mark.parametrize("codec_name", list(SUMMED_CODECS))
def test_what_is_computed_is_written_as_from_an_array(
    codec_name: str, size: int, where: int, spoiled: float | None
) -> None:
    codec = SUMMED_CODECS[codec_name]
    first, second = normal(2, size)
    if spoiled is not None:
        first[where % size] = spoiled
    payload = encoded(codec_name, first, allow_non_finite=True)
    operations = codec.reads(0, 2, 1.0) + add_scaled(0, 3, 0.5)
    computed = Computed(operations, (payload, second), np.empty(size, np.float32))
    found = [np.zeros_like(payload) for _ in range(2)]
    crcs = [
        codec.encode(values, to, allow_non_finite=True, crc=7)
        for values, to in zip((computed, computed.values()), found, strict=True)
    ]
    assert crcs[0] == crcs[1] == crc32.iscsi(found[0].tobytes(), 7)
    np.testing.assert_array_equal(*found)
