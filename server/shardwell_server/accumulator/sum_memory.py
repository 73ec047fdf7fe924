"""The memory that sums are in, with disk space or none to be taken for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.lazy_memory import lazy_zeros


class SumMemory(MappedFile):
    """Plain memory, of which only what is written costs something; gone with the process.

    Attributes:
        data: (size,) uint8, writable where room was reserved.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises MemoryError when there is no address space."""
        self.path = Path("memory")
        self.data = lazy_zeros((size_bytes,), "uint8")

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Makes room there. What is there is left as it is.

        Raises:
            StorageError: there is no disk space; nothing changed.
        """

    def ranges(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Offset and size of each part that may hold what another process has written."""
        return iter(())
