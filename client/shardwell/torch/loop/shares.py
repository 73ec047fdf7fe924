"""The batches of a DataLoader, as the shards deal them to this worker, and which a gradient is of.

The order is in the batch sampler, because frameworks rebuild DataLoaders. It draws in the main
process, ahead of what the program has seen where a loader prefetches. States of a batch, after
those that parameter/dealing.py has:

    state   event                                                             next
    drawn   a backward pass runs behind it (below)                            used
    drawn   another pass over the data begins, or the program drops its
            iterator: it is this worker's next batch again                    -
    used    the optimizer's step has a gradient, or owes one that failed      given
    used    the step is skipped (GradScaler, `skip_step`), or `zero_grad`
            comes without one: the shards deal it again                       -
    given   as its gradient counts                                            -

A backward pass uses all batches that the loader's own iterator has yielded by then. Of a loader
that a framework has built, which may look ahead, each backward pass uses one.

A pass is one iteration. It is dealt what lies below its limit, the end of epoch k, where k counts
the passes of this process that have ended:

    a pass has ended          k
    all that it drew is used  + 1; also where the program broke it off behind its last batch
    it drew nothing           + 1: its epoch was over when this process began
    it used nothing           as it was: an evaluation, or a look at the first batch
    the program broke it off  as it was: the next one goes on
    `set_epoch(e)`            at least e, the highest one since a pass began

The first limit is also the end of an epoch that has begun and is not over, unless `set_epoch` says
which it is.

Invariant: each gradient is given with the batches that it was made from, and a batch that no
gradient was made from is dealt again. So epochs end by the samples that have counted, however
often a program, or a framework, begins to iterate.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
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
from shardwell.numerics.permutation import permuted
from shardwell.parameter.dealing import Batch
from shardwell.specs.samples import Samples

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"),
    *("multiprocessing_context", "generator", "persistent_workers", "pin_memory_device"),
)
"""Arguments of a DataLoader that its share has, too. Not `in_order`: its batches come in order."""
_END = object()
_KNOWN = inspect.signature(DataLoader.__init__).parameters
"""Of which older versions of torch have fewer."""
_BY_HAND = (
    "share the data yourself, by client.rank and client.worker_count, and call prepare() without a "
    "loader"
)


class Deals(Protocol):
    """Deals batches: a parameter, by the account of its samples, or `OwnDeals`."""

    def next_batch(self, samples: Samples, limit: int) -> Batch | None:
        """Returns the next batch below a position, or None."""

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Takes batches back, as the next ones."""

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Takes batches back for later."""

    def await_free(self, samples: Samples, limit: int) -> bool:
        """Waits for samples below a position that others have; False: all have counted."""

    @property
    def samples_done(self) -> int:
        """The lowest position that has not counted."""


class OwnDeals:
    """The batches of an asynchronous worker, of which no account is kept.

    Each worker goes through all data in an order of its own, from its own step on.
    """

    def __init__(self, samples: Samples, worker_id: str, batch_count: int) -> None:
        length, size = samples.length, samples.batch_size
        in_epoch = length // size if samples.drop_last else -(-length // size)
        epoch, index = divmod(batch_count, in_epoch)
        self.samples_done = epoch * length + index * size
        words = f"{samples.seed} {worker_id}".encode()
        self._seed = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "little")

    def next_batch(self, samples: Samples, limit: int) -> Batch | None:
        """Returns the worker's next batch."""
        length, start = samples.length, self.samples_done
        epoch = start // length
        stop = min(start + samples.batch_size, (epoch + 1) * length)
        if samples.drop_last and stop - start < samples.batch_size:
            epoch, start, stop = epoch + 1, stop, stop + samples.batch_size
        if start >= limit:
            return None
        self.samples_done = stop
        places = np.arange(start, stop, dtype=np.int64) - epoch * length
        if samples.shuffle:
            indices = permuted(places, length, self._seed, epoch)
        else:  # in order, and each worker from another place on
            indices = (places + self._seed % length) % length
        return Batch(indices, epoch, ((start, stop),), samples.name, 0)

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Goes back to the first of the last batches."""
        if batches:
            self.samples_done = batches[0].ranges[0][0]

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Lets go of batches, which come with the next epoch."""

    def await_free(self, samples: Samples, limit: int) -> bool:
        """Returns False: others have orders of their own."""
        return False


@dataclass(eq=False)
class _Pass:
    """One iteration over the batch sampler."""

    batches: SharedBatches
    is_own: bool
    """True for an iterator of SharedLoader, which says what it has yielded."""
    limit: int = 0
    drawn: deque[Batch] = field(default_factory=deque)
    """Those that are not used, in order."""
    yielded_count: int = 0
    """How many of them an own iterator has yielded."""
    lost_count: int = 0
    """Batches that were put back, whose data an own iterator has still to fetch."""
    has_drawn: bool = False
    has_used: bool = False
    is_over: bool = False
    """True if nothing more is dealt to it."""
    has_ended: bool = False
    """True if an own iterator has yielded its last."""

    @property
    def is_running(self) -> bool:
        return self.is_own and not self.has_ended

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> list[int]:
        return self.batches.draw(self)

    def took(self) -> bool:
        """Takes note that data came; False: their batch was put back meanwhile."""
        if self.lost_count:
            self.lost_count -= 1
            return False
        self.yielded_count += 1
        return True


class SharedBatches(Sampler[list[int]]):
    """The batch sampler of a worker's share. For the main process and its backward passes."""

    def __init__(
        self,
        samples: Samples,
        deals: Callable[[], Deals],
        count_of: Callable[[int], int],
        *,
        is_counted: bool,
        take_last: Callable[[], None],
    ) -> None:
        """Makes the batches of a worker.

        Args:
            samples: The dataset.
            deals: Returns what deals them.
            count_of: Returns how many batches of so many samples this worker has.
            is_counted: True if shards keep account of them.
            take_last: Takes the weights that come of the last samples.
        """
        self.samples = samples
        self.batch_size, self.drop_last = samples.batch_size, samples.drop_last
        self.sampler = self  # of which frameworks call set_epoch
        self.is_next_own = False
        """True if the next pass is of an own iterator."""
        self._deals = deals
        self._count_of = count_of
        self._count = count_of(samples.length)
        if not self._count:
            raise ArgumentError(
                f"a worker's share of {samples.length} samples is less than a batch of "
                f"{samples.batch_size}, and drop_last leaves that out; make batches smaller"
            )
        self._is_counted = is_counted
        self.take_last = take_last
        self.newest: _Pass | None = None
        """The pass that began last."""
        self._used: list[Batch] = []
        self._seen: set[int] = set()
        """Tensors with a gradient of the backward pass under way."""
        self._lock = threading.Lock()  # backward has a thread for each device
        self._passes: list[_Pass] = []
        self._epoch = 0
        self._asked: int | None = None
        self._last_epoch = 0
        self._broke_off = False
        """True if the last pass that used batches was broken off."""
        self.before_step: Callable[[bool], None] = lambda _: None
        """Called where an own iterator is about to fetch the first batch of a step; True if steps
        have been made of others of it."""

    @override
    def __iter__(self) -> Iterator[list[int]]:
        is_own, self.is_next_own = self.is_next_own, False
        distributed = torch.distributed
        if not is_own and distributed.is_available() and distributed.is_initialized():
            rank_count = distributed.get_world_size()
            if rank_count > 1:
                raise ArgumentError(
                    f"torch.distributed has {rank_count} ranks, among which a framework deals "
                    "batches again that the shards have dealt already; leave the loader out of "
                    "accelerator.prepare() and iterate over it as prepare() has returned it, or "
                    "remove RANK, LOCAL_RANK and WORLD_SIZE from os.environ before the framework "
                    "is imported"
                )
        self.newest = _Pass(self, is_own)
        return self.newest

    def __len__(self) -> int:
        """Returns the batches of an epoch; once `set_epoch` has chosen one, of what is left of it.

        So frameworks know which batch is the last, though a worker has been started again.
        """
        if self._asked is None:
            return self._count
        epoch = self._asked
        while not (has_left := self.has_left(epoch)) and epoch < self._last_epoch:
            epoch += 1
        left = (epoch + 1) * self.samples.length - self._deals().samples_done
        return self._count_of(left) or self._count if has_left else self._count

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that epoch, and what is left of those before.

        The highest one that was asked for counts: Accelerate asks for the number of its own passes,
        which is lower than that of `SharedLoader.epochs` in a worker that was started again.
        """
        self._asked = max(epoch, self._asked or 0)

    def go_on_to(self, count: int) -> None:
        """Lets passes leave out epochs that are over, up to `count` epochs."""
        self._last_epoch = count - 1

    @property
    def seed_here(self) -> int:
        """A seed of this place in the data, for the random numbers of a DataLoader's workers."""
        words = f"{self.samples.seed} {self._deals().samples_done}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "little")

    def has_left(self, epoch: int) -> bool:
        """Returns True if anything of an epoch, or one before, is to be dealt."""
        self._settle()
        batch = self._next(epoch)
        if batch is not None:
            self._deals().put_back([batch])
        return batch is not None

    def await_left(self, epoch: int) -> bool:
        """Waits while other members have all that is left; True if any of it comes back."""
        limit = (epoch + 1) * self.samples.length
        return (
            not self.has_left(epoch)
            and self._deals().await_free(self.samples, limit)
            and self.has_left(epoch)
        )

    # Drawing.

    def draw(self, one: _Pass) -> list[int]:
        """Returns the next indexes of a pass; StopIteration at its end."""
        self._seen.clear()
        batch = None
        if not one.is_over:
            if self._passes[-1:] != [one]:
                self._settle()
            begun = one in self._passes
            batch = self._deals().next_batch(self.samples, one.limit) if begun else self._first(one)
        if batch is None:
            one.is_over = True
            raise StopIteration
        one.drawn.append(batch)
        one.has_drawn = True
        indices: list[int] = batch.indices.tolist()
        return indices

    def _next(self, epoch: int) -> Batch | None:
        return self._deals().next_batch(self.samples, (epoch + 1) * self.samples.length)

    def _first(self, one: _Pass) -> Batch | None:
        self._passes.append(one)
        asked, self._asked = self._asked, None
        self._epoch = max(self._epoch, asked or 0)
        epoch, batch = self._epoch, self._next(self._epoch)
        while batch is None and epoch < self._last_epoch:
            self._epoch = epoch = epoch + 1
            batch = self._next(epoch)
        if batch is None and asked is None:
            begun, rest = divmod(self._deals().samples_done, self.samples.length)
            if rest and begun > epoch:
                epoch, batch = begun, self._next(begun)
            elif self._broke_off:  # behind its last batch, so it has ended
                self._epoch = epoch = epoch + 1
                batch = self._next(epoch)
        self._broke_off = False
        one.limit = (epoch + 1) * self.samples.length
        return batch

    def _settle(self) -> None:
        """Ends the passes before, and puts back what they have not used.

        A pass that runs, and has used batches, goes on later: another one begins within it.
        """
        unused: list[Batch] = []
        stay = []
        for each in self._passes:
            if each.is_running and each.has_used:
                stay.append(each)
                continue
            if each.is_over and not each.drawn and (each.has_used or not each.has_drawn):
                self._epoch, self._broke_off = self._epoch + 1, False
            elif each.has_used:
                self._broke_off = True
            unused += self._left_by(each)
        self._passes = stay
        self._deals().put_back(unused)

    def _left_by(self, one: _Pass) -> list[Batch]:
        unused = list(one.drawn)
        one.lost_count += len(unused) - one.yielded_count if one.is_own else 0
        one.yielded_count = 0
        one.drawn.clear()
        return unused

    def break_off(self, one: _Pass) -> None:
        """Ends a pass whose iterator the program has dropped."""
        one.has_ended, one.is_over = True, one.is_over and not one.drawn
        self._deals().put_back(self._left_by(one))

    def begin_step(self, one: _Pass) -> None:
        """Calls `before_step`, unless the program has a batch of the step already."""
        if not (self._used or any(each.yielded_count for each in self._passes)):
            self.before_step(one.has_used)

    # Using.

    def note_backward(self, tensor: torch.Tensor) -> None:
        """Takes note that backward has made a tensor's gradient."""
        with self._lock:
            running = (each for each in reversed(self._passes) if each.is_running)
            one = next((each for each in running if each.yielded_count), None)
            if one is not None:
                self._use(one, one.yielded_count)
                one.yielded_count = 0
            elif not self._seen or id(tensor) in self._seen:  # another backward pass
                self._seen.clear()
                ended = (each for each in self._passes if not each.is_running)
                one = next((each for each in ended if each.drawn), None)
                if one is not None:
                    self._use(one, 1)
            self._seen.add(id(tensor))

    def _use(self, one: _Pass, count: int) -> None:
        used = [one.drawn.popleft() for _ in range(count)]
        one.has_used = True
        if self._is_counted:
            self._used += used

    @property
    def used(self) -> tuple[Batch, ...]:
        """The batches that the gradients are of, since the last step."""
        return tuple(self._used)

    def note_given(self, batches: Sequence[Batch]) -> None:
        """Takes note that a step has batches, which the parameter ends."""
        self._used = [each for each in self._used if each not in batches]
        self._seen.clear()

    def give_back(self) -> None:
        """Gives back batches whose gradient is for no step."""
        self._deals().give_back(self._used)
        self.note_given(self._used)

    def end_all(self) -> None:
        """Puts back what is drawn: another loader goes on."""
        for each in self._passes:
            self._deals().put_back(self._left_by(each))
        self._passes = []

    def begin_anew(self) -> None:
        """Forgets all batches: they were another parameter's."""
        self._used, self._passes, self._epoch = [], [], 0


class SharedLoader(DataLoader[Any]):
    """A DataLoader of this worker's share: each sample counts once an epoch, on all workers.

    Each `for` over it is an epoch, or goes on with the one that the last `for` broke off. A sample
    has counted once the step has that its gradient is for; a batch that no step had is dealt again.
    A worker that is started again goes on where all of them are. `epochs` leaves out what is over.

    Args:
        loader: The loader of all data.
        batches: The batches to take.

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

    def __init__(self, loader: DataLoader[Any], batches: SharedBatches) -> None:
        self.whole = loader
        """The loader of all data."""
        self._batches = batches
        super().__init__(
            loader.dataset,
            batch_sampler=batches,
            **{name: getattr(loader, name) for name in _KEPT if name in _KNOWN},
        )
        if loader.generator is None:  # else each iterator draws from torch's, beside the program
            self.generator = torch.Generator()
        self._draws_alone = loader.generator is None

    @override
    def __iter__(self) -> Any:
        self._batches.is_next_own = True
        if self._draws_alone:
            assert self.generator is not None
            self.generator.manual_seed(self._batches.seed_here)
        found = super().__iter__()
        one = self._batches.newest
        assert one is not None
        try:
            while True:
                self._batches.begin_step(one)
                data = next(found, _END)
                if data is _END:
                    break
                if one.took():
                    yield data
            one.has_ended = True
        finally:
            if not one.has_ended:
                self._batches.break_off(one)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs up to `count` of which this worker has samples to take.

        The last one may come again: an elastic worker waits at its end until all samples have
        counted, and takes those of a member that was lost. Then the model has the weights that came
        of all of them, on each worker.

        for epoch in loader.epochs(3):
            for inputs, targets in loader:
        """
        for epoch in range(count):
            if self._batches.has_left(epoch):
                self.set_epoch(epoch)
                yield epoch
        while count and self._batches.await_left(count - 1):
            self.set_epoch(count - 1)
            yield count - 1
        self._batches.take_last()

    def set_epoch(self, epoch: int) -> None:
        """Makes the next `for` over the loader that epoch, and what is left of those before."""
        self._batches.set_epoch(epoch)

    def go_on_to(self, epoch_count: int) -> None:
        """Makes each `for` over the loader begin with the first epoch that is not over.

        For a framework that ends the training where an epoch has no batch. Another `for` is empty
        once `epoch_count` epochs are over.
        """
        self._batches.go_on_to(epoch_count)


def samples_of(loader: Any, seed: int = 0) -> Samples:
    """Returns the samples that a loader has, if they can be dealt by their indexes."""
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
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        what = "batch_size=None" if batches is None else "a batch_sampler"
        raise ArgumentError(
            f"the loader has {what} of its own, which knows nothing of workers; make it with "
            f"batch_size= and shuffle=, or {_BY_HAND}"
        )
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise ArgumentError("the loader's dataset is empty; give it samples")
    sampler: Any = batches.sampler
    kind = type(sampler)
    shuffles = kind is not SequentialSampler
    if kind is SequentialSampler:
        data = sampler.data_source
    elif kind is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        data, generator = sampler.data_source, sampler.generator
        seed += 0 if generator is None else int(generator.initial_seed()) % 2**32
    elif kind is DistributedSampler:  # the shards deal among the ranks
        data, shuffles = sampler.dataset, sampler.shuffle
        seed += int(sampler.seed) % 2**32
    else:
        data = ()
    if len(data) != len(loader.dataset):  # type: ignore[arg-type]
        raise ArgumentError(
            f"the loader has a {kind.__name__} of its own, which draws some samples more often "
            "than others, or leaves some out, so that no epoch has each sample once; make it with "
            f"shuffle=, of a torch.utils.data.Subset where some are left out, or {_BY_HAND}"
        )
    return Samples(
        len(data), batches.batch_size, seed=seed, shuffle=shuffles, drop_last=batches.drop_last
    )


def batch_count(samples: Samples, worker_count: int, is_fixed: bool, length: int) -> int:
    """Returns how many batches of `length` samples a worker has: of a fixed crew, or at most."""
    width = worker_count * samples.batch_size
    full, rest = divmod(length, width if is_fixed else samples.batch_size)
    if not samples.drop_last and is_fixed:  # less than a sample for each is in the round before
        full += rest >= worker_count or (rest > 0 and not full)
    elif not samples.drop_last:
        full += rest > 0
    return full if is_fixed else -(-full // worker_count)
