"""The announcement of a rank's calls to rank 0, which says whether all call alike.

Rank 0 matches the calls; every other rank has one stream to it, open as long as the generation.
The stream is also how a death is noticed: when it breaks, the rank at its other end is gone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Protocol

import grpc
from typing_extensions import override

from shardwell.connection.error_codes import from_detail, to_detail
from shardwell.errors import ArgumentError, ShardwellError, WorkerLostError
from shardwell.group.agreement.matching import CallMatcher, Verdicts
from shardwell.group.agreement.settlement import Standings, from_message, merged, to_message
from shardwell.group.mailbox import Mailbox
from shardwell.group.transport.peers import Peer
from shardwell.v1 import peer_pb2 as pb

TO_REBUILD = "call rebuild() to go on with the others, or leave the group"
"""The action of a member when another is lost; an elastic group does it by itself."""


Ending = Callable[[pb.Failure], None]
"""The callback for the end of the generation, with the failure of all calls, on any thread."""


class Agreement(Protocol):
    """A rank's side. Any thread may call."""

    _tell: Callable[[pb.AgreeRequest], None]
    """The way of an event of this rank to rank 0."""

    def call(self, call: pb.CollectiveCall) -> None:
        """Tells what this rank calls; the verdict comes to its mailbox."""
        self._tell(pb.AgreeRequest(call=call))

    def made(self, call_index: int) -> None:
        """Tells, in an elastic group, that this rank has all of a call."""
        self._tell(pb.AgreeRequest(made=pb.MadeCall(call_index=call_index)))

    def settle(self, standings: Standings) -> None:
        """Tells, in an elastic group, what this rank knows; what all know comes to its mailbox."""
        self._tell(pb.AgreeRequest(standings=to_message(standings)))

    def give_up(self, failure: pb.Failure) -> None:
        """Ends the generation for all."""

    def leave(self) -> None:
        """Tells that this rank leaves after the calls that it has made."""

    def close(self, parting_s: float, gone_ranks: Collection[int]) -> None:
        """Ends streams and threads; blocks until ranks that live have this one's last words."""


def failure_of(error: ShardwellError) -> pb.Failure:
    """An error as it travels."""
    return pb.Failure(detail=to_detail(error), message=error.message)


def error_of(failure: pb.Failure) -> ShardwellError:
    """A new error that says what `failure` does."""
    return from_detail(failure.detail, failure.message)


def lost(rank: int, what: str, *, expired: bool = False, rebuilding: bool = False) -> pb.Failure:
    """The failure of a generation in which `rank` is gone, by its lease, or goes on to another."""
    failure = failure_of(WorkerLostError(f"rank {rank} {what}; {TO_REBUILD}", rank=rank))
    failure.expired, failure.rebuilding = expired, rebuilding
    return failure


def rebuilding(rank: int) -> pb.Failure:
    """The failure of a generation which `rank` follows with another."""
    return lost(rank, "asked to rebuild the group", rebuilding=True)


class Coordinator(Agreement):
    """The side of rank 0: its own, and what answers the other ranks' streams."""

    def __init__(
        self, size: int, mailbox: Mailbox, on_end: Ending, *, is_elastic: bool = False
    ) -> None:
        self._size = size
        self._tell = partial(self._take, 0)
        self._is_elastic = is_elastic
        self._matcher = CallMatcher(size, is_elastic=is_elastic)
        self._mailbox = mailbox
        self._on_end = on_end
        self.newcomer_count: Callable[[], int] = lambda: 0
        self._standings: dict[int, Standings] = {}
        self._changed = threading.Condition()
        # Bounded by the calls that a rank may be ahead.
        self._answers: list[queue.SimpleQueue[pb.AgreeResponse | None]] = [
            queue.SimpleQueue() for _ in range(size)
        ]
        self._left: set[int] = set()
        self._streaming: set[int] = set()
        self._readers: list[tuple[int, threading.Thread, grpc.ServicerContext]] = []
        self._over = False
        self._timer = threading.Thread(
            target=self._expire, name="shardwell-call-matcher", daemon=True
        )
        self._timer.start()

    @override
    def give_up(self, failure: pb.Failure) -> None:
        with self._changed:
            if self._over:
                return
            self._end_streams(pb.AgreeResponse(end=failure))
        self._on_end(failure)

    @override
    def leave(self) -> None:
        with self._changed:
            self._end_streams(pb.AgreeResponse(leaving=pb.LeavingRank()))

    def _end_streams(self, last: pb.AgreeResponse) -> None:
        self._over = True
        self._changed.notify_all()
        for answers in self._answers[1:]:
            answers.put(last)
            answers.put(None)

    @override
    def close(self, parting_s: float, gone_ranks: Collection[int]) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
            readers = list(self._readers)
        for answers in self._answers:
            answers.put(None)
        self._timer.join()
        deadline_s = time.monotonic() + parting_s
        for rank, thread, context in readers:
            if rank not in gone_ranks:
                thread.join(max(deadline_s - time.monotonic(), 0.0))
            if thread.is_alive():  # its rank has vanished, or hangs
                context.cancel()
                thread.join()

    def serve(
        self, rank: int, requests: Iterator[pb.AgreeRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AgreeResponse]:
        """Answers another rank's stream, until it leaves or the generation ends."""
        answers = self._answers[rank]
        with self._changed:
            if rank in self._streaming:
                raise ArgumentError(f"rank {rank} has a stream of calls already")
            self._streaming.add(rank)
        if not context.add_callback(lambda: answers.put(None)):
            return
        reader = threading.Thread(
            target=self._read, args=(rank, requests), name="shardwell-call-matcher", daemon=True
        )
        with self._changed:  # so that `close` finds none that has not begun
            self._readers.append((rank, reader, context))
            reader.start()
        while (answer := answers.get()) is not None:
            yield answer

    def _read(self, rank: int, requests: Iterator[pb.AgreeRequest]) -> None:
        try:
            for request in requests:
                self._take(rank, request)
        except ShardwellError as error:
            self.give_up(failure_of(error))
        except Exception:  # noqa: S110 (gRPC's, of several kinds: the stream broke)
            pass
        if rank not in self._left:
            self.give_up(lost(rank, "is gone: its connection to rank 0 ended"))
        self._answers[rank].put(None)

    def _take(self, rank: int, request: pb.AgreeRequest) -> None:
        event = request.WhichOneof("event")
        if event == "giving_up":
            self.give_up(request.giving_up)
            return
        with self._changed:
            if event == "call":
                if self._is_elastic:
                    self._matcher.newcomer_count = self.newcomer_count()
                verdicts = self._matcher.call(rank, request.call, time.monotonic())
            elif event == "made":
                verdicts = self._matcher.made(rank, request.made.call_index)
            elif event == "standings":
                self._settle(rank, from_message(request.standings))
                return
            elif event == "leaving":
                self._left.add(rank)
                verdicts = self._matcher.leave(rank, "has left the group")
            else:
                return
            self._hand_out(verdicts)
            self._changed.notify_all()

    def _settle(self, rank: int, standings: Standings) -> None:
        self._standings[rank] = standings
        if len(self._standings) == self._size:
            answer = to_message(merged(self._standings.values()))
            self._mailbox.put_standings(answer)
            for answers in self._answers[1:]:
                answers.put(pb.AgreeResponse(standings=answer))

    def _hand_out(self, verdicts: Verdicts) -> None:
        for rank, verdict in verdicts:
            if rank == 0:
                self._mailbox.put_verdict(verdict)
            else:
                self._answers[rank].put(pb.AgreeResponse(verdict=verdict))

    def _expire(self) -> None:
        with self._changed:
            while not self._over:
                rest_s = self._matcher.deadline_s - time.monotonic()
                if rest_s > 0:
                    self._changed.wait(min(rest_s, threading.TIMEOUT_MAX))
                else:
                    self._hand_out(self._matcher.expire(time.monotonic()))


class CoordinatorLink(Agreement):
    """The side of any other rank: a stream to rank 0."""

    def __init__(self, peer: Peer, opening: pb.PeerOpen, mailbox: Mailbox, on_end: Ending) -> None:
        self._mailbox = mailbox
        self._on_end = on_end
        self._requests: queue.SimpleQueue[pb.AgreeRequest | None] = queue.SimpleQueue()
        self._tell = self._requests.put
        self._tell(pb.AgreeRequest(open=opening))
        self._closed = False
        self._is_alone = False
        self._call: Any = peer.agree(iter(self._requests.get, None))
        if not self._call.add_callback(lambda: self._requests.put(None)):
            self._requests.put(None)
        self._reader = threading.Thread(target=self._read, name="shardwell-agreement", daemon=True)
        self._reader.start()

    @override
    def give_up(self, failure: pb.Failure) -> None:
        # Rank 0 answers with what all get, unless it has left.
        if self._is_alone:
            self._on_end(failure)
        self._requests.put(pb.AgreeRequest(giving_up=failure))

    @override
    def leave(self) -> None:
        # Rank 0 ends the stream when it has read so.
        self._closed = True
        self._requests.put(pb.AgreeRequest(leaving=pb.LeavingRank()))
        self._requests.put(None)

    @override
    def close(self, parting_s: float, gone_ranks: Collection[int]) -> None:
        self._closed = True
        self._requests.put(None)
        if 0 not in gone_ranks:
            self._reader.join(parting_s)
        self._call.cancel()
        self._reader.join()

    def _read(self) -> None:
        why = "its stream ended"
        try:
            for response in self._call:
                event = response.WhichOneof("event")
                if event == "verdict":
                    self._mailbox.put_verdict(response.verdict)
                elif event == "standings":
                    self._mailbox.put_standings(response.standings)
                elif event == "end":
                    self._on_end(response.end)
                    return
                elif event == "leaving":
                    self._is_alone = True
                    self._mailbox.end(
                        lambda: error_of(lost(0, "has left the group")), lets_finish=True
                    )
                    return
        except grpc.RpcError as error:
            why = str(error.details() or error.code().name)[:200]
        if not self._closed:
            self._on_end(lost(0, f"is gone: {why}"))
