"""Goal: the audit log says who did what, in a line for each stream and name, and never for a chunk.

Method: a real shard with a log, and its lines.
"""

from __future__ import annotations

import json
import logging
import stat
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.certificates import authority, of_client, of_server
from harness.files import contents_of
from harness.polling import PATIENCE_S, eventually
from harness.tokens import Tokens
from shardwell_server import ShardConfig, ShardServer
from shardwell_server.access import audit
from shardwell_server.access.audit import AuditLog

SGD = shardwell.SGD(learning_rate=1.0)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.same_host
@pytest.mark.parametrize("same_host", [False, True])
def test_who_did_what(tokens, tmp_path, same_host) -> None:
    path, files = tmp_path / "audit.jsonl", authority()
    config = ShardConfig(
        shard_index=0, shard_count=1, tokens=tokens.path, audit_log=path, tls=of_server(files)
    )
    maker, reader = tokens.add("maker", "admin"), tokens.add("reader", "read")
    given: dict[str, Any] = {"tls": of_client(files), "same_host": same_host}
    with ShardServer(config) as server:
        with shardwell.connect(server.address, worker_id="w0", token_file=maker, **given) as client:
            net = client.parameter("net", size=2000, optimizer=SGD)
            net.init(np.zeros(2000, np.float32))
            for _ in range(50):
                net.exchange(np.ones(2000, np.float32))
            client.save_checkpoint(tmp_path / "saved", ["net"])
            rows = client.table("rows", row_count=9, dim=2, optimizer=SGD)
            for _ in range(50):
                rows.put_row_gradients([1, 2], np.ones((2, 2), np.float32))
            rows.evict(older_than_step=1)
        with (
            shardwell.connect(server.address, worker_id="w1", token_file=reader, **given) as other,
            pytest.raises(shardwell.AccessDeniedError),
        ):
            other.parameter("net").exchange(np.ones(2000, np.float32))
        with pytest.raises(shardwell.AuthenticationError):
            shardwell.connect(server.address, token_file=False, **given)
    lines = lines_of(path)
    events = [(line["event"], line.get("token"), line.get("name")) for line in lines]
    counts = Counter(events)
    assert counts["created", "maker", "net"] == counts["created", "maker", "rows"] == 1
    assert counts["initialized", "maker", "net"] == 1
    assert counts["evicted", "maker", "rows"] == 1
    assert counts["opened", "reader", "net"]
    assert counts["refused", "reader", "net"]
    assert counts["refused", None, None]
    (refused,) = [line for line in lines if line["event"] == "refused" and "token" not in line]
    assert "a token is needed" in refused["reason"]
    assert refused["method"] == "GetStatus"
    assert refused["certificate"]
    exchanges = [line for line in lines if line.get("method") == "Exchange"]
    assert all(line["remote"].startswith("unix:" if same_host else "ipv4:") for line in exchanges)
    assert all(line["shard_index"] == 0 and line["time"].endswith("+00:00") for line in lines)
    assert len(lines) < 40  # of more than a hundred steps
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["parameter", "table"])
def test_a_create_that_is_refused_opens_nothing(tokens, tmp_path, kind) -> None:
    """By the token's quota, or because the name has another spec."""
    path = tmp_path / "audit.jsonl"
    config = ShardConfig(shard_index=0, shard_count=1, tokens=tokens.path, audit_log=path)
    maker = tokens.add("maker", "create", quota={f"{kind}s": 1})

    def make(client: shardwell.Client, name: str, size: int = 8) -> None:
        if kind == "parameter":
            client.parameter(name, size=size, optimizer=SGD)
        else:
            client.table(name, row_count=size, dim=2, optimizer=SGD)

    with (
        ShardServer(config) as server,
        shardwell.connect(server.address, worker_id="w0", token_file=maker) as client,
    ):
        make(client, "one")
        with pytest.raises(shardwell.LimitError):
            make(client, "two")
        with pytest.raises(shardwell.SpecMismatchError):
            make(client, "one", 9)
    told = [(line["event"], line.get("name"), line.get("right")) for line in lines_of(path)]
    assert [each for each in told if each[1] == "two"] == [("refused", "two", "create")]
    assert ("created", "one", None) in told
    assert told.count(("opened", "one", "create")) == 1
    (refused,) = [line for line in lines_of(path) if line["event"] == "refused"]
    assert refused["kind"] == kind
    assert f"{kind}s=1" in refused["reason"]


def test_refused_deletes_and_groups_have_their_names(tokens, tmp_path) -> None:
    """Each name a line, as far as they are not too many."""
    path = tmp_path / "audit.jsonl"
    config = ShardConfig(shard_index=0, shard_count=1, tokens=tokens.path, audit_log=path)
    maker, other = tokens.add("maker", "create"), tokens.add("other", "create:other-")
    names = ["one", "two", "three"]
    with ShardServer(config) as server:
        with shardwell.connect(server.address, worker_id="w0", token_file=maker) as client:
            for name in names:
                client.parameter(name, size=8, optimizer=SGD)
        with shardwell.connect(server.address, worker_id="w1", token_file=other) as client:
            for name in [*names, "missing"]:
                with pytest.raises(shardwell.AccessDeniedError):
                    client.delete(name)
        with pytest.raises(shardwell.AccessDeniedError):
            shardwell.join_group(
                "ring", rank=0, size=2, rendezvous=server.address, token_file=other
            )
    refused = [line for line in lines_of(path) if line["event"] == "refused"]
    assert all(line["token"] == "other" and "repeated" not in line for line in refused)
    told = [(line["method"], line["name"]) for line in refused]
    deletes = {name for method, name in told if method == "Delete"}
    assert deletes == {*names, "missing"}
    groups = {(line["name"], line["right"]) for line in refused if line["kind"] == "group"}
    assert groups == {("ring", "contribute")}


def test_restoring_is_audited(tokens, tmp_path) -> None:
    path = tmp_path / "audit.jsonl"
    with (
        ShardServer(ShardConfig(shard_index=0, shard_count=1)) as server,
        shardwell.connect(server.address, worker_id="w0") as client,
    ):
        net = client.parameter("net", size=20, optimizer=SGD)
        net.init(np.zeros(20, np.float32))
        net.exchange(np.ones(20, np.float32))
        rows = client.table("rows", row_count=9, dim=2, optimizer=SGD)
        rows.put_row_gradients([1], np.ones((1, 2), np.float32))
        client.save_checkpoint(tmp_path / "saved")
    config = ShardConfig(shard_index=0, shard_count=1, tokens=tokens.path, audit_log=path)
    with ShardServer(config) as server:
        low = tokens.add("worker", "contribute", "create:other")
        with (
            shardwell.connect(server.address, worker_id="w1", token_file=low) as client,
            pytest.raises(shardwell.AccessDeniedError, match="not create or restore it"),
        ):
            client.restore_checkpoint(tmp_path / "saved")
        file = tokens.add("maker", "create")
        with shardwell.connect(server.address, worker_id="w0", token_file=file) as client:
            client.restore_checkpoint(tmp_path / "saved")
            assert (client.parameter("net").get_weights() == -1).all()
    events = {(line["event"], line.get("name")) for line in lines_of(path)}
    assert {("restored", "net"), ("restored", "rows")} <= events


def test_it_is_rotated(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES_MAX", 1000)
    monkeypatch.setattr(audit, "FILE_COUNT_MAX", 2)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, shard_index=3)
    for number in range(100):
        log.note("created", number=number, empty="", nothing=None, long="x" * 10_000)
    log.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "audit.jsonl",
        "audit.jsonl.1",
        "audit.jsonl.2",
    ]
    for each in tmp_path.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    (*_, last) = lines_of(path)
    assert last["number"] == 99
    assert last["shard_index"] == 3
    assert len(last["long"]) == 400
    assert not {"empty", "nothing"} & last.keys()
    AuditLog(path).close()  # goes on
    assert lines_of(path)[-1]["number"] == 99


@pytest.mark.parametrize("name", ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.8"])
def test_a_file_that_is_no_audit_log_stays(tmp_path, name) -> None:
    theirs = tmp_path / name
    theirs.write_text("mine\n")
    theirs.chmod(0o644)
    config = ShardConfig(shard_index=0, shard_count=1, audit_log=tmp_path / "audit.jsonl")
    with pytest.raises(shardwell.ArgumentError, match=rf"{theirs} exists, and .*move it away"):
        ShardServer(config)
    assert contents_of(tmp_path) == {"": None, name: b"mine\n"}
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o644


def test_a_first_line_that_was_cut_off_is_a_log(tmp_path) -> None:
    path = tmp_path / "audit.jsonl"
    for begun in (b"", b'{"ti', b'{"time": "2026-'):
        path.write_bytes(begun)
        AuditLog(path).close()
        assert path.read_bytes() == begun


def test_a_file_that_comes_meanwhile_is_not_rotated_away(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES_MAX", 1000)
    monkeypatch.setattr(audit, "FILE_COUNT_MAX", 1)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    (tmp_path / "audit.jsonl.1").write_text("mine")
    with caplog.at_level(logging.ERROR, logger="shardwell_server"):
        for number in range(100):
            log.note("created", number=number, long="x" * 100)
        log.close()
    assert (tmp_path / "audit.jsonl.1").read_text() == "mine"
    assert [line["number"] for line in lines_of(path)] == [*range(100)]
    assert caplog.text.count("the audit log is not rotated") == 1


def test_lines_that_come_faster_than_they_are_written(tmp_path, monkeypatch) -> None:
    """No call waits for them; the next one says how many are left out."""
    monkeypatch.setattr(audit, "_WAITING_COUNT_MAX", 3)
    path, disk = tmp_path / "audit.jsonl", threading.Event()
    emit = audit._PrivateFile.emit

    def emit_slowly(self: Any, record: logging.LogRecord) -> None:
        assert disk.wait(PATIENCE_S)
        emit(self, record)

    monkeypatch.setattr(audit._PrivateFile, "emit", emit_slowly)
    log = AuditLog(path)
    for number in range(5000):
        log.note("created", number=number)
    disk.set()
    eventually("they are written", log._lines.empty)
    log.note("last")
    log.close()
    lines = lines_of(path)
    left_out = sum(line.get("left_out", 0) for line in lines)
    assert lines[-1]["event"] == "last"
    assert left_out > 1000
    assert len(lines) + left_out == 5001


def test_a_log_that_can_not_be_written(tmp_path) -> None:
    config = ShardConfig(shard_index=0, shard_count=1, audit_log=tmp_path / "no" / "such")
    with pytest.raises(shardwell.ArgumentError, match=r"the audit log .* can't be written"):
        ShardServer(config)


def test_what_is_alike_is_one_line(tmp_path, monkeypatch) -> None:
    """A flood of strangers leaves room for what else happens, and is counted."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for port in range(500):
        log.note("refused", remote=f"ipv4:10.0.0.1:{port}", method="GetStatus", reason="no token")
        log.note("opened", token="w", name="net", right="read", method="GetWeights")
    log.note("refused", remote="ipv4:10.0.0.2:1", method="GetStatus", reason="no token")
    log.note("opened", token="w", name="other", right="read", method="GetWeights")
    monkeypatch.setattr(audit, "_FOLD_S", 0.0)
    log.note("opened", token="w", name="net", right="read", method="GetWeights")
    log.close()
    events = [(line["event"], line.get("name"), line.get("repeated")) for line in lines_of(path)]
    assert events == [
        ("refused", None, None),
        ("opened", "net", None),
        ("refused", None, None),
        ("opened", "other", None),
        ("opened", "net", 499),
        ("refused", None, 499),
    ]


def test_any_number_of_kinds(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "_KIND_COUNT_MAX", 3)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for number in range(50):
        for _ in range(2):
            log.note("opened", token="w", name=f"n{number}")
    log.close()
    lines = lines_of(path)
    assert len(lines) == 100
    assert sum(line.get("repeated", 0) for line in lines) == 50
    assert len(log._seen) <= 4


def test_no_token_fills_it_with_names(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "_NAME_COUNT_MAX", 5)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for number in range(1000):
        log.note("refused", token="w", remote="unix:", method="GetStatus", name=f"n{number}")
    log.note("refused", token="other", remote="unix:", method="GetStatus", name="n0")
    log.close()
    lines = lines_of(path)
    assert [line["name"] for line in lines if line["token"] == "w"][:5] == [
        f"n{n}" for n in range(5)
    ]
    assert len(lines) == 5 + 1 + 1 + 1
    assert sum(line.get("repeated", 0) for line in lines) == 1000 - 6
