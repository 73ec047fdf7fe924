"""Goal: a checkpoint has the account of the samples, so that each still counts once an epoch.

Method: a weight counts the visits of a sample in an epoch: its gradient is -1 there, the rate 1. It
is saved in the middle of an epoch, and restored into other shards, workers and batch sizes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.visit_plan import SIGN
from harness.inside import channels_of
from harness.polling import PATIENCE_S
from shardwell.checkpoint.manifest import MANIFEST_NAME
from shardwell.v1 import parameter_server_pb2 as pb

LENGTH, EPOCHS = 100, 3
SIZE = EPOCHS * LENGTH
ELASTIC: dict[str, Any] = {"members": shardwell.Elastic(min_count=1, max_count=8)}


def opened(client: shardwell.Client, **crew: Any) -> Any:
    """The parameter whose weights count visits.

    Of elastic members any number may be in a step, some without a gradient; so there the rule is
    one that moves an element by 1 whatever the mean is.
    """
    rule = SIGN if "members" in crew else shardwell.SGD(lr=1.0)
    return client.parameter("visits", size=SIZE, optimizer=rule, codec="fp32", **crew)


def train(
    connect: Callable[..., shardwell.Client],
    target: Any,
    workers: int,
    samples: shardwell.Samples,
    *,
    epochs: int,
    most: int | None = None,
    **crew: Any,
) -> None:
    """All workers at once; `most` batches each."""
    factor = 1.0 if "members" in crew else float(workers)
    failed: list[BaseException] = []

    def work(worker_id: str) -> None:
        try:
            client = connect(target, worker_id)
            net = opened(client, **crew)
            net.init(np.zeros(SIZE))
            for number, batch in enumerate(net.batches(samples, epochs=epochs), 1):
                gradient = np.zeros(SIZE, np.float32)
                for start, stop in batch.ranges:
                    gradient[start:stop] = -factor
                net.exchange(gradient, batch=batch)
                if number == most:
                    break
            client.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def visits(client: shardwell.Client, **crew: Any) -> list[int]:
    """How often each sample has counted."""
    found: list[int] = np.rint(opened(client, **crew).get_weights()).astype(int).tolist()
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [({"worker_count": 2}, {"worker_count": 3}), (ELASTIC, ELASTIC)],
    ids=["fixed", "elastic"],
)
def test_each_sample_counts_once_an_epoch_across_a_restore_into_another_cluster(
    cluster: Any,
    connect: Any,
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    *,
    drop_last: bool,
) -> None:
    first, second = cluster(3), cluster(2)
    train(connect, first, 2, shardwell.Samples(LENGTH, 7), epochs=3, most=10, **before)
    reader = connect(first, "reader")
    half = visits(reader, **before)
    [entry] = reader.save_checkpoint(tmp_path / "half").parameters
    assert entry.samples["train"]["length"] == LENGTH
    connect(second, "restorer").restore_checkpoint(
        tmp_path / "half", worker_count=after.get("worker_count")
    )
    samples = shardwell.Samples(LENGTH, 4, drop_last=drop_last)
    train(connect, second, 3, samples, epochs=3, **after)
    counts = visits(connect(second, "last"), **after)
    assert 0 < sum(half) < SIZE
    assert max(counts) == 1
    missing = SIZE - sum(counts)
    named = opened(connect(second, "account"), **after).samples["train"].partial
    split = sum(stop - start for each in named for start, stop in each.ranges)
    # A late gradient that chunks split counts in a part of them, and is named.
    assert 0 <= missing <= split + (2 * 4 * 3 if drop_last else 0)


def test_samples_that_counted_after_the_checkpoint_are_dealt_again(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    first, second = cluster(2), cluster(2)
    samples = shardwell.Samples(LENGTH, 10, shuffle=False)
    client = connect(first, "w0")
    net = opened(client)
    net.init(np.zeros(SIZE))
    dealt = net.batches(samples)
    for _ in range(3):
        net.exchange(np.zeros(SIZE), batch=next(dealt))
    client.save_checkpoint(tmp_path / "third")
    for _ in range(4):
        net.exchange(np.zeros(SIZE), batch=next(dealt))
    other = connect(second, "w0")
    other.restore_checkpoint(tmp_path / "third")
    again = next(opened(other).batches(samples))
    assert again.indices.tolist() == list(range(30, 40))


def test_another_dataset_under_a_restored_name_is_refused(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    first, second = cluster(1), cluster(1)
    train(connect, first, 1, shardwell.Samples(LENGTH, 7), epochs=1, worker_count=1)
    connect(first, "reader").save_checkpoint(tmp_path / "saved")
    client = connect(second, "w0")
    client.restore_checkpoint(tmp_path / "saved")
    net = opened(client)
    with pytest.raises(shardwell.SpecMismatchError, match="length is 50, and other workers"):
        next(net.batches(shardwell.Samples(50, 7)))
    other = next(net.batches(shardwell.Samples(50, 7, name="fine-tuning")))
    assert other.epoch == 0


def test_a_damaged_account_is_refused_before_anything_stands(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    first, second = cluster(1), cluster(1)
    train(connect, first, 1, shardwell.Samples(LENGTH, 7), epochs=1, worker_count=1)
    saved = tmp_path / "saved"
    connect(first, "reader").save_checkpoint(saved)
    text = (saved / MANIFEST_NAME).read_text()
    (saved / MANIFEST_NAME).write_text(text.replace('"length": 100', '"length": 101'))
    client = connect(second, "w0")
    with pytest.raises(shardwell.StorageError, match="was damaged"):
        client.restore_checkpoint(saved)
    assert not any(shard.parameters for shard in client.status())


def test_a_restore_that_is_made_again_has_one_account(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    first, second = cluster(2), cluster(3)
    train(connect, first, 2, shardwell.Samples(LENGTH, 7), epochs=3, most=5, worker_count=2)
    reader = connect(first, "reader")
    [entry] = reader.save_checkpoint(tmp_path / "saved").parameters
    client = connect(second, "restorer")
    for _ in range(2):
        client.restore_checkpoint(tmp_path / "saved")
    [again] = client.save_checkpoint(tmp_path / "again").parameters
    assert json.dumps(again.samples) == json.dumps(entry.samples)


def account_with(**changes: Any) -> bytes:
    state = {"length": 9, "seed": 0, "shuffles": True, "done": [[0, 4]], "partial": []}
    return json.dumps({"train": {**state, "partial_count": 0, "left_out": 0, **changes}}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 0},
        {"length": 2.5},
        {"seed": -1},
        {"shuffles": 1},
        {"done": [[4, 2]]},
        {"done": [[0, 2.5]]},
        {"done": [[0, 4], [2, 6]]},
        {"done": [[0, 2**63]]},
        {"done": 7},
        {"partial": [["w", 0]]},
        {"partial": [["../w", 0, [[0, 1]]]]},
        {"partial_count": -1},
        {"left_out": None},
        {"ranks": 7},
        {"ranks": {"w": -1}},
        {"ranks": {"../w": 0}},
    ],
    ids=str,
)
def test_an_account_that_can_not_be_is_refused_by_name(
    cluster: Any, connect: Any, changes: dict[str, Any]
) -> None:
    client = connect(cluster(1), "w0")
    net = opened(client)
    [channel] = channels_of(client)

    def load(account: bytes) -> None:
        request = pb.DealSamplesRequest(
            shard=channel.identity,
            parameter=net.name,
            stage=pb.DealSamplesRequest.STAGE_LOAD,
            account=account,
        )
        channel.call("DealSamples", request, pb.DealSamplesResponse, timeout_s=PATIENCE_S)

    with pytest.raises(shardwell.ArgumentError, match="samples 'train' of the checkpoint"):
        load(account_with(**changes))
    load(account_with())
    assert net.samples["train"].done_count == 4


def test_a_large_account_is_saved_beside_a_large_chunk(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    """A message of a mebibyte of values has no room for it."""
    size = 2**18
    spec: dict[str, Any] = {"optimizer": shardwell.SGD(lr=1.0), "codec": "fp32", **ELASTIC}
    client = connect(cluster(1, chunk_size_bytes=2**20), "w0")
    net = client.parameter("large", size=size, **spec)
    net.init(np.zeros(size))
    taken = []
    for batch in net.batches(shardwell.Samples(4000, 1, shuffle=False), epochs=1):
        taken.append(batch)
        if len(taken) == 1400:
            break
    for batch in taken[::2]:  # so that every other sample has counted
        net.exchange(np.zeros(size), batch=batch)
    [entry] = client.save_checkpoint(tmp_path / "large").parameters
    assert len(entry.samples["train"]["done"]) == 700
    assert len(json.dumps(entry.samples)) > 2**13
