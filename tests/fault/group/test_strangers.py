"""Strangers that call PeerService, and a member that sends junk: raw gRPC, from the .proto.

Goal: what belongs elsewhere is refused with a status that says so, no member hangs, and a group
    goes
on with exact sums; a member that sends junk ends the call with an error, and nothing is written.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.group.ranks import error_of, joined, on_ranks, summed
from harness.inside import generation_of
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.threads import in_background
from harness.tokens import bearing
from harness.wire_client import crc as wire_crc
from harness.wire_client.worker import error_detail
from shardwell.v1 import group_pb2, group_pb2_grpc, peer_pb2, peer_pb2_grpc
from shardwell.v1 import types_pb2 as types


@pytest.fixture
def place(cluster) -> str:
    """Where groups meet."""
    return str(cluster(1).target)


class Stranger:
    """Raw gRPC to a member."""

    def __init__(self, group: shardwell.Group) -> None:
        generation = generation_of(group)  # where the .proto says that they are: in `members`
        self.members = generation.members
        self.opening = peer_pb2.PeerOpen(
            group=group.name,
            generation=generation.number,
            from_member_id=self.members[1].member_id,
            from_rank=1,
            to_member_id=self.members[0].member_id,
        )
        self.channel = grpc.insecure_channel(
            self.members[0].address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub = peer_pb2_grpc.PeerServiceStub(self.channel)

    def refused(self, opening: peer_pb2.PeerOpen) -> None:
        """Both kinds of stream are."""
        calls = (
            self.stub.Agree(iter([peer_pb2.AgreeRequest(open=opening)]), timeout=PATIENCE_S),
            self.stub.ReceiveChunks(
                peer_pb2.ReceiveChunksRequest(open=opening), timeout=PATIENCE_S
            ),
        )
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION, caught.value
            assert error_detail(caught.value).code == types.ERROR_CODE_WORKER_LOST


def changed(opening: peer_pb2.PeerOpen, **fields: Any) -> peer_pb2.PeerOpen:
    copy = peer_pb2.PeerOpen()
    copy.CopyFrom(opening)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def test_streams_that_belong_elsewhere_are_refused(place) -> None:
    def work(group: shardwell.Group) -> None:
        summed(group)
        if group.rank == 0:
            stranger = Stranger(group)
            with stranger.channel:
                for wrong in (
                    {"generation": stranger.opening.generation - 1},
                    {"generation": 0},
                    {"group": "another"},
                    {"to_member_id": "another"},
                    {"to_member_id": ""},
                    {"from_member_id": "another"},
                    {"from_rank": 2},
                    {"from_rank": 0, "from_member_id": stranger.members[0].member_id},
                    {"from_rank": 2**32 - 1},
                ):
                    stranger.refused(changed(stranger.opening, **wrong))
        for _ in range(3):
            summed(group)

    on_ranks(3, place, work)


def test_messages_of_an_earlier_generation_are_refused(place) -> None:
    def work(group: shardwell.Group) -> None:
        summed(group)
        group.barrier()  # no data are under way when the first one rebuilds
        stranger = Stranger(group)
        with stranger.channel:
            group.rebuild()
            if group.rank == 0:
                stranger.refused(stranger.opening)
            summed(group)

    on_ranks(2, place, work)


@pytest.mark.parametrize("kind", ["Agree", "ReceiveChunks"])
def test_a_second_stream_of_a_rank_is_refused(place, kind) -> None:
    def work(group: shardwell.Group) -> None:
        summed(group)
        if group.rank == 0:
            stranger = Stranger(group)
            calls: dict[str, Callable[[], Any]] = {
                "Agree": lambda: stranger.stub.Agree(
                    iter([peer_pb2.AgreeRequest(open=stranger.opening)]), timeout=PATIENCE_S
                ),
                "ReceiveChunks": lambda: stranger.stub.ReceiveChunks(
                    peer_pb2.ReceiveChunksRequest(open=stranger.opening), timeout=PATIENCE_S
                ),
            }
            # The sum may be here before rank 1 has opened its own.
            eventually("rank 1 listens", lambda: generation_of(group).outgoing(1)._is_open)
            with stranger.channel, pytest.raises(grpc.RpcError) as caught:
                list(calls[kind]())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
        for _ in range(3):
            summed(group)

    on_ranks(3, place, work)


@pytest.mark.parametrize("size", [0, 1, 100, 2**20, 5 * 2**20])
def test_garbage_does_no_harm(place, size) -> None:
    """Bytes that are no messages, small, large and oversized: an error, and no harm."""
    noise = np.random.default_rng(size).bytes(size)

    def work(group: shardwell.Group) -> None:
        summed(group)
        if group.rank == 0:
            address = generation_of(group).members[0].address
            prefix = "/shardwell.v1.PeerService/"
            with bearing(grpc.insecure_channel(address)) as channel:
                calls: list[Callable[[], Any]] = [
                    lambda: channel.unary_unary(f"{prefix}Greet")(noise, timeout=PATIENCE_S),
                    lambda: list(
                        channel.stream_stream(f"{prefix}Agree")(iter([noise]), timeout=PATIENCE_S)
                    ),
                    lambda: list(
                        channel.unary_stream(f"{prefix}ReceiveChunks")(noise, timeout=PATIENCE_S)
                    ),
                    lambda: channel.unary_unary(f"{prefix}Nonsense")(noise, timeout=PATIENCE_S),
                ]
                for call in calls:
                    with pytest.raises(grpc.RpcError) as caught:
                        call()
                    assert caught.value.code() not in (
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        grpc.StatusCode.UNKNOWN,
                    ), caught.value
            with (
                socket.create_connection(address.rsplit(":", 1)) as raw,
                contextlib.suppress(OSError),
            ):
                raw.sendall(noise)
        for _ in range(3):
            summed(group)

    on_ranks(2, place, work)


# A member that joins in order, made of stubs, and then sends junk.


@contextlib.contextmanager
def impostor(place: str, chunks: list[bytes]) -> Iterator[None]:
    """Rank 1 of two: it joins, calls what rank 0 calls, and streams `chunks`."""
    handlers = {
        "Greet": grpc.unary_unary_rpc_method_handler(lambda request, context: b""),
        "ReceiveChunks": grpc.unary_stream_rpc_method_handler(
            lambda request, context: iter(chunks)
        ),
    }
    with ThreadPoolExecutor(4) as threads, bearing(grpc.insecure_channel(place)) as channel:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("shardwell.v1.PeerService", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        member = group_pb2.Member(member_id="impostor", address=f"127.0.0.1:{port}")
        spec = group_pb2.GroupSpec(name="job", size=2, strategy="ring", codec=types.CODEC_FP16)
        request = group_pb2.JoinGroupRequest(spec=spec, member=member, rank=1, lease_ms=30_000)
        meeting = group_pb2_grpc.GroupServiceStub(channel)

        def ready() -> Any:
            answer = meeting.JoinGroup(wire_crc.seal_message(request), timeout=PATIENCE_S)
            request.checked_generation = answer.generation
            return answer if answer.ready else None

        answer = eventually("rank 0 is there", ready)
        with bearing(grpc.insecure_channel(answer.members[0].address)) as to_rank_0:
            call = peer_pb2.CollectiveCall(
                operation=peer_pb2.OPERATION_ALL_REDUCE,
                reduction=peer_pb2.REDUCTION_SUM,
                codec=types.CODEC_FP16,
                element_count=4,
                sample_count=1,
                wait_timeout_ms=10_000,
            )
            opening = peer_pb2.PeerOpen(
                group="job",
                generation=answer.generation,
                from_member_id="impostor",
                from_rank=1,
                to_member_id=answer.members[0].member_id,
            )
            requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
            requests.put(peer_pb2.AgreeRequest(open=opening, call=call))
            stub = peer_pb2_grpc.PeerServiceStub(to_rank_0)
            verdicts = stub.Agree(iter(requests.get, None), timeout=PATIENCE_S)
            try:
                yield
            finally:
                requests.put(None)
                verdicts.cancel()
                server.stop(None).wait()


def chunk_message(stage: int, payload: bytes = b"12345678", **fields: Any) -> bytes:
    chunk = types.Chunk(**{"element_count": 2, **fields})
    message = peer_pb2.ReceiveChunksResponse(stage=stage, chunk=chunk, payload=payload)
    return message.SerializeToString()


JUNK = {
    "no message": [b"\xff" * 50],
    "large noise": [b"\x7a" * 2**20],
    "no such chunk": [chunk_message(peer_pb2.STAGE_FINAL, chunk_index=99)],
    "no such call": [
        peer_pb2.ReceiveChunksResponse(call_index=2**63, stage=1).SerializeToString()
        for _ in range(99)
    ],
    "no stage": [chunk_message(0)],
    "no crc": [chunk_message(peer_pb2.STAGE_PARTIAL)],
    "too short": [chunk_message(peer_pb2.STAGE_PARTIAL, b"1")],
    "oversized": [b"\x00" * (3 * 2**20)],
    "nothing": [],
}


@pytest.mark.parametrize("kind", JUNK)
def test_a_member_that_sends_junk(place, kind) -> None:
    """It ends the call with an error that names it or the damage, and writes nothing."""

    def reduced() -> None:
        array = np.ones(4, np.float32)
        with joined(place, 0, 2) as group:
            error = error_of(lambda: group.all_reduce(array, timeout_s=BRIEF_S))
        assert not isinstance(error, shardwell.InternalError), error
        assert error.rank == 1 or isinstance(error, shardwell.CorruptChunkError), error
        assert (array == 1).all()

    watch = Stopwatch()
    real = in_background(reduced)
    with impostor(place, JUNK[kind]):
        real.result(PATIENCE_S)
    assert watch.elapsed_s < PATIENCE_S


def test_streams_that_say_nothing_take_no_member_s_place(place) -> None:
    """More of them than a member's server has threads."""
    waiting = [in_background(lambda rank=rank: joined(place, rank, 2)) for rank in range(2)]
    groups = [future.result(PATIENCE_S) for future in waiting]
    address = generation_of(groups[0]).members[0].address
    with bearing(grpc.insecure_channel(address)) as channel:
        silence = threading.Event()

        def nothing():
            silence.wait(PATIENCE_S)
            yield from ()

        agree = channel.stream_stream("/shardwell.v1.PeerService/Agree")
        calls = [agree(nothing()) for _ in range(40)]
        sums = [in_background(lambda group=group: summed(group)) for group in groups]
        for future in sums:
            future.result(PATIENCE_S)
        together = [in_background(group.rebuild) for group in groups]
        for future in together:
            future.result(PATIENCE_S)
        for call in calls:
            call.cancel()
        silence.set()
    for group in groups:
        group.close()
