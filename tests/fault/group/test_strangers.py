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
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Direction, Proxy
from harness.group.ranks import STRATEGIES, error_of, joined, on_ranks, summed
from harness.inside import generation_of
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.programs.ports import free_port
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


# Wires between members that are cut, held, slow or damaged, and addresses that lead nowhere.
# Goal: an error that names a rank within the deadline or lease, the same everywhere. Method: a
# proxy before one rank's server (advertise=).


LEASE_S = 2.0
LONG = 3_000_000


@contextlib.contextmanager
def behind_proxy(
    place: str, victim: int, **options: Any
) -> Iterator[tuple[Proxy, list[Future[shardwell.Group]]]]:
    """Three members, of which `victim` is reached through a proxy; all are closed at the end."""
    port = free_port()
    with Proxy(f"127.0.0.1:{port}") as proxy:

        def join(rank: int) -> shardwell.Group:
            given = {"lease_s": LEASE_S, "same_host": False, **options}  # all is on the wire
            if rank == victim:
                given |= {"listen": f"127.0.0.1:{port}", "advertise": proxy.address}
            return joined(place, rank, 3, **given)

        futures = [in_background(lambda rank=rank: join(rank)) for rank in range(3)]
        try:
            yield proxy, futures
        finally:
            proxy.resume()
            closing = [in_background(future.result(PATIENCE_S).close) for future in futures]
            for each in closing:
                each.result(PATIENCE_S)


def each(groups: list[shardwell.Group], call: Callable[[shardwell.Group], Any]) -> list[Any]:
    """The results of a call on all at once."""
    futures = [in_background(lambda group=group: call(group)) for group in groups]
    return [future.result(PATIENCE_S) for future in futures]


def failing(group: shardwell.Group, **options: Any) -> shardwell.ShardwellError:
    """The error that ends sums."""

    def forever() -> None:
        for _ in range(10_000):
            summed(group, LONG, **options)

    return error_of(forever)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_wire_that_is_cut(place, victim) -> None:
    """All calls fail at once, and all rebuild: all live, so all are members again."""
    with behind_proxy(place, victim) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        each(groups, summed)
        running = [in_background(lambda group=group: failing(group)) for group in groups]
        proxy.cut_after(Direction.TO_CLIENT, 3_000_000, refuse=False)
        watch = Stopwatch()
        errors = [future.result(PATIENCE_S) for future in running]
        assert watch.elapsed_s < PATIENCE_S
        assert {type(error) for error in errors} == {shardwell.WorkerLostError}
        each(groups, lambda group: group.rebuild(replacement_wait_s=10.0, timeout_s=PATIENCE_S))
        assert [group.size for group in groups] == [3, 3, 3]
        each(groups, summed)


@pytest.mark.parametrize("direction", Direction)
def test_damage_below_the_framing_of_grpc_at_the_meeting_place(place, direction) -> None:
    """It costs time and nothing else: the meeting place is asked again."""
    for at in (0, 3, 5, 8):  # of its first frame: others make a connection that stalls
        with Proxy(place) as proxy:
            proxy.corrupt_at(direction, at, 0x40)
            with joined(proxy.address, 0, 1, name=f"job-{at}", lease_s=LEASE_S) as group:
                summed(group)
            assert proxy.corrupted_count == 1


@pytest.mark.parametrize("direction", Direction)
def test_damage_below_the_framing_of_grpc_between_members(place, direction) -> None:
    """As a wire that is cut: a member is called lost, and all are there again."""
    with behind_proxy(place, 1) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        for at in (0, 3, 5):
            each(groups, summed)
            running = [
                in_background(lambda group=group: failing(group, timeout_s=5.0)) for group in groups
            ]
            start = 1_000_000 * (direction is Direction.TO_CLIENT) + at
            for more in range(60):  # a bit may be one that nothing depends on, such as a ping's
                proxy.corrupt_at(direction, start + more, 0x40)
                with contextlib.suppress(AssertionError):
                    eventually(
                        "a rank has noticed",
                        lambda: any(future.done() for future in running),  # noqa: B023
                        timeout_s=1.0,
                    )
                    break
            errors = [future.result(PATIENCE_S) for future in running]
            kinds = (shardwell.WorkerLostError, shardwell.DeadlineError)
            assert all(isinstance(error, (*kinds, shardwell.CorruptChunkError)) for error in errors)
            each(groups, lambda group: group.rebuild(replacement_wait_s=10.0, timeout_s=PATIENCE_S))
            assert [group.size for group in groups] == [3, 3, 3]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_stalled_wire(place, strategy) -> None:
    """Every process lives and renews its lease: the call's deadline ends it, the same for all."""
    with behind_proxy(place, 1, strategy=strategy) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        each(groups, summed)
        running = [
            in_background(lambda group=group: failing(group, timeout_s=2.0)) for group in groups
        ]
        with contextlib.suppress(TimeoutError):
            running[0].result(0.2)
        proxy.stall()
        watch = Stopwatch()
        errors = [future.result(PATIENCE_S) for future in running]
        assert watch.elapsed_s < PATIENCE_S
        assert all(isinstance(error, shardwell.WorkersMissingError) for error in errors), errors
        assert all(error.missing_ranks for error in errors)
        assert len({error.missing_ranks for error in errors}) == 1, errors
        proxy.resume()
        each(groups, lambda group: group.rebuild(timeout_s=PATIENCE_S))
        each(groups, summed)


@pytest.mark.parametrize("receiver", [1, 2])
def test_a_broadcast_to_a_rank_that_takes_nothing(place, receiver) -> None:
    """The root holds to the deadline as well, and queues no more than a little."""
    with behind_proxy(place, 0, strategy=shardwell.Centralized()) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        each(groups, summed)
        each(groups, lambda group: group.broadcast(np.zeros(10, np.float32)))
        calls = [
            in_background(
                lambda group=group: error_of(
                    lambda: [
                        group.broadcast(np.zeros(LONG, np.float32), timeout_s=1.5)
                        for _ in range(1000)
                    ]
                )
            )
            for group in groups
        ]
        with contextlib.suppress(TimeoutError):
            calls[receiver].result(0.2)
        proxy.stall()
        watch = Stopwatch()
        for call in calls:
            assert isinstance(call.result(PATIENCE_S), shardwell.DeadlineError)
        assert watch.elapsed_s < PATIENCE_S


def test_a_slow_wire(place) -> None:
    """It takes its time, and is right."""
    with behind_proxy(place, 2) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        proxy.slow_down(delay_s=0.01, bytes_per_s=2_000_000)
        each(groups, lambda group: summed(group, 500_000))
        proxy.slow_down()
        each(groups, summed)


def test_a_damaged_chunk(place) -> None:
    """A flipped bit is found: never a wrong sum."""
    with behind_proxy(place, 1) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        marked = np.frombuffer(b"\x77MARK-IT" * 300_000, np.float32)
        assert np.isfinite(marked).all()

        def call(group: shardwell.Group) -> shardwell.ShardwellError:
            return error_of(
                lambda: [group.broadcast(marked.copy(), root=1, codec="fp32") for _ in range(100)]
            )

        proxy.corrupt_after(Direction.TO_CLIENT, b"MARK-IT")
        errors = each(groups, call)
        assert proxy.corrupted_count == 1
        assert {type(error) for error in errors} == {shardwell.CorruptChunkError}
        assert len({error.message for error in errors}) == 1


def test_a_member_that_answers_late_is_waited_for(place) -> None:
    """For longer than leases: it lives, and the others have time until their joins' deadlines."""
    port = free_port()
    with Proxy(f"127.0.0.1:{port}") as proxy:
        proxy.stall()
        late = {"listen": f"127.0.0.1:{port}", "advertise": proxy.address}
        futures = [
            in_background(
                lambda rank=rank: joined(place, rank, 3, lease_s=0.5, **(late if rank == 1 else {}))
            )
            for rank in range(3)
        ]
        eventually("both greet it", lambda: proxy.connection_count >= 2)
        with pytest.raises(TimeoutError):
            futures[0].result(3 * 0.5)
        proxy.resume()
        groups = [future.result(20) for future in futures]
        each(groups, summed)
        each(groups, shardwell.Group.close)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "192.0.2.1:9", "no-such-host.invalid:1"])
def test_an_address_that_others_can_not_reach(place, address) -> None:
    """Join says so to all, with the rank: at once if no process listens, else at the deadline."""
    timeout_s = 20.0 if address == "127.0.0.1:1" else 3.0

    def join(rank: int) -> shardwell.ShardwellError:
        given = {"lease_s": LEASE_S, "join_timeout_s": timeout_s}
        if rank == 1:
            given["advertise"] = address
        return error_of(lambda: joined(place, rank, 3, **given).close())

    watch = Stopwatch()
    futures = [in_background(lambda rank=rank: join(rank)) for rank in range(3)]
    errors = [future.result(PATIENCE_S) for future in futures]
    assert watch.elapsed_s < PATIENCE_S
    for error in errors:
        assert isinstance(error, shardwell.WorkerUnreachableError), error
        assert error.rank == 1
        assert address in error.message
