"""Ctrl-C at any moment of a call: KeyboardInterrupt wherever the interpreter would raise it.

That is where functions of Python begin or return, and after those of C; nowhere else, such as
between the end of a `with` block and the release of its lock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

_EVENTS = ("call", "return", "c_return")


class Interrupts:
    """Raises KeyboardInterrupt at moments of some files' code, in this thread.

    Args:
        files: Ends of their names.
        at: Numbers of the moments, from 0, in the order in which they come.
    """

    def __init__(self, files: Collection[str], at: Collection[int]) -> None:
        self.places: list[str] = []
        """Where it was raised, as "file:function"."""
        self._files = tuple(files)
        self._at = at
        self._moment_count = 0

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether the call was interrupted. Its result is dropped."""
        sys.setprofile(self._reached)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    def _reached(self, frame: FrameType, event: str, _: Any) -> None:
        if event in _EVENTS and frame.f_code.co_filename.endswith(self._files):
            self._moment_count += 1
            if self._moment_count - 1 in self._at:
                file = frame.f_code.co_filename.rpartition("/")[2]
                self.places.append(f"{file}:{frame.f_code.co_name}")
                raise KeyboardInterrupt
