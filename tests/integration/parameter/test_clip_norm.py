"""Goal: the mean gradient is clipped by its norm over all shards, as on one process.

Method: real servers, small chunks, fp32; the oracle is SGD in float64, with the formula of torch's
clip_grad_norm_. Requests of CloseStep by hand are those of a client that is cut off, late or wrong.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.inside import channels_of
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background, together
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server import LocalCluster
from shardwell_server.shard.parameter import steps

SIZE, CLIP, RATE = 150, 1.5, 0.1
RULE = shardwell.SGD(RATE, clip_norm=CLIP)
FIRST = np.linspace(-1, 1, SIZE)


def gradients(steps: int, workers: int = 2) -> Any:
    """Some of which are longer than CLIP, and some not."""
    drawn = np.random.default_rng(5).standard_normal((steps, workers, SIZE))
    return (drawn * np.geomspace(0.02, 2.0, steps)[:, None, None]).astype(np.float32)


def clipped(gradient: Any, clip: float = CLIP) -> Any:
    return gradient * min(1.0, clip / (np.linalg.norm(gradient) + 1e-6))


def opened(client: shardwell.Client, **options: Any) -> Any:
    given = {"size": SIZE, "optimizer": RULE, "worker_count": 2, "codec": "fp32", **options}
    if "members" in given:
        del given["worker_count"]
    net = client.parameter("net", **given)
    net.init(
        FIRST if net.spec.layout is None else {t.name: np.zeros(t.shape) for t in net.spec.layout}
    )
    return net


def pair(running: LocalCluster, connect: Any, **options: Any) -> list[Any]:
    return [opened(connect(running, f"w{rank}"), **options) for rank in range(2)]


def close(client: shardwell.Client, shard: int, step: int, norm: float | None = None) -> Any:
    channel = channels_of(client)[shard]
    request = pb.CloseStepRequest(
        shard=channel.identity, parameter="net", step=step, norm=norm, wait_timeout_ms=200
    )
    return channel.call(
        "CloseStep",
        request,
        pb.CloseStepResponse,
        timeout_s=PATIENCE_S,
        wait_for_ready=True,  # after a restart
    )


@pytest.mark.parametrize("shard_count", [1, 3])
@pytest.mark.parametrize("how", ["exchange", "begun", "put"])
def test_two_workers_train_as_one_that_clips(cluster, connect, how, shard_count) -> None:
    running = cluster(shard_count, chunk_size_bytes=64)
    given, samples = gradients(8), (1, 3)

    def work(rank: int) -> Any:
        net = opened(connect(running, f"w{rank}"))
        for each in given[:, rank]:
            if how == "exchange":
                net.exchange(each, sample_count=samples[rank])
            elif how == "put":
                net.put_gradient(each, sample_count=samples[rank])
            else:
                begun = net.begin_exchange(each, sample_count=samples[rank])
                begun.ready(0, SIZE)
                assert not begun.has_left
                begun.finish()
        return net.get_weights(min_version=len(given))

    first, second = together([lambda: work(0), lambda: work(1)])
    weights = FIRST.copy()
    norms = []
    for step in given:
        mean = (samples[0] * step[0].astype(float) + samples[1] * step[1]) / sum(samples)
        norms.append(np.linalg.norm(mean))
        weights -= RATE * clipped(mean)
    assert min(norms) < CLIP < max(norms)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("crew", [{"worker_count": 2}, {"members": shardwell.Elastic(min_count=2)}])
def test_any_number_of_shards_and_any_chunks_give_the_same_bits(cluster, connect, crew) -> None:
    """Of gradients that depend on the weights, whose squares differ by far in size."""
    size, found = 50_001, {}
    rule = shardwell.Adam(0.01, clip_norm=1.0)
    tensors = {"a": (1000,), "b": (700,), "c": (size - 1700,)}
    groups = [shardwell.TensorGroup("b", frozen=True)]
    given_first = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    for shard_count, chunk_size in [(1, 1 << 20), (2, 1 << 12), (3, 1 << 14), (4, 1024), (5, 8192)]:
        running = cluster(shard_count, chunk_size_bytes=chunk_size)
        nets = [
            connect(running, f"w{rank}").parameter(
                "net", tensors=tensors, groups=groups, optimizer=rule, codec="fp32", **crew
            )
            for rank in range(2)
        ]
        together([lambda net=net: net.init(given_first) for net in nets])
        for step in range(4):
            random, weights = np.random.default_rng(step), nets[0].get_weights(min_version=step)
            for rank, net in enumerate(nets):
                gradient = {}
                for name, each in weights.items():
                    noise = random.standard_normal(each.size) * np.exp2(random.integers(-20, 3))
                    gradient[name] = (noise + 0.1 * each).astype(np.float32)
                net.put_gradient(gradient, sample_count=1 + rank)
        weights = nets[1].get_weights(min_version=4)
        found[shard_count] = b"".join(each.tobytes() for each in weights.values())
    assert set(found.values()) == {found[1]}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_one_worker_clips_by_itself(cluster, connect, mode, codec) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    net = opened(client, mode=mode, codec=codec, worker_count=0 if mode == "async" else 1)
    weights = FIRST.copy()
    for each in gradients(6, 1)[:, 0]:
        found = net.exchange(each.astype(np.float64))
        weights -= RATE * clipped(each.astype(float))
    np.testing.assert_allclose(found, weights, rtol=2e-3, atol=2e-3 if codec == "fp16" else 1e-6)


def test_a_begun_exchange_that_failed_is_clipped_once(tmp_path, connect) -> None:
    """The gradient that is sent again is the same, or it would be refused."""
    given = gradients(8, 1)[-1, 0]
    with LocalCluster(2, tmp_path, processes=True, chunk_size_bytes=64) as running:
        net = opened(connect(running, "w0"), worker_count=1)
        begun = net.begin_exchange(given)
        begun.ready(0, SIZE)
        running.children[1].kill()
        with pytest.raises(shardwell.ShardwellError, match="shard"):
            begun.finish(timeout_s=1.0)
        running.start_again(1)
        found = begun.finish()
    np.testing.assert_allclose(found, FIRST - RATE * clipped(given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("worker_count", [1, 2])
def test_frozen_tensors_do_not_count(cluster, connect, worker_count) -> None:
    running = cluster(2, chunk_size_bytes=64)
    groups = [shardwell.TensorGroup("b", frozen=True)]
    given = {"a": np.full(90, 0.5), "b": np.full(60, 100.0)}

    def work(rank: int) -> Any:
        client = connect(running, f"w{rank}")
        net = client.parameter(
            "net",
            tensors={"a": (90,), "b": (60,)},
            groups=groups,
            optimizer=RULE,
            worker_count=worker_count,
            codec="fp32",
        )
        net.init({"a": np.zeros(90), "b": np.ones(60)})
        return net.exchange(given)

    found = together([lambda rank=rank: work(rank) for rank in range(worker_count)])[0]
    np.testing.assert_allclose(found["a"], -RATE * clipped(given["a"]), rtol=1e-5)
    assert (found["b"] == 1).all()


@pytest.mark.parametrize("how", ["exchange", "put_gradient", "begin_exchange"])
@pytest.mark.parametrize(
    "crew",
    [
        {"min_contributors": 1},
        {"min_contributors": 1, "grace_s": 0.05},
        {"members": shardwell.Elastic(), "min_contributors": 1},
        {"members": shardwell.Elastic(), "min_contributors": 2, "grace_s": 0.05},
        {"members": shardwell.Elastic(max_count=1), "min_contributors": 1},
    ],
    ids=str,
)
def test_a_step_that_closes_without_others_is_clipped(cluster, connect, crew, how) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    net, weights = opened(client, **crew), FIRST.copy()
    for each in gradients(4, 1)[:, 0]:
        given = getattr(net, how)(each)
        if how == "begin_exchange":
            given.finish()
        weights -= RATE * clipped(each.astype(float))
        found = net.get_weights(min_version=net.next_step)
        np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-6)


def test_who_is_missing_is_named_and_the_step_goes_on(cluster, connect) -> None:
    first, second = pair(cluster(2), connect)
    given = gradients(1)[0]
    with pytest.raises(shardwell.WorkersMissingError, match="w1"):
        first.exchange(given[0], timeout_s=1.0)
    late = in_background(lambda: first.exchange(given[0]))
    np.testing.assert_array_equal(second.exchange(given[1]), late.result(PATIENCE_S))
    assert first.next_step == second.next_step == 1


def test_a_reader_closes_the_step_that_it_waits_for(cluster, connect) -> None:
    running = cluster(2)
    first, second = pair(running, connect)
    given = gradients(1)[0]
    first.put_gradient(given[0])
    second.put_gradient(given[1])
    reader = connect(running, "reader").parameter("net")
    assert reader.get_weights().tolist() == FIRST.astype(np.float32).tolist()
    found = reader.get_weights(min_version=1)
    np.testing.assert_allclose(found, FIRST - RATE * clipped(given.mean(axis=0)), atol=1e-6)


def test_the_first_norm_of_the_first_shard_counts(cluster, connect) -> None:
    """A client that was cut off has sent its norm to shard 0 alone; another found another one."""
    running = cluster(2)
    first, second = pair(running, connect)
    client = connect(running, "other")
    client.parameter("net")
    for net, each in zip((first, second), gradients(8)[-1], strict=True):
        net.put_gradient(each)
    measured = [math.fsum(close(client, shard, 0).squares) for shard in range(2)]
    assert math.sqrt(sum(measured)) == pytest.approx(np.linalg.norm(gradients(8)[-1].mean(axis=0)))
    assert close(client, 0, 0, norm=3.0).norm == 3.0
    assert close(client, 0, 0, norm=4.0).norm == 3.0
    assert math.fsum(close(client, 1, 0).squares) == measured[1]
    found = first.get_weights(min_version=1)
    mean = gradients(8)[-1].mean(axis=0)
    np.testing.assert_allclose(found, FIRST - RATE * mean * (CLIP / 3.0), rtol=1e-4, atol=1e-5)
    answer = close(client, 1, 0)
    assert answer.norm == 3.0
    assert not answer.squares
    first.put_gradient(gradients(1)[0, 0])
    second.exchange(gradients(1)[0, 1])
    answer = close(client, 0, 0)
    assert not answer.HasField("norm")  # it is long over
    assert not answer.squares


@pytest.mark.parametrize("allows", [False, True])
@pytest.mark.parametrize(
    "squares",
    [[-1.0], [1.0, -2.0], [1e300, 1e300], [1.0] * 17, [-math.inf], [1.0, math.nan]],
    ids=str,
)
def test_squares_that_are_none_are_refused(cluster, connect, monkeypatch, allows, squares) -> None:
    monkeypatch.setattr(steps, "exact_sum", lambda _: squares)
    first, second = pair(cluster(2), connect, allow_non_finite=allows)
    for net, each in zip((first, second), gradients(1)[0], strict=True):
        net.put_gradient(each)
    with pytest.raises(shardwell.CorruptChunkError, match="at most 16 numbers with a sum of"):
        first.get_weights(min_version=1, timeout_s=0.5)


@pytest.mark.parametrize(
    ("norm", "error", "says"),
    [
        (1.0, shardwell.StepOrderError, "chunk 0 is at step 0, with 1 of 2 contributions"),
        (math.nan, shardwell.ArgumentError, "norm must be a finite number"),
        (-1.0, shardwell.ArgumentError, "norm must be a finite number"),
        (None, shardwell.WorkersMissingError, "w1"),
    ],
)
def test_a_step_that_cannot_be_closed(cluster, connect, norm, error, says) -> None:
    running = cluster(2)
    first, second = pair(running, connect)
    first.put_gradient(gradients(1)[0, 0])
    client = connect(running, "other")
    with pytest.raises(error, match=says):
        close(client, 0, 0, norm)
    second.put_gradient(gradients(1)[0, 1])
    assert np.isfinite(first.get_weights(min_version=1)).all()


def test_a_parameter_that_is_not_clipped_has_nothing_to_close(cluster, connect) -> None:
    running = cluster(1)
    pair(running, connect, optimizer=shardwell.SGD(RATE))
    for norm in (None, 1.0):
        with pytest.raises(shardwell.ArgumentError, match="closes steps by itself"):
            close(connect(running, f"other-{norm}"), 0, 0, norm)


def test_what_is_not_finite_makes_all_nan_where_it_is_allowed(cluster, connect) -> None:
    """As torch's."""
    running = cluster(2)
    first, second = pair(running, connect, allow_non_finite=True)
    given = gradients(1)[0]
    given[0, 3] = np.inf
    late = in_background(lambda: first.exchange(given[0]))
    found = second.exchange(given[1])
    late.result(PATIENCE_S)
    assert np.isnan(found[3])
    np.testing.assert_array_equal(found[:3], FIRST[:3].astype(np.float32))  # times 1 / infinity


def test_a_norm_below_zero_is_refused_whatever_is_allowed(cluster, connect) -> None:
    running = cluster(1)
    first, second = pair(running, connect, allow_non_finite=True)
    for net, each in zip((first, second), gradients(1)[0], strict=True):
        net.put_gradient(each)
    with pytest.raises(shardwell.ArgumentError, match="at least 0"):
        close(connect(running, "other"), 0, 0, -1e-6)
    assert np.isfinite(first.get_weights(min_version=1)).all()


def test_out_may_never_overlap_the_gradient(cluster, connect) -> None:
    """Also where what is sent is a clipped copy of it."""
    net = opened(connect(cluster(1), "w0"), worker_count=1)
    for scale in (1e-3, 1e3):
        gradient = np.full(SIZE, scale, np.float32)
        with pytest.raises(shardwell.ArgumentError, match="overlap"):
            net.exchange(gradient, out=gradient)


def test_a_schedule_and_a_checkpoint(cluster, connect, tmp_path) -> None:
    running = cluster(2, chunk_size_bytes=64)
    nets, given = pair(running, connect), gradients(4)
    rates = (0.1, 0.1, 0.4, 0.2)

    def train(rank: int, steps: range) -> None:
        for step in steps:
            nets[rank].exchange(given[step, rank], learning_rate=rates[step])

    together([lambda: train(0, range(2)), lambda: train(1, range(2))])
    client = connect(running, "saver")
    client.save_checkpoint(tmp_path / "saved", ["net"])
    together([lambda: train(0, range(2, 4)), lambda: train(1, range(2, 4))])
    weights = FIRST.copy()
    for step, rate in zip(given, rates, strict=True):
        weights -= rate * clipped(step.mean(axis=0).astype(float))
    np.testing.assert_allclose(nets[0].get_weights(), weights, rtol=1e-5, atol=1e-6)
    other = connect(cluster(3, chunk_size_bytes=64), "w0")
    other.restore_checkpoint(tmp_path / "saved")
    assert other.parameter("net").spec.optimizer == RULE
    assert other.parameter("net").next_step == 2


def test_a_shard_that_is_killed_between_the_phases(tmp_path, connect) -> None:
    with LocalCluster(2, tmp_path, processes=True, chunk_size_bytes=64) as running:
        nets, given = pair(running, connect), gradients(3)
        client = connect(running, "other")
        client.parameter("net")
        for step in range(3):
            for net, each in zip(nets, given[step], strict=True):
                net.put_gradient(each)
            if step == 1:  # it has closed, the other one has not heard of it
                answers = [close(client, shard, 1) for shard in range(2)]
                norm = math.sqrt(math.fsum(x for each in answers for x in each.squares))
                close(client, 0, 1, norm)
            child = running.children[(step + 1) % 2]
            child.kill()
            eventually("it is dead", lambda child=child: child.poll() is not None)
            running.start_again((step + 1) % 2)
        weights = FIRST.copy()
        for each in given:
            weights -= RATE * clipped(each.mean(axis=0).astype(float))
        found = nets[1].get_weights(min_version=3)
        np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-6)


def test_it_is_of_parameters_alone(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    with pytest.raises(shardwell.ArgumentError, match="clip_norm is of parameters"):
        client.table("rows", row_count=4, dim=2, optimizer=RULE)
    with pytest.raises(shardwell.ArgumentError, match=r"SGD\.clip_norm must be"):
        shardwell.SGD(RATE, clip_norm=-1.0)
    other = connect(cluster(1), "w1")
    opened(other)
    with pytest.raises(shardwell.SpecMismatchError, match="clip_norm"):
        opened(other, optimizer=shardwell.SGD(RATE))
