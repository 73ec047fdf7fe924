"""The time of a step: what moves over which link, and what of it can be hidden. Pure arithmetic.

Every machine has one link that carries `link_bytes_per_s` out and, at once, as much in. M is one
worker's gradient as the codec writes it (as many bytes of weights come back), n the workers, s the
shards. Bytes over the fullest direction of the fullest link:

    co-located   shards beside workers:  max(M (1 - f) + (n - 1) f M, M if a worker has none),
                 f = ceil(s / n) / s what of the model a machine holds;  2 (n - 1) / n M with s = n
    dedicated    shards on s machines of their own:  max(1, n / s) M
    ring         2 (n - 1) / n M     Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
                 for clusters of workstations" (2009)
    tree         (a child's sums, and the final values back) x children, and its own up and down:
                 max(min(a, n - 1), 1 + min(a, max(n - 1 - a, 0))) M of arity a; see Tree
    the least    of any placement on n + k machines, 0 <= k <= n:  2 n (n - 1) / (n^2 + k n - 2 k) M
                 Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
                 Heterogeneous GPU/CPU Clusters" (BytePS), OSDI 2020, theorem 1. Co-located shards
                 (k = 0) and as many dedicated ones as workers (k = n) reach it; between them it
                 takes slices of unequal size, which a parameter here does not have.

To these bytes TCP/IP adds `HEADER_FACTOR`. Chunks are pipelined, so that sending, summing and
answering overlap, except the first row of chunks (`fill_s`); and a machine that converts, checks
and sums more slowly than its link brings bytes is the bound itself (`work_s`):

    communication = max(link_s + lag_s, work_s) + fill_s + latency_s

A shard answers a chunk when the last worker's has come. Streams that share links advance unequally,
so the answers begin late, and where gradients and weights should use a link's two directions at
once they do so in part. If none of it overlapped, a step would take the gradients' time and then
the weights', twice G = max(what a worker sends, what a shard takes in); so

    lag = LAG (r - 1) / (r + 1) (2 G - the bytes above)

for r workers that reach a shard over its link. (r - 1) / (r + 1) is the expected spread of r
independent, evenly distributed progresses; LAG was fitted, once, to runs of benchmarks/plan.py.
Co-located shards on all workers have 2 G equal to the bytes above, as their gradients and weights
share each direction: no lag. `put_gradient` alone reaches the links' bound (1.02 to 1.12 of it at
200 Mbit/s, where `exchange` takes 1.4 to 2.0): so it is the answers that are late.

The model leaves out workers of unequal speed, links that others use, disks (`--durability step`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardwell.errors import ArgumentError
from shardwell.group.schedule.strategies import Ring, Strategy, Tree
from shardwell.numerics.codec import CODECS
from shardwell.placement.slices import slice_of
from shardwell.specs.checks import check_number, check_whole_number
from shardwell.specs.optimizers import Average, Optimizer
from shardwell.specs.parameter import BLOCK_SIZES, GROUP_CODECS, block_size_of
from shardwell.wire import images
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES

HEADER_FACTOR = 1514 / 1448
"""The headers of Ethernet, IP and TCP in a full packet, as rate limits count them; a bare cable
adds 24 bytes (1.6 %). gRPC's own and a chunk's are 0.01 %."""
LATENCY_S = 0.5e-3
"""A small message and back within one rack, gRPC's and Python's share included."""
LAG = 0.7
"""The part of the spread of workers' streams that delays answers, measured."""
HOST_BYTES_PER_S = 1.5e9
"""Measured by `shardwell bench` over gRPC, as between machines, on two cores of an AMD EPYC
(SHARDWELL_SAME_HOST=off; in shared memory 2.3 to 2.5 GB/s)."""
BACKWARD_SHARE = 2 / 3
"""Part of a step's computing: a backward pass takes twice as long as the forward pass."""
COUNT_MAX = 100_000
_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training job, and its machines."""

    element_count: int
    worker_count: int
    shard_count: int
    link_bytes_per_s: float
    """Bytes a second of a machine's link in each direction, headers included."""
    codec: str = "fp16"
    compute_s: float = 0.0
    latency_s: float = LATENCY_S
    host_bytes_per_s: float = HOST_BYTES_PER_S
    """Bytes of float32 that a worker and a shard beside it push and pull a second without a link;
    `shardwell bench` measures yours."""
    optimizer: Optimizer = field(default_factory=Average)

    def __post_init__(self) -> None:
        check_number("element_count", self.element_count, low=1)
        for name in ("worker_count", "shard_count"):
            check_whole_number(name, getattr(self, name), 1, COUNT_MAX)
        for name in ("link_bytes_per_s", "host_bytes_per_s"):
            check_number(name, getattr(self, name), low=1e-3)
        for name in ("compute_s", "latency_s"):
            check_number(name, getattr(self, name))
        if self.codec not in CODECS:
            raise ArgumentError(f"codec must be one of {', '.join(CODECS)}; got {self.codec!r:.80}")

    @property
    def float32_bytes(self) -> int:
        """The bytes of the model's weights."""
        return _FLOAT32_BYTES * self.element_count

    @property
    def encoded_bytes(self) -> int:
        """The bytes of a gradient as it travels: M above."""
        codec = CODECS[self.codec].in_blocks_of(block_size_of(self.element_count))
        return codec.encoded_bytes(self.element_count)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A layout of a job, and the times of a step in it, in seconds."""

    layout: str
    machine_count: int
    link_bytes: float
    """Payload over the fullest direction of the fullest link."""
    link_s: float
    work_s: float
    lag_s: float = 0.0
    """The answers' wait, on the whole, for the worker whose chunk is last."""
    fill_s: float
    latency_s: float
    compute_s: float
    shard_bytes: int = 0
    """Memory of a shard: weights, sums and optimizer state of its slice; 0 without shards."""
    worker_state_bytes: int = 0
    """Optimizer state that each worker holds itself; 0 with shards, which hold it."""

    @property
    def communication_s(self) -> float:
        """The time from the last gradient to the last weights."""
        return max(self.link_s + self.lag_s, self.work_s) + self.fill_s + self.latency_s

    @property
    def step_s(self) -> float:
        """A step that first computes and then communicates."""
        return self.compute_s + self.communication_s

    @property
    def overlapped_s(self) -> float:
        """A step whose gradients leave during the backward pass: the most that overlap can hide."""
        backward_s = BACKWARD_SHARE * self.compute_s
        return self.compute_s - backward_s + max(backward_s, self.communication_s)

    @property
    def limit(self) -> str:
        """The largest part of a step: "compute", "link", "cpu" or "latency"."""
        causes = {
            "compute": self.compute_s,
            "latency": self.latency_s,
            "cpu": self.work_s,
            "link": self.link_s + self.lag_s + self.fill_s,
        }
        return max(causes, key=lambda name: causes[name])


def co_located(job: Job) -> StepTime:
    """Computes shards beside workers, dealt out evenly; a pair on one machine uses no link."""
    n, s = job.worker_count, job.shard_count
    held = math.ceil(s / n) / s
    with_shards = (1 - held) + (n - 1) * held
    sent = 1 - held if s >= n else 1.0
    return _server(
        job,
        "co-located",
        n,
        share=max(with_shards, sent),
        one_way=max(sent, (n - 1) * held),
        remote_count=n - 1,
        work=(1 + n * held) / 2,
    )


def dedicated(job: Job) -> StepTime:
    """Computes each shard on a machine of its own."""
    n, s = job.worker_count, job.shard_count
    share = max(1.0, n / s)
    return _server(
        job, "dedicated", n + s, share=share, one_way=share, remote_count=n, work=share / 2
    )


def ring(job: Job) -> StepTime:
    """Computes the workers' all-reduce in a ring; of small arrays in a tree, as `Ring` does."""
    n = job.worker_count
    chosen = Ring().suited_to(job.encoded_bytes, n)
    if n > 1 and isinstance(chosen, Tree):
        return _group(job, str(Ring()), tree_share(n, chosen.arity), 2 * _depth(n, chosen.arity))
    return _group(job, str(Ring()), ring_share(n), 2 * (n - 1))


def tree(job: Job, arity: int = 2) -> StepTime:
    """Computes the workers' all-reduce in a tree; ArgumentError: none has that arity."""
    strategy: Strategy = Tree(arity)
    n = job.worker_count
    return _group(job, str(strategy), tree_share(n, arity), 2 * _depth(n, arity))


def layouts(job: Job, arity: int = 2) -> list[StepTime]:
    """Returns the possible layouts, co-located and dedicated first; groups lack some codecs."""
    made = [co_located(job), dedicated(job), ring(job), tree(job, arity)]
    return made if job.codec in GROUP_CODECS else made[:2]


def least_link_s(job: Job) -> float:
    """Returns the time of `least_share` on the job's links, with a spare machine for each shard."""
    return _link_s(job, least_share(job.worker_count, job.shard_count) * job.encoded_bytes)


def ring_share(worker_count: int) -> float:
    """Returns the part of the array's bytes that each rank of a ring sends; as much comes in."""
    return 2 * (worker_count - 1) / worker_count


def tree_share(worker_count: int, arity: int) -> int:
    """Returns the copies of the array that a tree's busiest rank sends; as much comes in.

    The root sends final values to its children; a rank below it with children also sends its sum
    up.
    """
    if worker_count == 1:
        return 0
    below_root = max(worker_count - 1 - arity, 0)
    return max(min(arity, worker_count - 1), 1 + min(arity, below_root))


def least_share(worker_count: int, spare_count: int) -> float:
    """Returns the least bytes of a gradient on the fullest link (BytePS)."""
    n, k = worker_count, min(spare_count, worker_count)
    return 0.0 if n == 1 else 2 * n * (n - 1) / (n * n + k * n - 2 * k)


def shard_bytes(job: Job) -> int:
    """Returns the memory of the shard with the longest slice, as `shardwell status` reports it.

    With int8 the image, too, and its last change. The process itself (about 70 MB) and buffers of
    messages add to it.
    """
    block_size = BLOCK_SIZES.get(job.codec) or block_size_of(job.element_count)
    slice_size = slice_of(job.element_count, 0, job.shard_count, block_size).size
    array_count = 2 + len(job.optimizer.slot_names) + (job.codec in BLOCK_SIZES)  # with an image
    return _FLOAT32_BYTES * slice_size * array_count + images.kept_bytes(job.codec, slice_size)


def _server(
    job: Job,
    layout: str,
    machine_count: int,
    *,
    share: float,
    one_way: float,
    remote_count: int,
    work: float,
) -> StepTime:
    """Computes a parameter server's step.

    Of M, the fullest link carries `share`, and `one_way` (G) for gradients alone; weights take as
    much. `remote_count` workers' chunks come to a shard over its link. `work` is the busiest
    machine's part of the model, where a worker with a shard beside it has 1.
    """
    slice_bytes = job.encoded_bytes / job.shard_count
    chunk_bytes = min(PAYLOAD_SIZE_MAX_BYTES, slice_bytes) * remote_count
    spread = max(remote_count - 1, 0) / (remote_count + 1)
    lag = LAG * spread * max(2 * one_way - share, 0.0)
    return StepTime(
        layout=layout,
        machine_count=machine_count,
        link_bytes=share * job.encoded_bytes,
        link_s=_link_s(job, share * job.encoded_bytes),
        work_s=work * job.float32_bytes / job.host_bytes_per_s,
        lag_s=_link_s(job, lag * job.encoded_bytes),
        fill_s=_link_s(job, chunk_bytes),
        latency_s=job.latency_s,
        compute_s=job.compute_s,
        shard_bytes=shard_bytes(job),
    )


def _group(job: Job, layout: str, share: float, hop_count: int) -> StepTime:
    """Computes an all-reduce: `hop_count` messages one after another, of a chunk each at first."""
    n = job.worker_count
    segment_bytes = job.encoded_bytes / (n if layout == str(Ring()) else 1)
    chunk_bytes = min(PAYLOAD_SIZE_MAX_BYTES, segment_bytes)
    pipelined = 0 if layout == str(Ring()) else hop_count  # a ring's ranks all begin at once
    return StepTime(
        layout=layout,
        machine_count=n,
        link_bytes=share * job.encoded_bytes,
        link_s=_link_s(job, share * job.encoded_bytes),
        work_s=share * job.float32_bytes / job.host_bytes_per_s / 2,
        fill_s=_link_s(job, chunk_bytes * pipelined),
        latency_s=hop_count * job.latency_s / 2,
        compute_s=job.compute_s,
        worker_state_bytes=_FLOAT32_BYTES * job.element_count * len(job.optimizer.slot_names),
    )


def _depth(worker_count: int, arity: int) -> int:
    depth, reached, level = 0, 1, 1
    while reached < worker_count:
        level *= arity
        reached += level
        depth += 1
    return depth


def _link_s(job: Job, payload_bytes: float) -> float:
    return payload_bytes * HEADER_FACTOR / job.link_bytes_per_s
