"""What became of a worker's contribution to a step. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwell.placement.slices import Slice
from shardwell.process.html_table import html_table


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the shards counted of the gradient that this worker gave last."""

    step: int
    """The step that it joined."""
    size: int
    """Elements of the parameter."""
    superseded: tuple[Slice, ...] = ()
    """Ranges of elements, in order, for which another gradient of the step had been counted before:
    that of an earlier process of this worker, or one that a shard refused in part. What this
    gradient has there was not counted."""

    def _repr_html_(self) -> str:
        lost = ", ".join(f"{where.offset} to {where.stop - 1}" for where in self.superseded)
        row = (self.step, self.counted, lost)
        return html_table("what counted of a gradient", ("step", "counted", "superseded"), [row])

    @property
    def counted(self) -> str:
        """How much of the gradient counted: "all", a "part" or "none"."""
        lost = sum(where.size for where in self.superseded)
        return "all" if not lost else "part" if lost < self.size else "none"


def merged(ranges: Iterable[Slice]) -> tuple[Slice, ...]:
    """Ranges in order, those that touch each other as one."""
    found: list[Slice] = []
    for each in sorted(ranges, key=lambda each: each.offset):
        if found and found[-1].stop == each.offset:
            found[-1] = Slice(found[-1].offset, found[-1].size + each.size)
        else:
            found.append(each)
    return tuple(found)
