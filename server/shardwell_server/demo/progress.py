"""How a run is shown: a live bar on a terminal, a line now and then elsewhere, tables at the end.

Knows nothing of what is run: tasks have screens of their own, made of this.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from shardwell_server import terminal

_LINE_INTERVAL_S = 2.0


class Progress:
    """Bars, or lines in their place. A context manager: bars stand still when it ends."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or terminal.console()
        """Where it is shown."""
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        """Whether there is a bar."""
        self._line_due_s = 0.0
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            disable=not self.is_live,
            expand=True,
        )
        self.add_bar()

    def add_bar(self) -> None:
        """Begins another bar below, for what comes next; the last one stays as it is."""
        self._row = self._bar.add_task("", total=None, figures="")

    def say(self, what: str) -> None:
        """Tells what is being done."""
        if self.is_live:
            self._bar.update(self._row, description=what)
        else:
            self.print(what)

    def show(
        self, what: str, completed: int, total: int, figures: Sequence[str], *, last: bool
    ) -> None:
        """Shows how far something is; as a line at its end, and every two seconds before."""
        if self.is_live:
            self._bar.update(
                self._row,
                completed=completed,
                total=total,
                description=what,
                figures="  ".join(figures),
            )
        elif last or (completed < total and time.monotonic() >= self._line_due_s):
            self._line_due_s = time.monotonic() + _LINE_INTERVAL_S
            self.print("  ".join([what, *figures]))

    def print(self, text: str) -> None:
        """A line, with rich's markup, above the bar if there is one."""
        # Without a terminal, lines are as long as they are: a log is no place to wrap.
        self.console.print(text, soft_wrap=not self.is_live)

    def print_tables(self, *tables: Sequence[Sequence[str]]) -> None:
        """Tables of rows: a name, and what it is, in one column or several; with rich's markup."""
        self.console.print()
        for rows in tables:
            table = Table.grid(padding=(0, 3))
            for name, *texts in rows:
                table.add_row(f"[dim]{name}[/]", *texts)
            self.console.print(table)
            self.console.print()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()


def count(number: int, what: str) -> str:
    """A number of things, in words: "1 shard", "2 shards"."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def traffic(byte_count: int, seconds: float) -> str:
    """What went one way, as a closing table has it."""
    return f"{byte_count / 1e6:.1f} MB by all workers, {byte_count / 1e6 / seconds:.1f} MB/s"
