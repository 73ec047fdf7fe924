"""Goal: NaN, infinity and what is no time at all are refused wherever a length of time is given.

Method: all flags that end in -s are found by looking through all commands; all arguments of the
SDK that end in _s by looking through the signatures of what users hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
import numpy as np
import pytest

import shardwell
from harness.programs.commands import run_command
from shardwell_server import LocalCluster
from shardwell_server.cli import commands
from shardwell_server.cli.quantities import Duration

pytestmark = pytest.mark.timeout(60)

NO_TIMES = [float("nan"), float("inf"), float("-inf"), -1.0, 1e9]
SGD = shardwell.SGD(learning_rate=1.0)


def _flags(command: click.Command, path: str) -> Iterator[tuple[str, click.Parameter]]:
    context = click.Context(command)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _flags(inner, f"{path} {name}")
    for parameter in command.params:
        if any(flag.endswith("-s") and "-per-s" not in flag for flag in parameter.opts):
            yield f"{path} {parameter.opts[0]}", parameter


def test_every_flag_that_is_a_length_of_time() -> None:
    flags = dict(_flags(commands, "shardwell"))
    assert {"shardwell run --grace-s", "shardwell status --timeout-s"} < flags.keys()
    assert "shardwell serve --wait-max-s" in flags
    for path, flag in flags.items():
        assert isinstance(flag.type, Duration), path
        assert flag.type.convert("1.5", flag, None) == 1.5
        for value in (*NO_TIMES, "", "x"):
            with pytest.raises(click.BadParameter, match="number of seconds"):
                flag.type.convert(str(value), flag, None)


def test_a_flag_that_is_none_is_a_usage_error() -> None:
    code, _, log = run_command("run", "-n1", "--grace-s=nan", "--", "true")
    assert code == 2
    assert "--grace-s" in log


SAMPLES = shardwell.Samples(8, 4)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "init": {"weights": np.zeros(8, np.float32)},
    "put_gradient": {"gradient": np.zeros(8, np.float32)},
    "exchange": {"gradient": np.zeros(8, np.float32)},
    "exchange_async": {"gradient": np.zeros(8, np.float32)},
    "begin_exchange": {"gradient": np.zeros(8, np.float32)},
    "set_learning_rate": {"learning_rate": 0.5},
    "get_rows": {"ids": [1]},
    "put_row_gradients": {"ids": [1], "gradients": np.zeros((1, 2), np.float32)},
    "exchange_rows": {"ids": [1], "gradients": np.zeros((1, 2), np.float32)},
    "evict": {"older_than_step": 1},
    "save_checkpoint": {"path": "never"},
    "restore_checkpoint": {"path": "never"},
    "export_table": {"name": "t", "path": "never.safetensors"},
    "delete": {"name": "none"},
    "parameter": {
        "name": "new",
        "size": 8,
        "optimizer": SGD,
        "worker_count": 2,
        "min_contributors": 1,
    },
    "drain": {"worker_id": "none"},
    "remove_member": {"worker_id": "none"},
    "members": {"name": "none"},
    "contributions": {"step": 0},
    "keep_state": {"objects": {}},
    "restore": {"version": 0, "load_id": 1},
    "broadcast": {"root": 0},
    "broadcast_state": {"state": {"weights": np.zeros(2, np.float32)}},
    "reduce": {"root": 0},
    "step_samples": {"name": "none", "step": 0},
    "batches": {"samples": SAMPLES},
    "next_batch": {"samples": SAMPLES, "limit": 1},
    "await_free": {"samples": SAMPLES, "limit": 1},
}


NO_ARRAY = ("barrier", "join", "broadcast_state")


def _verbs(owner: Any) -> Iterator[Callable[[float], None]]:
    """Its public methods with an argument that is a length of time, once for each of those."""
    for name, method in inspect.getmembers(owner, inspect.ismethod):
        for argument in () if name.startswith("_") else inspect.signature(method).parameters:
            if argument.endswith("_s"):
                given = dict(ARGUMENTS.get(name, {}))
                if isinstance(owner, shardwell.Group) and name not in NO_ARRAY:
                    given["array"] = np.zeros(2, np.float32)
                yield partial(_call, method, argument, given)


def _call(method: Any, argument: str, given: dict[str, Any], value: float) -> None:
    if method.__name__ == "rebuild":
        given.pop("array", None)
    result = method(**given, **{argument: value})
    if hasattr(result, "result"):
        result.result(10)


def test_every_argument_of_the_sdk_that_is_a_length_of_time(cluster, connect, tmp_path) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    members = shardwell.Elastic()
    model = client.parameter("m", size=8, optimizer=SGD, members=members)
    table = client.table("t", row_count=9, dim=2, optimizer=SGD, members=members)
    count = 0
    with shardwell.join_group("g", rank=0, size=1, rendezvous=running.target) as group:
        for owner in (client, model, table, group):
            for call in _verbs(owner):
                for value in NO_TIMES:
                    with pytest.raises(shardwell.ArgumentError, match="_s must be"):
                        call(value)
                count += 1
        group.barrier()
    assert count > 20


@pytest.mark.parametrize("value", NO_TIMES)
def test_what_opens_things_refuses_them(cluster, value) -> None:
    running = cluster(1)
    place = {"rank": 0, "size": 1, "rendezvous": running.target}
    for call in (
        partial(shardwell.connect, running.target, timeout_s=value),
        partial(shardwell.connect, running.target, connect_timeout_s=value),
        partial(shardwell.join_group, "g", **place, timeout_s=value),
        partial(shardwell.join_group, "g", **place, join_timeout_s=value),
        partial(shardwell.join_group, "g", **place, lease_s=value),
        partial(shardwell.ThreadedSync, 2, timeout_s=value),
        partial(LocalCluster, 1, grace_s=value),
        partial(running.servers[0].stop, value),
    ):
        with pytest.raises(shardwell.ArgumentError, match="_s must be a number of seconds"):
            call()
