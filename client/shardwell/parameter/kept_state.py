"""The objects that a worker's training has beside the weights, whose states the shards keep.

A state of step t is what the objects are when t begins: before its batch is drawn, and after all
that the loop does behind the step before. It leaves ahead of t's gradient. Where the objects are:

    at        event                                                    next
    step t    `capture`: as t begins                                   t, captured
    step t    a step of this worker ends; its loop's tail follows      t + 1
    any       `load` of a state of step u                              u

So where steps close without this worker, `at` falls behind its next step: the objects take the
state that others bring. Where it makes a step again, as its tenure was over and nothing of it had
counted, `at` is ahead, and they take the state of that step again. Generators are each worker's
own, and no other's state is put into them.

A learner of outer training (`LearnerStates`) has a state of t from its offer of t - 1, and until
the next one, whatever its inner steps do to the objects: an offer is where a learner begins that is
started again. All are of fragment 0, whose offers count the samples.

    at            event                                                next
    any           `keep`: as the program registers them, or a `load`   t, captured, sent
    offer of t    `note_offer`, before it leaves                       t + 1, captured, pending
    t + 1,        `note_offer` as the loop has done what it does       t + 1, captured, pending
    captured      behind the inner step of the offer
    t + 1         chunk 0 has not counted the offer: it is late        the state before, of now
    pending       the offer's call begins, or `send`                   sent
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from shardwell.errors import ArgumentError, CorruptChunkError, DeadlineError, LimitError
from shardwell.parameter.feedback import Outcome
from shardwell.parameter.opening import ParameterOpening
from shardwell.parameter.state_pages import bring, fetched
from shardwell.rpc.call_scope import CallScope
from shardwell.rpc.cluster import Shards
from shardwell.rpc.retry import Attempts
from shardwell.specs.deadlines import check_timeout
from shardwell.specs.parameter import STATE_SIZE_MAX_BYTES, ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire.state_tree import ArrayForm, packed, unpacked

_LOG = logging.getLogger("shardwell")
_Stage = pb.KeepStateRequest
_AWAIT_S = 2.0
"""How long a worker that missed steps waits for the state of the next one."""
_AWAIT_PAUSE_S = 0.02
_NAME_SIZE_MAX = 200


class ReadState(NamedTuple):
    """A state as it was kept."""

    steps: Mapping[str, int]
    """The next step of each parameter and table of its worker then, by "parameter 'net'"."""
    objects: Mapping[str, Any]
    step: int
    is_own: bool
    """True if this worker gave it, or an earlier process of it."""


class KeptState:
    """The objects of one parameter's worker. For one thread at a time."""

    def __init__(self, name: str, at: int) -> None:
        self._name = name
        self._objects: dict[str, dict[str, Any]] = {}
        """By parameter, and name."""
        self._forms: dict[str, ArrayForm] = {}
        self._read: ReadState | None = None
        """The state that was kept, until the first step: others' objects may be in it."""
        self.at = at
        self.captured_step = -1
        self.pending: tuple[int, bytes] | None = None
        """The step and bytes that were captured last, until the shards have them."""

    def add(self, name: str, objects: Mapping[str, Any], forms: Sequence[ArrayForm]) -> None:
        """Keeps a parameter's objects from now on, in place of others of it."""
        if not isinstance(objects, Mapping) or not all(
            isinstance(key, str) and 0 < len(key) <= _NAME_SIZE_MAX for key in objects
        ):
            raise ArgumentError(
                'give objects by name, such as keep_state({"noise": generator}); got '
                f"{objects!r:.100}"
            )
        for key, each in objects.items():
            _check_object(key, each)
        self._forms |= {form.name: form for form in forms}
        self._objects[name] = dict(objects)

    def capture(self, step: int, steps: Mapping[str, int]) -> None:
        """Takes the objects' states as that of `step`.

        Raises:
            ArgumentError: a state has what can't be kept, or all of them are too large.
        """
        self._warn_of_rest()
        forms = list(self._forms.values())
        found = {
            name: {key: _state_of(each) for key, each in of.items()}
            for name, of in self._objects.items()
        }
        data = packed({"steps": dict(steps), "objects": found}, "the state", forms)
        if len(data) > STATE_SIZE_MAX_BYTES:
            sizes = {
                key: len(packed(each, key, forms))
                for of in found.values()
                for key, each in of.items()
            }
            largest = max(sizes, key=lambda key: sizes[key])
            raise ArgumentError(
                f"the state of parameter {self._name!r} has {len(data)} bytes, {sizes[largest]} of "
                f"them of {largest!r}, and the shards keep {STATE_SIZE_MAX_BYTES}: leave it out, "
                "and save it with the program, on rank 0 beside each checkpoint",
                parameter=self._name,
            )
        self.at = self.captured_step = step
        self.pending = step, data

    def read(self, data: bytes, step: int, *, is_own: bool) -> ReadState:
        """Returns what was kept."""
        found = unpacked(data, list(self._forms.values()))
        try:
            steps, objects = found["steps"], found["objects"]
            are_dicts = all(isinstance(each, dict) for each in (objects, *objects.values()))
            if are_dicts and all(type(each) is int for each in steps.values()):
                return ReadState(steps, objects, step, is_own)
        except (AttributeError, KeyError, TypeError):
            pass
        raise CorruptChunkError(
            f"the state that the shards keep of parameter {self._name!r} has no steps and objects",
            parameter=self._name,
        )

    def load(self, state: ReadState) -> None:
        """Puts a state into the objects of all parameters.

        Raises:
            ArgumentError: an object refuses its state; names it.
        """
        self._read, self.at = state, state.step
        for name in self._objects:
            self.load_of(name)

    def load_of(self, name: str) -> None:
        """Puts what was read last into a parameter's objects."""
        state = self._read
        if state is None:
            return
        known = state.objects.get(name, {})
        for key, each in self._objects[name].items():
            if key not in known:
                _LOG.warning(
                    "parameter %r: the state of step %d has no %r, which is left as it is",
                    name,
                    state.step,
                    key,
                )
            elif state.is_own or not _is_generator(each):
                try:
                    _load_into(each, known[key])
                except Exception as error:
                    raise ArgumentError(
                        f"{key!r} refuses the state of step {state.step} that the shards keep of "
                        f"parameter {name!r} ({error!r:.200}); give the object that the training "
                        "began with, or none",
                        parameter=name,
                    ) from error

    def _warn_of_rest(self) -> None:
        state, self._read = self._read, None
        if state is None:
            return
        left = [
            key
            for name, known in state.objects.items()
            for key in known.keys() - self._objects.get(name, {}).keys()
        ]
        if left:
            _LOG.warning(
                "parameter %r: the state of step %d has %s, which this program does not give to "
                "keep_state, so it is lost",
                self._name,
                state.step,
                ", ".join(map(repr, sorted(left))),
            )


def _check_object(key: str, each: Any) -> None:
    if not (
        _is_generator(each)
        or isinstance(each, MutableMapping)
        or (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))
    ):
        raise ArgumentError(
            f"{key!r} is a {type(each).__name__}, whose state can't be kept: give an object with "
            "state_dict() and load_state_dict(), a dict that the program changes, or a generator "
            "of random numbers"
        )


def _is_generator(each: Any) -> bool:
    is_torch = hasattr(each, "get_state") and hasattr(each, "set_state")
    return isinstance(each, np.random.Generator | random.Random) or is_torch


def _state_of(each: Any) -> Any:
    if isinstance(each, np.random.Generator):
        return each.bit_generator.state
    if isinstance(each, random.Random):
        return each.getstate()
    if _is_generator(each):
        return each.get_state()
    return dict(each) if isinstance(each, MutableMapping) else each.state_dict()


def _load_into(each: Any, state: Any) -> None:
    if isinstance(each, np.random.Generator):
        each.bit_generator.state = state
    elif isinstance(each, random.Random):
        each.setstate(state)
    elif _is_generator(each):
        each.set_state(state)
    elif isinstance(each, MutableMapping):
        each.clear()
        each.update(state)
    else:
        each.load_state_dict(state)


class KeptStates:
    """The state that a worker keeps on shard 0. The client's threads call `send_ahead`."""

    def __init__(
        self,
        spec: ParameterSpec,
        opening: ParameterOpening,
        calls: CallScope,
        shards: Shards,
        next_step: Callable[[], int],
    ) -> None:
        self._spec = spec
        self._opening = opening
        self._calls = calls
        self._shards = shards
        self._next_step = next_step
        self.kept: KeptState | None = None
        """Objects of all parameters; None: another one keeps them, or nothing is kept."""

    def begin(
        self,
        objects: Mapping[str, Any],
        forms: Sequence[ArrayForm],
        timeout_s: float | None,
        step: int,
    ) -> None:
        """Keeps objects, and puts into them what is kept; see `Parameter.keep_state`.

        `step` is the one behind the last that an earlier process of this worker has given.
        """
        if timeout_s is not None:
            check_timeout(timeout_s)
        spec = self._spec
        if spec.mode != "sync":
            raise ArgumentError(
                f"parameter {spec.name!r} has asynchronous steps, and no state is kept of these; "
                "keep one with a parameter of mode='sync', or with the program",
                parameter=spec.name,
            )
        home = self._shards.state_home
        if home is not None and home is not self and home.kept is not None:
            home.kept.add(spec.name, objects, forms)  # one state of all that a worker trains
            home.kept.load_of(spec.name)
            return
        kept = KeptState(spec.name, self._next_step())
        kept.add(spec.name, objects, forms)
        found = self._found(kept, step, timeout_s)
        if found is not None:
            if found.is_own and not spec.has_open_sets:
                self._shards.resumed = found.steps
                for each in self._shards.handles:
                    each.resume()
            kept.load(found)
            if found.step != self._next_step():
                _LOG.warning(
                    "parameter %r: the state that is kept is of step %d, and this worker is at "
                    "step %d: it lacks what the loop did behind the steps between",
                    spec.name,
                    found.step,
                    self._next_step(),
                )
        self.kept = kept
        self._shards.state_home = self

    def note(self) -> None:
        """Takes the objects as they are now; see `Parameter.note_state`."""
        home = self._shards.state_home
        if home is not None and home is not self:
            home.note()
            return
        kept, step = self.kept, self._next_step()
        if kept is None:
            return
        if self._spec.has_open_sets and kept.at != step:
            found = self._found(kept, step, waits=True)
            if found is not None and (found.step > kept.at or found.step == step):
                kept.load(found)
        self._capture(kept)
        with contextlib.suppress(LimitError):  # it leaves with the gradient, else
            self._calls.start(self.send, in_turn=True)

    def end(self, timeout_s: float | None) -> None:
        """Keeps the objects as they are behind the last step, unless the next has begun."""
        if timeout_s is not None:
            check_timeout(timeout_s)
        kept = self.kept
        if kept is not None and kept.captured_step < self._next_step():
            self._capture(kept)
        if kept is not None and kept.pending is not None:
            self._calls.run(self.send, timeout_s, in_turn=True)

    def hand_to(self, other: KeptStates) -> None:
        """Goes on with the objects as they are at the next step of another opening."""
        if self.kept is not None:
            other.kept, self.kept = self.kept, None
            other.kept.at, other.kept.captured_step = other._next_step(), -1
            self._shards.state_home = other

    def close(self) -> None:
        """Lets another parameter of this worker begin a state, as that of this one is closed."""
        if self._shards.state_home is self:
            self._shards.state_home = None

    def drop(self) -> None:
        """Keeps nothing more, of none of what this worker trains."""
        home = self._shards.state_home
        if home is not None:
            home.kept = None

    def note_end(self, outcome: Outcome, *, is_lost: bool) -> None:
        """Takes note that a step has ended, and that its loop does what it does behind it."""
        if self.kept is not None:
            self.kept.at += 1

    def send_ahead(self, attempts: Attempts) -> None:
        """Has shard 0 keep the state of the next step, before a gradient of it leaves."""
        kept = self.kept
        if kept is not None:
            if kept.captured_step != self._next_step():
                self._capture(kept)
            self.send(attempts)

    def _capture(self, kept: KeptState) -> None:
        handles = [each for each in self._shards.handles if each.may_go_back]
        kept.capture(self._next_step(), {each.what: each.next_step for each in handles})

    def _found(
        self, kept: KeptState, step: int, timeout_s: float | None = None, *, waits: bool = False
    ) -> ReadState | None:
        def ask(attempts: Attempts) -> pb.KeepStateResponse:
            end_s = attempts.remaining_s - _AWAIT_S
            while True:
                answer = self._call(attempts, stage=_Stage.STAGE_GET, step=step)
                if not (waits and answer.is_awaited) or attempts.remaining_s <= max(end_s, 0):
                    state = fetched(partial(self._call, attempts), answer)
                    if state is not None:
                        answer.state = state
                        return answer
                    if attempts.remaining_s <= 0:
                        raise DeadlineError(
                            f"the state of parameter {self._spec.name!r} was replaced each time "
                            f"that it was fetched, for {attempts.timeout_s:g} s; raise timeout_s",
                            parameter=self._spec.name,
                        )
                attempts.pause(_AWAIT_PAUSE_S)

        answer = self._calls.run(ask, timeout_s)
        if not answer.worker_id:
            return None
        is_own = answer.worker_id == self._opening.worker_id
        return kept.read(answer.state, int(answer.step), is_own=is_own)

    def send(self, attempts: Attempts) -> None:
        """Has shard 0 keep what was captured last; before a gradient of anything leaves."""
        kept = self.kept
        pending = None if kept is None else kept.pending
        if kept is not None and pending is not None:
            step, state = pending
            bring(partial(self._call, attempts), _Stage.STAGE_PUT, step, state, attempts)
            if kept.pending is pending:
                kept.pending = None

    def _call(self, attempts: Attempts, **fields: Any) -> pb.KeepStateResponse:
        opening, channel = self._opening, self._shards.channels[0]

        def ask() -> pb.KeepStateResponse:
            request = pb.KeepStateRequest(
                shard=channel.identity,
                worker_id=opening.worker_id,
                incarnation=opening.incarnation,
                **opening.of,
                **fields,
            )
            bound_s = attempts.rest_s
            kind = pb.KeepStateResponse
            return channel.call("KeepState", request, kind, timeout_s=bound_s, **opening.of)

        return attempts.run(ask)


class LearnerStates(KeptStates):
    """The states that a learner of outer training keeps, of fragment 0; `Outer` says when."""

    _offered = _counted = b""
    """The states behind the last offer, and behind the last that has counted."""

    @override
    def begin(
        self,
        objects: Mapping[str, Any],
        forms: Sequence[ArrayForm],
        timeout_s: float | None,
        step: int,
    ) -> None:
        spec = self._spec
        assert spec.fragment is not None
        if spec.fragment.index:
            raise ArgumentError(
                f"parameter {spec.name!r} is not fragment 0 of family {spec.fragment.family!r}, "
                "whose offers a state is of; call keep_state of the Outer, or of the DiLoCo",
                parameter=spec.name,
            )
        kept = KeptState(spec.fragment.family, self._next_step())
        kept.add(spec.fragment.family, objects, forms)
        found = self._found(kept, step, timeout_s)
        if found is not None:
            kept.load(found)
        kept.capture(self._next_step(), {})  # from which a learner begins that never offered
        assert kept.pending is not None
        self._counted = self._offered = kept.pending[1]
        self.kept = kept
        self._calls.run(self.send, timeout_s)

    def note_offer(self, step: int) -> None:
        """Takes the objects as they are now as the state behind an offer of a step."""
        if self.kept is not None:
            self.kept.capture(step + 1, {})
            _, self._offered = self.kept.pending or (0, b"")
            if step < self._next_step():  # it has counted
                self._counted = self._offered

    def go_back(self) -> None:
        """Puts the state behind the last offer that counted into the objects."""
        if self.kept is not None:
            self.kept.load(self.kept.read(self._counted, self._next_step(), is_own=True))

    def start_sending(self) -> None:
        """Has shard 0 keep what was captured last, in the background, behind an open offer."""
        with contextlib.suppress(LimitError):  # it leaves with the next offer, else
            self._calls.start(self.send, in_turn=True)

    @override
    def note(self) -> None:
        """Does nothing: inner steps begin within the place that a state is of."""

    @override
    def note_end(self, outcome: Outcome, *, is_lost: bool) -> None:
        """Goes back to the state before, if chunk 0 has not counted the samples of the offer.

        The learner keeps their work. Where it is lost before the next offer, they are dealt again.
        """
        if is_lost or any(not where.offset for where in (*outcome.late, *outcome.superseded)):
            if self.kept is not None:
                self.kept.pending = self._next_step(), self._counted
                self.start_sending()
        else:
            self._counted = self._offered

    @override
    def send_ahead(self, attempts: Attempts) -> None:
        """Has shard 0 keep what was captured for an offer, before it leaves."""
        self.send(attempts)

    @override
    def end(self, timeout_s: float | None) -> None:
        """Keeps what was captured last: what inner steps did since is lost with them."""
        if timeout_s is not None:
            check_timeout(timeout_s)
        if self.kept is not None and self.kept.pending is not None:
            self._calls.run(self.send, timeout_s)
