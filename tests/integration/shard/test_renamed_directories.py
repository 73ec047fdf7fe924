"""Goal: directories of a version that renamed, killed while it did, open, and nothing is lost.

Method: tests/data/renamed has two shards' directories, made by that version (make.py says in which
states). Each training goes on, in the middle of a step, and is compared with plain SGD.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.stories.images import in_memory
from shardwell_server import LocalCluster

PACKED = Path(__file__).parents[2] / "data/renamed/shards.tar.xz"
SIZE = 40
IDS = np.arange(4)
NAMES = {"marked": "marked", "ahead": "ahead", "moved": "new-moved", "done": "new-done"}
"""The name that each has from now on: its new one where both shards had that."""


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        with tarfile.open(PACKED) as packed:
            packed.extractall(path, filter="data")
        yield path


def started(path: Path) -> LocalCluster:
    return LocalCluster(2, path, chunk_size_bytes=1024, session_lease_s=1.0)


def opened(client: shardwell.Client, name: str, kind: str) -> Any:
    return client.table(f"{name}-t") if kind == "table" else client.parameter(f"{name}-p")


def give(handle: Any, step: int) -> None:
    if isinstance(handle, shardwell.Table):
        handle.put_row_gradients(IDS, np.full((4, 2), step + 1, np.float32))
    else:
        handle.put_gradient(np.full(SIZE, step + 1, np.float32))


def read(handle: Any, version: int) -> Any:
    if isinstance(handle, shardwell.Table):
        return handle.get_rows(IDS, min_version=version)
    return handle.get_weights(min_version=version)


def after(steps: int) -> float:
    """Any weight after so many steps of both workers."""
    return -0.5 * sum(range(1, steps + 1))


@pytest.mark.parametrize("kind", ["parameter", "table"])
@pytest.mark.parametrize("state", NAMES)
def test_it_has_one_name_and_goes_on(left: Path, state: str, kind: str) -> None:
    for step in (2, 3):  # and again, from what this version wrote
        with (
            started(left) as running,
            shardwell.connect(running.target, worker_id="w0") as first,
            shardwell.connect(running.target, worker_id="w1") as second,
        ):
            crew = [opened(each, NAMES[state], kind) for each in (first, second)]
            np.testing.assert_array_equal(read(crew[1], step), after(step))
            if step > 2:
                give(crew[0], step)
            give(crew[1], step)  # which closes the step that w0 had given already
            for handle in crew:
                np.testing.assert_array_equal(read(handle, step + 1), after(step + 1))
            held = [
                {e.spec.name for e in (*shard.parameters, *shard.tables)}
                for shard in first.status()
            ]
            name = f"{NAMES[state]}-{kind[0]}"
            assert [name in each for each in held] == [True, True]
            others = {f"new-{state}-{kind[0]}", f"{state}-{kind[0]}"} - {name}
            assert [others & each for each in held] == [set(), set()]
            error = getattr(shardwell, f"Unknown{kind.title()}Error")
            with pytest.raises(error):
                opened(first, others.pop()[:-2], kind)


@pytest.mark.parametrize("kind", ["parameter", "table"])
@pytest.mark.parametrize("state", NAMES)
def test_it_is_deleted_and_both_names_are_free(left: Path, state: str, kind: str) -> None:
    with (
        started(left) as running,
        shardwell.connect(running.target, worker_id="w1") as client,
    ):
        opened(client, NAMES[state], kind)
        assert client.delete(f"{NAMES[state]}-{kind[0]}", force=True) > 0
    with (
        started(left) as running,
        shardwell.connect(running.target, worker_id="w1") as client,
    ):
        for name in (f"{state}-{kind[0]}", f"new-{state}-{kind[0]}"):
            rule = shardwell.SGD(learning_rate=0.5)
            if kind == "table":
                made: Any = client.table(name, row_count=9, dim=2, optimizer=rule)
                made.put_row_gradients([1], np.ones((1, 2), np.float32))
            else:
                made = client.parameter(name, size=5, optimizer=rule)
                made.init(np.zeros(5, np.float32))
                np.testing.assert_array_equal(made.exchange(np.ones(5)), -0.5)


def test_a_name_that_was_given_is_not_taken_back(left: Path) -> None:
    """Where the renaming was done, workers of the old name hear the new one."""
    with started(left) as running:
        shard = running.servers[1].shard
        (part,) = [each for each in shard.parameters.all() if each.spec.name == "new-ahead-p"]
        shard.parameters.take_back("ahead-p", part.incarnation + 1)  # of another one
        shard.parameters.take_back("ahead-p", 0)
        assert shard.parameters.find("ahead-p") is None
        with pytest.raises(
            shardwell.UnknownParameterError, match="renamed to 'new-done-p' by 'w1'"
        ):
            running.servers[0].shard.parameters.get("done-p")
