"""Outer training (DiLoCo): a learner trains by itself, and sends what it moved once in a while.

The model's tensors are dealt into fragments (placement/fragments.py), each a parameter of its own,
`NAME.fragment-0` and so on, whose optimizer is the outer one. What a learner *offers* of a fragment
is the outer gradient, image - local: the *image* is the weights of the version that it had last, as
all learners decoded them. It is exchanged in the background; what comes is *taken*: the new image,
mixed with `alpha` of the local weights. (Douillard et al., DiLoCo, 2023; Streaming DiLoCo, 2025.)

States of a fragment in a learner:

    taken   -> offered      its next outer step has this learner's gradient, or will have it
    offered -> taken        the learner has the image of a later version
    offered -> failed       the call has ended with an error; `take` makes it again

Invariants:
  - A gradient is offered for the outer step that this learner has not given, with the same values
    until it is taken, so it counts once, whatever was killed.
  - What the shards did not count of an offer stays in the local weights, so the next one has it.
  - The fragment that is offered next is the one with the fewest outer steps (schedule.py).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import threading
import time
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from typing_extensions import override

from shardwell.client import Client, check_client
from shardwell.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    DivergedError,
    NonFiniteError,
    NotInitializedError,
    ShardUnavailableError,
    ShardwellError,
    StepOrderError,
)
from shardwell.numerics.arguments import as_floats, check_integer
from shardwell.numerics.codec import Float32
from shardwell.outer.learner_state import checked_state
from shardwell.outer.schedule import Schedule, due_fragment
from shardwell.parameter.parameter import Parameter
from shardwell.parameter.values import NamedArrays, TensorViews
from shardwell.placement.fragments import STRIDED, Patterns, assignment_name, deal_fragments
from shardwell.placement.slices import Slice
from shardwell.process.connected import Closing, Connected
from shardwell.process.ending import is_in_order
from shardwell.specs.checks import check_number
from shardwell.specs.deadlines import check_timeout, with_answer
from shardwell.specs.fragments import Fragment
from shardwell.specs.layout import TensorLayout
from shardwell.specs.learner import LearnerProgress
from shardwell.specs.members import Elastic
from shardwell.specs.names import check_name, neighbour
from shardwell.specs.optimizers import SGD, Average, Optimizer
from shardwell.specs.parameter import SAMPLE_COUNT_MAX, STEP_MAX, CodecName, ParameterSpec
from shardwell.threads.calls import ABANDON_S, LATE_S, SIGNAL_INTERVAL_S

DEFAULT_CODEC: CodecName = "int8"
"""How fragments travel where nothing else is asked for."""
OverdueName = Literal["wait", "later"]
"""What a learner does when the result of an offer has not come in time."""
DEFAULT_OUTER = SGD(0.7, momentum=0.9, nesterov=True)
"""The paper's."""
_LEAVE_S, _LEAVE_S_FAILED = 5.0, 1.0
"""How long a learner that ends waits for its open offers: in order, or by an exception."""
_LEAVE_S_MIN = 0.1
"""For saying of one fragment that a learner leaves, however long the others took."""
_INIT_PAUSE_S = 0.05
"""Between two looks at whether another learner has set its first weights."""


class FragmentState(NamedTuple):
    """One fragment of a family, as this learner has it."""

    name: str
    """Name of its parameter."""
    tensors: tuple[str, ...]
    """Names of its tensors, in order."""
    version: int
    """Outer steps that the image has seen."""
    step: int
    """The outer step that this learner's next offer joins."""
    is_offered: bool
    """Whether an offer of it was not taken yet."""


@dataclass(eq=False)
class _Offer:
    """An outer gradient on its way."""

    gradient: TensorViews
    sample_count: int
    step: int
    due: int
    """The inner step after which it is to be taken."""
    began_s: float = field(default_factory=time.monotonic)
    call: Future[NamedArrays] | None = None
    call_began_s: float = 0.0
    ended_s: float = 0.0
    """When the last call ended, by time.monotonic(); 0: it has not."""
    since_count: int = 0
    """Samples that were trained on since."""
    is_overdue: bool = False
    was_raised: bool = False
    """Whether the caller has got the error of the last call."""

    @property
    def has_ended(self) -> bool:
        """Whether its call has ended, one way or another."""
        return self.call is not None and self.call.done()

    @property
    def error(self) -> BaseException | None:
        """Why its call has failed, if it has."""
        return self.call.exception() if self.call is not None and self.call.done() else None

    def begin(self, call: Future[NamedArrays]) -> None:
        """It has a call from now on."""
        self.call_began_s, self.ended_s, self.was_raised = time.monotonic(), 0.0, False
        self.call = call
        call.add_done_callback(self._note_end)

    def _note_end(self, _: Future[NamedArrays]) -> None:
        self.ended_s = time.monotonic()


class Outer(Connected, Closing):
    """A learner's part in outer training, of NumPy arrays by name; torch has a shell around it.

        with shardwell.Outer(client, "net", tensors=weights, worker_count=4) as outer:
            weights = outer.init(weights)
            for batch in batches:
                weights = inner_step(weights, batch)
                weights.update(outer.after_step(weights, sample_count=len(batch)))

    For one thread at a time. Arrays that it returns are the caller's.

    Args:
        client: Made by `shardwell.connect`; the caller's to close.
        name: Name of the family on the cluster; its fragments are parameters `NAME.fragment-0` and
            so on.
        tensors: Shapes by name, or what has shapes, as the weights have; all learners give the
            same.
        outer: The update rule of outer gradients on the shards. Default: the paper's,
            `SGD(0.7, momentum=0.9, nesterov=True)`.
        sync_every: Inner steps between two outer steps of a fragment.
        fragments: How many, which divides sync_every; or a list with a regular expression for each,
            or several, of which the first that is found in a tensor's name counts.
        assignment: "strided": layers in turn, as published; "balanced": by size.
        overlap: Inner steps that go on between an offer and its take, below sync_every / fragments.
        alpha: The part of the local weights that stays at a take, 0 to 1.
        codec: How fragments travel. int8, the default: a byte an element both ways, and what
            rounding takes off is in the next offer. Not bf16, whose 8 bits lose what small inner
            rates move.
        worker_count: Learners that make an outer step; default: 1.
        members: In place of worker_count: learners come and go; see `Elastic`.
        min_contributors: See `Client.parameter`.
        grace_s: See `Client.parameter`.
        overdue: "wait": a take waits for the other learners. "later": it is made after the first
            inner step at which the result is here; `overdue_count` counts. An offer that is still
            open when its fragment is due again is waited for.
        timeout_s: How long a take waits, and each other call; default: the client's.

    Raises:
        SpecMismatchError: the cluster has another family under that name.
        ArgumentError: an argument can't be used; names it.
        ShardwellError: as `Client.parameter`.

    Examples:
        >>> weights = {"slope": np.zeros(3, np.float32)}
        >>> with shardwell.Outer(
        ...     client, "line", tensors=weights, sync_every=2, fragments=1
        ... ) as outer:
        ...     weights = outer.init(weights)
        ...     while outer.next_step < 3:
        ...         weights["slope"] += 0.1  # an inner step
        ...         weights.update(outer.after_step(weights, sample_count=32))
        >>> outer.next_step
        3
    """

    _elsewhere = "make an Outer in the other process, with a client that is connected there"

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        tensors: Mapping[str, Any],
        outer: Optimizer = DEFAULT_OUTER,
        sync_every: int = 100,
        fragments: int | Patterns = 4,
        assignment: str = STRIDED,
        overlap: int = 0,
        alpha: float = 0.0,
        codec: CodecName = DEFAULT_CODEC,
        worker_count: int | None = None,
        members: Elastic | None = None,
        min_contributors: int = 0,
        grace_s: float = 0.0,
        overdue: OverdueName = "wait",
        timeout_s: float | None = None,
    ) -> None:
        check_client(client)
        self.name = check_name("name", name)
        self._client = client
        layout = TensorLayout.of(tensors)
        self._shapes = {tensor.name: tensor.shape for tensor in layout}
        sizes = {tensor.name: tensor.size for tensor in layout}
        dealt = deal_fragments(sizes, fragments, assignment)
        self.schedule = Schedule(sync_every=sync_every, fragment_count=len(dealt), overlap=overlap)
        """When fragments are offered and taken."""
        self._check(outer, alpha, codec, overdue)
        self._alpha = float(alpha)
        self._waits = overdue == "wait"
        self._timeout_s = client.timeout_s if timeout_s is None else check_timeout(timeout_s)
        self.inner_step = 0
        """Inner steps that this learner has made; a loaded state counts on."""
        self.waited_s = 0.0
        """Seconds that takes have waited."""
        self.hidden_s = 0.0
        """Seconds that offers travelled, or waited for other learners, while training went on."""
        self.overdue_count = 0
        """Offers whose result had not come in time."""
        self.kept_count = 0
        """Takes at which this learner has kept work that the shards had not counted."""
        self.offered_count = 0
        """Offers so far."""
        self._sample_count = 0
        """What inner steps were trained on, since this learner began here."""
        self._began_bytes = client.traffic.sent_bytes, client.traffic.received_bytes
        """What its client had moved before."""
        self._position = 0
        """Inner steps since this learner began here, by which the schedule goes."""
        self._images: list[TensorViews] = []
        """Images of each fragment, once it has first weights."""
        self._offers: dict[int, _Offer] = {}
        """By fragment, in the order in which they were made."""
        self._sample_counts = [0] * len(dealt)
        """Samples since each fragment was taken last."""
        self._unreturned: NamedArrays = {}
        """What a call of `after_step` that failed had taken before."""
        self._parameters: list[Parameter[NamedArrays]] = []
        options: dict[str, Any] = {
            "optimizer": outer,
            "codec": codec,
            **Elastic.crew(worker_count, members),
            "min_contributors": min_contributors,
            "grace_s": grace_s,
        }
        for index, names in enumerate(dealt):
            shapes = {each: self._shapes[each] for each in names}
            fragment = Fragment(
                family=name,
                index=index,
                count=len(dealt),
                assignment=assignment_name(fragments, assignment),
            )
            parameter = client.parameter(
                fragment.parameter, tensors=shapes, fragment=fragment, **options
            )
            parameter.advise_on_non_finite(
                "lower the inner or the outer learning rate, and go on from reload()"
            )
            self._parameters.append(parameter)
        self._layouts: list[TensorLayout] = []
        for parameter in self._parameters:
            assert parameter.spec.layout is not None
            self._layouts.append(parameter.spec.layout)
        self._steps = [parameter.next_step for parameter in self._parameters]
        """The outer step that this learner's next offer of each fragment joins."""
        self._versions = [0] * len(dealt)
        self._is_to_join = members is not None
        """Whether this elastic learner may be no member of some fragments."""

    def __repr__(self) -> str:
        return (
            f"Outer({self.name!r}, {len(self._parameters)} fragments, inner step {self.inner_step})"
        )

    @staticmethod
    def _check(outer: Any, alpha: float, codec: Any, overdue: Any) -> None:
        if isinstance(outer, Average) or not isinstance(outer, Optimizer):
            raise ArgumentError(
                "outer must be an update rule, as shardwell.SGD(0.7, momentum=0.9, nesterov=True); "
                f"got {outer!r:.80}"
            )
        check_number("alpha", alpha)
        if alpha > 1.0:
            raise ArgumentError(
                f"alpha must be from 0 to 1, the part of the local weights that stays; got {alpha}"
            )
        if isinstance(codec, str) and codec.removesuffix("+lz4") == "bf16":
            raise ArgumentError(
                f"codec={codec!r} rounds weights to 8 bits, in which what inner steps move is "
                f"lost; pass {DEFAULT_CODEC!r}, 'fp32' or 'fp16'"
            )
        if overdue not in get_args(OverdueName):
            raise ArgumentError(f"overdue must be 'wait' or 'later'; got {overdue!r:.80}")

    @property
    def spec(self) -> ParameterSpec:
        """What all learners agreed on: that of the first fragment's parameter."""
        return self._parameters[0].spec

    @property
    def is_offer_due(self) -> bool:
        """Whether the next `after_step` offers a fragment."""
        return self.schedule.offers_after(self._position + 1)

    @property
    def is_draining(self) -> bool:
        """Whether an operator wants this learner to leave, by `shardwell members drain`."""
        return any(parameter.is_draining for parameter in self._parameters)

    @property
    def fragments(self) -> list[FragmentState]:
        """Each fragment's tensors, and where it is."""
        return [
            FragmentState(
                parameter.name,
                tuple(layout.by_name),
                self._versions[index],
                self._steps[index],
                index in self._offers,
            )
            for index, (parameter, layout) in enumerate(
                zip(self._parameters, self._layouts, strict=True)
            )
        ]

    @property
    def progress(self) -> LearnerProgress:
        """This learner's progress, which it reports after each take and `shardwell status` shows.

        Bytes are those that its client has moved since this object was made, for other parameters
        too; `sample_count` is what `after_step` has counted since then.
        """
        traffic, (sent, received) = self._client.traffic, self._began_bytes
        return LearnerProgress(
            inner_steps=self.inner_step,
            sample_count=self._sample_count,
            offered_count=self.offered_count,
            sent_bytes=traffic.sent_bytes - sent,
            received_bytes=traffic.received_bytes - received,
            hidden_s=max(self.hidden_s, 0.0),
            waited_s=self.waited_s,
            overdue_count=self.overdue_count,
            kept_count=self.kept_count,
        )

    @property
    def next_step(self) -> int:
        """The outer step that this learner is to go on with, also after a restart.

        All fragments have the outer steps before it, so learners that loop until it is reached end
        at the same one: `while outer.next_step < 200`.
        """
        return min(self._steps)

    # First weights, and the newest.

    def init(self, weights: Mapping[str, Any]) -> NamedArrays:
        """Gives first weights, unless the family has some, and takes the newest that it has.

        Of several learners, the first decides them for all fragments. A learner that comes while
        the others train gets their weights, and they do not wait for it.

        Args:
            weights: Arrays by name.

        Returns:
            The weights to train on, float32.

        Raises:
            ArgumentError, NonFiniteError: the weights can't be used; nothing was sent.
            NotInitializedError: another learner gave first weights for some fragments, and did not
                come back in time to give the rest.
            ShardwellError: as `Parameter.init`.
        """
        given = self._all_arrays(weights)
        digest = hashlib.blake2b(digest_size=8)
        for name in self._shapes:
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(given[name]).data)
        # All who give the same values may finish what one of them began; a family never has some
        # of one learner's and some of another's.
        load_id = int.from_bytes(digest.digest(), "little") >> 1 or 1
        for index, (parameter, layout) in enumerate(
            zip(self._parameters, self._layouts, strict=True)
        ):
            own = {name: given[name] for name in layout.by_name}
            try:
                version = parameter.restore(
                    own, version=0, load_id=load_id, timeout_s=self._timeout_s
                )
            except NonFiniteError:
                raise
            except ArgumentError:
                if index:
                    raise
                break  # the family has other first weights
            if not index and version:
                break  # all fragments had first weights before: one without was lost
        return self.reload()

    def reload(self) -> NamedArrays:
        """Takes the newest weights of every fragment, and forgets what the learner moved since.

        Waits for open offers, as they count. Other learners do not wait for this one meanwhile.

        Returns:
            The weights to train on, float32.

        Raises:
            NotInitializedError: no learner has given first weights.
            ShardwellError: as `Parameter.get_weights`, and as `take`.
        """
        for index in list(self._offers):
            try:
                self._awaited(index)
            except NonFiniteError:  # a shard has refused a part, so its step ends without the rest
                self._parameters[index].abandon_step(timeout_s=self._timeout_s)
            self._offers.pop(index, None)
        images = [self._newest(index) for index in range(len(self._parameters))]
        self._images = images
        self._sample_counts = [0] * len(images)
        self._unreturned = {}
        self._position = 0
        return {name: array.copy() for image in images for name, array in image.items()}

    def image(self) -> NamedArrays:
        """The weights that all learners share, as this one has taken them last; copies.

        Use them to evaluate: they are the mean of all learners' work; the local weights are one's.
        """
        self._check_begun()
        return {name: array.copy() for image in self._images for name, array in image.items()}

    def _newest(self, index: int) -> TensorViews:
        """The newest image of a fragment; waits for first weights that another learner gives."""
        parameter = self._parameters[index]
        # A learner of a fixed crew goes on behind its last offer, whose result it may have missed.
        is_open = parameter.spec.has_open_sets
        pause, until_s = threading.Event(), time.monotonic() + self._timeout_s
        while True:
            try:
                image = parameter.get_weights(
                    min_version=0 if is_open else parameter.next_step, timeout_s=self._timeout_s
                )
                break
            except NotInitializedError as error:
                if not index or time.monotonic() > until_s:
                    raise NotInitializedError(
                        f"fragment {index} of {self.name!r} has no first weights: the learner that "
                        "came first gave those of some fragments only; start it again with the "
                        "same weights, or delete the family and begin anew"
                        if index
                        else f"{self.name!r} has no first weights; call init(weights)",
                        parameter=parameter.name,
                    ) from error
                pause.wait(_INIT_PAUSE_S)
        self._steps[index], self._versions[index] = parameter.next_step, parameter.version
        assert isinstance(image, TensorViews)
        return image

    # Inner steps.

    def after_step(
        self,
        weights: Mapping[str, Any],
        sample_count: int = 1,
        *,
        into: MutableMapping[str, Any] | None = None,
    ) -> NamedArrays:
        """Counts an inner step, and offers and takes what is due after it.

        Args:
            weights: The local weights by name.
            sample_count: What the step was trained on, in any unit that all learners share; an
                offer weighs as much as was trained on since its fragment was taken.
            into: Gets the tensors that changed, by `update`, at the moment that they are taken:
                whatever ends the call, such as Ctrl-C. Default: they are returned.

        Returns:
            The tensors that changed, as new arrays: `weights.update(...)`. Most inner steps change
            none. With `into`, none.

        Raises:
            ArgumentError, NonFiniteError: the weights can't be offered; names the tensor. Nothing
                was sent.
            WorkersMissingError: a take has waited in vain; names the learner that is missing. The
                offer is open still, and the next call, or `take`, waits again.
            ShardwellError: as `Parameter.exchange`.
        """
        self._check_begun()
        count = check_integer("sample_count", sample_count, 0, STEP_MAX)
        self.inner_step += 1
        self._position += 1
        self._sample_count += count
        self._sample_counts = [each + count for each in self._sample_counts]
        for offer in self._offers.values():
            offer.since_count += count
        unreturned = self._unreturned
        changed: MutableMapping[str, Any] = unreturned if into is None else into
        now: Mapping[str, Any] = ChainMap(changed, weights)  # type: ignore[arg-type]
        self._take_due(now, changed)
        if self.schedule.offers_after(self._position):
            self._check_names(weights)
            fragment = due_fragment(self._next_steps)
            if fragment in self._offers:
                self._take(fragment, now, changed, refreshes=True)
            self._offer(fragment, now)
            self._take_due(now, changed)
        self._unreturned = {}
        return unreturned if into is None else {}

    @property
    def _next_steps(self) -> list[int]:
        return [step + (index in self._offers) for index, step in enumerate(self._steps)]

    def _take_due(self, weights: Mapping[str, Any], changed: MutableMapping[str, Any]) -> None:
        for fragment, offer in list(self._offers.items()):
            if offer.due > self._position or fragment not in self._offers:
                continue
            if not self._waits and not self._has_come(fragment, offer):
                self.overdue_count += not offer.is_overdue
                offer.is_overdue = True
                continue
            self._take(fragment, weights, changed, refreshes=True)

    def _has_come(self, fragment: int, offer: _Offer) -> bool:
        """Whether the result of an offer is here; an error is raised once, then it goes again.

        Raises:
            ShardwellError: the offer's call has failed.
        """
        error = offer.error
        if error is not None and not offer.was_raised:
            offer.was_raised = True
            raise error
        if error is not None or offer.call is None:
            self._send(fragment, offer)
        return offer.has_ended

    # One fragment.

    def offer(
        self, fragment: int, weights: Mapping[str, Any], *, sample_count: int | None = None
    ) -> None:
        """Offers what the local weights of a fragment have moved; does not wait.

        For loops with a schedule of their own; `after_step` calls it.

        Args:
            fragment: Index of the fragment, from 0.
            weights: The local weights by name; the fragment's at least.
            sample_count: Weight in the outer step's mean, 0 to 2^24; default: what `after_step` has
                counted since the fragment was taken, or 1.

        Raises:
            ArgumentError: the fragment is offered already, or a tensor is missing or has another
                shape.
            NonFiniteError: what a tensor has moved is not finite.
        """
        self._check_begun()
        index = self._checked_fragment(fragment)
        if index in self._offers:
            raise ArgumentError(
                f"fragment {index} of {self.name!r} is offered already; take({index}) before"
            )
        self._offer(index, weights, sample_count)

    def _offer(
        self, index: int, weights: Mapping[str, Any], sample_count: int | None = None
    ) -> None:
        if sample_count is None:
            sample_count = self._sample_counts[index] if self.inner_step else 1
        try:
            count = check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX)
        except ArgumentError as error:
            raise ArgumentError(
                f"fragment {index} of {self.name!r}: {error}; count in a larger unit, such as "
                "sequences instead of tokens"
            ) from None
        due = self._position + self.schedule.overlap
        offer = _Offer(self._moved(index, weights), count, self._steps[index], due)
        self._join(index)
        self._offers[index] = offer  # before it leaves: it counts, whatever ends this call
        try:
            self._send(index, offer)
        except ShardwellError:
            self._offers.pop(index)
            raise
        self.offered_count += 1

    def _join(self, offered: int) -> None:
        """Makes an elastic learner that begins to offer a member of the other fragments, too.

        So the others await it there a round later, when it has had time for its inner steps; if it
        joined with its offers alone, these would be late for another round.
        """
        if not self._is_to_join:
            return
        for index, parameter in enumerate(self._parameters):
            if index != offered and index not in self._offers:
                parameter.join(waits=False, timeout_s=self._timeout_s)
        self._is_to_join = False

    def _send(self, index: int, offer: _Offer) -> None:
        """Begins the call of an offer."""
        self._parameters[index].exchange_async(
            offer.gradient,
            sample_count=offer.sample_count,
            timeout_s=self._timeout_s,
            began=offer.begin,
        )

    def take(self, fragment: int, weights: Mapping[str, Any] | None = None) -> NamedArrays:
        """Waits for the result of an offer; returns the fragment's new local weights.

        Args:
            fragment: Index of the fragment, from 0.
            weights: The local weights by name as they are now; None: as they were offered.

        Raises:
            ArgumentError: the fragment was not offered.
            DivergedError: the weights that came of it are not finite.
            WorkersMissingError: other learners did not offer it in time; names them. Call it again.
            ShardwellError: as `Parameter.exchange`; call it again.
        """
        self._check_begun()
        index = self._checked_fragment(fragment)
        if index not in self._offers:
            raise ArgumentError(
                f"fragment {index} of {self.name!r} is not offered; offer({index}, weights) before"
            )
        taken: NamedArrays = {}
        self._take(index, weights, taken)
        return taken

    def _take(
        self,
        index: int,
        weights: Mapping[str, Any] | None,
        changed: MutableMapping[str, Any],
        *,
        refreshes: bool = False,
    ) -> None:
        """Takes a fragment, whose new local weights are in `changed` then."""
        offer, wait_began_s = self._offers[index], time.monotonic()
        image = self._awaited(index)
        parameter, layout = self._parameters[index], self._layouts[index]
        outcome = parameter.outcome
        assert outcome is not None
        uncounted = (*outcome.late, *outcome.superseded)
        # First what the caller gets: a signal may end this between any two lines.
        changed.update(self._mixed(index, image, offer, weights, uncounted))
        self._images[index] = image
        missed = outcome.version - offer.step - 1 if outcome.late else 0
        self._steps[index], self._versions[index] = parameter.next_step, parameter.version
        kept = sum(where.size for where in uncounted)
        self._is_to_join |= bool(outcome.late) and self.spec.members is not None
        trained = offer.sample_count + offer.since_count
        self._sample_counts[index] = round(trained * kept / layout.size)
        del self._offers[index]
        self.kept_count += bool(kept)
        self.hidden_s += min(offer.ended_s or wait_began_s, wait_began_s) - offer.began_s
        if missed > 0 and refreshes and weights is not None:  # it was away for longer
            self._refresh(weights, changed)
        with contextlib.suppress(ClosedError):  # by another thread
            self._parameters[0].report_learner(self.progress)

    def _awaited(self, index: int) -> TensorViews:
        """The image that comes of an offer; blocks. What fails leaves the offer open."""
        offer, began_s = self._offers[index], time.monotonic()
        error = offer.error
        # A call whose time ended before anything waited for it has a wait of its own.
        if (
            offer.call is None
            or offer.was_raised
            or isinstance(error, DeadlineError | ShardUnavailableError)
        ):
            self._send(index, offer)
        until_s = offer.call_began_s + with_answer(self._timeout_s) + LATE_S + ABANDON_S
        try:
            assert offer.call is not None
            while not offer.call.done():
                if time.monotonic() > until_s:
                    raise DeadlineError(
                        f"the offer of fragment {index} of {self.name!r} did not end within "
                        f"{ABANDON_S:g} s after its deadline: its connection is stuck; connect "
                        "again",
                        parameter=self._parameters[index].name,
                    )
                # In pieces, as a signal that another thread receives does not wake this one.
                concurrent.futures.wait([offer.call], timeout=SIGNAL_INTERVAL_S)
            offer.was_raised = offer.error is not None
            image = offer.call.result()
        except DivergedError:  # the step has ended with it
            del self._offers[index]
            raise
        finally:
            self.waited_s += time.monotonic() - began_s
        assert isinstance(image, TensorViews)
        return image

    def _mixed(
        self,
        index: int,
        image: TensorViews,
        offer: _Offer,
        weights: Mapping[str, Any] | None,
        uncounted: Sequence[Slice],
    ) -> NamedArrays:
        """The new local weights of a fragment, whose image is another now."""
        layout = self._layouts[index]
        new, old = _flat(image, layout), _flat(self._images[index], layout)
        mixed = TensorViews(layout, new.copy())
        if self._alpha or uncounted:
            if weights is None:
                local = old - _flat(offer.gradient, layout)
            else:
                local = np.empty(layout.size, np.float32)
                views = TensorViews(layout, local)
                for name, array in self._arrays(index, weights).items():
                    views[name][...] = array
            flat = _flat(mixed, layout)
            if self._alpha:
                flat *= np.float32(1.0 - self._alpha)
                flat += np.float32(self._alpha) * local
            for where in uncounted:
                own = slice(where.offset, where.stop)
                flat[own] = new[own] + (local[own] - old[own])
        return dict(mixed)

    def _refresh(self, weights: Mapping[str, Any], changed: MutableMapping[str, Any]) -> None:
        """Takes the newest image of what is not offered, and keeps what was moved since the old.

        The others have made more than one outer step without this learner: so it is in step with
        them at once. What can't be read now comes with its next offer.
        """
        for index in range(len(self._layouts)):
            if index in self._offers:
                continue
            version, old = self._versions[index], self._images[index]
            arrays = self._arrays(index, weights)
            try:
                new = self._newest(index)
            except (DeadlineError, ShardUnavailableError):
                return
            if self._versions[index] == version:
                continue
            changed.update(
                {
                    name: new[name] + np.subtract(array, old[name], dtype=np.float32)
                    for name, array in arrays.items()
                }
            )
            self._images[index] = new

    # Checks.

    def _check_begun(self) -> None:
        if not self._images:
            raise NotInitializedError(
                f"{self.name!r}: call init(weights) before inner steps, for the weights that all "
                "learners begin with",
                parameter=self._parameters[0].name,
            )

    def _checked_fragment(self, fragment: Any) -> int:
        return check_integer("fragment", fragment, 0, len(self._parameters) - 1)

    def _check_names(self, weights: Any) -> None:
        """Refuses what is no mapping, or has a tensor too many.

        Raises:
            ArgumentError: it is, or has.
        """
        if not isinstance(weights, Mapping):
            raise ArgumentError(
                f"weights of {self.name!r} must map the names of its {len(self._shapes)} tensors "
                f"to arrays; got {type(weights).__name__}"
            )
        for name in weights:
            if name not in self._shapes:
                raise ArgumentError(
                    f"weights of {self.name!r} have {name!r:.80}, which is no tensor of it"
                    f"{neighbour(str(name), self._shapes)}"
                )

    def _arrays(self, index: int, weights: Mapping[str, Any]) -> dict[str, Any]:
        """A fragment's arrays among the weights.

        Raises:
            ArgumentError: one is missing, or has another shape.
        """
        found = {}
        for name in self._layouts[index].by_name:
            try:
                given = weights[name]
            except KeyError:
                raise ArgumentError(
                    f"weights of {self.name!r} lack tensor {name!r} of fragment {index}"
                    f"{neighbour(name, map(str, weights))}"
                ) from None
            array = as_floats(f"weights of {self.name!r}: tensor {name!r}", given)
            if array.shape != self._shapes[name]:
                raise ArgumentError(
                    f"weights of {self.name!r}: tensor {name!r} must have shape "
                    f"{self._shapes[name]}, as it was opened; got {array.shape}; give a model of "
                    "another shape another name"
                )
            found[name] = array
        return found

    def _all_arrays(self, weights: Mapping[str, Any]) -> dict[str, Float32]:
        """All arrays, float32.

        Raises:
            ArgumentError, NonFiniteError: one is missing, can't be used, or is one too many.
        """
        self._check_names(weights)
        found: dict[str, Float32] = {}
        for index in range(len(self._parameters)):
            for name, array in self._arrays(index, weights).items():
                with np.errstate(over="ignore"):
                    found[name] = array.astype(np.float32, copy=False)
                if not np.isfinite(found[name]).all():
                    raise NonFiniteError(
                        f"weights of {self.name!r}: tensor {name!r} has values that are no finite "
                        "float32; mend them first",
                        parameter=self._parameters[index].name,
                    )
        return found

    def _moved(self, index: int, weights: Mapping[str, Any]) -> TensorViews:
        """The outer gradient of a fragment: image - local.

        Raises:
            ArgumentError: see `_arrays`.
            NonFiniteError: a tensor's is not finite; names it.
        """
        layout, image = self._layouts[index], self._images[index]
        gradient = TensorViews(layout, np.empty(layout.size, np.float32))
        for name, array in self._arrays(index, weights).items():
            with np.errstate(all="ignore"):
                moved = np.subtract(image[name], array, out=gradient[name], casting="same_kind")
            is_finite = np.isfinite(moved)
            if not is_finite.all():
                rest = np.linalg.norm(moved[is_finite].astype(np.float64))
                raise NonFiniteError(
                    f"fragment {index} of {self.name!r}: what tensor {name!r} has moved since it "
                    f"was taken is not finite in {int((~is_finite).sum())} of {moved.size} "
                    f"elements, and the rest has the norm {rest:.4g}; nothing was sent; lower the "
                    "inner learning rate or clip, and go on from reload()",
                    parameter=self._parameters[index].name,
                )
        return gradient

    # What a learner that is started again goes on with.

    def state_dict(self, weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """This learner's own state: plain numbers, lists, and float32 arrays.

        It has the inner steps and, for each fragment, the rounding error that is still to be sent
        (`residual`). With `weights` also how far the local weights have moved since the fragment
        was taken, and on how many samples; what an offered fragment has moved counts by itself.

        Args:
            weights: The local weights by name; None: what they have moved is not kept.
        """
        self._check_begun()
        fragments = []
        for index, parameter in enumerate(self._parameters):
            moved, residual, sample_count = None, None, 0
            if index not in self._offers:
                residual = parameter.residual
            if weights is not None and index not in self._offers:
                moved = -_flat(self._moved(index, weights), self._layouts[index])
                sample_count = self._sample_counts[index]
            fragments.append(
                {
                    "tensors": list(self._layouts[index].by_name),
                    "version": self._versions[index],
                    "sample_count": sample_count,
                    "moved": moved,
                    "residual": residual,
                }
            )
        return {"name": self.name, "inner_step": self.inner_step, "fragments": fragments}

    def load_state_dict(self, state: Mapping[str, Any]) -> NamedArrays:
        """Goes on from a state, on the newest weights that `init` has taken.

        What a fragment had moved counts once: it is left out where the learner has offered that
        fragment after the state was made, or where that was more outer steps ago than the shards
        know the contributors of.

        Args:
            state: Made by `state_dict`, maybe of an earlier version of the weights.

        Returns:
            The weights to train on: the newest, moved as the state says.

        Raises:
            ArgumentError: the state is of another family, or damaged, or inner steps were made
                before; says what differs. Nothing was changed.
        """
        self._check_begun()
        if self._offers or self._position:
            raise ArgumentError(
                f"load_state_dict of {self.name!r} after an inner step; call it before the first"
            )
        own = [(list(layout.by_name), layout.size) for layout in self._layouts]
        inner_step, found = checked_state(state, self.name, own)
        weights: NamedArrays = {}
        for index, each in enumerate(found):
            layout, image = self._layouts[index], self._images[index]
            mixed = TensorViews(layout, _flat(image, layout).copy())
            weights.update(mixed)
            if self._has_offered_since(index, each.version):
                continue
            if each.moved is not None:
                _flat(mixed, layout)[:] += each.moved
            self._sample_counts[index] = each.sample_count
            if self.spec.has_image:  # another codec rounds nothing off that is sent later
                self._parameters[index].load_residual(each.residual)
        self.inner_step = inner_step
        return weights

    def _has_offered_since(self, index: int, version: int) -> bool:
        """Whether an offer that this learner made of an image after that version counts."""
        parameter, newest = self._parameters[index], self._versions[index]
        if version > newest or self._steps[index] > newest:
            return True  # of weights that are gone; or in the outer step that is open
        if version == newest or not parameter.spec.has_open_sets:
            return version != newest  # a fixed crew's outer step needs this learner's offer
        worker_id, size = self._client.worker_id, self._layouts[index].size
        for step in range(version, newest):
            try:
                found = parameter.contributions(step, timeout_s=self._timeout_s)
            except StepOrderError:  # too long ago
                return True
            known = sum(where.size for where, workers in found if worker_id not in workers)
            if known < size:  # a shard was started again since, or the learner is in it
                return True
        return False

    # The end.

    def leave(self, *, timeout_s: float | None = None) -> None:
        """Takes part no more as an elastic learner; what it has offered counts.

        Open offers end first. The next offer takes part anew.

        Args:
            timeout_s: How long open offers are waited for; default: as each call.

        Raises:
            ShardwellError: as `Parameter.leave`.
        """
        until_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        failure: ShardwellError | None = None
        for parameter in self._parameters:
            rest_s = max(until_s - time.monotonic(), _LEAVE_S_MIN)
            try:
                parameter.leave(timeout_s=rest_s)
            except ShardwellError as error:  # of the others it takes its leave all the same
                failure = failure or error
        self._is_to_join = self.spec.members is not None
        if failure is not None:
            raise failure

    @override
    def __exit__(self, kind: object = None, error: object = None, *_: object) -> None:
        """Leaves, so that no learner awaits this one, and closes; waits for offers a few seconds.

        They count if they have left, whatever becomes of this learner.
        """
        with contextlib.suppress(ShardwellError):  # others find that it is gone
            self.leave(timeout_s=_LEAVE_S if is_in_order(error) else _LEAVE_S_FAILED)
        self.close()

    @override
    def close(self) -> None:
        """Ends this learner's calls, open offers among them; the family stays. Safe to repeat."""
        for parameter in self._parameters:
            parameter.close()


def _flat(views: TensorViews, layout: TensorLayout) -> Float32:
    flat = views.buffer(layout)
    assert flat is not None
    return flat
