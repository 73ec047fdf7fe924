"""Goal: what a call about one parameter costs does not depend on how many others there are.

Method: the same calls beside few and beside many parameters. Oracle: bytecodes of the worker and
the shards, descriptors of their process; no times.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.bytecodes import REPEAT_COUNT, Bytecodes
from harness.leaks import descriptor_count

SGD = shardwell.SGD(learning_rate=0.5)
SIZE = 10
MANY = 150
GRADIENT = np.ones(SIZE, np.float32)
ROOM = 1.05
"""A thread that waits may look once more."""


@pytest.mark.same_host
@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="3.12.1 crashes where many threads trace bytecodes"
)
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_call_costs_the_same_beside_many_parameters(
    cluster, connect, tmp_path: Path, on_disk: bool
) -> None:
    numbers = itertools.count()

    def opened(client: shardwell.Client) -> shardwell.Parameter:
        return client.parameter(f"p{next(numbers)}", size=SIZE, optimizer=SGD)

    def costs(client: shardwell.Client, count: Bytecodes) -> dict[str, int]:
        made = [opened(client) for _ in range(REPEAT_COUNT)]
        new, seated = iter(made), iter(made)
        used = made[-1]
        calls: dict[str, Callable[[], object]] = {
            "open": lambda: opened(client),
            "init": lambda: next(new).init(GRADIENT),
            "first exchange": lambda: next(seated).exchange(GRADIENT),
            "exchange": lambda: used.exchange(GRADIENT),
            "get_weights": used.get_weights,
            "open by name": lambda: client.parameter(used.name),
            "set_learning_rate": lambda: used.set_learning_rate(0.25),
        }
        return {what: count.of(call) for what, call in calls.items()}

    with Bytecodes() as count:
        running = cluster(2, data_dir=tmp_path if on_disk else None)
        client = connect(running, "w0")
        costs(client, count)  # what is done once for a process
        few = costs(client, count)
        for _ in range(MANY):
            opened(client).init(GRADIENT)
        many = costs(client, count)
    grown = {what: (few[what], many[what]) for what in few if many[what] > ROOM * few[what]}
    assert not grown


def test_a_parameter_on_disk_keeps_no_descriptor(cluster, connect, tmp_path: Path) -> None:
    client = connect(cluster(2, data_dir=tmp_path), "w0")

    def train(name: str) -> None:
        parameter = client.parameter(
            name, size=SIZE, optimizer=shardwell.Adam(learning_rate=0.5), worker_count=1
        )
        parameter.init(GRADIENT)
        parameter.exchange(GRADIENT)

    train("first")
    before = descriptor_count()
    for number in range(20):
        train(f"p{number}")
    assert descriptor_count() - before < 20
