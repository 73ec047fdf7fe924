"""A call to one shard that stays open: by which the shard knows that its client lives, say.

The call is made when the client connects, and made again when it broke: by gRPC's thread, at once,
as gRPC holds it back until there is a connection; or by the caller that needs it, see `ensure`.
Nothing waits for it: a shard that does not know the session yet says so, and the call that needs it
is attempted again. See docs/adr/0012-sessions.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from shardwell.errors import (
    AuthenticationError,
    CorruptChunkError,
    ShardUnavailableError,
    ShardwellError,
)
from shardwell.process.connected import OwnerProcess
from shardwell.threads.pool import Later, after

_LIFE_S_MIN = 1.0
"""A call that ended sooner is made again after so long, so that no shard is asked in a loop."""
_FOR_NOW = (ShardUnavailableError, CorruptChunkError)
"""After these errors the call is made again by itself."""


class HeldCall:
    """A call to one shard that is made again when it ends. Any thread may use it.

    `answered` gets each call that has ended well before the next one begins. It is called with the
    lock held, and never waits. None: the call does not end by itself.
    """

    def __init__(
        self,
        call: Callable[[], Any],
        translate: Callable[[Any], ShardwellError],
        answered: Callable[[Any], None] | None = None,
    ) -> None:
        self._make = call
        self._translate = translate
        self._answered = answered
        self._lock = threading.Lock()
        self._call: Any = None
        self._count = 0
        self._began_s = 0.0
        self._refusal: ShardwellError | None = None
        self._is_distrusted = False
        self._timer: Later | None = None
        self._closed = False
        self._owner = OwnerProcess("client")

    def ensure(self) -> None:
        """Makes the call if it is not open; raises what the shard refused the last one with."""
        with self._lock:
            refusal, self._refusal = self._refusal, None
            if not self._closed and self._call is None and not self._is_pausing():
                self._begin()
        if refusal is not None:
            raise refusal

    def begin_anew(self) -> None:
        """Makes the call over the channel that is used now; ends the one that is open."""
        with self._lock:
            call = self._call
            if self._closed or self._count == 0:
                return
            self._begin()
        if call is not None:
            call.cancel()

    def doubt(self) -> None:
        """Makes the call anew if the shard does not know of it after a second."""
        with self._lock:
            is_old = time.monotonic() - self._began_s >= _LIFE_S_MIN
            is_doubtful = self._call is not None and is_old
        if is_doubtful:
            self.begin_anew()

    def let_end(self) -> None:
        """Makes no call from now on; the one that is open goes on until the shard ends it."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Ends the call, and makes none from now on. Safe to repeat."""
        with self._lock:
            self._closed = True
            call, self._call = self._call, None
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if call is not None:
            call.cancel()

    def _begin(self) -> None:
        """Makes the call; the lock is held."""
        self._began_s = time.monotonic()
        self._count += 1
        self._call = self._make()
        if not self._call.add_callback(partial(_ended, weakref.ref(self), self._count)):
            self._go_on()  # it has ended already

    def ended(self, number: int) -> None:
        """Takes note that the call of that number has ended; called on gRPC's thread."""
        if not self._owner.is_here:  # gRPC ends the calls that a fork inherited
            return
        with self._lock:
            if not self._closed and self._call is not None and number == self._count:
                self._go_on()

    def _go_on(self) -> None:
        """Makes a call that has ended again, now or after a while; the lock is held."""
        call, self._call = self._call, None
        if self._answered is not None and call.code() is grpc.StatusCode.OK:
            self._answered(call)
        else:
            error = self._translate(call)
            self._is_distrusted = isinstance(error, AuthenticationError)
            is_for_now = self._is_distrusted or isinstance(error, _FOR_NOW)
            self._refusal = None if is_for_now else error  # it is not made again by itself
            if self._refusal is not None:
                return
        with contextlib.suppress(ValueError, RuntimeError):  # the channel, or Python, is closed
            if time.monotonic() - self._began_s >= _LIFE_S_MIN:
                self._begin()
            else:
                if self._timer is not None:  # `ensure` was called meanwhile
                    self._timer.cancel()
                ensured = partial(_ensured, weakref.ref(self))
                self._timer = after(_LIFE_S_MIN, "shardwell-held", ensured)

    def _is_pausing(self) -> bool:
        return self._is_distrusted and time.monotonic() - self._began_s < _LIFE_S_MIN


# gRPC and timers keep what they are to call. That must not keep an unused client, nor a
# call, which ends when nothing keeps it.


def _ended(held: weakref.ref[HeldCall], number: int) -> None:
    found = held()
    if found is not None:
        found.ended(number)


def _ensured(held: weakref.ref[HeldCall]) -> None:
    found = held()
    if found is not None:
        with contextlib.suppress(ShardwellError, ValueError):
            found.ensure()
