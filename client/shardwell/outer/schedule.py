"""A learner's schedule: when it offers a fragment and takes the result, and which one. Pure.

Of H = sync_every inner steps and F fragments one is due every H / F inner steps, its interval, so
that bytes a second are even. It is taken at the end of its interval, and offered `overlap` inner
steps before, so that training goes on while it travels (Douillard et al., Streaming DiLoCo, 2025).

Which one: that with the fewest outer steps, of equal ones the first. Every learner has given all
that is before what it gives, so of learners that wait for one another none waits for another that
waits for it. In step, fragments are due in turn; a learner that missed some finds back by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwell.errors import ArgumentError
from shardwell.specs.checks import check_whole_number
from shardwell.specs.parameter import STEP_MAX


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learner's schedule; inner steps are counted from 1, from where the learner begins."""

    sync_every: int
    """Inner steps from one outer step of a fragment to its next."""
    fragment_count: int
    """Fragments, each due once in sync_every inner steps; divides them."""
    overlap: int = 0
    """Inner steps from an offer to the take of its result, below the interval."""

    def __post_init__(self) -> None:
        check_whole_number("sync_every", self.sync_every, 1, STEP_MAX)
        if self.sync_every % self.fragment_count:
            below = self.sync_every - self.sync_every % self.fragment_count
            nearest = f"{below} or " if below else ""
            raise ArgumentError(
                f"sync_every={self.sync_every} must be a multiple of the {self.fragment_count} "
                f"fragments, each of which is due once in it; pass sync_every={nearest}"
                f"{below + self.fragment_count}, or another number of fragments"
            )
        check_whole_number("overlap", self.overlap, 0, STEP_MAX)
        if self.overlap >= self.interval:
            raise ArgumentError(
                f"overlap={self.overlap} must be below the interval of {self.interval} inner steps "
                f"in which one fragment is due (sync_every={self.sync_every} / "
                f"{self.fragment_count} fragments); pass a smaller overlap, a larger sync_every, "
                "or fewer fragments"
            )

    @property
    def interval(self) -> int:
        """The inner steps from one fragment to the next."""
        return self.sync_every // self.fragment_count

    def offers_after(self, inner_step: int) -> bool:
        """True if a fragment is offered after an inner step."""
        return (inner_step + self.overlap) % self.interval == 0


def due_fragment(steps: Sequence[int]) -> int:
    """Returns the fragment to offer next, by the outer step that each one's next offer joins."""
    return min(range(len(steps)), key=lambda fragment: (steps[fragment], fragment))
