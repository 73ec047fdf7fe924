"""Goal: outer training through real shards is torchft's, number by number.

Method: its published runs with two learners, each a thread; and its recovery, where the second
learner goes away after two outer steps and comes back under its name. torchft's newcomer does not
contribute to its first outer step, so it offers that with the weight 0 here.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.oracles.outer_training import (
    INNER_MOVE,
    LAYERS,
    OUTER_RATE,
    RECOVERY,
    RUNS,
    SYNC_EVERY,
    golden,
)
from harness.threads import together

ONES = {name: np.ones((1, 1), np.float32) for name in LAYERS}


class Replica:
    """One learner, and what it has seen."""

    def __init__(self, client: shardwell.Client, delay: int = 0, alpha: float = 0.0) -> None:
        self.outer = shardwell.Outer(
            client,
            "golden",
            tensors=ONES,
            outer=shardwell.SGD(OUTER_RATE),
            sync_every=SYNC_EVERY,
            fragments=2,
            overlap=delay,
            alpha=alpha,
            codec="fp32",
            worker_count=2,
        )
        self.weights = self.outer.init(ONES)
        self.local: dict[int, dict[str, float]] = {}
        self.shared = {0: _numbers(self.outer.image())}

    def run(self, step_count: int, *, counts_from: int = 0) -> None:
        """Inner steps; those before `counts_from` have the weight 0."""
        for number in range(step_count):
            self.local[number] = _numbers(self.weights)
            for array in self.weights.values():
                array -= INNER_MOVE
            versions = [each.version for each in self.outer.fragments]
            changed = self.outer.after_step(self.weights, int(number >= counts_from))
            self.weights.update(changed)
            if [each.version for each in self.outer.fragments] != versions:
                self.shared[number + 1] = _numbers(self.outer.image())


def _numbers(weights: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(array.item()) for name, array in weights.items()}


def assert_same(found: dict, expected: dict, *, from_step: int = 0) -> None:
    for step, weights in expected.items():
        if step >= from_step:
            assert found[step] == pytest.approx(weights, abs=1e-6), step


@pytest.mark.parametrize("run", RUNS)
def test_a_run_of_two_learners_is_the_published_one(cluster, connect, run: str) -> None:
    delay, alpha = RUNS[run]
    target, expected = cluster(2).target, golden(run)
    replicas = [Replica(connect(target, f"r{n}"), delay, alpha) for n in (0, 1)]
    count = len(expected[0].local)
    assert count > 2 * SYNC_EVERY
    together([lambda each=each: each.run(count) for each in replicas])
    for replica, published in zip(replicas, expected, strict=True):
        assert len(published.local) == count
        assert_same(replica.local, published.local)
        assert_same(replica.shared, published.shared)
        assert replica.outer.inner_step == count
        assert replica.outer.kept_count == replica.outer.overdue_count == 0


def test_a_learner_that_was_killed_comes_back_as_published(cluster, connect) -> None:
    target, expected = cluster(2).target, golden(RECOVERY)
    first, second = (Replica(connect(target, f"r{n}")) for n in (0, 1))
    count = len(expected[0].local)

    def dies_and_returns() -> Replica:
        second.run(SYNC_EVERY)  # two outer steps
        again = Replica(connect(target, "r1"))
        assert [each.version for each in again.outer.fragments] == [1, 1]
        again.run(len(expected[1].local), counts_from=SYNC_EVERY // 2)
        return again

    _, again = together([lambda: first.run(count), dies_and_returns])
    assert_same(first.local, expected[0].local)
    assert_same(first.shared, expected[0].shared)
    # Before its first outer step torchft's has first weights, and ours the newest.
    assert_same(again.local, expected[1].local, from_step=SYNC_EVERY // 2)
    assert_same(again.shared, expected[1].shared, from_step=SYNC_EVERY // 2)
