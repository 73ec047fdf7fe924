"""Goal: what is not finite is refused with its place, or passes when it is allowed; sums are right.

Method: NaN and infinities put at chosen places, also behind the first block; decode_add against the
same sum in float64.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.oracles.codec import FLOAT32_MAX, decoded, encoded, fp16_value, roundtrip
from shardwell.errors import ArgumentError
from shardwell.numerics.codec import CODECS, SUMMED_CODECS, NonFiniteValueError
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT

NAMES = sorted(SUMMED_CODECS)
ALL_NAMES = sorted(CODECS)
BAD = [math.nan, math.inf, -math.inf]
COUNT = BLOCK_ELEMENT_COUNT + 100
PLACES = [0, 1, 17, BLOCK_ELEMENT_COUNT - 1, BLOCK_ELEMENT_COUNT, COUNT - 1]


def same(found: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.array_equal(found, want, equal_nan=True))


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", PLACES)
def test_the_first_bad_value_is_refused_with_its_index(name: str, bad: float, place: int) -> None:
    values = np.ones(COUNT, np.float32)
    values[place] = bad
    values[place + 1 :: 37] = math.nan
    with pytest.raises(NonFiniteValueError) as caught:
        encoded(name, values)
    assert caught.value.index == place
    assert same(np.float64(caught.value.value), np.float64(bad))
    assert str(place) in str(caught.value)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_bad_value_in_any_layout_is_refused(name: str) -> None:
    values = np.ones(300, np.float64)
    values[123] = math.nan
    for array in (
        values,
        np.repeat(values, 2)[::2],
        values.astype(">f4"),
        values.astype(np.float16),
    ):
        with pytest.raises(NonFiniteValueError) as caught:
            encoded(name, array)
        assert caught.value.index == 123


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("value", [1e39, -1e300])
def test_a_float64_beyond_float32_is_refused(name: str, value: float) -> None:
    with pytest.raises(NonFiniteValueError) as caught:
        encoded(name, np.array([1.0, 2.0, value, value]))
    assert caught.value.index == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**60])
def test_allowed_values_pass_beside_finite_ones(name: str, scale: float) -> None:
    values = np.full(COUNT, scale, np.float32)
    values[5], values[7], values[-1], values[-2] = math.nan, math.inf, -math.inf, -scale
    assert same(roundtrip(name, values, allow_non_finite=True), values)


@pytest.mark.parametrize("name", NAMES)
def test_allowed_infinity_does_not_draw_finite_values_with_it(name: str) -> None:
    values = np.array([math.inf, FLOAT32_MAX, -FLOAT32_MAX, -math.inf], np.float32)
    back = roundtrip(name, values, allow_non_finite=True)
    assert (np.isinf(back) == np.isinf(values)).all()
    assert (np.sign(back) == np.sign(values)).all()
    alone = np.array(BAD, np.float32)
    assert same(roundtrip(name, alone, allow_non_finite=True), alone)


@pytest.mark.parametrize("name", NAMES)
def test_first_non_finite_finds_what_came(name: str) -> None:
    codec = SUMMED_CODECS[name]
    values = np.ones(500, np.float32)
    payload, exponent = encoded(name, values)
    assert codec.first_non_finite(payload, exponent) is None
    for bad in BAD:
        for place in (499, 321, 0):
            values = np.ones(500, np.float32)
            values[place::50] = bad
            payload, exponent = encoded(name, values, allow_non_finite=True)
            assert codec.first_non_finite(payload, exponent) == place


def test_first_non_finite_counts_an_overflow_of_the_scale() -> None:
    codec, exponent = SUMMED_CODECS["fp16"], 119
    for value, finite in ((511.75, True), (512.0, False), (-512.0, False), (65504.0, False)):
        written = np.array([1.0, 0.0, value, 600.0 if not finite else 2.0], np.float16)
        found = codec.first_non_finite(written.view(np.uint8), exponent)
        assert found == (None if finite else 2)


@settings(deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=30),
    exponent=st.integers(-126, 119),
)
def test_first_non_finite_of_any_fp16_chunk(bits: list[int], exponent: int) -> None:
    written = np.array(bits, np.uint16)
    with np.errstate(over="ignore"):
        values = np.ldexp(fp16_value(written), exponent).astype(np.float32)
    bad = [index for index, value in enumerate(values) if not math.isfinite(value)]
    found = SUMMED_CODECS["fp16"].first_non_finite(written.view(np.uint8), exponent)
    assert found == (bad[0] if bad else None)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("exponent", [-127, -1, 1, 119])
def test_only_fp16_has_a_scale(name: str, exponent: int) -> None:
    CODECS[name].check_exponent(0)
    with pytest.raises(ArgumentError, match="scale_exponent must be 0"):
        CODECS[name].check_exponent(exponent)


@pytest.mark.parametrize("exponent", [-(2**31), -127, 120, 2**31 - 1])
def test_fp16s_scale_has_a_range(exponent: int) -> None:
    for good in (-126, 0, 119):
        SUMMED_CODECS["fp16"].check_exponent(good)
    with pytest.raises(ArgumentError, match=f"from -126 to 119.*got {exponent}"):
        SUMMED_CODECS["fp16"].check_exponent(exponent)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [0.0, 1.0, 3.0, 32.0, 2.0**24])
@pytest.mark.parametrize("total_factor", [1.0, 0.0, 7.0, 2.0**-20])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e20])
def test_decode_add_is_a_weighted_sum(
    name: str, weight: float, total_factor: float, scale: float
) -> None:
    random = np.random.default_rng(2)
    values = (random.standard_normal(COUNT) * scale).astype(np.float32)
    total = (random.standard_normal(COUNT) * scale).astype(np.float32)
    payload, exponent = encoded(name, values)
    received = decoded(name, payload, exponent).astype(np.float64)
    parts = weight * received, total_factor * total.astype(np.float64)
    out = np.empty(COUNT, np.float32)
    factor = math.ldexp(weight, exponent)
    SUMMED_CODECS[name].decode_add(payload, factor, total, total_factor, out)
    assert (np.abs(out - sum(parts)) <= 2.0**-22 * sum(map(np.abs, parts)) + 2.0**-148).all()
    SUMMED_CODECS[name].decode_add(payload, factor, total, total_factor, total)
    assert total.tobytes() == out.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_decode_add_of_integers_is_exact(name: str) -> None:
    values = np.arange(-100, 101).astype(np.float32)
    total = np.arange(201).astype(np.float32)
    payload, exponent = encoded(name, values)
    factor, part = math.ldexp(1024.0, exponent), np.empty(101, np.float32)
    codec = SUMMED_CODECS[name]
    middle = payload[50 * codec.item_size : 151 * codec.item_size]
    codec.decode_add(middle, factor, total[50:151], 1000.0, part)
    assert (part == 1000 * total[50:151] + 1024 * values[50:151]).all()
    SUMMED_CODECS[name].decode_add(payload, factor, total, 1000.0, total)
    assert (total == 1000 * np.arange(201) + 1024 * values).all()


NAN_BITS = [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", NAN_BITS)
@pytest.mark.parametrize("count", [5, 5000])
def test_every_kind_of_nan_is_found_and_stays_one(name: str, bits: int, count: int) -> None:
    values = np.ones(count, np.float32)
    values.view(np.uint32)[count - 2] = bits
    with pytest.raises(NonFiniteValueError) as caught:
        encoded(name, values)
    assert caught.value.index == count - 2
    received = decoded(name, *encoded(name, values, allow_non_finite=True))
    np.testing.assert_array_equal(received, values)


CUT_ANYWHERE = """
import numpy as np
from shardwell.numerics.codec import SUMMED_CODECS
random = np.random.default_rng(0)
values, total = (random.standard_normal(1003).astype(np.float32) for _ in range(2))
payload, codec, whole = values.view(np.uint8), SUMMED_CODECS["fp32"], total.copy()
codec.decode_add(payload, 30 / 64, whole, 17 / 64, whole)
for cut in (1, 7, 8, 500, 1000):
    parts = total.copy()
    for part in (slice(0, cut), slice(cut, 1003)):
        stored = values[part].view(np.uint8)
        codec.decode_add(stored, 30 / 64, parts[part], 17 / 64, parts[part])
    assert parts.tobytes() == whole.tobytes(), cut
"""


@pytest.mark.parametrize("native", ["on", "off"])
def test_a_sum_does_not_depend_on_where_it_is_cut(native: str) -> None:
    """On a processor without AVX-512, too, whose kernels end otherwise than they go on."""
    environment = {**os.environ, "SHARDWELL_NATIVE": native}
    subprocess.run([sys.executable, "-c", CUT_ANYWHERE], env=environment, check=True)
