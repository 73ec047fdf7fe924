"""What a client has opened: under each name one object, until that is closed."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar


class Closeable(Protocol):
    """What can be opened, and closed by itself too."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""

    def close(self) -> None:
        """Lets no call begin. Safe to repeat."""


T = TypeVar("T", bound=Closeable)


class Opened(Generic[T]):
    """Objects of one kind by name. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, T] = {}
        self._closed = False

    def find(self, name: str) -> T | None:
        """What is open under that name."""
        with self._lock:
            return self._open(name)

    def keep(self, name: str, made: T) -> T:
        """Keeps what was made, but where another thread was faster; returns what is kept."""
        with self._lock:
            found = self._open(name)
            kept = self._objects[name] = made if found is None else found
            closed = self._closed
        if closed:
            kept.close()
        return kept

    def close(self) -> None:
        """Closes all, and what is kept later too."""
        with self._lock:
            self._closed = True
            objects = list(self._objects.values())
        for one in objects:
            one.close()

    def _open(self, name: str) -> T | None:
        found = self._objects.get(name)
        return None if found is None or found.is_closed else found
