"""One call's chunks of a parameter: gradients in, each answered or counted; weights out.

PutGradient, GetWeights and CloseStep are made of what Exchange is made of: an exchange whose chunks
are all counted alone, one that fetches weights, one that closes a step that is clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shardwell.errors import ArgumentError, CorruptChunkError, ShardUnavailableError
from shardwell.numerics.codec import Bytes
from shardwell.process.shared_memory import SharedMemory
from shardwell.transport.arena import Places, batch_count, payload_of, shared_message
from shardwell.transport.arena_offers import ArenaOffers
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.messages import ALIGNMENT_BYTES, Room
from shardwell_server.access.rights import Right
from shardwell_server.services.calls import Call, Handling, Needs
from shardwell_server.services.step_stream import (
    Due,
    Request,
    StepStream,
    moved,
    named,
    names_that_fit,
)
from shardwell_server.shard.crews import Contributor
from shardwell_server.shard.deadline import deadline_of, until
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.step_tracker import ParameterSeat

_SHORT_ELEMENT_COUNT = 131_072
"""Elements of a slice that is counted and encoded in about the time that a thread takes to wake
beside the loop's."""
_SLOW_ELEMENT_COUNT = 16_384
"""Fewer where payloads are compressed, or a file is mapped: several times as long."""


class ParameterStream(StepStream[ParameterSlice]):
    """The handler of one call, by `exchange` or by the method with the call's name."""

    _kind = "parameter"

    def __init__(
        self, shard: Shard, arenas: ArenaOffers, call: Call, *, only_counts: bool = False
    ) -> None:
        request_type = pb.PutGradientRequest if only_counts else pb.ExchangeRequest
        super().__init__(shard, call, partial(framing.parse_all, request_type))
        self._arenas = arenas
        self._only_counts = only_counts
        self._arena: SharedMemory | None = None
        self._step = 0
        self._counted = pb.PutGradientResponse()

    # Other calls.

    def put_gradient(self) -> Handling:
        yield from self.exchange()
        if self._opening is not None:
            self._slice.make_durable()
            if self._contributor is not None and self._contributor.superseded:
                self._counted.superseded.CopyFrom(self._superseded(self._contributor.superseded))
            if self._contributor is not None and self._slice.has_open_sets:
                self._counted.outcome.CopyFrom(self._outcome(self._contributor)())
        return self._counted

    def get_weights(self, request: pb.GetWeightsRequest) -> Handling:
        self._slice = named("parameter", self._shard, request, self._call, Right.READ)
        self._arena = arena_of(self._arenas, request.arena)
        yield from self._weights(request, self._arena)

    def close_step(self, request: pb.CloseStepRequest) -> Handling:
        parameter: ParameterSlice = named(
            "parameter", self._shard, request, self._call, Right.CONTRIBUTE
        )
        squares = None
        if request.HasField("norm"):
            norm = parameter.steps.close(request.step, request.norm)
        else:
            deadline = deadline_of(self._shard, self._call, request.wait_timeout_ms / 1000)
            measure = parameter.steps.measure
            squares, norm = yield from until(measure, request.step, deadline)
        # The gradients of the norm, too, before a client closes a step with it.
        parameter.make_durable()
        return checksum.seal(pb.CloseStepResponse(squares=squares, norm=norm))

    # A message of an exchange.

    def _opened(self) -> bool:
        if self._only_counts:
            self._bind()
        parameter = self._slice
        is_fast = parameter.storage.is_in_memory and not parameter.spec.lz4
        return (
            parameter.where.size <= (_SHORT_ELEMENT_COUNT if is_fast else _SLOW_ELEMENT_COUNT)
            and self._shard.config.durability.is_process
            and not parameter.spec.closes_by_norm
        )

    def _serve(self, request: pb.ExchangeRequest, payload: Bytes) -> Handling:
        call, parameter = self._call, self._slice
        has_gradient = request.HasField("gradient")
        if request.arena:
            self._check_between_steps("`arena`")
            self._arena = arena_of(self._arenas, request.arena)
        if not self._only_counts and (request.HasField("fetch") or request.HasField("close")):
            self._check_between_steps("`fetch` or `close`", is_in_step=has_gradient)
            if call.is_short and not self._may_be_short:
                yield Needs.LONG
            yield from self._asked(request)
        if not has_gradient:
            if payload.size:
                raise CorruptChunkError("a message has a payload and no `gradient`; send it again")
            return
        gradient = request.gradient
        if call.is_short and (
            not self._may_be_short
            or parameter.snapshots.pending  # what it changes is written to a file for them
        ):
            yield Needs.LONG
        contributor = self._contributor or self._bind()
        chunk, self._step = gradient.chunk, gradient.step
        payload = self._payload(gradient, payload)
        moved(self._shard, self._call, received=payload.size)
        deadline = deadline_of(self._shard, call, gradient.wait_timeout_ms / 1000)
        begun = self._beside.pop(chunk.chunk_index, None)
        is_new = yield from until(
            parameter.contribute, contributor, gradient, payload, deadline, begun=begun
        )
        self._is_between_steps = gradient.end_of_step and not self._only_counts
        is_late = parameter.has_open_sets and chunk.chunk_index in contributor.late
        if gradient.counts_only or self._only_counts:
            self._counted.counted_chunk_count += is_new
            self._counted.duplicate_chunk_count += not is_new
        else:
            follows = parameter.spec.mode == "sync" and not is_late
            where = chunk.chunk_index, gradient.step + 1 if follows else 0
            held = gradient.held_version if gradient.HasField("held_version") else None
            make = partial(parameter.weights_message, *where, deadline, held_version=held)
            if self._is_between_steps and parameter.has_open_sets:
                outcome = self._outcome(contributor)
                make = partial(_with_outcome, make, outcome)
            self._pending.append(
                Due(
                    make,
                    partial(parameter.is_ready, *where),
                    Room(chunk.shared.offset, payload) if chunk.HasField("shared") else None,
                )
            )
            if len(self._pending) > 2 * parameter.chunk_count:
                raise ArgumentError(
                    f"{len(self._pending)} chunks were sent without end_of_step, of "
                    f"{parameter.chunk_count}; read the answers first"
                )
        if self._is_between_steps:
            if contributor.superseded:
                superseded = self._superseded(contributor.superseded)
                yield pb.ExchangeResponse(superseded=superseded).SerializeToString()
            if self._counted.ByteSize():
                if parameter.has_open_sets:
                    self._counted.outcome.CopyFrom(self._outcome(contributor)())
                counted = pb.ExchangeResponse(counted=checksum.seal(self._counted))
                self._counted.Clear()
                self._pending.append(Due(counted.SerializeToString))

    def _transport(self) -> types_pb2.Transport:
        if self._arena is not None:
            return types_pb2.TRANSPORT_SHARED_MEMORY
        return super()._transport()

    def _payload(self, gradient: types_pb2.GradientChunk, payload: Bytes) -> Bytes:
        if checksum.gradient_control(gradient) != gradient.control_crc32c:
            raise CorruptChunkError(
                "end_of_step, counts_only, wait_timeout_ms or held_version of a chunk is damaged; "
                "send it again"
            )
        return payload_of(gradient.chunk, payload, self._arena)

    def _superseded(self, indexes: list[int]) -> pb.SupersededChunks:
        found = pb.SupersededChunks(step=self._step, chunk_indexes=indexes)
        found.crc32c = checksum.of_message(found)
        indexes.clear()
        return found

    def _outcome(self, contributor: Contributor[ParameterSeat]) -> Callable[[], pb.StepOutcome]:
        late, contributor.late = contributor.late, set()
        may_have, contributor.may_have_counted = contributor.may_have_counted, False
        return partial(_outcome, self._slice, self._step, late, may_have, contributor)

    def _asked(self, request: pb.ExchangeRequest) -> Handling:
        name = self._slice.spec.name
        if request.HasField("close") and request.HasField("fetch"):
            raise ArgumentError("a message has `fetch` and `close`; send two")
        if request.HasField("close"):
            checksum.check_sealed(request.close)
            if request.close.parameter != name:
                raise ArgumentError(
                    f"`close` names {request.close.parameter!r:.80} on a stream of {name!r}; open "
                    "that one first"
                )
            closed = yield from self.close_step(request.close)
            yield pb.ExchangeResponse(closed=closed).SerializeToString()
        if request.HasField("fetch"):
            fetch = request.fetch
            context = checksum.context(checksum.Kind.WEIGHTS_FETCH, name)
            if checksum.weights_fetch(context, fetch) != fetch.crc32c:
                raise CorruptChunkError("a fetch of weights is damaged; send it again")
            yield from self._weights(fetch, self._arena if fetch.in_arena else None)

    def _weights(
        self, asked: pb.GetWeightsRequest | pb.WeightsFetch, arena: SharedMemory | None
    ) -> Handling:
        parameter, min_version = self._slice, asked.min_version
        max_version = asked.max_version if asked.HasField("max_version") else None
        held = _held_versions(asked, parameter)
        deadline = deadline_of(self._shard, self._call, asked.wait_timeout_ms / 1000)
        places = None if arena is None else Places(arena)
        # GetWeightsResponse has the same fields.
        batch = framing.Batch(pb.ExchangeResponse, batch_count(parameter.chunk_count))
        for index in range(parameter.chunk_count):
            if not parameter.is_ready(index, min_version):
                yield from batch.rest()
            message = yield from until(
                parameter.weights_message, index, min_version, deadline, max_version, held[index]
            )
            parameter.make_durable()  # no client goes on from what could still be lost
            moved(self._shard, self._call, sent=len(message))
            shared_bytes = 0
            if places is not None:
                message, shared_bytes = shared_message(pb.ExchangeResponse, message, places.room)
            yield from batch.add(message, waits=shared_bytes > 0)
        yield from batch.rest()

    # Chunks that other threads count.

    def _count_beside(self, requests: Sequence[Request]) -> None:
        """Has free threads count a message's chunks, beside the others.

        Nothing is left to be decided: the stream is open, its worker has its seat, and these are
        chunks of one step, each once. Their order is free, as among workers; answers keep theirs.
        """
        contributor = self._contributor
        if self._call.is_short or contributor is None or contributor.seat is None:
            return
        if any(request.HasField("open") or request.arena for request, _, _ in requests):
            return
        if not requests[0][0].HasField("gradient"):
            return
        first = requests[0][0].gradient
        indexes = {first.chunk.chunk_index}
        for request, payload, _ in requests[1:]:
            gradient = request.gradient
            is_again = gradient.chunk.chunk_index in indexes
            if is_again or gradient.step != first.step or not gradient.chunk.HasField("shared"):
                return
            indexes.add(gradient.chunk.chunk_index)
            future = self._shard.core_threads.offer(self._count_one, contributor, gradient, payload)
            if future is None:
                return
            self._beside[gradient.chunk.chunk_index] = future

    def _count_one(
        self,
        contributor: Contributor[ParameterSeat],
        gradient: types_pb2.GradientChunk,
        payload: Bytes,
    ) -> bool:
        payload = self._payload(gradient, payload)
        deadline = deadline_of(self._shard, self._call, gradient.wait_timeout_ms / 1000)
        return self._slice.contribute(contributor, gradient, payload, deadline)


def _outcome(
    parameter: ParameterSlice,
    step: int,
    late: set[int],
    may_have_counted: bool,
    contributor: Contributor[ParameterSeat],
) -> pb.StepOutcome:
    found = pb.StepOutcome(
        step=step,
        late_chunk_indexes=sorted(late),
        tenure_is_over=contributor.is_over,
        version=parameter.version_min,
        is_draining=contributor.seat is not None and contributor.seat.is_draining,
        contributor_ids=names_that_fit(parameter.sets.workers(step)),
        late_may_have_counted=may_have_counted,
    )
    context = checksum.context(checksum.Kind.OUTCOME, parameter.spec.name)
    found.crc32c = checksum.outcome(context, found)
    return found


def _with_outcome(make: Callable[[], bytes], outcome: Callable[[], pb.StepOutcome]) -> bytes:
    """Puts the outcome before the weights: its bytes are more fields of protobuf's message."""
    message = make()
    head = pb.ExchangeResponse(outcome=outcome())
    rest = -head.ByteSize() % ALIGNMENT_BYTES
    if rest:
        head.padding = bytes((rest - 2) % ALIGNMENT_BYTES)
    return head.SerializeToString() + message


def _held_versions(
    asked: pb.GetWeightsRequest | pb.WeightsFetch, parameter: ParameterSlice
) -> list[int | None]:
    held = asked.held_versions if isinstance(asked, pb.WeightsFetch) else ()
    count = parameter.chunk_count
    if held and len(held) != count:
        raise ArgumentError(
            f"held_versions of parameter {parameter.spec.name!r}: expected {count}, one for each "
            f"chunk of the slice, or none; got {len(held)}",
            parameter=parameter.spec.name,
        )
    return [each - 1 if each else None for each in held] or [None] * count


def arena_of(arenas: ArenaOffers, token: int) -> SharedMemory | None:
    """Returns the arena of a token; None for no token."""
    memory = arenas.take(token) if token else None
    if token and memory is None:
        raise ShardUnavailableError(
            f"no arena of token {token:#x} is here, as after a restart; call again"
        )
    return memory
