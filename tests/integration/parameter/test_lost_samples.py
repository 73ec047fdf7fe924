"""Goal: what a lost member had is dealt soon, and what a newcomer gives counts whole.

Method: a member vanishes with most of an epoch, and another trains on, in epochs without an end; or
one comes while shards close a step, one before the other. Weights count visits.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import shardwell
from harness.inside import vanish
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background

LENGTH = 40
COPIES = 4
"""A weight of each sample in each, so that two shards have two chunks each."""
SAMPLES = shardwell.Samples(LENGTH, 1)
LEASED_COUNT = 32
"""Batches that a call deals."""


def opened(client: shardwell.Client) -> Any:
    net = client.parameter(
        "visits",
        size=COPIES * LENGTH,
        optimizer=shardwell.SGD(lr=1.0),
        codec="fp32",
        members=shardwell.Elastic(
            min_count=1, reference_count=1, member_lease_s=0.5, member_return_s=0.1
        ),
    )
    net.init(np.zeros(net.size))
    return net


def visit(batch: shardwell.Batch) -> Any:
    gradient = np.zeros(LENGTH, np.float32)
    gradient[batch.indices] = -1.0
    return np.tile(gradient, COPIES)


def train(net: Any, most: int | None, epochs: int | None = None) -> None:
    for batch in itertools.islice(net.batches(SAMPLES, epochs=epochs), most):
        net.exchange(visit(batch), batch=batch)


def test_a_lost_members_samples_are_dealt_before_those_of_later_epochs(
    cluster: Any, connect: Any
) -> None:
    running = cluster(2)
    lost = connect(running, "w0")
    train(opened(lost), 1)
    vanish(lost)
    net = opened(connect(running, "w1"))
    # One lease until the other's tenure is over, another that ends it, then what was lost.
    train(net, 3 * LEASED_COUNT)
    assert net.samples["train"].epoch >= 1
    assert net.get_weights().min() >= 1.0


def test_a_newcomers_first_samples_count_in_a_step_that_all_shards_await_it_in(
    cluster: Any, connect: Any
) -> None:
    """Shard 0 has closed the step before it when its gradient comes; the other shard has not."""
    running = cluster(2)
    first, newcomer = (opened(connect(running, name)) for name in ("w0", "w1"))
    ops = connect(running, "ops")
    half = first.slices[0].stop
    own = next(first.batches(SAMPLES, epochs=1))
    begun = first.begin_exchange(visit(own), batch=own)
    its = next(newcomer.batches(SAMPLES, epochs=1))
    begun.ready(0, half)  # of which the first chunk leaves
    eventually("a shard has closed it", lambda: ops.status()[0].parameters[0].version_max == 1)
    newcomer.put_gradient(visit(its), batch=its)
    assert newcomer.outcome.counted == "none"
    begun.ready(half, first.size)
    begun.finish()
    both = [in_background(lambda net=net: train(net, None, 1)) for net in (first, newcomer)]
    for each in both:
        each.result(PATIENCE_S)
    assert first.samples["train"].partial_count == 0
    assert first.get_weights().tolist() == [1.0] * first.size
