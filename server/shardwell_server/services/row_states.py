"""ScanRows with state, and LoadRows: a table's rows to a checkpoint and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwell import framing
from shardwell.codec import Bytes
from shardwell.errors import ArgumentError
from shardwell.optimizers import check_learning_rate
from shardwell.row_state import RowStateCodec
from shardwell.specs import STEP_MAX
from shardwell.v1 import table_pb2 as pb
from shardwell_server.shard.patience import Patience
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table_slice import TableSlice


def state_messages(
    table: TableSlice, version: int, patience: Patience, is_wanted: Callable[[], bool]
) -> Iterator[bytes]:
    """A first message when the rows are sure to be had, then all rows.

    Args:
        table: The table.
        version: Of every row; asynchronous mode has no use for it.
        patience: Bounds the wait for it.
        is_wanted: Whether the stream is still read; any thread calls it.

    Raises:
        NonFiniteError: training diverged; weights are not finite.
        ShardwellError: see `TableScan.under_way` and `TableScan.states`.
    """
    table.loading.check_standing()
    codec = RowStateCodec(table.spec)
    with table.scan.under_way(version, is_wanted) as snapshot:
        yield pb.ScanRowsResponse(
            version=table.version if snapshot is None else version,
            learning_rate=table.learning_rate,
        ).SerializeToString()
        for state, found, rate in table.scan.states(snapshot, patience):
            if state.ids.size:
                codec.check(state)
                table.make_durable()  # nobody goes on from what could still be lost
                header = pb.ScanRowsResponse(version=found, learning_rate=rate)
                yield codec.encode(header, header.rows, state)


def load(shard: Shard, messages: Iterator[bytes]) -> pb.LoadRowsResponse:
    """Takes the rows of one stream; see LoadRows.

    Raises:
        ShardwellError: they are refused, and the table is as it was when the load began.
    """
    loading: _Load | None = None
    for message in messages:
        request, payload = framing.parse(pb.LoadRowsRequest, message)
        shard.traffic.add(received=payload.size)
        if loading is None:
            if not request.HasField("open"):
                raise ArgumentError("a stream's first message must have `open`; it is missing")
            shard.check_identity(request.open.shard)
            loading = _Load(shard.tables.table(request.open.table), request)
        elif request.HasField("open"):
            raise ArgumentError("only the first message of a stream has `open`")
        elif loading.is_finished:
            raise ArgumentError("a message came after the one with `finish`")
        loading.take(request, payload)
    if loading is None:
        raise ArgumentError("the stream has no message")
    loading.end()
    return pb.LoadRowsResponse(row_count=loading.row_count)


class _Load:
    """One stream's rows on their way into a table."""

    def __init__(self, table: TableSlice, opening: pb.LoadRowsRequest) -> None:
        if opening.version > STEP_MAX:
            raise ArgumentError(f"version must be at most {STEP_MAX}; got {opening.version}")
        self._rate = (
            check_learning_rate("learning_rate", opening.learning_rate)
            if opening.HasField("learning_rate")
            else None
        )
        self._version = opening.version
        self._table = table
        self._codec = RowStateCodec(table.spec)
        self._number = table.loading.begin(opening.load_id, opening.open.incarnation)
        self.row_count = 0
        """Rows that stand."""
        self.is_finished = False
        """Whether they do."""

    def take(self, request: pb.LoadRowsRequest, payload: Bytes) -> None:
        """Does what a message says."""
        loading = self._table.loading
        if request.HasField("rows"):
            loading.add(self._number, self._codec.open(request.rows, payload))
        elif payload.size:
            raise ArgumentError("a message has a payload, but no `rows`")
        if request.finish:
            self.row_count = loading.finish(self._number, self._version, self._rate)
            self.is_finished = True

    def end(self) -> None:
        """Returns when what was done may be acknowledged."""
        self._table.make_durable()
