"""Goal: with native code, results have the same bits as without, and it touches nothing unchecked.

Method: the library as the package's build makes it, and once more as processors without AVX-512 run
it, beside NumPy: every operation and every optimizer on values of all kinds, at lengths and places
around its blocks. What does not fit is refused. All again under the address and undefined-behaviour
sanitizers, on memory without a byte to spare.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from fastcrc import crc32

from harness.native_library import ROOT, builder, built, library_of
from harness.oracles.codec import decoded, encoded
from harness.oracles.optimizers import OPTIMIZERS
from shardwell import SGD, Adagrad
from shardwell.numerics import elementwise, native
from shardwell.numerics.codec import SUMMED_CODECS
from shardwell.numerics.elementwise import Code, Operation, Operations
from shardwell.numerics.row_update_rules import RowUpdateRule
from shardwell.numerics.update_rules import UpdateRule

IN_BLOCKS = (*(Code.READ_FP16, Code.WRITE_FP16, Code.LOOK_FP16, Code.COPY_FP16, Code.CHECK_FP16),)
OTHERS = [code for code in Code if code not in IN_BLOCKS]
BLOCK_SIZES = [1, 2, 16, 48, 256, 1000]
HALF = (Code.READ_BF16, Code.LOOK_16, Code.COPY_16, Code.CHECK_16)
LENGTHS = [0, 1, 7, 8, 15, 16, 17, 2047, 2048, 2049, 3 * 2048 + 5]
FACTORS = [1.0, -1.0, 0.3, 2.0**-120, 1e-46, 3e38, 1e39]
run_natively, run_by_numpy = elementwise._run_natively, elementwise._run_by_numpy
packed_one = elementwise._packed_one


AWAY = "-DAWAY_BYTES=1"
"""Arrays that are only written go past the caches, however small they are."""


@pytest.fixture(scope="module", params=["", "-DWITHOUT_AVX512", AWAY, f"-DWITHOUT_AVX512 {AWAY}"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return library_of(tmp_path_factory.mktemp("native"), request.param)


def some_values(count: int, seed: int = 0) -> np.ndarray:
    """Of every magnitude, with zeros, infinities and NaN among them."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2**32, count, np.uint32)
    values = bits.view(np.float32).copy()
    normal = random.random(count) < 0.7
    values[normal] = random.standard_normal(count).astype(np.float32)[normal]
    odd = np.array([0.0, -0.0, np.inf, -np.inf, 65504.0, 65520.0, 2.0**-149, 1e-40], np.float32)
    places = random.random(count) < 0.1
    values[places] = random.choice(odd, count)[places]
    return values


def arrays_of(
    count: int, seed: int, block_size: int, *, is_finite: bool
) -> list[np.ndarray | None]:
    """Places 0 to 3: float32; 4 and 5: payloads; 6: a temporary; 7: exponents."""
    values = [some_values(count, seed + place) for place in range(4)]
    random, ends = np.random.default_rng(seed), (0, 2 * count)
    stored = random.integers(0, 256, 2 * count, np.uint8)
    exponents = random.integers(0, 256, count + 1, np.uint8)
    if is_finite:
        for array in values:
            array[~(np.abs(array) < 1e30)] = 1.0
        stored[1::2] &= 0xBF
        exponents = (exponents.view(np.int8) // 4).view(np.uint8)
    if block_size:
        stored = np.append(stored, exponents[: -(-count // block_size)])
        ends = (0, stored.size - 2 * count)
    return [*values, stored, np.zeros(2 * count + ends[1], np.uint8), None, exponents[::-1].copy()]


def same(found: np.ndarray, expected: np.ndarray, dtype: type) -> None:
    """The same bits; of NaN, that it is one."""
    assert found.size == expected.size
    found, expected = found.view(dtype), expected.view(dtype)
    if dtype is np.float32:
        is_nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), is_nan)
        found, expected = found[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32)
    np.testing.assert_array_equal(found, expected)


def check(
    library: native.Library,
    operations: Operations,
    count: int,
    start: int = 0,
    *,
    is_finite: bool = False,
) -> None:
    """Both ways on elements [start, count) of arrays that are a little longer."""
    sizes = [int(each.divisor) for each in operations if each.code in IN_BLOCKS]
    one, other = (
        arrays_of(count + 3, 1, max(sizes, default=0), is_finite=is_finite) for _ in range(2)
    )
    natively = run_natively(library, operations, tuple(one), start, count)
    by_numpy = run_by_numpy(operations, tuple(other), start, count)
    assert natively == by_numpy
    for place, (found, expected) in enumerate(zip(one[:6], other[:6], strict=True)):
        assert found is not None
        assert expected is not None
        is_payload = place > 3
        same(found, expected, np.uint8 if is_payload else np.float32)


def operations_of(code: Code, factor: float) -> Operations:
    match code:
        case Code.READ_FP32 | Code.LOOK_32 | Code.CHECK_32 | Code.COPY_32:
            source = 1
        case _ if code in HALF or (code in IN_BLOCKS and code is not Code.WRITE_FP16):
            source = 4
        case _:
            source = 2
    written = (Code.WRITE_FP32, Code.WRITE_BF16, Code.COPY_32, Code.COPY_16)
    written += (Code.WRITE_FP16, Code.COPY_FP16)
    to = 5 if code in written else 0
    factor = abs(factor) if code is Code.CLIP else factor
    return (Operation(code, to, source, 3, factor, divisor=abs(factor)),)


@pytest.mark.parametrize("code", OTHERS)
@pytest.mark.parametrize("factor", FACTORS)
def test_an_operation_has_numpys_bits(library: native.Library, code: Code, factor: float) -> None:
    for count in LENGTHS:
        for start in {0, min(3, count)}:
            if code is Code.WRITE_BF16 or code in HALF or start == 0:
                check(library, operations_of(code, factor), count, start)


@pytest.mark.parametrize("code", IN_BLOCKS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_an_operation_on_blocks_has_numpys_bits(
    library: native.Library, code: Code, block_size: int
) -> None:
    """From a block on and within one; READ_FP16 with each factor, and with exponents elsewhere."""
    size = float(block_size)
    for count in LENGTHS:
        starts = {0, 3, block_size, 2 * block_size, block_size + 1, 2 * block_size - 1, count}
        for start in sorted(start for start in starts if start <= count):
            if code is Code.WRITE_FP16 and start % block_size:
                continue
            (plain,) = operations_of(code, 1.0)
            check(library, (plain._replace(divisor=size),), count, start)
            if code is Code.READ_FP16:
                elsewhere = plain._replace(divisor=size, other=7)
                check(library, (elsewhere,), count, start)
                for factor in FACTORS[1:]:
                    check(library, (elsewhere._replace(factor=factor),), count, start)


def test_a_run_takes_an_array_for_each_place(library: native.Library) -> None:
    arrays = tuple(np.full(99, place, np.float32) for place in range(9))
    operations = tuple(Operation(Code.ADD_SCALED, 0, place) for place in range(1, 9))
    run_natively(library, operations, arrays, 0, 99)
    assert (arrays[0] == sum(range(9))).all()
    with pytest.raises(ValueError, match="do not fit"):
        run_natively(library, (Operation(Code.COPY, 0, 9),), (*arrays, arrays[8]), 0, 9)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("count", [1, 47, 2048, 2**20 // 4 + 77])
def test_runs_on_blocks_have_numpys_bits(
    library: native.Library, count: int, block_size: int
) -> None:
    """A sum is written and checked, read again, and a copy is looked at."""
    size = float(block_size)
    write = Operation(Code.WRITE_FP16, 5, 0, divisor=size)
    check_it = Operation(Code.CHECK_FP16, 0, 5, divisor=size)
    reads = Operation(Code.READ_FP16, 1, 5, divisor=size)
    copy = Operation(Code.COPY_FP16, 5, 4, divisor=size)
    add = Operation(Code.ADD_SCALED, 0, 1, factor=0.5)
    for operations in (
        (add, write, check_it),
        (write, reads, add),
        (copy, check_it, Operation(Code.LOOK_FP16, 0, 5, divisor=size), reads),
        (reads._replace(to=6, source=4), add._replace(source=6), write, check_it),
        (reads._replace(source=4), reads._replace(source=4, to=2), add),
    ):
        check(library, operations, count, is_finite=True)


@pytest.mark.parametrize("start", [0, 3])
def test_much_that_is_only_written_has_numpys_bits(library: native.Library, start: int) -> None:
    """A payload's copy, and its values; the same memory read by another operation is as it is."""
    copies = (Operation(Code.COPY_16, 5, 4), Operation(Code.CHECK_16, 0, 4))
    halves = Operation(Code.READ_FP16, 0, 4, divisor=256.0)
    for operations in (
        (*copies, Operation(Code.READ_BF16, 0, 4, factor=0.5)),
        (Operation(Code.COPY_FP16, 5, 4, divisor=256.0), halves),
        (halves._replace(factor=0.5),),
        (halves, Operation(Code.ADD_SCALED, 1, 0)),
    ):
        check(library, operations, 2**20 // 2 + 77, start)


@pytest.mark.parametrize("size", [0, 1, 2, 4097, 2**20, 2**20 + 1])
def test_bytes_are_copied_however_many(size: int) -> None:
    source = np.arange(size).astype(np.uint8)
    to = np.zeros(size, np.uint8)
    elementwise.copy_bytes(source, to)
    assert to.tobytes() == source.tobytes()


@pytest.mark.parametrize("divisor", [3.0, 0.75, 2.0**24 + 1, 1 / 3, 0.5000000001])
def test_a_mean_has_numpys_bits(library: native.Library, divisor: float) -> None:
    check(library, (Operation(Code.MEAN, 0, divisor=divisor),), 5000)
    largest = np.full(40, 3.4028234e38, np.float32)
    by_numpy = largest.copy()
    mean = (Operation(Code.MEAN, 0, divisor=0.5),)
    run_natively(library, mean, (largest,), 0, 40)
    run_by_numpy(mean, (by_numpy,), 0, 40)
    assert largest.tobytes() == by_numpy.tobytes()
    assert np.isfinite(largest).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 2])
def test_an_optimizer_has_numpys_bits(library: native.Library, name: str, count: int) -> None:
    updates = UpdateRule(OPTIMIZERS[name]).operations(update_count=count, learning_rate=0.37)
    # Places of update rules: weights, gradient, temporary and state, which is 0 or more.
    arrays = [some_values(6001, seed) for seed in range(5)]
    arrays[3:] = [np.abs(array) for array in arrays[3:]]
    by_numpy = [array.copy() for array in arrays]
    run_natively(library, updates, tuple(arrays), 0, 6001)
    run_by_numpy(updates, tuple(by_numpy), 0, 6001)
    for place in (0, 3, 4):
        same(arrays[place], by_numpy[place], np.float32)


@pytest.mark.parametrize("code", [Code.WRITE_FP16, Code.WRITE_BF16])
def test_every_rounding_has_numpys_bits(library: native.Library, code: Code) -> None:
    """All upper halves of a float32, each with what lies around what it is rounded at."""
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    upper = np.arange(2**16, dtype=np.uint32) << 16
    bits = (upper[:, None] | np.array(lower, np.uint32)).reshape(-1)
    for block_size in (1, 3) if code is Code.WRITE_FP16 else (bits.size,):
        size = elementwise.half_bytes(bits.size, block_size) - (code is Code.WRITE_BF16)
        written = [np.zeros(size, np.uint8) for _ in range(2)]
        writes = (Operation(code, 1, 0, divisor=float(block_size)),)
        values = bits.view(np.float32)
        run_natively(library, writes, (values, written[0]), 0, bits.size)
        run_by_numpy(writes, (values, written[1]), 0, bits.size)
        assert written[0].tobytes() == written[1].tobytes()


# CRCs.

CRC32C = 0x1EDC6F41
"""Of x^32 + x^28 + ... + 1, the polynomial without its first power."""


def power(exponent: int) -> int:
    """x^exponent by the polynomial, mirrored in 64 bits."""
    rest = 1
    for _ in range(exponent):
        rest = rest << 1 ^ ((1 << 32 | CRC32C) if rest >> 31 else 0)
    return int(f"{rest:032b}"[::-1], 2) << 32


def test_the_factors_are_powers_of_x() -> None:
    source = (Path(native.__file__).parent / "crc.c").read_text()
    for bits in (128, 512, 2048):
        factors = f"{power(bits + 63):#018x}, {power(bits - 1):#018x}"
        assert f"#define BY_{bits} {factors}\n" in source


@pytest.mark.parametrize("start", [0, 1, 2**32 - 1, 0xDEADBEEF])
def test_crcs_are_those_of_the_polynomial(library: native.Library, start: int) -> None:
    """Against the plainest way to compute one, and in pieces."""
    if not library.checks:
        pytest.skip("this processor multiplies without carries in no way that is known here")
    contents = np.random.default_rng(start).integers(0, 256, 2 * 5000, np.uint8)
    table = [0] * 256
    for byte in range(256):
        entry = byte
        for _ in range(8):
            entry = entry >> 1 ^ (int(f"{CRC32C:032b}"[::-1], 2) if entry & 1 else 0)
        table[byte] = entry
    checks = (Operation(Code.CHECK_16, 0, 0),)
    for count in (1, 3, 31, 32, 33, 127, 128, 129, 2047, 2048, 2049, 5000):
        inside = start ^ 2**32 - 1
        for byte in contents[: 2 * count].tolist():
            inside = inside >> 8 ^ table[(inside ^ byte) & 0xFF]
        expected = inside ^ 2**32 - 1
        arrays = (contents,)
        _, found = run_natively(library, checks, arrays, 0, count, start)
        assert found == expected
        _, half = run_natively(library, checks, arrays, 0, count // 2, start)
        _, found = run_natively(library, checks, arrays, count // 2, count, half)
        assert found == expected


@pytest.mark.parametrize("block_size", [2, 48, 256])
def test_what_is_checked_is_what_was_copied_and_read(
    library: native.Library, block_size: int
) -> None:
    """A payload by way of a temporary, in one run: copied, looked at, checked, and read."""
    values, size = np.random.default_rng(3).standard_normal(5000), float(block_size)
    payload = encoded("fp16", values, block_size=block_size)
    operations = (
        Operation(Code.COPY_FP16, 1, 2, divisor=size),
        Operation(Code.LOOK_FP16, 1, 1, divisor=size),
        Operation(Code.CHECK_FP16, 1, 1, divisor=size),
        Operation(Code.READ_FP16, 0, 1, factor=4.0, divisor=size),
    )
    wanted = decoded("fp16", payload, block_size=block_size)
    for run in (partial(run_natively, library), run_by_numpy):
        found = np.zeros(5000, np.float32)
        looked, crc = run(operations, (found, None, payload), 0, 5000, 7)
        np.testing.assert_array_equal(found, wanted * 4)
        assert looked == int(np.abs(wanted).max().view(np.uint32))
        assert crc == crc32.iscsi(payload.tobytes(), 7)


# What it refuses.

ADDS = (Operation(Code.ADD_SCALED, 0, 1),)
MISFITS: dict[str, tuple[Operations, tuple[int, ...], int, int]] = {
    "longer than an array": (ADDS, (400, 396), 0, 100),
    "longer than the target": (ADDS, (396, 400), 0, 100),
    "backwards": (ADDS, (400, 400), 9, 8),
    "a place of none": ((Operation(Code.SCALE, 9),), (400,), 0, 100),
    "a CRC of what is longer": ((Operation(Code.CHECK_16, 0, 0),), (400,), 0, 201),
    "more temporaries than there are": (
        tuple(Operation(Code.COPY, place, 0) for place in (2, 3, 4, 5)),
        (400, 400),
        0,
        100,
    ),
    "too many": (ADDS * 33, (400, 400), 0, 100),
    "further than memory goes": (ADDS, (400, 400), 2**62, 2**62 + 1),
}


@pytest.mark.parametrize("name", MISFITS)
def test_arrays_that_do_not_fit_are_refused_untouched(library: native.Library, name: str) -> None:
    operations, sizes, start, stop = MISFITS[name]
    arrays = [np.ones(size // 4, np.float32) for size in sizes]
    with pytest.raises(ValueError, match="do not fit"):
        run_natively(library, operations, tuple(arrays), start, stop)
    assert all((array == 1.0).all() for array in arrays)


READS = Operation(Code.READ_FP16, 0, 1, divisor=16.0)
WRITES = Operation(Code.WRITE_FP16, 1, 0, divisor=16.0)
COPIES = Operation(Code.COPY_FP16, 2, 1, divisor=16.0)
CHECKS = Operation(Code.CHECK_FP16, 0, 1, divisor=16.0)
LOOKS = Operation(Code.LOOK_FP16, 0, 1, divisor=16.0)
BLOCK_MISFITS: dict[str, tuple[Operations, tuple[int | None, ...], int, int]] = {
    **{
        f"{each.code.name} {name}": ((each,), (400, size, 207), 0, stop)
        for each in (READS, WRITES, COPIES, CHECKS, LOOKS)
        for name, size, stop in (
            ("without exponents", 200, 100),
            ("with one too few", 206, 90),
            ("with one too many", 208, 100),
            ("of fewer elements", 205, 100),
        )
    },
    "a copy to less": ((COPIES,), (400, 207, 204), 0, 100),
    "a write that begins within a block": ((WRITES,), (400, 207), 8, 100),
    "exponents elsewhere, too few": ((READS._replace(other=2),), (400, 200, 6), 0, 100),
    "exponents of nothing": ((READS._replace(other=2),), (400, 200, None), 0, 100),
    "exponents at a place of none": ((READS._replace(other=9),), (400, 200), 0, 100),
    "a temporary without exponents": ((READS,), (400, None), 0, 100),
    "a write to a temporary": ((WRITES,), (400, None), 0, 100),
    **{
        f"blocks of {size}": ((READS._replace(divisor=size),), (400, 207), 0, 100)
        for size in (0.0, 0.5, -16.0, 2.0**32, float("inf"), float("nan"))
    },
    "two sizes of blocks": ((READS._replace(divisor=1.0), LOOKS), (400, 207), 0, 68),
    "exponents here and elsewhere": ((READS, READS._replace(other=2)), (400, 207, 7), 0, 100),
    "two sizes of a temporary's blocks": (
        *((COPIES, READS._replace(source=2, divisor=1.0)), (400, 207), 0, 100),
    ),
    "two copies to temporaries": ((COPIES, COPIES._replace(to=3)), (400, 207), 0, 100),
    "a copy of more blocks than room": ((COPIES._replace(divisor=1.0),), (0, 3 * 4097), 0, 100),
    "a block that is larger than a temporary": (
        *((WRITES._replace(source=3, divisor=4096.0),), (400, 201), 0, 100),
    ),
}


@pytest.mark.parametrize("name", BLOCK_MISFITS)
def test_blocks_that_do_not_fit_are_refused_untouched(library: native.Library, name: str) -> None:
    operations, sizes, start, stop = BLOCK_MISFITS[name]
    arrays = [None if size is None else np.full(size, 7, np.uint8) for size in sizes]
    with pytest.raises(ValueError, match="do not fit"):
        run_natively(library, operations, tuple(arrays), start, stop)
    assert all((array == 7).all() for array in arrays if array is not None)


def test_native_code_does_not_write_read_only_arrays(library: native.Library) -> None:
    values = np.ones(40, np.float32)
    values.flags.writeable = False
    scales = (Operation(Code.SCALE, 0, factor=2.0),)
    with pytest.raises(ValueError, match="read-only"):
        run_natively(library, scales, (values,), 0, 40)
    looks = (Operation(Code.LOOK_32, 0, 0),)
    assert run_natively(library, looks, (values,), 0, 40)[0] == 0x3F800000


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.ones(8), "do not fit"),
        (np.ones(8, ">f4"), "do not fit"),
        (np.ones(8, np.int32), "do not fit"),
        (np.ones(16, np.float32)[::2], "not C-contiguous"),
    ],
)
def test_values_of_another_kind_are_refused(
    library: native.Library, values: np.ndarray, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        run_natively(library, ADDS, (values, values), 0, 8)


def test_nothing_at_a_place_that_is_not_aligned_is_nothing() -> None:
    nothing = np.zeros(17, np.uint8)[1:][:0].view(np.float32)
    assert elementwise.run((Operation(Code.LOOK_32, 0, 0),), (nothing,), 0, 0) == 0


def test_a_factor_that_float32_cannot_hold_adds_nothing() -> None:
    assert elementwise.add_scaled(0, 1, 1e-46) == ()
    assert elementwise.add_scaled(0, 1, -1e-46) == ()
    assert elementwise.add_scaled(0, 1, 1e-45) != ()


def test_threads_with_little_stack_can_run_it() -> None:
    code = """
import threading, numpy as np
from shardwell.numerics.codec import SUMMED_CODECS
threading.stack_size(64 * 1024)
codec, values = SUMMED_CODECS["fp16"], np.ones(10_000, np.float32)
payload = np.empty(codec.encoded_bytes(values.size), np.uint8)
one = threading.Thread(target=lambda: codec.encode(values, payload))
one.start()
one.join()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_operation_that_there_is_not_is_refused(library: native.Library) -> None:
    packed = bytes([len(Code), 0, 0, 0]) + bytes(12)
    assert library.run(packed, 1, (np.ones(4, np.float32),), 0, 4, 0) == -1


def test_a_place_that_is_not_aligned_is_refused(library: native.Library) -> None:
    values = np.zeros(41, np.uint8)[1:]
    assert values.ctypes.data % 4
    scales = packed_one(Operation(Code.SCALE, 0, factor=2.0))
    assert library.run(scales, 1, (values,), 0, 10, 0) == -1


# Where there is none.


def test_a_file_that_is_none_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.NATIVE_VARIABLE, raising=False)
    path = tmp_path / "kernels.so"
    assert native.load(path) == (None, "no native code was built")
    path.write_bytes(b"no library")
    assert native.load(path) == (None, "can't load kernels.so")


def test_a_library_of_another_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(native.NATIVE_VARIABLE, raising=False)
    path = built(tmp_path / "kernels.so")
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    assert native.load(path) == (None, "built for another version")


@pytest.mark.parametrize("setting", ["off", "0", ""])
def test_the_variant_is_reported_and_can_be_chosen(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, native.NATIVE_VARIABLE: setting}
    ran = subprocess.run(
        [sys.executable, "-m", "shardwell_server", "--version"],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if setting:
        assert ran.endswith(f", NumPy (SHARDWELL_NATIVE={setting})\n")
        return
    monkeypatch.delenv(native.NATIVE_VARIABLE, raising=False)
    found, missing = native.load(Path(native.__file__).parent / native.LIBRARY_NAME)
    what = f"NumPy ({missing})" if found is None else f"native code ({found.variant})"
    assert ran.endswith(f", {what}\n")


def test_the_packages_build_made_it_where_there_is_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not shutil.which("cc"):
        pytest.skip("no C compiler here")
    monkeypatch.delenv(native.NATIVE_VARIABLE, raising=False)
    found, missing = native.load(Path(native.__file__).parent / native.LIBRARY_NAME)
    assert found is not None or missing == "a processor without AVX2"


def test_a_failed_build_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_native = builder()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(RuntimeError, match="false"):
        build_native.build(ROOT, tmp_path / "kernels.so")
    monkeypatch.setenv("CC", "'/no/such folder/compiler' -O0")
    with pytest.raises(RuntimeError, match="No such file"):
        build_native.build(ROOT, tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())


def test_a_compiler_is_fetched_only_where_it_is_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_native = builder()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    hook = build_native.NativeCode(str(ROOT), {}, None, None, "", "wheel")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert hook.dependencies() == ["ziglang>=0.13"]
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert hook.dependencies() == []


# Under sanitizers: this file as a program.


@pytest.mark.parametrize("away", [(), (AWAY,)])
def test_it_stays_in_its_memory(tmp_path: Path, away: tuple[str, ...]) -> None:
    """Each array ends where its memory does, which the sanitizer watches."""
    flags = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *away)
    runtime = subprocess.run(
        ["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip() if shutil.which("cc") else ""  # fmt: skip
    if not os.path.isabs(runtime):
        pytest.skip("no sanitizer here")
    path = built(tmp_path / "kernels.so", *flags)
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment.pop(native.NATIVE_VARIABLE, None)
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "done\n"
    overrun = subprocess.run(
        [sys.executable, __file__, str(path), "overrun"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "AddressSanitizer: heap-buffer-overflow" in overrun.stderr  # it would have reported one


def _under_sanitizers(path: str, *, overruns: bool) -> None:
    library, missing = native.load(Path(path))
    assert library is not None, missing
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    for code in Code:
        for count, block_size in product(LENGTHS, BLOCK_SIZES if code in IN_BLOCKS else [1]):
            (each,) = operations_of(code, 0.5)
            in_blocks = elementwise.half_bytes(count, block_size)
            wide = code in (Code.WRITE_FP32, Code.COPY_32)
            sizes = [4 * count] * 4 + [2 * count, (4 if wide else 2) * count]
            if code in IN_BLOCKS:
                each = each._replace(divisor=float(block_size))
                sizes[4:] = [in_blocks, in_blocks]
                overruns_at = elementwise.half_bytes(count + 8, block_size) - in_blocks
            places = [libc.malloc(max(size, 1)) for size in sizes]
            for place, size in zip(places, sizes, strict=True):
                ctypes.memset(place, 0, size)
            more = overruns_at if code in IN_BLOCKS else 64
            arrays = [
                (ctypes.c_char * (size + (more if place > 3 else 64) * overruns)).from_address(at)
                for place, (at, size) in enumerate(zip(places, sizes, strict=True))
            ]
            packed, stop = elementwise.packed((each,)), count + 8 * overruns
            assert library.run(packed, 1, tuple(arrays), 0, stop, 0) >= 0
            for place in places:
                libc.free(place)
    _any_operations_under_sanitizers(library, libc)
    for count in (1, 2, 63, 64, 600, 5000):
        _rows_under_sanitizers(library, libc, count, overruns=overruns)
    for count in (1, 2, 7, 300):
        _tensors_under_sanitizers(library, libc, count)
    print("done")


def _any_operations_under_sanitizers(library: native.Library, libc: ctypes.CDLL) -> None:
    """Runs of any operations on arrays of any sizes: they are refused, or stay in their memory."""
    random, done = np.random.default_rng(1), 0
    for _ in range(30_000):
        count, block_size = int(random.integers(0, 40)) ** 2, int(random.choice(BLOCK_SIZES))
        in_blocks = elementwise.half_bytes(count, block_size)
        kinds = [4 * count, 2 * count, in_blocks, -(-count // block_size), in_blocks + 1]
        sizes = [int(random.choice(kinds, p=[0.4, 0.1, 0.4, 0.05, 0.05])) for _ in range(7)]
        taken = [libc.malloc(max(size, 1)) for size in sizes]
        arrays = [
            None if random.random() < 0.1 else (ctypes.c_char * size).from_address(place)
            for place, size in zip(taken, sizes, strict=True)
        ]
        for place, size in zip(taken, sizes, strict=True):
            ctypes.memset(place, int(random.integers(0, 256)), size)
        operations = tuple(
            Operation(
                Code(random.choice(IN_BLOCKS if random.random() < 0.7 else list(Code))),
                *(int(place) for place in random.integers(0, 9, 2)),
                int(random.integers(0, 9) * (random.random() < 0.2)),
                divisor=float(block_size if random.random() < 0.9 else random.choice(BLOCK_SIZES)),
            )
            for _ in range(int(random.integers(1, 4)))
        )
        start = int(random.choice([0, 0, block_size, 3]))
        packed = b"".join(map(packed_one, operations))
        stop = max(start, count - int(random.integers(0, 3)))
        done += library.run(packed, len(operations), tuple(arrays), start, stop, 0) >= 0
        for place in taken:
            libc.free(place)
    assert done > 1000, done


def _rows_under_sanitizers(
    library: native.Library, libc: ctypes.CDLL, count: int, *, overruns: bool
) -> None:
    taken = []

    def memory(values: np.ndarray) -> ctypes.Array[ctypes.c_char]:
        """Memory that ends where the values do, or is said to go on."""
        taken.append(libc.malloc(max(values.nbytes, 1)))
        ctypes.memmove(taken[-1], values.ctypes.data, values.nbytes)
        return (ctypes.c_char * (values.nbytes + 64 * overruns)).from_address(taken[-1])

    random = np.random.default_rng(count)
    dim = 5
    ids = memory(np.sort(random.integers(0, 2**40, count)) // 3 * 3)
    drawn = memory(random.integers(-(2**63), 2**63 - 1, count))
    for row_count, some in ((0, drawn), (2**40, ids)):
        library.check_ids(some, row_count, 3, 0)
        assert library.sort_ids(some, row_count, 3, memory(np.zeros(8 * count + 5, np.int64))) >= 0
    numbers = memory(np.arange(count))
    places = memory(random.permutation(count))
    starts = memory(np.array([*range(0, count, 70), count]))
    for kind in (np.int32, np.int64):
        marks = np.arange(count, dtype=kind)
        assert (
            library.find(numbers, 1, memory(marks), marks.itemsize, memory(marks.astype(int))) >= 0
        )
    for dtype, width in ((np.float32, dim), (np.int64, 1), (np.bool_, 1), (np.float32, 100)):
        rows, others = (memory(np.zeros((count, width), dtype)) for _ in range(2))
        stride = width * np.dtype(dtype).itemsize
        assert library.gather(rows, stride, places, others, 0) == 0
        assert library.scatter(rows, stride, places, others, count % 2) == 0
    sums = memory(np.zeros((count, 4), np.uint32))
    for start, size in ((0, 4 * dim), (3, 4 * dim - 3)):
        factors = memory(np.ones((4, size), np.int16))
        hashed = memory(np.ones((count, 4 * dim), np.uint8))
        assert library.hash_rows(hashed, 4 * dim, start, size, factors, sums) == 0
    rows = np.ones((count, dim), np.float32)
    levels, group_count = memory(np.zeros((12, dim), np.float32)), -(-count // 70)
    sums = memory(rows[:group_count])
    assert library.add_up(memory(rows), dim, places, starts, sums, levels) >= 0
    for has_slots in (False, True):
        rule = RowUpdateRule(Adagrad(0.1) if has_slots else SGD(0.1))
        code = elementwise.packed(operations := rule.operations(0.1) or ())
        every = [memory(rows) for _ in range(5)]
        arguments = (code, len(operations), every[0], places, dim, *every[1:3], has_slots)
        assert library.update(*arguments, *every[3:5]) == 0
    for each in SUMMED_CODECS.values() if library.checks else ():
        codec = each.in_blocks_of(dim)
        payload = memory(np.zeros(codec.encoded_bytes(group_count * dim), np.uint8))
        code = elementwise.packed(codec.reads(0, 1, 1.0))
        into = memory(rows)
        assert library.spread(code, payload, dim, places, starts, 0, group_count, into, 0) >= 0
    for address in taken:
        libc.free(address)


def _tensors_under_sanitizers(library: native.Library, libc: ctypes.CDLL, count: int) -> None:
    """Every range of a few tensors, and some of many, one of which is large."""
    random = np.random.default_rng(count)
    sizes = random.integers(0, 40, count)
    sizes[-1] = 3 if count < 10 else 20_000
    stops = np.cumsum(sizes)
    taken = []

    def array(size: int) -> np.ndarray:
        taken.append(libc.malloc(max(4 * size, 1)))
        return np.ctypeslib.as_array((ctypes.c_float * size).from_address(taken[-1]))

    tensors = tuple(array(int(size)) for size in sizes)
    for tensor in tensors:
        tensor[...] = 0
    shapes = np.stack([np.ones(count, int), sizes], axis=1)
    assert library.look_over(tensors, np.ndarray, shapes, np.empty(count, np.int64)) >= 0
    size = int(stops[-1])
    ends = [0, size] if count > 10 else range(size + 1)
    ranges = {(start, stop) for start in ends for stop in ends if start <= stop}
    ranges |= {(start, start + 9) for start in random.integers(0, max(size - 9, 1), 50) if size > 9}
    for start, stop in ranges:
        values = array(stop - start)
        values[...] = 1
        for parts in (1, 0):
            assert library.move(tensors, np.ndarray, stops, start, stop, values, parts) == 0
        assert values.all()
    for address in taken:
        libc.free(address)


if __name__ == "__main__":
    _under_sanitizers(sys.argv[1], overruns=len(sys.argv) > 2)
