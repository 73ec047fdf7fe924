"""An exchange whose gradient comes piece by piece, as a backward pass makes it.

A *piece* is a range of chunks of every slice that has some ready (placement/readiness.py). Pieces
are exchanged in the background, several at a time, each by a call that is whole in itself;
`finish` exchanges what is left.

    begun -> through      all its weights are here
          -> failed       its call has ended, and `finish` exchanges it again

Invariants (docs/adr/0033-pieces.md):
  - A chunk is begun, by one piece or by `finish`, when it and all before it in its slice are there.
  - At most PIECES_AT_ONCE_MAX are under way. After one has failed, no further one is begun.
  - `finish` sends all that is left without waiting for pieces under way, so that no worker waits
    for what another holds back; it returns when all pieces are through.
  - What happens in the background is done ahead of time and nothing else: whatever became of it,
    the errors of `finish` are those that count.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Generic

import numpy as np

from shardwell.errors import (
    ArgumentError,
    DeadlineError,
    NonFiniteError,
    ShardwellError,
    WorkersMissingError,
)
from shardwell.parameter.exchange import Progress
from shardwell.parameter.step_call import StepCall
from shardwell.parameter.values import Pieces, ValuesT
from shardwell.placement.readiness import Ranges, ReadyChunks
from shardwell.rpc.call_scope import await_call
from shardwell.rpc.retry import Attempts

PIECES_AT_ONCE_MAX = 3
"""Pieces of one exchange that are under way at once. With the call of `finish` they use as many
sets of streams as a client keeps."""
_CLOSE_S = 1.0
"""The longest wait of `finish` for a thread that is beginning a piece, which takes no time unless a
signal ended it there."""


@dataclass(eq=False)
class Piece:
    """The chunks that one call exchanges."""

    ranges: Ranges
    is_empty: bool = field(init=False)
    progress: Progress = field(init=False)
    is_through: bool = False
    call: Future[None] | None = None
    """None: `finish` exchanges it."""

    def __post_init__(self) -> None:
        starts = [first for first, stop in self.ranges if first < stop]
        self.is_empty = not starts
        self.progress = Progress(row=min(starts, default=0))


class OpenExchange(Generic[ValuesT]):
    """An exchange whose gradient is still being computed, made by `Parameter.begin_exchange`.

    Args:
        call: The call that ends the step.
        weights: Where the weights go.
        start: Runs a part of the exchange in the background. None: nothing is exchanged before
            `finish`.
        finish: Runs the end of the exchange, which gets its time and returns the fewest updates
            that a chunk has seen.

    Examples:
        >>> net = client.parameter("parts", size=4, optimizer=shardwell.SGD(lr=1.0))
        >>> net.init(np.zeros(4))
        >>> gradient = np.zeros(4, np.float32)
        >>> exchange = net.begin_exchange(gradient)
        >>> gradient[2:] = 1.0  # a part that is computed
        >>> exchange.ready(2, 2)
        >>> gradient[:2] = 2.0
        >>> exchange.finish()
        array([-2., -2., -1., -1.], dtype=float32)
    """

    def __init__(
        self,
        call: StepCall,
        weights: Pieces,
        start: Callable[[Callable[[Attempts], None]], Future[None]] | None,
        finish: Callable[[Callable[[Attempts], int], float | None], ValuesT],
    ) -> None:
        self._call = call
        self._weights = weights
        self._values = call.work.values.whole()
        self._start = start
        self._finish = finish
        self._parts = call.tools.transfer.parts
        self._chunks = ReadyChunks([part.chunks for part in self._parts])
        self._pieces: list[Piece] = []
        """The begun pieces in order: each begins in a slice where the one before ends."""
        self._rest: Piece | None = None
        self._under_way_count = 0
        self._is_closed = self._has_failed = False
        self._announced: queue.SimpleQueue[tuple[int, int] | Piece] = queue.SimpleQueue()
        # No thread waits for it: its owner handles what others announce meanwhile.
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        ready_count, count = self._chunks.ready_counts
        return f"OpenExchange({ready_count} of {count} chunks ready)"

    def ready(self, start: int, stop: int) -> None:
        """Makes known that the elements [start, stop) are computed. Any thread; never blocks.

        Args:
            start: First element; each is announced once.
            stop: Last element, and one more.
        """
        self._announced.put((start, stop))
        self._advance()

    def finish(self, timeout_s: float | None = None) -> ValuesT:
        """Exchanges the rest, which must be computed, and returns the weights after the step.

        After an error the step is still open: call it again with the same values. If one of them
        was not finite, those that had not left may be mended first.

        Raises:
            ShardwellError: see `Parameter.exchange`.
        """
        self._is_closed = True
        try:
            return self._finish(self._exchange_rest, timeout_s)
        except DeadlineError as error:
            missing = self._missing_workers()
            if type(error) is DeadlineError and missing is not None:  # a piece had taken the time
                raise missing from None
            raise

    @property
    def has_left(self) -> bool:
        """Returns True when a part of the gradient has left, or is about to."""
        return any(self._chunks.begun)

    def forget(self) -> None:
        """Replaces values that have not left by zeros, so that `finish` ends the step without them.

        A chunk with a value that is not finite was refused before it could leave, even if its piece
        was begun. Nothing leaves from then on before `finish`. If nothing has left at all, the
        exchange may be forgotten as a whole, without `finish`.
        """
        self._is_closed = True
        allows_all = self._call.tools.spec.allow_non_finite
        for part, begun in zip(self._parts, self._chunks.begun, strict=True):
            for index, where in enumerate(part.chunks):
                chunk = self._values[where.offset : where.stop]
                if index >= begun or not (allows_all or np.isfinite(chunk).all()):
                    chunk[:] = 0.0

    def await_pieces(self, attempts: Attempts) -> None:
        """Blocks until no piece is under way.

        Raises:
            DeadlineError: one took too long.
        """
        for piece in self._pieces:
            if piece.call is not None:
                await_call(piece.call, attempts, "a piece of the gradient")

    def _exchange(self, piece: Piece, attempts: Attempts) -> None:
        self._call.exchange_piece(self._weights, piece.progress, piece.ranges, attempts)
        piece.is_through = True

    # In the background.

    def _advance(self) -> None:
        while not self._announced.empty():
            if not self._lock.acquire(blocking=False):
                return
            try:
                self._take_announced()
            finally:
                self._lock.release()

    def _take_announced(self) -> None:
        while not self._announced.empty():
            announced = self._announced.get()
            if isinstance(announced, Piece):
                self._under_way_count -= 1
                self._has_failed |= not announced.is_through
            else:
                self._chunks.announce(*announced)
        while (
            self._start is not None
            and not (self._is_closed or self._has_failed)
            and self._under_way_count < PIECES_AT_ONCE_MAX
            and (ranges := self._chunks.take()) is not None
        ):
            self._begin(Piece(ranges), self._start)

    def _begin(
        self, piece: Piece, start: Callable[[Callable[[Attempts], None]], Future[None]]
    ) -> None:
        def ended(_: Future[None]) -> None:
            self._announced.put(piece)
            self._advance()

        self._pieces.append(piece)
        try:
            piece.call = start(partial(self._exchange, piece))
        except ShardwellError:
            self._has_failed = True  # `finish` says so
        else:
            self._under_way_count += 1
            piece.call.add_done_callback(ended)

    # In the call of `finish`.

    def _exchange_rest(self, attempts: Attempts) -> int:
        is_locked = self._lock.acquire(timeout=_CLOSE_S)  # no thread begins a piece from here on
        if is_locked:
            self._lock.release()
        has_failed = any(
            (piece.call is None or piece.call.done()) and not piece.is_through
            for piece in self._pieces
        )
        if has_failed:
            self._send_again(attempts)
        elif self._rest not in self._pieces:
            self._send_rest(attempts)
        self.await_pieces(attempts)
        self._send_again(attempts)
        return int(min(piece.progress.version for piece in self._pieces))

    def _send_rest(self, attempts: Attempts) -> None:
        if self._rest is None:
            self._rest = Piece(self._chunks.rest())
        try:
            if not self._rest.is_empty:
                self._exchange(self._rest, attempts)
        except (NonFiniteError, ArgumentError):  # nothing of it has left
            raise
        except BaseException:
            self._chunks.begin_all()
            raise
        self._chunks.begin_all()
        self._rest.is_through = True  # an empty one, too
        self._pieces.append(self._rest)

    def _send_again(self, attempts: Attempts) -> None:
        """Exchanges all behind the first gap in what came through, if there is one.

        Parts under way or through behind the gap go again, too, and count once.
        """
        again = Piece(self._not_through())
        if not again.is_empty:
            self._pieces.append(again)
            self._exchange(again, attempts)

    def _not_through(self) -> Ranges:
        through = [0] * len(self._parts)
        for piece in self._pieces:
            for number, (first, stop) in enumerate(piece.ranges):
                if first <= through[number]:
                    reached = stop if piece.is_through else min(stop, piece.progress.row)
                    through[number] = max(through[number], reached)
        return [(first, len(part.chunks)) for first, part in zip(through, self._parts, strict=True)]

    def _missing_workers(self) -> WorkersMissingError | None:
        calls = (piece.call for piece in self._pieces if piece.call is not None)
        errors = (call.exception() for call in calls if call.done())
        return next((each for each in errors if isinstance(each, WorkersMissingError)), None)
