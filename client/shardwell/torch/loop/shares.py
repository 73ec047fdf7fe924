"""A worker's share of a DataLoader's data, from the cluster's step on.

A crew of fixed size deals each epoch among its ranks, as torch's DistributedSampler does. Where
workers come and go, no share may depend on which workers take part: each worker goes through all
data in an order of its own, and an epoch is a number of the cluster's steps.

Invariant: which samples a batch has depends on the seed, the worker (its rank, or its id), the
epoch and the place in it alone; so a worker that is started again goes on as if it had not been.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from typing_extensions import override

from shardwell.errors import ArgumentError

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"),
    *("multiprocessing_context", "generator", "persistent_workers", "pin_memory_device"),
    "in_order",
)
"""Arguments of a DataLoader that its share has, too."""
_KNOWN = inspect.signature(DataLoader.__init__).parameters
"""Of which older versions of torch have fewer."""
_BY_HAND = (
    "share the data yourself, by client.rank and client.worker_count, and call prepare() without a "
    "loader"
)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of the data that a worker takes.

    A crew of fixed size has `rank` and `worker_count`. Where workers come and go, `worker_id` is
    set, and `worker_count` is the number of workers for which an epoch is short enough.
    """

    next_step: Callable[[], int]
    rank: int
    worker_count: int
    worker_id: str
    batches_per_step: int
    seed: int

    def sampler(self, dataset: Any, *, shuffle: bool, drop_last: bool, seed: int) -> Any:
        """The order in which the worker takes samples."""
        if self.worker_id:
            return _OwnOrder(dataset, self.worker_id, shuffle=shuffle, seed=seed)
        return DistributedSampler(
            dataset,
            self.worker_count,
            self.rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )


class SharedLoader(DataLoader[Any]):
    """A DataLoader of this worker's share. Each `for` over it is the next epoch.

    A worker that is started again begins where the cluster is: epochs that are over have no
    batches, and the first one that is not has those that are left. `epochs` leaves out the former.

    Args:
        loader: The loader of all data.
        share: The part to take.

    Raises:
        ArgumentError: the loader's data can't be shared; says what to do.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> plain = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> whole = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=4)
        >>> prepared = shardwell.torch.prepare(model, plain, whole, client=client, name="shared")
        >>> isinstance(prepared[2], shardwell.torch.SharedLoader), len(prepared[2])
        (True, 2)
        >>> prepared[1].close()
    """

    def __init__(self, loader: DataLoader[Any], share: Share) -> None:
        self.whole = loader
        """The loader of all data."""
        self._share = share
        self._next_epoch = 0
        shuffle, seed = check_loader(loader, share.seed)
        batch_size = loader.batch_size
        assert batch_size is not None
        sampler = share.sampler(
            loader.dataset, shuffle=shuffle, drop_last=loader.drop_last, seed=seed
        )
        self._batches = _Batches(sampler, batch_size, loader.drop_last)
        if share.worker_id:
            step_count = -(-len(self._batches) // (share.worker_count * share.batches_per_step))
            self._batches.count = step_count * share.batches_per_step
        if not len(self._batches):
            raise ArgumentError(
                f"a worker's share of {len(loader.dataset)} samples is less than a batch of "  # type: ignore[arg-type]
                f"{batch_size}, and drop_last leaves that out; make batches smaller"
            )
        self._begun_at = share.next_step() * share.batches_per_step
        """Batches that the cluster had behind it when this worker began."""
        super().__init__(
            loader.dataset,
            batch_sampler=self._batches,
            **{name: getattr(loader, name) for name in _KEPT if name in _KNOWN},
        )

    @override
    def __iter__(self) -> Any:
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        return self._epoch(epoch)

    def _epoch(self, epoch: int) -> Iterator[Any]:
        share, length = self._share, len(self._batches)
        comes_and_goes = bool(share.worker_id)
        at = share.next_step() * share.batches_per_step if comes_and_goes else self._begun_at
        self._batches.epoch, self._batches.first = epoch, max(at - epoch * length, 0)
        if self._batches.first >= length:
            return
        end = (epoch + 1) * length // share.batches_per_step
        for batch in super().__iter__():
            if comes_and_goes and share.next_step() >= end:
                return  # the cluster has ended this epoch without waiting for this worker
            yield batch

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs up to `count` that the cluster has not behind it.

        for epoch in loader.epochs(3):
            for inputs, targets in loader:
        """
        share, length = self._share, len(self._batches)
        epoch = self._begun_at // length
        while epoch < count:
            self._next_epoch = epoch
            yield epoch
            epoch += 1
            if share.worker_id:  # the cluster may be further on
                epoch = max(epoch, share.next_step() * share.batches_per_step // length)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next `for` over the loader that epoch, as DistributedSampler's does."""
        self._next_epoch = epoch


class _Batches(BatchSampler):
    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.epoch = self.first = 0
        self.count: int | None = None

    @override
    def __iter__(self) -> Iterator[list[int]]:
        order: Any = self.sampler
        order.set_epoch(self.epoch)
        return itertools.islice(super().__iter__(), self.first, self.count)

    @override
    def __len__(self) -> int:
        return super().__len__() if self.count is None else self.count


class _OwnOrder(Sampler[int]):
    """All data, in another order for each worker and epoch."""

    def __init__(self, dataset: Any, worker_id: str, *, shuffle: bool, seed: int) -> None:
        self._size = len(dataset)
        self._worker_id = worker_id
        self._shuffles = shuffle
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    @override
    def __len__(self) -> int:
        return self._size

    @override
    def __iter__(self) -> Iterator[int]:
        epoch = self._epoch if self._shuffles else 0
        words = f"{self._seed} {epoch} {self._worker_id}".encode()
        drawn = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "little")
        if self._shuffles:
            generator = torch.Generator()
            generator.manual_seed(drawn)
            yield from torch.randperm(self._size, generator=generator).tolist()
        else:  # in order, and each worker from another place on
            first = drawn % self._size
            yield from range(first, self._size)
            yield from range(first)


def check_loader(loader: Any, seed: int = 0) -> tuple[bool, int]:
    """Returns True for a loader that shuffles, and the seed by which it does."""
    if not isinstance(loader, DataLoader):
        raise ArgumentError(
            f"loader must be a torch.utils.data.DataLoader; got {type(loader).__name__}; {_BY_HAND}"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ArgumentError(
            f"loader is a {type(loader).__name__}, which makes its batches in a way of its own; "
            f"pass a plain DataLoader, or {_BY_HAND}"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ArgumentError(
            f"the loader's {type(loader.dataset).__name__} is an IterableDataset, which has no "
            "indexes to deal; let it read every client.worker_count-th sample from client.rank on "
            f"in its __iter__, from optimizer.next_step on; {_BY_HAND}"
        )
    if loader.batch_size is None:
        what = "a batch_sampler" if loader.batch_sampler is not None else "batch_size=None"
        raise ArgumentError(
            f"the loader has {what} of its own, which knows nothing of workers; make it with "
            f"batch_size= and shuffle=, or {_BY_HAND}"
        )
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise ArgumentError("the loader's dataset is empty; give it samples")
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return False, seed
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        generator = sampler.generator
        return True, seed if generator is None else int(generator.initial_seed()) % 2**32 + seed
    raise ArgumentError(
        f"the loader has a {type(sampler).__name__} of its own, which knows nothing of workers; "
        f"make it with shuffle=, or {_BY_HAND}"
    )
