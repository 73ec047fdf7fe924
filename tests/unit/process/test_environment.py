"""Goal: what a machine and its variables say is fit for ids and messages, whatever it is."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shardwell.process import environment
from shardwell.process.environment import (
    KNOWN_VARIABLES,
    host_id,
    host_name,
    misspelt_variables,
    variable,
)
from shardwell.rpc.session import new_session, unique_worker_id
from shardwell.specs.names import check_name
from shardwell.v1 import session_pb2
from shardwell_server.cli import commands

ROOT = Path(__file__).parents[3]
HOSTS = {
    "gpu-7.example": "gpu-7.example",
    "h\u00f6st": "h-st",
    "(none)": "none",
    "my host": "my-host",
    "_gpu-7": "gpu-7",
    "-dash": "dash",
    "a;b": "a-b",
    "": "localhost",
    "\udcf6\udcff": "host",  # bytes that are no UTF-8
    "\u4e3b\u673a": "host",
    "x" * 64: "x" * 64,
}


@pytest.mark.parametrize("host", HOSTS)
def test_the_name_of_any_machine(host, monkeypatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert host_id() == HOSTS[host]
    assert check_name("worker_id", unique_worker_id()).startswith(f"{HOSTS[host]}-")
    assert session_pb2.AttendRequest(host=new_session().host).host == host_name() != ""


@pytest.mark.parametrize("value", ["w0", "w0\r", " w0 ", "w0\n", "\tw0\r\n"])
def test_variables_have_no_blanks_around_them(value, monkeypatch) -> None:
    monkeypatch.setenv("SHARDWELL_WORKER_ID", value)
    assert variable("SHARDWELL_WORKER_ID") == "w0"
    monkeypatch.delenv("SHARDWELL_WORKER_ID")
    assert variable("SHARDWELL_WORKER_ID") == ""


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHARDWELL_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SHARDWELL_SHARD", "SHARDWELL_SHARDS"),
        ("SHARDWELL_SHRADS", "SHARDWELL_SHARDS"),
        ("SHARDWELL_WORKERID", "SHARDWELL_WORKER_ID"),
        ("SHARDWELL_TOKEN", "SHARDWELL_TOKENS"),
        ("SHARDWELL_TLS_CERTIFICATE", "SHARDWELL_TLS_CERT"),
        ("SHARDWELL_DATADIR", "SHARDWELL_DATA_DIR"),
        ("SHARDWELL_STREAMS_COUNT_MAX", "SHARDWELL_STREAM_COUNT_MAX"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_nearest(
    name, meant, no_variables, monkeypatch, caplog
) -> None:
    monkeypatch.setenv(name, "x")
    said = f"nothing reads ${name}; did you mean ${meant}?"
    assert misspelt_variables() == [said]
    environment.warn_of_misspelt_variables.cache_clear()
    for _ in range(2):
        environment.warn_of_misspelt_variables()
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize(
    "name",
    [
        *(f"SHARDWELL_{each}" for each in sorted(KNOWN_VARIABLES)),
        "SHARDWELL_SERVICE_HOST",  # Kubernetes sets these for services
        "SHARDWELL_SERVICE_PORT_GRPC",
        "SHARDWELL_PORT_7070_TCP_ADDR",
        "SHARDWELL_SHARD_0_PORT",
        "SHARDWELL_TEST_SEED",
        "SHARDWELL_SOAK_MINUTES",
        "SHARDWELL_EXPERIMENT_NAME",  # a user's own
        "MY_SHARDWELL_SHARD",
    ],
)
def test_a_variable_that_something_reads_is_not_misspelt(name, no_variables, monkeypatch) -> None:
    monkeypatch.setenv(name, "x")
    assert misspelt_variables() == []


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.params:
        names = parameter.envvar or []
        yield from [names] if isinstance(names, str) else names
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _options(found, context)


def test_all_variables_are_known(monkeypatch) -> None:
    """Those of the commands' options, and those that code, deployments and examples name."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", os.environ.get("OPENBLAS_NUM_THREADS", "1"))
    found = set(_options(commands, click.Context(commands)))
    for place in ("client", "server", "deploy", "examples", "docker-compose.yml"):
        files = (ROOT / place).rglob("*") if (ROOT / place).is_dir() else [ROOT / place]
        for file in files:
            if file.suffix in (".py", ".yml", ".yaml", ".sbatch", ".example", ".service", ".sh"):
                text = file.read_text(encoding="utf-8")
                found |= set(
                    re.findall(r"[\"'$ {]SHARDWELL_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_{*])", text)
                )
    names = {name.lstrip("\"'$ {").removeprefix("SHARDWELL_") for name in found}
    assert len(names) > 60
    assert names - set(KNOWN_VARIABLES) <= {"RUN"}  # a launcher's name
