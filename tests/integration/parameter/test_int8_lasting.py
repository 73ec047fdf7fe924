"""Goal: what int8 keeps beside weights goes where they go: checkpoints, files, other names.

Method: training by the replay of harness.oracles.int8, interrupted by each of them; the bits that
follow are those of training that was not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardwell
from harness.data.int8_training import RATE, Float32, Replay, assert_bits, gradient_of, opened
from shardwell_server import LocalCluster

OPTIMIZERS = {
    "sgd": shardwell.SGD(RATE),
    "momentum": shardwell.SGD(RATE, momentum=0.5),
    "adamw": shardwell.AdamW(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_goes_on_with_the_same_bits(cluster, connect, tmp_path, name) -> None:
    """On any number of shards: the image is in it, so that readers see no jump."""

    def train(client: shardwell.Client, residual: Float32 | None, first: int) -> Any:
        net = opened(client, optimizer=OPTIMIZERS[name])
        assert net.next_step == first
        net.load_residual(residual)
        for step in range(first, first + 3):
            net.exchange(gradient_of(0, step))
        return net

    source = connect(cluster(3), "w0")
    net = train(source, None, 0)
    residual, image = net.residual, net.get_weights()
    source.save_checkpoint(tmp_path / "saved")
    undisturbed = train(connect(cluster(1), "w0"), None, 0)
    for step in range(3, 6):
        undisturbed.exchange(gradient_of(0, step))
    for shard_count in (1, 2, 3):
        target = cluster(shard_count)
        client = connect(target, "w0")
        client.restore_checkpoint(tmp_path / "saved")
        assert_bits(connect(target, "reader").parameter("net").get_weights(), image)
        again = train(client, residual, 3)
        assert_bits(again.get_weights(), undisturbed.get_weights())
        assert_bits(again.residual, undisturbed.residual)
        net = client.save_checkpoint(tmp_path / f"again-{shard_count}")
    assert [each.spec.codec for each in net.parameters] == ["int8"]


def test_a_checkpoint_of_an_average_keeps_what_rounding_took(cluster, connect, tmp_path) -> None:
    source = connect(cluster(3), "w0")
    means = opened(source, optimizer=shardwell.Average())
    for step in range(3):
        means.exchange(gradient_of(0, step))
    residual = means.residual
    source.save_checkpoint(tmp_path / "saved")
    expected = means.exchange(gradient_of(0, 3))
    for shard_count in (1, 2):
        client = connect(cluster(shard_count), "w0")
        client.restore_checkpoint(tmp_path / "saved")
        again = opened(client, optimizer=shardwell.Average())
        again.load_residual(residual)
        assert_bits(again.exchange(gradient_of(0, 3)), expected)


def test_what_is_exported_is_the_weights_and_not_the_image(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    net, replay = opened(client), Replay()
    for _ in range(3):
        replay.step_of(net)
    assert (replay.weights.image != replay.weights.weights).any()
    saved = client.save_checkpoint(tmp_path / "saved")
    names = [entry.tensor_names for entry in saved.parameters]
    assert names == [("weights", "image")]


@pytest.mark.parametrize("processes", [False, True])
def test_shards_that_are_started_again(tmp_path: Path, processes: bool) -> None:
    """From their files: the image is in them, and the last change is not, so it is read whole."""
    replay = Replay()
    residual = None
    for _ in range(3):
        with (
            LocalCluster(2, data_dir=tmp_path, processes=processes) as running,
            shardwell.connect(running.target, worker_id="w0") as client,
        ):
            net = opened(client)
            net.load_residual(residual)
            assert_bits(net.get_weights(), replay.weights.image)
            for _ in range(2):
                replay.step_of(net)
            residual = net.residual


def test_one_that_is_deleted_and_made_again_begins_anew(cluster, connect) -> None:
    """No image of the former is changed."""
    running = cluster(2)
    client, other = connect(running, "w0"), connect(running, "r")
    replay, net = Replay(), opened(client)
    reader = other.parameter("net")
    for _ in range(2):
        replay.step_of(net)
        assert_bits(reader.get_weights(), replay.weights.image)
    connect(running, "ops").delete("net", force=True)
    with pytest.raises(shardwell.UnknownParameterError):
        reader.get_weights()
    again, replay = opened(connect(running, "w1")), Replay()
    for _ in range(2):
        replay.step_of(again)
    with pytest.raises(shardwell.ShardwellError):
        reader.get_weights()
    assert_bits(other.parameter("net").get_weights(), replay.weights.image)
