"""The proof of a client's identity: certificates, and a token that its calls bring.

The token is a secret, so it goes over TLS alone, or to this machine. It is read from a file, again
whenever that has changed. See docs/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import grpc

from shardwell.connection.tls import TlsArgument, TlsFiles, tls_files
from shardwell.errors import ArgumentError, AuthenticationError
from shardwell.process.changing_files import ChangingFiles, FilePath
from shardwell.process.environment import is_on, variable

_LOG = logging.getLogger("shardwell")
TOKEN_FILE_VARIABLE = "SHARDWELL_TOKEN_FILE"  # noqa: S105, the name of a variable
INSECURE_VARIABLE = "SHARDWELL_INSECURE"
AUTHORIZATION_KEY = "authorization"
"""Metadata that has `BEARER` and the token, as in HTTP (RFC 6750)."""
BEARER = "Bearer "
TOKEN_LENGTH_MAX = 4096
"""Most characters of a token, so that it and all else that a call brings stay below gRPC's limit of
metadata."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

TokenFileArgument: TypeAlias = FilePath | Literal[False] | None
"""The argument of callers; None: the environment's; False: none, whatever that says."""


class TokenFile:
    """A token in a file, read again when that has changed. Any thread may use it."""

    def __init__(self, path: FilePath) -> None:
        self.path = os.fspath(path)
        self._file = ChangingFiles([path], self._read, _LOG)

    def __repr__(self) -> str:
        return f"TokenFile({self.path!r})"

    def authorization(self) -> str:
        """The metadata of a call: the token that the file has now, or else the last one."""
        return BEARER + self._file.now()

    def _read(self) -> str:
        try:
            with Path(self.path).open("rb") as file:
                contents = file.read(TOKEN_LENGTH_MAX + 2)
        except OSError as error:
            raise ArgumentError(
                f"the file of the token, {self.path}, can't be read: {error.strerror}"
            ) from None
        except ValueError as error:  # a path that no file has
            raise ArgumentError(
                f"the file of the token, {self.path!r}, can't be read: {error}"
            ) from None
        token = contents.decode("ascii", "replace").strip()
        if len(token) > TOKEN_LENGTH_MAX or not _TOKEN.fullmatch(token):
            raise ArgumentError(
                f"{self.path} has no token: expected one of 1 to {TOKEN_LENGTH_MAX} letters, "
                "digits and -._~+/=, alone, as `shardwell token create` writes it"
            )
        return token


def token_file(path: TokenFileArgument) -> TokenFile | None:
    """The file that an argument means; None: there is no token."""
    if path is False:
        return None
    if path is None:
        path = variable(TOKEN_FILE_VARIABLE) or None
        return None if path is None else TokenFile(path)
    if not (isinstance(path, str | os.PathLike) and os.fspath(path)):
        raise ArgumentError(f"token_file must be the path of a file, or False; got {path!r:.80}")
    return TokenFile(path)


@dataclass(frozen=True)
class Credentials:
    """The certificates and the token of one side of its connections."""

    tls: TlsFiles | None = None
    token: TokenFile | None = None

    @staticmethod
    def of(tls: TlsArgument = None, token: TokenFileArgument = None) -> Credentials:
        """The meaning of arguments, and of the environment where they are None."""
        return Credentials(tls_files(tls), token_file(token))

    def check_private(self, addresses: Iterable[str]) -> None:
        """Refuses to send a token without TLS to an address that is not this machine's."""
        if self.token is None or self.tls is not None:
            return
        for address in addresses:
            if not is_loopback(address):
                raise ArgumentError(
                    f"the token of {self.token.path} would go to {address} in the clear: give "
                    "tls=shardwell.Tls(...), or set $SHARDWELL_TLS_CA; or token_file=False, to "
                    "send none"
                )


NO_CREDENTIALS = Credentials()


def is_loopback(address: str) -> bool:
    """Returns True if HOST:PORT is reached from this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def insecure_setting(is_insecure: bool | None) -> bool:
    """Returns True if strangers may be let in: as the caller says, or else the environment."""
    return is_on(INSECURE_VARIABLE) if is_insecure is None else bool(is_insecure)


class SameToken:
    """Lets in callers that bring this process's own token. Any thread may use it."""

    def __init__(self, token: TokenFile) -> None:
        self._token = token

    def check(self, authorization: str | None) -> None:
        """Refuses a call that brings another token, or none."""
        if authorization is None:
            raise no_token()
        if not hmac.compare_digest(authorization.encode(), self._token.authorization().encode()):
            raise AuthenticationError("the token is not that of the worker which answers here")

    def is_digest(self, digest: bytes) -> bool:
        """Returns True if that is SHA-256 of the token as it is now."""
        token = self._token.authorization().removeprefix(BEARER)
        return hmac.compare_digest(hashlib.sha256(token.encode()).digest(), digest)


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The authorization in a call's metadata; None: there is none."""
    for key, value in metadata or ():
        if key == AUTHORIZATION_KEY and isinstance(value, str):
            return value
    return None


def no_token() -> AuthenticationError:
    """The refusal of a call without a token."""
    return AuthenticationError(
        f"a token is needed: give token_file=, or set ${TOKEN_FILE_VARIABLE}"
    )


class AuthorizedChannel:
    """A gRPC channel whose calls bring a token, without TLS on one machine, unlike gRPC's own."""

    def __init__(self, channel: grpc.Channel, token: TokenFile) -> None:
        self._channel = channel
        self._token = token

    def __getattr__(self, shape: str) -> Any:
        """Returns gRPC's maker of calls of that shape, such as `unary_unary`."""
        make = getattr(self._channel, shape)
        return lambda *args, **options: _Authorized(make(*args, **options), self._token)

    def close(self) -> None:
        """Closes gRPC's channel."""
        self._channel.close()


class _Authorized:
    def __init__(self, make: Any, token: TokenFile) -> None:
        self._make = make
        self._token = token

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._make(request, metadata=self._metadata(), **options)

    def future(self, request: Any, **options: Any) -> Any:
        return self._make.future(request, metadata=self._metadata(), **options)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((AUTHORIZATION_KEY, self._token.authorization()),)
