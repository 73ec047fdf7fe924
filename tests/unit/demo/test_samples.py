"""Digits: disjoint parts, disjoint shares, and batches that depend on nothing but their numbers."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from shardwell import ArgumentError
from shardwell_server.demo.digits.samples import (
    CLASS_COUNT,
    HELD_OUT_COUNT,
    IMAGE_SIZE,
    Batches,
    Digits,
    Samples,
    check_installed,
    load_digits,
    split,
)
from shardwell_server.demo.reports import DemoError


@pytest.fixture(scope="module")
def digits() -> Digits:
    pytest.importorskip("sklearn", reason="scikit-learn brings the digits")
    return load_digits()


def numbered(count: int) -> Samples:
    """Distinct samples: the label is the sample's number."""
    labels = np.arange(count)
    return Samples(np.repeat(labels[:, None], 64, axis=1).astype(np.float32), labels)


def test_all_digits_are_there_and_held_out_ones_are_not_trained_on(digits):
    training = {image.tobytes() for image in digits.training.images}
    held_out = {image.tobytes() for image in digits.held_out.images}
    assert len(digits.held_out) == HELD_OUT_COUNT
    assert len(digits.training) + len(digits.held_out) == 1797
    assert not training & held_out


def test_pixels_and_labels_are_in_range(digits):
    for part in (digits.training, digits.held_out):
        assert part.images.shape == (len(part), IMAGE_SIZE)
        assert part.images.dtype == np.float32
        assert (part.images.min(), part.images.max()) == (0.0, 1.0)
        assert set(part.labels.tolist()) == set(range(CLASS_COUNT))


def test_loading_twice_gives_the_same(digits):
    np.testing.assert_array_equal(load_digits().training.images, digits.training.images)


def test_split_keeps_images_with_their_labels():
    parts = split(numbered(100), 30)
    together = np.concatenate([parts.training.labels, parts.held_out.labels])
    assert sorted(together.tolist()) == list(range(100))
    assert len(parts.held_out) == 30
    for part in (parts.training, parts.held_out):
        np.testing.assert_array_equal(part.images[:, 0], part.labels)


def batches(worker_index: int = 0, worker_count: int = 3, batch_size: int = 4) -> Batches:
    return Batches(
        numbered(50), worker_index=worker_index, worker_count=worker_count, batch_size=batch_size
    )


def test_batches_are_the_same_in_any_order_of_asking():
    forwards = batches()
    expected = [forwards[step].labels.tolist() for step in range(20)]
    again = batches()
    assert [again[step].labels.tolist() for step in reversed(range(20))] == expected[::-1]


def test_no_sample_comes_twice_in_a_pass_and_passes_differ():
    one = batches()  # 17 samples, 4 batches a pass
    passes = [[one[step].labels.tolist() for step in range(first, first + 4)] for first in (0, 4)]
    for batch_lists in passes:
        labels = [label for labels in batch_lists for label in labels]
        assert len(set(labels)) == len(labels) == 16
    assert passes[0] != passes[1]


def test_workers_share_no_sample_and_leave_none_out():
    shares = []
    for worker_index in range(3):
        one = batches(worker_index)
        shares.append({label for step in range(60) for label in one[step].labels.tolist()})
    assert sum(len(share) for share in shares) == 50
    assert set.union(*shares) == set(range(50))


@pytest.mark.parametrize("worker_index", [-1, 3])
def test_an_index_outside_the_crew_is_refused(worker_index):
    with pytest.raises(ArgumentError, match=f"worker_index={worker_index}, worker_count=3"):
        batches(worker_index)


def test_a_share_below_one_batch_is_refused():
    with pytest.raises(ArgumentError, match="less than a batch of 4"):
        batches(worker_count=20)


def test_without_scikit_learn_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r"-m pip install 'scikit-learn>=1\.4'"):
        check_installed()
