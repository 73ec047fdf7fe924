"""Goal: where payloads lie changes no bit, and what changes under a reader's eyes is not believed.

Method: collectives of real messages whose payloads lie in memory that a test plays with; what is
computed while it is written is held against what is written from an array.
"""

from __future__ import annotations

import numpy as np
import pytest
from fastcrc import crc32

from harness.oracles.codec import encoded
from harness.oracles.reductions import bits, normal
from shardwell.errors import CorruptChunkError
from shardwell.group.schedule.arithmetic import ChunkArithmetic, Reduction
from shardwell.group.schedule.collective import Arrival, Collective, Sending
from shardwell.group.schedule.plan import Operation, Plan
from shardwell.group.schedule.strategies import Centralized, Ring, Strategy, Tree
from shardwell.numerics.codec import SUMMED_CODECS, Bytes, Computed, Float32
from shardwell.numerics.elementwise import add_scaled
from shardwell.numerics.weighted_mean import MeanFactors
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire import messages as framing
from shardwell.wire.messages import Room

LENGTH = 30_011
CHUNK = 5_003


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
    arrays = normal(size, LENGTH)
    ranks = [
        Collective(
            Plan(
                operation=Operation.ALL_REDUCE,
                strategy=strategy,
                rank=rank,
                size=size,
                root=0,
                element_count=LENGTH,
                chunk_element_count=CHUNK,
            ),
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
    array = normal(1, CHUNK)[0]
    arithmetic = ChunkArithmetic(
        array.copy(), call_index=3, context=5, codec_name="fp16", reduction=Reduction.SUM
    )
    plan = Plan(
        operation=Operation.ALL_REDUCE,
        strategy=Ring(),
        rank=0,
        size=2,
        root=0,
        element_count=CHUNK,
        chunk_element_count=CHUNK,
    )
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
