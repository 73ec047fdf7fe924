"""Outer training (DiLoCo): what it sends, how fast it is on slow links, what a kill costs.

    python benchmarks/outer.py [PART ...] [--torchft-python PYTHON] [--json FILE]

Parts, all where none is named; the bound ends a part that takes longer:

    bytes       what a learner sends and receives, beside a synchronous exchange in fp16
    link        inner steps a second on links of 1000, 100, 50 and 10 Mbit/s with 20 ms, beside a
                synchronous exchange in fp16; needs Linux and root
    hidden      the part of an outer step's transfer that inner steps hide on 100 Mbit/s; needs
                Linux and root
    kills       what 8 learners train, one of which is killed every 20 s, beside the same without
    torchft     bytes, and seconds that a kill costs, beside torchft's DiLoCo over gloo
    digits      how well learners learn digits
    characters  how well they learn characters

A row is what was measured, the goal and the figure. All processes and namespaces that this makes
end with it, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from outer import kills, links, peer, traffic
from outer.rows import Row
from shardwell_server.processes import signals


class Part(NamedTuple):
    """A part of the benchmark."""

    measure: Callable[[argparse.Namespace], Iterable[Row]]
    bound_s: int


class TooLongError(BaseException):
    """A part has taken all its time. No Exception, so that nothing on its way handles it."""


def digits(args: argparse.Namespace) -> list[Row]:
    """How well learners learn digits."""
    from outer import quality

    return quality.digits()


def characters(args: argparse.Namespace) -> list[Row]:
    """How well learners learn characters."""
    from outer import quality

    return quality.characters()


PARTS = {
    "bytes": Part(lambda args: traffic.measure(), 120),
    "link": Part(lambda args: links.link(), 420),
    "hidden": Part(lambda args: links.hidden(), 240),
    "kills": Part(lambda args: kills.measure(), 420),
    "torchft": Part(lambda args: peer.measure(args.torchft_python), 420),
    "digits": Part(digits, 600),
    "characters": Part(characters, 900),
}


@contextlib.contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """A block that TooLongError ends."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    earlier = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


def measured(name: str, args: argparse.Namespace) -> list[Row]:
    """The rows of a part; one that says so where it has failed, or took too long."""
    part = PARTS[name]
    began_s = time.monotonic()
    print(f"{name}: at most {part.bound_s} s", file=sys.stderr, flush=True)
    rows: list[Row] = []
    try:
        with bounded(part.bound_s):
            for row in part.measure(args):
                rows.append(row)
                print(f"  {row.what}: {row.found}", file=sys.stderr, flush=True)
    except TooLongError:
        rows.append(Row(name, "", f"did not end within {part.bound_s} s"))
    except Exception as error:
        rows.append(Row(name, "", f"failed: {type(error).__name__}: {error}"))
    print(f"{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return rows


def show(console: Console, rows: list[Row]) -> None:
    """Prints a table."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("what", "goal", "measured"):
        table.add_column(title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--torchft-python", default=sys.executable, help="an interpreter with torchft"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return args


def main() -> None:
    """Measures what is asked for."""
    args = parse()
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}"
    )
    rows: list[Row] = []
    try:
        for name in PARTS:
            if not args.parts or name in args.parts:
                rows += measured(name, args)
    finally:
        show(console, rows)
        if args.json:
            args.json.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")


def with_one_thread() -> None:
    """Goes on with one thread for NumPy's and torch's products: learners are threads already.

    Such libraries look at their variables when they are loaded, which they are by now.
    """
    missing = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"} - set(os.environ)
    if missing:
        own = dict.fromkeys(missing, "1")
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **own})


if __name__ == "__main__":
    with_one_thread()
    signals.break_off()
    try:
        main()
    except signals.StoppedError as stopped:
        sys.exit(stopped.exit_code)
