"""Goal: what a command does never depends on whether what it says can be written.

Method: every kind of command with standard output that is full, closed, or a pipe that no process
reads; and on terminals, with and without $NO_COLOR.
"""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.tokens import TOKEN_FILE_VARIABLE
from shardwell_server import LocalCluster

pytestmark = pytest.mark.timeout(90)

COMMAND = (sys.executable, "-m", "shardwell_server")
LOST_CODE = 141
END_TIMEOUT_S = 40.0
COMMANDS = [
    ("status",),
    ("status", "--json"),
    ("checkpoint", "save", "saved"),
    ("checkpoint", "restore", "empty"),
    ("checkpoint", "inspect", "made", "--verify"),
    ("table", "export", "users", "rows.safetensors"),
    ("health",),
    ("bench", "--megabytes=1", "--seconds=0.01"),
    ("plan", "64MB"),
    ("--help",),
    ("serve", "--help"),
    ("--version",),
    ("run", "-n2", "--", "sh", "-c", "echo a; echo b"),
]


@pytest.fixture
def trained(cluster, connect, tmp_path) -> LocalCluster:
    """A cluster with a table, and directories for the commands."""
    running = cluster(1)
    client = connect(running, "w0")
    users = client.table("users", row_count=9, dim=2, optimizer=shardwell.SGD(learning_rate=1.0))
    users.put_row_gradients([1, 2], np.ones((2, 2), np.float32))
    client.save_checkpoint(tmp_path / "made")
    client.save_checkpoint(tmp_path / "empty", (), ())
    return running


def _environment(running: LocalCluster, **changes: str) -> dict[str, str]:
    # Without what makes colours where there is no terminal, or the reverse.
    plain = {
        k: v
        for k, v in os.environ.items()
        if "COLOR" not in k and ("SHARDWELL" not in k or k == TOKEN_FILE_VARIABLE)
    }
    shards = {"SHARDWELL_SHARDS": running.target, "SHARDWELL_LISTEN": running.addresses[0]}
    return {**plain, **shards, "TERM": "xterm-256color", **changes}


@contextlib.contextmanager
def _spoilt(kind: str) -> Iterator[int]:
    """A file descriptor that takes nothing."""
    if kind == "full":
        fd = os.open("/dev/full", os.O_WRONLY)
    else:
        reading_fd, fd = os.pipe()
        os.close(reading_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.sampled(2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("kind", ["full", "nobody reads"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_lost_output_is_reported_in_one_line(trained, tmp_path, arguments, kind) -> None:
    with _spoilt(kind) as fd:
        ended = subprocess.run(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=_environment(trained),
            timeout=END_TIMEOUT_S,
        )
    assert ended.returncode == LOST_CODE, ended.stderr
    if kind == "full":
        (line,) = ended.stderr.splitlines()
        assert "can't write to standard output: No space left" in line
    else:
        assert ended.stderr == ""
    _check_made(tmp_path, arguments)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_closed_output_is_no_error(trained, tmp_path, arguments) -> None:
    """Nor is what is opened next taken for it, and written to."""
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=_environment(trained),
        timeout=END_TIMEOUT_S,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    _check_made(tmp_path, arguments)


def _check_made(path: Path, arguments: tuple[str, ...]) -> None:
    if "save" in arguments:
        shardwell.inspect_checkpoint(path / "saved", verify=True)
    if "export" in arguments:
        assert (path / "rows.safetensors").stat().st_size > 0


@pytest.mark.parametrize("kind", ["full", "nobody reads"])
def test_a_shard_without_output_serves(kind) -> None:
    with _spoilt(kind) as fd, contextlib.ExitStack() as stack:
        flags = ("serve", "--shard-index=0", "--shard-count=1", "--listen=127.0.0.1:0")
        process = subprocess.Popen([*COMMAND, *flags], stdout=fd, stderr=subprocess.PIPE, text=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stderr is not None
        stack.callback(process.stderr.close)
        for line in process.stderr:
            if ("can't write" if kind == "full" else "shard is serving") in line:
                break
        assert process.poll() is None
        process.terminate()
        _, log = process.communicate(timeout=END_TIMEOUT_S)
        assert process.returncode == LOST_CODE
        assert "shard has stopped" in log


def _on_a_terminal(arguments: tuple[str, ...], path: Path, environment: dict[str, str]) -> bytes:
    """What a command writes to a terminal, standard output and error together."""
    main_fd, terminal_fd = pty.openpty()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, main_fd)
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=terminal_fd,
            stderr=terminal_fd,
            cwd=path,
            env=environment,
        )
        os.close(terminal_fd)
        stack.callback(process.wait)
        written = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(main_fd, 65536):
                written += data
    return written


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "arguments",
    [
        *COMMANDS,
        ("status", "--shards=127.0.0.1:1", "--timeout-s=0.1"),
        ("checkpoint", "inspect", "missing"),
        ("serve", "--shard-index=1", "--shard-count=1"),
        ("serve", "--shard-index=0", "--shard-count=1", "--data-dir=/dev/null"),
        ("demo", "--shard-count=1", "--workers=1", "--steps=2"),
    ],
    ids=" ".join,
)
def test_no_color_takes_all_escapes_away(trained, tmp_path, arguments) -> None:
    environment = _environment(trained, NO_COLOR="1")
    written = _on_a_terminal(arguments, tmp_path, environment)
    assert written
    assert b"\x1b" not in written, written


@pytest.mark.parametrize("arguments", [("status",), ("checkpoint", "inspect", "missing")])
def test_without_it_a_terminal_has_colours(trained, tmp_path, arguments) -> None:
    assert b"\x1b" in _on_a_terminal(arguments, tmp_path, _environment(trained))
