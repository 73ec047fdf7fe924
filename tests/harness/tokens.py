"""Tokens for tests: files written by hand, as security.md says; no code of the service's."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import grpc

TOKEN_FILE_VARIABLE = "SHARDWELL_TOKEN_FILE"


class Tokens:
    """A file of tokens, and a file of each secret.

    Args:
        directory: Where they are.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "tokens.json"
        self._entries: dict[str, dict[str, Any]] = {}
        self._write()

    def add(self, name: str, *rights: str, secret: str = "", **fields: Any) -> Path:
        """Adds a token, or replaces it; the file of its secret."""
        secret = secret or f"{name}-secret-{os.urandom(8).hex()}"
        digest = hashlib.sha256(secret.encode()).hexdigest()
        self._entries[name] = {"name": name, "sha256": [digest], "rights": [*rights], **fields}
        self._write()
        file = self.directory / f"{name}.token"
        _replace(file, f"{secret}\n")
        return file

    def remove(self, name: str) -> None:
        """Revokes a token; the file of its secret stays."""
        del self._entries[name]
        self._write()

    def _write(self) -> None:
        _replace(self.path, json.dumps({"tokens": list(self._entries.values())}))


def _replace(path: Path, contents: str) -> None:
    """Replaces a file that is in use."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(contents)
    os.replace(new, path)


def bearing(channel: grpc.Channel, token: str | None = None) -> grpc.Channel:
    """The channel, whose calls bring a token.

    Args:
        channel: gRPC's.
        token: Default: that of the file that the environment names; none where it names none.
    """
    authorization = common_authorization() if token is None else f"Bearer {token}"
    if authorization is None:
        return channel
    return grpc.intercept_channel(channel, _Bearer(authorization))


def common_authorization() -> str | None:
    """What calls bring by the environment."""
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    return f"Bearer {Path(path).read_text().strip()}" if path else None


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, authorization: str) -> None:
        self._metadata = (("authorization", authorization),)

    def _with(self, continuation: Any, details: Any, request: Any) -> Any:
        given = _Details(
            details.method,
            details.timeout,
            (*(details.metadata or ()), *self._metadata),
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
        return continuation(given, request)

    intercept_unary_unary = _with
    intercept_unary_stream = _with
    intercept_stream_unary = _with
    intercept_stream_stream = _with


class _Details(grpc.ClientCallDetails):
    def __init__(self, method, timeout, metadata, credentials, wait_for_ready, compression) -> None:
        self.method, self.timeout, self.metadata = method, timeout, metadata
        self.credentials, self.wait_for_ready = credentials, wait_for_ready
        self.compression = compression
