"""Wires between members that are cut, held, slow or damaged, and addresses that lead nowhere.

Goal: an error that names a rank within the deadline or lease, the same everywhere. Method: a proxy
before one rank's server (advertise=).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Direction, Proxy
from harness.group.ranks import STRATEGIES, error_of, joined, summed
from harness.polling import PATIENCE_S, Stopwatch, eventually
from harness.programs.ports import free_port
from harness.threads import in_background

LEASE_S = 2.0
LONG = 3_000_000


@pytest.fixture
def place(cluster) -> str:
    """Where groups meet."""
    return str(cluster(1).target)


@contextlib.contextmanager
def behind_proxy(
    place: str, victim: int, **options: Any
) -> Iterator[tuple[Proxy, list[Future[shardwell.Group]]]]:
    """Three members, of which `victim` is reached through a proxy; all are closed at the end."""
    port = free_port()
    with Proxy(f"127.0.0.1:{port}") as proxy:

        def join(rank: int) -> shardwell.Group:
            given = {"lease_s": LEASE_S, "same_host": False, **options}  # all is on the wire
            if rank == victim:
                given |= {"listen": f"127.0.0.1:{port}", "advertise": proxy.address}
            return joined(place, rank, 3, **given)

        futures = [in_background(lambda rank=rank: join(rank)) for rank in range(3)]
        try:
            yield proxy, futures
        finally:
            proxy.resume()
            closing = [in_background(future.result(PATIENCE_S).close) for future in futures]
            for each in closing:
                each.result(PATIENCE_S)


def each(groups: list[shardwell.Group], call: Callable[[shardwell.Group], Any]) -> list[Any]:
    """The results of a call on all at once."""
    futures = [in_background(lambda group=group: call(group)) for group in groups]
    return [future.result(PATIENCE_S) for future in futures]


def failing(group: shardwell.Group, **options: Any) -> shardwell.ShardwellError:
    """The error that ends sums."""

    def forever() -> None:
        for _ in range(10_000):
            summed(group, LONG, **options)

    return error_of(forever)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_wire_that_is_cut(place, victim) -> None:
    """All calls fail at once, and all rebuild: all live, so all are members again."""
    with behind_proxy(place, victim) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        each(groups, summed)
        running = [in_background(lambda group=group: failing(group)) for group in groups]
        proxy.cut_after(Direction.TO_CLIENT, 3_000_000, refuse=False)
        watch = Stopwatch()
        errors = [future.result(PATIENCE_S) for future in running]
        assert watch.elapsed_s < PATIENCE_S
        assert {type(error) for error in errors} == {shardwell.WorkerLostError}
        each(groups, lambda group: group.rebuild(replacement_wait_s=10.0, timeout_s=PATIENCE_S))
        assert [group.size for group in groups] == [3, 3, 3]
        each(groups, summed)


@pytest.mark.parametrize("direction", Direction)
def test_damage_below_the_framing_of_grpc_at_the_meeting_place(place, direction) -> None:
    """It costs time and nothing else: the meeting place is asked again."""
    for at in (0, 3, 5, 8):  # of its first frame: others make a connection that stalls
        with Proxy(place) as proxy:
            proxy.corrupt_at(direction, at, 0x40)
            with joined(proxy.address, 0, 1, name=f"job-{at}", lease_s=LEASE_S) as group:
                summed(group)
            assert proxy.corrupted_count == 1


@pytest.mark.parametrize("direction", Direction)
def test_damage_below_the_framing_of_grpc_between_members(place, direction) -> None:
    """As a wire that is cut: a member is called lost, and all are there again."""
    with behind_proxy(place, 1) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        for at in (0, 3, 5):
            each(groups, summed)
            running = [
                in_background(lambda group=group: failing(group, timeout_s=5.0)) for group in groups
            ]
            start = 1_000_000 * (direction is Direction.TO_CLIENT) + at
            for more in range(60):  # a bit may be one that nothing depends on, such as a ping's
                proxy.corrupt_at(direction, start + more, 0x40)
                with contextlib.suppress(AssertionError):
                    eventually(
                        "a rank has noticed",
                        lambda: any(future.done() for future in running),  # noqa: B023
                        timeout_s=1.0,
                    )
                    break
            errors = [future.result(PATIENCE_S) for future in running]
            kinds = (shardwell.WorkerLostError, shardwell.DeadlineError)
            assert all(isinstance(error, (*kinds, shardwell.CorruptChunkError)) for error in errors)
            each(groups, lambda group: group.rebuild(replacement_wait_s=10.0, timeout_s=PATIENCE_S))
            assert [group.size for group in groups] == [3, 3, 3]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_stalled_wire(place, strategy) -> None:
    """Every process lives and renews its lease: the call's deadline ends it, the same for all."""
    with behind_proxy(place, 1, strategy=strategy) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        each(groups, summed)
        running = [
            in_background(lambda group=group: failing(group, timeout_s=2.0)) for group in groups
        ]
        with contextlib.suppress(TimeoutError):
            running[0].result(0.2)
        proxy.stall()
        watch = Stopwatch()
        errors = [future.result(PATIENCE_S) for future in running]
        assert watch.elapsed_s < PATIENCE_S
        assert all(isinstance(error, shardwell.WorkersMissingError) for error in errors), errors
        assert all(error.missing_ranks for error in errors)
        assert len({error.missing_ranks for error in errors}) == 1, errors
        proxy.resume()
        each(groups, lambda group: group.rebuild(timeout_s=PATIENCE_S))
        each(groups, summed)


@pytest.mark.parametrize("receiver", [1, 2])
def test_a_broadcast_to_a_rank_that_takes_nothing(place, receiver) -> None:
    """The root holds to the deadline as well, and queues no more than a little."""
    with behind_proxy(place, 0, strategy=shardwell.Centralized()) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        each(groups, summed)
        each(groups, lambda group: group.broadcast(np.zeros(10, np.float32)))
        calls = [
            in_background(
                lambda group=group: error_of(
                    lambda: [
                        group.broadcast(np.zeros(LONG, np.float32), timeout_s=1.5)
                        for _ in range(1000)
                    ]
                )
            )
            for group in groups
        ]
        with contextlib.suppress(TimeoutError):
            calls[receiver].result(0.2)
        proxy.stall()
        watch = Stopwatch()
        for call in calls:
            assert isinstance(call.result(PATIENCE_S), shardwell.DeadlineError)
        assert watch.elapsed_s < PATIENCE_S


def test_a_slow_wire(place) -> None:
    """It takes its time, and is right."""
    with behind_proxy(place, 2) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        proxy.slow_down(delay_s=0.01, bytes_per_s=2_000_000)
        each(groups, lambda group: summed(group, 500_000))
        proxy.slow_down()
        each(groups, summed)


def test_a_damaged_chunk(place) -> None:
    """A flipped bit is found: never a wrong sum."""
    with behind_proxy(place, 1) as (proxy, futures):
        groups = [future.result(PATIENCE_S) for future in futures]
        marked = np.frombuffer(b"\x77MARK-IT" * 300_000, np.float32)
        assert np.isfinite(marked).all()

        def call(group: shardwell.Group) -> shardwell.ShardwellError:
            return error_of(
                lambda: [group.broadcast(marked.copy(), root=1, codec="fp32") for _ in range(100)]
            )

        proxy.corrupt_after(Direction.TO_CLIENT, b"MARK-IT")
        errors = each(groups, call)
        assert proxy.corrupted_count == 1
        assert {type(error) for error in errors} == {shardwell.CorruptChunkError}
        assert len({error.message for error in errors}) == 1


def test_a_member_that_answers_late_is_waited_for(place) -> None:
    """For longer than leases: it lives, and the others have time until their joins' deadlines."""
    port = free_port()
    with Proxy(f"127.0.0.1:{port}") as proxy:
        proxy.stall()
        late = {"listen": f"127.0.0.1:{port}", "advertise": proxy.address}
        futures = [
            in_background(
                lambda rank=rank: joined(place, rank, 3, lease_s=0.5, **(late if rank == 1 else {}))
            )
            for rank in range(3)
        ]
        eventually("both greet it", lambda: proxy.connection_count >= 2)
        with pytest.raises(TimeoutError):
            futures[0].result(3 * 0.5)
        proxy.resume()
        groups = [future.result(20) for future in futures]
        each(groups, summed)
        each(groups, shardwell.Group.close)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "192.0.2.1:9", "no-such-host.invalid:1"])
def test_an_address_that_others_can_not_reach(place, address) -> None:
    """Join says so to all, with the rank: at once if no process listens, else at the deadline."""
    timeout_s = 20.0 if address == "127.0.0.1:1" else 3.0

    def join(rank: int) -> shardwell.ShardwellError:
        given = {"lease_s": LEASE_S, "join_timeout_s": timeout_s}
        if rank == 1:
            given["advertise"] = address
        return error_of(lambda: joined(place, rank, 3, **given).close())

    watch = Stopwatch()
    futures = [in_background(lambda rank=rank: join(rank)) for rank in range(3)]
    errors = [future.result(PATIENCE_S) for future in futures]
    assert watch.elapsed_s < PATIENCE_S
    for error in errors:
        assert isinstance(error, shardwell.WorkerUnreachableError), error
        assert error.rank == 1
        assert address in error.message
