"""What a session is: one life of a client process, which both sides tell others from by a number.

Pure. Two processes with one worker_id have two sessions; a process that is restarted has another
one (docs/adr/0012-sessions.md).
"""

from __future__ import annotations

from typing import NamedTuple

HOST_LENGTH_MAX = 255


class Session(NamedTuple):
    """Compared by its number alone; the rest is for messages."""

    number: int
    """Drawn at random when the client connects; 64 bits, not 0."""
    host: str
    """Name of the machine."""
    pid: int
    """The process there."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host!r}"
