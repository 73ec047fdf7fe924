"""One generation of a group: its members, and everything that ends with it.

    ready --a member is lost, or gives up--> over        all calls fail with the same error
    ready --close--> leaving --all is sent--> over       calls that were made are finished

The rank that first notices a loss reports it to rank 0, which reports it to all: so all name the
same rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import grpc

from shardwell.connection.tls import TlsFiles
from shardwell.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    WorkerLostError,
)
from shardwell.group.agreement.coordinator import (
    Agreement,
    Coordinator,
    CoordinatorLink,
    error_of,
    failure_of,
    lost,
)
from shardwell.group.agreement.settlement import Standings, from_message
from shardwell.group.engine import Call, Done, Engine
from shardwell.group.mailbox import Mailbox
from shardwell.group.schedule.collective import Arrival
from shardwell.group.schedule.strategies import Strategy
from shardwell.group.transport.links import Link
from shardwell.group.transport.peers import (
    LEAVE_TIMEOUT_S,
    Incoming,
    Outgoing,
    Peer,
    Received,
)
from shardwell.process.shared_memory import SharedMemory
from shardwell.process.spans import Traffic
from shardwell.threads.pool import begin
from shardwell.threads.spread import CoreThreads
from shardwell.v1 import group_pb2
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire import checksum

_PARTING_S = 10.0
"""The longest time in which others read that this rank leaves."""
_WORD_S = 1.0
"""The longest delay of rank 0's word behind a socket's end."""
TELLING_S = 2.0
"""The longest time in which rank 0 tells all why the generation is over."""


class Generation:
    """A generation, made when all members have reached one another. Any thread may call it."""

    def __init__(
        self,
        *,
        group: str,
        formed: group_pb2.JoinGroupResponse,
        strategy: Strategy,
        traffic: Traffic,
        same_host: bool,
        tls: TlsFiles | None,
        threads: CoreThreads,
        is_elastic: bool = False,
    ) -> None:
        self.number = formed.generation
        self.rank = formed.rank
        self.members = tuple(formed.members)
        self._group = group
        self._traffic = traffic
        self._same_host = same_host
        self._tls = tls
        self._peers: dict[int, Peer] = {}
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._lock = threading.Lock()
        self._over = False
        self._ended_by: pb.Failure | None = None
        self._closing = False
        self._joining: Future[Done] | None = None
        self._mailbox = Mailbox(self.size)
        self.confirm: Callable[[], None] = lambda: None
        """Learns whether this rank itself was declared lost, before another is called lost here."""
        self._agreement: Agreement
        if self.rank == 0:
            self._host: Coordinator | None = Coordinator(
                self.size, self._mailbox, self.end, is_elastic=is_elastic
            )
            self._agreement = self._host
        else:
            self._host = None
            peer = self._peer(0)
            self._agreement = CoordinatorLink(peer, self._opening(0), self._mailbox, self.end)
        self.engine = Engine(
            self.rank,
            strategy,
            self._mailbox,
            self._agreement,
            self,
            traffic,
            context_of=partial(checksum.peer_context, group, self.number),
            threads=threads,
        )
        self.engine.is_elastic = is_elastic
        self._announcing = threading.Lock()

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def is_over(self) -> bool:
        """True if no further call can be made."""
        return self._mailbox.ended is not None

    def count_newcomers(self, count: Callable[[], int]) -> None:
        """Has rank 0 learn from `count` how many workers wait for the next generation."""
        if self._host is not None:
            self._host.newcomer_count = count

    def settled(self, standings: Standings, timeout_s: float) -> Standings:
        """The counts of all ranks of an elastic group for earlier generations; blocks. Once."""
        self._agreement.settle(standings)
        answer = self._mailbox.await_standings(timeout_s)
        if answer is None:
            error = DeadlineError(
                f"not all ranks of generation {self.number} of group {self._group!r} began it "
                f"within {timeout_s:.3g} s; see whether they are stuck"
            )
            self.end_for_all(failure_of(error))  # no call is made where it is not known
            raise error
        return from_message(answer)

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """The rank whose death ended the generation, where one did."""
        failure = self._ended_by
        if failure is None or failure.rebuilding:
            return ()
        error = error_of(failure)
        is_lost = isinstance(error, WorkerLostError) and error.rank is not None
        return (error.rank,) if is_lost and error.rank is not None else ()

    def submit(self, call: Call) -> None:
        """Announces a call, and makes it when its turn comes. Does not block."""
        with self._announcing:
            if self._closing:
                raise ClosedError("the group was closed; join it again")
            if self._mailbox.ended is not None:
                raise self._mailbox.ended()
            if self._joining is not None and not self._joining.done() and not call.is_join:
                raise ArgumentError(
                    "another thread waits in join(); this rank makes no other call until then"
                )
            call.announcement.call_index = 0 if call.is_join else self.engine.next_call_index
            self._agreement.call(call.announcement)  # what rank 0 refuses counts nowhere
            if call.is_join:
                self._joining = call.result
            else:
                self.engine.next_call_index += 1
            self.engine.submit(call)

    def end(self, failure: pb.Failure) -> None:
        """Ends it here: all calls fail with this. From any thread; the first counts."""
        if self._mailbox.ended is None:
            self.confirm()
        if failure.expired and failure.detail.rank == self.rank:
            failure = failure_of(
                WorkerLostError(
                    f"rank {self.rank} of group {self._group!r}, this worker, was silent for "
                    "longer than its lease, and the others go on without it; close the group, and "
                    "join it again",
                    rank=self.rank,
                )
            )
        self._mailbox.end(lambda: error_of(failure))
        with self._lock:
            self._over = True
            self._ended_by = self._ended_by or failure
            links: list[Outgoing | Incoming] = [
                *self._outgoing.values(),
                *self._incoming.values(),
            ]
        for link in links:
            link.cut()

    def end_for_all(self, failure: pb.Failure) -> None:
        """Ends the generation here, and for all members that can be reached."""
        self._agreement.give_up(failure)
        self.end(failure)

    def close(self) -> None:
        """Leaves the group: calls that were made are finished, then all streams end.

        Blocks at the most until the calls' deadlines, and a minute for this rank's last messages.
        """
        with self._announcing:
            self._closing = True
        self.engine.close()
        with self._lock:
            links = list(self._outgoing.values())
        deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
        for link in links:
            link.finish()
        for link in links:  # some ranks may still have to open theirs
            link.await_received(max(deadline_s - time.monotonic(), 0.0))
        with self._lock:
            is_over, self._over = self._over, True
        if not is_over:
            self._agreement.leave()
        self._release(_PARTING_S)

    def abort(self, failure: pb.Failure, telling_s: float = TELLING_S) -> None:
        """Ends the generation for all members, which may take so long to tell, and leaves."""
        with self._announcing:
            self._closing = True
        deadline_s = time.monotonic() + telling_s
        self._agreement.give_up(failure)
        # Until rank 0 has reported it to all: else they would find this rank's streams at their
        # end, and take it for dead.
        self._mailbox.await_end(telling_s)
        self.end(failure)
        self.engine.close()
        self._release(max(deadline_s - time.monotonic(), 0.0))

    def _release(self, parting_s: float) -> None:
        self._mailbox.end(lambda: ClosedError("the group was closed; join it again"))
        self._agreement.close(parting_s, self.lost_ranks)
        for incoming in self._incoming.values():
            incoming.close()
        self._mailbox.inbox.close()
        for peer in self._peers.values():
            peer.close()

    # What other members send: on threads of the server.

    def serve_agreement(
        self,
        opening: pb.PeerOpen,
        requests: Iterator[pb.AgreeRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[pb.AgreeResponse]:
        """Answers another rank's stream of calls."""
        self._check_opening(opening)
        if self._host is None:
            raise ArgumentError(f"Agree is answered by rank 0; this is rank {self.rank}")
        return self._host.serve(opening.from_rank, requests, context)

    def serve_chunks(
        self,
        opening: pb.PeerOpen,
        context: grpc.ServicerContext | Link,
        memory: SharedMemory | None,
    ) -> Iterator[bytes]:
        """The chunks for another rank, until this one leaves; through the memory that it shares."""
        self._check_opening(opening)
        return self.outgoing(opening.from_rank).serve(context, memory)

    def _check_opening(self, opening: pb.PeerOpen) -> None:
        rank = opening.from_rank
        known = rank < self.size and self.members[rank].member_id == opening.from_member_id
        if not known or rank == self.rank:
            raise WorkerLostError(
                f"{opening.from_member_id!r:.80} is not rank {rank} of generation {self.number} of "
                f"group {self._group!r}",
                rank=rank,
            )

    def _opening(self, rank: int) -> pb.PeerOpen:
        return pb.PeerOpen(
            group=self._group,
            generation=self.number,
            from_member_id=self.members[self.rank].member_id,
            from_rank=self.rank,
            to_member_id=self.members[rank].member_id,
        )

    def _peer(self, rank: int) -> Peer:
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._peers[rank] = Peer(
                self.members[rank], same_host=self._same_host, tls=self._tls
            )
        return peer

    # What the engine needs of other ranks.

    def outgoing(self, rank: int) -> Outgoing:
        """The way of chunks to a rank; raises when the generation is over."""
        with self._lock:
            link = self._outgoing.get(rank)
            if link is None:  # a late rank still receives what was sent before
                self._check_links()
                link = self._outgoing[rank] = Outgoing(
                    self._traffic, lambda what: self._link_failed(rank, what)
                )
            return link

    def listen_to(self, rank: int) -> None:
        """Has chunks of a rank come to the mailbox from now on. Safe to repeat."""
        with self._lock:
            self._check_links()
            if rank not in self._incoming:
                self._incoming[rank] = Incoming(
                    self._peer(rank),
                    self._opening(rank),
                    partial(self._take, rank),
                    lambda what: self._link_failed(rank, what),
                    self._mailbox.inbox,
                    partial(self._mailbox.is_full, rank),
                )

    def _check_links(self) -> None:
        if self._over:
            ended = self._mailbox.ended
            raise ClosedError("the group was closed") if ended is None else ended()

    def _take(self, rank: int, received: Received, waits: bool) -> None:
        self._mailbox.put_arrival(Arrival(rank, *received), waits=waits)

    def _link_failed(self, rank: int, what: str) -> None:
        """Leaves the decision to rank 0, whose report is slower than a socket's end."""

        def give_up() -> None:
            self._mailbox.await_end(_WORD_S)
            if not self._over:
                self._agreement.give_up(lost(rank, f"can't be reached: {what}"))

        if not self._over:
            begin("shardwell-link-failed", give_up)
