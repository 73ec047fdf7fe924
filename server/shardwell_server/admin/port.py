"""The admin port: what it answers, and to whom.

    /live         200 as long as the shard's loop turns, whatever it waits for
    /startup      200 once it has read its files and serves
    /ready        200 while it takes calls, and whether files are damaged; 503, and why, before,
                  while it stops, and without files
    /metrics      for Prometheus
    /status.json  the state of the whole cluster
    /history.json the last hour of the shard; with ?kind=KIND&name=NAME, of one name
    /details.json tensors, settings and last steps of ?kind=KIND&name=NAME
    /             a page that shows all that, with its style, its programs and its icon
    /runbook.md   the runbook, to whose sections the page leads

Probes need no token: they say nothing that a connection to the shard would not. The rest needs one
where the shard's calls do, and tells only of names that it may read. States: starting (probes are
answered, as files are still read), serving, stopping.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from shardwell.connection.credentials import Credentials, is_loopback
from shardwell.connection.tls import TlsFiles
from shardwell.errors import ArgumentError, AuthenticationError, ShardwellError
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.names import check_name
from shardwell.threads.asking import ask_all
from shardwell_server.access.access import Access
from shardwell_server.admin.history import History, Key
from shardwell_server.admin.http import HttpServer, Response
from shardwell_server.admin.metrics import CONTENT_TYPE, exposition
from shardwell_server.admin.view import details, own_status, view
from shardwell_server.admin.vitals import Vitals
from shardwell_server.config import ShardConfig
from shardwell_server.operations.cluster_status import Answer, ask

_PAGE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/runbook.md": ("runbook.md", "text/plain; charset=utf-8"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
    "/uplot.css": ("uplot/uPlot.min.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uplot/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
}
_ANSWER_S = 1.0
_KEPT_S = 0.5
"""For so long all readers see one state: shards are asked twice a second at the most."""
_STARTING = "starting: files are being read"


class AdminPort:
    """Listens from its construction on, or raises an error; `attach` gives it a shard."""

    def __init__(self, config: ShardConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._vitals: Vitals | None = None
        self._history: History | None = None
        self._access: Access | None = None
        self._is_alive: Callable[[], bool] = lambda: True
        self._not_ready = _STARTING
        self._has_served = False
        self._channels: list[ShardChannel] = []
        """To all shards, in order; empty: this shard is the only one."""
        self._answers: tuple[float, list[Answer]] = (-_KEPT_S, [])
        self._address = ""
        tls = None if config.tls is None else TlsFiles(config.tls)
        self._http = HttpServer(config.admin_listen, self.respond, tls, _hosts_of(config))
        self.url = f"{'http' if tls is None else 'https'}://{self._http.address}/"

    def attach(
        self, vitals: Vitals, access: Access, address: str, is_alive: Callable[[], bool]
    ) -> None:
        """Shows a shard from now on; `is_alive`, of its loop, may block for some seconds."""
        self._access, self._is_alive, self._address = access, is_alive, address
        self.know_cluster(self._config.cluster)
        self._history = History(vitals)
        self._history.start()
        self._vitals = vitals

    def know_cluster(self, addresses: Sequence[str]) -> None:
        """Shows all shards from now on, whose addresses are in order."""
        if len(addresses) > 1 and not self._channels:
            credentials = Credentials.of()
            self._channels = [
                ShardChannel(index, address, credentials=credentials, same_host=False)
                for index, address in enumerate(addresses)
            ]

    def serves(self) -> None:
        """Notes that the shard takes calls from now on."""
        self._not_ready, self._has_served = "", True

    def stops(self, reason: str) -> None:
        """Notes that the shard takes no more calls."""
        self._not_ready = reason

    def close(self) -> None:
        """Ends it. Safe to repeat."""
        self._http.close()
        if self._history is not None:
            self._history.close()
        for channel in self._channels:
            with contextlib.suppress(ShardwellError):
                channel.close()

    def respond(self, path: str, query: str, authorization: str | None) -> Response:
        """Returns the answer for a path and its query."""
        match path:
            case "/live" if self._is_alive():
                return _text(HTTPStatus.OK, "alive")
            case "/live":
                return _unavailable("the shard's loop does not answer")
            case "/startup":
                if self._has_served:
                    return _text(HTTPStatus.OK, "started")
                return _unavailable(self._not_ready)
            case "/ready":
                why = self._why_not_ready()
                return _unavailable(why) if why else _text(HTTPStatus.OK, self._serving())
            case "/metrics" | "/status.json" | "/history.json" | "/details.json":
                return self._guarded(path, query, authorization)
        if path in _PAGE_FILES:
            return self._guarded(path, query, authorization)
        return _text(
            HTTPStatus.NOT_FOUND,
            "there are /, /status.json, /history.json, /details.json, /metrics, /live, /ready and "
            "/startup",
        )

    def _why_not_ready(self) -> str:
        gone = None if self._vitals is None else self._vitals.files_fault()
        return self._not_ready or gone or ""

    def _serving(self) -> str:
        """Probes need no token: their answers have no path or name."""
        if self._vitals is None or not self._vitals.damages():
            return "serving"
        return (
            "serving what is whole: a stored file is damaged; `shardwell status` and the shard's "
            "log name it"
        )

    def _guarded(self, path: str, query: str, authorization: str | None) -> Response:
        vitals, access, history = self._vitals, self._access, self._history
        if vitals is None or access is None or history is None:
            return _unavailable(self._not_ready)
        try:
            principal = access.principal(authorization)
        except AuthenticationError as error:
            return _text(HTTPStatus.UNAUTHORIZED, error.message)
        if path in _PAGE_FILES:
            name, content_type = _PAGE_FILES[path]
            return Response(HTTPStatus.OK, _contents(name), content_type)

        def is_shown(shown: str) -> bool:
            return principal.best(shown) is not None

        if path == "/metrics":
            return Response(HTTPStatus.OK, exposition(vitals, is_shown), CONTENT_TYPE)
        if path == "/status.json":
            return _json(view(self._ask_all(vitals), vitals, is_shown))
        try:
            only = _named(query, is_optional=path == "/history.json")
        except ArgumentError as error:
            return _text(HTTPStatus.BAD_REQUEST, error.message)
        if only is None or path == "/history.json":
            return _json(history.view(is_shown, only))
        found = details(vitals, is_shown, only)
        if found is None:
            words = f"this shard has no {only[0]} {only[1]!r}, or the token may not read it"
            return _text(HTTPStatus.NOT_FOUND, words)
        return _json(found)

    def _ask_all(self, vitals: Vitals) -> list[Answer]:
        with self._lock:  # requests that come meanwhile get the same answers
            asked_s, answers = self._answers
            if time.monotonic() - asked_s >= _KEPT_S:
                own: Answer = (self._address, own_status(vitals, self._address))

                def answer(channel: ShardChannel) -> Answer:
                    is_own = channel.shard_index == self._config.shard_index
                    return (channel.address, own[1]) if is_own else ask(channel, _ANSWER_S)

                answers = ask_all(self._channels, answer) or [own]
                self._answers = (time.monotonic(), answers)
            return answers


def _hosts_of(config: ShardConfig) -> set[str] | None:
    """Answers this machine's hosts alone where nothing else keeps others out; None: all."""
    if config.asks_for_tokens or not is_loopback(config.admin_listen):
        return None
    listened_on = config.admin_listen.rpartition(":")[0].lower()
    return {"127.0.0.1", "[::1]", "localhost", listened_on}


@functools.cache
def _contents(name: str) -> bytes:
    path = Path(__file__).parent / name
    if name == "runbook.md" and not path.exists():  # a checkout has it among the docs
        path = Path(__file__).parents[3] / "docs" / name
    return path.read_bytes()


def _named(query: str, *, is_optional: bool) -> Key | None:
    """Returns the kind and name of a query; None: all. ArgumentError: neither."""
    if is_optional and not query:
        return None
    try:
        given = parse_qs(query, keep_blank_values=True, max_num_fields=2)
        (kind,), (name,) = given["kind"], given["name"]
    except (KeyError, ValueError):
        raise ArgumentError(f"the query must be kind=KIND&name=NAME; got {query!r:.200}") from None
    if kind not in ("parameter", "table"):
        raise ArgumentError(f"kind must be parameter or table; got {kind!r:.80}")
    return kind, check_name("name", name)


def _json(found: dict[str, Any]) -> Response:
    return Response(HTTPStatus.OK, json.dumps(found).encode(), "application/json")


def _unavailable(words: str) -> Response:
    return _text(HTTPStatus.SERVICE_UNAVAILABLE, words)


def _text(status: HTTPStatus, words: str) -> Response:
    return Response(status, f"{words}\n".encode())
