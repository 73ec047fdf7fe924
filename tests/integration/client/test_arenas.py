"""Goal: memory that a worker shares with shards of its machine changes how fast results come, and
nothing else; no other process gets hold of it.

Method: the same steps with it and without, bit for bit; a client of its own that offers memory as
the .proto says, right and in every wrong way; shards that refuse, forget, are full, or are off.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError

import shardwell
from harness.inside import channels_of, endpoint_of, idle_sets
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background
from harness.transports import RULE, mapped_bytes, trained
from harness.wire_client import crc as wire_crc
from harness.wire_client.arena import NONCE, SEALS, SIZE, WireArena
from harness.wire_client.worker import WireWorker, decode, error_detail, spec
from shardwell.process.shared_memory import IS_SUPPORTED, OwnMemory
from shardwell.transport import arena
from shardwell.transport import arena_offers as arenas
from shardwell.transport.stream import ShardStream
from shardwell.transport.unix_call import UnixCall
from shardwell.v1 import arena_pb2, types_pb2
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import check_chunk
from shardwell_server import server
from shardwell_server.config import Limits
from shardwell_server.services import parameter_stream

pytestmark = [
    pytest.mark.same_host,
    pytest.mark.skipif(not IS_SUPPORTED, reason="no memory can be sealed on this system"),
]

CHUNK_BYTES = 64 * 1024
ELEMENTS = 500_000
"""More than one arena of the least size, in chunks that are just large enough to be shared."""
OPTIONS: dict[str, Any] = {"optimizer": RULE, "worker_count": 2}


@pytest.fixture(autouse=True)
def _usual_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of the suite shares all."""
    monkeypatch.setattr(arena, "SHARED_BYTES_MIN", 64 * 1024)


def gradient(rank: int, step: int, size: int = ELEMENTS) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(size, np.float32)


def test_memory_of_a_call_serves_the_next(cluster, connect) -> None:
    """Whichever of the verbs it is; and none after one that failed."""
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    client = connect(running, "w0")
    net = client.parameter("net", size=ELEMENTS, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(ELEMENTS, np.float32))

    def kept() -> list[arena.Arena]:
        sets = idle_sets(client)
        return [stream._arena for each in sets for stream in each._streams.values()]

    arenas = set()
    for step in range(4):
        net.put_gradient(np.ones(ELEMENTS, np.float32))
        arenas |= {*kept()}
        before = client.traffic.shared_bytes
        assert net.get_weights()[-1] == -2 * step - 1
        assert client.traffic.shared_bytes - before > 2 * ELEMENTS - CHUNK_BYTES
        arenas |= {*kept()}
        assert net.exchange(np.ones(ELEMENTS, np.float32))[-1] == -2 * step - 2
        arenas |= {*kept()}
    assert len(arenas) == 1
    arenas.clear()
    with pytest.raises(shardwell.NonFiniteError):
        net.put_gradient(np.full(ELEMENTS, np.nan, np.float32))
    with pytest.raises(shardwell.WorkersMissingError):
        net.get_weights(min_version=99, timeout_s=0.5)
    assert not kept()  # the shard may still write there
    net.put_gradient(np.ones(ELEMENTS, np.float32))
    net.put_gradient(np.ones(ELEMENTS, np.float32))
    assert len(kept()) == 1
    client.close()
    eventually("nobody has any", lambda: gc.collect() >= 0 and mapped_bytes(running) == [0])
    assert not kept()


@pytest.mark.parametrize("verb", ["get_weights", "exchange"])
def test_a_kept_error_keeps_no_memory(cluster, connect, verb) -> None:
    client = connect(cluster(1, chunk_size_bytes=CHUNK_BYTES), "w0")
    net = client.parameter("net", size=ELEMENTS, **OPTIONS)
    net.init(np.zeros(ELEMENTS, np.float32))
    net.put_gradient(np.ones(ELEMENTS, np.float32))
    mapped = Path("/proc/self/maps")
    assert "memfd:shardwell" in mapped.read_text()
    call = {
        "get_weights": lambda: net.get_weights(min_version=9, timeout_s=2.0),
        "exchange": lambda: net.exchange(np.ones(ELEMENTS, np.float32), timeout_s=2.0),
    }[verb]
    with pytest.raises(shardwell.WorkersMissingError) as kept:
        call()
    eventually("it is let go", lambda: "memfd:shardwell" not in mapped.read_text())
    assert kept.value.__traceback__ is not None


def test_a_stream_that_needs_more_gets_more_and_its_end_frees_it(cluster, connect) -> None:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    client = connect(running, "w0")
    sizes = (100_000, 100, 500_000, 100_000)
    found = []
    for number, size in enumerate(sizes):
        net = client.parameter(f"p{number}", size=size, optimizer=OPTIONS["optimizer"])
        net.init(np.zeros(size, np.float32))
        net.exchange(gradient(0, 0, size))
        found += mapped_bytes(running)
        np.testing.assert_allclose(net.get_weights(), -0.1 * gradient(0, 0, size), atol=1e-3)
    # All but the last chunk of each, which may be small.
    least = sum(size - CHUNK_BYTES // 2 for size in sizes if size > 100)
    assert 3 * 2 * least <= client.traffic.shared_bytes <= 3 * 2 * sum(sizes)
    assert 200_000 < found[0] == found[1] < 1_000_000 < found[2] == found[3] < 1_100_000
    client.close()
    eventually("it is unmapped", lambda: gc.collect() >= 0 and mapped_bytes(running) == [0])
    assert not idle_sets(client)
    maps = Path("/proc/self/maps")
    eventually("and here", lambda: "memfd:shardwell" not in maps.read_text())


def test_a_stream_that_its_shard_has_ended_keeps_no_memory(cluster, connect) -> None:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    client = connect(running, "w0")
    net = client.parameter("net", size=ELEMENTS, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(ELEMENTS, np.float32))
    net.exchange(np.ones(ELEMENTS, np.float32))
    (streams,) = idle_sets(client)
    (stream,) = streams._streams.values()
    assert stream._arena is not None
    running.close()

    def has_let_go() -> bool:
        client._idle_streams.take().close()  # a Unix stream notices when it is wanted next
        return stream._arena is None

    eventually("it has let go", has_let_go)


def test_small_payloads_are_inline(cluster, connect) -> None:
    running = cluster(1, chunk_size_bytes=2**20)
    trained(running, connect, size=1000)
    assert mapped_bytes(running) == [0]


def test_what_does_not_fit_is_inline(cluster, connect, monkeypatch) -> None:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    expected = trained(running, connect, "inline", same_host=False)
    monkeypatch.setattr(arena, "ARENA_BYTES_MAX", 5 * CHUNK_BYTES)
    found = trained(running, connect, "partly")
    assert mapped_bytes(running) == [2 * 5 * CHUNK_BYTES]
    np.testing.assert_array_equal(found, expected)


def test_a_shard_that_is_full_of_it(cluster, connect, monkeypatch) -> None:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES, limits=Limits(arena_bytes_max=1_100_000))
    expected = trained(running, connect, "inline", same_host=False)
    real, offers = arena._offered, []
    monkeypatch.setattr(arena, "_offered", lambda *given: offers.append(given) or real(*given))
    found = trained(running, connect, "shared")
    assert 1_000_000 < mapped_bytes(running)[0] < 1_100_000  # of one of the two
    assert len(offers) == 2  # who was refused does not ask at every step
    np.testing.assert_array_equal(found, expected)


def test_descriptors_are_left_for_the_rest(cluster, connect) -> None:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    expected = trained(running, connect, "inline", same_host=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
    try:
        found = trained(running, connect, "shared", shares=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    np.testing.assert_array_equal(found, expected)


# Offers, by hand.


@pytest.fixture
def offering(cluster) -> Any:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    with WireWorker(running.target, "wire") as worker:
        status = worker.stubs[0].GetStatus(pb.GetStatusRequest())

        def offer(**wrong: Any) -> WireArena:
            identity = wrong.pop("identity", worker.identities[0])
            return WireArena(status.arena_address, identity, **wrong)

        offer.running, offer.worker = running, worker  # type: ignore[attr-defined]
        yield offer


def test_an_offer_is_taken_by_who_proves_it(offering) -> None:
    found = offering()
    assert found.answer.token
    assert not found.answer.refusal
    assert int.from_bytes(found.memory[8:16], "little") == found.answer.token


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"seals": 0}, "not sealed"),
        ({"seals": SEALS & ~1}, "not sealed"),  # it could be sealed against writing
        ({"real_size": SIZE // 2}, "has 524288 bytes; expected 1048576"),
        ({"real_size": SIZE * 2}, "has 2097152 bytes; expected 1048576"),
        ({"size": 0, "real_size": SIZE}, "an arena of 0 bytes"),
        ({"size": SIZE + 1, "real_size": SIZE + 1}, "expected a multiple of 4096"),
        ({"size": 2**40, "real_size": SIZE}, "at most"),
        ({"nonce": NONCE + 1}, "not the same at both ends"),
        ({"file_count": 0}, "one file"),
        ({"identity": types_pb2.ShardIdentity(shard_count=9)}, "cluster"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, dict) else None,
)
def test_offers_that_are_refused(offering, wrong, says) -> None:
    found = offering(**wrong)
    assert not found.answer.token
    assert says in found.answer.refusal
    eventually("nothing is mapped", lambda: mapped_bytes(offering.running) == [0])
    assert offering().answer.token


def test_files_that_are_no_memory_are_refused(offering, tmp_path) -> None:
    plain = tmp_path / "file"
    plain.write_bytes(bytes(SIZE))
    reading, writing = os.pipe()
    files = [os.open(plain, os.O_RDWR), os.open("/dev/null", os.O_RDWR), reading, writing]
    for file in files:
        assert not offering(file=file).answer.token
        os.close(file)
    assert mapped_bytes(offering.running) == [0]


@pytest.mark.parametrize("message", [b"", b"\xff" * 100, bytes(10_000)], ids=["", "no", "long"])
def test_messages_that_are_no_offers(offering, message) -> None:
    found = None
    with contextlib.suppress(OSError, DecodeError):  # who can't be understood gets no answer
        found = offering(message=message)
    assert found is None or not found.answer.token
    assert mapped_bytes(offering.running) == [0]
    assert offering().answer.token


def test_pages_that_are_not_there_are_made(offering) -> None:
    """Before they are used, so that touching them can't fail."""
    own = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(own, SIZE)
        os.pwrite(own, NONCE.to_bytes(8, "little"), 0)
        fcntl.fcntl(own, fcntl.F_ADD_SEALS, SEALS)
        assert os.fstat(own).st_blocks * 512 < SIZE
        assert offering(file=own).answer.token
        assert os.fstat(own).st_blocks * 512 >= SIZE
    finally:
        os.close(own)


def test_a_server_that_has_not_mapped_the_memory_is_not_believed(cluster, connect) -> None:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    name = f"shardwell-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def lie() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.send(arena_pb2.ArenaAnswer(token=77).SerializeToString())

        lying = in_background(lie)
        client = connect(running, "w0")
        channels_of(client)[0].arenas.server.address = f"@{name}"
        net = client.parameter("net", size=ELEMENTS, optimizer=shardwell.SGD(1.0))
        net.init(np.zeros(ELEMENTS, np.float32))
        assert net.exchange(np.ones(ELEMENTS, np.float32))[0] == -1
        lying.result(PATIENCE_S)
    assert not client.traffic.shared_bytes


@pytest.mark.parametrize("verb", ["exchange", "put and get"])
def test_memory_that_a_namesake_elsewhere_has_taken(cluster, connect, tmp_path, verb) -> None:
    """A client finds another machine's shard of the same name where it looks for its own."""
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    near, far = (
        cluster(1, chunk_size_bytes=CHUNK_BYTES, same_host=str(tmp_path / name), cluster_id="c")
        for name in ("near", "far")
    )
    client = connect(far, "w0", timeout_s=PATIENCE_S)
    channels_of(client)[0].arenas.server.address = endpoint_of(near.servers[0]).arenas.address
    net = client.parameter("net", size=ELEMENTS, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(ELEMENTS, np.float32))
    for step in range(3):
        if verb == "exchange":
            weights = net.exchange(np.ones(ELEMENTS, np.float32))
        else:
            net.put_gradient(np.ones(ELEMENTS, np.float32))
            weights = net.get_weights()
        assert set(weights.tolist()) == {-step - 1.0}


def test_a_name_is_of_one_machine_and_network(cluster, tmp_path, monkeypatch) -> None:
    config = cluster(1).servers[0].config
    name_of = server._socket_name
    here = name_of(config, 7070)
    assert here == name_of(config, 7070)
    assert here != name_of(config, 7071)
    other = tmp_path / "boot_id"
    other.write_text("another machine")
    monkeypatch.setattr(server, "_BOOT_ID", str(other))
    assert here != (elsewhere := name_of(config, 7070))
    network = tmp_path / "net"
    network.symlink_to("net:[1]")
    monkeypatch.setattr(server, "_NETWORK", str(network))
    assert elsewhere != name_of(config, 7070)


def test_a_silent_connection_delays_others_only_briefly(offering, monkeypatch) -> None:
    monkeypatch.setattr(arenas, "_PATIENCE_S", 0.2)
    address = "\0" + endpoint_of(offering.running.servers[0]).arenas.address[1:]
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(address)
        assert offering().answer.token


def test_untaken_offers_are_forgotten(offering, monkeypatch) -> None:
    monkeypatch.setattr(arenas, "_OFFER_S", 0.0)
    tokens = [offering().answer.token for _ in range(3)]
    assert mapped_bytes(offering.running)[0] <= 2 * SIZE
    assert endpoint_of(offering.running.servers[0]).arenas.take(tokens[0]) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(offering, monkeypatch) -> None:
    """However right his offer."""
    monkeypatch.setattr(arenas, "_PATIENCE_S", PATIENCE_S)  # so that it is not that which ends it
    address = endpoint_of(offering.running.servers[0]).arenas.address
    offer = arena_pb2.ArenaOffer(
        shard=offering.worker.identities[0], size_bytes=SIZE, nonce=NONCE
    ).SerializeToString()
    script = f"""
import fcntl, os, socket
os.setuid(65534)
own = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
os.ftruncate(own, {SIZE})
os.pwrite(own, {NONCE.to_bytes(8, "little")!r}, 0)
fcntl.fcntl(own, fcntl.F_ADD_SEALS, {SEALS})
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.settimeout({PATIENCE_S / 2})
    connection.connect("\\0" + {address[1:]!r})
    try:
        socket.send_fds(connection, [{offer!r}], [own])
        print(connection.recv(100))
    except (ConnectionResetError, BrokenPipeError):
        print(b"")
"""
    found = subprocess.run(
        [sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout == "b''\n"
    assert mapped_bytes(offering.running) == [0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_shard_of_another_user_is_offered_nothing(cluster, connect, monkeypatch) -> None:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    name = f"shardwell-test-{os.getpid()}"
    script = f"""
import os, socket
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind("\\0" + {name!r})
    listener.listen()
    print("ready", flush=True)
    connection, _ = listener.accept()
    print(connection.recv(100), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        client = connect(running, "w0")
        channels_of(client)[0].arenas.server.address = f"@{name}"
        net = client.parameter("net", size=ELEMENTS, optimizer=shardwell.SGD(1.0))
        net.init(np.zeros(ELEMENTS, np.float32))
        net.exchange(np.ones(ELEMENTS, np.float32))
        assert net.get_weights()[0] == -1
        assert other.stdout.readline() == "b''\n"


# Streams, by hand.


class Exchanging:
    """One Exchange call of a client of its own, with an arena."""

    def __init__(self, offering: Any, codec: int = types_pb2.CODEC_FP32) -> None:
        self.arena = offering()
        self.parameter = offering.worker.create(spec("net", 8, codec=codec))
        self.parameter.init(np.zeros(8))
        self.stub = offering.worker.stubs[0]

    def message(self, step: int, values: Any, offset: int = 64) -> Any:
        (message,) = self.parameter.gradient_messages(pb.ExchangeRequest, 0, values, step=step)
        message.gradient.chunk.shared.CopyFrom(self.arena.put(offset, message.payload))
        message.ClearField("payload")
        if step == 0:
            message.arena = self.arena.answer.token
        else:
            message.ClearField("open")
        return message

    def answers(self, messages: Any) -> list[Any]:
        return list(self.stub.Exchange(iter(messages), timeout=PATIENCE_S))

    def refusal(self, message: Any) -> types_pb2.ErrorDetail:
        with pytest.raises(grpc.RpcError) as caught:
            self.answers([message])
        return error_detail(caught.value)


def test_payload_and_answer_lie_in_the_arena(offering) -> None:
    call = Exchanging(offering)
    values = np.arange(8.0)
    answers = call.answers([call.message(0, values, 64), call.message(1, values, 128)])
    for count, answer in enumerate(answers, start=1):
        assert not answer.payload
        assert answer.chunk.shared == types_pb2.Shared(offset=64 * count, size=32)
        found = decode(call.arena.bytes_of(answer.chunk.shared), types_pb2.CODEC_FP32, 1, -1)
        np.testing.assert_array_equal(found, -count * values)


def test_the_next_answer_is_inline_for_who_sends_inline(offering) -> None:
    call = Exchanging(offering)
    (inline,) = call.parameter.gradient_messages(pb.ExchangeRequest, 0, np.ones(8), step=1)
    inline.ClearField("open")
    shared, plain = call.answers([call.message(0, np.ones(8)), inline])
    assert shared.chunk.HasField("shared")
    assert not plain.chunk.HasField("shared")
    np.testing.assert_array_equal(decode(plain.payload, types_pb2.CODEC_FP32, 1, -1), -2)


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 32),
        (48, 32),
        (65, 32),
        (SIZE, 32),
        (SIZE - 16, 32),
        (2**63, 32),
        (2**64 - 16, 32),
        (64, 2**32 - 1),
        (64, SIZE),
        (64, 16),
        (64, 0),
    ],
)
def test_places_that_are_not_there(offering, offset, size) -> None:
    call = Exchanging(offering)
    message = call.message(0, np.ones(8))
    message.gradient.chunk.shared.offset, message.gradient.chunk.shared.size = offset, size
    assert call.refusal(message).code == types_pb2.ERROR_CODE_CORRUPT_CHUNK
    other = Exchanging(offering)
    (answer,) = other.answers([other.message(0, np.ones(8))])
    assert answer.version == 1


def test_a_payload_in_both_places_or_without_an_arena(offering) -> None:
    call = Exchanging(offering)
    both = call.message(0, np.ones(8))
    both.payload = bytes(32)
    assert call.refusal(both).code == types_pb2.ERROR_CODE_CORRUPT_CHUNK
    without = call.message(0, np.ones(8))
    without.arena = 0
    found = call.refusal(without)
    assert found.code == types_pb2.ERROR_CODE_CORRUPT_CHUNK


@pytest.mark.parametrize("token", ["another", "taken"])
def test_tokens_that_are_not_known(offering, token) -> None:
    call = Exchanging(offering)
    message = call.message(0, np.ones(8))
    if token == "taken":
        assert len(call.answers([message])) == 1
    else:
        message.arena ^= 1
    assert call.refusal(message).code == types_pb2.ERROR_CODE_STOPPING


def test_another_arena_within_a_step_is_refused(offering) -> None:
    parameter = offering.worker.create(spec("wide", CHUNK_BYTES // 4 + 8))
    parameter.init(np.zeros(CHUNK_BYTES // 4 + 8))
    messages = parameter.gradient_messages(pb.ExchangeRequest, 0, np.ones(CHUNK_BYTES // 4 + 8))
    messages[1].arena = offering().answer.token
    with pytest.raises(grpc.RpcError) as caught:
        list(offering.worker.stubs[0].Exchange(iter(messages), timeout=PATIENCE_S))
    assert "in the middle of a step" in caught.value.details()


def test_what_the_other_side_changes_is_noticed(offering) -> None:
    call = Exchanging(offering)
    message = call.message(0, np.ones(8))
    call.arena.memory[70] ^= 1
    assert call.refusal(message).code == types_pb2.ERROR_CODE_CORRUPT_CHUNK


def in_one(messages: list[Any]) -> Any:
    return pb.ExchangeRequest(
        batch=[wire_crc.seal_around(message).SerializeToString() for message in messages]
    )


def test_messages_in_one_are_as_by_themselves(offering) -> None:
    call = Exchanging(offering)
    messages = [call.message(step, np.arange(8.0), 64 * (step + 1)) for step in range(3)]
    answers = call.answers([in_one(messages[:2]), messages[2]])
    assert [answer.version for answer in answers] == [1, 2, 3]  # each has ended a step
    found = decode(call.arena.bytes_of(answers[2].chunk.shared), types_pb2.CODEC_FP32, 1, -1)
    np.testing.assert_array_equal(found, -3 * np.arange(8.0))


def test_a_bad_message_in_a_batch_ends_the_stream_after_the_good_ones(offering) -> None:
    call = Exchanging(offering)
    good, bad = call.message(0, np.ones(8), 64), call.message(1, np.ones(8), 128)
    bad.gradient.chunk.crc32c ^= 1
    assert call.refusal(in_one([good, bad])).code == types_pb2.ERROR_CODE_CORRUPT_CHUNK
    other = call.message(1, np.ones(8), 64)
    other.open.CopyFrom(good.open)
    other.arena = (found := offering()).answer.token
    other.gradient.chunk.shared.CopyFrom(found.put(64, np.ones(8, "<f4").tobytes()))
    (answer,) = call.answers([other])
    assert answer.version == 2


@pytest.mark.parametrize("what", ["nested", "with more", "too many"])
def test_a_batch_that_is_none_is_refused(offering, what) -> None:
    call = Exchanging(offering)
    message = call.message(0, np.ones(8))
    batch = in_one([message] * (65 if what == "too many" else 1))
    if what == "nested":
        batch = in_one([batch])
    elif what == "with more":
        batch.gradient.CopyFrom(message.gradient)
    assert call.refusal(batch).code == types_pb2.ERROR_CODE_CORRUPT_CHUNK


def test_large_steps_leave_in_fewer_messages(cluster, connect) -> None:
    client, chunk_count = connect(cluster(1, chunk_size_bytes=CHUNK_BYTES), "w0"), 10
    size = chunk_count * CHUNK_BYTES // 2
    net = client.parameter("net", size=size, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(size, np.float32))
    sent: list[bytes] = []
    real = UnixCall.send

    def counted(self: UnixCall, messages: Any, **options: Any) -> None:
        real(self, (sent.append(message) or message for message in messages), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnixCall, "send", counted)
        net.exchange(np.ones(size, np.float32))
    assert len(sent) == chunk_count // 2
    assert sum(len(pb.ExchangeRequest.FromString(each).batch) or 1 for each in sent) == chunk_count


def test_a_stream_with_an_answer_too_many_is_not_used_again(cluster, connect, monkeypatch) -> None:
    client = connect(cluster(1, chunk_size_bytes=CHUNK_BYTES), "w0")
    size, opened = 10 * CHUNK_BYTES // 2, []
    net = client.parameter("net", size=size, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(size, np.float32))
    joined, begin = framing.joined, ShardStream.__init__

    def one_more(header_type: Any, messages: Any) -> bytes:
        if header_type is pb.ExchangeResponse:
            last = pb.ExchangeResponse.FromString(messages[-1])
            messages = [*messages] + [messages[-1]] * (last.chunk.chunk_index == 9)
        return joined(header_type, messages)

    def counted(self: ShardStream, *args: Any, **options: Any) -> None:
        opened.append(self)
        begin(self, *args, **options)

    monkeypatch.setattr(framing, "joined", one_more)
    monkeypatch.setattr(ShardStream, "__init__", counted)
    for step in range(3):
        assert (net.exchange(np.ones(size, np.float32)) == -1.0 - step).all()
    assert len(opened) == 3


# Faults that a caller does not see.


def test_a_payload_that_is_damaged_is_sent_again(cluster, connect, monkeypatch) -> None:
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    expected = trained(running, connect, "inline", same_host=False)
    real, damaged = parameter_stream.payload_of, threading.Event()

    def damaging(chunk: Any, payload: Any, memory: Any) -> Any:
        found = real(chunk, payload, memory)
        if chunk.chunk_index == 3 and not damaged.is_set():
            damaged.set()
            found = found.copy()
            found[5] ^= 4
        return found

    monkeypatch.setattr(parameter_stream, "payload_of", damaging)
    np.testing.assert_array_equal(trained(running, connect, "shared"), expected)
    assert damaged.is_set()


def test_a_shard_that_has_forgotten_the_arena(cluster, connect, monkeypatch) -> None:
    """As one that was started again between the offer and the stream."""
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES)
    expected = trained(running, connect, "inline", same_host=False)
    real, forgot = arenas.ArenaOffers.take, threading.Event()

    def take(offers: Any, token: int) -> Any:
        if not forgot.is_set():
            forgot.set()
            return None
        return real(offers, token)

    monkeypatch.setattr(arenas.ArenaOffers, "take", take)
    np.testing.assert_array_equal(trained(running, connect, "shared"), expected)
    assert forgot.is_set()


def test_a_stream_that_is_cancelled_when_its_answer_has_come(cluster, connect, monkeypatch) -> None:
    """Its memory stays until that is decoded."""
    client = connect(cluster(1, chunk_size_bytes=1 << 20), "w0")
    net = client.parameter("net", size=200_000, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(net.size, np.float32))
    real = UnixCall.read

    def read(call: UnixCall) -> bytes:
        answer = real(call)
        call.cancel()
        gc.collect()
        return answer

    monkeypatch.setattr(UnixCall, "read", read)
    assert net.exchange(np.ones(net.size, np.float32))[-1] == -1
    assert client.traffic.shared_bytes == 2 * (2 * net.size + -(-net.size // 256))


def test_time_that_offers_take_is_none_that_a_shard_waits(cluster, connect, monkeypatch) -> None:
    """Or no error would name the missing worker."""
    client = connect(cluster(1), "w0")
    net = client.parameter("net", size=ELEMENTS, **OPTIONS)
    net.init(np.zeros(ELEMENTS, np.float32))

    def slow(self: ShardStream, wanted_bytes: int, timeout_s: float) -> None:
        time.sleep(1.5)

    monkeypatch.setattr(ShardStream, "arena", slow)
    with pytest.raises(shardwell.WorkersMissingError):
        net.exchange(np.ones(ELEMENTS, np.float32), timeout_s=8.0)


def test_large_chunks_are_not_counted_on_the_loop(cluster, connect, monkeypatch) -> None:
    """Also where small ones are, on the same stream, and the message is as short."""
    client = connect(cluster(1, chunk_size_bytes=1 << 20), "w0")
    real, threads = parameter_stream.payload_of, {}

    def noted(chunk: Any, payload: Any, memory: Any) -> Any:
        threads.setdefault(chunk.element_count, set()).add(threading.current_thread().name)
        return real(chunk, payload, memory)

    monkeypatch.setattr(parameter_stream, "payload_of", noted)
    for _ in range(5):
        for size in (1000, 1000, 200_000, 130_000, 130_000, 60_000):
            codec = "fp16+lz4" if size == 60_000 else "fp16"
            net = client.parameter(f"p{size}", size=size, optimizer=shardwell.SGD(1.0), codec=codec)
            net.init(np.zeros(size, np.float32))
            net.exchange(np.ones(size, np.float32))
    assert client.traffic.shared_bytes
    loop = "shardwell-loop"
    for size in (1000, 130_000):
        assert any(loop in name for name in threads[size]), size
    for size in (200_000, 60_000):
        assert not any(loop in name for name in threads[size]), size


def test_what_a_snapshot_keeps_is_not_written_on_the_loop(cluster, connect, monkeypatch) -> None:
    """And once it has ended, the same stream's chunks are counted there again."""
    running = cluster(1, chunk_size_bytes=1 << 20)
    net = connect(running, "w0").parameter("net", size=130_000, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(net.size, np.float32))
    real, on_loop = parameter_stream.payload_of, []

    def noted(*arguments: Any) -> Any:
        on_loop.append("shardwell-loop" in threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(parameter_stream, "payload_of", noted)
    snapshots = running.servers[0].shard.parameters.get("net").snapshots
    for _ in range(3):
        net.exchange(np.ones(net.size, np.float32))
        with snapshots.under_way(net.next_step, lambda: True):
            for _ in range(2):
                net.exchange(np.ones(net.size, np.float32))
    assert on_loop == [False, False, False, True, False, False, True, False, False]


def test_a_python_that_has_no_memfd() -> None:
    """As some builds for Linux are."""
    script = """
import fcntl, os
del os.memfd_create, os.eventfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL
import numpy as np
import shardwell
from shardwell_server import LocalCluster
with LocalCluster(1) as cluster, shardwell.connect(cluster.target) as client:
    net = client.parameter("net", size=3_000_000, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(net.size, np.float32))
    net.exchange(np.ones(net.size, np.float32))
    print(net.get_weights()[-1], client.traffic.shared_bytes)
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout == "-1.0 0\n"


def test_a_payload_that_no_chunk_has_is_not_copied() -> None:
    own = OwnMemory(4 << 20)
    chunk = types_pb2.Chunk(shared=types_pb2.Shared(offset=64, size=3 << 20))
    with pytest.raises(shardwell.CorruptChunkError, match="expected at most"):
        arena.payload_of(chunk, np.empty(0, np.uint8), own.memory)
    own.close()


def test_a_payload_that_may_change_is_marked() -> None:
    """So that a copy is checked, and used, and not what is shared: see tests of wire/chunks.py."""
    own = OwnMemory(8192)
    memory = own.memory
    own.close()
    memory.view(64, 32)[:] = 7
    chunk = types_pb2.Chunk(shared=types_pb2.Shared(offset=64, size=32))
    found = arena.payload_of(chunk, np.empty(0, np.uint8), memory)
    assert found.flags.writeable
    assert set(found.tolist()) == {7}
    inline = arena.payload_of(types_pb2.Chunk(), np.frombuffer(b"inline", np.uint8), memory)
    assert not inline.flags.writeable
    chunk.crc32c = checksum.of_chunk(0, chunk, found)
    copied = check_chunk(chunk, found, 0).payload
    memory.view(64, 32)[:] = 9
    assert set(copied.tolist()) == {7}


HOLDING = """
import sys, threading
import numpy as np, shardwell
target, count = sys.argv[1], int(sys.argv[2])
def one(index):
    with shardwell.connect(target, worker_id=f"w{index}", same_host=False) as client:
        net = client.parameter(
            "net", size=2**19, optimizer=shardwell.SGD(0.1), worker_count=count + 1
        )
        net.init(np.zeros(2**19, np.float32))
        net.exchange(np.ones(2**19, np.float32), timeout_s=60)
for index in range(count):
    threading.Thread(target=one, args=(index,), daemon=True).start()
threading.Event().wait()
"""


def test_a_shard_keeps_no_payload_of_who_waits_for_others(cluster) -> None:
    running, count = cluster(1, chunk_size_bytes=2**20), 6
    with subprocess.Popen([sys.executable, "-c", HOLDING, running.target, str(count)]) as waiting:
        try:
            parameters = running.servers[0].shard.parameters
            eventually(
                "all have contributed",
                lambda: (
                    [len(each.describe(9).contributed_worker_ids) for each in parameters.all()]
                    == [count]
                ),
            )

            def payloads() -> list[str]:
                kinds = (types.GeneratorType, types.CoroutineType)
                running = [each for each in gc.get_objects() if type(each) in kinds]
                frames = [
                    each.gi_frame if isinstance(each, types.GeneratorType) else each.cr_frame
                    for each in running
                ]
                return [
                    f"{name} in {frame.f_code.co_qualname}"
                    for frame in frames
                    if frame is not None
                    for name, value in frame.f_locals.items()
                    if isinstance(value, bytes | np.ndarray) and len(value) > 900_000
                ]

            eventually("nothing is kept", lambda: payloads() == [])
        finally:
            waiting.kill()
