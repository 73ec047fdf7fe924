"""The way in: every call brings a token, once there is a file of them or of keys.

Files are read again when they change, so that tokens come, end and are revoked without a restart;
a call that is open is looked at again then.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from shardwell.connection.credentials import (
    BEARER,
    TOKEN_LENGTH_MAX,
    SameToken,
    TokenFile,
    no_token,
)
from shardwell.errors import AuthenticationError
from shardwell.process.changing_files import ChangingFiles
from shardwell_server.access.rights import ANYBODY, Principal, time_of
from shardwell_server.access.tokens import digest_of, read_tokens
from shardwell_server.access.web_tokens import Key, principal_of, read_keys
from shardwell_server.config import ShardConfig
from shardwell_server.shard.quotas import Quota

_LOG = logging.getLogger("shardwell_server")
_BELIEVED_COUNT_MAX = 4096


def wall_clock_s() -> float:
    """Returns seconds since 1970, by the clock that people set: tokens end by it."""
    return time.time()  # noqa: TID251


class Access:
    """The tokens of a shard, and the principals of its calls. Any thread may use it."""

    def __init__(
        self,
        *,
        tokens: Path | None = None,
        jwt_keys: Path | None = None,
        same: SameToken | None = None,
        cluster_id: str = "",
        now_s: Callable[[], float] = wall_clock_s,
    ) -> None:
        self._cluster_id = cluster_id
        self._now_s = now_s
        self._same = same
        self._tokens: ChangingFiles[dict[bytes, Principal]] | None = None
        self._keys: ChangingFiles[list[Key]] | None = None
        self._signed_by: list[Key] = []
        self._believed: dict[bytes, Principal] = {}
        """The principals by the digests of JWTs that these keys have signed."""
        if tokens is not None:
            self._tokens = ChangingFiles([tokens], lambda: _principals(tokens), _LOG)
        if jwt_keys is not None:
            self._keys = ChangingFiles([jwt_keys], lambda: read_keys(jwt_keys), _LOG)

    @staticmethod
    def of(config: ShardConfig) -> Access:
        """Makes the access of a shard's config."""
        same = None if config.same_token is None else SameToken(TokenFile(config.same_token))
        return Access(
            tokens=config.tokens, jwt_keys=config.jwt_keys, same=same, cluster_id=config.cluster_id
        )

    def principals(self) -> list[Principal]:
        """Returns the callers that the file of tokens has, one for each secret."""
        return [*self._by_digest.values()]

    @property
    def _by_digest(self) -> dict[bytes, Principal]:
        return {} if self._tokens is None else self._tokens.last

    def quotas(self) -> dict[str, Quota]:
        """Returns the file's quotas, by the names of tokens."""
        return {each.name: each.quota for each in self.principals()}

    @property
    def asks(self) -> bool:
        """Returns True if calls need a token."""
        return any(each is not None for each in (self._tokens, self._keys, self._same))

    def refresh(self) -> None:
        """Reads what has changed."""
        for files in (self._tokens, self._keys):
            if files is not None:
                files.now()

    def principal(self, authorization: str | None) -> Principal:
        """Returns the principal that makes a call; AuthenticationError: it is not let in."""
        if not self.asks:
            return ANYBODY
        if authorization is None:
            raise no_token()
        token = authorization.removeprefix(BEARER)
        if token == authorization or not 0 < len(token) <= TOKEN_LENGTH_MAX:
            raise AuthenticationError('authorization must be "Bearer TOKEN"')
        digest = digest_of(token)
        found = self._known(digest)
        if found is None:  # it may have come a moment ago
            self.refresh()
            found = self._known(digest)
        if found is None and self._keys is not None and token.count(".") == 2:
            found = self._signed(token, digest, self._keys.last)
        if found is None and self._same is not None:
            self._same.check(authorization)
            return dataclasses.replace(ANYBODY, proof=digest)
        if found is None:
            raise AuthenticationError("no such token is known here; is it one for this cluster?")
        self._check_time(found)
        return found

    def check_still(self, principal: Principal) -> None:
        """Refuses a caller whose token has ended, or changed."""
        if not self.asks or principal is ANYBODY:
            return
        keys = [] if self._keys is None else self._keys.last
        proof = principal.proof
        if self._same is not None and not principal.name:
            if self._same.is_digest(proof):
                return
            raise AuthenticationError("the token was replaced")
        if self._by_digest.get(proof) != principal and not any(key.proof == proof for key in keys):
            raise AuthenticationError(f"token {principal.name!r} was revoked, or has changed")
        self._check_time(principal)

    def _signed(self, token: str, digest: bytes, keys: list[Key]) -> Principal:
        """Looks at a JWT once as long as the keys are equal."""
        if self._signed_by is not keys:
            self._signed_by, self._believed = keys, {}
        found = self._believed.get(digest)
        if found is None:
            found = principal_of(token, keys, self._cluster_id)
            if len(self._believed) >= _BELIEVED_COUNT_MAX:
                self._believed.clear()
            self._believed[digest] = found
        return found

    def _known(self, digest: bytes) -> Principal | None:
        """Looks at all tokens of the file, so that the time says nothing."""
        found = None
        for proof, each in self._by_digest.items():
            if hmac.compare_digest(proof, digest):
                found = each
        return found

    def _check_time(self, principal: Principal) -> None:
        ends_s = principal.expires_s
        if ends_s is not math.inf and self._now_s() >= ends_s + principal.leeway_s:
            raise AuthenticationError(
                f"token {principal.name!r} expired at {time_of(ends_s)}; put a new one into its "
                "file"
            )


def _principals(tokens: Path) -> dict[bytes, Principal]:
    return {who.proof: who for token in read_tokens(tokens) for who in token.principals()}
