"""One table on this shard: parts of gradients counted in their turn, steps that close, rows out.

The tracker decides, rows.py moves bytes, the storage keeps them; here threads meet. A thread that
changes anything holds `changed`, and waits for other workers there; a reader does not need it. A
part is decoded and checked before it is taken.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from shardwell.errors import ArgumentError, StorageError
from shardwell.numerics.codec import Bytes, NonFiniteValueError
from shardwell.numerics.update_rules import SAFE_MAGNITUDE
from shardwell.numerics.weighted_mean import shift_for
from shardwell.process.spans import ALL_CHUNKS, now_ns
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2 as pb
from shardwell.v1.trace_pb2 import (
    SPAN_KIND_ADD,
    SPAN_KIND_ENCODE_WEIGHTS,
    SPAN_KIND_UPDATE,
)
from shardwell.wire import checksum
from shardwell.wire.rows import RowCodec
from shardwell_server.shard.crews import Contributor
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.errors import (
    await_version,
    diverged_row,
    non_finite_row,
    state_overflow,
)
from shardwell_server.shard.quotas import OwnedBytes
from shardwell_server.shard.sessions import Attendance
from shardwell_server.shard.slice import ShardSlice, SharedParts
from shardwell_server.shard.step_tracker import Decision
from shardwell_server.shard.table.loading import TableLoading
from shardwell_server.shard.table.parts import Part, PartReader
from shardwell_server.shard.table.rows import NonFiniteSumError
from shardwell_server.shard.table.scan import TableScan
from shardwell_server.shard.table.state import TableState
from shardwell_server.shard.table.step_tracker import TableSeat
from shardwell_server.store.contract import TableRecord, TableStorage

_ENDING = "end the step with what is counted of it"
_CLOSED_SET_COUNT_MAX = 16
_EVICT_ROW_COUNT = 2**20
"""Places that are looked at before the lock is free for others."""


class TableSlice(ShardSlice[TableSeat, pb.OpenTableResponse, pb.TableStatus]):
    """The slice of one table. All methods may be called from any thread.

    If an earlier process left the storage, `go_on` comes before anything else.
    """

    kind = "table"

    def __init__(
        self,
        spec: TableSpec,
        storage: TableStorage,
        stored_bytes: OwnedBytes,
        shared: SharedParts,
    ) -> None:
        state = TableState(spec, storage, stored_bytes, shared)
        super().__init__(spec.name, state, shared)
        self.spec: TableSpec = spec
        self.storage: TableStorage = storage
        self.layout = state.layout
        self.register = state.register
        self._spans = state.spans
        self._sums = spec.sums_gradients
        self._draws_incarnation = state.shard_index == 0
        self._codec = RowCodec.of(spec)
        self._answer_context = checksum.context(checksum.Kind.ROWS_ANSWER, spec.name)
        self._reader = PartReader(spec, self._codec, state.placement, state.shard_index)
        self._changed = state.changed
        self._lock = state.lock
        self._tracker = state.tracker
        self._places = state.places
        self._rows = state.rows
        self._closed_sets: dict[int, list[str]] = {}
        """By step: the elastic members in the sets of the last steps that closed."""
        self.scan = TableScan(state)
        self.loading = TableLoading(state)
        self._sample_counts: dict[int, tuple[int, int]] = {}
        self._counted_row_count = 0
        self._duplicate_part_count = 0
        self._late_part_count = 0

    def go_on(self) -> None:
        """Closes a step that was being closed, or awaits no worker; damage is raised by reads."""
        with self._lock, contextlib.suppress(StorageError):
            self.loading.drop_unfinished()
            self._settle()

    @property
    def is_in_memory(self) -> bool:
        """True if nothing about its rows waits for a disk."""
        return not self.storage.undo_bytes

    @property
    def is_free(self) -> bool:
        """True if no call changes anything now, and a part changes no rows but its own.

        The last part of a step of several workers closes it, which takes as long as all its rows.
        """
        return not self._sums and not self._lock.locked()

    @property
    def rows_per_message_max(self) -> int:
        return self._codec.row_count_max

    @property
    def version(self) -> int:
        """The steps that have closed; asynchronous: that were counted."""
        return self._tracker.version

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return self.register.rates.at(self.version)

    # Taking part.

    def _meet_incarnation(self, incarnation: int) -> int:
        if self._draws_incarnation and not (incarnation or self.register.incarnation):
            incarnation = secrets.randbits(63) + 1
        if incarnation and not (self.register.incarnation and self._has_begun):
            self.register.note_incarnation(incarnation)
        self.register.check_incarnation(incarnation)
        return self.register.incarnation

    @property
    def _has_begun(self) -> bool:
        has_rows = self._places.row_count > 0 or self.loading.is_under_way
        return has_rows or self.register.has_counted

    def _opened(self, worker_id: str) -> pb.OpenTableResponse:
        step, part_count = self._tracker.next_part(worker_id)
        return pb.OpenTableResponse(
            rows_per_message_max=self.rows_per_message_max,
            version=self.version,
            next_step=step,
            counted_part_count=part_count,
            row_count=self._places.row_count,
            begun=self._has_begun,
        )

    def _wake_all(self) -> None:
        self._changed.notify_all()

    # Gradients in.

    def contribute(
        self,
        contributor: Contributor[TableSeat],
        header: pb.RowGradients,
        payload: Bytes,
        deadline: RequestDeadline,
    ) -> bool:
        """Counts a part of a step, once; blocks while an earlier step is open.

        Everything is checked before anything is changed; the worker's seat is taken only then.
        Returns False if the part had been counted before, or is late: `contributor.late` has those
        parts.
        """
        begin_ns = now_ns()
        part = self._reader.open(contributor.worker_id, header, payload)
        with self._lock:
            if self.storage.record.is_loading:
                self.loading.check_committed()
            seat = contributor.seat
            if seat is None:
                seat = contributor.seat = self._seat(contributor)
            self._crew.check(contributor)  # another one may take the seat over at any time
            decision = self._decide(contributor, header)
            if decision is Decision.WAIT:
                self._settle()
                decision = self._decide(contributor, header)
            if decision is Decision.WAIT:
                await_version(self._tracker, header.step, self._changed, deadline)
            if decision in (Decision.LATE, Decision.UNKNOWN):
                unknown = decision is Decision.UNKNOWN
                contributor.note_late(header.part_index, may_have_counted=unknown)
                self._late_part_count += 1
                return False
            if decision is not Decision.COUNT:
                self._duplicate_part_count += not header.abandons
                if decision is Decision.SUPERSEDED:
                    contributor.superseded.append(header.part_index)
                return False
            assert seat is not None
            self._check_sample_count(seat, header)
            version = self.storage.record.version
            begun_s = self._count(seat, part)
            self._counted_row_count += part.ids.size
            self._finish_step()
            closed = self.storage.record.version != version
            end_ns = self._spans.add(
                SPAN_KIND_UPDATE if closed else SPAN_KIND_ADD,
                self.spec.name,
                header.step,
                header.part_index,
                contributor.worker_id,
                begin_ns,
            )
            seat.contributed(contributor.session, end_ns / 1e9, begun_s)
            return True

    def _decide(self, contributor: Contributor[TableSeat], header: pb.RowGradients) -> Decision:
        seat, step = contributor.seat, header.step
        if seat is None and header.abandons:
            return Decision.LATE
        if seat is None:
            found = self.contributors(step) if step >= self.version else self._closed_sets.get(step)
            return self._tracker.decide_past(
                contributor.worker_id, step, header.part_index, header.rows.crc32c, found
            )
        if header.abandons:
            return self._tracker.decide_end(seat, header.step)
        return self._tracker.decide(
            seat,
            header.step,
            header.part_index,
            ends_step=header.end_of_step,
            crc32c=header.rows.crc32c,
        )

    def _check_sample_count(self, seat: TableSeat, header: pb.RowGradients) -> None:
        """Refuses another weight in the middle of a step, as far as this process remembers."""
        if header.abandons:
            return
        step, found = self._sample_counts.get(seat.index, (-1, 0))
        if header.part_index and step == header.step and found != header.sample_count:
            raise ArgumentError(
                f"sample_count must be the same in all parts of a step; step {step} of "
                f"{seat.worker_id!r} began with {found}, part {header.part_index} has "
                f"{header.sample_count}"
            )
        self._sample_counts[seat.index] = (header.step, header.sample_count)

    def _count(self, seat: TableSeat, part: Part) -> float | None:
        """Counts a part; the lock is held. Returns when its step began; None: with this part."""
        ids, gradients, header, peak = part
        if not self.spec.allow_non_finite and not (
            peak + self._rows.decay_peak(ids) < SAFE_MAGNITUDE
        ):
            self._check_state(seat, part)
        record, ends = self.storage.record, header.end_of_step
        done = 0 if header.abandons else header.part_index + 1
        position = self._tracker.following(seat, ends_step=ends)
        stored = seat.stored_position(position)
        if not self._sums:
            following = record._replace(version=record.version + ends)
        else:
            total = record.sample_total
            following = record._replace(
                contribution_count=record.contribution_count + ends,
                sample_total=total + (done == 1) * header.sample_count,
                # As long as nothing weighs anything, all sums are 0, whatever their scale.
                shift=record.shift
                if total
                else shift_for(header.sample_count, self.spec.step_size_max),
                is_closing=self._tracker.has_open_sets and ends and self._tracker.completes(seat),
            )
        if not ids.size or (self._tracker.is_sync and not header.sample_count):
            self._rows.settle(following, stored)  # of no weight: as if it had no rows
        elif not self._sums:
            rate = self.register.rates.at(record.version)
            self._rows.apply(ids, gradients, rate, following, stored)
        else:
            factor = math.ldexp(float(header.sample_count), -following.shift)
            try:
                self._rows.add(ids, gradients, factor, following, stored)
            except NonFiniteSumError as error:
                place = error.cell.row * self.spec.dim + error.cell.column
                what = f"sum of step {header.step} with the gradient of {seat.worker_id!r}"
                advice = f"scale gradients down, and {_ENDING}"
                raise non_finite_row(self.spec, ids, place, what, advice) from None
        self._tracker.record(seat, position, None if header.abandons else header.rows.crc32c)
        self._tracker.is_closing = following.is_closing
        is_sync, version = self._tracker.is_sync, self._tracker.version
        begun_s = self.times.contributed(version) if is_sync else None
        self._catch_up()
        return begun_s

    def _check_state(self, seat: TableSeat, part: Part) -> None:
        """Refuses a gradient that would take optimizer state beyond float32, for good.

        In a mean with others it does so no more than alone.
        """
        if self._tracker.is_sync and not part.header.sample_count:
            return
        rate = self.register.rates.at(self.storage.record.version)
        found = self._rows.state_overflow(part.ids, part.gradients, rate)
        if found is not None:
            name, place = found
            raise state_overflow(
                f"table {self.spec.name!r}",
                f"row id {part.ids[place.row]}, column {place.column}",
                f"gradient of {seat.worker_id!r}",
                name,
                too_large="gradient" if part.peak >= SAFE_MAGNITUDE else "weight decay",
                ending=_ENDING,
                element_index=place.row * self.spec.dim + place.column,
                table=self.spec.name,
            )

    def _catch_up(self) -> None:
        while self._tracker.version < self.storage.record.version:
            if self._tracker.is_sync:
                self.times.closed(self._tracker.version)
            if self._tracker.has_open_sets:
                step = self._tracker.version
                self._closed_sets[step] = sorted(self._tracker.contributors(step))
                self._closed_sets.pop(step - _CLOSED_SET_COUNT_MAX, None)
            self._tracker.close()
            if self.scan.snapshots.pending:
                self.scan.begin_snapshots()
            self._changed.notify_all()

    def _finish_step(self) -> None:
        """Closes the open step if all workers have ended it; the caller holds `changed`."""
        record = self.storage.record
        if self._tracker.is_decided(record):
            rate = self.register.rates.at(record.version)
            try:
                self._rows.close(
                    record.sample_total,
                    record.shift,
                    self.spec.rate_of_step(rate, record.contribution_count),
                    TableRecord(record.row_used, record.version + 1),
                )
            except BaseException:
                self._changed.notify_all()  # waiting calls try, or have the error, too
                raise
            self._catch_up()

    # Steps that may close without a worker.

    def _settle_all(self) -> None:
        if self._tracker.has_open_sets:
            with self._lock:
                self._settle()
                self._changed.notify_all()  # who waits with a tenure that is over

    def _settle(self) -> None:
        """Decides the open step's set without a contribution, if it is complete now; and closes it.

        The caller holds `changed`. After a failure to write, the step is open still, or closing.
        """
        if self.storage.record.is_loading:
            return
        self._come_to_rest()
        if not (self._tracker.has_open_sets and self._tracker.is_complete):
            self._finish_step()
            return
        begin_ns, step = now_ns(), self.version
        self._rows.settle(self.storage.record._replace(is_closing=True), None)
        self._tracker.is_closing = True
        self._finish_step()
        self._spans.add(SPAN_KIND_UPDATE, self.spec.name, step, ALL_CHUNKS, "", begin_ns)

    def _come_to_rest(self) -> None:
        """Ends the open step of members whose tenure is over, as if each had abandoned the rest.

        The lock is held, so nothing else is being counted.
        """
        for seat in self._tracker.cut_off:
            record, ended = self.storage.record, self._tracker.following(seat, ends_step=True)
            self.register.cut_off(seat)
            following = record._replace(contribution_count=record.contribution_count + 1)
            self._rows.settle(following, seat.stored_position(ended))
            self._tracker.record(seat, ended)

    def contributors(self, step: int) -> list[str]:
        """Returns the sorted workers in an elastic step's set; empty: it is not known any more."""
        if step == self.version:
            return sorted(self._tracker.contributors(step))
        return self._closed_sets.get(step, [])

    # Rows out.

    def rows_message(
        self,
        fetch: pb.RowsFetch,
        payload: Bytes,
        deadline: RequestDeadline,
        *,
        min_version: int | None = None,
        outcome: Callable[[], pb.RowsOutcome] | None = None,
    ) -> bytes:
        """Encodes the rows of a fetch as a sealed message, once the table has `min_version`.

        `min_version` is in place of the fetch's own; `outcome` is called once the rows are read.
        """
        ids = self._reader.open_ids(fetch, payload)
        self.loading.check_committed()
        self._wait_for(fetch.min_version if min_version is None else min_version, deadline)
        begin_ns = now_ns()
        values = np.empty((ids.size, self.spec.dim), np.float32)
        max_version = fetch.max_version if fetch.HasField("max_version") else None
        version = self._rows.read(ids, values, max_version)
        header = pb.ExchangeRowsResponse(version=version)
        if outcome is not None:
            header.outcome.CopyFrom(outcome())
        start = checksum.rows_answer(self._answer_context, ids, version)
        try:
            message = self._codec.encode(header, header.rows, None, values, start=start)
        except NonFiniteValueError as error:
            raise diverged_row(self.spec, ids, error.index, version) from None
        self._spans.add(
            SPAN_KIND_ENCODE_WEIGHTS, self.spec.name, version - 1, ALL_CHUNKS, "", begin_ns
        )
        return message

    def _wait_for(self, version: int, deadline: RequestDeadline) -> None:
        if self._tracker.is_sync and self.version < version:
            with self._lock:
                self._settle()
                if self.version < version:
                    await_version(self._tracker, version, self._changed, deadline)

    # Keeping.

    def evict(self, older_than_step: int) -> int:
        """Removes rows whose last gradient joined an earlier step; returns how many."""
        count = start = 0
        while start < self._places.used:
            with self._lock:
                self.loading.check_committed()
                older = older_than_step
                if self._tracker.is_sync:  # with one worker, the open step's rows have no sum
                    older = min(older, self.version)
                count += self._rows.evict(start, start + _EVICT_ROW_COUNT, older)
            start += _EVICT_ROW_COUNT
        self.make_durable()
        return count

    def checks(self) -> Iterator[Callable[[], None]]:
        batch = self.layout.rows_per_change_max
        for start in range(0, self._places.used, batch):
            yield functools.partial(self._rows.verify, start, start + batch)

    def make_image(self, is_stopping: Callable[[], bool]) -> None:
        self.storage.make_image(is_stopping)

    # The rest.

    def change_learning_rate(self, from_step: int | None, learning_rate: float) -> None:
        with self._lock:
            self.loading.check_committed()
            self.register.change_learning_rate(from_step, learning_rate)

    def describe(
        self, name_count_max: int, attending: Mapping[str, Attendance] | None = None
    ) -> pb.TableStatus:
        load_id = self.register.load_id  # before `loading`, so that no load looks finished too soon
        version = self.version
        status = pb.TableStatus(
            spec=self.spec.to_proto(),
            row_count=self._places.row_count,
            row_capacity=self.storage.reserved_row_count,
            stored_bytes=self.storage.reserved_row_count * self.layout.row_size_bytes,
            version=version,
            counted_row_count=self._counted_row_count,
            duplicate_part_count=self._duplicate_part_count,
            late_part_count=self._late_part_count,
            learning_rate=self.learning_rate,
            loading=self.loading.is_under_way,
            load_id=load_id,
            incarnation=self.register.incarnation,
        )
        self._add_members(status, version, name_count_max, attending)
        return status
