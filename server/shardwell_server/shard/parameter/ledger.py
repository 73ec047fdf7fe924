"""The account of a dataset's samples: which have counted, who has which, what is dealt next. Pure.

All data of a training are one sequence of positions: position g is sample g % length of epoch
g // length, in that epoch's order. States of a position (docs/adr/0042-samples.md):

    state    event                                                        next
    free     it is dealt to a holder                                      out
    out      its holder's gradient is counted by chunk 0, in step t       open
    out      its holder gives it back                                     free
    out      its holder's tenure is over, and no shard has counted it     free
    out      the same, and a shard other than chunk 0's has counted it;
             or its holder says that a part of its gradient counted       done, partial
    free     of a fixed crew: its worker will give no step again in
             which a shard other than chunk 0's has counted it            done, partial
    open     chunk 0 closes step t                                        done
    open,    its holder's tenure is over, and a chunk has not counted it,
    done     or its holder says so                                        the same, partial
    open,    the count is void: chunk 0's record is older                 out; free in a fixed crew
    done
    free     it is left out at the end of an epoch (drop_last)            done

Elastic members lease positions. Workers of a fixed crew are dealt by a plan, which says for each
rank a sequence of its own: as much for each rank, and the same whenever a worker is started again.
A rank is its launcher's, or the place of its seat, and a checkpoint has it by worker id.

Invariants:
  - A position is in one state; `done` never shrinks, but where a checkpoint is loaded.
  - A position is out to one holder at most, and counts for its holder alone.
  - Each change is noted before it takes effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from shardwell.errors import ArgumentError, LimitError, SpecMismatchError
from shardwell.placement.ranges import (
    NumberRanges,
    added,
    between,
    common,
    first_of,
    place_of,
    size_of,
    united,
    without,
)
from shardwell.specs.samples import POSITION_MAX

RANK_COUNT_MAX = 1024
"""Workers whose ranks a checkpoint has; of larger crews none."""
STEP_COUNT_MAX = 1024
"""Closed steps whose samples are known."""
_PARTIAL_COUNT_MAX = 256
"""Partial blocks that are known by number; more are counted."""
_PLAN_COUNT_MAX = 256
"""Plans of which a rank has batches that it did not give yet."""
_KEPT_COUNT = 4096
"""The last counts that a compacted log has one by one: a loss of power may take them back."""

Event = dict[str, Any]


class Holder(NamedTuple):
    """A worker in one tenure; 0 in a crew of fixed size."""

    worker_id: str
    tenure: int


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The data that all workers have to agree on."""

    name: str
    length: int
    seed: int
    shuffles: bool


class Counted(NamedTuple):
    """The samples of a gradient that chunk 0 has counted."""

    step: int
    order: int
    """Its place among the step's contributions."""
    holder: Holder
    ranges: NumberRanges


class Partial(NamedTuple):
    """The samples of a gradient that has counted in some chunks, and will in no others."""

    worker_id: str
    step: int
    ranges: NumberRanges


class Given(NamedTuple):
    """The last gradient of a tenure, as the shards have counted chunks other than the first."""

    step: int
    ranges: NumberRanges
    """In any chunk; without any: none."""
    whole_before: int
    """Gradients of earlier steps have counted in all chunks, but for what the worker has said."""
    carried: NumberRanges = ()
    """Those that a gradient of an earlier step had as well."""


class Way(NamedTuple):
    """The numbers by which a fixed crew is dealt its samples."""

    rank_count: int
    batch_size: int
    drops_last: bool

    @property
    def width(self) -> int:
        return self.rank_count * self.batch_size

    @property
    def words(self) -> str:
        last = ", and drops what is less" if self.drops_last else ""
        return f"batches of {self.batch_size} for each of {self.rank_count} workers{last}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A deal of positions among the ranks of a fixed crew, batch by batch in turns.

    Each rank has as many batches. The last round deals the rest evenly; where that is less than a
    sample for each, the round before it is larger by one.
    """

    number: int
    ranges: NumberRanges
    way: Way

    @cached_property
    def round_count(self) -> int:
        full, rest = divmod(size_of(self.ranges), self.way.width)
        is_spread = rest < self.way.rank_count and full > 0
        return full + (rest > 0 and not self.way.drops_last and not is_spread)

    def batch(self, rank: int, round_index: int) -> NumberRanges:
        """Returns the positions of a rank's batch."""
        way = self.way
        begin = round_index * way.width
        if round_index < self.round_count - 1 or way.drops_last:
            begin += rank * way.batch_size
            return between(self.ranges, begin, begin + way.batch_size)
        each, more = divmod(size_of(self.ranges) - begin, way.rank_count)
        begin += rank * each + min(rank, more)
        return between(self.ranges, begin, begin + each + (rank < more))

    @property
    def left_out(self) -> NumberRanges:
        """The positions that no rank has."""
        dealt = self.round_count * self.way.width
        return between(self.ranges, dealt, POSITION_MAX) if self.way.drops_last else ()

    def rest_of(self, rank: int, gone: NumberRanges, count: int) -> list[NumberRanges]:
        """Returns the next `count` batches of a rank's sequence, without what is `gone`."""
        left = without(self.ranges, gone)
        found: list[NumberRanges] = []
        if left:
            first = min(place_of(self.ranges, left[0][0]) // self.way.width, self.round_count - 1)
            gone_before = gone[-1][1] if gone else 0
            for index in range(first, self.round_count):
                batch = self.batch(rank, index)
                if batch and batch[0][0] < gone_before:
                    batch = without(batch, gone)
                if batch:
                    found.append(batch)
                if len(found) == count:
                    break
        return found

    def facts(self) -> Event:
        return {"number": self.number, "ranges": self.ranges, "way": self.way}


@dataclass
class Account:
    """The numbers of a dataset's positions, for people."""

    epoch: int
    length: int
    done: int
    out: int
    free: int
    left_out: int
    """Of all epochs; the three before are of this one."""
    partial: list[Partial] = field(default_factory=list)
    partial_count: int = 0


class Ledger:
    """The account of one dataset. For one thread at a time."""

    def __init__(self, data: Dataset, note: Callable[[Event], None], *, leases: bool) -> None:
        self.data = data
        self._note_event = note
        self.leases = leases
        """True if members come and go, and lease what they are dealt."""
        self.done: NumberRanges = ()
        self.open: list[Counted] = []
        """Of the open step of chunk 0, in order."""
        self.out: dict[Holder, NumberRanges] = {}
        self.last_step: dict[Holder, int] = {}
        """The last step of each elastic holder that is not settled."""
        self.plans: list[Plan] = []
        self.returned: NumberRanges = ()
        """Positions of plans that were given back: the next plan has them."""
        self.ranks: dict[str, int] = {}
        """Of each worker of a fixed crew that was dealt anything: its place in plans."""
        self._former_ranks: dict[str, int] = {}
        """Those that a checkpoint had."""
        self._returned_by: dict[str, tuple[int, NumberRanges]] = {}
        """Of each worker of a fixed crew: the last step in which it gave any back, and these."""
        self.partial: list[Partial] = []
        self.partial_count = 0
        self.left_out_count = 0
        self.steps: OrderedDict[int, list[Counted]] = OrderedDict()
        """The last steps that have closed."""
        self._known_from = 0

    def _note(self, kind: str, **facts: Any) -> None:
        self._note_event({"kind": kind, "data": self.data.name, **facts})

    def check(self, data: Dataset) -> None:
        """Refuses a worker whose data are others."""
        for what in ("length", "seed", "shuffles"):
            expected, got = getattr(self.data, what), getattr(data, what)
            if expected != got:
                raise SpecMismatchError(
                    f"samples {data.name!r}: {what} is {got}, and other workers, or an earlier "
                    f"process, have {expected}; give all workers the same dataset, or this one "
                    "another name="
                )

    # Counting.

    def advance(self, version: int) -> None:
        """Closes the steps before a version of chunk 0."""
        if self.open and self.open[0].step < version:
            closed, self.open = self.open, []
            if closed[-1].step >= version:
                self.open = [each for each in closed if each.step >= version]
                closed = [each for each in closed if each.step < version]
            counted = closed[0].ranges
            if len(closed) > 1:
                counted = united(*(each.ranges for each in closed))
            self.done = added(self.done, counted)
            for each in closed:
                self.steps.setdefault(each.step, []).append(each)
            while len(self.steps) > STEP_COUNT_MAX:
                self._known_from = self.steps.popitem(last=False)[0] + 1

    @property
    def open_ranges(self) -> NumberRanges:
        return united(*(each.ranges for each in self.open))

    @property
    def out_ranges(self) -> NumberRanges:
        return united(*self.out.values())

    def check_count(self, holder: Holder, ranges: NumberRanges) -> None:
        """Refuses samples that are not the holder's to contribute."""
        if self.leases:
            others = without(ranges, self.out.get(holder, ()))
            why = "are not leased to it"
        else:
            others = common(ranges, self.done)
            for each in self.open:
                others = others or common(ranges, each.ranges)
            why = "have counted"
        if others:
            raise ArgumentError(
                f"worker {holder.worker_id!r} contributes samples {self.data.name!r} at positions "
                f"{others[0][0]} to {others[0][1] - 1}, which {why}; give exchange() the batch "
                "that batches() has yielded, once",
                worker_id=holder.worker_id,
            )

    def note_count(self, counted: Counted) -> None:
        """Notes a gradient's samples, which count with the gradient; see `count`."""
        self._note_event({"kind": "counted", "data": self.data.name, **_facts(counted)})

    def count(self, counted: Counted) -> None:
        """Takes what was noted, once the gradient has counted."""
        self.open.append(counted)
        if self.leases:
            self.last_step[counted.holder] = counted.step
            self._take_from(counted.holder, counted.ranges)
        if self.returned:
            self.returned = without(self.returned, counted.ranges)

    def _take_from(self, holder: Holder, ranges: NumberRanges) -> None:
        left = without(self.out.get(holder, ()), ranges)
        if left:
            self.out[holder] = left
        else:
            self.out.pop(holder, None)

    # Dealing.

    def lease(
        self, holder: Holder, count: int, limit: int, batch_size: int, *, drops_last: bool
    ) -> list[NumberRanges]:
        """Deals up to `count` batches of free positions below `limit`, the lowest ones."""
        busy = united(self.open_ranges, self.out_ranges)
        free = without(((0, limit),) if limit > 0 else (), united(self.done, busy))
        batches: list[NumberRanges] = []
        while free and len(batches) < count:
            length = self.data.length
            epoch = free[0][0] // length
            whole: NumberRanges = ((epoch * length, (epoch + 1) * length),)
            here = common(free, whole)
            batch = first_of(here, batch_size)
            if not drops_last or size_of(batch) == batch_size:
                batches.append(batch)
            elif (
                whole[0][1] <= limit
                and not common(busy, whole)
                and not any(common(each, whole) for each in batches)
            ):
                self._leave_out(batch)  # else more of the epoch may come back
            free = without(free, batch)
        if batches:
            ranges = united(*batches)
            self._note("lease", **holder._asdict(), ranges=ranges)
            self._take_lease(holder, ranges)
        return batches

    def _take_lease(self, holder: Holder, ranges: NumberRanges) -> None:
        self.out[holder] = united(self.out.get(holder, ()), ranges)

    def _leave_out(self, ranges: NumberRanges) -> None:
        self._note("left_out", ranges=ranges)
        self._take_left_out(ranges)

    def _take_left_out(self, ranges: NumberRanges) -> None:
        self.left_out_count += size_of(without(ranges, self.done))
        self.done = united(self.done, ranges)

    def planned(
        self,
        rank: int,
        way: Way,
        count: int,
        limit: int,
        held: NumberRanges,
        *,
        is_alone: bool,
    ) -> list[NumberRanges]:
        """Deals the next batches of a rank's sequence, as long as they begin below `limit`.

        `held` are positions that the rank has, and did not give yet. `is_alone`: no worker that is
        connected has been dealt in another way, so a new one may begin.
        """
        if self.begins_anew(way):
            if not is_alone:
                other = next(plan.way for plan in self.plans if plan.way != way)
                raise SpecMismatchError(
                    f"samples {self.data.name!r}: this worker has {way.words}, and others that are "
                    f"connected have {other.words}; give all workers the same"
                )
            if not self._begin_plan(way, limit, is_anew=True):
                return []
        while True:
            gone = united(self.done, self.open_ranges, self.returned, held)
            for plan, later in self._plans():
                batches = plan.rest_of(rank, united(gone, later), count)
                if batches:
                    return [each for each in batches if each[0][0] < limit]
            if len(self._unfinished()) >= _PLAN_COUNT_MAX:
                raise LimitError(
                    f"samples {self.data.name!r}: {_PLAN_COUNT_MAX} deals have batches whose "
                    "gradients did not come yet; give the gradients of those before asking on"
                )
            if not self._begin_plan(way, limit):
                return []

    def begins_anew(self, way: Way) -> bool:
        """Returns True if the next deal of a fixed crew is not as the last one."""
        return any(plan.way != way for plan in self.plans)

    def rank_of(self, worker_id: str, wanted: Sequence[int], rank_count: int) -> int:
        """Returns the rank in plans that a worker of a fixed crew has, and keeps.

        It is the one of a checkpoint, or the first of the `wanted` ones, that no other worker has.
        """
        rank = self.ranks.get(worker_id)
        if rank is None:
            former = self._former_ranks.get(worker_id, rank_count)
            taken = set(self.ranks.values())
            asked = (each for each in (former, *wanted) if each < rank_count)
            free = (each for each in (*asked, *range(rank_count)) if each not in taken)
            rank = next(free, None)
            if rank is None:
                raise ArgumentError(
                    f"samples {self.data.name!r} are dealt to {rank_count} workers already: "
                    f"{', '.join(sorted(self.ranks))}; worker {worker_id!r} is none of them",
                    worker_id=worker_id,
                )
            self._note("rank", worker_id=worker_id, rank=rank)
            self.ranks[worker_id] = rank
        return rank

    @property
    def _cursor(self) -> int:
        """The first position that nothing has touched, nor anything behind it."""
        planned = (plan.ranges for plan in self.plans)
        touched = (self.done, self.open_ranges, self.returned, *planned)
        return max((ranges[-1][1] for ranges in touched if ranges), default=0)

    def _begin_plan(self, way: Way, limit: int, *, is_anew: bool = False) -> bool:
        """Plans what is free up to the end of the epoch; False: too little is, below `limit`."""
        cursor, length = self._cursor, self.data.length
        end = -(-cursor // length) * length
        left: NumberRanges = ((0, cursor),) if cursor else ()
        if not is_anew:  # the ranks have what is planned, but for what they gave back
            planned = united(*(plan.ranges for plan in self.plans))
            left = without(left, without(planned, self.returned))
        left = without(left, united(self.done, self.open_ranges))
        least = way.width if way.drops_last else way.rank_count
        missing = least - size_of(left) - (end - cursor)
        if missing > 0 and end < limit:
            end += length * min(-(-missing // length), -(-(limit - end) // length))
        ranges = united(left, [(cursor, end)])
        if size_of(ranges) < least:
            return False
        number = self.plans[-1].number + 1 if self.plans else 0
        plan = Plan(number=number, ranges=ranges, way=way)
        self._note("plan", is_anew=is_anew, **plan.facts())
        self._take_plan(plan, is_anew=is_anew)
        return True

    def _take_plan(self, plan: Plan, *, is_anew: bool) -> None:
        self.returned = () if is_anew else without(self.returned, plan.ranges)
        earlier = [] if is_anew else self._unfinished()
        self.plans = [*earlier, plan]
        self._take_left_out(plan.left_out)

    def _unfinished(self) -> list[Plan]:
        """Returns the plans that a rank has something of, or is still to be dealt."""
        gone = united(self.done, self.open_ranges, self.returned)
        return [plan for plan, later in self._plans() if without(plan.ranges, united(gone, later))]

    def _plans(self) -> Iterator[tuple[Plan, NumberRanges]]:
        """Yields plans, and what later ones deal instead: it was given back."""
        for index, plan in enumerate(self.plans, 1):
            yield plan, united(*(each.ranges for each in self.plans[index:]))

    # Ends.

    def give_back(self, holder: Holder, ranges: NumberRanges, step: int = 0) -> None:
        """Frees positions whose gradient counted nowhere, and will not come in a step."""
        ranges = self._of(holder, ranges)
        if ranges:
            self._note("returned", **holder._asdict(), ranges=ranges, step=step)
            self._take_back(holder, ranges, step)

    def _take_back(self, holder: Holder, ranges: NumberRanges, step: int) -> None:
        if self.leases:
            self._take_from(holder, ranges)
            return
        self.returned = united(self.returned, ranges)
        last, earlier = self._returned_by.get(holder.worker_id, (step, ()))
        ranges = united(ranges, earlier) if last == step else ranges
        self._returned_by[holder.worker_id] = step, ranges

    def begin_again(self, worker_id: str, step: int) -> None:
        """Deals to a worker of a fixed crew once more what it gave back in a step.

        It was started again in that step: so all ranks go on with as many batches.
        """
        last, ranges = self._returned_by.get(worker_id, (step, ()))
        ranges = common(ranges, self.returned)
        if last == step and ranges:
            self._note("taken", worker_id=worker_id, ranges=ranges)
            self._take_again(worker_id, ranges)

    def _take_again(self, worker_id: str, ranges: NumberRanges) -> None:
        self.returned = without(self.returned, ranges)
        self._returned_by.pop(worker_id, None)

    def _of(self, holder: Holder, ranges: NumberRanges) -> NumberRanges:
        """Returns those of the ranges that are out to a holder."""
        if self.leases:
            return common(ranges, self.out.get(holder, ()))
        return without(ranges, united(self.done, self.open_ranges))

    def end_partly(self, holder: Holder, step: int, ranges: NumberRanges) -> None:
        """Ends positions whose gradient counted in some chunks, and not in all."""
        named = united(*(p.ranges for p in self.partial if p[:2] == (holder.worker_id, step)))
        counted = without(common(ranges, self._counted_by(holder, step)), named)
        known = united(self._of(holder, ranges), counted)
        if known:
            self._note("partial", **holder._asdict(), step=step, ranges=known)
            self._take_partial(holder, step, known)

    def _counted_by(self, holder: Holder, step: int) -> NumberRanges:
        counted = (*self.open, *self.steps.get(step, ()))
        return united(*(each.ranges for each in counted if each[:3:2] == (step, holder)))

    def _take_partial(self, holder: Holder, step: int, ranges: NumberRanges) -> None:
        self._take_from(holder, ranges)
        self.done = united(self.done, without(ranges, self.open_ranges))
        self.partial_count += 1
        self.partial = [*self.partial, Partial(holder.worker_id, step, ranges)][
            -_PARTIAL_COUNT_MAX:
        ]

    def settle(self, holder: Holder, given: Given, next_step: int) -> None:
        """Frees a holder's positions once its tenure is over on all shards.

        What it gave to other chunks, and not to chunk 0, is partial; else its last gradient that
        chunk 0 counted, if another chunk has not. A worker of a fixed crew gives steps from
        `next_step` on, which says the same of those before.
        """
        ahead = self._of(holder, given.ranges) if given.step < next_step else ()
        last = self.last_step.get(holder, -1)
        if not self.leases:
            counted = (*self.open, *(each for step in self.steps.values() for each in step))
            steps = (each.step for each in counted if each.holder == holder)
            last = max((each for each in steps if each < next_step), default=-1)
        if ahead:
            self.end_partly(holder, given.step, ahead)
        elif last >= given.whole_before:
            self.end_partly(holder, last, self._counted_by(holder, last))
        self.give_back(holder, self.out.get(holder, ()))
        if holder in self.last_step:
            self._note("settled", **holder._asdict())
            del self.last_step[holder]

    # Reading.

    def at(self, version: int) -> NumberRanges | None:
        """Returns what was done in a version of chunk 0; None: it is too long ago."""
        if version < self._known_from:
            return None
        closed = [each for found in self.steps.values() for each in found]
        later = [each.ranges for each in closed if each.step >= version]
        partial = [each.ranges for each in self.partial if each.step >= version]
        return without(self.done, united(*later, *partial))

    def of_step(self, step: int) -> list[Counted] | None:
        """Returns what has counted in a step, in order; None: it is too long ago."""
        if step < self._known_from:
            return None
        return self.steps.get(step, []) + [each for each in self.open if each.step == step]

    def counted_by(self, worker_id: str, step: int) -> NumberRanges:
        """Returns what a worker of a fixed crew has given in a step that chunk 0 counted."""
        return self._counted_by(Holder(worker_id, 0), step)

    def counts_below(self, limit: int, but: Holder) -> tuple[int, int]:
        """Returns the counts of positions below `limit` that others have, and that are free.

        In a fixed crew others have what is planned and has not counted.
        """
        busy = [ranges for holder, ranges in self.out.items() if holder != but]
        busy += [each.ranges for each in self.open if each.holder != but]
        if not self.leases:
            planned = united(*(plan.ranges for plan in self.plans))
            busy.append(without(planned, united(self.done, self.open_ranges, self.returned)))
        own = self.out.get(but, ()), *(each.ranges for each in self.open if each.holder == but)
        below: NumberRanges = ((0, limit),) if limit > 0 else ()
        out = united(*busy)
        free = without(below, united(self.done, out, *own))
        return size_of(common(out, below)), size_of(free)

    @property
    def done_before(self) -> int:
        """The lowest position that has not counted."""
        return self.done[0][1] if self.done and self.done[0][0] == 0 else 0

    def account(self) -> Account:
        """Returns the numbers of now."""
        length = self.data.length
        epoch = self.done_before // length
        whole: NumberRanges = ((epoch * length, (epoch + 1) * length),)
        done = size_of(common(self.done, whole))
        busy = size_of(common(united(self.out_ranges, self.open_ranges), whole))
        return Account(
            epoch=epoch,
            length=length,
            done=done,
            out=busy,
            free=length - done - busy,
            left_out=self.left_out_count,
            partial=list(self.partial),
            partial_count=self.partial_count,
        )

    # Events.

    def state(self, done: NumberRanges) -> Event:
        """Returns the part that a checkpoint has."""
        ranks = {**self._former_ranks, **self.ranks}
        return {
            "length": self.data.length,
            "seed": self.data.seed,
            "shuffles": self.data.shuffles,
            "done": done,
            "partial": self.partial,
            "partial_count": self.partial_count,
            "left_out": self.left_out_count,
            "ranks": ranks if len(ranks) <= RANK_COUNT_MAX else {},
        }

    def events(self) -> Iterator[Event]:
        """Yields events that say as much as all before."""
        name = {"data": self.data.name}
        closed = [each for found in self.steps.values() for each in found][-_KEPT_COUNT:]
        before = without(self.done, united(*(each.ranges for each in closed)))
        yield {"kind": "state", **name, **self.state(before)}
        for worker_id, rank in self.ranks.items():
            yield {"kind": "rank", **name, "worker_id": worker_id, "rank": rank}
        for plan in self.plans:
            yield {"kind": "plan", **name, "is_anew": False, **plan.facts()}
        for counted in (*closed, *self.open):
            yield {"kind": "counted", **name, **_facts(counted)}
        if self.leases:  # by what has counted alone, settled holders would be back
            holders = dict.fromkeys(each.holder for each in (*closed, *self.open))
            for holder in holders:
                if holder not in self.last_step:
                    yield {"kind": "settled", **name, **holder._asdict()}
        for holder, step in self.last_step.items():
            yield {"kind": "last", **name, **holder._asdict(), "step": step}
        for holder, ranges in self.out.items():
            yield {"kind": "lease", **name, **holder._asdict(), "ranges": ranges}
        for worker_id, (step, ranges) in [("", (0, self.returned)), *self._returned_by.items()]:
            if left := common(ranges, self.returned):
                holder = Holder(worker_id, 0)
                yield {"kind": "returned", **name, **holder._asdict(), "ranges": left, "step": step}

    def restore(self, event: Event) -> None:
        """Takes an event of an earlier process, in the order of the log."""
        kind, given = event["kind"], event.get("ranges", ())
        # Of most, one range.
        ranges = ((given[0][0], given[0][1]),) if len(given) == 1 else united(given)
        holder = Holder(event.get("worker_id", ""), event.get("tenure", 0))
        match kind:
            case "state":
                self.done = united(event["done"])
                self.partial = [Partial(w, s, united(r)) for w, s, r in event["partial"]]
                self.partial_count = event["partial_count"]
                self.left_out_count = event["left_out"]
                self._former_ranks = event.get("ranks", {})
            case "rank":
                self.ranks[holder.worker_id] = event["rank"]
            case "counted":
                self.count(Counted(event["step"], event["order"], holder, ranges))
            case "last":
                self.last_step[holder] = event["step"]
            case "settled":
                self.last_step.pop(holder, None)
            case "lease":
                self._take_lease(holder, ranges)
            case "returned":
                self._take_back(holder, ranges, event["step"])
            case "taken":
                self._take_again(holder.worker_id, ranges)
            case "partial":
                self._take_partial(holder, event["step"], ranges)
            case "left_out":
                self._take_left_out(ranges)
            case "plan":
                plan = Plan(number=event["number"], ranges=ranges, way=Way(*event["way"]))
                self._take_plan(plan, is_anew=event["is_anew"])
            case _:
                raise KeyError(kind)

    def forget_from(self, step: int, order: int) -> bool:
        """Forgets counts that were noted, and did not count: of this place, and later.

        A shard that is killed between note and count, or loses its newest steps with its machine,
        counts other gradients in their places. True: there were such.
        """
        found = False
        while self.open and self.open[-1][:2] >= (step, order):
            void, found = self.open.pop(), True
            if self.leases:
                self._take_lease(void.holder, void.ranges)
                steps = [each.step for each in self.open if each.holder == void.holder]
                self.last_step[void.holder] = max(steps, default=-1)
        return found

    def recovered(self, version: int) -> None:
        """Ends the restoring: nothing is open that chunk 0 has not counted."""
        self.advance(version)
        self._known_from = max(version, self._known_from)


def _facts(counted: Counted) -> Event:
    step, order, (worker_id, tenure), ranges = counted
    return {
        "step": step,
        "order": order,
        "worker_id": worker_id,
        "tenure": tenure,
        "ranges": ranges,
    }
