"""What the demo of digits runs, and how it went: values that `run` and `display` share."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from shardwell.errors import ArgumentError
from shardwell.specs.parameter import WIRE_CODECS, CodecName, ModeName
from shardwell_server.demo.digits.worker import ACCURACY_MIN, STEP_COUNT, SyncName, Task
from shardwell_server.demo.progress import TrainingState

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
    target: str | None = None
    """A cluster that runs already; None: start one of `shard_count`."""

    def __post_init__(self) -> None:
        if not 1 <= self.worker_count <= WORKER_COUNT_MAX:
            raise ArgumentError(
                f"the demo has work for 1 to {WORKER_COUNT_MAX} workers; got {self.worker_count}"
            )
        if self.step_count < 1:
            raise ArgumentError(f"step_count must be at least 1; got {self.step_count}")
        if self.sync != "server" and self.mode == "async":
            raise ArgumentError(f"only shards average asynchronously; got sync={self.sync!r}")
        if self.sync in ("ring", "tree", "centralized") and self.codec not in WIRE_CODECS:
            raise ArgumentError(
                f"a group's codec is one of {', '.join(WIRE_CODECS)}; got {self.codec!r}"
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
        parameter = f"digits-{uuid.uuid4().hex[:8]}"
        return [
            Task(
                target=target,
                worker_id=f"w{index}",
                worker_index=index,
                worker_count=self.worker_count,
                parameter=parameter,
                step_count=self.step_count,
                codec=self.codec,
                mode=self.mode,
                sync=self.sync,
            )
            for index in range(self.process_count)
        ]


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

    @property
    def passed(self) -> bool:
        """Whether the accuracy is what the demo promises."""
        return self.accuracy >= ACCURACY_MIN
