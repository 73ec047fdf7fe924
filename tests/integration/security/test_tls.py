"""Goal: over TLS all is as it is without; whoever is not believed comes no further, and is told.

Method: real shards and groups with certificates of authorities made here, and every pair of sides
that may meet; certificates that are replaced under training; strangers that stop in the middle.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.certificates import authority, of_client, of_server
from harness.polling import PATIENCE_S, eventually
from harness.programs.ports import free_port
from harness.threads import in_background, together
from shardwell import Tls
from shardwell.rpc import options
from shardwell.rpc.tls import TlsFiles, check_trust
from shardwell_server import GroupCluster, ShardConfig, ShardServer
from shardwell_server.certificates import Certificates, make_certificates

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


def side(name: str) -> Tls | None:
    """One side of a connection, by its name in the tests' parameters."""
    ours, theirs = authority(), authority("theirs")
    elsewhere = authority("elsewhere", ("shard.example.org",))
    return {
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
    ],
)
def test_two_sides(cluster, connect, server, client, refusal) -> None:
    running = cluster(1, tls=side(server))
    tls: Any = side(client) or False
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


def test_the_environment(cluster, monkeypatch) -> None:
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
        ({"ca": "empty"}, "empty has no certificate of an authority"),
        ({"ca": "ours.key"}, "ours.key has no certificate of an authority"),
        ({"cert": "ours.pem"}, "come together"),
        ({"cert": "ours.pem", "key": "theirs.key"}, "are no certificate and its key"),
        ({"cert": "ours.key", "key": "ours.pem"}, "are no certificate and its key"),
        ({"cert": "ours.pem", "key": "locked.key"}, "without a password"),
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
    with pytest.raises(shardwell.ArgumentError, match=what):
        shardwell.connect("127.0.0.1:1", tls=Tls(**{k: tmp_path / v for k, v in files.items()}))


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


@pytest.fixture
def own(tmp_path: Path) -> Certificates:
    """Certificates that a test may replace."""
    return make_certificates(tmp_path / "certs", ["localhost", "127.0.0.1"], 7)


def renewed(files: Certificates) -> None:
    make_certificates(files.ca.parent, (), 7)


@pytest.mark.parametrize(
    "seconds", [6, pytest.param(60, marks=pytest.mark.exhaustive)], ids=["a moment", "a minute"]
)
def test_replaced_every_second_under_training(cluster, connect, own, seconds) -> None:
    """No step fails, none is counted twice, and old connections end."""
    running = cluster(2, tls=of_server(own), connection_age_s=1.0, processes=True)
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

    step_count = [0, 0]

    def work(rank: int) -> None:
        while time.monotonic() < until_s or step_count[rank] < max(step_count):
            weights = nets[rank].exchange(np.ones(300, np.float32))
            step_count[rank] += 1
            assert (weights == -step_count[rank]).all()

    both = [in_background(lambda rank=rank: work(rank)) for rank in range(2)]
    over = threading.Event()
    while time.monotonic() < until_s:
        over.wait(1.0)
        renewed(own)
        serials.add(serial(running.addresses[0], own))
    for each in both:
        each.result(PATIENCE_S)
    assert step_count[0] == step_count[1] > 10
    assert len(serials) > seconds / 2


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
    make_certificates(own.ca.parent, ["127.0.0.1"], 7)
    assert fresh != own.server_key.read_bytes()
    assert serial(running.target, own) != before
    assert len(connect(running, "w0", tls=of_client(own)).status()) == 1


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
    running.start_again(0)
    assert (net.exchange(np.ones(300, np.float32)) == -2).all()


# Strangers.


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
@pytest.mark.parametrize("flags", [[], ["-tls1_1"], ["-cert", "theirs"]])
def test_openssl_as_a_stranger(cluster, connect, flags) -> None:
    running, theirs = cluster(1, tls=of_server(authority())), authority("theirs")
    certificate = ["-cert", str(theirs.client), "-key", str(theirs.client_key)]
    command = ["openssl", "s_client", "-connect", running.target, "-alpn", "h2", "-quiet"]
    ended = subprocess.run(
        [*command, *(certificate if "-cert" in flags else flags)],
        input=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert not ended.stdout
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
def test_a_group(cluster, same_host) -> None:
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


def test_a_member_s_port_is_closed_to_strangers(cluster) -> None:
    files, theirs = authority(), authority("theirs")
    target = cluster(1, tls=of_server(files)).target
    addresses: list[str] = []

    def work(rank: int) -> None:
        with joined(rank, target, of_server(files)) as group:
            addresses[:] = group.addresses
            group.barrier()
            for address in addresses:
                for tls in (None, TlsFiles(of_client(theirs))):
                    with pytest.raises(shardwell.AuthenticationError):
                        check_trust("a member", address, tls, PATIENCE_S)
            group.barrier()

    together([lambda: work(0), lambda: work(1)])


def test_shards_beside_the_ranks(cluster) -> None:
    files = authority()
    target = cluster(1, tls=of_server(files)).target

    def work(rank: int) -> Any:
        tls = of_server(files)
        with (
            joined(rank, target, tls) as group,
            GroupCluster(group, tls=tls) as shards,
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
    shown = repr(of_server(own)) + repr(TlsFiles(of_server(own)))
    assert "PRIVATE" not in shown


def test_certificates_are_replaced_whole(own) -> None:
    """Under readers, who see one or the other."""
    tls = of_server(own)
    eventually("it is read again", lambda: (renewed(own), TlsFiles(tls).contents())[1].cert)
    assert not [path for path in own.ca.parent.iterdir() if path.suffix == ".part"]
    with pytest.raises(shardwell.ArgumentError, match="a host is a name or an IP address"):
        make_certificates(own.ca.parent, ["127.0.0.1:7070"], 7)
    shutil.copy(authority("theirs").ca_key, own.ca_key)
    with pytest.raises(shardwell.StorageError, match="is not the key of"):
        renewed(own)
