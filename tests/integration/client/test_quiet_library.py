"""Goal: a program that asks for no logs sees what it waits for, and nothing that it caught.

Method: small programs in processes of their own, whose standard error is read.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness import required
from harness.inside import vanish
from harness.polling import PATIENCE_S
from harness.programs.commands import Program, run_command
from harness.programs.ports import free_port
from shardwell.threads import calls
from shardwell_server import LocalCluster, ShardConfig, ShardServer

pytestmark = pytest.mark.timeout(90)

REFUSED = """
import numpy as np, shardwell
from shardwell_server import LocalCluster
with LocalCluster(2) as cluster, shardwell.connect(cluster.target, worker_id="w0") as client:
    sgd = shardwell.SGD(0.1)
    client.parameter("m", size=10, optimizer=sgd)
    for call in (
        lambda: client.parameter("m", size=11, optimizer=sgd),
        lambda: client.export_table("none", "none.parquet"),
        lambda: shardwell.join_group("g", rank=1, size=2, rendezvous=cluster.target,
                                     join_timeout_s=0.2),
    ):
        try:
            call()
        except shardwell.ShardwellError as error:
            print("caught", type(error).__name__)
"""
CONNECT = """
import sys, shardwell
try:
    shardwell.connect(sys.argv[1], worker_id="w0", connect_timeout_s=float(sys.argv[2]))
except shardwell.ShardUnavailableError:
    print("gave up")
"""

TRAIN = """
import sys, threading, numpy as np, shardwell
client = shardwell.connect(sys.argv[1], worker_id="w0", timeout_s=5.0)
nets = [client.parameter(name, size=100, optimizer=shardwell.SGD(0.1)) for name in "ab"]
def step(net):
    try:
        net.exchange(np.ones(100, np.float32))
    except shardwell.ShardUnavailableError:
        sys.stdout.write("gave up\\n")  # at once, as another thread writes, too
        sys.stdout.flush()
for net in nets:
    net.init(np.zeros(100, np.float32))
    step(net)
print("stepped", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=step, args=(net,)) for net in nets]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_errors_that_a_program_catches_are_not_printed_besides() -> None:
    with Program("-c", REFUSED) as program:
        assert program.end(60) == 0
        assert len(program.lines) == 3
        assert program.log == []


def test_a_call_that_waits_for_a_shard_logs_which(free_address: str) -> None:
    with Program("-c", CONNECT, free_address, "4") as program:
        assert program.end(60) == 0
        assert program.lines == ["gave up"]
        (line,) = program.log
        assert f"waiting for shard 0 of 1 at {free_address}" in line
        assert "4 s (connect_timeout_s)" in line


def test_training_logs_which_shard_does_not_come_back(cluster) -> None:
    """Once, however many calls wait for it."""
    running = cluster(2)
    with Program("-c", TRAIN, running.target, stdin=subprocess.PIPE) as program:
        assert program.read_line() == "stepped"
        running.servers[1].stop(0.0)
        program.process.stdin.write("go on\n")
        program.process.stdin.flush()
        assert program.end(60) == 0
        assert program.lines[1:] == ["gave up", "gave up"]
        # A machine may be so busy that to connect takes long, which is logged for each shard.
        (line,) = (line for line in program.log if "(connect_timeout_s)" not in line)
        assert f"waiting for shard 1 of 2 at {running.addresses[1]}" in line
        assert "the call gives up in " in line


@pytest.mark.parametrize(("given", "kept"), [(None, "ERROR"), ("INFO", "INFO")])
def test_grpc_says_as_much_as_it_is_asked_to(given: str | None, kept: str) -> None:
    """Of its own accord it tells of ends of connections, which a program may have asked for."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if given is not None:
        environment["GRPC_VERBOSITY"] = given
    program = "import os, shardwell; print(os.environ['GRPC_VERBOSITY'])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (f"{kept}\n", "")


def test_without_a_further_thread_a_call_waits_as_well(cluster, connect, monkeypatch) -> None:
    """It is what tells of the wait that needs one."""
    shards = connect(cluster(1), "w0")._shards

    def refuse(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    assert shards.await_shard(0, PATIENCE_S)


def test_a_call_that_takes_long_says_so_once(cluster, connect, monkeypatch, caplog) -> None:
    """A tenth of its time, and no less than some seconds: a user of slow steps sets more."""
    monkeypatch.setattr(calls, "_LONG_S_MIN", 0.2)
    net = connect(cluster(1), "w0", timeout_s=4.0).parameter(
        "net", size=10, optimizer=shardwell.SGD(0.1), worker_count=2
    )
    net.init(np.zeros(10, np.float32))
    with pytest.raises(shardwell.WorkersMissingError):
        net.exchange(np.ones(10, np.float32), timeout_s=2.0)
    (line,) = [record.getMessage() for record in caplog.records if "taken" in record.getMessage()]
    assert line.startswith("exchange of parameter 'net' has taken")
    assert "gives up after 2 s (timeout_s)" in line
    assert line.endswith("it waits for 1 more worker")


def test_a_call_that_takes_long_names_for_whom_it_waits(
    cluster, connect, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(calls, "_LONG_S_MIN", 0.2)
    target = cluster(2)
    clients = [connect(target, f"w{number}", timeout_s=4.0) for number in range(2)]
    rule = shardwell.SGD(0.1)
    tables = [
        each.table("rows", row_count=9, dim=1, optimizer=rule, worker_count=2) for each in clients
    ]
    tables[1].put_row_gradients([1], np.ones((1, 1), np.float32))
    tables[0].put_row_gradients([1], np.ones((1, 1), np.float32))
    vanish(clients[1])  # as kill -9 does
    with pytest.raises(shardwell.WorkersMissingError):
        tables[0].exchange_rows([2], np.ones((1, 1), np.float32), [2], timeout_s=3.0)
    (line,) = [each.getMessage() for each in caplog.records if "has taken" in each.getMessage()]
    assert re.search(r"waits for 'w1' \(process \d+ on '.*', not connected any more\)$", line), line


def test_who_does_not_wait_long_reads_nothing(cluster, free_address: str) -> None:
    for target, timeout_s in ((cluster(2).target, "20"), (free_address, "0.2")):
        with Program("-c", CONNECT, target, timeout_s) as program:
            assert program.end(60) == 0
            assert program.log == []


def test_commands_say_what_they_wait_for_too(free_address: str, tmp_path: Path) -> None:
    code, _, log = run_command(
        "checkpoint", "save", str(tmp_path / "c"), f"--shards={free_address}", "--timeout-s=4"
    )
    assert code == 1
    waits, gives_up = log.splitlines()
    assert f"waiting for shard 0 of 1 at {free_address}" in waits
    assert gives_up.startswith("shardwell: shard 0 of 1")


@pytest.fixture
def free_address() -> str:
    """An address where no process listens."""
    return f"127.0.0.1:{free_port()}"


def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--shard-index=0", "--shard-count=1", f"--listen={address}", "--log-level=error")
        code, output, log = run_command("serve", *flags)
        assert (code, output) == (1, "")
        (line,) = log.splitlines()
        assert f"can't listen on {address}: Address already in use" in line


@pytest.mark.parametrize("listen", ["192.0.2.1:0", "no-such-host.invalid:0"])
def test_an_address_without_a_shard_is_one_line(listen) -> None:
    code, _, log = run_command(
        "serve",
        "--shard-index=0",
        "--shard-count=1",
        f"--listen={listen}",
        "--log-level=error",
        "--insecure",
    )
    assert code == 1
    (line,) = log.splitlines()
    assert f"can't listen on {listen}" in line


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "[::1]", "[::]"])
def test_every_kind_of_address_can_be_listened_on(host) -> None:
    if host.startswith("["):
        required.ipv6()
    config = ShardConfig(shard_index=0, shard_count=1, listen=f"{host}:0", insecure=True)
    with ShardServer(config) as server:
        port = server.address.rpartition(":")[2]
        target = f"[::1]:{port}" if host.startswith("[") else f"127.0.0.1:{port}"
        with shardwell.connect(target, worker_id="w0") as client:
            assert client.shard_count == 1


@pytest.mark.parametrize("durability", ["step", "5"])
@pytest.mark.parametrize("processes", [False, True])
def test_a_cluster_without_files_promises_none(durability, processes) -> None:
    with pytest.raises(shardwell.ArgumentError, match="needs a data directory"):
        LocalCluster(1, durability=durability, processes=processes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "command", [("serve", "--shard-index=0", "--shard-count=1"), ("cluster", "--shard-count=1")]
)
@pytest.mark.parametrize("durability", ["step", "0.5"])
def test_durability_without_a_data_dir_is_refused(command, durability) -> None:
    code, output, log = run_command(*command, f"--durability={durability}", "--log-level=error")
    assert (code, output) == (2, "")
    assert f"durability '{durability}' needs a data directory" in log
    assert "--data-dir" in log
