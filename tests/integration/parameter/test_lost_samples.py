"""Goal: what a lost member had is dealt soon, and not only where nothing else is left to deal.

Method: a member vanishes with most of an epoch, and another trains on, in epochs without an end.
Weights count visits.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import shardwell
from harness.inside import vanish

LENGTH = 40
SAMPLES = shardwell.Samples(LENGTH, 1)
LEASED_COUNT = 32
"""Batches that a call deals."""


def opened(client: shardwell.Client) -> Any:
    net = client.parameter(
        "visits",
        size=LENGTH,
        optimizer=shardwell.SGD(lr=1.0),
        codec="fp32",
        members=shardwell.Elastic(
            min_count=1, reference_count=1, member_lease_s=0.5, member_return_s=0.1
        ),
    )
    net.init(np.zeros(LENGTH))
    return net


def train(net: Any, most: int) -> None:
    for batch in itertools.islice(net.batches(SAMPLES), most):
        gradient = np.zeros(LENGTH)
        gradient[batch.indices] = -1.0
        net.exchange(gradient, batch=batch)


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
