"""ScanRows with state, and LoadRows: a table's rows to a checkpoint and back."""

from __future__ import annotations

from collections.abc import Callable

from shardwell.errors import ArgumentError, CorruptChunkError, DivergedError, NonFiniteError
from shardwell.numerics.codec import Bytes
from shardwell.specs.optimizers import check_learning_rate
from shardwell.specs.parameter import STEP_MAX
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.row_state import RowState, RowStateCodec, empty_state
from shardwell_server.services.calls import Handling, Read
from shardwell_server.shard.deadline import RequestDeadline, until
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table.slice import TableSlice


def state_messages(
    table: TableSlice,
    version: int,
    deadline: RequestDeadline,
    is_wanted: Callable[[], bool],
    count: Callable[[int], None],
) -> Handling:
    """A first message when the rows are sure to be had, then all rows.

    Args:
        table: The table.
        version: Of every row; asynchronous mode has no use for it.
        deadline: Bounds the wait for it.
        is_wanted: Whether the stream is still read; any thread calls it.
        count: Told of the bytes of each message.

    Raises:
        DivergedError: training diverged; weights are not finite.
        ShardwellError: see `TableScan.under_way`, `check_begun` and `states`.
    """
    table.loading.check_standing()
    codec = RowStateCodec(table.spec)
    context = checksum.rows_scan_context(table.spec.name, pb.ScanRowsRequest.CONTENT_STATE)

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
                table.make_durable()  # nobody goes on from what could still be lost
                answer = message(state, found, rate)
                count(len(answer))
                yield answer


def load(shard: Shard) -> Handling:
    """Takes the rows of one stream; see LoadRows.

    Raises:
        ShardwellError: they are refused, and the table is as it was when the load began.
    """
    loading: _Load | None = None
    message = yield Read.NEXT_STEP
    while message is not None:
        request, payload = framing.parse(pb.LoadRowsRequest, message)
        shard.traffic.add(received=payload.size)
        if loading is None:
            if not request.HasField("open"):
                raise ArgumentError("a stream's first message must have `open`; it is missing")
            shard.check_identity(request.open.shard)
            loading = _Load(shard.tables.get(request.open.table), request)
        elif request.HasField("open"):
            raise ArgumentError("only the first message of a stream has `open`")
        elif loading.is_finished:
            raise ArgumentError("a message came after the one with `finish`")
        loading.take(request, payload)
        message = yield Read.NEXT
    if loading is None:
        raise ArgumentError("the stream has no message")
    loading.end()
    return pb.LoadRowsResponse(row_count=loading.row_count)


class _Load:
    """One stream's rows on their way into a table."""

    def __init__(self, table: TableSlice, opening: pb.LoadRowsRequest) -> None:
        self._table = table
        self._codec = RowStateCodec(table.spec)
        self._opening = opening
        self._context = checksum.rows_load_context(opening)
        self._number = 0
        """Of the load; 0: it has not begun."""
        self._rate: float | None = None
        self.row_count = 0
        """Rows that stand."""
        self.is_finished = False
        """Whether they do."""

    def take(self, request: pb.LoadRowsRequest, payload: Bytes) -> None:
        """Does what a message says."""
        loading = self._table.loading
        if not request.HasField("rows"):  # what their CRC32C covers can't be believed without them
            raise CorruptChunkError("a message of LoadRows has no `rows`; send it again")
        start = checksum.rows_load(self._context, finish=request.finish)
        state = self._codec.open(request.rows, payload, start=start)
        if not self._number:
            self._begin()
        if state.ids.size:
            loading.add(self._number, state)
        if request.finish:
            self.row_count = loading.finish(self._number, self._opening.version, self._rate)
            self.is_finished = True

    def _begin(self) -> None:
        opening = self._opening
        if opening.version > STEP_MAX:
            raise ArgumentError(f"version must be at most {STEP_MAX}; got {opening.version}")
        if opening.HasField("learning_rate"):
            self._rate = check_learning_rate("learning_rate", opening.learning_rate)
        self._number = self._table.loading.begin(opening.load_id, opening.open.incarnation)

    def end(self) -> None:
        """Returns when what was done may be acknowledged."""
        self._table.make_durable()
