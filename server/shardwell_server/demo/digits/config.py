"""What the demo of digits runs, and how it went: values that `run` and `display` share."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwell.errors import ArgumentError
from shardwell.specs.parameter import GROUP_CODECS, CodecName, ModeName
from shardwell_server.demo.digits.worker import ACCURACY_MIN, STEP_COUNT, OuterPlan, SyncName, Task
from shardwell_server.demo.progress import TrainingState

CHAOS_WORKER_COUNT_MIN = 3
WORKER_COUNT_MAX = 32
"""With more, a worker's share of the digits is hardly more than its batch."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo runs; checked when made."""

    shard_count: int = 2
    """Shards, each a process."""
    worker_count: int = 4
    """Workers, each a process."""
    codec: CodecName = "fp16"
    """How gradients and weights travel."""
    mode: ModeName = "sync"
    """`sync`: a step is the mean of all workers' gradients; `async`: each as it arrives."""
    step_count: int = STEP_COUNT
    """Steps of each worker."""
    sync: SyncName = "server"
    """Who averages: the shards, the workers in a group, or threads."""
    has_chaos: bool = False
    """Whether workers come, leave and die while they train."""
    seed: int = 0
    """Of who does so, and when."""
    outer: OuterPlan | None = None
    """Outer training: workers make steps of their own, and send once in many."""
    target: str | None = None
    """A cluster that runs already; None: start one of `shard_count`."""

    def __post_init__(self) -> None:
        if not 1 <= self.worker_count <= WORKER_COUNT_MAX:
            raise ArgumentError(
                f"the demo has work for 1 to {WORKER_COUNT_MAX} workers; got {self.worker_count}"
            )
        if self.outer and (self.sync, self.mode, self.has_chaos) != ("server", "sync", False):
            raise ArgumentError(
                "outer training has steps of its own; leave out --sync, --mode and --chaos; got "
                f"sync={self.sync!r}, mode={self.mode!r}, chaos={self.has_chaos}"
            )
        if self.has_chaos and (self.sync, self.mode) != ("server", "sync"):
            raise ArgumentError(
                "chaos is for workers that shards wait for; leave out --sync and --mode; got "
                f"sync={self.sync!r}, mode={self.mode!r}"
            )
        if self.has_chaos and self.worker_count < CHAOS_WORKER_COUNT_MIN:
            raise ArgumentError(
                f"chaos needs {CHAOS_WORKER_COUNT_MIN} workers to begin with, for two always stay; "
                f"got {self.worker_count}"
            )
        if self.step_count < 1:
            raise ArgumentError(f"step_count must be at least 1; got {self.step_count}")
        if self.sync != "server" and self.mode == "async":
            raise ArgumentError(f"only shards average asynchronously; got sync={self.sync!r}")
        if self.sync in ("ring", "tree", "centralized") and self.codec not in GROUP_CODECS:
            raise ArgumentError(
                f"a group's codec is one of {', '.join(GROUP_CODECS)}; got {self.codec!r}"
            )

    @property
    def started_shard_count(self) -> int:
        """Shards that the demo starts: a group needs one to meet at, threads none."""
        if self.target is not None or self.sync == "threads":
            return 0
        return self.shard_count if self.sync == "server" else 1

    @property
    def process_count(self) -> int:
        """Processes that train."""
        return 1 if self.sync == "threads" else self.worker_count

    def tasks(self, target: str) -> list[Task]:
        """What each worker is to do. The parameter's name is new, so that nothing is resumed."""
        first = Task(
            target=target,
            worker_id="w0",
            worker_index=0,
            worker_count=self.worker_count,
            parameter=f"digits-{uuid.uuid4().hex[:8]}",
            step_count=self.step_count,
            codec=self.codec,
            mode=self.mode,
            sync=self.sync,
            is_elastic=self.has_chaos,
            outer=self.outer,
        )
        return [first.of_worker(index) for index in range(self.process_count)]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How it went."""

    accuracy: float
    """Of the final weights, on held-out digits."""
    held_out_count: int
    """How many those are."""
    state: TrainingState
    """Of the workers, at the end."""
    duration_s: float
    """Of the whole demo."""
    chaos_counts: Mapping[str, int] = field(default_factory=dict)
    """How many workers came, left and were lost, with chaos."""

    @property
    def passed(self) -> bool:
        """Whether the accuracy is what the demo promises."""
        return self.accuracy >= ACCURACY_MIN
