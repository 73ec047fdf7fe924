"""A dense parameter in a worker: first weights, gradients out, weights in.

The three verbs block until they are done or their deadline has passed; a Parameter may be used by
several threads, whose calls then take turns. Its buffers are the caller's: nothing is kept of a
gradient after the call returns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from shardwell.channel import ANSWER_MARGIN_S, ShardChannel
from shardwell.codec import Float32
from shardwell.errors import (
    ArgumentError,
    ClosedError,
    CorruptChunkError,
    DeadlineError,
    ShardUnavailableError,
)
from shardwell.first_weights import FirstWeights, GivenWeights
from shardwell.lane import Lane
from shardwell.opening import Opening
from shardwell.siblings import Siblings
from shardwell.specs import SAMPLE_COUNT_MAX, STEP_MAX, ParameterSpec, check_learning_rate
from shardwell.traffic import Traffic
from shardwell.transfer import Gradient, Transfer
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.values import (
    as_flat,
    as_output,
    check_integer,
    check_timeout,
    finite_peak,
    milliseconds,
)
from shardwell.watchdog import Watchdog


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
        self.next_step: int
        """The step that this worker's next gradient joins; a restarted worker goes on here."""
        self.version = 0
        """Updates that the weights fetched last have seen (the fewest of their chunks)."""
        self._channels = channels
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._watchdog = watchdog
        self._executor = executor
        self._traffic = traffic
        self._lock = threading.RLock()
        self._closed = False
        self._lanes_used = False
        self._has_seat = False
        self._siblings = Siblings()
        self._opening = Opening(spec, channels, worker_id)
        self._transfer = Transfer(spec, worker_id=worker_id, traffic=traffic)
        self._parts, self.next_step = self._opening.open(timeout_s)

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
            finite_peak(what, values, self.name)
        wait_s = self._bounded(timeout_s)
        with self._turn(wait_s):
            version = FirstWeights(
                self.name,
                GivenWeights(values),
                self._channels,
                worker_id=self._worker_id,
                traffic=self._traffic,
                timeout_s=wait_s,
            ).settle()
            if self.spec.mode == "sync" and self.next_step < version:  # a checkpoint was restored
                self._close_lanes()
                self._parts, self.next_step = self._opening.open(wait_s)
            return version

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
        siblings, parts = Siblings(), self._parts
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
                            wait_timeout_ms=milliseconds(wait_s),
                        ),
                        timeout=wait_s + ANSWER_MARGIN_S,
                    ),
                )
                for part in parts
            ]
            self.version = self._transfer.receive(
                parts, flat, lambda number: next(calls[number], b""), min_version, siblings
            )
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
                                self._transfer.messages(
                                    pb.PutGradientRequest, part, work, opens=True
                                ),
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
                self._exchange_once(replace(work, wait_timeout_ms=milliseconds(rest_s)), flat)
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
            from_step = None if is_now else self._opening.first_step_ahead(self.next_step, wait_s)
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

    def reopen(self) -> None:
        """Asks the shards again where this worker stands, and goes on at that `next_step`."""
        with self._turn(self._timeout_s):
            self._close_lanes()
            self._parts, self.next_step = self._opening.open(self._timeout_s)

    def close(self) -> None:
        """Ends this worker's streams; the parameter lives on in the cluster. Safe to repeat."""
        self._closed = True
        self._close_lanes()

    # Gradients out.

    def _gradient(self, gradient: Any, sample_count: int, timeout_s: float | None) -> Gradient:
        """Checks everything that can be checked before anything is sent; takes a seat, once."""
        self._check_open()
        what = f"gradient of {self.name!r}"
        values = as_flat(what, gradient, self.size)
        count = check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX)
        peaks = None
        if not self.spec.allow_non_finite:
            peaks = [
                finite_peak(what, values, self.name, where.offset, where.stop)
                for part in self._parts
                for where in part.chunks
            ]
        wait_s = self._bounded(timeout_s)
        if not self._has_seat:
            self._opening.take_seat(wait_s)
            self._has_seat = True
        return Gradient(values, self.next_step, count, milliseconds(wait_s), peaks)

    def _exchange_once(self, work: Gradient, weights: Float32) -> None:
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
                    lane.submit(
                        self._transfer.messages(pb.ExchangeRequest, part, work, opens=opens)
                    )
                self.version = self._transfer.receive(
                    self._parts,
                    weights,
                    lambda number: lanes[number].read(),
                    min_version,
                    siblings,
                    watch,
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


def _guarded(messages: Iterator[bytes], failures: list[BaseException]) -> Iterator[bytes]:
    """Ends a stream early when a message can't be made, and keeps the reason for the caller."""
    try:
        yield from messages
    except Exception as error:
        failures.append(error)
