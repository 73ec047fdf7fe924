"""Goal: ranks of one machine send chunks over a Unix socket and share memory; results are the same
where they do not.

Method: real groups, with both and without, bit for bit; a socket that refuses, is silent, or ends
where the other side expected to be served; a rank that reads late, so that memory has no room;
offers that are refused, and unknown tokens; strangers that open links by hand.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.group.ranks import error_of, joined, on_ranks
from harness.inside import generation_of
from harness.polling import PATIENCE_S, eventually
from harness.wire_client.crc import WIRE_VERSION
from shardwell.errors import ShardwellError, WorkerLostError
from shardwell.group.transport import links, peers, server
from shardwell.group.transport.links import ACCEPTED, Link, Links
from shardwell.group.transport.peers import RECEIVE_CHUNKS, Outgoing
from shardwell.process.shared_memory import IS_SUPPORTED, SharedMemory
from shardwell.process.unix_sockets import connected
from shardwell.transport import arena
from shardwell.transport.arena import Arenas
from shardwell.transport.arena_offers import ArenaOffers
from shardwell.v1 import peer_pb2 as pb
from shardwell.v1 import unix_stream_pb2
from shardwell.wire.frames import FrameKind, FrameReader, head

pytestmark = [
    pytest.mark.same_host,
    pytest.mark.skipif(not links.IS_SUPPORTED, reason="the system tells no ends of sockets"),
]
shares_memory = pytest.mark.skipif(not IS_SUPPORTED, reason="no memory can be sealed here")
SIZE = 2_500_000
"""5 MB of fp16: more than a socket's buffer, and a few chunks of each rank."""


def values(rank: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(size, np.float32)


def link_count(group: shardwell.Group) -> int:
    """Ranks to which it sends over a Unix socket."""
    outgoing = generation_of(group)._outgoing.values()
    return sum(each._link is not None for each in outgoing)


def reduced(place: str, size: int, **options: Any) -> tuple[list[np.ndarray], int, list[int]]:
    """What a few calls of all kinds come to, how many links there are, and bytes of each rank.

    The bytes are those that went through shared memory.
    """

    def work(group: shardwell.Group) -> tuple[list[np.ndarray], int, float]:
        found = []
        for element_count in (SIZE, 10):
            for call in (
                lambda array: group.all_reduce(array, op="mean", sample_count=group.rank + 1),
                lambda array: group.broadcast(array, root=1),
                group.all_gather,
            ):
                array = values(group.rank, element_count)
                call(array)
                found.append(array)
        return found, link_count(group), group.traffic.shared_bytes

    results = on_ranks(size, place, work, **options)
    for found, _, _ in results[1:]:
        assert_same(found, results[0][0])
    counts, shared_bytes = [each[1] for each in results], [each[2] for each in results]
    return results[0][0], sum(counts), shared_bytes


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(autouse=True)
def _usual_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of the suite shares all."""
    monkeypatch.setattr(arena, "SHARED_BYTES_MIN", 64 * 1024)


@pytest.fixture
def place(cluster) -> str:
    return str(cluster(1).target)


def mapped_count() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:shardwell")


@pytest.mark.parametrize("strategy", ["ring", "tree(arity=2)", "centralized"])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "fp32"])
def test_results_are_those_of_the_network(place, strategy, codec) -> None:
    options = {"strategy": strategy, "codec": codec}
    expected, count, shared_bytes = reduced(place, 3, same_host=False, **options)
    assert (count, shared_bytes) == (0, [0, 0, 0])
    found, count, shared_bytes = reduced(place, 3, **options)
    assert count >= 3
    assert_same(found, expected)
    if IS_SUPPORTED:
        assert min(shared_bytes) > 0
        eventually("it is unmapped", lambda: gc.collect() >= 0 and mapped_count() == 0)


@pytest.mark.parametrize("strategy", ["ring", "centralized"])
def test_payloads_may_go_over_the_socket(place, monkeypatch, strategy) -> None:
    """Where there is no memory to share: messages that the socket takes in part."""
    expected, _, _ = reduced(place, 3, same_host=False, strategy=strategy)
    monkeypatch.setattr(Arenas, "arena", lambda *_: None)
    found, count, _ = reduced(place, 3, strategy=strategy)
    assert count >= 3
    assert_same(found, expected)


def silent(link: Link) -> bytes:
    """Reads all that comes, and accepts nothing."""
    link._read(FrameKind.MESSAGE)
    raise AssertionError("the other rank did not wait")


def refusing(link: Link) -> bytes:
    raise ConnectionResetError("not here")


@pytest.mark.parametrize("accept", [silent, refusing])
def test_a_socket_that_does_not_serve(place, monkeypatch, accept) -> None:
    expected, _, _ = reduced(place, 2, same_host=False)
    monkeypatch.setattr("shardwell.group.transport.peers._ACCEPT_S", 0.1)
    monkeypatch.setattr(Link, "accept", accept)
    found, count, _ = reduced(place, 2)
    assert count == 0
    assert_same(found, expected)


def test_no_more_links_than_there_may_be(place, monkeypatch) -> None:
    expected, _, _ = reduced(place, 2, same_host=False)
    real = Links.__init__

    def without_room(self: Links, serve: Any, threads: Any, count_max: int, log: Any) -> None:
        real(self, serve, threads, 0, log)

    monkeypatch.setattr(Links, "__init__", without_room)
    found, count, _ = reduced(place, 2)
    assert count == 0
    assert_same(found, expected)


def test_a_socket_without_a_listener(place, monkeypatch) -> None:
    """Its address is known, and no more there; as on a machine that has a namesake."""
    expected, _, _ = reduced(place, 2, same_host=False)
    real = Links.start

    def started(self: Links, same_host: str, name: str) -> None:
        real(self, "off", name)
        self.address = f"@{name}"
        self.close = lambda: None  # type: ignore[method-assign]

    monkeypatch.setattr(Links, "start", started)
    found, count, _ = reduced(place, 2)
    assert count == 0
    assert_same(found, expected)


@pytest.mark.parametrize("what", ["write", "write_now"])
def test_a_link_that_breaks_is_a_rank_that_is_lost(place, monkeypatch, what) -> None:
    """As over gRPC: all hear of it at once."""
    real = getattr(Link, what)
    broken: list[bool] = []

    def breaking(self: Link, *arguments: Any) -> Any:
        if not broken:
            broken.append(True)
            self.cancel()
        return real(self, *arguments)

    if what == "write":  # all that is sent goes by the link's own thread
        monkeypatch.setattr(links, "SHORT_BYTES_MAX", -1)
    monkeypatch.setattr(Link, what, breaking)

    def work(group: shardwell.Group) -> None:
        array = values(group.rank)
        # A rank that lacks nothing ends this call without an error, and the next one with it.
        error = error_of(lambda: [group.all_reduce(array) for _ in range(2)])
        assert isinstance(error, WorkerLostError)

    on_ranks(2, place, work)
    assert broken


def test_a_rank_that_leaves_while_the_other_does_nothing(place) -> None:
    """It does not wait for the other's next call."""

    def work(group: shardwell.Group) -> None:
        array = np.ones(SIZE, np.float32)
        group.all_reduce(array)
        np.testing.assert_array_equal(array, 2.0)
        if group.rank == 0:
            error_of(group.barrier)  # the other has left

    on_ranks(2, place, work)


# Memory that ranks share.


@shares_memory
@pytest.mark.parametrize("place_count", [1, 2])
def test_what_finds_no_place_goes_over_the_network(place, monkeypatch, place_count) -> None:
    expected, _, _ = reduced(place, 2, same_host=False)
    monkeypatch.setattr(peers, "_PLACE_COUNT", place_count)
    found, _, _ = reduced(place, 2)
    assert_same(found, expected)


@shares_memory
@pytest.mark.parametrize("counts", [0, 2**63, 2**64 - 1], ids=["never", "wild", "below 0"])
def test_a_reader_whose_count_is_wrong(place, monkeypatch, counts) -> None:
    """It suffers for what it wrote, and no other does: results, or an error."""
    expected, _, _ = reduced(place, 2, same_host=False)
    real = SharedMemory.set_number

    def set_number(memory: SharedMemory, index: int, number: int) -> None:
        real(memory, index, counts if index == peers._COPIED else number)

    monkeypatch.setattr(SharedMemory, "set_number", set_number)
    found, _, shared_bytes = reduced(place, 2)
    assert_same(found, expected)
    assert max(shared_bytes) <= 2 * 2 * peers._PLACE_COUNT * 2**20


@shares_memory
def test_payloads_that_change_on_their_way_are_refused(place, monkeypatch) -> None:
    real = arena.payload_of

    def damaging(chunk: Any, payload: Any, memory: Any) -> Any:
        found = real(chunk, payload, memory).copy()
        found[100] ^= 1
        return found

    monkeypatch.setattr(arena, "payload_of", damaging)
    with pytest.raises(ShardwellError, match="CRC32C"):
        reduced(place, 2)


@shares_memory
def test_offers_that_are_refused_or_forgotten(place, monkeypatch) -> None:
    expected, _, _ = reduced(place, 2, same_host=False)
    monkeypatch.setattr(ArenaOffers, "take", lambda offers, token: None)
    found, _, shared_bytes = reduced(place, 2)
    assert_same(found, expected)
    assert not any(shared_bytes)
    monkeypatch.undo()

    def refused(offers: ArenaOffers, offer: Any, file: int) -> int:
        raise OSError("no more memory")

    monkeypatch.setattr(ArenaOffers, "_take_in", refused)
    found, _, shared_bytes = reduced(place, 2)
    assert_same(found, expected)
    assert not any(shared_bytes)


@shares_memory
def test_an_offer_for_another_member_is_refused(place) -> None:
    with joined(place, 0, 1) as group:
        server = group._membership._server  # type: ignore[attr-defined]
        asking = peers.Arenas(
            "it", lambda: peers.arena_pb2.ArenaOffer(member_id="another"), server.arenas.address
        )
        assert asking.arena(10**6) is None
        assert server.arenas.mapped_bytes == 0


@shares_memory
@pytest.mark.parametrize("setting", ["off", "directory"])
def test_the_environment_says_where(place, monkeypatch, setting) -> None:
    expected, _, _ = reduced(place, 2, same_host=False)
    with tempfile.TemporaryDirectory() as directory:  # whose path a socket's has room for
        monkeypatch.setenv("SHARDWELL_SAME_HOST", "off" if setting == "off" else directory)
        found, _, shared_bytes = reduced(place, 2)
        assert not os.listdir(directory)
    assert_same(found, expected)
    assert any(shared_bytes) == (setting == "directory")


# Links, by hand.


class Stranger:
    """A caller of a member's Unix socket, by hand."""

    def __init__(self, address: str) -> None:
        self.connection = connected(address, socket.SOCK_STREAM, PATIENCE_S)
        self._frames = FrameReader()

    def send(self, kind: FrameKind, contents: bytes) -> None:
        self.connection.sendall(head(kind, len(contents)) + contents)

    def open(self, method: str = RECEIVE_CHUNKS) -> None:
        opening = unix_stream_pb2.UnixStreamOpen(method=method, wire_version=WIRE_VERSION)
        self.send(FrameKind.OPEN, opening.SerializeToString())

    def heard(self) -> list[tuple[int, bytes]]:
        """All that comes until the connection ends."""
        found: list[tuple[int, bytes]] = []
        with contextlib.suppress(ConnectionResetError):
            while piece := self.connection.recv(4096):
                found += self._frames.feed(piece)
        return found


@pytest.fixture
def member(place) -> Iterator[shardwell.Group]:
    with joined(place, 0, 1) as group:
        yield group


def address_of(group: shardwell.Group) -> str:
    address: str = generation_of(group).members[0].stream_address
    assert address
    return address


@pytest.mark.parametrize("case", ["method", "member", "no request", "no frame", "second open"])
def test_strangers_are_refused(member, case) -> None:
    stranger = Stranger(address_of(member))
    with stranger.connection:
        if case == "no frame":
            stranger.connection.sendall(b"\xff" * 64)
            assert stranger.heard() == []
            return
        stranger.open("/shardwell.v1.PeerService/Agree" if case == "method" else RECEIVE_CHUNKS)
        if case == "method":
            ((kind, end),) = stranger.heard()
        else:
            if case == "second open":
                stranger.open()
            else:
                opening = pb.PeerOpen(group=member.name, to_member_id="another")
                request = pb.ReceiveChunksRequest(open=opening).SerializeToString()
                stranger.send(FrameKind.MESSAGE, b"\xff" if case == "no request" else request)
            first, *rest = stranger.heard()
            assert first == (FrameKind.MESSAGE, ACCEPTED)
            if case != "member":
                assert rest == []
                return
            ((kind, end),) = rest
        assert kind == FrameKind.END
        assert unix_stream_pb2.UnixStreamEnd.FromString(end).code != 0
    member.barrier()


def test_strangers_that_say_nothing_hold_no_place_for_long(member, monkeypatch) -> None:
    monkeypatch.setattr(server, "_OPEN_TIMEOUT_S", 0.2)
    with contextlib.ExitStack() as stack:
        strangers = [Stranger(address_of(member)) for _ in range(2)]
        for stranger in strangers:
            stack.enter_context(stranger.connection)
            assert stranger.heard() == []  # closed at last
    membership = member._membership
    eventually("all have gone", lambda: not membership._server.links._open)


def test_a_child_that_was_forked_ends_nothing(place) -> None:
    """What it inherits is its parent's: see process/connected.py."""
    left, right = socket.socketpair()
    with left:
        link = Link(right)
        link._owner.process_id += 1
        link.cancel()
        left.settimeout(0.05)
        with pytest.raises(TimeoutError):
            left.recv(1)
        link._owner.process_id -= 1
        link.cancel()
        assert left.recv(1) == b""
        link.close()
        assert link.write_now(b"to nobody")


def test_messages_of_several_threads_keep_their_order() -> None:
    """Short ones go at once, unless one is waiting that can't."""
    left, right = socket.socketpair()
    with left:
        right.setblocking(False)
        link, outgoing = Link(right), Outgoing(shardwell.Traffic(), lambda what: None)
        right.setblocking(False)
        stream = outgoing.serve(link)
        outgoing.send(b"0", 1)
        sent = [b"0"]
        assert next(stream) == b"0"  # which is being written
        for number in range(1, 4):
            outgoing.send(b"%d" % number, 1)
        left.settimeout(0.05)
        with pytest.raises(TimeoutError):
            left.recv(1)
        for _ in range(3):
            sent.append(next(stream))
        assert sent == [b"0", b"1", b"2", b"3"]
        outgoing.finish()
        assert pb.ReceiveChunksResponse.FromString(next(stream)).last
        outgoing.send(b"4", 1)
        assert left.recv(100) == head(FrameKind.MESSAGE, 1) + b"4"
        outgoing.send(bytes(links.SHORT_BYTES_MAX + 1), 1)
        with pytest.raises(TimeoutError):
            left.recv(1)
        outgoing.cut()
        link.close()


def test_an_end_whose_callback_fails_hides_no_other() -> None:
    """A link's end calls its waiter's function, which may fail."""
    ended: list[Link] = []
    over = threading.Event()

    def serve(link: Link) -> None:
        def end() -> None:
            ended.append(link)
            if len(ended) == 1:
                raise RuntimeError("nobody is to know")

        link.add_callback(end)
        served.append(link)
        over.wait(PATIENCE_S)

    served: list[Link] = []
    with ThreadPoolExecutor(2) as threads:
        made = Links(serve, threads, 2, logging.getLogger("shardwell.test"))
        made.start("auto", f"shardwell-test-{uuid.uuid4().hex}")
        try:
            for count in (1, 2):
                with connected(made.address, socket.SOCK_STREAM, PATIENCE_S):
                    eventually("it is served", lambda count=count: len(served) == count)
                eventually("its end is seen", lambda count=count: len(ended) == count)
        finally:
            over.set()
            made.close()
    assert ended == served
