"""Calls that a signal, a fork or a stuck connection can't break.

Python raises KeyboardInterrupt in the main thread between any two instructions, in grpcio too,
which then never lets go of a lock that all later calls need. So the SDK's caller never calls
gRPC, and takes no lock that anything else waits for: the call goes into a queue, from which a
thread of the client takes it, and its outcome comes in another. Both are queue.SimpleQueue, whose
operations are whole whatever signal comes. The threads here get no KeyboardInterrupt.

States of a call:

    queued -> running -> ended                      the outcome is known
              running -> cancelled -> ended         the deadline passed, the caller was interrupted,
                                                    or the client was closed
Invariants:
  - The caller waits no longer than the call's timeout and ABANDON_S, whatever the call's thread,
    gRPC or its locks do: then it gets DeadlineError, and the thread is left to itself.
  - A signal is handled within SIGNAL_INTERVAL_S, whenever and in whatever thread it comes.
  - A call that was cancelled has ended before its caller goes on, unless it had to be abandoned.
  - What cancels (`cancelled_by`) runs on one thread of its own, never on the caller's.
  - A process that was forked has none of the threads: each call in it is refused at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple, TypeVar

from shardwell.errors import (
    ClosedError,
    DeadlineError,
    InternalError,
    LimitError,
    ShardwellError,
)
from shardwell.process.connected import OwnerProcess
from shardwell.process.ending import closed_text, named

_LOG = logging.getLogger("shardwell")
_LONG_PART = 0.1
"""The part of its time after which a call takes long: slow steps are given more time."""
_LONG_S_MIN = 10.0
_LOOK_S_FIRST = 2.0
"""A waiting call has its shards looked at after so long, and then each time that it has doubled."""
CALL_COUNT_MAX = 256
LATE_S = 0.25
"""The delay after its timeout at which a call is cancelled; before that it is to end by itself."""
ABANDON_S = 3.0
"""The delay after that at which its caller goes on, though the call has not ended."""
_LOOK_INTERVAL_S_MAX = 60.0
"""The longest sleep of the thread that cancels while a call may become late."""
SIGNAL_INTERVAL_S = 0.5
"""A caller's wait is cut into pieces of it: a signal that comes just before the wait begins, or
that another thread receives, does not wake it; Python's handler then runs between two pieces."""
_IDLE_S = 10.0
"""The time without a call after which a thread ends, unless it is the last that waits for one."""

ResultT = TypeVar("ResultT")


class _Outcome(NamedTuple):
    result: Any
    error: BaseException | None


class Call:
    """A call under way, or a part of one. Any thread but a caller's may cancel it.

    A part, which runs elsewhere, has no `body`, and is cancelled with the whole. `deliver` receives
    the outcome, on the call's thread; with `is_awaited` it does nothing but hand it over.
    """

    def __init__(
        self,
        body: Callable[[], Any] = lambda: None,
        timeout_s: float = math.inf,
        deliver: Callable[[_Outcome], None] = lambda _: None,
        scope: object = None,
        *,
        is_awaited: bool = False,
    ) -> None:
        self.body = body
        self.deliver = deliver
        self.scope = scope
        self.is_awaited = is_awaited
        self.late_s = time.monotonic() + timeout_s + LATE_S
        self.has_ended = False
        self.cancelled = threading.Event()
        self.is_expired = False
        self.lock = threading.Lock()
        """Held to change `acts`, and to cancel."""
        self.acts: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Ends its wait. Safe to repeat."""
        with self.lock:
            self.cancelled.set()
            acts = list(self.acts)
        for act in acts:
            act()


_current = threading.local()


def current_call() -> Call | None:
    """Returns the call, or the part of one, that this thread runs."""
    call: Call | None = getattr(_current, "call", None)
    return call


class cancelled_by:  # noqa: N801 (read as a verb, as contextlib's are)
    """A block whose wait `act` ends, if its call is cancelled, or was before.

    `act` does not block for long, and may be called by any thread, and more than once. The call is
    by default the one that this thread runs. Written out, as a generator costs twice as much.
    """

    __slots__ = ("_act", "_call")

    def __init__(self, act: Callable[[], None], call: Call | None = None) -> None:
        self._act = act
        self._call: Call | None = call or getattr(_current, "call", None)

    def __enter__(self) -> None:
        call = self._call
        if call is None:
            return
        with call.lock:
            call.acts.append(self._act)
            is_late = call.cancelled.is_set()
        if is_late:
            self._act()

    def __exit__(self, *reason: object) -> None:
        if self._call is not None:
            with self._call.lock:
                self._call.acts.remove(self._act)


class CallPart(Call):
    """A part of a call, on a thread of its own: cancelled with the call, or alone."""

    def __init__(self, whole: Call | None) -> None:
        super().__init__()
        self._whole = whole

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Has this thread run the part while the block runs."""
        before = current_call()
        with contextlib.ExitStack() as block:
            if self._whole is not None:
                block.enter_context(cancelled_by(self._end, self._whole))
            _current.call = self
            try:
                yield
            finally:
                _current.call = before

    def _end(self) -> None:
        assert self._whole is not None
        self.is_expired = self._whole.is_expired
        self.cancel()


class CallThreads:
    """The threads of one client, which end with this object, too: none of them holds it.

    Any thread may call, and after `close` none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.owner = OwnerProcess(name)
        self.closed = ""
        """The reason for refusals after `close`; "": the usual one."""
        self._threads = _Threads(f"shardwell-{name}")
        self._end = weakref.finalize(self, self._threads.end)
        try:
            self._threads.start()
        except RuntimeError as error:
            raise named(error, f"a {name}") from None

    def run(
        self,
        body: Callable[[], ResultT],
        timeout_s: float,
        *,
        scope: object = None,
        tell: Callable[[float], None] | None = None,
        look: Callable[[float], None] | None = None,
    ) -> ResultT:
        """Runs `body` on a thread of these, and returns its result. Blocks up to `timeout_s`.

        After an interrupt its result is dropped, which must let go of all by itself. `tell` is
        called once it has taken long, with the seconds so far; `look` after a few seconds, and each
        time that they have doubled. A ShardwellError's traceback begins here. DeadlineError: it did
        not end, even though it was cancelled. ForkedError, ClosedError, LimitError: it was not
        begun.
        """
        outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        call = Call(body, timeout_s, outcomes.put, scope, is_awaited=True)
        self._check_room()
        threads = self._threads
        try:
            # No function of Python before it is queued, at whose beginning a signal could come: an
            # interrupted call that was not begun would be waited for in vain.
            threads.queued.put(call)
            threads.look()
            if threads.are_gone:
                _refuse(call)
            long_s = max(timeout_s * _LONG_PART, _LONG_S_MIN)
            outcome = _awaited(outcomes, timeout_s + LATE_S + ABANDON_S, long_s, tell, look)
        except queue.Empty:
            raise DeadlineError(
                f"a call of this {self._name} did not end within {ABANDON_S:g} s after it was "
                "cancelled: its connection is stuck; make another"
            ) from None
        except BaseException:
            threads.look()  # again, if the signal came before it
            threads.to_cancel.put(call.cancel)
            if not (call.has_ended or threads.are_gone):
                with contextlib.suppress(queue.Empty):
                    outcomes.get(timeout=ABANDON_S)
            raise
        if outcome.error is None:
            return outcome.result  # type: ignore[no-any-return]
        __tracebackhide__ = True  # of notebooks and of pytest
        if isinstance(outcome.error, InternalError) or not isinstance(
            outcome.error, ShardwellError
        ):
            raise outcome.error
        # What it says is for users; how the call's thread came to it is for who mends Shardwell.
        _LOG.debug("a call failed", exc_info=outcome.error)
        raise outcome.error.with_traceback(None) from None

    def start(
        self, body: Callable[[], ResultT], timeout_s: float, *, scope: object = None
    ) -> Future[ResultT]:
        """Begins the work of `run`, without waiting."""
        future: Future[ResultT] = Future()
        future.set_running_or_notify_cancel()

        def deliver(outcome: _Outcome) -> None:
            if outcome.error is not None:
                future.set_exception(outcome.error)
            else:
                future.set_result(outcome.result)

        self._check_room()
        call = Call(body, timeout_s, deliver, scope)
        try:
            self._threads.queued.put(call)
        finally:
            self._threads.look()
        if self._threads.are_gone:
            with contextlib.suppress(InvalidStateError):  # the last of them did
                _refuse(call)
        return future

    def cancel_scope(self, scope: object) -> None:
        """Ends its calls that have begun, soon, on the thread that cancels. Does not wait."""
        self._threads.to_cancel.put(lambda: self._threads.cancel(scope))

    def close(self, finish: Callable[[], None] | None = None) -> None:
        """Cancels all calls, does `finish`, and ends the threads; from any thread. Never blocks."""
        self._threads.end(finish)

    def _check_room(self) -> None:
        self.owner.check()
        if self._threads.is_ended:
            raise ClosedError(self.closed or closed_text(f"the {self._name}", "connect again"))
        if len(self._threads.running) >= CALL_COUNT_MAX:
            raise LimitError(
                f"limit call_count_max={CALL_COUNT_MAX}: as many calls of this {self._name} are "
                "under way; wait for some of them"
            )


class _Threads:
    """The threads' side of CallThreads. Callers use the queues, and take no lock of it.

    A thread waits for a call, is spare, or runs one. One waits at a time, the one that ran a call
    last if it can be: of several that wait at one queue, a call wakes two, and others each time.
    A thread that queues a call has a spare thread look whether to wait if none waits, and so has
    a thread that takes a call and leaves another. So a queued call has a thread that waits, or is
    about to look. At the end the last thread refuses the queued calls; later ones are refused by
    the thread that queues them.
    """

    def __init__(self, name: str) -> None:
        self.to_cancel: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Acts for the thread that cancels; None ends it."""
        self.is_ended = False
        self.are_gone = False
        self.queued: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        """Calls to be run; None ends the threads. `look` is to be called after each."""
        self._name = name
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        """For each item, a spare looks whether it is to wait for a call."""
        self._lock = threading.Lock()
        self.running: set[Call] = set()
        """Calls under way; a thread of these changes it, with the lock held."""
        self._one_waits = False
        """True if a thread waits for a call, or is sure to do so next."""
        self._spare_count = 0
        self._count = 0
        self._look_s = math.inf
        """The time.monotonic() of the next look for late calls, when the first becomes late at the
        latest. The end of a call does not change it: calls of like timeouts wake the thread once a
        timeout, not once each."""

    def start(self) -> None:
        self._thread(self._cancel)
        self._add()

    def look(self) -> None:
        """Makes sure that a thread takes what was queued. Safe to repeat."""
        if not self._one_waits:
            self._woken.put(None)

    def end(self, finish: Callable[[], None] | None = None) -> None:
        """Takes no further call; the thread that cancels calls `finish` after the last one."""
        self.is_ended = True
        if finish is not None:
            self.to_cancel.put(finish)
        self.to_cancel.put(None)

    def cancel(self, scope: object = None) -> None:
        with self._lock:
            calls = [call for call in self.running if scope in (None, call.scope)]
        for call in calls:
            _tried(call.cancel)

    def _thread(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=self._name, daemon=True).start()

    def _add(self) -> None:
        with self._lock:
            self._count += 1
        try:
            self._thread(self._work)
        except BaseException:
            with self._lock:
                self._count -= 1
            raise

    def _work(self) -> None:
        try:
            self._run_calls()
        finally:
            with self._lock:
                self._count -= 1
                is_last = self.is_ended and not self._count
            if is_last:
                self.are_gone = True
                self._refuse_all()

    def _run_calls(self) -> None:
        waits = False
        while (call := self._next_call(waits=waits)) is not None:
            _current.call = call
            outcome = _not_begun() if self.is_ended else _outcome_of(call)
            _current.call = None
            call.has_ended = True
            with self._lock:
                self.running.discard(call)
                # Before its caller can make the next one, which is then this thread's.
                waits = call.is_awaited and not self._one_waits
                self._one_waits |= waits
            call.deliver(outcome)
            del call, outcome  # what they hold is the caller's to let go

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call = self.queued.get_nowait()
                if call is not None:
                    with contextlib.suppress(InvalidStateError):  # who queued it did
                        _refuse(call)

    def _next_call(self, *, waits: bool) -> Call | None:
        """Waits for a call, and has another thread wait for the next; None: end.

        With `waits` it is the thread that waits already; else it may be a spare first.
        """
        if not waits and not self._is_wanted():
            return None
        call = self.queued.get()
        if call is None:
            self.queued.put(None)  # for the next thread
        with self._lock:
            self._one_waits = False
            if not self.queued.empty():
                self._woken.put(None)
            if call is None:
                return None
            self.running.add(call)
            is_last = not self._spare_count
            is_first_late = call.late_s < self._look_s
            self._look_s = min(call.late_s, self._look_s)
        if is_last:
            # Without a thread to be had, calls take turns.
            with contextlib.suppress(RuntimeError, MemoryError):
                self._add()
        if is_first_late:
            self.to_cancel.put(lambda: None)  # it looks when to look
        return call

    def _is_wanted(self) -> bool:
        """Waits until this thread is the one that waits for a call; False: there are enough."""
        with self._lock:
            self._spare_count += 1
        is_idle = False
        while True:
            with self._lock:
                is_wanted = not self._one_waits
                if is_wanted or is_idle:
                    self._spare_count -= 1
                    self._one_waits = True
                    return is_wanted
            try:
                self._woken.get(timeout=_IDLE_S)
                is_idle = False
            except queue.Empty:
                is_idle = True

    def _cancel(self) -> None:
        while True:
            wait_s, look_s = None, self._look_s
            if look_s != math.inf:
                wait_s = min(max(look_s - time.monotonic(), 0.0), _LOOK_INTERVAL_S_MAX)
            try:
                act = self.to_cancel.get(timeout=wait_s)
            except queue.Empty:
                act = self._cancel_late
            if act is None:
                break
            _tried(act)
            del act
        self.cancel()
        self.queued.put(None)
        self.look()

    def _cancel_late(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            waiting = [call for call in self.running if not call.is_expired]
            late = [call for call in waiting if call.late_s <= now_s]
            self._look_s = min(
                (call.late_s for call in waiting if call.late_s > now_s), default=math.inf
            )
        for call in late:
            call.is_expired = True
            _tried(call.cancel)


def _awaited(
    outcomes: queue.SimpleQueue[_Outcome],
    timeout_s: float,
    long_s: float,
    tell: Callable[[float], None] | None,
    look: Callable[[float], None] | None,
) -> _Outcome:
    began_s, look_s = time.monotonic(), _LOOK_S_FIRST
    until_s = began_s + timeout_s
    while (rest_s := until_s - time.monotonic()) > SIGNAL_INTERVAL_S:
        with contextlib.suppress(queue.Empty):
            return outcomes.get(timeout=SIGNAL_INTERVAL_S)
        waited_s = time.monotonic() - began_s
        if look is not None and waited_s >= look_s:
            look(waited_s)
            look_s *= 2
        if tell is not None and waited_s >= long_s:
            tell(waited_s)
            tell = None
    return outcomes.get(timeout=max(rest_s, 0.0))


def _outcome_of(call: Call) -> _Outcome:
    if call.cancelled.is_set():
        return _not_begun()
    try:
        return _Outcome(call.body(), None)
    except BaseException as error:
        return _Outcome(None, named(error, "this call"))


def _not_begun() -> _Outcome:
    return _Outcome(None, ClosedError("the call was given up before it began"))


def _refuse(call: Call) -> None:
    call.has_ended = True
    call.deliver(_not_begun())


def _tried(act: Callable[[], None]) -> None:
    """Runs `act`, whose failure must not keep others from being cancelled."""
    try:
        act()
    except Exception:
        _LOG.exception("a call could not be cancelled")
