"""`shardwell checkpoint save|restore|inspect`, as child processes."""

from __future__ import annotations

import socket

import numpy as np
import pytest

import shardwell
from harness.programs.commands import run_command

ADAM = shardwell.Adam(learning_rate=0.25)


@pytest.fixture
def trained(cluster, connect):
    """A cluster with two parameters, one of which has taken two steps."""
    running = cluster(2)
    client = connect(running, "w0")
    model = client.parameter("model", size=100, optimizer=ADAM)
    model.init(np.zeros(100, np.float32))
    for _ in range(2):
        model.exchange(np.ones(100, np.float32))
    client.parameter("other", size=7, optimizer=ADAM).init(np.zeros(7, np.float32))
    return running


def test_from_one_cluster_to_another(trained, cluster, connect, tmp_path) -> None:
    path = tmp_path / "step-2"
    code, output, log = run_command("checkpoint", "save", str(path), f"--shards={trained.target}")
    assert (code, log) == (0, "")
    for words in (str(path), trained.cluster_id, "2 shards", "model", "other", "exp_avg_sq"):
        assert words in output
    code, inspected, log = run_command("checkpoint", "inspect", str(path), "--verify")
    assert (code, log) == (0, "")
    assert inspected.splitlines()[:-1] == output.splitlines()
    assert "verified" in inspected
    target = cluster(3)
    code, output, log = run_command(
        "checkpoint", "restore", str(path), environment={"SHARDWELL_SHARDS": target.target}
    )
    assert (code, log) == (0, "")
    assert output == (
        f"restored model, other from {path} into 3 shards; workers go on at next_step"
    )
    before = connect(trained, "w0").parameter("model", size=100, optimizer=ADAM)
    after = connect(target, "w0").parameter("model", size=100, optimizer=ADAM)
    assert (after.next_step, before.next_step) == (2, 2)
    np.testing.assert_array_equal(after.get_weights(), before.get_weights())


def test_only_some_parameters(trained, cluster, connect, tmp_path) -> None:
    path = str(tmp_path / "c")
    shards = f"--shards={trained.target}"
    code, output, _ = run_command("checkpoint", "save", path, shards, "--parameter=other")
    assert code == 0
    assert "model" not in output
    code, _, log = run_command("checkpoint", "restore", path, shards, "--parameter=model")
    assert (code, log) == (1, f"shardwell: {path} has no parameter 'model'; it has ['other']")


def test_refusals_are_one_line_and_exit_code_1(trained, tmp_path) -> None:
    path, shards = str(tmp_path / "c"), f"--shards={trained.target}"
    assert run_command("checkpoint", "save", path, shards)[0] == 0
    data = tmp_path / "c" / "000001-model" / "slice-00000.safetensors"
    for arguments, words in [
        (["save", path, shards], "exists already"),
        (["restore", path, shards], "has first weights already"),
        (["save", str(tmp_path / "d"), shards, "--parameter=nobody"], "no parameter 'nobody'"),
        (["inspect", str(tmp_path / "nowhere")], f"{tmp_path / 'nowhere'} is no checkpoint"),
        (["restore", str(tmp_path), shards], f"{tmp_path} is no checkpoint"),
    ]:
        code, output, log = run_command("checkpoint", *arguments)
        assert (code, output, len(log.splitlines())) == (1, "", 1)
        assert words in log
    changed = bytearray(data.read_bytes())
    changed[-1] ^= 1
    data.write_bytes(changed)
    assert run_command("checkpoint", "inspect", path)[0] == 0
    for arguments in (["inspect", path, "--verify"], ["restore", path, shards]):
        code, _, log = run_command("checkpoint", *arguments)
        assert code == 1
        assert f"{data} was damaged" in log


def test_a_cluster_must_be_named(tmp_path) -> None:
    code, _, log = run_command("checkpoint", "save", str(tmp_path / "c"))
    assert code == 2
    assert "--shards" in log
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments", [("checkpoint", "save"), ("checkpoint", "restore"), ("table", "export", "rows")]
)
def test_a_shard_that_does_not_answer_is_waited_for_as_long_as_is_said(
    trained, tmp_path, arguments
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        down = f"127.0.0.1:{silent.getsockname()[1]}"
        shards = f"--shards={trained.addresses[0]},{down}"
        path = str(tmp_path / "rows.safetensors")
        code, output, log = run_command(*arguments, path, shards, "--timeout-s=0.5")
    assert (code, output, len(log.splitlines())) == (1, "", 1)
    assert f"shard 1 of 2 at {down} did not answer within 0.5 s" in log
    code, _, log = run_command(*arguments, path, shards, "--timeout-s=-1")
    assert (code, "--timeout-s" in log, "Traceback" in log) == (2, True, False)
