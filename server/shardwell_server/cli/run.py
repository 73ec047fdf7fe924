"""`shardwell run`: any program as N workers on this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from types import FrameType

import click
import grpc

from shardwell.client import TARGET_VARIABLE
from shardwell.connection.credentials import TOKEN_FILE_VARIABLE, Credentials, SameToken
from shardwell.connection.options import listen_on
from shardwell.connection.tls import Tls
from shardwell.group.launch import (
    GROUP_VARIABLE,
    LAUNCHER_VARIABLE,
    RENDEZVOUS_VARIABLE,
    SHARDWELL_RUN,
)
from shardwell.group.rendezvous.service import GroupService, admit_anybody, admit_same
from shardwell.specs.names import check_name, parse_target
from shardwell.threads.spread import core_count
from shardwell_server.cli.options import option, usage_errors
from shardwell_server.cli.quantities import Duration
from shardwell_server.config import LOCAL_SHARD_COUNT_MAX
from shardwell_server.processes import guard, signals
from shardwell_server.processes.child import Child, describe_exit
from shardwell_server.processes.guard import adopt_orphans
from shardwell_server.processes.output import RankOutput, shows_colors
from shardwell_server.processes.own import stop_when_parent_ends
from shardwell_server.processes.supervise import Change, Restarts, State, Supervisor

_WORKER_COUNT_MAX = 256
"""Each has two pipes; 1024 open files are a usual limit."""
_RESTART_COUNT_MAX = 1000
_DEFAULT_RESTART_COUNT = 3
_RENDEZVOUS_THREAD_COUNT = 4
_LOCALHOST = "127.0.0.1"
_STDOUT_FD, _STDERR_FD = 1, 2
_LOOK_INTERVAL_S = 0.05
_WAKE_SIZE_BYTES = 4096
_LAST_WORDS_S = 1.0
"""The wait for output that a process holds open which has left its group."""
_GRACE_S = 5.0
_LEAVE_GRACE_S = 120.0
"""The grace after SIGTERM: that of a spot instance, in which workers end the step under way."""
RESTART_VARIABLE = "SHARDWELL_RESTART"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
_LEFT_CODES = (0, signals.EXIT_CODE_BASE + signal.SIGTERM, -signal.SIGTERM)
"""Codes of workers that are done, as subprocess has them: with their work, or asked by SIGTERM."""
_LAST_READ_COUNT_MAX = 16
"""Reads of what one stream of an ended worker still holds: a whole pipe."""
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_NOT_HIDDEN = ("__main__", "test")
"""Names that programs give their own files, and that nothing needs from Python."""
_CODES = {errno.ENOENT: 127, errno.EACCES: 126, errno.ENOEXEC: 126}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--workers",
    "worker_count",
    type=click.IntRange(1, _WORKER_COUNT_MAX),
    required=True,
    help="Workers to start, each a process.",
)
@option(
    "--group",
    "Name of the group that they join; default: a new one.",
    name="group_name",
    envvar=GROUP_VARIABLE,
)
@option(
    "--rendezvous",
    "Where they meet, such as a shard; default: here, served by this command.",
    envvar=RENDEZVOUS_VARIABLE,
    metavar="HOST:PORT",
)
@option(
    "--with-shards",
    "A shard beside each worker, in memory, over which weights and optimizer state are split; "
    "sets $SHARDWELL_SHARDS.",
    is_flag=True,
)
@option(
    "--grace-s",
    "How long workers that are asked to stop may take before they are killed; default: 120 s "
    "after SIGTERM, in which they end the step under way, and 5 s after Ctrl-C or a failure.",
    Duration(0.0, 3600.0),
)
@option(
    "--elastic",
    "A worker that fails or is killed is started again, and the others go on.",
    is_flag=True,
)
@option(
    "--restarts",
    "With --elastic: how often each rank is started again in all; 0: never; default: "
    f"{_DEFAULT_RESTART_COUNT}.",
    click.IntRange(0, _RESTART_COUNT_MAX),
    name="restart_count_max",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    *,
    worker_count: int,
    group_name: str | None,
    rendezvous: str | None,
    with_shards: bool,
    grace_s: float | None,
    elastic: bool,
    restart_count_max: int | None,
    command: tuple[str, ...],
) -> None:
    """Start a program as N workers on this machine.

    shardwell run -n 4 -- python train.py --epochs 3

    Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as with
    torchrun, and where its group meets, so that join_group() needs no arguments. OMP_NUM_THREADS is
    set to the cores divided by N, unless it is set: N workers with as many threads as cores each
    would fight for the cores. Their standard input is empty.

    Every line of output has the rank in front. When a worker fails, the others get SIGTERM, and
    SIGKILL after the grace; exit code: that of the worker, 128 and the number of the signal that
    ended it, or 0 if none failed. Ctrl-C and SIGTERM are passed on; a second one kills at once.
    SIGTERM goes to each worker, and to what it has started once the worker has ended. SIGUSR1 and
    SIGUSR2, as of Slurm's --signal, go to each worker, whose handlers they are for.
    What workers have started ends with them, also when this command is killed, except what has
    made itself a session of its own.

    With --elastic, for workers that come and go (members=), one that fails is started again after a
    pause of 1 s, which doubles up to 10 s; $SHARDWELL_RESTART counts. One that ends with 0, or
    after SIGTERM to it alone (143), is done. Exit code: 0 if each rank's last process did so, else
    that of the first rank that was given up. After Ctrl-C, or SIGTERM to this command, nothing is
    started again.

    With --with-shards each worker has a shard, in a process of its own: connect() needs no target.
    They start before the workers and end after them; one that dies ends the run, also with
    --elastic.
    """
    program = _find_program(command[0])
    restarts: Restarts | None = None
    if elastic:
        restarts = Restarts(
            count_max=_DEFAULT_RESTART_COUNT if restart_count_max is None else restart_count_max,
            first_pause_s=_FIRST_PAUSE_S,
            pause_s_max=_LONGEST_PAUSE_S,
            done_codes=_LEFT_CODES,
        )
    elif restart_count_max is not None:
        raise click.UsageError(
            f"--restarts {restart_count_max} needs --elastic: without it the first failure ends all"
        )
    if with_shards and worker_count > LOCAL_SHARD_COUNT_MAX:
        raise click.UsageError(
            f"--with-shards: a machine has at most {LOCAL_SHARD_COUNT_MAX} shards; got "
            f"-n {worker_count}; start fewer workers, or `shardwell cluster` with fewer shards"
        )
    with usage_errors():
        group_name = check_name("--group", group_name or f"run-{uuid.uuid4().hex[:12]}")
        if rendezvous:
            parse_target(rendezvous)
    try:
        passing_fd = guarded(grace_s)
    except OSError as error:
        raise click.ClickException(f"can't start a process to run the workers: {error}") from error
    with contextlib.ExitStack() as stack:
        shared = {GROUP_VARIABLE: group_name}
        shards: Sequence[Child] = ()
        if with_shards:
            from shardwell_server.local_cluster import LocalCluster  # a third of a second

            with signals.breaking_off():
                cluster = stack.enter_context(
                    LocalCluster(
                        worker_count,
                        processes=True,
                        tls=Tls.from_environment(),
                        same_token=os.environ.get(TOKEN_FILE_VARIABLE) or None,
                        log_level="warning",
                    )
                )
            shards = cluster.children
            shared[TARGET_VARIABLE] = cluster.target
        shared[RENDEZVOUS_VARIABLE] = rendezvous or stack.enter_context(_served_rendezvous())
        environments = _environments(worker_count, shared)
        try:
            code = LocalRun(
                program,
                command,
                environments,
                shards,
                passing_fd=passing_fd,
                grace_s=grace_s,
                restarts=restarts,
            ).run()
        except OSError as error:
            say(f"can't start {worker_count} workers: {error}")
            code = _CODES.get(error.errno or 0, 1)
    raise click.exceptions.Exit(code)


@contextlib.contextmanager
def _served_rendezvous() -> Iterator[str]:
    server = grpc.server(
        futures.ThreadPoolExecutor(_RENDEZVOUS_THREAD_COUNT, "shardwell-rendezvous")
    )
    with usage_errors():
        credentials = Credentials.of()
    token = credentials.token
    admit = admit_anybody if token is None else admit_same(SameToken(token))
    server.add_generic_rpc_handlers([GroupService(admit=admit).handler()])
    port = listen_on(server, f"{_LOCALHOST}:0", credentials.tls)
    server.start()
    try:
        yield f"{_LOCALHOST}:{port}"
    finally:
        server.stop(None).wait()


def _environments(worker_count: int, given: dict[str, str]) -> list[dict[str, str]]:
    with socket.create_server((_LOCALHOST, 0)) as listener:
        free_port = listener.getsockname()[1]
    shared = {
        "OMP_NUM_THREADS": str(max(1, core_count() // worker_count)),
        **{name: value for name, value in os.environ.items() if value or name != "OMP_NUM_THREADS"},
        "WORLD_SIZE": str(worker_count),
        "LOCAL_WORLD_SIZE": str(worker_count),
        "MASTER_ADDR": _LOCALHOST,
        "MASTER_PORT": str(free_port),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER_VARIABLE: SHARDWELL_RUN,
        **given,
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(worker_count)]


def _find_program(name: str) -> str:
    program = shutil.which(name)
    if program is not None:
        return program
    if os.path.exists(name) and (os.sep in name or name.endswith(".py")):
        what = "is a directory" if os.path.isdir(name) else "is not executable"
        code = _CODES[errno.EACCES]
    else:
        what, code = "was not found", _CODES[errno.ENOENT]
    hint = f"; to run a Python program: -- python {name}" if name.endswith(".py") else ""
    say(f"{name} {what}{hint}")
    raise click.exceptions.Exit(code)


class RankProcess(Child):
    """A worker, whose output is passed on with its rank in front of each line."""

    def __init__(
        self, rank: int, program: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        super().__init__(
            command,
            program=program,
            environment=environment,
            stderr=subprocess.PIPE,
            is_tied=False,
        )
        self.rank = rank
        self.passed_on = [
            RankOutput(rank, source, sink_fd, is_colored=shows_colors(sink_fd))
            for source, sink_fd in zip(self.outputs, (_STDOUT_FD, _STDERR_FD), strict=True)
        ]


def guarded(grace_s: float | None) -> int:
    """Continues in a child; this process becomes its guard, and ends with its exit code.

    Returns a descriptor from which the numbers of passed signals come. Main thread only, while stop
    signals are held, and before threads start.
    """
    reading_fd, writing_fd = os.pipe()
    passing_fd, telling_fd = os.pipe()
    os.set_blocking(passing_fd, False)
    for fd in (writing_fd, telling_fd):
        os.set_inheritable(fd, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    if child != 0:
        grace_s = _GRACE_S if grace_s is None else grace_s
        arguments = [str(child), str(grace_s), str(telling_fd)]
        os.execv(sys.executable, [sys.executable, "-I", "-S", guard.__file__, *arguments])
    for fd in (writing_fd, telling_fd):
        os.close(fd)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    stop_when_parent_ends(signals.ask_to_stop, reading_fd)
    return passing_fd


class LocalRun:
    """Runs N workers until all have ended. Main thread only: it takes the signals.

    The first that fails stops all, and so does the end of a shard; with `restarts`, a failed worker
    is started again, alone. One thread does it all, so that lines do not mix. The caller stops the
    shards. `passing_fd` is of `guarded`.
    """

    def __init__(
        self,
        program: str,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        shards: Sequence[Child] = (),
        *,
        passing_fd: int,
        grace_s: float | None,
        restarts: Restarts | None,
    ) -> None:
        self._program = program
        self._command = command
        self._environments = environments
        self._shards = shards
        self._passing_fd = passing_fd
        self._leave_grace_s = _LEAVE_GRACE_S if grace_s is None else grace_s
        self._rule = restarts
        self._supervisor: Supervisor[RankProcess] = Supervisor(
            _GRACE_S if grace_s is None else grace_s
        )
        self._parent_pid = os.getppid()
        self._failed_code: int | None = None
        self._signal: int | None = None
        self._passed_on: set[int] = set()
        """Signals that the guard has sent, and that have not come yet."""
        self._signal_counts = {"guard": 0, "direct": 0}
        """Signals to stop, by their way: a sender may signal all processes of a job, of which this
        process and its guard are two."""
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Blocks until no worker is left; returns the exit code.

        0 if all ended with it; that of the first worker or shard that failed, or 128 and the number
        of the signal that ended it; 1 for a shard that ended with 0; 128 and the number of the
        signal that stopped us. Of elastic workers, that of the first that was given up.
        """
        adopt_orphans()
        with self._selector, self._taking_signals():
            try:
                for rank in range(len(self._environments)):
                    if self._signal is None:
                        self._supervisor.add(partial(self._start, rank), self._rule or Restarts())
                self._watch()
            except BrokenPipeError as error:
                if not isinstance(error.__cause__, BrokenPipeError):  # whose reader has gone
                    say(f"{error}; the workers are stopped")
                self._failed_code = signals.EXIT_CODE_BASE + signal.SIGPIPE
            finally:
                self._end_all()
        if self._signal is not None:
            return signals.EXIT_CODE_BASE + self._signal
        return self._failed_code or 0

    @contextlib.contextmanager
    def _taking_signals(self) -> Iterator[None]:
        # Ignored, it would take codes of workers; handled, it ends the wait for output.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        woken_fd, waking_fd = os.pipe()
        for fd in (woken_fd, waking_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waking_fd, warn_on_full_buffer=False)
        self._selector.register(woken_fd, selectors.EVENT_READ)
        for number in signals.stop_signals():
            signal.signal(number, self._handle)
        for number in signals.user_signals():
            signal.signal(number, self._pass_on_signal)
        taken = signals.stop_signals() | signals.user_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
        try:
            yield
        finally:
            signals.hold()
            signal.set_wakeup_fd(-1)
            for fd in (woken_fd, waking_fd):
                os.close(fd)

    @property
    def _ranks(self) -> list[RankProcess]:
        return [place.process for place in self._supervisor.places]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Acts at once: the loop may be writing to a terminal that takes nothing."""
        source = "guard" if self._was_passed_on(number) else "direct"
        self._signal_counts[source] += 1
        if self._signal is None:
            self._signal = number
            self._ask_to_stop(number)
        elif max(self._signal_counts.values()) > 1:
            for rank in self._ranks:
                rank.send(signal.SIGKILL)

    def _pass_on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._was_passed_on(number):  # else the guard has it, too
            for rank in self._ranks:
                rank.tell(number)

    def _was_passed_on(self, number: int) -> bool:
        """True if the guard has sent this signal; more of them may have become one."""
        with contextlib.suppress(BlockingIOError):
            self._passed_on.update(os.read(self._passing_fd, _WAKE_SIZE_BYTES))
        is_passed = number in self._passed_on
        self._passed_on.discard(number)
        return is_passed

    def _start(self, rank: int, restart_count: int) -> RankProcess:
        environment = self._environments[rank]
        if self._rule is not None:
            environment = {**environment, RESTART_VARIABLE: str(restart_count)}
        started = RankProcess(rank, self._program, self._command, environment)
        try:
            for output in started.passed_on:
                self._selector.register(output, selectors.EVENT_READ)
        except OSError:
            started.kill()
            raise
        return started

    def _watch(self) -> None:
        supervisor = self._supervisor
        has_said = had_any = False
        while (supervisor.is_awaited or not supervisor.is_gone) and supervisor.rest_s > 0:
            if self._signal is not None:
                self._ask_to_stop(self._signal)  # it came while one was being started
            had_any = not supervisor.is_gone
            has_said = has_said or (had_any and self._say_signal())
            self._judge_shards()
            # Where nothing is due, the next line, end or signal is the next event.
            self._pass_on_output(None if supervisor.is_settled else _LOOK_INTERVAL_S)
            self._reap_orphans()
            ended = [change for change in supervisor.look() if change.words]
            self._pass_on_last_words([change.place.process for change in ended])
            if supervisor.stop_s is None:
                self._judge(ended)
            if not supervisor.is_awaited and not supervisor.is_gone:
                self._ask_to_stop(signal.SIGTERM)  # what is left of workers that have ended
        if had_any and not has_said:  # the last one ended as the signal came
            self._say_signal()
        for rank in self._ranks:
            if rank.poll() is None:
                say(f"rank {rank.rank} did not end within {supervisor.grace_s:g} s and is killed")

    def _say_signal(self) -> bool:
        if self._signal is not None:
            say(
                f"{signal.Signals(self._signal).name}: workers have {self._supervisor.grace_s:g} s "
                "to stop; another one kills them at once"
            )
        return self._signal is not None

    def _reap_orphans(self) -> None:
        """Waits for orphans, except started processes, whose exit codes their objects ask for."""
        started: dict[int, Callable[[], object]] = {
            process.pid: process.poll for process in (*self._ranks, *self._shards)
        }
        with contextlib.suppress(ChildProcessError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    return
                if ended.si_pid in started:
                    started[ended.si_pid]()
                else:
                    os.waitpid(ended.si_pid, os.WNOHANG)

    def _judge(self, ended: list[Change[RankProcess]]) -> None:
        # Of several at once, one that was killed is the more likely cause.
        ended.sort(key=lambda change: ((change.place.code or 0) > 0, change.place.process.rank))
        for place, _, words in ended:
            code, words = place.code or 0, f"rank {place.process.rank} {words}"
            if place.state is State.PAUSING:
                pause_s, count = place.rule.pause_s(place.restart_count), place.restart_count + 1
                say(
                    f"{words}; it is started again in {pause_s:g} s "
                    f"({count} of {place.rule.count_max})"
                )
            elif place.state is State.FAILED:
                self._failed_code = self._failed_code or _exit_code_of(code)
                if self._rule is not None:
                    say(f"{words}; it is not started again (restarts: {place.restart_count})")
                elif all(each.state is State.FAILED for each in self._supervisor.places):
                    say(words)
                else:
                    say(f"{words}; the others are stopped")
            elif code != 0:
                say(f"{words}: it has left, and is not started again")
        if any(place.state is State.FAILED for place, _, _ in ended):
            self._say_what_is_hidden()
            if self._rule is None:
                self._ask_to_stop(signal.SIGTERM)

    def _say_what_is_hidden(self) -> None:
        for hiding in hidden_modules(self._command):
            say(
                f"{hiding} hides Python's own module {hiding.stem!r} from the workers and from all "
                "that they import; if their error names it, give the file another name"
            )

    def _judge_shards(self) -> None:
        """Stops the workers where a shard has ended: without it none comes any further."""
        if self._supervisor.stop_s is not None:
            return
        for index, shard in enumerate(self._shards):
            code = shard.poll()
            if code is not None:
                self._failed_code = _exit_code_of(code) or 1
                say(f"shard {index} has ended with {describe_exit(code)}; the workers are stopped")
                self._ask_to_stop(signal.SIGTERM)
                return

    def _ask_to_stop(self, number: int) -> None:
        """Signals those that have got none. Also called by the signals' handler."""
        is_orphan = os.getppid() != self._parent_pid  # the command was killed
        if self._supervisor.stop_s is None and self._signal == signal.SIGTERM and not is_orphan:
            self._supervisor.grace_s = self._leave_grace_s
        self._supervisor.ask_to_stop(number)

    def _end_all(self) -> None:
        for rank in self._ranks:
            rank.kill()
        # Also those of earlier processes of a rank, which what they have started may hold open.
        sources = [key.fileobj for key in self._selector.get_map().values()]
        outputs = [source for source in sources if isinstance(source, RankOutput)]
        deadline_s = time.monotonic() + _LAST_WORDS_S
        try:
            while any(o.is_open for o in outputs) and time.monotonic() < deadline_s:
                self._pass_on_output(_LOOK_INTERVAL_S)
            for output in outputs:
                output.close()
        except BrokenPipeError:
            for output in outputs:
                output.discard()

    def _pass_on_output(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.fileobj, RankOutput):
                self._pass_on(key.fileobj)
            else:
                os.read(key.fd, _WAKE_SIZE_BYTES)

    def _pass_on_last_words(self, ended: list[RankProcess]) -> None:
        """Writes them before our words about its end."""
        for rank in ended:
            for output in rank.passed_on:
                for _ in range(_LAST_READ_COUNT_MAX):
                    if not output.is_open or not self._pass_on(output):
                        break

    def _pass_on(self, output: RankOutput) -> bool:
        was_there = output.pass_on()
        if not output.is_open:
            self._selector.unregister(output)
        return was_there


def _exit_code_of(code: int) -> int:
    return code if code >= 0 else signals.EXIT_CODE_BASE - code


def say(words: str) -> None:
    """Prints a line of the command's own."""
    click.secho(f"shardwell: {words}", fg="red", err=True)


def hidden_modules(command: Sequence[str]) -> list[Path]:
    """Returns files that Python would import for `command` in place of its own modules."""
    directory = _first_directory(command)
    if directory is None:
        return []
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    return [
        entry
        for entry in entries
        if entry.stem in sys.stdlib_module_names
        and entry.stem not in (*sys.builtin_module_names, *_NOT_HIDDEN)
        and (entry.suffix == ".py" or (entry / "__init__.py").is_file())
    ]


def _first_directory(command: Sequence[str]) -> Path | None:
    if command[0].endswith(".py"):
        return Path(command[0]).resolve().parent
    if not Path(command[0]).name.startswith("python"):
        return None
    arguments = iter(command[1:])
    for argument in arguments:
        if argument in ("-m", "-c"):
            return Path.cwd()
        if argument in ("-P", "-I"):
            return None
        if argument in _WITH_VALUE:
            next(arguments, None)
        elif not argument.startswith("-"):
            return Path(argument).resolve().parent
    return None
