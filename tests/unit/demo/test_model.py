"""The perceptron: its gradient against finite differences in float64, and what it promises."""

from __future__ import annotations

import numpy as np
import pytest

from shardwell_server.demo.digits.model import Perceptron

MODEL = Perceptron(input_size=5, hidden_size=7, class_count=3)


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.random((11, 5)), random.integers(0, 3, 11)


def test_size_counts_every_weight_once():
    assert MODEL.size == 5 * 7 + 7 + 7 * 3 + 3
    tensors = MODEL.tensors(np.arange(MODEL.size, dtype=np.float64))
    assert list(tensors) == ["hidden.weights", "hidden.bias", "output.weights", "output.bias"]
    assert np.concatenate([part.ravel() for part in tensors.values()]).tolist() == list(
        range(MODEL.size)
    )


def test_tensors_are_views_of_the_vector():
    flat = np.zeros(MODEL.size)
    MODEL.tensors(flat)["output.bias"][-1] = 3.0
    assert flat[-1] == 3.0


def test_gradient_agrees_with_finite_differences(batch):
    images, labels = batch
    flat = np.random.default_rng(2).normal(0.0, 0.7, MODEL.size)
    _, gradient = MODEL.loss_and_gradient(flat, images, labels)
    width = 1e-6
    expected = np.empty(MODEL.size)
    for index in range(MODEL.size):
        ends = []
        for sign in (1.0, -1.0):
            moved = flat.copy()
            moved[index] += sign * width
            ends.append(MODEL.loss_and_gradient(moved, images, labels)[0])
        expected[index] = (ends[0] - ends[1]) / (2 * width)
    assert np.abs(gradient).max() > 0.01
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_loss_is_the_mean_cross_entropy(batch):
    images, labels = batch
    flat = np.random.default_rng(3).normal(0.0, 0.7, MODEL.size)
    tensors = MODEL.tensors(flat)
    expected = 0.0
    for image, label in zip(images, labels, strict=True):
        hidden = [
            max(value, 0.0) for value in image @ tensors["hidden.weights"] + tensors["hidden.bias"]
        ]
        powers = np.exp(np.array(hidden) @ tensors["output.weights"] + tensors["output.bias"])
        expected -= np.log(powers[label] / powers.sum()) / len(labels)
    loss, _ = MODEL.loss_and_gradient(flat, images, labels)
    assert loss == pytest.approx(expected, rel=1e-12)


def test_large_scores_do_not_overflow(batch):
    images, labels = batch
    flat = MODEL.first_weights(0) * np.float32(1e4)
    loss, gradient = MODEL.loss_and_gradient(flat, images.astype(np.float32), labels)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def test_inputs_stay_as_they_are_and_the_gradient_is_new(batch):
    images, labels = batch
    flat = MODEL.first_weights(0)
    before = flat.copy(), images.copy(), labels.copy()
    _, gradient = MODEL.loss_and_gradient(flat, images.astype(np.float32), labels)
    MODEL.accuracy(flat, images.astype(np.float32), labels)
    assert not np.may_share_memory(gradient, flat)
    assert gradient.dtype == np.float32
    for array, copy in zip((flat, images, labels), before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_accuracy_is_the_part_that_is_right(batch):
    images, _ = batch
    flat = np.zeros(MODEL.size)
    MODEL.tensors(flat)["output.bias"][:] = (0.0, 1.0, 0.0)  # it always says 1
    labels = np.array([1, 0, 1, 2, 1, 1, 0, 0, 0, 0, 2])
    assert MODEL.accuracy(flat, images, labels) == 4 / 11


def test_first_weights_follow_their_seed():
    first = MODEL.first_weights(4)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, MODEL.first_weights(4))
    assert (first != MODEL.first_weights(5)).any()
    assert not MODEL.tensors(first)["hidden.bias"].any()
    deviation = Perceptron(input_size=64, hidden_size=256, class_count=3).first_weights(0)
    assert deviation[: 64 * 256].std() == pytest.approx((2 / 64) ** 0.5, rel=0.02)
