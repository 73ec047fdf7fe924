"""One call of a worker that ends its next step of a parameter, and what became of the step.

A step's states, as one worker sees them (docs/adr/0005-steps.md):

    state     the shards have of it                a call that fails   a call that succeeds
    untried   nothing                              untried, tried      ended
    tried     parts of calls that failed, or of    tried               ended: a part counts once, as
              an earlier process                                       the shards had it first
    refused   parts, and one had a value that is   refused             ended: other values may take
              not finite                                               the place of that part
    ended     all of it                            -                   -

A call that fails leaves a step untried only if nothing of it has left. A shard's refusal leads to
refused from untried and from tried. Weights that diverged are an error that ends the step all the
same, once the rest of the gradient is counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from shardwell.errors import DivergedError, NonFiniteError
from shardwell.numerics.codec import Float32
from shardwell.numerics.update_rules import TensorRules, clip_factor
from shardwell.parameter.dealing import Batch
from shardwell.parameter.exchange import Gradient, Progress, Transfer
from shardwell.parameter.feedback import NOTHING_LOST, Ended, Feedback, Outcome, merged
from shardwell.parameter.opening import ParameterOpening
from shardwell.parameter.values import Pieces
from shardwell.placement.readiness import Ranges
from shardwell.placement.slices import Slice
from shardwell.rpc.retry import Attempts
from shardwell.specs.parameter import ParameterSpec, block_size_of
from shardwell.steps.member import Member

_LOG = logging.getLogger("shardwell")


@dataclass(frozen=True)
class Tools:
    """The objects that all steps of one parameter use."""

    spec: ParameterSpec
    opening: ParameterOpening
    transfer: Transfer
    feedback: Feedback
    rules: TensorRules
    member: Member | None

    @cached_property
    def clips(self) -> bool:
        """Returns True if the worker clips, which then knows the norm of the mean."""
        return bool(self.spec.optimizer.clip_norm) and not self.spec.closes_by_norm


@dataclass
class Tried:
    """The traces of calls that have failed in a step, from which its next call goes on."""

    step: int = -1
    """-1: no step."""
    is_sent: bool = False
    is_refused: bool = False
    superseded: set[Slice] = field(default_factory=set)


@dataclass(eq=False)
class StepCall:
    """The work, progress and outcome of one call that ends a step. For one thread at a time."""

    tools: Tools
    ended: Callable[[StepCall, Outcome, int], None]
    """Takes the outcome of this call once its step has ended, and the worker's next step."""
    tried: Tried
    work: Gradient
    version: int
    """The version of the weights before it."""
    has_effect: bool
    """False for 0 samples of a synchronous step, and for a call that only ends a step."""
    is_clipped: bool
    """True if the values are within their largest norm, or the worker does not clip."""
    is_first: bool = False
    """True if nothing of the step can have left the worker before: this process has given the step
    before, and this is its first call for this one."""
    batches: Sequence[Batch] = ()
    """The samples that its gradient was made from, without those of carried values."""
    passes: bool = False
    """True if nothing is sent: no shard awaits a gradient of this member, and it has none."""
    own: Pieces | None = None
    """The gradient without carried values; None: the work has nothing else."""
    is_again: bool = False
    """True if a piece has failed that may have sent some of it."""
    found_version: int | None = None
    """The version of the weights after it; None: they are not known."""

    def put(self, attempts: Attempts) -> None:
        """Sends all of it until it is counted, and ends the step."""
        if self.passes:
            self._pass()
            return
        self._clip()
        self.work.after_refusal |= self.tried.is_refused
        try:
            self._put(attempts)
        except BaseException as error:
            self._note_failure(error)
            raise
        self._end(attempts)

    def abandon(self, attempts: Attempts) -> None:
        """Ends the step, of which no value here is new to the shards."""
        self._put(attempts)
        self._end(attempts)

    def exchange(
        self,
        weights: Pieces,
        attempts: Attempts,
        rest: Callable[[Attempts], int] | None = None,
        await_pieces: Callable[[Attempts], None] | None = None,
    ) -> None:
        """Exchanges all of it, or what `rest` does, and ends the step.

        With `rest`, `await_pieces` returns when no piece of it is under way.
        """
        if self.passes:
            self._pass()
            return
        if not self.is_clipped:
            self._clip()
        self.work.after_refusal |= self.tried.is_refused
        transfer, by_norm = self.tools.transfer, self.tools.spec.closes_by_norm
        diverged: DivergedError | None = None
        try:
            try:
                if by_norm:  # no weights come before all gradients of the step are counted
                    self._put(attempts)
                    self.found_version = transfer.read(weights, self.work.step + 1, attempts)
                elif rest is not None:
                    self.found_version = rest(attempts)
                else:
                    progress = Progress()
                    self.found_version = attempts.run(
                        lambda: transfer.exchange(self.work, weights, progress, None, attempts)
                    )
            except DivergedError as error:  # some of it is counted, so all of it is to be
                diverged = error
                if await_pieces is not None:
                    await_pieces(attempts)
                if not by_norm:
                    self._put(attempts)
        except BaseException as error:
            self._note_failure(error if diverged is None else diverged)
            raise
        self._end(attempts)
        if diverged is not None:
            raise diverged

    def exchange_piece(
        self, weights: Pieces, progress: Progress, ranges: Ranges, attempts: Attempts
    ) -> None:
        """Exchanges some chunks, ahead of `exchange`. Several threads at a time."""
        transfer = self.tools.transfer
        own = replace(self.work, looked_at=set())  # what is not finite may be mended in between
        try:
            attempts.run(lambda: transfer.exchange(own, weights, progress, ranges, attempts))
        except BaseException:
            self.is_again = True
            raise
        self.is_again |= attempts.is_again

    def look_again(self) -> None:
        """Takes values that are complete now, and may have been mended where they lie."""
        self.work.looked_at.clear()
        feedback = self.tools.feedback
        if feedback.keeps and feedback.is_due and self.own is None:
            self.tools.transfer.check_finite(self.work)
            self.add_carried()

    def add_carried(self) -> None:
        """Adds carried values and the loss by rounding to a gradient that is whole."""
        if not self.has_effect or self.own is not None:
            return
        self._clip()  # what is added was clipped before
        work = self.work
        values: Float32 = work.values.whole().astype(np.float32, copy=False)
        self.own, work.values = work.values, Pieces(self.tools.feedback.added(values))
        work.looked_at.clear()

    def _clip(self) -> None:
        if self.is_clipped:
            return
        spec, work = self.tools.spec, self.work
        self.tools.transfer.check_finite(work)
        with np.errstate(all="ignore"):  # where allow_non_finite lets anything through
            values: Float32 = work.values.whole().astype(np.float32, copy=False)
            squares = self.tools.rules.squares(0, values, block_size_of(values.size))
            factor = clip_factor(math.sqrt(math.fsum(squares)), spec.optimizer.clip_norm)
            if factor != 1.0:
                work.values = Pieces(values * np.float32(factor))
        self.is_clipped = True

    def _pass(self) -> None:
        """Leaves the step to the others, as if it had closed before."""
        step, size = self.work.step, self.tools.spec.size
        late = (Slice(0, size),)
        self.ended(self, Outcome(step=step, size=size, version=step, late=late), step)

    def _put(self, attempts: Attempts) -> None:
        transfer, progress = self.tools.transfer, Progress()
        transfer.close_steps_before(self.work.step, attempts)
        attempts.run(lambda: transfer.put_gradient(self.work, progress, attempts))

    def _note_failure(self, error: BaseException) -> None:
        """Lets the step end with other values, if a shard has refused a part of these."""
        if isinstance(error, NonFiniteError):
            if error.shard_index is None:
                return  # nothing has left
            self.tried.is_refused = True
        self.tried.is_sent = True
        if self.has_effect:
            self.tools.feedback.tried(self.work.step, self.work.values)

    def _end(self, attempts: Attempts) -> None:
        work, feedback, spec = self.work, self.tools.feedback, self.tools.spec
        ended = NOTHING_LOST
        superseded: tuple[Slice, ...] = ()
        if self.is_first and not self.has_effect:
            # A shard that was killed has forgotten that it had counted this, which has no values.
            work.superseded.clear()
        if work.superseded or work.late:
            is_again = self.is_again or attempts.is_again or self.tried.is_sent
            unknown = work.unknown if is_again else ()
            ended = Ended({*work.late} - {*unknown}, {*work.superseded}, {*unknown})
            superseded = merged(ended.superseded)
        if feedback.keeps:
            kept = ended
            if work.samples is not None and self.tools.member is None:
                kept = replace(ended, superseded=set())  # an earlier process's, of the same samples
            feedback.end(work.step, work.values if self.has_effect else None, self.own, kept)
        if spec.has_open_sets:
            outcome, next_step = self._end_open(ended, superseded)
        else:
            next_step = work.step + 1
            version = self.version if self.found_version is None else self.found_version
            version = max(version, work.step)
            outcome = Outcome(
                step=work.step, size=spec.size, version=version, superseded=superseded
            )
        if superseded:
            _LOG.warning(
                "parameter %r: of step %d of worker %r, another gradient had been counted before "
                "for %d of %d elements, so what this one has there was not; see `outcome`",
                spec.name,
                work.step,
                self.tools.opening.worker_id,
                sum(where.size for where in superseded),
                spec.size,
            )
        self.ended(self, outcome, next_step)

    def _end_open(self, ended: Ended, superseded: tuple[Slice, ...]) -> tuple[Outcome, int]:
        """Goes on behind a step that may have closed without this gradient."""
        spec, work, member = self.tools.spec, self.work, self.tools.member
        outcomes = list(work.outcomes.values())
        names = {name for each in outcomes for name in each.contributor_ids}
        version = min((int(each.version) for each in outcomes), default=work.step)
        is_over = any(each.tenure_is_over for each in outcomes)
        if member is not None:
            member.end_step(outcomes, is_whole=not work.late)
        # It may give the step again in its next tenure alone; what it gave counts once.
        next_step = max(version, work.step + (not is_over or not work.late))
        if ended.unknown:
            _LOG.warning(
                "parameter %r: worker %r was away for so long that no shard knows whether step %d "
                "had counted, for %d of %d elements; they do not count again; see `outcome`",
                spec.name,
                self.tools.opening.worker_id,
                work.step,
                sum(where.size for where in ended.unknown),
                spec.size,
            )
        outcome = Outcome(
            step=work.step,
            size=spec.size,
            version=version,
            superseded=superseded,
            late=merged(ended.late),
            unknown=merged(ended.unknown),
            contributors=tuple(sorted(names)),
        )
        return outcome, next_step
