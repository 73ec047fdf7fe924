"""Ids of one call to what travels and back, against plain dicts and lists.

Goal: distinct, ascending, on the right shard, and each of the caller's ids gets its own row back,
whatever dtype, shape, order and repeats.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import shardwell
from shardwell.placement.rows import RowPlacement
from shardwell.table.batch import RowBatch, RowSums, Span, as_gradients, as_ids

SHARD_COUNTS = st.sampled_from([1, 2, 3, 8])
KEYS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([2**63 - 1, -(2**63), 2**32, 2**16]),
)


def _batch(ids, row_count=None, shard_count=1) -> RowBatch:
    flat, shape = as_ids(ids, row_count)
    return RowBatch(flat, shape, RowPlacement(row_count, shard_count))


def _check(batch: RowBatch, ids: np.ndarray, placement: RowPlacement) -> None:
    keys = ids.reshape(-1).astype(np.int64)
    assert sorted(batch.distinct.ids.tolist()) == sorted(set(keys.tolist()))
    shards = placement.shards_of(batch.distinct.ids)
    assert len(batch.distinct.bounds) == placement.shard_count + 1
    for shard_index in range(placement.shard_count):
        start, stop = batch.distinct.bounds[shard_index : shard_index + 2]
        assert set(shards[start:stop].tolist()) <= {shard_index}
        assert np.all(np.diff(batch.distinct.ids[start:stop].astype(object)) > 0)
    rows = batch.distinct.ids.astype(np.float64)[:, np.newaxis]
    spread = np.full((keys.size, 1), np.nan)
    batch.spread(rows, spread)
    np.testing.assert_array_equal(spread[:, 0], keys.astype(np.float64))
    assert batch.shape == ids.shape
    assert batch.has_repeats == (len(set(keys.tolist())) < keys.size)


@given(st.lists(KEYS, max_size=40), SHARD_COUNTS)
def test_every_id_gets_its_row(keys, shard_count) -> None:
    ids = np.array(keys, np.int64)
    _check(_batch(ids, None, shard_count), ids, RowPlacement(None, shard_count))


@given(
    hnp.arrays(
        hnp.integer_dtypes(endianness="?") | hnp.unsigned_integer_dtypes(endianness="?"),
        hnp.array_shapes(min_dims=0, max_dims=3, max_side=6),
    ),
    SHARD_COUNTS,
)
def test_ids_of_any_integer_dtype_and_shape(ids, shard_count) -> None:
    _check(_batch(ids, None, shard_count), ids, RowPlacement(None, shard_count))
    if ids.ndim:
        turned = ids[::-1].T
        _check(_batch(turned, None, shard_count), turned, RowPlacement(None, shard_count))


@pytest.mark.parametrize("shard_count", [1, 3])
@pytest.mark.parametrize("size", [1000, 1024, 5000, 20_000])
@pytest.mark.parametrize("bits", [1, 8, 16, 17, 32, 33, 48, 63, 64])
def test_large_batches_of_ids_of_every_width(size, bits, shard_count) -> None:
    """Each way of sorting: by 64 bits, and by one to four digits."""
    words = np.random.default_rng(bits).integers(0, 2**bits - 1, size, np.uint64, endpoint=True)
    ids = words.view(np.int64)
    ids[size // 2 :] = ids[: size - size // 2]  # repeats
    _check(_batch(ids, None, shard_count), ids, RowPlacement(None, shard_count))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (5, [5]),
        ([], []),
        ((3, 1), [1, 3]),
        ([[7], [7]], [7]),
        (np.int16(4), [4]),
        (range(3), [0, 1, 2]),
    ],
)
def test_scalars_and_lists(ids, expected) -> None:
    batch = _batch(ids, 10)
    assert batch.distinct.ids.tolist() == expected
    assert batch.shape == np.shape(ids)


def test_unsigned_keys_stand_for_the_signed_ones_of_the_same_bits() -> None:
    batch = _batch(np.array([2**63, 2**64 - 1, 5], np.uint64))
    assert batch.distinct.ids.tolist() == [-(2**63), -1, 5]


def test_ids_that_ascend_are_not_copied() -> None:
    ids = np.array([1, 4, 9])
    batch = _batch(ids, 10)
    assert batch.is_plain
    assert np.shares_memory(batch.distinct.ids, ids)
    assert not _batch(ids, 10, shard_count=2).is_plain or batch.distinct.ids.size == 0
    assert not _batch(ids[::-1], 10).is_plain
    assert not _batch(np.array([1, 1]), 10).is_plain


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.array([1.0, 2.0]), r"integers; got float64 \(the first is .*1\.0"),
        ([1, 2.5], "integers; got float64"),
        (np.array([], np.float32), "got float32"),
        (np.array([True]), "got bool"),
        ([True, False], "got bool"),
        (np.array([1, None]), "got object"),
        (["a"], "integers; got <U1"),
        ([[1, 2], [3]], "ids must be an array"),
        (None, "got object"),
        (np.array(["2020-01-01"], "M8[D]"), "got datetime64"),
        (np.ma.array([1, 2], mask=[0, 1]), "masked"),
    ],
)
def test_what_is_no_id_is_refused(ids, match) -> None:
    with pytest.raises(shardwell.ArgumentError, match=match):
        as_ids(ids, 10)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([3, 10, 11], "row id 10 at place 1 is out of range; the table's ids are 0 to 9"),
        ([3, -1, 12], "row id -1 at place 1 "),
        (10, "row id 10 at place 0 "),
        (np.array([[0, 1], [2, 77]]), r"row id 77 at \(1, 1\) is"),
        (np.array([2**64 - 1], np.uint64), "row id 18446744073709551615 at place 0"),
        (np.array([-128], np.int8), "row id -128 at place 0"),
    ],
)
def test_ids_out_of_range_are_named(ids, match) -> None:
    with pytest.raises(shardwell.ArgumentError, match=match):
        as_ids(ids, 10)


@given(st.lists(st.integers(0, 99), max_size=60), SHARD_COUNTS, st.integers(1, 20))
def test_messages_cover_a_shards_rows_in_order(ids, shard_count, row_count_max) -> None:
    distinct = _batch(np.array(ids, np.int64), 100, shard_count).distinct
    for shard_index in range(shard_count):
        spans = distinct.messages(shard_index, row_count_max)
        rows = [row for span in spans for row in range(*span)]
        assert rows == list(range(*distinct.bounds[shard_index : shard_index + 2]))
        assert all(1 <= stop - start <= row_count_max for start, stop in spans)
        assert bool(spans) == (shard_index in list(distinct.shards()))


@given(st.data(), SHARD_COUNTS)
def test_a_subset_keeps_shards_and_order(data, shard_count) -> None:
    ids = data.draw(st.lists(st.integers(0, 99), max_size=40, unique=True))
    distinct = _batch(np.array(ids, np.int64), 100, shard_count).distinct
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), bool)
    subset = distinct.subset(np.flatnonzero(keep))
    assert subset.ids.tolist() == distinct.ids[keep].tolist()
    shards = RowPlacement(100, shard_count).shards_of(subset.ids)
    for shard_index in range(shard_count):
        here = subset.messages(shard_index, 1000)
        assert here == ([Span(*subset.bounds[shard_index : shard_index + 2])] if here else [])
        assert all((shards[start:stop] == shard_index).all() for start, stop in here)


# Gradients of repeated ids, against np.add.at in float64; what may not travel is named.  Goal:
# sums within float32's rounding, exact for whole numbers, the same bits for the same gradients of
# an id whatever else is in the batch and however many shards there are.


def _sum_batch(ids, shard_count=1) -> RowBatch:
    flat, shape = as_ids(ids, None)
    return RowBatch(flat, shape, RowPlacement(None, shard_count))


def _sums(ids, gradients, shard_count=1, **options) -> dict[int, np.ndarray]:
    """By id, read in messages of three rows."""
    batch = _sum_batch(ids, shard_count)
    flat = as_gradients(gradients, batch.shape, gradients.shape[-1], "t")
    sums = RowSums(batch, flat, "t", **{"allow_non_finite": False, **options})
    found = {}
    for shard_index in range(shard_count):
        for span in batch.distinct.messages(shard_index, 3):
            rows = sums.rows(span)
            assert rows.dtype == np.float32
            assert rows.flags.c_contiguous
            found.update(zip(batch.distinct.ids[slice(*span)].tolist(), rows, strict=True))
    return found


def _oracle(ids, gradients) -> dict[int, np.ndarray]:
    keys, inverse = np.unique(np.ravel(ids), return_inverse=True)
    total = np.zeros((keys.size, gradients.shape[-1]))
    np.add.at(total, inverse.ravel(), gradients.reshape(-1, gradients.shape[-1]).astype(np.float64))
    return dict(zip(keys.tolist(), total, strict=True))


@given(
    st.lists(st.integers(-4, 40), max_size=150),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 3, 64]),
    st.integers(0, 2**32 - 1),
)
def test_whole_numbers_add_up_exactly(ids, shard_count, dim, seed) -> None:
    gradients = np.random.default_rng(seed).integers(-99, 99, (len(ids), dim)).astype(np.float32)
    found, expected = (
        _sums(np.array(ids, np.int64), gradients, shard_count),
        _oracle(ids, gradients),
    )
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_array_equal(found[key], row)


@pytest.mark.parametrize("dim", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("top", [1, 2, 50, 100_000])
def test_large_batches_are_summed_as_by_numpy(dim, top) -> None:
    """One id thousands of times, a few often, nearly all once: segments of segments."""
    generator = np.random.default_rng(top)
    ids = generator.integers(0, top, (30, 100))
    gradients = generator.standard_normal((30, 100, dim))
    found, expected = _sums(ids, gradients, 2), _oracle(ids, gradients.astype(np.float32))
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_allclose(found[key], row, rtol=1e-5, atol=2e-5)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=100), st.lists(st.integers(6, 9), max_size=60)
)
def test_an_ids_sum_depends_on_its_own_gradients_alone(ids, others) -> None:
    """Bit for bit, with values that round; on one shard and on three."""
    gradients = np.random.default_rng(len(ids)).standard_normal((len(ids), 5)).astype(np.float32)
    alone = _sums(np.array(ids), gradients)
    rest = np.ones((len(others), 5), np.float32)
    mixed = _sums(np.array([*others, *ids]), np.concatenate((rest, gradients)), 3)
    for key, row in alone.items():
        assert row.tobytes() == mixed[key].tobytes()


def test_rows_of_a_span_are_the_callers_own() -> None:
    batch = _sum_batch(np.array([2, 1]))
    gradients = np.array([[2.0], [1.0]], np.float32)
    sums = RowSums(batch, gradients, "t", allow_non_finite=False)
    sums.rows(Span(0, 2))[:] = 9
    assert sums.rows(Span(0, 2)).tolist() == [[1.0], [2.0]]
    assert sums.rows(Span(1, 1)).shape == (0, 1)


def test_no_rows_at_all() -> None:
    batch = _sum_batch([], 3)
    sums = RowSums(batch, as_gradients(np.zeros((0, 4)), (0,), 4, "t"), "t", allow_non_finite=False)
    assert sums.rows(Span(0, 0)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", ">f8"])
def test_dtypes_and_layouts(dtype) -> None:
    gradients = np.arange(24, dtype=dtype).reshape(4, 6)
    for layout in (
        gradients,
        np.asfortranarray(gradients),
        np.repeat(gradients, 2, axis=1)[:, ::2],
    ):
        flat = as_gradients(layout, (4,), 6, "t")
        assert (flat.dtype, flat.shape) == (np.float32, (4, 6))
        assert flat.flags.c_contiguous
        np.testing.assert_array_equal(flat, gradients)


@pytest.mark.parametrize(
    ("gradients", "match"),
    [
        (np.zeros((3, 4)), r"of shape \(2, 4\): .* got \(3, 4\)"),
        (np.zeros((2, 5)), r"got \(2, 5\)"),
        (np.zeros(8), r"got \(8,\)"),
        (np.zeros((1, 2, 4)), r"got \(1, 2, 4\)"),
        (np.zeros((2, 4), np.int64), "float32 .* got int64"),
        (np.zeros((2, 4), bool), "got bool"),
        (np.zeros((2, 4), np.complex64), "got complex64"),
        (np.zeros((2, 4), object), "got object"),
        ([["a"] * 4] * 2, "must be"),
        ([[0.0] * 3] * 2, r"got \(2, 3\)"),
        (np.ma.array(np.zeros((2, 4)), mask=np.eye(2, 4)), "masked"),
    ],
)
def test_what_are_no_gradients_is_refused(gradients, match) -> None:
    with pytest.raises(shardwell.ArgumentError, match=match):
        as_gradients(gradients, (2,), 4, "t")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("shard_count", [1, 3])
def test_the_first_value_that_is_not_finite_is_named(bad, shard_count) -> None:
    gradients = np.zeros((2, 3, 4))
    gradients[1, 0, 2] = gradients[1, 2, 0] = bad
    ids = np.array([[7, 8, 9], [7, 9, 8]])
    with pytest.raises(
        shardwell.NonFiniteError, match=r"row id 7 of 't': element 2 .* place 3"
    ) as e:
        _sums(ids, gradients, shard_count)
    assert (e.value.element_index, e.value.table) == (3 * 4 + 2, "t")
    assert _sums(ids, gradients, shard_count, allow_non_finite=True)[9].tolist()[1:] == [0, 0, 0]


def test_a_sum_that_float32_cannot_hold_is_named() -> None:
    gradients = np.zeros((5, 3), np.float32)
    gradients[[1, 3], 2] = 3e38
    with pytest.raises(
        shardwell.NonFiniteError, match=r"row id 6 .* more than once.* element 2"
    ) as e:
        _sums(np.array([9, 6, 9, 6, 1]), gradients, 2)
    assert e.value.element_index == 1 * 3 + 2
    found = _sums(np.array([9, 6, 9, 6, 1]), gradients, 2, allow_non_finite=True)
    assert found[6].tolist() == [0, 0, np.inf]


def test_a_digest_tells_gradients_apart() -> None:
    def digest(ids, values) -> tuple[int, int]:
        batch = _sum_batch(ids)
        flat = as_gradients(np.array(values)[:, np.newaxis], batch.shape, 1, "t")
        return RowSums(batch, flat, "t", allow_non_finite=False).digest()

    assert digest([1, 2], [3.0, 4.0]) == digest(np.array([1, 2], np.int8), np.float32([3, 4]))
    others = [
        ([2, 1], [3.0, 4.0]),
        ([1, 2], [4.0, 3.0]),
        ([1], [3.0]),
        ([], []),
        ([1, 2], [3.0, 5.0]),
    ]
    assert digest([1, 2], [3.0, 4.0]) not in [digest(*other) for other in others]
