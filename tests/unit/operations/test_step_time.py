"""Predicted step times: bytes against the schedules that move them, and the limits of each layout.

Method: what a ring or tree sends is counted along the strategies' own flows; what a server's links
carry is counted machine by machine. BytePS's bound is compared with the two layouts that reach it.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest

import shardwell
from shardwell.group.schedule.strategies import Ring, Strategy, Tree
from shardwell.placement.slices import slice_of
from shardwell_server.operations import step_time
from shardwell_server.operations.step_time import Job, StepTime

COUNTS = [1, 2, 3, 4, 5, 8, 13]
BYTES_PER_ELEMENT = 2 + 1 / 256
"""Of fp16, with its exponents."""
ENCODED_BYTES = 16_000_000 * BYTES_PER_ELEMENT


def _job(**changes: object) -> Job:
    given = {
        "element_count": 16_000_000,
        "worker_count": 4,
        "shard_count": 4,
        "link_bytes_per_s": 125e6,
    }
    return Job(**{**given, **changes})  # type: ignore[arg-type]


def _counted_share(strategy: Strategy, size: int) -> Fraction:
    """What the busiest rank sends or receives, of the array, along the strategy's own flows."""
    collectors = range(size) if strategy.is_segmented else [0]
    segment = Fraction(1, len(collectors))
    sent, received = [Fraction(0)] * size, [Fraction(0)] * size
    for collector in collectors:
        for rank in range(size):
            target = strategy.inflow(rank, collector, size).target
            pairs = [] if target is None else [(rank, target)]
            pairs += [(rank, to) for to in strategy.outflow(rank, collector, size).targets]
            for source, to in pairs:
                sent[source] += segment
                received[to] += segment
    return max(sent + received)


@pytest.mark.parametrize("size", COUNTS)
def test_a_ring_sends_what_its_schedule_does(size) -> None:
    assert step_time.ring_share(size) == pytest.approx(float(_counted_share(Ring(), size)))


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("arity", [1, 2, 3, 8])
def test_a_tree_sends_what_its_schedule_does(size, arity) -> None:
    assert step_time.tree_share(size, arity) == _counted_share(Tree(arity), size)


def _counted_server_bytes(job: Job, *, is_apart: bool) -> float:
    """Bytes over the fullest direction of a machine's link, machine by machine."""
    n, s = job.worker_count, job.shard_count
    sent, received = [0.0] * (n + s), [0.0] * (n + s)
    for shard in range(s):
        host = n + shard if is_apart else shard % n
        moved = slice_of(job.element_count, shard, s).size * BYTES_PER_ELEMENT
        for worker in range(n):
            if worker != host:
                for source, to in ((worker, host), (host, worker)):
                    sent[source] += moved
                    received[to] += moved
    return max(sent + received)


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize("shards", COUNTS)
def test_a_server_s_links_carry_what_goes_over_each(workers, shards) -> None:
    job = _job(worker_count=workers, shard_count=shards)
    for made, is_apart in ((step_time.co_located(job), False), (step_time.dedicated(job), True)):
        counted = _counted_server_bytes(job, is_apart=is_apart)
        assert made.link_bytes == pytest.approx(counted, rel=1e-5), made.layout


@pytest.mark.parametrize("n", COUNTS)
def test_nothing_is_below_the_bound_and_two_layouts_reach_it(n) -> None:
    assert step_time.least_share(n, 0) == pytest.approx(step_time.ring_share(n))
    co_located = step_time.co_located(_job(worker_count=n, shard_count=n))
    assert co_located.link_bytes == pytest.approx(ENCODED_BYTES * step_time.least_share(n, 0))
    if n > 1:
        dedicated = step_time.dedicated(_job(worker_count=n, shard_count=n))
        assert dedicated.link_bytes == pytest.approx(ENCODED_BYTES * step_time.least_share(n, n))
    for spare_count in range(1, 2 * n):
        dedicated = step_time.dedicated(_job(worker_count=n, shard_count=spare_count))
        assert dedicated.link_bytes >= ENCODED_BYTES * step_time.least_share(n, spare_count) - 1e-3


def test_two_spare_machines_beside_four_workers() -> None:
    """The paper's formula by hand: 2 * 4 * 3 / (16 + 8 - 4)."""
    assert step_time.least_share(4, 2) == pytest.approx(24 / 20)


def test_one_worker_alone_exchanges_nothing() -> None:
    job = _job(worker_count=1, shard_count=1, compute_s=0.5)
    for made in (step_time.ring(job), step_time.tree(job)):
        assert made.communication_s == 0.0
        assert made.step_s == made.overlapped_s == 0.5
    assert step_time.co_located(job).link_s == 0.0
    assert step_time.dedicated(job).link_bytes == ENCODED_BYTES
    assert step_time.least_link_s(job) == 0.0


def test_answers_wait_where_both_directions_should_be_busy_at_once() -> None:
    """Not with a shard beside each worker, nor where only one worker comes over a shard's link."""
    for workers, shards in ((4, 4), (2, 1), (1, 1)):
        job = _job(worker_count=workers, shard_count=shards)
        assert step_time.co_located(job).lag_s == pytest.approx(0.0)
    assert step_time.dedicated(_job(worker_count=1, shard_count=1)).lag_s == 0.0
    lagging = [step_time.dedicated(_job(worker_count=n, shard_count=n)) for n in (2, 4, 64)]
    shares = [one.lag_s / one.link_s for one in lagging]
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < shares[-1] < step_time.LAG  # never as if nothing overlapped


def _time(**changes: float) -> StepTime:
    given: dict[str, object] = dict.fromkeys(
        ("link_bytes", "link_s", "work_s", "lag_s", "fill_s", "latency_s", "compute_s"), 0.0
    )
    given |= {"layout": "", "machine_count": 1, "shard_bytes": 0, "worker_state_bytes": 0}
    return StepTime(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "communication_s", "step_s", "overlapped_s", "limit"),
    [
        ({"link_s": 2.0, "work_s": 1.0, "fill_s": 0.5, "latency_s": 0.5}, 3.0, 3.0, 3.0, "link"),
        ({"link_s": 1.0, "lag_s": 2.0, "work_s": 2.0}, 3.0, 3.0, 3.0, "link"),
        ({"link_s": 1.0, "work_s": 2.0}, 2.0, 2.0, 2.0, "cpu"),
        ({"link_s": 1.0, "compute_s": 6.0}, 1.0, 7.0, 6.0, "compute"),
        ({"link_s": 5.0, "compute_s": 6.0}, 5.0, 11.0, 7.0, "compute"),
        ({"latency_s": 1.0}, 1.0, 1.0, 1.0, "latency"),
    ],
)
def test_what_hides_what(given, communication_s, step_s, overlapped_s, limit) -> None:
    made = _time(**given)
    assert made.communication_s == communication_s
    assert made.step_s == step_s
    assert made.overlapped_s == pytest.approx(overlapped_s)
    assert made.limit == limit


def test_a_link_twice_as_fast_halves_its_part() -> None:
    slow, fast = (step_time.layouts(_job(link_bytes_per_s=rate)) for rate in (1e8, 2e8))
    for one, other in zip(slow, fast, strict=True):
        assert one.link_s == pytest.approx(2 * other.link_s)
        assert one.work_s == other.work_s


def test_small_arrays_take_the_ring_s_tree() -> None:
    """With 16 ranks in a tree of arity 8: two levels up and two down, not 30 hops."""
    made = step_time.ring(_job(element_count=10, worker_count=16, latency_s=1.0))
    assert made.latency_s == 2.0


@pytest.mark.parametrize(
    ("optimizer", "arrays"),
    [
        (shardwell.SGD(0.1), 2),
        (shardwell.SGD(0.1, momentum=0.9), 3),
        (shardwell.AdamW(0.1), 4),
    ],
)
def test_memory_of_the_longest_slice(optimizer, arrays) -> None:
    job = _job(element_count=10, shard_count=3, optimizer=optimizer)
    assert step_time.shard_bytes(job) == 4 * 4 * arrays
    assert step_time.ring(job).worker_state_bytes == 4 * 10 * (arrays - 2)
    blocks = _job(element_count=3001, shard_count=2, optimizer=optimizer)  # 47 of 64
    assert step_time.shard_bytes(blocks) == 4 * 24 * 64 * arrays


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("element_count", 0),
        ("element_count", True),
        ("worker_count", 0),
        ("shard_count", 10**9),
        ("link_bytes_per_s", 0.0),
        ("link_bytes_per_s", math.nan),
        ("host_bytes_per_s", math.inf),
        ("compute_s", -1.0),
        ("latency_s", "soon"),
        ("codec", "int3"),
    ],
)
def test_impossible_plans_are_refused_by_name(field, value) -> None:
    with pytest.raises(shardwell.ArgumentError, match=field):
        dataclasses.replace(_job(), **{field: value})


def test_a_tree_without_children_is_refused() -> None:
    with pytest.raises(shardwell.ArgumentError, match="arity"):
        step_time.tree(_job(), 0)
