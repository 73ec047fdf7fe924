"""ParameterServerService: the wire contract of protos/, over one Shard.

Messages with payloads are read and written as bytes (see shardwell.framing); gRPC's own threads run
each handler, so a stream's bytes are decoded on the stream's thread, without the GIL.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import grpc

import shardwell
from shardwell import framing
from shardwell.answering import Answering, parsed
from shardwell.codec import Bytes
from shardwell.errors import ArgumentError, WrongShardError
from shardwell.names import check_name
from shardwell.optimizers import check_learning_rate
from shardwell.specs import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server.services.first_weights import receive_first_weights
from shardwell_server.services.snapshots import snapshot_messages
from shardwell_server.services.streams import OpenStreams
from shardwell_server.services.waiting import patience_of, wanted
from shardwell_server.shard.parameter_slice import ParameterSlice
from shardwell_server.shard.patience import Patience
from shardwell_server.shard.shard import Shard

_LOG = logging.getLogger("shardwell_server")
_SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"]
_NO_WAIT_S = 1e-6
_CLAIM_WAIT_COUNT_MAX = 16
"""Calls of ClaimInit that may wait at once; further ones are answered at once, and ask again."""
STATUS_NAME_COUNT_MAX = 1500
"""Worker ids of each kind in one answer, so that it stays below the limit of a message."""


class ParameterServerService:
    """Handlers, one method an RPC."""

    def __init__(self, shard: Shard, streams: OpenStreams) -> None:
        self._shard = shard
        self._streams = streams
        self._limits = shard.config.limits
        self._answering = Answering(_LOG, shard_index=shard.config.shard_index, place="shard")
        self._claim_waits = threading.BoundedSemaphore(_CLAIM_WAIT_COUNT_MAX)

    def handler(self) -> grpc.GenericRpcHandler:
        """All methods, for grpc.Server."""
        stream, answers = grpc.stream_unary_rpc_method_handler, self._answering
        handlers = {
            "CreateParameter": answers.unary(self.create_parameter, pb.CreateParameterRequest),
            "ClaimInit": answers.unary(self.claim_init, pb.ClaimInitRequest),
            "ConfirmInit": answers.unary(self.confirm_init, pb.ConfirmInitRequest),
            "SetLearningRate": answers.unary(self.set_learning_rate, pb.SetLearningRateRequest),
            "GetStatus": answers.unary(self.get_status, pb.GetStatusRequest),
            "InitWeights": stream(
                answers.answering(self.init_weights),
                response_serializer=pb.InitWeightsResponse.SerializeToString,
            ),
            "PutGradient": stream(
                answers.answering(self.put_gradient),
                response_serializer=pb.PutGradientResponse.SerializeToString,
            ),
            "GetWeights": grpc.unary_stream_rpc_method_handler(
                answers.streaming(parsed(self.get_weights, pb.GetWeightsRequest))
            ),
            "Snapshot": grpc.unary_stream_rpc_method_handler(
                answers.streaming(parsed(self.snapshot, pb.SnapshotRequest))
            ),
            "Exchange": grpc.stream_stream_rpc_method_handler(answers.streaming(self.exchange)),
        }
        assert set(handlers) == {method.name for method in _SERVICE.methods}
        return grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)

    # RPCs.

    def create_parameter(
        self, request: pb.CreateParameterRequest, context: grpc.ServicerContext
    ) -> pb.CreateParameterResponse:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        named = request.worker_id or request.take_seat
        worker_id = check_name("worker_id", request.worker_id) if named else ""
        spec = ParameterSpec.from_proto(request.spec)
        if request.take_seat:
            self._shard.parameter(spec.name)  # whoever takes a seat has opened it before
        parameter, created = self._shard.create(spec)
        response = parameter.join(worker_id, take_seat=request.take_seat)
        response.created = created
        if created:
            _LOG.info("parameter created", extra={"parameter": spec.name, "size": spec.size})
        return response

    def claim_init(
        self, request: pb.ClaimInitRequest, context: grpc.ServicerContext
    ) -> pb.ClaimInitResponse:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        if request.shard.shard_index != 0:
            raise WrongShardError("ClaimInit is answered by shard 0 alone; call it there")
        worker_id = check_name("worker_id", request.worker_id)
        parameter = self._shard.parameter(request.parameter)
        # Those who wait here must never take the threads that first weights come in on.
        waits = bool(request.wait_timeout_ms) and self._claim_waits.acquire(blocking=False)
        try:
            timeout_s = request.wait_timeout_ms / 1000 if waits else _NO_WAIT_S
            return parameter.claim_init(worker_id, self._patience(context, timeout_s))
        finally:
            if waits:
                self._claim_waits.release()

    def init_weights(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> pb.InitWeightsResponse:
        """See the .proto."""
        with self._streams.opened():
            version = receive_first_weights(
                messages, self._opened, lambda size: self._shard.traffic.add(received=size)
            )
            return pb.InitWeightsResponse(version=version)

    def confirm_init(
        self, request: pb.ConfirmInitRequest, context: grpc.ServicerContext
    ) -> pb.ConfirmInitResponse:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        version = self._shard.parameter(request.parameter).confirm_init(request.epoch)
        return pb.ConfirmInitResponse(version=version)

    def put_gradient(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> pb.PutGradientResponse:
        """See the .proto."""
        response = pb.PutGradientResponse()
        with self._streams.opened():
            source: _GradientSource | None = None
            for message in messages:
                request, payload = framing.parse(pb.PutGradientRequest, message)
                source = source or self._source(request)
                if request.HasField("gradient"):
                    self._shard.traffic.add(received=payload.size)
                    timeout_s = request.gradient.wait_timeout_ms / 1000
                    patience = self._patience(context, timeout_s)
                    if source.contribute(request.gradient, payload, patience):
                        response.counted_chunk_count += 1
                    else:
                        response.duplicate_chunk_count += 1
            if source is not None:
                source.parameter.make_durable()
        return response

    def get_weights(
        self, request: pb.GetWeightsRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        parameter = self._shard.parameter(request.parameter)
        patience = self._patience(context, request.wait_timeout_ms / 1000)
        with self._streams.opened():
            for index in range(parameter.chunk_count):
                message = parameter.weights_message(index, request.min_version, patience)
                parameter.make_durable()  # nobody goes on from what could still be lost
                self._shard.traffic.add(sent=len(message))
                yield message

    def snapshot(
        self, request: pb.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        parameter = self._shard.parameter(request.parameter)
        with self._streams.opened():
            for message in snapshot_messages(
                parameter,
                request.version,
                self._patience(context, request.wait_timeout_ms / 1000),
                wanted(self._shard, context),
            ):
                self._shard.traffic.add(sent=len(message))
                yield message

    def exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """See the .proto."""
        pending: deque[tuple[int, int, Patience]] = deque()
        with self._streams.opened():
            source: _GradientSource | None = None
            try:
                for message in messages:
                    self._streams.busy(context)
                    request, payload = framing.parse(pb.ExchangeRequest, message)
                    source = source or self._source(request)
                    if not request.HasField("gradient"):
                        continue
                    gradient = request.gradient
                    self._shard.traffic.add(received=payload.size)
                    patience = self._patience(context, gradient.wait_timeout_ms / 1000)
                    source.contribute(gradient, payload, patience)
                    version = gradient.step + 1 if source.parameter.spec.mode == "sync" else 0
                    pending.append((gradient.chunk.chunk_index, version, patience))
                    if len(pending) > 2 * source.parameter.chunk_count:
                        raise ArgumentError(
                            f"{len(pending)} chunks were sent without end_of_step, of "
                            f"{source.parameter.chunk_count}; read the answers first"
                        )
                    yield from self._answers(source.parameter, pending, all_=gradient.end_of_step)
                    if gradient.end_of_step:
                        self._streams.idle(context)
                if source is not None:
                    yield from self._answers(source.parameter, pending, all_=True)
            finally:
                self._streams.busy(context)

    def set_learning_rate(
        self, request: pb.SetLearningRateRequest, context: grpc.ServicerContext
    ) -> pb.SetLearningRateResponse:
        """See the .proto."""
        self._shard.check_identity(request.shard)
        rate = check_learning_rate("learning_rate", request.learning_rate)
        from_step = request.from_step if request.HasField("from_step") else None
        self._shard.parameter(request.parameter).change_learning_rate(from_step, rate)
        _LOG.info(
            "learning rate changed",
            extra={"parameter": request.parameter, "learning_rate": rate},
        )
        return pb.SetLearningRateResponse()

    def get_status(
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetStatusResponse:
        """See the .proto."""
        shard, config = self._shard, self._shard.config
        parameters = [] if request.identity_only else shard.parameters()
        if request.parameter:
            parameters = [p for p in parameters if p.spec.name == request.parameter]
        name_count_max = max(STATUS_NAME_COUNT_MAX // max(len(parameters), 1), 1)
        return pb.GetStatusResponse(
            shard=types_pb2.ShardIdentity(
                cluster_id=config.cluster_id,
                shard_index=config.shard_index,
                shard_count=config.shard_count,
            ),
            software_version=shardwell.__version__,
            uptime_s=time.monotonic() - shard.started_s,
            parameters=[parameter.describe(name_count_max) for parameter in parameters],
            stored_bytes=shard.stored_bytes,
            received_payload_bytes=shard.traffic.received_bytes,
            sent_payload_bytes=shard.traffic.sent_bytes,
            open_stream_count=self._streams.count,
        )

    # What they share.

    def _opened(self, request: Any) -> ParameterSlice:
        """The parameter that a stream's first message names."""
        if not request.HasField("open"):
            raise ArgumentError("a stream's first message must have `open`; it is missing")
        self._shard.check_identity(request.open.shard)
        check_name("worker_id", request.open.worker_id)
        return self._shard.parameter(request.open.parameter)

    def _source(self, request: Any) -> _GradientSource:
        return _GradientSource(self._opened(request), request.open.worker_id)

    def _answers(
        self,
        parameter: ParameterSlice,
        pending: deque[tuple[int, int, Patience]],
        *,
        all_: bool,
    ) -> Iterator[bytes]:
        """The weights that are due, in order: those that are ready, or all."""
        while pending:
            index, version, patience = pending[0]
            if not all_ and not parameter.is_ready(index, version):
                return
            message = parameter.weights_message(index, version, patience)
            parameter.make_durable()  # it acknowledges a gradient
            pending.popleft()
            self._shard.traffic.add(sent=len(message))
            yield message

    def _patience(self, context: grpc.ServicerContext, timeout_s: float) -> Patience:
        return patience_of(self._shard, context, timeout_s)


class _GradientSource:
    """Whose gradients a stream carries, and where they go."""

    def __init__(self, parameter: ParameterSlice, worker_id: str) -> None:
        self.parameter = parameter
        self._worker_id = worker_id

    def contribute(
        self, gradient: types_pb2.GradientChunk, payload: Bytes, patience: Patience
    ) -> bool:
        """See ParameterSlice.contribute."""
        return self.parameter.contribute(self._worker_id, gradient, payload, patience)
