"""The file of tokens: who each is, what it may do, and a digest of its secret, never the secret.

    {"tokens": [{"name": "trainer", "sha256": ["..."], "rights": ["contribute:prod-"],
                 "expires": "2027-01-31T00:00:00Z", "quota": {"streams": 64}}]}

A token may have several secrets, so that a new one can be handed out before the old one ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwell.errors import ArgumentError
from shardwell.specs.names import check_name
from shardwell_server.access.rights import (
    Grant,
    Principal,
    fields_of,
    grants_of,
    seconds_of,
    time_of,
)
from shardwell_server.shard.quotas import NO_QUOTA, Quota

TOKEN_COUNT_MAX = 1000
_SECRET_COUNT_MAX = 4
_FILE_SIZE_MAX_BYTES = 2**22
_SECRET_BYTES = 32
_SECRET_LINE = re.compile(rb"[A-Za-z0-9_-]{43}\n")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"name", "sha256", "rights", "expires", "quota"}
_QUOTA_FIELDS = {field.name for field in dataclasses.fields(Quota)}


@dataclass(frozen=True, kw_only=True)
class Token:
    """One entry of the file."""

    name: str
    digests: tuple[str, ...]
    """SHA-256 of each secret, in hexadecimal digits; the newest last."""
    grants: tuple[Grant, ...]
    expires_s: float = math.inf
    """Seconds since 1970."""
    quota: Quota = NO_QUOTA

    @staticmethod
    def of(given: object) -> Token:
        """Returns the entry that a JSON object is."""
        entry = fields_of("a token", given, _FIELDS)
        name, expires = check_name("a token's name", entry.get("name")), entry.get("expires")
        try:
            return Token(
                name=name,
                digests=_digests_of(entry.get("sha256")),
                grants=grants_of(entry.get("rights")),
                expires_s=math.inf if expires is None else seconds_of(expires),
                quota=quota_of(entry.get("quota", {})),
            )
        except ArgumentError as error:
            raise ArgumentError(f"token {name!r}: {error.message}") from None

    def to_json(self) -> dict[str, Any]:
        """Returns the entry of the file."""
        quota = {name: most for name, most in vars(self.quota).items() if most is not None}
        return {
            "name": self.name,
            "sha256": list(self.digests),
            "rights": [str(grant) for grant in self.grants],
            **({} if self.expires_s == math.inf else {"expires": time_of(self.expires_s)}),
            **({"quota": quota} if quota else {}),
        }

    def principals(self) -> Iterator[Principal]:
        """Yields the principal of each secret."""
        for digest in self.digests:
            yield Principal(
                name=self.name,
                grants=self.grants,
                quota=self.quota,
                expires_s=self.expires_s,
                proof=bytes.fromhex(digest),
            )

    def with_secret(self, digest: str) -> Token:
        """Returns the token with one more secret; of many, the oldest goes."""
        return dataclasses.replace(self, digests=(*self.digests, digest)[-_SECRET_COUNT_MAX:])


def _digests_of(given: object) -> tuple[str, ...]:
    found = [given] if isinstance(given, str) else given
    if (
        not isinstance(found, list)
        or not 0 < len(found) <= _SECRET_COUNT_MAX
        or not all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in found)
    ):
        raise ArgumentError(
            f"sha256 must be a list of 1 to {_SECRET_COUNT_MAX} digests of secrets, each of 64 "
            "lower-case hexadecimal digits"
        )
    return tuple(found)


def quota_of(given: object) -> Quota:
    """Returns the quota that a JSON object is."""
    return Quota(**fields_of("quota", given, _QUOTA_FIELDS))


def new_secret() -> str:
    """Returns a random secret."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> bytes:
    """Returns the SHA-256 of a secret, all that is kept; drawn at random, it needs no salt."""
    return hashlib.sha256(secret.encode()).digest()


def read_tokens(path: Path) -> list[Token]:
    """Reads all tokens of a file; ArgumentError says which file, and what is wrong."""
    found = fields_of(str(path), json_of(path), {"tokens"}).get("tokens")
    if not isinstance(found, list) or len(found) > TOKEN_COUNT_MAX:
        raise ArgumentError(f"{path}: tokens must be a list of at most {TOKEN_COUNT_MAX}")
    try:
        tokens = [Token.of(each) for each in found]
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error.message}") from None
    names = [token.name for token in tokens]
    digests = [digest for token in tokens for digest in token.digests]
    for what, each in (("name", names), ("secret", digests)):
        if len(set(each)) != len(each):
            raise ArgumentError(f"{path}: two tokens have the same {what}")
    return tokens


def json_of(path: Path) -> Any:
    """Reads a file of JSON; no error has any of it, as it may be secret."""
    with _telling(path, "read"):
        try:
            mode = path.stat().st_mode
        except ValueError as error:  # a path that no file has
            raise ArgumentError(f"{str(path)!r} can't be read: {error}") from None
        if not stat.S_ISREG(mode):  # a pipe would be waited for
            raise ArgumentError(f"{path} can't be read: it is no file")
        with path.open("rb") as file:
            contents = file.read(_FILE_SIZE_MAX_BYTES + 1)
    if len(contents) > _FILE_SIZE_MAX_BYTES:
        raise ArgumentError(f"{path} is larger than {_FILE_SIZE_MAX_BYTES} bytes")
    try:
        return json.loads(contents)
    except (ValueError, RecursionError):
        raise ArgumentError(f"{path} is no JSON") from None


@contextlib.contextmanager
def changing_tokens(path: Path) -> Iterator[dict[str, Token]]:
    """Yields a file's tokens by name, and replaces it after the block; locks out others."""
    path = path.resolve()  # what a link leads to is changed, not the link
    with _telling(path.parent, "opened"):
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        had_file = path.exists()
        tokens = {each.name: each for each in read_tokens(path)} if had_file else {}
        yield tokens
        contents = json.dumps({"tokens": [each.to_json() for each in tokens.values()]}, indent=2)
        with private_file(path, f"{contents}\n", keeps_owner=True, is_ours=lambda path: had_file):
            pass
    finally:
        os.close(directory)


@contextlib.contextmanager
def private_file(
    path: Path,
    contents: str,
    *,
    keeps_owner: bool = False,
    is_ours: Callable[[Path], bool] = lambda path: False,
) -> Iterator[None]:
    """Puts a private file in place after the block; `keeps_owner` keeps owner and mode."""
    _check_replaceable(path, is_ours)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with _telling(path, "written"), open(os.open(new, flags, 0o600), "w") as file:
            if keeps_owner and path.exists() and not path.is_symlink():
                old = path.stat()
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        yield
        _check_replaceable(path, is_ours)
        with _telling(path, "written"):
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _check_replaceable(path: Path, is_ours: Callable[[Path], bool]) -> None:
    if os.path.lexists(path) and not is_ours(path):
        raise ArgumentError(
            f"{path} exists, and Shardwell did not write it; move it away, or give another place"
        )


def is_secret_file(path: Path) -> bool:
    """Returns True if a file is one line as `new_secret` draws it, so was written for a token."""
    with _telling(path, "read"):
        if path.is_symlink() or not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return _SECRET_LINE.fullmatch(file.read(_FILE_SIZE_MAX_BYTES)) is not None


@contextlib.contextmanager
def _telling(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"{path} can't be {done}: {error.strerror}") from None
