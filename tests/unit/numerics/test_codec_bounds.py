"""Goal: values come back within the bounds that the codecs state, whatever their magnitudes.

Method: arrays aimed at the edges (float32's largest and smallest, blocks that differ by all of
float32's range) and hypothesis between them; errors are taken in float64.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.oracles.codec import (
    FLOAT32_MAX,
    check_roundtrip,
    decoded,
    encoded,
    roundtrip,
)
from shardwell.numerics.codec import SUMMED_CODECS
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT

NAMES = sorted(SUMMED_CODECS)
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
