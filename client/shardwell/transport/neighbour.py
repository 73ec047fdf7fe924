"""A guess whether a server is on this machine, by its address and by earlier calls."""

from __future__ import annotations

import time

PAUSE_S = 60.0
"""The pause after a server on this machine refused, or had gone."""
_RESTART_S = 1.0
"""The pause after a server that was reached went away: it may be being started again."""
_RESTART_COUNT = 60
"""Such pauses in a row before the server counts as gone."""


class Neighbour:
    """An address on this machine, and its pauses after failures. Any thread may ask."""

    def __init__(self, address: str, *, is_wanted: bool) -> None:
        self.address = address
        """May be set once it is known; empty: nowhere."""
        self._is_wanted = is_wanted
        self._next_try_s = 0.0
        self._restart_count = 0
        """Failures left before it is no neighbour."""

    @property
    def is_there(self) -> bool:
        """True if it is to be tried."""
        return self._is_wanted and bool(self.address) and time.monotonic() >= self._next_try_s

    def pause(self, duration_s: float = PAUSE_S) -> None:
        """Leaves the address alone for a while, as it refused."""
        self._next_try_s = time.monotonic() + duration_s

    def note_reached(self) -> None:
        """Notes that the server is on this machine: it is back soon if it goes."""
        self._restart_count = _RESTART_COUNT

    def note_missing(self) -> None:
        """Notes that no process listens there: the shard restarts, or is on another machine."""
        self.pause(_RESTART_S if self._restart_count else PAUSE_S)
        self._restart_count = max(self._restart_count - 1, 0)
