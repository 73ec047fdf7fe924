"""Goal: a known vulnerability is never taken for a service that is not reached.

Method: pip-audit as it is, and a service on this machine that answers as OSV does, or stops to.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.extras

ROOT = Path(__file__).parents[3]
FINDING = {"vulns": [{"id": "GHSA-0000-0000-0000", "summary": "of a test", "affected": []}]}
CANARY = "jinja2"
Answer = Callable[[str], dict[str, Any] | int]
"""From a package's name to what is known of it, or to an HTTP status."""


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    pytest.importorskip("pip_audit")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(ROOT / "tools")
    import audit

    monkeypatch.setattr(audit, "SERVICES", ("osv",))
    return audit


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], list[str]]]:
    """Starts a service; returns the packages for which it was asked."""
    servers = []

    def start(answer: Answer) -> list[str]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked.append(json.loads(body)["package"]["name"])
                answered = answer(asked[-1])
                self.send_response(answered if isinstance(answered, int) else 200)
                self.end_headers()
                self.wfile.write(
                    b"" if isinstance(answered, int) else json.dumps(answered).encode()
                )

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        monkeypatch.setenv("PIP_AUDIT_OSV_URL", f"http://127.0.0.1:{server.server_port}/v1/query")
        return asked

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def knows(*names: str) -> Answer:
    return lambda name: FINDING if name in names else {}


def test_nothing_known_of_any_package(audit, serve, capsys) -> None:
    asked = serve(knows(CANARY))
    assert audit.main() == 0
    locked = [pin.name for lock in (audit.DEMO_LOCK, audit.BUILD_LOCK)
              for pin in audit.read(ROOT / lock)]  # fmt: skip
    assert asked == [CANARY, *locked]
    assert f"no vulnerability in {len(locked)} locked packages" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["click", "scikit-learn", "hatchling"])
def test_a_finding_fails(audit, serve, capsys, name) -> None:
    serve(knows(CANARY, name))
    assert audit.main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{name} " in line
    assert "GHSA-0000-0000-0000" in line


def test_a_finding_before_the_service_is_gone_fails(audit, serve, capsys) -> None:
    serve(lambda name: 503 if name == "click" else knows(CANARY, "cffi")(name))
    assert audit.main() == 1
    assert "broke off" in capsys.readouterr().out


def test_findings_of_one_lock_are_printed_when_the_next_breaks_off(audit, serve, capsys) -> None:
    serve(lambda name: 503 if name == "hatchling" else knows(CANARY, "cffi")(name))
    assert audit.main() == 1
    output = capsys.readouterr().out
    assert "GHSA-0000-0000-0000" in output
    assert "broke off" in output


@pytest.mark.parametrize("answer", [knows(), lambda _: 403, lambda _: 503])
def test_a_service_that_knows_nothing_is_not_believed(audit, serve, capsys, answer) -> None:
    asked = serve(answer)
    assert audit.main() == 0
    assert asked == [CANARY]
    assert "could not look" in capsys.readouterr().out


def test_a_service_that_is_not_there(audit, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PIP_AUDIT_OSV_URL", "http://127.0.0.1:1/v1/query")
    assert audit.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "could not look" in line


def test_a_service_that_keeps_silent_is_left(audit, serve, monkeypatch, capsys) -> None:
    monkeypatch.setattr(audit, "CANARY_TIMEOUT_S", 1)
    is_over = threading.Event()

    def answer(_: str) -> int:
        is_over.wait(60)
        return 503

    serve(answer)
    assert audit.main() == 0
    is_over.set()
    assert "could not look" in capsys.readouterr().out


def test_a_failure_of_pip_audit_itself_fails(audit, monkeypatch, capsys) -> None:
    monkeypatch.setattr(audit, "SERVICES", ("no such service",))
    assert audit.main() == 1
    assert "broke off" in capsys.readouterr().out
