"""The display of a run: a live bar on a terminal, a line now and then elsewhere, tables.

Where all workers stand is worked out from what they report. Nothing here knows what is run: tasks
have displays of their own, made of this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from shardwell_server import terminal
from shardwell_server.demo.workers import Member

_LINE_INTERVAL_S = 2.0
_WINDOW_S = 2.0


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """All workers together at one moment."""

    ready_count: int
    step: int
    step_sum: int
    loss: float | None
    """The mean of the running workers' latest, or of all where these made no step."""
    first_loss: float | None
    sent_bytes: int
    received_bytes: int
    sent_value_bytes: int
    """Bytes that float32 would have taken for the sent values."""
    bytes_per_s: float
    training_s: float
    outer: Mapping[str, float] = field(default_factory=dict)
    """Outer training's counts, the least of workers, and seconds, their mean."""

    @property
    def steps_per_s(self) -> float:
        """Each worker's steps a second in the whole training; the first one starts the clock."""
        return (self.step - 1) / self.training_s if self.step > 1 and self.training_s > 0 else 0.0

    @property
    def codec_ratio(self) -> float:
        """The bytes that float32 would have taken, for each byte sent."""
        return self.sent_value_bytes / self.sent_bytes if self.sent_bytes else 0.0


class Observer:
    """Looks at all workers, and remembers the last two seconds for the rate."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._window: deque[tuple[float, int]] = deque()

    def look(self, now_s: float) -> TrainingState:
        """Returns the state of all workers; `now_s` is monotonic time."""
        members = self._members
        living = [member for member in members if not member.is_let_go]
        reports = [member.latest for member in members if member.latest is not None]
        sent = sum(report.sent_bytes for report in reports)
        received = sum(report.received_bytes for report in reports)
        self._window.append((now_s, sent + received))
        while self._window[0][0] < now_s - _WINDOW_S:
            self._window.popleft()
        then_s, earlier = self._window[0]
        started_s = [member.first_step_s for member in members if member.first_step_s is not None]
        return TrainingState(
            ready_count=len(reports),
            step=min(member.step for member in living),
            step_sum=sum(member.step for member in members),
            loss=_mean([m.loss for m in living], [m.loss for m in members]),
            first_loss=_mean([member.first_loss for member in members]),
            sent_bytes=sent,
            received_bytes=received,
            sent_value_bytes=sum(report.sent_value_bytes for report in reports),
            bytes_per_s=(sent + received - earlier) / (now_s - then_s) if now_s > then_s else 0.0,
            outer=_outer([report.outer for report in reports]),
            training_s=max(m.heard_s for m in members) - min(started_s) if started_s else 0.0,
        )


def _outer(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not reports or not all(reports):
        return {}
    return {
        name: sum(report[name] for report in reports) / len(reports)
        if name.endswith("_s")
        else min(report[name] for report in reports)
        for name in reports[0]
    }


def _mean(*choices: Sequence[float | None]) -> float | None:
    for choice in choices:
        known = [value for value in choice if value is not None]
        if known:
            return sum(known) / len(known)
    return None


class Progress:
    """Bars, or lines in their place. A context manager: bars stay as they are when it ends."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or terminal.console()
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
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
        """Begins another bar below, for the next task; the last one stays as it is."""
        self._row = self._bar.add_task("", total=None, figures="")

    def say(self, what: str) -> None:
        """Shows a task in words."""
        if self.is_live:
            self._bar.update(self._row, description=what)
        else:
            self.print(what)

    def show(
        self, what: str, completed: int, total: int, figures: Sequence[str], *, last: bool
    ) -> None:
        """Shows progress; as a line at its end, and every two seconds before."""
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
        """Prints a line, with rich's markup, above the bar if there is one."""
        # Without a terminal, lines are as long as they are: a log is no place to wrap.
        self.console.print(text, soft_wrap=not self.is_live)

    def print_tables(self, *tables: Sequence[Sequence[str]]) -> None:
        """Prints tables of rows: a name, and what it is, in several columns; with rich's markup."""
        self.console.print()
        for rows in tables:
            table = Table.grid(padding=(0, 3))
            for name, *texts in rows:
                table.add_row(f"[dim]{name}[/]", *texts)
            self.console.print(table)
            self.console.print()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def count(number: int, what: str) -> str:
    """Formats a number of things: "1 shard", "2 shards"."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def traffic(byte_count: int, seconds: float) -> str:
    """Formats the bytes of one direction for a closing table."""
    return f"{byte_count / 1e6:.1f} MB by all workers, {byte_count / 1e6 / seconds:.1f} MB/s"
