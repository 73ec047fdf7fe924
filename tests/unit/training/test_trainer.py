"""Goal: many workers train to what one would, hold the same bits, and fail with a reason.

Method: softmax regression on real digits by threads that synchronise with ThreadedSync, beside one
worker and beside the optimizers' formulas in float64; workers with unequally many shares in a group
of threads (harness/group/thread_group.py).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.softmax import WEIGHTS_SHAPE, accuracy, batches, gradient_of
from harness.group.thread_group import ThreadGroups
from harness.oracles.optimizers import OPTIMIZERS, Oracle
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.threads import in_background, together
from shardwell import DataParallelTrainer, GradientSync, GroupSync, LocalSync, ThreadedSync

SGD = shardwell.SGD(learning_rate=0.5, momentum=0.9)
ZEROS = np.zeros(WEIGHTS_SHAPE, np.float32)


def one_worker(optimizer: shardwell.Optimizer, given: list[Any]) -> tuple[np.ndarray, list[float]]:
    trainer = DataParallelTrainer(gradient_of, ZEROS, optimizer)
    return trainer.weights, [trainer.step(batch).loss for batch in given]


@pytest.mark.parametrize("micro_batch_size", [None, 7])
@pytest.mark.parametrize("worker_count", [1, 2, 3, 4])
def test_threads_train_to_what_one_worker_does(
    worker_count: int, micro_batch_size: int | None
) -> None:
    """Batches of 50 do not divide by 3 or 4, so shares are unequal."""
    given = batches(50, 30)
    expected, losses = one_worker(SGD, given)
    sync = ThreadedSync(worker_count)

    def work(rank: int) -> tuple[np.ndarray, list[shardwell.StepResult]]:
        trainer = DataParallelTrainer(
            gradient_of, ZEROS, SGD, sync, rank=rank, micro_batch_size=micro_batch_size
        )
        return trainer.weights, [trainer.step(batch) for batch in given]

    results = together([lambda rank=rank: work(rank) for rank in range(worker_count)])
    for weights, steps in results:
        np.testing.assert_array_equal(weights, results[0][0])
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-4)
        assert [step.step for step in steps] == list(range(30))
        assert [step.loss for step in steps] == [step.loss for step in results[0][1]]
        np.testing.assert_allclose([step.loss for step in steps], losses, rtol=1e-4)
    assert sum(steps[0].sample_count for _, steps in results) == 50
    assert accuracy(results[0][0]) > 0.85
    assert not ZEROS.any()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "average" not in name])
def test_every_optimizer_is_applied_as_its_formula_says(name: str) -> None:
    optimizer, random = OPTIMIZERS[name], np.random.default_rng(1)
    gradients = random.standard_normal((20, 33)).astype(np.float32)
    weights = random.standard_normal(33).astype(np.float32)
    trainer = DataParallelTrainer(lambda _, batch: (0.5, gradients[batch[0]]), weights, optimizer)
    oracle = Oracle(optimizer, weights)
    rate = trainer.learning_rate
    for index in range(20):
        if index == 10:
            trainer.learning_rate = rate = rate / 2
        assert trainer.step([index]).loss == 0.5
        oracle.update(gradients[index], rate)
    np.testing.assert_allclose(trainer.weights, oracle.weights, rtol=1e-4, atol=1e-5)
    assert trainer.next_step == 20


def test_the_mean_is_clipped_by_its_norm() -> None:
    """As torch's clip_grad_norm_ does; squares are added exactly."""
    gradients = np.random.default_rng(1).standard_normal((2, 9000)).astype(np.float32)
    gradients[1] *= 1e-3  # short enough
    rule, first = shardwell.SGD(learning_rate=1.0, clip_norm=2.0), np.zeros(9000, np.float32)
    trainer = DataParallelTrainer(lambda _, batch: (0.5, gradients[batch[0]]), first, rule)
    want = first
    for index, gradient in enumerate(gradients):
        trainer.step([index])
        norm = math.sqrt(math.fsum(float(each) ** 2 for each in gradient.tolist()))
        want = want - gradient * np.float32(min(1.0, 2.0 / (norm + 1e-6)))
        np.testing.assert_array_equal(trainer.weights, want)


@pytest.mark.parametrize("optimizer", [SGD, shardwell.Adam(), shardwell.Adagrad(learning_rate=0.1)])
def test_a_worker_with_an_empty_share_updates_like_the_others(
    optimizer: shardwell.Optimizer,
) -> None:
    sync, given = ThreadedSync(3), batches(2, 5)

    def work(rank: int) -> tuple[np.ndarray, int]:
        trainer = DataParallelTrainer(gradient_of, ZEROS, optimizer, sync, rank=rank)
        return trainer.weights, sum(trainer.step(batch).sample_count for batch in given)

    results = together([lambda rank=rank: work(rank) for rank in range(3)])
    assert [count for _, count in results] == [5, 5, 0]
    for weights, _ in results:
        np.testing.assert_array_equal(weights, results[0][0])
        assert weights.any()


def test_ranks_of_trainers_are_the_seats_of_their_threads() -> None:
    """The last rank comes first: without its seat it would get the lowest."""
    sync, given = ThreadedSync(3), batches(6, 1)

    def work(rank: int) -> None:
        trainer = DataParallelTrainer(gradient_of, ZEROS, SGD, sync, rank=rank)
        assert trainer.fit(given) == 1
        assert sync.rank == rank

    early = []
    for rank in (2, 1):
        early.append(in_background(lambda rank=rank: work(rank)))
        eventually("it waits", lambda: len(sync._under_way) == len(early))
    work(0)
    for future in early:
        future.result(PATIENCE_S)


@pytest.mark.parametrize("share_counts", [(6, 6), (6, 2), (1, 5, 3), (0, 4), (0, 0)])
def test_workers_with_fewer_shares_end_with_the_others_bits(share_counts: tuple[int, ...]) -> None:
    groups, given = ThreadGroups(len(share_counts)), batches(20, 6)
    optimizer = shardwell.Adam(learning_rate=0.01)

    def work(rank: int) -> tuple[DataParallelTrainer, list[int]]:
        group = groups.member(rank)
        trainer = DataParallelTrainer(gradient_of, ZEROS, optimizer, GroupSync(group))
        assert trainer.rank == rank
        steps: list[int] = []

        def noted(result: shardwell.StepResult) -> None:
            steps.append(result.step)
            trainer.learning_rate = 0.01 / (result.step + 2)

        assert trainer.fit(given[: share_counts[rank]], on_step=noted) == share_counts[rank]
        assert group.codecs == ["fp32"] * 3
        for batch in given[:2]:  # all go on together
            trainer.step(batch)
        return trainer, steps

    results = together([lambda rank=rank: work(rank) for rank in range(len(share_counts))])
    longest = max(share_counts)
    for (trainer, steps), count in zip(results, share_counts, strict=True):
        assert steps == list(range(count))
        assert trainer.next_step == longest + 2
        assert trainer.learning_rate == results[0][0].learning_rate
        np.testing.assert_array_equal(trainer.weights, results[0][0].weights)
    if longest:
        assert results[0][0].learning_rate == 0.01 / (longest + 1)


def test_unequal_shares_among_threads_end_at_the_deadline() -> None:
    sync, given = ThreadedSync(2, timeout_s=BRIEF_S), batches(20, 3)

    def work(rank: int) -> BaseException | None:
        trainer = DataParallelTrainer(gradient_of, ZEROS, SGD, sync, rank=rank)
        try:
            trainer.fit(given[: 3 - rank])
        except shardwell.ShardwellError as error:
            assert trainer.next_step == 2
            return error
        return None

    error, nothing = together([lambda: work(0), lambda: work(1)])
    assert nothing is None
    assert isinstance(error, shardwell.WorkersMissingError)
    assert error.missing_ranks == (1,)


def test_a_step_that_failed_changed_nothing_and_can_be_made_again() -> None:
    bad = [True]
    given = batches(20, 2)

    def sometimes(weights: np.ndarray, batch: Any) -> tuple[float, np.ndarray]:
        loss, gradient = gradient_of(weights, batch)
        if bad:
            gradient[3, 4] = np.nan
        return loss, gradient

    trainer = DataParallelTrainer(sometimes, ZEROS, SGD)
    with pytest.raises(shardwell.NonFiniteError, match="gradient of rank 0 at step 0 is nan at el"):
        trainer.step(given[0])
    assert trainer.next_step == 0
    assert not trainer.weights.any()
    bad.clear()
    losses = [trainer.step(batch).loss for batch in given]
    expected, expected_losses = one_worker(SGD, given)
    np.testing.assert_array_equal(trainer.weights, expected)
    assert losses == expected_losses


@pytest.mark.parametrize(
    ("result", "error", "reason"),
    [
        ((0.0, np.ones(4, np.float32)), shardwell.ArgumentError, "step 0 must have 3 elements"),
        ((0.0, np.ones(3, np.int64)), shardwell.ArgumentError, "step 0 must be float32"),
        ((0.0, ["1"] * 3), shardwell.ArgumentError, "gradient of rank 0 at step 0 must be"),
        ((0.0, np.full(3, 1e300)), shardwell.NonFiniteError, "1e\\+300 at element 0"),
        ((float("nan"), np.ones(3)), shardwell.NonFiniteError, "loss of rank 0 at step 0 is nan"),
        ((1e300, np.ones(3)), shardwell.NonFiniteError, "loss of rank 0 at step 0 is 1e\\+300"),
    ],
)
def test_what_a_gradient_function_returns_is_checked(
    result: Any, error: type[Exception], reason: str
) -> None:
    trainer = DataParallelTrainer(lambda weights, batch: result, np.zeros(3, np.float32), SGD)
    with pytest.raises(error, match=reason):
        trainer.step([1])


def test_arguments_that_can_not_be_are_refused() -> None:
    weights = np.zeros(3, np.float32)
    with pytest.raises(shardwell.ArgumentError, match="optimizer must be one of"):
        DataParallelTrainer(gradient_of, weights, shardwell.Average())
    with pytest.raises(shardwell.ArgumentError, match="at least 1 element"):
        DataParallelTrainer(gradient_of, weights[:0], SGD)
    with pytest.raises(shardwell.NonFiniteError, match="element 1 is inf"):
        DataParallelTrainer(gradient_of, np.array([0, np.inf]), SGD)
    with pytest.raises(shardwell.ArgumentError, match="rank must be an integer from 0 to 1"):
        DataParallelTrainer(gradient_of, weights, SGD, ThreadedSync(2), rank=2)
    with pytest.raises(shardwell.ArgumentError, match="micro_batch_size"):
        DataParallelTrainer(gradient_of, weights, SGD, micro_batch_size=0)
    trainer = DataParallelTrainer(gradient_of, weights, SGD)
    with pytest.raises(shardwell.ArgumentError, match="at least 1 sample; got 0"):
        trainer.step([])
    with pytest.raises(shardwell.ArgumentError, match="learning_rate"):
        trainer.learning_rate = -1.0
    member = ThreadGroups(2).member(1)
    other = DataParallelTrainer(gradient_of, weights, SGD, GroupSync(member), rank=0)
    with pytest.raises(shardwell.ArgumentError, match="rank=0 was given, but the sync's is 1"):
        other.step([1, 2])


def test_one_worker_alone() -> None:
    sync, array = LocalSync(), np.arange(6, dtype=np.float32).reshape(2, 3)
    sync.sync_gradients(array, sample_count=7)
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])
    assert (sync.is_distributed, sync.worker_count, sync.rank) == (False, 1, 0)
    for bad in (np.ones(3), np.ones(4, np.float32)[::2], [1.0], np.frombuffer(bytes(8), "f4")):
        with pytest.raises(shardwell.ArgumentError, match="array must be a writable C-contiguous"):
            sync.sync_gradients(bad)
    with pytest.raises(shardwell.ArgumentError, match="sample_count"):
        sync.sync_gradients(array, sample_count=-1)
    array[1, 1] = np.inf
    with pytest.raises(shardwell.NonFiniteError, match="element 4 is inf") as caught:
        sync.sync_gradients(array)
    assert (caught.value.element_index, caught.value.rank) == (4, 0)
    LocalSync(allow_non_finite=True).sync_gradients(array)
    sync.sync_gradients(array, sample_count=0)
    assert not array.any()


@pytest.mark.parametrize(
    "sync", [LocalSync(), ThreadedSync(2), GroupSync(ThreadGroups(2).member(0))]
)
def test_each_is_a_gradient_sync(sync: Any) -> None:
    assert isinstance(sync, GradientSync)
    assert sync.is_distributed == (sync.worker_count > 1)
