"""A model for tests of training: softmax regression on scikit-learn's digits."""

from __future__ import annotations

from typing import Any

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]
WEIGHTS_SHAPE = (65, 10)


def digits() -> Batch:
    """(1797, 65) float32 pixels in [0, 1] and a constant, (1797,) labels; shuffled alike always."""
    from sklearn.datasets import load_digits  # takes two seconds

    found = load_digits()
    order = np.random.default_rng(3).permutation(len(found.target))
    images = np.ones((len(order), 65), np.float32)
    images[:, :64] = found.data[order] / 16
    return images, found.target[order]


def batches(size: int, count: int) -> list[Batch]:
    images, labels = digits()
    return [
        (images[start : start + size], labels[start : start + size])
        for start in range(0, size * count, size)
    ]


def gradient_of(weights: np.ndarray, batch: Any) -> tuple[float, np.ndarray]:
    """Mean cross-entropy and its gradient."""
    images, labels = batch
    scores = images @ weights
    scores -= scores.max(axis=1, keepdims=True)
    chances = np.exp(scores)
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels]).mean()
    chances[rows, labels] -= 1
    return float(loss), images.T @ chances / np.float32(len(labels))


def accuracy(weights: np.ndarray) -> float:
    images, labels = digits()
    return float(((images @ weights).argmax(axis=1) == labels).mean())
