"""One call's rows of a table: parts of gradients in, each step counted when it ends; rows out.

A step closes as a whole, and its parts are counted in their order under one lock of the table, so
no other thread counts some of them beside the stream's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.numerics.codec import Bytes
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell_server.services.calls import Call, Handling, Needs
from shardwell_server.services.step_stream import Due, Request, StepStream, moved, names_that_fit
from shardwell_server.shard.deadline import deadline_of, until
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table.slice import TableSlice
from shardwell_server.shard.table.step_tracker import TableSeat

_SHORT_ELEMENT_COUNT = 64 * 1024
"""Values of rows that are read or updated in less time than a thread takes to wake."""
_SHORT_BYTES_MAX = 64 * 1024


class RowStream(StepStream[TableSlice]):
    """The handler of ExchangeRows, by its `exchange`."""

    _kind = "table"

    def __init__(self, shard: Shard, call: Call) -> None:
        super().__init__(shard, call, _parsed)
        self._counted = pb.RowsCounted()
        self._counted_context = 0
        self._superseded: list[int] = []
        self._ended: _Ended | None = None
        """The last step, if it has ended and no fetch has followed it, with elastic members."""

    def _opened(self) -> bool:
        self._slice.register.check_incarnation(self._opening.incarnation)
        self._counted_context = checksum.context(checksum.Kind.ROWS_COUNTED, self._opening.table)
        self._ended = None
        return self._slice.is_in_memory and self._shard.config.durability.is_process

    def _serve(self, request: pb.ExchangeRowsRequest, payload: Bytes) -> Handling:
        table, has_gradient = self._slice, request.HasField("gradient")
        if has_gradient and request.HasField("fetch"):
            raise ArgumentError("a message has `gradient` or `fetch`, not both; send two")
        gradient = request.gradient
        asked = gradient if has_gradient else request.fetch
        if self._call.is_short and (
            not self._may_be_short
            or payload.size > _SHORT_BYTES_MAX
            or asked.rows.row_count * table.spec.dim > _SHORT_ELEMENT_COUNT
            or not table.is_free
        ):
            yield Needs.LONG
        moved(self._shard, self._call, received=payload.size)
        deadline = deadline_of(self._shard, self._call, asked.wait_timeout_ms / 1000)
        if request.HasField("fetch"):
            rows = partial(table.rows_message, request.fetch, payload, deadline)
            self._pending.append(Due(self._after_step(request.fetch, rows)))
        if not has_gradient:
            if payload.size and not request.HasField("fetch"):
                raise CorruptChunkError(
                    "a message has a payload and neither `gradient` nor `fetch`; send it again"
                )
            return
        if self._is_between_steps or self._counted.step != gradient.step:
            self._counted, self._superseded = pb.RowsCounted(step=gradient.step), []
        self._is_between_steps = False
        contributor = self._contributor or self._bind()
        is_new = yield from until(table.contribute, contributor, gradient, payload, deadline)
        is_late = gradient.part_index in contributor.late
        self._counted.counted_part_count += is_new
        self._counted.duplicate_part_count += not is_new and not is_late
        self._counted.superseded_part_count += len(contributor.superseded)
        self._superseded += contributor.superseded
        contributor.superseded.clear()
        self._is_between_steps = gradient.end_of_step
        if gradient.end_of_step:
            response = pb.ExchangeRowsResponse(counted=self._counted, version=table.version)
            if table.spec.has_open_sets:
                late, contributor.late = sorted(contributor.late), set()
                may_have, contributor.may_have_counted = contributor.may_have_counted, False
                self._ended = _Ended(
                    gradient.step,
                    late,
                    may_have,
                    self._superseded,
                    contributor.is_over,
                    contributor.seat,
                )
                response.outcome.CopyFrom(_outcome(table, self._ended))
            response.counted.crc32c = checksum.rows_counted(
                self._counted_context, response.counted, response.version
            )
            self._pending.append(Due(response.SerializeToString))

    def _after_step(self, fetch: pb.RowsFetch, rows: Callable[..., bytes]) -> Callable[[], bytes]:
        ended = self._ended
        if ended is None or not fetch.unless_late:
            return rows
        self._ended = ended._replace(is_sent=True)
        outcome = None if ended.is_sent else partial(_outcome, self._slice, ended)
        return partial(rows, min_version=0 if ended.late else None, outcome=outcome)


class _Ended(NamedTuple):
    step: int
    late: list[int]
    may_have_counted: bool
    superseded: list[int]
    is_over: bool
    seat: TableSeat | None
    is_sent: bool = False


def _outcome(table: TableSlice, ended: _Ended) -> pb.RowsOutcome:
    found = pb.RowsOutcome(
        step=ended.step,
        late_part_indexes=ended.late,
        tenure_is_over=ended.is_over,
        version=table.version,
        contributor_ids=names_that_fit(table.contributors(ended.step)),
        is_draining=ended.seat is not None and ended.seat.is_draining,
        superseded_part_indexes=ended.superseded,
        late_may_have_counted=ended.may_have_counted,
    )
    found.crc32c = checksum.rows_outcome(
        checksum.context(checksum.Kind.ROWS_OUTCOME, table.spec.name), found
    )
    return found


def _parsed(message: bytes) -> Sequence[Request]:
    return ((*framing.parse(pb.ExchangeRowsRequest, message), len(message)),)
