"""Goal: the bits on the wire are those that the .proto describes, and depend on nothing but values.

Method: every pattern of the half-precision formats against the formats' formulas in integers, and
the same values laid out in memory in every way that callers have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from fastcrc import crc32
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.oracles.codec import bf16_bits, decoded, encoded, fp16_payload, fp16_value
from shardwell.numerics.codec import (
    CODECS,
    GROUP_BLOCK_SIZE,
    SUMMED_CODECS,
    NonFiniteValueError,
)
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT
from shardwell.specs.parameter import block_size_of

NAMES = sorted(SUMMED_CODECS)
ALL_NAMES = sorted(CODECS)
PATTERNS = np.arange(2**16, dtype=np.uint16)


def some_values(count: int, dtype: str = "float32") -> np.ndarray:
    random = np.random.default_rng(3)
    scale = np.exp2(random.integers(-12, 12, count))
    return (random.standard_normal(count) * scale).astype(np.float16).astype(dtype)


BLOCK_SIZES = [1, 2, 16, 48, 256, 1000]


def check_fp16(values: np.ndarray, block_size: int) -> None:
    """The payload is the oracle's; of NaN, that it is one."""
    found = encoded("fp16", values, allow_non_finite=True, block_size=block_size)
    wanted = fp16_payload(values, block_size)
    end = 2 * values.size
    assert found[end:].tobytes() == wanted[end:].tobytes()
    halves, oracles = found[:end].view(np.uint16), wanted[:end].view(np.uint16)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(halves[~is_nan], oracles[~is_nan])
    assert np.isnan(halves[is_nan].view(np.float16)).all()


@pytest.mark.parametrize("exponent", [0, 1, -1, 100, 112, 127, -100, -126, -127, -128])
def test_every_fp16_pattern_decodes(exponent: int) -> None:
    exponents = np.full(2**16 // 256, exponent, np.int8)
    payload = np.concatenate([PATTERNS.view(np.uint8), exponents.view(np.uint8)])
    values = decoded("fp16", payload)
    with np.errstate(over="ignore", invalid="ignore"):
        want = np.ldexp(fp16_value(PATTERNS), exponent).astype(np.float32)
    np.testing.assert_array_equal(values, want)
    kept = ~np.isnan(want)
    assert (np.signbit(values) == np.signbit(want))[kept].all()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_fp16_value_is_written_as_the_proto_says(block_size: int) -> None:
    check_fp16(fp16_value(PATTERNS).astype(np.float32), block_size)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("exponent", [-140, -126, -112, -60, -1, 0, 1, 13, 60, 126, 127])
def test_fp16_is_rounded_to_nearest_even(exponent: int, block_size: int) -> None:
    random = np.random.default_rng(5)
    ties = (np.arange(1, 4000) * 0.5 + 1024) / 4096
    values = np.concatenate(
        [ties, -ties, random.uniform(-1, 1, 4000), random.uniform(-1e-6, 1e-6, 99)]
    )
    check_fp16(np.ldexp(values, exponent).astype(np.float32), block_size)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50),
    st.sampled_from(BLOCK_SIZES),
)
def test_fp16_of_any_bits(bits: list[int], block_size: int) -> None:
    check_fp16(np.array(bits, np.uint32).view(np.float32), block_size)


@pytest.mark.parametrize("odd", [0.0, 1e30, 1e-30, 3.4028235e38, -3.4e38, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_an_odd_value_concerns_its_block_alone(odd: float, block_size: int) -> None:
    for place in (0, 255, 256, 4095, 4999):
        values = some_values(5000)
        values[place] = odd
        check_fp16(values, block_size)


def test_the_example_of_the_proto() -> None:
    """The last five elements of a parameter of 69, in blocks of 2, alone and with the others."""
    values = np.ones(69, np.float32)
    values[64:] = (0.75, -(2.0**-20), 0.0, 0.0, 3.0)
    payload = encoded("fp16", values[64:], block_size=2)
    assert payload.tobytes() == bytes.fromhex("007600a8000000000076f100f3")
    whole = encoded("fp16", values, block_size=block_size_of(69))
    assert whole[2 * 64 : 2 * 69].tobytes() + whole[-3:].tobytes() == payload.tobytes()
    assert decoded("fp16", payload, block_size=2).tolist() == values[64:].tolist()


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_parts_cut_at_blocks_have_the_bits_of_the_whole(name: str, block_size: int) -> None:
    codec = CODECS[name].in_blocks_of(block_size)
    unit = {"fp16": block_size, "int8": 4096}.get(name, 1)
    values = np.concatenate([some_values(9000) * np.float32(factor) for factor in (1, 1e-9, 1e9)])
    whole = encoded(name, values, block_size=block_size)
    back = decoded(name, whole, block_size=block_size)
    for cut in (unit, 8192 // unit * unit, 26000 // unit * unit):
        parts = [
            encoded(name, part, block_size=block_size) for part in (values[:cut], values[cut:])
        ]
        read = [decoded(name, part, block_size=block_size) for part in parts]
        assert np.concatenate(read).tobytes() == back.tobytes()
        ends = [codec.item_size * count for count in (cut, values.size - cut)]
        if name == "int8":
            ends = [part.size - end for part, end in zip(parts, ends, strict=True)]
        cuts = [np.split(part, [end]) for part, end in zip(parts, ends, strict=True)]
        heads, tails = zip(*cuts, strict=True)
        assert np.concatenate([*heads, *tails]).tobytes() == whole.tobytes()


def test_every_bf16_pattern_decodes() -> None:
    values = decoded("bf16", PATTERNS.view(np.uint8))
    want = (PATTERNS.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(values, want)
    assert (values.view(np.uint32) == want.view(np.uint32))[~np.isnan(want)].all()


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_is_rounded_to_nearest_even(low: int) -> None:
    bits = (PATTERNS.astype(np.uint32) << 16) | np.uint32(low)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    payload = encoded("bf16", values)
    assert (payload.view(np.uint16) == bf16_bits(values)).all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bf16_of_any_bits(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    values = np.append(values[np.isfinite(values)], np.float32(1.0))
    payload = encoded("bf16", values)
    assert (payload.view(np.uint16) == bf16_bits(values)).all()


def test_fp32_is_the_bytes_themselves() -> None:
    values = some_values(1000)
    assert encoded("fp32", values).tobytes() == values.astype("<f4").tobytes()


@pytest.mark.skipif(sys.byteorder != "little", reason="views below assume a little-endian host")
@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("count", [1, 3, 1000, BLOCK_ELEMENT_COUNT + 17])
@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**40])
def test_layouts_and_dtypes_give_the_same_bits(name: str, count: int, scale: float) -> None:
    values = some_values(count) * np.float32(scale)
    want = encoded(name, values)
    wide = np.repeat(values, 3)
    layouts = {
        "strided": wide[::3],
        "reversed": np.ascontiguousarray(values[::-1])[::-1],
        "float64": values.astype(np.float64),
        "float64, strided": np.repeat(values.astype(np.float64), 2)[::2],
        "big-endian": values.astype(">f4"),
        "big-endian float64": values.astype(">f8"),
        "broadcast column": np.stack([values, values], axis=1)[:, 1],
        "read-only": np.frombuffer(values.tobytes(), np.float32),
    }
    if scale == 1.0:
        layouts["float16"] = values.astype(np.float16)
        layouts["big-endian float16"] = values.astype(">f2")
    for layout, array in layouts.items():
        before = array.tobytes()
        assert encoded(name, array).tobytes() == want.tobytes(), layout
        assert array.tobytes() == before, layout


def test_float64_is_rounded_once_to_float32() -> None:
    values = np.random.default_rng(1).standard_normal(500)
    assert encoded("fp32", values).tobytes() == values.astype(np.float32).tobytes()


@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_same_values_are_always_written_with_the_same_bits(name: str) -> None:
    values = np.concatenate([some_values(BLOCK_ELEMENT_COUNT) * np.float32(1e-9), some_values(99)])
    others = some_values(5000)[::-1] * np.float32(1e30)
    first = encoded(name, values)
    for _ in range(3):
        encoded(name, others)
        assert encoded(name, values).tobytes() == first.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_encoding_what_was_decoded_changes_nothing_more(name: str) -> None:
    values = np.random.default_rng(9).standard_normal(5000).astype(np.float32)
    once = decoded(name, encoded(name, values))
    twice = decoded(name, encoded(name, once))
    assert once.tobytes() == twice.tobytes()


KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as they are": lambda values: values,
    "tiny": lambda values: values * np.float32(1e-12),
    "huge": lambda values: values * np.float32(1e37),
    "the largest": lambda values: np.full_like(values, 3.4028235e38),
    "growing": lambda values: values * np.geomspace(1e-9, 1e9, values.size, dtype=np.float32),
    "growing a little": lambda values: values * np.linspace(1e-4, 5e-4, values.size, dtype="f4"),
    "one at the end": lambda values: np.append(values[:-1] * np.float32(1e-6), np.float32(7e4)),
    "zeros": np.zeros_like,
    "doubles": lambda values: values.astype(np.float64) * 1e-7,
    "every other": lambda values: np.repeat(values, 2)[::2] * np.float32(1e-3),
}


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 2 * BLOCK_ELEMENT_COUNT + 77])
def test_a_look_in_the_same_pass_changes_no_bits(name: str, kind: str, count: int) -> None:
    """Exactly what is written without; and the CRC of that."""
    codec = CODECS[name]
    with np.errstate(over="ignore"):
        values = KINDS[kind](some_values(count)) if count else np.empty(0, np.float32)
        values[~np.isfinite(values)] = 1.0
    expected, payload = encoded(name, values), np.zeros(codec.encoded_bytes(values.size), np.uint8)
    crc = codec.encode(values, payload, crc=1000)
    assert payload.tobytes() == expected.tobytes()
    assert crc == crc32.iscsi(payload.tobytes(), 1000)
    if name == "fp16":
        plain = values.astype(np.float32)
        assert payload.tobytes() == fp16_payload(plain, GROUP_BLOCK_SIZE).tobytes()


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 4000, BLOCK_ELEMENT_COUNT + 3])
def test_a_look_in_the_same_pass_finds_the_first(name: str, value: float, index: int) -> None:
    codec, values = CODECS[name], some_values(2 * BLOCK_ELEMENT_COUNT)
    values[index] = value
    values[index + 1] = np.nan
    payload = np.empty(codec.encoded_bytes(values.size), np.uint8)
    with pytest.raises(NonFiniteValueError, match=f"element {index} "):
        codec.encode(values, payload, crc=0)
