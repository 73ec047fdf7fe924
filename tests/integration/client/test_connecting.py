"""connect(): the right shards in the right order, or an error that names the wrong one."""

from __future__ import annotations

import contextlib
import socket
from concurrent import futures

import grpc
import numpy as np
import pytest

import shardwell
from harness.faults.standing_still import stopped
from harness.polling import PATIENCE_S, Stopwatch
from harness.programs.ports import free_port
from harness.threads import in_background
from shardwell.connection.absence import BUSY, why_absent
from shardwell_server import LocalCluster, ShardConfig, ShardServer

SGD = shardwell.SGD(learning_rate=0.5)


def _refused(target: str, **options: object) -> shardwell.ShardwellError:
    options.setdefault("connect_timeout_s", 10)
    with pytest.raises(shardwell.ShardwellError) as caught:
        shardwell.connect(target, worker_id="w0", **options).close()
    return caught.value


def test_shards_in_another_order(cluster) -> None:
    running = cluster(3)
    one, two, three = running.addresses
    error = _refused(f"{one},{three},{two}")
    assert isinstance(error, shardwell.WrongShardError)
    assert error.shard_index == 1
    assert f"{three} should be shard 1 of 3" in error.message
    assert "it is shard 2 of 3" in error.message


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_addresses(cluster, count) -> None:
    error = _refused(",".join(cluster(3).addresses[:count]))
    assert isinstance(error, shardwell.WrongShardError)
    assert f"shard 0 of {count}" in error.message
    assert "shard 0 of 3" in error.message


def test_shards_of_two_clusters(cluster) -> None:
    one, two = cluster(2), cluster(2)
    error = _refused(f"{one.addresses[0]},{two.addresses[1]}")
    assert isinstance(error, shardwell.WrongShardError)
    assert error.shard_index == 1
    assert one.cluster_id in error.message
    assert two.cluster_id in error.message


def test_a_cluster_with_another_name(cluster) -> None:
    running = cluster(2)
    error = _refused(running.target, cluster_id="mine")
    assert isinstance(error, shardwell.WrongShardError)
    assert "'mine'" in error.message
    with shardwell.connect(running.target, cluster_id=running.cluster_id) as client:
        assert client.cluster_id == running.cluster_id


def test_a_shard_that_changed_behind_an_address(cluster, connect) -> None:
    """The check at connect is not the only one: every call says which shard it means."""
    port = free_port()
    config = {"shard_index": 0, "shard_count": 1, "listen": f"127.0.0.1:{port}"}
    client = None
    with contextlib.ExitStack() as stack:
        with ShardServer(ShardConfig(cluster_id="one", **config)):
            client = stack.enter_context(shardwell.connect(f"127.0.0.1:{port}", worker_id="w0"))
            model = client.parameter("model", size=10, optimizer=SGD)
            model.init(np.zeros(10, np.float32))
        with ShardServer(ShardConfig(cluster_id="two", **config)):
            for call in (
                lambda: client.parameter("model", size=10, optimizer=SGD),
                lambda: model.init(np.zeros(10, np.float32)),
                lambda: model.get_weights(),
                lambda: model.put_gradient(np.zeros(10, np.float32)),
                lambda: model.exchange(np.zeros(10, np.float32)),
                lambda: model.set_learning_rate(0.1),
            ):
                with pytest.raises(shardwell.WrongShardError, match=r"'two'.*'one'"):
                    call()


def test_a_closed_port_is_named_in_time() -> None:
    address = f"127.0.0.1:{free_port()}"
    watch = Stopwatch()
    error = _refused(address, connect_timeout_s=0.6)
    assert 0.5 < watch.elapsed_s < PATIENCE_S
    assert isinstance(error, shardwell.ShardUnavailableError)
    assert error.shard_index == 0
    assert address in error.message
    assert "nothing listens on port" in error.message


def test_an_unknown_host_is_named() -> None:
    error = _refused("shard-0.invalid:7070", connect_timeout_s=0.6, token_file=False)
    assert isinstance(error, shardwell.ShardUnavailableError)
    assert "this machine knows no host 'shard-0.invalid'" in error.message


def test_what_is_waited_for_is_logged_with_its_reason(caplog) -> None:
    address = f"127.0.0.1:{free_port()}"
    _refused(address, connect_timeout_s=3)
    assert f"still waiting for shard 0 of 1 at {address}: nothing listens on port" in caplog.text


def test_a_listener_that_never_answers_is_named_in_time(cluster) -> None:
    running = cluster(2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mute = f"127.0.0.1:{listener.getsockname()[1]}"
        watch = Stopwatch()
        error = _refused(f"{running.addresses[0]},{mute}", connect_timeout_s=0.6)
    assert 0.5 < watch.elapsed_s < PATIENCE_S
    assert isinstance(error, shardwell.ShardUnavailableError)
    assert error.shard_index == 1
    assert mute in error.message
    assert "something listens there that is no shard, or a shard whose" in error.message


def test_a_server_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = in_background(answer)
        error = _refused(f"127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=0.8)
        listener.shutdown(socket.SHUT_RDWR)
        answering.result(PATIENCE_S)
    assert isinstance(error, shardwell.ShardUnavailableError)
    assert error.shard_index == 0
    assert "that is no shard, and speaks HTTP/1" in error.message


def test_a_shard_that_does_not_answer_in_time(cluster) -> None:
    running = cluster(1, processes=True)
    assert why_absent(running.addresses[0]) == BUSY
    with stopped(running.children[0].pid):
        error = _refused(running.target, connect_timeout_s=0.6)
    assert "a shard whose process was stopped" in error.message


def test_what_listens_with_tls_is_not_looked_at() -> None:
    """A server of TLS has nothing to say to a plain look: it would seem to be no shard."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert why_absent(address, speaks_tls=True) == BUSY
        assert "no shard" in why_absent(address)


def test_a_grpc_server_of_another_service() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        error = _refused(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
    assert isinstance(error, shardwell.WrongShardError)
    assert "no Shardwell shard" in error.message


def test_a_shard_that_starts_late_is_waited_for(cluster) -> None:
    port = free_port()
    early = ShardServer(ShardConfig(shard_index=0, shard_count=2, cluster_id="late"))
    late = ShardConfig(shard_index=1, shard_count=2, cluster_id="late", listen=f"127.0.0.1:{port}")
    with early:
        target = f"{early.address},127.0.0.1:{port}"
        connecting = in_background(lambda: shardwell.connect(target, connect_timeout_s=20))
        with pytest.raises(TimeoutError):
            connecting.result(0.3)
        with ShardServer(late), connecting.result(PATIENCE_S) as client:
            model = client.parameter("model", size=10, optimizer=SGD)
            model.init(np.zeros(10, np.float32))
            np.testing.assert_array_equal(model.exchange(np.ones(10, np.float32)), -0.5)


@pytest.mark.parametrize(
    "target",
    ["", ",", "localhost", "localhost:", ":7070", "a:1,,b:2", "a:0", "a:65536", "a:x", "a:1,a:1"],
)
def test_targets_that_are_none(target) -> None:
    assert isinstance(_refused(target), shardwell.ArgumentError)


def test_no_target_at_all(monkeypatch) -> None:
    monkeypatch.delenv("SHARDWELL_SHARDS", raising=False)
    with pytest.raises(shardwell.ArgumentError, match="SHARDWELL_SHARDS"):
        shardwell.connect()


@pytest.mark.parametrize("worker_id", ["a b", "-", "x" * 129, "ä"])
def test_worker_ids_that_are_none(cluster, worker_id) -> None:
    with pytest.raises(shardwell.ArgumentError, match="worker_id"):
        shardwell.connect(cluster().target, worker_id=worker_id)


def test_connecting_to_a_port_that_something_else_has(cluster) -> None:
    taken = cluster(1).addresses[0]
    with pytest.raises(shardwell.ShardUnavailableError, match="already in use"):
        ShardServer(ShardConfig(shard_index=0, shard_count=1, listen=taken))


def test_processes_do_not_inherit_a_data_dir(tmp_path, monkeypatch) -> None:
    """A user's environment for `shardwell serve` is not a cluster's in a notebook."""
    monkeypatch.setenv("SHARDWELL_DATA_DIR", str(tmp_path / "mine"))
    with LocalCluster(2, processes=True) as running:
        shardwell.connect(running.target).close()
    assert not (tmp_path / "mine").exists()
