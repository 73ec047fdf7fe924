"""What a person sees: a live bar on a terminal, a line now and then elsewhere, a closing table."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from shardwell_server.demo.standing import Standing
from shardwell_server.demo.worker import ACCURACY_MIN

if TYPE_CHECKING:
    from shardwell_server.demo.run import DemoConfig, Result

_LINE_INTERVAL_S = 2.0


class Screen:
    """Shows one run. A context manager: the bar stands still when it ends."""

    def __init__(self, config: DemoConfig, console: Console | None = None) -> None:
        self._config = config
        self._console = console or Console(highlight=False)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._line_due_s = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._live,
            expand=True,
        )
        self._row = self._progress.add_task("", total=None, figures="")

    def say(self, what: str) -> None:
        """Tells what is being done."""
        if self._live:
            self._progress.update(self._row, description=what)
        else:
            self._print(what)

    def show(self, standing: Standing, accuracy: float | None, *, last: bool) -> None:
        """Shows where the training stands."""
        step_count, worker_count = self._config.step_count, self._config.process_count
        if standing.loss is None:
            if self._live and standing.ready_count:
                self.say(f"starting workers, {standing.ready_count} of {worker_count} are ready")
            return
        step = f"step {standing.step:>{len(str(step_count))}}/{step_count}"
        figures = [f"loss {standing.loss:.4f}"]
        if accuracy is not None:
            figures.append(f"accuracy {accuracy:.3f}")
        if not last and self._config.sync != "threads":
            figures.append(f"{standing.bytes_per_s / 1e6:5.1f} MB/s")
        if self._live:
            self._progress.update(
                self._row,
                completed=standing.step,
                total=step_count,
                description=step,
                figures="  ".join(figures),
            )
        elif last or (standing.step < step_count and time.monotonic() >= self._line_due_s):
            self._line_due_s = time.monotonic() + _LINE_INTERVAL_S
            self._print("  ".join([step, *figures]))

    def conclude(self, result: Result) -> None:
        """Prints the closing table."""
        standing, config = result.standing, self._config
        right = round(result.accuracy * result.held_out_count)
        colour = "green" if result.passed else "red"
        seconds = standing.training_s or float("nan")
        rows = {
            "held-out accuracy": f"[bold {colour}]{result.accuracy:.3f}[/], {right} of "
            f"{result.held_out_count} digits; {ACCURACY_MIN} is needed",
            "loss": f"{standing.first_loss:.4f} at the first step, {standing.loss:.4f} at the last",
            "steps": f"{config.step_count} by every worker in {standing.training_s:.1f} s, "
            f"{standing.steps_per_s:.1f} a second",
            "sent": _traffic(standing.sent_bytes, seconds),
            "received": _traffic(standing.received_bytes, seconds),
            "codec": f"{config.codec}, {standing.codec_ratio:.2f} times less than float32",
        }
        if config.sync == "threads":
            del rows["sent"], rows["received"], rows["codec"]
        rows |= {
            "in all": f"{result.duration_s:.1f} s, from start to end of all processes",
        }
        table = Table.grid(padding=(0, 3))
        for name, text in rows.items():
            table.add_row(f"[dim]{name}[/]", text)
        self._console.print()
        self._console.print(table)
        self._console.print()

    def __enter__(self) -> Screen:
        self._print(f"[bold]Shardwell[/]: {escape(_described(self._config))}")
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def _print(self, text: str) -> None:
        # Without a terminal, lines are as long as they are: a log is no place to wrap.
        self._console.print(text, soft_wrap=not self._live)


def _described(config: DemoConfig) -> str:
    """What is about to run."""
    if config.sync == "threads":
        return f"{count(config.worker_count, 'thread')} of one process"
    workers = count(config.worker_count, "worker")
    if config.sync != "server":
        shape = {"ring": "in a ring", "tree": "in a tree", "centralized": "around rank 0"}
        return f"{workers} among themselves, {shape[config.sync]}, codec {config.codec}"
    where = count(config.shard_count, "shard") if config.target is None else config.target
    return f"{workers} on {where}, codec {config.codec}, {config.mode}"


def _traffic(count: int, seconds: float) -> str:
    return f"{count / 1e6:.1f} MB by all workers, {count / 1e6 / seconds:.1f} MB/s"


def count(number: int, what: str) -> str:
    """A number of things, in words: "1 shard", "2 shards"."""
    return f"{number} {what}" + ("" if number == 1 else "s")
