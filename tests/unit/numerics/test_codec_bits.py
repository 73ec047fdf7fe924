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

from harness.oracles.codec import bf16_bits, decoded, encoded, fp16_value
from shardwell.numerics.codec import (
    CODECS,
    GUESS_ELEMENT_COUNT,
    SUMMED_CODECS,
    NonFiniteValueError,
    peak_of,
)
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT, Scratch

NAMES = sorted(SUMMED_CODECS)
ALL_NAMES = sorted(CODECS)
PATTERNS = np.arange(2**16, dtype=np.uint16)


def some_values(count: int, dtype: str = "float32") -> np.ndarray:
    random = np.random.default_rng(3)
    scale = np.exp2(random.integers(-12, 12, count))
    return (random.standard_normal(count) * scale).astype(np.float16).astype(dtype)


@pytest.mark.parametrize("exponent", [0, 1, -1, 100, 112, -100, -126])
def test_every_fp16_pattern_decodes(exponent: int) -> None:
    values = decoded("fp16", PATTERNS.view(np.uint8), exponent)
    want = np.ldexp(fp16_value(PATTERNS), exponent).astype(np.float32)
    np.testing.assert_array_equal(values, want)
    kept = ~np.isnan(want)
    assert (np.signbit(values) == np.signbit(want))[kept].all()


def test_every_fp16_value_is_written_as_itself() -> None:
    finite = PATTERNS[np.isfinite(fp16_value(PATTERNS))]
    payload, exponent = encoded("fp16", np.append(fp16_value(finite), 1.0).astype(np.float32))
    back = np.ldexp(fp16_value(payload.view(np.uint16)), exponent)
    unscaled = np.ldexp(fp16_value(finite), -exponent)
    assert (back[:-1] == np.ldexp(unscaled.astype(np.float16).astype(np.float64), exponent)).all()


@pytest.mark.parametrize("exponent", [-140, -126, -60, -1, 0, 1, 13, 60, 126])
def test_fp16_is_rounded_to_nearest_even(exponent: int) -> None:
    random = np.random.default_rng(5)
    ties = (np.arange(1, 4000) * 0.5 + 1024) / 4096
    values = np.concatenate(
        [ties, -ties, random.uniform(-1, 1, 4000), random.uniform(-1e-6, 1e-6, 99)]
    )
    values = np.ldexp(values, exponent).astype(np.float32)
    payload, scale = encoded("fp16", values)
    want = np.ldexp(values.astype(np.float64), -scale).astype(np.float16)
    assert (payload.view(np.uint16) == want.view(np.uint16)).all()


def test_every_bf16_pattern_decodes() -> None:
    values = decoded("bf16", PATTERNS.view(np.uint8), 0)
    want = (PATTERNS.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(values, want)
    assert (values.view(np.uint32) == want.view(np.uint32))[~np.isnan(want)].all()


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_is_rounded_to_nearest_even(low: int) -> None:
    bits = (PATTERNS.astype(np.uint32) << 16) | np.uint32(low)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    payload, exponent = encoded("bf16", values)
    assert exponent == 0
    assert (payload.view(np.uint16) == bf16_bits(values)).all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bf16_of_any_bits(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    values = np.append(values[np.isfinite(values)], np.float32(1.0))
    payload, _ = encoded("bf16", values)
    assert (payload.view(np.uint16) == bf16_bits(values)).all()


def test_fp32_is_the_bytes_themselves() -> None:
    values = some_values(1000)
    payload, exponent = encoded("fp32", values)
    assert (payload.tobytes(), exponent) == (values.astype("<f4").tobytes(), 0)


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
        payload, exponent = encoded(name, array)
        assert exponent == want[1], layout
        assert payload.tobytes() == want[0].tobytes(), layout
        assert array.tobytes() == before, layout


def test_float64_is_rounded_once_to_float32() -> None:
    values = np.random.default_rng(1).standard_normal(500)
    payload, _ = encoded("fp32", values)
    assert payload.tobytes() == values.astype(np.float32).tobytes()


@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_same_values_are_always_written_with_the_same_bits(name: str) -> None:
    codec, scratch = CODECS[name], Scratch()
    values = np.concatenate([some_values(BLOCK_ELEMENT_COUNT) * np.float32(1e-9), some_values(99)])
    others = some_values(5000)[::-1] * np.float32(1e30)
    first = encoded(name, values)
    for _ in range(3):
        payload = np.empty(codec.encoded_bytes(values.size), np.uint8)
        codec.encode(others, np.empty(codec.encoded_bytes(others.size), np.uint8), scratch)
        exponent = codec.encode(values, payload, scratch).exponent
        assert (payload.tobytes(), exponent) == (first[0].tobytes(), first[1])


@pytest.mark.parametrize("name", NAMES)
def test_encoding_what_was_decoded_changes_nothing_more(name: str) -> None:
    values = np.random.default_rng(9).standard_normal(5000).astype(np.float32)
    once = decoded(name, *encoded(name, values))
    twice = decoded(name, *encoded(name, once))
    assert once.tobytes() == twice.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_reading_a_part_is_reading_the_whole(name: str) -> None:
    codec = SUMMED_CODECS[name]
    payload, exponent = encoded(name, some_values(1000) * np.float32(1e-20))
    whole = decoded(name, payload, exponent)
    part = np.empty(300, np.float32)
    codec.decode(payload[150 * codec.item_size : 450 * codec.item_size], exponent, part)
    assert part.tobytes() == whole[150:450].tobytes()


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
    """Exactly what is written where the peak was looked for before; and the CRC of that."""
    codec, scratch = CODECS[name], Scratch()
    with np.errstate(over="ignore"):
        values = KINDS[kind](some_values(count)) if count else np.empty(0, np.float32)
        values[~np.isfinite(values)] = 1.0
        peak = float(np.abs(values).astype(np.float32).max(initial=0.0))
    expected = np.zeros(codec.encoded_bytes(values.size), np.uint8)
    before = codec.encode(values, expected, scratch, peak=peak)
    payload = np.zeros_like(expected)
    starts = {}

    def start(exponent: int) -> int:
        starts[exponent] = 1000 + exponent
        return starts[exponent]

    written = codec.encode(values, payload, scratch, is_exact=True, start=start)
    assert written.exponent == before.exponent
    assert payload.tobytes() == expected.tobytes()
    assert written.crc == crc32.iscsi(payload.tobytes(), starts[written.exponent])
    assert len(starts) <= 2


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 4000, BLOCK_ELEMENT_COUNT + 3])
def test_a_look_in_the_same_pass_finds_the_first(name: str, value: float, index: int) -> None:
    codec, values = CODECS[name], some_values(2 * BLOCK_ELEMENT_COUNT)
    values[index] = value
    values[index + 1] = np.nan
    payload = np.empty(codec.encoded_bytes(values.size), np.uint8)
    with pytest.raises(NonFiniteValueError, match=f"element {index} "):
        codec.encode(values, payload, Scratch(), is_exact=True)


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("count", [1, 4096, 4097, GUESS_ELEMENT_COUNT, GUESS_ELEMENT_COUNT + 5000])
@pytest.mark.parametrize("odd", [None, 0.0, 1e30, 1e-30, 3.4e38, np.inf, np.nan])
def test_what_is_known_of_the_first_values_changes_nothing(name, count, odd) -> None:
    """Wherever the odd one is: among the first values, or behind them."""
    for place in {0, count // 2, count - 1}:
        values = np.full(count, 0.3, np.float32) if odd != 0.0 else np.zeros(count, np.float32)
        if odd:
            values[place] = odd
        first_peak = peak_of(values[:GUESS_ELEMENT_COUNT])
        for allowed in (False, True):
            results: list[object] = []
            for known in (None, first_peak):
                payload = np.zeros(CODECS[name].encoded_bytes(count), np.uint8)
                options = {"allow_non_finite": allowed, "first_peak": known}
                try:
                    found = CODECS[name].encode(values, payload, Scratch(), **options)
                    results.append((found.exponent, payload.tobytes()))
                except NonFiniteValueError as error:
                    results.append(error.index)
            assert results[0] == results[1]
