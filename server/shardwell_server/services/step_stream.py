"""One call's steps, of a parameter or a table: gradients in, each counted once; answers out.

`StepStream` is the driver of both. A subclass turns messages into contributions, and says which
answers they are owed. States of a stream: between steps, where it may be opened anew or asked for
something else, and in a step, from the first part of a gradient until one that ends the step.
Answers leave in the order in which they became due: those that are ready as messages come, all of
them before anything that follows a step, and none before what it acknowledges is durable.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from shardwell.errors import ArgumentError, ShardUnavailableError
from shardwell.numerics.codec import Bytes
from shardwell.specs.names import check_name
from shardwell.specs.optimizers import check_learning_rate
from shardwell.specs.parameter import STEP_MAX, ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell.transport.arena import BATCH_COUNT, shared_message
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.messages import Room
from shardwell_server.access.rights import Right
from shardwell_server.services.calls import UNIX_PEER, Call, Handling, Needs
from shardwell_server.shard.crews import Contributor
from shardwell_server.shard.deadline import NotYet, until
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table.slice import TableSlice

_LOG = logging.getLogger("shardwell_server")
SliceT = TypeVar("SliceT", ParameterSlice, TableSlice)
_NAMES_SIZE_MAX_BYTES = 16 * 1024
Kind: TypeAlias = Literal["parameter", "table"]
Request: TypeAlias = tuple[Any, Bytes, int]
"""A message's header, its payload, and bytes of the message."""


class Due(NamedTuple):
    """An answer that a stream owes."""

    make: Callable[[], bytes]
    is_ready: Callable[[], bool] = lambda: True
    room: Room | None = None
    """None: its payload goes into the message."""


def moved(shard: Shard, call: Call, *, received: int = 0, sent: int = 0) -> None:
    """Counts bytes of payload that a call has moved."""
    shard.traffic.add(received=received, sent=sent)
    call.moved_bytes += received + sent


class StepStream(ABC, Generic[SliceT]):
    """Drives the steps of one call; `parse` finds the requests of a message."""

    _kind: ClassVar[Kind]

    def __init__(
        self, shard: Shard, call: Call, parse: Callable[[bytes], Iterable[Request]]
    ) -> None:
        self._shard = shard
        self._call = call
        self._parse = parse
        self._slice: SliceT
        self._opening: Any = None
        self._contributor: Contributor[Any] | None = None
        self._may_be_short = False
        self._is_between_steps = True
        self._pending: deque[Due] = deque()
        self._batch = framing.Batch(pb.ExchangeResponse, BATCH_COUNT)
        self._is_spread = shard.core_threads.count > 1
        self._beside: dict[int, Future[bool]] = {}
        """Parts of the current message that other threads count, by index."""
        self._made: deque[Future[tuple[bytes, int]]] = deque()

    # What a subclass does.

    @abstractmethod
    def _opened(self) -> bool:
        """Takes the slice and the opening message; returns True if it may be short."""

    @abstractmethod
    def _serve(self, request: Any, payload: Bytes) -> Handling:
        """Serves a request; its answer becomes due."""

    def _count_beside(self, requests: Sequence[Request]) -> None:
        """Has free threads count parts of a message, where parts are independent."""

    # The driver.

    def exchange(self) -> Handling:
        try:
            while True:
                message = yield Needs.NEXT_STEP if self._is_between_steps else Needs.NEXT
                if message is None:
                    break
                requests = list(self._parse(message))
                if self._is_spread and len(requests) > 1:
                    self._count_beside(requests)
                for request, payload, _ in requests:
                    if self._is_between_steps and self._pending:
                        yield from self._answers(all_=True)  # of the step before
                    if self._opening is None or request.HasField("open"):
                        self._open(request)
                    yield from self._serve(request, payload)
                del message, request, payload, requests  # not to be held while answers wait
                if self._pending:
                    yield from self._answers(all_=self._is_between_steps)
                if self._is_between_steps:
                    self._call.is_short = self._may_be_short  # whatever this step was
            if self._pending:
                yield from self._answers(all_=True)
        finally:
            if self._beside or self._made:
                self._end_beside()

    def _open(self, request: Any) -> None:
        self._check_between_steps("`open`")
        self._slice = opened(self._kind, self._shard, request, self._call, Right.READ)
        check_name("worker_id", request.open.worker_id)
        self._opening, self._contributor = request.open, None
        self._may_be_short = self._opened()

    def _check_between_steps(self, what: str, *, is_in_step: bool = False) -> None:
        if is_in_step or not self._is_between_steps:
            raise ArgumentError(f"{what} came in the middle of a step; end it first")

    def _bind(self) -> Contributor[Any]:
        """A stream that only reads needs neither right nor session."""
        opening, call = self._opening, self._call
        call.check(Right.CONTRIBUTE, self._kind, self._slice.spec.name)
        session = self._shard.sessions.check(
            opening.session, opening.worker_id, call.principal.name, self._transport()
        )
        call.session = session.number
        self._contributor = Contributor(opening.worker_id, session, opening.tenure)
        return self._contributor

    def _transport(self) -> types_pb2.Transport:
        is_unix = self._call.peer == UNIX_PEER
        return types_pb2.TRANSPORT_UNIX if is_unix else types_pb2.TRANSPORT_TCP

    def _answers(self, *, all_: bool) -> Handling:
        pending, batch, holds = self._pending, self._batch, False
        while pending:
            first = pending[0]
            if (holds or not all_) and not first.is_ready():
                if not all_:
                    break
                yield from batch.rest()
            begun = self._made.popleft() if self._made else None
            if self._is_spread and len(pending) > 1 and not self._made:
                self._make_beside()
            if first.room is None:
                message = yield from until(first.make)
                size_bytes = len(message)
            else:
                message, size_bytes = yield from until(_shared, first, begun=begun)
            self._slice.make_durable()  # it acknowledges a gradient, or others go on from it
            pending.popleft()
            moved(self._shard, self._call, sent=size_bytes)
            is_shared = first.room is not None
            if holds or is_shared:
                yield from batch.add(message, waits=is_shared)
            else:
                yield message
            holds = is_shared
        if holds:
            yield from batch.rest()

    def _make_beside(self) -> None:
        if self._call.is_short:
            return
        for each in itertools.islice(self._pending, 1, None):
            if each.room is None or not each.is_ready():
                return
            future = self._shard.core_threads.offer(_shared, each)
            if future is None:
                return
            self._made.append(future)

    def _end_beside(self) -> None:
        """Returns when no other thread works for this call."""
        beside: list[Future[Any]] = [*self._beside.values(), *self._made]
        self._beside.clear()
        self._made.clear()
        for future in beside:
            error = None if future.cancel() else future.exception()
            if isinstance(error, NotYet):
                error.forget()


def opened(kind: Kind, shard: Shard, request: Any, call: Call, right: Right) -> Any:
    """Returns the slice that a stream's first message names."""
    if not request.HasField("open"):
        raise ArgumentError("a stream's first message must have `open`; it is missing")
    checksum.check_sealed(request.open)
    return named(kind, shard, request.open, call, right)


def named(kind: Kind, shard: Shard, request: Any, call: Call, right: Right) -> Any:
    """Returns the slice that a request names, if its caller has the right."""
    shard.check_identity(request.shard)
    name = getattr(request, kind)
    call.check(right, kind, name)
    return shard.registry(kind).opened(name, request.incarnation)


def joined(
    kind: Kind, shard: Shard, request: Any, call: Call, spec_type: type[ParameterSpec | TableSpec]
) -> Any:
    """Returns the answer to a worker that opens a parameter or table, perhaps a new one."""
    shard.check_identity(request.shard)
    takes_seat = request.take_seat
    named = request.worker_id or takes_seat
    worker_id = check_name("worker_id", request.worker_id) if named else ""
    spec = spec_type.from_proto(request.spec)
    registry = shard.registry(kind)
    registry.take_back(spec.name, request.incarnation)
    exists = registry.has(spec.name)
    right = Right.CONTRIBUTE if takes_seat else Right.READ if exists else Right.CREATE
    call.check(right, kind, spec.name)
    if (call.principal.best(spec.name) or 0) < Right.CONTRIBUTE:
        worker_id = ""  # a caller that may not contribute is none that others wait for
    registry.check_opened(spec.name, request.incarnation)
    if request.must_exist and not exists:
        raise shard.lost_memory(kind, spec.name)
    seat_for: Contributor[Any] | None = None
    if takes_seat:
        registry.get(spec.name)  # a caller that takes a seat has opened it before
        if request.from_step > STEP_MAX:
            raise ArgumentError(f"from_step must be at most {STEP_MAX}; got {request.from_step}")
        seat_for = Contributor(
            worker_id,
            shard.sessions.check(request.session, worker_id, call.principal.name),
            request.tenure,
            asks=True,
            begins_anew=request.begins_anew,
            from_step=request.from_step if request.HasField("from_step") else None,
        )
    found, created = registry.open(spec, call.principal.name)
    response = found.join(
        worker_id, request.session, seat_for=seat_for, incarnation=request.incarnation
    )
    response.created = created
    if registry.get(spec.name) is not found:  # it was deleted meanwhile
        raise ShardUnavailableError(f"{kind} {spec.name!r} was deleted; call again")
    if created:
        call.note("created", kind=kind, name=spec.name)
        size = "size" if kind == "parameter" else "dim"
        _LOG.info(f"{kind} created", extra={kind: spec.name, size: getattr(spec, size)})
    return response


def change_learning_rate(kind: Kind, shard: Shard, request: Any, call: Call) -> None:
    """Sets the learning rate of what a request names, from a step on."""
    found = named(kind, shard, request, call, Right.CONTRIBUTE)
    rate = check_learning_rate("learning_rate", request.learning_rate, found.spec.optimizer)
    from_step = request.from_step if request.HasField("from_step") else None
    found.change_learning_rate(from_step, rate)
    _LOG.info("learning rate changed", extra={kind: found.spec.name, "learning_rate": rate})


def names_that_fit(worker_ids: Iterable[str]) -> list[str]:
    """Returns the first names, as many as an outcome has room for."""
    found, size_bytes = [], 0
    for worker_id in worker_ids:
        size_bytes += len(worker_id) + 2
        if size_bytes > _NAMES_SIZE_MAX_BYTES:
            break
        found.append(worker_id)
    return found


def _shared(due: Due) -> tuple[bytes, int]:
    message = due.make()
    left, _ = shared_message(pb.ExchangeResponse, message, lambda size_bytes: due.room)
    return left, len(message)
