"""Speed of the codecs on one thread: GB/s of float32, beside NumPy's own conversion and a copy.

python benchmarks/codec.py [--megabytes 64]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from fastcrc import crc32

from shardwell.numerics.codec import SUMMED_CODECS

CHUNK = 512 * 1024


def speed(work: Callable[[], object], byte_count: int, runs: int = 9) -> float:
    """Median GB/s over `runs`."""
    work()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return byte_count / sorted(times)[runs // 2] / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    size = parser.parse_args().megabytes * 2**20 // 4
    rng = np.random.default_rng(0)
    total = np.zeros(size, np.float32)
    half = np.empty(size, np.float16)
    rows: dict[str, float] = {}
    source = rng.standard_normal(size, np.float32)

    def numpy_encode() -> None:
        half[:] = source

    def numpy_decode() -> None:
        total[:] = half

    def numpy_add() -> None:
        np.add(total, half, out=total)

    rows["numpy copy"] = speed(lambda: np.copyto(total, source), size * 4)
    rows["numpy encode fp16"] = speed(numpy_encode, size * 4)
    rows["numpy decode fp16"] = speed(numpy_decode, size * 4)
    rows["numpy decode-add fp16"] = speed(numpy_add, size * 4)
    total[:] = 0
    for magnitude in (1.0, 1e-5):
        values = source * np.float32(magnitude)
        for codec in SUMMED_CODECS.values():
            pairs = [
                (part, np.empty(codec.encoded_bytes(part.size), np.uint8), total[i : i + CHUNK])
                for i in range(0, size, CHUNK)
                for part in (values[i : i + CHUNK],)
            ]

            def encode(codec=codec, pairs=pairs) -> None:
                for v, p, _ in pairs:
                    codec.encode(v, p)

            def decode(codec=codec, pairs=pairs) -> None:
                for _, p, t in pairs:
                    codec.decode(p, t)

            def add(codec=codec, pairs=pairs) -> None:
                for _, p, t in pairs:
                    codec.decode_add(p, 32.0, t, 1.0, t)

            def check(codec=codec, pairs=pairs) -> None:
                for _, p, _ in pairs:
                    codec.first_non_finite(p)

            name = f"{codec.name} (values of {magnitude:g})"
            rows[f"encode {name}"] = speed(encode, size * 4)
            rows[f"decode {name}"] = speed(decode, size * 4)
            rows[f"decode-add {name}"] = speed(add, size * 4)
            rows[f"finite check {name}"] = speed(check, size * 4)
            rows[f"crc32c {name}"] = speed(
                lambda pairs=pairs: [crc32.iscsi(p) for _, p, _ in pairs], size * 4
            )
            total[:] = 0
    for name, value in rows.items():
        print(f"{name:40s} {value:6.1f} GB/s of float32")
    print(json.dumps({"gigabytes_per_s": {k: round(v, 2) for k, v in rows.items()}}))


if __name__ == "__main__":
    main()
