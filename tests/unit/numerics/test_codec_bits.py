"""Goal: the bits on the wire are those that the .proto describes, and depend on nothing but values.

Method: every pattern of the half-precision formats against the formats' formulas in integers, and
the same values laid out in memory in every way that callers have.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
from fastcrc import crc32
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.oracles.codec import (
    FLOAT32_MAX,
    bf16_bits,
    check_roundtrip,
    decoded,
    encoded,
    fp16_payload,
    fp16_value,
    roundtrip,
)
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


# Values come back within the bounds that the codecs state, whatever their magnitudes. Method:
# arrays aimed at the edges (float32's largest and smallest, blocks that differ by all of float32's
# range) and hypothesis between them; errors are taken in float64.


EXPONENTS = range(-149, 128)


def float32s(*values: float) -> np.ndarray:
    return np.array(values, np.float64).astype(np.float32)


def in_blocks(*peaks: float) -> np.ndarray:
    """One block for each peak, and a short one more for the last; values below it of both signs."""
    random = np.random.default_rng(7)
    blocks = [
        np.clip(random.standard_normal(BLOCK_ELEMENT_COUNT) / 5, -1, 1) * peak for peak in peaks
    ]
    tail = float32s(peaks[-1], -peaks[-1], 0.0)
    return np.concatenate([np.concatenate(blocks).astype(np.float32), tail])


@pytest.mark.parametrize("name", NAMES)
def test_every_magnitude_of_float32(name: str) -> None:
    for exponent in EXPONENTS:
        for mantissa in (1.0, 1.5, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12, 2 - 2**-11, 2 - 2**-23):
            peak = math.ldexp(mantissa, exponent)
            check_roundtrip(name, float32s(peak, -peak, peak / 3, -peak / 2**13, 0.0, -0.0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("peak", [FLOAT32_MAX, -FLOAT32_MAX])
def test_float32_max_does_not_overflow(name: str, peak: float) -> None:
    check_roundtrip(name, float32s(peak))
    check_roundtrip(name, float32s(1.0, peak, -1e-44, 0.0))


@pytest.mark.parametrize("name", NAMES)
def test_magnitudes_around_the_largest_do_not_overflow(name: str) -> None:
    largest = np.array([FLOAT32_MAX], np.float32).view(np.uint32)[0]
    for below in (0, 1, 2, 2**11, 2**12, 2**12 + 1, 2**13, 2**15, 2**15 + 1, 2**16, 2**17):
        check_roundtrip(name, np.array([largest - below], np.uint32).view(np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_float32_max_in_a_later_block_does_not_overflow(name: str) -> None:
    for first in (2.0**112, 2.0**118, 2.0**122, 2.0**126):
        check_roundtrip(name, in_blocks(first, FLOAT32_MAX))


@pytest.mark.parametrize("name", NAMES)
def test_subnormals_and_zeros(name: str) -> None:
    check_roundtrip(name, float32s(1e-44))
    check_roundtrip(name, float32s(2**-149, -(2**-149), 0.0, -0.0, 2**-127, 2**-126))
    check_roundtrip(name, float32s(0.0))
    check_roundtrip(name, float32s(-0.0, 0.0, -0.0))
    check_roundtrip(name, np.zeros(BLOCK_ELEMENT_COUNT + 3, np.float32))


def test_fp16_keeps_float32s_subnormals_exactly() -> None:
    values = np.arange(1, 2**11, dtype=np.uint32).view(np.float32)
    assert (roundtrip("fp16", values) == values).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("first", "later"),
    [
        (0.0, 1e-30),
        (0.0, 1e-44),
        (0.0, FLOAT32_MAX),
        (1e-44, 1e38),
        (1e-30, 1.0),
        (1.0, 2.0**30),
        (1.0, 1e-30),
        (1e38, 1e-44),
        (2.0**-4, 2.0**17),
        (2.0**11, 65504.0),
        (2.0**11, 65520.0),
    ],
)
def test_a_later_block_of_another_magnitude(name: str, first: float, later: float) -> None:
    check_roundtrip(name, in_blocks(first, later))


@pytest.mark.parametrize("name", NAMES)
def test_a_peak_in_the_middle_of_three_blocks(name: str) -> None:
    check_roundtrip(name, in_blocks(1e-20, 1e20, 1e-20))
    check_roundtrip(name, in_blocks(1e20, 1e-20, 1.0))


@pytest.mark.parametrize("block_size", [2, 16, 256])
def test_fp16_keeps_small_values_as_the_docs_state(
    block_size: int,
) -> None:
    """Beside a power of two, what is at most that is 0; where float32 has it, and as bf16 does."""
    for exponent in range(-126, 128):
        power, most = float32s(math.ldexp(1.0, exponent), math.ldexp(2 - 2**-20, exponent))
        for peak in (power, most):
            fraction = np.float32(peak * np.float32(2.0**-39))
            above = np.nextafter(fraction, np.float32(np.inf))
            values = np.full((3, block_size), above)
            values[:, 0], values[1, 1:] = peak, -above
            found = decoded(
                "fp16",
                encoded("fp16", values.reshape(-1), block_size=block_size),
                block_size=block_size,
            )
            assert (np.sign(found) == np.sign(values.reshape(-1))).all()
            if above > 2.0**-133:
                assert (roundtrip("bf16", values.reshape(-1)) != 0.0).all()
        at_most = power * np.array([2.0**-39, 2.0**-40], np.float32)
        found = roundtrip("fp16", np.array([power, *at_most, *-at_most], np.float32))
        if exponent >= -112:  # below, an exponent has no room to be smaller
            assert found.tolist() == [power, 0.0, 0.0, 0.0, 0.0]
        else:
            assert (found != 0.0).tolist() == [True, *(at_most != 0), *(at_most != 0)]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
)
@example([FLOAT32_MAX, 1.0])
@example([65504.0, 65520.0, 2.0**-24])
def test_any_finite_values(name: str, values: list[float]) -> None:
    check_roundtrip(name, np.array(values, np.float32))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(
    peaks=st.lists(
        st.sampled_from([0.0, 1e-44, 1e-30, 0.01, 1.0, 3e3, 7e4, 1e20, 3e38]), max_size=3
    ),
    tail=st.floats(width=32, allow_nan=False, allow_infinity=False),
)
def test_any_order_of_blocks(name: str, peaks: list[float], tail: float) -> None:
    blocks = [np.full(BLOCK_ELEMENT_COUNT, peak, np.float32) for peak in peaks]
    check_roundtrip(name, np.concatenate([*blocks, np.array([tail], np.float32)]))


@pytest.mark.parametrize(("name", "digits"), [("fp32", 24), ("fp16", 11), ("bf16", 8)])
def test_integers_that_the_format_can_hold_stay_exact(name: str, digits: int) -> None:
    values = np.arange(-(2**digits) if digits < 20 else -5000, min(2**digits, 5000) + 1)
    whole = values.astype(np.float32)
    assert (roundtrip(name, whole) == whole).all()
    assert (roundtrip(name, np.ldexp(whole, 60)) == np.ldexp(whole, 60)).all()
    assert (roundtrip(name, np.ldexp(whole, -60)) == np.ldexp(whole, -60)).all()
