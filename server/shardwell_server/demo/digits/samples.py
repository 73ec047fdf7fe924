"""The data: scikit-learn's 1797 handwritten digits, cut the same way in every process.

Comes with the package, so nothing is downloaded. Everything is a function of fixed seeds: workers
that share nothing but their numbers agree on who trains on what, and a worker that starts again at
a step sees the same digits there.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwell.errors import ArgumentError
from shardwell.process.environment import install_command
from shardwell_server.demo.reports import DemoError

IMAGE_SIZE = 64
CLASS_COUNT = 10
HELD_OUT_COUNT = 450
"""A quarter: 0.95 of it is no matter of luck, and three quarters are enough to learn from."""

_SPLIT_SEED = 20
_BATCH_SEED = 21
_PIXEL_MAX = 16.0


@dataclass(frozen=True)
class Samples:
    """The images of digits, with their labels."""

    images: npt.NDArray[np.float32]
    """(n, 64), in [0, 1]."""
    labels: npt.NDArray[np.int64]
    """(n,), 0 to 9."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, where: slice | npt.NDArray[np.int64]) -> Samples:
        return Samples(self.images[where], self.labels[where])


@dataclass(frozen=True)
class Digits:
    """The two parts; no digit is in both."""

    training: Samples
    held_out: Samples
    """Digits that measure the accuracy, and train nothing."""


def check_installed() -> None:
    """Checks that scikit-learn is installed, without the seconds that importing it takes."""
    _digits_file()


def load_digits() -> Digits:
    """Loads all digits, split; DemoError: scikit-learn is not installed."""
    rows = np.loadtxt(_digits_file(), np.float32, delimiter=",")
    images, labels = rows[:, :-1] / _PIXEL_MAX, rows[:, -1]
    return split(Samples(images, labels.astype(np.int64)), HELD_OUT_COUNT)


def _digits_file() -> Path:
    """Spares scikit-learn's import, which takes two seconds of a core."""
    package = importlib.util.find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.exists():
            return path
    raise DemoError(
        "the digits come with scikit-learn, which is not installed; run: "
        f"{install_command('scikit-learn>=1.4')}"
    )


def split(samples: Samples, held_out_count: int) -> Digits:
    """Cuts samples in two, by a fixed shuffle, since the writers come one after another."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(samples))
    return Digits(samples[order[held_out_count:]], samples[order[:held_out_count]])


class Batches:
    """One worker's batches: `batches[step]` is equal whenever and wherever it is asked for.

    Samples are dealt round-robin, so that no two workers share one. Each pass over a worker's share
    is in another order; the rest after its last full batch waits.
    """

    def __init__(
        self, samples: Samples, *, worker_index: int, worker_count: int, batch_size: int
    ) -> None:
        if not 0 <= worker_index < worker_count:
            raise ArgumentError(
                "worker_index must be from 0 to worker_count - 1; got "
                f"worker_index={worker_index}, worker_count={worker_count}"
            )
        self._share = samples[worker_index::worker_count]
        if len(self._share) < batch_size:
            raise ArgumentError(
                f"{len(samples)} digits among {worker_count} workers leave worker {worker_index} "
                f"with {len(self._share)}, less than a batch of {batch_size}; use fewer workers"
            )
        self._worker_index = worker_index
        self._batch_size = batch_size

    def __getitem__(self, step: int) -> Samples:
        turn, place = divmod(step, len(self._share) // self._batch_size)
        order = np.random.default_rng((_BATCH_SEED, self._worker_index, turn)).permutation(
            len(self._share)
        )
        return self._share[order[place * self._batch_size :][: self._batch_size]]
