"""The rights of a token to names, each to those that begin with a prefix. Pure.

Rights are steps of one ladder: a token that has one has those below it.

    read        see a name's status, fetch weights and rows, take checkpoints
    contribute  first weights and gradients, learning rates; join a group of that name
    create      make a parameter or table; restore it from a checkpoint; delete what it has made
    admin       remove rows; delete a parameter or table
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shardwell.errors import AccessDeniedError, ArgumentError
from shardwell.specs.names import check_name
from shardwell_server.shard.quotas import NO_QUOTA, Quota

_PREFIX_LENGTH_MAX = 128
_GRANT_COUNT_MAX = 256


class Right(enum.IntEnum):
    """The rights to a name; the larger ones include the smaller."""

    READ = 1
    CONTRIBUTE = 2
    CREATE = 3
    ADMIN = 4

    @property
    def word(self) -> str:
        """The spelling of files and messages."""
        return self.name.lower()


_DEEDS = {
    Right.READ: "read {}",
    Right.CONTRIBUTE: "contribute to {}",
    Right.CREATE: "create or restore {}",
    Right.ADMIN: "administer {}",
}
_MAY = {
    Right.READ: "read",
    Right.CONTRIBUTE: "read and contribute to",
    Right.CREATE: "read, contribute to and create",
}


@dataclass(frozen=True)
class Grant:
    """A right on all names that begin with a prefix; of parameters, tables and groups alike."""

    right: Right
    prefix: str = ""

    @staticmethod
    def parse(text: object) -> Grant:
        """Parses "RIGHT:PREFIX", or "RIGHT", for all names."""
        word, _, prefix = text.partition(":") if isinstance(text, str) else ("", "", "")
        found = next((right for right in Right if right.word == word), None)
        if found is None or (prefix and not _is_prefix(prefix)):
            words = ", ".join(right.word for right in Right)
            raise ArgumentError(
                f"a right is RIGHT:PREFIX, or RIGHT alone for all names, where RIGHT is one of "
                f"{words}, and names begin with PREFIX; got {text!r:.200}"
            )
        return Grant(found, prefix)

    def __str__(self) -> str:
        return f"{self.right.word}:{self.prefix}" if self.prefix else self.right.word


def _is_prefix(prefix: str) -> bool:
    try:
        check_name("prefix", prefix)
    except ArgumentError:
        return False
    return len(prefix) <= _PREFIX_LENGTH_MAX


def grants_of(texts: object) -> tuple[Grant, ...]:
    """Returns the grants in a list, as a file or a JWT has it."""
    if not isinstance(texts, list) or not 0 < len(texts) <= _GRANT_COUNT_MAX:
        raise ArgumentError(
            f"rights must be a list of 1 to {_GRANT_COUNT_MAX}, each RIGHT:PREFIX; got "
            f"{texts!r:.200}"
        )
    return tuple(Grant.parse(text) for text in texts)


@dataclass(frozen=True, kw_only=True)
class Principal:
    """A caller: a token with its rights. Equal where nothing about the token changed."""

    name: str
    """The token's name; empty: any caller of a shard without tokens."""
    grants: tuple[Grant, ...]
    expires_s: float = math.inf
    """Seconds since 1970."""
    leeway_s: float = 0.0
    """The time for which it is good beyond its end, by another machine's clock."""
    quota: Quota = NO_QUOTA
    proof: bytes = field(default=b"", repr=False)
    """A digest of the secret, or of the key of a JWT, which shows that the token is still good."""

    def best(self, name: str) -> Right | None:
        """Returns the highest right to that name; None: nothing."""
        found = [grant.right for grant in self.grants if name.startswith(grant.prefix)]
        return max(found, default=None)

    def check(self, right: Right, kind: str, name: str) -> None:
        """Refuses a right that it lacks to a "parameter", "table" or "group", whatever its name."""
        best = self.best(name)
        if best is not None and best >= right:
            return
        shown = f"{kind} {name!r:.140}"
        has, needed = f"has no right to {shown}", "a right"
        if best is not None:  # else the answer does not say whether the name exists
            has = f"may {_MAY[best]} {shown}, not {_DEEDS[right].format('it')}"
            needed = f"the right {right.word!r}"
        where: dict[str, Any] = {kind: name[:140]} if kind in ("parameter", "table") else {}
        raise AccessDeniedError(
            f"token {self.name!r} {has}; that needs a token with {needed} for a prefix of the name",
            **where,
        )


ANYBODY = Principal(name="", grants=(Grant(Right.ADMIN),))
"""The caller of a shard that asks for no token."""


def seconds_of(text: object) -> float:
    """Returns seconds since 1970 of a time with its offset from UTC, as in ISO 8601."""
    try:
        found = datetime.fromisoformat(text if isinstance(text, str) else "")
    except ValueError:
        found = None
    if found is None or found.tzinfo is None or not 1970 < found.year < 9999:
        raise ArgumentError(
            f"expires must be a time with its zone, such as 2027-01-31T12:00:00Z; got {text!r:.80}"
        )
    return found.timestamp()


def time_of(seconds: float) -> str:
    """Returns the time as files and messages spell it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def fields_of(what: str, given: object, allowed: set[str]) -> Mapping[str, Any]:
    """Returns a JSON object; refuses other fields."""
    if not isinstance(given, dict):
        raise ArgumentError(f"{what} must be a JSON object; got {given!r:.80}")
    unknown = given.keys() - allowed
    if unknown:
        raise ArgumentError(
            f"{what} has {sorted(unknown)[0]!r:.80}, which is none of its fields: "
            f"{', '.join(sorted(allowed))}"
        )
    return given
