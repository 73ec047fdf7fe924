"""One member: its server, its lease, and its way into each generation of its group.

A busy machine answers late, and that says nothing about the way to it: when a generation is being
formed, a member counts as unreachable when its address certainly is not its own (no process listens
there, or another member does), and else only when the worker that greets it has no time left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from shardwell.connection.credentials import Credentials, SameToken
from shardwell.connection.tls import TlsFiles
from shardwell.errors import (
    DeadlineError,
    LimitError,
    ShardUnavailableError,
    ShardwellError,
    WorkerLostError,
)
from shardwell.group.agreement.coordinator import failure_of, lost, rebuilding
from shardwell.group.generation import TELLING_S, Generation
from shardwell.group.rendezvous.client import Rendezvous
from shardwell.group.rendezvous.lease import LeaseKeeper
from shardwell.group.rendezvous.service import GroupService, admit_anybody, admit_same
from shardwell.group.schedule.strategies import Strategy
from shardwell.group.transport.peers import Peer
from shardwell.group.transport.server import PeerServer
from shardwell.process.environment import host_name
from shardwell.process.spans import Traffic
from shardwell.threads.daemon_threads import DaemonThreads
from shardwell.threads.spread import CoreThreads
from shardwell.v1 import group_pb2

_REST_S_MIN = 0.05
"""The meeting place is asked for so long at least, whatever it took to end a generation."""
_THREAD_COUNT_MAX = 16
_PAUSE_S_MAX = 1.0
"""The longest pause before a member that did not answer is greeted again."""
_PROBE_S = 1.0
"""The longest wait of a probe for a process to listen at an address."""
_REASON_LENGTH_MAX = 200


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The place of a worker in its group, and where it meets the others."""

    name: str
    rank: int
    size: int
    rendezvous: str
    serves_rendezvous: bool
    listen: str


def address_towards(host: str, port: int) -> str:
    """Returns this machine's address on the way to another; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def host_towards(meeting: str) -> str:
    """Returns this machine's host in an address that the meeting place can reach."""
    host, _, port = meeting.rpartition(":")
    try:
        found = address_towards(host.strip("[]"), int(port))
    except OSError as error:
        raise ShardUnavailableError(
            f"no way to the rendezvous at {meeting}: {error}; check the address, or pass listen="
        ) from None
    return f"[{found}]" if ":" in found else found


def _meeting_place(credentials: Credentials) -> grpc.GenericRpcHandler:
    token = credentials.token
    admit = admit_anybody if token is None else admit_same(SameToken(token))
    return GroupService(admit=admit).handler()


class Membership:
    """The way of a member to its group's generations, with its rank."""

    def __init__(
        self,
        spec: group_pb2.GroupSpec,
        arguments: Arguments,
        traffic: Traffic,
        *,
        lease_s: float,
        advertise: str | None,
        same_host: str,
        credentials: Credentials,
        threads: CoreThreads,
    ) -> None:
        self._threads = threads
        self._same_host = same_host
        self._tls = credentials.tls
        self._spec = spec
        self._arguments = arguments
        self._strategy = Strategy.parse(spec.strategy)
        self._traffic = traffic
        self._lease_ms = int(1000 * lease_s)
        self._lease: LeaseKeeper | None = None
        self.generation: Generation
        self._has_joined = False
        member_id = uuid.uuid4().hex
        self._server = PeerServer(
            arguments.listen,
            group=spec.name,
            member_id=member_id,
            size=arguments.size,
            same_host=same_host,
            tls=credentials.tls,
            more=(_meeting_place(credentials),) if arguments.serves_rendezvous else (),
        )
        self._member = group_pb2.Member(
            member_id=member_id,
            address=advertise or self._reachable_address(),
            description=f"{host_name()}, process {os.getpid()}"[:200],
            arena_address=self._server.arenas.address,
            stream_address=self._server.links.address,
        )
        self._rendezvous = Rendezvous(arguments.rendezvous, credentials)

    def join(self, timeout_s: float) -> None:
        """Comes into the first generation."""
        request = self._request(rank=self._arguments.rank)
        self._begun(self._rendezvous.join(request, timeout_s=timeout_s, greet=self._greet))

    def rejoin(
        self,
        previous: Generation,
        timeout_s: float,
        wait_s: float,
        *,
        without_newcomers: bool = False,
    ) -> Generation:
        """Returns the generation that follows `previous`; blocks until it is ready.

        The other members are waited for `timeout_s`, replacements for `wait_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        request = self._request(
            rank=previous.rank,
            previous_generation=previous.number,
            previous_member_count=len(previous.members),
            lost_ranks=previous.lost_ranks,
            replacement_wait_ms=int(1000 * wait_s),
            without_newcomers=without_newcomers,
        )
        previous.abort(rebuilding(previous.rank), min(TELLING_S, timeout_s / 4))
        self._end_lease()
        try:
            rest_s = max(deadline_s - time.monotonic(), _REST_S_MIN)
            formed = self._rendezvous.join(request, timeout_s=rest_s, greet=self._greet)
        except BaseException:
            self._keep_lease(previous)  # it lives, and may ask again
            raise
        return self._begun(formed)

    def _request(self, **more: Any) -> group_pb2.JoinGroupRequest:
        return group_pb2.JoinGroupRequest(
            spec=self._spec, member=self._member, lease_ms=self._lease_ms, **more
        )

    @property
    def waiting_count(self) -> int:
        """The workers that wait for the next generation."""
        return 0 if self._lease is None else self._lease.waiting_count

    def leave(self) -> None:
        """Ends the generation when the calls that were made are done, and then `close`."""
        self.generation.close()
        self.close()

    def close(self) -> None:
        """Gives up the rank, and ends the server."""
        self._end_lease()
        if self._has_joined:  # a join that fails has left
            with contextlib.suppress(ShardwellError):  # without an answer, no server needs to know
                self._rendezvous.leave(self._spec.name, self._member.member_id)
        self._rendezvous.close()
        self._server.close()
        self._threads.close()

    def _begun(self, formed: group_pb2.JoinGroupResponse) -> Generation:
        generation = Generation(
            group=self._spec.name,
            formed=formed,
            strategy=self._strategy,
            traffic=self._traffic,
            same_host=self._same_host != "off",
            tls=self._tls,
            threads=self._threads,
            is_elastic=self._spec.min_size > 0,
        )
        self._server.begin(generation)
        self.generation = generation
        self._has_joined = True
        self._keep_lease(generation)
        return generation

    def _keep_lease(self, generation: Generation) -> None:
        def on_lost(members: Sequence[group_pb2.LostMember]) -> None:
            for member in members:
                if member.rank == generation.rank:  # the others learn of it without this one
                    error = WorkerLostError(member.reason, rank=member.rank)
                    generation.end(failure_of(error))
                elif member.rebuilds:
                    generation.end_for_all(rebuilding(member.rank))
                elif not member.left:  # a leaving rank notifies rank 0, in order with its calls
                    reason = f"is gone: {member.reason}"
                    generation.end_for_all(lost(member.rank, reason, expired=member.expired))

        renewal = group_pb2.RenewLeaseRequest(
            spec=self._spec,
            member=self._member,
            generation=generation.number,
            rank=generation.rank,
            member_count=generation.size,
            lease_ms=self._lease_ms,
        )
        self._lease = LeaseKeeper(self._rendezvous, renewal, on_lost)
        generation.confirm = self._lease.confirm
        generation.count_newcomers(lambda: self.waiting_count)

    def _end_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _reachable_address(self) -> str:
        host, _, port = self._server.address.rpartition(":")
        if self._arguments.serves_rendezvous:
            return self._arguments.rendezvous
        if host in ("0.0.0.0", "[::]"):
            host = host_towards(self._arguments.rendezvous)
        return f"{host}:{port}"

    def _greet(self, members: Sequence[group_pb2.Member], deadline_s: float) -> Greeting:
        return Greeting(self._spec.name, self._member.member_id, members, deadline_s, self._tls)


class Greeting:
    """Greets members in the background, from construction until `close` or `deadline_s`."""

    def __init__(
        self,
        group: str,
        own_id: str,
        members: Sequence[group_pb2.Member],
        deadline_s: float,
        tls: TlsFiles | None,
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
