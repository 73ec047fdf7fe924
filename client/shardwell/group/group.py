"""A group: workers that reduce among themselves, as one of them sees it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np

from shardwell.connection.credentials import Credentials
from shardwell.errors import (
    ArgumentError,
    ClosedError,
    GroupMismatchError,
    LimitError,
    WorkerLostError,
)
from shardwell.group.agreement.coordinator import failure_of
from shardwell.group.calls import REPLACEMENT_WAIT_S_MAX, CallMaker, CallOptions
from shardwell.group.engine import Call, Done
from shardwell.group.generation import Generation
from shardwell.group.membership import Membership
from shardwell.group.schedule.plan import Operation
from shardwell.group.state import SharedState
from shardwell.numerics.arguments import as_output
from shardwell.numerics.codec import Float32
from shardwell.numerics.reduction import ReductionName
from shardwell.placement.slices import slice_of
from shardwell.process.connected import Connected
from shardwell.process.ending import closed_text
from shardwell.process.spans import Traffic
from shardwell.specs.deadlines import check_duration, check_timeout
from shardwell.specs.names import format_ranks
from shardwell.specs.parameter import WireName
from shardwell.threads.calls import CallThreads, cancelled_by

_NOTHING: Float32 = np.empty(0, np.float32)
_ENGINE_S = 1e8
"""The bound of what the engine ends within its own deadlines, however much is to come before."""

_CALL_COUNT_MAX = 64

ResultT = TypeVar("ResultT")


def _close_at_exit(of: weakref.ReferenceType[Group]) -> None:
    group = of()
    if group is not None:
        group.close()


class Group(Connected):
    """A group that `join_group` has made. A context manager; any thread may call it.

    All ranks make the same calls in the same order. Each call first agrees on what is called, which
    takes a message to rank 0 and back; if the ranks differ, every one of them gets the same error
    and no array is written. Arrays are float32 of any shape, C-contiguous and writable, and are
    reduced in place; no one else may use an array until its call is done. After an error in the
    middle of a call (WorkerLostError, a deadline) each element is what it was, or final. Ctrl-C
    ends the wait for a call, which this rank makes all the same: the array is the group's until it
    is done, and the next call comes after it.

    Every rank ends with the same bits, whatever the codec, and a run that is repeated has them
    again.

    Examples:
        >>> gradient = np.ones(3, np.float32)
        >>> group.all_reduce(gradient, op="mean")  # in place; the same bits on all ranks
        >>> group.rank, group.size
        (0, 1)
    """

    _elsewhere = "call shardwell.join_group in the other process, which is a rank of its own"

    def __init__(
        self,
        name: str,
        membership: Membership,
        threads: CallThreads,
        calls: CallMaker,
        *,
        traffic: Traffic,
        credentials: Credentials,
    ) -> None:
        self.tls = None if credentials.tls is None else credentials.tls.tls
        """The credentials of this worker, and those it believes; None: no TLS."""
        self.token_file = None if credentials.token is None else credentials.token.path
        """Path of the file with this worker's token; None: it has none."""
        self.name = name
        """Name of the group."""
        self.strategy = calls.strategy
        """The strategy of its reductions."""
        self.traffic = traffic
        """Bytes moved so far."""
        self._membership = membership
        self._threads = threads
        self._timeout_s = calls.timeout_s
        self._calls = calls
        self._room = threading.BoundedSemaphore(_CALL_COUNT_MAX)
        self._closed = False
        self._has_state = False
        self._rebuilding = threading.Lock()
        # A program that ends without `close` leaves all the same, once its calls are done.
        self._at_exit = weakref.finalize(self, _close_at_exit, weakref.ref(self))
        # One that is forgotten leaves as well.
        self._forgotten = weakref.finalize(self, threads.close, membership.leave)
        self._forgotten.atexit = False

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank={self.rank}, size={self.size}, strategy={self.strategy})"

    @property
    def _generation(self) -> Generation:
        return self._membership.generation

    @property
    def rank(self) -> int:
        """This worker's 0-based rank; `rebuild`, and calls of an elastic group, may change it."""
        return self._generation.rank

    @property
    def size(self) -> int:
        """The number of members; `rebuild`, and calls of an elastic group, may change it."""
        return self._generation.size

    @property
    def generation(self) -> int:
        """The number of the generation: it grows whenever members change."""
        return self._generation.number

    @property
    def addresses(self) -> list[str]:
        """The HOST:PORT where the other members reach each rank, by rank."""
        return [member.address for member in self._generation.members]

    @property
    def waiting_count(self) -> int:
        """The workers that wait to come in, as of a moment ago: `rebuild` on all ranks takes them.

        In an elastic group the next `broadcast_state` does.
        """
        return self._membership.waiting_count

    def all_reduce(
        self,
        array: Float32,
        op: ReductionName = "sum",
        *,
        sample_count: int = 1,
        codec: WireName | None = None,
        timeout_s: float | None = None,
        retry: bool = False,
    ) -> None:
        """Reduces the arrays of all ranks, and gives the result to each, in place. Blocks.

        Args:
            array: float32 of any shape, C-contiguous and writable; as long on every rank.
            op: "sum", "mean", "max" or "min". A sum beyond float32 is infinite.
            sample_count: With "mean": this rank's weight, 0 to 2^24, as in sum(n_i * x_i) /
                sum(n_i); if all are 0, the mean is 0.
            codec: How chunks travel: "fp32", "fp16", "bf16"; default: the group's. Partial sums
                travel in it too, and are rounded to it at each hop.
            timeout_s: How long the other ranks are waited for to make the call; then again for
                their data. Default: the group's.
            retry: In an elastic group: copies the array before the call, and if a rank is lost in
                the middle, makes the call again with the ranks that are left. The same on all
                ranks. The copy takes as much memory as the array, until the call ends.

        Raises:
            CollectiveMismatchError: the ranks called something else, or with other lengths or
                dtypes. All get it; the group goes on.
            NonFiniteError: a rank's array has NaN or infinity. All get it; the group goes on.
            WorkersMissingError: ranks did not call in time. All get it; the group goes on, unless
                data were already moving.
            WorkerLostError: a rank is gone; `rebuild`, or leave.
            ArgumentError: `retry` in a group that is not elastic.
            ClosedError: the group was closed.
        """
        options = CallOptions(op, 0, sample_count, codec, timeout_s, retry)
        self._ended(partial(self._start, Operation.ALL_REDUCE, array, options))

    def all_reduce_async(
        self,
        array: Float32,
        op: ReductionName = "sum",
        *,
        sample_count: int = 1,
        codec: WireName | None = None,
        timeout_s: float | None = None,
    ) -> Future[None]:
        """Starts `all_reduce` in the background; the future ends when the array is done.

        Calls are matched among the ranks by their order. Blocks only while 64 are under way. The
        deadlines of the other ranks' calls count from when each is announced, not from its turn.
        Callbacks of the future run before the group's next call, and are refused calls that wait.

        Raises:
            WorkerLostError, ClosedError: no call can be made any more. Other errors come from the
                future.
        """
        result: Future[None] = Future()
        result.set_running_or_notify_cancel()

        def done(call: Future[Done]) -> None:
            error = call.exception()
            if error is None:
                result.set_result(None)
            else:
                result.set_exception(error)

        options = CallOptions(op, 0, sample_count, codec, timeout_s, waits=False)
        begin = partial(self._start, Operation.ALL_REDUCE, array, options)
        is_callback = self._generation.engine.is_current_thread
        call = begin() if is_callback else self._run(begin, _ENGINE_S)
        call.add_done_callback(done)
        return result

    def reduce(
        self,
        array: Float32,
        root: int = 0,
        op: ReductionName = "sum",
        *,
        sample_count: int = 1,
        codec: WireName | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Reduces the arrays of all ranks into the root's; the others' stay as they are. Blocks.

        See `all_reduce`.
        """
        options = CallOptions(op, root, sample_count, codec, timeout_s)
        self._ended(partial(self._start, Operation.REDUCE, array, options))

    def broadcast(
        self,
        array: Float32,
        root: int = 0,
        *,
        codec: WireName | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Gives the root's array to every rank, in place. Blocks.

        With a codec that rounds, the root's own array is rounded too, so that all are the same;
        pass codec="fp32" for first weights. See `all_reduce`.
        """
        options = CallOptions(root=root, codec=codec, timeout_s=timeout_s)
        self._ended(partial(self._start, Operation.BROADCAST, array, options))

    def reduce_scatter(
        self,
        array: Float32,
        op: ReductionName = "sum",
        *,
        sample_count: int = 1,
        codec: WireName | None = None,
        timeout_s: float | None = None,
    ) -> Float32:
        """Reduces the arrays of all ranks; each gets its own segment of the result. Blocks.

        Returns:
            This rank's segment, a view: `segment(array)`, but that it is cut among those that take
            part while others are in `join`. The rest of the array stays as it is. See `all_reduce`.
        """
        options = CallOptions(op, 0, sample_count, codec, timeout_s)
        done = self._ended(partial(self._start, Operation.REDUCE_SCATTER, array, options))
        flat = as_output(array, None, "array")
        where = slice_of(flat.size, done.place, len(done.ranks))
        return flat[where.offset : where.stop]

    def all_gather(
        self, array: Float32, *, codec: WireName | None = None, timeout_s: float | None = None
    ) -> None:
        """Fills the array with the segment of each rank, in place. Blocks.

        Rank r contributes `segment(array)`; an array of shape (size, ...) has row r as rank r's.
        While ranks are in `join` it fails for all: their segments are missing.
        With a codec that rounds, a rank's own segment is rounded too. See `all_reduce`.
        """
        options = CallOptions(codec=codec, timeout_s=timeout_s)
        self._ended(partial(self._start, Operation.ALL_GATHER, array, options))

    def broadcast_state(
        self, state: Mapping[str, np.ndarray], *, timeout_s: float | None = None
    ) -> bool:
        """Gives the state of the group to members that lack it, in place, bit for bit. Blocks.

        All ranks call it, with the same names, shapes and dtypes. A member has the state from its
        first `broadcast_state` on. If all have it, nothing moves. Otherwise the lowest rank that
        has it gives its arrays to those that lack it; rank 0 does at the start, when none has it.
        Arrays are written when all of the state has come, which takes as much memory once more.

        In an elastic group, workers that wait come in here and, once a member has called this,
        nowhere else: call it at the top of each step.

        Args:
            state: Arrays by name: C-contiguous, writable, of any dtype but object; not changed by
                others until this returns.
            timeout_s: How long the other ranks are waited for; default: the group's.

        Returns:
            Whether this worker was given the state: True on a newcomer.

        Raises:
            ArgumentError: an array can't be used.
            GroupMismatchError: the ranks' names, shapes or dtypes differ. In an elastic group that
                has a state, only newcomers get it, and leave; the others go on.
            ShardwellError: as `broadcast`.
        """
        return self._shared_state(SharedState(state), timeout_s)

    def _refuse_state(self, error: GroupMismatchError, *, goes_on: bool) -> None:
        raise error

    def _ask_for_state(self, timeout_s: float | None) -> Future[Done]:
        call = self._calls.state(has_state=self._has_state, timeout_s=timeout_s)
        return self._submitted(call)

    def _shared_state(self, state: SharedState, timeout_s: float | None) -> bool:
        given = self._tried_state(state, timeout_s)
        assert given is not None
        return given

    def _tried_state(self, state: SharedState, timeout_s: float | None) -> bool | None:
        asked = self._ended(partial(self._ask_for_state, timeout_s))
        if all(asked.sample_counts):
            return False
        place, has_state = asked.place, bool(asked.sample_counts[asked.place])
        root = int(np.argmax(asked.sample_counts))  # the first that has it, or 0
        summing = CallOptions("sum", codec="fp32", timeout_s=timeout_s, generation=asked.generation)
        options = summing._replace(op=None, root=asked.ranks[root])
        words = state.digest_words()
        self._ended(partial(self._start, Operation.BROADCAST, words, options))
        differing: Float32 = np.zeros(len(asked.ranks), np.float32)
        differing[place] = (words != state.digest_words()).any()
        self._ended(partial(self._start, Operation.ALL_REDUCE, differing, summing))
        if differing.any():
            ranks = [asked.ranks[each] for each in np.flatnonzero(differing)]
            error = GroupMismatchError(
                f"the states of {format_ranks(ranks)} differ from rank {asked.ranks[root]}'s in "
                f"names, shapes or dtypes; here: {state.description:.1000}; give all ranks the same"
            )
            self._refuse_state(error, goes_on=has_state)
            return None
        is_given = not has_state and place != root
        for start, stop in state.pieces():
            words = state.words(start, stop)
            self._ended(partial(self._start, Operation.BROADCAST, words, options))
            if is_given:
                state.take(start, words)
        if is_given:
            state.write()
        self._has_state = True
        return is_given

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Blocks until all ranks have called it."""
        self._ended(partial(self._start, None, _NOTHING, CallOptions(timeout_s=timeout_s)))

    def join(self, *, timeout_s: float | None = None) -> int:
        """Takes part in no further calls until all ranks have called `join`. Blocks.

        For a worker that has fewer batches than others: they go on among themselves, and means
        count who is still in. While ranks are out, `reduce_scatter` cuts segments among those that
        are in, and `all_gather` fails.

        Args:
            timeout_s: How long the others are waited for; default: an hour, because they may have
                many batches left.

        Returns:
            The rank that called it last; it has made every call, so that others may take what they
            missed with `broadcast(..., root=that)`. From now on all take part again.

        Raises:
            WorkersMissingError: others did not come in time; call again to go on waiting.
            WorkerLostError, ClosedError: see `all_reduce`.
        """
        call = self._calls.join(timeout_s)
        return self._ended(partial(self._submitted, call)).last_rank

    def segment(self, array: Float32) -> Float32:
        """This rank's part of an array, as `reduce_scatter` and `all_gather` cut it: a view.

        One dimension; the first `array.size % size` segments are one element longer.
        """
        where = slice_of(array.size, self.rank, self.size)
        return array.reshape(-1)[where.offset : where.stop]

    def rebuild(self, *, timeout_s: float | None = None, replacement_wait_s: float = 0.0) -> None:
        """Goes on with the members that live, and with workers that have come to replace others.

        Calls of an elastic group do it by themselves.

        Needs the meeting place: where rank 0 serves that (a list of addresses, torchrun), and rank
        0 is lost, start the job again. All members that live must call it; if no rank is lost, the
        others' calls fail with an error that asks for it.
        Calls that are under way fail. Ranks close up: the
        order of those that live stays, a replacement has the rank that it asked for, or a free one
        where that is another's by now, and gaps are gone. Blocks until the new generation is ready.

        Args:
            timeout_s: How long the other members are waited for; default: the group's.
            replacement_wait_s: How long to wait for replacements before going on with fewer, at
                most an hour.

        Raises:
            WorkersMissingError: members that live did not call it in time; they are named. This
                one keeps its rank; call it again, or leave.
            WorkerUnreachableError, ShardUnavailableError: see `join_group`.
            RankTakenError, WorkerLostError: the others went on without this one, which they took
                for dead; join again.
        """
        timeout_s = check_timeout(self._timeout_s if timeout_s is None else timeout_s)
        wait_s = check_duration("replacement_wait_s", replacement_wait_s, 0, REPLACEMENT_WAIT_S_MAX)
        self._run(partial(self._rebuild, timeout_s, wait_s), timeout_s + wait_s)

    def _rebuild(self, timeout_s: float, wait_s: float) -> None:
        previous = self._generation
        with self._rebuilding:
            self._check_open()
            if self._generation is not previous:
                return  # another thread has done it meanwhile
            generation = self._membership.rejoin(previous, timeout_s, wait_s)
            if self._closed:  # meanwhile, by another thread, which knew of the previous one alone
                generation.close()
                self._check_open()

    def close(self) -> None:
        """Leaves the group, when the calls that were made are done. Safe to repeat. Blocks.

        A program that ends without it leaves in the same way. A process that was forked is no
        member, and does nothing.
        """
        self._leave(self._membership.leave)

    def _abort(self, error: BaseException) -> None:
        failed = WorkerLostError(
            f"rank {self.rank} left in the middle, because of {error!r:.200}", rank=self.rank
        )

        def leave() -> None:
            self._generation.abort(failure_of(failed))
            self._membership.close()

        self._leave(leave)

    def _leave(self, leave: Callable[[], None]) -> None:
        if self._closed or not self._threads.owner.is_here:
            return
        self._closed = True
        self._at_exit.detach()
        self._forgotten.detach()
        begun: list[bool] = []

        def leave_once() -> None:
            if not begun:
                begun.append(True)
                leave()

        try:
            self._threads.run(leave_once, _ENGINE_S)
        finally:  # where Ctrl-C came before it had begun, it is done all the same
            self._threads.close(leave_once)

    def _check_open(self) -> None:
        self._threads.owner.check()
        if self._closed:
            raise ClosedError(closed_text(f"group {self.name!r}", "join it again"))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        succeeds = isinstance(error, SystemExit) and not error.code  # sys.exit()
        if error is None or succeeds or isinstance(error, WorkerLostError):
            self.close()
        else:
            self._abort(error)

    # How a call comes to its engine.

    def _start(
        self, operation: Operation | None, array: Float32, options: CallOptions
    ) -> Future[Done]:
        """Announces a call; what is wrong with it is announced as well, so that all fail alike."""
        if options.retry:
            raise ArgumentError("retry=True needs a group that was joined with elastic=True")
        generation = self._generation
        call = self._calls.collective(generation.rank, generation.size, operation, array, options)
        return self._submitted(call, generation, waits=options.waits)

    def _submitted(
        self, call: Call, generation: Generation | None = None, *, waits: bool = True
    ) -> Future[Done]:
        self._check_open()
        generation = generation or self._generation
        self._submit(call, generation, waits=waits)
        return call.result

    def _submit(self, call: Call, generation: Generation, *, waits: bool) -> None:
        """Gives a call to the generation's engine; it occupies a slot until its result has arrived.

        Blocks while too many are under way, except in a callback of the engine, which never waits.
        """
        is_callback = generation.engine.is_current_thread
        if waits and is_callback:
            raise ArgumentError(
                "a callback of all_reduce_async waits for another call of the group, which is made "
                "when the callback has returned; call all_reduce_async there, or another thread"
            )
        # The engine makes room, but not while a callback of its own waits for it.
        if not self._room.acquire(blocking=not is_callback):
            raise LimitError(
                f"limit under_way_count_max={_CALL_COUNT_MAX}: as many calls of group "
                f"{self.name!r} are under way; a callback can't wait for one to end: make fewer"
            )
        room = self._room  # alone: a group that is forgotten leaves
        call.result.add_done_callback(lambda _: room.release())
        try:
            generation.submit(call)
        except BaseException:
            room.release()
            raise

    def _ended(self, begin: Callable[[], Future[Done]]) -> Done:
        if self._generation.engine.is_current_thread:
            return begin().result()  # `begin` refuses it: a callback can't wait

        def made() -> Done:
            result = begin()
            ended = threading.Event()
            result.add_done_callback(lambda _: ended.set())
            with cancelled_by(ended.set):
                ended.wait()
            if not result.done():  # given up: that is no outcome
                raise ClosedError(closed_text(f"group {self.name!r}", "join it again"))
            return result.result()

        return self._run(made, _ENGINE_S)

    def _run(self, body: Callable[[], ResultT], timeout_s: float) -> ResultT:
        self._check_open()
        return self._threads.run(body, timeout_s)
