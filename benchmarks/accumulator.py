"""Rows a second that the gradient accumulator takes, beside np.add.at on a plain array.

    python benchmarks/accumulator.py [--row-count 1000000] [--dim 64] [--batch 4096] [--rounds 9]
                                     [--data-dir DIR]

Batches of uniform ids, and of Zipf(1.1), and single rows; 1, 2 and 4 threads; locks of 64 and 4096
rows, and one for all. The accumulator is in memory, or in a file of DIR, where it takes back what a
killed process was in the middle of. The peers are plain arrays and one thread, and promise nothing:
`np.add.at` adds up repeats, the bare gather and scatter does not even that. Kinds take turns; of
each, the fastest round counts, because what else the machine does only slows. `apply` is beside the
same on plain arrays whose touched rows are known.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from shardwell_server import MmapGradientAccumulator

POOL_SIZE = 8
"""Batches that take turns, so that rows are not in the cache from the time before."""
SINGLE_COUNT = 500
RATE = 0.01
Batch = tuple[np.ndarray, np.ndarray]
Work = Callable[[Batch], object]


class Kind:
    """One line of the table."""

    def __init__(self, name: str, work: Work, thread_count: int = 1) -> None:
        self.name = name
        self._work = work
        self._thread_count = thread_count
        self.best = 0.0
        """Rows a second in the fastest round."""

    def run(self, batches: list[Batch], threads: ThreadPoolExecutor) -> None:
        """One round: each thread has all batches, in an order of its own."""
        start = threading.Barrier(self._thread_count)

        def act(number: int) -> tuple[float, float]:
            start.wait()
            begin = time.perf_counter()
            for index in range(len(batches)):
                self._work(batches[(index + number) % len(batches)])
            return begin, time.perf_counter()

        times = list(threads.map(act, range(self._thread_count)))
        row_count = self._thread_count * sum(ids.size for ids, _ in batches)
        time_s = max(end for _, end in times) - min(begin for begin, _ in times)
        self.best = max(self.best, row_count / time_s)


def batches_of(args: argparse.Namespace, *, is_zipf: bool) -> list[Batch]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(POOL_SIZE):
        ids = (
            rng.zipf(1.1, args.batch) % args.row_count
            if is_zipf
            else rng.integers(0, args.row_count, args.batch)
        )
        made.append((ids, rng.standard_normal((args.batch, args.dim), np.float32)))
    return made


def gather_and_scatter(plain: np.ndarray, batch: Batch) -> None:
    ids, gradients = batch
    plain[ids] = np.take(plain, ids, axis=0, mode="clip") + gradients


def singles(add: Callable[[int, np.ndarray], object]) -> Work:
    def work(batch: Batch) -> None:
        ids, gradients = batch
        for row, gradient in zip(ids.tolist()[:SINGLE_COUNT], gradients, strict=False):
            add(row, gradient)

    return work


def add_single(plain: np.ndarray, row: int, gradient: np.ndarray) -> None:
    np.add.at(plain, row, gradient)


def batched_kinds(
    accumulators: dict[str, MmapGradientAccumulator],
    plain: np.ndarray,
    thread_counts: tuple[int, ...],
) -> list[Kind]:
    """The peers first."""
    made = [
        Kind("np.add.at", lambda batch: np.add.at(plain, *batch)),
        Kind("bare gather and scatter", lambda batch: gather_and_scatter(plain, batch)),
    ]
    for name, accumulator in accumulators.items():
        for count in thread_counts:

            def work(batch: Batch, accumulator: MmapGradientAccumulator = accumulator) -> None:
                accumulator.accumulate_rows(*batch)

            made.append(Kind(f"{name}, {count} thread{'s' * (count > 1)}", work, count))
    return made


def single_kinds(accumulators: dict[str, MmapGradientAccumulator], plain: np.ndarray) -> list[Kind]:
    """The peer first."""
    return [
        Kind("np.add.at", singles(partial(add_single, plain))),
        *(Kind(name, singles(made.accumulate)) for name, made in accumulators.items()),
    ]


def show(part: str, kinds: list[Kind]) -> dict[str, float]:
    """Prints a part of the table; returns ratios to its first line."""
    print(part)
    for kind in kinds:
        ratio = kind.best / kinds[0].best
        print(f"  {kind.name:42s} {kind.best / 1e6:8.3f} M rows/s {ratio:7.2f}")
    return {kind.name: round(kind.best / kinds[0].best, 2) for kind in kinds}


def apply_kinds(
    name: str, accumulator: MmapGradientAccumulator, plain: np.ndarray, batches: list[Batch]
) -> list[Kind]:
    """Timed here, because each needs a batch to be accumulated before."""
    rows = np.zeros_like(plain)
    bare, applied = Kind("plain arrays", lambda batch: None), Kind(name, lambda batch: None)
    for ids, gradients in [*batches, *batches]:
        distinct = np.unique(ids)
        begin = time.perf_counter()
        rows[distinct] -= RATE * plain[distinct]
        plain[distinct] = 0.0
        bare.best = max(bare.best, distinct.size / (time.perf_counter() - begin))
        accumulator.accumulate_rows(ids, gradients)
        begin = time.perf_counter()
        count = accumulator.apply(RATE, rows)
        applied.best = max(applied.best, count / (time.perf_counter() - begin))
    return [bare, applied]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row-count", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--data-dir", type=Path)
    args = parser.parse_args()
    ratios = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.data_dir)))
        threads = stack.enter_context(ThreadPoolExecutor(4))
        accumulators = {}
        for where in ("memory", "file"):
            for stripe in (64, 4096, args.row_count):
                label = "all" if stripe == args.row_count else stripe
                path = directory / str(stripe) if where == "file" else None
                made = MmapGradientAccumulator(path, args.dim, args.row_count, stripe)
                accumulators[f"{where}, rows_per_lock {label}"] = stack.enter_context(made)
        first = {name: accumulators[name] for name in accumulators if name.endswith(" 64")}
        plain = np.zeros((args.row_count, args.dim), np.float32)
        uniform = batches_of(args, is_zipf=False)
        few = [(ids[:SINGLE_COUNT], gradients) for ids, gradients in uniform]
        size = f"batches of {args.batch} rows of {args.dim}"
        for part, kinds, batches in (
            (f"uniform, {size}", batched_kinds(accumulators, plain, (1, 2, 4)), uniform),
            (f"Zipf, {size}", batched_kinds(first, plain, (1,)), batches_of(args, is_zipf=True)),
            ("single rows, 1 thread", single_kinds(first, plain), few),
        ):
            for _ in range(args.rounds):
                for kind in kinds:
                    kind.run(batches, threads)
            ratios[part] = show(part, kinds)
        for name, accumulator in first.items():
            accumulator.zero_grad()
            part = f"apply of {args.batch} rows of {args.dim}"
            kinds = apply_kinds(name, accumulator, plain, uniform)
            ratios.setdefault(part, {}).update(show(part, kinds))
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
