"""Goal: shard 0 says which samples each step had, as they were dealt.

Method: batches that workers got are kept by step, and compared with the answers of the client and
of the command.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.programs.commands import run_command
from harness.threads import together

SIZE = 3
SAMPLES = shardwell.Samples(50, 4)
Given = dict[tuple[int, str], shardwell.Batch]


def opened(clients: list[shardwell.Client]) -> list[Any]:
    nets = []
    for client in clients:
        net = client.parameter(
            "seen", size=SIZE, optimizer=shardwell.SGD(lr=1.0), worker_count=len(clients)
        )
        net.init(np.zeros(SIZE))
        nets.append(net)
    return nets


def train(net: Any, number: int, given: Given) -> None:
    for batch in itertools.islice(net.batches(SAMPLES), 3):
        net.exchange(np.ones(SIZE), batch=batch)
        given[net.outcome.step, f"w{number}"] = batch


def test_a_step_has_the_batches_that_its_gradients_were_made_from(
    cluster: Any, connect: Any
) -> None:
    running = cluster(2)
    clients = [connect(running, f"w{number}") for number in range(2)]
    given: Given = {}
    nets = opened(clients)
    together([partial(train, net, number, given) for number, net in enumerate(nets)])
    for step in range(3):
        found = {each.worker_id: each for each in clients[0].step_samples("seen", step)}
        assert sorted(found) == ["w0", "w1"]
        for worker_id, each in found.items():
            batch = given[step, worker_id]
            assert (each.name, each.epoch, each.ranges) == ("train", 0, batch.ranges)
            assert each.indices.tolist() == batch.indices.tolist()
    assert clients[0].step_samples("seen", 3) == []


def test_the_command_prints_the_account_and_a_step(cluster: Any, connect: Any) -> None:
    running = cluster(1)
    given: Given = {}
    [net] = opened([connect(running, "w0")])
    train(net, 0, given)
    flag = f"--shards={running.target}"
    code, printed, _ = run_command("samples", "seen", "--json", flag)
    account = json.loads(printed)
    assert (code, account["done_count"], account["free_count"]) == (0, 12, 38)
    code, printed, _ = run_command("samples", "seen", "--step=1", "--json", flag)
    assert (code, json.loads(printed)["samples"]) == (0, given[1, "w0"].indices.tolist())
    code, printed, _ = run_command("samples", "seen", flag)
    assert (code, "train" in printed, "38" in printed) == (0, True, True)
    code, _, log = run_command("samples", "other", flag)
    assert code == 1
    assert "no parameter 'other'" in log


def test_a_step_that_has_not_begun_is_refused_by_number(cluster: Any, connect: Any) -> None:
    client = connect(cluster(1), "w0")
    [net] = opened([client])
    next(net.batches(SAMPLES))
    with pytest.raises(shardwell.StepOrderError, match="step 7 of parameter 'seen'"):
        client.step_samples("seen", 7)
