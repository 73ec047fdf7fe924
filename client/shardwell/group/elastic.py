"""A group whose workers come and go: its calls, and how they go on in the next generation.

    a call is made --> announced in a generation --> ended
                          ^            | the generation is over
                          |            v
                          +-------- settled: made again, ended, or failed

Each call is kept until it has ended. When its generation is over, the member comes into the next,
learns there how far the calls of the old one are on others, and announces anew what is to be made
again, in the order in which it was called. Invariants: docs/adr/0037-elastic-groups.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from shardwell.errors import (
    ArgumentError,
    ClosedError,
    GroupMismatchError,
    ShardwellError,
    WorkerLostError,
)
from shardwell.group.agreement.coordinator import TO_REBUILD, failure_of
from shardwell.group.agreement.settlement import (
    Counts,
    Fate,
    fate_of,
    merged,
)
from shardwell.group.calls import CallOptions
from shardwell.group.engine import Call, Done, Progress, Regrouping
from shardwell.group.generation import Generation
from shardwell.group.group import Group
from shardwell.group.schedule.plan import Operation
from shardwell.group.state import SharedState
from shardwell.numerics.codec import Float32

Finish = Callable[[], None]
_REPAIR_S_MAX = 1e8
"""The bound of a repair that ends within the deadlines of calls."""
_REST_S_MIN = 1.0
"""A repair has so long at least, however long those before it took."""


@dataclass(eq=False, kw_only=True)
class PendingCall:
    """A call until it has ended, over all generations in which it is announced."""

    make: Callable[[Generation], Call]
    timeout_s: float
    admits: bool
    """True if newcomers may come in before it."""
    retries: bool
    """True if it can be made again when data have moved."""
    waits: bool = True
    only_in: int = 0
    """Number of the only generation in which it may be made; 0: any."""
    input: Float32 | None = None
    """The array's values before, of a call that writes and is made again."""
    call: Call | None = None
    announced_in: int = 0
    result: Future[Done] = field(default_factory=Future)

    @property
    def made(self) -> Call:
        """The call as it was announced last."""
        assert self.call is not None
        return self.call

    def restore(self) -> None:
        """Gives the array the values from before the call."""
        if self.input is not None and self.made.array.size == self.input.size:
            self.made.array[:] = self.input


class ElasticGroup(Group):
    """A group of `join_group(elastic=True)`: workers come, leave and are lost while calls go on.

    A call returns on all members that live, or on none. If a rank was lost before a call, or left,
    the call goes on with the others. If it is lost in the middle of a call, an `all_reduce` with
    `retry=True` goes on; other calls that move data raise WorkerLostError on all members, and the
    next call goes on. Workers that wait come in at the next `broadcast_state`; where no member has
    called that, at the next `all_reduce` or `barrier`. `rank`, `size` and `generation` change then,
    inside calls alone. Ranks are by age: rank 0 is a member that is longest in the group.
    """

    def __init__(self, *args: Any, min_size: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._min_size = min_size
        self._announcing = threading.RLock()
        """Held to announce calls and to come into the next generation; never by the engine."""
        self._pending: dict[int, PendingCall] = {}
        """The calls by identity, in the order in which they were called."""
        self._standings: dict[int, Counts] = {}
        """Counts by generation, for members that have not received them yet."""
        self._is_stateful = False
        self._is_expelled = False
        self._repair_begun_in = 0

    def begin(self, timeout_s: float) -> None:
        """Begins the first generation, with all others of it; blocks."""
        generation = self._generation
        with self._announcing:
            try:
                self._standings = dict(generation.settled({}, timeout_s))
            except WorkerLostError:
                self._repair(generation, [], timeout_s)

    @override
    def join(self, *, timeout_s: float | None = None) -> int:
        """Raises ArgumentError: a worker without further batches leaves with `close`."""
        raise ArgumentError(
            "in an elastic group a worker without more batches leaves with close(); join() keeps "
            "the ranks of workers that are to go on together"
        )

    @override
    def _check_open(self) -> None:
        super()._check_open()
        if self._is_expelled:
            raise ClosedError(
                f"the others of group {self.name!r} went on without this worker, which was silent "
                "for longer than its lease; close the group, and join it again as a newcomer"
            )

    # Calls.

    @override
    def _start(
        self, operation: Operation | None, array: Float32, options: CallOptions
    ) -> Future[Done]:
        def make(generation: Generation) -> Call:
            return self._calls.collective(
                generation.rank, generation.size, operation, array, options
            )

        is_free = operation in (None, Operation.ALL_REDUCE)
        # What depends on ranks is for those that the caller has seen.
        only_in = options.generation or (0 if is_free else self._generation.number)
        pending = PendingCall(
            make=make,
            timeout_s=self._timeout_of(options.timeout_s),
            admits=options.waits and is_free and not only_in and not self._is_stateful,
            retries=operation is None or options.retry,
            waits=options.waits,
            only_in=only_in,
            input=_copied(array) if options.retry else None,
        )
        return self._announced(pending)

    @override
    def _ask_for_state(self, timeout_s: float | None) -> Future[Done]:
        return self._announced(
            PendingCall(
                make=lambda _: self._calls.state(has_state=self._has_state, timeout_s=timeout_s),
                timeout_s=self._timeout_of(timeout_s),
                admits=True,
                retries=True,
            )
        )

    def _timeout_of(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _announced(self, pending: PendingCall) -> Future[Done]:
        if self._generation.engine.is_current_thread:
            raise ArgumentError(
                "a callback makes no calls of an elastic group: it would hold up the repair that "
                "the call may need; make the call on another thread"
            )
        with self._finishing() as finishes:
            self._check_open()
            self._pending[id(pending)] = pending
            generation = self._generation
            lacks = pending.admits and generation.size < self._min_size
            if generation.is_over or lacks:
                self._repair(generation, finishes, pending.timeout_s)
            else:
                self._announce(pending, generation, finishes)
        return pending.result

    @contextlib.contextmanager
    def _finishing(self) -> Iterator[list[Finish]]:
        """Holds the lock, and frees it before it runs the list, in which callers' code may be."""
        finishes: list[Finish] = []
        try:
            with self._announcing:
                yield finishes
        finally:
            for finish in finishes:
                finish()

    def _announce(
        self, pending: PendingCall, generation: Generation, finishes: list[Finish]
    ) -> None:
        if generation.size < self._min_size and not pending.admits:
            error = WorkerLostError(
                f"group {self.name!r} has {generation.size} members, and at least "
                f"{self._min_size} (min_size) are to be there; call broadcast_state, which waits "
                "for others"
            )
            finishes.append(partial(self._fail, pending, error))
            return
        try:
            call = pending.make(generation)
            call.announcement.admits = pending.admits
            call.announcement.retries = pending.retries
            if pending.only_in not in (0, generation.number):
                changed = WorkerLostError(
                    f"the members of group {self.name!r} changed before this call, whose array is "
                    "for the ranks before; look at rank and size, and call it again"
                )
                call.announcement.problem.CopyFrom(failure_of(changed))
            pending.call, pending.announced_in = call, generation.number
            call.result.add_done_callback(partial(self._call_ended, pending, call, generation))
            self._submit(call, generation, waits=pending.waits)
        except BaseException as error:
            pending.call = None
            if generation.is_over and isinstance(error, WorkerLostError):
                self._repair_soon(generation)  # which announces it
                return
            self._pending.pop(id(pending), None)
            raise

    def _call_ended(
        self, pending: PendingCall, call: Call, generation: Generation, result: Future[Done]
    ) -> None:
        error = result.exception()
        if pending.call is not call:
            return
        if error is None:
            self._finish(pending)
        elif self._is_to_settle(pending, error, generation):
            self._repair_soon(generation)
        else:
            self._fail(pending, error)

    def _is_to_settle(
        self, pending: PendingCall, error: BaseException, generation: Generation
    ) -> bool:
        if isinstance(error, Regrouping):
            return True
        progress = pending.made.progress
        if progress is Progress.ENDED or not generation.is_over:
            return False
        if isinstance(error, WorkerLostError):
            return progress is not Progress.MOVING or pending.retries
        if progress is Progress.PREPARED and not isinstance(error, ClosedError):
            pending.retries = False  # a deadline, say, ended it: others fail where data move
            return True
        return False

    def _finish(self, pending: PendingCall) -> None:
        if self._pending.pop(id(pending), None) is not None:
            done = pending.made.done
            pending.result.set_result(done._replace(generation=pending.announced_in))

    def _fail(self, pending: PendingCall, error: BaseException) -> None:
        if self._pending.pop(id(pending), None) is None:
            return
        if isinstance(error, WorkerLostError) and TO_REBUILD in error.message:
            advice = "the next call goes on with the members that are left"
            error = WorkerLostError(error.message.replace(TO_REBUILD, advice), rank=error.rank)
        pending.result.set_exception(error)

    # The next generation.

    def _repair_soon(self, previous: Generation) -> None:
        if self._repair_begun_in == previous.number:
            return
        self._repair_begun_in = previous.number

        def repair() -> None:
            # Its error is that of the calls, too.
            with contextlib.suppress(ShardwellError), self._finishing() as finishes:
                if self._generation is previous:
                    self._repair(previous, finishes)

        try:
            self._threads.start(repair, _REPAIR_S_MAX)
        except ShardwellError as error:
            for pending in list(self._pending.values()):
                self._fail(pending, error)

    def _repair(
        self,
        previous: Generation,
        finishes: list[Finish],
        timeout_s: float | None = None,
        wait_s: float = 0.0,
    ) -> None:
        """Comes into the generation that follows, and settles what was called before.

        `finishes` receives what ends calls, to be called without the lock.
        """
        waiting = list(self._pending.values())
        if timeout_s is None:
            timeout_s = waiting[0].timeout_s if waiting else self._timeout_s
        try:
            generation = self._followed(
                previous,
                timeout_s,
                wait_s,
                without_newcomers=not all(pending.admits for pending in waiting),
            )
        except Exception as error:
            self._repair_begun_in = 0  # the next call tries again
            self._is_expelled = isinstance(error, WorkerLostError)
            finishes += [partial(self._fail, pending, error) for pending in waiting]
            raise
        for pending in waiting:
            self._settle(pending, generation, finishes)

    def _followed(
        self, previous: Generation, timeout_s: float, wait_s: float, *, without_newcomers: bool
    ) -> Generation:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._check_open()
            rest_s = max(deadline_s - time.monotonic(), min(timeout_s, _REST_S_MIN))
            try:
                generation = self._membership.rejoin(
                    previous, rest_s, wait_s, without_newcomers=without_newcomers
                )
            finally:
                self._note_counts(previous)
            if self._closed:  # meanwhile, by another thread, which knew of the previous one alone
                generation.close()
                self._check_open()
            try:
                self._standings = dict(generation.settled(self._standings, timeout_s))
            except WorkerLostError:
                previous = generation
                continue
            return generation

    def _note_counts(self, previous: Generation) -> None:
        counts = previous.engine.counts
        if counts.moved:  # all its members knew of those before
            self._standings = {}
        known = merged([self._standings, {previous.number: counts}])
        self._standings = known

    def _settle(self, pending: PendingCall, generation: Generation, finishes: list[Finish]) -> None:
        call = pending.call
        if call is not None:
            fate = fate_of(
                call.announcement.call_index,
                self._standings.get(pending.announced_in, Counts()),
                is_prepared=call.progress in (Progress.PREPARED, Progress.ENDED),
                retries=pending.retries,
            )
            if fate is Fate.MADE:
                finishes.append(partial(self._finish, pending))
                return
            if fate is Fate.FAILED:
                error = WorkerLostError(
                    f"members of group {self.name!r} were lost in the middle of this call, so that "
                    f"it failed on all; {generation.size} go on with the next call"
                )
                finishes.append(partial(self._fail, pending, error))
                return
            pending.restore()
        self._announce(pending, generation, finishes)

    @override
    def _rebuild(self, timeout_s: float, wait_s: float) -> None:
        previous = self._generation
        with self._finishing() as finishes:
            self._check_open()
            if self._generation is previous:
                self._repair(previous, finishes, timeout_s, wait_s)

    # The state.

    @override
    def _shared_state(self, state: SharedState, timeout_s: float | None) -> bool:
        self._is_stateful = True
        deadline_s = time.monotonic() + self._timeout_of(timeout_s)
        while True:
            try:
                given = self._tried_state(state, timeout_s)
            except WorkerLostError:
                if self._is_expelled or time.monotonic() > deadline_s:
                    raise
                continue
            if given is not None:
                return given

    @override
    def _refuse_state(self, error: GroupMismatchError, *, goes_on: bool) -> None:
        if not goes_on:
            self._abort(error)
            raise error


def _copied(array: Any) -> Float32 | None:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        return None
    return array.reshape(-1).copy()
