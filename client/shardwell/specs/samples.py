"""The samples of a training, as a worker declares them, and a batch of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import check_integer
from shardwell.numerics.permutation import Int64
from shardwell.placement.ranges import NumberRanges
from shardwell.specs.names import check_name

LENGTH_MAX = 2**48
BATCH_SIZE_MAX = 2**24


@dataclass(frozen=True)
class Samples:
    """The data that a training's workers share, of which each sample counts once an epoch.

    `Parameter.batches` deals them. All workers give the same `length`, `seed` and `shuffle`.

    Args:
        length: Samples of the dataset, 1 to 2^48.
        batch_size: Samples of a batch, 1 to 2^24. The last batch of an epoch has fewer; that of a
            worker_count may have one more. After a restart or a restore it may be another.
        seed: Of the order, 0 to 2^64 - 1.
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
        check_integer("length", self.length, 1, LENGTH_MAX)
        check_integer("batch_size", self.batch_size, 1, BATCH_SIZE_MAX)
        check_integer("seed", self.seed, 0, 2**64 - 1)
        check_name("name of samples", self.name)
        for what in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, what), bool):
                raise ArgumentError(f"{what} must be True or False; got {getattr(self, what)!r}")


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples that were dealt to this worker, for one gradient; give it to `exchange`.

    Examples:
        >>> net = client.parameter("dealt", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> for batch in net.batches(shardwell.Samples(5, batch_size=2, shuffle=False), epochs=1):
        ...     weights = net.exchange(np.ones(3), batch=batch)
        ...     print(batch.indices)
        [0 1]
        [2 3]
        [4]
    """

    indices: Int64
    """(n,) int64: which samples of the dataset."""
    epoch: int
    """The epoch that they count in, from 0."""
    ranges: NumberRanges
    """Their positions in the sequence of all epochs."""
    data: str
    """The name of their `Samples`."""
    tenure: int
    """The membership that they were dealt to; 0 where workers do not come and go."""

    def __len__(self) -> int:
        return len(self.indices)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.indices.astype(self.indices.dtype if dtype is None else dtype)
