"""SIGTERM as a request to leave, which a training loop answers between two steps.

A spot instance that is taken away has two minutes, a process under Kubernetes or Slurm half a
minute: enough for the step under way, which others wait for. So the signal's handler only notes the
request; nothing is sent from there. It is installed by the main thread alone, and only where
SIGTERM would end the process: a handler of the program's own, or of its framework's, stays alone.

The first SIGTERM is noted. A second one ends the process at once, unless it comes within a second:
Slurm and systemd send SIGTERM to all processes of a job, and a launcher among them passes its own
on. A process that was forked, and one in which nothing looks any more, are ended by the first.

Processes that the program has started, such as those of a DataLoader, get such a SIGTERM as well
and end. Their ends must not break the step under way: what a handler of SIGCHLD raises is held
back, and an error that then ends the program, for want of data, ends it with `EXIT_CODE`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

from shardwell.errors import WorkerLostError, WorkersMissingError
from shardwell.process.ending import leaving
from shardwell.specs.parameter import ParameterSpec

EXIT_CODE = 128 + signal.SIGTERM
"""The code of a process that SIGTERM ended: 143. Kubernetes and Slurm start such a worker
again where they are to; 0 would say that its training is complete."""

REPEAT_S = 1.0
"""The time after the first SIGTERM in which others are the same request, as a launcher passes its
own on; and before it, in which processes of the program may have ended by it."""
_LOOK_INTERVAL_S = 0.01
_DATA_MODULE = "torch.utils.data.dataloader"
"""The module whose loaders' processes end by themselves when they get SIGTERM, and whose waits end
then."""


def go_on_without(spec: ParameterSpec) -> bool:
    """True if other workers of a parameter make their steps when one of them has left.

    Where they do not, they wait for it to be started again, so SIGTERM may as well kill it.
    """
    return spec.members is not None or spec.mode == "async" or spec.worker_count == 1


class LeaveRequest:
    """Notes SIGTERM while it is open, for a training loop to end between two steps.

        with shardwell.connect() as client, shardwell.LeaveRequest() as request:
            ...
            for step in range(model.next_step, 1000):
                weights = model.exchange(gradient_of(weights, step))
                request.check()

    A context manager. It is opened by the main thread; elsewhere, and where the program handles
    SIGTERM already, it changes nothing, and the request never comes. Any thread may look at it.

    Examples:
        >>> with shardwell.LeaveRequest() as request:
        ...     for step in range(3):
        ...         request.check()  # after SIGTERM: ends the program, between two steps
        >>> request.has_come
        False
    """

    def __init__(self) -> None:
        self.has_come = False
        """True once the request has come."""
        self._is_known = False
        """True if a step has ended since."""
        self.has_signal = False
        """True if SIGTERM was the reason."""
        self._process_id = os.getpid()

    def __repr__(self) -> str:
        return f"LeaveRequest(has_come={self.has_come})"

    def check(self) -> None:
        """Ends the program where it is, if SIGTERM has come: `with` blocks end in order.

        Raises:
            SystemExit: it has; with the exit code 143, as that of a process that SIGTERM ended.
        """
        _hold_errors_of_children()
        if self.has_come:
            raise SystemExit(EXIT_CODE)

    @contextlib.contextmanager
    def ending_after_step(self) -> Iterator[None]:
        """A step, as its block. The one under way when SIGTERM comes ends as ever.

        So a loop that looks at `has_come` can end by itself; any other is ended by the next step,
        once that is made.

        Raises:
            SystemExit: a step has ended since SIGTERM came, and now this one; or it can't be made,
                as the others have left before.
        """
        _hold_errors_of_children()
        try:
            yield
        except (WorkersMissingError, WorkerLostError):
            self.check()
            raise
        if self._is_known:
            self.check()
        self._is_known = self.has_come

    def open(self) -> None:
        """Notes SIGTERM from now on, if it can. Safe to repeat."""
        if threading.current_thread() is threading.main_thread():
            found = signal.getsignal(signal.SIGTERM)
            if found is signal.SIG_DFL:
                leaving.clear()
                signal.signal(signal.SIGTERM, _note)
            if found in (signal.SIG_DFL, _note):
                _open.add(self)

    def close(self) -> None:
        """Does not note it any more. Safe to repeat; from any thread."""
        _open.discard(self)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not _open and signal.getsignal(signal.SIGTERM) is _note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __enter__(self) -> LeaveRequest:
        self.open()
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def note(self) -> bool:
        """Notes SIGTERM; returns whether it is the first that this process gets."""
        is_news = self.is_asked and not self.has_signal
        self.has_signal |= is_news
        self.has_come |= is_news
        return is_news

    @property
    def is_asked(self) -> bool:
        """True if this process made the request: it may be one that was forked later."""
        return os.getpid() == self._process_id


_open: weakref.WeakSet[LeaveRequest] = weakref.WeakSet()
_came_s = -REPEAT_S
"""The moment at which SIGTERM was noted, on the monotonic clock."""


def _note(number: int, frame: FrameType | None) -> None:
    """The handler. Writes to no log: what it interrupts may be in the middle of a line."""
    global _came_s
    asked = [each for each in list(_open) if each.is_asked]
    noted = [each for each in asked if each.note()]
    if noted:
        _came_s = time.monotonic()
        leaving.set()
        _hold_errors_of_children()
        if not isinstance(sys.excepthook, _EndHook):
            sys.excepthook = _EndHook(sys.excepthook)
    elif asked and time.monotonic() - _came_s < REPEAT_S:
        pass
    elif signal.getsignal(number) is _note:  # else another handler, which calls this one, decides
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _EndHook:
    """Prints an error that ends the program; the exit code is that of a worker that leaves."""

    def __init__(self, earlier: Callable[..., object]) -> None:
        self._earlier = earlier

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_globals.get("__name__") != _DATA_MODULE:
            trace = trace.tb_next
        if trace is not None:
            print(f"shardwell: SIGTERM came to all processes: {error}", file=sys.stderr)
        else:
            self._earlier(kind, error, error.__traceback__)
        if isinstance(error, Exception):
            raise SystemExit(EXIT_CODE)


class _ChildrenHandler:
    """Handles SIGCHLD as the program does, but holds back what that raises because of SIGTERM."""

    def __init__(self, earlier: Callable[[int, FrameType | None], object]) -> None:
        self._earlier = earlier

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._earlier(number, frame)
        except Exception:
            if not _open:
                raise
            deadline_s = time.monotonic() + REPEAT_S
            while not (is_asked := any(each.has_signal for each in list(_open))):
                if time.monotonic() > deadline_s:  # this process does not get the signal
                    break
                time.sleep(_LOOK_INTERVAL_S)
            if not is_asked:
                raise
            if _awaits_data(frame):
                raise SystemExit(EXIT_CODE) from None


def _hold_errors_of_children() -> None:
    """Makes the program's handler of SIGCHLD, if it has one by now, a `_ChildrenHandler`."""
    if _open and threading.current_thread() is threading.main_thread():
        found = signal.getsignal(signal.SIGCHLD)
        if callable(found) and not isinstance(found, _ChildrenHandler):
            signal.signal(signal.SIGCHLD, _ChildrenHandler(found))


def _awaits_data(frame: FrameType | None) -> bool:
    """True if the main thread waits for a loader, between two steps."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _DATA_MODULE:
            return True
        frame = frame.f_back
    return False
