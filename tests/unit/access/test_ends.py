"""Goal: each certificate and token is in the log with 30, 7 and 1 days left, and when it has ended.

Method: files of tokens and certificates, and a clock that is passed in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.certificates import authority, of_server, write_pair
from shardwell.connection.tls import Tls, TlsFiles
from shardwell_server.access import ends
from shardwell_server.access.access import Access
from shardwell_server.access.ends import DAY_S, Ends, first_end

ENDS_S = 1_893_456_000.0  # 2030-01-01


@pytest.fixture
def access(tmp_path: Path) -> Access:
    tokens: list[dict[str, Any]] = [
        {"name": "trainer", "sha256": ["0" * 64, "1" * 64], "rights": ["read"]},
        {"name": "forever", "sha256": ["2" * 64], "rights": ["read"]},
    ]
    tokens[0]["expires"] = "2030-01-01T00:00:00Z"
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": tokens}))
    return Access(tokens=tmp_path / "tokens.json")


def test_a_line_at_each_stage(access: Access, caplog, monkeypatch) -> None:
    monkeypatch.setattr(ends, "_LOOK_INTERVAL_S", 0.0)
    now_s = [ENDS_S - 40 * DAY_S]
    watched = Ends(None, access, list, lambda: now_s[0])
    told = []
    for days in (40.0, 31, 30, 29.9, 8, 6.9, 6.5, 1.5, 0.9, 0.5, -0.1, -2):
        now_s[0] = ENDS_S - days * DAY_S
        caplog.clear()
        for _ in range(3):
            watched.warn()
        told += [(days, each.levelname) for each in caplog.records]
    assert told == [(30, "WARNING"), (6.9, "WARNING"), (0.9, "WARNING"), (-0.1, "ERROR")]
    assert "token trainer has ended, at 2030-01-01T00:00:00Z; shardwell token renew" in (
        watched.soon()[0].words(now_s[0])
    )


def test_a_shard_that_starts_late_tells_once(access: Access, caplog, monkeypatch) -> None:
    monkeypatch.setattr(ends, "_LOOK_INTERVAL_S", 0.0)
    watched = Ends(
        None, access, lambda: [("w0", ENDS_S + DAY_S, 30 * DAY_S)], lambda: ENDS_S - 3600
    )
    for _ in range(2):
        watched.warn()
    assert [each.message.split(" ends")[0] for each in caplog.records] == [
        "token trainer",
        "certificate of worker w0",
    ]


def test_files_of_certificates(access: Access, tmp_path: Path) -> None:
    """The first end of a file counts; a file that was replaced has another."""
    ours, theirs = authority(), authority("theirs")
    cert, key = tmp_path / "its.pem", tmp_path / "its.key"
    write_pair("P-256", cert, key, ours, days=200)
    both = tmp_path / "both.pem"
    both.write_bytes(ours.ca.read_bytes() + theirs.ca.read_bytes())
    files = TlsFiles(Tls(ca=both, cert=cert, key=key))
    (ends_s, lead_s) = first_end(cert.read_bytes()) or (0.0, 0.0)
    assert lead_s == 30 * DAY_S
    watched = Ends(files, Access(), list, lambda: ends_s - 5 * DAY_S)
    found = {each.kind: each for each in watched.all()}
    assert found["certificate"].name == str(cert)
    assert found["authority"].ends_s == min(
        (first_end(each.ca.read_bytes()) or (0.0,))[0] for each in (ours, theirs)
    )
    words = [each.words(watched.now_s()) for each in watched.soon() if each.kind == "certificate"]
    assert len(words) == 1
    assert " ends in 5.0 days, at 20" in words[0]
    write_pair("P-256", cert, key, ours, days=400)
    files.contents()
    assert not [each for each in watched.soon() if each.kind == "certificate"]


def test_one_of_a_day_is_no_trouble_before_the_last_third_of_its_life(tmp_path: Path) -> None:
    cert, key = tmp_path / "its.pem", tmp_path / "its.key"
    ours = authority()
    write_pair("P-256", cert, key, ours, days=1)
    found = first_end(cert.read_bytes())
    assert found is not None
    ends_s, lead_s = found
    assert 0 < lead_s < DAY_S
    now_s = [ends_s - lead_s - 1]
    watched = Ends(TlsFiles(Tls(cert=cert, key=key)), Access(), list, lambda: now_s[0])
    assert watched.soon() == []
    now_s[0] += 2
    assert [each.kind for each in watched.soon()] == ["certificate"]


def test_what_has_no_end(tmp_path: Path) -> None:
    assert Ends(TlsFiles(of_server(authority())), Access(), list).soon() == []
    assert Ends(None, Access(), list).all() == []
    assert first_end(b"no certificate") is None
