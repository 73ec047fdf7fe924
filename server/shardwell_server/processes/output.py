"""The workers' output, cut into lines, each with its rank in front.

Bytes stay bytes: what a program prints need not be text.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from typing import IO

import click

from shardwell_server.terminal import is_plain

LINE_SIZE_MAX_BYTES = 256 * 1024
"""Longer lines are cut into several, so that a stream without line ends takes no more memory."""
PROGRESS_INTERVAL_S = 1.0
"""A progress bar overwrites its line, which it can't among other lines: its newest state is a line
of its own, once in so long."""
_LINE_END_OR_RETURN = re.compile(rb"(\r*\n|\r+)")
_READ_SIZE_BYTES = 64 * 1024
_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")


class LineCutter:
    """The lines of one stream, with the rest of its current line."""

    def __init__(self) -> None:
        self._rest = b""
        self._state: bytes | None = None
        """The line before its last carriage return, if that was not printed yet."""
        self._is_overwritten = False
        self._told_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Returns the lines that `data` completes, without line ends; `now_s` is of any clock."""
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
        """Returns the rest when the stream ended: a last line without its end."""
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


class RankOutput:
    """One of a worker's two streams; `source` is set to not block, and closed at its end."""

    def __init__(self, rank: int, source: IO[bytes], sink_fd: int, *, is_colored: bool) -> None:
        prefix = f"[{rank}]"
        if is_colored:
            prefix = click.style(prefix, fg=_COLORS[rank % len(_COLORS)])
        self._prefix = f"{prefix} ".encode()
        self._source = source
        self._sink_fd = sink_fd
        self._cutter = LineCutter()
        os.set_blocking(source.fileno(), False)

    def fileno(self) -> int:
        """Returns the descriptor, for selectors."""
        return self._source.fileno()

    @property
    def is_open(self) -> bool:
        """True if more may come."""
        return not self._source.closed

    def pass_on(self) -> bool:
        """Writes the lines of all bytes that wait; returns True if any did."""
        try:
            data = os.read(self.fileno(), _READ_SIZE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return True
        self._write(self._cutter.feed(data, time.monotonic()))
        return True

    def close(self) -> None:
        """Closes it, and writes the rest: a last line without its end too. Safe to repeat."""
        if self.is_open:
            self._source.close()
            self._write(self._cutter.end())

    def discard(self) -> None:
        """Closes it without writing."""
        self._source.close()

    def _write(self, lines: list[bytes]) -> None:
        # Whole lines at once: other processes may write to the same terminal.
        data = memoryview(b"".join(b"%b%b\n" % (self._prefix, line) for line in lines))
        while data:
            try:
                data = data[os.write(self._sink_fd, data) :]
            except BlockingIOError:  # another program has set our terminal to not block
                select.select([], [self._sink_fd], [])
            except OSError as error:  # such as EIO, of a terminal that is gone
                raise BrokenPipeError(
                    f"can't write to standard output: {error.strerror}"
                ) from error


def shows_colors(sink_fd: int) -> bool:
    """Returns True for a terminal, unless its user wants no colors."""
    with contextlib.suppress(OSError):
        return os.isatty(sink_fd) and not is_plain()
    return False
