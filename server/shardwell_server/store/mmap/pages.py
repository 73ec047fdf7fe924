"""The pages of large states, which the log "states" names by place, size and digest.

A page is written before the event that names it, to a place that no event of a kept state names. So
a kill leaves a page in part that nothing names, and a reader compares digests. Places of
`PAGE_ROOM_BYTES` lie one behind the other, and the file grows as far as it is needed.
"""

from __future__ import annotations

import os

from shardwell_server.store.contract import PAGE_ROOM_BYTES
from shardwell_server.store.files.layout import Home
from shardwell_server.store.files.mapped import failing, opened, reserve

NAME = "pages"


class StatePages:
    """The file of a slice, which the first page makes."""

    def __init__(self, home: Home) -> None:
        self.path = home.path / NAME
        self._reached = home.reached

    def put(self, place: int, page: bytes) -> None:
        """Writes a page; StorageError: the disk failed."""
        assert len(page) <= PAGE_ROOM_BYTES
        flags = os.O_RDWR | os.O_CREAT
        with failing(self.path, "writing a page of a state"), opened(self.path, flags) as file:
            end = (place + 1) * PAGE_ROOM_BYTES
            if os.fstat(file).st_size < end:
                reserve(file, end)
                self._reached("room for a page of a state")
            os.pwrite(file, page, place * PAGE_ROOM_BYTES)
            self._reached("a page of a state")

    def get(self, place: int, size_bytes: int) -> bytes:
        """Returns bytes of a page as they lie; StorageError: the file can't be read."""
        doing = "reading a page of a state"
        with failing(self.path, doing), opened(self.path, os.O_RDONLY) as file:
            return os.pread(file, size_bytes, place * PAGE_ROOM_BYTES)
