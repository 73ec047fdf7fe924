"""Goal: a checkpoint in an object store is complete or absent, whatever is killed, and restores.

Method: moto's S3 server, a process of its own; saves are killed, cut off and made at once, objects
are damaged; what is left is read by plain HTTP.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.programs.commands import run_command
from harness.threads import in_background, together
from shardwell.checkpoint import stores

pytest.importorskip("obstore")
pytest.importorskip("moto")
object_store = pytest.importorskip("harness.object_store")
pytestmark = pytest.mark.extras
SIZE, ADAM = 1000, shardwell.Adam(lr=0.1)
RUNS = "s3://bucket/runs/{step}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with object_store.object_store(monkeypatch) as found:
        yield found


def opened(client: shardwell.Client) -> Any:
    net = client.parameter("net", size=SIZE, optimizer=ADAM)
    net.init(np.zeros(SIZE))
    return net


def trained(client: shardwell.Client, steps: int, **options: Any) -> Any:
    """Saves each step, with a table and a state beside the weights."""
    net = opened(client)
    counts = {"steps": 0}
    net.keep_state({"counts": counts})
    rows = client.table("rows", row_count=10, dim=2, optimizer=shardwell.SGD(1.0))
    for step in range(steps):
        rows.put_row_gradients([step], np.ones((1, 2), np.float32))
        net.exchange(np.full(SIZE, step + 1.0))
        counts["steps"] += 1
        client.save_checkpoint(RUNS, **options)
    return net


def test_other_shards_go_on_from_the_newest(store, cluster, connect, tmp_path: Path) -> None:
    client = connect(cluster(2), "w0")
    net = trained(client, 4, keep=2)
    expected = net.exchange(np.ones(SIZE))
    assert {key.split("/")[1] for key in store.listed()} == {"3", "4"}
    assert not [key for key in store.listed() if "partial" in key or "removed" in key]

    other = connect(cluster(3), "w0")
    assert str(other.restore_checkpoint(RUNS).path) == "s3://bucket/runs/4"
    again = other.parameter("net", size=SIZE, optimizer=ADAM)
    counts: dict[str, int] = {}
    again.keep_state({"counts": counts})
    assert (again.next_step, counts) == (4, {"steps": 4})
    assert again.exchange(np.ones(SIZE)).tobytes() == expected.tobytes()
    made = shardwell.export_checkpoint(RUNS, tmp_path / "net.safetensors", "net")
    assert (made.version, made.size) == (4, SIZE)


def test_commands_take_urls(store, cluster, connect) -> None:
    running = cluster(2)
    trained(connect(running, "w0"), 1)
    given = {**os.environ, **store.environment}
    saved = run_command(
        "checkpoint", "save", "s3://bucket/by-hand", "--shards", running.target, environment=given
    )
    assert saved[0] == 0, saved
    code, text, _ = run_command(
        "checkpoint", "inspect", "s3://bucket/by-hand", "--verify", environment=given
    )
    assert code == 0
    assert "verified: every file is as it was written" in text
    code, _, log = run_command("checkpoint", "inspect", "s3://bucket", environment=given)
    assert code == 2
    assert "names no place in the bucket" in log


def test_a_name_that_is_taken_is_refused_and_stays(store, cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    opened(client)
    client.save_checkpoint("s3://bucket/one")
    keys = store.listed()
    with pytest.raises(shardwell.ArgumentError, match=r"s3://bucket/one exists already"):
        client.save_checkpoint("s3://bucket/one")
    assert store.listed() == keys


def test_the_same_step_is_saved_once_and_another_replaces_it(store, cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    net = trained(client, 1)
    keys = store.listed()
    client.save_checkpoint(RUNS)
    assert store.listed() == keys
    client.delete("net")
    net = opened(client)
    net.exchange(np.full(SIZE, 7.0))
    client.save_checkpoint(RUNS)
    assert not set(store.listed()) & (set(keys) - {"runs/1/manifest.json"})
    shardwell.inspect_checkpoint(RUNS, verify=True)


def test_of_saves_to_one_place_at_once_one_is_whole(store, cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    opened(client)
    refused = []

    def save() -> None:
        try:
            client.save_checkpoint("s3://bucket/one")
        except shardwell.ArgumentError as error:
            refused.append(error)

    together([save] * 4)
    assert len(refused) == 3
    shardwell.inspect_checkpoint("s3://bucket/one", verify=True)
    assert len({key.split("/")[1] for key in store.listed()}) == 2  # the manifest, and one save's


@pytest.mark.parametrize("what", ["cut", "flipped", "gone"])
def test_a_damaged_one_is_named_and_passed_over(store, cluster, connect, caplog, what) -> None:
    trained(connect(cluster(1), "w0"), 2)
    (key,) = (key for key in store.listed() if key.startswith("runs/2/") and "slice" in key)
    data = bytearray(store.get(key))
    data[-1] ^= 1
    if what == "gone":
        store.delete(key)
    else:
        store.put(key, bytes(data[:-1] if what == "cut" else data))
    with pytest.raises(shardwell.StorageError, match=f"s3://bucket/{key}"):
        shardwell.inspect_checkpoint("s3://bucket/runs/2", verify=True)
    client = connect(cluster(1), "w0")
    with caplog.at_level(logging.WARNING, "shardwell"):
        assert str(client.restore_checkpoint(RUNS).path) == "s3://bucket/runs/1"
    assert "passed over a checkpoint that can't be used" in caplog.text


SAVES = """
import sys, itertools, numpy as np, shardwell
with shardwell.connect(sys.argv[1], worker_id="w0") as client:
    net = client.parameter("net")
    for step in itertools.count():
        net.exchange(np.ones(net.size, np.float32))
        client.save_checkpoint("s3://bucket/runs/{step}", keep=2)
        print(step, flush=True)
"""


def test_a_save_that_is_killed_leaves_nothing_that_looks_whole(
    store, cluster, connect, monkeypatch
) -> None:
    running = cluster(2)
    client = connect(running, "operator")
    net = client.parameter("net", size=300_000, optimizer=ADAM)
    net.init(np.zeros(300_000, np.float32))
    delays = random.Random(1)

    for _ in range(6):
        program = subprocess.Popen(
            [sys.executable, "-c", SAVES, running.target], stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        program.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(delays.uniform(0.0, 0.3))
        program.send_signal(signal.SIGKILL)
        program.wait()
        program.stdout.close()
        shardwell.inspect_checkpoint(RUNS, verify=True)
    monkeypatch.setattr(stores, "_ABANDONED", timedelta(0))
    last = connect(running, "w0").parameter("net", size=300_000, optimizer=ADAM)
    last.exchange(np.ones(300_000, np.float32))  # of which a killed one has given a part
    made = client.save_checkpoint(RUNS, keep=1)
    step = str(made.path).rpartition("/")[2]
    named = [f"runs/{step}/{file.path}" for each in made.parameters for file in each.files]
    older = [key for key in store.listed() if int(key.split("/")[1]) <= int(step)]
    assert sorted(older) == sorted([*named, f"runs/{step}/manifest.json"])


def test_a_removal_from_a_store_that_was_cut_off_is_finished(store, cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    trained(client, 2)
    manifest = store.get("runs/1/manifest.json")
    store.put("runs/1/manifest.removed", manifest)
    store.delete("runs/1/manifest.json")
    store.put("runs/1/notes.txt", b"a user's own")
    opened(client).exchange(np.ones(SIZE))
    client.save_checkpoint(RUNS, keep=2)
    assert [key for key in store.listed() if key.startswith("runs/1/")] == ["runs/1/notes.txt"]


def test_a_store_that_starts_again_costs_the_save_at_most(store, cluster, connect) -> None:
    """It has lost all, as no store of a user's does; so nothing is whole until the next save."""
    client = connect(cluster(1), "w0")
    trained(client, 1)
    store.kill()
    saving = in_background(partial(client.save_checkpoint, RUNS))
    store.start()
    error = saving.exception(120)
    assert error is None or "s3://bucket/runs/1" in str(error)
    if error is not None:
        client.save_checkpoint(RUNS)
    shardwell.inspect_checkpoint(RUNS, verify=True)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s3://bucket", "names no place in the bucket"),
        ("s3://bucket/", "names no place in the bucket"),
        ("s3://bucket/a/../b", "names no place in the bucket"),
        ("s3:/bucket/a", "is a URL of 's3'"),
        ("ftp://bucket/a", "is a URL of 'ftp'"),
    ],
)
def test_what_is_no_place_is_refused_by_name(url: str, match: str) -> None:
    with pytest.raises(shardwell.ArgumentError, match=match):
        shardwell.inspect_checkpoint(url)


def test_without_obstore_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    stores._obstore.cache_clear()
    with pytest.raises(shardwell.ArgumentError, match=r"pip install .*obstore"):
        shardwell.inspect_checkpoint(RUNS)


def test_a_bucket_that_is_not_there_is_named(store, cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    opened(client)
    with pytest.raises(shardwell.StorageError, match=r"s3://other/one/.* failed: ") as caught:
        client.save_checkpoint("s3://other/one")
    assert "secret-of-tests" not in str(caught.value)
    with pytest.raises(shardwell.StorageError, match=r"s3://other/one is no checkpoint"):
        shardwell.inspect_checkpoint("s3://other/one")
