"""init(): the first caller decides the first weights, as a whole, in the whole cluster."""

from __future__ import annotations

import contextlib
import time

import grpc
import numpy as np
import pytest

import shardwell
from harness.oracles.parameter import integer_gradient
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.threads import in_background, together
from harness.wire_client.worker import WireWorker, error_detail, spec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server import Limits

SGD = shardwell.SGD(learning_rate=1.0)
SHORT_CLAIM = Limits(init_claim_s=0.5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shard_count", [1, 2, 4])
def test_racing_clients_agree_on_one_of_them(cluster, connect, shard_count) -> None:
    running = cluster(shard_count, chunk_size_bytes=64)
    size, racer_count = 997, 8
    clients = [connect(running, f"w{index}") for index in range(racer_count)]
    for round_ in range(5):
        models = [client.parameter(f"m{round_}", size=size, optimizer=SGD) for client in clients]

        def race(index: int, models: list[shardwell.Parameter] = models) -> np.ndarray:
            assert models[index].init(np.full(size, index, np.float32)) == 0
            return models[index].get_weights()

        seen = together([lambda i=index: race(i) for index in range(racer_count)])
        winner = seen[0][0]
        assert winner in range(racer_count)
        for weights in seen:
            np.testing.assert_array_equal(weights, winner)


def test_threads_of_one_client_race_too(cluster, connect) -> None:
    model = connect(cluster(3, chunk_size_bytes=64), "w0").parameter(
        "model", size=501, optimizer=SGD
    )
    together([lambda i=index: model.init(np.full(501, i, np.float32)) for index in range(4)])
    weights = model.get_weights()
    np.testing.assert_array_equal(weights, weights[0])


def test_init_after_training_changes_nothing(cluster, connect) -> None:
    running = cluster()
    model = connect(running, "w0").parameter("model", size=50, optimizer=SGD)
    model.init(np.zeros(50, np.float32))
    model.exchange(np.ones(50, np.float32))
    late = connect(running, "late").parameter("model", size=50, optimizer=SGD)
    assert late.init(np.full(50, 9, np.float32)) == 1
    np.testing.assert_array_equal(late.get_weights(), -1)


def test_first_weights_stand_exactly_whatever_the_codec(cluster, connect) -> None:
    """They travel as float32: what fp16 can't hold still makes a difference of one step."""
    running = cluster()
    tiny = np.float32(2.0**-20)
    model = connect(running, "w0").parameter("model", size=64, optimizer=SGD, codec="fp16")
    model.init(np.full(64, 1 + tiny, np.float32))
    weights = model.exchange(np.ones(64, np.float32))
    np.testing.assert_array_equal(weights, tiny)


def test_an_average_needs_no_init(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=50, optimizer=shardwell.Average())
    np.testing.assert_array_equal(model.get_weights(), 0)
    np.testing.assert_array_equal(model.exchange(np.full(50, 3, np.float32)), 3)


@pytest.mark.parametrize("progress", ["claimed", "sent to shard 1", "half of shard 0"])
def test_a_claimant_that_dies_is_taken_over(cluster, connect, progress) -> None:
    running = cluster(2, limits=SHORT_CLAIM)
    size = 300
    heir = connect(running, "heir").parameter("model", size=size, optimizer=SGD, codec="fp32")
    with WireWorker(running.target, "dead") as worker:
        dead = worker.create(spec("model", size))
        epoch = dead.claim_init().epoch
        values = np.full(size, 5, np.float32)
        if progress != "claimed":
            dead.init_shard(1, values, epoch)
        if progress == "half of shard 0":
            half = dead.init_messages(0, values, epoch, range_element_count=75)[:2]
            with pytest.raises(grpc.RpcError, match="all of it"):
                worker.stubs[0].InitWeights(iter(half), timeout=PATIENCE_S)
        watch = Stopwatch()
        assert heir.init(np.full(size, 6, np.float32)) == 0
        assert watch.elapsed_s < PATIENCE_S
        np.testing.assert_array_equal(heir.get_weights(), 6)
        for shard_index in (0, 1):  # the dead one comes back, and is too late
            with pytest.raises(grpc.RpcError, match="epoch") as late:
                dead.init_shard(shard_index, values, epoch)
            assert late.value.code().name == "ABORTED"
    np.testing.assert_array_equal(heir.get_weights(), 6)


def test_a_living_claimant_is_waited_for(cluster, connect) -> None:
    running = cluster(2)
    other = connect(running, "other").parameter("model", size=20, optimizer=SGD, codec="fp32")
    with WireWorker(running.target, "slow") as worker:
        slow = worker.create(spec("model", 20))
        epoch = slow.claim_init().epoch
        waiting = in_background(lambda: other.init(np.full(20, 2, np.float32)))
        slow.init_shard(1, np.ones(20), epoch)
        assert not waiting.done()
        slow.init_shard(0, np.ones(20), epoch)
        assert waiting.result(PATIENCE_S) == 0
    np.testing.assert_array_equal(other.get_weights(), 1)


def test_a_claimant_that_never_finishes_is_a_deadline(cluster, connect) -> None:
    running = cluster(2)
    other = connect(running, "other").parameter("model", size=20, optimizer=SGD, codec="fp32")
    with WireWorker(running.target, "dead") as worker:
        worker.create(spec("model", 20)).claim_init()
        watch = Stopwatch()
        with pytest.raises(shardwell.DeadlineError, match="claimed") as caught:
            other.init(np.zeros(20, np.float32), timeout_s=BRIEF_S)
        assert 0.9 * BRIEF_S < watch.elapsed_s < PATIENCE_S
        assert caught.value.shard_index == 0


def test_a_gradient_between_the_shards_of_an_init_does_no_harm(cluster, connect) -> None:
    """A claimant sets shard 1 and dies; a worker that never called init() pushes to it meanwhile.

    Shard 0 refuses that worker, so no worker trained: the next claimant must be able to take over,
    and the worker's gradient must count once, on its weights.
    """
    running = cluster(2, limits=SHORT_CLAIM)
    size = 40
    gradient = integer_gradient(0, 0, size)
    eager = connect(running, "eager").parameter("model", size=size, optimizer=SGD, codec="fp32")
    with WireWorker(running.target, "dead") as dead, WireWorker(running.target, "eager") as raw:
        first = dead.create(spec("model", size))
        first.init_shard(1, np.full(size, 5, np.float32), first.claim_init().epoch)
        messages = raw.create(spec("model", size)).gradient_messages(
            pb.PutGradientRequest, 1, gradient
        )
        with contextlib.suppress(grpc.RpcError):  # whether it is refused is the shard's choice
            raw.stubs[1].PutGradient(iter(messages), timeout=PATIENCE_S)
    with pytest.raises(shardwell.NotInitializedError):
        eager.put_gradient(gradient)
    heir = connect(running, "heir").parameter("model", size=size, optimizer=SGD, codec="fp32")
    heir.init(np.full(size, 6, np.float32))
    np.testing.assert_array_equal(eager.exchange(gradient), 6 - gradient)


def test_a_second_epoch_cannot_replace_weights_that_stand(cluster, connect) -> None:
    """The .proto: ABORTED for an older epoch, FAILED_PRECONDITION for one that was not granted."""
    running = cluster(1)
    model = connect(running, "w0").parameter("model", size=20, optimizer=SGD, codec="fp32")
    model.init(np.ones(20, np.float32))
    with WireWorker(running.target, "stranger") as worker:
        stranger = worker.create(spec("model", 20))
        granted = stranger.claim_init().epoch
        for epoch, status in ((7, "ABORTED"), (granted + 1, "FAILED_PRECONDITION")):
            with pytest.raises(grpc.RpcError) as caught:
                stranger.init_shard(0, np.full(20, 9, np.float32), epoch)
            assert caught.value.code().name == status
    np.testing.assert_array_equal(model.get_weights(), 1)


def test_waiting_for_first_weights_leaves_room_for_those_who_send_them(cluster, connect) -> None:
    """More workers wait for `initialized` than the shard has threads beyond its streams."""
    running = cluster(1, limits=Limits(stream_count_max=2))
    with WireWorker(running.target, "claimant") as worker:
        claimed = worker.create(spec("model", 20))
        epoch = claimed.claim_init().epoch
        waiting = [
            in_background(lambda n=n: _wait_for_init(running.target, f"waiting-{n}"))
            for n in range(40)
        ]
        eventually("most of them wait", lambda: _known_workers(worker) >= 41)
        try:
            claimed.init_shard(0, np.ones(20), epoch)
        finally:
            answers = [future.result(PATIENCE_S) for future in waiting]
    assert all(answer.initialized for answer in answers)


def test_a_burst_of_calls_is_served_whatever_the_number_of_threads(cluster) -> None:
    running = cluster(1, limits=Limits(stream_count_max=2))
    with WireWorker(running.target, "w0") as worker:
        worker.create(spec("model", 20))
        calls = [
            worker.stubs[0].GetStatus.future(pb.GetStatusRequest(), timeout=PATIENCE_S)
            for _ in range(400)
        ]
        assert {call.result().parameters[0].spec.name for call in calls} == {"model"}


def _wait_for_init(target: str, worker_id: str):
    with WireWorker(target, worker_id) as worker:
        parameter = worker.create(spec("model", 20))
        for _ in range(200):
            answer = parameter.claim_init(wait_timeout_s=PATIENCE_S)
            if answer.initialized or answer.granted:
                break
            time.sleep(0.1)  # as the .proto says: ask again a little later
        return answer


def _known_workers(worker: WireWorker) -> int:
    status = worker.stubs[0].GetStatus(pb.GetStatusRequest(), timeout=PATIENCE_S)
    return len(status.parameters[0].missing_worker_ids)


def test_only_shard_0_grants_claims(cluster) -> None:
    running = cluster(2)
    with WireWorker(running.target, "w0") as worker:
        worker.create(spec("model", 20))
        with pytest.raises(grpc.RpcError, match="shard 0") as caught:
            worker.stubs[1].ClaimInit(
                pb.ClaimInitRequest(shard=worker.identities[1], parameter="model", worker_id="w0"),
                timeout=PATIENCE_S,
            )
        assert caught.value.code().name == "FAILED_PRECONDITION"
        detail = error_detail(caught.value)
        assert detail.code == types_pb2.ERROR_CODE_WRONG_SHARD
        assert detail.shard_index == 1
