"""The workers' output, line by line, each with its rank in front."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import IO

import click

from shardwell_server.launch.lines import LineCutter
from shardwell_server.terminal import is_plain

_READ_SIZE_BYTES = 64 * 1024
_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")


class RankOutput:
    """One of a worker's two streams.

    Args:
        rank: Whose.
        source: The reading end of a pipe; it is set to not block, and closed at its end.
        sink_fd: Where its lines go.
        is_colored: The rank in front has a color of its own.
    """

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
        """For selectors."""
        return self._source.fileno()

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return not self._source.closed

    def pass_on(self) -> bool:
        """Writes the lines of what can be read at once; whether anything was there.

        Raises:
            BrokenPipeError: nobody reads our output any more.
        """
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
        """Writes what is left, a last line without its end too. Safe to repeat."""
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
                raise BrokenPipeError(f"can't write the output: {error.strerror}") from error


def shows_colors(sink_fd: int) -> bool:
    """Whether it is a terminal, whose user has not said no."""
    with contextlib.suppress(OSError):
        return os.isatty(sink_fd) and not is_plain()
    return False
