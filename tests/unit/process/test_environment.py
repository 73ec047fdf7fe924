"""Goal: what a machine and its variables say is fit for ids and messages, whatever it is."""

from __future__ import annotations

import socket

import pytest

from shardwell.process.environment import host_id, host_name, variable
from shardwell.rpc.session import new_session, unique_worker_id
from shardwell.specs.names import check_name
from shardwell.v1 import session_pb2

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
