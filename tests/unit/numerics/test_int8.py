"""Goal: int8 comes back within its bounds, and the same values have one payload, however cut.

Method: an oracle of plain loops in float64 that knows only what the .proto says of CODEC_INT8;
sizes around a block's, values at float32's edges, hypothesis between them, and damaged payloads.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwell.numerics import int8
from shardwell.numerics.codec import CODECS, NonFiniteValueError, block_codec

BLOCK = 4096
FLOAT32_MAX = float(np.finfo(np.float32).max)
SMALLEST_PEAK = 2.0**-100
SIZES = [1, 2, 4095, 4096, 4097, 3 * 4096, 32 * 4096, 33 * 4096 - 1, 64 * 4096 + 7]
CODEC = CODECS["int8"]


def some_values(count: int, seed: int = 3) -> np.ndarray:
    """Blocks of very different magnitudes."""
    random = np.random.default_rng(seed)
    magnitudes = np.exp2(random.integers(-40, 40, -(-count // BLOCK))).repeat(BLOCK)[:count]
    return (random.standard_normal(count) * magnitudes).astype(np.float32)


def written(values: np.ndarray) -> np.ndarray:
    payload = np.full(CODEC.encoded_bytes(values.size), 0xA5, np.uint8)
    CODEC.encode(values, payload)
    return payload


def read(payload: np.ndarray) -> np.ndarray:
    values = np.full(CODEC.element_count(payload.size), np.nan, np.float32)
    CODEC.decode(payload, values)
    return values


def taken_apart(payload: np.ndarray, count: int) -> tuple[list[float], list[int]]:
    """Scales and levels of a payload, as the .proto lays them out."""
    blocks = (count + BLOCK - 1) // BLOCK
    assert payload.size == 4 * blocks + count
    stored = payload.tobytes()
    scales = list(struct.unpack(f"<{blocks}f", stored[: 4 * blocks]))
    return scales, list(struct.unpack(f"<{count}b", stored[4 * blocks :]))


def check(values: np.ndarray) -> np.ndarray:
    """Asserts all that is said of the payload of values; returns what is read of it."""
    payload = written(values)
    scales, levels = taken_apart(payload, values.size)
    back = read(payload)
    exact = [float(value) for value in values.astype(np.float32)]
    for number, scale in enumerate(scales):
        block = exact[number * BLOCK : (number + 1) * BLOCK]
        peak = max(abs(value) for value in block)
        assert math.isfinite(scale)
        assert abs(scale - peak / 127) <= 2.0**-22 * peak / 127 or peak < SMALLEST_PEAK
        assert (scale == 0) == (peak < SMALLEST_PEAK)
        bound = scale / 2 * (1 + 2.0**-15) if scale else SMALLEST_PEAK
        for place, value in enumerate(block, number * BLOCK):
            level, found = levels[place], float(back[place])
            assert -127 <= level <= 127
            # One product of a float32 and a small integer, rounded once.
            assert found == float(np.float32(np.float64(scale) * level))
            assert abs(found - value) <= bound + abs(found) * 2.0**-24
            assert abs(found - value) <= peak / 254 * (1 + 2.0**-15) or not scale
            assert level == 0 or (level > 0) == (value > 0)
            if scale and abs(value) == peak:
                assert abs(level) == 127
    return back


@pytest.mark.parametrize("count", SIZES[:6])
def test_values_come_back_within_the_bounds(count: int) -> None:
    check(some_values(count))


@pytest.mark.parametrize("count", SIZES)
def test_values_of_many_blocks_do_too(count: int) -> None:
    """By the same oracle, in whole arrays of float64."""
    values = some_values(count)
    back = read(written(values)).astype(np.float64)
    padded = np.zeros(-(-count // BLOCK) * BLOCK)
    padded[:count] = np.abs(values)
    peaks = padded.reshape(-1, BLOCK).max(axis=1).repeat(BLOCK)[:count]
    assert (np.abs(back - values) <= peaks / 254 * (1 + 2.0**-15)).all()


def test_nothing_is_a_payload_of_nothing() -> None:
    none = np.empty(0, np.float32)
    assert written(none).size == 0
    assert read(np.empty(0, np.uint8)).size == 0
    assert int8.peak(np.empty(0, np.uint8)) == 0


@pytest.mark.parametrize("count", [0, *SIZES, 2**20, 2**31 + 5])
def test_a_payload_says_how_many_elements_it_has(count: int) -> None:
    size = count + 4 * math.ceil(count / BLOCK)
    assert CODEC.encoded_bytes(count) == size
    assert CODEC.element_count(size) == count


def test_each_size_has_one_number_of_elements_or_none() -> None:
    sizes = {CODEC.encoded_bytes(count): count for count in range(3 * BLOCK)}
    for size in range(max(sizes) + 1):
        assert CODEC.element_count(size) == sizes.get(size, -1)


@pytest.mark.parametrize("exponent", range(-149, 128))
def test_int8_codes_every_magnitude_of_float32(exponent: int) -> None:
    for mantissa in (1.0, 1.5, 1 + 2**-10, 2 - 2**-11, 2 - 2**-23):
        peak = math.ldexp(mantissa, exponent)
        wanted = [peak, -peak, peak / 3, peak / 254, -peak / 253, peak / 255, 0.0, -0.0]
        check(np.array(wanted).astype(np.float32))


@pytest.mark.parametrize("below", [0, 1, 2, 60, 127, 128, 1000])
def test_int8_does_not_overflow_around_the_largest(below: int) -> None:
    largest = np.array([FLOAT32_MAX], np.float32).view(np.uint32)[0] - below
    peak = np.array([largest], np.uint32).view(np.float32)
    check(np.concatenate([peak, -peak, peak / 2, [1.0]]).astype(np.float32))


def test_a_block_below_the_smallest_peak_is_zeros() -> None:
    below = np.nextafter(np.float32(SMALLEST_PEAK), np.float32(0))
    values = np.full(3 * BLOCK, below, np.float32)
    values[BLOCK] = SMALLEST_PEAK  # and only that of the second is not
    values[-1] = 2.0**-149
    back = check(values)
    assert not back[:BLOCK].any()
    assert back[BLOCK : 2 * BLOCK].all()
    assert not back[2 * BLOCK :].any()


def test_zeros_are_zeros_without_a_sign() -> None:
    back = check(np.array([0.0, -0.0] * 3000, np.float32))
    assert back.tobytes() == bytes(4 * back.size)


def test_whole_numbers_of_a_scale_stay_exact() -> None:
    values = np.arange(-127, 128).astype(np.float32)
    for exponent in (-90, -3, 0, 60, 119):
        scaled = np.ldexp(values, exponent)
        assert check(scaled).tobytes() == scaled.tobytes()


def test_a_large_block_does_not_touch_its_neighbours() -> None:
    values = some_values(3 * BLOCK)
    alone = written(values[2 * BLOCK :])
    values[: 2 * BLOCK] = FLOAT32_MAX
    beside = written(values)
    assert beside[8:12].tobytes() == alone[:4].tobytes()
    assert beside[12 + 2 * BLOCK :].tobytes() == alone[4:].tobytes()


@settings(deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
)
@example([FLOAT32_MAX, 1.0])
@example([-FLOAT32_MAX, FLOAT32_MAX, SMALLEST_PEAK])
@example([2.0**-149])
def test_int8_codes_any_finite_values(values: list[float]) -> None:
    check(np.array(values, np.float32))


@settings(deadline=None, max_examples=25)
@given(
    count=st.integers(1, 40 * BLOCK),
    seed=st.integers(0, 2**32 - 1),
    peaks=st.lists(st.sampled_from([0.0, 1e-44, 1e-30, 1.0, 7e4, 1e20, 3e38]), max_size=40),
)
def test_parts_have_the_bits_of_the_whole(count: int, seed: int, peaks: list[float]) -> None:
    """Read and written from any block on, as a shard does where its kernels stop for a while."""
    values = some_values(count, seed)
    for number, peak in enumerate(peaks[: -(-count // BLOCK)]):
        values[number * BLOCK] = peak
    whole, parts = written(values), np.full(CODEC.encoded_bytes(count), 0x5A, np.uint8)
    random = np.random.default_rng(seed)
    inner = random.integers(0, -(-count // BLOCK), 3) * BLOCK
    starts = sorted({0, *(int(place) for place in inner)})
    largest = [
        int8.quantize(values[start:stop], parts, start)
        for start, stop in zip(starts, [*starts[1:], count], strict=True)
    ]
    assert parts.tobytes() == whole.tobytes()
    assert max(largest) == float(np.abs(values).max())
    back = np.full(count, np.nan, np.float32)
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        int8.dequantize(whole, back[start:stop], start)
    assert back.tobytes() == read(whole).tobytes()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, BLOCK - 1, BLOCK, 33 * BLOCK - 1, 40 * BLOCK])
def test_int8_refuses_the_first_bad_value_with_its_index(bad: float, place: int) -> None:
    values = np.ones(40 * BLOCK + 1, np.float32)
    values[place] = bad
    values[place + 1 :: 37] = math.nan
    with pytest.raises(NonFiniteValueError) as caught:
        written(values)
    assert caught.value.index == place
    assert np.array_equal(caught.value.value, bad, equal_nan=True)


def test_int8_refuses_a_float64_beyond_float32() -> None:
    with pytest.raises(NonFiniteValueError) as caught:
        written(np.array([1.0, 2.0, 1e39, 1e300]))
    assert caught.value.index == 2


def test_any_layout_and_dtype_has_the_same_bits() -> None:
    halves = np.random.default_rng(1).standard_normal(5000).astype(np.float16)
    wanted = written(halves.astype(np.float32)).tobytes()
    for same in (
        halves,
        halves.astype(np.float64),
        halves.astype(">f4"),
        np.repeat(halves.astype(np.float32), 2)[::2],
        halves.astype(np.float32)[::-1].copy()[::-1],
        np.frombuffer(b"x" + halves.astype(np.float32).tobytes(), np.uint8)[1:].view(np.float32),
    ):
        assert written(same).tobytes() == wanted


@pytest.mark.parametrize("count", SIZES)
def test_the_residual_is_what_reading_lacks(count: int) -> None:
    values = some_values(count)
    found = block_codec("int8").residual(values)
    assert found.tobytes() == (values - read(written(values))).tobytes()


@pytest.mark.parametrize("count", SIZES)
def test_the_peak_is_that_of_what_is_read(count: int) -> None:
    payload = written(some_values(count))
    assert CODEC.peak(payload) == float(np.abs(read(payload)).max())
    bits, _ = CODEC.take(payload, None, 0)
    assert CODEC.peak_of_bits(bits) == CODEC.peak(payload)
    assert CODEC.first_non_finite(payload) is None


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("level", [0, 1, -127])
@pytest.mark.parametrize("scale", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_is_found(block: int, level: int, scale: float) -> None:
    """Also where all of its block's elements are zeros."""
    count = 2 * BLOCK + 100
    payload = written(np.ones(count, np.float32))
    payload[:12].view("<f4")[block] = scale
    payload[12:].view(np.int8)[block * BLOCK : (block + 1) * BLOCK] = level
    assert CODEC.peak(payload) == math.inf
    assert CODEC.first_non_finite(payload) == block * BLOCK
    values = np.empty(count, np.float32)
    bits, crc = CODEC.decode_looked(payload, values, 0)
    assert (CODEC.peak_of_bits(bits), crc) == (math.inf, CODEC.take(payload, None, 0)[1])


@pytest.mark.parametrize("level", [127, -127, -128])
def test_a_value_that_overflows_is_found(level: int) -> None:
    payload = written(np.ones(BLOCK + 50, np.float32))
    payload[:8].view("<f4")[1] = FLOAT32_MAX / 100
    levels = payload[8:].view(np.int8)
    levels[BLOCK:] = 1
    assert CODEC.peak(payload) == np.float32(FLOAT32_MAX / 100)
    levels[BLOCK + 7] = level
    assert CODEC.peak(payload) == math.inf
    assert CODEC.first_non_finite(payload) == BLOCK + 7


def test_what_no_writer_writes_is_read_as_it_says() -> None:
    """A scale below 0, and the byte -128: values as others, with a peak that covers them."""
    payload = written(np.full(100, 1.0, np.float32))
    payload[:4].view("<f4")[0] = -0.5
    payload[4:].view(np.int8)[:3] = (-128, 127, 1)
    assert read(payload)[:3].tolist() == [64.0, -63.5, -0.5]
    assert CODEC.peak(payload) == 64.0


@settings(deadline=None)
@given(st.binary(min_size=5, max_size=60))
def test_the_peak_of_any_bytes_covers_their_values(stored: bytes) -> None:
    payload = np.frombuffer(bytearray(stored), np.uint8)
    (scale,) = struct.unpack("<f", stored[:4])
    levels = struct.unpack(f"<{len(stored) - 4}b", stored[4:])
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = [abs(float(np.float32(np.float64(scale) * level))) for level in levels]
    is_finite = math.isfinite(scale) and all(map(math.isfinite, wanted))
    assert CODEC.peak(payload) == (max(wanted) if is_finite else math.inf)
    bad = [place for place, value in enumerate(wanted) if not math.isfinite(value)]
    assert CODEC.first_non_finite(payload) == (bad[0] if bad else None)


def test_a_payload_that_may_change_is_read_from_a_copy() -> None:
    values = some_values(5000)
    payload, copies = written(values), [np.empty(CODEC.encoded_bytes(5000), np.uint8)]
    back = np.empty(5000, np.float32)
    CODEC.decode(payload, back, copies)
    assert copies[0].tobytes() == payload.tobytes()
    into = np.empty_like(payload)
    _, crc = CODEC.take(payload, into, 99)
    assert into.tobytes() == payload.tobytes()
    for may_change in (False, True):
        again = np.empty(5000, np.float32)
        assert CODEC.decode_checked(payload, again, 99, may_change=may_change) == crc
        assert again.tobytes() == back.tobytes()
