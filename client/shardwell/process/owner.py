"""The maker of things that are of no use in another process: connections and threads stay behind.

`os.fork` copies the objects, also by way of multiprocessing, and not the threads that serve them,
nor what locks they held.
"""

from __future__ import annotations

import os

from shardwell.errors import ForkedError


class OwnerProcess:
    """The process that this was made in; `what` belongs to it, in messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._process_id = os.getpid()

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self._process_id

    @property
    def is_here(self) -> bool:
        """True in that process."""
        return os.getpid() == self._process_id

    def check(self) -> None:
        """Raises ForkedError in a process that was forked from the one that made it."""
        if os.getpid() != self._process_id:
            raise ForkedError(
                f"this {self._what} was made in process {self._process_id} and can't be used in "
                f"process {os.getpid()}, which was forked from it; make one in this process"
            )
