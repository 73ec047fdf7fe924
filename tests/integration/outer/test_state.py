"""Goal: what a learner has saved counts once, however old it is when the learner goes on.

Method: as in test_outer.py: moves are small whole numbers and the outer rule is SGD of rate 1, so
that the image is the mean of the local weights. A learner that ends here without leaving is gone
as after kill -9: nothing but its state is left of it.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.threads import together

SHAPES = {"w": (5000,)}


def opened(
    client: shardwell.Client, first: float = 0.0, **options
) -> tuple[shardwell.Outer, dict[str, np.ndarray]]:
    plain = {"outer": shardwell.SGD(1.0), "codec": "fp32", "sync_every": 4, "fragments": 1}
    outer = shardwell.Outer(client, "net", tensors=SHAPES, **{**plain, **options})
    return outer, outer.init({"w": np.full(SHAPES["w"], first, np.float32)})


def loop(outer: shardwell.Outer, weights: dict[str, np.ndarray], by: float, count: int) -> None:
    for _ in range(count):
        weights["w"] += np.float32(by)
        weights.update(outer.after_step(weights))


def value(weights: dict[str, np.ndarray]) -> float:
    (found,) = np.unique(weights["w"])
    return float(found)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_was_offered_after_the_state_is_not_offered_again(cluster, connect, codec) -> None:
    """Three moves are saved, and are in the image as well, with a fourth."""
    target = cluster(2).target
    client = connect(target, "w0")
    outer, weights = opened(client, codec=codec)
    loop(outer, weights, 1.0, 3)
    state = outer.state_dict(weights)
    loop(outer, weights, 1.0, 3)
    assert outer.fragments[0].version == 1
    client.close()
    outer, weights = opened(connect(target, "w0"), codec=codec)
    image = outer.image()
    weights = outer.load_state_dict(state)
    assert outer.inner_step == 3
    assert np.array_equal(weights["w"], image["w"])
    assert np.allclose(weights["w"], 4.0, atol=0.05)


def test_what_was_not_offered_is_on_top_of_newer_weights(cluster, connect) -> None:
    """The others made two outer steps without this learner."""
    target = cluster(2).target
    members = {"members": shardwell.Elastic(min_count=1, max_count=4)}
    first, weights = opened(connect(target, "w0"), **members)
    client = connect(target, "w1")
    second, others = opened(client, **members)
    loop(second, others, 5.0, 3)
    state = second.state_dict(others)
    client.close()
    loop(first, weights, 1.0, 8)
    assert first.fragments[0].version == 2
    second, _ = opened(connect(target, "w1"), **members)
    assert value(second.load_state_dict(state)) == 8.0 + 15.0


def test_an_elastic_learner_s_offer_after_the_state_counts_once(cluster, connect) -> None:
    target = cluster(2).target
    members = {"members": shardwell.Elastic(min_count=1, max_count=4)}
    first, weights = opened(connect(target, "w0"), **members)
    client = connect(target, "w1")
    second, others = opened(client, **members)
    loop(second, others, 2.0, 3)
    state = second.state_dict(others)
    loop(second, others, 2.0, 1)  # offers 8, by itself
    assert (second.fragments[0].version, second.kept_count) == (1, 0)
    client.close()
    loop(first, weights, 1.0, 4)  # late, so that its 4 are kept
    loop(first, weights, 1.0, 4)
    newest = first.fragments[0].version
    assert newest > 1
    second, _ = opened(connect(target, "w1"), **members)
    assert value(second.load_state_dict(state)) == value(first.image())


def test_a_newcomer_s_weights_never_become_the_cluster_s(cluster, connect) -> None:
    """Not where all others are gone, either, and it is the only learner of the next outer step."""
    target = cluster(2).target
    members = {"members": shardwell.Elastic(min_count=1, max_count=4)}
    client = connect(target, "w0")
    outer, weights = opened(client, **members)
    loop(outer, weights, 1.0, 8)
    client.close()
    newcomer, weights = opened(connect(target, "w1"), 1e6, **members)
    assert value(weights) == 8.0
    loop(newcomer, weights, 2.0, 4)
    assert value(newcomer.image()) == value(weights) == 16.0


def test_a_state_older_than_what_shards_remember_adds_nothing(cluster, connect) -> None:
    target = cluster(2).target
    members = {"members": shardwell.Elastic(min_count=1, max_count=4)}
    client = connect(target, "w1")
    second, others = opened(client, **members)
    loop(second, others, 2.0, 3)
    state = second.state_dict(others)
    client.close()
    first, weights = opened(connect(target, "w0"), **members)
    loop(first, weights, 1.0, 4 * 17)
    second, _ = opened(connect(target, "w1"), **members)
    assert value(second.load_state_dict(state)) == 68.0


def test_a_damaged_version_is_refused(cluster, connect) -> None:
    outer, weights = opened(connect(cluster(1).target, "w0"))
    state = outer.state_dict(weights)
    state["fragments"][0]["version"] = -1
    with pytest.raises(shardwell.ArgumentError, match="version must be a whole number"):
        outer.load_state_dict(state)


def test_two_learners_of_a_fixed_crew(cluster, connect) -> None:
    """What one had saved is in the outer step that it joined before it was killed."""
    target = cluster(2).target
    first, weights = opened(connect(target, "w0"), worker_count=2)
    client = connect(target, "w1")
    second, others = opened(client, worker_count=2)
    loop(second, others, 3.0, 3)
    state = second.state_dict(others)
    together([lambda: loop(first, weights, 1.0, 4), lambda: loop(second, others, 3.0, 1)])
    assert value(weights) == value(others) == (4.0 + 12.0) / 2
    client.close()
    second, _ = opened(connect(target, "w1"), worker_count=2)
    others = second.load_state_dict(state)
    assert value(others) == 8.0
    together([lambda: loop(first, weights, 1.0, 4), lambda: loop(second, others, 1.0, 4)])
    assert value(weights) == value(others) == 12.0
