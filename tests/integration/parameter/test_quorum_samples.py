"""Goal: a worker of a fixed crew that is lost in mid-step has its samples counted once, or named.

Method: a chunk of the other shard than shard 0 has counted its gradient, and chunk 0 has not; then
another process of it, or all workers with other batches, go on. Weights count visits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.visit_plan import SIGN
from harness.inside import vanish
from harness.polling import eventually
from harness.threads import together

LENGTH = 40
COPIES = 4
"""A weight of each sample in each, so that two shards have two chunks each."""
GRACE_S = 2.0


def opened(client: shardwell.Client, late: Any) -> Any:
    net = client.parameter(
        "visits",
        size=COPIES * LENGTH,
        optimizer=SIGN,
        codec="fp32",
        worker_count=2,
        min_contributors=1,
        grace_s=GRACE_S,
        late=late,
    )
    net.init(np.zeros(net.size))
    return net


def visit(batch: shardwell.Batch) -> Any:
    gradient = np.zeros(LENGTH, np.float32)
    gradient[batch.indices] = -1.0
    return np.tile(gradient, COPIES)


def train(net: Any, samples: shardwell.Samples) -> None:
    for batch in net.batches(samples, epochs=1):
        net.exchange(visit(batch), batch=batch)
    net.close()


def lost_in_mid_step(connect: Any, running: Any, late: Any, samples: Any) -> shardwell.Batch:
    """The batch of a worker that has given its gradient to a chunk of the second shard alone."""
    client = connect(running, "w0")
    net = opened(client, late)
    batch: shardwell.Batch = next(net.batches(samples))
    begun = net.begin_exchange(visit(batch), batch=batch)
    begun.ready(net.slices[1].offset, net.size)  # of which the first chunk leaves
    ops = connect(running, "ops")
    eventually(
        "it has counted",
        lambda: sum(p.counted_chunk_count for s in ops.status() for p in s.parameters),
    )
    vanish(client)
    return batch


def visits(net: Any) -> Any:
    return net.get_weights().reshape(COPIES, LENGTH)


def check(net: Any, lost: shardwell.Batch) -> None:
    """No sample counted twice, and those in part are named: of one gradient."""
    account, found = net.samples["train"], visits(net)
    assert account.epoch == 1
    assert [each.ranges for each in account.partial] == [lost.ranges]
    expected = np.ones((COPIES, LENGTH))
    expected[:, lost.indices] = found[:, lost.indices]
    assert found.tolist() == expected.tolist()
    assert set(found[:, lost.indices].ravel()) == {0.0, 1.0}


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_what_others_closed_a_step_without_is_named_and_not_dealt_again(
    cluster: Any, connect: Any, late: Any
) -> None:
    running, samples = cluster(2), shardwell.Samples(LENGTH, 4)
    other = opened(connect(running, "w1"), "drop")
    own = next(other.batches(samples, epochs=1))
    lost = lost_in_mid_step(connect, running, "drop", samples)
    other.exchange(visit(own), batch=own)
    assert other.outcome.counted == "all"
    net = opened(connect(running, "w0"), late)
    together([partial(train, each, samples) for each in (net, other)])
    check(opened(connect(running, "w2"), "drop"), lost)


def test_what_is_given_again_counts_whole(cluster: Any, connect: Any) -> None:
    """The step that it was lost in is still open."""
    running, samples = cluster(2), shardwell.Samples(LENGTH, 4)
    lost = lost_in_mid_step(connect, running, "drop", samples)
    net = opened(connect(running, "w0"), "drop")
    assert net.next_step == 0
    batch = next(net.batches(samples, epochs=1))
    assert batch.ranges == lost.ranges
    net.exchange(visit(batch), batch=batch)
    assert net.outcome.counted == "all"
    assert net.samples["train"].partial_count == 0
    assert set(visits(net)[:, batch.indices].ravel()) == {1.0}


@pytest.mark.parametrize("late", ["drop", "carry"])
@pytest.mark.parametrize("gives", ["nothing", "more"])
def test_what_is_not_given_again_is_named(
    cluster: Any, connect: Any, gives: str, late: Any
) -> None:
    running, samples = cluster(2), shardwell.Samples(LENGTH, 4)
    lost = lost_in_mid_step(connect, running, "drop", samples)
    net = opened(connect(running, "w0"), late)
    dealt = net.batches(samples, epochs=1)
    batches = [next(dealt), next(dealt)]
    values = None if gives == "nothing" else sum(map(visit, batches))
    net.exchange(values, batch=batches)
    after = next(dealt)
    net.exchange(visit(after), batch=after)
    named = batches[0] if gives == "nothing" else batches[1]
    assert [each.ranges for each in net.samples["train"].partial] == [named.ranges]
    assert batches[0].ranges == lost.ranges
    assert visits(net).max() == 1.0


def test_what_was_given_in_part_is_named_before_others_are_dealt_in_another_way(
    cluster: Any, connect: Any
) -> None:
    running, samples = cluster(2), shardwell.Samples(LENGTH, 4)
    client = connect(running, "w1")
    first = opened(client, "drop")
    own = next(first.batches(samples, epochs=1))
    lost = lost_in_mid_step(connect, running, "drop", samples)
    first.exchange(visit(own), batch=own)
    client.close()
    nets = [opened(connect(running, name), "drop") for name in ("w1", "w0")]
    together([partial(train, net, shardwell.Samples(LENGTH, 3)) for net in nets])
    check(opened(connect(running, "w2"), "drop"), lost)
