"""Passes over memory: native code beside NumPy with numkong, in turns, on one thread.

    python benchmarks/arithmetic.py [--megabytes 64] [--rounds 15]

Float32 of N MB in chunks of half a million elements, as fp16: far more than caches hold, so that
what is measured is what a step pays. "close" is a step's end on a shard: the last gradient is
decoded, added to the sum, averaged, and the optimizer updates weights and state. "One after the
other" and "in one pass" do the same: what a worker does with a gradient (look for NaN, encode,
CRC), a shard with what came (copy, CRC, look), and a worker with weights (copy, CRC, decode).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from fastcrc import crc32
from rich.console import Console
from rich.table import Table

from shardwell import SGD, Adam
from shardwell.numerics import native
from shardwell.numerics.codec import CODECS, peak_of
from shardwell.numerics.elementwise import Arrays, Operations, add_scaled, run
from shardwell.numerics.scratch import Scratch
from shardwell.numerics.update_rules import GRADIENT, SECOND_SLOT, UpdateRule

ELEMENT_COUNT = 512 * 1024
PAYLOAD, TOTAL = SECOND_SLOT + 1, SECOND_SLOT + 2


def work(chunk_count: int) -> dict[str, Callable[[int], object]]:
    """What is done with a chunk, by name."""
    random = np.random.default_rng(0)
    values, weights, total = (
        [random.standard_normal(ELEMENT_COUNT, np.float32) for _ in range(chunk_count)]
        for _ in range(3)
    )
    first, second = (
        [np.ones(ELEMENT_COUNT, np.float32) for _ in range(chunk_count)] for _ in range(2)
    )
    payloads = [np.zeros(2 * ELEMENT_COUNT, np.uint8) for _ in range(chunk_count)]
    codec, scratch = CODECS["fp16"], Scratch()
    for value, payload in zip(values, payloads, strict=True):
        codec.encode(value, payload, scratch)

    def close(rule: UpdateRule) -> Callable[[int], object]:
        mean = codec.reads(GRADIENT, PAYLOAD, 0.5) + add_scaled(GRADIENT, TOTAL, 0.5)
        updates: Operations = mean + rule.operations(update_count=9, learning_rate=1e-3)

        def act(index: int) -> object:
            slots = first[index], second[index]
            arrays = Arrays(weights[index], None, None, *slots, payloads[index], total[index])
            return run(updates, arrays, 0, ELEMENT_COUNT)

        return act

    copies = np.zeros(2 * ELEMENT_COUNT, np.uint8)

    def crc(payload: np.ndarray) -> int:
        return int(crc32.iscsi(payload.data, 0))

    def gives_in_turns(index: int) -> object:
        peak = peak_of(values[index])
        return codec.encode(values[index], payloads[index], scratch, peak=peak), crc(
            payloads[index]
        )

    def takes_in_turns(index: int) -> object:
        np.copyto(copies, payloads[index])
        return crc(copies), codec.peak(copies, 0)

    def reads_in_turns(index: int) -> object:
        np.copyto(copies, payloads[index])
        crc(copies)
        return codec.decode(copies, 0, total[index])

    return {
        "give, one after the other": gives_in_turns,
        "give, in one pass": lambda k: codec.encode(
            values[k], payloads[k], scratch, is_exact=True, start=lambda _: 0
        ),
        "take, one after the other": takes_in_turns,
        "take, in one pass": lambda k: codec.take(payloads[k], copies, 0),
        "read, one after the other": reads_in_turns,
        "read, in one pass": lambda k: codec.decode_checked(
            payloads[k], 0, total[k], 0, may_change=True
        ),
        "look for NaN": lambda k: peak_of(values[k]),
        "encode": lambda k: codec.encode(values[k], payloads[k], scratch),
        "look at a payload": lambda k: codec.peak(payloads[k], 0),
        "decode": lambda k: codec.decode(payloads[k], 0, values[k]),
        "decode and add": lambda k: codec.decode_add(payloads[k], 3.0, total[k], 1.0, total[k]),
        "close, SGD": close(UpdateRule(SGD(learning_rate=1e-3))),
        "close, Adam": close(UpdateRule(Adam(learning_rate=1e-3))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    library = native.LIBRARY
    if library is None:
        raise SystemExit(f"nothing to compare: {native.describe()}")
    chunk_count = max(args.megabytes * 10**6 // 4 // ELEMENT_COUNT, 1)
    table = Table("", "NumPy ms", "native ms", "native / NumPy", title=native.describe())
    for name, act in work(chunk_count).items():
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(args.rounds):
            for is_native, kept in times.items():
                native.LIBRARY = library if is_native else None
                start = time.perf_counter()
                for index in range(chunk_count):
                    act(index)
                kept.append((time.perf_counter() - start) * 1e3)
        native.LIBRARY = library
        by_numpy, natively = statistics.median(times[False]), statistics.median(times[True])
        table.add_row(name, f"{by_numpy:.1f}", f"{natively:.1f}", f"{natively / by_numpy:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
