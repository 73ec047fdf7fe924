"""The samples of a training, as a worker declares them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

from shardwell.errors import ArgumentError
from shardwell.specs.checks import check_whole_number
from shardwell.specs.names import check_name

LENGTH_MAX = 2**48
BATCH_SIZE_MAX = 2**24
POSITION_MAX = 2**62
"""Positions in the sequence of all epochs are below it."""


@dataclass(frozen=True)
class Samples:
    """The data that a training's workers share, of which each sample counts once an epoch.

    `Parameter.batches` deals them. All workers give the same `length`, `seed` and `shuffle`.

    Args:
        length: Samples of the dataset, 1 to 2^48.
        batch_size: Samples of a batch, 1 to 2^24. The last batch of an epoch has fewer; that of a
            worker_count may have one more. After a restart or a restore it may be another.
        seed: The seed of the order, 0 to 2^64 - 1.
        shuffle: Each epoch has an order of its own; else samples come in order.
        drop_last: The last samples of an epoch that are no whole batch are left out.
        name: Tells several datasets of one parameter apart. Another dataset needs another name.

    Examples:
        >>> samples = shardwell.Samples(1000, batch_size=32, seed=7)
        >>> samples.name
        'train'
    """

    length: int
    batch_size: int = 32
    seed: int = field(default=0, kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)
    drop_last: bool = field(default=False, kw_only=True)
    name: str = field(default="train", kw_only=True)

    def __post_init__(self) -> None:
        check_whole_number("length", self.length, 1, LENGTH_MAX)
        check_whole_number("batch_size", self.batch_size, 1, BATCH_SIZE_MAX)
        check_whole_number("seed", self.seed, 0, 2**64 - 1)
        check_name("name of samples", self.name)
        for what in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, what), bool):
                raise ArgumentError(f"{what} must be True or False; got {getattr(self, what)!r}")

    def limit_of(self, epochs: int | None) -> int:
        """Returns the position behind as many epochs; None: behind all.

        Raises:
            ArgumentError: epochs is no whole number from 0 on.

        Examples:
            >>> shardwell.Samples(1000).limit_of(3)
            3000
        """
        if epochs is None:
            return POSITION_MAX
        is_number = isinstance(epochs, Integral) and not isinstance(epochs, bool)
        count = int(epochs) if is_number else epochs
        check_whole_number("epochs", count, 0, POSITION_MAX)
        return min(count * self.length, POSITION_MAX)
