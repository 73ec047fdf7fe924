"""What a session is: one life of a client process, which both sides tell others from by a number.

Two processes with one worker_id have two sessions; a process that is restarted has another
one (docs/adr/0012-sessions.md).
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
    """Compared by its number alone; the rest is for messages."""

    number: int
    """Drawn at random when the client connects; 64 bits, not 0."""
    host: str
    """Name of the machine."""
    pid: int
    """The process there."""
    process: str = ""
    """Id of the process, which others on the machine can look up: see `own_identity`; empty:
    unknown."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host!r}"


def new_session() -> Session:
    """Draws the session of a client that connects now, in this process."""
    return Session(secrets.randbits(63) + 1, host_name(), os.getpid(), own_identity())


def unique_worker_id() -> str:
    """A worker id for a worker that is never restarted.

    Host, without what no id has, process, and a random number that tells apart containers on one
    host.
    """
    return f"{host_id()}-{os.getpid()}-{secrets.token_hex(_ID_BYTES)}"
