"""Goal: whoever looks at a cluster sees how far outer training has come, learner by learner.

Method: real learners and shards; what they say is compared with what they count themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.threads import together
from shardwell import LearnerProgress
from shardwell.v1 import parameter_server_pb2 as pb

WEIGHTS = {f"layers.{n}.w": np.ones((3, n + 2), np.float32) for n in range(4)}


def learner(client: shardwell.Client, **changes: Any) -> shardwell.Outer:
    options: dict[str, Any] = {
        "tensors": WEIGHTS,
        "sync_every": 4,
        "fragments": 4,
        "codec": "fp32",
        "worker_count": 2,
    }
    return shardwell.Outer(client, "net", **{**options, **changes})


def train(outer: shardwell.Outer, step_count: int, sample_count: int = 3) -> None:
    weights = outer.init(WEIGHTS)
    for _ in range(step_count):
        weights = {name: array - 0.25 for name, array in weights.items()}
        weights.update(outer.after_step(weights, sample_count))


def told(client: shardwell.Client) -> dict[str, LearnerProgress]:
    """What shard 0 has of fragment 0, by worker; no other part has anything."""
    found = {}
    for shard in client.status():
        for parameter in shard.parameters:
            if shard.shard_index == 0 and parameter.spec.name == "net.fragment-0":
                assert all(each.ago_s >= 0 for each in parameter.learners)
                found = {each.worker_id: each.progress for each in parameter.learners}
            else:
                assert parameter.learners == ()
    return found


def test_each_learner_says_what_it_has_done(cluster: Any, connect: Any) -> None:
    running = cluster(2)
    learners = [learner(connect(running, f"w{n}")) for n in (0, 1)]
    together([lambda one=one: train(one, 8) for one in learners])
    own = {f"w{n}": one.progress for n, one in enumerate(learners)}
    ops = connect(running, "ops")
    eventually("shard 0 has what both said last", lambda: told(ops) == own)
    for progress in own.values():
        assert (progress.inner_steps, progress.sample_count) == (8, 24)
        assert progress.offered_count == 8
        sizes = 4 * sum(array.size for array in WEIGHTS.values())
        assert progress.received_bytes >= 2 * sizes
        assert progress.sent_bytes >= 2 * sizes
        assert (progress.overdue_count, progress.kept_count) == (0, 0)
    assert any(progress.waited_s > 0 for progress in own.values())


def test_bytes_before_it_are_of_another(cluster: Any, connect: Any) -> None:
    client = connect(cluster(1), "w0")
    other = client.parameter("other", size=1000, optimizer=shardwell.SGD(1.0))
    other.init(np.ones(1000, np.float32))
    outer = learner(client, worker_count=1)
    train(outer, 4)
    assert outer.progress.sent_bytes < 4000


def test_shard_0_is_told_the_newest_though_many_are_said_at_once(
    cluster: Any, connect: Any
) -> None:
    client = connect(cluster(1), "w0")
    outer = learner(client, worker_count=1)
    outer.init(WEIGHTS)
    fragment = client.parameter("net.fragment-0")
    for number in range(200):
        fragment.report_learner(LearnerProgress(inner_steps=number))
    eventually(
        "the newest is there", lambda: told(client) == {"w0": LearnerProgress(inner_steps=199)}
    )


def test_it_never_blocks_and_never_fails_for_want_of_a_shard(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    running = cluster(1, data_dir=tmp_path, processes=True)
    client = connect(running, "w0")
    learner(client, worker_count=1).init(WEIGHTS)
    fragment = client.parameter("net.fragment-0")
    running.children[0].kill()
    for number in range(20):
        fragment.report_learner(LearnerProgress(inner_steps=number))
    running.start_again(0)
    last = LearnerProgress(inner_steps=99)

    def is_told() -> bool:
        fragment.report_learner(last)
        try:
            return told(client) == {"w0": last}
        except shardwell.ShardUnavailableError:  # as long as it starts
            return False

    eventually("the shard has it once it is back", is_told)
    fragment.close()
    with pytest.raises(shardwell.ClosedError):
        fragment.report_learner(last)


@pytest.mark.parametrize("progress", [None, {"inner_steps": 1}, 3])
def test_something_else_is_refused(cluster: Any, connect: Any, progress: Any) -> None:
    client = connect(cluster(1), "w0")
    learner(client, worker_count=1).init(WEIGHTS)
    with pytest.raises(shardwell.ArgumentError, match="progress must be"):
        client.parameter("net.fragment-0").report_learner(progress)


def test_other_parameters_have_no_learners(cluster: Any, connect: Any) -> None:
    client = connect(cluster(1), "w0")
    learner(client, worker_count=1).init(WEIGHTS)
    plain = client.parameter("plain", size=4, optimizer=shardwell.SGD(1.0))
    for parameter in (client.parameter("net.fragment-1"), plain):
        with pytest.raises(shardwell.ArgumentError, match="is not fragment 0 of a family"):
            parameter.report_learner(LearnerProgress())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda request: setattr(request, "worker_id", ""), "worker_id"),
        (lambda request: setattr(request, "worker_id", "a/b"), "worker_id"),
        (lambda request: setattr(request.learner, "waited_s", float("nan")), "waited_s"),
        (lambda request: setattr(request.learner, "kept_count", 2**63), "kept_count"),
        (lambda request: setattr(request, "parameter", "net.fragment-1"), "fragment 0"),
        (lambda request: request.ClearField("learner"), "figure"),
    ],
)
def test_a_request_by_hand_is_checked(
    cluster: Any, connect: Any, change: Callable[[pb.ReportRequest], None], words: str
) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    learner(client, worker_count=1).init(WEIGHTS)
    request = pb.ReportRequest(
        parameter="net.fragment-0", worker_id="w9", learner=pb.LearnerProgress(inner_steps=1)
    )
    channel = client._shards.channels[0]
    request.shard.CopyFrom(channel.identity)
    change(request)
    with pytest.raises(shardwell.ArgumentError, match=words):
        channel.call("Report", request, pb.ReportResponse, timeout_s=PATIENCE_S, parameter="net")
    assert told(client) == {}
