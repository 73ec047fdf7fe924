"""Goal: what is in a worker's environment besides Shardwell's own changes nothing.

Method: real clusters and commands; proxy variables that lead to nothing, values with line ends of
Windows.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.certificates import authority, of_client, of_server
from harness.programs.commands import Program, run_command

SGD = shardwell.SGD(learning_rate=1.0)
NAMES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
NOWHERE = dict.fromkeys(NAMES, "http://127.0.0.1:9")


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(name.upper(), value)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("has_tls", [False, True])
def test_proxies_are_for_others(cluster, connect, proxies, has_tls) -> None:
    files = authority() if has_tls else None
    server, client = (None, False) if files is None else (of_server(files), of_client(files))
    running = cluster(2, tls=server)
    worker = connect(running, "w0", tls=client, same_host=False)
    net = worker.parameter("net", size=40, optimizer=SGD)
    net.init(np.zeros(40, np.float32))
    assert (net.exchange(np.ones(40, np.float32)) == -1).all()
    with shardwell.join_group(
        "g", rank=0, size=1, rendezvous=running.target.split(",")[0], tls=client
    ) as group:
        group.barrier()


@pytest.mark.parametrize("has_tls", [False, True])
def test_commands_do_not_go_through_them(cluster, has_tls) -> None:
    files = authority() if has_tls else None
    running = cluster(1, tls=None if files is None else of_server(files), tokens=None)
    environment = {**NOWHERE, "no_proxy": "", "SHARDWELL_SHARDS": running.target}
    if files is not None:
        environment |= {
            "SHARDWELL_TLS_CA": str(files.ca),
            "SHARDWELL_TLS_CERT": str(files.client),
            "SHARDWELL_TLS_KEY": str(files.client_key),
        }
    for command in (("status",), ("top", "--once"), ("health", running.target)):
        code, output, log = run_command(*command, environment=environment)
        assert code == 0, (command, output, log)


def test_a_proxy_that_is_wanted_is_used(cluster, proxies, monkeypatch) -> None:
    files = authority()
    running = cluster(1, tls=of_server(files))
    monkeypatch.setenv("SHARDWELL_USE_PROXY", "1")
    with pytest.raises(shardwell.ShardUnavailableError):
        shardwell.connect(running.target, tls=of_client(files), connect_timeout_s=0.5)


def test_line_ends_of_windows(cluster, monkeypatch) -> None:
    running = cluster(1, tokens=None)
    monkeypatch.setenv("SHARDWELL_SHARDS", f"{running.target}\r")
    monkeypatch.setenv("SHARDWELL_WORKER_ID", "w7 \r\n")
    with shardwell.connect(token_file=False) as client:
        assert client.worker_id == "w7"
    environment = {"SHARDWELL_SHARDS": f" {running.target}\r", "SHARDWELL_LOG_LEVEL": "error\r"}
    code, _, log = run_command("status", environment=environment)
    assert code == 0, log
    address = f"{running.target}\r"
    assert run_command("health", environment={"SHARDWELL_LISTEN": address})[0] == 0


def test_a_misspelt_variable_is_named_once_by_commands_and_at_connect(cluster) -> None:
    running = cluster(1, tokens=None)
    said = "nothing reads $SHARDWELL_SHARD; did you mean $SHARDWELL_SHARDS?"
    misspelt = {"SHARDWELL_SHARD": running.target}
    code, _, log = run_command("status", f"--shards={running.target}", environment=misspelt)
    assert (code, log) == (0, said)
    program = (
        "import shardwell\n"
        "for _ in range(2):\n"
        "    try: shardwell.connect()\n"
        "    except shardwell.ArgumentError as error: print(error.message)\n"
    )
    with Program("-c", program, environment=misspelt) as worker:
        assert worker.end() == 0
        assert [line[:19] for line in worker.lines] == ["no target was given"] * 2
        assert worker.log == [said]
