"""The model: a perceptron with one hidden layer, whose weights are one flat vector.

Pure functions of that vector, as a parameter server wants them: weights in, gradient out. The
layers are views of the vector, so nothing is copied to put a gradient together. They compute in the
weights' own dtype; float64 is for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Perceptron:
    """The model's shape: input, hidden layer (ReLU), classes (softmax)."""

    input_size: int
    hidden_size: int
    class_count: int

    @property
    def size(self) -> int:
        """The elements of the flat vector."""
        return (self.input_size + 1) * self.hidden_size + (self.hidden_size + 1) * self.class_count

    def tensors(self, flat: FloatArray) -> dict[str, FloatArray]:
        """Returns the views of a (size,) vector, by name, in its order."""
        shapes = {
            "hidden.weights": (self.input_size, self.hidden_size),
            "hidden.bias": (self.hidden_size,),
            "output.weights": (self.hidden_size, self.class_count),
            "output.bias": (self.class_count,),
        }
        views, start = {}, 0
        for name, shape in shapes.items():
            stop = start + int(np.prod(shape))
            views[name] = flat[start:stop].reshape(shape)
            start = stop
        return views

    def first_weights(self, seed: int) -> npt.NDArray[np.float32]:
        """Draws initial weights: (size,) float32, normal with variance 2 / fan-in (He, 2015)."""
        random = np.random.default_rng(seed)
        flat = np.zeros(self.size, np.float32)
        tensors = self.tensors(flat)
        for weights in (tensors["hidden.weights"], tensors["output.weights"]):
            deviation = np.sqrt(2.0 / weights.shape[0])
            weights[...] = random.normal(0.0, deviation, weights.shape)
        return flat

    def loss_and_gradient(
        self, flat: FloatArray, images: FloatArray, labels: npt.NDArray[np.int64]
    ) -> tuple[float, FloatArray]:
        """Returns a batch's mean cross-entropy, and its gradient: (size,), new."""
        weights = self.tensors(flat)
        gradient_flat = np.empty_like(flat)
        gradient = self.tensors(gradient_flat)
        hidden, scores = _scores(weights, images)
        # log-sum-exp, with the largest score taken out so that nothing overflows.
        scores -= scores.max(axis=1, keepdims=True)
        log_totals = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))
        loss = float((log_totals[:, 0] - scores[rows, labels]).mean())
        by_scores = np.exp(scores - log_totals)
        by_scores[rows, labels] -= 1.0
        by_scores /= len(labels)
        by_hidden = by_scores @ weights["output.weights"].T
        by_hidden *= hidden > 0
        np.matmul(hidden.T, by_scores, out=gradient["output.weights"])
        np.matmul(images.T, by_hidden, out=gradient["hidden.weights"])
        by_scores.sum(axis=0, out=gradient["output.bias"])
        by_hidden.sum(axis=0, out=gradient["hidden.bias"])
        return loss, gradient_flat

    def accuracy(
        self, flat: FloatArray, images: FloatArray, labels: npt.NDArray[np.int64]
    ) -> float:
        """Returns the part of the images, 0 to 1, whose highest score is the right one."""
        _, scores = _scores(self.tensors(flat), images)
        return float((scores.argmax(axis=1) == labels).mean())


def _scores(weights: dict[str, FloatArray], images: FloatArray) -> tuple[FloatArray, FloatArray]:
    hidden = images @ weights["hidden.weights"] + weights["hidden.bias"]
    np.maximum(hidden, 0.0, out=hidden)
    return hidden, hidden @ weights["output.weights"] + weights["output.bias"]
