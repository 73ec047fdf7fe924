"""`shardwell plan` as a child process; its memory of a shard beside what a real shard reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.programs.commands import run_command
from shardwell_server.operations import step_time


def test_plan_prints_a_page_for_people() -> None:
    code, output, log = run_command("plan", "7B", "--workers=8", "--link=25Gbit/s", "--compute-s=2")
    assert (code, log) == (0, "")
    for words in ("co-located", "dedicated", "ring", "tree(arity=2)", "Take ", "BytePS", "28.0 GB"):
        assert words in output
    rate = f"{step_time.HOST_BYTES_PER_S / 1e9:g}"
    assert f"--host-rate {rate}GB/s" in output  # links that fast are not the limit
    _, output, _ = run_command("plan", "--help")
    assert f"[default: ({rate}GB/s)]" in " ".join(output.split())
    page = Path(__file__).parents[3] / "docs" / "machines.md"
    assert f"the default, {rate} GB/s, is what it measured" in page.read_text()


def test_json_has_what_the_table_has() -> None:
    code, output, log = run_command("plan", "64MB", "--workers=2", "--codec=fp32", "--json")
    assert (code, log) == (0, "")
    printed = json.loads(output)
    layouts = {one["layout"]: one for one in printed["layouts"]}
    assert list(layouts) == ["co-located", "dedicated", "ring", "tree(arity=2)"]
    assert printed["recommended"] in layouts
    assert layouts["ring"]["link_bytes"] == 64e6  # 2 (2 - 1) / 2 of 64 MB
    assert layouts["ring"]["link_s"] == pytest.approx(64e6 * step_time.HEADER_FACTOR / 125e6)


def test_outer_training_beside_synchronous_steps() -> None:
    code, output, log = run_command("plan", "25M", "--outer=100", "--compute-s=0.2")
    assert (code, log) == (0, "")
    # 4 fragments of 6.25e6 elements: 1526 scales each. fp16: 100 steps of 50.1 MB.
    assert "sends 25.0 MB as int8 and receives as much" in " ".join(output.split())
    assert "5.01 GB, 200 times as much" in " ".join(output.split())
    assert "every 25 inner steps, and leaves 2 before" in " ".join(output.split())
    for mbit in ("1,000", "100", "50.0", "10.0"):
        assert any(line.split()[:1] == [mbit] for line in output.splitlines()), output
    assert "hide all of it" in output
    arguments = ("--outer=100", "--fragments=2", "--overlap=5", "--codec=fp16", "--link=80Mbit/s")
    code, output, log = run_command("plan", "25M", *arguments, "--json")
    assert (code, log) == (0, "")
    shown = json.loads(output)
    assert shown["sent_bytes"] == shown["received_bytes"] == 50_097_658
    assert shown["synchronous_bytes"] == 5_009_765_700
    assert (shown["fragment_count"], shown["overlap"], shown["codec"]) == (2, 5, "fp16")
    assert [one["link_bytes_per_s"] for one in shown["links"]] == [10e6]
    assert shown["links"][0]["hidden_share"] == 0.0  # no inner step takes time
    _, output, _ = run_command("plan", "25M", "--outer=6", "--fragments=3", "--json")
    assert json.loads(output)["overlap"] == 1  # what two inner steps leave room for
    _, output, _ = run_command("plan", "25M", "--outer=100")
    assert "Give --compute-s" in output


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["25M", "--outer=0"], "--outer"),
        (["25M", "--outer=10"], "sync_every=10 must be a multiple of the 4 fragments"),
        (["25M", "--outer=100", "--overlap=25"], "overlap=25 must be below the interval of 25"),
        (["25M", "--fragments=4"], "give --outer"),
        ([], "SIZE"),
        (["much"], "7B"),
        (["0"], "7B"),
        (["7B", "--workers=0"], "worker_count"),
        (["7B", "--shard-count=-1"], "shard_count"),
        (["7B", "--link=0Gbit/s"], "1Gbit/s"),
        (["7B", "--codec=int3"], "--codec"),
        (["7B", "--compute-s=-1"], "--compute-s"),
        (["7B", "--arity=0"], "--arity"),
    ],
)
def test_what_can_t_be_planned(arguments, words) -> None:
    code, output, log = run_command("plan", *arguments)
    assert (code, output) == (2, "")
    assert log.startswith("Usage: ")
    assert words in log.splitlines()[-1]


@pytest.mark.parametrize(
    "optimizer", [shardwell.SGD(0.1), shardwell.SGD(0.1, momentum=0.9), shardwell.AdamW(0.1)]
)
@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_shard_holds_what_is_predicted(cluster, connect, optimizer, codec) -> None:
    """Within 5 %: the shard counts what it keeps of each chunk, too."""
    size = 1_000_000
    client = connect(cluster(2), "w0")
    model = client.parameter("model", size=size, optimizer=optimizer, worker_count=2, codec=codec)
    model.init(np.zeros(size, np.float32))
    job = step_time.Job(
        element_count=size,
        worker_count=2,
        shard_count=2,
        link_bytes_per_s=1e8,
        optimizer=optimizer,
        codec=codec,
    )
    for shard in client.status():
        assert shard.stored_bytes == pytest.approx(step_time.shard_bytes(job), rel=0.05)
