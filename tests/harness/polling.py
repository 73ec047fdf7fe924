"""Waiting for what another thread or process does: polled with a deadline, never slept for."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

ResultT = TypeVar("ResultT")
PATIENCE_S = 40.0
"""How long a test waits for what should happen. Says nothing about speed: a busy machine takes many
seconds for what a quiet one does at once, and what takes longer than this hangs."""
BRIEF_S = 3.0
"""Deadline of a call that is to end for want of time: as long as a busy machine may take to find
out what its error has to say."""
_LOOK_INTERVAL_S = 0.01


def eventually(what: str, look: Callable[[], ResultT], *, timeout_s: float = PATIENCE_S) -> ResultT:
    """The first result of `look` that is true.

    Raises:
        AssertionError: there was none within `timeout_s`; says `what` and the last result.
    """
    deadline_s = time.monotonic() + timeout_s
    never = threading.Event()
    while True:
        result = look()
        if result:
            return result
        if time.monotonic() > deadline_s:
            raise AssertionError(f"within {timeout_s:g} s not: {what}; last look: {result!r}")
        never.wait(_LOOK_INTERVAL_S)


def until_accepted(
    call: Callable[[], ResultT],
    *errors: type[BaseException],
    timeout_s: float = PATIENCE_S,
) -> ResultT:
    """The result of `call`, which is repeated while it raises one of `errors`."""
    results: list[ResultT] = []
    last: list[BaseException] = []

    def attempt() -> bool:
        try:
            results.append(call())
        except errors as error:
            last[:] = [error]
            return False
        return True

    try:
        eventually("the call succeeds", attempt, timeout_s=timeout_s)
    except AssertionError:
        raise AssertionError(f"still refused after {timeout_s:g} s: {last[0]!r}") from last[0]
    return results[0]


class Stopwatch:
    """Seconds since it was made; only for bounds of seconds, never for speed."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._start_s


class HasFileno(Protocol):
    """What `readable` can wait for."""

    def fileno(self) -> int:
        """Its file descriptor, of any number: `select.select` takes those below 1,024 alone."""


FileT = TypeVar("FileT", bound=HasFileno)


def readable(files: Iterable[FileT], timeout_s: float) -> list[FileT]:
    """Which have something to read, or have ended, once one of them does; none if none in time."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ, file)
        return [key.data for key, _ in selector.select(max(timeout_s, 0))]
