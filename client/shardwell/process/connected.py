"""Holders of connections and threads of one process, which are closed and never copied.

A fork copies the objects, and not the threads that serve them, nor what locks they held.
"""

from __future__ import annotations

import os
from typing import NoReturn, Self

from typing_extensions import override

from shardwell.errors import ArgumentError, ForkedError


class OwnerProcess:
    """The process that this was made in; `what` belongs to it, in messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Returns True in that process."""
        return os.getpid() == self.process_id

    def check(self) -> None:
        """Raises ForkedError in a process that was forked from the one that made it."""
        if os.getpid() != self.process_id:
            raise ForkedError(
                f"this {self._what} was made in process {self.process_id} and can't be used in "
                f"process {os.getpid()}, which was forked from it; make one in this process"
            )


class Connected:
    """Refuses to be copied or pickled, with what to do in the other process."""

    _elsewhere = "call shardwell.connect in the other process"

    @override
    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            f"{type(self).__name__} can't be copied or pickled: its connections are those of this "
            f"process; {self._elsewhere}"
        )


class Closing:
    """A context manager that closes itself on exit, whether the block failed or not."""

    def close(self) -> None:
        """Lets go of what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
