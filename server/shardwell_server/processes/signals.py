"""The ways of commands with SIGINT, SIGTERM and SIGHUP: held at first, then in two ways.

While the signals are held, they wait in the kernel: an exception in the middle of an import, or of
a gRPC call, could be lost or leave a lock taken. A command that serves keeps holding them, and asks
for them where it can stop (`wait`, `is_asked_to_stop`, `check`). Every other command is broken off
wherever it is (`break_off`): a StoppedError runs through its `with` blocks, as Ctrl-C's would. One
that meets a finalizer is lost there; code that holds signals afterwards gets it again.

Main thread only, except `held`. Threads and child processes that are started while signals are held
hold them, too. SIGHUP that is ignored, as under nohup, stays so.

SIGUSR1 and SIGUSR2, which Slurm's --signal sends to all processes of a job, are held for good: they
would end a shard that workers still need. `shardwell run` passes them on.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

EXIT_CODE_BASE = 128


_came: int | None = None


class StoppedError(BaseException):
    """A signal asked the command to stop. No Exception, so that nothing on its way handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code as in shells: 130 after Ctrl-C."""
        return EXIT_CODE_BASE + self.number

    @property
    def cause(self) -> str:
        """The signal, in words."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name


def stop_signals() -> set[signal.Signals]:
    """Returns the signals that ask a command to stop."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return numbers


def user_signals() -> set[signal.Signals]:
    """Returns signals that announce the end of a job's time: for workers, and for no command."""
    numbers = {signal.SIGUSR1, signal.SIGUSR2}
    return {number for number in numbers if signal.getsignal(number) != signal.SIG_IGN}


def hold() -> None:
    """Lets signals wait until they are asked for. Safe to repeat."""
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals() | user_signals())


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keeps signals out of a block, such as one that starts a process and notes it."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def wait() -> None:
    """Blocks until a held signal has come."""
    signal.sigwait(stop_signals())


def is_asked_to_stop() -> bool:
    """Returns True once a signal has come."""
    return _came is not None or bool(signal.sigpending() & stop_signals())


def check() -> None:
    """Raises StoppedError once a signal has come."""
    if _came is not None:
        raise StoppedError(_came)
    if is_asked_to_stop():
        raise StoppedError(signal.sigwait(stop_signals()))


def ask_to_stop() -> None:
    """Asks this process to stop, as a signal from outside would. From any thread."""
    os.kill(os.getpid(), signal.SIGTERM)


def break_off() -> None:
    """Has a signal raise StoppedError wherever the main thread is, from now on.

    The first one does. Its clean end is bounded, so others that machines send change nothing; a
    person who types Ctrl-C again ends the process at once.
    """
    for number in stop_signals():
        signal.signal(number, _raise)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())


@contextlib.contextmanager
def breaking_off() -> Iterator[None]:
    """Lets signals break off a block of a command that holds them: it may take long."""
    break_off()
    try:
        yield
    finally:
        hold()
    check()


def _raise(number: int, frame: FrameType | None) -> None:
    global _came
    _came = number
    hold()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    raise StoppedError(number)
