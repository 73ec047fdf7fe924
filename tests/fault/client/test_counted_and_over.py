"""Goal: a gradient that the shards have counted is never said to be late, whatever has become of
its worker's tenure before the worker hears of it; what did not count is carried over once.

Method: a worker is cut off from a shard with its gradient counted, its tenure is ended, others go
on, the shard is killed; then the cable is mended, and the call goes on. Gradients are small
integers, so that a weight says which of them it has, and how often.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Proxy
from harness.polling import eventually
from harness.threads import in_background
from shardwell_server import LocalCluster

SIZE = 3072
"""Of which two shards have equal slices."""
CHUNKS_OF_A_SHARD = -(-SIZE // 2 // 64)
HASTY_S = 1.0
"""Of calls that are to fail."""


def full(value: float) -> np.ndarray:
    return np.full(SIZE, value, np.float32)


def opened(client: shardwell.Client, **options: Any) -> Any:
    options.setdefault("members", shardwell.Elastic())
    net = client.parameter(
        "net", size=SIZE, codec="fp32", optimizer=shardwell.SGD(learning_rate=1.0), **options
    )
    net.init(full(0.0))
    return net


@contextlib.contextmanager
def going_on(net: Any) -> Iterator[None]:
    """Another member makes steps of zeros; the block ends with its own member gone."""
    ended = threading.Event()

    def make_steps() -> None:
        while not ended.is_set():
            net.exchange(full(0.0))

    others = in_background(make_steps)
    try:
        yield
    finally:
        ended.set()
    others.result(60)


class CutOff:
    """Two shards, of which w0 reaches the second one through a cable that can be cut."""

    def __init__(self, running: LocalCluster, proxy: Proxy) -> None:
        self.running, self.proxy = running, proxy
        self.target = f"{running.addresses[0]},{proxy.address}"

    def await_counted(self, ops: shardwell.Client, name: str) -> None:
        """All shards have counted w0's gradient."""

        def look() -> bool:
            return any(m.worker_id == "w0" and m.next_step > 0 for m in ops.members(name))

        eventually("the gradient is counted", look)

    def lose(self, ops: shardwell.Client, name: str, *, kills: bool) -> None:
        """w0 is cut off from the second shard, which is killed if asked; its tenure ends."""
        self.proxy.cut(refuse=True)
        if kills:
            self.running.children[1].kill()
            self.running.start_again(1)
        ops.remove_member("w0", name)


@pytest.fixture
def cut_off(cluster, tmp_path) -> Iterator[CutOff]:
    with ExitStack() as stack:
        running = cluster(2, data_dir=tmp_path, processes=True)
        yield CutOff(running, stack.enter_context(Proxy(running.addresses[1])))


def whole(net: Any, value: float) -> None:
    net.exchange(full(value))


def in_pieces(net: Any, value: float) -> None:
    gradient = full(value)
    begun = net.begin_exchange(gradient)
    begun.ready(0, SIZE // 2)
    begun.ready(SIZE // 2, SIZE)
    begun.finish()


@pytest.mark.parametrize("give", [whole, in_pieces])
@pytest.mark.parametrize(("late", "kills", "steps"), [("carry", True, 1), ("drop", False, 4)])
def test_a_counted_gradient_is_not_late(
    cut_off: CutOff,
    connect,
    give: Callable[[Any, float], None],
    late: str,
    kills: bool,
    steps: int,
) -> None:
    ops = connect(cut_off.running, "ops")
    slow = opened(connect(cut_off.target, "w0"), late=late)
    fast = opened(connect(cut_off.running, "w1"))
    fast.join()
    given = in_background(lambda: give(slow, 1000.0))
    cut_off.await_counted(ops, "net")
    cut_off.lose(ops, "net", kills=kills)
    for _ in range(steps):
        fast.exchange(full(0.0))
    cut_off.proxy.accept()
    given.result(60)
    assert (slow.outcome.step, slow.outcome.counted) == (0, "all")
    assert slow.next_step == steps
    with going_on(fast):
        for _ in range(3):
            slow.exchange(full(0.0))
        slow.leave()
    assert set(fast.get_weights().tolist()) == {-500.0}


def test_a_counted_offer_is_not_kept(cut_off: CutOff, connect) -> None:
    """Else a learner offers its work again."""

    def learner(client: shardwell.Client) -> Any:
        return shardwell.Outer(
            client,
            "net",
            tensors={"w": (SIZE,)},
            sync_every=1,
            fragments=1,
            codec="fp32",
            outer=shardwell.SGD(1.0),
            members=shardwell.Elastic(),
        )

    ops = connect(cut_off.running, "ops")
    with (
        learner(connect(cut_off.target, "w0")) as slow,
        learner(connect(cut_off.running, "w1")) as fast,
    ):
        theirs = fast.init({"w": full(0.0)})
        mine = slow.init({"w": full(0.0)})
        ops.parameter("net.fragment-0")
        fast._fragments[0].parameter.join()
        mine["w"] = mine["w"] + np.float32(1000.0)
        given = in_background(lambda: slow.after_step(mine))
        cut_off.await_counted(ops, "net")
        cut_off.lose(ops, "net", kills=True)
        fast.after_step(theirs)
        cut_off.proxy.accept()
        changed = given.result(60)
        assert slow.kept_count == 0
        assert set(changed["w"].tolist()) == {500.0}


@pytest.mark.parametrize("kills", [False, True])
def test_counted_rows_are_not_late(cut_off: CutOff, connect, kills: bool) -> None:
    def table(client: shardwell.Client) -> Any:
        return client.table(
            "rows",
            row_count=100,
            dim=2,
            codec="fp32",
            initializer=shardwell.Zeros(),
            optimizer=shardwell.SGD(learning_rate=1.0),
            members=shardwell.Elastic(),
        )

    ids, zeros = np.arange(100), np.zeros((100, 2), np.float32)
    ops = connect(cut_off.running, "ops")
    slow, fast = table(connect(cut_off.target, "w0")), table(connect(cut_off.running, "w1"))
    fast.join()
    given = in_background(lambda: slow.exchange_rows(ids, zeros + 1000))
    cut_off.await_counted(ops, "rows")
    cut_off.lose(ops, "rows", kills=kills)
    fast.put_row_gradients(ids, zeros)
    cut_off.proxy.accept()
    given.result(60)
    assert slow.outcome.counted == "all"
    assert set(fast.get_rows(ids).ravel().tolist()) == {-500.0}


@pytest.mark.parametrize("kills", [False, True])
def test_what_a_failed_call_has_carried_is_not_carried_again(
    cluster, connect, tmp_path, kills: bool
) -> None:
    """The call waits in vain; its step closes with its gradient before the next one is given.

    A shard that is killed meanwhile does not know any more with which gradient.
    """
    running = cluster(2, data_dir=tmp_path, processes=True)
    slow, fast = opened(connect(running, "w0"), late="carry"), opened(connect(running, "w1"))
    slow.get_weights()
    fast.exchange(full(0.0))
    slow.put_gradient(full(100.0))
    assert slow.outcome.counted == "none"
    with pytest.raises(shardwell.WorkersMissingError):
        slow.exchange(full(10.0), timeout_s=HASTY_S)
    if kills:
        running.children[1].kill()
        running.start_again(1)
    given = 0
    with going_on(fast):
        slow.get_weights(min_version=slow.next_step + 1)
        while given == 0 or slow.outcome.counted != "all":
            slow.exchange(full(1.0))
            given += 1
        slow.leave()
    assert set(fast.get_weights().tolist()) == {-(110 + given) / 2}


@pytest.mark.parametrize(("first", "then"), [("drop", "carry"), ("carry", "drop")])
def test_who_opens_it_again_may_carry_or_not(cluster, connect, first: str, then: str) -> None:
    running = cluster(2)
    client, fast = connect(running, "w0"), opened(connect(running, "w1"))
    slow = opened(client, late=first)
    fast.exchange(full(0.0))
    if first == "carry":
        slow.put_gradient(full(100.0))
        assert slow.outcome.counted == "none"
    assert opened(client, late=then) is slow
    assert slow.late == then
    if first == "drop":
        slow.next_step = 0  # its weights are of then
        slow.put_gradient(full(10.0))
        assert slow.outcome.counted == "none"
    given = 0
    with going_on(fast):
        while given == 0 or slow.outcome.counted != "all":
            slow.exchange(full(1.0))
            given += 1
        slow.leave()
    weights = fast.get_weights()
    if then == "carry":
        assert set(weights.tolist()) == {-(10 + given) / 2}
    else:
        assert weights.min() >= -given / 2


def test_what_another_gradient_has_superseded_is_carried_over(cluster, connect) -> None:
    """A worker is started again in mid-step, and gives another gradient than its first process.

    That one has counted on the first shard alone.
    """
    running = cluster(2)
    fast = opened(connect(running, "w1"))
    with Proxy(running.addresses[1]) as proxy:
        first = connect(f"{running.addresses[0]},{proxy.address}", "w0")
        net = opened(first)
        fast.join()
        for each in (net, fast):
            each.put_gradient(full(0.0))
        net.get_weights(min_version=1)
        ops = connect(running, "ops")
        (member, _) = ops.members("net")
        before = member.counted_chunk_count
        proxy.stall()
        given = in_background(lambda: net.put_gradient(full(1000.0)))

        def look() -> bool:
            (found,) = [each for each in ops.members("net") if each.worker_id == "w0"]
            return found.counted_chunk_count == before + CHUNKS_OF_A_SHARD

        eventually("the first shard has counted it", look)
        proxy.cut(refuse=True)
        first.close()
        assert given.exception(60) is not None
    again = opened(connect(running, "w0"), late="carry")
    again.get_weights()
    again.put_gradient(full(8.0))
    assert again.outcome.counted == "part"
    assert again.outcome.superseded == (shardwell.Slice(0, SIZE // 2),)
    with going_on(fast):
        again.exchange(full(0.0))
        while again.outcome.counted != "all":
            again.exchange(full(0.0))
        again.leave()
    expected = full(-4.0)
    expected[: SIZE // 2] -= 500.0
    np.testing.assert_array_equal(fast.get_weights(), expected)
