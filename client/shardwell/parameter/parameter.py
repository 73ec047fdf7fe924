"""A dense parameter in a worker: first weights, gradients out, weights in.

Its values are one vector, or tensors by name, as it was opened (values.py). Calls block until they
are done or their deadline has passed; meanwhile a shard that went away is waited for, and what it
has not acknowledged is sent again. A Parameter may be used by several threads, whose calls then
take turns. Its buffers are the caller's: nothing is kept of a gradient after the call returns.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, get_args

import numpy as np
from typing_extensions import override

from shardwell.errors import (
    ArgumentError,
    ClosedError,
    CorruptChunkError,
    DeadlineError,
    DivergedError,
    LimitError,
    NonFiniteError,
    ShardUnavailableError,
    StepOrderError,
)
from shardwell.numerics.arguments import check_finite, check_integer
from shardwell.numerics.codec import Float32, block_codec
from shardwell.numerics.update_rules import TensorRules, clip_factor
from shardwell.parameter.exchange import Gradient, Progress, ShardSlice, Transfer
from shardwell.parameter.feedback import NOTHING_LOST, Ended, Feedback
from shardwell.parameter.first_weights import FirstWeights, GivenValues
from shardwell.parameter.membership import ParameterOpening
from shardwell.parameter.open_exchange import OpenExchange, Piece
from shardwell.parameter.outcome import Outcome, merged
from shardwell.parameter.pieces import Pieces
from shardwell.parameter.values import Room, ValuesT, values_of
from shardwell.placement.readiness import Ranges
from shardwell.placement.slices import Slice, slice_of
from shardwell.process.html_table import html_table
from shardwell.rpc.call_scope import JointTurn
from shardwell.rpc.cluster import Shards
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ask_parameters
from shardwell.specs.learner import LearnerProgress
from shardwell.specs.names import check_name
from shardwell.specs.parameter import SAMPLE_COUNT_MAX, STEP_MAX, ParameterSpec, block_size_of
from shardwell.steps.handle import Handle
from shardwell.steps.member import Member
from shardwell.threads.asking import ask_all
from shardwell.traffic import Traffic
from shardwell.transport.stream_pool import IdleStreams, StreamPool
from shardwell.v1 import parameter_server_pb2 as pb

_REPORT_S = 10.0
"""After so long a report is given up."""
_REPORT_ERROR_COUNT = 10
"""Reasons that are logged why reports were refused."""
_LOG = logging.getLogger("shardwell")

LateName = Literal["drop", "carry"]
"""What becomes of a gradient whose step has closed without it."""


def checked_late(late: Any) -> LateName:
    """`late` if it is one.

    Raises:
        ArgumentError: it is not.
    """
    if late not in get_args(LateName):
        raise ArgumentError(f"late must be 'drop' or 'carry'; got {late!r:.80}")
    found: LateName = late
    return found


class Settled(NamedTuple):
    """What became of first weights."""

    version: int
    is_own: bool
    """Whether they are the caller's."""


class Parameter(Handle[ParameterSpec], Generic[ValuesT]):
    """Made by `Client.parameter`. A context manager, which closes the parameter in this worker.

    "Values", below, are one (size,) array; or, opened with `tensors`, a dict of arrays by name,
    each of its shape. Arrays are read and written in place; tensors that lie one behind the other
    in one buffer, as returned ones do, are a little faster.

    Examples:
        >>> tensors = {"weight": (2, 2), "bias": (2,)}
        >>> net = client.parameter("layer", tensors=tensors, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init({name: np.zeros(shape) for name, shape in tensors.items()})
        >>> weights = net.exchange({name: np.ones(shape) for name, shape in tensors.items()})
        >>> weights["bias"]
        array([-0.5, -0.5], dtype=float32)
        >>> net.next_step
        1
    """

    kind = "parameter"
    next_step: int = 0
    """The step that this worker's next gradient joins."""
    _opening: ParameterOpening

    def __init__(
        self,
        spec: ParameterSpec,
        shards: Shards,
        *,
        worker_id: str,
        timeout_s: float,
        traffic: Traffic,
        idle_streams: IdleStreams,
        late: LateName = "drop",
    ) -> None:
        super().__init__(spec, shards, timeout_s=timeout_s)
        self.is_draining = False
        """Whether an operator wants this elastic member to leave after its step, as `shardwell
        members drain` asks it: a loop that looks here calls `leave`, or closes the client."""
        codec = block_codec(spec.codec_name) if spec.has_image else None
        self._feedback = Feedback(spec.size, codec)
        """What the next gradient adds of earlier ones."""
        self.late = late
        self._sent_step = -1
        """The step of which a call has failed that may have sent something."""
        self.outcome: Outcome | None = None
        """What the shards counted of this worker's last gradient; None: it gave none."""
        self.version = 0
        """Updates that the weights fetched last have seen (the fewest of their chunks)."""
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._idle_streams = idle_streams
        self._traffic = traffic
        self._values = values_of(spec)
        self._rules = TensorRules(spec.optimizer, spec.layout)
        self._reporting: Future[None] | None = None
        """The report that was sent last."""
        self._report_errors: set[str] = set()
        """Why reports were refused, as it was logged."""
        self._progress: LearnerProgress | None = None
        """This learner's next report of progress."""
        self._saying: Future[None] | None = None
        """The call that sends its last report."""
        self._closes_by_norm = spec.closes_by_norm
        self._clips = bool(spec.optimizer.clip_norm) and not spec.closes_by_norm
        """Whether the worker knows the norm of the mean, and clips it."""
        self._closed_version = 0
        """Steps before it have closed everywhere, where they close by their norm."""
        pool = StreamPool(idle_streams, self._what, count_max=None, **self._of)
        self._has_seat = False
        self._is_in_step = False
        """Whether a part of this worker's next step may be counted: of an earlier process of it, or
        of a call that failed."""
        self._refused_step = -1
        """The step of which a shard refused a part."""
        self._opening = ParameterOpening(spec, shards.channels, worker_id)
        self._transfer = Transfer(
            spec,
            pool,
            spans=shards.spans,
            worker_id=worker_id,
            traffic=traffic,
            threads=shards.core_threads,
        )
        self._member = self._member_of(self._transfer, worker_id)
        self._calls.run(self._open)

    def __repr__(self) -> str:
        layout = self.spec.layout
        tensors = "" if layout is None else f", {len(layout)} tensors"
        return f"Parameter({self.name!r}, size={self.size}{tensors}, mode={self.spec.mode!r})"

    def _repr_html_(self) -> str:
        spec = self.spec
        workers = f", {spec.crew}" if spec.worker_count else ""
        rows: list[tuple[str, object]] = [
            ("elements", f"{self.size:,}"),
            ("tensors", "one vector" if spec.layout is None else len(spec.layout)),
            ("optimizer", spec.optimizer),
            ("mode", f"{spec.mode}{workers}"),
            ("codec", spec.codec),
            ("next step", self.next_step),
            ("version of the weights here", self.version),
        ]
        return html_table(f"parameter {self.name}", (), rows)

    @property
    def late(self) -> LateName:
        """The way of a gradient whose step has closed without it; see `Client.parameter`.

        Setting "drop" forgets what is carried over.

        Raises:
            ArgumentError: it is set to neither "drop" nor "carry".
        """
        return "carry" if self._feedback.carries else "drop"

    @late.setter
    def late(self, late: Any) -> None:
        self._feedback.set_carries(checked_late(late) == "carry")

    @property
    def size(self) -> int:
        """Number of float32 elements."""
        return self.spec.size

    @property
    def slices(self) -> list[Slice]:
        """The range of elements that each shard owns, by shard.

        Where each worker has a shard (`shardwell run --with-shards`, `GroupCluster`), that of rank
        r owns `slices[r]`. They are whole blocks of `spec.slice_unit` elements, of which the first
        slices may have one more; with fewer blocks than shards, the last are empty.
        """
        shard_count = len(self._shards.channels)
        unit = self.spec.slice_unit
        return [slice_of(self.size, i, shard_count, unit) for i in range(shard_count)]

    def init(self, weights: Any, *, timeout_s: float | None = None) -> int:
        """Sets the first weights; the first caller in the whole cluster decides them.

        All workers may call it, each with its own values: one of them wins, as a whole, and the
        others return when its weights are set. They travel as float32 and are kept exactly.

        Args:
            weights: Values; see `put_gradient` for what is taken.
            timeout_s: See `Client`.

        Returns:
            The version: 0, or more if training has begun.

        Raises:
            ArgumentError, NonFiniteError: the weights can't be used; nothing was sent.
            DeadlineError: the client that came first did not finish in time.
        """

        def settle(attempts: Attempts) -> int:
            given = GivenValues(self._first_values(weights, is_weights=True))
            return self._settle(given, attempts).version

        return self._calls.run(settle, timeout_s, in_turn=True)

    def restore(
        self, *arrays: Any, version: int, load_id: int, timeout_s: float | None = None
    ) -> int:
        """`init` with the update rule's arrays, as a checkpoint has them.

        Args:
            arrays: Values, as of `init`: the weights, then the update rule's arrays in the order of
                its `slot_names`, which a version above 0 needs; and the image, with codec int8, or
                without it the weights are the image.
            version: Updates that they have seen; `next_step` goes on there.
            load_id: Tells these values from any others, 1 to 2^63 - 1. All callers that give the
                same values give the same.
            timeout_s: See `Client`.

        Returns:
            The version: `version`, or more if training has begun on these values.

        Raises:
            ArgumentError: the parameter has other first weights; or as `init`.
            NonFiniteError, DeadlineError: as `init`.
        """

        def settle(attempts: Attempts) -> int:
            values = [
                self._first_values(array, is_weights=not number)
                for number, array in enumerate(arrays)
            ]
            slot_count = len(self.spec.optimizer.slot_names)
            if self.spec.has_image and len(values) == 1 + slot_count and (slot_count or version):
                values.append(values[0])
            given = GivenValues(*values, version=version, load_id=load_id)
            settled = self._settle(given, attempts)
            if settled.is_own:
                return settled.version

            def ask(channel: ShardChannel) -> pb.GetStatusResponse:
                return attempts.beside().run(
                    lambda: ask_parameters(channel, attempts.rest_s, self.name)
                )

            found = ask_all(self._shards.channels, ask)
            if any(each.load_id != load_id for status in found for each in status.parameters):
                raise ArgumentError(
                    f"parameter {self.name!r} has first weights already, which are others than "
                    "these; delete it before, or give these another name",
                    parameter=self.name,
                )
            return settled.version

        return self._calls.run(settle, timeout_s, in_turn=True)

    def _first_values(self, given: Any, *, is_weights: bool) -> Float32:
        """Values for all elements, checked; state may be infinite, as squares overflow."""
        what = f"first weights of {self.name!r}"
        values: Float32 = self._values.pieces(what, given).whole()
        if is_weights and not self.spec.allow_non_finite:
            check_finite(
                what, values, self.name, remedy="mend them first", name_of=self.spec.element
            )
        return values

    def _settle(self, values: GivenValues, attempts: Attempts) -> Settled:
        """Has first weights, these or others, and goes on behind them."""
        first_weights = FirstWeights(
            self.spec,
            values,
            self._shards.channels,
            worker_id=self._worker_id,
            traffic=self._traffic,
            attempts=attempts,
            incarnation=self._opening.incarnation,
        )
        version = attempts.run(first_weights.settle)
        known_step = self.next_step + self._gives_again
        if self.spec.mode == "sync" and known_step < version:  # a checkpoint was restored
            self._open(attempts, is_known=True)
        return Settled(version, first_weights.is_own)

    def get_weights(
        self, *, out: ValuesT | None = None, min_version: int = 0, timeout_s: float | None = None
    ) -> ValuesT:
        """The weights, as the shards have them now.

        Args:
            out: Where to put them: values of writable C-contiguous float32; default: new ones,
                tensors as views of one buffer. Their contents are undefined after an error.
            min_version: Wait until every chunk has seen that many updates: `step + 1` for the
                result of `step`.
            timeout_s: See `Client`.

        Raises:
            NotInitializedError: no worker has called `init` yet.
            DivergedError: weights became NaN or infinite.
            WorkersMissingError: `min_version` was not reached in time; names who is missing.
            DeadlineError, ShardUnavailableError: a shard did not answer, or did not come back.
        """
        get = partial(self._get_weights, out, min_version)
        return self._calls.run(get, timeout_s, verb="get_weights")

    def get_weights_async(
        self, *, out: ValuesT | None = None, min_version: int = 0, timeout_s: float | None = None
    ) -> Future[ValuesT]:
        """`get_weights` without waiting: its result or error comes in the future.

        `out` belongs to the call until then. A call that waits does not delay others; a client may
        have 256 of them.

        Raises:
            LimitError: as many calls of the client are under way.
            ClosedError: the parameter or its client was closed.
        """
        return self._calls.start(partial(self._get_weights, out, min_version), timeout_s)

    def put_gradient(
        self,
        gradient: Any,
        *,
        sample_count: int = 1,
        learning_rate: float | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Adds a gradient to this worker's next step; returns when all shards have counted it.

        Does not wait for the other workers, except for a step before this one. After an error the
        step is still this worker's next: call again; what had been counted is not counted twice.

        Args:
            gradient: Values: float32; float64, float16 and bfloat16 are converted. NumPy arrays, or
                what has `__array__`, DLPack or the buffer protocol, such as a torch tensor in the
                CPU's memory. A vector may have any shape and layout with `size` elements. Read
                until the call returns.
            sample_count: Weight in the step's mean, 0 to 2^24: sum(n_i * g_i) / sum(n_i). Has no
                effect in asynchronous mode.
            learning_rate: The optimizer's rate from this step on, for all workers, so that a
                schedule needs no call of its own. All workers give the same; a `GroupedRate` where
                groups of tensors have rates that change apart. Asynchronous mode: the rate of this
                gradient's update alone. Default: no change.
            timeout_s: See `Client`.

        Returns:
            The step that it joined; `get_weights(min_version=step + 1)` has its effect.

        Raises:
            ArgumentError, NonFiniteError: the gradient can't be used; nothing was sent.
            NotInitializedError, StepOrderError, SeatsTakenError: see the errors. StepOrderError,
                too, where the step has another learning rate by then: nothing was counted.
            WorkersMissingError: an earlier step did not close in time.
            DeadlineError, ShardUnavailableError: a shard did not answer, or did not come back.
        """

        def put(attempts: Attempts) -> int:
            work = self._gradient(gradient, sample_count, learning_rate, attempts)
            if self._clips:
                self._clip(work)
            work.after_refusal = work.step == self._refused_step
            try:
                self._put(work, attempts)
            except BaseException as error:
                self._note_failure(work, error)
                raise
            self._end_step(work, attempts)
            return work.step

        return self._calls.run(put, timeout_s, in_turn=True, verb="put_gradient")

    def exchange(
        self,
        gradient: Any,
        *,
        sample_count: int = 1,
        learning_rate: float | None = None,
        out: ValuesT | None = None,
        timeout_s: float | None = None,
    ) -> ValuesT:
        """`put_gradient` and `get_weights` of its result at once, chunk by chunk.

        While later chunks of the gradient leave, updated weights of earlier ones arrive, so that
        both directions of the wire are busy. Synchronous mode: waits for the other workers.

        Args:
            gradient: See `put_gradient`. None: this worker has none for the step, which counts for
                it with the weight 0, so that no worker waits. A step without any gradient changes
                no weight, and none of an optimizer's state. Asynchronous mode: nothing counts.
            sample_count: See `put_gradient`.
            learning_rate: See `put_gradient`.
            out: See `get_weights`. It must not overlap the gradient's memory.
            timeout_s: See `Client`.

        Returns:
            The weights after this step; `out` if given. Where sets are open, they may be of a later
            version, as `version` says; `outcome` says what counted.

        Raises:
            DivergedError: the gradient is counted, and the step has ended; the weights that came
                of it are not finite.
            ShardwellError: as `put_gradient` and `get_weights`. The step is still this worker's
                next: call again.
        """
        exchange = partial(self._exchange, gradient, sample_count, learning_rate, out)
        return self._calls.run(exchange, timeout_s, in_turn=True, verb="exchange")

    def exchange_async(
        self,
        gradient: Any,
        *,
        sample_count: int = 1,
        learning_rate: float | None = None,
        out: ValuesT | None = None,
        timeout_s: float | None = None,
        began: Callable[[Future[ValuesT]], None] | None = None,
    ) -> Future[ValuesT]:
        """`exchange` without waiting: its result or error comes in the future.

        `gradient` and `out` belong to the call until then. Other calls of this parameter wait for
        their turn meanwhile, except `get_weights`. An elastic member that joins with the gradient
        gets the weights that there are, and not those of the first step that awaits it.

        Args:
            gradient: See `exchange`, as all that follow.
            sample_count: Its weight in the mean.
            learning_rate: The optimizer's from this step on.
            out: Where to put the weights.
            timeout_s: How long it may take.
            began: Gets the future, too, on a thread that no signal interrupts: so that a caller
                whom Ctrl-C ends in this call knows whether the gradient is on its way.

        Raises:
            LimitError: as many calls of the client are under way.
            ClosedError: the parameter or its client was closed.
        """
        exchange = partial(
            self._exchange, gradient, sample_count, learning_rate, out, reads_first=False
        )
        if began is None:
            return self._calls.start(exchange, timeout_s, in_turn=True)

        def begin(_: Attempts) -> Future[ValuesT]:
            future = self._calls.start(exchange, timeout_s, in_turn=True)
            began(future)
            return future

        return self._calls.run(begin)

    def abandon_step(self, *, timeout_s: float | None = None) -> int:
        """Ends this worker's next step without a gradient; returns the step.

        For use after a call that failed, say, because a shard refused a part of a gradient. Parts
        that were counted stay counted, and `outcome` has the ranges; the rest of this worker's
        contribution is zeros with the weight 0, and in asynchronous mode nothing. Safe to repeat.

        Args:
            timeout_s: See `Client`.

        Raises:
            ShardwellError: see `put_gradient`. The step is still this worker's next: call again.
        """

        def abandon(attempts: Attempts) -> int:
            work = self._without_gradient(None, attempts)
            self._put(work, attempts)  # of which no value is new to the shards
            self._end_step(work, attempts)
            return work.step

        return self._calls.run(abandon, timeout_s, in_turn=True, verb="abandon_step")

    def begin_exchange(
        self,
        gradient: Any,
        *,
        sample_count: int = 1,
        learning_rate: float | None = None,
        out: ValuesT | None = None,
        timeout_s: float | None = None,
    ) -> OpenExchange[ValuesT]:
        """An exchange of a gradient that is still being computed, such as by a backward pass.

        Call `OpenExchange.ready` for each part that is computed; it is exchanged while the rest is
        computed; `OpenExchange.finish` waits for all. Until then no other gradient joins the step.
        NaN and infinity are found part by part; earlier parts have already been counted.

        Args:
            gradient: See `put_gradient`; it must lie in one buffer, which is read until `finish`
                has returned.
            sample_count: See `put_gradient`.
            learning_rate: See `put_gradient`.
            out: See `exchange`; written while the gradient is computed.
            timeout_s: Bound of each piece that is exchanged before `finish`, and of `finish`.

        Raises:
            ArgumentError: see `exchange`; or the gradient would have to be copied.
            NotInitializedError, SeatsTakenError: see the errors.
        """

        def begin(attempts: Attempts) -> tuple[Gradient, Room[ValuesT]]:
            work = self._gradient(gradient, sample_count, learning_rate, attempts, is_whole=False)
            return work, self._room_beside(work, out)

        work, room = self._calls.run(begin, timeout_s, in_turn=True)
        turn = JointTurn()

        def exchange(piece: Piece, attempts: Attempts) -> None:
            own = replace(work, looked_at=set())  # what is not finite may be mended in between
            try:
                self._exchange_chunks(own, room.pieces, attempts, piece.progress, piece.ranges)
            except BaseException:
                work.is_again = True
                raise
            work.is_again |= attempts.is_again

        def start(body: Callable[[Attempts], None]) -> Future[None]:
            def ahead(attempts: Attempts) -> None:
                if self.next_step != work.step:
                    raise StepOrderError(
                        f"step {work.step} of {self.name!r} has ended before this piece of its "
                        "gradient could leave",
                        parameter=self.name,
                    )
                body(attempts)

            return self._calls.start(ahead, timeout_s, in_turn=turn)

        def finish(rest: Callable[[Attempts], int], own_s: float | None) -> ValuesT:
            def end(attempts: Attempts) -> ValuesT:
                work.looked_at.clear()
                if self._feedback.keeps and self._feedback.is_due and not work.has_carried:
                    self._transfer.check_finite(work)  # what is not may be mended, where it lies
                    self._add_carried(work)
                self._end_exchange(work, room.pieces, attempts, rest, begun.await_pieces)
                if self._member is not None and self._member.has_joined():  # with this gradient
                    self._read_first(self._member, room.pieces, attempts)
                return room.result

            bound_s = timeout_s if own_s is None else own_s
            return self._calls.run(end, bound_s, in_turn=turn, verb="exchange")

        # A norm is that of all of it, and so is what is carried over, or was rounded off.
        is_whole_at_once = (
            bool(self.spec.optimizer.clip_norm) or self.late == "carry" or self.spec.has_image
        )
        begun = OpenExchange(
            self._transfer.parts,
            work.values.whole(),
            exchange,
            None if is_whole_at_once else start,
            finish,
            allow_non_finite=self.spec.allow_non_finite,
        )
        return begun

    def report(self, *, step: int | None = None, **figures: float) -> None:
        """Reports figures of a step, for the status page and metrics: `net.report(loss=0.3)`.

        They are shown as curves on the status page, the mean of all workers' for each step, and as
        a metric; training does not depend on them. Never blocks and never fails for want of a
        shard: what can't be sent now, or comes while the last report is under way, is left out.

        Args:
            step: The step of the figures; default: `next_step`, whose gradient they came with.
            figures: Numbers by name; up to 16 names a parameter.

        A shard that refuses it is named in the log, once for each reason.

        Raises:
            ArgumentError: a figure is no number, a name is invalid, or no figure was given.
            ClosedError: the parameter or its client was closed.
        """
        values = {name: _figure(name, value) for name, value in figures.items()}
        if not values:
            raise ArgumentError("report figures by name, such as report(loss=0.3); got none")
        number = self.next_step if step is None else check_integer("step", step, 0, STEP_MAX)
        if self._reporting is not None and not self._reporting.done():
            self._calls.check_open()
            return

        figure_list = [pb.Figure(name=name, value=value) for name, value in values.items()]

        def send(attempts: Attempts) -> None:
            self._send_report(pb.ReportRequest(step=number, figures=figure_list), attempts)

        with contextlib.suppress(LimitError):  # as many calls are under way as there may be
            self._reporting = self._calls.start(send, _REPORT_S)
            self._reporting.add_done_callback(self._note_report)

    def report_learner(self, progress: LearnerProgress) -> None:
        """Reports to the cluster how far a learner in outer training has come.

        For loops with a schedule of their own, on the parameter of their family's fragment 0;
        `Outer` calls it. `shardwell status` and the status page show what each worker said last.
        Never blocks and never fails for want of a shard: of reports that come while one is under
        way, the newest is sent after it.

        Args:
            progress: The totals so far, not the increase.

        A shard that refuses it is named in the log, once for each reason.

        Raises:
            ArgumentError: `progress` is invalid, or this is not a family's fragment 0.
            ClosedError: the parameter or its client was closed.
        """
        if not isinstance(progress, LearnerProgress):
            raise ArgumentError(f"progress must be shardwell.LearnerProgress; got {progress!r:.80}")
        if self.spec.fragment is None or self.spec.fragment.index:
            raise ArgumentError(
                f"parameter {self.name!r} is not fragment 0 of a family; call report_learner of "
                "that one, for all fragments"
            )
        self._progress = progress
        if self._saying is not None and not self._saying.done():
            self._calls.check_open()
            return
        self._say_progress()

    def _say_progress(self) -> None:
        def send(attempts: Attempts) -> None:
            progress, self._progress = self._progress, None
            if progress is not None:  # else the call before this one has said it
                request = pb.ReportRequest(
                    worker_id=self._worker_id,
                    session=self._shards.channels[0].session.number,
                    learner=progress.to_proto(),
                )
                self._send_report(request, attempts)

        def go_on(call: Future[None]) -> None:
            self._note_report(call)
            if self._progress is not None:
                with contextlib.suppress(ClosedError):
                    self._say_progress()

        with contextlib.suppress(LimitError):  # as many calls are under way as there may be
            self._saying = self._calls.start(send, _REPORT_S)
            self._saying.add_done_callback(go_on)

    def _send_report(self, request: pb.ReportRequest, attempts: Attempts) -> None:
        channel = self._shards.channels[0]
        request.shard.CopyFrom(channel.identity)
        request.parameter, request.incarnation = self.name, self._opening.incarnation
        channel.call(
            "Report", request, pb.ReportResponse, timeout_s=attempts.rest_s, parameter=self.name
        )

    def _note_report(self, call: Future[None]) -> None:
        error = call.exception()
        if error is None or isinstance(error, ClosedError | DeadlineError | ShardUnavailableError):
            return
        if str(error) not in self._report_errors and len(self._report_errors) < _REPORT_ERROR_COUNT:
            self._report_errors.add(str(error))
            _LOG.warning("reports of parameter %r are refused: %s", self.name, error)

    # Elastic members.

    @override
    def _take_part(self, member: Member, attempts: Attempts) -> None:
        if not member.takes_part:
            member.join(attempts)
        self._read_first(member, Pieces(np.empty(self.size, np.float32)), attempts)

    def contributions(
        self, step: int, *, timeout_s: float | None = None
    ) -> list[tuple[Slice, tuple[str, ...]]]:
        """The workers whose gradients are in one of the last steps, in the order of the sums.

        A step has the bits of a fixed crew of these workers whose gradients came in that order.
        Chunks may differ: a chunk's step closes without those that were late there. The shards keep
        the last 16 steps in memory; `shardwell serve --contribution-log` keeps all in a file.

        Args:
            step: The step, such as `outcome.step`.
            timeout_s: See `Client`.

        Returns:
            Ranges of elements in order, each with its worker ids; neighbours with the same are one.
            Ranges that have not closed the step are left out, and so are those of a shard that was
            started again since: it knows the last step of each chunk.

        Raises:
            ArgumentError: a step has all of worker_count, as neither members= nor min_contributors=
                was given.
            StepOrderError: no shard knows the step: it is open, or older.
        """
        number = check_integer("step", step, 0, STEP_MAX)

        def get(attempts: Attempts) -> list[tuple[Slice, tuple[str, ...]]]:
            def ask(part: ShardSlice) -> list[tuple[Slice, tuple[str, ...]]]:
                return self._contributions(part, number, attempts.beside())

            found: list[tuple[Slice, tuple[str, ...]]] = []
            for where, workers in itertools.chain(*ask_all(self._transfer.parts, ask)):
                last = found[-1] if found else (Slice(0, 0), ())
                if last[0].stop == where.offset and last[1] == workers:
                    found[-1] = Slice(last[0].offset, last[0].size + where.size), workers
                else:
                    found.append((where, workers))
            if not found:
                raise StepOrderError(
                    f"no shard knows who contributed to step {number} of parameter {self.name!r}: "
                    "it is open, or not among the last 16 that closed; the shards' "
                    "--contribution-log keeps all steps",
                    parameter=self.name,
                )
            return found

        return self._calls.run(get, timeout_s)

    def _contributions(
        self, part: ShardSlice, step: int, attempts: Attempts
    ) -> list[tuple[Slice, tuple[str, ...]]]:
        """Contributors to each chunk of a shard that has closed a step, in order."""
        channel = part.channel
        request = pb.GetContributionsRequest(
            shard=channel.identity,
            parameter=self.name,
            step=step,
            incarnation=self._opening.incarnation,
        )

        def ask() -> pb.GetContributionsResponse:
            request.shard.CopyFrom(channel.identity)
            answer = channel.call(
                "GetContributions",
                request,
                pb.GetContributionsResponse,
                timeout_s=attempts.rest_s,
                parameter=self.name,
            )
            first, stop = request.first_chunk_index, len(part.chunks)
            indexes = [index for each in answer.sets for index in each.chunk_indexes]
            following = answer.next_chunk_index if answer.HasField("next_chunk_index") else stop
            if len(set(indexes)) < len(indexes) or not all(
                first <= index < following for index in indexes
            ):
                following = 0
            if not first <= following <= stop or (following < stop and not indexes):
                raise CorruptChunkError(
                    f"shard {channel.shard_index} names chunks of parameter {self.name!r} that it "
                    f"does not have: expected indexes from {first} to {stop - 1}, each once; run "
                    "the same version everywhere",
                    shard_index=channel.shard_index,
                    parameter=self.name,
                )
            return answer

        workers: dict[int, tuple[str, ...]] = {}
        while True:
            answer = attempts.run(ask)
            for each in answer.sets:
                workers.update(dict.fromkeys(each.chunk_indexes, tuple(each.worker_ids)))
            if not answer.HasField("next_chunk_index"):
                return [(part.chunks[index], workers[index]) for index in sorted(workers)]
            request.first_chunk_index = answer.next_chunk_index

    def _read_first(self, member: Member, weights: Pieces, attempts: Attempts) -> None:
        """Reads the weights of the first step that awaits this member, waiting for them."""

        def read(step: int, part: Attempts) -> int:
            if self._closes_by_norm:  # all who were to close these steps may be gone
                for version in range(self._opening.oldest_version + 1, step + 1):
                    self._close_steps_before(version, part)
            found = part.run(partial(self._transfer.get_weights, weights, step, part))
            return int(found.version)

        version = member.read_first(read, attempts)
        if version is not None:
            self.version = version
            self.next_step = max(self.next_step, version)

    def reopen(self) -> None:
        """Asks the shards again for this worker's step, and goes on at that `next_step`."""

        def reopened(attempts: Attempts) -> None:
            self._has_seat = False  # another process may have taken it over
            if self._member is not None:
                self._member.forget()
            self._open(attempts)

        self._calls.run(reopened, in_turn=True)

    def advise_on_non_finite(self, remedy: str) -> None:
        """What NonFiniteError is to advise; for what opens a parameter on its caller's behalf."""
        self._transfer.non_finite_remedy = self._transfer.refusal_remedy = remedy

    @property
    def residual(self) -> Float32 | None:
        """The rounding error of this worker's gradients so far, which the next one adds: (size,).

        A copy; None: nothing, as with any codec but int8. Keep it with the worker's own state to go
        on with the same bits after a restart; without it, each element loses less than half a
        rounding step, once.
        """
        residual = self._feedback.residual
        return None if residual is None else residual.copy()

    def load_residual(self, residual: Any) -> None:
        """Goes on with the `residual` of an earlier process of this worker, or with None.

        Raises:
            ArgumentError: the codec is not int8, or it is not (size,) finite values.
        """
        if residual is None:
            self._feedback.residual = None
            return
        if not self.spec.has_image:
            raise ArgumentError(
                f"parameter {self.name!r} has codec {self.spec.codec}, which keeps no residual; "
                "load None"
            )
        given = np.asarray(residual)
        with np.errstate(all="ignore"):
            values = given.astype(np.float32) if given.dtype.kind in "fiu" else None  # a copy
        if values is None or values.shape != (self.size,) or not np.isfinite(values).all():
            raise ArgumentError(
                f"residual of parameter {self.name!r} must be ({self.size},) finite values; got "
                f"{given.dtype} of {given.shape}"
            )
        self._feedback.residual = values

    # What the verbs share, on a thread of the client's.

    @property
    @override
    def _keeps_step(self) -> bool:
        return super()._keeps_step and self.spec.fragment is None  # whose schedule is `Outer`'s

    @override
    def _go_back(self) -> None:
        self.next_step -= 1
        self._is_in_step = True

    def _open(self, attempts: Attempts, *, is_known: bool = False) -> None:
        """Opens the parameter on all shards, that which is open if `is_known`; sets `next_step`."""
        self._transfer.parts, self.next_step = self._opening.open(attempts, is_known=is_known)
        self.spec = self._opening.spec
        self._gives_again = False
        if not self.spec.has_open_sets:
            self._feedback.reopened(self.next_step)
        self._transfer.incarnation = self._opening.incarnation
        self._is_in_step = self._opening.has_seat
        self._closed_version = 0
        if self._transfer.image is not None:
            self._transfer.image.forget()

    def _get_weights(self, out: ValuesT | None, min_version: int, attempts: Attempts) -> ValuesT:
        min_version = check_integer("min_version", min_version, 0, STEP_MAX)
        room: Room[ValuesT] = self._values.room(out)
        self._close_steps_before(min_version, attempts)
        step = None
        if self._is_in_step and self.spec.mode == "sync" and not self.spec.has_open_sets:
            step = self.next_step
        found = attempts.run(
            lambda: self._transfer.get_weights(room.pieces, min_version, attempts, step)
        )
        self.version = int(found.version)
        if self.spec.has_open_sets:  # a gradient of these weights is of their version
            self.next_step = max(self.next_step, self.version)
        if step is not None and found.version == step < found.version_max:
            _LOG.warning(
                "parameter %r: step %d of worker %r was cut off, and shards have no longer the "
                "weights before it of all chunks: these are of versions %d to %d, and a gradient "
                "of them is another than was counted in part",
                self.name,
                step,
                self._worker_id,
                self.version,
                found.version_max,
            )
        return room.result

    def _exchange(
        self,
        gradient: Any,
        sample_count: int,
        learning_rate: float | None,
        out: ValuesT | None,
        attempts: Attempts,
        *,
        reads_first: bool = True,
    ) -> ValuesT:
        if gradient is None and self.spec.mode == "async":
            return self._get_weights(out, 0, attempts)
        if gradient is None:
            work = self._without_gradient(learning_rate, attempts)
        else:
            work = self._gradient(gradient, sample_count, learning_rate, attempts)
        room = self._room_beside(work, out)
        self._end_exchange(work, room.pieces, attempts)
        if self._member is not None and not reads_first:
            self._member.first_step = None
        elif self._member is not None and self._member.has_joined():  # with this gradient
            self._read_first(self._member, room.pieces, attempts)
        return room.result

    def _room_beside(self, work: Gradient, out: ValuesT | None) -> Room[ValuesT]:
        """Where weights go, which is nowhere in the gradient."""
        room: Room[ValuesT] = self._values.room(out)
        if room.pieces.overlaps(work.values):
            raise ArgumentError("out must not overlap the gradient; pass another array")
        return room

    def _end_exchange(
        self,
        work: Gradient,
        weights: Pieces,
        attempts: Attempts,
        rest: Callable[[Attempts], int] | None = None,
        await_pieces: Callable[[Attempts], None] | None = None,
    ) -> None:
        """Exchanges all of a gradient, or what `rest` does, and ends the step.

        With `rest`, `await_pieces` returns when no piece of it is under way.
        """
        if self._clips:
            self._clip(work)
        work.after_refusal |= work.step == self._refused_step
        try:
            if self._closes_by_norm:
                self.version = self._exchange_clipped(work, weights, attempts)
            elif rest is not None:
                self.version = rest(attempts)
            else:
                self.version = self._exchange_chunks(work, weights, attempts, Progress())
        except DivergedError as error:  # some of it is counted, so all of it is to be
            try:
                if await_pieces is not None:
                    await_pieces(attempts)
                if not self._closes_by_norm:
                    self._put(work, attempts)
            except BaseException:
                self._note_failure(work, error)
                raise
            self._end_step(work, attempts)
            raise
        except BaseException as error:
            self._note_failure(work, error)
            raise
        self._end_step(work, attempts)

    def _note_failure(self, work: Gradient, error: BaseException) -> None:
        """Lets the step end with other values, if a shard has refused a part of these."""
        if isinstance(error, NonFiniteError):
            if error.shard_index is None:
                return  # nothing has left
            self._refused_step = work.step
        self._sent_step = work.step
        if work.has_effect:
            self._feedback.tried(work.step, work.values)

    def _end_step(self, work: Gradient, attempts: Attempts) -> None:
        """Goes on to the next step: all of this one is counted."""
        transfer, ended = self._transfer, NOTHING_LOST
        superseded: tuple[Slice, ...] = ()
        if transfer.superseded or transfer.late:
            is_again = work.is_again or attempts.is_again or self._sent_step == work.step
            unknown = transfer.unknown if is_again else ()
            ended = Ended({*transfer.late} - {*unknown}, {*transfer.superseded}, {*unknown})
            superseded = merged(ended.superseded)
            transfer.superseded.clear()
        if self._feedback.keeps:
            sent = work.values if work.has_effect else None
            self._feedback.end(work.step, sent, work.own, ended)
        self.next_step, self._is_in_step, self._sent_step = work.step + 1, False, -1
        if self.spec.has_open_sets:
            self.outcome = self._end_open_step(work, ended)
        else:
            version = max(self.version, work.step)
            size = self.spec.size
            self.outcome = Outcome(
                step=work.step, size=size, version=version, superseded=superseded
            )
        if superseded:
            _LOG.warning(
                "parameter %r: of step %d of worker %r, another gradient had been counted before "
                "for %d of %d elements, so what this one has there was not; see `outcome`",
                self.name,
                work.step,
                self._worker_id,
                sum(where.size for where in superseded),
                self.size,
            )

    def _end_open_step(self, work: Gradient, ended: Ended) -> Outcome:
        """What became of a gradient whose step may have closed without it."""
        transfer = self._transfer
        is_late = bool(transfer.late)
        outcomes = list(transfer.outcomes.values())
        if outcomes:
            transfer.forget_outcome()
        names = {name for each in outcomes for name in each.contributor_ids}
        version = min((int(each.version) for each in outcomes), default=work.step)
        is_over = any(each.tenure_is_over for each in outcomes)
        if self._member is not None:
            self._member.is_settled |= not is_late
            if is_over:
                self._member.lose()
        self.is_draining = any(each.is_draining for each in outcomes)
        # It may give the step again in its next tenure alone; what it gave counts once.
        self.next_step = max(version, work.step + (not is_over or not is_late))
        if ended.unknown:
            _LOG.warning(
                "parameter %r: worker %r was away for so long that no shard knows whether step %d "
                "had counted, for %d of %d elements; they do not count again; see `outcome`",
                self.name,
                self._worker_id,
                work.step,
                sum(where.size for where in ended.unknown),
                self.size,
            )
        return Outcome(
            step=work.step,
            size=self.spec.size,
            version=version,
            superseded=merged(ended.superseded),
            late=merged(ended.late),
            unknown=merged(ended.unknown),
            contributors=tuple(sorted(names)),
        )

    def _add_carried(self, work: Gradient) -> None:
        """Adds what did not count of earlier gradients, or rounding took, to one that is whole."""
        if not work.has_effect or work.has_carried:
            return
        if self._clips:  # what is added was clipped before
            self._clip(work)
        values: Float32 = work.values.whole().astype(np.float32, copy=False)
        work.own, work.values = work.values, Pieces(self._feedback.added(values))
        work.looked_at.clear()
        work.has_carried = True

    def _end_tried(self, attempts: Attempts) -> None:
        """Asks what became of a step that calls have failed with, and that has closed since.

        A contribution without values joins what was counted of it, and changes nothing.
        """
        work = Gradient(self._zeros(), self._feedback.tried_step, 0, None)
        work.has_effect, work.after_refusal, work.is_clipped = False, True, True
        self._transfer.forget_outcome()
        self._put(work, attempts)
        self._end_step(work, attempts)

    def _exchange_chunks(
        self,
        work: Gradient,
        weights: Pieces,
        attempts: Attempts,
        progress: Progress,
        ranges: Ranges | None = None,
    ) -> int:
        """Exchanges chunks from `progress` on, or all; returns the version so far."""
        return attempts.run(
            lambda: self._transfer.exchange(work, weights, progress, ranges, attempts)
        )

    def _exchange_clipped(self, work: Gradient, weights: Pieces, attempts: Attempts) -> int:
        """The same where no weights come before all gradients of the step are counted."""
        self._put(work, attempts)
        self._close_steps_before(work.step + 1, attempts)
        found = attempts.run(lambda: self._transfer.get_weights(weights, work.step + 1, attempts))
        return int(found.version)

    def _put(self, work: Gradient, attempts: Attempts) -> None:
        """Has a gradient counted, all of it."""
        self._close_steps_before(work.step, attempts)
        progress = Progress()
        attempts.run(lambda: self._transfer.put_gradient(work, progress, attempts))

    def _close_steps_before(self, version: int, attempts: Attempts) -> None:
        """Closes the step that leads to a version, where that needs a call."""
        if self._closes_by_norm and version > self._closed_version:
            attempts.run(lambda: self._transfer.close_step(version - 1, attempts))
            self._closed_version = version

    def _clip(self, work: Gradient) -> None:
        """Scales a gradient down to its largest norm, once."""
        if work.is_clipped:
            return
        clip_norm = self.spec.optimizer.clip_norm
        self._transfer.check_finite(work)
        with np.errstate(all="ignore"):  # where allow_non_finite lets anything through
            values: Float32 = work.values.whole().astype(np.float32, copy=False)
            squares = self._rules.squares(0, values, block_size_of(values.size))
            factor = clip_factor(math.sqrt(math.fsum(squares)), clip_norm)
            if factor != 1.0:
                work.values = Pieces(values * np.float32(factor))
        work.is_clipped = True

    def _gradient(
        self,
        gradient: Any,
        sample_count: int,
        learning_rate: float | None,
        attempts: Attempts,
        *,
        is_whole: bool = True,
    ) -> Gradient:
        """Checks everything that can be checked before anything is sent; takes a seat, once.

        With `is_whole` its values are there; if not, they are read later, where they lie.
        """
        values = self._values.pieces(f"gradient of {self.name!r}", gradient, in_place=not is_whole)
        count = check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX)
        if learning_rate is not None:
            self.spec.check_rate(learning_rate)
        return self._contribution(values, count, learning_rate, attempts, is_whole=is_whole)

    def _without_gradient(self, learning_rate: float | None, attempts: Attempts) -> Gradient:
        """A contribution of the weight 0, which joins what was counted of the step."""
        if learning_rate is not None:
            self.spec.check_rate(learning_rate)
        work = self._contribution(self._zeros(), 0, learning_rate, attempts, has_effect=False)
        work.after_refusal = work.is_clipped = True
        return work

    def _zeros(self) -> Pieces:
        return Pieces(np.broadcast_to(np.float32(0), (self.spec.size,)))

    def _contribution(
        self,
        values: Pieces,
        count: int,
        learning_rate: float | None,
        attempts: Attempts,
        *,
        is_whole: bool = True,
        has_effect: bool = True,
    ) -> Gradient:
        """A gradient of this worker's next step, for which it has a seat."""
        self._shards.given.add(self._what)
        if self._feedback.keeps and self._feedback.is_open(self.next_step):
            self._end_tried(attempts)
        if self._transfer.superseded and self._sent_step != self.next_step:
            self._transfer.superseded.clear()  # of a call that failed, and whose step has ended
        work = Gradient(values, self.next_step, count, learning_rate)
        work.has_effect = has_effect and (count > 0 or self.spec.mode == "async")
        if is_whole and self._feedback.keeps and self._feedback.is_due:
            self._add_carried(work)
        if self._transfer.outcomes:
            self._transfer.forget_outcome()  # of a call that failed
        member = self._member
        if self._has_seat if member is None else member.takes_part:
            self._is_in_step = True
            return work
        if is_whole:
            self._transfer.check_finite(work)
        if member is not None:
            member.join(attempts)
        else:
            self._opening.take_seat(self.next_step, attempts)
            self._transfer.tenure = self._opening.tenure
            self._has_seat = True
            work.step = self.next_step
        self._is_in_step = True
        return work


def _figure(name: str, value: Any) -> float:
    """A figure as a number; a torch tensor or NumPy array of one element is one, too."""
    check_name("figure", name)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"figure {name!r} must be a number; got {value!r:.80}") from None
