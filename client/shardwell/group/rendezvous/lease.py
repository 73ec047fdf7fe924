"""A member's sign of life: a thread that renews its lease, and learns who is lost."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardwell.errors import ArgumentError, ClosedError, ShardwellError, WorkerLostError
from shardwell.group.rendezvous.client import Rendezvous
from shardwell.process.connected import Closing
from shardwell.process.ending import named
from shardwell.v1 import group_pb2 as pb

_LOG = logging.getLogger("shardwell.group")
_RENEWALS_A_LEASE = 4
_CONFIRMING_S = 1.0
"""The longest wait of a member that stood still for the rendezvous to confirm it."""
_ANSWER_PART_OF_LEASE = 0.4
"""A renewal is given up before half of the lease has passed, so that another can still be made."""


class LeaseKeeper(Closing):
    """Renews one member's lease from construction until `close`. A context manager.

    A rendezvous that does not answer is asked again: the group goes on without it. `on_lost` is
    called from this thread once for each lost member, and must not call `close`. After it the
    lease is renewed on, so that the member can rebuild the group, unless it is the lost one.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        request: pb.RenewLeaseRequest,
        on_lost: Callable[[Sequence[pb.LostMember]], None],
    ) -> None:
        self.waiting_count = 0
        self._rendezvous = rendezvous
        self._request = request
        self._on_lost = on_lost
        self._known_ranks: set[int] = set()
        self._lease_s = request.lease_ms / 1000
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._call: Any = None
        self._changed = threading.Condition()
        self._known_until_s = time.monotonic() + self._lease_s
        self._thread = threading.Thread(target=self._run, name="shardwell-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Safe to repeat; the member is not taken out of its group."""
        with self._lock:
            self._closed.set()
            if self._call is not None:
                self._call.cancel()
        self._thread.join()

    def confirm(self) -> None:
        """Waits, at most 1 s, until the lease of a member that was silent is known to live."""
        if threading.current_thread() is not self._thread:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed.is_set() or time.monotonic() < self._known_until_s,
                    _CONFIRMING_S,
                )

    def _run(self) -> None:
        try:
            self._renew_always()
        finally:
            self._note_known(math.inf)

    def _renew_always(self) -> None:
        due_s = time.monotonic()
        while not self._closed.wait(max(due_s - time.monotonic(), 0.0)):
            began_s = time.monotonic()
            due_s = max(due_s + self._lease_s / _RENEWALS_A_LEASE, began_s)
            try:
                lost = self._renew()
            except ClosedError:
                return
            except (WorkerLostError, ArgumentError) as error:  # or it is no member at all
                self._tell([pb.LostMember(rank=self._request.rank, reason=error.message)])
                return
            except ShardwellError as error:
                _LOG.debug("a lease was not renewed", extra={"reason": error.message})
                continue
            self._tell(lost)
            self._note_known(began_s + self._lease_s)

    def _note_known(self, until_s: float) -> None:
        with self._changed:
            self._known_until_s = until_s
            self._changed.notify_all()

    def _renew(self) -> Sequence[pb.LostMember]:
        with self._lock:
            if self._closed.is_set():
                raise ClosedError("the lease is not renewed any more")
            try:
                self._call = self._rendezvous.begin_renewal(
                    self._request, timeout_s=self._lease_s * _ANSWER_PART_OF_LEASE
                )
            except RuntimeError as error:  # gRPC starts no thread while the interpreter ends
                raise named(error, "the renewal of a lease") from None
        response = self._rendezvous.finish_renewal(self._call)
        self.waiting_count = response.waiting_count
        return response.lost

    def _tell(self, lost: Sequence[pb.LostMember]) -> None:
        new = [member for member in lost if member.rank not in self._known_ranks]
        self._known_ranks.update(member.rank for member in new)
        if new:
            self._on_lost(new)
