"""Goal: shard 0 says which samples each step had, as they were dealt.

Method: batches that workers got are kept by step, and compared with the answers to STAGE_LOOK.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.threads import together
from shardwell.placement.ranges import flat
from shardwell.v1 import parameter_server_pb2 as pb

SIZE = 3


def opened(connect: Any, target: Any) -> list[Any]:
    nets = []
    for number in range(2):
        net = connect(target, f"w{number}").parameter(
            "seen", size=SIZE, optimizer=shardwell.SGD(lr=1.0), worker_count=2
        )
        net.init(np.zeros(SIZE))
        nets.append(net)
    return nets


def look(net: Any, step: int) -> dict[str, list[int]]:
    """The samples of a step, by worker."""
    channel = net._shards.channels[0]
    request = pb.DealSamplesRequest(
        shard=channel.identity,
        stage=pb.DealSamplesRequest.STAGE_LOOK,
        parameter="seen",
        step=step,
        incarnation=net._opening.incarnation,
    )
    answer = channel.call("DealSamples", request, pb.DealSamplesResponse, timeout_s=30.0)
    assert {each.data for each in answer.counted} <= {"train"}
    return {each.worker_id: list(each.ranges) for each in answer.counted}


def train(net: Any, number: int, given: dict[tuple[int, str], list[int]]) -> None:
    for batch in itertools.islice(net.batches(shardwell.Samples(50, 4)), 3):
        net.exchange(np.ones(SIZE), batch=batch)
        given[net.outcome.step, f"w{number}"] = flat(batch.ranges)


def test_a_step_has_the_batches_that_its_gradients_were_made_from(
    cluster: Any, connect: Any
) -> None:
    nets = opened(connect, cluster(2))
    given: dict[tuple[int, str], list[int]] = {}
    together([partial(train, net, number, given) for number, net in enumerate(nets)])
    for step in range(3):
        assert look(nets[0], step) == {name: given[step, name] for name in ("w0", "w1")}
    assert look(nets[0], 3) == {}


def test_a_step_that_has_not_begun_is_refused_by_number(cluster: Any, connect: Any) -> None:
    nets = opened(connect, cluster(1))
    next(nets[0].batches(shardwell.Samples(50, 4)))
    with pytest.raises(shardwell.StepOrderError, match="step 7 of parameter 'seen'"):
        look(nets[0], 7)
