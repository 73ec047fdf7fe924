"""Goal: a chunk that is damaged or has no place in a call is refused, and changes nothing.

Method: a rank of a group of four is stopped in the middle of an all-reduce, just before a message
that it waits for; what comes instead is spoilt in one way. Then the right one comes, and the result
is as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.group.plans import plan_of
from shardwell.errors import CorruptChunkError
from shardwell.group.schedule.arithmetic import ChunkArithmetic, Reduction
from shardwell.group.schedule.collective import Arrival, Collective, Sending
from shardwell.group.schedule.strategies import Centralized, Ring, Strategy, Tree
from shardwell.numerics.codec import Float32
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing

SIZE, LENGTH, CHUNK = 4, 24, 3
CONTEXT = 77
Spoil = Callable[[Arrival], Arrival]


class Stage:
    """Four ranks, whose messages wait in the order in which they were sent."""

    def __init__(self, strategy: Strategy, codec: str) -> None:
        random = np.random.default_rng(1)
        self.arrays: list[Float32] = [
            random.integers(-9, 9, LENGTH).astype(np.float32) for _ in range(SIZE)
        ]
        self.total = sum(self.arrays)
        self.waiting: list[tuple[int, Sending]] = []
        self.ranks = []
        for rank, array in enumerate(self.arrays):
            plan = plan_of(rank, SIZE, LENGTH, CHUNK, strategy=strategy)
            arithmetic = ChunkArithmetic(
                array, call_index=9, context=CONTEXT, codec_name=codec, reduction=Reduction.SUM
            )
            self.ranks.append(Collective(plan, arithmetic))

    def enter(self) -> None:
        for rank, collective in enumerate(self.ranks):
            while collective.may_enter:
                self.waiting += [(rank, sending) for sending in collective.enter()]

    def next(self) -> tuple[int, Arrival]:
        """(to whom, what) comes next."""
        source, sending = self.waiting[0]
        header, payload = framing.parse(pb.ReceiveChunksResponse, sending.message)
        return sending.rank, Arrival(source, header, payload, sending.message)

    def deliver(self) -> None:
        target, arrival = self.next()
        del self.waiting[0]
        sendings = self.ranks[target].receive(arrival)
        self.waiting += [(target, sending) for sending in sendings]
        self.enter()

    def finish(self) -> None:
        while self.waiting:
            self.deliver()
        for collective, array in zip(self.ranks, self.arrays, strict=True):
            assert collective.is_done
            np.testing.assert_array_equal(array, self.total)


def with_header(**fields: Any) -> Spoil:
    def spoil(arrival: Arrival) -> Arrival:
        header = pb.ReceiveChunksResponse()
        header.CopyFrom(arrival.header)
        for name, value in fields.items():
            if name == "stage":
                header.stage = value
            else:
                setattr(header.chunk, name, value)
        if "crc32c" not in fields:  # meant so by its sender
            start = checksum.peer_chunk(CONTEXT, header.stage)
            header.chunk.crc32c = checksum.of_chunk(start, header.chunk, arrival.payload)
        return arrival._replace(header=header)

    return spoil


def flip_payload_bit(arrival: Arrival) -> Arrival:
    payload = arrival.payload.copy()
    payload[-1] ^= 1
    return arrival._replace(payload=payload)


def shorten_payload(arrival: Arrival) -> Arrival:
    return arrival._replace(payload=arrival.payload[:-1])


def swap_stage(arrival: Arrival) -> Arrival:
    other = {pb.STAGE_PARTIAL: pb.STAGE_FINAL, pb.STAGE_FINAL: pb.STAGE_PARTIAL}
    return with_header(stage=other[arrival.header.stage])(arrival)


def next_chunk(arrival: Arrival) -> Arrival:
    index = arrival.header.chunk.chunk_index
    return with_header(chunk_index=(index + 1) % (LENGTH // CHUNK))(arrival)


def shift_offset(arrival: Arrival) -> Arrival:
    return with_header(element_offset=arrival.header.chunk.element_offset + 1)(arrival)


def from_stranger(arrival: Arrival) -> Arrival:
    return arrival._replace(rank=99)


def of_another_call(arrival: Arrival) -> Arrival:
    header = pb.ReceiveChunksResponse()
    header.CopyFrom(arrival.header)
    start = checksum.peer_chunk(CONTEXT + 1, header.stage)
    header.chunk.crc32c = checksum.of_chunk(start, header.chunk, arrival.payload)
    return arrival._replace(header=header)


SPOILS: dict[str, tuple[Spoil, str]] = {
    "flipped bit": (flip_payload_bit, "CRC32C"),
    "short payload": (shorten_payload, "CRC32C"),
    "wrong crc": (with_header(crc32c=1), "CRC32C"),
    "stage unknown": (with_header(stage=7), r"\(7\).*none is due from it"),
    "stage unspecified": (with_header(stage=0), "STAGE_UNSPECIFIED.*none is due from it"),
    "other stage": (swap_stage, "none is due from it|final before all|came before"),
    "next chunk": (next_chunk, "covers elements|none is due|came before"),
    "no such chunk": (with_header(chunk_index=8), "the array has 8 chunks"),
    "index of 32 bits": (with_header(chunk_index=2**32 - 1), "the array has 8 chunks"),
    "other offset": (shift_offset, "covers elements"),
    "offset of 64 bits": (with_header(element_offset=2**64 - 1), "covers elements"),
    "other count": (with_header(element_count=2), "covers elements"),
    "no elements": (with_header(element_count=0), "covers elements"),
    "compressed": (with_header(lz4=True), "compressed"),
    "another call's": (of_another_call, "CRC32C"),
    "a stranger's": (from_stranger, "none is due from it"),
}


def before(stage: Stage, message_count: int) -> None:
    stage.enter()
    for _ in range(message_count):
        if stage.waiting:
            stage.deliver()


@pytest.mark.sampled(27)
@pytest.mark.parametrize("strategy", [Ring(), Tree(2), Tree(3), Centralized()], ids=str)
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", SPOILS)
def test_a_spoilt_message_changes_nothing(kind: str, codec: str, strategy: Strategy) -> None:
    spoil, why = SPOILS[kind]
    message_count = 0
    while True:
        stage = Stage(strategy, codec)
        before(stage, message_count)
        if not stage.waiting:
            break
        target, arrival = stage.next()
        arrays = [array.tobytes() for array in stage.arrays]
        with pytest.raises(CorruptChunkError, match=why) as caught:
            stage.ranks[target].receive(spoil(arrival))
        assert "of call 9 (all_reduce)" in caught.value.message
        assert [array.tobytes() for array in stage.arrays] == arrays
        stage.finish()
        message_count += 1 + message_count // 3
    assert message_count > 6


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
@pytest.mark.parametrize("message_count", [0, 7, 20])
def test_a_flipped_bit_changes_nothing(codec: str, message_count: int) -> None:
    """Every bit of a message: before the payload, and in it."""
    stage = Stage(Ring(), codec)
    before(stage, message_count)
    target, arrival = stage.next()
    arrays = [array.tobytes() for array in stage.arrays]
    for bit in range(8 * len(arrival.message)):
        damaged = bytearray(arrival.message)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            header, payload = framing.parse(pb.ReceiveChunksResponse, bytes(damaged))
        except CorruptChunkError:
            continue
        is_same = header.chunk == arrival.header.chunk and header.stage == arrival.header.stage
        if header.call_index != arrival.header.call_index:
            continue  # another call gets it, whose context is another
        if is_same and payload.tobytes() == arrival.payload.tobytes():
            continue  # padding, or `last`, which is no more than that here
        with pytest.raises(CorruptChunkError):
            stage.ranks[target].receive(Arrival(arrival.rank, header, payload, bytes(damaged)))
        assert [array.tobytes() for array in stage.arrays] == arrays
    stage.finish()


@pytest.mark.parametrize("strategy", [Ring(), Tree(2), Tree(3), Centralized()], ids=str)
def test_a_chunk_counts_once(strategy: Strategy) -> None:
    """Each message is delivered again: at once, and at the end."""
    stage = Stage(strategy, "fp32")
    stage.enter()
    seen = []
    while stage.waiting:
        target, arrival = stage.next()
        seen.append((target, arrival))
        stage.deliver()
        with pytest.raises(CorruptChunkError, match="it came before"):
            stage.ranks[target].receive(arrival)
    for target, arrival in seen:
        with pytest.raises(CorruptChunkError, match="it came before"):
            stage.ranks[target].receive(arrival)
    stage.finish()


@pytest.mark.parametrize("strategy", [Ring(), Tree(2), Tree(3), Centralized()], ids=str)
def test_a_rank_takes_only_from_its_sources(strategy: Strategy) -> None:
    """Every message, from every other rank than the one that sent it, and to every other."""
    stage = Stage(strategy, "fp32")
    stage.enter()
    while stage.waiting:
        target, arrival = stage.next()
        for rank in range(SIZE):
            if rank != arrival.rank and not is_due(strategy, rank, target, arrival):
                with pytest.raises(CorruptChunkError, match="none is due from it"):
                    stage.ranks[target].receive(arrival._replace(rank=rank))
        stage.deliver()
    stage.finish()


def is_due(strategy: Strategy, rank: int, target: int, arrival: Arrival) -> bool:
    """Whether another child of a tree could have sent it as well."""
    if strategy == Ring() or arrival.header.stage != pb.STAGE_PARTIAL:
        return False
    if strategy == Tree(2):
        return (target, rank) in {(0, 1), (0, 2), (1, 3)}
    return target == 0 and rank > 0


def test_a_spoilt_chunk_before_its_turn_is_refused_at_once() -> None:
    """In a tree rank 2's chunk waits for rank 1's; that must not hide what is wrong with it."""
    stage = Stage(Centralized(), "fp32")
    stage.enter()
    early = [item for item in stage.waiting if item[0] == 2]
    stage.waiting = early + [item for item in stage.waiting if item[0] != 2]
    target, arrival = stage.next()
    assert (target, arrival.rank) == (0, 2)
    with pytest.raises(CorruptChunkError, match="CRC32C"):
        stage.ranks[0].receive(flip_payload_bit(arrival))
    stage.finish()
