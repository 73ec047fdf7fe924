"""The digits that have counted, added up from the steps one by one, beside shard 0's own account.

Shard 0 keeps the account and lists the gradients of each step. The tally adds these lists up, so a
digit that two gradients of one epoch had would show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import shardwell
from shardwell.placement.ranges import NumberRanges, common, size_of, united
from shardwell.rpc.shard_status import PartialSamples

_LOOK_S = 0.05
_BEHIND_COUNT = 512
"""Steps that may wait for the next look; shard 0 knows the last 1,024."""
_SHOWN_COUNT = 3
"""Gradients and epochs that rows name."""


class Tally:
    """The positions of a parameter's only dataset that have counted. For one thread."""

    def __init__(self, client: shardwell.Client, model: shardwell.Parameter[Any]) -> None:
        self._client = client
        self._model = model
        self._step = 0
        self.counted: NumberRanges = ()
        self.twice: NumberRanges = ()
        """Positions that more than one gradient had."""

    def look(self, step: int, *, last: bool = False) -> None:
        """Adds steps before `step`, which are closed: all at last, else as many as time allows."""
        due_s = time.monotonic() + _LOOK_S
        for number in range(self._step, step):
            if not last and time.monotonic() > due_s and step - number < _BEHIND_COUNT:
                return
            for each in self._client.step_samples(self._model.name, number):
                self.twice = united(self.twice, common(self.counted, each.ranges))
                self.counted = united(self.counted, each.ranges)
            self._step = number + 1

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields rows of a table, of now."""
        [account] = self._model.samples.values()
        partial = account.partial, account.partial_count
        yield from account_rows(self.counted, self.twice, account.length, *partial)


def account_rows(
    counted: NumberRanges,
    twice: NumberRanges,
    length: int,
    partial: tuple[PartialSamples, ...],
    partial_count: int,
) -> Iterator[tuple[str, str]]:
    """Yields rows of what has counted: in all, in part, and in epochs that are not whole."""
    split = united(*(each.ranges for each in partial))
    done = united(counted, split)
    doubled = f"[bold red]{size_of(twice)} twice[/]" if twice else "[green]none twice[/]"
    epochs = _epochs(done, length)
    whole_count = sum(count == length for count in epochs)
    yield (
        "digits",
        f"{size_of(counted):,} counted, {doubled}; all {length:,} in {whole_count} of "
        f"{len(epochs)} epochs",
    )
    rest = [f"{count:,} in epoch {epoch}" for epoch, count in enumerate(epochs) if count < length]
    if rest:
        yield "unfinished", _shown(rest, len(rest))
    named = [
        f"{size_of(each.ranges)} of {each.worker_id} in step {each.step}, epoch "
        f"{each.ranges[0][0] // length}"
        for each in partial
    ]
    yield "in part", _shown(named, partial_count) or "none"


def _epochs(done: NumberRanges, length: int) -> list[int]:
    """Returns how many positions of each epoch are among `done`, up to the last that has any."""
    end = done[-1][1] if done else 0
    return [size_of(common(done, ((start, start + length),))) for start in range(0, end, length)]


def _shown(items: list[str], count: int) -> str:
    more = count - len(items[:_SHOWN_COUNT])
    return "; ".join(items[:_SHOWN_COUNT]) + (f"; and {more} more" if more else "")
