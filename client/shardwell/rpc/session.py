"""The session: one life of a client process, which a number tells from all others.

Two processes with one worker_id have two sessions; a process that is restarted has another one
(docs/adr/0012-sessions.md).
"""

from __future__ import annotations

import os
import secrets
from typing import NamedTuple

from shardwell.process.environment import host_id, host_name, own_identity

HOST_LENGTH_MAX = 255
PROCESS_LENGTH_MAX = 255
VERSION_LENGTH_MAX = 64
_ID_BYTES = 4


class Session(NamedTuple):
    """A life of a client process: the number identifies it, the rest is for messages."""

    number: int
    """Drawn at random when the client connects; 64 bits, not 0."""
    host: str
    pid: int
    process: str = ""
    """Its id, which others on the machine can look up (`own_identity`); empty: unknown."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host!r}"


def new_session() -> Session:
    """Draws the session of a client that connects now, in this process."""
    return Session(secrets.randbits(63) + 1, host_name(), os.getpid(), own_identity())


def unique_worker_id() -> str:
    """Makes an id for a worker that is never restarted; containers on one host differ."""
    return f"{host_id()}-{os.getpid()}-{secrets.token_hex(_ID_BYTES)}"
