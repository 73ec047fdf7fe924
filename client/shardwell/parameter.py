"""A dense parameter in a worker: first weights, gradients out, weights in.

The three verbs block until they are done or their deadline has passed; a Parameter may be used by
several threads, whose calls then take turns. Its buffers are the caller's: nothing is kept of a
gradient after the call returns.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from shardwell import framing
from shardwell.channel import ANSWER_MARGIN_S, ShardChannel
from shardwell.chunk_codec import PAYLOAD_SIZE_MAX_BYTES, ChunkCodec
from shardwell.codec import CODECS, Float32, NonFiniteValueError
from shardwell.errors import (
    ArgumentError,
    ClosedError,
    CorruptChunkError,
    DeadlineError,
    NonFiniteError,
    ShardUnavailableError,
    ShardwellError,
    StepOrderError,
    UnknownParameterError,
)
from shardwell.first_weights import FirstWeights, confirm
from shardwell.lane import Lane
from shardwell.partition import Slice, slice_of
from shardwell.scratch import thread_scratch
from shardwell.siblings import Siblings
from shardwell.specs import SAMPLE_COUNT_MAX, STEP_MAX, ParameterSpec, check_learning_rate
from shardwell.traffic import Traffic
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.values import as_flat, as_output, check_finite, check_integer, check_timeout
from shardwell.watchdog import Watch, Watchdog


@dataclass(frozen=True)
class _Gradient:
    """A gradient on its way."""

    values: npt.NDArray[Any]
    step: int
    sample_count: int
    wait_timeout_ms: int


class _Part:
    """What this parameter is on one shard that owns a slice of it."""

    def __init__(self, channel: ShardChannel, where: Slice, chunk_element_count: int) -> None:
        self.channel = channel
        self.chunks = [
            where.chunk(index, chunk_element_count)
            for index in range(where.chunk_count(chunk_element_count))
        ]
        self.lane: Lane | None = None


class Parameter:
    """Made by `Client.parameter`."""

    def __init__(
        self,
        spec: ParameterSpec,
        channels: list[ShardChannel],
        *,
        worker_id: str,
        timeout_s: float,
        watchdog: Watchdog,
        executor: Executor,
        traffic: Traffic,
    ) -> None:
        self.spec = spec
        """What all workers agreed on."""
        self.next_step = 0
        """The step that this worker's next gradient joins; a restarted worker goes on here."""
        self.version = 0
        """Updates that the weights fetched last have seen (the fewest of their chunks)."""
        self._channels = channels
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._watchdog = watchdog
        self._executor = executor
        self._traffic = traffic
        self._codec = ChunkCodec.of(spec)
        self._lock = threading.RLock()
        self._closed = False
        self._lanes_used = False
        self._has_seat = False
        self._siblings = Siblings()
        self._parts: list[_Part] = []
        self._parts = self._open()

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.spec.name

    @property
    def size(self) -> int:
        """Number of float32 elements."""
        return self.spec.size

    def init(self, weights: Any, *, timeout_s: float | None = None) -> int:
        """Sets the first weights; whoever calls first, in the whole cluster, decides them.

        All workers may call it, each with its own values: one of them wins, as a whole, and the
        others return when its weights stand. They travel as float32 and stand exactly.

        Args:
            weights: (size,) float32, or of any shape with as many elements.
            timeout_s: See `Client`.

        Returns:
            The version: 0, or more if training has begun.

        Raises:
            ArgumentError, NonFiniteError: the weights can't be used; nothing was sent.
            DeadlineError: the client that came first did not finish in time.
        """
        what = f"first weights of {self.name!r}"
        values = as_flat(what, weights, self.size)
        if not self.spec.allow_non_finite:
            check_finite(what, values, self.name)
        wait_s = self._bounded(timeout_s)
        with self._turn(wait_s):
            return FirstWeights(
                self.name,
                values,
                self._channels,
                worker_id=self._worker_id,
                traffic=self._traffic,
                timeout_s=wait_s,
            ).settle()

    def get_weights(
        self, *, out: Float32 | None = None, min_version: int = 0, timeout_s: float | None = None
    ) -> Float32:
        """The weights, as the shards have them now.

        Args:
            out: Where to put them, a writable C-contiguous float32 array of `size` elements;
                default: a new (size,) array. Its contents are undefined after an error.
            min_version: Wait until every chunk has seen that many updates: `step + 1` for the
                result of `step`.
            timeout_s: See `Client`.

        Raises:
            NotInitializedError: nobody has called `init` yet.
            WorkersMissingError: `min_version` was not reached in time; names who is missing.
            DeadlineError, ShardUnavailableError: a shard did not answer.
        """
        min_version = check_integer("min_version", min_version, 0, STEP_MAX)
        weights = np.empty(self.size, np.float32) if out is None else out
        flat = weights if out is None else as_output(out, self.size)
        wait_s = self._bounded(timeout_s)
        self._check_open()
        siblings = Siblings()
        try:
            calls = [
                siblings.add(
                    part.channel,
                    part.channel.get_weights(
                        pb.GetWeightsRequest(
                            shard=part.channel.identity,
                            parameter=self.name,
                            worker_id=self._worker_id,
                            min_version=min_version,
                            wait_timeout_ms=_milliseconds(wait_s),
                        ),
                        timeout=wait_s + ANSWER_MARGIN_S,
                    ),
                )
                for part in self._parts
            ]
            self._receive(flat, lambda number: next(calls[number], b""), min_version, siblings)
        except (ShardUnavailableError, ValueError) as error:
            self._check_open(error)
            raise
        finally:
            siblings.cancel()
        return weights

    def get_weights_async(
        self, *, out: Float32 | None = None, min_version: int = 0, timeout_s: float | None = None
    ) -> Future[Float32]:
        """`get_weights` on a thread of the client's; its result or error comes in the future.

        `out` belongs to the call until then.
        """
        self._check_open()
        return self._executor.submit(
            self.get_weights, out=out, min_version=min_version, timeout_s=timeout_s
        )

    def put_gradient(
        self, gradient: Any, *, sample_count: int = 1, timeout_s: float | None = None
    ) -> int:
        """Adds a gradient to this worker's next step; returns when all shards have counted it.

        Does not wait for the other workers, except for a step before this one. After an error the
        step is still this worker's next: call again; what had been counted is not counted twice.

        Args:
            gradient: (size,) float32, or any shape and layout with as many elements; float64 and
                float16 are converted. Read until the call returns.
            sample_count: Weight in the step's mean, 0 to 2^24: sum(n_i * g_i) / sum(n_i). Has no
                effect in asynchronous mode.
            timeout_s: See `Client`.

        Returns:
            The step that it joined; `get_weights(min_version=step + 1)` has its effect.

        Raises:
            ArgumentError, NonFiniteError: the gradient can't be used; nothing was sent.
            NotInitializedError, StepOrderError, SeatsTakenError: see the errors.
            WorkersMissingError: an earlier step did not close in time.
            DeadlineError, ShardUnavailableError: a shard did not answer.
        """
        with self._turn(self._bounded(timeout_s)):
            work = self._gradient(gradient, sample_count, timeout_s)
            failures: list[BaseException] = []
            siblings = Siblings()
            try:
                calls = [
                    siblings.add(
                        part.channel,
                        part.channel.put_gradient.future(
                            _guarded(
                                self._messages(pb.PutGradientRequest, part, work, opens=True),
                                failures,
                            ),
                            timeout=work.wait_timeout_ms / 1000 + ANSWER_MARGIN_S,
                        ),
                    )
                    for part in self._parts
                ]
                for part, call in zip(self._parts, calls, strict=True):
                    try:
                        call.result()
                    except (grpc.RpcError, grpc.FutureCancelledError):
                        channel, error = siblings.failure(part.channel, call)
                        raise channel.translate(error, self.name) from None
                    if failures:
                        raise failures[0]
                    answer = call.result()
                    counted = answer.counted_chunk_count + answer.duplicate_chunk_count
                    if counted != len(part.chunks):
                        raise CorruptChunkError(
                            f"shard {part.channel.shard_index} counted {counted} of "
                            f"{len(part.chunks)} chunks of {self.name!r}; call again",
                            shard_index=part.channel.shard_index,
                            parameter=self.name,
                        )
            except (ShardUnavailableError, ValueError) as error:
                self._check_open(error)
                raise
            finally:
                siblings.cancel()
            self.next_step = work.step + 1
            return work.step

    def exchange(
        self,
        gradient: Any,
        *,
        sample_count: int = 1,
        out: Float32 | None = None,
        timeout_s: float | None = None,
    ) -> Float32:
        """`put_gradient` and `get_weights` of its result at once, chunk by chunk.

        While later chunks of the gradient leave, updated weights of earlier ones arrive, so that
        both directions of the wire are busy. Synchronous mode: waits for the other workers.

        Args:
            gradient: See `put_gradient`.
            sample_count: See `put_gradient`.
            out: See `get_weights`. It must not overlap the gradient's memory.
            timeout_s: See `Client`.

        Returns:
            The weights after this step: (size,) float32, `out` if given.

        Raises:
            As `put_gradient` and `get_weights`. After an error the step is still this worker's
            next: call again.
        """
        with self._turn(self._bounded(timeout_s)):
            work = self._gradient(gradient, sample_count, timeout_s)
            flat = weights = np.empty(self.size, np.float32) if out is None else out
            if out is not None:
                flat = as_output(out, self.size)
                if np.may_share_memory(flat, work.values):
                    raise ArgumentError("out must not overlap the gradient; pass another array")
            may_be_stale = self._lanes_used
            deadline_s = time.monotonic() + work.wait_timeout_ms / 1000
            try:
                self._exchange_once(work, flat)
            except (ShardUnavailableError, ValueError) as error:
                self._check_open(error)
                if not may_be_stale or not isinstance(error, ShardUnavailableError):
                    raise
                # The streams of earlier steps were gone; a step is safe to repeat on new ones.
                rest_s = max(deadline_s - time.monotonic(), 0.05)
                self._exchange_once(replace(work, wait_timeout_ms=_milliseconds(rest_s)), flat)
            self._lanes_used = True
            self.next_step = work.step + 1
            return weights

    def set_learning_rate(
        self, learning_rate: float, *, now: bool = False, timeout_s: float | None = None
    ) -> None:
        """Changes the optimizer's learning rate on all shards, for all workers.

        Synchronous mode: takes effect at this worker's next step, which is the same update on every
        shard and chunk if this worker takes part. Asynchronous mode, or with `now`: at the first
        step that no chunk of a shard has reached, which may be another step on another shard.

        Raises:
            ArgumentError: the rate is negative or not finite, or the optimizer has none.
            StepOrderError: chunks are past this worker's next step; use `now`.
        """
        rate = check_learning_rate("learning_rate", learning_rate)
        wait_s = self._bounded(timeout_s)
        with self._turn(wait_s):
            is_now = now or self.spec.mode == "async"
            from_step = None if is_now else self._first_step_ahead(wait_s)
            for channel in self._channels:
                request = pb.SetLearningRateRequest(
                    shard=channel.identity,
                    parameter=self.name,
                    learning_rate=rate,
                    from_step=from_step,
                )
                channel.call(
                    "SetLearningRate",
                    request,
                    pb.SetLearningRateResponse,
                    timeout_s=wait_s,
                    parameter=self.name,
                )

    def _first_step_ahead(self, timeout_s: float) -> int:
        """The first step from now on that no chunk of any shard has passed.

        That is this worker's next step, or, when that was interrupted and some chunks closed it,
        the one after it. A worker that takes part is never further behind.
        """
        newest = 0
        for channel in self._channels:
            status = channel.call(
                "GetStatus",
                pb.GetStatusRequest(parameter=self.name),
                pb.GetStatusResponse,
                timeout_s=timeout_s,
            )
            here = status.parameters
            if not here:
                raise UnknownParameterError(
                    f"shard {channel.shard_index} has no parameter {self.name!r} any more; "
                    "it lost its memory",
                    shard_index=channel.shard_index,
                    parameter=self.name,
                )
            newest = max(newest, here[0].version_max)
        if newest > self.next_step + 1:
            raise StepOrderError(
                f"learning rate of {self.name!r} from step {self.next_step}, this worker's next: "
                f"chunks have reached step {newest}; pass now=True, or open the parameter again",
                parameter=self.name,
            )
        return max(newest, self.next_step)

    def reopen(self) -> None:
        """Asks the shards again where this worker stands, and goes on at that `next_step`."""
        with self._turn(self._timeout_s):
            self._close_lanes()
            self._parts = self._open()

    def close(self) -> None:
        """Ends this worker's streams; the parameter lives on in the cluster. Safe to repeat."""
        self._closed = True
        self._close_lanes()

    # Opening.

    def _open(self) -> list[_Part]:
        """Creates or joins the parameter on all shards; parts with empty slices are left out."""
        answers = [self._join(channel, self._timeout_s) for channel in self._channels]
        if answers[0].initialized and not all(answer.initialized for answer in answers):
            epoch = answers[0].init_epoch
            confirm(self.name, self._channels, epoch, timeout_s=self._timeout_s)
        parts, next_steps = [], []
        for channel, opened in zip(self._channels, answers, strict=True):
            where = Slice(opened.slice_offset, opened.slice_size)
            item_size = CODECS[self.spec.codec_name].item_size
            bytes_ = opened.chunk_element_count * item_size
            if (
                where != slice_of(self.size, channel.shard_index, len(self._channels))
                or not 64 <= bytes_ <= PAYLOAD_SIZE_MAX_BYTES
            ):
                raise CorruptChunkError(
                    f"shard {channel.shard_index} answers slice {where} in chunks of "
                    f"{opened.chunk_element_count} elements for {self.name!r}; it does not fit "
                    "size and shard count; run the same version everywhere",
                    shard_index=channel.shard_index,
                    parameter=self.name,
                )
            if where.size:
                parts.append(_Part(channel, where, opened.chunk_element_count))
                next_steps.append(opened.next_step)
        if self.spec.mode == "sync" and max(next_steps) - min(next_steps) > 1:
            raise StepOrderError(
                f"shards disagree on where parameter {self.name!r} stands: this worker's next step "
                f"is {min(next_steps)} on one and {max(next_steps)} on another; a shard lost its "
                "memory; start the training again under another name",
                parameter=self.name,
            )
        self.next_step = min(next_steps)
        return parts

    def _join(
        self, channel: ShardChannel, timeout_s: float, *, take_seat: bool = False
    ) -> pb.CreateParameterResponse:
        """Creates or joins the parameter on one shard."""
        return channel.call(
            "CreateParameter",
            pb.CreateParameterRequest(
                shard=channel.identity,
                worker_id=self._worker_id,
                spec=self.spec.to_proto(),
                take_seat=take_seat,
            ),
            pb.CreateParameterResponse,
            timeout_s=timeout_s,
            parameter=self.name,
        )

    # Gradients out.

    def _gradient(self, gradient: Any, sample_count: int, timeout_s: float | None) -> _Gradient:
        """Checks everything that can be checked before anything is sent; takes a seat, once."""
        self._check_open()
        what = f"gradient of {self.name!r}"
        values = as_flat(what, gradient, self.size)
        count = check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX)
        if not self.spec.allow_non_finite:
            check_finite(what, values, self.name)
        wait_s = self._bounded(timeout_s)
        if not self._has_seat:
            for channel in self._channels:  # in order: shard 0 decides who is among the workers
                self._join(channel, wait_s, take_seat=True)
            self._has_seat = True
        return _Gradient(values, self.next_step, count, _milliseconds(wait_s))

    def _messages(
        self, header_type: Any, part: _Part, work: _Gradient, *, opens: bool
    ) -> Iterator[bytes]:
        """The stream of one gradient to one shard; runs on a thread of gRPC's."""
        scratch = thread_scratch()
        last = len(part.chunks) - 1
        for index, where in enumerate(part.chunks):
            header = header_type()
            if opens and index == 0:
                header.open.CopyFrom(self._stream_open(part.channel))
            gradient = header.gradient
            gradient.step = work.step
            gradient.sample_count = work.sample_count
            gradient.wait_timeout_ms = work.wait_timeout_ms
            gradient.end_of_step = index == last
            try:
                message = self._codec.encode(
                    header,
                    gradient.chunk,
                    where,
                    index,
                    work.values[where.offset : where.stop],
                    scratch,
                )
            except NonFiniteValueError as error:  # the caller changed the array meanwhile
                raise NonFiniteError(
                    f"gradient of {self.name!r}: element {where.offset + error.index} became "
                    f"{error.value} while it was sent; do not write to it before the call returns",
                    element_index=where.offset + error.index,
                    parameter=self.name,
                ) from None
            self._traffic.add_sent(len(message), where.size)
            yield message

    def _exchange_once(self, work: _Gradient, weights: Float32) -> None:
        """One attempt; on failure all lanes are closed, so that no late answer can be mistaken."""
        timeout_s = work.wait_timeout_ms / 1000 + ANSWER_MARGIN_S
        min_version = work.step + 1 if self.spec.mode == "sync" else 0
        lanes: list[Lane] = []

        def give_up() -> None:
            for lane in lanes:
                lane.close()

        with self._watchdog.watch(timeout_s, give_up) as watch:
            try:
                opens = not all(part.lane is not None and part.lane.is_open for part in self._parts)
                if opens:
                    self._close_lanes()
                    self._siblings = Siblings()
                siblings = self._siblings
                for part in self._parts:
                    lane = Lane(part.channel, siblings) if opens else part.lane
                    if lane is None or self._closed:
                        raise self._closed_error()
                    part.lane = lane
                    lanes.append(lane)
                    lane.submit(self._messages(pb.ExchangeRequest, part, work, opens=opens))
                self._receive(
                    weights, lambda number: lanes[number].read(), min_version, siblings, watch
                )
            except BaseException:
                self._close_lanes()
                for lane in lanes:
                    lane.close()
                    if lane.failure is not None:
                        raise lane.failure from None
                raise

    def _close_lanes(self) -> None:
        """Ends all lanes. From any thread: the watchdog's, or one that closes the client."""
        self._lanes_used = False
        for part in self._parts:
            lane, part.lane = part.lane, None
            if lane is not None:
                lane.close()

    # Weights in.

    def _receive(
        self,
        weights: Float32,
        read: Callable[[int], bytes],
        min_version: int,
        siblings: Siblings,
        watch: Watch | None = None,
    ) -> None:
        """Reads every chunk of every part, in turns, so that no shard's stream stands still.

        All clients read shard by shard within a chunk index, in the same order; with it, a shard
        that waits until its answer is taken can never be part of a circle of waits.
        """
        version = math.inf
        for index in range(max(len(part.chunks) for part in self._parts)):
            for number, part in enumerate(self._parts):
                if index < len(part.chunks):
                    try:
                        message = read(number)
                    except grpc.RpcError as error:
                        if watch is not None and watch.expired:
                            raise DeadlineError(
                                f"shard {part.channel.shard_index} at {part.channel.address} did "
                                f"not answer an exchange of {self.name!r} within its deadline; "
                                "check the network, or raise timeout_s",
                                shard_index=part.channel.shard_index,
                                parameter=self.name,
                            ) from None
                        channel, first = siblings.failure(part.channel, error)
                        raise channel.translate(first, self.name) from None
                    found = self._decode(
                        part,
                        index,
                        message,
                        weights,
                        min_version,
                        is_exchange=watch is not None,
                    )
                    version = min(version, found)
        self.version = int(version)

    def _decode(
        self,
        part: _Part,
        index: int,
        message: bytes,
        weights: Float32,
        min_version: int,
        *,
        is_exchange: bool,
    ) -> int:
        """Checks a chunk of weights and writes it where it belongs; returns its version."""
        header, payload = framing.parse(pb.ExchangeResponse, message)
        where = part.chunks[index]
        chunk: types_pb2.Chunk = header.chunk
        # A step after this worker's can't have closed without it; a shard that says so has kept an
        # older state than another one.
        exact = is_exchange and self.spec.mode == "sync"
        late = header.version != min_version if exact else header.version < min_version
        if chunk.chunk_index != index or late:
            raise CorruptChunkError(
                f"shard {part.channel.shard_index} answered chunk {chunk.chunk_index} at version "
                f"{header.version} of {self.name!r}; expected chunk {index} at version "
                f"{min_version}{'' if exact else ' or later'}",
                shard_index=part.channel.shard_index,
                parameter=self.name,
            )
        try:
            stored = self._codec.open(chunk, where, payload)
        except ShardwellError as error:
            raise CorruptChunkError(
                f"shard {part.channel.shard_index} answered, for {self.name!r}: {error.message}",
                shard_index=part.channel.shard_index,
                parameter=self.name,
            ) from None
        self._codec.codec.decode(stored, chunk.scale_exponent, weights[where.offset : where.stop])
        self._traffic.add_received(len(message), where.size)
        return int(header.version)

    def _stream_open(self, channel: ShardChannel) -> types_pb2.StreamOpen:
        return types_pb2.StreamOpen(
            shard=channel.identity, parameter=self.name, worker_id=self._worker_id
        )

    def _bounded(self, timeout_s: float | None) -> float:
        return check_timeout(self._timeout_s if timeout_s is None else timeout_s)

    @contextlib.contextmanager
    def _turn(self, timeout_s: float) -> Iterator[None]:
        """Calls that use the worker's next step take turns; waiting for one's turn is bounded."""
        if not self._lock.acquire(timeout=timeout_s):
            raise DeadlineError(
                f"another thread's call on {self.name!r} took longer than {timeout_s:g} s; "
                "raise timeout_s, or use one thread a parameter",
                parameter=self.name,
            )
        try:
            self._check_open()
            yield
        finally:
            self._lock.release()

    def _check_open(self, cause: BaseException | None = None) -> None:
        """Refuses to work after `close`; `cause` is what came of working while it was called."""
        if self._closed:
            raise self._closed_error() from cause

    def _closed_error(self) -> ClosedError:
        return ClosedError(
            f"parameter {self.name!r} was closed with its client; connect again",
            parameter=self.name,
        )


def _milliseconds(seconds: float) -> int:
    return max(int(seconds * 1000), 1)


def _guarded(messages: Iterator[bytes], failures: list[BaseException]) -> Iterator[bytes]:
    """Ends a stream early when a message can't be made, and keeps the reason for the caller."""
    try:
        yield from messages
    except Exception as error:
        failures.append(error)
