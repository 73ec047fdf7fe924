"""The values of a table's rows before their first gradient. Pure; stated in table.proto.

Each value is a function of seed, id and column alone, whichever rows are asked for with it, and the
same bits on every machine: integers, and + - * / sqrt of float64, which IEEE 754 rounds alike
everywhere. So there is no np.log here, which does not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids, Words, mix
from shardwell.specs.initializers import Initializer, Normal, Uniform, Zeros

Float64 = npt.NDArray[np.float64]
Words32 = npt.NDArray[np.uint32]

_BLOCK_ELEMENT_COUNT = 32 * 1024
"""Values that are worked on at a time: their arrays, 32 bytes a value, stay in the cache."""
_SEED_STEP = 0x9E3779B97F4A7C15
_COLUMN_STEP = np.uint32(0x9E3779B9)
_SHUFFLES = ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1))
"""(shift, factor) of each round of a permutation of 32-bit words (Wellons, hash prospector)."""

# Wichura's algorithm AS 241, PPND7: numerators and denominators, the highest power first.
_CENTRE, _CENTRE_SQUARE = 0.425, 0.180625
_CENTRE_ABOVE = (5.9109374720e01, 1.5929113202e02, 5.0434271938e01, 3.3871327179e00)
_CENTRE_BELOW = (6.7187563600e01, 7.8757757664e01, 1.7895169469e01, 1.0)
_TAIL_ABOVE = (1.7023821103e-01, 1.3067284816e00, 2.7568153900e00, 1.4234372777e00)
_TAIL_BELOW = (1.2021132975e-01, 7.3700164250e-01, 1.0)
# The series of artanh(t) / t, in t * t.
_ARTANH = tuple(1.0 / k for k in range(19, 0, -2))
_LOG_2, _SQRT_HALF = 0.6931471805599453, 0.7071067811865476


def initial_rows(
    initializer: Initializer, keys: Ids, dim: int, out: Float32 | None = None
) -> Float32:
    """The values of rows that do not exist yet: (n, dim) float32, into `out` if it is given."""
    if out is None:
        out = np.empty((keys.size, dim), np.float32)
    if isinstance(initializer, Zeros):
        out.fill(0.0)
        return out
    assert isinstance(initializer, Uniform | Normal)
    if is_normal := isinstance(initializer, Normal):
        scale, shift = initializer.std, initializer.mean
    else:  # the power of two rounds nothing, wherever it is
        scale, shift = (initializer.high - initializer.low) * 2.0**-24, initializer.low
    seed = np.array([initializer.seed], np.uint64) + np.uint64(_SEED_STEP)
    words = mix(keys.view(np.uint64) + mix(seed))
    step = max(_BLOCK_ELEMENT_COUNT // dim, 1)
    bits, more_bits = np.empty((2, min(step, keys.size), dim), np.uint32)
    u, r, z = np.empty((3, *bits.shape), np.float64)
    for start in range(0, keys.size, step):
        into = out[start : start + step]
        n = len(into)
        _shuffle(words[start : start + step], bits[:n], more_bits[:n])
        np.copyto(u[:n], bits[:n].view(np.int32))  # SIMD knows signed ones
        values = np.add(u[:n], 0.5, out=u[:n])
        if is_normal:
            np.multiply(values, 2.0**-24, out=values)
            values = _inverse_normal(values, r[:n], z[:n])
        np.multiply(values, scale, out=values)
        np.add(values, shift, out=into)
    return out


def _shuffle(words: Words, bits: Words32, shifted: Words32) -> None:
    columns = np.arange(bits.shape[1], dtype=np.uint32) * _COLUMN_STEP
    np.add(words.astype(np.uint32)[:, np.newaxis], columns, out=bits)
    np.bitwise_xor(bits, (words >> np.uint64(32)).astype(np.uint32)[:, np.newaxis], out=bits)
    for shift, factor in _SHUFFLES:
        np.right_shift(bits, np.uint32(shift), out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        if factor != 1:
            np.multiply(bits, np.uint32(factor), out=bits)
    np.right_shift(bits, np.uint32(8), out=bits)


def _inverse_normal(u: Float64, r: Float64, z: Float64) -> Float64:
    """Returns z; u is at least 2^-25 from 0 and 1, so the third case, r above 5, has no use."""
    q = np.subtract(u, 0.5, out=u)
    in_tail = np.flatnonzero(np.abs(q, out=z) > _CENTRE)
    tail = np.take(q, in_tail)
    np.multiply(q, q, out=r)
    np.subtract(_CENTRE_SQUARE, r, out=r)
    np.multiply(q, _polynomial(_CENTRE_ABOVE, r, out=z), out=z)
    np.divide(z, _polynomial(_CENTRE_BELOW, r, out=q), out=z)
    far = np.sqrt(-_log(0.5 - np.abs(tail)))
    far -= 1.6
    far = _polynomial(_TAIL_ABOVE, far) / _polynomial(_TAIL_BELOW, far)
    np.put(z, in_tail, np.copysign(far, tail))
    return z


def _log(x: Float64) -> Float64:
    f, e = np.frexp(x)
    is_small = f < _SQRT_HALF
    np.multiply(f, 2.0, out=f, where=is_small)
    e = e.astype(np.float64) - is_small
    t = (f - 1.0) / (f + 1.0)
    return e * _LOG_2 + 2.0 * t * _polynomial(_ARTANH, t * t)


def _polynomial(coefficients: tuple[float, ...], x: Float64, out: Float64 | None = None) -> Float64:
    found = np.multiply(x, coefficients[0], out=out)
    for coefficient in coefficients[1:-1]:
        np.add(found, coefficient, out=found)
        np.multiply(found, x, out=found)
    np.add(found, coefficients[-1], out=found)
    return found
