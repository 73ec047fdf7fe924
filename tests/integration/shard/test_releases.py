"""Goal: what an earlier release left, in the middle of a step, is opened, exact, and goes on.

Method: tests/data/releases has, of each release, data directories as a kill leaves them, a
checkpoint, an accumulator's file and contribution logs, made by that release's code (make.py), and
what that code read of them, before and after the open step.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastcrc import crc32

import shardwell
from harness.formats import RELEASES, make
from harness.polling import PATIENCE_S
from harness.programs.commands import Program
from harness.programs.forked_cluster import ForkedCluster
from harness.programs.forkserver import ForkedCalls
from harness.stories.images import in_memory
from harness.threads import in_background
from shardwell.specs.formats import DIRECTORY
from shardwell_server import LocalCluster, MmapGradientAccumulator
from shardwell_server.store.files.boot import kernel_boot_id

MAKE = make()
PACKED = sorted(RELEASES.glob("*.tar.xz"))
WITHOUT_BLOCKS = [path for path in PACKED if path.name.startswith(("0.1.0.", "0.2.0."))]
"""Releases that cut parameters anywhere; that of 2026-11-27 is a commit between two releases."""
without_blocks = pytest.mark.parametrize(
    "release", WITHOUT_BLOCKS, indirect=True, ids=lambda path: path.name.removesuffix(".tar.xz")
)


@pytest.fixture(params=PACKED, ids=lambda path: path.name.removesuffix(".tar.xz"))
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        with tarfile.open(request.param) as packed:
            packed.extractall(path, filter="data")
        yield path


def expected_of(release: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((release / "expected.json").read_text())
    return found


def open_all(client: shardwell.Client, expected: dict[str, Any]) -> dict[str, Any]:
    status = client.status()[0]
    names = {each.spec.name for each in (*status.parameters, *status.tables)} & set(expected)
    return {
        name: client.table(name) if name in MAKE.tables() else client.parameter(name)
        for name in sorted(names)
    }


@pytest.mark.parametrize(
    ("kind", "boot_id"),
    [("process", kernel_boot_id()), ("step", "before the power failed")],
    ids=["killed", "lost power"],
)
def test_a_directory_is_opened_and_its_open_step_closes(
    release: Path, kind: str, boot_id: str
) -> None:
    expected = expected_of(release)
    for path in release.glob(f"{kind}/shard-*/boot.json"):
        path.write_text(json.dumps({"boot_id": boot_id, "state": "running"}))
    with (
        LocalCluster(
            2, release / kind, chunk_size_bytes=1024, durability=kind, session_lease_s=1.0
        ) as cluster,
        shardwell.connect(cluster.target, worker_id="w1") as client,
    ):
        handles = open_all(client, expected)
        assert len(handles) >= (7 if kind == "process" else 3)
        for name, handle in handles.items():
            before, after = (np.array(expected[name][each]) for each in ("before", "after"))
            error_max = {"int8": 0.05, "elastic_rows": 0.01}.get(name, 0)
            # What rounding had left of w1's gradients in int8 was lost with its process; the rows
            # above were read in fp16.
            if name.startswith("elastic"):  # w0 is gone, so that the open step has its gradient
                given = MAKE.row_gradients if name in MAKE.tables() else MAKE.gradient
                handle.join()
                after = before - 0.5 * given(0, 2) - 0.5 * given(1, 3)
                MAKE.give([None, handle], name, 1, 3)
                found = MAKE.values_of(handle, name, 4)
            else:
                if name != "async":  # its files have the third gradient of w0
                    np.testing.assert_array_equal(MAKE.values_of(handle, name, 2), before, name)
                MAKE.give([None, handle], name, 1, 2)
                found = MAKE.values_of(handle, name, 3)
            np.testing.assert_allclose(found, after, 0, error_max, err_msg=name)
    for path in release.glob(f"{kind}/shard-*/shard.json"):
        found = json.loads(path.read_text())
        assert (found["format_version"], found["shardwell_version"]) == (
            DIRECTORY.newest,
            shardwell.__version__,
        )


WORKER = f"""
import runpy, sys, shardwell
make = runpy.run_path({MAKE.__file__!r})
with shardwell.connect(sys.argv[1], worker_id="w1") as client:
    net = client.parameter("sgd", size=make["SIZE"], **make["parameters"]()["sgd"])
    while net.next_step < int(sys.argv[2]):
        net.exchange(make["gradient"](1, net.next_step))
        print(net.next_step, flush=True)
"""
"""A worker that opens a parameter by its own arguments, which say nothing of how it was cut."""
CUT_ANYWHERE = [shardwell.Slice(0, 750), shardwell.Slice(750, 750)]


@without_blocks
def test_a_parameter_keeps_its_slices_through_kills(release: Path) -> None:
    for path in release.glob("process/shard-*/boot.json"):
        path.write_text(json.dumps({"boot_id": kernel_boot_id(), "state": "running"}))
    last_step, kill_step = 9, 5
    with (
        ForkedCalls() as forked,
        ForkedCluster(
            forked, release / "process", shard_count=2, chunk_size_bytes=1024, cluster_id="kept"
        ) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        net = client.parameter("sgd", size=MAKE.SIZE, **MAKE.parameters()["sgd"])
        assert (net.next_step, net.slices) == (3, CUT_ANYWHERE)
        assert client.parameter("sgd", size=MAKE.SIZE, **MAKE.parameters()["sgd"]) is net

        def train() -> None:
            while net.next_step < last_step:
                net.exchange(MAKE.gradient(0, net.next_step))

        training = in_background(train)
        with Program("-c", WORKER, cluster.target, str(last_step)) as worker:
            while int(worker.read_line()) < kill_step:
                pass
        cluster.shards[1].kill()
        cluster.start(1)
        with Program("-c", WORKER, cluster.target, str(last_step)) as worker:
            assert worker.end() == 0
        training.result(PATIENCE_S)
        weights = np.array(expected_of(release)["sgd"]["before"], np.float32)
        for step in range(2, last_step):
            weights -= (MAKE.gradient(0, step) + MAKE.gradient(1, step)) / 4
        np.testing.assert_array_equal(net.get_weights(min_version=last_step), weights)
        np.testing.assert_array_equal(cluster.stored("sgd"), weights)


@without_blocks
def test_a_checkpoint_of_an_older_directory_is_cut_anew(release: Path, tmp_path: Path) -> None:
    names = ("sgd", "momentum", "adam")
    expected = expected_of(release)
    with (
        LocalCluster(2, release / "process", chunk_size_bytes=1024) as cluster,
        shardwell.connect(cluster.target, worker_id="w1") as client,
    ):
        assert [client.parameter(name).slices for name in names] == [CUT_ANYWHERE] * 3
        client.save_checkpoint(tmp_path / "saved", names)
    for shard_count in (1, 2, 5):
        with (
            LocalCluster(shard_count) as cluster,
            shardwell.connect(cluster.target, worker_id="w1") as client,
        ):
            client.restore_checkpoint(tmp_path / "saved")
            for name in names:
                net = client.parameter(name)
                blocks = [[part.offset % 32, part.size > 0] for part in net.slices]
                assert blocks == [[0, True]] * shard_count
                before = np.array(expected[name]["before"], np.float32)
                np.testing.assert_array_equal(net.get_weights(min_version=2), before)


def test_shards_that_make_it_anew_cut_as_shard_0_does(tmp_path: Path) -> None:
    """A parameter of which nothing has begun, on a shard that an older version had not made yet."""
    spec = {"size": 1024, "optimizer": MAKE.SGD}
    with (
        LocalCluster(2, tmp_path) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        client.parameter("net", **spec)
    (path,) = tmp_path.glob("shard-0/parameters/*/parameter.json")
    text = path.read_text().rpartition("}")[0] + "}"
    older = json.dumps(json.loads(text) | {"format_version": DIRECTORY.newest - 1})
    path.write_text(f"{older}\n{crc32.iscsi(older.encode()):08x}\n")
    (removed,) = tmp_path.glob("shard-1/parameters/*[0-9]")
    shutil.rmtree(removed)
    with (
        LocalCluster(2, tmp_path) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        net = client.parameter("net", **spec)
        net.init(np.zeros(1024))
        np.testing.assert_array_equal(net.exchange(np.ones(1024)), np.full(1024, -0.5))
        assert [s.parameters[0].spec.cuts_blocks for s in client.status()] == [True, True]


@pytest.mark.parametrize("shard_count", [1, 2, 5])
def test_a_checkpoint_is_restored(release: Path, shard_count: int) -> None:
    expected = expected_of(release)
    with (
        LocalCluster(shard_count) as cluster,
        shardwell.connect(cluster.target, worker_id="w1") as client,
    ):
        client.restore_checkpoint(release / "checkpoint")
        handles = open_all(client, expected)
        assert set(handles) == set(expected)
        for name, handle in handles.items():
            found = MAKE.values_of(handle, name, 2)
            np.testing.assert_array_equal(found, np.array(expected[name]["before"]), name)


def test_sums_of_an_accumulator_are_read(release: Path) -> None:
    with MmapGradientAccumulator(release / "sums", dim=4, max_rows=8) as sums:
        assert sums.get_grad(3).tolist() == [1, 2, 3, 4]


def test_a_contribution_log_goes_on(release: Path) -> None:
    logs = sorted(release.glob("contributions-process/shard-*.jsonl"))
    first = [json.loads(path.read_text().partition("\n")[0]).get("format") for path in logs]
    with (
        LocalCluster(2, contribution_dir=release / "contributions-process") as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        net = client.parameter(
            "net", size=4, optimizer=MAKE.SGD, worker_count=1, min_contributors=1
        )
        net.init(np.zeros(4))
        net.exchange(np.ones(4))
    for path, format_before in zip(logs, first, strict=True):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line.get("format") for line in (lines[0], lines[-1])] == [format_before, 1]


# Directories of a version that renamed, killed while it did, open, and nothing is lost. Method:
# tests/data/renamed has two shards' directories, made by that version (make.py says in which
# states). Each training goes on, in the middle of a step, and is compared with plain SGD.


RENAMED_PACKED = Path(__file__).parents[2] / "data/renamed/shards.tar.xz"
SIZE = 40
IDS = np.arange(4)
NAMES = {"marked": "marked", "ahead": "ahead", "moved": "new-moved", "done": "new-done"}
"""The name that each has from now on: its new one where both shards had that."""


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        with tarfile.open(RENAMED_PACKED) as packed:
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
