"""The samples of a parameter's gradients: ledger.py's accounts where threads, disk and wire meet.

The shard that has the parameter's first chunk, shard 0, has an account of each dataset; a sample
counts when chunk 0 counts its gradient. Where a step may close without a worker, every shard notes
which samples the last gradient of each had that counted in any other chunk: {"kind": "gave", ...}.
A worker that is lost in the middle of a step may have given these chunks and not chunk 0.

States of a count, by its place in chunk 0's record (version, contributions to it):

    state    event                                                 next
             it is noted: {"kind": "counted", ...}                 noted
    noted    chunk 0 commits a record past its place               counts
    noted    the journal or the record can't be written; or a new
             process finds a record that is not past its place     void: {"kind": "void", ...}
    counts   a new process finds such a record, after a loss of
             power                                                 void

Invariant: nothing else is noted, nor does a gradient come in its place, before a void count is.

Lock order: a chunk's lock is taken first.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwell.errors import ArgumentError, LimitError, StepOrderError, StorageError
from shardwell.numerics.arguments import check_integer
from shardwell.placement.ranges import NumberRanges, common, flat, paired, united
from shardwell.specs.names import check_name
from shardwell.specs.parameter import STEP_MAX, WORKER_COUNT_MAX, ParameterSpec
from shardwell.specs.samples import BATCH_SIZE_MAX, LENGTH_MAX, POSITION_MAX
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server.shard.parameter.ledger import (
    RANK_COUNT_MAX,
    STEP_COUNT_MAX,
    Counted,
    Dataset,
    Event,
    Given,
    Holder,
    Ledger,
    Way,
)
from shardwell_server.shard.step_tracker import ParameterSeat, StepTracker
from shardwell_server.store.contract import ParameterStorage

BATCH_COUNT_MAX = 1024
_RANGE_COUNT_MAX = 256
_DATASET_COUNT_MAX = 64
_GAVE_COUNT_MAX = 1024
_ACCOUNT_SIZE_MAX_BYTES = 2**19


class _Gave(NamedTuple):
    """The last gradient of a worker that counted in chunks other than the first."""

    step: int
    data: str
    ranges: NumberRanges
    chunks: set[int]
    """Indices of these chunks."""
    carried: NumberRanges = ()
    """Those that the gradient before had as well."""


class Samples:
    """The samples of one slice. Any thread may call it."""

    def __init__(
        self,
        spec: ParameterSpec,
        storage: ParameterStorage,
        tracker: StepTracker,
        *,
        has_first_chunk: bool,
        is_whole: bool,
    ) -> None:
        """Takes a slice's parts; `is_whole`: no other shard has any of the parameter."""
        self._spec = spec
        self._storage = storage
        self._tracker = tracker
        self._crew = tracker.crew
        self.has_first_chunk = has_first_chunk
        self._is_whole = is_whole
        self._leases = spec.members is not None
        self._lock = threading.Lock()
        self._ledgers: dict[str, Ledger] = {}
        self.void: tuple[int, int] | None = None
        """The place of a count that is noted, as long as it does not count."""
        self._ways: dict[tuple[str, int], Way] = {}
        """By dataset and session: how a worker of a fixed crew was dealt its last batches."""
        self._gave: dict[Holder, _Gave] = {}
        self._settled: set[str] = set()
        """Workers of a fixed crew that were dealt nothing since they were settled."""

    # Gradients.

    @contextlib.contextmanager
    def noted(
        self, index: int, seat: ParameterSeat, step: int, gradient: types_pb2.GradientChunk
    ) -> Iterator[None]:
        """Notes the samples of a gradient, which count if the chunk counts it inside.

        The chunk's lock is held.

        Raises:
            ArgumentError: they are not the worker's, or there is no such dataset.
            StorageError: they can't be noted.
        """
        is_first = index == 0 and self.has_first_chunk
        if not gradient.HasField("samples"):
            if is_first and self.void is not None:
                with self._lock:
                    self._note_void()
            yield
            return
        given = gradient.samples
        ranges = paired(given.ranges[: 2 * _RANGE_COUNT_MAX + 1])
        if not ranges:
            raise ArgumentError(
                f"a gradient of parameter {self._spec.name!r} names samples {given.data!r} without "
                "ranges; leave them out"
            )
        holder = Holder(seat.worker_id, seat.tenure.number)
        if is_first:
            with self._lock:
                ledger, found = self._note_count(holder, step, given.data, ranges)
            try:
                yield
            finally:
                with self._lock:
                    self._end_count(ledger, found)
        elif self._spec.has_open_sets:
            with self._lock:
                gave = self._note_gave(holder, step, given.data, ranges)
            yield
            if gave.step == step:
                gave.chunks.add(index)
        else:
            yield

    def _note_count(
        self, holder: Holder, step: int, data: str, ranges: NumberRanges
    ) -> tuple[Ledger, Counted]:
        if self.void is not None:
            self._note_void()
        ledger = self._ledgers.get(data) or self._ledger(data)
        version, order = self._place
        ledger.advance(version)
        ledger.check_count(holder, ranges)
        found = Counted(step, order, holder, ranges)
        self.void = found.step, found.order
        ledger.note_count(found)
        return ledger, found

    def _end_count(self, ledger: Ledger, found: Counted) -> None:
        if self._place > (found.step, found.order):
            ledger.count(found)
            self.void = None
        else:
            with contextlib.suppress(StorageError):  # else before the next event
                self._note_void()

    def _note_void(self) -> None:
        """Notes that a count is void; chunk 0's lock is held."""
        if self.void is not None:
            step, order = self.void
            self._log({"kind": "void", "step": step, "order": order})
            self.void = None

    def _note_gave(self, holder: Holder, step: int, data: str, ranges: NumberRanges) -> _Gave:
        known = self._gave.get(holder)
        if known is not None and known.step >= step:
            return known
        carried = common(known.ranges, ranges) if known is not None and known.data == data else ()
        gave = _Gave(step, check_name("dataset", data), ranges, set(), carried)
        self._log(_gave_event(holder, gave))
        self._take_gave(holder, gave)
        if not self.has_first_chunk:  # which deals nothing, where the log is made short else
            self._compact()
        return gave

    def _take_gave(self, holder: Holder, gave: _Gave) -> None:
        self._gave.pop(holder, None)
        self._gave[holder] = gave
        while len(self._gave) > _GAVE_COUNT_MAX:
            del self._gave[next(iter(self._gave))]

    # Dealing.

    def deal(
        self, request: pb.DealSamplesRequest, rank: tuple[int, int], living: Mapping[int, str]
    ) -> Any:
        """Deals batches to a worker; chunk 0's lock is held.

        `rank` is the place of its seat, of so many; `living` are the connected workers, by their
        sessions.
        """
        data = _dataset(request.dataset)
        check_integer("batch_size", request.batch_size, 1, BATCH_SIZE_MAX)
        check_integer("batch_count", request.batch_count, 1 - self._leases, BATCH_COUNT_MAX)
        if request.drop_last and request.batch_size > data.length:
            raise ArgumentError(
                f"samples {data.name!r}: drop_last leaves out all {data.length} samples, which are "
                f"less than a batch of {request.batch_size}; make batches smaller"
            )
        limit = min(request.limit, POSITION_MAX)
        holder = Holder(request.worker_id, request.tenure)
        with self._lock:
            self._note_void()
            ledger = self._ledgers.get(data.name) or self._begin(data)
            ledger.check(data)
            ledger.advance(self._version)
            response = pb.DealSamplesResponse()
            if self._leases:
                for each in self._over(ledger):
                    if self._is_whole:
                        self._settle(ledger, each, [])
                    else:
                        response.unsettled.add(worker_id=each.worker_id, tenure=each.tenure)
                # Fewer near the end, so that no member has much where others have nothing.
                free_count = ledger.counts_below(limit, holder)[1] // request.batch_size
                fair_count = max(free_count // (2 * max(len(self._crew.awaited), 1)), 1)
                batches = ledger.lease(
                    holder,
                    min(request.batch_count, fair_count),
                    limit,
                    request.batch_size,
                    drops_last=request.drop_last,
                )
            else:
                if not request.ranges:
                    ledger.begin_again(holder.worker_id, request.step)
                again: NumberRanges = ()
                if self._spec.fragment is None:  # a learner makes other moves, on other samples
                    again = ledger.counted_by(holder.worker_id, request.step)
                response.again.ranges.extend(flat(again))
                wanted = [request.rank, rank[0]] if request.HasField("rank") else [rank[0]]
                own_rank = ledger.rank_of(holder.worker_id, wanted, rank[1])
                way = Way(rank[1], request.batch_size, request.drop_last)
                own = [each for each, name in living.items() if name == holder.worker_id]
                ways = {of: had for of, had in self._ways.items() if of[1] in living}
                others = [
                    had for of, had in ways.items() if of[0] == data.name and of[1] not in own
                ]
                is_alone = all(had == way for had in others)
                if is_alone and self._spec.has_open_sets and ledger.begins_anew(way):
                    names = ledger.ranks.keys() - {holder.worker_id} - self._settled
                    if names:
                        response.unsettled.extend(
                            pb.DealSamplesResponse.Tenure(worker_id=each) for each in sorted(names)
                        )
                        return response
                self._settled.discard(holder.worker_id)
                batches = ledger.planned(
                    own_rank,
                    way,
                    request.batch_count,
                    limit,
                    united(again, paired(request.ranges)),
                    is_alone=is_alone,
                )
                self._ways = {**ways, **{(data.name, each): way for each in own}}
            for batch in batches:
                response.batches.add(ranges=flat(batch))
            response.out_count, response.free_count = ledger.counts_below(limit, holder)
            response.done_before = ledger.done_before
            self._compact()
            return response

    def _begin(self, data: Dataset) -> Ledger:
        check_name("dataset", data.name)
        if len(self._ledgers) >= _DATASET_COUNT_MAX:
            raise ArgumentError(
                f"parameter {self._spec.name!r} has {_DATASET_COUNT_MAX} datasets already: "
                f"{', '.join(self._ledgers)}; go on with one of them",
                parameter=self._spec.name,
            )
        made = Ledger(data, self._log, leases=self._leases)
        self._log({"kind": "state", "data": data.name, **made.state(())})
        self._ledgers[data.name] = made
        return made

    def _over(self, ledger: Ledger) -> list[Holder]:
        """Returns the holders whose tenure is over here."""
        holders = dict.fromkeys((*ledger.out, *ledger.last_step))
        return [each for each in holders if self._crew.member(*each) is None]

    def give_back(self, request: pb.DealSamplesRequest) -> None:
        """Takes positions back; chunk 0's lock is held."""
        holder = Holder(request.worker_id, request.tenure)
        ranges = paired(request.ranges)
        with self._lock:
            self._note_void()
            ledger = self._ledger(request.dataset.name)
            ledger.advance(self._version)
            if request.is_partial:
                ledger.end_partly(holder, request.step, ranges)
            else:
                ledger.give_back(holder, ranges, request.step)
            self._compact()

    def last_given(self, holder: Holder) -> tuple[str, Given]:
        """Returns the dataset and the last gradient of a member in chunks but the first."""
        with self._lock:
            return self._last_given(holder)

    def _last_given(self, holder: Holder) -> tuple[str, Given]:
        others = len(self._tracker.records) - self.has_first_chunk
        if not others:
            return "", Given(0, (), POSITION_MAX)
        gave = self._gave.get(holder)
        if gave is None:
            return "", Given(0, (), 0)
        is_whole = len(gave.chunks) == others
        return gave.data, Given(gave.step, gave.ranges, gave.step + is_whole, gave.carried)

    def settle(self, request: pb.DealSamplesRequest) -> None:
        """Frees positions of a tenure that is over on all shards; chunk 0's lock is held.

        Of a fixed crew: names those that count in part, as their worker will not give them again.
        """
        holder = Holder(request.worker_id, request.tenure)
        ranges = paired(request.ranges)
        others = request.dataset.name, Given(request.step, ranges, request.whole_before)
        with self._lock:
            self._note_void()
            for ledger in self._ledgers.values():
                ledger.advance(self._version)
                if not self._leases:  # its worker has asked this shard as well
                    data, given = others
                    if data != ledger.data.name:
                        given = Given(0, (), given.whole_before)
                    ledger.settle(holder, given, request.next_step)
                    self._settled.add(holder.worker_id)
                elif holder in self._over(ledger):
                    self._settle(ledger, holder, [others])
            self._compact()

    def _settle(self, ledger: Ledger, holder: Holder, others: list[tuple[str, Given]]) -> None:
        given = [self._last_given(holder), *others]
        its = [each for data, each in given if data == ledger.data.name]
        step = max((each.step for each in its), default=0)
        ranges = united(*(each.ranges for each in its if each.step == step))
        whole_before = min(each.whole_before for _, each in given)
        ledger.settle(holder, Given(step, ranges, whole_before), POSITION_MAX)

    # Snapshots.

    def account(self, version: int) -> bytes:
        """Returns the accounts in a version of chunk 0, for a checkpoint; its lock is held."""
        with self._lock:
            found = {}
            for name, ledger in self._ledgers.items():
                ledger.advance(self._version)
                done = ledger.at(version)
                if done is None:
                    raise ArgumentError(
                        f"samples {name!r}: what had counted in version {version} is not known any "
                        "more; save again",
                        parameter=self._spec.name,
                    )
                found[name] = ledger.state(done)
            account = json.dumps(found).encode() if found else b""
            if len(account) > _ACCOUNT_SIZE_MAX_BYTES:
                raise LimitError(
                    f"parameter {self._spec.name!r}: the account of its samples has {len(account)} "
                    f"bytes, and a checkpoint has room for {_ACCOUNT_SIZE_MAX_BYTES}; save again "
                    "when workers have given more of what they were dealt",
                    parameter=self._spec.name,
                )
            return account

    def load(self, account: bytes) -> None:
        """Goes on with the accounts of a checkpoint; nothing has been dealt yet."""
        with self._lock:
            self._note_void()
            made = {}
            for name, state in _read_account(account).items():
                try:
                    event = {"kind": "state", **_checked_state(name, state)}
                    made[name] = event, self._restored(event)
                except (ArgumentError, KeyError, TypeError, ValueError) as error:
                    raise ArgumentError(
                        f"samples {name!r} of the checkpoint can't be read ({error!r}); use the "
                        "version that saved it"
                    ) from None
            for event, _ in made.values():
                self._log(event)
            self._ledgers = {name: ledger for name, (_, ledger) in made.items()}

    def has_counted(self, worker_id: str, step: int) -> bool:
        """Returns True if a worker's samples are in a step of chunk 0."""
        with self._lock:
            counted = (
                each
                for ledger in self._ledgers.values()
                for each in (*ledger.open, *ledger.steps.get(step, ()))
            )
            return any(each[0] == step and each.holder.worker_id == worker_id for each in counted)

    # Status.

    def of_step(self, step: int) -> pb.DealSamplesResponse:
        """Returns what a step of chunk 0 has, for people; its lock is held."""
        response = pb.DealSamplesResponse()
        with self._lock:
            for name, ledger in self._ledgers.items():
                ledger.advance(self._version)
                found = ledger.of_step(step) if step <= self._version else None
                if found is None:
                    raise StepOrderError(
                        f"step {step} of parameter {self._spec.name!r} is not among those whose "
                        f"samples {name!r} are known: the open one, {self._version}, and the last "
                        f"{STEP_COUNT_MAX} that closed since shard 0 began; ask for one of these",
                        parameter=self._spec.name,
                    )
                for each in found:
                    response.counted.add(
                        worker_id=each.holder.worker_id, data=name, ranges=flat(each.ranges)
                    )
        return response

    def describe(self) -> Iterator[pb.SamplesStatus]:
        """Yields the datasets' accounts; chunk 0's lock need not be held."""
        with self._lock:
            for ledger in self._ledgers.values():
                ledger.advance(self._version)
                account = ledger.account()
                data = ledger.data
                yield pb.SamplesStatus(
                    dataset=pb.Dataset(
                        name=data.name,
                        length=data.length,
                        seed=data.seed,
                        shuffles=data.shuffles,
                    ),
                    epoch=account.epoch,
                    done_count=account.done,
                    out_count=account.out,
                    free_count=account.free,
                    left_out_count=account.left_out,
                    partial_count=account.partial_count,
                    partial=[
                        pb.PartialSamples(
                            worker_id=each.worker_id, step=each.step, ranges=flat(each.ranges)
                        )
                        for each in account.partial[-16:]
                    ],
                )

    # Keeping.

    @property
    def _version(self) -> int:
        return self._tracker.records[0].version

    @property
    def _place(self) -> tuple[int, int]:
        """The next count's place in chunk 0's record."""
        record = self._tracker.records[0]
        return record.version, record.contribution_count

    def _ledger(self, name: str) -> Ledger:
        found = self._ledgers.get(name)
        if found is None:
            raise ArgumentError(
                f"parameter {self._spec.name!r} has no samples {name!r}; ask batches() for them",
                parameter=self._spec.name,
            )
        return found

    def _log(self, event: Event) -> None:
        self._storage.note("samples", event)

    def _compact(self) -> None:
        self._storage.compact_notes("samples", self._events)

    def _events(self) -> list[Event]:
        events = [event for ledger in self._ledgers.values() for event in ledger.events()]
        return [*events, *(_gave_event(*each) for each in self._gave.items())]

    def _restored(self, event: Event) -> Ledger:
        data = Dataset(
            name=event["data"],
            length=event["length"],
            seed=event["seed"],
            shuffles=event["shuffles"],
        )
        made = Ledger(data, self._log, leases=self._leases)
        made.restore(event)
        return made

    def restore(self) -> None:
        """Goes on from the log, once each chunk's record is what it was, or was replayed."""
        for event in self._storage.noted("samples"):
            try:
                self._restore(event)
            except (ArgumentError, KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"parameter {self._spec.name!r}: its samples hold {event!r}, which this "
                    f"version can't read ({error!r}); run the version that wrote it, or restore a "
                    "copy",
                    parameter=self._spec.name,
                ) from None
        if self._ledgers:
            if self._forget_from(*self._place):
                self.void = self._place
                with contextlib.suppress(StorageError):  # else before the next event
                    self._note_void()
            for ledger in self._ledgers.values():
                ledger.recovered(self._version)

    def _restore(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "gave":
            holder, step = Holder(event["worker_id"], event["tenure"]), event["step"]
            chunks = self._chunks_with(holder, step)
            if chunks != set():  # else none has counted it, or power was lost since
                carried = united(event.get("carried", ()))
                gave = _Gave(step, event["data"], united(event["ranges"]), chunks or set(), carried)
                self._take_gave(holder, gave)
        elif kind == "void":
            self._forget_from(event["step"], event["order"])
        elif kind == "state":
            self._ledgers[event["data"]] = self._restored(event)
        else:
            self._ledgers[event["data"]].restore(event)

    def _chunks_with(self, holder: Holder, step: int) -> set[int] | None:
        """Returns the chunks but the first that a member's step counted in; None: it is unknown."""
        if step > max(record.version for record in self._tracker.records):
            return set()
        seat = self._crew.find(holder.worker_id)
        if seat is None or seat.tenure.number != holder.tenure:
            return None
        others = range(int(self.has_first_chunk), len(seat.last_step))
        return {index for index in others if seat.last_step[index] >= step}

    def _forget_from(self, step: int, order: int) -> bool:
        found = [ledger.forget_from(step, order) for ledger in self._ledgers.values()]
        return any(found)


def _gave_event(holder: Holder, gave: _Gave) -> Event:
    facts = {"step": gave.step, "data": gave.data, "ranges": gave.ranges}
    if gave.carried:
        facts["carried"] = gave.carried
    return {"kind": "gave", **holder._asdict(), **facts}


def _dataset(given: pb.Dataset) -> Dataset:
    check_integer("length", given.length, 1, LENGTH_MAX)
    return Dataset(name=given.name, length=given.length, seed=given.seed, shuffles=given.shuffles)


def _read_account(account: bytes) -> dict[str, Any]:
    try:
        found = json.loads(account) if len(account) <= _ACCOUNT_SIZE_MAX_BYTES else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or len(found) > _DATASET_COUNT_MAX:
        raise ArgumentError(
            f"the account of samples in a checkpoint is JSON of at most {_ACCOUNT_SIZE_MAX_BYTES} "
            f"bytes; got {len(account)} bytes that are none"
        )
    return found


def _checked_state(name: str, state: dict[str, Any]) -> Event:
    """Returns a dataset's part of a checkpoint's account, of which nothing is believed."""
    if not isinstance(state["shuffles"], bool):
        raise TypeError("shuffles must be true or false")
    ranks = state.get("ranks", {})
    if not isinstance(ranks, dict) or len(ranks) > RANK_COUNT_MAX:
        raise TypeError(f"ranks must be at most {RANK_COUNT_MAX}, by worker id")
    return {
        "data": check_name("dataset", name),
        "length": check_integer("length", state["length"], 1, LENGTH_MAX),
        "seed": check_integer("seed", state["seed"], 0, 2**64 - 1),
        "shuffles": state["shuffles"],
        "done": _checked_ranges(state["done"]),
        "partial": [
            [
                check_name("worker_id", worker_id),
                check_integer("step", step, 0, STEP_MAX),
                _checked_ranges(ranges),
            ]
            for worker_id, step, ranges in state["partial"]
        ],
        "partial_count": check_integer("partial_count", state["partial_count"], 0, POSITION_MAX),
        "left_out": check_integer("left_out", state["left_out"], 0, POSITION_MAX),
        "ranks": {
            check_name("worker_id", worker_id): check_integer("rank", rank, 0, WORKER_COUNT_MAX)
            for worker_id, rank in ranks.items()
        },
    }


def _checked_ranges(given: Any) -> NumberRanges:
    numbers = []
    for start, stop in given:
        begin = check_integer("start of a range", start, 0, POSITION_MAX)
        numbers += [begin, check_integer("end of a range", stop, begin + 1, POSITION_MAX) - begin]
    return paired(numbers)
