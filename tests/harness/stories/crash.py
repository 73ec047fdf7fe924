"""The story on stores of either kind: undisturbed, cut off, and gone on with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from harness.stories.images import Image
from harness.stories.parameter import CONFIG, State, short_blocks, state_of, story
from shardwell_server.config import Durability
from shardwell_server.shard.shard import Shard
from shardwell_server.store.files.boot import Boot
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore


class Undisturbed(NamedTuple):
    """The story on a MemoryStore."""

    results: list[bool]
    states: list[State]
    """Before the first call, and after each."""


class Written(NamedTuple):
    """The files right after one write."""

    point: str
    answered_count: int
    image: Image
    synced: Mapping[str, bytes]
    """Of those files what is on disk for good, where that was recorded."""


def undisturbed_story() -> Undisturbed:
    """Tells it in memory."""
    with short_blocks():
        shard = Shard(CONFIG, MemoryStore())
        results, states = [], [state_of(shard)]
        for call in story():
            results.append(call.make(shard))
            states.append(state_of(shard))
    assert states[-1]["sync"]["initialized"]
    assert sum(before != after for before, after in itertools.pairwise(states)) > 30
    return Undisturbed(results, states)


class SameMachine(Boot):
    """One that never lost power, and waits for no disk to say so."""

    lost_power = False

    def is_torn(self) -> bool:
        return self.lost_power

    def mark(self, state: str) -> None:
        pass


class OtherStart(SameMachine):
    """One that lost power since."""

    lost_power = True


def _nothing(point: str) -> None:
    pass


@contextlib.contextmanager
def recovered(
    path: Path,
    reached: Callable[[str], None] = _nothing,
    *,
    durability: str = "process",
    boot: type[Boot] = SameMachine,
) -> Iterator[Shard]:
    """A shard that goes on from files; at the end it is as good as killed."""
    kept = Durability(durability)
    yield Shard(CONFIG, MmapStore(path, durability=kept, boot=boot(path), reached=reached))


def state_at(path: Path, reached: Callable[[str], None] = _nothing) -> State:
    """What a shard that goes on from files holds; they are recovered then."""
    with recovered(path, reached) as shard:
        return state_of(shard)


def go_on(shard: Shard, answered_count: int, undisturbed: Undisturbed) -> None:
    """Sends all again as clients do: what was answered changes nothing, the rest is done.

    Raises:
        AssertionError: it does not end as the undisturbed story does.
    """
    for number, call in enumerate(story()):
        if number < answered_count and call.is_repeated:
            assert not call.make(shard), f"{call.name} was answered and is done again"
        elif number == answered_count:  # it may have been done or not
            call.make(shard)
        elif number > answered_count:
            assert call.make(shard) == undisturbed.results[number], call.name
    assert state_of(shard) == undisturbed.states[-1]
