"""A request to stop, as signals bring it: noted at once, acted on where it does no harm.

A handler that sets a `threading.Event` can deadlock with the thread that waits for it; here it
writes one number, and the demo's loop looks at it ten times a second.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StoppedError(Exception):
    """The demo was asked to stop."""


class StopRequest:
    """SIGINT and SIGTERM. Made in the main thread, which then takes them for good."""

    def __init__(self) -> None:
        self.signal_number = 0
        """The signal that came first; 0: none."""
        self._raises = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    @property
    def exit_code(self) -> int:
        """As shells have it: 130 after Ctrl-C."""
        return 128 + self.signal_number

    def check(self) -> None:
        """Raises StoppedError if a signal came."""
        if self.signal_number:
            raise StoppedError

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A block that a signal breaks off wherever it is: slow, and with nothing to clean up."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        asked_before = self.signal_number != 0
        self.signal_number = self.signal_number or number
        # Who asks twice does not want to wait for the end of a clean stop; child processes end
        # with this one in any case.
        if self._raises or asked_before:
            raise StoppedError
