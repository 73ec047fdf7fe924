"""`shardwell run` with real programs: what they get, what is shown of them, and how they end.

Workers tell their process ids, and every test ends with a look whether they are gone; so are their
shards, which are found as children of the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from harness.leaks import child_pids, is_running
from harness.polling import PATIENCE_S, Stopwatch, eventually
from harness.programs.commands import Program, run_command
from harness.tokens import bearing
from harness.wire_client import crc as wire_crc
from shardwell.group.launch import LaunchEnvironment
from shardwell.v1 import group_pb2 as pb


@pytest.fixture
def script(tmp_path: Path):
    """Writes a worker's program; what it starts with imports what all need."""

    def write(text: str) -> str:
        path = tmp_path / "worker.py"
        path.write_text(
            "import os, signal, subprocess, sys, time\n"
            "from pathlib import Path\n"
            "rank = int(os.environ['RANK'])\n"
            f"here = Path({str(tmp_path)!r})\n"
            "def tell(pid, what='pid'):\n"
            "    (here / f'{what}-{rank}.new').write_text(str(pid))\n"
            "    (here / f'{what}-{rank}.new').rename(here / f'{what}-{rank}')\n"
            "def others_are_there():\n"
            "    while len(list(here.glob('pid-?'))) < int(os.environ['WORLD_SIZE']):\n"
            "        time.sleep(0.01)\n" + text
        )
        return str(path)

    return write


@pytest.fixture
def pids(tmp_path: Path) -> Iterator:
    """The process ids that workers have written so far; all must be gone at the end."""

    def written() -> list[int]:
        return [int(path.read_text()) for path in sorted(tmp_path.glob("*-[0-9]"))]

    yield written
    left = written()
    try:
        eventually("all workers are gone", lambda: not any(map(is_running, left)))
    finally:
        for pid in filter(is_running, left):
            os.kill(pid, signal.SIGKILL)


def _start(count: int, program: str, *flags: str) -> Program:
    return Program(
        "-m", "shardwell_server", "run", f"-n{count}", *flags, "--", sys.executable, program
    )


def _run(count: int, program: str, *flags: str) -> tuple[int, str, str]:
    return run_command("run", f"-n{count}", *flags, "--", sys.executable, program)


def _all_told(pids, count: int) -> list[int]:
    return eventually(f"{count} processes run", lambda: pids() if len(pids()) == count else None)


def test_workers_get_their_ranks_and_one_place_to_meet(script) -> None:
    code, output, log = _run(3, script("print(dict(os.environ))"))
    assert (code, log) == (0, "")
    environs = {}
    for line in output.splitlines():
        rank, text = re.fullmatch(r"\[(\d)\] (.*)", line).groups()
        environs[int(rank)] = eval(text, {"__builtins__": {}})
    assert set(environs) == {0, 1, 2}
    found = [LaunchEnvironment.of(environs[rank]) for rank in range(3)]
    assert [(it.rank, it.size, it.local_rank) for it in found] == [(r, 3, r) for r in range(3)]
    assert {it.source for it in found} == {"shardwell run"}
    assert not any(it.serves_rendezvous for it in found)
    assert len({(it.group_name, it.rendezvous_address) for it in found}) == 1
    for environ in environs.values():
        assert environ["LOCAL_WORLD_SIZE"] == "3"
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(environ["MASTER_PORT"]) < 65536
        assert int(environ["OMP_NUM_THREADS"]) >= 1
        assert environ["PYTHONUNBUFFERED"] == "1"


def test_the_place_to_meet_is_served(script, pids) -> None:
    """A member that asks for a rank learns who is missing."""
    program = script(
        "print(os.environ['SHARDWELL_RENDEZVOUS'], os.environ['SHARDWELL_GROUP'])\n"
        "tell(os.getpid()); time.sleep(60)"
    )
    with _start(1, program) as running:
        address, name = running.read_line().removeprefix("[0] ").split()
        request = pb.JoinGroupRequest(
            spec=pb.GroupSpec(name=name, size=2, strategy="ring", codec=1),
            member=pb.Member(member_id="m0", address="127.0.0.1:1", description="a test"),
            rank=0,
            lease_ms=1000,
        )
        with bearing(grpc.insecure_channel(address)) as channel:
            join = channel.unary_unary(
                "/shardwell.v1.GroupService/JoinGroup",
                request_serializer=pb.JoinGroupRequest.SerializeToString,
                response_deserializer=pb.JoinGroupResponse.FromString,
            )
            answer = join(wire_crc.seal_message(request), timeout=PATIENCE_S)
            assert list(answer.missing_ranks) == [1]
        running.send(signal.SIGTERM)
        assert running.end() == 128 + signal.SIGTERM


def test_names_that_were_given(script) -> None:
    program = script(
        "print(*(os.environ[v] for v in ('SHARDWELL_GROUP', 'SHARDWELL_RENDEZVOUS')), sys.argv[1:])"
    )
    flags = ("--group=job-7", "--rendezvous=10.0.0.1:7070")
    code, output, _ = run_command(
        "run", "-n1", *flags, sys.executable, program, "-n", "--group=x", "--", "-h"
    )
    assert (code, output) == (
        0,
        "[0] job-7 10.0.0.1:7070 ['-n', '--group=x', '--', '-h']",
    )
    code, output, _ = run_command(
        "run", "-n1", "--", sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])",
        environment={"OMP_NUM_THREADS": "7"},
    )  # fmt: skip
    assert (code, output) == (0, "[0] 7")


def test_output_and_errors_keep_their_streams_and_lines(script) -> None:
    program = script(
        "for i in range(200):\n"
        "    print(f'{rank}-{i} ' + 'x' * (i * 7 % 300))\n"
        "    print(f'{rank}+{i}', file=sys.stderr)\n"
        "sys.stdout.write('no line end')"
    )
    code, output, log = _run(3, program)
    assert code == 0
    for rank in range(3):
        mine = [line for line in output.splitlines() if line.startswith(f"[{rank}] ")]
        expected = [f"[{rank}] {rank}-{i} " + "x" * (i * 7 % 300) for i in range(200)]
        assert mine == [*expected, f"[{rank}] no line end"]
        errors = [line for line in log.splitlines() if line.startswith(f"[{rank}] ")]
        assert errors == [f"[{rank}] {rank}+{i}" for i in range(200)]
    assert len(output.splitlines()) == 3 * 201
    assert len(log.splitlines()) == 3 * 200


def test_long_lines_and_bytes_that_are_no_text(script) -> None:
    """Lines of 64 KiB, more than a pipe takes at once, from all ranks at the same time."""
    program = script(
        "line = bytes([97 + rank]) * 65536 + b'\\xff\\xfe\\0' + b'\\n'\n"
        "for _ in range(20):\n"
        "    sys.stdout.buffer.write(line)"
    )
    done = subprocess.run(
        [sys.executable, "-m", "shardwell_server", "run", "-n3", sys.executable, program],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.split(b"\n")
    expected = [
        b"[%d] " % rank + bytes([97 + rank]) * 65536 + b"\xff\xfe\0" for rank in range(3)
    ] * 20
    assert sorted(lines) == sorted([b"", *expected])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(7)", 7, "rank 1 has ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 has ended with signal 9 (SIGKILL)"),
        ("raise ValueError('my mistake')", 1, "rank 1 has ended with exit code 1"),
    ],
)
def test_when_one_fails_the_others_are_stopped(script, pids, end, code, words) -> None:
    program = script(
        "tell(os.getpid()); others_are_there()\n"
        f"if rank == 1:\n    print('last words', end='')\n    {end}\n"
        "time.sleep(60)"
    )
    watch = Stopwatch()
    ended, output, log = _run(3, program, "--grace-s=60")
    assert ended == code
    assert watch.elapsed_s < PATIENCE_S
    assert output == "[1] last words"
    assert f"shardwell: {words}; the others are stopped" in log
    assert len(pids()) == 3
    if "mistake" in end:
        assert "[1] ValueError: my mistake" in log.splitlines()


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(script, pids) -> None:
    program = script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "tell(os.getpid()); others_are_there()\n"
        "if rank == 0: sys.exit(3)\n"
        "time.sleep(60)"
    )
    code, _, log = _run(2, program, "--grace-s=0.3")
    assert code == 3
    assert "rank 1 did not end within 0.3 s and is killed" in log
    assert len(pids()) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(0)", 0), ("sys.exit(5)", 5), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_what_workers_have_started_ends_with_them(script, pids, end, code) -> None:
    """A grandchild holds the output open too; one ignores SIGTERM."""
    program = script(
        "ignoring = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)'\n"
        "tell(subprocess.Popen(['sleep', '60']).pid, 'child')\n"
        "tell(subprocess.Popen([sys.executable, '-c', ignoring]).pid, 'other')\n"
        f"tell(os.getpid()); others_are_there()\n{end}"
    )
    watch = Stopwatch()
    assert _run(2, program, "--grace-s=0.5")[0] == code
    assert watch.elapsed_s < PATIENCE_S
    assert len(pids()) == 6


def test_what_workers_leave_behind_is_waited_for_while_they_run(script, pids, tmp_path) -> None:
    """In the worker's group and in a session of its own; their worker and another one go on."""
    program = script(
        "left = []\n"
        "if rank == 0:\n"
        "    for shell in (['sh'], ['setsid', 'sh']) * 3:\n"
        "        command = [*shell, '-c', 'sleep 0.2 >&- & echo $!']\n"
        "        left.append(int(subprocess.run(command, capture_output=True).stdout))\n"
        "    (here / 'left.new').write_text(' '.join(map(str, left)))\n"
        "    (here / 'left.new').rename(here / 'left')\n"
        "tell(os.getpid()); others_are_there()\n"
        "while not (here / 'over').exists(): time.sleep(0.01)\n"
        "sys.exit(7 * rank)"
    )

    def is_there(pid: str) -> bool:  # one that has ended is, until its parent waits for it
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
        return True

    with _start(2, program) as running:
        left = tmp_path / "left"
        eventually("all are left behind", left.exists)
        eventually("all are waited for", lambda: not any(map(is_there, left.read_text().split())))
        assert len(_all_told(pids, 2)) == 2
        assert all(map(is_running, pids()))
        (tmp_path / "over").touch()
        assert running.end() == 7


@pytest.mark.parametrize(
    ("number", "caught"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")]
)
def test_signals_are_passed_on(script, pids, number, caught) -> None:
    program = script(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "try:\n    tell(os.getpid()); time.sleep(60)\n"
        "except BaseException as error:\n"
        "    print('saw', type(error).__name__); time.sleep(0.3); print('saved')"
    )
    with _start(2, program, "--grace-s=60") as running:
        _all_told(pids, 2)
        running.send(number)
        assert running.end() == 128 + number
        assert sorted(running.lines) == [
            "[0] saved", f"[0] saw {caught}", "[1] saved", f"[1] saw {caught}",
        ]  # fmt: skip
        assert running.log == [
            f"shardwell: {signal.Signals(number).name}: workers have 60 s to stop; "
            "another one kills them at once"
        ]


@pytest.mark.parametrize("flag", ["--grace-s=60", "--elastic"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_workers_reaches_their_handlers_alone(script, pids, number, flag) -> None:
    """As Slurm's --signal=USR1@60 sends it: a worker saves, and all go on."""
    program = script(
        "saved = []\n"
        f"signal.signal({number:d}, lambda *_: saved.append(1))\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "tell(os.getpid()); tell(child.pid, 'child')\n"
        "while not saved: time.sleep(0.01)\n"
        "print('saved', child.poll()); child.kill(); child.wait()"
    )
    with _start(2, program, flag) as running:
        _all_told(pids, 4)
        running.send(number)
        assert running.end() == 0
        assert sorted(running.lines) == ["[0] saved None", "[1] saved None"]


def test_a_worker_without_a_handler_of_a_signal_for_workers_ends_by_it(script, pids) -> None:
    with _start(1, script("tell(os.getpid()); time.sleep(60)")) as running:
        _all_told(pids, 1)
        running.send(signal.SIGUSR1)
        assert running.end() == 128 + signal.SIGUSR1
        assert running.log == ["shardwell: rank 0 has ended with signal 10 (SIGUSR1)"]


def test_sigterm_leaves_a_worker_what_it_needs_for_its_last_step(script, pids) -> None:
    """As the processes of a DataLoader; they get it, too, once their worker has ended."""
    program = script(
        "asked = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: asked.append(True))\n"
        "pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}\n"
        "loader = subprocess.Popen(['sh', '-c', 'read line; echo $line; sleep 60'], **pipes)\n"
        "tell(loader.pid, 'loader'); tell(os.getpid())\n"
        "while not asked: time.sleep(0.01)\n"
        "loader.stdin.write(b'a batch\\n'); loader.stdin.flush()\n"
        "print(loader.stdout.readline().decode(), end='')"
    )
    with _start(2, program) as running:
        _all_told(pids, 4)
        running.send(signal.SIGTERM)
        assert running.end() == 128 + signal.SIGTERM
        assert sorted(running.lines) == ["[0] a batch", "[1] a batch"]
        assert running.log == [
            "shardwell: SIGTERM: workers have 120 s to stop; another one kills them at once"
        ]


def test_a_hangup_stops_workers_unless_it_is_ignored(script, pids) -> None:
    command = [sys.executable, "-m", "shardwell_server", "run", "-n1"]
    program = script("tell(os.getpid())\ntime.sleep(60)")
    for trap, number in (("", signal.SIGHUP), ("trap '' HUP; ", signal.SIGTERM)):
        with contextlib.suppress(FileNotFoundError):
            Path(program).with_name("pid-0").unlink()
        running = subprocess.Popen(
            ["sh", "-c", f'{trap}exec "$@"', "sh", *command, sys.executable, program],
            stderr=subprocess.DEVNULL,
        )
        _all_told(pids, 1)
        for sent in dict.fromkeys((signal.SIGHUP, number)):  # a second one may come after its end
            running.send_signal(sent)
        assert running.wait(PATIENCE_S) == 128 + number


def test_a_second_ctrl_c_kills_at_once(script, pids) -> None:
    program = script(
        "def ignore(*_):\n    print('not yet')\n"
        "signal.signal(signal.SIGINT, ignore)\n"
        "tell(os.getpid())\n"
        "while True: time.sleep(1)"
    )
    with _start(2, program, "--grace-s=60") as running:
        _all_told(pids, 2)
        running.send(signal.SIGINT)
        assert {running.read_line(), running.read_line()} == {"[0] not yet", "[1] not yet"}
        running.send(signal.SIGINT)
        assert running.end(PATIENCE_S) == 130


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("is_child", [False, True])
def test_workers_end_when_the_command_itself_is_killed(script, pids, ignores, is_child) -> None:
    """Or the child of it that runs the workers."""
    program = script(
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if ignores else "")
        + "tell(os.getpid()); tell(subprocess.Popen(['sleep', '60']).pid, 'child')\n"
        "time.sleep(60)"
    )
    with _start(3, program, "--grace-s=0.5") as running:
        workers = _all_told(pids, 6)
        assert all(map(is_running, workers))
        os.kill(_runner_pid(running) if is_child else running.pid, signal.SIGKILL)
        eventually("all are gone", lambda: not any(map(is_running, workers)))
        assert running.end() == (128 + signal.SIGKILL if is_child else -signal.SIGKILL)
        assert any("was killed by signal 9" in line for line in running.log) == is_child


@pytest.mark.parametrize("delay_s", [0.0, 0.25, 0.3, 0.35, 0.4, 0.5])
def test_the_command_is_killed_while_it_starts(script, delay_s) -> None:
    """Whenever it is: no worker is started that would never end."""
    program = script("time.sleep(60)")
    with _start(8, program, "--grace-s=0.2") as running:
        threading.Event().wait(delay_s)
        running.send(signal.SIGKILL)
        eventually("all are gone", lambda: not _processes_of(program))


def _processes_of(program: str) -> list[str]:
    """Those that run it, or will: its path is in the arguments of all that lead to it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if program.encode() in entry.read_bytes():
                found.append(entry.parent.name)
    return found


def test_when_the_output_has_no_reader_workers_are_stopped(script, pids) -> None:
    program = script("tell(os.getpid())\nwhile True: print('more'); time.sleep(0.01)")
    reading_fd, writing_fd = os.pipe()
    reader = subprocess.Popen(
        [sys.executable, "-m", "shardwell_server", "run", "-n2", sys.executable, program],
        stdout=writing_fd,
    )
    os.close(writing_fd)
    assert os.read(reading_fd, 4)
    os.close(reading_fd)
    assert reader.wait(PATIENCE_S) == 128 + signal.SIGPIPE


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (("no-such-command",), 127, "no-such-command was not found"),
        (("./missing.py",), 127, "./missing.py was not found"),
        (("{there}/worker.py",), 126, "is not executable; to run a Python program: -- python"),
        (("{there}",), 126, "is a directory"),
        (("{there}/odd",), 126, "Exec format error"),
        (("{there}/lost",), 127, "No such file or directory"),
    ],
)
def test_commands_that_can_not_be_started(script, tmp_path, command, code, words) -> None:
    script("")
    for name, text in (("odd", "no format at all"), ("lost", "#!/no/such/interpreter\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    ended, output, log = run_command("run", "-n1", *(w.format(there=tmp_path) for w in command))
    assert (ended, output) == (code, "")
    assert words in log
    assert "Traceback" not in log


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ("-n0", "true"),
        ("-n2",),
        ("true",),
        ("-n1", "--group=a b", "true"),
        ("-n1", "--rendezvous=nonsense", "true"),
        ("-n1", "--grace-s=-1", "true"),
        ("-n65", "--with-shards", "true"),
        ("-n1", "--restarts=2", "true"),
        ("-n1", "--elastic", "--restarts=-1", "true"),
    ],
)
def test_flags_that_make_no_sense(arguments) -> None:
    code, _, log = run_command("run", *arguments)
    assert code == 2
    assert "Traceback" not in log


TRAINING = """
import numpy as np, shardwell
count = int(os.environ["WORLD_SIZE"])
client = shardwell.connect(worker_id=f"w{rank}", timeout_s=300)
net = client.parameter(
    "net", size=7, optimizer=shardwell.SGD(learning_rate=1.0), worker_count=count, codec="fp32"
)
net.init(np.zeros(7, np.float32))
weights = net.exchange(np.arange(1, 8) * (rank + 1.0))
"""


def _runner_pid(running: Program) -> int:
    """Of the child process of a run that has the workers and shards."""
    return eventually("the run has a child", lambda: child_pids(running.pid)).pop()


def _shard_pids(running: Program, count: int) -> list[int]:
    """Of the shards of a run, by index."""

    def found() -> list[int]:
        pids = {}
        for pid in child_pids(_runner_pid(running)):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                for word in words:
                    if word.startswith(b"--shard-index="):
                        pids[int(word.rpartition(b"=")[2])] = pid
        return [pids[index] for index in sorted(pids)] if len(pids) == count else []

    return eventually(f"{count} shards run", found)


def test_each_worker_has_a_shard(script) -> None:
    """In the order of the ranks, whatever cluster the variable named before."""
    program = script(
        TRAINING + "shards = [status.shard_index for status in client.status()]\n"
        "print(shards, weights.tolist(), os.environ['SHARDWELL_SHARDS'])"
    )
    command = ("run", "-n3", "--with-shards", "--", sys.executable, program)
    code, output, log = run_command(*command, environment={"SHARDWELL_SHARDS": "10.0.0.1:7070"})
    assert (code, log) == (0, "")
    lines = sorted(output.splitlines())
    written = [re.fullmatch(r"\[(\d)\] (\[.*?\]) (\[.*?\]) (\S+)", line).groups() for line in lines]
    expected = str([-2.0 * i for i in range(1, 8)])  # the mean of 1, 2 and 3 times
    assert [(rank, shards, weights) for rank, shards, weights, _ in written] == [
        (str(rank), "[0, 1, 2]", expected) for rank in range(3)
    ]
    targets = {target for *_, target in written}
    assert len(targets) == 1
    assert len(targets.pop().split(",")) == 3


@pytest.mark.parametrize(("killed", "flags"), [(0, ()), (1, ()), (1, ("--elastic",))])
def test_a_shard_that_dies_ends_the_run(script, pids, killed, flags) -> None:
    program = script(TRAINING + "tell(os.getpid()); net.get_weights(min_version=2)")
    with _start(2, program, "--with-shards", "--grace-s=60", *flags) as running:
        shards = _shard_pids(running, 2)
        _all_told(pids, 2)
        os.kill(shards[killed], signal.SIGKILL)
        assert running.end() == 128 + signal.SIGKILL
        words = f"shard {killed} has ended with signal 9 (SIGKILL); the workers are stopped"
        assert f"shardwell: {words}" in running.log
    assert not any(map(is_running, shards))


def test_a_shard_that_gets_sigterm_ends_the_run_too(script, pids) -> None:
    program = script("tell(os.getpid()); time.sleep(60)")
    with _start(1, program, "--with-shards") as running:
        shards = _shard_pids(running, 1)
        _all_told(pids, 1)
        os.kill(shards[0], signal.SIGTERM)
        assert running.end() == 1
        assert running.log == [
            "shardwell: shard 0 has ended with exit code 0; the workers are stopped"
        ]


def test_shards_end_with_workers_that_fail(script, pids) -> None:
    program = script(
        TRAINING + "tell(os.getpid()); others_are_there()\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "net.get_weights(min_version=2)"
    )
    with _start(2, program, "--with-shards", "--grace-s=60") as running:
        shards = _shard_pids(running, 2)
        assert running.end() == 128 + signal.SIGKILL
        words = "rank 1 has ended with signal 9 (SIGKILL); the others are stopped"
        assert f"shardwell: {words}" in running.log
    assert not any(map(is_running, shards))


def test_shards_serve_until_the_last_worker_has_ended(script, pids) -> None:
    """Ctrl-C is for the workers: what they do then, such as to save, finds its shards."""
    program = script(
        TRAINING + "tell(os.getpid())\n"
        "try:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('saved', net.get_weights()[1])"
    )
    with _start(2, program, "--with-shards", "--grace-s=60") as running:
        shards = _shard_pids(running, 2)
        _all_told(pids, 2)
        running.send(signal.SIGINT)
        assert running.end() == 128 + signal.SIGINT
        assert sorted(running.lines) == ["[0] saved -3.0", "[1] saved -3.0"]
    assert not any(map(is_running, shards))


@pytest.mark.parametrize("while_it_starts", [False, True])
def test_shards_end_when_the_command_itself_is_killed(script, pids, while_it_starts) -> None:
    program = script(TRAINING + "tell(os.getpid()); time.sleep(60)")
    with _start(2, program, "--with-shards", "--grace-s=0.5") as running:
        shards = _shard_pids(running, 2)
        if not while_it_starts:
            _all_told(pids, 2)
        running.send(signal.SIGKILL)
        eventually("all are gone", lambda: not any(map(is_running, [*shards, *pids()])))
        eventually("no worker is started", lambda: not _processes_of(program))


MEMBER = """
import numpy as np, shardwell
with (
    shardwell.connect({target!r}, worker_id=f"w{{rank}}", timeout_s=40) as client,
    shardwell.LeaveRequest() as request,
):
    net = client.parameter(
        "net", size=7, optimizer=shardwell.SGD(learning_rate=1.0), codec="fp32",
        members=shardwell.Elastic(member_return_s=0.3),
    )
    net.init(np.zeros(7, np.float32))
    net.get_weights()
    tell(os.getpid())
    while not (here / "over").exists():
        net.exchange(np.ones(7, np.float32))
        found = net.outcome
        life = os.environ["SHARDWELL_RESTART"]
        print(found.counted, ",".join(found.contributors), "in life", life)
        request.check()
        time.sleep(0.01)
"""


def _read_until(running: Program, expected: str) -> None:
    """Reads lines of the workers until one is the expected one."""
    eventually(f"a worker says {expected!r}", lambda: running.read_line() == expected)


def _said(running: Program) -> list[str]:
    """What the command itself has said."""
    return [
        line.removeprefix("shardwell: ") for line in running.log if line.startswith("shardwell: ")
    ]


def test_an_elastic_member_that_is_killed_is_started_again(script, pids, cluster, tmp_path) -> None:
    program = script(MEMBER.format(target=cluster(2).target))
    with _start(3, program, "--elastic") as running:
        before = _all_told(pids, 3)
        for rank in range(3):
            _read_until(running, f"[{rank}] all w0,w1,w2 in life 0")
        os.kill(before[1], signal.SIGKILL)
        for rank in (0, 2):
            _read_until(running, f"[{rank}] all w0,w2 in life 0")
        _read_until(running, "[1] all w0,w1,w2 in life 1")
        after = pids()
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] != before[1]
        assert all(map(is_running, after))
        (tmp_path / "over").touch()
        assert running.end() == 0
        ended = "rank 1 has ended with signal 9 (SIGKILL)"
        assert _said(running) == [f"{ended}; it is started again in 1 s (1 of 3)"]


def test_an_elastic_member_that_leaves_on_sigterm_is_done(script, pids, cluster, tmp_path) -> None:
    program = script(MEMBER.format(target=cluster(2).target))
    with _start(3, program, "--elastic") as running:
        before = _all_told(pids, 3)
        _read_until(running, "[1] all w0,w1,w2 in life 0")
        os.kill(before[1], signal.SIGTERM)
        for rank in (0, 2):
            _read_until(running, f"[{rank}] all w0,w2 in life 0")
        eventually("its end is printed", lambda: _said(running))
        assert all(map(is_running, (before[0], before[2])))
        (tmp_path / "over").touch()
        assert running.end() == 0
        assert _said(running) == [
            "rank 1 has ended with exit code 143: it has left, and is not started again"
        ]


def test_an_elastic_worker_that_always_fails_is_given_up(script, pids, tmp_path) -> None:
    """The others end with 0 and the run with its code."""
    program = script(
        "tell(os.getpid())\n"
        "if rank == 1: print('life', os.environ['SHARDWELL_RESTART']); sys.exit(7)\n"
        "while not (here / 'over').exists(): time.sleep(0.01)\n"
        "print('done')"
    )
    with _start(3, program, "--elastic", "--restarts=2") as running:
        written = [
            "rank 1 has ended with exit code 7; it is started again in 1 s (1 of 2)",
            "rank 1 has ended with exit code 7; it is started again in 2 s (2 of 2)",
            "rank 1 has ended with exit code 7; it is not started again (restarts: 2)",
        ]
        eventually("it is given up", lambda: written[-1] in _said(running))
        (tmp_path / "over").touch()
        assert running.end() == 7
        assert _said(running) == written
        lives = [f"[1] life {life}" for life in range(3)]
        assert sorted(running.lines) == ["[0] done", *lives, "[2] done"]


def test_the_first_elastic_worker_that_is_given_up_has_the_code(script, pids) -> None:
    """Of others that fail later, leave on SIGTERM, or end with 0."""
    program = script(
        "tell(os.getpid()); others_are_there()\n"
        "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
        "while len(list(here.glob('seen-?'))) < 2: time.sleep(0.01)\n"
        "sys.exit(9 if rank == 0 else 0)"
    )
    with _start(4, program, "--elastic", "--restarts=0") as running:
        eventually("two ends are printed", lambda: len(_said(running)) == 2)
        assert sorted(_said(running)) == [
            "rank 2 has ended with signal 9 (SIGKILL); it is not started again (restarts: 0)",
            "rank 3 has ended with signal 15 (SIGTERM): it has left, and is not started again",
        ]
        for rank in range(2):
            (Path(program).with_name(f"seen-{rank}")).write_text(str(pids()[rank]))
        assert running.end() == 128 + signal.SIGKILL
        assert _said(running)[2:] == [
            "rank 0 has ended with exit code 9; it is not started again (restarts: 0)"
        ]


def test_nothing_is_left_of_an_elastic_worker_when_it_is_started_again(script, pids) -> None:
    program = script(
        "ignoring = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(); "
        "time.sleep(60)'\n"
        "if os.environ['SHARDWELL_RESTART'] == '0':\n"
        "    command = [sys.executable, '-c', ignoring]\n"
        "    child = subprocess.Popen(command, stdout=subprocess.PIPE)\n"
        "    child.stdout.readline(); tell(child.pid, 'child'); sys.exit(1)\n"
        "try:\n    os.kill(int((here / 'child-0').read_text()), 0)\n"
        "except ProcessLookupError:\n    print('gone')"
    )
    code, output, _ = _run(1, program, "--elastic")
    assert (code, output) == (0, "[0] gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_elastic_worker_is_started_again_once_the_run_is_to_stop(script, pids, number) -> None:
    """Neither one that pauses, whose end is not awaited, nor one that the signal makes fail."""
    program = script(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('life', os.environ['SHARDWELL_RESTART'])\n"
        "if rank == 1: sys.exit(3)\n"
        "tell(os.getpid()); time.sleep(60)"
    )
    with _start(2, program, "--elastic", "--restarts=9") as running:
        _all_told(pids, 1)
        pausing = "rank 1 has ended with exit code 3; it is started again in 4 s (3 of 9)"
        eventually("it pauses", lambda: pausing in _said(running))
        running.send(number)
        assert running.end() == 128 + number
        lives = [f"[1] life {life}" for life in range(3)]
        assert sorted(running.lines) == ["[0] life 0", *lives]
        assert _said(running)[2] == pausing
        (last,) = _said(running)[3:]
        assert last.startswith(f"{number.name}: workers have")


def test_ctrl_c_ends_a_run_whose_only_elastic_worker_pauses(script) -> None:
    with _start(1, script("sys.exit(3)"), "--elastic", "--restarts=9") as running:
        pausing = "rank 0 has ended with exit code 3; it is started again in 4 s (3 of 9)"
        eventually("it pauses", lambda: pausing in _said(running))
        running.send(signal.SIGINT)
        assert running.end() == 128 + signal.SIGINT
        assert _said(running)[2:] == [pausing]


def test_elastic_workers_end_when_the_command_itself_is_killed(script, pids) -> None:
    """Those that were started again, too."""
    program = script(
        "if os.environ['SHARDWELL_RESTART'] == '0': sys.exit(1)\ntell(os.getpid()); time.sleep(60)"
    )
    with _start(2, program, "--elastic", "--grace-s=0.5") as running:
        _all_told(pids, 2)
        running.send(signal.SIGKILL)
