"""Goal: whatever becomes of members, messages and shards, a gradient counts once at most, a chunk's
sum is what its set names, bit for bit, and no open step hangs.

Method: a hypothesis state machine plays clients that follow docs/adr/0036 beside two shards without
sockets, one chunk's message at a time: messages are lost, doubled, late and in any order; workers
come, go, die, lose a shard, and share few seats; shards are killed at any write and recovered. The
oracle has for each chunk the gradients that its open step has, in order. Each call may only add
what its message brings, or close a step; each closed step is computed anew from its gradients, in
their order, by NumPy's float32 or by the arithmetic of the shards on other memory. In the end, with
min_count members that reach all shards, every chunk must go on.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from harness.data.sessions import session_of
from harness.elastic_shards import (
    CHUNK_ELEMENT_COUNT,
    ElasticShard,
    deadline,
    elastic_spec,
)
from harness.inside import tracker_of
from harness.machines import cases
from harness.stories.crash import SameMachine
from harness.stories.images import image_of, in_memory, restore
from shardwell.errors import LimitError, SeatsTakenError
from shardwell.numerics.codec import Float32
from shardwell.numerics.update_rules import TensorRules, clip_factor
from shardwell.numerics.weighted_mean import shift_for
from shardwell.rpc.session import Session
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.config import Durability
from shardwell_server.shard.deadline import NotYet
from shardwell_server.shard.parameter.averaging import (
    NOTHING,
    ChunkState,
    Contribution,
    add_to_sum,
    close_full_step,
)
from shardwell_server.shard.step_tracker import ParameterSeat
from shardwell_server.store.contract import ChunkRecord
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

SHARD_COUNT, CHUNK_COUNT = 2, 2
"""Chunks are those of one shard."""
PLACES = [(shard, chunk) for shard in range(SHARD_COUNT) for chunk in range(CHUNK_COUNT)]
NAMES = ["w0", "w1", "w2", "w3", "w4"]
names = st.sampled_from(NAMES)
shards = st.integers(0, SHARD_COUNT - 1)


class KilledError(BaseException):
    """A shard's process ends at a write."""


@dataclass
class Given:
    """A gradient's chunk, as its worker sent it."""

    worker_id: str
    values: Float32
    sample_count: int


@dataclass
class Message:
    """A chunk under way, which may arrive at any time, and again."""

    place: tuple[int, int]
    session: Session
    tenure: int
    step: int
    given: Given


@dataclass
class Client:
    """A process of a worker."""

    worker_id: str
    session: Session
    tenure: int = 0
    phase: str = "idle"
    """"idle", "joining", "sending", or "waiting" for the weights of its first step."""
    next_step: int = 0
    from_step: int | None = None
    asked: list[tuple[int, int | None]] = field(default_factory=list)
    """While it joins: version_max and needed_step by which shard 0 .. have answered."""
    ahead: int = 1
    is_ahead_of_gradient: bool = False
    waiting: dict[tuple[int, int], Message] = field(default_factory=dict)
    answers: dict[tuple[int, int], str] = field(default_factory=dict)
    over: set[tuple[str, int]] = field(default_factory=set)


class NoStorage:
    """The blocks of a change that no storage keeps."""

    def blocks(self, count: int) -> Iterator[tuple[int, int]]:
        """All at once."""
        yield 0, count

    def commit(self, record: ChunkRecord, seat_index: int, step: int) -> None:
        """Keeps nothing."""


class MembersMachine(RuleBasedStateMachine):
    """Clients that follow docs/adr/0036, beside two shards."""

    clip_norm = 0.0

    @initialize(
        min_count=st.integers(1, 3),
        more=st.integers(0, 2),
        quorum=st.sampled_from([0, 0, 1, 2]),
        stores=st.tuples(st.booleans(), st.booleans()),
    )
    def open(self, min_count: int, more: int, quorum: int, stores: tuple[bool, bool]) -> None:
        self.stack = contextlib.ExitStack()
        temporary = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.path = self.stack.enter_context(in_memory(temporary))
        self.min_count = min_count
        self.max_count = max(min_count + more, 2 if self.clip_norm else 1)  # one clips for itself
        quorum = min(quorum, self.max_count)
        self.spec = elastic_spec(
            size=SHARD_COUNT * CHUNK_COUNT * CHUNK_ELEMENT_COUNT,
            min_count=min_count,
            max_count=self.max_count,
            clip_norm=self.clip_norm,
            min_contributors=quorum,
            grace_s=1.0 if quorum else 0.0,
        )
        self.rules = TensorRules(self.spec.optimizer, self.spec.layout)
        self.paths: dict[int, Path] = {}
        self.armed: dict[int, int] = {}
        """Shards that are killed at a write of their next call, by its number."""
        self.left: dict[int, int] = {}
        self.numbers = iter(range(1, 10**9))
        self.random = np.random.default_rng(5)
        self.shards = [self.made(index, stores[index]) for index in range(SHARD_COUNT)]
        for shard in self.shards:
            shard.initialize()
        self.clients: dict[str, Client] = {}
        self.lives: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.cut: set[tuple[str, int]] = set()
        self.sent: list[Message] = []
        self.open_steps: dict[tuple[int, int], list[Given]] = {place: [] for place in PLACES}
        self.versions = dict.fromkeys(PLACES, 0)
        self.closed: dict[tuple[int, int], dict[int, tuple[str, ...]]] = {p: {} for p in PLACES}
        self.given: dict[tuple[int, int], dict[tuple[str, int], Given]] = {p: {} for p in PLACES}
        """What counted, by worker and step."""
        self.weights = {place: np.zeros(CHUNK_ELEMENT_COUNT, np.float32) for place in PLACES}
        self.slots = {place: np.zeros(CHUNK_ELEMENT_COUNT, np.float32) for place in PLACES}
        self.norms: dict[int, float] = {}
        self.full: dict[tuple[int, int], tuple[int, tuple[str, ...]]] = {}
        """Of each chunk the last step whose set was decided before it closed, and the set."""

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            try:
                self.go_on()
            finally:
                self.stack.close()

    # Shards.

    def made(self, index: int, is_mapped: bool) -> ElasticShard:
        if not is_mapped:
            return ElasticShard(self.spec, index, SHARD_COUNT, MemoryStore())
        path = self.paths[index] = self.path / f"{index}-{next(self.numbers)}"
        path.mkdir()
        return ElasticShard(self.spec, index, SHARD_COUNT, self.store_at(index, path))

    def store_at(self, index: int, path: Path) -> MmapStore:
        def reached(point: str) -> None:
            if index in self.left:
                self.left[index] -= 1
                if self.left[index] == 0:
                    del self.left[index]
                    image = image_of(path)
                    self.paths[index] = restore(image, self.path / f"{index}-{next(self.numbers)}")
                    raise KilledError

        return MmapStore(
            path, durability=Durability("process"), boot=SameMachine(path), reached=reached
        )

    def recover(self, index: int) -> None:
        old = self.shards[index]
        image = image_of(self.paths[index])
        path = self.paths[index] = restore(image, self.path / f"{index}-{next(self.numbers)}")
        store = self.store_at(index, path)
        self.shards[index] = ElasticShard(self.spec, index, SHARD_COUNT, store, living=old.living)

    def call(self, index: int, act: Callable[[], Any], message: Message | None = None) -> Any:
        """What a shard answers; None: it was killed meanwhile, or the answer is lost with it."""
        count = self.armed.pop(index, None)
        if count is not None:
            self.left[index] = count
        answer = None
        try:
            answer = act()
        except KilledError:
            pass
        finally:
            self.left.pop(index, None)
            if count is not None:
                self.recover(index)
                answer = None
            self.observe(index, message)
        return answer

    def observe(self, index: int, message: Message | None) -> None:
        """Compares a shard with the oracle, which goes on with what the shard has done."""
        shard = self.shards[index]
        tracker = tracker_of(shard.part)
        for chunk in range(CHUNK_COUNT):
            place = index, chunk
            now, found = self.open_steps[place], shard.open_sets[chunk]
            version = shard.versions[chunk]
            is_its = message is not None and message.place == place
            added = [*now, message.given] if is_its and message is not None else now
            sets = [tuple(each.worker_id for each in given) for given in (now, added)]
            if version == self.versions[place]:
                assert found in sets, (place, found, sets)
                if is_its and message is not None and found == sets[1] != sets[0]:
                    assert message.step == version
                    self.open_steps[place] = added
                    self.note_given(place, message)
            else:
                assert version == self.versions[place] + 1
                assert found == ()
                named = shard.part.sets.of_step(version - 1).get(chunk)
                if named is None:
                    named = sets[0]
                assert named in sets, (named, sets)
                if is_its and message is not None and named == sets[1] != sets[0]:
                    self.note_given(place, message)
                self.close(place, added if named == sets[1] else now)
            record = tracker.records[chunk]
            if self.full.get(place, (-1, ()))[0] == version:
                assert self.full[place] == (version, found)
            elif record.is_full:
                self.full[place] = version, found
                assert len(found) >= self.min_count
            assert record.contribution_count == len(self.open_steps[place])
            members = [each.worker_id for each in self.open_steps[place]]
            assert len(set(members)) == len(members)
            for seat in tracker.open_sets[chunk]:
                assert tracker.crew.seats[seat.index].worker_id == seat.worker_id
                assert tracker.crew.seats[seat.index].last_step[chunk] == version
            if not self.left and not shard.timer.due:  # else it settles in a moment
                assert record.is_full or not tracker.is_complete(chunk)
            start = chunk * CHUNK_ELEMENT_COUNT
            part = slice(start, start + CHUNK_ELEMENT_COUNT)
            np.testing.assert_array_equal(
                shard.part.storage.weights[part].view(np.uint32),
                self.weights[place].view(np.uint32),
            )
            for step, named in self.closed[place].items():
                assert shard.part.sets.of_step(step).get(chunk, named) == named

    def note_given(self, place: tuple[int, int], message: Message) -> None:
        of_step = message.given.worker_id, message.step
        assert of_step not in self.given[place], message
        self.given[place][of_step] = message.given

    def close(self, place: tuple[int, int], given: list[Given]) -> None:
        """A chunk's step closes with these, in this order."""
        shard, version = self.shards[place[0]], self.versions[place]
        names = tuple(each.worker_id for each in given)
        assert len(names) >= self.min_count
        if not self.spec.min_contributors or len(names) < self.spec.min_contributors:
            for seat in tracker_of(shard.part).crew.awaited:
                awaits = seat.from_step is not None and seat.from_step <= version
                assert not awaits or seat.worker_id in names or self.clip_norm
        self.closed[place][version] = names
        self.open_steps[place] = []
        self.versions[place] = version + 1
        self.replay(place, version, given)

    def replay(self, place: tuple[int, int], version: int, given: list[Given]) -> None:
        """A crew of these, whose gradients come in this order."""
        codec = ChunkCodec.of(self.spec).codec
        memory = np.full(CHUNK_ELEMENT_COUNT, np.nan, np.float32)
        state = ChunkState(
            offset=self.shards[place[0]].part.where.offset + place[1] * CHUNK_ELEMENT_COUNT,
            weights=self.weights[place],
            gradient_sum=memory,
            slots=(self.slots[place],),
        )
        total, samples, change = NOTHING, 0, NoStorage()
        shift = shift_for(5, self.spec.step_size_max)
        for each in given:
            contribution = Contribution(each.values.view(np.uint8), each.sample_count)
            total = add_to_sum(
                contribution, codec, memory, total, change, shift=shift, may_stay_encoded=False
            )
            samples += each.sample_count
        record = ChunkRecord(
            version, len(given), samples, total_factor=total.factor, shift=shift, is_full=True
        )
        factor = 1.0
        if self.clip_norm:
            factor = clip_factor(self.norms[version], self.clip_norm)
        rate = self.spec.optimizer.learning_rate
        close_full_step(
            state, codec, self.rules, change, record, clip_factor=factor, learning_rate=rate
        )

    # Workers.

    def alive(self, worker_id: str) -> Client | None:
        return self.clients.get(worker_id)

    def reaches(self, client: Client, index: int) -> bool:
        return (client.worker_id, index) not in self.cut

    @rule(name=names)
    def come(self, name: str) -> None:
        if name not in self.clients:
            self.lives[name] = self.lives.get(name, 0) + 1
            client = Client(name, session_of(name, self.lives[name]))
            client.next_step = min(self.versions.values())  # it reads the weights
            self.clients[name] = client
            for index, shard in enumerate(self.shards):
                if self.reaches(client, index):
                    shard.living.attending.add(client.session.number)

    @rule(name=names)
    def die(self, name: str) -> None:
        client = self.clients.pop(name, None)
        if client is not None:
            for shard in self.shards:
                shard.living.attending.discard(client.session.number)

    @rule(name=names, index=shards)
    def lose_shard(self, name: str, index: int) -> None:
        client = self.clients.get(name)
        if client is not None:
            self.cut.add((name, index))
            self.shards[index].living.attending.discard(client.session.number)

    @rule(name=names, index=shards)
    def find_shard(self, name: str, index: int) -> None:
        client = self.clients.get(name)
        self.cut.discard((name, index))
        if client is not None:
            self.shards[index].living.attending.add(client.session.number)

    @rule(name=names, named=st.sets(shards))
    def leave(self, name: str, named: set[int]) -> None:
        """To some shards the message is lost; others carry it there."""
        client = self.clients.get(name)
        if client is None or not client.tenure or client.phase != "idle":
            return
        client.over.add((name, client.tenure))
        for index in sorted(named):
            if self.reaches(client, index):
                self.end_tenure(index, name, client.tenure)
        self.lose_tenure(client)

    def end_tenure(self, index: int, name: str, tenure: int) -> None:
        self.call(index, lambda: self.shards[index].part.end_tenure(name, tenure))

    @staticmethod
    def lose_tenure(client: Client) -> None:
        client.tenure, client.from_step = 0, None

    @rule(name=names, index=shards)
    def heartbeat(self, name: str, index: int) -> None:
        client = self.clients.get(name)
        if client is None or not self.reaches(client, index):
            return
        for worker_id, tenure in sorted(client.over):
            self.end_tenure(index, worker_id, tenure)
        part = self.shards[index].part
        if part.had_session(client.session.number):
            client.over.update(part.ended_tenures())

    @rule()
    def a_minute_passes(self) -> None:
        """Those that live report it to the shards that they reach, and then forget it."""
        for _ in range(2):
            for index in range(SHARD_COUNT):
                self.pass_time(index)
                for name in sorted(self.clients):
                    self.heartbeat(name, index)
        for shard in self.shards:
            shard.part._ended.clear()
        for client in self.clients.values():
            client.over = {
                each for each in client.over if each == (client.worker_id, client.tenure)
            }

    # What it does next.

    @rule(name=names, count=st.integers(1, 14), seed=st.integers(0, 99))
    def go(self, name: str, count: int, seed: int) -> None:
        """Does so many things, one after the other, its chunks in any order."""
        order = np.random.default_rng(seed).permutation(len(PLACES))
        for _ in range(count):
            client = self.clients.get(name)
            if client is None:
                self.come(name)
            elif client.phase == "idle":
                self.begin(name, bool(seed % 3 == 0))
            elif client.phase == "joining":
                self.ask(name)
            elif client.phase == "waiting":
                self.read_first(name)
            else:
                lacking = [PLACES[n] for n in order if PLACES[n] not in client.answers]
                for place in lacking[:1]:
                    self.arrive(name, place)
                if not lacking and self.clip_norm:
                    self.close_step(is_told_to_all=bool(seed % 4))
                if not lacking:
                    self.finish(name, bool(seed % 2))

    @rule(count=st.integers(1, 14), seed=st.integers(0, 99))
    def all_go(self, count: int, seed: int) -> None:
        """So do all."""
        for number in range(count):
            for name in sorted(self.clients):
                self.go(name, 1 + (seed + number) % 3, seed + number % 2)

    @rule(count=st.integers(5, 14), seed=st.integers(0, 99))
    def all_go_far(self, count: int, seed: int) -> None:
        """So do all, for longer."""
        self.all_go(count, seed)

    # Joining.

    def begin(self, name: str, is_ahead: bool) -> None:
        """A gradient of its next step, for which it takes a seat if it has none."""
        client = self.clients.get(name)
        if client is None or client.phase != "idle":
            return
        if (name, client.tenure) in client.over:
            self.lose_tenure(client)
        if client.tenure:
            self.send(client)
        else:
            client.is_ahead_of_gradient = is_ahead
            self.begin_joining(client)

    def begin_joining(self, client: Client, from_step: int | None = None) -> None:
        client.phase, client.asked, client.ahead = "joining", [], 1
        client.from_step = from_step
        if from_step is None:
            client.tenure = next(self.numbers)

    def ask(self, name: str) -> None:
        """Of the shard that is next."""
        client = self.clients.get(name)
        if client is None or client.phase != "joining":
            return
        index = len(client.asked)
        if not self.reaches(client, index):
            return
        shard = self.shards[index]
        try:
            answer = self.call(
                index,
                lambda: shard.ask(
                    name, client.tenure, from_step=client.from_step, session=client.session
                ),
            )
        except (SeatsTakenError, LimitError):
            client.phase = "idle"
            self.lose_tenure(client)
            return
        if answer is None:
            return  # it asks again
        if answer.tenure != client.tenure:  # a shard has found that it is over
            self.begin_joining(client)
            return
        needed = answer.needed_step if answer.HasField("needed_step") else None
        client.asked.append((answer.version_max, needed))
        if len(client.asked) == SHARD_COUNT:
            self.agree(client)

    def agree(self, client: Client) -> None:
        """As Opening.join_members does."""
        needed = [each[1] for each in client.asked if each[1] is not None]
        newest = max(each[0] for each in client.asked)
        client.asked = []
        if needed:
            wanted = min(needed)
        elif client.from_step is None or newest > client.from_step:
            wanted = newest + client.ahead
            client.ahead *= 2
        else:
            wanted = client.from_step
        if wanted == client.from_step:
            if client.is_ahead_of_gradient:
                client.phase = "waiting"
            else:
                self.send(client)
        client.from_step = wanted

    def read_first(self, name: str) -> None:
        client = self.clients.get(name)
        if client is None or client.phase != "waiting":
            return
        assert client.from_step is not None
        if not all(self.reaches(client, index) for index in range(SHARD_COUNT)):
            return
        if min(self.versions.values()) >= client.from_step:
            client.next_step = max(client.next_step, min(self.versions.values()))
            client.phase = "idle"
            client.is_ahead_of_gradient = False
            client.from_step = None
            return
        client.is_ahead_of_gradient = True
        self.begin_joining(client, client.from_step)

    # Gradients.

    def send(self, client: Client) -> None:
        client.phase, client.waiting, client.answers = "sending", {}, {}
        samples = int(self.random.integers(0, 6))
        for place in PLACES:
            values = self.random.standard_normal(CHUNK_ELEMENT_COUNT).astype(np.float32)
            given = Given(client.worker_id, values, samples)
            client.waiting[place] = Message(
                place, client.session, client.tenure, client.next_step, given
            )

    def arrive(self, name: str, place: tuple[int, int]) -> None:
        """A chunk of its gradient arrives, or arrives again."""
        client = self.clients.get(name)
        if client is None or place not in client.waiting or not self.reaches(client, place[0]):
            return
        message = client.waiting[place]
        if not self.random.integers(0, 3):
            self.sent = [*self.sent[-30:], message]
        answer = self.deliver(message)
        if answer is not None:
            client.answers[place] = answer

    def deliver(self, message: Message) -> str | None:
        index, chunk = message.place
        shard, given = self.shards[index], message.given
        try:
            answer: str | None = self.call(
                index,
                lambda: shard.give(
                    given.worker_id,
                    message.tenure,
                    chunk,
                    message.step,
                    given.values,
                    sample_count=given.sample_count,
                    session=message.session,
                    timeout_s=60.0,
                ),
                message,
            )
        except NotYet:
            return None
        counted = self.given[message.place].get((given.worker_id, message.step))
        if answer in ("late", "over", "superseded"):
            assert counted is not given, (answer, message)
        elif answer == "counted":
            assert counted is given, message
        elif answer == "duplicate":  # or another gradient of the step, before a restart
            name, place, step = given.worker_id, message.place, message.step
            later = [key for key in self.given[place] if key[0] == name and key[1] > step]
            assert counted is not None or later, message  # its mark is past it: no client waits
        return answer

    @precondition(lambda self: bool(self.sent))
    @rule(number=st.integers(0, 30))
    def arrive_late(self, number: int) -> None:
        """A message of whatever process and tenure, for which no client waits any more."""
        message = self.sent[number % len(self.sent)]
        client = self.clients.get(message.given.worker_id)
        if client is None or client.waiting.get(message.place) is not message:
            self.deliver(message)

    def finish(self, name: str, waits: bool) -> None:
        """It has the answers; `waits`: and the weights, as with `exchange`."""
        client = self.clients.get(name)
        if client is None or client.phase != "sending" or len(client.answers) < len(PLACES):
            return
        step = client.next_step
        counted = [p for p in PLACES if client.answers[p] in ("counted", "duplicate")]
        if (waits or self.clip_norm) and any(self.versions[p] <= step for p in counted):
            return
        is_over = bool({"over", "unknown"} & set(client.answers.values()))
        is_late = "late" in client.answers.values() or is_over
        version = min(self.versions.values())
        client.next_step = max(version, step + (not (is_late and is_over)))
        client.waiting, client.answers, client.phase = {}, {}, "idle"
        if is_over:
            self.lose_tenure(client)
        elif client.from_step is not None:
            client.phase = "waiting"

    # Shards.

    @rule(index=shards)
    def pass_time(self, index: int) -> None:
        self.call(index, self.shards[index].timer.fire)

    @rule(index=shards, write=st.integers(1, 12))
    def kill(self, index: int, write: int) -> None:
        if index in self.paths:
            self.armed[index] = write

    @rule(index=shards)
    def restart(self, index: int) -> None:
        if index in self.paths:
            before = self.seats_of(index)
            self.recover(index)
            assert [seat[:-1] for seat in self.seats_of(index)] == [seat[:-1] for seat in before]
            for seat, (*_, marks) in zip(self.seats_in(index), before, strict=True):
                if seat.doubtful_step is None:
                    assert seat.last_step == marks
                else:  # marks from before the last closed step may be another worker's
                    for now, was, doubt in zip(
                        seat.last_step, marks, seat.doubtful_step, strict=True
                    ):
                        assert now == was or now == -1 < was <= doubt
            self.observe(index, None)

    def seats_of(self, index: int) -> list[tuple[object, ...]]:
        """What a restart must keep of each seat."""
        return [
            (s.worker_id, s.owner, s.tenure, s.is_over, s.from_step, s.last_step)
            for s in self.seats_in(index)
        ]

    def seats_in(self, index: int) -> tuple[ParameterSeat, ...]:
        return tuple(tracker_of(self.shards[index].part).crew.seats)

    # Steps that close by their norm.

    def close_step(self, *, is_told_to_all: bool) -> None:
        """A client measures the oldest open step on all shards, and tells shard 0 and the others.

        It dies after shard 0, unless `is_told_to_all`.
        """
        step, squares = min(self.versions.values()), []
        try:
            for shard in self.shards:
                squares.append(shard.part.steps.measure(step, deadline(60.0)))
        except NotYet:
            return
        if any(squared is None for squared, _ in squares):
            known = [norm for _, norm in squares if norm is not None]
            norm = known[0] if known else self.norms[step]
        else:
            norm = math.sqrt(math.fsum(square for parts, _ in squares for square in parts))
        assert self.norms.setdefault(step, norm) == norm  # the sums are decided
        for index in range(SHARD_COUNT if is_told_to_all else 1):
            counted = self.call(
                index, lambda index=index: self.shards[index].part.steps.close(step, norm)
            )
            assert counted in (norm, None)
            if counted is None:
                return

    # The end.

    def go_on(self) -> None:
        """With min_count members that reach all shards, every chunk goes on."""
        self.armed.clear()
        crew = [
            client
            for client in self.clients.values()
            if all(self.reaches(client, index) for index in range(SHARD_COUNT))
        ]
        stuck = [client for client in self.clients.values() if client not in crew]
        room = self.max_count - self.min_count
        for client in stuck[room:]:
            self.die(client.worker_id)
        for client in crew[self.max_count - len(stuck[:room]) :]:
            self.die(client.worker_id)
        for number in range(self.min_count):
            if len([c for c in crew if c.worker_id in self.clients]) < self.min_count:
                self.come(f"x{number}")
                crew.append(self.clients[f"x{number}"])
        goal = max(self.versions.values()) + 2
        for _ in range(40):
            for index in range(SHARD_COUNT):
                self.pass_time(index)
            for client in list(self.clients.values()):
                self.play(client)
            if min(self.versions.values()) >= goal:
                return
        raise AssertionError(f"stands still: {self.picture()}")

    def play(self, client: Client) -> None:
        name = client.worker_id
        for index in range(SHARD_COUNT):
            self.heartbeat(name, index)
        for _ in range(8):
            self.begin(name, False)
            for _ in range(SHARD_COUNT):
                self.ask(name)
            for place in PLACES:
                self.arrive(name, place)
            if self.clip_norm:
                self.close_step(is_told_to_all=True)
            self.finish(name, True)
            self.read_first(name)

    def picture(self) -> dict[str, object]:
        """Where all stand."""
        return {
            "versions": self.versions,
            "open": {p: [g.worker_id for g in each] for p, each in self.open_steps.items()},
            "cut": self.cut,
            "clients": [
                (c.worker_id, c.phase, c.tenure, c.next_step, c.from_step, c.answers)
                for c in self.clients.values()
            ],
            "seats": [
                [
                    (s.worker_id, s.tenure.number, s.from_step, s.is_over, s.last_step)
                    for s in tracker_of(shard.part).crew.seats
                ]
                for shard in self.shards
            ],
        }


TestMembers, TestMembersLong = cases(MembersMachine, max_examples=150, step_count=60)


class ClippedMachine(MembersMachine):
    """The same where steps close by the norm of their mean, in two phases."""

    clip_norm = 1.5


TestClippedMembers, TestClippedMembersLong = cases(ClippedMachine, max_examples=150, step_count=60)
