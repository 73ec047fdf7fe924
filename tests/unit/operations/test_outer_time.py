"""What outer training asks of links, with numbers worked out by hand.

The link carries 1.514e6 bytes a second, so that 1.448e6 bytes of payload pass in a second: a packet
of 1514 bytes has 1448 of them. One learner and one shard: nothing is summed or late. A chunk has up
to 2^20 bytes, and the first of them is not overlapped.
"""

from __future__ import annotations

import dataclasses

import pytest

import shardwell
from shardwell_server.operations.outer_time import OuterJob, outer_time
from shardwell_server.operations.step_time import Job

LINK = 1.514e6
PAYLOAD_BYTES_PER_S = 1.448e6
CHUNK = 2**20
FRAGMENT = 2**20 + 4 * 256
"""Bytes of 2^20 elements as int8: 256 blocks of 4,096 elements have a scale of four bytes each."""


def _outer(**changes: object) -> OuterJob:
    job = Job(
        element_count=4 * 2**20,
        worker_count=1,
        shard_count=1,
        link_bytes_per_s=LINK,
        compute_s=0.1,
        latency_s=0.0,
        host_bytes_per_s=1e18,
    )
    given: dict[str, object] = {"sync_every": 100, "overlap": 2}
    for name, value in changes.items():
        if name in ("element_count", "compute_s", "host_bytes_per_s"):
            job = dataclasses.replace(job, **{name: value})  # type: ignore[arg-type]
        else:
            given[name] = value
    return OuterJob(job=job, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codec", "element_count", "encoded"),
    [
        ("int8", 1, 5),
        ("int8", 4096, 4100),
        ("int8", 4097, 4105),
        ("int8", 25_000_000, 25_024_416),  # 6,104 scales: 25e6 / 4096 is 6103.5
        ("fp32", 3, 12),
        ("fp16", 3, 9),
        ("bf16", 3, 6),
    ],
)
def test_bytes_of_a_codec(codec, element_count, encoded) -> None:
    job = dataclasses.replace(_outer().job, codec=codec, element_count=element_count)
    assert job.encoded_bytes == encoded


def test_bytes_of_an_outer_step_and_of_as_many_synchronous_ones() -> None:
    outer = _outer()
    assert outer.encoded_bytes == 4 * FRAGMENT == 4_198_400
    assert outer.synchronous_bytes == 100 * (2 * 4 * 2**20 + 2**14) == 840_499_200
    assert _outer(codec="fp32").encoded_bytes == 4 * 4 * 2**20
    assert _outer(element_count=10).encoded_bytes == 4 * (3 + 4)  # of 10 elements: 3 a fragment


def test_an_outer_step_on_a_link_that_hides_a_part() -> None:
    """A fragment takes 1.449 s, of which two inner steps hide 0.2; a learner waits four times."""
    fragment_s = (FRAGMENT + CHUNK) / PAYLOAD_BYTES_PER_S
    waited_s = fragment_s - 2 * 0.1
    made = outer_time(_outer(), LINK)
    assert fragment_s == pytest.approx(1.449017, rel=1e-6)
    assert made.fragment_s == pytest.approx(fragment_s)
    assert made.waited_s == pytest.approx(waited_s)
    assert made.hidden_share == pytest.approx(0.2 / fragment_s)
    assert made.outer_step_s == pytest.approx(100 * 0.1 + 4 * waited_s)
    assert made.inner_step_s == pytest.approx(0.1499607, rel=1e-6)
    # fp16: 2^23 bytes, 2^14 exponents and a chunk; the forward pass, a third, hides nothing.
    synchronous_s = 0.1 / 3 + (2**23 + 2**14 + CHUNK) / PAYLOAD_BYTES_PER_S
    assert made.synchronous_step_s == pytest.approx(synchronous_s)
    assert made.gain == pytest.approx(synchronous_s / made.inner_step_s)
    with_headers = FRAGMENT * 1514 / 1448
    assert made.mean_bytes_per_s == pytest.approx(4 * with_headers / made.outer_step_s)
    assert made.peak_bytes_per_s == pytest.approx(with_headers / fragment_s)


def test_a_link_that_hides_all_adds_nothing() -> None:
    outer = _outer(overlap=24)
    made = outer_time(outer, LINK)
    assert (made.waited_s, made.hidden_share) == (0.0, 1.0)
    assert made.outer_step_s == pytest.approx(10.0)
    assert made.mean_bytes_per_s == pytest.approx(4 * FRAGMENT * 1514 / 1448 / 10)


def test_without_overlap_or_computing_nothing_is_hidden() -> None:
    for changes in ({"overlap": 0}, {"compute_s": 0.0}):
        made = outer_time(_outer(**changes), LINK)
        assert made.hidden_share == 0.0
        assert made.waited_s == made.fragment_s
        assert _outer(**changes).hiding_bytes_per_s is None
    assert made.outer_step_s == pytest.approx(4 * made.fragment_s)


def test_the_slowest_link_that_hides_all() -> None:
    """A fragment and its first chunk, with headers, in the 0.2 s of two inner steps."""
    rate = _outer().hiding_bytes_per_s
    assert rate is not None
    assert rate == pytest.approx((FRAGMENT + CHUNK) * 1514 / 1448 / 0.2)
    assert outer_time(_outer(), rate).waited_s == pytest.approx(0.0, abs=1e-9)
    assert outer_time(_outer(), 0.99 * rate).waited_s > 0.0


def test_processors_that_are_slower_than_the_link() -> None:
    """Working on half of a fragment's 2^22 bytes of float32 takes 0.15 s of the 0.2."""
    outer = _outer(host_bytes_per_s=2**21 / 0.15)
    rate = outer.hiding_bytes_per_s
    assert rate is not None
    assert rate == pytest.approx(CHUNK * 1514 / 1448 / 0.05)
    assert outer_time(outer, rate).waited_s == pytest.approx(0.0, abs=1e-9)
    assert _outer(host_bytes_per_s=2**21 / 0.25).hiding_bytes_per_s is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync_every": 0}, "sync_every must be"),
        ({"fragment_count": 0}, "fragment_count must be at least 1"),
        ({"fragment_count": 3}, "sync_every=100 must be a multiple of the 3 fragments"),
        ({"overlap": 25}, "overlap=25 must be below the interval of 25 inner steps"),
        ({"overlap": -1}, "overlap must be"),
        ({"element_count": 3}, "4 fragments of 3 elements"),
        ({"codec": "int3"}, "codec must be one of fp32, fp16, bf16, int8; got 'int3'"),
    ],
)
def test_impossible_outer_plans_are_refused_by_name(changes, words) -> None:
    with pytest.raises(shardwell.ArgumentError, match=words):
        _outer(**changes)
