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


class Interrupt:
    """Raises KeyboardInterrupt once, at a moment of some files' code, in this thread.

    Args:
        files: Ends of their names.
        at: Number of the moment, from 0, in the order in which they come.
    """

    def __init__(self, files: Collection[str], at: int) -> None:
        self.place = ""
        """Where it was raised, as "file:function"; "": there were fewer moments."""
        self._files = tuple(files)
        self._left = at

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether the call was interrupted. Its result is dropped."""
        self.begin()
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    def begin(self) -> None:
        """Counts from here on. The caller ends that by `sys.setprofile(None)`."""
        sys.setprofile(self._reached)

    def _reached(self, frame: FrameType, event: str, _: Any) -> None:
        if event in _EVENTS and frame.f_code.co_filename.endswith(self._files):
            self._left -= 1
            if self._left < 0:
                file = frame.f_code.co_filename.rpartition("/")[2]
                self.place = f"{file}:{frame.f_code.co_name}"
                raise KeyboardInterrupt  # which ends the counting, too
