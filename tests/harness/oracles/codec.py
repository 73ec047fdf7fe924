"""What the codecs' tests measure by: each format's arithmetic, written in integers and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardwell.numerics.codec import CODECS, Bytes, Float32
from shardwell.numerics.scratch import Scratch

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_SMALLEST = 2.0**-149


def encoded(
    name: str,
    values: npt.NDArray[Any],
    *,
    allow_non_finite: bool = False,
    peak: float | None = None,
) -> tuple[Bytes, int]:
    """The payload and exponent that the codec `name` writes."""
    codec = CODECS[name]
    payload = np.full(codec.encoded_bytes(values.size), 0xA5, np.uint8)
    exponent = codec.encode(
        values, payload, Scratch(), allow_non_finite=allow_non_finite, peak=peak
    ).exponent
    codec.check_exponent(exponent)
    return payload, exponent


def decoded(name: str, payload: Bytes, exponent: int) -> Float32:
    """What the codec `name` reads from a payload, which stays as it was."""
    codec = CODECS[name]
    values = np.full(codec.element_count(payload.size), np.nan, np.float32)
    before = payload.tobytes()
    codec.decode(payload, exponent, values)
    assert payload.tobytes() == before
    return values


def roundtrip(name: str, values: npt.NDArray[Any], *, allow_non_finite: bool = False) -> Float32:
    """`values`, written and read."""
    return decoded(name, *encoded(name, values, allow_non_finite=allow_non_finite))


def bounds(name: str, exact: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How far each value may be off, as numerics/codec.py states it; `exact` in float64."""
    magnitudes = np.abs(exact)
    if name == "fp32":
        return np.zeros_like(magnitudes)
    if name == "fp16":
        return 2.0**-11 * magnitudes + 2.0**-19 * magnitudes.max(initial=0.0)
    # Below 2^-126 bfloat16 has a fixed spacing of 2^-133, of which half can be lost.
    return np.where(magnitudes < 2.0**-126, 2.0**-134, 2.0**-8 * magnitudes)


def check_roundtrip(name: str, values: npt.NDArray[Any]) -> None:
    """Asserts that all values come back finite, within bounds, with their signs and zeros.

    Whether the writer knew their peak or had to find it.
    """
    # What travels is float32; float64 is rounded to it first.
    exact = values.astype(np.float32).astype(np.float64)
    for peak in (None, float(np.abs(exact).max(initial=0.0))):
        back = decoded(name, *encoded(name, values, peak=peak)).astype(np.float64)
        assert np.isfinite(back).all()
        np.testing.assert_array_less(np.abs(back - exact) - bounds(name, exact), 2.0**-1074)
        assert (np.signbit(back) == np.signbit(exact)).all()
        assert (back[exact == 0] == 0).all()


def fp16_value(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
    """What binary16's bits stand for, by IEEE 754's own formula."""
    sign = np.where(bits >> 15, -1.0, 1.0)
    exponent = (bits.astype(np.int64) >> 10) & 0x1F
    fraction = (bits & 0x3FF).astype(np.float64)
    subnormal = np.ldexp(fraction, -24)
    normal = np.ldexp(1024.0 + fraction, exponent - 25)
    special = np.where(fraction > 0, np.nan, np.inf)
    return sign * np.select([exponent == 0, exponent < 31], [subnormal, normal], special)


def bf16_bits(values: Float32) -> npt.NDArray[np.uint16]:
    """Finite float32 to bfloat16: nearest, ties to even, the largest finite one at most."""
    bits = values.view(np.uint32).astype(np.uint64)
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    quotient, rest = magnitude >> 16, magnitude & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (quotient & 1 == 1))
    return (sign | np.minimum(quotient + up, 0x7F7F)).astype(np.uint16)
