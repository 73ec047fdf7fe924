"""A storm from a seed: members come, leave, are killed and stand still, and shards are killed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class StormWorker(Protocol):
    """A process that a storm hits."""

    worker_id: str

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""

    def close(self) -> None:
        """Kills it, and waits until it is gone."""


WorkerT = TypeVar("WorkerT", bound=StormWorker)
KINDS = ("kill", "replace", "stop", "two", "shard", "nothing")


class Storm(Generic[WorkerT]):
    """The crew, and what happens to it.

    Args:
        start: Starts a worker by its name.
        start_shard_again: Kills a shard and starts it again, by its index.
        shard_count: Shards.
        seed: Seed of all that is drawn.
        kinds: What may happen, besides what `more` has. "lose" is a kill of one that stays away.
        more: Other blows by name.
    """

    def __init__(
        self,
        start: Callable[[str], WorkerT],
        start_shard_again: Callable[[int], None],
        *,
        shard_count: int,
        seed: int,
        kinds: Sequence[str] = KINDS,
        more: dict[str, Callable[[random.Random], None]] | None = None,
    ) -> None:
        self._start = start
        self._start_shard_again = start_shard_again
        self._shard_count = shard_count
        self._chance = random.Random(seed)
        self._more = more or {}
        self._kinds = (*kinds, *self._more)
        self._count = 0
        self.workers: list[WorkerT] = []
        self.blows: dict[str, int] = {}
        self.lost_count = 0
        """Workers that were killed."""

    def start(self, worker_id: str = "") -> None:
        """Starts a worker, under a new name or an old one."""
        self._count += 1
        self.workers.append(self._start(worker_id or f"w{self._count}"))

    def resize(self, count: int) -> None:
        """Starts workers, or kills some, until there are so many."""
        while len(self.workers) < count:
            self.start()
        while len(self.workers) > count:
            self._lose()

    def _lose(self) -> WorkerT:
        victim = self.workers.pop(self._chance.randrange(len(self.workers)))
        victim.close()
        self.lost_count += 1
        return victim

    def blow(self) -> None:
        """Draws what happens now, and has it happen."""
        kind = self._chance.choice(self._kinds)
        self.blows[kind] = self.blows.get(kind, 0) + 1
        if kind in self._more:
            self._more[kind](self._chance)
        elif kind == "shard":
            self._start_shard_again(self._chance.randrange(self._shard_count))
        elif kind == "stop":
            victim = self._chance.choice(self.workers)
            victim.send(signal.SIGSTOP)
            time.sleep(self._chance.uniform(0.0, 1.5))
            victim.send(signal.SIGCONT)
        elif kind == "lose":
            self._lose()
        elif kind != "nothing":
            for _ in range(2 if kind == "two" else 1):
                victim = self._lose()
                self.start("" if kind == "replace" else victim.worker_id)
        time.sleep(self._chance.uniform(0.0, 0.3))
