"""Goal: a client and its shards let go of what is deleted or closed, so that a sweep has no end.

Method: parameters, tables and families that are opened, trained and deleted in turn, in one process
with their shards. Python's garbage collector tells which objects of both sides still exist.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from shardwell.outer.outer import Outer
from shardwell.parameter.image import Image
from shardwell.steps.handle import Handle
from shardwell_server.shard.slice import ShardSlice

SIZE = 4000
COUNT = 12
"""Trials of a sweep."""
ELASTIC = shardwell.Elastic()


def _parameter(**options: Any) -> Callable[[shardwell.Client, str], Any]:
    def trial(client: shardwell.Client, name: str) -> Any:
        net = client.parameter(name, size=SIZE, optimizer=shardwell.SGD(0.5), **options)
        net.init(np.zeros(SIZE))
        if options.get("mode") == "async":
            net.put_gradient(np.ones(SIZE))
        else:
            net.exchange(np.ones(SIZE))
        np.testing.assert_allclose(net.get_weights(), -0.5, rtol=0.01)
        return net

    return trial


def _table(client: shardwell.Client, name: str) -> Any:
    rows = np.arange(SIZE // 8)
    table = client.table(name, row_count=len(rows), dim=8, optimizer=shardwell.SGD(0.5))
    table.put_row_gradients(rows, np.ones((len(rows), 8), np.float32))
    return table


def _family(client: shardwell.Client, name: str) -> Any:
    weights = {"layer": np.zeros(SIZE, np.float32)}
    outer = shardwell.Outer(
        client, name, tensors=weights, fragments=1, sync_every=1, members=ELASTIC
    )
    weights = outer.init(weights)
    weights["layer"] += 1.0
    outer.after_step(weights)
    return outer


KINDS = {
    "parameter": _parameter(),
    "int8": _parameter(codec="int8"),
    "elastic": _parameter(codec="int8", members=ELASTIC),
    "async": _parameter(mode="async"),
    "table": _table,
    "family": _family,
}


def _objects() -> dict[int, object]:
    """Those that hold a parameter's or table's arrays, of clients and of shards."""
    gc.collect()
    kinds = (Handle, Image, Outer, ShardSlice)
    return {id(each): each for each in gc.get_objects() if issubclass(type(each), kinds)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("end", ["delete", "close, delete"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_of_the_trials_of_a_sweep(cluster, connect, kind, end) -> None:
    client, before = connect(cluster(2), "w0"), _objects().keys()
    for index in range(COUNT):
        made = KINDS[kind](client, f"trial-{index}")
        if end != "delete":
            made.close()
        client.delete(f"trial-{index}")
    del made
    eventually("both sides let go", lambda: _objects().keys() <= before)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_sweep_needs_the_memory_of_one_trial(cluster, connect) -> None:
    client, size, before = connect(cluster(1), "w0"), 500_000, 0
    for index in range(40):
        net = client.parameter(
            f"trial-{index}", size=size, optimizer=shardwell.SGD(0.5), codec="int8"
        )
        net.init(np.zeros(size))
        net.exchange(np.ones(size))
        client.delete(f"trial-{index}")
        if index == 9:  # buffers that stay
            before = _resident_bytes()
    # 30 that were kept would have the weights' image and what rounding had left.
    assert _resident_bytes() - before < 30 * 2 * size * 4 // 2


@pytest.mark.parametrize("kind", ["int8", "elastic", "table"])
def test_what_was_closed_is_let_go_of_and_opened_anew(cluster, connect, kind) -> None:
    client = connect(cluster(1), "w0")
    first = KINDS[kind](client, "net")
    open_again = client.table if kind == "table" else client.parameter
    assert open_again("net") is first
    first.close()
    held = weakref.ref(first)
    del first
    gc.collect()
    assert held() is None
    again = open_again("net")
    assert again.next_step == 1
    assert open_again("net") is again


@pytest.mark.parametrize("kind", ["int8", "table"])
def test_what_was_closed_needs_no_garbage_collector(cluster, connect, kind) -> None:
    client = connect(cluster(1), "w0")
    made = KINDS[kind](client, "net")
    made.close()
    gc.collect()
    gc.disable()
    try:
        held = weakref.ref(made)
        del made
        eventually("its arrays are freed", lambda: held() is None)
    finally:
        gc.enable()
