"""The outcome of a step, and what the next gradient makes up for of it.

That is what did not count, and what rounding took off what counted. Pure.

A step may be tried by several calls: one that fails may have been counted in part. When the step
has ended, an element's state is, by what became of it there,

    of a gradient                                  carried               residual
    counted                                        0                     what rounding took off it
    late                                           late="drop": as it    as it was
                                                   was; "carry": all     "carry": 0
                                                   that was sent
    superseded, by what an earlier outcome of      as late               as late
      this step has said to be counted
    superseded, by what a failed call has sent,    the gradient alone    what rounding took off that
      which had carried and residual in it                               one; 0 if it is one of many
    superseded, by an earlier process              the gradient, and     0
                                                   what was carried
    unknown: it may have counted                   0                     0

    of a contribution without values
    superseded, by what a failed call has sent     0                     as above
    superseded, by an earlier process              as it was             0
    unknown                                        0                     0
    otherwise                                      as it was             as it was

with "carry" alone in the column "carried": with "drop" nothing is. So whatever is kept has not
counted, and is lost rather than doubled where nothing tells which gradient has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from fastcrc import crc32

from shardwell.numerics.codec import BlockCodec, Float32
from shardwell.parameter.values import Pieces
from shardwell.placement.slices import Slice
from shardwell.process.html_table import html_table

_TRIED_COUNT_MAX = 3
"""Gradients of a step whose rounding is kept apart. With more, and with two beside the one that
ends the step, it is unknown which was counted."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The part that the shards counted of the gradient that this worker gave last.

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
        """Returns "all", "part" or "none", as of the gradient all, a part or nothing counted."""
        counted = self.counted_elements
        return "all" if counted == self.size else "part" if counted else "none"

    @property
    def counted_elements(self) -> int:
        """The number of elements of the gradient that counted."""
        ranges = (*self.superseded, *self.late, *self.unknown)
        return self.size - sum(where.size for where in ranges)


def merged(ranges: Iterable[Slice]) -> tuple[Slice, ...]:
    """Returns ranges in order, those that touch each other as one."""
    found: list[Slice] = []
    for each in sorted(ranges, key=lambda each: each.offset):
        if found and found[-1].stop == each.offset:
            found[-1] = Slice(found[-1].offset, found[-1].size + each.size)
        else:
            found.append(each)
    return tuple(found)


@dataclass
class Ended:
    """The fate of a worker's contribution to a step, by chunk."""

    late: Collection[Slice] = ()
    superseded: Collection[Slice] = ()
    unknown: Collection[Slice] = ()
    """Late chunks that may have counted when an earlier call or attempt had sent them."""


NOTHING_LOST = Ended()


class Feedback:
    """The values that the next gradient adds to its own; for one thread at a time."""

    def __init__(self, size: int, codec: BlockCodec | None) -> None:
        self._size = size
        self._codec = codec
        self.carries = False
        self.keeps = codec is not None
        self.carried: Float32 | None = None
        """(size,): uncounted values of earlier gradients."""
        self.residual: Float32 | None = None
        """(size,): the loss by rounding of earlier gradients that counted."""
        self._tried: dict[int, Float32 | None] = {}
        """The loss by rounding of each gradient of `tried_step` in a failed call, by checksum."""
        self.tried_step = -1
        self._uncounted: Collection[Slice] = ()
        """Uncounted ranges by an earlier outcome of `_ended_step`."""
        self._ended_step = -1

    def set_carries(self, carries: bool) -> None:
        """Sets late="carry" or "drop"; "drop" forgets the carried values."""
        self.carries, self.keeps = carries, carries or self._codec is not None
        if not carries:
            self.carried = None

    @property
    def is_due(self) -> bool:
        """Returns True if the next gradient adds anything."""
        return self.carried is not None or self.residual is not None

    def is_open(self, next_step: int) -> bool:
        """Returns True if a call has failed in an earlier step, which may have counted in part."""
        return bool(self._tried) and self.tried_step < next_step

    def added(self, values: Float32) -> Float32:
        """Returns a gradient with the values that it makes up for: new, unless there are none."""
        with np.errstate(all="ignore"):  # what is not finite is found where it is looked at
            for more in (self.carried, self.residual):
                values = values if more is None else values + more
        return values

    def tried(self, step: int, sent: Pieces) -> None:
        """Notes the gradient of a failed call, parts of which may be counted."""
        if not self.keeps:
            return
        if self.tried_step != step:
            self._tried, self.tried_step = {}, step
        if len(self._tried) < _TRIED_COUNT_MAX:
            self._tried.setdefault(_crc_of(sent), self._rounded_off(sent))

    def reopened(self, next_step: int) -> None:
        """Goes on at the step that shards with fixed sets name: those before it have counted."""
        if self._tried and next_step != self.tried_step:
            if next_step == self.tried_step + 1:
                self.residual = self._only(self._tried)
            self._tried = {}

    def end(self, step: int, sent: Pieces | None, own: Pieces | None, ended: Ended) -> None:
        """Goes on behind a step.

        `sent` is the gradient as it was sent; None: no values. `own` is the gradient without the
        added values; None: none were added.
        """
        tried = self._tried if step == self.tried_step else {}
        uncounted = self._uncounted if step == self._ended_step else None
        self._tried, self.tried_step = {}, -1
        as_late = [*ended.late]
        superseded: list[Slice] = []
        for where in ended.superseded:
            was_told = uncounted is not None and where not in uncounted
            (as_late if was_told else superseded).append(where)
        if sent is None:
            self._end_without(tried, superseded, ended.unknown)
            return
        self._ended_step, self._uncounted = (
            step,
            {
                where
                for where in (*ended.late, *ended.superseded)
                if uncounted is None or where in uncounted
            },
        )
        if tried:
            tried = {crc: each for crc, each in tried.items() if crc != _crc_of(sent)}
        carried = None
        if self.carries and (as_late or superseded):
            carried = np.zeros(self._size, np.float32)
        residual = self._rounded_off(sent)
        for where in as_late:
            part = slice(where.offset, where.stop)
            if carried is not None:
                carried[part] = sent.read(where.offset, where.stop)
            if residual is not None:
                kept = None if self.carries else self.residual
                residual[part] = 0 if kept is None else kept[part]
        only, alone = self._only(tried), sent if own is None else own
        for where in superseded:
            part = slice(where.offset, where.stop)
            if carried is not None:
                carried[part] = alone.read(where.offset, where.stop)
                if self.carried is not None and not tried:
                    carried[part] += self.carried[part]
            if residual is not None:
                residual[part] = 0 if only is None else only[part]
        self.carried, self.residual = carried, residual
        self._forget(ended.unknown)

    def _end_without(
        self,
        tried: dict[int, Float32 | None],
        superseded: Collection[Slice],
        unknown: Collection[Slice],
    ) -> None:
        only = self._only(tried)
        if self.residual is not None or only is not None:
            residual = np.zeros(self._size, np.float32)
            if self.residual is not None:
                residual[:] = self.residual
            for where in superseded:
                part = slice(where.offset, where.stop)
                residual[part] = 0 if only is None else only[part]
            self.residual = residual
        self._forget(unknown)
        if tried and self.carried is not None:
            self._forget_carried(superseded)

    def _forget(self, unknown: Collection[Slice]) -> None:
        self._forget_carried(unknown)
        if self.residual is not None:
            for where in unknown:
                self.residual[where.offset : where.stop] = 0

    def _forget_carried(self, ranges: Collection[Slice]) -> None:
        if self.carried is not None:
            for where in ranges:
                self.carried[where.offset : where.stop] = 0

    def _rounded_off(self, sent: Pieces) -> Float32 | None:
        if self._codec is None:
            return None
        return self._codec.residual(sent.whole().astype(np.float32, copy=False))

    @staticmethod
    def _only(tried: dict[int, Float32 | None]) -> Float32 | None:
        """Returns the loss by rounding of the one tried gradient; None: of none or of several."""
        return next(iter(tried.values())) if len(tried) == 1 else None


def _crc_of(sent: Pieces) -> int:
    values = np.ascontiguousarray(sent.whole(), np.float32)
    return int(crc32.iscsi(values.view(np.uint8).data))
