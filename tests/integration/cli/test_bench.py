"""Goal: `shardwell bench` measures a real cluster, leaves nothing there, and disturbs no other.

Method: the command as a child process beside clusters that hold other parameters; which figures
there are is asserted, and which of them can't be, but no time.
"""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from harness.programs.commands import Program, run_command
from harness.programs.ports import free_port
from shardwell_server.operations import step_time

SGD = shardwell.SGD(learning_rate=0.5)
BRIEF = ("bench", "--megabytes=1", "--seconds=0.01")
CHUNKS = {"chunk_size_bytes": 2**20}
"""The shards' default; payloads below 64 KiB share no memory."""


def names_on(client: shardwell.Client) -> set[str]:
    """Of all parameters of a cluster."""
    return {each.spec.name for shard in client.status() for each in shard.parameters}


def test_all_figures_of_each_shard(cluster) -> None:
    running = cluster(3, **CHUNKS)
    code, output, log = run_command(*BRIEF, "--json", f"--shards={running.target}")
    assert (code, log) == (0, "")
    printed = json.loads(output)
    assert printed["cluster_id"] == running.cluster_id
    assert printed["left_parameters"] == []
    assert [shard["address"] for shard in printed["shards"]] == running.addresses
    assert sum(shard["slice_size"] for shard in printed["shards"]) == 250_000
    for shard in printed["shards"]:
        assert shard["round_trip_s"] > 0
        assert set(shard["out_s"]) == set(shard["in_s"]) == {"fp16", "fp32"}
        assert min(*shard["out_s"].values(), *shard["in_s"].values()) > 0
    assert set(printed["codecs"]) == {"fp32", "fp16", "bf16", "int8"}
    assert all(rate > 0 for rates in printed["codecs"].values() for rate in rates.values())
    step = printed["step"]
    assert step["limit"] in ("link", "codec", "latency", "shards")
    assert step["exchange_s"] > 0


def test_bench_prints_a_page_for_people(cluster) -> None:
    running = cluster(2, **CHUNKS)
    code, output, log = run_command(*BRIEF, f"--shards={running.target}")
    assert (code, log) == (0, "")
    for words in (running.cluster_id, *running.addresses, "encode", "decode", "limited by"):
        assert words in output
    assert "Left on the shards" not in output
    assert len(output.splitlines()) < 30


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="memory is shared on Linux")
@pytest.mark.parametrize(
    ("setting", "transport"), [({}, "memory"), ({"SHARDWELL_SAME_HOST": "off"}, "gRPC")]
)
def test_the_transport_that_an_exchange_uses(cluster, setting, transport) -> None:
    running = cluster(2, **CHUNKS)
    code, output, _ = run_command(
        *BRIEF, "--json", f"--shards={running.target}", environment=setting
    )
    assert code == 0
    printed = json.loads(output)
    assert [shard["transport"] for shard in printed["shards"]] == [transport] * 2
    if transport == "memory":
        assert printed["step"]["link_s"] == 0.0


def test_a_link_that_is_given_is_the_bound(cluster) -> None:
    """1 MB as fp16 and headers over 1 kbit/s would take an hour: far more than what is measured."""
    running = cluster(1, **CHUNKS)
    code, output, _ = run_command(
        *BRIEF,
        "--json",
        "--link=1kbit/s",
        f"--shards={running.target}",
        environment={"SHARDWELL_SAME_HOST": "off"},
    )
    assert code == 0
    step = json.loads(output)["step"]
    assert step["link_s"] == pytest.approx(500_000 * step_time.HEADER_FACTOR / 125)
    assert step["limit"] == "link"


def test_parameters_that_train_there_are_not_touched(cluster, connect) -> None:
    running = cluster(2, **CHUNKS)
    model = connect(running, "w0").parameter("model", size=100, optimizer=SGD)
    model.init(np.zeros(100, np.float32))
    model.put_gradient(np.ones(100, np.float32))
    for _ in range(2):
        code, _, log = run_command(*BRIEF, f"--shards={running.target}")
        assert (code, log) == (0, "")
    for shard in connect(running, "looker").status():
        assert [one.spec.name for one in shard.parameters] == ["model"]
        assert shard.parameters[0].version_max == 1
    np.testing.assert_array_equal(model.exchange(np.ones(100, np.float32)), -1.0)


def test_ctrl_c_ends_it_and_the_next_one_works(cluster, connect) -> None:
    running = cluster(2, **CHUNKS)
    arguments = ("bench", "--megabytes=1", "--seconds=600", f"--shards={running.target}")
    looker = connect(running, "looker")
    with Program("-m", "shardwell_server", *arguments, is_forked=True) as program:
        eventually(
            "it moves something",
            lambda: any(one.version_max for shard in looker.status() for one in shard.parameters),
        )
        program.send(signal.SIGINT)
        assert program.end() == 128 + signal.SIGINT
        assert "Traceback" not in "\n".join(program.log)
    assert names_on(looker) == set()
    code, _, log = run_command(*BRIEF, f"--shards={running.target}")
    assert (code, log) == (0, "")


def test_a_shard_that_is_away_is_named(cluster) -> None:
    running = cluster(2, **CHUNKS)
    down = f"127.0.0.1:{free_port()}"
    code, output, log = run_command(
        *BRIEF, "--timeout-s=2", f"--shards={running.addresses[0]},{down}"
    )
    assert (code, output) == (1, "")
    assert "shard 1" in log
    assert down in log
    assert "Traceback" not in log


def test_addresses_in_another_order_are_refused(cluster) -> None:
    running = cluster(2, **CHUNKS)
    code, output, log = run_command(*BRIEF, f"--shards={','.join(running.addresses[::-1])}")
    assert (code, output) == (1, "")
    assert "shard 1 of 2" in log


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--shards HOST:PORT"),
        (["--shards=nonsense"], "nonsense"),
        (["--shards=127.0.0.1:1", "--megabytes=0"], "--megabytes"),
        (["--shards=127.0.0.1:1", "--megabytes=100000"], "--megabytes"),
        (["--shards=127.0.0.1:1", "--link=fast"], "1Gbit/s"),
        (["--shards=127.0.0.1:1", "--seconds=nan"], "--seconds"),
    ],
)
def test_flags_that_can_t_be_used(flags, words) -> None:
    code, output, log = run_command("bench", *flags)
    assert (code, output) == (2, "")
    assert words in log
    assert "Traceback" not in log
