"""Goal: whatever ends a call in int8, what rounding takes off is neither lost nor doubled.

Method: calls that fail in mid-step, of each kind of error, and what a worker may do then: the same
again, another gradient, none at all, a new process. Beside it the replay of harness.oracles.int8:
of the same steps without errors; or, where two gradients of a step were counted in part, of each
range by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.int8_training import RATE, SIZE, Float32, Replay, assert_bits, gradient_of, opened
from harness.faults.proxy import Direction, Proxy
from harness.oracles.int8 import BLOCK, Int8Weights, Int8Worker, rounded, sgd
from harness.threads import in_background, together
from shardwell.placement.slices import Slice

HASTY_S = 1.0
"""Of calls that are to fail."""


def assert_ranges(
    found: Float32, ranges: Sequence[Slice], within: Float32, beside: Float32
) -> None:
    """Within some ranges, neither none nor all, it is the one, and elsewhere the other."""
    expected = beside.copy()
    for where in ranges:
        expected[where.offset : where.stop] = within[where.offset : where.stop]
    assert 0 < sum(where.size for where in ranges) < SIZE
    assert_bits(found, expected)


def whole(net: Any, gradient: Float32, **options: Any) -> None:
    net.exchange(gradient, **options)


def put(net: Any, gradient: Float32, **options: Any) -> None:
    net.put_gradient(gradient, **options)


def in_pieces(net: Any, gradient: Float32, timeout_s: float | None = None) -> None:
    begun = net.begin_exchange(gradient)
    begun.ready(0, SIZE)
    begun.finish(timeout_s)


VERBS = [whole, put, in_pieces]
Give = Callable[..., None]


# The same gradient again.


@pytest.mark.parametrize("give", VERBS)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("byte_count", [1, 5000])
def test_a_call_that_was_cut_off_counts_once(
    cluster, connect, give: Give, direction: Direction, byte_count: int
) -> None:
    running = cluster(2, chunk_size_bytes=4096)
    if give is put and direction is Direction.TO_CLIENT:
        byte_count = 1  # its answer is short
    with Proxy(running.addresses[1]) as proxy:
        net = opened(connect(f"{running.addresses[0]},{proxy.address}", "w0"))
        replay = Replay()
        for step in range(3):
            replay.step(gradient_of(0, step))
            if step == 1:
                proxy.cut_after(direction, byte_count)
                before = net.residual
                with pytest.raises(shardwell.ShardUnavailableError):
                    give(net, gradient_of(0, step), timeout_s=HASTY_S)
                assert net.next_step == step
                assert_bits(net.residual, before)
                proxy.accept()
            give(net, gradient_of(0, step))
            replay.check(net)
        assert proxy.cut_count == 1


@pytest.mark.parametrize("give", [whole, in_pieces])
def test_a_call_that_waited_in_vain_counts_once(cluster, connect, give: Give) -> None:
    """And another gradient in its place is refused, without a trace."""
    running = cluster(2)
    nets = [opened(connect(running, f"w{rank}"), worker_count=2) for rank in range(2)]
    workers, weights = [Int8Worker(SIZE) for _ in nets], Int8Weights(np.zeros(SIZE, np.float32))
    for step in range(2):
        for _ in range(2):
            with pytest.raises(shardwell.WorkersMissingError, match="w1"):
                give(nets[0], gradient_of(0, step), timeout_s=HASTY_S)
            with pytest.raises(shardwell.StepOrderError, match="another than was counted"):
                give(nets[0], gradient_of(5, step), timeout_s=HASTY_S)
        nets[1].put_gradient(gradient_of(1, step))
        give(nets[0], gradient_of(0, step))
        sent = [each.sent(gradient_of(rank, step)) for rank, each in enumerate(workers)]
        mean = (sent[0] + sent[1]) / np.float32(2)
        expected = weights.update(sgd(RATE)(weights.weights, mean))
        for net, worker in zip(nets, workers, strict=True):
            assert_bits(net.get_weights(min_version=step + 1), expected)
            assert_bits(net.residual, worker.residual)


def test_a_piece_that_waited_in_vain_is_finished_again(cluster, connect) -> None:
    running = cluster(2)
    nets = [opened(connect(running, f"w{rank}"), worker_count=2) for rank in range(2)]
    worker = Int8Worker(SIZE)
    for step in range(3):
        begun = nets[0].begin_exchange(gradient_of(0, step))
        begun.ready(0, SIZE)
        for _ in range(2):
            with pytest.raises(shardwell.WorkersMissingError):
                begun.finish(HASTY_S)
        nets[1].put_gradient(gradient_of(1, step))
        begun.finish()
        worker.sent(gradient_of(0, step))
        assert_bits(nets[0].residual, worker.residual)


def test_an_exchange_that_was_begun_and_left_is_nothing(cluster, connect) -> None:
    net, replay = opened(connect(cluster(2), "w0")), Replay()
    for step in range(3):
        begun = net.begin_exchange(gradient_of(9, step))
        begun.ready(0, SIZE // 2)
        del begun
        replay.step(gradient_of(0, step))
        net.exchange(gradient_of(0, step))
        replay.check(net)


# What a worker refuses itself.


@pytest.mark.parametrize("give", VERBS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_leaves_no_trace(cluster, connect, give, bad) -> None:
    net, replay = opened(connect(cluster(2), "w0")), Replay()
    for step in range(3):
        gradient = gradient_of(0, step)
        gradient[BLOCK + 7] = bad
        with pytest.raises(shardwell.NonFiniteError, match=f"element {BLOCK + 7}"):
            give(net, gradient)
        replay.step(gradient_of(0, step))
        give(net, gradient_of(0, step))
        replay.check(net)


def test_what_is_not_finite_can_be_mended_in_each_step(cluster, connect) -> None:
    """Also where something is added to the gradient, which is a copy then."""
    net, replay = opened(connect(cluster(2), "w0")), Replay()
    for step in range(3):
        gradient = gradient_of(0, step)
        gradient[BLOCK + 7] = np.nan
        begun = net.begin_exchange(gradient)
        begun.ready(0, SIZE)
        for _ in range(2):
            with pytest.raises(shardwell.NonFiniteError, match=f"element {BLOCK + 7}"):
                begun.finish()
        gradient[BLOCK + 7] = gradient_of(0, step)[BLOCK + 7]
        begun.finish()
        replay.step(gradient_of(0, step))
        replay.check(net)


# Another gradient, or none, after a part was counted.


def begun_in_part(net: Any, step: int) -> tuple[Float32, Float32]:
    """Has a part of a gradient counted, as a shard refuses another: its state would overflow.

    Returns what the worker had left before, and has left where this one was counted.
    """
    before = np.zeros(SIZE, np.float32) if net.residual is None else net.residual
    gradient = gradient_of(0, step)
    gradient[3 * BLOCK + 5] = 1e30
    with pytest.raises(shardwell.NonFiniteError, match="infinite for good"):
        net.exchange(gradient)
    assert net.next_step == step
    offered = gradient + before
    return before, offered - rounded(offered)


def test_another_gradient_takes_the_rest(cluster, connect) -> None:
    """The counted part of the first has taken the residual with it, and left its own."""
    net = opened(connect(cluster(3), "w0"), optimizer=shardwell.Adagrad(0.5))
    for step in range(4):
        before, first = begun_in_part(net, step)
        net.exchange(gradient_of(1, step))
        offered = gradient_of(1, step) + before
        assert_ranges(net.residual, net.outcome.superseded, first, offered - rounded(offered))


@pytest.mark.parametrize("end", ["abandon_step", "exchange"])
def test_no_gradient_takes_the_rest(cluster, connect, end: str) -> None:
    net = opened(connect(cluster(3), "w0"), optimizer=shardwell.Adagrad(0.5))
    for step in range(4):
        before, first = begun_in_part(net, step)
        if end == "exchange":
            net.exchange(None)
        else:
            assert net.abandon_step() == step
        assert_ranges(net.residual, net.outcome.superseded, first, before)


def test_of_two_gradients_before_it_is_unknown_which_was_counted(cluster, connect) -> None:
    """So nothing is kept there: half a rounding step may be lost, and nothing doubled."""
    net = opened(connect(cluster(3), "w0"), optimizer=shardwell.Adagrad(0.5))
    net.exchange(gradient_of(0, 0))
    before, _ = begun_in_part(net, 1)
    other = gradient_of(2, 1)
    other[3 * BLOCK + 5] = -1e30
    with pytest.raises(shardwell.NonFiniteError):
        net.exchange(other)
    net.exchange(gradient_of(1, 1))
    offered = gradient_of(1, 1) + before
    zeros = np.zeros(SIZE, np.float32)
    assert_ranges(net.residual, net.outcome.superseded, zeros, offered - rounded(offered))


def test_the_same_gradient_after_another_one_knows_which_was_counted(cluster, connect) -> None:
    """The first was counted in part; the second is tried twice, and cut off at first."""
    running = cluster(2, chunk_size_bytes=4096)
    with Proxy(running.addresses[1]) as proxy:
        target = f"{running.addresses[0]},{proxy.address}"
        net = opened(connect(target, "w0"), optimizer=shardwell.Adagrad(0.5))
        net.exchange(gradient_of(0, 0))
        before, first = begun_in_part(net, 1)
        proxy.cut_after(Direction.TO_SHARD, 4000)
        with pytest.raises(shardwell.ShardUnavailableError):
            net.exchange(gradient_of(1, 1), timeout_s=HASTY_S)
        proxy.accept()
        net.exchange(gradient_of(1, 1))
    offered = gradient_of(1, 1) + before
    assert_ranges(net.residual, net.outcome.superseded, first, offered - rounded(offered))


def test_a_step_that_is_abandoned_after_all_of_it_was_counted(cluster, connect) -> None:
    """As the answers were lost, or others were missing."""
    running = cluster(2)
    nets = [opened(connect(running, f"w{rank}"), worker_count=2) for rank in range(2)]
    worker = Int8Worker(SIZE)
    for step in range(3):
        with pytest.raises(shardwell.WorkersMissingError):
            nets[0].exchange(gradient_of(0, step), timeout_s=HASTY_S)
        assert nets[0].abandon_step() == step
        nets[1].exchange(gradient_of(1, step))
        worker.sent(gradient_of(0, step))
        assert_bits(nets[0].residual, worker.residual)


def test_a_step_that_is_abandoned_before_any_of_it_was_counted(cluster, connect) -> None:
    net, replay = opened(connect(cluster(2), "w0")), Replay()
    for step in range(0, 6, 2):
        replay.step(gradient_of(0, step))
        net.exchange(gradient_of(0, step))
        assert net.abandon_step() == step + 1
        assert_bits(net.residual, replay.worker.residual)


def test_a_worker_that_opens_again_behind_its_gradient(cluster, connect) -> None:
    """All of it was counted, and no answer came: it goes on at the next step."""
    running = cluster(2)
    nets = [opened(connect(running, f"w{rank}"), worker_count=2) for rank in range(2)]
    workers = [Int8Worker(SIZE) for _ in nets]
    weights = Int8Weights(np.zeros(SIZE, np.float32))
    for step in range(3):
        with pytest.raises(shardwell.WorkersMissingError):
            nets[0].exchange(gradient_of(0, step), timeout_s=HASTY_S)
        nets[0].reopen()
        assert nets[0].next_step == step + 1
        nets[1].exchange(gradient_of(1, step))
        sent = [each.sent(gradient_of(rank, step)) for rank, each in enumerate(workers)]
        mean = (sent[0] + sent[1]) / np.float32(2)
        expected = weights.update(sgd(RATE)(weights.weights, mean))
        for net, worker in zip(nets, workers, strict=True):
            assert_bits(net.get_weights(min_version=step + 1), expected)
            assert_bits(net.residual, worker.residual)


@pytest.mark.parametrize("give", [whole, in_pieces])
def test_a_step_that_diverged_is_counted_whole(cluster, connect, give: Give) -> None:
    net = opened(connect(cluster(3), "w0"), optimizer=shardwell.SGD(learning_rate=1e4))
    worker = Int8Worker(SIZE)
    for step in range(4):
        gradient = gradient_of(0, step)
        if step == 1:
            gradient[3 * BLOCK + 5] = 1e36
        if step < 1:
            give(net, gradient)
        else:
            with pytest.raises(shardwell.DivergedError, match=f"element {3 * BLOCK + 5}"):
                give(net, gradient)
        worker.sent(gradient)
        assert net.next_step == step + 1
        assert_bits(net.residual, worker.residual)


# Steps that close without a worker.


@pytest.mark.parametrize("late", ["drop", "carry"])
@pytest.mark.parametrize("give", VERBS)
def test_what_came_too_late(cluster, connect, late: str, give: Give) -> None:
    """Of a gradient that is dropped, what it had taken with it stays; else all is in the next."""
    running = cluster(2)
    fast, slow = (
        opened(connect(running, f"w{rank}"), worker_count=2, min_contributors=1, late=late)
        for rank in range(2)
    )
    give(slow, gradient_of(1, 0))
    replay = Replay()
    replay.step(gradient_of(1, 0))
    assert_bits(slow.residual, replay.worker.residual)
    for counted in ("none", "all"):
        fast.exchange(np.zeros(SIZE, np.float32))
        assert fast.outcome.counted == counted
    give(slow, gradient_of(1, 1))
    assert slow.outcome.counted == "none"
    if late == "drop":
        assert_bits(slow.residual, replay.worker.residual)
        following = gradient_of(1, 2)
    else:
        assert not slow.residual.any()
        offered = gradient_of(1, 1) + replay.worker.residual
        replay.worker.residual[:] = 0
        following = gradient_of(1, 2) + offered
    give(slow, gradient_of(1, 2))
    assert slow.outcome.counted == "all"
    replay.step(following)
    assert_bits(slow.residual, replay.worker.residual)
    np.testing.assert_allclose(
        slow.get_weights(min_version=slow.next_step), replay.weights.image, atol=0.05
    )


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_what_came_too_late_for_a_part(cluster, connect, late: str) -> None:
    running = cluster(2)
    *others, last = (
        opened(connect(running, f"w{rank}"), worker_count=3, min_contributors=2, late=late)
        for rank in range(3)
    )
    first = in_background(lambda: others[0].exchange(gradient_of(0, 0)))
    last.exchange(gradient_of(2, 0))
    first.result(60)
    others[1].exchange(gradient_of(1, 0))
    before = last.residual
    for net in others:
        transfer = net._transfer
        transfer.parts = transfer.parts[:1]
        net.put_gradient(gradient_of(1, 1))
    last.put_gradient(gradient_of(2, 1))
    offered = gradient_of(2, 1) + before
    kept = before if late == "drop" else np.zeros(SIZE, np.float32)
    assert_ranges(last.residual, last.outcome.late, kept, offered - rounded(offered))


def test_a_late_int8_gradient_may_have_counted_in_part(cluster, connect) -> None:
    """What counted of it has taken the residual with it, and has left its own."""
    running = cluster(3)
    fast, slow = (
        opened(
            connect(running, f"w{rank}"),
            optimizer=shardwell.Adagrad(0.5),
            worker_count=2,
            min_contributors=1,
        )
        for rank in range(2)
    )
    slow.exchange(gradient_of(1, 0))
    before, left = begun_in_part(slow, 1)
    while fast.next_step < 2:
        fast.exchange(np.zeros(SIZE, np.float32))
    slow.get_weights(min_version=2)
    assert slow.next_step == 2
    counted = [where for where, names in fast.contributions(1) if "w1" in names]
    slow.exchange(gradient_of(5, 2))
    assert slow.outcome.counted == "all"
    assert 0 < sum(where.size for where in counted) < SIZE
    for where in counted:
        before[where.offset : where.stop] = left[where.offset : where.stop]
    offered = gradient_of(5, 2) + before
    assert_bits(slow.residual, offered - rounded(offered))


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_elastic_members_come_and_go(cluster, connect, late: str) -> None:
    """What all have is what was given and counted, less what each has left."""
    running = cluster(2)
    nets = [
        opened(connect(running, f"w{rank}"), members=shardwell.Elastic(max_count=3), late=late)
        for rank in range(2)
    ]
    ended = threading.Event()
    given = np.zeros(SIZE, np.float64)

    def stay() -> None:
        """Gives nothing, and so takes nothing off."""
        while not ended.is_set():
            nets[0].exchange(np.zeros(SIZE, np.float32))

    def come_and_go() -> None:
        net = nets[1]
        try:
            for number in range(12):
                carried = net._feedback.carried
                net.exchange(gradient_of(1, number), sample_count=2**20)
                counted = {"all": 1, "none": 0}[net.outcome.counted]
                given[:] += counted * gradient_of(1, number).astype(np.float64)
                if counted and carried is not None and late == "carry":
                    given[:] += carried
                if number % 4 == 3:
                    net.leave()
        finally:
            ended.set()

    together([stay, come_and_go])
    left = nets[1].residual
    weights = connect(running, "reader").parameter("net").get_weights()
    assert_bits(weights, nets[0].get_weights())
    # The samples of the other are a millionth of the mean, and an image is off by half a step.
    np.testing.assert_allclose(weights, -RATE * (given - left), atol=0.02)
    assert np.abs(weights).max() > 1


# A worker that is started again in mid-step.


@pytest.mark.parametrize("same", [True, False])
def test_a_worker_that_is_started_again_in_mid_step(cluster, connect, same: bool) -> None:
    """It reads the weights before its step, and what its first process had counted stays so."""
    running = cluster(3)
    first = connect(running, "w0")
    net = opened(first, optimizer=shardwell.Adagrad(0.5))
    image = net.exchange(gradient_of(0, 0))
    before, left = begun_in_part(net, 1)
    first.close()
    again = opened(connect(running, "w0"), optimizer=shardwell.Adagrad(0.5))
    assert again.next_step == 1
    assert_bits(again.get_weights(min_version=1), image)
    reader = connect(running, "reader").parameter("net")
    assert (reader.get_weights() != image).any(), "no chunk has closed; the test can't fail"
    again.load_residual(before)
    gradient = gradient_of(0, 1) if same else gradient_of(1, 1)
    found = again.exchange(gradient)
    assert_bits(found, reader.get_weights(min_version=2))
    offered = gradient + before
    rest = offered - rounded(offered)
    superseded = again.outcome.superseded
    assert bool(superseded) != same
    if same:  # but for the part that was refused, and counts now
        assert_bits(again.residual, rest)
        assert_bits(left[: 3 * BLOCK], rest[: 3 * BLOCK])
    else:
        assert_ranges(again.residual, superseded, np.zeros(SIZE, np.float32), rest)
