"""Outer training (DiLoCo): a learner trains by itself, and sends what it moved once in a while.

The model's tensors are dealt into fragments (placement/fragments.py), each a parameter of its own,
`NAME.fragment-0` and so on, whose optimizer is the outer one. mixing.py has the algorithm, which is
four moves on a fragment; schedule.py says when each is due; fragment.py has a fragment's state and
the offer that is on its way. Here is the learner's loop.

Samples and kept states are those of fragment 0: its offer names the batches of the inner steps
since the one before, and a state of its step t is what the registered objects are behind its offer
of t - 1. With `overlap`, and where the loop says at which place inner steps begin (`batches`, or
`note_state`), that offer leaves there: when the loop has done what it does behind the inner step of
the offer, such as a step of its schedule.

At the end of the data (`await_free`) what was moved since the last offers is offered:

    this learner has                     it                                  next
    moves, or batches that did not count  offers and takes what is due        the same
    neither; others of a fixed crew have  the same, with the weight 0         the same
    neither; another elastic one has      leaves, and waits for it            batches, or the end
    neither, nor has another              the end; of a fixed crew once all   -
                                          fragments are at one step

Invariants:
  - A gradient is offered for the outer step that this learner has not given, with the same values
    until it is taken, so it counts once, whatever was killed.
  - What the shards did not count of an offer stays in the local weights, so the next one has it.
  - The fragment that is offered next is the one with the fewest outer steps (schedule.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from typing_extensions import override

from shardwell.client import Client, check_client
from shardwell.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    NonFiniteError,
    NotInitializedError,
    ShardUnavailableError,
    ShardwellError,
)
from shardwell.numerics.arguments import check_integer
from shardwell.outer import mixing
from shardwell.outer.fragment import LearnerFragment, Offer
from shardwell.outer.learner_state import checked_state
from shardwell.outer.schedule import Schedule, due_fragment
from shardwell.parameter.dealing import Batch
from shardwell.parameter.feedback import Outcome
from shardwell.parameter.kept_state import LearnerStates
from shardwell.parameter.values import NamedArrays, TensorViews
from shardwell.placement.fragments import STRIDED, Patterns, assignment_name, deal_fragments
from shardwell.process.connected import Closing, Connected
from shardwell.process.ending import is_in_order
from shardwell.specs.checks import check_number
from shardwell.specs.deadlines import check_timeout
from shardwell.specs.fragments import Fragment
from shardwell.specs.layout import TensorLayout
from shardwell.specs.learner import LearnerProgress
from shardwell.specs.members import Elastic
from shardwell.specs.names import check_name, neighbour
from shardwell.specs.optimizers import SGD, Average, Optimizer
from shardwell.specs.parameter import SAMPLE_COUNT_MAX, STEP_MAX, CodecName, ParameterSpec
from shardwell.specs.samples import Samples
from shardwell.wire.state_tree import ArrayForm

DEFAULT_CODEC: CodecName = "int8"
OverdueName = Literal["wait", "later"]
DEFAULT_OUTER = SGD(0.7, momentum=0.9, nesterov=True)
"""The paper's."""
_LEAVE_S, _LEAVE_S_FAILED = 5.0, 1.0
"""The time for which a learner that ends awaits open offers: in order, or by an exception."""
_LEAVE_S_MIN = 0.1
"""For saying of one fragment that a learner leaves, however long the others took."""


@dataclass
class _Loop:
    """The facts that a learner's loop of inner steps leaves behind, for the next call."""

    unreturned: NamedArrays = field(default_factory=dict)
    """Weights that a call of `after_step` had taken before it failed."""
    batches: list[Batch] = field(default_factory=list)
    """Batches of inner steps since the first fragment was offered."""
    weights: Any = field(default_factory=dict)
    """The dict that the caller trains on, as far as it has given it."""
    says_begin: bool = False
    """True if the loop says at which place an inner step begins."""
    noted_step: int | None = None
    """The step of the offer behind which the loop may do more, before it goes on."""


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
    """True if an offer of it was not taken yet."""


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
        self._shapes = {tensor.name: tensor.shape for tensor in TensorLayout.of(tensors)}
        sizes = {name: math.prod(shape) for name, shape in self._shapes.items()}
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
        """Samples of inner steps, since this learner began here."""
        self._began_bytes = client.traffic.sent_bytes, client.traffic.received_bytes
        """Bytes that its client had moved before."""
        self._position = 0
        """Inner steps since this learner began here, by which the schedule goes."""
        self._loop = _Loop()
        self._is_to_join = members is not None
        """True if this elastic learner may be no member of some fragments."""
        options: dict[str, Any] = {
            "optimizer": outer,
            "codec": codec,
            **Elastic.crew(worker_count, members),
            "min_contributors": min_contributors,
            "grace_s": grace_s,
        }
        self._fragments: list[LearnerFragment] = []
        for index, names in enumerate(dealt):
            fragment = Fragment(
                family=name,
                index=index,
                count=len(dealt),
                assignment=assignment_name(fragments, assignment),
            )
            parameter = client.parameter(
                fragment.parameter,
                tensors={each: self._shapes[each] for each in names},
                fragment=fragment,
                **options,
            )
            parameter.advise_on_non_finite(
                "lower the inner or the outer learning rate, and go on from reload()"
            )
            self._fragments.append(LearnerFragment(name, index, parameter))

    def __repr__(self) -> str:
        return (
            f"Outer({self.name!r}, {len(self._fragments)} fragments, inner step {self.inner_step})"
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
        """The spec that all learners agreed on, of the first fragment's parameter."""
        return self._fragments[0].parameter.spec

    @property
    def is_offer_due(self) -> bool:
        """True if the next `after_step` offers a fragment."""
        return self.schedule.offers_after(self._position + 1)

    @property
    def is_draining(self) -> bool:
        """True if an operator wants this learner to leave, by `shardwell members drain`."""
        return any(each.parameter.is_draining for each in self._fragments)

    @property
    def fragments(self) -> list[FragmentState]:
        """Each fragment's tensors, and where it is."""
        return [
            FragmentState(
                each.parameter.name,
                tuple(each.layout.by_name),
                each.version,
                each.step,
                each.offer is not None,
            )
            for each in self._fragments
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
        return min(each.step for each in self._fragments)

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
        self._check_names(weights)
        given = [each.first_weights(weights) for each in self._fragments]
        by_name = ChainMap(*given)
        digest = hashlib.blake2b(digest_size=8)
        for name in self._shapes:
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(by_name[name]).data)
        # All who give the same values may finish what one of them began; a family never has some
        # of one learner's and some of another's.
        load_id = int.from_bytes(digest.digest(), "little") >> 1 or 1
        for fragment, own in zip(self._fragments, given, strict=True):
            try:
                version = fragment.parameter.restore(
                    own, version=0, load_id=load_id, timeout_s=self._timeout_s
                )
            except NonFiniteError:
                raise
            except ArgumentError:
                if fragment.index:
                    raise
                break  # the family has other first weights
            if not fragment.index and version:
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
        self.give_back()
        for fragment, offer in self._open_offers:
            try:
                self._awaited(fragment, offer)
            except NonFiniteError:  # a shard has refused a part, so its step ends without the rest
                fragment.parameter.abandon_step(timeout_s=self._timeout_s)
            fragment.offer = None
        images = [each.newest(self._timeout_s) for each in self._fragments]
        for fragment, image in zip(self._fragments, images, strict=True):
            fragment.image, fragment.sample_count = image, 0
        self._loop.unreturned = {}
        self._position = 0
        self._loop.weights = self.image()
        found: NamedArrays = self._loop.weights
        return found

    def image(self) -> NamedArrays:
        """The weights that all learners share, as this one has taken them last; copies.

        Use them to evaluate: they are the mean of all learners' work; the local weights are one's.
        """
        images = self._begun_images()
        return {name: array.copy() for image in images for name, array in image.items()}

    # Inner steps.

    def batches(self, samples: Samples, *, epochs: int | None = None) -> Iterator[Batch]:
        """Yields batches of a dataset, so that each sample counts once an epoch, on all learners.

            for batch in outer.batches(shardwell.Samples(len(data), batch_size=32)):
                weights = inner_step(weights, data[batch.indices])
                weights.update(outer.after_step(weights, batch=batch))

        A sample counts when the next offer of fragment 0 counts. What a learner has moved that was
        lost is dealt again; and where shards had lost one that comes back, it gives up what it has
        moved since its last offer, for others have these samples by then.

        At the end it offers what was moved since, and puts what it takes into the dict of weights
        that `after_step` got last, or `init` returned. A batch that no `after_step` gets is dealt
        again then.

        Args:
            samples: See `Parameter.batches`, as for `epochs`.
            epochs: Times that each sample is to count in all. Default: no end.

        Raises:
            ShardwellError: as `Parameter.batches` and `take`.
        """
        return self._dealt(samples, samples.limit_of(epochs))

    def _dealt(self, samples: Samples, limit: int) -> Iterator[Batch]:
        while True:
            self.note_state()
            batch = self.next_batch(samples, limit)
            if batch is not None:
                yield batch
            elif not self.await_free(samples, limit):
                return

    def next_batch(self, samples: Samples, limit: int) -> Batch | None:
        """Returns the next batch that begins below a position; see `Parameter.next_batch`."""
        return self._fragments[0].parameter.next_batch(samples, limit, timeout_s=self._timeout_s)

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Makes batches of `next_batch` the next ones again; see `Parameter.put_back`."""
        self._fragments[0].parameter.put_back(batches)

    def give_back(self, batches: Sequence[Batch] | None = None) -> None:
        """Gives back batches whose moves are given up; None: those since the last offer."""
        if batches is None:
            batches, self._loop.batches = self._loop.batches, []
        self._fragments[0].parameter.give_back(batches)

    @property
    def samples_done(self) -> int:
        """The lowest position that had not counted at the last deal."""
        return self._fragments[0].parameter.samples_done

    def await_free(
        self,
        samples: Samples,
        limit: int,
        *,
        weights: MutableMapping[str, Any] | None = None,
    ) -> bool:
        """Ends what `next_batch` has dealt below a position, as `batches` does at its end.

        Args:
            samples: See `batches`.
            limit: See `next_batch`, which has returned None.
            weights: The local weights, and where to put what is taken; default: as of `batches`.

        Returns:
            True: there are more, of a lost learner. False: all have counted.
        """
        parameter = self._fragments[0].parameter
        weights = self._loop.weights if weights is None else weights
        if not isinstance(weights, MutableMapping):
            raise ArgumentError(
                f"{self.name!r}: the end of batches() puts what it takes into the weights that "
                f"after_step got, and a {type(weights).__name__} can't be written to; pass a dict"
            )
        is_fixed = self.spec.members is None
        while True:
            while self._has_work or (is_fixed and len({each.step for each in self._fragments}) > 1):
                self._make_round(weights)
            parameter.give_back_taken()
            if not is_fixed:
                break
            batch = parameter.next_batch(samples, limit, timeout_s=self._timeout_s)
            if batch is not None:
                parameter.put_back([batch])
                return True
            if not parameter.others_have_samples:
                return False
            self._make_round(weights)  # they wait for it
        if not parameter.others_have_samples:
            return False
        self.leave()
        is_free = parameter.await_free(samples, limit, timeout_s=self._timeout_s)
        self._refresh(weights, weights)
        return is_free

    @property
    def _has_work(self) -> bool:
        is_moved = any(each.sample_count or each.offer is not None for each in self._fragments)
        return is_moved or bool(self._loop.batches) or self._fragments[0].parameter.carries_samples

    def _make_round(self, weights: MutableMapping[str, Any]) -> None:
        """Takes what is offered, and offers and takes the fragment that is due."""
        for fragment, offer in self._open_offers:
            self._take(fragment, offer, weights, weights, refreshes=True)
        due = self._fragments[due_fragment([each.step for each in self._fragments])]
        # Batches between an offer and its take count, whatever alpha leaves of their moves.
        least = int(bool(self._loop.batches) and not due.index)
        self._offer(due, weights, max(due.sample_count, least), is_held=False)
        assert due.offer is not None
        self._take(due, due.offer, weights, weights, refreshes=True)

    def after_step(
        self,
        weights: Mapping[str, Any],
        sample_count: int | None = None,
        *,
        batch: Batch | Sequence[Batch] = (),
        into: MutableMapping[str, Any] | None = None,
    ) -> NamedArrays:
        """Counts an inner step, and offers and takes what is due after it.

        Args:
            weights: The local weights by name.
            sample_count: What the step was trained on, in any unit that all learners share; an
                offer weighs as much as was trained on since its fragment was taken. Default: the
                samples of `batch`, or 1.
            batch: What `batches` has yielded for the step, or several of it.
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
        self._begun_images()
        batches = (batch,) if isinstance(batch, Batch) else tuple(batch)
        if sample_count is None:
            sample_count = sum(map(len, batches)) if batches else 1
        count = check_integer("sample_count", sample_count, 0, STEP_MAX)
        self._loop.batches += batches
        self._loop.weights = weights if into is None else into
        self.inner_step += 1
        self._position += 1
        self._sample_count += count
        for each in self._fragments:
            each.sample_count += count
            if each.offer is not None:
                each.offer.since_count += count
        unreturned = self._loop.unreturned
        changed: MutableMapping[str, Any] = unreturned if into is None else into
        now: Mapping[str, Any] = ChainMap(changed, weights)  # type: ignore[arg-type]
        self._take_due(now, changed)
        if self.schedule.offers_after(self._position):
            self._check_names(weights)
            steps = [each.step + (each.offer is not None) for each in self._fragments]
            fragment = self._fragments[due_fragment(steps)]
            if fragment.offer is not None:
                self._take(fragment, fragment.offer, now, changed, refreshes=True)
            self._offer(fragment, now)
            self._take_due(now, changed)
        self._loop.unreturned = {}
        return unreturned if into is None else {}

    @property
    def _open_offers(self) -> list[tuple[LearnerFragment, Offer]]:
        """The open offers, in the order in which they were made."""
        found = [(each, each.offer) for each in self._fragments if each.offer is not None]
        return sorted(found, key=lambda each: each[1].began_s)

    def _take_due(self, weights: Mapping[str, Any], changed: MutableMapping[str, Any]) -> None:
        for fragment, offer in self._open_offers:
            if offer.due > self._position:
                continue
            if self._waits or fragment.has_come(offer, self._timeout_s):
                self._take(fragment, offer, weights, changed, refreshes=True)
            else:
                self.overdue_count += not offer.is_overdue
                offer.is_overdue = True

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
        found = self._checked_fragment(fragment)
        if found.offer is not None:
            raise ArgumentError(
                f"fragment {found.index} of {self.name!r} is offered already; take({found.index}) "
                "before"
            )
        self._offer(found, weights, sample_count)

    def _offer(
        self,
        fragment: LearnerFragment,
        weights: Mapping[str, Any],
        sample_count: int | None = None,
        *,
        is_held: bool | None = None,
    ) -> None:
        if sample_count is None:
            sample_count = fragment.sample_count if self.inner_step else 1
        try:
            count = check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX)
        except ArgumentError as error:
            raise ArgumentError(
                f"fragment {fragment.index} of {self.name!r}: {error}; count in a larger unit, "
                "such as sequences instead of tokens"
            ) from None
        due = self._position + self.schedule.overlap
        offer = Offer(fragment.moved(weights), count, fragment.step, due)
        self._join(fragment)
        if not fragment.index:
            self._states.note_offer(offer.step)
            self._loop.noted_step = offer.step if self._states.kept is not None else None
            offer.batches, self._loop.batches = self._loop.batches, []
            if is_held is None:
                is_kept = self._loop.noted_step is not None
                is_held = is_kept and self._loop.says_begin and self.schedule.overlap > 0
        fragment.offer = offer  # before it leaves: it counts, whatever ends this call
        self.offered_count += 1
        if is_held:  # until the next inner step begins, or it is due
            return
        try:
            fragment.send(offer, self._timeout_s)
        except ShardwellError:
            fragment.offer = None
            self.offered_count -= 1
            self._loop.batches = [*offer.batches, *self._loop.batches]
            raise

    def _join(self, offered: LearnerFragment) -> None:
        """Makes an elastic learner that begins to offer a member of the other fragments, too.

        So the others await it there a round later, when it has had time for its inner steps; if it
        joined with its offers alone, these would be late for another round.
        """
        if not self._is_to_join:
            return
        for each in self._fragments:
            if each is not offered and each.offer is None:
                each.parameter.join(waits=False, timeout_s=self._timeout_s)
        self._is_to_join = False

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
        found = self._checked_fragment(fragment)
        if found.offer is None:
            raise ArgumentError(
                f"fragment {found.index} of {self.name!r} is not offered; offer({found.index}, "
                "weights) before"
            )
        taken: NamedArrays = {}
        self._take(found, found.offer, weights, taken)
        return taken

    def _take(
        self,
        fragment: LearnerFragment,
        offer: Offer,
        weights: Mapping[str, Any] | None,
        changed: MutableMapping[str, Any],
        *,
        refreshes: bool = False,
    ) -> None:
        wait_began_s = time.monotonic()
        image = self._awaited(fragment, offer)
        parameter, outcome = fragment.parameter, fragment.parameter.outcome
        assert outcome is not None
        if offer.batches and not self.spec.has_open_sets:
            outcome = _without_repeats(outcome)
        taken = mixing.take(outcome, offer.step, offer.sample_count + offer.since_count)
        alpha = self._alpha
        is_void = bool(offer.batches) and parameter.lost_batches
        if is_void:
            alpha, taken = 0.0, mixing.Taken((), 0, taken.missed_count)
        # First what the caller gets: a signal may end this between any two lines.
        changed.update(fragment.mixed(image, weights, alpha, taken.uncounted))
        if is_void:
            self._drop_moved(fragment, changed)
            self._states.go_back()
        fragment.image = image
        fragment.step, fragment.version = parameter.next_step, parameter.version
        if not fragment.index and (is_void or taken.uncounted):  # the state before is that of now
            self._loop.noted_step = None
        self._is_to_join |= bool(outcome.late) and self.spec.members is not None
        fragment.sample_count = taken.sample_count
        fragment.offer = None
        self.kept_count += bool(taken.uncounted)
        self.hidden_s += min(offer.ended_s or wait_began_s, wait_began_s) - offer.began_s
        if taken.missed_count > 0 and refreshes and weights is not None:  # it was away for longer
            self._refresh(weights, changed)
        with contextlib.suppress(ClosedError):  # by another thread
            self._fragments[0].parameter.report_learner(self.progress)

    def _drop_moved(self, void: LearnerFragment, changed: MutableMapping[str, Any]) -> None:
        """Gives up what other fragments have moved on samples that others have by now."""
        self._loop.batches = []
        for fragment in self._fragments:
            if fragment is not void and fragment.offer is None and fragment.image is not None:
                changed.update({name: array.copy() for name, array in fragment.image.items()})
                fragment.sample_count = 0

    def _awaited(self, fragment: LearnerFragment, offer: Offer) -> TensorViews:
        began_s = time.monotonic()
        try:
            return fragment.awaited(offer, self._timeout_s)
        finally:
            self.waited_s += time.monotonic() - began_s

    def _refresh(self, weights: Mapping[str, Any], changed: MutableMapping[str, Any]) -> None:
        """Takes the newest image of what is not offered, and keeps what was moved since the old.

        The others have made more than one outer step without this learner: so it is in step with
        them at once. What can't be read now comes with its next offer.
        """
        for fragment in self._fragments:
            if fragment.offer is not None:
                continue
            version = fragment.version
            fragment.arrays(weights)  # is refused before the image is another
            try:
                new = fragment.newest(self._timeout_s)
            except (DeadlineError, ShardUnavailableError):
                return
            if fragment.version != version:
                changed.update(fragment.refreshed(new, weights))
                fragment.image = new

    # Checks.

    def _begun_images(self) -> list[TensorViews]:
        images = [each.image for each in self._fragments if each.image is not None]
        if not images:
            raise NotInitializedError(
                f"{self.name!r}: call init(weights) before inner steps, for the weights that all "
                "learners begin with",
                parameter=self._fragments[0].parameter.name,
            )
        return images

    def _checked_fragment(self, fragment: Any) -> LearnerFragment:
        self._begun_images()
        return self._fragments[check_integer("fragment", fragment, 0, len(self._fragments) - 1)]

    def _check_names(self, weights: Any) -> None:
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

    # What a learner that is started again goes on with.

    def state_dict(self, weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """This learner's own state: plain numbers, lists, and float32 arrays.

        It has the inner steps and, for each fragment, the rounding error that is still to be sent
        (`residual`). With `weights` also how far the local weights have moved since the fragment
        was taken, and on how many samples; what an offered fragment has moved counts by itself.

        Args:
            weights: The local weights by name; None: what they have moved is not kept.
        """
        self._begun_images()
        self.note_state()  # as an offer that is held counts by itself
        fragments = [each.state(weights) for each in self._fragments]
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
        self._begun_images()
        if self._open_offers or self._position:
            raise ArgumentError(
                f"load_state_dict of {self.name!r} after an inner step; call it before the first"
            )
        own = [(list(each.layout.by_name), each.layout.size) for each in self._fragments]
        inner_step, saved = checked_state(state, self.name, own)
        weights: NamedArrays = {}
        for fragment, each in zip(self._fragments, saved, strict=True):
            weights.update(fragment.load(each, self._client.worker_id, self._timeout_s))
        self.inner_step = inner_step
        self._loop.weights = weights
        return weights

    # What a program has beside the weights.

    def keep_state(
        self,
        objects: Mapping[str, Any],
        *,
        forms: Sequence[ArrayForm] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Keeps objects beside the weights on the shards, and takes what is kept of them.

            weights = outer.init(weights)
            outer.keep_state({"noise": noise, "progress": progress})

        A learner that is started again begins behind its last offer of fragment 0 that counted:
        with the samples that were not in it, the newest weights, and the objects as they were
        there. One that comes anew has the objects of another learner, and so has one that missed
        outer steps while it was away; generators of random numbers are each learner's own.

        The objects are taken as fragment 0 is offered, by `after_step`: so call that behind all
        that an inner step does to them. A loop of `batches`, or one that calls `note_state` as an
        inner step begins, may do more behind it.

        Args:
            objects: See `Parameter.keep_state`. Not large ones: an inner optimizer's state is the
                learner's, as `state_dict` says.
            forms: See there.
            timeout_s: See `Client`.

        Raises:
            NotInitializedError: before `init`.
            ArgumentError: an object can't be kept, or it refuses its state.
            ShardwellError: as `Parameter.exchange`.

        Examples:
            >>> weights = {"kept": np.zeros(3, np.float32)}
            >>> with shardwell.Outer(client, "kept", tensors=weights, fragments=1) as outer:
            ...     weights = outer.init(weights)
            ...     outer.keep_state({"progress": {"lucky": 7}})
        """
        self._begun_images()
        self._fragments[0].parameter.keep_state(objects, forms=forms, timeout_s=timeout_s)

    def note_state(self) -> None:
        """Takes note that an inner step begins, for loops without `batches`.

        If the last one has offered fragment 0, the objects of `keep_state` are taken as they are
        now; and with `overlap` the offer leaves now, so that none counts without them. Without
        `keep_state` it does nothing.

        Raises:
            ArgumentError: see `keep_state`.
            ShardwellError: as `Parameter.exchange`.
        """
        self._loop.says_begin = True
        step, self._loop.noted_step = self._loop.noted_step, None
        if step is None:
            return
        fragment, states = self._fragments[0], self._states
        states.note_offer(step)
        if fragment.offer is not None and fragment.offer.state == "made":
            fragment.send(fragment.offer, self._timeout_s)
        else:
            states.start_sending()

    @property
    def _states(self) -> LearnerStates:
        found = self._fragments[0].parameter.learner_states
        assert found is not None
        return found

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
        try:
            self.note_state()  # so that an offer that is held leaves
        except ShardwellError as error:
            failure = error
        for each in self._fragments:
            rest_s = max(until_s - time.monotonic(), _LEAVE_S_MIN)
            try:
                each.parameter.leave(timeout_s=rest_s)
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
        for each in self._fragments:
            each.parameter.close()


def _without_repeats(outcome: Outcome) -> Outcome:
    """Returns the outcome of an offer that chunk 0 counts, as if other chunks did.

    Those have counted one of an earlier process of this learner, of a fixed crew, from which these
    samples were dealt again.
    """
    if any(where.offset == 0 for where in outcome.superseded):  # chunk 0 has counted that, too
        return outcome
    return dataclasses.replace(outcome, superseded=())
