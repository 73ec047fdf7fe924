"""Goal: pieces leave by shard, several at once, and no order of theirs makes a circle of waits.

Method: one worker of two begins a step, so that no answer can come, and the chunks that the shards
have counted are what has left. Nothing else can have brought them there.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwell
from harness.polling import BRIEF_S, eventually
from harness.threads import together
from shardwell.parameter.open_exchange import PIECES_AT_ONCE_MAX
from shardwell.placement.readiness import PIECE_COUNT_MAX
from shardwell.placement.slices import Slice

CHUNK = 256
CHUNK_COUNT = 32
"""Of a slice of two."""
SIZE = 2 * CHUNK * CHUNK_COUNT
PIECE = SIZE // PIECE_COUNT_MAX
"""Elements of the smallest piece: four chunks."""


def opened(client: shardwell.Client, name: str = "net", **options) -> shardwell.Parameter:
    options.setdefault("optimizer", shardwell.SGD(learning_rate=0.5, momentum=0.5))
    net = client.parameter(name, size=SIZE, codec="fp32", **options)
    net.init(np.zeros(SIZE, np.float32))
    return net


def gradient_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, SIZE).astype(np.float32)


def counted(client: shardwell.Client, name: str = "net") -> list[int]:
    """Chunks that each shard has counted, of all steps."""
    return [
        next(each.counted_chunk_count for each in shard.parameters if each.spec.name == name)
        for shard in client.status()
    ]


def parts(where: Slice, size: int) -> list[tuple[int, int]]:
    return [(first, first + size) for first in range(where.offset, where.stop, size)]


def test_a_shard_gets_its_piece_when_others_have_none(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=4 * CHUNK), "w0")
    net = opened(client, worker_count=2)
    begun = net.begin_exchange(gradient_of(1), timeout_s=BRIEF_S)
    first, second = net.slices
    begun.ready(second.offset, second.offset + PIECE)
    eventually("the second shard has it", lambda: counted(client) == [0, PIECE // CHUNK])
    begun.ready(first.offset, first.offset + 2 * PIECE)
    eventually(
        "the first has it, too", lambda: counted(client) == [2 * PIECE // CHUNK, PIECE // CHUNK]
    )
    assert begun.has_left
    assert net.next_step == 0


def test_several_pieces_leave_before_the_first_is_answered(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=4 * CHUNK)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    net, other = (opened(client, worker_count=2) for client in clients)
    gradient = gradient_of(1)
    begun = net.begin_exchange(gradient)
    first, second = net.slices
    for number, (start, stop) in enumerate(parts(first, PIECE)[:-1], 1):
        begun.ready(start, stop)
        has_left = min(number, PIECES_AT_ONCE_MAX) * PIECE // CHUNK
        eventually("it has left", lambda expected=has_left: counted(clients[0])[0] == expected)
    # Ready pieces wait, until the other worker lets pieces come through.
    for start, stop in parts(second, PIECE):
        begun.ready(start, stop)
    assert counted(clients[0]) == [PIECES_AT_ONCE_MAX * PIECE // CHUNK, 0]
    found, expected = together([lambda: begun.finish(), lambda: other.exchange(gradient)])
    alone = opened(clients[0], "alone").exchange(gradient)
    np.testing.assert_array_equal(found, alone)
    np.testing.assert_array_equal(expected, alone)
    assert net.outcome == shardwell.Outcome(step=0, size=SIZE, version=1)


def test_workers_whose_pieces_come_in_opposite_orders(cluster, connect) -> None:
    """Each has as many pieces under way as it may, and all wait for what the other has not begun:
    `finish` sends the rest beside them."""
    running = cluster(2, chunk_size_bytes=4 * CHUNK)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    nets = [opened(client, worker_count=2) for client in clients]
    for step in range(2):
        gradient = gradient_of(step)
        begun = [net.begin_exchange(gradient) for net in nets]
        for each, where in zip(begun, nets[0].slices, strict=True):
            for start, stop in parts(where, PIECE)[:-1]:
                each.ready(start, stop)
        stuck = 2 * step * CHUNK_COUNT + PIECES_AT_ONCE_MAX * PIECE // CHUNK
        eventually("both are stuck", lambda each=stuck: counted(clients[0]) == [each, each])
        one, two = together([each.finish for each in begun])
        np.testing.assert_array_equal(one, two)
    alone = opened(clients[0], "alone")
    for step in range(2):
        expected = alone.exchange(gradient_of(step))
    np.testing.assert_array_equal(one, expected)


def test_any_orders_of_two_workers_make_the_same_step(cluster, connect) -> None:
    running = cluster(3, chunk_size_bytes=4 * CHUNK)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    nets = [opened(client, worker_count=2) for client in clients]
    alone = opened(clients[0], "alone")
    everything = parts(Slice(0, SIZE), 3 * CHUNK)

    @settings(max_examples=15)
    @given(
        st.permutations(everything), st.permutations(everything), st.integers(0, len(everything))
    )
    def check(one: list[tuple[int, int]], two: list[tuple[int, int]], announced_count: int) -> None:
        gradient = gradient_of(alone.next_step)

        def work(net: shardwell.Parameter, order: list[tuple[int, int]]) -> np.ndarray:
            begun = net.begin_exchange(gradient)
            for start, stop in order[:announced_count]:
                begun.ready(start, min(stop, SIZE))
            return begun.finish()

        found = together([lambda: work(nets[0], one), lambda: work(nets[1], two)])
        expected = alone.exchange(gradient)
        for each in found:
            np.testing.assert_array_equal(each, expected)
        assert [net.version for net in nets] == [alone.version] * 2

    check()


def test_other_calls_in_turn_wait_for_all_pieces(cluster, connect) -> None:
    """A rate for the next step must not come between two pieces of this one."""
    running = cluster(2, chunk_size_bytes=4 * CHUNK)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    net, other = (opened(client, worker_count=2) for client in clients)
    gradient = gradient_of(1)
    begun = net.begin_exchange(gradient)
    for start, stop in parts(net.slices[0], PIECE)[:2]:
        begun.ready(start, stop)
    eventually("two have left", lambda: counted(clients[0])[0] == 2 * PIECE // CHUNK)
    with pytest.raises(shardwell.DeadlineError, match="another thread's call"):
        net.set_learning_rate(0.25, timeout_s=0.3)
    together([begun.finish, lambda: other.exchange(gradient)])
    net.set_learning_rate(0.25)
    assert net.next_step == 1


def test_a_failed_piece_is_sent_again_with_those_behind_it(cluster, connect) -> None:
    """Exactly once: what was counted before counts with the same values."""
    client = connect(cluster(2, chunk_size_bytes=4 * CHUNK), "w0")
    net, whole = opened(client), opened(client, "whole")
    gradient = gradient_of(1)
    gradient[3] = np.nan
    begun = net.begin_exchange(gradient)
    begun.ready(PIECE, 2 * PIECE)  # nothing: what lies before it is missing
    begun.ready(SIZE // 2, SIZE // 2 + PIECE)
    eventually("it is counted", lambda: counted(client)[1] == PIECE // CHUNK)
    begun.ready(0, PIECE)
    with pytest.raises(shardwell.NonFiniteError, match="element 3"):
        begun.finish()
    gradient[3] = 1.0
    mended = gradient_of(1)
    mended[3] = 1.0
    np.testing.assert_array_equal(begun.finish(), whole.exchange(mended))
    assert net.outcome == shardwell.Outcome(step=0, size=SIZE, version=1)
    np.testing.assert_array_equal(net.exchange(gradient_of(2)), whole.exchange(gradient_of(2)))
