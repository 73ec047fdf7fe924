"""Goal: SIGINT, SIGTERM and SIGHUP end every command in order, from its first instant on.

Method: real signals to real processes, at moments that /proc shows: the signals are held, the first
big package is mapped, gRPC is mapped, children are there, the first line is out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.faults.standing_still import stopped
from harness.leaks import child_pids, is_running
from harness.polling import eventually
from harness.programs.commands import Program, ServingShard
from harness.programs.ports import free_port

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]

COMMAND = ("-m", "shardwell_server")
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SERVE = ("serve", "--shard-index=0", "--shard-count=1", "--listen=127.0.0.1:0")
SHORT_RUN = ("run", "-n1", "--", "sleep", "60")
RUN_WITH_SHARDS = ("run", "-n2", "--with-shards", "--", "sleep", "60")


def _holds(pid: int, number: int) -> bool:
    """Whether a process's main thread blocks a signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _maps(name: str) -> Callable[[Program], bool]:
    return lambda program: name in Path(f"/proc/{program.pid}/maps").read_text()


MOMENTS: dict[str, Callable[[Program], bool]] = {
    "first instant": lambda program: _holds(program.pid, signal.SIGTERM),
    "numpy": _maps("_multiarray_umath"),
    "grpc": _maps("cygrpc"),
    "children": lambda program: bool(child_pids(program.pid)),
}


def _ended_at(program: Program, moment: str, number: signal.Signals) -> int:
    """Sends a signal at a moment; the exit code, once no child is left."""

    def is_there() -> bool:
        assert program.process.poll() is None, (program.process.poll(), program.log)
        return MOMENTS[moment](program)

    eventually(moment, is_there, timeout_s=30)
    children = child_pids(program.pid)
    program.send(number)
    code = program.end(40)
    assert not any(map(is_running, children))
    assert "Traceback" not in "\n".join(program.log), program.log
    assert len(program.log) <= 1, program.log
    return code


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("moment", ["first instant", "numpy", "grpc"])
def test_a_shard_that_starts_ends_with_0(moment, number, tmp_path) -> None:
    flags = (f"--data-dir={tmp_path}", "--log-level=error")
    with Program(*COMMAND, *SERVE, *flags) as program:
        assert _ended_at(program, moment, number) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_cluster_that_starts_ends_and_leaves_nothing(moment, number) -> None:
    with Program(*COMMAND, "cluster") as program:
        assert _ended_at(program, moment, number) in (0, 128 + number)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("moment", ["first instant", "grpc"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--workers=2"),
        ("checkpoint", "save", "nowhere"),
        ("table", "export", "users", "nowhere.safetensors"),
        ("train-digits", "--worker-id=w0"),
        SHORT_RUN,
    ],
    ids=lambda arguments: arguments[0],
)
def test_other_commands_that_start_end_with_the_signal_s_code(moment, number, arguments) -> None:
    environment = {"SHARDWELL_SHARDS": f"127.0.0.1:{free_port()}"}
    with Program(*COMMAND, *arguments, environment=environment) as program:
        assert _ended_at(program, moment, number) == 128 + number


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_command_that_waits_for_a_shard_is_broken_off(number, tmp_path) -> None:
    path = tmp_path / "saved"
    with ServingShard() as shard:
        address = shard.address()
        with stopped(shard.pid):
            arguments = ("checkpoint", "save", str(path), f"--shards={address}")
            with Program(*COMMAND, *arguments) as save:
                eventually(
                    "signals break it off", lambda: _takes(save.pid, signal.SIGTERM), timeout_s=30
                )
                save.send(number)
                assert save.end() == 128 + number
                words = "Ctrl-C" if number == signal.SIGINT else number.name
                assert save.log == [f"Stopped by {words}."]
    assert list(tmp_path.iterdir()) == []


def _takes(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal, and lets it through."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1) and not _holds(pid, number)
    return False


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("command", ["serve", "cluster"])
def test_what_serves_ends_with_0(command, number) -> None:
    with Program(*COMMAND, *(SERVE if command == "serve" else ("cluster",))) as program:
        program.read_line()
        children = child_pids(program.pid)
        for each in (program.pid, *children):  # as Slurm's --signal does; workers need the shards
            os.kill(each, signal.SIGUSR1)
            os.kill(each, signal.SIGUSR2)
        program.send(number)
        assert program.end() == 0
        eventually("no child is left", lambda: not any(map(is_running, children)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_run_with_shards_that_starts_ends_and_leaves_nothing(moment, number) -> None:
    with Program(*COMMAND, *RUN_WITH_SHARDS) as program:
        assert _ended_at(program, moment, number) == 128 + number


def test_under_nohup_a_terminal_s_end_ends_nothing() -> None:
    script = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    with Program("-c", script, *COMMAND, *SERVE) as program:
        program.read_line()
        program.send(signal.SIGHUP)
        with pytest.raises(AssertionError, match="still runs"):
            program.end(0.3)
        program.send(signal.SIGTERM)
        assert program.end() == 0


def test_workers_of_a_run_take_signals_as_programs_do() -> None:
    """What the command holds back while it starts is not held back in what it starts."""
    script = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)"
    with Program(*COMMAND, "run", "-n1", "--", "python3", "-c", script) as program:
        assert program.read_line() == "[0] set()"
        assert program.end() == 0


LOST = """
import io, os, signal
from shardwell_server.processes import signals

class File(io.RawIOBase):
    def close(self):
        if not self.closed:
            super().close()
            os.kill(os.getpid(), signal.SIGTERM)

signals.hold()
try:
    with signals.breaking_off():
        File()  # its finalizer takes whatever is raised in it
        print("goes on")
except signals.StoppedError as stopped:
    print("stopped by", stopped.cause)
"""


def test_a_signal_that_comes_in_a_finalizer_is_not_lost() -> None:
    with Program("-c", LOST) as program:
        assert program.end() == 0
        assert program.lines == ["goes on", "stopped by SIGTERM"]


def test_others_files_stay(tmp_path) -> None:
    """By a short name, for the sockets' paths: those that have the names of a shard's sockets."""
    with ServingShard(f"--same-host={tmp_path}") as shard:
        shard.address()
        sockets = list(tmp_path.iterdir())
        assert len(sockets) == 2, sockets  # for memory, and for streams
        for each in sockets:
            each.unlink()
            each.write_text("notes")
        shard.send(signal.SIGTERM)
        assert shard.end() == 0
    assert sorted(tmp_path.iterdir()) == sorted(sockets)
    assert all(each.read_text() == "notes" for each in sockets)
