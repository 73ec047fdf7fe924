"""A small HTTP server on threads of its own: few connections, short requests, bounded waits.

It answers people, probes and Prometheus, a few times a second. So it is the standard library's,
with what that lacks for a port that strangers may reach: an end to connections that say nothing,
and to their number.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple

from typing_extensions import override

from shardwell.connection.tls import Contents, TlsFiles
from shardwell.errors import ShardUnavailableError

_LOG = logging.getLogger("shardwell_server")
_CONNECTION_COUNT_MAX = 32
_SILENCE_S = 10.0
_LOOK_S = 0.1
"""The pause between two looks for the end: for so long a shard that stops waits for it."""
_PORT = re.compile(r":[0-9]*\Z")
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""A browser loads for the page only what this port answers, and no code in the markup."""
_REALM = 'Basic realm="shardwell: any name, and a token as the password"'


class Response(NamedTuple):
    """An answer to a request."""

    status: HTTPStatus
    contents: bytes
    content_type: str = "text/plain; charset=utf-8"


Respond = Callable[[str, str, "str | None"], Response]
"""Answers a path, its query, and `Authorization`; None: it is absent."""


class HttpServer(ThreadingMixIn, TCPServer):
    """Listens until it is closed; ShardUnavailableError: the address can't be listened on.

    `respond` makes answers on several threads at once. `hosts` are the names in `Host` that are
    answered, in lower case; None: all. A page of another site makes its own name lead here (DNS
    rebinding), and then reads what a browser gets.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128  # a probe that finds it full is late by a second or more

    def __init__(
        self,
        listen: str,
        respond: Respond,
        tls: TlsFiles | None,
        hosts: Collection[str] | None = None,
    ) -> None:
        self.respond = respond
        self._hosts = hosts
        self._tls = tls
        self._context: tuple[Contents, ssl.SSLContext] | None = None
        self._lock = threading.Lock()
        self._open: dict[Any, socket.socket] = {}
        """Connections as they came, and as they are spoken over; the earliest first."""
        host, _, port = listen.rpartition(":")
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host.strip("[]"), int(port)), _Handler)
        except OSError as error:
            raise ShardUnavailableError(
                f"can't listen on {listen} for administration: {error.strerror}; give a free port, "
                "or 0 for any, and an address of this machine"
            ) from None
        self.address = f"{host}:{self.server_address[1]}"
        self._thread = threading.Thread(
            target=lambda: self.serve_forever(_LOOK_S), name="shardwell-admin", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it; answers under way go on. Safe to repeat."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = request
            surplus = len(self._open) - _CONNECTION_COUNT_MAX
            oldest = self._open.pop(next(iter(self._open))) if surplus > 0 else None
        if oldest is not None:  # so that those who say nothing keep no probe out
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        try:
            super().process_request(request, client_address)
        except (RuntimeError, MemoryError):  # no thread
            self._forget(request)
            self.shutdown_request(request)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def refusal(self, given: Sequence[str]) -> Response | None:
        """Returns a refusal of a request for another host; probes may leave `Host` out."""
        if self._hosts is None:
            return None
        for each in given:
            if _PORT.sub("", each.strip().lower()) not in self._hosts:
                words = (
                    f"this port answers to {', '.join(sorted(self._hosts))}, and the request is "
                    f"for {each[:200]!r}; use one of these, or listen with tokens\n"
                )
                return Response(HTTPStatus.MISDIRECTED_REQUEST, words.encode())
        return None

    def _forget(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)

    @override
    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_SILENCE_S)
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        with self._secure(self._tls).wrap_socket(
            request, server_side=True, do_handshake_on_connect=False
        ) as secured:
            with self._lock:
                if request in self._open:  # it has not given way
                    self._open[request] = secured
            secured.do_handshake()
            super().finish_request(secured, client_address)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that break, or speak something else: the port has not failed."""
        if not isinstance(sys.exception(), OSError):
            _LOG.exception("a connection for administration has failed")

    def _secure(self, tls: TlsFiles) -> ssl.SSLContext:
        contents, known = tls.contents(), self._context
        if known is not None and known[0] is contents:
            return known[1]
        assert tls.tls.cert is not None  # a shard without one does not serve
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(tls.tls.cert, tls.tls.key)
        except OSError as error:  # of another one that is being written, say
            _LOG.warning(
                "the admin port keeps its last certificate, as the new one fails: %s", error
            )
            if known is None:
                raise
            return known[1]
        self._context = (contents, context)
        return context


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    timeout = _SILENCE_S
    protocol_version = "HTTP/1.1"
    server_version = "shardwell"
    sys_version = ""

    def do_GET(self) -> None:
        """Writes an answer; do_HEAD leaves out its contents."""
        path, _, query = self.path.partition("?")
        try:
            response = self.server.refusal(self.headers.get_all("Host", [])) or self.server.respond(
                path, query, bearer(self.headers.get("Authorization"))
            )
        except Exception:
            response = Response(
                HTTPStatus.INTERNAL_SERVER_ERROR, b"failed; the shard's log says why\n"
            )
            self.log_failure()
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.contents)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", _POLICY)
        if response.status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", _REALM)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.contents)

    do_HEAD = do_GET  # noqa: N815

    def log_failure(self) -> None:
        _LOG.exception("could not answer %r", self.path[:200])

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: probes make several requests a second."""


def bearer(authorization: str | None) -> str | None:
    """Returns the token of a browser's password prompt; anything else as it is."""
    scheme, _, contents = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    with contextlib.suppress(binascii.Error, UnicodeDecodeError):
        token = base64.b64decode(contents, validate=True).decode().partition(":")[2]
        return f"Bearer {token}"
    return authorization
