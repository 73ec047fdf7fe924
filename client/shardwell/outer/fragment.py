"""A fragment as one learner has it: its image, its next outer step, and its open offer."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from shardwell.errors import (
    ArgumentError,
    DeadlineError,
    DivergedError,
    NonFiniteError,
    NotInitializedError,
    ShardUnavailableError,
    StepOrderError,
)
from shardwell.numerics.arguments import as_floats
from shardwell.numerics.codec import Float32
from shardwell.outer import mixing
from shardwell.outer.learner_state import SavedFragment
from shardwell.parameter.dealing import Batch
from shardwell.parameter.parameter import Parameter
from shardwell.parameter.values import NamedArrays, TensorViews
from shardwell.placement.slices import Slice
from shardwell.specs.deadlines import with_answer
from shardwell.specs.names import neighbour
from shardwell.threads.calls import ABANDON_S, LATE_S, SIGNAL_INTERVAL_S

_INIT_PAUSE_S = 0.05


@dataclass(eq=False)
class Offer:
    """An outer gradient on its way.

    The values stay as they are until it is taken, so it counts once, however often it is sent.

        state        the gradient's call                           is left by
        made         has not begun; a signal may have come before  send -> travelling
        travelling   is under way                                  its end -> come, failed
        come         has ended with an image                       a take, with which it is over
        failed       has ended with an error, not raised so far    raised -> known; send
        known        has ended with an error that a caller got     send -> travelling

    A take sends a failed one again if it was only out of time or had no shard, as that may have
    been before any take waited; any other error is raised first.
    """

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
    batches: Sequence[Batch] = ()
    """The samples that it was trained on, of the fragment that keeps account of them."""
    since_count: int = 0
    """Samples that were trained on since."""
    is_overdue: bool = False
    is_known: bool = False

    @property
    def state(self) -> Literal["made", "travelling", "come", "failed", "known"]:
        """The state by the table above."""
        if self.call is None:
            return "made"
        if not self.call.done():
            return "travelling"
        if self.call.exception() is None:
            return "come"
        return "known" if self.is_known else "failed"

    @property
    def error(self) -> BaseException | None:
        """The error of its call, if that has failed."""
        return self.call.exception() if self.call is not None and self.call.done() else None

    def begin(self, call: Future[NamedArrays]) -> None:
        """Notes the call that carries the offer from now on."""
        self.call_began_s, self.ended_s, self.is_known = time.monotonic(), 0.0, False
        self.call = call
        call.add_done_callback(self._note_end)

    def _note_end(self, _: Future[NamedArrays]) -> None:
        self.ended_s = time.monotonic()


class LearnerFragment:
    """One learner's state of a fragment; the family's loop is `Outer`."""

    def __init__(self, family: str, index: int, parameter: Parameter[NamedArrays]) -> None:
        assert parameter.spec.layout is not None
        self.family = family
        self.index = index
        self.parameter = parameter
        self.layout = parameter.spec.layout
        self.image: TensorViews | None = None
        """The weights that all learners share; None: there are none yet."""
        self.version = 0
        """Outer steps that the image has seen."""
        self.step = parameter.next_step
        """The outer step that this learner's next offer joins."""
        self.sample_count = 0
        self.offer: Offer | None = None

    # Local weights.

    def arrays(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The fragment's arrays among the weights."""
        found = {}
        for name, tensor in self.layout.by_name.items():
            try:
                given = weights[name]
            except KeyError:
                raise ArgumentError(
                    f"weights of {self.family!r} lack tensor {name!r} of fragment {self.index}"
                    f"{neighbour(name, map(str, weights))}"
                ) from None
            array = as_floats(f"weights of {self.family!r}: tensor {name!r}", given)
            if array.shape != tensor.shape:
                raise ArgumentError(
                    f"weights of {self.family!r}: tensor {name!r} must have shape {tensor.shape}, "
                    f"as it was opened; got {array.shape}; give a model of another shape another "
                    "name"
                )
            found[name] = array
        return found

    def first_weights(self, weights: Mapping[str, Any]) -> dict[str, Float32]:
        """The fragment's arrays among the weights, float32 and finite."""
        found: dict[str, Float32] = {}
        for name, array in self.arrays(weights).items():
            with np.errstate(over="ignore"):
                found[name] = array.astype(np.float32, copy=False)
            if not np.isfinite(found[name]).all():
                raise NonFiniteError(
                    f"weights of {self.family!r}: tensor {name!r} has values that are no finite "
                    "float32; mend them first",
                    parameter=self.parameter.name,
                )
        return found

    def moved(self, weights: Mapping[str, Any]) -> TensorViews:
        """The outer gradient: image - local."""
        assert self.image is not None
        gradient = TensorViews(self.layout, np.empty(self.layout.size, np.float32))
        for name, array in self.arrays(weights).items():
            moved = mixing.offer(self.image[name], array, gradient[name])
            is_finite = np.isfinite(moved)
            if not is_finite.all():
                rest = np.linalg.norm(moved[is_finite].astype(np.float64))
                raise NonFiniteError(
                    f"fragment {self.index} of {self.family!r}: what tensor {name!r} has moved "
                    f"since it was taken is not finite in {int((~is_finite).sum())} of "
                    f"{moved.size} elements, and the rest has the norm {rest:.4g}; nothing was "
                    "sent; lower the inner learning rate or clip, and go on from reload()",
                    parameter=self.parameter.name,
                )
        return gradient

    def mixed(
        self,
        image: TensorViews,
        weights: Mapping[str, Any] | None,
        alpha: float,
        uncounted: Sequence[Slice],
    ) -> NamedArrays:
        """The new local weights, as `image` becomes the fragment's; weights None: as offered."""
        assert self.image is not None
        assert self.offer is not None
        old = local = self._flat(self.image)
        if (alpha or uncounted) and weights is None:
            local = old - self._flat(self.offer.gradient)
        elif (alpha or uncounted) and weights is not None:
            local = np.empty(self.layout.size, np.float32)
            views = TensorViews(self.layout, local)
            for name, array in self.arrays(weights).items():
                views[name][...] = array
        mixed = mixing.mix(old, self._flat(image), local, alpha, uncounted)
        return dict(TensorViews(self.layout, mixed))

    def refreshed(self, new: TensorViews, weights: Mapping[str, Any]) -> NamedArrays:
        """The new local weights, as `new` becomes the image of what is not offered."""
        assert self.image is not None
        return {
            name: mixing.refresh(self.image[name], new[name], array)
            for name, array in self.arrays(weights).items()
        }

    def _flat(self, views: TensorViews) -> Float32:
        flat = views.buffer(self.layout)
        assert flat is not None
        return flat

    # The shards.

    def newest(self, timeout_s: float) -> TensorViews:
        """The newest image; waits for first weights that another learner gives."""
        parameter = self.parameter
        # A learner of a fixed crew goes on behind its last offer, whose result it may have missed.
        is_open = parameter.spec.has_open_sets
        pause, until_s = threading.Event(), time.monotonic() + timeout_s
        while True:
            try:
                image = parameter.get_weights(
                    min_version=0 if is_open else parameter.next_step, timeout_s=timeout_s
                )
                break
            except NotInitializedError as error:
                if not self.index or time.monotonic() > until_s:
                    raise NotInitializedError(
                        f"fragment {self.index} of {self.family!r} has no first weights: the "
                        "learner that came first gave those of some fragments only; start it again "
                        "with the same weights, or delete the family and begin anew"
                        if self.index
                        else f"{self.family!r} has no first weights; call init(weights)",
                        parameter=parameter.name,
                    ) from error
                pause.wait(_INIT_PAUSE_S)
        self.step, self.version = parameter.next_step, parameter.version
        assert isinstance(image, TensorViews)
        return image

    def send(self, offer: Offer, timeout_s: float) -> None:
        """Begins a call that carries an offer."""
        self.parameter.exchange_async(
            offer.gradient,
            sample_count=offer.sample_count,
            batch=offer.batches,
            timeout_s=timeout_s,
            began=offer.begin,
        )

    def has_come(self, offer: Offer, timeout_s: float) -> bool:
        """True if the image is here; an error is raised once, then the offer goes again."""
        if offer.state == "failed":
            offer.is_known = True
            assert offer.error is not None
            raise offer.error
        if offer.state in ("made", "known"):
            self.send(offer, timeout_s)
        return offer.state not in ("made", "travelling")

    def awaited(self, offer: Offer, timeout_s: float) -> TensorViews:
        """The image that comes of the offer; blocks. What fails leaves the offer open."""
        is_out_of_time = isinstance(offer.error, DeadlineError | ShardUnavailableError)
        if offer.state in ("made", "known") or is_out_of_time:
            self.send(offer, timeout_s)
        until_s = offer.call_began_s + with_answer(timeout_s) + LATE_S + ABANDON_S
        call = offer.call
        assert call is not None
        while not call.done():
            if time.monotonic() > until_s:
                raise DeadlineError(
                    f"the offer of fragment {self.index} of {self.family!r} did not end within "
                    f"{ABANDON_S:g} s after its deadline: its connection is stuck; connect again",
                    parameter=self.parameter.name,
                )
            # In pieces, as a signal that another thread receives does not wake this one.
            concurrent.futures.wait([call], timeout=SIGNAL_INTERVAL_S)
        offer.is_known = offer.error is not None
        try:
            image = call.result()
        except DivergedError:  # the step has ended with it
            self.offer = None
            raise
        assert isinstance(image, TensorViews)
        return image

    # What a learner that is started again goes on with.

    def state(self, weights: Mapping[str, Any] | None) -> dict[str, Any]:
        """The fragment's part of `Outer.state_dict`."""
        moved, residual, sample_count = None, None, 0
        if self.offer is None:
            residual = self.parameter.residual
            if weights is not None:
                moved, sample_count = -self._flat(self.moved(weights)), self.sample_count
        return {
            "tensors": list(self.layout.by_name),
            "version": self.version,
            "sample_count": sample_count,
            "moved": moved,
            "residual": residual,
        }

    def load(self, saved: SavedFragment, worker_id: str, timeout_s: float) -> NamedArrays:
        """The local weights to go on with: the image, moved as the state says."""
        assert self.image is not None
        flat = self._flat(self.image).copy()
        if not self._has_offered_since(saved.version, worker_id, timeout_s):
            if saved.moved is not None:
                flat += saved.moved
            self.sample_count = saved.sample_count
            if self.parameter.spec.has_image:  # others round nothing off that is sent later
                self.parameter.load_residual(saved.residual)
        return dict(TensorViews(self.layout, flat))

    def _has_offered_since(self, version: int, worker_id: str, timeout_s: float) -> bool:
        """True if an offer that this learner made of an image after that version counts."""
        if version > self.version or self.step > self.version:
            return True  # of weights that are gone; or in the outer step that is open
        if version == self.version or not self.parameter.spec.has_open_sets:
            return version != self.version  # a fixed crew's outer step needs this learner's offer
        for step in range(version, self.version):
            try:
                found = self.parameter.contributions(step, timeout_s=timeout_s)
            except StepOrderError:  # too long ago
                return True
            known = sum(where.size for where, workers in found if worker_id not in workers)
            if known < self.layout.size:  # a shard was started again since, or the learner is in it
                return True
        return False
