"""What the codecs' tests measure by: each format's arithmetic, written in integers and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardwell.numerics.codec import CODECS, GROUP_BLOCK_SIZE, Bytes, Float32

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_SMALLEST = 2.0**-149


def encoded(
    name: str,
    values: npt.NDArray[Any],
    *,
    allow_non_finite: bool = False,
    block_size: int = GROUP_BLOCK_SIZE,
) -> Bytes:
    """The payload that the codec `name` writes; `block_size` is fp16's."""
    codec = CODECS[name].in_blocks_of(block_size)
    payload = np.full(codec.encoded_bytes(values.size), 0xA5, np.uint8)
    codec.encode(values, payload, allow_non_finite=allow_non_finite)
    return payload


def decoded(name: str, payload: Bytes, *, block_size: int = GROUP_BLOCK_SIZE) -> Float32:
    """What the codec `name` reads from a payload, which stays as it was."""
    codec = CODECS[name].in_blocks_of(block_size)
    values = np.full(codec.element_count(payload.size), np.nan, np.float32)
    before = payload.tobytes()
    codec.decode(payload, values)
    assert payload.tobytes() == before
    return values


def roundtrip(name: str, values: npt.NDArray[Any], *, allow_non_finite: bool = False) -> Float32:
    """`values`, written and read."""
    return decoded(name, encoded(name, values, allow_non_finite=allow_non_finite))


def bounds(name: str, exact: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How far each value may be off, as numerics/codec.py states it; `exact` in float64."""
    magnitudes = np.abs(exact)
    if name == "fp32":
        return np.zeros_like(magnitudes)
    if name == "fp16":
        starts = np.arange(0, magnitudes.size, GROUP_BLOCK_SIZE)
        peaks = np.maximum.reduceat(magnitudes, starts) if starts.size else magnitudes
        peak = np.repeat(peaks, GROUP_BLOCK_SIZE)[: magnitudes.size]
        return np.maximum(2.0**-11 * magnitudes, np.maximum(2.0**-39 * peak, 2.0**-150))
    # Below 2^-126 bfloat16 has a fixed spacing of 2^-133, of which half can be lost.
    return np.where(magnitudes < 2.0**-126, 2.0**-134, 2.0**-8 * magnitudes)


def check_roundtrip(name: str, values: npt.NDArray[Any]) -> None:
    """Asserts that all values come back finite, within bounds, with their signs and zeros."""
    # What travels is float32; float64 is rounded to it first.
    exact = values.astype(np.float32).astype(np.float64)
    back = roundtrip(name, values).astype(np.float64)
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


def fp16_payload(values: Float32, block_size: int) -> Bytes:
    """The payload of fp16 by the .proto, each value divided in float64 and rounded once."""
    halves, exponents = np.zeros(values.size, np.float16), []
    largest = np.float16(2.0**15 - 2.0**4)
    for start in range(0, values.size, block_size):
        block = values[start : start + block_size].astype(np.float64)
        peak = np.abs(block[np.isfinite(block)]).max(initial=0.0)
        exponents.append(max(int(np.frexp(peak)[1]) - 15, -126) if peak else 0)
        with np.errstate(invalid="ignore"):
            written = np.ldexp(block, -exponents[-1]).astype(np.float16)
        if exponents[-1] == 113:
            written = np.where(np.isfinite(block), np.clip(written, -largest, largest), written)
        halves[start : start + block_size] = written
    return np.concatenate([halves.view(np.uint8), np.array(exponents, np.int8).view(np.uint8)])


def bf16_bits(values: Float32) -> npt.NDArray[np.uint16]:
    """Finite float32 to bfloat16: nearest, ties to even, the largest finite one at most."""
    bits = values.view(np.uint32).astype(np.uint64)
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    quotient, rest = magnitude >> 16, magnitude & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (quotient & 1 == 1))
    return (sign | np.minimum(quotient + up, 0x7F7F)).astype(np.uint16)
