"""The samples of a parameter's gradients: ledger.py's accounts where threads, disk and wire meet.

The shard that has the parameter's first chunk, shard 0, has an account of each dataset; a sample
counts when chunk 0 counts its gradient. Every shard notes, of elastic members, which samples the
last gradient of each had that counted in any other chunk: {"kind": "gave", ...}. A member that is
lost in the middle of a step may have given these chunks and not chunk 0.

Lock order: a chunk's lock is taken first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from shardwell.errors import ArgumentError, StorageError
from shardwell.placement.ranges import NumberRanges, flat, paired, united
from shardwell.specs.names import check_name
from shardwell.specs.parameter import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server.shard.parameter.ledger import (
    POSITION_MAX,
    Counted,
    Dataset,
    Event,
    Holder,
    Ledger,
    Way,
)
from shardwell_server.shard.step_tracker import ParameterSeat, StepTracker
from shardwell_server.store.contract import ParameterStorage

LENGTH_MAX = 2**48
BATCH_SIZE_MAX = 2**24
BATCH_COUNT_MAX = 1024
_RANGE_COUNT_MAX = 256
_DATASET_COUNT_MAX = 64
_GAVE_COUNT_MAX = 1024
_ACCOUNT_SIZE_MAX_BYTES = 2**19


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
        self._noted: tuple[Ledger, Counted] | None = None
        """The last count that was noted, until it counts."""
        self._ways: dict[tuple[str, int], Way] = {}
        """By dataset and session: how a worker of a fixed crew was dealt its last batches."""
        self._gave: dict[Holder, Event] = {}
        """The last gradient of each elastic member that counted in a chunk other than the first."""

    # Gradients.

    def note(
        self, index: int, seat: ParameterSeat, step: int, samples: types_pb2.StepSamples
    ) -> Counted | None:
        """Notes the samples of a gradient that a chunk is about to count; its lock is held.

        Returns what `counted` is to take once it has. ArgumentError: they are not the worker's.
        """
        ranges = paired(samples.ranges[: 2 * _RANGE_COUNT_MAX + 1], POSITION_MAX)
        holder = Holder(seat.worker_id, seat.tenure.number)
        with self._lock:
            if index or not self.has_first_chunk:
                if self._leases:
                    self._note_gave(holder, step, samples.data, ranges)
                return None
            ledger = self._ledger(samples.data)
            ledger.advance(self._version)
            ledger.check_count(holder, ranges)
            order = self._tracker.records[0].contribution_count
            found = Counted(step, order, holder, ranges)
            if self._noted is not None:  # a full disk kept its gradient from counting
                self._noted[0].note_void(self._noted[1])
            ledger.note_count(found)
            self._noted = ledger, found
            return found

    def counted(self, samples: types_pb2.StepSamples, found: Counted) -> None:
        """Takes samples whose gradient chunk 0 has counted; its lock is held."""
        with self._lock:
            self._ledgers[samples.data].count(found)
            self._noted = None

    def _note_gave(self, holder: Holder, step: int, data: str, ranges: NumberRanges) -> None:
        known = self._gave.get(holder)
        if known is not None and known["step"] >= step:
            return
        event = {
            "kind": "gave",
            "data": check_name("dataset", data),
            **holder._asdict(),
            "step": step,
            "ranges": ranges,
        }
        self._log(event)
        self._take_gave(holder, event)

    def _take_gave(self, holder: Holder, event: Event) -> None:
        self._gave.pop(holder, None)
        self._gave[holder] = event
        while len(self._gave) > _GAVE_COUNT_MAX:
            del self._gave[next(iter(self._gave))]

    # Dealing.

    def deal(
        self, request: pb.DealSamplesRequest, rank: tuple[int, int], living: Mapping[int, str]
    ) -> Any:
        """Deals batches to a worker; chunk 0's lock is held.

        `living` are the connected workers, by their sessions.
        """
        data = _dataset(request.dataset)
        _check("batch_size", request.batch_size, BATCH_SIZE_MAX)
        _check("batch_count", request.batch_count, BATCH_COUNT_MAX, least=1 - self._leases)
        limit = min(request.limit, POSITION_MAX)
        holder = Holder(request.worker_id, request.tenure)
        with self._lock:
            ledger = self._ledgers.get(data.name) or self._begin(data)
            ledger.check(data)
            ledger.advance(self._version)
            response = pb.DealSamplesResponse()
            if self._leases:
                for each in self._over(ledger):
                    if self._is_whole:
                        self._settle(ledger, each, None)
                    else:
                        response.unsettled.add(worker_id=each.worker_id, tenure=each.tenure)
                batches = ledger.lease(
                    holder,
                    request.batch_count,
                    limit,
                    request.batch_size,
                    drops_last=request.drop_last,
                )
            else:
                again = ledger.counted_by(holder.worker_id, request.step)
                response.again.ranges.extend(flat(again))
                way = Way(rank[1], request.batch_size, request.drop_last)
                own = [each for each, name in living.items() if name == holder.worker_id]
                ways = {of: had for of, had in self._ways.items() if of[1] in living}
                others = [
                    had for of, had in ways.items() if of[0] == data.name and of[1] not in own
                ]
                batches = ledger.planned(
                    rank[0],
                    way,
                    request.batch_count,
                    limit,
                    united(again, paired(request.ranges, POSITION_MAX)),
                    is_alone=all(had == way for had in others),
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
        return [each for each in ledger.out if self._crew.member(*each) is None]

    def give_back(self, request: pb.DealSamplesRequest) -> None:
        """Takes positions back; chunk 0's lock is held."""
        holder = Holder(request.worker_id, request.tenure)
        ranges = paired(request.ranges, POSITION_MAX)
        with self._lock:
            ledger = self._ledger(request.dataset.name)
            ledger.advance(self._version)
            if request.is_partial:
                ledger.end_partly(holder, request.step, ranges)
            else:
                ledger.give_back(holder, ranges)
            self._compact()

    def last_given(self, holder: Holder) -> tuple[int, NumberRanges]:
        """Returns the step and the samples of the last gradient of an elastic member."""
        with self._lock:
            event = self._gave.get(holder)
            return (0, ()) if event is None else (event["step"], event["ranges"])

    def settle(self, request: pb.DealSamplesRequest) -> None:
        """Frees positions of a tenure that is over on all shards; chunk 0's lock is held."""
        holder = Holder(request.worker_id, request.tenure)
        ranges = paired(request.ranges, POSITION_MAX)
        with self._lock:
            for ledger in self._ledgers.values():
                ledger.advance(self._version)
                if holder in self._over(ledger):
                    self._settle(ledger, holder, (request.step, ranges))
            self._compact()

    def _settle(
        self, ledger: Ledger, holder: Holder, others: tuple[int, NumberRanges] | None
    ) -> None:
        own = self._gave.get(holder)
        given: list[tuple[int, NumberRanges]] = [] if others is None else [others]
        if own is not None and own["data"] == ledger.data.name:
            given.append((own["step"], own["ranges"]))
        step = max((step for step, _ in given), default=0)
        ledger.settle(holder, step, united(*(ranges for _, ranges in given)))

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
            return json.dumps(found).encode() if found else b""

    def load(self, account: bytes) -> None:
        """Goes on with the accounts of a checkpoint; nothing has been dealt yet."""
        with self._lock:
            made = {}
            for name, state in _read_account(account).items():
                try:
                    event = {"kind": "state", "data": check_name("dataset", name), **state}
                    made[name] = event, self._restored(event)
                except (KeyError, TypeError, ValueError) as error:
                    raise ArgumentError(
                        f"samples {name!r} of the checkpoint can't be read ({error!r}); use the "
                        "version that saved it"
                    ) from None
            for event, _ in made.values():
                self._log(event)
            self._ledgers = {name: ledger for name, (_, ledger) in made.items()}

    # Status.

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

    def _ledger(self, name: str) -> Ledger:
        found = self._ledgers.get(name)
        if found is None:
            raise ArgumentError(
                f"parameter {self._spec.name!r} has no samples {name!r}; ask batches() for them",
                parameter=self._spec.name,
            )
        return found

    def _log(self, event: Event) -> None:
        self._storage.log_samples(event)

    def _compact(self) -> None:
        self._storage.compact_samples(self._events)

    def _events(self) -> list[Event]:
        events = [event for ledger in self._ledgers.values() for event in ledger.events()]
        return [*events, *self._gave.values()]

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
        for event in self._storage.sample_events():
            try:
                if event["kind"] == "gave":
                    ranges = united(event["ranges"])
                    holder = Holder(event["worker_id"], event["tenure"])
                    self._take_gave(holder, {**event, "ranges": ranges})
                elif event["kind"] == "state":
                    self._ledgers[event["data"]] = self._restored(event)
                else:
                    self._ledgers[event["data"]].restore(event)
            except (KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"parameter {self._spec.name!r}: its samples hold {event!r}, which this "
                    f"version can't read ({error!r}); run the version that wrote it, or restore a "
                    "copy",
                    parameter=self._spec.name,
                ) from None
        if self._ledgers:
            record = self._tracker.records[0]
            for ledger in self._ledgers.values():
                ledger.recovered(record.version, record.contribution_count)


def _dataset(given: pb.Dataset) -> Dataset:
    _check("length", given.length, LENGTH_MAX)
    return Dataset(name=given.name, length=given.length, seed=given.seed, shuffles=given.shuffles)


def _check(what: str, value: int, most: int, *, least: int = 1) -> None:
    if not least <= value <= most:
        raise ArgumentError(f"{what} of samples must be {least} to {most}; got {value}")


def _read_account(account: bytes) -> dict[str, Any]:
    try:
        found = json.loads(account) if len(account) <= _ACCOUNT_SIZE_MAX_BYTES else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ArgumentError(
            f"the account of samples in a checkpoint is JSON of at most {_ACCOUNT_SIZE_MAX_BYTES} "
            f"bytes; got {len(account)} bytes that are none"
        )
    return found
