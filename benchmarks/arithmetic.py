"""Passes over memory: native code beside NumPy, in turns, on one thread.

    python benchmarks/arithmetic.py [--megabytes 64] [--rounds 15]

Float32 of N MB in chunks of half a million elements, as fp16: far more than caches hold, so that
what is measured is what a step pays. "close" is a step's end on a shard: the last gradient is
decoded, added to the sum, averaged, and the optimizer updates weights and state. "One after the
other" and "in one pass" do the same: what a worker does with a gradient (look for NaN, encode,
CRC), a shard with what came (copy, CRC, look), and a worker with weights (copy, CRC, decode).

Then all passes of a step of two workers and their shards, by SGD, on one thread: as it is done,
with payloads of fp16 in shared memory, and as it could be, with float32 there, rounded to fp16 by
who reads it; of the caller's arrays, and of arrays that lie in that memory.
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
from shardwell.numerics.codec import CODECS, GROUP_BLOCK_SIZE
from shardwell.numerics.elementwise import (
    Code,
    Operation,
    Operations,
    add_scaled,
    run,
    run_checked,
)
from shardwell.numerics.update_rules import GRADIENT, SECOND_SLOT, TEMPORARY, UpdateRule

ELEMENT_COUNT = 512 * 1024
PAYLOAD, TOTAL = SECOND_SLOT + 1, SECOND_SLOT + 2


def work(chunk_count: int) -> dict[str, Callable[[int], object]]:
    """The kinds of work on a chunk, by name."""
    random = np.random.default_rng(0)
    values, weights, total = (
        [random.standard_normal(ELEMENT_COUNT, np.float32) for _ in range(chunk_count)]
        for _ in range(3)
    )
    first, second = (
        [np.ones(ELEMENT_COUNT, np.float32) for _ in range(chunk_count)] for _ in range(2)
    )
    codec = CODECS["fp16"]
    narrow = codec.encoded_bytes(ELEMENT_COUNT)
    payloads = [np.zeros(narrow, np.uint8) for _ in range(chunk_count)]
    for value, payload in zip(values, payloads, strict=True):
        codec.encode(value, payload)
    looks = (Operation(Code.LOOK_32, 0, 0),)

    def close(rule: UpdateRule) -> Callable[[int], object]:
        mean = codec.reads(GRADIENT, PAYLOAD, 0.5) + add_scaled(GRADIENT, TOTAL, 0.5)
        updates: Operations = mean + rule.operations(update_count=9, learning_rate=1e-3)

        def act(index: int) -> object:
            slots = first[index], second[index]
            arrays = (weights[index], None, None, *slots, payloads[index], total[index])
            return run(updates, arrays, 0, ELEMENT_COUNT)

        return act

    copies = np.zeros(narrow, np.uint8)

    def crc(payload: np.ndarray) -> int:
        return int(crc32.iscsi(payload.data, 0))

    def gives_in_turns(index: int) -> object:
        run(looks, (values[index],), 0, ELEMENT_COUNT)
        return codec.encode(values[index], payloads[index]), crc(payloads[index])

    def takes_in_turns(index: int) -> object:
        np.copyto(copies, payloads[index])
        return crc(copies), codec.peak(copies)

    def reads_in_turns(index: int) -> object:
        np.copyto(copies, payloads[index])
        crc(copies)
        return codec.decode(copies, total[index])

    return {
        "give, one after the other": gives_in_turns,
        "give, in one pass": lambda k: codec.encode(values[k], payloads[k], crc=0),
        "take, one after the other": takes_in_turns,
        "take, in one pass": lambda k: codec.take(payloads[k], copies, 0),
        "read, one after the other": reads_in_turns,
        "read, in one pass": lambda k: codec.decode_checked(
            payloads[k], total[k], 0, may_change=True
        ),
        "look for NaN": lambda k: run(looks, (values[k],), 0, ELEMENT_COUNT),
        "encode": lambda k: codec.encode(values[k], payloads[k]),
        "look at a payload": lambda k: codec.peak(payloads[k]),
        "decode": lambda k: codec.decode(payloads[k], values[k]),
        "decode and add": lambda k: codec.decode_add(payloads[k], 3.0, total[k], 1.0, total[k]),
        "close, SGD": close(UpdateRule(SGD(learning_rate=1e-3))),
        "close, Adam": close(UpdateRule(Adam(learning_rate=1e-3))),
    }


def steps(chunk_count: int) -> dict[str, Callable[[int], object]]:
    """A chunk's way through a step of two workers, by what lies in shared memory."""
    random = np.random.default_rng(0)

    def arrays(count: int) -> list[np.ndarray]:
        return [random.standard_normal(count, np.float32) for _ in range(chunk_count)]

    gradients, results = (
        [arrays(ELEMENT_COUNT) for _ in range(2)],
        [arrays(ELEMENT_COUNT) for _ in range(2)],
    )
    weights = arrays(ELEMENT_COUNT)
    shared = [[each.view(np.uint8) for each in arrays(ELEMENT_COUNT)] for _ in range(2)]
    copies = [np.empty(4 * ELEMENT_COUNT, np.uint8) for _ in range(2)]
    codec = CODECS["fp16"]
    narrow = codec.encoded_bytes(ELEMENT_COUNT)
    answer = np.empty(narrow, np.uint8)
    firsts = [np.zeros(narrow, np.uint8) for _ in range(chunk_count)]
    update = UpdateRule(SGD(learning_rate=1e-3)).operations(update_count=9, learning_rate=1e-3)
    mean = codec.reads(GRADIENT, PAYLOAD, 0.5) + codec.reads(TEMPORARY, TOTAL, 1.0)
    mean += add_scaled(GRADIENT, TEMPORARY, 0.5)

    def narrow_step(index: int) -> None:
        for rank in range(2):
            codec.encode(gradients[rank][index], shared[rank][index][:narrow], crc=0)
            codec.take(shared[rank][index][:narrow], copies[rank][:narrow], 0)
        run(codec.copies(0, 1), (firsts[index], copies[0][:narrow]), 0, ELEMENT_COUNT)
        places = (weights[index], *(None,) * (PAYLOAD - 1), copies[1][:narrow], firsts[index])
        run(mean + update, places, 0, ELEMENT_COUNT)
        codec.encode(weights[index], answer, crc=0)
        for rank in range(2):
            shared[rank][index][:narrow] = answer
            codec.decode_checked(
                shared[rank][index][:narrow], results[rank][index], 0, may_change=True
            )

    look, copy, check = (
        Operation(Code.LOOK_32, 0, 1),
        Operation(Code.COPY_32, 1, 2),
        Operation(Code.CHECK_32, 0, 1),
    )
    given, first, second, other = 2, 3, 4, 5

    def rounded(to: int, source: int, through: int) -> Operations:
        writes = Operation(Code.WRITE_FP16, through, source, divisor=float(GROUP_BLOCK_SIZE))
        return (writes, *codec.reads(to, through, 1.0))

    combined = (
        *rounded(GRADIENT, first, other),
        *rounded(given, second, other),
        *add_scaled(GRADIENT, given),
        Operation(Code.SCALE, GRADIENT, factor=0.5),
        *update,
        *rounded(6, 0, other),
        Operation(Code.COPY, 7, 6),
        Operation(Code.CHECK_32, 0, 6),
    )

    def wide_step(index: int, *, is_ours: bool) -> None:
        for rank in range(2):
            theirs, memory = gradients[rank][index].view(np.uint8), shared[rank][index]
            if is_ours:
                run_checked((look, check), (None, memory), 0, ELEMENT_COUNT, 0)
            else:
                run_checked((copy, look, check), (None, memory, theirs), 0, ELEMENT_COUNT, 0)
            run_checked((copy, check), (None, copies[rank], memory), 0, ELEMENT_COUNT, 0)
        answers = [shared[rank][index].view(np.float32) for rank in range(2)]
        read = [each.view(np.float32) for each in copies]
        places = (weights[index], None, None, *read, answer, *answers)
        run_checked(combined, places, 0, ELEMENT_COUNT, 0)
        for rank in range(2):
            memory, mine = shared[rank][index], results[rank][index].view(np.uint8)
            if is_ours:
                run_checked((check,), (None, memory), 0, ELEMENT_COUNT, 0)
            else:
                run_checked((copy, check), (None, mine, memory), 0, ELEMENT_COUNT, 0)

    return {
        "fp16 in shared memory": narrow_step,
        "float32, the caller's arrays": lambda index: wide_step(index, is_ours=False),
        "float32, arrays of ours": lambda index: wide_step(index, is_ours=True),
    }


def compare_steps(chunk_count: int, rounds: int) -> Table:
    """What the passes of a step take, in turns."""
    found = Table("a step's passes", "ms", "/ fp16")
    ways = steps(chunk_count)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, act in ways.items():
            start = time.perf_counter()
            for index in range(chunk_count):
                act(index)
            times[name].append((time.perf_counter() - start) * 1e3)
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, ms in medians.items():
        found.add_row(name, f"{ms:.1f}", f"{ms / medians['fp16 in shared memory']:.2f}")
    return found


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
    Console().print(compare_steps(chunk_count, args.rounds))


if __name__ == "__main__":
    main()
