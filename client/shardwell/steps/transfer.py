"""One attempt of a call: messages leave for all shards, and answers come in.

    borrow a set of streams -> submit each shard's messages -> read the answers in turns
    -> give the set back, or close it after a failure

What the messages say and what an answer means is for the subclass: chunks of a parameter
(parameter/exchange.py) or rows of a table (table/exchange.py). Another attempt is for the caller,
whose records say how far this one has come.

Invariants:
  - Everything leaves for all shards before an answer is awaited.
  - All clients read in one order: unit by unit, and within a unit shard by shard, whichever units
    their calls have. So a shard that waits until its answer is taken can never be part of a circle
    of waits (docs/adr/0033-pieces.md).
  - An attempt ends with its streams closed, or with every answer read and the streams kept.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import grpc

from shardwell.errors import CorruptChunkError, NonFiniteError
from shardwell.numerics.codec import Bytes
from shardwell.process.spans import ALL_CHUNKS, Traffic, now_ns
from shardwell.rpc.cluster import Shards
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.steps.opening import Opening
from shardwell.transport.arena import Arena
from shardwell.transport.call_group import CallGroup
from shardwell.transport.stream import ShardStream
from shardwell.transport.stream_pool import StreamPool
from shardwell.v1.trace_pb2 import SPAN_KIND_WAIT
from shardwell.wire import checksum
from shardwell.wire import messages as framing

SHORT_BYTES = 64 * 1024
"""The size of messages that fit into a socket, and are made sooner than a thread wakes."""
_SPREAD_BYTES = 256 * 1024
"""The size from which on an answer is worth another thread's waking."""

Answer: TypeAlias = tuple[Any, Bytes, int]


PartT = TypeVar("PartT", bound=Any)
"""The part of a call for one shard, whose `channel` it has."""


@dataclass(eq=False)
class Line(Generic[PartT]):
    """One shard in one attempt."""

    part: PartT
    first: int
    """The first unit that it answers: a chunk, or a message of rows."""
    stop: int
    """The one behind the last."""
    stream: ShardStream
    call_group: CallGroup
    """Call group of all streams of the attempt: its first failure is the one that counts."""
    opens: bool
    arena: Arena | None = None
    """Shared with the shard as long as the attempt lasts."""
    work: Any = None
    """The gradient that it sends, which its answers are about; None: none."""
    is_shared: bool = False
    answers: deque[Answer] = field(default_factory=deque)
    """Answers that came in one message with the last that was read."""
    held: dict[int, int] = field(default_factory=dict)
    """The versions of images that it has said are held, by the number of the chunk."""


Stretch: TypeAlias = tuple[PartT, int, int]
"""A part, its first unit that is sent or asked for, and the one behind the last."""


class StepTransfer(ABC, Generic[PartT]):
    """The way of one parameter's or table's steps to the shards and back."""

    _open_type: Callable[..., Any]
    _answer_type: type[Any]
    _aside = ""
    """The field of answers that come between those of units; "": none do."""
    _shares = False
    """True if payloads may lie in memory that a shard of this machine shares."""

    def __init__(
        self,
        opening: Opening[Any, Any],
        pool: StreamPool,
        shards: Shards,
        traffic: Traffic,
    ) -> None:
        self._opening = opening
        self._name: str = opening.spec.name
        self._pool = pool
        self._spans = shards.spans
        self._traffic = traffic
        self._threads = shards.core_threads

    @contextlib.contextmanager
    def _lines(
        self,
        stretches: Sequence[Stretch[PartT]],
        attempts: Attempts,
        span_kind: int | None = None,
        step: int = 0,
        *,
        reads: bool = False,
        work: Any = None,
    ) -> Iterator[list[Line[PartT]]]:
        """Gives a stream to the shard of each part, for some of its units, in the order given.

        Streams that are opened only to read share no memory and end with the call: a reader, or a
        wait for weights beside the worker's own steps, uses up nothing that others need.
        """
        channels = [part.channel for part, _, _ in stretches]
        lines: list[Line[PartT]] = []
        begin_ns = now_ns()
        try:
            with self._pool.borrowed(attempts.rest_s) as streams:
                subject = (self._name, self._opening.incarnation, self._opening.tenure)
                streams.only_reads = reads and streams.is_new
                opened = streams.streams(channels, subject, attempts.rest_s)
                for stretch, (stream, opens) in zip(stretches, opened, strict=True):
                    line = Line(*stretch, stream, streams.call_group, opens, work=work)
                    lines.append(line)
                    if not self._shares or streams.only_reads:
                        continue
                    if room_bytes := self._room_bytes(*stretch):
                        line.arena = stream.arena(room_bytes, attempts.rest_s)
                        line.is_shared = line.arena is not None and line.arena.has_room(room_bytes)
                yield lines
        finally:
            for line in lines:  # which the error that is raised would hold
                line.arena = None
            if span_kind is not None:
                self._spans.add(span_kind, self._name, step, ALL_CHUNKS, "", begin_ns)

    def _room_bytes(self, part: PartT, first: int, stop: int) -> int:
        """Returns the bytes of an arena for units [first, stop), where `_shares`; 0: no arena."""
        raise NotImplementedError

    def _receive(
        self,
        lines: Sequence[Line[PartT]],
        first: int,
        step: int,
        take: Callable[[Line[PartT], int, Answer], None],
    ) -> None:
        """Reads every answer of every line, in turns; `take` gets each, maybe on another thread."""
        stop = max((line.stop for line in lines), default=0)
        spread = None
        try:
            for unit in range(first, stop):
                for line in lines:
                    if not line.first <= unit < line.stop:
                        continue
                    answer = self._next(line, step, unit)
                    has_more = line.answers or (
                        answer[2] >= _SPREAD_BYTES and not (unit == stop - 1 and line is lines[-1])
                    )
                    if has_more and self._threads.count > 1:
                        spread = spread or self._threads.spread()
                        spread.give(take, line, unit, answer)
                    else:
                        take(line, unit, answer)
                    del answer  # which an error that is raised would hold
        finally:
            if spread is not None:
                spread.wait()
        for line in lines:
            if line.answers:
                raise self._damaged(line, "more than it was asked for; call again")

    def _next(self, line: Line[PartT], step: int = 0, unit: int | None = None) -> Answer:
        """Returns the next answer of a shard; blocks. With `unit`, a wait is noted as a span.

        The error that ends the attempt may be another shard's.
        """
        while True:
            if line.answers:
                answer = line.answers.popleft()
                if not self._aside or not answer[0].HasField(self._aside):
                    return answer
                self._take_aside(line, answer[0])
                continue
            channel, begin_ns = line.part.channel, now_ns()
            try:
                message = line.stream.read()
                line.answers.extend(framing.parse_all(self._answer_type, message))
            except grpc.RpcError as error:
                failed = line.call_group.error_of(channel, error, **self._opening.of)
                if isinstance(failed, NonFiniteError):
                    self._explain(line, failed)
                raise failed from None
            except CorruptChunkError as error:
                raise self._damaged(line, error.message) from None
            if unit is not None:
                self._spans.add(SPAN_KIND_WAIT, self._name, step, unit, channel.name, begin_ns)

    def _damaged(self, line: Line[PartT], how: str) -> CorruptChunkError:
        """Returns the error for an answer that can't be believed; `how` says why."""
        channel = line.part.channel
        return self._opening.damaged(channel, f"answered for {self._name!r}: {how}")

    def _take_aside(self, line: Line[PartT], answer: Any) -> None:
        raise NotImplementedError

    @abstractmethod
    def _explain(self, line: Line[PartT], error: NonFiniteError) -> None:
        """Completes a shard's refusal of values with what this worker knows."""

    def _stream_open(self, channel: ShardChannel) -> Any:
        opening = self._opening
        return checksum.seal(
            self._open_type(
                shard=channel.identity,
                worker_id=opening.worker_id,
                session=channel.session.number,
                tenure=opening.tenure,
                incarnation=opening.incarnation,
                **opening.of,
            )
        )
