"""The rendezvous as a worker sees it: it asks for a rank until its generation is ready.

JoinGroup is asked again and again, so a rendezvous that is not there yet, or that is started anew
meanwhile, costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from shardwell.connection.absence import why_absent
from shardwell.connection.channel import Channel
from shardwell.connection.credentials import NO_CREDENTIALS, Credentials
from shardwell.connection.error_codes import from_rpc_error
from shardwell.connection.options import unary_stub
from shardwell.connection.tls import check_trust
from shardwell.errors import (
    ClosedError,
    CorruptChunkError,
    DeadlineError,
    ShardUnavailableError,
    WorkersMissingError,
    WorkerUnreachableError,
)
from shardwell.process.connected import Closing
from shardwell.process.ending import has_main_ended
from shardwell.specs.deadlines import less_margin
from shardwell.specs.names import format_ranks, parse_target
from shardwell.threads.calls import cancelled_by, current_call
from shardwell.v1 import group_pb2 as pb
from shardwell.wire import checksum

POLL_INTERVAL_S_MIN, POLL_INTERVAL_S_MAX = 0.02, 0.25
"""Between two questions; drawn anew each time, so that many workers do not ask at one moment."""
_ANSWER_S_MAX = 5.0
"""An answer never takes long, so a later question finds another way."""
_LEAVE_S_MAX = 1.0
"""Leaving is a courtesy: without it the place is free when the lease ends."""
_LEAVE_UNHEARD_S = 0.2
"""The longest leave after a join that had no answer last: its caller waits already."""
_SILENCE_S = 2.0
_SERVICE = pb.DESCRIPTOR.services_by_name["GroupService"].full_name
_LOG = logging.getLogger("shardwell.group")
_FIRST_NOTICE_S = 2.0
"""Workers that a launcher starts together rarely come further apart."""
_PAUSE_S_MAX = 60.0
_TELLING_S_MAX = 1.0
"""Time before a join's deadline at which a member reports to all which members it could not reach;
at most a quarter of it."""


class Greeted(Protocol):
    """The members that are being greeted: see `membership.py`."""

    @property
    def unreachable(self) -> list[pb.UnreachableMember] | None:
        """The members that can't be reached; None while it is not known."""

    def wait(self, timeout_s: float) -> None:
        """Blocks until `unreachable` is known, at most so long."""

    def close(self) -> None:
        """Ends the greeting."""


Greet = Callable[[Sequence[pb.Member], float], Greeted]


class WaitingNotices:
    """A wait's log lines: one after 2 s, and others at pauses that double, up to a minute."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._pause_s = _FIRST_NOTICE_S
        self._due_s = self._began_s + self._pause_s

    def note(self, what: Callable[[], str]) -> None:
        """Logs what is waited for, if a line is due; `what` continues "... has waited 2 s "."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        _LOG.warning("a worker has waited %.3g s %s", now_s - self._began_s, what())
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
        self._due_s = now_s + self._pause_s


class Rendezvous(Closing):
    """The client of a meeting place: of a cluster, shard 0. Any thread may use it."""

    def __init__(self, target: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self.address = parse_target(target)[0]
        self._closed = threading.Event()
        self._tls = credentials.tls
        self._channel = Channel(self.address, credentials)

    def join(
        self,
        request: pb.JoinGroupRequest,
        *,
        timeout_s: float,
        greet: Greet,
    ) -> pb.JoinGroupResponse:
        """Returns a place in the group's next generation; blocks until all its members have met.

        When it gives up, for whatever reason, it leaves, so that the place is free; but a member
        that follows a previous generation keeps its rank there, and may ask again. Each attempt
        needs a member_id of its own, except those that follow. `greet` begins to greet all members,
        until a time by `time.monotonic` that is a little before the timeout; it is called once for
        each generation that is formed, while the requests go on, so that the place is kept. Where
        it follows one, WorkerUnreachableError comes at the timeout alone: a member may have died
        just now.
        """
        waiting = _Waiting(self.address, request, timeout_s)
        try:
            with contextlib.ExitStack() as greetings:
                return self._formed(request, waiting, greet, greetings)
        except BaseException:
            if not request.previous_generation:
                leave_s = _LEAVE_S_MAX if waiting.is_heard else _LEAVE_UNHEARD_S
                with contextlib.suppress(Exception):
                    name, member_id = request.spec.name, request.member.member_id
                    self.leave(name, member_id, timeout_s=leave_s)
            raise

    def begin_renewal(self, request: pb.RenewLeaseRequest, *, timeout_s: float) -> Any:
        """Sends a renewal; the call, whose `cancel` ends it, for `finish_renewal`."""
        return self._begin("RenewLease", request, pb.RenewLeaseResponse, timeout_s)

    def finish_renewal(self, call: Any) -> pb.RenewLeaseResponse:
        """The lost members, and the number of workers that wait for a generation; blocks."""
        response: pb.RenewLeaseResponse = self._finish(call)
        return response

    def leave(self, group: str, member_id: str, *, timeout_s: float = _LEAVE_S_MAX) -> None:
        """Gives the place up. Safe to repeat."""
        request = pb.LeaveGroupRequest(group=group, member_id=member_id)
        self._finish(self._begin("LeaveGroup", request, pb.LeaveGroupResponse, timeout_s))

    def close(self) -> None:
        """Ends the connection and all calls on it. Safe to repeat."""
        self._closed.set()
        self._channel.close()

    def _formed(
        self,
        request: pb.JoinGroupRequest,
        waiting: _Waiting,
        greet: Greet,
        greetings: contextlib.ExitStack,
    ) -> pb.JoinGroupResponse:
        greeting: Greeted | None = None
        greeted_generation = 0
        while (remaining_s := waiting.remaining_s) > 0:
            answer_s = min(remaining_s, _ANSWER_S_MAX)
            try:
                call = self._begin(
                    "JoinGroup",
                    request,
                    pb.JoinGroupResponse,
                    answer_s,
                    waits=waiting.is_tried,  # what no waiting mends is found out at once
                )
                with cancelled_by(call.cancel):
                    response: pb.JoinGroupResponse = self._finish(call)
            except (ShardUnavailableError, DeadlineError) as error:
                if isinstance(error, WorkersMissingError):
                    raise
                waiting.failed(error)
                if not request.previous_generation:  # else the two sides have met before
                    check_trust("the rendezvous", self.address, self._tls, waiting.remaining_s)
            except CorruptChunkError as error:
                waiting.failed(error)
            except WorkerUnreachableError as error:
                if not request.previous_generation:
                    raise
                waiting.failed(error)
                request.checked_generation = 0
                del request.unreachable[:]
            else:
                waiting.answered(response)
                if response.ready:
                    return response
                if response.members and greeted_generation != response.generation:
                    greetings.close()
                    greeted_generation = response.generation
                    greeting = greet(tuple(response.members), waiting.greeting_deadline_s)
                    greetings.callback(greeting.close)
                elif greeted_generation != response.generation:
                    greeting = None  # that generation will not be
            pause_s = random.uniform(POLL_INTERVAL_S_MIN, waiting.poll_interval_s)  # noqa: S311 (a pause)
            pause_s = min(pause_s, max(waiting.remaining_s, 0.0))
            if greeting is None:
                self._closed.wait(pause_s)
            else:
                greeting.wait(pause_s)
                if (unreachable := greeting.unreachable) is not None:
                    request.checked_generation = greeted_generation
                    del request.unreachable[:]
                    request.unreachable.extend(unreachable)
                    greeting = None
            if self._closed.is_set() or _is_given_up():
                raise ClosedError("the rendezvous was closed, or the call given up")
            waiting.note()
        raise waiting.given_up()

    def _begin(
        self,
        method: str,
        request: Any,
        response_type: type[Message],
        timeout_s: float,
        *,
        waits: bool = True,
    ) -> Any:
        self._channel.renew()
        stub = unary_stub(self._channel.current, f"/{_SERVICE}/{method}", response_type)
        if has_main_ended():
            return _CallHere(partial(stub, request, timeout=timeout_s, wait_for_ready=waits))
        try:
            return stub.future(request, timeout=timeout_s, wait_for_ready=waits)
        except ValueError as error:  # what gRPC raises for a closed channel
            if not self._closed.is_set():
                raise
            raise ClosedError(f"the rendezvous was closed ({error})") from None

    def _finish(self, call: Any) -> Any:
        try:
            if (response := call.result()) is None:
                raise ShardUnavailableError(f"the answer of {self.address} was lost on its way")
            checksum.check_sealed(response)
            return response
        except ValueError as error:  # what gRPC raises for a closed channel
            if not self._closed.is_set():
                raise
            raise ClosedError(f"the rendezvous was closed ({error})") from None
        except grpc.FutureCancelledError:
            if _is_expired():
                raise DeadlineError(
                    f"the rendezvous at {self.address} did not answer in time"
                ) from None
            raise ClosedError("the call of the rendezvous was cancelled") from None
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise ClosedError("the rendezvous was closed") from None
            raise from_rpc_error(error, f"rendezvous at {self.address}") from None


class _CallHere:
    """A call on the thread that waits for it: gRPC would start one, and Python may not."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self.result = result

    def cancel(self) -> None:
        pass


def _is_given_up() -> bool:
    call = current_call()
    return call is not None and call.cancelled.is_set() and not call.is_expired


def _is_expired() -> bool:
    call = current_call()
    return call is not None and call.is_expired


class _Waiting:
    def __init__(self, address: str, request: pb.JoinGroupRequest, timeout_s: float) -> None:
        self.poll_interval_s = 2 * POLL_INTERVAL_S_MIN
        self._address = address
        self._spec, self._rank = request.spec, request.rank
        self._timeout_s = timeout_s
        self._began_s = self._answered_s = time.monotonic()
        self._last: pb.JoinGroupResponse | None = None
        self._error: Exception | None = None
        self._notices = WaitingNotices()

    @property
    def greeting_deadline_s(self) -> float:
        return self._began_s + less_margin(self._timeout_s, _TELLING_S_MAX)

    @property
    def remaining_s(self) -> float:
        return self._began_s + self._timeout_s - time.monotonic()

    @property
    def is_tried(self) -> bool:
        return self._last is not None or self._error is not None

    @property
    def is_heard(self) -> bool:
        return self._error is None

    def answered(self, response: pb.JoinGroupResponse) -> None:
        is_new = self._last is None or self._last.generation != response.generation
        self.poll_interval_s = (
            2 * POLL_INTERVAL_S_MIN
            if is_new
            else min(1.5 * self.poll_interval_s, POLL_INTERVAL_S_MAX)
        )
        self._last, self._answered_s, self._error = response, time.monotonic(), None

    def failed(self, error: Exception) -> None:
        self._error = error

    def note(self) -> None:
        self._notices.note(self._awaited)

    def _awaited(self) -> str:
        last, name = self._last, f"group {self._spec.name!r}"
        if last is not None and self._spec.min_size and last.refusals:
            return f"for a place in elastic {name}: {last.refusals[-1]} ({self._address})"
        what = "the meeting place" if last is None else format_ranks(tuple(last.missing_ranks))
        return f"as rank {self._rank} of {name} for {what} ({self._address})"

    def given_up(self) -> Exception:
        last, name, size = self._last, self._spec.name, self._spec.size
        if last is None:
            found = why_absent(self._address)
            return ShardUnavailableError(
                f"no rendezvous at {self._address}: rank {self._rank} of group {name!r} waited "
                f"{self._timeout_s:g} s ({self._error or 'no answer'}): {found}; "
                "shard 0 of the cluster, or the first of the addresses, is to run there",
                rank=self._rank,
            )
        missing = tuple(last.missing_ranks)
        if self._spec.min_size and not last.members:
            return WorkersMissingError(
                f"elastic group {name!r}: no place within {self._timeout_s:g} s: "
                f"{'; '.join(last.refusals)}; start more workers, or raise join_timeout_s (of a "
                f"call: timeout_s) ({self._address})",
                missing_ranks=missing,
                rank=self._rank,
            )
        count = len(last.members) or size
        there = [rank for rank in range(count) if rank not in missing]
        verb = "have not reached all others" if last.members else "did not come"
        parts = [
            f"group {name!r}: {format_ranks(missing)} of {count} {verb} within {self._timeout_s:g} "
            f"s; {format_ranks(there)} did"
        ]
        parts += [f"refused: {refusal}" for refusal in last.refusals]
        silence_s = time.monotonic() - self._answered_s
        if self._error is not None and silence_s > _SILENCE_S:
            parts.append(f"the rendezvous has not answered for {silence_s:.3g} s ({self._error})")
        cure = (
            "correct those that were refused, and start all again"
            if last.refusals
            else "start the workers that are missing, or raise join_timeout_s "
            "(of rebuild: timeout_s)"
        )
        parts.append(f"{cure} ({self._address})")
        return WorkersMissingError("; ".join(parts), missing_ranks=missing, rank=self._rank)
