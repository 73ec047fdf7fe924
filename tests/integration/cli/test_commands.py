"""The command `shardwell`: serve, cluster, status and their directories, as child processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.faults.standing_still import stopped
from harness.leaks import child_pids, is_running
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import Program, ServingShard, run_command
from harness.programs.ports import free_port
from shardwell_server import LocalCluster
from shardwell_server.config import Limits
from shardwell_server.store.files.data_dir import write_record

SGD = shardwell.SGD(learning_rate=0.5)
WIDE = {"COLUMNS": "250"}
SHARDS = "--shards=127.0.0.1:1"
CLUSTER = ["-m", "shardwell_server", "cluster", "--shard-count=2"]


@pytest.fixture
def trained(cluster, connect):
    """A cluster with a step that waits for `late` and a worker that it has not seen."""
    running = cluster(2)
    model, late = (
        connect(running, name).parameter("model", size=100, optimizer=SGD, worker_count=3)
        for name in ("early", "late")
    )
    model.init(np.zeros(100, np.float32))
    model.put_gradient(np.ones(100, np.float32))
    assert late.next_step == 0
    connect(running, "early").parameter("fresh", size=1, optimizer=SGD)
    return running


def test_status_as_a_table(trained) -> None:
    code, output, log = run_command("status", "--shards", trained.target, environment=WIDE)
    assert (code, log) == (0, "")
    for words in ("0 of 2", "1 of 2", trained.cluster_id, "serving", *trained.addresses):
        assert words in output
    assert output.count("0; in: early; missing: late, 1 never seen") == 1
    assert output.count("not initialized") == 1
    assert re.search(r"^ model +100 +SGD 0.5 +fp16 ", output, re.MULTILINE)
    assert "0 to 49" not in output
    assert "open step: its number, workers whose gradients are in it" in output
    # Each shard's part by itself.
    target = f"--shards={trained.target}"
    code, output, _ = run_command("status", "--by-shard", target, environment=WIDE)
    assert code == 0
    assert output.count("0; in: early; missing: late, 1 never seen") == 2
    assert output.count("not initialized") == 2
    assert re.search(r"^ model +0 +0 to 49 +SGD", output, re.MULTILINE)
    assert re.search(r"^ model +1 +50 to 99 +SGD", output, re.MULTILINE)


def test_status_in_a_narrow_pipe_still_names_who_is_missing(trained) -> None:
    """Without a terminal the width is unknown: names and addresses must stay in one piece."""
    code, output, _ = run_command("status", "--shards", trained.target)
    assert code == 0
    for words in (*trained.addresses, trained.cluster_id, "late", "early"):
        assert words in output


def test_status_as_json(trained) -> None:
    code, output, log = run_command("status", "--json", "--shards", trained.target)
    assert (code, log) == (0, "")
    shards = [json.loads(line) for line in output.splitlines()]
    assert [shard["address"] for shard in shards] == trained.addresses
    for index, shard in enumerate(shards):
        assert shard["shard_index"] == index
        by_name = {parameter["spec"]["name"]: parameter for parameter in shard["parameters"]}
        assert by_name["model"]["missing_worker_ids"] == ["late"]
        assert by_name["model"]["unknown_worker_count"] == 1
        assert by_name["model"]["initialized"] is True
        assert by_name["fresh"]["initialized"] is False


def test_status_of_tables(cluster, connect) -> None:
    running = cluster(2)
    options = {"optimizer": SGD, "row_count": 1500, "dim": 8}
    early, _ = (
        connect(running, name).table("users", worker_count=3, **options)
        for name in ("early", "late")
    )
    early.put_row_gradients(np.arange(1200), np.ones((1200, 8), np.float32))
    connect(running, "w").table("clicks", mode="async", codec="bf16", **options)
    code, output, log = run_command("status", "--shards", running.target, environment=WIDE)
    assert (code, log) == (0, "")
    for words in ("tables", "users", "1,200", "SGD 0.5", "fp16", "0, asynchronous", "bf16"):
        assert words in output
    assert output.count("0; in: early; missing: late, 1 never seen") == 1
    target = f"--shards={running.target}"
    code, output, _ = run_command("status", "--by-shard", target, environment=WIDE)
    assert (code, output.count(" 600 "), output.count("0, asynchronous")) == (0, 2, 2)
    code, output, _ = run_command("status", "--json", "--shards", running.target)
    assert code == 0
    for line in output.splitlines():
        clicks, users = json.loads(line)["tables"]
        assert (clicks["spec"]["name"], clicks["row_count"]) == ("clicks", 0)
        assert (users["row_count"], users["missing_worker_ids"]) == (600, ["late"])


def test_status_takes_its_target_from_the_environment(trained) -> None:
    code, output, _ = run_command(
        "status", "--json", environment={"SHARDWELL_SHARDS": trained.target}
    )
    assert (code, len(output.splitlines())) == (0, 2)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_status_of_a_shard_that_is_down(trained, flags) -> None:
    down = f"127.0.0.1:{free_port()}"
    target = f"{trained.addresses[0]},{down}"
    code, output, _ = run_command(
        "status", *flags, "--timeout-s=2", f"--shards={target}", environment=WIDE
    )
    assert code == 1
    assert down in output
    assert trained.addresses[0] in output
    if flags:
        assert "shard 1" in json.loads(output.splitlines()[1])["error"]
    else:
        assert "no answer" in output
        assert "shard 1" in output
        assert "model" in output


def test_status_of_no_shard_at_all() -> None:
    """Nothing is known of parameters, so there is no table that says there are none."""
    code, output, _ = run_command("status", f"--shards=127.0.0.1:{free_port()}", environment=WIDE)
    assert code == 1
    assert "no answer" in output
    assert "parameters" not in output


def test_status_of_a_shard_whose_files_are_gone(tmp_path) -> None:
    """It answers, and says what is wrong with it."""
    directory = tmp_path / "data"
    with ServingShard(f"--data-dir={directory}") as shard:
        address = shard.address()
        directory.rename(tmp_path / "elsewhere")

        def shown() -> str:
            code, output, _ = run_command("status", f"--shards={address}", environment=WIDE)
            return output if code else ""

        output = eventually("it is noticed", shown)
    assert "failing" in output
    assert "answer" not in output
    assert f"{address}: data directory {directory} was removed" in " ".join(output.split())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize("places", [(1, 0), (0,), (1,), (0, 1, 2)])
def test_status_of_addresses_that_are_not_the_cluster(trained, cluster, flags, places) -> None:
    addresses = [*trained.addresses, *cluster(1).addresses]
    target = ",".join(addresses[place] for place in places)
    code, output, _ = run_command("status", *flags, f"--shards={target}", environment=WIDE)
    assert code == 1
    assert f"should be shard {len(places) - 1} of {len(places)}" in output
    if flags:
        assert any("error" in json.loads(line) for line in output.splitlines())
    else:
        assert "wrong place" in output


def test_status_of_shards_of_two_clusters(cluster) -> None:
    one, other = cluster(2), cluster(2)
    target = f"{one.addresses[0]},{other.addresses[1]}"
    code, output, _ = run_command("status", f"--shards={target}", environment=WIDE)
    assert code == 1
    assert "other cluster" in output
    assert f"{other.addresses[1]} should be shard 1 of 2 of cluster {one.cluster_id!r}" in output


def test_status_of_workers_that_have_finished(cluster, connect) -> None:
    running = cluster(2)
    options = {"optimizer": SGD, "worker_count": 2}
    clients = [connect(running, name) for name in ("w0", "w1")]
    models = [client.parameter("model", size=100, **options) for client in clients]
    tables = [client.table("users", row_count=9, dim=2, **options) for client in clients]
    models[0].init(np.zeros(100, np.float32))
    for _ in range(3):
        for model, table in zip(models, tables, strict=True):
            model.put_gradient(np.ones(100, np.float32))
            table.put_row_gradients([1], np.ones((1, 2), np.float32))
    for client in clients:
        client.close()
    target = f"--shards={running.target}"
    code, output, _ = run_command("status", "--all", target, environment=WIDE)
    assert code == 0
    assert "missing" not in output
    assert output.count("3; done: w0, w1") == 2
    code, output, _ = run_command("status", target, environment=WIDE)  # both are one line
    assert code == 0
    assert "done:" not in output
    assert "ended, all workers have left (--all lists them): model, users" in output


@pytest.mark.parametrize("target", ["nonsense", "a:0", ""])
def test_status_of_no_target(target) -> None:
    code, _, log = run_command("status", f"--shards={target}")
    assert code == 2
    assert log
    assert "Traceback" not in log


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("checkpoint", "save", "never"),
        ("checkpoint", "restore", "never"),
        ("table", "export", "users", "never.parquet"),
        ("bench",),
        ("train-digits", "--worker-id=w0"),
    ],
    ids=" ".join,
)
def test_shards_that_are_not_given_are_asked_for_in_the_same_words(arguments) -> None:
    code, _, log = run_command(*arguments)
    assert code == 2
    assert "--shards HOST:PORT[,HOST:PORT...]" in log
    assert "$SHARDWELL_SHARDS" in log


def test_serve_takes_flags_and_variables(connect) -> None:
    with ServingShard("--cluster-id=mine", "--parameter-count-max=1", "--chunk-size-bytes=64") as s:
        client = connect(s.address(), "w0", cluster_id="mine")
        client.parameter("one", size=100, optimizer=SGD)
        with pytest.raises(shardwell.LimitError, match="parameter_count_max=1"):
            client.parameter("two", size=100, optimizer=SGD)
    variables = {
        "SHARDWELL_SHARD_INDEX": "0",
        "SHARDWELL_SHARD_COUNT": "1",
        "SHARDWELL_LISTEN": "127.0.0.1:0",
        "SHARDWELL_CLUSTER_ID": "theirs",
    }
    with Program("-m", "shardwell_server", "serve", environment=variables) as program:
        address = program.read_line().removeprefix("serving on ")
        assert connect(address, "w1").cluster_id == "theirs"


def test_the_help_of_serve_says_what_each_limit_is() -> None:
    code, output, _ = run_command("serve", "--help", environment={"COLUMNS": "200"})
    assert code == 0
    printed = " ".join(output.split())
    for field in dataclasses.fields(Limits):
        entry = printed.split(f"--{field.name.replace('_', '-')} ")[1]
        meaning = entry.split("[default:")[0].partition(" ")[2]
        assert len(meaning) > 20, entry
        assert printed.count(meaning) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shard-index=1", "--shard-count=1"], "shard_index"),
        (["--shard-index=0", "--shard-count=1", "--chunk-size-bytes=65"], "chunk_size_bytes"),
        (["--shard-index=0", "--shard-count=1", "--listen=nowhere"], "listen"),
        (["--shard-index=0", "--shard-count=1", "--cluster-id=a b"], "cluster_id"),
        (["--shard-index=0", "--shard-count=1", "--stream-count-max=0"], "stream_count_max"),
        (["--shard-index=0", "--shard-count=1", "--grace-s=-1"], "--grace-s"),
        (["--shard-index=0", "--shard-count=1", "--durability=often"], "durability"),
        (["--shard-index=0", "--shard-count=1", "--durability=step"], "--data-dir"),
        (["--shard-count=1"], "shard-index"),
    ],
)
def test_serve_refuses_flags_that_can_t_be_used(flags, words) -> None:
    _check_usage(words, "serve", *flags)


def _check_usage(words: str, *arguments: str) -> None:
    """A command that is used wrongly does nothing and says how to use it."""
    code, output, log = run_command(*arguments)
    assert (code, output) == (2, ""), log
    assert log.startswith("Usage: "), log
    assert words in log.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--durability=often"], "durability"), (["--durability=5"], "--data-dir")],
)
def test_cluster_refuses_flags_that_can_t_be_used(flags, words) -> None:
    _check_usage(words, "cluster", *flags)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--shard-index=0", "--shard-count=1", "--data-dir="),
        ("cluster", "--data-dir="),
        ("checkpoint", "save", "", SHARDS),
        ("checkpoint", "restore", "", SHARDS),
        ("checkpoint", "inspect", ""),
        ("table", "export", "users", "", SHARDS),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_working_directory(arguments) -> None:
    _check_usage("it is empty", *arguments)


def test_an_unknown_export_format_is_refused_before_shards_are_asked() -> None:
    _check_usage(".safetensors or .parquet", "table", "export", "users", "users.csv", SHARDS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "127.0.0.1:1,127.0.0.1:2"])
def test_health_of_no_address(address) -> None:
    _check_usage(f"HOST:PORT; got {address!r}", "health", address)


def test_health_asks_no_port_beyond_the_last() -> None:
    with LocalCluster(1) as running:
        port = int(running.target.rpartition(":")[2])
        address = f"127.0.0.1:{port + 2**16}"  # gRPC alone would ask the shard
        _check_usage(f"HOST:PORT; got {address!r}", "health", address)


@pytest.mark.parametrize("arguments", [(), ("",)])
def test_health_asks_for_an_address(arguments) -> None:
    _check_usage("add HOST:PORT, or set $SHARDWELL_LISTEN", "health", *arguments)


def test_a_data_dir_belongs_to_one_shard_and_one_process(tmp_path) -> None:
    directory = tmp_path / "data" / "shard-0"
    mine = [f"--data-dir={directory}", "--cluster-id=mine"]
    with ServingShard(*mine) as first:
        first.address()
        code, _, log = run_command(
            "serve", "--shard-index=0", "--shard-count=1", "--listen=127.0.0.1:0", *mine
        )
        assert code == 1
        assert f"{directory} is in use by another process" in log
        first.send(signal.SIGKILL)
        first.end()
    with ServingShard(*mine) as again:  # the lock of a killed process is free
        again.address()
        again.send(signal.SIGTERM)
        assert again.end() == 0
    for other in (
        ["--shard-index=0", "--shard-count=1", "--cluster-id=theirs"],
        ["--shard-index=1", "--shard-count=2", "--cluster-id=mine"],
    ):
        code, _, log = run_command(
            "serve", *other, "--listen=127.0.0.1:0", f"--data-dir={directory}"
        )
        assert code == 1
        assert "belongs to another shard" in log
    (directory / "shard.json").write_text("{")
    code, _, log = run_command(
        "serve", "--shard-index=0", "--shard-count=1", "--listen=127.0.0.1:0", *mine
    )
    assert code == 1
    assert "can't be read" in log


def shard_pid(program: Program, index: int, unlike: int = 0) -> int:
    """The process of a shard of `shardwell cluster`, once there is one that is not `unlike`."""

    def look() -> int | None:
        for pid in child_pids(program.pid) - {unlike}:
            with contextlib.suppress(OSError):
                if f"--shard-index={index}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    return pid
        return None

    return eventually(f"shard {index} has a process", look)


class TestCluster:
    """`shardwell cluster`, and that its children end however it ends."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_it_prints_the_export_line_and_stops_everything(self, tmp_path, number) -> None:
        arguments = ["cluster", "--shard-count=2", f"--data-dir={tmp_path}"]
        with Program("-m", "shardwell_server", *arguments) as program:
            line = program.read_line()
            assert line.startswith("export SHARDWELL_SHARDS=")
            target = line.removeprefix("export SHARDWELL_SHARDS=")
            children = child_pids(program.pid)
            assert len(children) == 2
            with shardwell.connect(target, worker_id="w0") as client:
                model = client.parameter("m", size=100, optimizer=SGD)
                model.init(np.zeros(100, np.float32))
                np.testing.assert_array_equal(model.exchange(np.ones(100, np.float32)), -0.5)
            program.send(number)
            code = program.end()
            assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
            eventually("its children have ended", lambda: not any(map(is_running, children)))
        kept = sorted(path.name for path in tmp_path.iterdir())
        assert kept == ["cluster.json", "shard-0", "shard-1"]

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_with_a_data_dir_it_comes_back_on_its_ports(self, tmp_path, number) -> None:
        lines = []
        for flags in (["--shard-count=3"], []):
            with Program(*CLUSTER[:-1], f"--data-dir={tmp_path}", *flags) as program:
                lines.append(program.read_line())
                program.send(number)
                program.end()
        assert lines[0] == lines[1]
        assert lines[0].count("127.0.0.1:") == 3

    def test_a_port_of_its_own_that_is_taken_is_named(self, tmp_path) -> None:
        with Program(*CLUSTER, f"--data-dir={tmp_path}") as program:
            address = program.read_line().rpartition(",")[2]
            program.send(signal.SIGTERM)
            assert program.end() == 0
        host, port = address.split(":")
        with socket.create_server((host, int(port))):
            code, _, log = run_command("cluster", f"--data-dir={tmp_path}")
            assert code == 1
            assert f"shard 1 can't listen on {address}" in log
            assert "remove cluster.json in the data directory" in log

    @pytest.mark.parametrize(
        "text", ["", "{}", '{"format_version": 1, "shards": "x:1"}', "flipped"]
    )
    def test_a_record_of_its_ports_that_is_damaged_is_refused(self, tmp_path, text) -> None:
        record = tmp_path / "cluster.json"
        write_record(record, {"shards": "127.0.0.1:20001,127.0.0.1:20002"})
        record.write_text(
            record.read_text().replace("20002", "20003") if text == "flipped" else text
        )
        code, _, log = run_command("cluster", f"--data-dir={tmp_path}")
        assert code == 1
        assert f"{record}, which has the ports of the shards, can't be read" in log
        assert "remove it" in log
        assert list(tmp_path.iterdir()) == [record]

    def test_another_number_of_shards_is_refused_with_what_to_do(self, tmp_path) -> None:
        with Program(*CLUSTER, f"--data-dir={tmp_path}") as program:
            program.read_line()
            program.send(signal.SIGTERM)
            assert program.end() == 0
        before = sorted(tmp_path.rglob("*"))
        code, _, log = run_command("cluster", "--shard-count=3", f"--data-dir={tmp_path}")
        assert code == 1
        assert f"{tmp_path} has the files of 2 shards; got shard_count=3" in log
        assert "shardwell checkpoint save" in log
        assert "shardwell cluster --shard-count 3 --data-dir" in log
        assert sorted(tmp_path.rglob("*")) == before

    def test_a_shard_that_dies_ends_it(self) -> None:
        with Program("-m", "shardwell_server", "cluster", "--shard-count=2") as program:
            program.read_line()
            children = sorted(child_pids(program.pid))
            os.kill(children[1], signal.SIGKILL)
            assert program.end() == 1
            assert any("shard" in line and "exit code -9" in line for line in program.log)
            eventually("the other has ended", lambda: not is_running(children[0]))

    @pytest.mark.exhaustive
    def test_with_a_data_dir_a_shard_that_dies_goes_on(self, tmp_path) -> None:
        arguments = [*CLUSTER, f"--data-dir={tmp_path}"]
        with Program(*arguments) as program:
            target = program.read_line().removeprefix("export SHARDWELL_SHARDS=")
            with shardwell.connect(target, worker_id="w0", timeout_s=PATIENCE_S) as client:
                model = client.parameter("m", size=100, optimizer=SGD)
                model.init(np.zeros(100, np.float32))
                for step in range(4):
                    for pid in child_pids(program.pid):
                        os.kill(pid, signal.SIGKILL)
                    weights = model.exchange(np.ones(100, np.float32))
                    np.testing.assert_array_equal(weights, -0.5 * (step + 1))
                assert sum("goes on from" in line for line in program.log) >= 4
            program.send(signal.SIGTERM)
            assert program.end() == 0
        with Program(*arguments) as program:  # another day
            target = program.read_line().removeprefix("export SHARDWELL_SHARDS=")
            with shardwell.connect(target, worker_id="w0") as client:
                model = client.parameter("m", size=100, optimizer=SGD)
                assert model.next_step == 4
                np.testing.assert_array_equal(model.get_weights(), -2.0)
            program.send(signal.SIGTERM)
            assert program.end() == 0

    def test_a_shard_that_is_killed_while_it_starts_is_started_again(self, tmp_path) -> None:
        with Program(*CLUSTER, f"--data-dir={tmp_path}") as program:
            target = program.read_line().removeprefix("export SHARDWELL_SHARDS=")
            pid, other = (shard_pid(program, index) for index in (0, 1))
            with shardwell.connect(target, worker_id="w0", timeout_s=PATIENCE_S) as client:
                model = client.parameter("m", size=100, optimizer=SGD)
                model.init(np.zeros(100, np.float32))
                for _ in range(4):
                    os.kill(pid, signal.SIGKILL)
                    pid = shard_pid(program, 0, unlike=pid)
                np.testing.assert_array_equal(model.exchange(np.ones(100, np.float32)), -0.5)
            assert shard_pid(program, 1) == other
            assert any("exit code -9 before it served" in line for line in program.log)
            program.send(signal.SIGTERM)
            assert program.end() == 0

    def test_shards_are_watched_while_one_of_them_starts(self, tmp_path) -> None:
        with Program(*CLUSTER, f"--data-dir={tmp_path}") as program:
            program.read_line()
            pids = [shard_pid(program, index) for index in (0, 1)]
            os.kill(pids[0], signal.SIGKILL)
            starting = shard_pid(program, 0, unlike=pids[0])
            with stopped(starting):  # for as long as the other one takes
                os.kill(pids[1], signal.SIGKILL)
                eventually(
                    "shard 1 serves again",
                    lambda: any("# shard 1" in line and "goes on" in line for line in program.log),
                    timeout_s=PATIENCE_S,
                )
                assert not any("# shard 0" in line and "goes on" in line for line in program.log)
                program.send(signal.SIGTERM)  # nor does that wait for who is starting
            assert program.end() == 0

    def test_a_shard_that_can_not_go_on_ends_it_and_says_why(self, tmp_path) -> None:
        with Program(*CLUSTER, f"--data-dir={tmp_path}") as program:
            program.read_line()
            (tmp_path / "shard-1" / "shard.json").write_text("{")
            os.kill(shard_pid(program, 1), signal.SIGKILL)
            assert program.end() == 1
            log = "\n".join(program.log)
            assert "shard 1 did not start: exit code 1" in log
            assert "shard.json" in log
            assert "Traceback" not in log

    def test_each_line_of_the_log_says_which_shard_wrote_it(self, tmp_path) -> None:
        with Program(*CLUSTER, f"--data-dir={tmp_path}", "--log-level=info") as program:
            target = program.read_line().removeprefix("export SHARDWELL_SHARDS=")
            with shardwell.connect(target, worker_id="w0") as client:
                client.parameter("m", size=100, optimizer=SGD)
                client.table("t", row_count=9, dim=2, optimizer=SGD)
            program.send(signal.SIGTERM)
            assert program.end() == 0
        lines = [json.loads(line) for line in program.log if not line.startswith("#")]
        for event in ("shard is serving", "parameter created", "table created"):
            found = [line["shard_index"] for line in lines if line["event"] == event]
            assert sorted(found) == [0, 1]
        assert all("shard_index" in line for line in lines)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("durability", ["", "disk", "0", "-1", "nan", "1e9"])
    def test_a_durability_that_is_none(self, durability) -> None:
        code, _, log = run_command(
            "serve", "--shard-index=0", "--shard-count=1", f"--durability={durability}"
        )
        assert code == 2
        assert "durability must be" in log
        assert "Traceback" not in log

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("count", ["0", "65", "x"])
    def test_counts_that_are_none(self, count) -> None:
        code, _, log = run_command("cluster", f"--shard-count={count}")
        assert code in (1, 2)
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("statsu",), "No such command 'statsu'; did you mean 'status'?"),
        (("checkpoint", "sav", "x"), "No such command 'sav'; did you mean 'save'?"),
        (("token", "revok"), "No such command 'revok'; did you mean 'revoke'?"),
        (("zzz",), "No such command 'zzz'."),
    ],
)
def test_a_wrong_command_is_answered_with_the_nearest(
    arguments: tuple[str, ...], meant: str
) -> None:
    code, output, log = run_command(*arguments)
    assert (code, output) == (2, "")
    assert log.splitlines()[-1] == f"Error: {meant}"


def test_the_version_in_short() -> None:
    assert run_command("-V") == run_command("--version")
    assert run_command("-V")[1].startswith(f"shardwell, version {shardwell.__version__}, ")
