"""Goal: each sample is dealt once, in round-robin order; updates merge as the weighted mean says.

Method: hypothesis makes batches and updates; plain lists and float64 beside them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell import ArgumentError, Update, merge_updates, split_batch
from shardwell.training.batches import count_samples, micro_batches, share_of

COUNTS = st.integers(0, 40)
WORKERS = st.integers(1, 9)


class Pair(NamedTuple):
    images: np.ndarray
    labels: np.ndarray


def dealt(samples: list[Any], worker_count: int) -> list[list[Any]]:
    hands: list[list[Any]] = [[] for _ in range(worker_count)]
    for index, sample in enumerate(samples):
        hands[index % worker_count].append(sample)
    return hands


@given(count=COUNTS, worker_count=WORKERS)
def test_every_kind_is_dealt_round_robin(count: int, worker_count: int) -> None:
    hands = dealt(list(range(count)), worker_count) if count else []
    rows = np.arange(count)
    images = np.stack([rows, -rows], axis=1)
    assert split_batch(list(range(count)), worker_count) == hands
    assert split_batch(tuple(range(count)), worker_count) == [tuple(hand) for hand in hands]
    assert [list(share) for share in split_batch(range(count), worker_count)] == hands
    assert [share.tolist() for share in split_batch(rows, worker_count)] == hands
    for share, hand in zip(split_batch((images, rows), worker_count), hands, strict=True):
        assert type(share) is tuple
        np.testing.assert_array_equal(share[0], images[hand])
        np.testing.assert_array_equal(share[1], rows[hand])
    batch = {"images": images, "names": list(range(count)), "more": (rows, rows)}
    for share, hand in zip(split_batch(batch, worker_count), hands, strict=True):
        np.testing.assert_array_equal(share["images"], images[hand])
        assert share["names"] == hand
        assert [column.tolist() for column in share["more"]] == [hand, hand]
    for rank, hand in enumerate(hands):
        assert share_of(rows, worker_count, rank).tolist() == hand


@given(count=COUNTS, size=st.integers(1, 12))
def test_micro_batches_follow_one_another(count: int, size: int) -> None:
    parts = micro_batches(list(range(count)), size)
    assert [sample for part in parts for sample in part] == list(range(count))
    assert all(len(part) == size for part in parts[:-1])
    assert all(0 < len(part) <= size for part in parts)


def test_shares_of_arrays_are_views_and_named_tuples_stay() -> None:
    images, labels = np.zeros((5, 2)), np.zeros(5)
    first, second = split_batch(Pair(images, labels), 2)
    assert isinstance(second, Pair)
    first.images[0] = second.labels[0] = 1
    assert images[0].tolist() == [1, 1]
    assert labels[1] == 1


def test_a_list_of_arrays_is_samples_and_a_tuple_of_arrays_is_columns() -> None:
    arrays = [np.zeros(4), np.ones(4)]
    assert count_samples(arrays) == 2
    assert count_samples(tuple(arrays)) == 4
    assert count_samples(()) == count_samples({}) == 0
    assert split_batch({}, 2) == split_batch([], 2) == split_batch(np.zeros((0, 3)), 2) == []


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((np.zeros(3), np.zeros(4)), "equal lengths; got {0: 3, 1: 4}"),
        ({"x": np.zeros(3), "y": [1, 2]}, "equal lengths; got {'x': 3, 'y': 2}"),
        (np.float32(3), "got float32"),
        ("text", "got str"),
        (None, "got NoneType"),
        (iter([1]), "got list_iterator"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, reason: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        split_batch(batch, 2)
    assert reason in str(caught.value)


@pytest.mark.parametrize("worker_count", [0, -1, 1.0])
def test_worker_counts_that_can_not_be_are_refused(worker_count: Any) -> None:
    with pytest.raises(ArgumentError, match="worker_count must be an integer"):
        split_batch([1], worker_count)


UPDATES = st.lists(
    st.builds(
        lambda values, loss, count: Update(
            gradient=np.array(values, np.float32), loss=loss, sample_count=count
        ),
        st.lists(st.floats(-1000, 1000, width=32), max_size=8),
        st.floats(-1000, 1000),
        st.integers(0, 100),
    ),
    max_size=8,
)


@given(updates=UPDATES)
def test_updates_merge_as_the_weighted_mean(updates: list[Update]) -> None:
    length = max((update.gradient.size for update in updates), default=0)
    total = sum(update.sample_count for update in updates)
    expected, loss = [0.0] * length, 0.0
    for update in updates:
        share = update.sample_count / total if total else 0.0
        loss += share * update.loss
        for index, value in enumerate(update.gradient.tolist()):
            expected[index] += share * value
    merged = merge_updates(updates)
    assert merged.gradient.dtype == np.float32
    assert merged.gradient.shape == (length,)
    assert merged.sample_count == total
    np.testing.assert_allclose(merged.gradient, expected, rtol=1e-6, atol=1e-6)
    assert merged.loss == pytest.approx(loss, rel=1e-9, abs=1e-9)


def test_no_updates_and_no_samples_are_zeros() -> None:
    nothing = merge_updates([])
    assert (nothing.gradient.size, nothing.loss, nothing.sample_count) == (0, 0.0, 0)
    bad = np.full(3, np.nan, np.float32)
    empty = Update(gradient=bad, loss=np.nan, sample_count=0)
    merged = merge_updates([empty, empty])
    assert (merged.gradient.tolist(), merged.loss, merged.sample_count) == ([0.0] * 3, 0.0, 0)
    one = Update(gradient=np.ones(2, np.float32), loss=3.0, sample_count=1)
    merged = merge_updates([one, empty])
    assert (merged.gradient.tolist(), merged.loss) == ([1.0, 1.0, 0.0], 3.0)


def test_sums_are_float64_and_the_updates_stay() -> None:
    """1 more than 2^24 is lost in float32."""
    gradients = [np.array([value], np.float32) for value in (2.0**24, 1.0, 1.0, -(2.0**24))]
    updates = [Update(gradient=g, loss=0.0, sample_count=1) for g in gradients]
    assert merge_updates(updates).gradient.tolist() == [0.5]
    assert gradients[0][0] == 2.0**24


@pytest.mark.parametrize(
    ("gradient", "sample_count"), [(np.ones(2, np.int32), 1), (["1"], 1), (np.ones(2), -1)]
)
def test_updates_that_can_not_be_are_refused(gradient: Any, sample_count: int) -> None:
    with pytest.raises(ArgumentError, match="of an update"):
        merge_updates([Update(gradient=gradient, loss=0.0, sample_count=sample_count)])


def test_what_was_merged_merges_again() -> None:
    """Counts add up beyond those of any one step."""
    one = Update(gradient=np.array([1.0, 3.0], np.float32), loss=2.0, sample_count=2**24)
    merged = merge_updates([one, one])
    again = merge_updates(
        [merged, merged, Update(gradient=np.zeros(2, np.float32), loss=0.0, sample_count=0)]
    )
    assert (again.sample_count, again.loss) == (2**26, 2.0)
    assert again.gradient.tolist() == [1.0, 3.0]
    for _ in range(20):
        again = merge_updates([again, again])
    assert again.sample_count == 2**46
