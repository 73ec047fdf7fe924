"""A dense parameter in a worker: first weights, gradients out, weights in.

Its values are one vector, or tensors by name, as it was opened (values.py). Calls block until they
are done or their deadline has passed; meanwhile a shard that went away is waited for, and what it
has not acknowledged is sent again. A Parameter may be used by several threads, whose calls then
take turns. Its buffers are the caller's: nothing is kept of a gradient after the call returns.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Literal, get_args

import numpy as np
from typing_extensions import override

from shardwell.errors import ArgumentError, StepOrderError
from shardwell.numerics.arguments import check_finite, check_integer
from shardwell.numerics.codec import Float32, block_codec
from shardwell.numerics.update_rules import TensorRules
from shardwell.parameter.dealing import Batch, Dealing
from shardwell.parameter.exchange import Gradient, ShardSlice, Transfer
from shardwell.parameter.feedback import Feedback, Outcome
from shardwell.parameter.first_weights import FirstWeights, GivenValues
from shardwell.parameter.kept_state import KeptStates, LearnerStates
from shardwell.parameter.open_exchange import OpenExchange
from shardwell.parameter.opening import ParameterOpening
from shardwell.parameter.reports import Reports
from shardwell.parameter.step_call import StepCall, Tools, Tried
from shardwell.parameter.values import Pieces, Values, ValuesT, values_of, zeros
from shardwell.placement.slices import Slice, slice_of
from shardwell.process.html_table import html_table
from shardwell.process.spans import Traffic
from shardwell.rpc.call_scope import JointTurn
from shardwell.rpc.cluster import Shards
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_status import SamplesStatus, ask_parameters
from shardwell.specs.deadlines import check_timeout
from shardwell.specs.learner import LearnerProgress
from shardwell.specs.parameter import SAMPLE_COUNT_MAX, STEP_MAX, ParameterSpec
from shardwell.specs.samples import Samples
from shardwell.steps.handle import Handle
from shardwell.steps.member import Member
from shardwell.transport.stream_pool import IdleStreams, StreamPool
from shardwell.wire.state_tree import ArrayForm

_LOG = logging.getLogger("shardwell")
_AWAIT_FREE_S = 0.2
"""The interval at which a worker without samples asks whether some are free."""

LateName = Literal["drop", "carry"]


def checked_late(late: Any) -> LateName:
    """Returns `late`; ArgumentError: it is not a LateName."""
    if late not in get_args(LateName):
        raise ArgumentError(f"late must be 'drop' or 'carry'; got {late!r:.80}")
    found: LateName = late
    return found


def _next_step_of(this: weakref.ref[Parameter[Any]]) -> int:
    parameter = this()
    return 0 if parameter is None else parameter.next_step


class Parameter(Handle[ParameterSpec], Generic[ValuesT]):
    """A vector on the shards, made by `Client.parameter`; leaving the context closes it here.

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
        timeout_s: float,
        traffic: Traffic,
        idle_streams: IdleStreams,
        late: LateName = "drop",
    ) -> None:
        opening = ParameterOpening(spec, shards.channels, shards.worker_id)
        super().__init__(spec, opening, shards, timeout_s)
        codec = block_codec(spec.codec_name) if spec.has_image else None
        self._feedback = Feedback(spec.size, codec)
        this = weakref.ref(self)  # so that a closed parameter's arrays are free at once
        next_step = partial(_next_step_of, this)
        self._dealing = Dealing(opening, shards, self._member, next_step)
        self.late = late
        self.outcome: Outcome | None = None
        """What the shards counted of this worker's last gradient; None: it gave none."""
        self.version = 0
        """Updates that the weights fetched last have seen (the fewest of their chunks)."""
        self._timeout_s = timeout_s
        self._idle_streams = idle_streams
        self._traffic = traffic
        self._values: Values[ValuesT] = values_of(spec)
        self._reports = Reports(opening, self._calls, shards.channels[0])
        pool = StreamPool(idle_streams, opening.what, count_max=None, **opening.of)
        self._transfer = Transfer(opening, pool, shards, traffic)
        rules = TensorRules(spec.optimizer, spec.layout)
        self._tools = Tools(spec, opening, self._transfer, self._feedback, rules, self._member)
        self.lost_batches = False
        """True if the batches of the last gradient are others' by now: the shards had lost this
        member since they dealt them, and nothing of the gradient has counted."""
        self._tried = Tried()
        self._is_in_step = False
        """True if a part of the next step may be counted, of an earlier process or failed call."""
        self._has_seat = False
        states = KeptStates if spec.fragment is None else LearnerStates
        self._states = states(spec, opening, self._calls, shards, next_step)
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
        if not self._feedback.carries:
            self._dealing.drop_carried()

    @property
    def size(self) -> int:
        """The number of float32 elements."""
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
            return self._settle(given, attempts)[0]

        return self._calls.run(settle, timeout_s, in_turn=True)

    def restore(
        self, *arrays: Any, version: int, load_id: int, timeout_s: float | None = None
    ) -> int:
        """Does what `init` does, with the update rule's arrays, as a checkpoint has them.

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
            settled_version, is_own = self._settle(given, attempts)
            if not is_own:
                self._opening.check_first_weights(load_id, attempts)
            return settled_version

        return self._calls.run(settle, timeout_s, in_turn=True)

    def _first_values(self, given: Any, *, is_weights: bool) -> Float32:
        what = f"first weights of {self.name!r}"
        values: Float32 = self._values.pieces(what, given).whole()
        if is_weights and not self.spec.allow_non_finite:
            check_finite(
                what, values, self.name, remedy="mend them first", name_of=self.spec.element
            )
        return values

    def _settle(self, values: GivenValues, attempts: Attempts) -> tuple[int, bool]:
        first_weights = FirstWeights(
            self.spec,
            values,
            self._shards.channels,
            worker_id=self._opening.worker_id,
            traffic=self._traffic,
            attempts=attempts,
            incarnation=self._opening.incarnation,
        )
        version = attempts.run(first_weights.settle)
        known_step = self.next_step + self._gives_again
        if self.spec.mode == "sync" and known_step < version:  # a checkpoint was restored
            self._open(attempts, is_known=True)
        return version, first_weights.is_own

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
        """Begins `get_weights` without waiting: its result or error comes in the future.

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
        batch: Batch | Sequence[Batch] = (),
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
            batch: The batches of `batches` that it was made from: they count as it counts. Where
                shards have lost this member since they dealt one, the gradient is not sent, and
                the worker gives none for the step.
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
            call = self._step_call(gradient, sample_count, learning_rate, attempts, batch=batch)
            call.put(attempts)
            return call.work.step

        return self._calls.run(put, timeout_s, in_turn=True, verb="put_gradient")

    def exchange(
        self,
        gradient: Any,
        *,
        sample_count: int = 1,
        learning_rate: float | None = None,
        batch: Batch | Sequence[Batch] = (),
        out: ValuesT | None = None,
        timeout_s: float | None = None,
    ) -> ValuesT:
        """Gives a gradient and gets the weights that come of it, chunk by chunk.

        While later chunks of the gradient leave, updated weights of earlier ones arrive, so that
        both directions of the wire are busy. Synchronous mode: waits for the other workers.

        Args:
            gradient: See `put_gradient`. None: this worker has none for the step, which counts for
                it with the weight 0, so that no worker waits. A step without any gradient changes
                no weight, and none of an optimizer's state. Asynchronous mode: nothing counts.
            sample_count: See `put_gradient`.
            learning_rate: See `put_gradient`.
            batch: See `put_gradient`. Without a gradient they are given back, and dealt again.
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
        exchange = partial(self._exchange, gradient, sample_count, learning_rate, out, batch=batch)
        return self._calls.run(exchange, timeout_s, in_turn=True, verb="exchange")

    def exchange_async(
        self,
        gradient: Any,
        *,
        sample_count: int = 1,
        learning_rate: float | None = None,
        batch: Batch | Sequence[Batch] = (),
        out: ValuesT | None = None,
        timeout_s: float | None = None,
        began: Callable[[Future[ValuesT]], None] | None = None,
    ) -> Future[ValuesT]:
        """Begins `exchange` without waiting: its result or error comes in the future.

        `gradient` and `out` belong to the call until then. Other calls of this parameter wait for
        their turn meanwhile, except `get_weights`. An elastic member that joins with the gradient
        gets the weights that there are, and not those of the first step that awaits it.

        Args:
            gradient: See `exchange`, as all that follow.
            sample_count: Its weight in the mean.
            learning_rate: The optimizer's from this step on.
            batch: See `put_gradient`.
            out: Where to put the weights.
            timeout_s: How long it may take.
            began: Gets the future, too, on a thread that no signal interrupts: so that a caller
                whom Ctrl-C ends in this call knows whether the gradient is on its way.

        Raises:
            LimitError: as many calls of the client are under way.
            ClosedError: the parameter or its client was closed.
        """
        exchange = partial(
            self._exchange,
            gradient,
            sample_count,
            learning_rate,
            out,
            batch=batch,
            reads_first=False,
        )
        kept = self._states.kept
        if kept is not None and kept.captured_step != self.next_step:
            self.note_state()  # while the program does not change the objects
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
            call = self._step_call(None, 0, None, attempts, has_values=False)
            call.abandon(attempts)
            return call.work.step

        return self._calls.run(abandon, timeout_s, in_turn=True, verb="abandon_step")

    def begin_exchange(
        self,
        gradient: Any,
        *,
        sample_count: int = 1,
        learning_rate: float | None = None,
        batch: Batch | Sequence[Batch] = (),
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
            batch: See `put_gradient`.
            out: See `exchange`; written while the gradient is computed.
            timeout_s: Bound of each piece that is exchanged before `finish`, and of `finish`.

        Raises:
            ArgumentError: see `exchange`; or the gradient would have to be copied.
            NotInitializedError, SeatsTakenError: see the errors.
        """

        def begin(attempts: Attempts) -> tuple[StepCall, Pieces, ValuesT]:
            call = self._step_call(
                gradient, sample_count, learning_rate, attempts, batch=batch, is_whole=False
            )
            return call, *self._room_beside(call, out)

        call, weights, result = self._calls.run(begin, timeout_s, in_turn=True)
        turn = JointTurn()

        def start(body: Callable[[Attempts], None]) -> Future[None]:
            def ahead(attempts: Attempts) -> None:
                if self.next_step != call.work.step:
                    raise StepOrderError(
                        f"step {call.work.step} of {self.name!r} has ended before this piece of "
                        "its gradient could leave",
                        parameter=self.name,
                    )
                body(attempts)

            return self._calls.start(ahead, timeout_s, in_turn=turn)

        def finish(rest: Callable[[Attempts], int], own_s: float | None) -> ValuesT:
            def end(attempts: Attempts) -> ValuesT:
                call.look_again()
                call.exchange(weights, attempts, rest, begun.await_pieces)
                if self._member is not None:
                    self._read_behind(call, self._member, weights, attempts)
                return result

            bound_s = timeout_s if own_s is None else own_s
            return self._calls.run(end, bound_s, in_turn=turn, verb="exchange")

        # A norm is that of all of it, and so is what is carried over, or was rounded off.
        is_whole_at_once = (
            bool(self.spec.optimizer.clip_norm) or self.late == "carry" or self.spec.has_image
        )
        is_whole_at_once |= call.passes
        begun = OpenExchange(call, weights, None if is_whole_at_once else start, finish)
        return begun

    # The state beside the weights.

    def keep_state(
        self,
        objects: Mapping[str, Any],
        *,
        forms: Sequence[ArrayForm] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Keeps objects beside the weights on the shards, and takes what is kept of them.

            noise = np.random.default_rng(rank)
            net.keep_state({"noise": noise, "progress": progress})

        From now on the objects' state at the beginning of each step is kept with it: a worker that
        is started again has it, with the weights of that step, and so has one that goes on from a
        checkpoint. One that comes anew has the newest of the others. Of a worker of a fixed crew
        that was killed behind a step, and before the next one began, the step is made again: its
        gradient counts once, and what the loop does behind it is done to the objects as before.

        A step begins where `batches` yields its first batch; in a loop without it, where
        `note_state` is called, or else with the gradient. Generators of random numbers (of NumPy,
        `random` and torch) are each worker's own, and no other worker's state is put into them.

        Args:
            objects: By name: with `state_dict()` and `load_state_dict()`, or a dict that the
                program changes, or a generator. States have numbers, strings, lists, dicts and
                arrays; one worker's have 1,000,000 bytes in all. They replace those of an earlier
                call.
            forms: The arrays of other libraries in them; `shardwell.torch.prepare` gives torch's.
            timeout_s: See `Client`.

        Raises:
            ArgumentError: asynchronous mode, or outer training, or an object can't be kept, or it
                refuses its state.
            ShardwellError: as `exchange`.

        Examples:
            >>> net = client.parameter("stateful", size=2, optimizer=shardwell.SGD(lr=0.5))
            >>> net.init(np.zeros(2))
            >>> progress = {"lucky": 7}
            >>> net.keep_state({"progress": progress})
            >>> weights = net.exchange(np.ones(2))
        """
        self._states.begin(objects, forms, timeout_s, self.resumed_step)

    def note_state(self) -> None:
        """Takes the objects of `keep_state` as they are now as the state of the next step.

        For loops without `batches`, where a step begins. It blocks only where a step has closed
        without this worker: until another one has brought the state of the next step, for some
        seconds at most, and puts it into the objects. Without `keep_state` it does nothing.

        Raises:
            ArgumentError: see `keep_state`.
            ShardwellError: as `exchange`.
        """
        self._states.note()

    def end_state(self, *, timeout_s: float | None = None) -> None:
        """Keeps the objects of `keep_state` as they are behind the last step.

        Closing the client does it. Where the next step has begun it does nothing.

        Args:
            timeout_s: See `Client`.

        Raises:
            ShardwellError: as `exchange`.
        """
        self._states.end(timeout_s)

    def hand_state_to(self, other: Parameter[Any]) -> None:
        """Has the parameter that takes the place of this one keep the objects, as they are."""
        self._states.hand_to(other._states)

    def drop_state(self) -> None:
        """Ends `keep_state`, such as in the middle of what a loop does behind a step."""
        self._states.drop()

    @property
    def learner_states(self) -> LearnerStates | None:
        """The states that `Outer` keeps of a family, with its fragment 0; None: it is no part."""
        return self._states if isinstance(self._states, LearnerStates) else None

    # Samples.

    @property
    def samples(self) -> dict[str, SamplesStatus]:
        """The account of its samples, by the name of each dataset, as shard 0 has it now.

        Raises:
            ShardwellError: shard 0 does not answer in time.
        """

        def ask(attempts: Attempts) -> dict[str, SamplesStatus]:
            answer = ask_parameters(self._shards.channels[0], attempts.rest_s, self.name)
            found = [each for status in answer.parameters for each in status.samples]
            return {each.dataset.name: SamplesStatus.from_proto(each) for each in found}

        return self._calls.run(lambda attempts: attempts.run(lambda: ask(attempts)), in_turn=False)

    def batches(
        self,
        samples: Samples,
        *,
        epochs: int | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Batch]:
        """Yields batches of a dataset, so that each sample counts once an epoch, on all workers.

            for batch in net.batches(shardwell.Samples(len(data), batch_size=32), epochs=10):
                weights = net.exchange(gradient(weights, data[batch.indices]), batch=batch)

        A sample counts when the gradient counts that it was made from. The shards keep account of
        it: a worker that is started again, or comes later, goes on where all of them are. What a
        lost member had is dealt again, and so are batches whose gradient did not count. A batch
        that no `exchange` gets is this worker's until it ends.

        An elastic worker takes part with its first batch. That is dealt again where the others are
        in the middle of a step: `exchange` sends nothing then, `outcome` says that nothing counted,
        and the worker goes on with the weights of the first step that all shards await it in. Where
        nothing is left but what other members have, it leaves, and waits until these have counted,
        or are free, as a member was lost: so iteration ends when all have counted. A batch that
        comes after such a wait is for weights of a later version than the last exchange returned.

        Args:
            samples: The dataset; all workers give the same.
            epochs: Times that each sample is to count in all, not from now on. Default: no end.
            timeout_s: Bound of each call to shard 0, one for some batches; see `Client`.

        Raises:
            ArgumentError: asynchronous mode.
            SpecMismatchError: other workers have another dataset of that name.
            ShardwellError: as `exchange`.
        """
        if self.spec.mode != "sync":
            raise ArgumentError(
                f"parameter {self.name!r} has mode='async', which keeps no account of samples; "
                "open it with worker_count= or members="
            )
        if timeout_s is not None:
            check_timeout(timeout_s)
        return self._batches(samples, samples.limit_of(epochs), timeout_s)

    def _batches(self, samples: Samples, limit: int, timeout_s: float | None) -> Iterator[Batch]:
        while True:
            if not self._dealing.has_taken:
                self._states.note()
            batch = self.next_batch(samples, limit, timeout_s=timeout_s)
            if batch is not None:
                yield batch
            elif not self.await_free(samples, limit, timeout_s=timeout_s):
                return

    def await_free(self, samples: Samples, limit: int, *, timeout_s: float | None = None) -> bool:
        """Waits, without taking part, while other members have the last samples below `limit`.

        Args:
            samples: See `batches`.
            limit: See `next_batch`, which has returned None.
            timeout_s: See `Client`.

        Returns:
            True: some are free now, as a member was lost. False: all have counted, or workers do
            not come and go.
        """

        def look(attempts: Attempts) -> bool | None:
            may_come = self._dealing.may_come(samples, limit, attempts)
            if may_come is None:
                attempts.pause(_AWAIT_FREE_S)
            return may_come

        if timeout_s is not None:
            check_timeout(timeout_s)
        if self.spec.members is None and self._dealing.carries and self.spec.fragment is None:
            self._calls.run(self._drop_carried, timeout_s, in_turn=True)
            return True
        others_have_some = self._dealing.out_count or self._dealing.carries
        if self.spec.members is None or not others_have_some:
            return False
        self.leave(timeout_s=timeout_s)  # and what it carries over is free again
        may_come: bool | None = None
        while may_come is None:
            may_come = self._calls.run(look, timeout_s)
        return may_come

    @property
    def others_have_samples(self) -> bool:
        """True if other workers had samples when this one was dealt none last."""
        return self._dealing.out_count > 0

    @property
    def carries_samples(self) -> bool:
        """True if batches of a late gradient go with the next one."""
        return self._dealing.carries

    def next_batch(
        self, samples: Samples, limit: int, *, timeout_s: float | None = None
    ) -> Batch | None:
        """Returns the next batch that begins below position `limit`, as `batches` yields it.

        Args:
            samples: See `batches`.
            limit: A position in the sequence of all epochs: `epochs` times `samples.length`.
            timeout_s: See `Client`.

        Returns:
            None: no such samples are free now.
        """
        if timeout_s is not None:
            check_timeout(timeout_s)
        self._calls.check_usable()
        if self._takes_part and (batch := self._dealing.take_dealt(samples, limit)) is not None:
            return batch

        def take(attempts: Attempts) -> Batch | None:
            while True:
                if not self._takes_part:
                    self._begin_part(attempts)
                    if self._member is not None and self.next_step >= self._opening.from_step:
                        self._member.first_step = None  # the program has its weights
                try:
                    return self._dealing.take(samples, limit, attempts)
                except StepOrderError:  # shard 0 has ended its tenure meanwhile
                    if self._member is None or attempts.remaining_s <= 0:
                        raise
                    self._member.lose()

        return self._calls.run(take, timeout_s, in_turn=not self._takes_part)

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Gives back batches of `batches`, of which no gradient will come: they are dealt again.

        The shards learn of it with the next call that deals or gives.
        """
        self._dealing.give_back(batches)

    def give_back_taken(self) -> None:
        """Gives back all batches that the program has, and that go with no gradient so far."""
        self._dealing.give_back_taken()

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Makes batches that nothing was computed from the next ones that `next_batch` returns.

        Asks no shard. Other batches than those of `next_batch`, or ended ones, are left alone.

        Args:
            batches: In the order in which they came.
        """
        self._dealing.put_back(batches)

    @property
    def samples_done(self) -> int:
        """The lowest position of samples that had not counted when shard 0 was asked last."""
        return self._dealing.done_before

    @property
    def _takes_part(self) -> bool:
        return self._has_seat if self._member is None else self._member.takes_part

    def _begin_part(self, attempts: Attempts) -> None:
        if self._member is not None:
            self._member.join(attempts)
        else:
            self._opening.take_seat(self.next_step, attempts)
            self._has_seat = True

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
        if not figures:
            raise ArgumentError("report figures by name, such as report(loss=0.3); got none")
        number = self.next_step if step is None else check_integer("step", step, 0, STEP_MAX)
        self._reports.send_figures(number, figures)

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
        self._reports.send_progress(progress)

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
        get = partial(self._opening.contributions, self._transfer.parts, number)
        return self._calls.run(get, timeout_s)

    def _read_first(self, member: Member, weights: Pieces, attempts: Attempts) -> None:

        def read(step: int, part: Attempts) -> int:
            if self.spec.closes_by_norm:  # all who were to close these steps may be gone
                for version in range(self._opening.oldest_version + 1, step + 1):
                    self._transfer.close_steps_before(version, part)
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
        """Sets what NonFiniteError advises; for code that opens a parameter for its caller."""
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

    @override
    def close(self) -> None:
        super().close()
        self._states.close()

    # What the verbs share, on a thread of the client's.

    @property
    @override
    def _keeps_step(self) -> bool:
        return super()._keeps_step and self.spec.fragment is None  # whose schedule is `Outer`'s

    @override
    def _go_back(self, step_count: int = 1) -> None:
        self.next_step -= step_count
        self._is_in_step = True

    def _open(self, attempts: Attempts, *, is_known: bool = False) -> None:
        parts, self.next_step = self._opening.open(attempts, is_known=is_known)
        self._transfer.reopen(parts)
        self.spec = self._opening.spec
        self._gives_again = False
        if not self.spec.has_open_sets:
            self._feedback.reopened(self.next_step)
        self._is_in_step = self._opening.has_seat

    def _get_weights(self, out: ValuesT | None, min_version: int, attempts: Attempts) -> ValuesT:
        min_version = check_integer("min_version", min_version, 0, STEP_MAX)
        weights, result = self._values.room(out)
        self._transfer.close_steps_before(min_version, attempts)
        step = None
        if self._is_in_step and self.spec.mode == "sync" and not self.spec.has_open_sets:
            step = self.next_step
        found = attempts.run(
            lambda: self._transfer.get_weights(weights, min_version, attempts, step)
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
                self._opening.worker_id,
                self.version,
                found.version_max,
            )
        return result

    def _exchange(
        self,
        gradient: Any,
        sample_count: int,
        learning_rate: float | None,
        out: ValuesT | None,
        attempts: Attempts,
        *,
        batch: Batch | Sequence[Batch] = (),
        reads_first: bool = True,
    ) -> ValuesT:
        has_values = gradient is not None
        if not has_values and self.spec.mode == "async":
            return self._get_weights(out, 0, attempts)
        call = self._step_call(
            gradient, sample_count, learning_rate, attempts, batch=batch, has_values=has_values
        )
        weights, result = self._room_beside(call, out)
        call.exchange(weights, attempts)
        member = self._member
        if member is not None:
            if not reads_first:
                member.first_step = None
            self._read_behind(call, member, weights, attempts)
        return result

    def _read_behind(
        self, call: StepCall, member: Member, weights: Pieces, attempts: Attempts
    ) -> None:
        """Reads the weights of the first step of a member that has joined with a gradient."""
        if member.has_joined():
            self._read_first(member, weights, attempts)
        elif call.passes:
            get = partial(self._transfer.get_weights, weights, 0, attempts)
            self.version = int(attempts.run(get).version)
            self.next_step = max(self.next_step, self.version)

    def _room_beside(self, call: StepCall, out: ValuesT | None) -> tuple[Pieces, ValuesT]:
        weights, result = self._values.room(out)
        if weights.overlaps(call.work.values):
            raise ArgumentError("out must not overlap the gradient; pass another array")
        return weights, result

    def _step_call(
        self,
        gradient: Any,
        sample_count: int,
        learning_rate: float | None,
        attempts: Attempts,
        *,
        batch: Batch | Sequence[Batch] = (),
        is_whole: bool = True,
        has_values: bool = True,
    ) -> StepCall:
        """Checks all that can be checked before anything is sent; takes a seat, once.

        Without `is_whole` values are read later, where they lie.
        """
        feedback, dealing = self._feedback, self._dealing
        home = self._shards.state_home
        if self._states.kept is not None:
            self._states.send_ahead(attempts)
        if home is not None and home is not self._states:
            home.send(attempts)
        batches = given = (batch,) if isinstance(batch, Batch) else tuple(batch)
        if dealing.is_used or batches:
            self.lost_batches = has_values and not dealing.admits(batches)
            if self.lost_batches or (batches and self._is_before(self._opening.whole_from)):
                has_values = False
            if not (has_values and sample_count):
                dealing.give_back(batches)
                batches = ()
            if dealing.has_void:  # others may have the samples of what is carried
                self._forget_carried()
            dealing.tell(attempts)
        if has_values:
            what = f"gradient of {self.name!r}"
            values = self._values.pieces(what, gradient, in_place=not is_whole)
            sample_count = check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX)
        else:
            values, sample_count = zeros(self.spec.size), 0
        if learning_rate is not None:
            self.spec.check_rate(learning_rate)
        self._shards.given.add(self._what)
        if feedback.keeps and feedback.is_open(self.next_step):
            self._end_tried(attempts)
        tried = self._tried
        if tried.step != self.next_step or not tried.is_sent:
            tried = self._tried = Tried(self.next_step)
        call = StepCall(
            self._tools,
            self._go_on,
            tried,
            Gradient(
                values,
                tried.step,
                sample_count,
                learning_rate,
                after_refusal=not has_values,
                superseded=tried.superseded,
            ),
            self.version,
            has_effect=has_values and (sample_count > 0 or self.spec.mode == "async"),
            is_clipped=not (has_values and self._tools.clips),
            is_first=not (tried.is_sent or self._is_in_step)
            and self.outcome is not None
            and self.outcome.step == tried.step - 1,
            batches=batches,
        )
        if dealing.is_used and call.has_effect:
            call.work.samples = dealing.named(batches)
        if is_whole and feedback.keeps and feedback.is_due:
            call.add_carried()
        # With samples it leaves in the tenure that these were dealt to, though that may be over.
        is_bound = call.work.samples is not None and self._member is not None
        if not (is_bound or self._takes_part):
            if is_whole:
                self._transfer.check_finite(call.work)
            self._begin_part(attempts)
        gave_back = bool(given) and not (has_values or tried.is_sent)
        call.passes = gave_back and self._is_before(self._opening.from_step)
        self._is_in_step = True
        return call

    def _is_before(self, first_step: int) -> bool:
        """Returns True of a member whose next step is before the first that awaits it."""
        is_member = self._member is not None and self.spec.fragment is None  # outer work is kept
        return is_member and self.next_step < first_step

    def _go_on(self, call: StepCall, outcome: Outcome, next_step: int) -> None:
        if call.found_version is not None:
            self.version = call.found_version
        self.outcome, self.next_step = outcome, next_step
        if call.work.samples is not None:
            self._end_batches(call.batches, outcome)
        if self._states.kept is not None:
            self._states.note_end(outcome, is_lost=self.lost_batches)
        self._is_in_step, self._tried = False, Tried()

    def _end_batches(self, batches: Sequence[Batch], outcome: Outcome) -> None:
        feedback, member = self._feedback, self._member
        keeps = feedback.carries or self.spec.fragment is not None  # whose learner keeps its work
        carries = keeps and (member is None or member.takes_part)
        may_carry = self._dealing.ended(batches, outcome, carries=carries)
        is_lost = member is not None and not member.takes_part
        is_lost |= keeps and not may_carry
        self.lost_batches |= bool(batches) and is_lost and outcome.counted == "none"
        if keeps and not (carries and may_carry):  # what was carried is of samples that are void
            self._forget_carried()

    def _drop_carried(self, attempts: Attempts) -> None:
        """Gives samples back whose values no next step takes; those in part are named."""
        self._feedback.carried = None
        self._dealing.drop_carried()
        self._dealing.tell(attempts)

    def _forget_carried(self) -> None:
        self._feedback.carried = None
        self._dealing.forget_carried()

    def _end_tried(self, attempts: Attempts) -> None:
        """Asks for the outcome of a step in which calls have failed, and that has closed since.

        A contribution without values joins what was counted of it, and changes nothing.
        """
        step = self._feedback.tried_step
        tried = self._tried if self._tried.step == step else Tried(step)
        work = Gradient(zeros(self.spec.size), step, 0, None, after_refusal=True)
        work.superseded = tried.superseded
        call = StepCall(
            self._tools,
            self._go_on,
            tried,
            work,
            self.version,
            has_effect=False,
            is_clipped=True,
        )
        call.abandon(attempts)


class SliceProbe(Parameter[Any]):
    """A parameter whose calls move one shard's slice alone, for `shardwell bench`.

    It is asynchronous, open, initialized and without training: its steps are not whole on other
    shards. Its `traffic` counts, not that of the client whose connections it uses.
    """

    def __init__(self, parameter: Parameter[Any], shard_index: int) -> None:
        if parameter.spec.mode != "async":
            raise ArgumentError(
                f"parameter {parameter.name!r} is synchronous: a gradient for one shard alone "
                "would leave its step open; measure with one of mode='async'"
            )
        if not any(one.size for one in parameter.slices[shard_index : shard_index + 1]):
            raise ArgumentError(f"shard {shard_index} has no elements of {parameter.name!r}")
        self._shard_index = shard_index
        self.traffic = Traffic()
        super().__init__(
            parameter.spec,
            parameter._shards,
            timeout_s=parameter._timeout_s,
            traffic=self.traffic,
            idle_streams=parameter._idle_streams,
        )

    @override
    def _open(self, attempts: Attempts, *, is_known: bool = False) -> None:
        super()._open(attempts, is_known=is_known)
        self._transfer.parts = [
            ShardSlice(part.channel, part.where, part.chunk_element_count, 0)
            for part in self._transfer.parts
            if part.channel.shard_index == self._shard_index
        ]
