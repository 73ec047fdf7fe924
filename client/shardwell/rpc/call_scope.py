"""The calls of one parameter, table or client: their deadlines, turns, attempts and end.

A call runs on a thread of the client's (calls.py). Calls that use the worker's next step take
turns; what a call asks of the shards is attempted again until it succeeds or its deadline has
passed; and once `close` was called, that is the reason of any failure.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from shardwell.errors import ClosedError, DeadlineError, ShardwellError
from shardwell.process import telemetry
from shardwell.process.spans import now_ns
from shardwell.rpc.cluster import Shards
from shardwell.rpc.heartbeat import TakesPart
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_status import missing_words
from shardwell.specs.deadlines import check_timeout, with_answer
from shardwell.threads.calls import current_call

_LOG = logging.getLogger("shardwell")
_ASK_TIMEOUT_S = 5.0
_TURN_LOOK_INTERVAL_S = 0.1

ResultT = TypeVar("ResultT")


class JointTurn:
    """The turn of calls that may be under way at once, such as the pieces of one exchange.

    The first call takes the scope's turn and the last gives it back. Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while the first waits for the scope's turn: others wait for that one."""
        self._count = 0

    def enter(self, scope_lock: threading.Lock, acquire: Callable[[threading.Lock], None]) -> None:
        """Waits with `acquire` for the scope's turn, which the first call takes for all."""
        acquire(self._lock)
        try:
            if not self._count:
                acquire(scope_lock)
            self._count += 1
        finally:
            self._lock.release()

    def leave(self, scope_lock: threading.Lock) -> None:
        """Gives the scope's turn back with the last call."""
        with self._lock:
            self._count -= 1
            if not self._count:
                scope_lock.release()


class CallScope:
    """The calls of one parameter, table or client. Any thread may use it."""

    def __init__(self, shards: Shards, timeout_s: float, what: str, **where: Any) -> None:
        self._shards = shards
        self._worker_id = shards.worker_id
        self._timeout_s = check_timeout(timeout_s)
        self._what = what
        self._where = where
        self._turn_lock = threading.Lock()
        self.is_closed = False
        self.member: TakesPart | None = None
        """None: this worker is no elastic member of what is called."""

    def run(
        self,
        body: Callable[[Attempts], ResultT],
        timeout_s: float | None = None,
        *,
        in_turn: bool | JointTurn = False,
        verb: str = "",
    ) -> ResultT:
        """Runs `body` on another thread and returns its result; blocks up to the deadline."""
        __tracebackhide__ = True  # of notebooks and of pytest
        self.check_open()
        bound_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        call = partial(self._attempted, body, bound_s, in_turn=in_turn)
        tell = partial(self._tell_wait, verb, bound_s) if verb else None
        look = partial(self._look, f"{verb or 'a call'} of {self._what}")
        end_s = with_answer(bound_s)
        run = partial(self._shards.threads.run, call, end_s, scope=self, tell=tell, look=look)
        if not (verb and sys.modules.get(telemetry.MODULE)):
            return run()
        begin_ns, failed = now_ns(), None
        try:
            return run()
        except BaseException as error:
            failed = error
            raise
        finally:
            spans, where = self._shards.spans, self._where
            telemetry.export_call(verb, spans, self._worker_id, where, begin_ns, failed)

    def _look(self, what: str, waited_s: float) -> None:
        self._shards.look_for_silence(what, waited_s)
        if self.member is not None and self.member.membership is not None:
            self._shards.heartbeats.give_way(self.member)

    def start(
        self,
        body: Callable[[Attempts], ResultT],
        timeout_s: float | None = None,
        *,
        in_turn: bool | JointTurn = False,
    ) -> Future[ResultT]:
        """Begins a call as `run` does; its future has the errors of `body`."""
        self.check_open()
        bound_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        call = partial(self._attempted, body, bound_s, in_turn=in_turn)
        return self._shards.threads.start(call, with_answer(bound_s), scope=self)

    def check_open(self, cause: BaseException | None = None) -> None:
        """Raises ClosedError after `close`, with the failure that it caused as the cause."""
        if self.is_closed:
            raise ClosedError(
                f"{self._what} was closed, or its client was; open it again, or connect again",
                **self._where,
            ) from cause

    def check_usable(self) -> None:
        """Raises what a call would before it begins, for one that needs no thread."""
        self.check_open()
        self._shards.threads.owner.check()

    def close(self) -> None:
        """Ends the calls under way, and lets none begin. From any thread; safe to repeat."""
        self.is_closed = True
        self._shards.threads.cancel_scope(self)

    def _tell_wait(self, verb: str, timeout_s: float, waited_s: float) -> None:
        with contextlib.suppress(ShardwellError):  # so many calls wait, or the client was closed
            self._shards.threads.start(
                partial(self._tell, verb, timeout_s, waited_s), 2 * _ASK_TIMEOUT_S
            )

    # On a thread of the client's.

    def _tell(self, verb: str, timeout_s: float, waited_s: float) -> None:
        missing = missing_words(self._shards.channels, _ASK_TIMEOUT_S, **self._where)
        _LOG.warning(
            "%s of %s has taken %.0f s, and gives up after %g s (timeout_s); it waits for %s",
            verb,
            self._what,
            waited_s,
            timeout_s,
            missing or "what shardwell status may say",
        )

    def _attempted(
        self,
        body: Callable[[Attempts], ResultT],
        timeout_s: float,
        *,
        in_turn: bool | JointTurn = False,
    ) -> ResultT:
        attempts = Attempts(timeout_s, self._shards)
        joint = in_turn if isinstance(in_turn, JointTurn) else None
        if joint is not None:
            joint.enter(self._turn_lock, partial(self._await_turn, attempts))
        elif in_turn and not self._turn_lock.acquire(blocking=False):
            self._await_turn(attempts, self._turn_lock)
        try:
            self.check_open()
            return body(attempts)
        except (ShardwellError, ValueError) as error:  # ValueError: gRPC's, when closed
            self.check_open(error)
            raise
        finally:
            if joint is not None:
                joint.leave(self._turn_lock)
            elif in_turn:
                self._turn_lock.release()

    def _await_turn(self, attempts: Attempts, lock: threading.Lock) -> None:
        call = current_call()
        assert call is not None
        while not lock.acquire(timeout=min(attempts.rest_s, _TURN_LOOK_INTERVAL_S)):
            if call.cancelled.is_set() or attempts.remaining_s <= 0:
                self.check_open()
                raise DeadlineError(
                    f"another thread's call on {self._what} took longer than "
                    f"{attempts.timeout_s:g} s; raise timeout_s, or let one thread call it",
                    **self._where,
                )


def await_call(call: Future[None], attempts: Attempts, what: str) -> None:
    """Blocks until another call of the client has ended, at most until the deadline."""
    current = current_call()
    assert current is not None
    while not call.done():
        try:
            call.exception(timeout=min(attempts.rest_s, _TURN_LOOK_INTERVAL_S))
        except TimeoutError:
            if current.cancelled.is_set() or attempts.remaining_s <= 0:
                raise DeadlineError(
                    f"{what} took longer than {attempts.timeout_s:g} s; raise timeout_s"
                ) from None
