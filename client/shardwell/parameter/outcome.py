"""What became of a worker's contribution to a step. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwell.placement.slices import Slice
from shardwell.process.html_table import html_table


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the shards counted of the gradient that this worker gave last.

    Examples:
        >>> net = client.parameter("counted", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> weights = net.exchange(np.ones(3))
        >>> net.outcome.step, net.outcome.counted
        (0, 'all')
    """

    step: int
    """The step that it was of."""
    size: int
    """Elements of the parameter."""
    version: int = 0
    """Updates that every chunk had seen when the shards answered."""
    superseded: tuple[Slice, ...] = ()
    """Ranges of elements, in order, for which another gradient of the step had been counted before:
    that of an earlier process of this worker, or one that a shard refused in part. What this
    gradient has there was not counted."""
    late: tuple[Slice, ...] = ()
    """Ranges of elements, in order, whose step had closed before this gradient came, or that a
    member gave whose tenure was over. What it has there was not counted."""
    unknown: tuple[Slice, ...] = ()
    """Ranges of elements, in order, that were sent again by a member that was away for so long that
    no shard knows any more whether they had counted before. They do not count again, and are not
    carried over."""
    contributors: tuple[str, ...] = ()
    """Workers whose gradients the step has in any chunk, sorted, where steps may close without a
    worker; else empty. Of a step that is still open, those so far."""

    def _repr_html_(self) -> str:
        def words(ranges: tuple[Slice, ...]) -> str:
            return ", ".join(f"{where.offset} to {where.stop - 1}" for where in ranges)

        names = ("step", "counted", "superseded", "late", "unknown", "contributors")
        ranges = map(words, (self.superseded, self.late, self.unknown))
        row = (self.step, self.counted, *ranges, ", ".join(self.contributors))
        return html_table("what counted of a gradient", names, [row])

    @property
    def counted(self) -> str:
        """How much of the gradient counted: "all", a "part" or "none"."""
        counted = self.counted_elements
        return "all" if counted == self.size else "part" if counted else "none"

    @property
    def counted_elements(self) -> int:
        """Elements of the gradient that counted."""
        ranges = (*self.superseded, *self.late, *self.unknown)
        return self.size - sum(where.size for where in ranges)


def merged(ranges: Iterable[Slice]) -> tuple[Slice, ...]:
    """Ranges in order, those that touch each other as one."""
    found: list[Slice] = []
    for each in sorted(ranges, key=lambda each: each.offset):
        if found and found[-1].stop == each.offset:
            found[-1] = Slice(found[-1].offset, found[-1].size + each.size)
        else:
            found.append(each)
    return tuple(found)
