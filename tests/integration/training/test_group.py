"""Goal: a trainer on a real group trains what one worker alone does, and all ranks end alike.

Method: linear regression with an exact answer; each rank is a thread with a server of its own, and
the oracle is plain NumPy in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell
from harness.group.ranks import STRATEGIES, on_ranks
from harness.polling import PATIENCE_S

SIZE, SAMPLES, STEPS, RATE = 12, 30, 25, 0.05
RNG = np.random.default_rng(7)
INPUTS = [RNG.standard_normal((SAMPLES, SIZE)) for _ in range(STEPS)]
ANSWER = RNG.standard_normal(SIZE)


@pytest.fixture
def place(cluster) -> str:
    return cluster(1).target


def loss_and_gradient(weights: Any, inputs: Any) -> tuple[float, Any]:
    errors = inputs @ weights - inputs @ ANSWER
    return float((errors**2).mean()), 2 * inputs.T @ errors / len(inputs)


def expected() -> np.ndarray:
    weights = np.zeros(SIZE)
    for inputs in INPUTS:
        weights -= RATE * loss_and_gradient(weights, inputs)[1]
    return weights


def trainer_of(group: shardwell.Group) -> shardwell.DataParallelTrainer:
    return shardwell.DataParallelTrainer(
        loss_and_gradient,
        np.zeros(SIZE, np.float32),
        shardwell.SGD(learning_rate=RATE),
        shardwell.GroupSync(group),
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_shares_of_a_batch_make_the_whole_batch_s_step(place, strategy, size) -> None:
    def train(group: shardwell.Group) -> tuple[np.ndarray, list[float]]:
        trainer = trainer_of(group)
        losses = [trainer.step(inputs).loss for inputs in INPUTS]
        return trainer.weights.copy(), losses

    results = on_ranks(size, place, train, strategy=strategy, codec="fp32")
    for weights, losses in results:
        np.testing.assert_array_equal(weights, results[0][0])
        assert losses == results[0][1]
        np.testing.assert_allclose(weights, expected(), rtol=1e-4, atol=1e-5)


def test_ranks_with_fewer_batches_leave_and_all_end_alike(place) -> None:
    counts = (3, 10, 7)

    def train(group: shardwell.Group) -> tuple[np.ndarray, int, int]:
        trainer = trainer_of(group)
        made = trainer.fit(INPUTS[index] for index in range(counts[group.rank]))
        sum_of_ones = np.ones(5, np.float32)
        group.all_reduce(sum_of_ones)  # all take part again
        assert sum_of_ones[0] == 3
        return trainer.weights.copy(), made, trainer.next_step

    results = on_ranks(3, place, train)
    assert tuple(made for _, made, _ in results) == counts
    for weights, _, next_step in results:
        assert next_step == max(counts)
        np.testing.assert_array_equal(weights, results[0][0])


def test_a_gradient_that_is_not_finite_is_every_rank_s_error_at_once(place) -> None:
    def train(group: shardwell.Group) -> np.ndarray:
        trainer = trainer_of(group)
        trainer.step(INPUTS[0])
        before = trainer.weights.copy()
        spoilt = INPUTS[1].copy()
        if group.rank == 1:
            spoilt[:] = np.nan
        with pytest.raises(shardwell.NonFiniteError, match="rank 1"):
            trainer.step(spoilt)
        np.testing.assert_array_equal(trainer.weights, before)
        trainer.step(INPUTS[1])
        return trainer.weights.copy()

    first, *others = on_ranks(3, place, train, timeout_s=PATIENCE_S)
    for weights in others:
        np.testing.assert_array_equal(weights, first)


def test_the_loop_is_the_same_with_every_sync(place) -> None:
    def train(sync: shardwell.GradientSync, rank: int, size: int) -> np.ndarray:
        weights = np.zeros(SIZE, np.float32)
        for inputs in INPUTS:
            share = shardwell.split_batch(inputs, size)[rank]
            gradient = loss_and_gradient(weights, share)[1].astype(np.float32)
            sync.sync_gradients(gradient, sample_count=len(share))
            weights -= np.float32(RATE) * gradient
        return weights

    size = 3
    found = [train(shardwell.LocalSync(), 0, 1)]
    found += on_ranks(
        size,
        place,
        lambda group: train(shardwell.GroupSync(group), group.rank, size),
        codec="fp32",
    )
    for weights in found:
        np.testing.assert_allclose(weights, expected(), rtol=1e-4, atol=1e-5)


def test_who_has_made_fewer_steps_takes_the_others_weights(place) -> None:
    """As after a rebuild: one lacks the last step, and a new worker, which comes last, all."""
    made = {0: 2, 1: 3, 2: 0}

    def train(group: shardwell.Group) -> tuple[int, float, np.ndarray]:
        trainer = trainer_of(group)
        trainer.sync = shardwell.LocalSync()
        trainer.learning_rate = RATE / (group.rank + 1)
        for inputs in INPUTS[: made[group.rank]]:
            trainer.step(inputs)
        trainer.sync = shardwell.GroupSync(group)
        if group.rank == 2:
            group.barrier()  # without the others, so after their join
        assert trainer.fit(()) == 0
        return trainer.next_step, trainer.learning_rate, trainer.weights.copy()

    results = on_ranks(3, place, train, codec="fp16")
    for step, rate, weights in results:
        assert (step, rate) == (3, RATE / 2)
        np.testing.assert_array_equal(weights, results[1][2])
        assert weights.any()
