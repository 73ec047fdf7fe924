"""One call's rows of a table: parts of gradients in, each step counted when it ends; rows out.

A step closes as a whole, and its parts are counted in their order under one lock of the table, so
no other thread counts some of them beside the stream's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.numerics.codec import Bytes
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell_server.services.calls import Call, Handling, Needs
from shardwell_server.services.step_stream import Due, Request, StepStream
from shardwell_server.shard.deadline import deadline_of, until
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table.slice import TableSlice

_SHORT_ELEMENT_COUNT = 64 * 1024
"""Values of rows that are read or updated in less time than a thread takes to be woken."""
_SHORT_BYTES_MAX = 64 * 1024
"""Of a message for which that holds: of many ids of narrow rows each costs more than its values."""


class RowStream(StepStream[TableSlice]):
    """The handler of ExchangeRows is its `exchange`.

    Args:
        shard: The shard, whose tables they are.
        call: The call.
    """

    _kind = "table"

    def __init__(self, shard: Shard, call: Call) -> None:
        super().__init__(shard, call, _parsed)
        self._counted = pb.RowsCounted()
        """Parts of the step that has come last."""
        self._counted_context = 0

    def _opened(self) -> bool:
        """Prepares answers; a table in memory is short unless something waits for a disk."""
        self._slice.register.check_incarnation(self._opening.incarnation)
        self._counted_context = checksum.rows_counted_context(self._opening.table)
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
            or gradient.trace_parent  # exporting spans may take any time
            or not table.is_free
        ):
            yield Needs.LONG
        self._recorder.frame(received=payload.size)
        deadline = deadline_of(self._shard, self._call, asked.wait_timeout_ms / 1000)
        if request.HasField("fetch"):
            self._pending.append(Due(partial(table.rows_message, request.fetch, payload, deadline)))
        if not has_gradient:
            if payload.size and not request.HasField("fetch"):
                raise CorruptChunkError(
                    "a message has a payload and neither `gradient` nor `fetch`; send it again"
                )
            return
        if self._is_between_steps or self._counted.step != gradient.step:
            self._counted = pb.RowsCounted(step=gradient.step)
        self._is_between_steps = False
        contributor = self._contributor or self._bind()
        if gradient.trace_parent:
            self._recorder.begun(gradient.trace_parent, gradient.step)
        is_new = yield from until(table.contribute, contributor, gradient, payload, deadline)
        self._counted.counted_part_count += is_new
        self._counted.duplicate_part_count += not is_new
        self._counted.superseded_part_count += len(contributor.superseded)
        contributor.superseded.clear()
        self._is_between_steps = gradient.end_of_step
        if gradient.end_of_step:
            response = pb.ExchangeRowsResponse(counted=self._counted, version=table.version)
            response.counted.crc32c = checksum.rows_counted(
                self._counted_context, response.counted, response.version
            )
            self._pending.append(Due(response.SerializeToString))


def _parsed(message: bytes) -> Sequence[Request]:
    """The one request of a message."""
    return ((*framing.parse(pb.ExchangeRowsRequest, message), len(message)),)
