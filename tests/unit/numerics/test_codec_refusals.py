"""Goal: what is not finite is refused with its place, or passes when it is allowed; sums are right.

Method: NaN and infinities put at chosen places, also behind the first block; decode_add against the
same sum in float64.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from fastcrc import crc32
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.oracles.codec import FLOAT32_MAX, decoded, encoded, fp16_value, roundtrip
from shardwell.numerics import native
from shardwell.numerics.codec import CODECS, SUMMED_CODECS, NonFiniteValueError
from shardwell.numerics.elementwise import add_scaled, run
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
    assert codec.first_non_finite(encoded(name, values)) is None
    for bad in BAD:
        for place in (499, 321, 0):
            values = np.ones(500, np.float32)
            values[place::50] = bad
            payload = encoded(name, values, allow_non_finite=True)
            assert codec.first_non_finite(payload) == place


def in_blocks_of_2(bits: list[int], exponents: list[int]) -> np.ndarray:
    """A payload of fp16 that no writer writes."""
    halves = np.array(bits, np.uint16).view(np.uint8)
    return np.concatenate([halves, np.array(exponents, np.int8).view(np.uint8)])


def test_first_non_finite_counts_an_overflow_of_the_scale() -> None:
    codec = SUMMED_CODECS["fp16"].in_blocks_of(2)
    for value, finite in ((511.75, True), (512.0, False), (-512.0, False), (65504.0, False)):
        written = np.array([1.0, 65504.0, value, 600.0 if not finite else 2.0], np.float16)
        payload = in_blocks_of_2(written.view(np.uint16).tolist(), [0, 119])
        assert codec.first_non_finite(payload) == (None if finite else 2)
        assert (codec.peak(payload) == math.inf) is not finite


@settings(deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=30),
    exponents=st.lists(st.integers(-128, 127), min_size=15, max_size=15),
)
def test_first_non_finite_of_any_fp16_payload(bits: list[int], exponents: list[int]) -> None:
    """And the peak, and what a look in the pass that reads says, with the payload's CRC."""
    exponents = exponents[: -(-len(bits) // 2)]
    payload = in_blocks_of_2(bits, exponents)
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.repeat(exponents, 2)[: len(bits)]
        values = np.ldexp(fp16_value(np.array(bits, np.uint16)), powers).astype(np.float32)
    bad = [index for index, value in enumerate(values) if not math.isfinite(value)]
    codec, found = SUMMED_CODECS["fp16"].in_blocks_of(2), np.zeros(len(bits), np.float32)
    assert codec.first_non_finite(payload) == (bad[0] if bad else None)
    peak = math.inf if bad else float(np.abs(values).max())
    assert codec.peak(payload) == peak
    looked, crc = codec.decode_looked(payload, found, 7)
    assert (codec.peak_of_bits(looked), crc) == (peak, crc32.iscsi(payload.tobytes(), 7))
    assert codec.take(payload, None, 7) == (looked, crc)
    np.testing.assert_array_equal(found, values)


def test_each_size_of_a_payload_has_one_number_of_elements_or_none() -> None:
    for block_size in (1, 2, 16, 48, 256, 1000):
        codec = CODECS["fp16"].in_blocks_of(block_size)
        sizes = {2 * n + math.ceil(n / block_size): n for n in range(2100)}
        for size in range(max(sizes) + 1):
            assert codec.element_count(size) == sizes.get(size, -1)
        assert all(codec.encoded_bytes(count) == size for size, count in sizes.items())


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
    payload = encoded(name, values)
    received = decoded(name, payload).astype(np.float64)
    parts = weight * received, total_factor * total.astype(np.float64)
    out = np.empty(COUNT, np.float32)
    SUMMED_CODECS[name].decode_add(payload, weight, total, total_factor, out)
    assert (np.abs(out - sum(parts)) <= 2.0**-22 * sum(map(np.abs, parts)) + 2.0**-148).all()
    SUMMED_CODECS[name].decode_add(payload, weight, total, total_factor, total)
    assert total.tobytes() == out.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_decode_add_of_integers_is_exact(name: str) -> None:
    values = np.arange(-100, 101).astype(np.float32)
    total = np.arange(201).astype(np.float32)
    payload = encoded(name, values)
    SUMMED_CODECS[name].decode_add(payload, 1024.0, total, 1000.0, total)
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
    received = decoded(name, encoded(name, values, allow_non_finite=True))
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


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 5000])
def test_what_is_kept_is_read_while_a_sum_is_written_over_it(name: str, count: int) -> None:
    """As a shard does with the first contribution of a step, some blocks after another."""
    codec = CODECS[name].summed
    values, other = np.random.default_rng(count).standard_normal((2, count)).astype(np.float32)
    payload = encoded(codec.name, values)
    memory = np.full(count, np.nan, np.float32)
    codec.keep(payload, memory)
    stored, exponents = codec.kept(memory)
    if count:
        assert np.shares_memory(stored, memory)
    operations = codec.reads_kept(0, 2, 3) + add_scaled(0, 1, 0.5)
    for start in range(0, count, 512):
        run(operations, (memory, other, stored, exponents), start, min(start + 512, count))
    wanted = decoded(codec.name, payload)
    wanted = wanted + np.float32(0.5) * other
    assert memory.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("exponent", [-126, -3, 0, 119])
@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_a_payload_of_an_earlier_version_has_the_same_values(
    exponent: int, block_size: int
) -> None:
    codec = CODECS["fp16"].in_blocks_of(block_size)
    halves = np.random.default_rng(1).standard_normal(1001).astype(np.float16)
    before = halves.view(np.uint8)
    found = decoded("fp16", codec.upgraded(before, exponent, 1001), block_size=block_size)
    assert found.tobytes() == np.ldexp(halves.astype(np.float32), exponent).tobytes()
    payload = encoded("fp16", found, block_size=block_size)
    assert codec.upgraded(payload, exponent, 1001) is payload
    for name in ("fp32", "bf16", "int8"):
        payload = encoded(name, found)
        assert CODECS[name].upgraded(payload, 0, 1001) is payload


@pytest.mark.parametrize("native_code", [True, False])
@pytest.mark.parametrize("count", [1, 256, 2049, 4096, 5000, 300_000])
def test_exponents_that_change_after_they_were_checked_are_not_used(
    count: int, native_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes to them: the values are those of the exponents that were checked."""
    codec, values = CODECS["fp16"], np.ones(count, np.float32)
    if not native_code:
        monkeypatch.setattr(native, "LIBRARY", None)
    payload, found = encoded("fp16", values), np.empty(count, np.float32)
    crc = codec.decode_checked(payload, found, 5, may_change=False)
    assert crc == crc32.iscsi(payload.tobytes(), 5)
    memory, is_over = payload.copy(), threading.Event()

    def write() -> None:
        while not is_over.is_set():
            memory[2 * count :] ^= 0x11

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            if codec.decode_checked(memory, found, 5, may_change=True) == crc:
                assert (found == 1.0).all()
    finally:
        is_over.set()
        writer.join()
