"""Outputs of commands: a terminal, a pipe without a reader, a full device, nothing.

A command's work does not depend on whether its output can be written: failed output is dropped,
with one message on standard error, and exit code 0 becomes 141 at the end, which shells give a
program whose output is no longer read. `$NO_COLOR` takes away all escape sequences, not colours
alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

OUTPUT_LOST_CODE = 141
_STDOUT_FD, _STDERR_FD = 1, 2
_PIPE_WIDTH = 200
"""The columns without a terminal: nothing is cut off or wrapped."""
_WHOLE = ("address", "state")
"""Columns that are copied or looked for as one word: a narrow terminal folds others first."""


class _Output(io.FileIO):
    """A file descriptor that is written to as long as it takes bytes."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.is_lost = False
        """Whether something could not be written."""

    def write(self, data: Any, /) -> int:
        """Takes all bytes, as far as the writer knows."""
        if not self.is_lost:
            try:
                return super().write(data)
            except OSError as error:
                self.is_lost = True
                # Who ends first in a pipe, as `head` does, has read what it wanted.
                if self.fileno() != _STDERR_FD and not isinstance(error, BrokenPipeError):
                    self._tell(error)
        return memoryview(data).nbytes

    @staticmethod
    def _tell(error: OSError) -> None:
        words = f"shardwell: can't write to standard output: {error.strerror}\n"
        with contextlib.suppress(OSError):
            os.write(_STDERR_FD, words.encode())


class Outputs:
    """The standard output and error of this process, in place of `sys.stdout` and `sys.stderr`."""

    def __init__(self) -> None:
        for fd in range(_STDERR_FD + 1):
            with contextlib.suppress(OSError):
                os.fstat(fd)
                continue
            # Else the next file that is opened would be written to as standard output.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        self._stdout, self._stderr = _Output(_STDOUT_FD), _Output(_STDERR_FD)
        sys.stdout = _text(self._stdout, sys.stdout)
        sys.stderr = _text(self._stderr, sys.stderr)

    def final_code(self, code: int) -> int:
        """Returns the command's exit code, once its output is written."""
        sys.stdout.flush()
        return OUTPUT_LOST_CODE if code == 0 and self._stdout.is_lost else code


def _text(output: _Output, replaced: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=getattr(replaced, "encoding", None),
        errors=getattr(replaced, "errors", None),
        line_buffering=True,
    )


def is_plain() -> bool:
    """Returns True if the user wants no escape sequences, on a terminal too."""
    return bool(os.environ.get("NO_COLOR"))


def console() -> Console:
    """Makes the console of commands' tables and bars."""
    from rich.console import Console

    return Console(
        highlight=False,
        force_terminal=False if is_plain() else None,
        width=None if os.isatty(_STDOUT_FD) else _PIPE_WIDTH,
    )


def legend(words: str) -> Text:
    """Makes a dim line under a table, which explains its columns."""
    from rich.text import Text

    return Text(words, style="dim")


def table(title: str, *columns: str) -> Table:
    """Makes a table that fits a narrow terminal; a column that begins with ">" has numbers.

    Its title, if any, is wrapped to its width.
    """
    from rich import box  # not above: `shardwell health` needs little
    from rich.table import Table

    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        numeric = column.startswith(">")
        made.add_column(
            column.removeprefix(">"),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=column in _WHOLE,
        )
    return made
