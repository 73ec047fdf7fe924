"""SIGTERM as a request to leave, which a training loop answers between two steps.

A spot instance that is taken away has two minutes, a process under Kubernetes or Slurm half a
minute: enough for the step under way, which others wait for. So the signal's handler only notes the
request; nothing is sent from there. It is installed by the main thread alone, and only where
SIGTERM would end the process: a handler of the program's own, or of its framework's, stays alone.

The first SIGTERM is noted; from then on SIGTERM does what it did before, so that a second one ends
the process at once. A process that was forked, and one in which nothing looks any more, are ended
by the first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from types import FrameType

from shardwell.errors import WorkerLostError, WorkersMissingError
from shardwell.specs.parameter import ParameterSpec

EXIT_CODE = 128 + signal.SIGTERM
"""As shells have it of a process that SIGTERM ended: 143. Kubernetes and Slurm start such a worker
again where they are to; 0 would say that its training is complete."""


def go_on_without(spec: ParameterSpec) -> bool:
    """Whether other workers of a parameter make their steps when one of them has left.

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
        """Whether SIGTERM has come."""
        self._is_known = False
        """Whether a step has ended since."""
        self._process_id = os.getpid()

    def __repr__(self) -> str:
        return f"LeaveRequest(has_come={self.has_come})"

    def check(self) -> None:
        """Ends the program where it is, if SIGTERM has come: `with` blocks end in order.

        Raises:
            SystemExit: it has; with the exit code 143, as that of a process that SIGTERM ended.
        """
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
        """SIGTERM has come; whether this is the process that is asked."""
        self.has_come = os.getpid() == self._process_id
        return self.has_come


_open: weakref.WeakSet[LeaveRequest] = weakref.WeakSet()
"""Requests whose owners still exist."""


def _note(number: int, frame: FrameType | None) -> None:
    """The handler. Writes to no log: what it interrupts may be in the middle of a line."""
    noted = [each for each in list(_open) if each.note()]
    if signal.getsignal(number) is _note:  # else another handler, which calls this one, decides
        signal.signal(number, signal.SIG_DFL)
        if not noted:
            os.kill(os.getpid(), number)
