"""Goal: in outer training each sample counts once an epoch, in the offer that has its move.

Method: an inner step moves a sample's weight by the number of learners, and outer SGD of rate 1
takes the mean; so the image counts the visits, as small whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.inside import vanish
from harness.threads import together

LENGTH = 96
SAMPLES = shardwell.Samples(LENGTH, 4)
ELASTIC: dict[str, Any] = {
    "members": shardwell.Elastic(
        min_count=1, max_count=4, member_return_s=0.05, member_lease_s=0.5, reference_count=1
    )
}


def learner(client: shardwell.Client, **crew: Any) -> shardwell.Outer:
    return shardwell.Outer(
        client,
        "visits",
        tensors={"count": (LENGTH,)},
        outer=shardwell.SGD(1.0),
        codec="fp32",
        sync_every=3,
        fragments=1,
        **crew,
    )


def train(outer: shardwell.Outer, by: float, *, epochs: int, most: int | None = None) -> int:
    """Moves each sample that is dealt; returns how many batches were."""
    weights = outer.init({"count": np.zeros(LENGTH, np.float32)})
    count = 0
    for batch in outer.batches(SAMPLES, epochs=epochs):
        weights["count"][batch.indices] += np.float32(by)
        weights.update(outer.after_step(weights, 1, batch=batch))
        count += 1
        if count == most:
            break
    return count


def visits(connect: Callable[..., shardwell.Client], target: Any, **crew: Any) -> list[float]:
    outer = learner(connect(target, "reader"), **crew)
    found: list[float] = np.unique(outer.reload()["count"]).tolist()
    return found


def test_each_sample_counts_once_an_epoch_with_a_fixed_crew(cluster: Any, connect: Any) -> None:
    target = cluster(2)
    learners = [learner(connect(target, f"w{i}"), worker_count=2) for i in range(2)]
    counts = together([partial(train, one, 2.0, epochs=2) for one in learners])
    assert counts == [24, 24]  # of 4 samples each, and no batch is left behind the last offer
    assert visits(connect, target, worker_count=2) == [2.0]


@pytest.mark.parametrize("crew", [{"worker_count": 1}, ELASTIC], ids=["fixed", "elastic"])
@pytest.mark.parametrize("most", [3, 4, 5])
def test_a_lost_learners_moves_since_its_last_offer_are_dealt_again(
    cluster: Any, connect: Any, crew: dict[str, Any], most: int
) -> None:
    target = cluster(2)
    lost = connect(target, "w0")
    train(learner(lost, **crew), 1.0, epochs=2, most=most)
    vanish(lost)
    train(learner(connect(target, "w0"), **crew), 1.0, epochs=2)
    assert visits(connect, target, **crew) == [2.0]


def test_a_learner_whose_samples_were_dealt_to_others_gives_up_its_moves(
    cluster: Any, connect: Any
) -> None:
    target = cluster(1)
    client = connect(target, "w0")
    away = learner(client, **ELASTIC)
    weights = away.init({"count": np.zeros(LENGTH, np.float32)})
    dealt = away.batches(SAMPLES, epochs=2)
    for _ in range(2):
        batch = next(dealt)
        weights["count"][batch.indices] += np.float32(1.0)
        weights.update(away.after_step(weights, 1, batch=batch))
    client.remove_member("w0", "visits.fragment-0")
    train(learner(connect(target, "w1"), **ELASTIC), 1.0, epochs=1)
    batch = next(dealt)
    weights["count"][batch.indices] += np.float32(1.0)
    weights.update(away.after_step(weights, 1, batch=batch))
    image = away.image()["count"]
    assert np.array_equal(weights["count"], image)
    client.close()  # what it was dealt meanwhile is free again
    train(learner(connect(target, "w1"), **ELASTIC), 1.0, epochs=2)
    assert visits(connect, target, **ELASTIC) == [2.0]
