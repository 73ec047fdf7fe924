"""Goal: a call whose client is gone is asked for nothing of gRPC's.

gRPC's context of a call that is over reads freed memory where it is asked for its peer, on whatever
thread, and the process may die. Handlers go on for a moment on work threads after their client is
gone, so that what they say of it has to be read before.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardwell_server.access.audit import no_audit
from shardwell_server.services.calls import Call, Rpc

RPC = Rpc("Exchange", lambda: None, False, True, False, True)


class Context:
    """A context of gRPC's that may be asked as long as its call lives."""

    def __init__(self) -> None:
        self.is_over = False

    def peer(self) -> str:
        assert not self.is_over
        return "ipv4:127.0.0.1%3A7"

    def auth_context(self) -> dict[str, list[bytes]]:
        assert not self.is_over
        return {"x509_common_name": [b"w0"]}

    def time_remaining(self) -> None:
        assert not self.is_over


@pytest.mark.parametrize("is_audited", [True, False])
def test_what_is_said_of_the_client_is_read_while_the_call_lives(is_audited) -> None:
    noted: list[dict[str, Any]] = []

    def note(event: str, **fields: Any) -> None:
        noted.append({"event": event, **fields})

    async def call() -> Call:
        context = Context()
        made = Call(context, RPC, note if is_audited else no_audit)
        context.is_over = True
        return made

    ended = asyncio.run(call())
    ended.note("opened", kind="parameter")
    assert ended.peer == "ipv4:127.0.0.1%3A7"
    expected = {"token": "", "certificate": "w0", "remote": "ipv4:127.0.0.1:7"}
    expected |= {"event": "opened", "method": "Exchange", "kind": "parameter"}
    assert noted == ([expected] if is_audited else [])
