"""TableService: the wire contract of table.proto, over the tables of one Shard.

As parameter_service.py: messages with payloads are read and written as bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from shardwell.errors import (
    ArgumentError,
    CorruptChunkError,
    DivergedError,
    NonFiniteError,
)
from shardwell.numerics.codec import Bytes
from shardwell.specs.optimizers import check_learning_rate
from shardwell.specs.parameter import STEP_MAX
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.row_state import RowState, RowStateCodec, empty_state
from shardwell.wire.rows import RowCodec
from shardwell_server.access.rights import Right
from shardwell_server.services.calls import Call, Handling, Needs
from shardwell_server.services.parameter_service import STATUS_NAME_COUNT_MAX
from shardwell_server.services.row_stream import RowStream
from shardwell_server.services.step_stream import (
    change_learning_rate,
    joined,
    moved,
    named,
    opened,
)
from shardwell_server.shard.deadline import RequestDeadline, deadline_of, until, wanted
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table.slice import TableSlice

_LOG = logging.getLogger("shardwell_server")
_CONTENT = pb.ScanRowsRequest.Content
_CONTENTS = (_CONTENT.CONTENT_IDS, _CONTENT.CONTENT_VALUES, _CONTENT.CONTENT_STATE)


class TableService:
    """Handlers, one method an RPC."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def open_table(self, request: pb.OpenTableRequest, call: Call) -> Any:
        return joined("table", self._shard, request, call, TableSpec)

    def exchange_rows(self, call: Call) -> Handling:
        return RowStream(self._shard, call).exchange()

    def scan_rows(self, request: pb.ScanRowsRequest, call: Call) -> Handling:
        table: TableSlice = named("table", self._shard, request, call, Right.READ)
        if request.content not in _CONTENTS:
            raise ArgumentError(
                f"content must be CONTENT_IDS, CONTENT_VALUES or CONTENT_STATE; got "
                f"{request.content}"
            )
        if request.content == _CONTENT.CONTENT_STATE:
            yield from state_messages(
                table,
                request.version,
                deadline_of(self._shard, call, request.wait_timeout_ms / 1000),
                wanted(self._shard, call),
                lambda size: moved(self._shard, call, sent=size),
            )
            self._shard.copied_s = time.monotonic()
            return
        table.loading.check_committed()
        codec = RowCodec.of_scans(table.spec)
        scanned = checksum.context(checksum.Kind.ROWS_SCAN, table.spec.name, request.content)
        header = pb.ScanRowsResponse(version=table.version, learning_rate=table.learning_rate)
        start = checksum.rows_scan(scanned, header)
        yield codec.encode(header, header.rows, None, None, start=start)
        for ids, values in table.scan.values(
            with_values=request.content == _CONTENT.CONTENT_VALUES
        ):
            header = pb.ScanRowsResponse(version=table.version)
            start = checksum.rows_scan(scanned, header)
            message = codec.encode(header, header.rows, ids, values, start=start)
            table.make_durable()  # no client goes on from what could still be lost
            moved(self._shard, call, sent=len(message))
            yield message

    def load_rows(self, call: Call) -> Handling:
        loading: _Load | None = None
        message = yield Needs.NEXT_STEP
        while message is not None:
            request, payload = framing.parse(pb.LoadRowsRequest, message)
            moved(self._shard, call, received=payload.size)
            if loading is None:
                table = opened("table", self._shard, request, call, Right.CREATE)
                loading = _Load(table, request)
            elif request.HasField("open"):
                raise ArgumentError("only the first message of a stream has `open`")
            elif loading.is_finished:
                raise ArgumentError("a message came after the one with `finish`")
            loading.take(request, payload)
            message = yield Needs.NEXT
        if loading is None:
            raise ArgumentError("the stream has no message")
        loading.table.make_durable()
        name = loading.table.spec.name
        call.note("restored", kind="table", name=name, rows=loading.row_count)
        _LOG.info("rows loaded", extra={"rows": loading.row_count})
        return pb.LoadRowsResponse(row_count=loading.row_count)

    def evict_rows(self, request: pb.EvictRowsRequest, call: Call) -> pb.EvictRowsResponse:
        table: TableSlice = named("table", self._shard, request, call, Right.ADMIN)
        count = table.evict(request.older_than_step)
        call.note("evicted", kind="table", name=request.table, rows=count)
        evicted = {"rows": count, "older_than_step": request.older_than_step}
        _LOG.info("rows evicted", extra={"table": request.table, **evicted})
        return pb.EvictRowsResponse(evicted_row_count=count)

    def set_table_learning_rate(
        self, request: pb.SetTableLearningRateRequest, call: Call
    ) -> pb.SetTableLearningRateResponse:
        change_learning_rate("table", self._shard, request, call)
        return pb.SetTableLearningRateResponse()

    def get_table_status(
        self, request: pb.GetTableStatusRequest, call: Call
    ) -> pb.GetTableStatusResponse:
        self._shard.check_identity(request.shard)
        if request.table:
            call.check(Right.READ, "table", request.table)
            self._shard.tables.check_opened(request.table, request.incarnation)
            found = self._shard.tables.find(request.table)
            tables = [self._shard.tables.get(request.table) if found is None else found]
        else:
            tables = [t for t in self._shard.tables.all() if call.principal.best(t.spec.name)]
        name_count_max = max(STATUS_NAME_COUNT_MAX // max(len(tables), 1), 1)
        attending = self._shard.sessions.by_worker() if tables else {}
        response = pb.GetTableStatusResponse(
            tables=[
                self._shard.tables.describe(table, name_count_max, attending) for table in tables
            ]
        )
        return checksum.seal(response)


def state_messages(
    table: TableSlice,
    version: int,
    deadline: RequestDeadline,
    is_wanted: Callable[[], bool],
    count: Callable[[int], None],
) -> Handling:
    """Yields a first message when the rows are sure to come, then all rows.

    `deadline` bounds the wait for `version`, which asynchronous mode does not use; any thread calls
    `is_wanted`; `count` gets the bytes of each message.
    """
    table.loading.check_committed()
    codec = RowStateCodec(table.spec)
    context = checksum.context(
        checksum.Kind.ROWS_SCAN, table.spec.name, pb.ScanRowsRequest.CONTENT_STATE
    )

    def message(state: RowState, version: int, learning_rate: float) -> bytes:
        header = pb.ScanRowsResponse(version=version, learning_rate=learning_rate)
        start = checksum.rows_scan(context, header)
        return codec.encode(header, header.rows, state, start=start)

    with table.scan.under_way(version, is_wanted) as snapshot:
        yield message(
            empty_state(table.spec, 0),
            table.version if snapshot is None else version,
            table.learning_rate,
        )
        yield from until(table.scan.check_begun, snapshot, deadline)
        for state, found, rate in table.scan.states(snapshot):
            if state.ids.size:
                try:
                    codec.check(state)
                except NonFiniteError as error:
                    raise DivergedError(error.message, table=table.spec.name) from None
                table.make_durable()  # no client goes on from what could still be lost
                answer = message(state, found, rate)
                count(len(answer))
                yield answer


class _Load:
    def __init__(self, table: TableSlice, opening: pb.LoadRowsRequest) -> None:
        self.table = table
        self._codec = RowStateCodec(table.spec)
        self._opening = opening
        self._context = checksum.rows_load_context(opening)
        self._number = 0
        self._rate: float | None = None
        self.row_count = 0
        self.is_finished = False

    def take(self, request: pb.LoadRowsRequest, payload: Bytes) -> None:
        loading = self.table.loading
        if not request.HasField("rows"):  # what their CRC32C covers can't be believed without them
            raise CorruptChunkError("a message of LoadRows has no `rows`; send it again")
        start = checksum.rows_load(self._context, finish=request.finish)
        state = self._codec.open(request.rows, payload, start=start)
        if not self._number:
            opening = self._opening
            if opening.version > STEP_MAX:
                raise ArgumentError(f"version must be at most {STEP_MAX}; got {opening.version}")
            if opening.HasField("learning_rate"):
                self._rate = check_learning_rate("learning_rate", opening.learning_rate)
            self._number = loading.begin(opening.load_id, opening.open.incarnation)
        if state.ids.size:
            loading.add(self._number, state)
        if request.finish:
            self.row_count = loading.finish(self._number, self._opening.version, self._rate)
            self.is_finished = True
