"""A check that a worker reaches all other members of a generation that is being formed.

A busy machine answers late, and that says nothing about the way to it: a member counts as
unreachable when its address certainly is not its own (no process listens there, or another member
does), and else only when the worker that greets it has no time left.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from shardwell.connection.tls import TlsFiles
from shardwell.errors import (
    DeadlineError,
    LimitError,
    ShardUnavailableError,
    ShardwellError,
)
from shardwell.group.transport.peers import Peer
from shardwell.threads.daemon_threads import DaemonThreads
from shardwell.v1 import group_pb2

_THREAD_COUNT_MAX = 16
_PAUSE_S_MAX = 1.0
"""The longest pause before a member that did not answer is greeted again."""
_PROBE_S = 1.0
"""The longest wait of a probe for a process to listen at an address."""
_REASON_LENGTH_MAX = 200


class Greeting:
    """Greets members in the background, from construction until `close` or `deadline_s`."""

    def __init__(
        self,
        group: str,
        own_id: str,
        members: Sequence[group_pb2.Member],
        deadline_s: float,
        tls: TlsFiles | None = None,
    ) -> None:
        self._group = group
        self._tls = tls
        self._deadline_s = deadline_s
        self._over = threading.Event()
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._peers: set[Peer] = set()
        self._unreachable: list[group_pb2.UnreachableMember] = []
        others = [(rank, one) for rank, one in enumerate(members) if one.member_id != own_id]
        self._left_count = len(others)
        if not others:
            self._known.set()
        self._threads = DaemonThreads(_THREAD_COUNT_MAX, "shardwell-greeting")
        for rank, member in others:
            self._threads.submit(self._greet, rank, member)

    def wait(self, timeout_s: float) -> None:
        """Blocks until `unreachable` is known, at most so long."""
        self._known.wait(timeout_s)

    @property
    def unreachable(self) -> list[group_pb2.UnreachableMember] | None:
        """The members that can't be reached, once one is found or all have answered; else None."""
        if not self._known.is_set():
            return None
        with self._lock:
            return list(self._unreachable)

    def close(self) -> None:
        """Ends the greeting. Safe to repeat."""
        with self._lock:
            self._over.set()
            peers = list(self._peers)
        for peer in peers:
            peer.close()
        self._threads.shutdown()

    def _greet(self, rank: int, member: group_pb2.Member) -> None:
        reason = self._reason(member)
        with self._lock:
            self._left_count -= 1
            if reason is not None:
                self._unreachable.append(
                    group_pb2.UnreachableMember(rank=rank, reason=reason[:_REASON_LENGTH_MAX])
                )
            if reason is not None or not self._left_count:
                self._known.set()

    def _reason(self, member: group_pb2.Member) -> str | None:
        peer = Peer(member, tls=self._tls)
        with self._lock:
            if not self._over.is_set():
                self._peers.add(peer)
        try:
            return self._answered(peer)
        finally:
            with self._lock:
                self._peers.discard(peer)
            peer.close()

    def _answered(self, peer: Peer) -> str | None:
        began_s, pause_s, failed = time.monotonic(), _PAUSE_S_MAX / 16, "no answer"
        while not self._over.is_set():
            try:
                peer.greet(self._group, max(self._deadline_s - time.monotonic(), 0.0))
                return None
            except (DeadlineError, LimitError) as error:
                failed = error.message
            except ShardUnavailableError as error:
                failed = error.message
                if not self._over.is_set():
                    certain = _nobody_listens(peer.member.address)
                    if certain is not None:
                        return certain
            except ShardwellError as error:
                return error.message
            rest_s = self._deadline_s - time.monotonic()
            if rest_s <= 0:
                break
            self._over.wait(min(pause_s, rest_s))
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        return f"not within {time.monotonic() - began_s:.3g} s: {failed}"


def _nobody_listens(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
    except socket.gaierror as error:
        return None if error.errno == socket.EAI_AGAIN else str(error)
    except ConnectionRefusedError as error:
        return str(error)
    except OSError:
        return None
    return None
