"""Goal: over TLS all is as it is without; a side that is not believed comes no further, and learns
why.

Method: real shards and groups with certificates of authorities made here, and every pair of sides
that may meet; certificates that are replaced under training; strangers that stop in the middle.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509

import shardwell
from harness.certificates import KEYS, authority, of_client, of_server, write_pair
from harness.inside import channels_of
from harness.polling import PATIENCE_S, eventually
from harness.programs.ports import free_port
from harness.threads import in_background, together
from shardwell import Tls
from shardwell.connection import options
from shardwell.connection.channel import Channel
from shardwell.connection.credentials import Credentials
from shardwell.connection.options import unary_stub
from shardwell.connection.tls import TlsFiles
from shardwell.v1 import peer_pb2
from shardwell_server import GroupCluster, ShardConfig, ShardServer
from shardwell_server.operations.certificates import Certificates, make_certificates

SGD = shardwell.SGD(learning_rate=1.0)
CONNECT_S = 20.0
"""Far longer than it may take to be refused."""


def trained(running: Any, connect: Any, tls: Tls | None, size: int = 3000) -> Any:
    """What two workers have after some steps, over gRPC."""
    clients = [connect(running, f"w{rank}", tls=tls, same_host=False) for rank in range(2)]

    def work(rank: int) -> Any:
        net = clients[rank].parameter("net", size=size, optimizer=SGD, worker_count=2)
        net.init(np.zeros(size, np.float32))
        for step in range(3):
            drawn = np.random.default_rng([rank, step])
            weights = net.exchange(drawn.standard_normal(size, np.float32))
        return weights.copy()

    one, other = together([lambda: work(0), lambda: work(1)])
    np.testing.assert_array_equal(one, other)
    return one


@pytest.mark.parametrize("processes", [False, True])
def test_weights_are_those_without(cluster, connect, processes) -> None:
    files = authority()
    found = trained(
        cluster(2, tls=of_server(files), processes=processes), connect, of_client(files)
    )
    np.testing.assert_array_equal(found, trained(cluster(2), connect, None))


@pytest.mark.same_host
def test_shards_of_this_machine_share_memory_all_the_same(cluster, connect) -> None:
    files = authority()
    running = cluster(1, tls=of_server(files), chunk_size_bytes=2**20)
    client = connect(running, "w0", tls=of_client(files))
    net = client.parameter("net", size=500_000, optimizer=SGD)
    net.init(np.zeros(net.size, np.float32))
    assert net.exchange(np.ones(net.size, np.float32))[-1] == -1
    assert client.traffic.shared_bytes


@functools.cache
def expired(files: Certificates) -> Certificates:
    """By the same authority, and good for no more than the hour before."""
    directory = Path(tempfile.mkdtemp(dir=files.ca.parent))
    for path in (files.ca, files.ca_key):
        shutil.copy(path, directory)
    return make_certificates(directory, ["127.0.0.1"], 0)


def side(name: str, *, is_client: bool = False) -> Tls | None:
    """One side of a connection, by its name in the tests' parameters."""
    ours, theirs = authority(), authority("theirs")
    elsewhere = authority("elsewhere", ("shard.example.org",))
    past = expired(ours)
    return {
        "expired": Tls(ca=ours.ca, cert=past.client, key=past.client_key)
        if is_client
        else Tls(cert=past.server, key=past.server_key),
        "plain": None,
        "tls": Tls(cert=ours.server, key=ours.server_key),
        "mutual": of_server(ours),
        "elsewhere": Tls(cert=elsewhere.server, key=elsewhere.server_key),
        "client's certificate": Tls(cert=ours.client, key=ours.client_key),
        "ca": Tls(ca=ours.ca),
        "certificate": of_client(ours),
        "server's certificate": of_server(ours),
        "another ca": Tls(ca=theirs.ca),
        "another ca's certificate": Tls(ca=ours.ca, cert=theirs.client, key=theirs.client_key),
        "ca elsewhere": Tls(ca=elsewhere.ca),
        "ca and name": Tls(ca=elsewhere.ca, server_name="shard.example.org"),
    }[name]


@pytest.mark.parametrize(
    ("server", "client", "refusal"),
    [
        ("plain", "plain", None),
        ("plain", "ca", "does not speak TLS, and this side does"),
        ("plain", "certificate", "does not speak TLS, and this side does"),
        ("tls", "plain", r"speaks TLS, and this side does not: give tls="),
        ("tls", "ca", None),
        ("tls", "certificate", None),
        ("tls", "another ca", "certificate that is not believed: unable to get local issuer"),
        ("mutual", "plain", r"speaks TLS, and this side does not: give tls="),
        ("mutual", "ca", "asks for a certificate: give tls="),
        ("mutual", "certificate", None),
        ("mutual", "server's certificate", None),
        ("mutual", "another ca", "certificate that is not believed"),
        ("mutual", "another ca's certificate", r"refuses the certificate /.*client.pem"),
        ("elsewhere", "ca elsewhere", "Hostname mismatch|IP address mismatch"),
        ("elsewhere", "ca and name", None),
        ("client's certificate", "ca", "unsuitable certificate purpose"),
        ("expired", "ca", "certificate has expired"),
        ("mutual", "expired", r"refuses the certificate /.*client.pem"),
    ],
)
def test_both_sides_decide_who_is_let_in(cluster, connect, server, client, refusal) -> None:
    running = cluster(1, tls=side(server))
    tls: Any = side(client, is_client=True) or False
    if refusal is None:
        assert len(connect(running, "w0", tls=tls).status()) == 1
        return
    began_s = time.monotonic()
    with pytest.raises(shardwell.AuthenticationError, match=refusal) as caught:
        connect(running, "w0", tls=tls, connect_timeout_s=CONNECT_S)
    assert time.monotonic() - began_s < CONNECT_S / 2
    assert caught.value.shard_index == 0
    assert running.target in caught.value.message


def test_a_shard_that_comes_later_is_waited_for(cluster, connect) -> None:
    address, files = f"127.0.0.1:{free_port()}", authority()
    waiting = in_background(lambda: connect(address, "w0", tls=of_client(files)))
    config = ShardConfig(shard_index=0, shard_count=1, listen=address, tls=of_server(files))
    with ShardServer(config):
        client = waiting.result(PATIENCE_S)
        assert len(client.status()) == 1
        client.close()


def test_the_environment_names_certificates(cluster, monkeypatch) -> None:
    files = authority()
    running = cluster(1, tls=of_server(files))
    monkeypatch.setenv("SHARDWELL_TLS_CA", str(files.ca))
    with pytest.raises(shardwell.AuthenticationError, match=r"\$SHARDWELL_TLS_CERT"):
        shardwell.connect(running.target)
    monkeypatch.setenv("SHARDWELL_TLS_CERT", str(files.client))
    with pytest.raises(shardwell.ArgumentError, match="come together"):
        shardwell.connect(running.target)
    monkeypatch.setenv("SHARDWELL_TLS_KEY", str(files.client_key))
    shardwell.connect(running.target).close()
    with pytest.raises(shardwell.AuthenticationError, match="speaks TLS"):
        shardwell.connect(running.target, tls=False)
    monkeypatch.setenv("SHARDWELL_TLS_SERVER_NAME", "nobody")
    with pytest.raises(shardwell.AuthenticationError, match="'nobody'"):
        shardwell.connect(running.target)


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"ca": "missing"}, "missing can't be read: No such file"),
        ({"ca": "a\0b"}, "can't be read: embedded null"),
        ({"ca": "empty"}, "empty has no certificate of an authority"),
        ({"ca": "ours.key"}, "ours.key has no certificate of an authority"),
        ({"cert": "ours.pem"}, "come together"),
        ({"cert": "ours.pem", "key": "theirs.key"}, "are no certificate and its key"),
        ({"cert": "ours.key", "key": "ours.pem"}, "are no certificate and its key"),
        ({"cert": "ours.pem", "key": "locked.key"}, "without a password"),
        ({"cert": "empty", "key": "ours.key"}, "are no certificate and its key"),
        ({"cert": "ours.der", "key": "ours.key"}, "in PEM form"),
        ({"ca": "marked.pem"}, "marked.pem has a byte order mark"),
        ({"cert": "marked.pem", "key": "ours.key"}, "marked.pem has a byte order mark"),
        ({"cert": "ours.pem", "key": "marked.key"}, "marked.key has a byte order mark"),
        ({"ca": "two.pem"}, "two.pem has a byte order mark"),
    ],
)
def test_files_that_are_of_no_use(tmp_path, files, what) -> None:
    ours, theirs = authority(), authority("theirs")
    (tmp_path / "empty").touch()
    for path, name in (
        (ours.server, "ours.pem"),
        (ours.server_key, "ours.key"),
        (theirs.server_key, "theirs.key"),
    ):
        shutil.copy(path, tmp_path / name)
    (tmp_path / "locked.key").write_bytes(_locked(ours.server_key))
    mark, cert = b"\xef\xbb\xbf", ours.server.read_bytes()
    (tmp_path / "marked.pem").write_bytes(mark + cert)
    (tmp_path / "marked.key").write_bytes(mark + ours.server_key.read_bytes())
    (tmp_path / "two.pem").write_bytes(cert + mark + cert)
    (tmp_path / "ours.der").write_bytes(ssl.PEM_cert_to_DER_cert(cert.decode()))
    with pytest.raises(shardwell.ArgumentError, match=what):
        shardwell.connect(
            "127.0.0.1:1", tls=Tls(**{k: f"{tmp_path}/{v}" for k, v in files.items()})
        )


@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_taken_if_grpc_serves_them(cluster, connect, tmp_path, kind) -> None:
    """Both ends with that kind of key; who takes it can connect, and who doesn't names it."""
    files, cert, key = authority(), tmp_path / "its.pem", tmp_path / "its.key"
    write_pair(kind, cert, key, files)
    tls = Tls(ca=files.ca, cert=cert, key=key)
    if grpc_serves(cert, key, files.ca):
        running = cluster(1, tls=tls, admin_listen="127.0.0.1:0")
        assert len(connect(running, "w0", tls=tls).status()) == 1
        return
    assert kind not in ("P-256", "P-384", "RSA")
    refusal = r"its.pem and .*its.key can't be served: gRPC makes no connection"
    with pytest.raises(shardwell.ArgumentError, match=refusal):
        cluster(1, tls=tls)
    with pytest.raises(shardwell.ArgumentError, match=refusal):
        shardwell.connect("127.0.0.1:1", tls=tls)


def grpc_serves(cert: Path, key: Path, ca: Path) -> bool:
    """Whether a plain server of gRPC with that certificate, and a plain client, come together."""
    server = grpc.server(ThreadPoolExecutor(1))
    pair = (key.read_bytes(), cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], ca.read_bytes(), True)
    try:
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        with grpc.secure_channel(
            f"127.0.0.1:{port}", grpc.ssl_channel_credentials(ca.read_bytes(), *pair)
        ) as channel:
            grpc.channel_ready_future(channel).result(3.0)
    except (RuntimeError, grpc.FutureTimeoutError):
        return False
    finally:
        server.stop(None).wait(PATIENCE_S)
    return True


@pytest.mark.parametrize("path", ["", 5, b"ca.pem", True])
def test_certificates_that_are_no_path_are_refused(path: Any) -> None:
    with pytest.raises(shardwell.ArgumentError, match="tls: ca must be the path of a file"):
        Tls(ca=path)
    with pytest.raises(shardwell.ArgumentError, match="tls must be"):
        shardwell.connect("127.0.0.1:1", tls=path)


def _locked(key: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    return loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


# Certificates that are replaced.


def serial(address: str, files: Certificates) -> str:
    """The number of the certificate that a new connection gets, as OpenSSL sees it."""
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.client, files.client_key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        found: Any = secure.getpeercert()
        return str(found["serialNumber"])


def connections_to(addresses: list[str]) -> set[str]:
    """What this process is connected by to them: its own ends, as the kernel names them."""
    ports = {f"{int(address.rpartition(':')[2]):04X}" for address in addresses}
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "01" and row[2].rpartition(":")[2] in ports}


@pytest.fixture
def own(tmp_path: Path) -> Certificates:
    """Certificates that a test may replace."""
    return make_certificates(tmp_path / "certs", ["localhost", "127.0.0.1"], 7)


def renewed(files: Certificates) -> None:
    make_certificates(files.ca.parent, (), 7)


@pytest.mark.parametrize(
    "seconds", [6, pytest.param(60, marks=pytest.mark.exhaustive)], ids=["a moment", "a minute"]
)
def test_certificates_replaced_every_second_under_training(
    cluster, connect, own, seconds, monkeypatch
) -> None:
    """No step fails, none is counted twice, and connections end, streams in the middle of a step
    with them."""
    monkeypatch.setattr(options, "_CONNECTION_END_S", 0.5)
    running = cluster(2, tls=of_server(own), connection_age_s=1.0)
    clients = [
        connect(running, f"w{rank}", tls=of_client(own), same_host=False) for rank in range(2)
    ]
    nets = [
        client.parameter("net", size=300, optimizer=SGD, worker_count=2, codec="fp32")
        for client in clients
    ]
    nets[0].init(np.zeros(300, np.float32))
    until_s = time.monotonic() + seconds
    serials = {serial(running.addresses[0], own)}
    first = connections_to(running.addresses)
    assert len(first) == 4
    step_count = [0, 0]
    begun: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def lead() -> Iterator[None]:
        while time.monotonic() < until_s:
            begun.put(True)
            yield
        begun.put(False)

    def follow() -> Iterator[None]:
        while begun.get(timeout=PATIENCE_S):
            yield

    def work(rank: int, steps: Iterator[None]) -> None:
        for _ in steps:
            weights = nets[rank].exchange(np.ones(300, np.float32))
            step_count[rank] += 1
            assert (weights == -step_count[rank]).all()

    both = [in_background(lambda: work(0, lead())), in_background(lambda: work(1, follow()))]
    over = threading.Event()
    while time.monotonic() < until_s:
        over.wait(1.0)
        renewed(own)
        serials.add(serial(running.addresses[0], own))
    for each in both:
        each.result(PATIENCE_S)
    assert step_count[0] == step_count[1] > 10
    assert len(serials) > seconds / 2
    assert not first & connections_to(running.addresses)


def test_what_does_not_fit_is_not_taken(cluster, connect, own, caplog) -> None:
    """A certificate whose key is not there yet: the old ones go on, and then both are new."""
    running = cluster(1, tls=of_server(own))
    before = serial(running.target, own)
    kept = own.server_key.read_bytes()
    renewed(own)
    fresh = own.server_key.read_bytes()
    own.server_key.write_bytes(kept)
    assert serial(running.target, own) == before
    assert "what was there before is used" in caplog.text
    own.server.unlink()
    assert serial(running.target, own) == before
    own.server_key.unlink()
    make_certificates(own.ca.parent, ["127.0.0.1"], 7)
    assert fresh != own.server_key.read_bytes()
    eventually("the new certificate", lambda: serial(running.target, own) != before)
    assert len(connect(running, "w0", tls=of_client(own)).status()) == 1


@pytest.mark.parametrize("kind", ["Ed25519", "P-521", "byte order mark"])
def test_what_grpc_can_not_serve_is_not_taken(cluster, connect, own, caplog, kind) -> None:
    """Neither by a shard nor by a client: both go on with what they had, and name the file."""
    running = cluster(1, tls=of_server(own))
    client = Channel(running.target, Credentials.of(of_client(own)))
    before = serial(running.target, own)
    for cert, key in ((own.server, own.server_key), (own.client, own.client_key)):
        if kind in KEYS:
            write_pair(kind, cert, key, own)
        else:
            cert.write_bytes(b"\xef\xbb\xbf" + cert.read_bytes())
    assert serial(running.target, authority_of(own)) == before
    assert not client.renew()
    client.close()
    refusals = [record for record in caplog.records if "was there before" in record.message]
    assert {record.levelname for record in refusals} == {"ERROR"}
    for path in (own.server, own.client):
        assert any(str(path) in record.message for record in refusals)
    renewed_by_force(own)
    eventually("the new certificate", lambda: serial(running.target, own) != before)
    assert len(connect(running, "w0", tls=of_client(own)).status()) == 1


def authority_of(files: Certificates) -> Certificates:
    """Another client's certificate by the same authority."""
    directory = Path(tempfile.mkdtemp(dir=files.ca.parent))
    for path in (files.ca, files.ca_key):
        shutil.copy(path, directory)
    return make_certificates(directory, ["127.0.0.1"], 7)


def renewed_by_force(files: Certificates) -> None:
    """Also where what exists was not made by `make_certificates`."""
    for path in (files.server, files.server_key, files.client, files.client_key):
        path.unlink()
    make_certificates(files.ca.parent, ["127.0.0.1"], 7)


def test_an_authority_is_replaced_under_training(
    cluster, connect, own, tmp_path, monkeypatch
) -> None:
    """As the runbook has it: both are believed for a time, and then the new one alone."""
    monkeypatch.setattr(options, "_CONNECTION_END_S", 0.5)
    old = make_certificates_beside(own, tmp_path / "old")
    running = cluster(2, tls=of_server(own), connection_age_s=1.0)
    client = connect(running, "w0", tls=of_client(own), same_host=False)
    net = client.parameter("net", size=300, optimizer=SGD, codec="fp32")
    net.init(np.zeros(300, np.float32))
    new = make_certificates(tmp_path / "new", ["localhost", "127.0.0.1"], 7)
    steps = 0

    def train(until: Callable[[], bool]) -> None:
        nonlocal steps
        deadline_s = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline_s
            steps += 1
            assert (net.exchange(np.ones(300, np.float32)) == -steps).all()

    both = tmp_path / "both.pem"
    both.write_bytes(own.ca.read_bytes() + new.ca.read_bytes())
    shutil.copy(both, own.ca)
    mixed = new._replace(ca=both)
    train(lambda: all(answers(address, mixed) for address in running.addresses))
    for name in ("server", "client"):
        for each in ("", "_key"):
            shutil.copy(getattr(new, f"{name}{each}"), getattr(own, f"{name}{each}"))
    number = x509.load_pem_x509_certificate(new.server.read_bytes()).serial_number
    train(lambda: all(int(serial(a, mixed), 16) == number for a in running.addresses))
    first = connections_to(running.addresses)
    train(lambda: not first & connections_to(running.addresses))
    shutil.copy(new.ca, own.ca)
    train(lambda: not any(answers(address, old._replace(ca=both)) for address in running.addresses))
    first = connections_to(running.addresses)
    train(lambda: not first & connections_to(running.addresses))
    assert len(connect(running, "w1", tls=of_client(new)).status()) == 2
    with pytest.raises(shardwell.AuthenticationError, match="refuses the certificate"):
        connect(running, "w2", tls=Tls(ca=new.ca, cert=old.client, key=old.client_key))


def make_certificates_beside(files: Certificates, directory: Path) -> Certificates:
    """A copy, which stays when the files are replaced."""
    shutil.copytree(files.ca.parent, directory)
    return Certificates.of(directory)


def answers(address: str, files: Certificates) -> bool:
    """Whether a server takes a client's certificate: it speaks first, in HTTP/2."""
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.client, files.client_key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            return bool(secure.recv(1))
    except OSError:
        return False


def test_all_that_connect_while_files_are_tried_are_served(cluster, own) -> None:
    """Trying them takes threads of gRPC's, and those who connect meanwhile leave it some."""
    running = cluster(4, tls=of_server(own))
    for _ in range(3):
        renewed(own)
        found = together(
            [
                functools.partial(serial, address, own)
                for address in running.addresses
                for _ in range(8)
            ]
        )
        assert len(found) == 32
    number = x509.load_pem_x509_certificate(own.server.read_bytes()).serial_number
    for address in running.addresses:
        newest = functools.partial(serial, address, own)
        eventually("the newest certificate", lambda look=newest: int(look(), 16) == number)


def test_a_client_takes_new_ones_where_it_connects_again(cluster, connect, own, tmp_path) -> None:
    """The authority itself is another one, and the shard is started again."""
    running = cluster(1, data_dir=tmp_path / "data", tls=of_server(own), processes=True)
    client = connect(running, "w0", tls=of_client(own), same_host=False)
    net = client.parameter("net", size=300, optimizer=SGD)
    net.init(np.zeros(300, np.float32))
    net.exchange(np.ones(300, np.float32))
    running.children[0].kill()
    running.children[0].wait(PATIENCE_S)
    shutil.rmtree(own.ca.parent)
    make_certificates(own.ca.parent, ["127.0.0.1"], 7)
    attendance = channels_of(client)[0]._attendance
    count = attendance._count
    eventually("it attends again by itself", lambda: attendance._count > count)  # in vain
    running.start_again(0)
    assert (net.exchange(np.ones(300, np.float32)) == -2).all()


def test_a_client_that_waits_takes_what_comes_meanwhile(cluster, connect, own, tmp_path) -> None:
    running = cluster(1, data_dir=tmp_path / "data", tls=of_server(own), processes=True)
    theirs = make_certificates(tmp_path / "of the client", ["127.0.0.1"], 7)
    for path, mine in zip(own, theirs, strict=True):
        shutil.copy(path, mine)
    client = connect(running, "w0", tls=of_client(theirs), same_host=False)
    net = client.parameter("net", size=300, optimizer=SGD)
    net.init(np.zeros(300, np.float32))
    net.exchange(np.ones(300, np.float32))
    running.children[0].kill()
    running.children[0].wait(PATIENCE_S)
    shutil.rmtree(own.ca.parent)
    make_certificates(own.ca.parent, ["127.0.0.1"], 7)
    running.start_again(0)
    waiting = in_background(lambda: net.exchange(np.ones(300, np.float32)).copy())
    eventually("it waits", lambda: channels_of(client)[0]._attendance._call is not None)
    assert not waiting.done()
    for path, mine in zip(own, theirs, strict=True):
        shutil.copy(path, mine)
    assert (waiting.result(PATIENCE_S) == -2).all()


def test_an_idle_client_takes_new_certificates_when_its_connection_ends(
    cluster, connect, own, monkeypatch
) -> None:
    monkeypatch.setattr(options, "_CONNECTION_END_S", 0.5)
    client = connect(cluster(1, tls=of_server(own), connection_age_s=1.0), "w0", tls=of_client(own))
    (channel,) = channels_of(client)
    before = channel._channel._contents.cert
    renewed(own)
    eventually("it has the new one", lambda: channel._channel._contents.cert != before)
    assert channel._channel._contents.cert == own.client.read_bytes()
    assert len(client.status()) == 1


# Strangers.


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
@pytest.mark.parametrize("who", ["ours", "nobody", "theirs", "of old"])
def test_openssl_as_a_stranger(cluster, connect, monkeypatch, who) -> None:
    """Not a byte is said to it, but to who may come in."""
    monkeypatch.setattr(options, "_HANDSHAKE_S", 1.0)  # it says nothing in HTTP/2
    running = cluster(1, tls=of_server(authority()))
    command = ["openssl", "s_client", "-connect", running.target, "-alpn", "h2", "-quiet"]
    if who != "nobody":
        files = authority("theirs") if who == "theirs" else authority()
        command += ["-cert", str(files.client), "-key", str(files.client_key)]
    if who == "of old":
        command += ["-tls1_1", "-cipher", "DEFAULT@SECLEVEL=0"]
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert bool(ended.stdout) == (who == "ours")
    assert len(connect(running, "w0", tls=of_client(authority())).status()) == 1


def test_handshakes_that_stop_in_the_middle_end(cluster, connect, monkeypatch) -> None:
    monkeypatch.setattr(options, "_HANDSHAKE_S", 1.0)
    running = cluster(1, tls=of_server(authority()))
    host, _, port = running.target.rpartition(":")
    hello = _client_hello()
    with contextlib.ExitStack() as stack:
        strangers = []
        for number in range(60):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(hello[: number * len(hello) // 59])
            stranger.settimeout(PATIENCE_S)
            strangers.append(stranger)
        assert len(connect(running, "w0", tls=of_client(authority())).status()) == 1
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(65_536):
                    pass


def _client_hello() -> bytes:
    context = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    incomplete = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        incomplete.do_handshake()
    return outgoing.read()


# Groups.


def joined(rank: int, target: Any, tls: Any, **options: Any) -> Any:
    return shardwell.join_group(
        "g", rank=rank, size=2, rendezvous=target, tls=tls, join_timeout_s=CONNECT_S, **options
    )


@pytest.mark.parametrize("same_host", [True, False])
def test_a_group_speaks_tls(cluster, same_host) -> None:
    files = authority()
    target = cluster(1, tls=of_server(files)).target

    def work(rank: int) -> Any:
        with joined(rank, target, of_server(files), same_host=same_host) as group:
            array = np.full(300_000, rank + 1, np.float32)
            group.all_reduce(array)
            return array

    for found in together([lambda: work(0), lambda: work(1)]):
        assert (found == 3).all()


def test_a_group_that_meets_at_rank_0() -> None:
    files = authority()
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def work(rank: int) -> Any:
        with joined(rank, addresses, of_server(files)) as group:
            array = np.full(10, rank, np.float32)
            group.all_reduce(array)
            return array

    for found in together([lambda: work(0), lambda: work(1)]):
        assert (found == 1).all()


def test_who_is_no_member(cluster) -> None:
    ours, theirs = authority(), authority("theirs")
    target = cluster(1, tls=of_server(ours)).target
    with pytest.raises(shardwell.AuthenticationError, match=r"the rendezvous at .* speaks TLS"):
        joined(0, target, False)
    stranger = Tls(ca=ours.ca, cert=theirs.server, key=theirs.server_key)
    with pytest.raises(shardwell.AuthenticationError, match="refuses the certificate"):
        joined(0, target, stranger)
    with pytest.raises(shardwell.ArgumentError, match="tls needs ca, cert and key"):
        joined(0, target, Tls(ca=ours.ca))


def greeted(address: str, tls: TlsFiles | None) -> str:
    """What comes of asking a server who it is, by gRPC alone."""
    channel = Channel(address, Credentials(tls))
    greet = unary_stub(channel.current, "/shardwell.v1.PeerService/Greet", peer_pb2.GreetResponse)
    with pytest.raises(grpc.RpcError) as caught:
        greet(peer_pb2.GreetRequest(group="g", member_id="nobody"), timeout=PATIENCE_S)
    channel.close()
    return str(caught.value.details())


def test_a_member_s_port_is_closed_to_strangers(cluster) -> None:
    files, theirs = authority(), authority("theirs")
    target = cluster(1, tls=of_server(files)).target
    addresses: list[str] = []

    def work(rank: int) -> None:
        with joined(rank, target, of_server(files)) as group:
            addresses[:] = group.addresses
            group.barrier()
            for address in addresses:
                assert "another worker answers here" in greeted(address, TlsFiles(of_client(files)))
                for tls in (None, TlsFiles(of_client(theirs))):
                    assert "failed to connect" in greeted(address, tls)
            group.barrier()

    together([lambda: work(0), lambda: work(1)])


def test_shards_beside_the_ranks(cluster) -> None:
    files = authority()
    target = cluster(1, tls=of_server(files)).target

    def work(rank: int) -> Any:
        tls = of_server(files)
        with (
            joined(rank, target, tls) as group,
            GroupCluster(group) as shards,
            shardwell.connect(shards.target, worker_id=f"w{rank}", tls=tls) as client,
        ):
            net = client.parameter("net", size=100, optimizer=SGD, worker_count=2)
            net.init(np.zeros(100, np.float32))
            return net.exchange(np.ones(100, np.float32)).copy()

    for found in together([lambda: work(0), lambda: work(1)]):
        assert (found == -1).all()


def test_keys_are_their_owner_s_alone(own) -> None:
    for key in (own.ca_key, own.server_key, own.client_key):
        assert key.stat().st_mode & 0o077 == 0
    assert own.ca.parent.stat().st_mode & 0o077 == 0


def test_nothing_secret_is_shown(own) -> None:
    contents = TlsFiles(of_server(own)).contents()
    assert b"PRIVATE" in (contents.key or b"")
    assert "CERTIFICATE" in repr(contents)
    assert "PRIVATE" not in repr(contents)


def test_certificates_are_replaced_whole(own) -> None:
    """Under a reader, who sees one or the other."""
    over, found = threading.Event(), set[bytes]()

    def read() -> None:
        while not over.is_set():
            contents = own.server.read_bytes()
            x509.load_pem_x509_certificate(contents)
            found.add(contents)

    reading = in_background(read)

    def is_seen() -> bool:
        renewed(own)
        return len(found) > 5

    try:
        eventually("it is read again and again", is_seen)
    finally:
        over.set()
    reading.result(PATIENCE_S)
    assert not [path for path in own.ca.parent.iterdir() if path.suffix == ".part"]


def test_what_is_no_authority_makes_nothing(own) -> None:
    before = {path.name: path.read_bytes() for path in own.ca.parent.iterdir()}
    with pytest.raises(shardwell.ArgumentError, match="a host is a name or an IP address"):
        make_certificates(own.ca.parent, ["127.0.0.1:7070"], 7)
    own.ca_key.unlink()  # as on a machine that its certificates were copied to
    with pytest.raises(shardwell.StorageError, match="key does not: certificates are made where"):
        renewed(own)
    shutil.copy(authority("theirs").ca_key, own.ca_key)
    with pytest.raises(shardwell.StorageError, match="is not the key of"):
        renewed(own)
    own.ca_key.write_bytes(before["ca.key"])
    assert {path.name: path.read_bytes() for path in own.ca.parent.iterdir()} == before


def test_an_authority_that_was_half_made(own) -> None:
    """Killed before ca.pem was there."""
    own.ca.rename(own.ca.with_name("ca.pem.part"))
    renewed(own)
    TlsFiles(of_server(own))
