"""What it costs to make an update of mapped weights whole or not at all, mechanism by mechanism.

    python benchmarks/crash_safety.py [--megabytes 64] [--data-dir DIR] [--rounds 7]

One thread updates every block of a mapped float32 file, weights -= rate * gradient, the gradient in
cache, as the last contribution of a step does. Rows take turns; the ratio is to plain memory.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fastcrc import crc32

from shardwell.numerics.codec import Float32
from shardwell.numerics.elementwise import Code, Operation, add_scaled, blocks, run
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT

RATE = -0.01
UPDATE = (Operation(Code.COPY, 2, 1), *add_scaled(2, 0, RATE))
CHUNK_ELEMENT_COUNT = 8 * BLOCK_ELEMENT_COUNT
"""As many as 1 MiB of fp16."""


def mapped(path: Path, count: int) -> Float32:
    path.write_bytes(bytes(4 * count))
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 4 * count), np.float32)


def update(weights: Float32, gradient: Float32, into: Float32) -> None:
    run(UPDATE, (gradient, weights, into), 0, into.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    count = args.megabytes * 10**6 // 4
    gradient = np.ones(BLOCK_ELEMENT_COUNT, np.float32)
    with tempfile.TemporaryDirectory(dir=args.data_dir) as directory:
        memory = np.zeros(count, np.float32)
        weights = mapped(Path(directory) / "weights", count)
        other = mapped(Path(directory) / "other", count)
        undo = mapped(Path(directory) / "undo", CHUNK_ELEMENT_COUNT)

        def in_place(array: Float32) -> Callable[[], None]:
            def run() -> None:
                for start, stop in blocks(count):
                    block = array[start:stop]
                    update(block, gradient[: block.size], block)

            return run

        def with_undo(*, crc: bool) -> Callable[[], None]:
            def run() -> None:
                for start, stop in blocks(count):
                    block = weights[start:stop]
                    saved = start % CHUNK_ELEMENT_COUNT
                    np.copyto(undo[saved : saved + block.size], block)
                    update(block, gradient[: block.size], block)
                    if crc:
                        crc32.iscsi(block.view(np.uint8).data)

            return run

        def other_copy() -> None:
            for start, stop in blocks(count):
                block = weights[start:stop]
                update(block, gradient[: block.size], other[start : start + block.size])

        rows: dict[str, Callable[[], None]] = {
            "plain memory, in place": in_place(memory),
            "mapped, in place (not safe)": in_place(weights),
            "mapped, undo area": with_undo(crc=False),
            "mapped, undo area, CRC32C": with_undo(crc=True),
            "mapped, two copies in turns": other_copy,
        }
        times: dict[str, list[float]] = {row: [] for row in rows}
        for number in range(args.rounds + 1):
            for row, run in rows.items():
                start = time.perf_counter()
                run()
                if number:
                    times[row].append(time.perf_counter() - start)
    medians = {row: statistics.median(values) for row, values in times.items()}
    floor = medians["plain memory, in place"]
    for row, value in medians.items():
        print(f"{row:32s} {value * 1e3:7.1f} ms {value / floor:6.2f}")
    print(json.dumps({row: round(value / floor, 3) for row, value in medians.items()}))


if __name__ == "__main__":
    main()
