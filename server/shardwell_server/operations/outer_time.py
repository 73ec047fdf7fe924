"""The load of outer training (DiLoCo) on a link, and the time that it takes there. Pure arithmetic.

A learner makes H inner steps of its own for one outer step, in which it sends each of F fragments
of the model once and receives its new weights. Fragments take turns: one leaves every H / F inner
steps, and its result is due `overlap` inner steps later. With c seconds an inner step, and C the
time from a fragment that leaves to weights that are there, computed as `step_time` does for a
parameter as large as a fragment on dedicated shards:

    waited = max(0, C - overlap c)         for each fragment
    hidden = 1 - waited / C
    outer step = H c + F waited

All fragments are taken as equally large, H must be a multiple of F, and the overlap ends before the
next fragment leaves; so fragments never share a link. Source: Douillard et al., "Streaming DiLoCo
with overlapping communication" (2025), arXiv 2501.18512.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from shardwell.errors import ArgumentError
from shardwell.outer.schedule import Schedule
from shardwell_server.operations import step_time
from shardwell_server.operations.step_time import HEADER_FACTOR, Job, StepTime

FRAGMENT_COUNT = 4
OVERLAP = 2
CODEC = "int8"


@dataclass(frozen=True, kw_only=True)
class OuterJob:
    """The outer training of a job, beside synchronous steps of an equal job."""

    job: Job
    """The model, learners (its workers), shards and links; `compute_s` is the time of an inner
    step, the codec that of synchronous steps."""
    sync_every: int
    fragment_count: int = FRAGMENT_COUNT
    """Parts that the model is sent in: F. Divides `sync_every`."""
    overlap: int = 0
    """Inner steps between a fragment's offer and the taking of its result."""
    codec: str = CODEC

    def __post_init__(self) -> None:
        if self.fragment_count < 1:
            raise ArgumentError(f"fragment_count must be at least 1; got {self.fragment_count}")
        _ = self.schedule  # checks steps, fragments and overlap
        if self.job.element_count < self.fragment_count:
            raise ArgumentError(
                f"fragment_count must be at most element_count; got {self.fragment_count} "
                f"fragments of {self.job.element_count} elements"
            )
        _ = self.fragment_job  # checks the codec

    @property
    def schedule(self) -> Schedule:
        """The inner steps at which fragments leave."""
        return Schedule(
            sync_every=self.sync_every, fragment_count=self.fragment_count, overlap=self.overlap
        )

    @property
    def fragment_job(self) -> Job:
        """One fragment's exchange as a step of its own, which computes nothing."""
        size = math.ceil(self.job.element_count / self.fragment_count)
        return dataclasses.replace(self.job, element_count=size, codec=self.codec, compute_s=0.0)

    @property
    def encoded_bytes(self) -> int:
        """The bytes that a learner sends in an outer step, and receives."""
        return self.fragment_count * self.fragment_job.encoded_bytes

    @property
    def synchronous_bytes(self) -> int:
        """The bytes that a worker would send in as many synchronous steps, and receive."""
        return self.sync_every * self.job.encoded_bytes

    @property
    def hiding_bytes_per_s(self) -> float | None:
        """The slowest link on which no learner waits; None: computing is too short for any."""
        one = step_time.dedicated(dataclasses.replace(self.fragment_job, link_bytes_per_s=1.0))
        room_s = self.overlap * self.job.compute_s - one.latency_s
        if room_s <= one.work_s:
            return None
        carried_bytes = one.link_s + one.lag_s + one.fill_s  # seconds at one byte a second
        return max(carried_bytes / room_s, one.fill_s / (room_s - one.work_s))


@dataclass(frozen=True, kw_only=True)
class OuterTime:
    """The times of an outer step on one link, in seconds; rates in bytes a second with headers."""

    link_bytes_per_s: float
    fragment_s: float
    waited_s: float
    outer_step_s: float
    inner_step_s: float
    synchronous_step_s: float
    """A step that exchanges gradients for weights each time, overlapped with the backward pass."""
    mean_bytes_per_s: float
    """A learner's sending over the whole outer step; it receives as much."""
    peak_bytes_per_s: float
    """A learner's sending while a fragment travels."""

    @property
    def hidden_share(self) -> float:
        """The part of a fragment's time in which the learner computes."""
        return 1.0 - self.waited_s / self.fragment_s

    @property
    def gain(self) -> float:
        """The number of inner steps that a learner makes in the time of a synchronous one."""
        return self.synchronous_step_s / self.inner_step_s


def outer_time(outer: OuterJob, link_bytes_per_s: float) -> OuterTime:
    """Returns the times of an outer step on links of that rate."""
    job = dataclasses.replace(outer.job, link_bytes_per_s=link_bytes_per_s)
    synchronous: StepTime = step_time.dedicated(job)
    fragment_job = dataclasses.replace(outer.fragment_job, link_bytes_per_s=link_bytes_per_s)
    fragment_s = step_time.dedicated(fragment_job).communication_s
    waited_s = max(0.0, fragment_s - outer.overlap * job.compute_s)
    outer_step_s = outer.sync_every * job.compute_s + outer.fragment_count * waited_s
    sent_bytes = outer.encoded_bytes * HEADER_FACTOR
    return OuterTime(
        link_bytes_per_s=link_bytes_per_s,
        fragment_s=fragment_s,
        waited_s=waited_s,
        outer_step_s=outer_step_s,
        inner_step_s=outer_step_s / outer.sync_every,
        synchronous_step_s=synchronous.overlapped_s,
        mean_bytes_per_s=sent_bytes / outer_step_s,
        peak_bytes_per_s=sent_bytes / outer.fragment_count / fragment_s,
    )
