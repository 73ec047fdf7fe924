"""The samples of a worker: what shard 0 has dealt to it, and what became of its batches.

States of a batch (docs/adr/0042-samples.md has those of its positions):

    dealt     shard 0 has dealt it                 next -> taken; the tenure ends -> void
    taken     the program has it                   a gradient of it counts -> ended; it is given
                                                   back -> owed; it is put back -> dealt; the
                                                   tenure ends -> void
    carried   its gradient was late, and goes      as taken
              with the next one (late="carry")
    owed      shard 0 is to learn that it is       tell -> ended
              free, or has counted in part
    void      it is free, or another's: a          ended
              gradient of it is not sent

Invariants:
  - A gradient leaves only if each of its batches is taken or carried, in the tenure in which it
    leaves. So what one shard counts of it is the worker's to count.
  - `_held` has a batch from its deal to its end, so that no call asks for it once more.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.numerics.permutation import Int64, samples_at
from shardwell.parameter.feedback import Outcome
from shardwell.parameter.opening import ParameterOpening
from shardwell.placement.ranges import (
    NumberRanges,
    between,
    common,
    flat,
    paired,
    size_of,
    united,
    without,
)
from shardwell.rpc.cluster import Shards
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.parameter import STEP_MAX
from shardwell.specs.samples import Samples
from shardwell.steps.member import Member
from shardwell.threads.asking import ask_all
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2

_BATCH_COUNT = 32
"""Batches that one call asks for. A worker of a fixed crew asks for twice as many the next time."""
_BATCH_COUNT_MAX = 256
_SAMPLE_COUNT_MAX = 2**16
"""The most samples of more than `_BATCH_COUNT` batches: their indices are in memory."""
_Stage = pb.DealSamplesRequest


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of samples that was dealt to this worker; give it to `exchange` with its gradient.

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


@dataclass(frozen=True)
class Owed:
    """The positions of batches whose end shard 0 does not know."""

    data: str
    tenure: int
    ranges: NumberRanges
    step: int = 0
    is_partial: bool = False


class Dealing:
    """The samples of one parameter's worker.

    `take` and `take_dealt` for any thread; the rest for one at a time.
    """

    def __init__(
        self,
        opening: ParameterOpening,
        shards: Shards,
        member: Member | None,
        next_step: Callable[[], int],
    ) -> None:
        self._opening = opening
        self._channels = shards.channels
        self._launched_rank = shards.launched_rank
        self._member = member
        self._next_step = next_step
        self._lock = threading.Lock()
        self._dealt: dict[str, deque[Batch]] = {}
        """In order. Its operations are whole, so that `take_dealt` needs no lock."""
        self._held: dict[int, Batch] = {}
        """By identity: dealt, taken and carried ones."""
        self._batch_count = _BATCH_COUNT
        """Batches that the next call asks for."""
        self._carried: list[Batch] = []
        self._split: set[int] = set()
        """Of carried ones, by identity: some chunk has counted them."""
        self._owed: list[Owed] = []
        self._is_settled = member is not None or not opening.spec.has_open_sets
        """True once shard 0 knows what an earlier process of this worker gave in part."""
        self._remade = Owed("", 0, ())
        """The step that an earlier process of this worker has begun, and the samples that it had
        of it, until this process has ended that step."""
        self._given_before: NumberRanges = ()
        """Samples of the earlier process that some shards may have counted before that step."""
        self.is_used = False
        """True if batches were asked for."""
        self.out_count = 0
        """Positions below the limit of the last deal that other workers have."""
        self.free_count = 0
        """The free ones below that limit."""
        self.done_before = 0
        """The lowest position that had not counted at the last deal."""

    @property
    def _tenure(self) -> int:
        """The tenure that takes part; 0 without members, -1: none does."""
        if self._member is None:
            return 0
        return self._opening.tenure if self._member.takes_part else -1

    # Taking batches.

    def take_dealt(self, samples: Samples, limit: int) -> Batch | None:
        """Returns the next batch of those that were dealt; None: `take` may have one.

        It takes no lock, and asks no shard.
        """
        waiting = self._dealt.get(samples.name)
        if not waiting:
            return None
        try:
            batch = waiting[0]
            if batch.tenure != self._tenure or batch.ranges[0][0] >= limit:
                return None
            waiting.remove(batch)
        except (IndexError, ValueError):  # another thread has it
            return None
        return batch

    def take(self, samples: Samples, limit: int, attempts: Attempts) -> Batch | None:
        """Returns the next batch that begins below `limit`; None: none is free now.

        The worker takes part.
        """
        with self._lock:
            self.is_used = True
            waiting = self._dealt.setdefault(samples.name, deque())
            while (batch := self.take_dealt(samples, limit)) is None:
                for each in [each for each in tuple(waiting) if each.tenure != self._tenure]:
                    with contextlib.suppress(ValueError):
                        waiting.remove(each)
                        self._end(each)
                left = tuple(waiting)
                if left and left[0].ranges[0][0] >= limit:
                    return None
                if not left:
                    self.tell(attempts)
                    if not self._deal(samples, limit, waiting, attempts):
                        return None
            return batch

    def _end(self, batch: Batch) -> bool:
        """Ends a batch; False: it has ended before."""
        return self._held.pop(id(batch), None) is not None

    def may_come(self, samples: Samples, limit: int, attempts: Attempts) -> bool | None:
        """Returns True if samples below `limit` are free; None: others have some; False: none is.

        For an elastic worker, which need not be a member.
        """
        with self._lock:
            _, over = self._asked(samples, limit, attempts, count=0)
            for each in over:
                self._settle(each.worker_id, each.tenure, attempts)
            if over:
                self._asked(samples, limit, attempts, count=0)
            least = samples.batch_size if samples.drop_last and self.out_count else 1
            return True if self.free_count >= least else None if self.out_count else False

    def _deal(
        self, samples: Samples, limit: int, waiting: deque[Batch], attempts: Attempts
    ) -> bool:
        """Puts dealt batches behind those that wait; False: there are none."""
        while True:
            if not self._is_settled:
                is_fragment = self._opening.spec.fragment is not None
                step = STEP_MAX if is_fragment else self._next_step()  # a learner makes none again
                self._remade = self._settle(self._opening.worker_id, 0, attempts, step)
                self._is_settled = True
            found, over = self._asked(samples, limit, attempts, self._batch_count)
            # They are this worker's, also if the next call fails.
            self._held.update((id(batch), batch) for batch in found)
            waiting.extend(found)
            for each in over:
                self._settle(each.worker_id, each.tenure, attempts)
            if found or not over:
                break
        if self._member is None:  # no shard keeps a lease
            most = min(_SAMPLE_COUNT_MAX // samples.batch_size, _BATCH_COUNT_MAX)
            self._batch_count = max(min(2 * self._batch_count, most), _BATCH_COUNT)
        return bool(found)

    def _asked(
        self, samples: Samples, limit: int, attempts: Attempts, count: int
    ) -> tuple[list[Batch], list[Any]]:
        is_first = not self._taken_count
        tenure = max(self._tenure, 0)
        request = self._request(
            _Stage.STAGE_DEAL,
            tenure=tenure,
            dataset=pb.Dataset(
                name=samples.name,
                length=samples.length,
                seed=samples.seed,
                shuffles=samples.shuffle,
            ),
            batch_size=samples.batch_size,
            drop_last=samples.drop_last,
            batch_count=count,
            limit=limit,
            step=self._next_step(),
            ranges=flat(self._held_of(samples.name)),
            rank=self._launched_rank(self._opening.spec.worker_count),
        )
        answer = self._call(self._channels[0], request, attempts)
        self.out_count, self.free_count = answer.out_count, answer.free_count
        self.done_before = answer.done_before
        dealt = [self._ranges(each.ranges) for each in answer.batches]
        again = self._ranges(answer.again.ranges) if is_first else ()
        if again and self._member is None:
            had = self._remade.ranges if self._remade.data == samples.name else ()
            self._remade = Owed(samples.name, 0, united(had, again), request.step)
            again = without(again, self._given_before)
        if again:
            size = samples.batch_size
            dealt[:0] = [again] if size_of(again) <= size + 1 else _parts(again, size)
        batches = [
            Batch(indices, ranges[0][0] // samples.length, ranges, samples.name, tenure)
            for ranges, indices in zip(dealt, _indices(samples, dealt), strict=True)
        ]
        return batches, list(answer.unsettled)

    def _held_of(self, name: str) -> NumberRanges:
        if self._member is not None:
            return ()
        held = tuple(self._held.values())
        return united(*(batch.ranges for batch in held if batch.data == name))

    def _ranges(self, numbers: Sequence[int]) -> NumberRanges:
        try:
            return paired(numbers)
        except ArgumentError as error:
            raise CorruptChunkError(
                f"shard 0 deals samples that are none: {error.message}", **self._opening.of
            ) from None

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Makes taken batches the next ones again. Elastic members keep as many as a call deals."""
        with self._lock:
            for batch in reversed(batches):
                if self._end(batch):
                    again = replace(batch)  # no gradient of the one that the program has leaves
                    self._held[id(again)] = again
                    self._dealt[batch.data].appendleft(again)
            for waiting in self._dealt.values() if self._member is not None else ():
                while len(waiting) > _BATCH_COUNT:
                    last = waiting.pop()
                    self._end(last)
                    self._owed.append(Owed(last.data, last.tenure, last.ranges))

    # Their ends.

    def admits(self, batches: Sequence[Batch]) -> bool:
        """Returns True if a gradient of batches may leave now; those that are void end else."""
        tenure, are_valid = self._tenure, True
        remade = self._remade
        if remade.ranges and self._next_step() > remade.step:  # which ended without any of them
            are_valid = not any(common(batch.ranges, remade.ranges) for batch in batches)
            self._end_remade(())
        for batch in batches if are_valid else ():
            if batch.tenure != tenure:
                are_valid = False
            elif id(batch) not in self._held:
                raise ArgumentError(
                    f"this batch of samples {batch.data!r} was dealt to another worker or "
                    "parameter, or its gradient has counted; give each batch that batches() yields "
                    "to one exchange()"
                )
        if len(batches) > 1 and len({batch.data for batch in batches}) > 1:
            raise ArgumentError("one gradient has batches of several datasets; give each its step")
        return are_valid

    def named(self, batches: Sequence[Batch]) -> types_pb2.StepSamples | None:
        """Returns batches, and what is carried over, as a gradient names them."""
        given = (*batches, *self._carried)
        if not given:
            return None
        ranges = given[0].ranges
        if len(given) > 1:
            ranges = united(*(batch.ranges for batch in given))
        return types_pb2.StepSamples(data=given[0].data, ranges=flat(ranges))

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Ends batches whose gradient does not leave."""
        for batch in batches:
            if self._end(batch):
                step, remade = self._next_step(), self._remade
                split = common(batch.ranges, remade.ranges) if batch.data == remade.data else ()
                if split:
                    self._owed.append(replace(remade, ranges=split, is_partial=True))
                    self._remade = replace(remade, ranges=without(remade.ranges, split))
                if left := without(batch.ranges, split):
                    self._owed.append(Owed(batch.data, batch.tenure, left, step))

    def _end_remade(self, given: NumberRanges) -> None:
        """Ends the step that an earlier process has begun, as this one has given it with samples.

        Some shards have that process's gradient, and the others this one's: of samples that only
        one of them had.
        """
        remade, self._remade = self._remade, Owed("", 0, ())
        rest = without(remade.ranges, given)
        split = united(rest, without(given, remade.ranges)) if given else rest
        if split:
            self._owed.append(replace(remade, ranges=split, is_partial=True))
        for batch in list(self._held.values()) if rest else ():
            if batch.data == remade.data and common(batch.ranges, rest):
                with contextlib.suppress(ValueError):
                    self._dealt[batch.data].remove(batch)
                self._end(batch)
                if left := without(batch.ranges, rest):
                    self._owed.append(Owed(batch.data, batch.tenure, left, remade.step))

    def give_back_taken(self) -> None:
        """Ends the taken batches, of which no gradient will come."""
        others = [*self._carried, *(batch for of in self._dealt.values() for batch in of)]
        others_ids = set(map(id, others))
        self.give_back([each for each in tuple(self._held.values()) if id(each) not in others_ids])

    def ended(self, batches: Sequence[Batch], outcome: Outcome, *, carries: bool) -> bool:
        """Ends the batches of a step, by what became of its gradient.

        Returns False if values that are carried over are of samples that others may be dealt.
        """
        given, self._carried = [*batches, *self._carried], []
        if not given:
            return True
        if self._remade.ranges and outcome.step == self._remade.step:
            self._end_remade(united(*(batch.ranges for batch in given)))
        is_fragment, superseded = self._opening.spec.fragment is not None, outcome.superseded
        is_superseded = any(where.offset == 0 for where in superseded)
        if self._member is None and not (is_fragment and is_superseded):
            superseded = ()  # its earlier process had the same samples
        # A learner keeps its work of these, as late work.
        late = [*outcome.late, *superseded] if is_fragment else outcome.late
        lost = [*outcome.late, *outcome.unknown, *superseded]
        if not lost:
            for batch in given:
                self._end(batch)
            self._split = set()
            return True
        is_counted = not any(where.offset == 0 for where in lost)
        is_late = any(where.offset == 0 for where in late)
        is_partial = outcome.counted != "none" or bool(outcome.unknown)
        if self._member is None:  # an earlier process's, of the same samples, has counted there
            is_partial |= bool(outcome.superseded)
        split = self._split | {id(batch) for batch in given if is_partial}
        if carries and is_late and not is_counted and given[0].tenure == self._tenure:
            self._carried, self._split = given, split
            return True
        for batch in given:
            self._end(batch)
        # Also where the rest is carried over: it is lost with this worker.
        for is_split in (True, False):
            ranges = united(*(b.ranges for b in given if (id(b) in split) == is_split))
            if ranges and (is_split or not is_counted):
                owed = Owed(given[0].data, given[0].tenure, ranges, outcome.step, is_split)
                self._owed.append(owed)
        self._split = set()
        return is_counted

    @property
    def has_taken(self) -> bool:
        """True if the program has batches whose gradient has not counted."""
        return self._taken_count > len(self._carried)

    @property
    def _taken_count(self) -> int:
        return len(self._held) - sum(map(len, self._dealt.values()))

    @property
    def carries(self) -> bool:
        """True if batches are carried over to the next step."""
        return bool(self._carried)

    @property
    def has_void(self) -> bool:
        """True if batches are carried over whose tenure has ended since."""
        return any(batch.tenure != self._tenure for batch in self._carried)

    def drop_carried(self) -> None:
        """Ends batches whose values are not carried over any more."""
        for batch in self._carried:
            self._end(batch)
            is_split = id(batch) in self._split
            self._owed.append(Owed(batch.data, batch.tenure, batch.ranges, is_partial=is_split))
        self._carried, self._split = [], set()

    def forget_carried(self) -> None:
        """Gives up batches whose gradient is not carried over any more: their tenure is over."""
        for batch in self._carried:
            self._end(batch)
        self._carried, self._split = [], set()

    def tell(self, attempts: Attempts) -> None:
        """Tells shard 0 what became of batches that have not counted whole."""
        while self._owed:
            owed = self._owed.pop(0)  # so that another thread sends the next one
            request = self._request(
                _Stage.STAGE_RETURN,
                tenure=owed.tenure,
                dataset=pb.Dataset(name=owed.data),
                ranges=flat(owed.ranges),
                step=owed.step,
                is_partial=owed.is_partial,
            )
            try:
                self._call(self._channels[0], request, attempts)
            except BaseException:
                self._owed.insert(0, owed)
                raise

    def _settle(
        self, worker_id: str, tenure: int, attempts: Attempts, next_step: int = STEP_MAX
    ) -> Owed:
        """Ends a tenure on all shards, and tells shard 0 what its last gradient had counted of.

        Of a fixed crew, it returns what had counted of `next_step`, which its worker gives again.
        """
        subject: dict[str, Any] = {"worker_id": worker_id, "tenure": tenure}
        end = partial(self._request, _Stage.STAGE_END, **subject)
        answers = ask_all(self._channels, lambda each: self._call(each, end(), attempts.beside()))
        step = max((answer.step for answer in answers), default=0)
        newest = [each for each in answers if each.step == step and each.ranges]
        ranges, data = united(*(self._ranges(each.ranges) for each in newest)), ""
        if newest:
            data = newest[0].data
        remade: NumberRanges = ()
        if step >= next_step:  # of what the step has, some was carried on from earlier ones
            step, before = max(next_step - 1, 0), [each.carried for each in newest]
            before += [each.ranges for each in answers if each.step < next_step]
            carried = united(*map(self._ranges, before))
            remade = without(ranges, carried)
            ranges = self._given_before = common(ranges, carried)
        request = self._request(
            _Stage.STAGE_SETTLE,
            **subject,
            step=step,
            ranges=flat(ranges),
            dataset=pb.Dataset(name=data),
            whole_before=min(each.whole_before for each in answers),
            next_step=next_step,
        )
        self._call(self._channels[0], request, attempts)
        return Owed(data, 0, remade, next_step)

    def _request(self, stage: Any, **fields: Any) -> pb.DealSamplesRequest:
        fields.setdefault("worker_id", self._opening.worker_id)
        return pb.DealSamplesRequest(
            stage=stage, incarnation=self._opening.incarnation, **self._opening.of, **fields
        )

    def _call(
        self, channel: ShardChannel, request: pb.DealSamplesRequest, attempts: Attempts
    ) -> pb.DealSamplesResponse:
        def ask() -> pb.DealSamplesResponse:
            request.shard.CopyFrom(channel.identity)
            return channel.call(
                "DealSamples",
                request,
                pb.DealSamplesResponse,
                timeout_s=attempts.rest_s,
                **self._opening.of,
            )

        return attempts.run(ask)


def _indices(samples: Samples, dealt: Sequence[NumberRanges]) -> list[Int64]:
    """Returns the samples of each batch, all at once."""
    if not dealt:
        return []
    runs: list[list[int]] = []  # of batches that follow one another, as all of one worker do
    ends = [0]
    for ranges in dealt:
        for start, stop in ranges:
            if runs and runs[-1][1] == start:
                runs[-1][1] = stop
            else:
                runs.append([start, stop])
        ends.append(ends[-1] + size_of(ranges))
    positions = np.concatenate([np.arange(*run, dtype=np.int64) for run in runs])
    found = samples_at(positions, samples.length, samples.seed, shuffles=samples.shuffle)
    return [found[first:end] for first, end in itertools.pairwise(ends)]


def _parts(ranges: NumberRanges, size: int) -> list[NumberRanges]:
    return [between(ranges, first, first + size) for first in range(0, size_of(ranges), size)]
