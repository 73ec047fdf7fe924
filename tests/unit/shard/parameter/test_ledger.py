"""Goal: whatever becomes of workers and shards, a sample counts once at most in each chunk, and in
all of them by the end, but for samples that the account names.

Method: hypothesis state machines play workers that follow docs/adr/0042 beside the real Samples and
Ledger of three shards: chunks of a gradient arrive in any order, late or never; workers die, come
back, are slow, give back; shards are killed between the note and the count, compact their logs, and
lose their newest steps with the power. The log is a list of lines; who is a member, and what a
chunk's record says, are the machine's own. The oracle has a plain set of the gradients that each
chunk has counted, and counts the visits of each position in each chunk.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import shardwell
from harness.machines import cases
from shardwell import ParameterSpec
from shardwell.errors import ArgumentError, StorageError
from shardwell.placement.ranges import NumberRanges, flat, paired, united
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server.shard.parameter.ledger import Counted, Dataset, Holder, Ledger, Way
from shardwell_server.shard.parameter.samples import Samples
from shardwell_server.store.contract import ChunkRecord

CHUNK_COUNTS = (2, 1, 2)
"""Of each shard; shard 0's first chunk is chunk 0, which decides."""
PLACES = [(shard, index) for shard, count in enumerate(CHUNK_COUNTS) for index in range(count)]
FIRST = 0, 0
NAMES = ["w0", "w1", "w2"]
EPOCHS = 2
names = st.sampled_from(NAMES)
places = st.sampled_from(PLACES)
shards = st.integers(0, len(CHUNK_COUNTS) - 1)
DATA = "train"


class KilledError(BaseException):
    """A shard's process ends at a write."""


class Lines:
    """A log as its file has it, of a process that may be killed right after any line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_long = False
        self.is_dead = False
        self.dies_after: int | None = None

    def note(self, log: str, event: Any) -> None:
        if self.is_dead:
            raise KilledError
        self.lines.append(json.dumps(event))
        self._written()

    def compact_notes(self, log: str, events: Callable[[], Sequence[Any]]) -> None:
        if self.is_long:
            self.lines = [json.dumps(event) for event in events()]
            self.is_long = False

    def noted(self, log: str) -> list[Any]:
        return [json.loads(line) for line in self.lines]

    def _written(self) -> None:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after <= 0:
                self.is_dead, self.dies_after = True, None
                raise KilledError


@dataclass(eq=False)
class Given:
    """A gradient on its way, from one process of a worker."""

    holder: Holder
    step: int
    ranges: NumberRanges
    outcomes: dict[tuple[int, int], str] = field(default_factory=dict)
    """By chunk: "counted" or "late"."""

    @property
    def positions(self) -> list[int]:
        return numbers(self.ranges)


@dataclass(eq=False)
class Worker:
    """A process of a worker."""

    holder: Holder
    dealt: list[NumberRanges] = field(default_factory=list)
    gradient: Given | None = None
    next_step: int = 0


def spec_of(worker_count: int, members: shardwell.Elastic | None = None) -> ParameterSpec:
    optimizer = shardwell.SGD(learning_rate=1.0)
    return ParameterSpec(
        name="p", size=10, optimizer=optimizer, worker_count=worker_count, members=members
    )


def numbers(ranges: Iterable[Any]) -> list[int]:
    return [number for start, stop in ranges for number in range(start, stop)]


class Shard:
    """One shard's records and members, which a kill leaves, and its Samples, which it does not."""

    def __init__(self, spec: ParameterSpec, index: int) -> None:
        self.spec, self.index = spec, index
        self.log = Lines()
        self.records = [ChunkRecord()] * CHUNK_COUNTS[index]
        self.seats: dict[str, Any] = {}
        self.living: set[Holder] = set()
        self.start()

    def start(self) -> None:
        self.log.is_dead, self.log.dies_after = False, None
        crew = SimpleNamespace(member=self.member, find=self.seats.get, awaited=())
        tracker: Any = SimpleNamespace(records=self.records, crew=crew)
        storage: Any = self.log
        self.samples = Samples(
            self.spec, storage, tracker, has_first_chunk=self.index == 0, is_whole=False
        )
        self.samples.restore()

    def member(self, worker_id: str, tenure: int) -> Any:
        return self.seats[worker_id] if Holder(worker_id, tenure) in self.living else None

    def seat(self, holder: Holder) -> None:
        """Gives a worker's seat to its new tenure, which ends the one before."""
        self.end_tenure(holder.worker_id)
        self.seats[holder.worker_id] = SimpleNamespace(
            worker_id=holder.worker_id,
            tenure=SimpleNamespace(number=holder.tenure),
            last_step=[-1] * len(self.records),
        )
        self.living.add(holder)

    def end_tenure(self, worker_id: str, tenure: int | None = None) -> None:
        over = {h for h in self.living if h.worker_id == worker_id and tenure in (None, h.tenure)}
        self.living -= over


class CountingMachine(RuleBasedStateMachine):
    """The shards, and the oracle: what each chunk has counted."""

    worker_count: int
    members: shardwell.Elastic | None = None

    def begin(self, length: int, batch_size: int, *, drop_last: bool) -> None:
        self.length, self.batch_size, self.drop_last = length, batch_size, drop_last
        self.limit = EPOCHS * length
        self.spec = spec_of(self.worker_count, self.members)
        self.shards = [Shard(self.spec, index) for index in range(len(CHUNK_COUNTS))]
        self.counted: dict[tuple[int, int], list[Given]] = {place: [] for place in PLACES}
        """In order."""
        self.versions = dict.fromkeys(PLACES, 0)
        self.workers: dict[str, Worker] = {}
        self.sent: list[Given] = []
        self.tenures = iter(range(1, 10**9))
        self.size_max = 2 * (batch_size + 1)
        """Samples of a gradient."""

    # What a shard does.

    def set_record(self, place: tuple[int, int]) -> None:
        shard, index = place
        version = self.versions[place]
        count = sum(each.step == version for each in self.counted[place])
        self.shards[shard].records[index] = ChunkRecord(version, count)

    def call(self, shard: int, act: Callable[[], Any], dies_after: int | None = None) -> Any:
        """What a shard answers; None: it was killed after so many lines, and is back."""
        self.shards[shard].log.dies_after = dies_after
        try:
            return act()
        except KilledError:
            self.shards[shard].start()
            return None
        finally:
            self.shards[shard].log.dies_after = None

    def contribute(self, given: Given, place: tuple[int, int], fault: str = "") -> None:
        """Counts a chunk of a gradient, which comes in time."""
        shard, index = place
        subject = self.shards[shard]
        gradient = types_pb2.GradientChunk(step=given.step)
        if given.ranges:
            gradient.samples.data = DATA
            gradient.samples.ranges.extend(flat(given.ranges))
        seat = subject.seats[given.holder.worker_id]

        def count() -> None:
            with subject.samples.noted(index, seat, given.step, gradient):
                if fault == "killed before it counts":
                    subject.log.is_dead = True
                    raise KilledError
                if fault == "a full disk":
                    raise StorageError("full")
                self.counted[place].append(given)
                self.set_record(place)
                seat.last_step[index] = given.step
                if fault == "killed when it has counted":
                    subject.log.is_dead = True
                    raise KilledError
            given.outcomes[place] = "counted"

        try:
            self.call(shard, count, 1 if fault == "killed at the note" else None)
        except StorageError:
            assert fault == "a full disk"

    def close(self, place: tuple[int, int]) -> None:
        self.versions[place] += 1
        self.set_record(place)

    @property
    def ledger(self) -> Ledger | None:
        found = self.shards[0].samples._ledgers.get(DATA)
        if found is not None:
            found.advance(self.versions[FIRST])
        return found

    def request(self, stage: int, holder: Holder, **fields: Any) -> Any:
        return pb.DealSamplesRequest(
            stage=stage,  # type: ignore[arg-type]
            worker_id=holder.worker_id,
            tenure=holder.tenure,
            **fields,
        )

    def deal_request(self, holder: Holder, **fields: Any) -> Any:
        fields = {"batch_size": self.batch_size, "batch_count": 3, **fields}
        return self.request(
            pb.DealSamplesRequest.STAGE_DEAL,
            holder,
            dataset=pb.Dataset(name=DATA, length=self.length, seed=3, shuffles=True),
            drop_last=self.drop_last,
            limit=self.limit,
            **fields,
        )

    def give_back(self, holder: Holder, ranges: NumberRanges, step: int | None = None) -> None:
        """Returns positions; with a step, those of a gradient that counted in part."""
        request = self.request(
            pb.DealSamplesRequest.STAGE_RETURN,
            holder,
            dataset=pb.Dataset(name=DATA),
            ranges=flat(ranges),
            step=step or 0,
            is_partial=step is not None,
        )
        self.shards[0].samples.give_back(request)

    # The oracle.

    def visits(self, place: tuple[int, int]) -> Counter[int]:
        return Counter(number for each in self.counted[place] for number in each.positions)

    @property
    def partial(self) -> set[int]:
        ledger = self.ledger
        return set() if ledger is None else set(numbers(r for p in ledger.partial for r in p[2]))

    @invariant()
    def no_sample_counts_twice_in_a_chunk(self) -> None:
        for place in PLACES if hasattr(self, "counted") else ():
            assert max(self.visits(place).values(), default=1) == 1, place

    @invariant()
    def what_is_done_has_counted_or_is_named(self) -> None:
        ledger = self.ledger if hasattr(self, "shards") else None
        if ledger is None:
            return
        version = self.versions[FIRST]
        closed = {n for e in self.counted[FIRST] if e.step < version for n in e.positions}
        still = {n for e in self.counted[FIRST] if e.step == version for n in e.positions}
        done = set(numbers(ledger.done))
        assert closed <= done
        assert set(numbers(ledger.open_ranges)) == still
        rest = done - closed - self.partial
        assert len(rest) <= ledger.left_out_count
        if not self.drop_last:
            assert not rest
        assert not done & still
        held = Counter(number for ranges in ledger.out.values() for number in numbers(ranges))
        assert max(held.values(), default=1) == 1
        assert not (done | still) & set(held)

    # Faults of shards.

    @rule(shard=shards)
    def restart(self, shard: int) -> None:
        self.shards[shard].start()

    @rule(shard=st.sampled_from([0, 0, 1]))
    def compact(self, shard: int) -> None:
        """The next call that may compacts; on other shards only a start shows it."""
        subject = self.shards[shard]
        subject.log.is_long = True
        if shard:
            subject.log.compact_notes("samples", subject.samples._events)

    @rule(back=st.integers(0, 3), prefixes=st.lists(st.integers(0, 3), min_size=5, max_size=5))
    def lose_power(self, back: int, prefixes: list[int]) -> None:
        """All go back to one version, with some of what had come for it; no worker is left."""
        if any(shard.log.is_long for shard in self.shards):
            return
        version = max(min(self.versions.values()) - back, 0)
        self.workers.clear()
        self.sent.clear()
        for place, prefix in zip(PLACES, prefixes, strict=True):
            before = [each for each in self.counted[place] if each.step < version]
            came = [each for each in self.counted[place] if each.step == version]
            self.counted[place] = [*before, *came[:prefix]]
            self.versions[place] = version
            self.set_record(place)
            for seat in self.shards[place[0]].seats.values():
                holder = Holder(seat.worker_id, seat.tenure.number)
                steps = [e.step for e in self.counted[place] if e.holder == holder]
                seat.last_step[place[1]] = max(steps, default=-1)
        for shard in self.shards:
            shard.start()

    @rule(back=st.integers(0, 4), ranks=st.integers(1, 3), batch_size=st.integers(1, 4))
    def load_elsewhere(self, back: int, ranks: int, batch_size: int) -> None:
        """The account of a version, in a fixed crew with other batches: it deals the rest, once."""
        version = self.versions[FIRST] - back
        if self.ledger is None or version < 0:
            return
        if version < self.ledger._known_from:
            assert back
            with pytest.raises(ArgumentError, match="save again"):
                self.shards[0].samples.account(version)
            return
        account = self.shards[0].samples.account(version)
        counted = {n for e in self.counted[FIRST] if e.step < version for n in e.positions}
        done = set(numbers(json.loads(account)[DATA]["done"]))
        assert counted <= done
        assert len(done - counted - self.partial) <= json.loads(account)[DATA]["left_out"]
        other = Shard(spec_of(ranks), 0)
        other.samples.load(account)
        dealt: list[int] = []
        for rank in range(ranks):
            held: NumberRanges = ()
            while True:
                request = self.deal_request(
                    Holder(f"r{rank}", 0), batch_size=batch_size, ranges=flat(held)
                )
                request.drop_last = False
                answer = other.samples.deal(request, (rank, ranks), {})
                if not answer.batches:
                    break
                for batch in answer.batches:
                    ranges = paired(batch.ranges)
                    dealt += numbers(ranges)
                    held = united(held, ranges)
        assert len(set(dealt)) == len(dealt)
        missing = set(range(self.limit)) - done - set(dealt)
        assert not set(dealt) & done
        assert len(missing) < ranks


class ElasticMachine(CountingMachine):
    """Members that lease what they are dealt."""

    worker_count, members = 8, shardwell.Elastic(min_count=1, max_count=8)

    @initialize(length=st.integers(3, 12), batch_size=st.integers(1, 3), drop_last=st.booleans())
    def open(self, length: int, batch_size: int, *, drop_last: bool) -> None:
        self.begin(length, batch_size, drop_last=drop_last)
        self.death_count = 0
        self.told_count = 0
        """Gradients of which a worker said that they counted in part."""

    @rule(name=names)
    def come(self, name: str) -> None:
        if name in self.workers:
            return
        holder = Holder(name, next(self.tenures))
        for shard in self.shards:
            shard.seat(holder)
        self.workers[name] = Worker(holder, next_step=max(self.versions.values()))

    def is_member(self, worker: Worker) -> bool:
        return worker.holder in self.shards[0].living

    @rule(name=names, kill=st.sampled_from([None, None, None, 1, 2]), settles=st.booleans())
    def deal(self, name: str, kill: int | None, *, settles: bool) -> None:
        worker = self.workers.get(name)
        if worker is not None and self.is_member(worker):
            self.ask(worker, kill, settles=settles)

    def ask(self, worker: Worker, kill: int | None = None, *, settles: bool = True) -> bool:
        """True: something was dealt, or settled, so that more may be."""
        request = self.deal_request(worker.holder)
        samples = self.shards[0].samples
        answer = self.call(0, lambda: samples.deal(request, (0, 0), {}), kill)
        if answer is None:
            return False
        worker.dealt += [paired(batch.ranges) for batch in answer.batches]
        for over in answer.unsettled if settles else ():
            self.settle(Holder(over.worker_id, over.tenure))
        return bool(answer.batches or answer.unsettled)

    def settle(self, over: Holder) -> None:
        answers = []
        for shard in self.shards[1:]:
            shard.end_tenure(*over)
            answers.append(shard.samples.last_given(over))
        step = max(given.step for _, given in answers)
        newest = [each for each in answers if each[1].step == step and each[1].ranges]
        request = self.request(
            pb.DealSamplesRequest.STAGE_SETTLE,
            over,
            step=step,
            ranges=flat(united(*(given.ranges for _, given in newest))),
            dataset=pb.Dataset(name=newest[0][0] if newest else ""),
            whole_before=min(given.whole_before for _, given in answers),
        )
        self.shards[0].samples.settle(request)

    @rule(name=names, count=st.integers(1, 2))
    def start_step(self, name: str, count: int) -> None:
        """A gradient is made of the next batches, and leaves."""
        worker = self.workers.get(name)
        if worker is None or worker.gradient is not None or not worker.dealt:
            return
        if min(self.versions.values()) < worker.next_step:
            return
        step = max(self.versions.values())
        taken, worker.dealt = worker.dealt[:count], worker.dealt[count:]
        worker.gradient = Given(worker.holder, step, united(*taken))
        worker.next_step = step + 1
        self.sent.append(worker.gradient)

    @rule(
        data=st.data(),
        place=places,
        fault=st.sampled_from(
            [""] * 8
            + [
                "killed at the note",
                "killed before it counts",
                "killed when it has counted",
                "a full disk",
            ]
        ),
    )
    @precondition(lambda self: getattr(self, "sent", None))
    def arrive(self, data: st.DataObject, place: tuple[int, int], fault: str) -> None:
        """A chunk arrives, of a worker that may be dead."""
        self.deliver(data.draw(st.sampled_from(self.sent)), place, fault)

    def deliver(self, given: Given, place: tuple[int, int], fault: str = "") -> None:
        version, counted = self.versions[place], given in self.counted[place]
        if counted:
            given.outcomes[place] = "counted"
        elif version > given.step or given.holder not in self.shards[place[0]].living:
            given.outcomes[place] = "late"
        elif version == given.step:
            self.contribute(given, place, fault)

    @rule(place=places)
    def close_step(self, place: tuple[int, int]) -> None:
        """Without those that have not come; a step needs one."""
        version = self.versions[place]
        if min(self.versions.values()) == version and any(
            each.step == version for each in self.counted[place]
        ):
            self.close(place)

    @rule(name=names)
    def finish_step(self, name: str) -> None:
        """The worker knows what became of its gradient, and tells shard 0."""
        worker = self.workers.get(name)
        given = None if worker is None else worker.gradient
        if worker is None or given is None or len(given.outcomes) < len(PLACES):
            return
        worker.gradient = None
        self.sent.remove(given)
        outcomes = set(given.outcomes.values())
        if outcomes == {"late"}:
            self.give_back(given.holder, given.ranges)
        elif "late" in outcomes:
            self.told_count += 1
            self.give_back(given.holder, given.ranges, given.step)

    @rule(shard=shards)
    def restart(self, shard: int) -> None:
        before = None if self.ledger is None else dict(self.ledger.last_step)
        super().restart(shard)
        # A settled holder must not come back: no shard knows any more what it gave.
        assert before is None or set(self.ledger.last_step) <= set(before)

    @rule(name=names)
    def skip_a_batch(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.dealt:
            self.give_back(worker.holder, worker.dealt.pop(0))

    @rule(name=names)
    def die(self, name: str) -> None:
        """What it has sent may still arrive, until its tenure ends."""
        self.death_count += self.workers.pop(name, None) is not None

    @rule(name=names)
    def lose(self, name: str) -> None:
        """Shard 0 takes a worker for lost, which may be slow; the others do not, yet."""
        for holder in [each for each in self.shards[0].living if each.worker_id == name]:
            self.shards[0].living.discard(holder)

    @rule(name=names)
    def go(self, name: str) -> None:
        """A worker that has noticed comes anew later; one without a gradient leaves in order."""
        worker = self.workers.get(name)
        if worker is None or worker.gradient is not None:
            return
        for batch in worker.dealt:
            self.give_back(worker.holder, batch)
        del self.workers[name]
        for shard in self.shards:
            shard.end_tenure(*worker.holder)

    @rule(back=st.integers(0, 3), prefixes=st.lists(st.integers(0, 3), min_size=5, max_size=5))
    def lose_power(self, back: int, prefixes: list[int]) -> None:
        self.death_count += len(NAMES) * (1 + back)
        super().lose_power(back, prefixes)

    @invariant()
    def what_is_free_has_counted_nowhere(self) -> None:
        ledger = self.ledger if hasattr(self, "shards") else None
        if ledger is None:
            return
        taken = united(ledger.done, ledger.open_ranges, ledger.out_ranges)
        free = set(range(self.limit)) - set(numbers(taken))
        for place in PLACES:
            assert not free & set(self.visits(place)), place

    def teardown(self) -> None:
        """One member is left, undisturbed: it gives all that is free, to all chunks."""
        if not hasattr(self, "shards"):
            return
        for name in list(self.workers):
            self.die(name)
        self.sent.clear()
        for shard in self.shards:
            shard.living.clear()
            shard.start()
        self.even_out()
        self.come("w0")
        worker = self.workers["w0"]
        for _ in range(200):
            if not worker.dealt and not self.ask(worker):
                break
            self.start_step("w0", 1)
            if worker.gradient is not None:
                for place in reversed(PLACES):
                    self.deliver(worker.gradient, place)
                self.finish_step("w0")
                for place in PLACES:
                    self.close(place)
        ledger = self.ledger
        if ledger is None:
            return
        assert set(range(self.limit)) <= set(numbers(ledger.done))
        assert not ledger.out
        partial, left_out = self.partial, ledger.left_out_count
        for place in PLACES:
            missing = set(range(self.limit)) - set(self.visits(place)) - partial
            assert len(missing) <= left_out, (place, missing)
        assert left_out <= EPOCHS * (self.batch_size - 1) if self.drop_last else not left_out
        assert ledger.partial_count <= self.death_count + self.told_count
        assert all(len(numbers(each.ranges)) <= self.size_max for each in ledger.partial)
        self.no_sample_counts_twice_in_a_chunk()
        self.what_is_done_has_counted_or_is_named()

    def even_out(self) -> None:
        """All chunks close the step that some have closed, or hold a gradient of."""
        version = max(self.versions.values()) + 1
        for place in PLACES:
            while self.versions[place] < version:
                self.close(place)


TestElastic, TestElasticLong = cases(ElasticMachine, max_examples=240, step_count=50)


class FixedMachine(CountingMachine):
    """A crew of fixed size, which is dealt by plans. A step closes with all."""

    @initialize(
        ranks=st.integers(1, 3),
        length=st.integers(3, 14),
        batch_size=st.integers(1, 3),
        drop_last=st.booleans(),
    )
    def open(self, ranks: int, length: int, batch_size: int, *, drop_last: bool) -> None:
        self.worker_count = ranks
        self.begin(length, batch_size, drop_last=drop_last)
        self.names = NAMES[:ranks]
        for name in self.names:
            for shard in self.shards:
                shard.seat(Holder(name, 0))
        self.given: dict[tuple[str, int], Given] = {}
        """The gradient of each worker's step; those without samples have no ranges."""
        self.ahead: dict[str, list[NumberRanges]] = {name: [] for name in self.names}
        """Batches that a rank was dealt in an earlier process, and comes to again."""

    def start_worker(self, name: str) -> Worker:
        """A process that begins anew, in the first step that a chunk has not got from it."""
        holder = Holder(name, 0)
        last = min(
            max((e.step for e in self.counted[place] if e.holder == holder), default=-1)
            for place in PLACES
        )
        self.workers[name] = Worker(holder, next_step=last + 1)
        return self.workers[name]

    def held(self, worker: Worker) -> NumberRanges:
        given = () if worker.gradient is None else worker.gradient.ranges
        return united(*worker.dealt, given)

    def ask(self, worker: Worker, count: int, kill: int | None = None) -> None:
        """The worker is dealt more, and the same as an earlier process of it."""
        name = worker.holder.worker_id
        request = self.deal_request(
            worker.holder,
            batch_count=count,
            step=worker.next_step,
            ranges=flat(self.held(worker)),
        )
        rank = NAMES.index(name), self.worker_count
        samples = self.shards[0].samples
        is_first = worker.gradient is None and not worker.dealt
        answer = self.call(0, lambda: samples.deal(request, rank, {}), kill)
        if answer is None:
            return
        found = [paired(batch.ranges) for batch in answer.batches]
        again = paired(answer.again.ranges)
        if is_first and again:
            found.insert(0, again)
            assert again == self.given[name, worker.next_step].ranges
        before = self.ahead[name]
        common = min(len(before), len(found))
        assert found[:common] == before[:common]
        self.ahead[name] = before[common:]
        worker.dealt += found

    @rule(data=st.data(), count=st.integers(1, 4), kill=st.sampled_from([None, None, 1, 2]))
    def deal(self, data: st.DataObject, count: int, kill: int | None) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.ask(self.workers.get(name) or self.start_worker(name), count, kill)

    @rule(data=st.data(), skips=st.sampled_from([False, False, False, True]))
    def start_step(self, data: st.DataObject, *, skips: bool) -> None:
        self.make(data.draw(st.sampled_from(self.names)), skips=skips)

    def make(self, name: str, *, skips: bool = False) -> None:
        """A gradient is made of the next batch; one that is skipped has no samples."""
        worker = self.workers.get(name)
        if worker is None or worker.gradient is not None or not worker.dealt:
            return
        step = worker.next_step
        if min(self.versions.values()) < step:
            return
        batch = worker.dealt.pop(0)
        known = self.given.get((name, step))
        if known is not None and any(known in self.counted[place] for place in PLACES):
            assert known.ranges == batch
            worker.gradient = known
            return
        skips = skips and set(self.versions.values()) == {step}
        if skips:
            self.give_back(worker.holder, batch)
            batch = ()
        worker.gradient = self.given[name, step] = Given(worker.holder, step, batch)
        for place in PLACES if skips else ():  # one that is killed in between skips another batch
            self.deliver(worker, place)

    @rule(
        data=st.data(),
        place=places,
        fault=st.sampled_from(
            [""] * 8
            + [
                "killed at the note",
                "killed before it counts",
                "killed when it has counted",
                "a full disk",
            ]
        ),
    )
    def arrive(self, data: st.DataObject, place: tuple[int, int], fault: str) -> None:
        worker = self.workers.get(data.draw(st.sampled_from(self.names)))
        if worker is not None and worker.gradient is not None:
            self.deliver(worker, place, fault)

    def deliver(self, worker: Worker, place: tuple[int, int], fault: str = "") -> None:
        given = worker.gradient
        assert given is not None
        if given not in self.counted[place] and self.versions[place] == given.step:
            self.contribute(given, place, fault)
            came = [e for e in self.counted[place] if e.step == given.step]
            if len(came) == self.worker_count:
                self.close(place)
        if all(given in self.counted[each] for each in PLACES):
            worker.gradient, worker.next_step = None, given.step + 1

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Another process of the worker comes to the same batches, but for what has counted."""
        name = data.draw(st.sampled_from(self.names))
        worker = self.workers.pop(name, None)
        if worker is not None:
            given = [] if worker.gradient is None else [worker.gradient.ranges]
            self.ahead[name] = [*filter(None, given), *worker.dealt, *self.ahead[name]]
            later = self.start_worker(name)
            if worker.gradient is not None and later.next_step != worker.gradient.step:
                assert later.next_step > worker.gradient.step

    @rule(back=st.integers(0, 3), prefixes=st.lists(st.integers(0, 3), min_size=5, max_size=5))
    def lose_power(self, back: int, prefixes: list[int]) -> None:
        """A step that lacks no rank was closed; batches that had counted come in another order.

        Steps that were skipped are on the disk: the rank would have a batch less than others.
        """
        version = min(self.versions.values()) - back
        if any(each.step >= version for each in self.given.values() if not each.ranges):
            return
        super().lose_power(back, [min(each, self.worker_count - 1) for each in prefixes])
        if not self.workers:
            self.ahead = {name: [] for name in self.names}

    def teardown(self) -> None:
        """All ranks go on, undisturbed and in turns: none has a batch more than another."""
        if not hasattr(self, "given"):
            return
        for name in self.names:
            self.workers.setdefault(name, Worker(Holder(name, 0)))
            self.workers.pop(name)
            self.start_worker(name)
        self.ahead = {name: [] for name in self.names}
        for _ in range(200):
            order = sorted(self.names, key=lambda name: self.workers[name].next_step)
            for name in order:
                worker = self.workers[name]
                if worker.gradient is None and not worker.dealt:
                    self.ask(worker, 1)
                self.make(name)
            busy = [name for name in self.names if self.workers[name].gradient is not None]
            if not busy:
                break
            for name in busy:
                for place in PLACES:
                    if self.workers[name].gradient is not None:
                        self.deliver(self.workers[name], place)
        for name in self.names:
            assert self.workers[name].gradient is None, "a rank has a batch, and others have none"
        steps = {worker.next_step for worker in self.workers.values()}
        assert steps == {self.versions[FIRST]}
        ledger = self.ledger
        if ledger is None:
            return
        done = set(numbers(ledger.done))
        assert not self.partial
        missing = set(range(self.limit)) - done
        least = self.worker_count * (self.batch_size if self.drop_last else 1)
        assert len(missing) < least
        for place in PLACES:
            here = set(range(self.limit)) - set(self.visits(place)) - missing
            assert len(here) == ledger.left_out_count or len(here) <= ledger.left_out_count
        assert self.drop_last or not ledger.left_out_count
        self.no_sample_counts_twice_in_a_chunk()
        self.what_is_done_has_counted_or_is_named()


TestFixed, TestFixedLong = cases(FixedMachine, max_examples=240, step_count=50)


def test_a_rank_that_begins_a_step_again_is_dealt_what_it_gave_back_in_it() -> None:
    events: list[Any] = []
    data = Dataset(name=DATA, length=12, seed=0, shuffles=False)
    ledger = Ledger(data, events.append, leases=False)

    def dealt(rank: int) -> NumberRanges:
        found = ledger.planned(rank, Way(2, 2, False), 1, 12, (), is_alone=False)
        return found[0] if found else ()

    first = dealt(0)
    ledger.give_back(Holder("w0", 0), first, step=4)
    ledger.begin_again("w0", 5)
    assert dealt(0) != first
    again = Ledger(data, events.append, leases=False)
    for event in list(ledger.events()):
        again.restore(json.loads(json.dumps(event)))
    for each in (again, ledger):
        each.begin_again("w0", 4)
        assert not each.returned
    assert dealt(0) == first


def test_others_of_a_fixed_crew_have_what_is_planned_and_has_not_counted() -> None:
    data = Dataset(name=DATA, length=12, seed=0, shuffles=False)
    ledger = Ledger(data, lambda _: None, leases=False)
    own, other = Holder("w0", 0), Holder("w1", 0)
    assert ledger.counts_below(12, own) == (0, 12)
    (batch,) = ledger.planned(0, Way(2, 2, False), 1, 12, (), is_alone=False)
    assert ledger.counts_below(12, own) == (12, 0)
    ledger.count(Counted(0, 0, own, batch))
    assert ledger.counts_below(12, own) == (10, 0)
    assert ledger.counts_below(12, other) == (12, 0)
    ledger.give_back(other, ((6, 8),))
    assert ledger.counts_below(12, own) == (8, 2)


def machine_of(kind: type[Any], holder: Holder) -> Any:
    """A machine whose one worker was dealt batches of two."""
    machine = kind()
    machine.worker_count = 1 if kind is FixedMachine else kind.worker_count
    machine.begin(6, 2, drop_last=False)
    for shard in machine.shards:
        shard.seat(holder)
    machine.shards[0].samples.deal(machine.deal_request(holder), (0, 1), {})
    return machine


def test_samples_whose_gradient_the_record_lacks_have_not_counted() -> None:
    holder = Holder("w0", 0)
    machine = machine_of(FixedMachine, holder)
    machine.contribute(Given(holder, 0, ((0, 2),)), FIRST, "killed before it counts")
    assert machine.ledger.open == []
    machine.contribute(Given(holder, 0, ((0, 2),)), FIRST)
    assert [each.ranges for each in machine.ledger.open] == [((0, 2),)]


def test_samples_of_a_lost_member_that_another_shard_has_counted_are_not_dealt_again() -> None:
    holder = Holder("w0", 1)
    machine = machine_of(ElasticMachine, holder)
    machine.contribute(Given(holder, 0, ((0, 2),)), (1, 0))
    for shard in machine.shards:
        shard.living.clear()
    machine.settle(holder)
    assert machine.ledger.done == ((0, 2),)
    assert [each.ranges for each in machine.ledger.partial] == [((0, 2),)]
    assert not machine.ledger.out


def test_a_settled_member_stays_settled_in_a_log_that_was_made_short() -> None:
    """Else it is settled again, when no shard knows any more that all chunks had counted."""
    holder = Holder("w0", 1)
    machine = machine_of(ElasticMachine, holder)
    for place in PLACES:
        machine.contribute(Given(holder, 0, ((0, 2),)), place)
        machine.close(place)
    for shard in machine.shards:
        shard.living.clear()
    machine.settle(holder)
    machine.compact(0)
    machine.shards[0].samples.deal(machine.deal_request(Holder("w1", 2)), (0, 1), {})
    machine.shards[0].start()
    assert holder not in machine.ledger.last_step
    assert not machine.ledger.partial
