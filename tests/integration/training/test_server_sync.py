"""Goal: shards can be the way in which gradients are synchronised, and a trainer does not notice.

Method: several clients of a real cluster on threads; integers whose means are exact, then digits
beside one worker that trains alone.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.data.softmax import WEIGHTS_SHAPE, accuracy, batches, gradient_of
from harness.oracles.parameter import integer_gradient
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch
from harness.threads import in_background, together
from shardwell import DataParallelTrainer, GradientSync, ServerSync

AVERAGE = shardwell.Average()
SGD = shardwell.SGD(learning_rate=0.5, momentum=0.9)


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
@pytest.mark.parametrize(("worker_count", "shard_count"), [(1, 2), (2, 1), (4, 3)])
def test_arrays_become_their_mean(cluster, connect, codec, worker_count, shard_count) -> None:
    running, shape = cluster(shard_count, chunk_size_bytes=64), (11, 13)

    def work(index: int) -> list[np.ndarray]:
        parameter = connect(running, f"w{index}").parameter(
            "mean", size=143, optimizer=AVERAGE, worker_count=worker_count, codec=codec
        )
        sync = ServerSync(parameter)
        assert isinstance(sync, GradientSync)
        assert (sync.is_distributed, sync.worker_count) == (worker_count > 1, worker_count)
        arrays = [integer_gradient(index, step, 143).reshape(shape) for step in range(4)]
        for step, array in enumerate(arrays):
            sync.sync_gradients(array, sample_count=0 if step == 3 else 5)
        return arrays

    results = together([lambda index=index: work(index) for index in range(worker_count)])
    for step in range(3):
        mean = sum(integer_gradient(index, step, 143) for index in range(worker_count))
        for arrays in results:
            np.testing.assert_array_equal(arrays[step], (mean / worker_count).reshape(shape))
    for arrays in results:
        assert not arrays[3].any()


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_workers_train_to_what_one_does(cluster, connect, codec) -> None:
    """fp16 rounds gradients and the loss to 11 bits; the weights stay near."""
    running, given, worker_count = cluster(2, chunk_size_bytes=1024), batches(50, 30), 3
    alone = DataParallelTrainer(gradient_of, np.zeros(WEIGHTS_SHAPE, np.float32), SGD)
    losses = [alone.step(batch).loss for batch in given]

    def work(rank: int) -> tuple[np.ndarray, list[float]]:
        weights = np.zeros(WEIGHTS_SHAPE, np.float32)
        parameter = connect(running, f"w{rank}").parameter(
            "sync", size=weights.size + 1, optimizer=AVERAGE, worker_count=worker_count, codec=codec
        )
        trainer = DataParallelTrainer(gradient_of, weights, SGD, ServerSync(parameter), rank=rank)
        return trainer.weights, [trainer.step(batch).loss for batch in given]

    results = together([lambda rank=rank: work(rank) for rank in range(worker_count)])
    tolerance = {"fp32": 1e-4, "fp16": 2e-2}[codec]
    for weights, found in results:
        np.testing.assert_array_equal(weights, results[0][0])
        assert found == results[0][1]
        np.testing.assert_allclose(weights, alone.weights, rtol=0, atol=tolerance)
        np.testing.assert_allclose(found, losses, rtol=tolerance, atol=tolerance)
    assert accuracy(results[0][0]) > 0.85


def test_a_worker_that_has_no_more_batches_is_missed(cluster, connect) -> None:
    running, given = cluster(1), batches(20, 3)
    missed = shardwell.WorkersMissingError

    def work(rank: int) -> tuple[BaseException | None, DataParallelTrainer]:
        weights = np.zeros(WEIGHTS_SHAPE, np.float32)
        parameter = connect(running, f"w{rank}").parameter(
            "sync", size=weights.size + 1, optimizer=AVERAGE, worker_count=2
        )
        sync = ServerSync(parameter, timeout_s=BRIEF_S)
        trainer = DataParallelTrainer(gradient_of, weights, SGD, sync, rank=rank)
        try:
            trainer.fit(given[: 3 - rank])
        except missed as error:
            return error, trainer
        return None, trainer

    (error, longer), (nothing, shorter) = together([lambda: work(0), lambda: work(1)])
    assert nothing is None
    assert isinstance(error, missed)
    assert error.missing_worker_ids == ("w1",)
    assert longer.next_step == 2
    np.testing.assert_array_equal(longer.weights, shorter.weights)
    # The step is still open: with both there it goes on, and counts once.
    late = in_background(lambda: shorter.step_share(given[0]))
    result = longer.step_share(given[2])
    assert result.step == late.result(PATIENCE_S).step == 2
    np.testing.assert_array_equal(longer.weights, shorter.weights)


def test_an_array_is_as_it_was_when_the_others_did_not_come(cluster, connect) -> None:
    running = cluster(1)
    parameters = [
        connect(running, f"w{index}").parameter(
            "mean", size=9, optimizer=AVERAGE, worker_count=2, codec="fp32"
        )
        for index in range(2)
    ]
    array = np.arange(9, dtype=np.float32)
    sync = ServerSync(parameters[0], timeout_s=BRIEF_S)
    watch = Stopwatch()
    with pytest.raises(shardwell.WorkersMissingError):
        sync.sync_gradients(array)
    assert watch.elapsed_s < PATIENCE_S  # the client's own is longer
    np.testing.assert_array_equal(array, np.arange(9))
    other = np.ones(9, np.float32)
    waiting = in_background(lambda: ServerSync(parameters[1]).sync_gradients(other))
    sync.sync_gradients(array)
    waiting.result(PATIENCE_S)
    np.testing.assert_array_equal(array, (np.arange(9) + 1) / 2)
    np.testing.assert_array_equal(array, other)


def test_parameters_that_can_not_synchronise_are_refused(cluster, connect) -> None:
    client, weights = connect(cluster(1), "w0"), np.zeros(9, np.float32)
    model = client.parameter("model", size=10, optimizer=SGD)
    with pytest.raises(shardwell.ArgumentError, match=r"'model' has SGD and mode='sync'"):
        ServerSync(model)
    loose = client.parameter("loose", size=10, optimizer=AVERAGE, mode="async")
    with pytest.raises(shardwell.ArgumentError, match=r"'loose' has Average and mode='async'"):
        ServerSync(loose)
    sync = ServerSync(client.parameter("short", size=9, optimizer=AVERAGE))
    with pytest.raises(shardwell.ArgumentError, match="10 are needed for 9 weights and the loss"):
        DataParallelTrainer(gradient_of, weights, SGD, sync)
    with pytest.raises(shardwell.ArgumentError, match="must have 9 elements; got 10"):
        sync.sync_gradients(np.zeros(10, np.float32))
    with pytest.raises(shardwell.ArgumentError, match="array must be a writable C-contiguous"):
        sync.sync_gradients(np.zeros(9))
    sync = ServerSync(client.parameter("good", size=10, optimizer=AVERAGE))
    trainer = DataParallelTrainer(lambda _, batch: (0.0, weights), weights, SGD, sync)
    with pytest.raises(shardwell.ArgumentError, match="ServerSync does not know this worker's ran"):
        trainer.step([1])
    assert trainer.step_share([1]).loss == 0.0


@pytest.mark.parametrize(
    "crew",
    [
        {"members": shardwell.Elastic(max_count=4)},
        {"worker_count": 2, "min_contributors": 1, "grace_s": 0.1},
    ],
)
def test_steps_that_may_close_without_a_worker_are_refused(cluster, connect, crew) -> None:
    parameter = connect(cluster(1), "w0").parameter("open", size=5, optimizer=AVERAGE, **crew)
    with pytest.raises(shardwell.ArgumentError, match="one that missed a step would have others"):
        ServerSync(parameter)
