"""What all-reduce's codecs cost in accuracy, beside float64.

    python benchmarks/allreduce_error.py [--ranks 2 4 8 16] [--strategies ring tree centralized]
                                         [--codecs fp16 bf16 fp32] [--elements 2097152]
                                         [--json FILE]

The sum of n arrays, each rank with normal data of its own. "even": all elements are of one
magnitude. "uneven": each chunk has its own, from 1e-6 to 1e6, the same on all ranks; then each
chunk is measured by itself, and the worst one counts. Relative L2 is |found - exact| / |exact|;
the maximum is of an element's error, over the root mean square of the exact elements. All ranks
must have the same bits, or the run fails. Ranks are threads of this process, on real connections.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import shardwell
from shardwell.group.schedule.arithmetic import chunk_element_count
from shardwell.group.schedule.plan import Operation, Plan
from shardwell.numerics.codec import SUMMED_CODECS, Float32
from shardwell.placement.slices import Slice
from shardwell_server import LocalCluster

STRATEGIES: dict[str, shardwell.Strategy] = {
    "ring": shardwell.Ring(),
    "tree": shardwell.Tree(),
    "centralized": shardwell.Centralized(),
}
DATA = ("even", "uneven")
MAGNITUDE_EXPONENT_MAX = 6


def chunks(strategy: str, codec: str, rank_count: int, element_count: int) -> list[Slice]:
    """How an all-reduce cuts its array."""
    plan = Plan(
        operation=Operation.ALL_REDUCE,
        strategy=STRATEGIES[strategy],
        rank=0,
        size=rank_count,
        root=0,
        element_count=element_count,
        chunk_element_count=chunk_element_count(codec),
    )
    return [where for where, _, _ in plan.chunks]


def data(rank_count: int, element_count: int, parts: list[Slice]) -> list[Float32]:
    """Each rank's array; each part with a magnitude of its own."""
    magnitudes = np.random.default_rng(0).uniform(-1, 1, len(parts)) * MAGNITUDE_EXPONENT_MAX
    arrays = []
    for rank in range(rank_count):
        array = np.random.default_rng(1 + rank).standard_normal(element_count, np.float32)
        if len(parts) > 1:
            for where, magnitude in zip(parts, magnitudes, strict=True):
                array[where.offset : where.stop] *= np.float32(10.0**magnitude)
        arrays.append(array)
    return arrays


def errors(found: Float32, exact: np.ndarray, parts: list[Slice]) -> tuple[float, float]:
    """Relative L2 and maximum of the worst part."""
    worst_l2 = worst_max = 0.0
    for where in parts:
        true = exact[where.offset : where.stop]
        difference = found[where.offset : where.stop] - true
        norm = np.linalg.norm(true)
        worst_l2 = max(worst_l2, float(np.linalg.norm(difference) / norm))
        peak = float(np.abs(difference).max())
        worst_max = max(worst_max, peak / float(norm / np.sqrt(true.size)))
    return worst_l2, worst_max


def measure(
    groups: list[shardwell.Group],
    threads: ThreadPoolExecutor,
    codec: str,
    arrays: list[Float32],
    parts: list[Slice],
) -> dict[str, float]:
    """One all-reduce of all ranks."""
    exact = np.zeros(arrays[0].size)
    for array in arrays:
        exact += array

    def reduce(group: shardwell.Group, array: Float32) -> None:
        group.all_reduce(array, codec=codec)

    list(threads.map(reduce, groups, arrays))
    for rank, array in enumerate(arrays):
        if array.tobytes() != arrays[0].tobytes():
            raise SystemExit(f"rank {rank} has other bits than rank 0 with {codec}")
    l2, peak = errors(arrays[0], exact, parts)
    return {"relative_l2": l2, "max_over_rms": peak}


def joined(
    name: str, rank_count: int, target: str, threads: ThreadPoolExecutor
) -> list[shardwell.Group]:
    """The ranks of one group."""

    def join(rank: int) -> shardwell.Group:
        return shardwell.join_group(
            f"{name}-{rank_count}", rank, rank_count, STRATEGIES[name], target
        )

    return list(threads.map(join, range(rank_count)))


def rows(args: argparse.Namespace, target: str) -> list[dict[str, Any]]:
    """All figures."""
    found = []
    for rank_count in args.ranks:
        with ThreadPoolExecutor(rank_count) as threads:
            for strategy in args.strategies:
                groups = joined(strategy, rank_count, target, threads)
                for codec in args.codecs:
                    for kind in DATA:
                        parts = [Slice(0, args.elements)]
                        if kind == "uneven":
                            parts = chunks(strategy, codec, rank_count, args.elements)
                        arrays = data(rank_count, args.elements, parts)
                        figures = measure(groups, threads, codec, arrays, parts)
                        row = {"ranks": rank_count, "strategy": strategy, "codec": codec}
                        found.append({**row, "data": kind, **figures})
                list(threads.map(shardwell.Group.close, groups))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    names = list(STRATEGIES)
    parser.add_argument("--strategies", nargs="+", choices=names, default=names)
    codecs = ["fp16", "bf16", "fp32"]
    parser.add_argument("--codecs", nargs="+", choices=list(SUMMED_CODECS), default=codecs)
    parser.add_argument("--elements", type=int, default=2**21)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with LocalCluster(1) as cluster:
        found = rows(args, cluster.target)
    console = Console()
    for figure, title in (("relative_l2", "relative L2"), ("max_over_rms", "maximum / RMS")):
        table = Table(
            title=f"{title} of the error, {args.elements} elements; bits are the same on all ranks",
            title_justify="left",
        )
        table.add_column("", no_wrap=True)
        for rank_count in args.ranks:
            table.add_column(f"{rank_count} ranks", justify="right")
        for strategy in args.strategies:
            for codec in args.codecs:
                for kind in DATA:
                    key = {"strategy": strategy, "codec": codec, "data": kind}
                    values = [row[figure] for row in found if key.items() <= row.items()]
                    label = f"{strategy}, {codec}, {kind}"
                    table.add_row(label, *(f"{value:.1e}" for value in values))
        console.print(table)
    result = {"elements": args.elements, "same_bits": True, "rows": found}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
