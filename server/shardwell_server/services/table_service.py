"""TableService: the wire contract of table.proto, over the tables of one Shard.

As parameter_server.py: messages with payloads are read and written as bytes, and decoded on their
stream's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import grpc

from shardwell import framing
from shardwell.answering import Answering, parsed
from shardwell.codec import Bytes
from shardwell.errors import ArgumentError, StepOrderError, UnknownTableError
from shardwell.names import check_name
from shardwell.optimizers import check_learning_rate
from shardwell.row_codec import RowCodec
from shardwell.table_spec import TableSpec
from shardwell.v1 import table_pb2 as pb
from shardwell_server.services import row_states
from shardwell_server.services.parameter_server import STATUS_NAME_COUNT_MAX
from shardwell_server.services.streams import OpenStreams
from shardwell_server.services.waiting import patience_of, wanted
from shardwell_server.shard.patience import Patience
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table_slice import TableSlice

_LOG = logging.getLogger("shardwell_server")
_SERVICE = pb.DESCRIPTOR.services_by_name["TableService"]
_CONTENT = pb.ScanRowsRequest.Content
_CONTENTS = (_CONTENT.CONTENT_IDS, _CONTENT.CONTENT_VALUES, _CONTENT.CONTENT_STATE)


class TableService:
    """Handlers, one method an RPC."""

    def __init__(self, shard: Shard, streams: OpenStreams) -> None:
        self._shard = shard
        self._streams = streams
        self._answering = Answering(_LOG, shard_index=shard.config.shard_index, place="shard")

    def handler(self) -> grpc.GenericRpcHandler:
        """All methods, for grpc.Server."""
        answers = self._answering
        handlers = {
            "OpenTable": answers.unary(self.open_table, pb.OpenTableRequest),
            "EvictRows": answers.unary(self.evict_rows, pb.EvictRowsRequest),
            "SetTableLearningRate": answers.unary(
                self.set_table_learning_rate, pb.SetTableLearningRateRequest
            ),
            "GetTableStatus": answers.unary(self.get_table_status, pb.GetTableStatusRequest),
            "ExchangeRows": grpc.stream_stream_rpc_method_handler(
                answers.streaming(self.exchange_rows)
            ),
            "ScanRows": grpc.unary_stream_rpc_method_handler(
                answers.streaming(parsed(self.scan_rows, pb.ScanRowsRequest))
            ),
            "LoadRows": grpc.stream_unary_rpc_method_handler(
                answers.answering(self.load_rows),
                response_serializer=pb.LoadRowsResponse.SerializeToString,
            ),
        }
        assert set(handlers) == {method.name for method in _SERVICE.methods}
        return grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)

    # RPCs.

    def open_table(
        self, request: pb.OpenTableRequest, context: grpc.ServicerContext
    ) -> pb.OpenTableResponse:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        named = request.worker_id or request.take_seat
        worker_id = check_name("worker_id", request.worker_id) if named else ""
        spec = TableSpec.from_proto(request.spec)
        if request.take_seat:
            self._shard.tables.table(spec.name)  # whoever takes a seat has opened it before
        if request.must_exist:
            self._check_kept(spec.name)
        table, created = self._shard.tables.open(spec)
        response = table.join(
            worker_id, take_seat=request.take_seat, incarnation=request.incarnation
        )
        response.created = created
        if created:
            _LOG.info("table created", extra={"table": spec.name, "dim": spec.dim})
        return response

    def exchange_rows(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """See the .proto."""
        with self._streams.opened():
            exchange: _RowExchange | None = None
            try:
                for message in messages:
                    self._streams.busy(context)
                    request, payload = framing.parse(pb.ExchangeRowsRequest, message)
                    if exchange is None or request.HasField("open"):
                        if exchange is not None and not exchange.is_between_steps:
                            raise ArgumentError("`open` came in the middle of a step; end it first")
                        exchange = self._opened(request)
                    self._shard.traffic.add(received=payload.size)
                    yield from exchange.answers(request, payload, self._waiting(request, context))
                    if exchange.is_between_steps:
                        self._streams.idle(context)
            finally:
                self._streams.busy(context)

    def scan_rows(
        self, request: pb.ScanRowsRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        table = self._shard.tables.table(request.table)
        if request.content not in _CONTENTS:
            raise ArgumentError(
                f"content must be CONTENT_IDS, CONTENT_VALUES or CONTENT_STATE; got "
                f"{request.content}"
            )
        with self._streams.opened():
            if request.content == _CONTENT.CONTENT_STATE:
                patience = patience_of(self._shard, context, request.wait_timeout_ms / 1000)
                for message in row_states.state_messages(
                    table, request.version, patience, wanted(self._shard, context)
                ):
                    self._shard.traffic.add(sent=len(message))
                    yield message
                return
            table.loading.check_standing()
            codec = RowCodec.of_scans(table.spec)
            yield pb.ScanRowsResponse(
                version=table.version,
                learning_rate=table.learning_rate,
            ).SerializeToString()
            for ids, values in table.scan.values(
                with_values=request.content == _CONTENT.CONTENT_VALUES
            ):
                header = pb.ScanRowsResponse(version=table.version)
                message = codec.encode(header, header.rows, ids, values)
                table.make_durable()  # nobody goes on from what could still be lost
                self._shard.traffic.add(sent=len(message))
                yield message

    def load_rows(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> pb.LoadRowsResponse:
        """See the .proto."""
        with self._streams.opened():
            try:
                response = row_states.load(self._shard, self._one_by_one(messages, context))
            finally:
                self._streams.busy(context)
        _LOG.info("rows loaded", extra={"rows": response.row_count})
        return response

    def evict_rows(
        self, request: pb.EvictRowsRequest, context: grpc.ServicerContext
    ) -> pb.EvictRowsResponse:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        count = self._shard.tables.table(request.table).evict(request.older_than_step)
        _LOG.info(
            "rows evicted",
            extra={
                "table": request.table,
                "rows": count,
                "older_than_step": request.older_than_step,
            },
        )
        return pb.EvictRowsResponse(evicted_row_count=count)

    def set_table_learning_rate(
        self, request: pb.SetTableLearningRateRequest, context: grpc.ServicerContext
    ) -> pb.SetTableLearningRateResponse:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        table = self._shard.tables.table(request.table)
        rate = check_learning_rate("learning_rate", request.learning_rate, table.spec.optimizer)
        from_step = request.from_step if request.HasField("from_step") else None
        table.change_learning_rate(from_step, rate)
        _LOG.info("learning rate changed", extra={"table": request.table, "learning_rate": rate})
        return pb.SetTableLearningRateResponse()

    def get_table_status(
        self, request: pb.GetTableStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetTableStatusResponse:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        tables = self._shard.tables.all()
        if request.table:
            tables = [self._shard.tables.table(request.table)]
        name_count_max = max(STATUS_NAME_COUNT_MAX // max(len(tables), 1), 1)
        return pb.GetTableStatusResponse(
            tables=[table.describe(name_count_max) for table in tables]
        )

    # What they share.

    def _one_by_one(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """The same; while the next one is waited for, the server may stop."""
        self._streams.idle(context)
        for message in messages:
            self._streams.busy(context)
            yield message
            self._streams.idle(context)

    def _check_kept(self, name: str) -> None:
        """Refuses to make a table that has begun on another shard."""
        try:
            self._shard.tables.table(name)
        except UnknownTableError:
            raise StepOrderError(
                f"table {name!r} has begun on other shards, and shard "
                f"{self._shard.config.shard_index} does not have it: it lost its memory; restore a "
                "checkpoint into an empty cluster, or start the training again under another name",
                table=name,
            ) from None

    def _opened(self, request: pb.ExchangeRowsRequest) -> _RowExchange:
        """The table and worker that a stream's first message names."""
        if not request.HasField("open"):
            raise ArgumentError("a stream's first message must have `open`; it is missing")
        self._shard.check_identity(request.open.shard)
        worker_id = check_name("worker_id", request.open.worker_id)
        table = self._shard.tables.table(request.open.table)
        table.register.check_incarnation(request.open.incarnation)
        return _RowExchange(self._shard, table, worker_id)

    def _waiting(self, request: pb.ExchangeRowsRequest, context: grpc.ServicerContext) -> Patience:
        asked = request.gradient if request.HasField("gradient") else request.fetch
        return patience_of(self._shard, context, asked.wait_timeout_ms / 1000)


class _RowExchange:
    """One worker's stream: its messages, in order, to the table and back."""

    def __init__(self, shard: Shard, table: TableSlice, worker_id: str) -> None:
        self._shard = shard
        self._table = table
        self._worker_id = worker_id
        self._counted = pb.RowsCounted()
        self.is_between_steps = True
        """Whether nothing of a step has come, or all of it."""

    def answers(
        self, request: pb.ExchangeRowsRequest, payload: Bytes, patience: Patience
    ) -> Iterator[bytes]:
        """Does what a message asks for; what is to be answered now."""
        table = self._table
        if request.HasField("gradient") and request.HasField("fetch"):
            raise ArgumentError("a message has `gradient` or `fetch`, not both; send two")
        if request.HasField("gradient"):
            self._take(request.gradient, payload, patience)
            if not request.gradient.end_of_step:
                return
            table.make_durable()
            response = pb.ExchangeRowsResponse(counted=self._counted, version=table.version)
            message = response.SerializeToString()
            self._counted = pb.RowsCounted()
        elif request.HasField("fetch"):
            message = table.rows_message(request.fetch, payload, patience)
            table.make_durable()  # nobody goes on from what could still be lost
        elif payload.size:
            raise ArgumentError("a message has a payload, but neither `gradient` nor `fetch`")
        else:
            return
        self._shard.traffic.add(sent=len(message))
        yield message

    def _take(self, gradient: pb.RowGradients, payload: Bytes, patience: Patience) -> None:
        counted = self._counted
        if counted.step != gradient.step or self.is_between_steps:
            counted = self._counted = pb.RowsCounted(step=gradient.step)
        self.is_between_steps = False
        if self._table.contribute(self._worker_id, gradient, payload, patience):
            counted.counted_part_count += 1
        else:
            counted.duplicate_part_count += 1
        self.is_between_steps = gradient.end_of_step
