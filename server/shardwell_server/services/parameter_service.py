"""ParameterServerService: the wire contract of protos/, over one Shard.

Messages with payloads are read and written as bytes (see shardwell.wire.messages), and decoded
where the handlers run (see calls.py), without the GIL.
"""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import shardwell
from shardwell.errors import (
    ArgumentError,
    LimitError,
    WrongShardError,
)
from shardwell.numerics import native
from shardwell.numerics.codec import CODECS, Float32, NonFiniteValueError
from shardwell.placement.slices import Slice
from shardwell.specs.learner import LearnerProgress
from shardwell.specs.names import check_name
from shardwell.specs.parameter import ParameterSpec
from shardwell.transport.arena_offers import ArenaOffers
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES, ChunkCodec
from shardwell_server.access.rights import Right
from shardwell_server.services.calls import Call, Handling, Needs
from shardwell_server.services.open_streams import OpenStreams
from shardwell_server.services.parameter_stream import ParameterStream
from shardwell_server.services.step_stream import (
    change_learning_rate,
    joined,
    moved,
    named,
    opened,
)
from shardwell_server.shard.deadline import deadline_of, until, wanted
from shardwell_server.shard.errors import diverged
from shardwell_server.shard.parameter.loading import ParameterLoad
from shardwell_server.shard.parameter.open_sets import Contributors
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.shard import Shard

_NO_WAIT_S = 1e-6
_DEAL_RIGHTS = {
    pb.DealSamplesRequest.STAGE_LOAD: Right.CREATE,
    pb.DealSamplesRequest.STAGE_LOOK: Right.READ,
}
"""Stages that are about no worker; others need CONTRIBUTE."""
_STATE_RIGHTS = {
    pb.KeepStateRequest.STAGE_LOAD: Right.CREATE,
    pb.KeepStateRequest.STAGE_GET: Right.READ,
}
"""The rights of stages; others need CONTRIBUTE."""
_STATES_WAIT_S = 5.0
"""How long a snapshot waits for workers to bring their states of its version."""
_TROUBLE_COUNT_MAX = 16
_STATUS_SIZE_MAX_BYTES = 2**19
"""Most bytes of the parameters in one answer, except one that is larger alone."""
STATUS_NAME_COUNT_MAX = 1500
_CONTRIBUTIONS_SIZE_MAX_BYTES = 2**19
_CHUNK_INDEX_SIZE_BYTES = 5
_RANGE_ELEMENT_COUNT = PAYLOAD_SIZE_MAX_BYTES // 4
_DESCRIPTOR_RESERVE = 16
"""Descriptors that newcomers leave: to accept a connection and refuse it by name, and for files."""
_DESCRIPTORS = "/proc/self/fd"


class ParameterServerService:
    """Handlers, one method an RPC."""

    def __init__(self, shard: Shard, streams: OpenStreams, arenas: ArenaOffers) -> None:
        self._shard = shard
        self._streams = streams
        self._arenas = arenas
        self.stream_address = ""
        """The address of streams from this machine; empty: gRPC alone."""
        self.troubles: Callable[[], list[pb.Trouble]] = list
        self.resources: Callable[[], pb.Resources] = pb.Resources
        self.settings: Callable[[], pb.ShardSettings] = pb.ShardSettings

    def create_parameter(self, request: pb.CreateParameterRequest, call: Call) -> Any:
        return joined("parameter", self._shard, request, call, ParameterSpec)

    def claim_init(self, request: pb.ClaimInitRequest, call: Call) -> Handling:
        parameter = self._named(request, call, Right.CONTRIBUTE)
        if request.shard.shard_index != 0:
            raise WrongShardError("ClaimInit is answered by shard 0 alone; call it there")
        worker_id = check_name("worker_id", request.worker_id)
        deadline = deadline_of(self._shard, call, request.wait_timeout_ms / 1000 or _NO_WAIT_S)
        return (yield from until(parameter.loading.claim, worker_id, deadline, request.above_epoch))

    def init_weights(self, call: Call) -> Handling:
        load: ParameterLoad | None = None
        right = Right.CONTRIBUTE
        message = yield Needs.NEXT_STEP
        while message is not None:
            request, payload = framing.parse(pb.InitWeightsRequest, message)
            if load is None:
                restores = request.version or request.load_id or request.array_count > 1
                right = Right.CREATE if restores else Right.CONTRIBUTE
                parameter: ParameterSlice = opened("parameter", self._shard, request, call, right)
                check_name("worker_id", request.open.worker_id)
                load = ParameterLoad(parameter.loading, request)
            load.take(request, payload)
            moved(self._shard, call, received=payload.size)
            message = yield Needs.NEXT
        if load is None:
            raise ArgumentError("an InitWeights stream must begin with `open`; it was empty")
        version = load.end()
        event = "restored" if right is Right.CREATE else "initialized"
        call.note(event, kind="parameter", name=parameter.spec.name, version=version)
        return pb.InitWeightsResponse(version=version)

    def confirm_init(self, request: pb.ConfirmInitRequest, call: Call) -> pb.ConfirmInitResponse:
        parameter = self._named(request, call, Right.CONTRIBUTE)
        return pb.ConfirmInitResponse(version=parameter.loading.confirm(request.epoch))

    def _named(self, request: Any, call: Call, right: Right) -> ParameterSlice:
        found: ParameterSlice = named("parameter", self._shard, request, call, right)
        return found

    def put_gradient(self, call: Call) -> Handling:
        return ParameterStream(self._shard, self._arenas, call, only_counts=True).put_gradient()

    def get_weights(self, request: pb.GetWeightsRequest, call: Call) -> Handling:
        return ParameterStream(self._shard, self._arenas, call).get_weights(request)

    def close_step(self, request: pb.CloseStepRequest, call: Call) -> Handling:
        return ParameterStream(self._shard, self._arenas, call).close_step(request)

    def exchange(self, call: Call) -> Handling:
        return ParameterStream(self._shard, self._arenas, call).exchange()

    def snapshot(self, request: pb.SnapshotRequest, call: Call) -> Handling:
        """Yields a first message when every chunk is sure to come, then chunk by chunk in order."""
        self._shard.check_identity(request.shard)
        call.check(Right.READ, "parameter", request.parameter)
        parameter = self._shard.parameters.get(request.parameter)
        deadline = deadline_of(self._shard, call, request.wait_timeout_ms / 1000)
        context = checksum.context(checksum.Kind.SNAPSHOT, parameter.spec.name)
        codec = ChunkCodec(CODECS["fp32"], allow_non_finite=parameter.spec.allow_non_finite)
        names = ("weights", *(f"optimizer's {n!r}" for n in parameter.spec.slot_names))
        element_count = min(parameter.chunk_element_count, parameter.where.size)
        buffers = [
            np.empty(element_count, np.float32) for _ in range(parameter.loading.array_count)
        ]
        with (
            parameter.held_states(request.version) as held,
            parameter.snapshots.under_way(request.version, wanted(self._shard, call)) as snapshot,
        ):
            yield pb.SnapshotResponse(
                version=request.version, array_count=parameter.loading.array_count
            ).SerializeToString()
            for index in range(parameter.chunk_count):
                where = parameter.where.chunk(index, parameter.chunk_element_count)
                arrays = [buffer[: where.size] for buffer in buffers]
                found, rate = yield from until(
                    parameter.snapshots.capture, index, snapshot, deadline, arrays
                )
                parameter.make_durable()
                account = parameter.account_of_samples(found) if index == 0 else b""
                if account:  # by itself, as a message with values has no room for it
                    header = pb.SnapshotResponse(version=found, samples=account)
                    start = checksum.snapshot(context, header)
                    nothing = Slice(where.offset, 0)
                    yield codec.encode(
                        header, header.chunk, nothing, index, arrays[0][:0], start=start
                    )
                for array_index, array in enumerate(arrays):
                    header = pb.SnapshotResponse(
                        version=found, array_index=array_index, learning_rate=rate
                    )
                    start = checksum.snapshot(context, header)
                    try:
                        for message in _ranges(codec, header, where, index, array, start):
                            moved(self._shard, call, sent=len(message))
                            yield message
                    except NonFiniteValueError as error:
                        raise diverged(
                            parameter.spec, where.offset + error.index, found, names[array_index]
                        ) from None
            if held.by_worker:
                on_their_way = deadline_of(self._shard, call, _STATES_WAIT_S)
                for given in (yield from until(parameter.states_of, held, on_their_way)):
                    parts = (parameter.page_of_states(each) for each in given.pages)
                    for number, part in enumerate(itertools.chain([given.state], parts)):
                        header = pb.SnapshotResponse(
                            version=held.version,
                            state=part,
                            worker_id=given.worker_id,
                            state_step=given.step,
                            state_page=number,
                            state_page_count=len(given.pages),
                        )
                        start = checksum.snapshot(context, header)
                        nothing = Slice(parameter.where.stop, 0)
                        message = codec.encode(
                            header, header.chunk, nothing, 0, buffers[0][:0], start=start
                        )
                        moved(self._shard, call, sent=len(message))
                        yield message
            self._shard.copied_s = time.monotonic()

    def set_learning_rate(
        self, request: pb.SetLearningRateRequest, call: Call
    ) -> pb.SetLearningRateResponse:
        change_learning_rate("parameter", self._shard, request, call)
        return pb.SetLearningRateResponse()

    def report(self, request: pb.ReportRequest, call: Call) -> pb.ReportResponse:
        parameter = self._named(request, call, Right.CONTRIBUTE)
        figures = {figure.name: figure.value for figure in request.figures}
        if request.HasField("learner"):
            worker_id = check_name("worker_id", request.worker_id)
            progress = LearnerProgress.from_proto(request.learner)
            if parameter.spec.fragment is None or parameter.spec.fragment.index:
                raise ArgumentError(
                    f"a learner's progress belongs to the parameter of its family's fragment 0; "
                    f"{request.parameter!r} is none"
                )
            self._shard.sessions.check(request.session, worker_id, call.principal.name)
            parameter.reports.note_learner(worker_id, progress)
        if figures or not request.HasField("learner"):
            parameter.reports.note(request.step, figures)
        return pb.ReportResponse()

    def deal_samples(self, request: pb.DealSamplesRequest, call: Call) -> pb.DealSamplesResponse:
        right = _DEAL_RIGHTS.get(request.stage, Right.CONTRIBUTE)
        parameter = self._named(request, call, right)
        if request.stage not in _DEAL_RIGHTS:
            check_name("worker_id", request.worker_id)
        return checksum.seal(parameter.deal(request))

    def keep_state(self, request: pb.KeepStateRequest, call: Call) -> pb.KeepStateResponse:
        parameter = self._named(request, call, _STATE_RIGHTS.get(request.stage, Right.CONTRIBUTE))
        check_name("worker_id", request.worker_id)
        response = parameter.keep_state(request)
        parameter.make_durable()
        return checksum.seal(response)

    def get_contributions(
        self, request: pb.GetContributionsRequest, call: Call
    ) -> pb.GetContributionsResponse:
        parameter = self._named(request, call, Right.READ)
        if not parameter.has_open_sets:
            raise ArgumentError(
                f"every step of parameter {request.parameter!r} has the gradients of "
                f"{parameter.spec.crew}, so shards keep no sets of it; they do where members= or "
                "min_contributors= is given",
                parameter=request.parameter,
            )
        response = pb.GetContributionsResponse()
        by_set: dict[Contributors, pb.ContributorSet] = {}
        size_bytes = 0
        for index, workers in sorted(parameter.sets.of_step(request.step).items()):
            if index < request.first_chunk_index:
                continue
            known = by_set.get(workers)
            size_bytes += _CHUNK_INDEX_SIZE_BYTES
            size_bytes += 0 if known else sum(len(each) + 4 for each in workers)
            if size_bytes > _CONTRIBUTIONS_SIZE_MAX_BYTES and response.sets:
                response.next_chunk_index = index
                break
            if known is None:
                known = by_set[workers] = response.sets.add(worker_ids=workers)
            known.chunk_indexes.append(index)
        return checksum.seal(response)

    def head(self) -> pb.GetStatusResponse:
        """Returns the status of the shard, without what it holds."""
        shard, config = self._shard, self._shard.config
        return pb.GetStatusResponse(
            shard=types_pb2.ShardIdentity(
                cluster_id=config.cluster_id,
                shard_index=config.shard_index,
                shard_count=config.shard_count,
            ),
            software_version=shardwell.__version__,
            uptime_s=time.monotonic() - shard.started_s,
            stored_bytes=shard.stored_bytes,
            received_payload_bytes=shard.traffic.received_bytes,
            sent_payload_bytes=shard.traffic.sent_bytes,
            open_stream_count=self._streams.count,
            arena_address=self._arenas.address,
            arithmetic=native.describe(),
            stream_address=self.stream_address,
        )

    def get_status(self, request: pb.GetStatusRequest, call: Call) -> pb.GetStatusResponse:
        shard = self._shard
        if request.identity_only:  # what a client asks first
            admit_newcomer()
        parameters: list[ParameterSlice] = []
        if request.parameter:
            call.check(Right.READ, "parameter", request.parameter)
            found = shard.parameters.find(request.parameter)  # at no cost of all the others
            parameters = [] if found is None or request.identity_only else [found]
        elif not request.identity_only:
            all_ = shard.parameters.all()
            parameters = [p for p in all_ if call.principal.best(p.spec.name)]
        name_count_max = max(STATUS_NAME_COUNT_MAX // max(len(parameters), 1), 1)
        response = self.head()
        if not (request.identity_only or request.after):
            shown = (each for each in self.troubles() if call.principal.best(each.name))
            response.troubles.extend(itertools.islice(shown, _TROUBLE_COUNT_MAX))
            response.resources.CopyFrom(self.resources())
            response.settings.CopyFrom(self.settings())
            if not call.principal.best(""):
                del response.settings.endings[:]
        size_bytes = 0
        attending = shard.sessions.by_worker() if parameters else {}
        for parameter in parameters:
            if parameter.spec.name > request.after and not response.more:
                described = shard.parameters.describe(parameter, name_count_max, attending)
                size_bytes += described.ByteSize()
                response.more = size_bytes > _STATUS_SIZE_MAX_BYTES and bool(response.parameters)
                if not response.more:
                    response.parameters.append(described)
        return checksum.seal(response)


def _ranges(
    codec: ChunkCodec,
    header: pb.SnapshotResponse,
    where: Slice,
    index: int,
    array: Float32,
    start: int,
) -> Iterator[bytes]:
    for number in range(where.chunk_count(_RANGE_ELEMENT_COUNT)):
        part = where.chunk(number, _RANGE_ELEMENT_COUNT)
        first = part.offset - where.offset
        values = array[first : first + part.size]
        try:
            yield codec.encode(header, header.chunk, part, index, values, start=start)
        except NonFiniteValueError as error:
            raise NonFiniteValueError(first + error.index, error.value) from None


def admit_newcomer() -> None:
    """Raises LimitError while connected clients need the last descriptors."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = len(os.listdir(_DESCRIPTORS))
    except FileNotFoundError:
        return  # a system that does not tell
    except OSError:
        count = most
    if most != resource.RLIM_INFINITY and count > most - _DESCRIPTOR_RESERVE:
        raise LimitError(
            f"limit of open files: the shard has {count} of {most}; raise it (ulimit -n), or use "
            "fewer workers or parameters"
        )
