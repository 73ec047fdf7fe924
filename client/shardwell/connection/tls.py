"""TLS: who the two ends of a connection are, proved by certificates in files.

Files may be replaced at any time. A server looks at them when a connection comes, a client when it
makes one after a failure. What can't be used, a certificate whose key is still the old one, say, is
left alone, and the last that could be used stays. A certificate and its key can be used when gRPC
has made a connection with them on this machine: Python's ssl reads keys that gRPC can't serve.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import grpc

from shardwell.connection.options import check_fork
from shardwell.errors import ArgumentError, AuthenticationError
from shardwell.process.changing_files import ChangingFiles
from shardwell.process.environment import variable
from shardwell.threads.calls import cancelled_by, current_call

_LOG = logging.getLogger("shardwell")
_LOOK_S = 1.0
"""The time of a server for each of three things that show what is wrong."""
_LOOK_S_MIN = 0.01
_TRY_S = 5.0
"""The time of a connection that tries a certificate, usually 10 ms; one that takes longer
says nothing about the certificate."""
_READ_S = 0.5
"""The time for which a connection waits for files that are tried, before it gets the last ones."""
_JUDGED = ("CERTIFICATE_VERIFY_FAILED", "certificate signature", "erification", "peer certificate")
"""Words of gRPC where a client has got as far as to judge the server's certificate: its date, its
names. They are for clients to refuse, since the server could show it."""
_FIRST_CERTIFICATE = re.compile(rb".*?-----END [A-Z0-9 ]*CERTIFICATE-----", re.DOTALL)
_NO_PROXY = (("grpc.enable_http_proxy", 0),)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CA_VARIABLE = "SHARDWELL_TLS_CA"
CERT_VARIABLE = "SHARDWELL_TLS_CERT"
KEY_VARIABLE = "SHARDWELL_TLS_KEY"
SERVER_NAME_VARIABLE = "SHARDWELL_TLS_SERVER_NAME"
VARIABLES = (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, SERVER_NAME_VARIABLE)


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The files with which one side proves itself, and believes the other side.

    All files are PEM, and may be replaced while they are in use: see docs/security.md.

    Args:
        ca: Certificates of the authorities that vouch for the other side. None: for a client, those
            that gRPC brings, as browsers do; a server takes clients without a certificate.
        cert: This side's certificate, and those between it and its authority. A server and a
            member of a group need one, a client where the server asks for it.
        key: The private key of `cert`, without a password.
        server_name: The name that a server's certificate must have, if not the host of its address:
            where workers reach shards by addresses that no certificate names.

    Raises:
        ArgumentError: one of cert and key is missing.

    Examples:
        >>> tls = shardwell.Tls(ca="certs/ca.pem", cert="certs/client.pem", key="certs/client.key")
        >>> tls.ca
        'certs/ca.pem'
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if path is not None and not (isinstance(path, str | os.PathLike) and os.fspath(path)):
                raise ArgumentError(f"tls: {name} must be the path of a file; got {path!r:.80}")
        if (self.cert is None) != (self.key is None):
            raise ArgumentError(
                "a certificate and its key come together; got "
                f"cert={_shown(self.cert)} and key={_shown(self.key)}"
            )

    @staticmethod
    def from_environment() -> Tls | None:
        """Reads $SHARDWELL_TLS_CA, _CERT, _KEY and _SERVER_NAME; None: none of them is named."""
        ca, cert, key, name = (variable(each) or None for each in VARIABLES)
        return Tls(ca=ca, cert=cert, key=key, server_name=name) if ca or cert or key else None


TlsArgument: TypeAlias = Tls | Literal[False] | None
"""The argument of callers; None: the environment's; False: no TLS, whatever that says."""


@dataclass(frozen=True)
class Contents:
    """The contents of the files when they were read and fitted together."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None = field(repr=False)


class TlsFiles:
    """The files of a `Tls`, read again when they change. Any thread may use it."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        paths = [path for path in (tls.ca, tls.cert, tls.key) if path is not None]
        self._files = ChangingFiles(paths, partial(_read, tls), _LOG)

    def contents(self) -> Contents:
        """The current contents of the files: the same object as long as nothing has changed."""
        return self._files.now()

    @property
    def last(self) -> Contents:
        """Returns the contents that are in use."""
        return self._files.last

    def channel_credentials(self, contents: Contents) -> grpc.ChannelCredentials:
        """Returns the credentials of a client's connections."""
        return grpc.ssl_channel_credentials(contents.ca, contents.key, contents.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """The credentials of a server's connections: the files' contents when each comes."""
        if self.tls.cert is None:
            raise ArgumentError(
                "a server needs a certificate and its key: give both, or set "
                f"${CERT_VARIABLE} and ${KEY_VARIABLE}"
            )
        used = [self._files.last]
        looking = threading.Lock()

        def look() -> None:
            try:
                self.contents()
            finally:
                looking.release()

        def changed() -> Any:  # None, too, whatever gRPC's types say
            if self._files.have_changed() and looking.acquire(blocking=False):
                try:
                    _look_apart(look)
                except RuntimeError:  # no thread can be had
                    looking.release()
            contents = self._files.last
            if contents is used[0]:
                return None
            used[0] = contents
            return _server_configuration(contents)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(used[0]), changed, self.tls.ca is not None
        )


def tls_files(tls: TlsArgument) -> TlsFiles | None:
    """The files that an argument means; None: no TLS."""
    if tls is False:
        return None
    given = Tls.from_environment() if tls is None else tls
    if given is None:
        return None
    if not isinstance(given, Tls):
        raise ArgumentError(f"tls must be shardwell.Tls(...), False or None; got {given!r:.80}")
    return TlsFiles(given)


def check_trust(who: str, address: str, files: TlsFiles | None, timeout_s: float) -> None:
    """Looks why a connection to a server can't be made, once one has failed. Blocks a few seconds.

    gRPC says of most reasons only that the socket was closed. Nothing is looked at where this
    thread's call was cancelled. AuthenticationError: a server answers, and the two sides do not
    trust each other.
    """
    call = current_call()
    look_s = min(_LOOK_S, timeout_s / 6)
    reason: str | None = None
    for _ in range(2):  # a server that just goes away looks like one that refuses, once
        if look_s < _LOOK_S_MIN or (call is not None and call.cancelled.is_set()):
            return
        reason = _distrust(address, files, look_s)
        if reason is None:
            return
    raise AuthenticationError(f"{who} at {address} {reason}")


def _distrust(address: str, files: TlsFiles | None, look_s: float) -> str | None:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    tls = None if files is None else files.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        if tls is None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        else:
            if tls.ca is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(tls.ca)
            if tls.cert is not None and tls.key is not None:
                context.load_cert_chain(tls.cert, tls.key, _no_password)
        name = (tls and tls.server_name) or host
        with (
            socket.create_connection((host, int(port)), look_s) as plain,
            plain.dup() as same,
            cancelled_by(partial(_shut, same)),
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            if tls is None:
                return (
                    "speaks TLS, and this side does not: give tls=shardwell.Tls(ca=...), or set "
                    f"${CA_VARIABLE}"
                )
            # A server that believes this side says so at once, and one that does not goes.
            with contextlib.suppress(ConnectionResetError):
                if secure.recv(1):
                    return None
            return _refused(tls, "it says no more than that")
    except ssl.SSLCertVerificationError as error:
        assert tls is not None
        return (
            f"has a certificate that is not believed: {error.verify_message}; expected one for "
            f"{name!r} that {_shown(tls.ca) if tls.ca else 'a public authority'} vouches for"
        )
    except ssl.SSLError as error:
        return _reason_of_alert(tls, error.reason or "")
    except OSError:
        return None
    return None


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _reason_of_alert(tls: Tls | None, reason: str) -> str | None:
    if tls is None:
        return None
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return "does not speak TLS, and this side does: start it with TLS, or give tls=False"
    return _refused(tls, reason.lower().replace("_", " ")) if "ALERT" in reason else None


def _refused(tls: Tls, reason: str) -> str:
    if tls.cert is None:
        return (
            "asks for a certificate: give tls=shardwell.Tls(cert=..., key=...), or set "
            f"${CERT_VARIABLE} and ${KEY_VARIABLE}"
        )
    return (
        f"refuses the certificate {_shown(tls.cert)} ({reason}): is it of an authority that the "
        "server believes, and good today?"
    )


def _look_apart(look: Callable[[], None]) -> None:
    """Has files read on a thread of its own, and waits for it a moment.

    The connection that tries them needs threads of gRPC's. This is one, and so are those of all
    callers of `connect` meanwhile.
    """
    thread = threading.Thread(target=look, name="shardwell-tls", daemon=True)
    thread.start()
    thread.join(_READ_S)


def _server_configuration(contents: Contents) -> grpc.ServerCertificateConfiguration:
    assert contents.key is not None
    assert contents.cert is not None
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.cert)], contents.ca)


def _read(tls: Tls) -> Contents:
    ca, cert, key = (_bytes_of(path) for path in (tls.ca, tls.cert, tls.key))
    for path, found in ((tls.ca, ca), (tls.cert, cert), (tls.key, key)):
        if found is not None and _BYTE_ORDER_MARK in found:
            raise ArgumentError(
                f"{_shown(path)} has a byte order mark (EF BB BF), at which gRPC stops reading; "
                "save it as ASCII, or as UTF-8 without that mark"
            )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca is not None:
        try:
            context.load_verify_locations(tls.ca)
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"{_shown(tls.ca)} has no certificate of an authority in PEM form ({error})"
            ) from None
    if tls.cert is not None and tls.key is not None:
        try:
            context.load_cert_chain(tls.cert, tls.key, _no_password)
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"{_shown(tls.cert)} and {_shown(tls.key)} are no certificate and its key, without "
                f"a password, in PEM form ({error})"
            ) from None
    contents = Contents(ca, cert, key)
    if cert is not None:
        reason = _unserved(contents)
        if reason is not None:
            raise ArgumentError(
                f"{_shown(tls.cert)} and {_shown(tls.key)} can't be served: gRPC makes no "
                f"connection with them ({reason}); expected a key that its TLS takes, such as one "
                "of the curve P-256 or P-384 or of RSA, and a certificate for signing"
            )
    return contents


def _unserved(contents: Contents) -> str | None:
    """Returns why gRPC makes no connection with a certificate and its key; None: it does.

    A server on this machine shows it, and a client that trusts it calls: the keys and signatures
    of clients' certificates are checked as well by that.
    """
    check_fork()
    server = grpc.server(ThreadPoolExecutor(1))
    try:
        assert contents.key is not None
        assert contents.cert is not None
        credentials = grpc.ssl_server_credentials([(contents.key, contents.cert)], contents.ca)
        try:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        except RuntimeError:
            return "its TLS can't read these files" if _reaches_itself() else None
        server.start()
        first = _FIRST_CERTIFICATE.match(contents.cert)
        assert first is not None
        trusting = grpc.ssl_channel_credentials(first[0])
        with grpc.secure_channel(f"127.0.0.1:{port}", trusting, options=_NO_PROXY) as channel:
            details = _unreachable(channel)
        if details is None or any(word in details for word in _JUDGED) or not _reaches_itself():
            return None
        return details.rpartition(f":{port}: ")[2][:200]
    finally:
        server.stop(None).wait(_TRY_S)


def _reaches_itself() -> bool:
    server = grpc.server(ThreadPoolExecutor(1))
    try:
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=_NO_PROXY) as channel:
            return _unreachable(channel) is None
    except RuntimeError:
        return False
    finally:
        server.stop(None).wait(_TRY_S)


def _unreachable(channel: grpc.Channel) -> str | None:
    try:
        call: Any = channel.unary_unary("/shardwell.Try/Try")
        call(b"", timeout=_TRY_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return str(error.details())
    return None


def _bytes_of(path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(f"{_shown(path)} can't be read: {error.strerror}") from None
    except ValueError as error:  # a path that no file has
        raise ArgumentError(f"{_shown(path)!r} can't be read: {error}") from None


def _no_password() -> str:
    raise ValueError("the key has a password")


def _shown(path: str | os.PathLike[str] | None) -> str:
    return "None" if path is None else os.fspath(path)
