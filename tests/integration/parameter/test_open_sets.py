"""Steps that close without a worker: what counts, what is late, and what its worker hears of it.

Every number is an integer or a mean of two, so the weights that follow are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardwell
from shardwell_server import LocalCluster

SIZE = 1000
CHUNK_BYTES = 256
"""64 elements of fp32, so that each shard has several chunks."""


def gradient(value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(SIZE, value, np.float32)


def opened(client: shardwell.Client, **options: Any) -> shardwell.Parameter:
    given = {"worker_count": 2, "min_contributors": 1} if "members" not in options else {}
    net = client.parameter(
        "net",
        size=SIZE,
        optimizer=shardwell.SGD(learning_rate=1.0),
        codec="fp32",
        **{**given, **options},
    )
    net.init(np.zeros(SIZE, np.float32))
    return net


@pytest.fixture
def running(
    cluster: Callable[..., LocalCluster], connect: Callable[..., shardwell.Client]
) -> Callable[[str], shardwell.Client]:
    """Connects workers to one cluster."""
    made = cluster(2, chunk_size_bytes=CHUNK_BYTES)
    return lambda name: connect(made, name)


def outcome_of(net: shardwell.Parameter) -> shardwell.Outcome:
    assert net.outcome is not None
    return net.outcome


def test_who_is_late_gets_the_weights_and_an_outcome(
    running: Callable[[str], shardwell.Client],
) -> None:
    fast, slow = opened(running("w0")), opened(running("w1"))
    for step in range(3):
        assert set(fast.exchange(gradient(2.0)).tolist()) == {-2.0 * (step + 1)}
    found = slow.exchange(gradient(100.0))
    assert set(found.tolist()) == {-6.0}
    late = outcome_of(slow)
    assert (late.step, late.counted, late.counted_elements) == (0, "none", 0)
    assert late.late == (shardwell.Slice(0, SIZE),)
    assert (late.version, slow.version, slow.next_step) == (3, 3, 3)
    assert set(slow.exchange(gradient(4.0)).tolist()) == {-10.0}
    in_time = outcome_of(slow)
    assert (in_time.step, in_time.counted, in_time.contributors) == (3, "all", ("w1",))


def test_what_did_not_count_is_carried_over(running: Callable[[str], shardwell.Client]) -> None:
    fast, slow = opened(running("w0")), opened(running("w1"), late="carry")
    fast.exchange(gradient(2.0))
    slow.exchange(gradient(100.0))
    assert outcome_of(slow).counted == "none"
    fast.exchange(gradient(2.0))
    slow.exchange(gradient(10.0))
    assert outcome_of(slow).counted == "none"
    assert set(slow.exchange(gradient(1.0)).tolist()) == {-4.0 - 111.0}
    assert outcome_of(slow).counted == "all"
    assert set(slow.exchange(gradient(1.0)).tolist()) == {-4.0 - 112.0}


@pytest.mark.parametrize("is_begun", [False, True])
def test_it_is_carried_past_a_step_without_a_gradient(
    running: Callable[[str], shardwell.Client], is_begun: bool
) -> None:
    fast, slow = opened(running("w0")), opened(running("w1"), late="carry")
    fast.exchange(gradient(2.0))
    slow.exchange(gradient(100.0))
    slow.exchange(None)
    if is_begun:
        begun = slow.begin_exchange(gradient(1.0))
        begun.ready(0, SIZE)
        found = begun.finish()
    else:
        found = slow.exchange(gradient(1.0))
    assert set(found.tolist()) == {-2.0 - 101.0}


def test_each_step_begins_with_another_chunk(running: Callable[[str], shardwell.Client]) -> None:
    nets = [opened(running(f"w{n}"), min_contributors=2) for n in range(2)]
    given = np.arange(SIZE, dtype=np.float32)
    for step in range(5):
        nets[0].put_gradient(given)
        found = nets[1].exchange(given)
        np.testing.assert_array_equal(found, -(step + 1) * given)


@pytest.mark.parametrize("late", [None, "keep"])
def test_late_is_one_of_two(running: Callable[[str], shardwell.Client], late: Any) -> None:
    with pytest.raises(shardwell.ArgumentError, match="late must be 'drop' or 'carry'"):
        opened(running("w0"), late=late)


def test_a_put_hears_what_counted_of_it(running: Callable[[str], shardwell.Client]) -> None:
    fast, slow = opened(running("w0")), opened(running("w1"))
    assert fast.put_gradient(gradient(2.0)) == 0
    assert outcome_of(fast).contributors == ("w0",)
    assert slow.put_gradient(gradient(2.0)) == 0
    assert outcome_of(slow).counted == "none"
    assert set(slow.get_weights(min_version=1).tolist()) == {-2.0}
    assert slow.put_gradient(gradient(2.0)) == 1
    assert outcome_of(slow).counted == "all"


def test_a_put_that_is_late_in_part_is_followed_by_the_next_step(
    cluster: Callable[..., LocalCluster], connect: Callable[..., shardwell.Client]
) -> None:
    """One shard closes the step without it; the other has counted it, and waits for others."""
    running = cluster(2, chunk_size_bytes=CHUNK_BYTES)
    *others, last = (
        opened(connect(running, f"w{n}"), worker_count=3, min_contributors=2) for n in range(3)
    )
    for net in others:
        transfer = net._transfer
        transfer.parts = transfer.parts[:1]
        net.put_gradient(gradient(1.0))
    assert last.put_gradient(gradient(2.0)) == 0
    assert (outcome_of(last).counted, last.next_step) == ("part", 1)
    with pytest.raises(shardwell.WorkersMissingError):
        last.put_gradient(gradient(5.0), timeout_s=1.0)


def test_all_in_time_are_the_mean_of_all(running: Callable[[str], shardwell.Client]) -> None:
    first, second = (opened(running(f"w{n}"), min_contributors=2, grace_s=30.0) for n in range(2))
    first.put_gradient(gradient(2.0))
    assert set(second.exchange(gradient(4.0), sample_count=3).tolist()) == {-3.5}
    assert outcome_of(second).contributors == ("w0", "w1")


def test_the_rate_is_that_of_a_count_of_members(
    running: Callable[[str], shardwell.Client],
) -> None:
    members = shardwell.Elastic(min_count=1, max_count=4, reference_count=4)
    net = opened(running("w0"), members=members)
    assert set(net.exchange(gradient(8.0)).tolist()) == {-2.0}


def test_no_step_waits_for_a_member_without_a_gradient(
    running: Callable[[str], shardwell.Client],
) -> None:
    members = shardwell.Elastic(min_count=1, max_count=4)
    net = opened(running("w0"), members=members)
    assert set(net.exchange(None).tolist()) == {0.0}
    assert net.next_step == 1
    assert set(net.exchange(gradient(8.0)).tolist()) == {-8.0}


def test_a_begun_exchange_has_an_outcome(running: Callable[[str], shardwell.Client]) -> None:
    fast, slow = opened(running("w0")), opened(running("w1"))
    fast.exchange(gradient(2.0))
    given = gradient(3.0)
    begun = slow.begin_exchange(given)
    begun.ready(SIZE // 2, SIZE)
    begun.ready(0, SIZE // 2)
    assert set(begun.finish().tolist()) == {-2.0}
    assert outcome_of(slow).counted == "none"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"members": shardwell.Elastic(), "worker_count": 2}, "worker_count= and members= both"),
        ({"members": 3}, "members must be shardwell.Elastic; got 3"),
        ({"members": shardwell.Elastic(), "mode": "async"}, "members= needs mode='sync'"),
        ({"min_contributors": 3}, "min_contributors must be at most worker_count=2; got 3"),
        ({"grace_s": float("nan")}, "grace_s must be a finite number"),
        ({"grace_s": -1.0}, "grace_s must be a finite number"),
        ({"min_contributors": 0, "grace_s": 1.0}, "give min_contributors, too"),
    ],
)
def test_what_can_not_be_opened_together(
    running: Callable[[str], shardwell.Client], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(shardwell.ArgumentError, match=words):
        opened(running("w0"), **options)


def test_a_member_too_many_is_refused_by_name(
    running: Callable[[str], shardwell.Client],
) -> None:
    members = shardwell.Elastic(min_count=1, max_count=1)
    first, second = (opened(running(f"w{n}"), members=members) for n in range(2))
    first.exchange(gradient(1.0))
    with pytest.raises(shardwell.SeatsTakenError, match="max_count=1 members take part already"):
        second.exchange(gradient(1.0))
    first.leave()
    assert set(second.exchange(gradient(1.0)).tolist()) == {-1.0}
    assert (outcome_of(second).counted, second.next_step) == ("none", 1)
    assert set(second.exchange(gradient(1.0)).tolist()) == {-2.0}


def test_two_specs_that_disagree(running: Callable[[str], shardwell.Client]) -> None:
    opened(running("w0"), members=shardwell.Elastic(max_count=4))
    with pytest.raises(shardwell.SpecMismatchError, match="members"):
        opened(running("w1"), members=shardwell.Elastic(max_count=5))


def test_who_is_late_brings_no_rate(running: Callable[[str], shardwell.Client]) -> None:
    fast, slow = opened(running("w0")), opened(running("w1"))
    fast.exchange(gradient(1.0), learning_rate=2.0)
    fast.exchange(gradient(1.0), learning_rate=3.0)
    assert set(slow.exchange(gradient(1.0), learning_rate=5.0).tolist()) == {-5.0}
    assert set(slow.exchange(gradient(1.0)).tolist()) == {-8.0}
