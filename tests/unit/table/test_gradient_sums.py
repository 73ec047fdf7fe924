"""Gradients of repeated ids, against np.add.at in float64; what may not travel is named.

Goal: sums within float32's rounding, exact for whole numbers, the same bits for the same gradients
of an id whatever else is in the batch and however many shards there are.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwell
from shardwell.placement.rows import RowPlacement
from shardwell.table.batch import RowBatch, RowSums, Span, as_gradients, as_ids


def _batch(ids, shard_count=1) -> RowBatch:
    flat, shape = as_ids(ids, None)
    return RowBatch(flat, shape, RowPlacement(None, shard_count))


def _sums(ids, gradients, shard_count=1, **options) -> dict[int, np.ndarray]:
    """By id, read in messages of three rows."""
    batch = _batch(ids, shard_count)
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
    batch = _batch(np.array([2, 1]))
    gradients = np.array([[2.0], [1.0]], np.float32)
    sums = RowSums(batch, gradients, "t", allow_non_finite=False)
    sums.rows(Span(0, 2))[:] = 9
    assert sums.rows(Span(0, 2)).tolist() == [[1.0], [2.0]]
    assert sums.rows(Span(1, 1)).shape == (0, 1)


def test_no_rows_at_all() -> None:
    batch = _batch([], 3)
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
        batch = _batch(ids)
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
