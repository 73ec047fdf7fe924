"""Cuts a stream of bytes into lines that may be mixed with those of others. Pure.

Bytes stay bytes: what a program prints need not be text.
"""

from __future__ import annotations

import re

LINE_SIZE_MAX_BYTES = 256 * 1024
"""Longer lines are cut into several, so that a stream without line ends takes no more memory."""
PROGRESS_INTERVAL_S = 1.0
"""A progress bar writes over its line, with a carriage return, many times a second. Among other
programs' lines it can't; the newest state is shown as a line of its own, once in so long."""
_LINE_END_OR_RETURN = re.compile(rb"(\r*\n|\r+)")


class LineCutter:
    """One stream, and what it has said so far of its current line."""

    def __init__(self) -> None:
        self._rest = b""
        """What came after the last line end or carriage return."""
        self._state: bytes | None = None
        """What the line showed before the last carriage return, if that was not told yet."""
        self._is_overwritten = False
        """The current line has had a carriage return."""
        self._told_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """The lines that are complete with `data`, without line ends.

        Args:
            data: What came next, cut anywhere.
            now_s: The time, of any clock that goes forward.
        """
        lines: list[bytes] = []
        data = self._rest + data
        text = data.rstrip(b"\r")  # returns at the end may be the first half of a line end
        held_back = b"\r" if len(text) < len(data) else b""
        *pieces, rest = _LINE_END_OR_RETURN.split(text)
        for shown, separator in zip(pieces[::2], pieces[1::2], strict=True):
            if shown:
                self._state = shown
            if separator.endswith(b"\n"):
                self._tell_line(lines)
            else:
                self._is_overwritten = True
                self._tell_progress(lines, now_s)
        while len(rest) > LINE_SIZE_MAX_BYTES:
            lines.append(rest[:LINE_SIZE_MAX_BYTES])
            rest = rest[LINE_SIZE_MAX_BYTES:]
        self._rest = rest + held_back
        return lines

    def end(self) -> list[bytes]:
        """What was not told when the stream ended: a last line without its end."""
        lines: list[bytes] = []
        self._state = self._rest.rstrip(b"\r") or self._state
        if self._state is not None:
            self._tell_line(lines)
        self._rest = b""
        return lines

    def _tell_line(self, lines: list[bytes]) -> None:
        if self._state is not None:
            for start in range(0, len(self._state), LINE_SIZE_MAX_BYTES):
                lines.append(self._state[start : start + LINE_SIZE_MAX_BYTES])
        elif not self._is_overwritten:
            lines.append(b"")
        self._state, self._is_overwritten = None, False

    def _tell_progress(self, lines: list[bytes], now_s: float) -> None:
        if self._state is not None and now_s - self._told_s >= PROGRESS_INTERVAL_S:
            lines.append(self._state[:LINE_SIZE_MAX_BYTES])
            self._state, self._told_s = None, now_s
