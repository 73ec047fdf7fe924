"""The admission of callers: tokens and their quotas, and the audit log of refusals."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from shardwell.connection.credentials import authorization_of
from shardwell.errors import AccessDeniedError, AuthenticationError, LimitError
from shardwell_server.access.access import Access
from shardwell_server.access.audit import Note, no_audit
from shardwell_server.shard.quotas import CALL_BYTES, Usages

if TYPE_CHECKING:
    from shardwell_server.services.calls import Call


class Guard:
    """Lets callers in by their tokens, and slows them to their quotas. For the loop's thread."""

    def __init__(self, access: Access, usages: Usages, note: Note = no_audit) -> None:
        self.note = note
        self.turned_away_s: float | None = None
        self._access = access
        self._usages = usages

    async def enter(self, call: Call) -> None:
        """Finds a call's principal, or refuses it; LimitError: the token's quota is used up."""
        if not self._access.asks:
            return
        metadata: Any = call.context.invocation_metadata()
        call.principal = principal = self._access.principal(authorization_of(metadata))
        if principal.name:
            call.usage = usage = self._usages.of(principal.name, principal.quota)
            if not call.rpc.is_urgent:
                usage.check_rate()
            if call.rpc.is_counted:
                usage.take("calls")
                call.is_counted = True
            delay_s = usage.delay_s(CALL_BYTES)
            if delay_s > 0 and not call.rpc.is_urgent:
                await asyncio.sleep(delay_s)

    async def pace(self, call: Call, *, free_bytes: int = 0) -> None:
        if call.usage is None or call.usage.quota.bytes_per_s is None:
            return
        delay_s = call.usage.delay_s(max(call.moved_bytes, CALL_BYTES) - free_bytes)
        call.moved_bytes = 0
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    def leave(self, call: Call) -> None:
        if call.is_counted and call.usage is not None:
            call.usage.add("calls", -1)

    def check_still(self, call: Call) -> None:
        """Raises AuthenticationError once a call's token has ended, or was revoked."""
        self._access.check_still(call.principal)

    def refused(self, call: Call, error: Exception) -> None:
        if not isinstance(error, AuthenticationError | AccessDeniedError | LimitError):
            return
        if error is not call.ending and not isinstance(error, LimitError):
            self.turned_away_s = time.monotonic()
        event = "ended" if error is call.ending else "refused"
        kind = "parameter" if error.parameter else "table" if error.table else None
        name, right = error.parameter or error.table, None
        if call.asked is not None and not isinstance(error, AuthenticationError):
            right, kind, name = call.asked[0].word, *call.asked[1:]
        call.note(event, kind=kind, name=name, right=right, reason=error.message)
