"""Workers on this machine from start to end: the first that fails, or a shard of theirs, stops all.

Elastic ones do not stop one another: one that fails is started again, alone.

One thread does it all, so that lines do not mix: it waits for output, for ends of processes and for
signals, which all wake it through file descriptors.

A worker is a process and the group of all that it starts. Shards that workers may have beside them
are only watched: the caller stops them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

import click

from shardwell_server import signals
from shardwell_server.launch import guard
from shardwell_server.launch.guard import adopt_orphans, send_to_group
from shardwell_server.launch.hidden import hidden_modules
from shardwell_server.launch.output import RankOutput, shows_colors
from shardwell_server.processes import ChildProcess, describe_exit, stop_when_parent_ends

_STDOUT_FD, _STDERR_FD = 1, 2
_LOOK_INTERVAL_S = 0.05
"""How often groups are looked at whose leader has ended: nothing wakes us for them."""
_LAST_WORDS_S = 1.0
"""How long output is waited for that a process holds open which has left its group."""
_GRACE_S = 5.0
"""For workers whose run has failed, or that Ctrl-C ends."""
_LEAVE_GRACE_S = 120.0
"""After SIGTERM: what a spot instance is given, in which workers end the step under way."""
RESTART_VARIABLE = "SHARDWELL_RESTART"
"""How many times an elastic worker was started again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
"""Before a worker is started again, so that one that always fails does not burn the machine."""
_LEFT_CODES = (0, signals.EXIT_CODE_BASE + signal.SIGTERM, -signal.SIGTERM)
"""Ends of workers that are done, as subprocess has them: with their work, or asked by SIGTERM."""
_LAST_READ_COUNT_MAX = 16
"""Reads of what one stream of an ended worker still holds: a whole pipe."""


class RankProcess:
    """A worker in a process group of its own: signals go to it and to all that it has started.

    Args:
        rank: Its rank.
        program: Path of the executable.
        command: Its arguments, its name first.
        environment: All its variables.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        rank: int,
        program: str,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.rank = rank
        self._process = subprocess.Popen(
            command,
            executable=program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            process_group=0,
            bufsize=0,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.outputs = [
            RankOutput(rank, source, sink_fd, is_colored=shows_colors(sink_fd))
            for source, sink_fd in (
                (self._process.stdout, _STDOUT_FD),
                (self._process.stderr, _STDERR_FD),
            )
        ]
        self._has_group = True
        self._asked_alone: int | None = None
        """The signal that the worker was asked to stop with, and nothing that it has started."""

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, as subprocess has it; None while it runs."""
        return self._process.poll()

    @property
    def is_gone(self) -> bool:
        """It has ended, and nothing that it started is left in its group."""
        if self.poll() is None:
            return False
        # Ours by `adopt_orphans`; what has ended is counted in a group until it is waited for.
        with contextlib.suppress(ChildProcessError):
            while self._has_group and os.waitpid(-self.pid, os.WNOHANG)[0] != 0:
                pass
        return not self.send(0)

    def send(self, number: int) -> bool:
        """Sends a signal to the group; whether a process was in it. Also from signal handlers."""
        # Once the group is empty, the number may be another's.
        if self._has_group and not send_to_group(self.pid, number):
            self._has_group = False
        return self._has_group

    def ask_to_stop(self, number: int) -> None:
        """Sends a signal; also from signal handlers.

        SIGTERM is for the worker alone at first: the step that it may end needs what it has
        started, such as the processes of a DataLoader.
        """
        if number == signal.SIGTERM and self.poll() is None:
            self._asked_alone = number
            self.tell(number)
        else:
            self.send(number)

    def tell(self, number: int) -> None:
        """Sends a signal to the worker alone, which may handle it; also from signal handlers."""
        self._process.send_signal(number)

    def ask_the_rest(self) -> None:
        """Sends what the worker was asked with to all that it has left, once it has ended."""
        if self._asked_alone is not None:
            self.send(self._asked_alone)
            self._asked_alone = None

    def kill(self) -> None:
        """Kills the group, and waits for the worker."""
        self.send(signal.SIGKILL)
        self._process.wait()


def guarded(grace_s: float | None) -> int:
    """Goes on in a child process; this one becomes its guard, and ends with its exit code.

    The child gets a descriptor, in which it reads the numbers of signals that its guard passes on.

    Main thread only, while stop signals are held, and before threads are started.

    Args:
        grace_s: How long workers may take to end if the child is killed; None: a few seconds.
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
    """N workers, until all have ended. Main thread only: it takes the signals.

    Args:
        program: Path of the executable.
        command: Its arguments, its name first.
        environments: The variables of each rank.
        shards: Processes that serve the workers: the end of one is a failure, too.
        passing_fd: From `guarded`.
        grace_s: How long workers that are asked to stop may take; None: 120 s after
            SIGTERM, a few seconds after all else.
        restart_count_max: How often each rank is started again where it fails, while the others
            go on; None: the first failure stops all.
    """

    def __init__(
        self,
        program: str,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        shards: Sequence[ChildProcess] = (),
        *,
        passing_fd: int,
        grace_s: float | None,
        restart_count_max: int | None = None,
    ) -> None:
        self._program = program
        self._command = command
        self._environments = environments
        self._shards = shards
        self._passing_fd = passing_fd
        self._grace_s = _GRACE_S if grace_s is None else grace_s
        self._leave_grace_s = _LEAVE_GRACE_S if grace_s is None else grace_s
        self._restart_count_max = restart_count_max
        self._restart_counts = [0] * len(environments)
        self._due: dict[int, float] = {}
        """When each rank that has failed is started again, on the monotonic clock."""
        self._given_up_code: int | None = None
        self._ranks: list[RankProcess] = []
        """The newest process of each rank."""
        self._parent_pid = os.getppid()
        self._failed_code: int | None = None
        self._signal: int | None = None
        self._passed_on: set[int] = set()
        """Numbers of signals that the guard has sent, and that have not come yet."""
        self._signal_counts = {"guard": 0, "direct": 0}
        """Signals to stop, by where they came from: the sender may have sent one to all processes
        of a job, of which this process and its guard are two."""
        self._stop_s: float | None = None
        """When the workers were asked to stop."""
        self._asked: set[RankProcess] = set()
        """Those that were asked to stop: once is enough, a second SIGINT would hinder it."""
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Blocks until no worker is left; the exit code.

        0 if all ended with it; that of the first worker or shard that failed, or 128 and the number
        of the signal that ended it; 1 for a shard that ended with 0; 128 and the number of the
        signal that stopped us. Of elastic workers, that of the first that was given up.

        Raises:
            OSError: a worker can't be started; those that were are stopped.
        """
        adopt_orphans()
        with self._selector, self._waking():
            try:
                for rank in range(len(self._environments)):
                    if self._signal is None:
                        self._start(rank)
                self._watch()
            except BrokenPipeError as error:
                say(f"{error}; the workers are stopped")
                self._failed_code = signals.EXIT_CODE_BASE + signal.SIGPIPE
            finally:
                self._end_all()
        if self._signal is not None:
            return signals.EXIT_CODE_BASE + self._signal
        return self._failed_code or self._given_up_code or 0

    @contextlib.contextmanager
    def _waking(self) -> Iterator[None]:
        """Signals, and ends of workers, wake the selector."""
        reading_fd, writing_fd = os.pipe()
        for fd in (reading_fd, writing_fd):
            os.set_blocking(fd, False)

        def clear() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(reading_fd, 4096)

        self._selector.register(reading_fd, selectors.EVENT_READ, clear)
        for number in signals.stop_signals():
            signal.signal(number, self._handle)
        for number in signals.user_signals():
            signal.signal(number, self._pass_on_signal)
        earlier_handler = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        earlier_fd = signal.set_wakeup_fd(writing_fd, warn_on_full_buffer=False)
        taken = signals.stop_signals() | signals.user_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
        try:
            yield
        finally:
            signals.hold()
            signal.set_wakeup_fd(earlier_fd)
            signal.signal(signal.SIGCHLD, earlier_handler)
            os.close(reading_fd)
            os.close(writing_fd)

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
        """Whether the guard has sent this signal; more of them may have become one."""
        with contextlib.suppress(BlockingIOError):
            self._passed_on.update(os.read(self._passing_fd, 4096))
        is_passed = number in self._passed_on
        self._passed_on.discard(number)
        return is_passed

    def _start(self, rank: int) -> RankProcess:
        environment = self._environments[rank]
        if self._restart_count_max is not None:
            environment = {**environment, RESTART_VARIABLE: str(self._restart_counts[rank])}
        started = RankProcess(rank, self._program, self._command, environment)
        self._ranks[rank : rank + 1] = [started]
        for output in started.outputs:
            self._selector.register(output, selectors.EVENT_READ)
        return started

    def _start_those_due(self, left: list[RankProcess]) -> Iterator[RankProcess]:
        """Starts ranks again whose pause is over, once nothing is left of their last process."""
        now_s = time.monotonic()
        for rank in [rank for rank, due_s in self._due.items() if due_s <= now_s]:
            if self._stop_s is not None:
                return
            if self._ranks[rank] in left:
                self._ranks[rank].send(signal.SIGKILL)
                continue
            del self._due[rank]
            self._restart_counts[rank] += 1
            try:
                started = self._start(rank)
            except OSError as error:
                self._ranks[rank].kill()  # it may run, and only not be watched
                self._retry_or_give_up(rank, f"can't be started: {error}", 1)
            else:
                yield started
            if self._signal is not None:
                self._ask_to_stop(self._signal)  # it came while this one was being started

    def _watch(self) -> None:
        """Passes output on until all workers have ended and nothing of them is left."""
        running = list(self._ranks)
        left: list[RankProcess] = []
        has_told = False
        if self._signal is not None:
            self._ask_to_stop(self._signal)  # it came while one was being started
        had_any = False
        while running or left or (self._due and self._stop_s is None):
            had_any = bool(running)
            has_told = has_told or self._say_signal()
            self._judge_shards()
            must_look = bool(left) or self._stop_s is not None
            self._pass_on_output(_LOOK_INTERVAL_S if must_look else self._pause_s())
            self._reap_orphans()
            ended = [rank for rank in running if rank.poll() is not None]
            running = [rank for rank in running if rank not in ended]
            self._pass_on_last_words(ended)
            if self._restart_count_max is None:
                self._judge(ended)
            else:
                self._judge_each(ended)
            for rank in ended:
                rank.ask_the_rest()
            left = [rank for rank in left + ended if not rank.is_gone]
            running.extend(self._start_those_due(left))
            is_over = bool(left) and not running and not self._due
            if self._stop_s is None and (self._failed_code is not None or is_over):
                self._ask_to_stop(signal.SIGTERM)
            if self._stop_s is not None and time.monotonic() - self._stop_s > self._grace_s:
                for rank in running:
                    say(f"rank {rank.rank} did not end within {self._grace_s:g} s and is killed")
                return
        if had_any and not has_told:  # the last one ended as the signal came
            self._say_signal()

    def _say_signal(self) -> bool:
        """Says what a signal to stop does; whether one has come."""
        if self._signal is not None:
            say(
                f"{signal.Signals(self._signal).name}: workers have {self._grace_s:g} s to stop; "
                "another one kills them at once"
            )
        return self._signal is not None

    def _reap_orphans(self) -> None:
        """Waits for those that have ended of what workers left behind: ours by `adopt_orphans`.

        The object that started a process asks for its exit code, which only the first wait gets.
        """
        started: dict[int, Callable[[], object]] = {
            **{rank.pid: rank.poll for rank in self._ranks},
            **{shard.pid: shard.poll for shard in self._shards},
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

    def _judge(self, ended: list[RankProcess]) -> None:
        """Notes and tells the first failure; those that a stop causes are none."""
        failed = [rank for rank in ended if rank.poll() != 0]
        if not failed or self._stop_s is not None:
            return
        # Of several at once, one that was killed is the more likely cause.
        failed.sort(key=lambda rank: ((rank.poll() or 0) > 0, rank.rank))
        first = failed[0].poll()
        assert first is not None
        self._failed_code = _exit_code_of(first)
        for rank in failed:
            say(
                f"rank {rank.rank} has ended with {describe_exit(rank.poll())}"
                + ("; the others are stopped" if len(self._ranks) > len(failed) else "")
            )
        self._say_what_is_hidden()

    def _judge_each(self, ended: list[RankProcess]) -> None:
        """Of elastic workers: who is done, who is started again, and who is given up."""
        if self._stop_s is not None:
            return
        for rank in ended:
            code = rank.poll()
            assert code is not None
            words = f"has ended with {describe_exit(code)}"
            if code not in _LEFT_CODES:
                self._retry_or_give_up(rank.rank, words, _exit_code_of(code))
            elif code != 0:
                say(f"rank {rank.rank} {words}: it has left, and is not started again")
            if code != 0:
                rank.send(signal.SIGTERM)  # what it has started

    def _retry_or_give_up(self, rank: int, words: str, code: int) -> None:
        count = self._restart_counts[rank]
        assert self._restart_count_max is not None
        if count < self._restart_count_max:
            pause_s = min(_FIRST_PAUSE_S * 2**count, _LONGEST_PAUSE_S)
            self._due[rank] = time.monotonic() + pause_s
            say(
                f"rank {rank} {words}; it is started again in {pause_s:g} s "
                f"({count + 1} of {self._restart_count_max})"
            )
        else:
            say(f"rank {rank} {words}; it is not started again (restarts: {count})")
            self._given_up_code = self._given_up_code or code
            self._say_what_is_hidden()

    def _pause_s(self) -> float | None:
        """Until a worker is to be started again; None if none is."""
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def _say_what_is_hidden(self) -> None:
        for hiding in hidden_modules(self._command):
            say(
                f"{hiding} hides Python's own module {hiding.stem!r} from the workers and from all "
                "that they import; if their error names it, give the file another name"
            )

    def _judge_shards(self) -> None:
        """Stops the workers where a shard has ended: without it none comes any further."""
        if self._stop_s is not None or self._failed_code is not None:
            return
        for index, shard in enumerate(self._shards):
            code = shard.poll()
            if code is not None:
                self._failed_code = _exit_code_of(code) or 1
                say(f"shard {index} has ended with {describe_exit(code)}; the workers are stopped")
                self._ask_to_stop(signal.SIGTERM)
                return

    def _ask_to_stop(self, number: int) -> None:
        """Sends a signal to those that have got none. Also called by the signals' handler."""
        if self._stop_s is None:
            self._stop_s = time.monotonic()
            is_orphan = os.getppid() != self._parent_pid  # the command was killed
            if self._signal == signal.SIGTERM and not is_orphan:
                self._grace_s = self._leave_grace_s
        for rank in self._ranks:
            if rank not in self._asked:
                self._asked.add(rank)
                rank.ask_to_stop(number)

    def _end_all(self) -> None:
        """Kills what is left, and writes what it has said."""
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
        """Waits for output, or to be woken; passes on a bounded part of what has come."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.fileobj, RankOutput):
                self._pass_on(key.fileobj)
            else:
                key.data()

    def _pass_on_last_words(self, ended: list[RankProcess]) -> None:
        """So that they come before what we say of its end."""
        for rank in ended:
            for output in rank.outputs:
                for _ in range(_LAST_READ_COUNT_MAX):
                    if not output.is_open or not self._pass_on(output):
                        break

    def _pass_on(self, output: RankOutput) -> bool:
        was_there = output.pass_on()
        if not output.is_open:
            self._selector.unregister(output)
        return was_there


def _exit_code_of(code: int) -> int:
    """The exit code that a shell has for one of subprocess."""
    return code if code >= 0 else signals.EXIT_CODE_BASE - code


def say(words: str) -> None:
    """Prints a line of the command's own."""
    click.secho(f"shardwell: {words}", fg="red", err=True)
