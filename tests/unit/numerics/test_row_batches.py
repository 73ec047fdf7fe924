"""Goal: rows are sorted, found, gathered, scattered, added up and spread, the same in C and NumPy.

Method: the library as the package's build makes it, as processors without AVX-512 run it, and
NumPy, each against plain Python; what does not fit is refused, with nothing touched. test_native.py
runs all of it under sanitizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fastcrc import crc32
from hypothesis import given
from hypothesis import strategies as st

from harness.native_library import library_of
from harness.oracles.codec import decoded, encoded
from shardwell import SGD, Adagrad
from shardwell.numerics import elementwise, native, row_batches
from shardwell.numerics.codec import SUMMED_CODECS
from shardwell.numerics.elementwise import Code, Operation
from shardwell.numerics.row_update_rules import RowUpdateRule
from shardwell.placement.rows import RowPlacement

KEYS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([2**63 - 1, -(2**63), 2**32, 2**16]),
)
SHARD_COUNTS = st.sampled_from([1, 2, 3, 7, 8, 64, 65_535])
WAYS = ["NumPy", "", "-DWITHOUT_AVX512"]


@pytest.fixture(scope="module", params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    library = None
    if request.param != "NumPy":
        library = library_of(tmp_path_factory.mktemp("native"), request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LIBRARY", library)
        yield request.param


# Ids.


def _check_sorted(ids: np.ndarray, placement: RowPlacement) -> None:
    found = row_batches.sort_ids(ids, placement)
    keys = sorted(set(ids.tolist()))
    shards = dict(zip(keys, placement.shards_of(np.array(keys, np.int64)).tolist(), strict=True))
    distinct = sorted(keys, key=lambda key: (shards[key], key))
    assert found.distinct.tolist() == distinct
    in_order = [shards[key] for key in distinct]
    assert found.bounds == [
        sum(shard < bound for shard in in_order) for bound in range(placement.shard_count + 1)
    ]
    groups = [found.places[start:stop].tolist() for start, stop in pairwise(found.starts)]
    by_key: dict[int, list[int]] = {key: [] for key in distinct}
    for place, key in enumerate(ids.tolist()):
        by_key[key].append(place)
    assert groups == list(by_key.values())
    assert found.starts[0] == 0
    assert found.places.size == found.inverse.size == ids.size
    assert found.distinct[found.inverse].tolist() == ids.tolist()
    assert found.is_plain == (distinct == ids.tolist())


@given(st.lists(KEYS, max_size=60), SHARD_COUNTS)
def test_keys_are_sorted_by_shard(keys: list[int], shard_count: int) -> None:
    _check_sorted(np.array(keys, np.int64), RowPlacement(None, shard_count))


@given(st.lists(st.integers(0, 99), max_size=120), SHARD_COUNTS)
def test_ids_are_sorted_by_shard(ids: list[int], shard_count: int) -> None:
    _check_sorted(np.array(ids, np.int64), RowPlacement(100, shard_count))


@pytest.mark.parametrize("size", [1000, 1024, 5000])
@pytest.mark.parametrize("bits", [1, 8, 11, 12, 16, 33, 63, 64])
def test_many_ids_of_every_width(size: int, bits: int) -> None:
    words = np.random.default_rng(bits).integers(0, 2**bits - 1, size, np.uint64, endpoint=True)
    ids = words.view(np.int64)
    ids[size // 2 :] = ids[: size - size // 2]
    _check_sorted(ids, RowPlacement(None, 3))
    _check_sorted(np.sort(ids), RowPlacement(None, 1))


@given(st.lists(KEYS, max_size=30), SHARD_COUNTS, st.booleans())
def test_ids_of_a_shard_fit_and_no_others(
    keys: list[int], shard_count: int, has_row_count: bool
) -> None:
    row_count = 2**62 if has_row_count else None
    if row_count is not None:
        keys = [key % row_count for key in keys]
    placement = RowPlacement(row_count, shard_count)
    ids = np.unique(np.array(keys, np.int64))
    shards = placement.shards_of(ids)
    for shard_index in {0, shard_count - 1, *shards.tolist()}:
        own = ids[shards == shard_index]
        assert row_batches.are_fit(own, placement, shard_index)
        if own.size > 1:
            assert not row_batches.are_fit(own[::-1].copy(), placement, shard_index)
            assert not row_batches.are_fit(own.repeat(2), placement, shard_index)
        for other in ids[shards != shard_index][:2]:
            assert not row_batches.are_fit(np.sort(np.append(own, other)), placement, shard_index)


@pytest.mark.parametrize("ids", [[-1], [-(2**63), 3], [3, 10], [3, 2**63 - 1], [10]])
def test_ids_out_of_range_do_not_fit(ids: list[int]) -> None:
    assert not row_batches.are_fit(np.array(ids), RowPlacement(10, 1), 0)
    assert row_batches.are_fit(np.array([0, 9]), RowPlacement(10, 1), 0)


@given(st.lists(st.integers(0, 99), max_size=50), st.sampled_from([np.int32, np.int64]))
def test_places_are_found(rows: list[int], kind: Any) -> None:
    marks = np.random.default_rng(1).integers(0, 3, 100).astype(kind)
    places, missing_count = row_batches.find(
        np.array(rows, int) * 3 + 1, RowPlacement(300, 3), marks
    )
    assert places.tolist() == [int(marks[row]) - 1 for row in rows]
    assert missing_count == sum(marks[row] == 0 for row in rows)


# Rows.


@given(
    st.lists(st.integers(-1, 19), max_size=40),
    st.sampled_from([(np.float32, (1,)), (np.float32, (64,)), (np.int64, ()), (np.bool_, ())]),
)
def test_rows_are_gathered(places: list[int], kind: Any) -> None:
    dtype, shape = kind
    random = np.random.default_rng(len(places))
    array = random.standard_normal((20, *shape)).astype(dtype)
    into = np.zeros((len(places) + 2, *shape), dtype)
    row_batches.gather(array, np.array(places, np.int64), into)
    for row, place in zip(into, places, strict=False):
        assert place == -1 or (row == array[place]).all()
    assert not into[len(places) :].any()


@given(st.permutations(range(20)), st.integers(0, 20), st.sampled_from([1, 3, 64, 100]))
def test_rows_are_scattered(places: list[int], count: int, dim: int) -> None:
    random = np.random.default_rng(dim)
    array = random.standard_normal((20, dim)).astype(np.float32)
    rows = random.standard_normal((count, dim)).astype(np.float32)
    expected = array.copy()
    expected[places[:count]] = rows
    row_batches.scatter(array, np.array(places[:count], np.int64), rows)
    assert array.tobytes() == expected.tobytes()


def _some_groups(random: np.random.Generator, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Places of groups of these sizes, and where each group begins."""
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    return random.permutation(int(starts[-1])), starts


def _segments_added(rows: list[np.ndarray]) -> np.ndarray:
    """As it is said, one row after another."""
    while len(rows) > 1:
        sums = []
        for start in range(0, len(rows), 8):
            total = rows[start].copy()
            for row in rows[start + 1 : start + 8]:
                total = total + row
            sums.append(total)
        rows = sums
    return rows[0]


@pytest.mark.parametrize("dim", [1, 64, 2050])
@pytest.mark.parametrize(
    "sizes", [[1], [2], [8], [9], [64], [65], [1, 7, 1, 8, 2], [513, 1, 71], [1] * 30]
)
def test_groups_are_added_up_in_segments(sizes: list[int], dim: int) -> None:
    random = np.random.default_rng(dim)
    places, starts = _some_groups(random, sizes)
    rows = random.standard_normal((places.size, dim)).astype(np.float32)
    rows[::7, 0] = -0.0
    sums, bits = row_batches.add_up(rows, places, starts)
    expected = np.array(
        [_segments_added(list(rows[places[start:stop]])) for start, stop in pairwise(starts)]
    )
    assert sums.tobytes() == expected.tobytes()
    several = np.abs(expected[np.array(sizes) > 1])
    assert bits == (int(several.max().view(np.uint32)) if several.size else 0)


def test_sums_beyond_float32_are_seen() -> None:
    rows = np.full((3, 2), 3e38, np.float32)
    sums, bits = row_batches.add_up(rows, np.arange(3), np.array([0, 2, 3]))
    assert np.isinf(sums[0]).all()
    assert bits == 0x7F800000


BY_ELEMENT = {
    "sgd": SGD(learning_rate=0.3),
    "sgd, all": SGD(learning_rate=0.3, weight_decay=0.2, clip_value=1.0),
    "adagrad": Adagrad(learning_rate=0.1),
    "adagrad, all": Adagrad(learning_rate=0.1, weight_decay=0.2, clip_value=0.5),
}


def _values(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Of every magnitude, with zeros, denormals, infinities and NaN among them."""
    values = random.standard_normal(shape).astype(np.float32)
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 1e-40, 3e38], np.float32)
    is_odd = random.random(shape) < 0.2
    values[is_odd] = random.choice(odd, int(is_odd.sum()))
    return values


@pytest.mark.parametrize("optimizer", BY_ELEMENT)
@pytest.mark.parametrize("dim", [1, 7, 64, 2048, 2049, 5000])
@pytest.mark.parametrize("count", [0, 1, 33])
def test_rows_are_updated_where_they_lie(optimizer: str, dim: int, count: int) -> None:
    """As copies of them are, on which one operation after another is run by NumPy."""
    rule, random = RowUpdateRule(BY_ELEMENT[optimizer]), np.random.default_rng(dim)
    operations = rule.operations(0.37)
    assert operations is not None
    arrays = [np.abs(_values(random, 40, dim)) for _ in range(1 + len(rule.initial_slots))]
    before = [array.copy() for array in arrays]
    saved = [np.zeros_like(array) for array in arrays]
    gradients, places = _values(random, count, dim), random.permutation(40)[:count]
    rows = [array[places] for array in arrays]
    every = (rows[0], gradients.copy(), None, *rows[1:])
    flat = tuple(None if each is None else each.reshape(-1) for each in every)
    elementwise._run_by_numpy(operations, flat, 0, count * dim)
    row_batches.update(operations, gradients, places, arrays, saved)
    for array, was, kept, new in zip(arrays, before, saved, rows, strict=True):
        assert kept[:count].tobytes() == was[places].tobytes()
        found, others = array[places], np.delete(array, places, axis=0)
        assert others.tobytes() == np.delete(was, places, axis=0).tobytes()
        is_nan = np.isnan(new)
        assert (np.isnan(found) == is_nan).all()
        assert found[~is_nan].tobytes() == new[~is_nan].tobytes()


def test_operations_on_other_places_are_refused() -> None:
    if native.LIBRARY is None:
        return
    array = np.ones((4, 8), np.float32)
    for each in (
        Operation(Code.COPY, 4, 0),
        Operation(Code.COPY, 0, 3),
        Operation(Code.MULTIPLY, 0, 1, 5),
        Operation(Code.READ_FP16, 0, 1),
        Operation(Code.CHECK_32, 0, 1),
        Operation(Code.COPY_32, 0, 1),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            row_batches.update((each,), array.copy(), np.arange(4), [array], [array.copy()])
    assert (array == 1).all()


@pytest.mark.parametrize("name", SUMMED_CODECS)
@pytest.mark.parametrize("dim", [1, 5, 64, 3000])
def test_rows_are_spread_to_all_their_places(way: str, name: str, dim: int) -> None:
    if not row_batches.can_spread():
        assert way == "NumPy"
        return
    codec, random = SUMMED_CODECS[name].in_blocks_of(dim), np.random.default_rng(dim)
    places, starts = _some_groups(random, [1, 3, 1, 1, 9, 2, *[1] * 40])
    first, stop = 2, 40
    values = random.standard_normal((stop - first) * dim).astype(np.float32)
    values *= np.exp2(random.integers(-30, 30, stop - first)).astype(np.float32).repeat(dim)
    payload = encoded(name, values, block_size=dim)
    into, reads = np.full((places.size, dim), np.nan, np.float32), codec.reads(0, 1, 1.0)
    crc = row_batches.spread(reads, payload, places, starts, first, stop, into, 7)
    assert crc == crc32.iscsi(payload.tobytes(), 7)
    expected = np.full_like(into, np.nan)
    for number, row in enumerate(decoded(name, payload, block_size=dim).reshape(-1, dim)):
        expected[places[starts[first + number] : starts[first + number + 1]]] = row
    np.testing.assert_array_equal(into, expected)


# What does not fit.

_INTS = [np.arange(4), np.array([0, 4]), np.array([0, 1, 2, 3, 4])]
_FLOATS = np.ones((4, 8), np.float32)
_MARKS = np.zeros(4, np.int32)


def _read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


_NOTHING = (b"", 0, _FLOATS.copy())
"""Operations, how many, and gradients."""
_ONE = (_FLOATS.copy(), _FLOATS.copy())
"""Weights, and where they are saved."""
MISFITS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "a place that there is not": ("gather", (_FLOATS, 32, np.array([4]), _FLOATS, 0, 0)),
    "a place below -1": ("gather", (_FLOATS, 32, np.array([-2]), _FLOATS, 0, 0)),
    "more rows than room": ("gather", (_FLOATS, 32, np.zeros(5, int), _FLOATS.copy(), 0, 0)),
    "rows without size": ("gather", (_FLOATS, 0, np.arange(1), _FLOATS, 0, 0)),
    "a room that is read-only": ("gather", (_FLOATS, 32, _INTS[0], _read_only(_FLOATS), 0, 0)),
    "rows with gaps": ("gather", (_FLOATS[:, ::2], 16, _INTS[0], _FLOATS, 0, 0)),
    "what has no memory": ("gather", (_FLOATS, 32, None, _FLOATS, 0, 0)),
    "a place of none": ("scatter", (_FLOATS.copy(), 32, np.array([-1]), _FLOATS, 0)),
    "a place too far": ("scatter", (_FLOATS.copy(), 32, np.array([4]), _FLOATS, 0)),
    "fewer rows than places": ("scatter", (_FLOATS.copy(), 32, np.arange(4), _FLOATS[:3], 0)),
    "an array that is read-only": ("scatter", (_read_only(_FLOATS), 32, _INTS[0], _FLOATS, 0)),
    "an id beyond the marks": (
        "find",
        (np.array([8]), 2, np.zeros(4, np.int32), 4, _INTS[0].copy()),
    ),
    "a negative id": ("find", (np.array([-1]), 2, np.zeros(4, np.int32), 4, _INTS[0].copy())),
    "marks of another size": (
        "find",
        (np.array([1]), 2, np.zeros(4, np.int16), 2, _INTS[0].copy()),
    ),
    "no shards": ("find", (np.array([1]), 0, np.zeros(4, np.int32), 4, _INTS[0].copy())),
    "too little room": ("sort_ids", (np.arange(4), 0, 2, np.empty(35, np.int64))),
    "no shard": ("sort_ids", (np.arange(4), 0, 0, np.empty(99, np.int64))),
    "ids of none": ("check_ids", (np.arange(4), 0, 0, 0)),
    "groups that end too late": (
        "add_up",
        (_FLOATS, 8, _INTS[0], np.array([0, 5]), _FLOATS.copy(), np.empty((12, 8), np.float32)),
    ),
    "groups that descend": (
        "add_up",
        (_FLOATS, 8, _INTS[0], np.array([0, 3, 2]), _FLOATS.copy(), np.empty((12, 8), np.float32)),
    ),
    "a group of nothing": (
        "add_up",
        (_FLOATS, 8, _INTS[0], np.array([0, 0, 4]), _FLOATS.copy(), np.empty((12, 8), np.float32)),
    ),
    "no room to add up": (
        "add_up",
        (_FLOATS, 8, _INTS[0], _INTS[1], _FLOATS.copy(), np.empty((11, 8), np.float32)),
    ),
    "an update too far": ("update", (*_NOTHING, np.array([4]), 8, *_ONE, 0, None, None)),
    "an update of a place of none": (
        "update",
        (*_NOTHING, np.array([-1]), 8, *_ONE, 0, None, None),
    ),
    "an update of more rows": ("update", (*_NOTHING, np.zeros(5, int), 8, *_ONE, 0, None, None)),
    "an update of slots of none": ("update", (*_NOTHING, _INTS[0], 8, *_ONE, 1, None, None)),
    "an update of rows without size": ("update", (*_NOTHING, _INTS[0], 0, *_ONE, 0, None, None)),
    "an update of what is read-only": (
        "update",
        (*_NOTHING, _INTS[0], 8, _read_only(_FLOATS), _FLOATS.copy(), 0, None, None),
    ),
    "more operations than there can be": (
        "update",
        (bytes(33 * 16), 33, _FLOATS.copy(), _INTS[0], 8, *_ONE, 0, None, None),
    ),
    "a row beyond": (
        "add_up",
        (_FLOATS, 8, _INTS[0] + 1, _INTS[1], _FLOATS.copy(), np.empty((12, 8), np.float32)),
    ),
}
_READS = SUMMED_CODECS["fp16"].in_blocks_of(8).reads(0, 1, 1.0)
_HALVES = np.zeros(68, np.uint8)
SPREADS: dict[str, tuple[Any, ...]] = {
    "a payload of another size": (_HALVES[:66], 8, _INTS[0], _INTS[2], 0, 4, _FLOATS.copy()),
    "no exponents": (_HALVES[:64], 8, _INTS[0], _INTS[2], 0, 4, _FLOATS.copy()),
    "blocks that are no rows": (_HALVES[:36], 4, _INTS[0], _INTS[2], 0, 4, _FLOATS[:2].copy()),
    "more rows than there are": (_HALVES, 8, _INTS[0], _INTS[2], 1, 5, _FLOATS.copy()),
    "backwards": (_HALVES[:0], 8, _INTS[0], _INTS[2], 3, 2, _FLOATS.copy()),
    "a place too far": (_HALVES, 8, _INTS[0] + 1, _INTS[2], 0, 4, _FLOATS.copy()),
    "too little room": (_HALVES, 8, _INTS[0], _INTS[2], 0, 4, _FLOATS[:3].copy()),
    "a start below none": (_HALVES, 8, _INTS[0], _INTS[2] - 1, 0, 4, _FLOATS.copy()),
    "not aligned": (np.zeros(69, np.uint8)[1:], 8, _INTS[0], _INTS[2], 0, 4, _FLOATS.copy()),
    "read-only": (_HALVES, 8, _INTS[0], _INTS[2], 0, 4, _read_only(_FLOATS)),
}


@pytest.mark.parametrize("name", MISFITS)
def test_rows_that_do_not_fit_are_refused_untouched(name: str) -> None:
    if native.LIBRARY is None:
        return
    function, arguments = MISFITS[name]
    _check_refused(getattr(native.LIBRARY, function), arguments)


@pytest.mark.parametrize("name", SPREADS)
def test_what_can_not_be_spread_is_refused_untouched(name: str) -> None:
    if not row_batches.can_spread():
        return
    assert native.LIBRARY is not None
    code = row_batches.packed(_READS)
    _check_refused(native.LIBRARY.spread, (code, *SPREADS[name], 0))


def test_an_operation_that_reads_nothing_is_refused() -> None:
    if not row_batches.can_spread():
        return
    assert native.LIBRARY is not None
    for code in (6, 8, 22, len(Code), 255):
        packed = bytes([code, 0, 1, 0]) + bytes(12)
        into = _FLOATS.copy()
        arguments = (packed, _HALVES, 8, _INTS[0], _INTS[2], 0, 4, into, 0)
        _check_refused(native.LIBRARY.spread, arguments)


def _check_refused(call: Any, arguments: tuple[Any, ...]) -> None:
    before = [one.tobytes() for one in arguments if isinstance(one, np.ndarray)]
    try:
        found = call(*arguments)
    except (TypeError, ValueError, BufferError):
        found = -1
    assert found == -1
    assert before == [one.tobytes() for one in arguments if isinstance(one, np.ndarray)]


def test_rows_that_do_not_fit_raise() -> None:
    if native.LIBRARY is None:
        return
    with pytest.raises(ValueError, match="do not fit"):
        row_batches.gather(_FLOATS, np.array([9]), _FLOATS.copy())
