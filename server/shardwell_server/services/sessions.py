"""SessionService: which clients are connected.

An Attend call is open as long as its client is.
"""

from __future__ import annotations

import logging
from functools import partial

from shardwell.errors import ArgumentError, ShardUnavailableError
from shardwell.rpc.session import (
    HOST_LENGTH_MAX,
    PROCESS_LENGTH_MAX,
    VERSION_LENGTH_MAX,
    Session,
)
from shardwell.specs.names import check_name
from shardwell.v1 import session_pb2 as pb
from shardwell.wire import checksum
from shardwell_server.access.ends import first_end
from shardwell_server.access.rights import Right
from shardwell_server.services.calls import Call, Calls, Handling, Needs
from shardwell_server.services.step_stream import Kind
from shardwell_server.shard.sessions import session_ended
from shardwell_server.shard.shard import Shard

_LOG = logging.getLogger("shardwell_server")
_ENDED_COUNT_MAX = 1024


class SessionService:
    """Handlers, one method an RPC."""

    def __init__(self, shard: Shard, calls: Calls) -> None:
        self._shard = shard
        self._calls = calls
        self.certificate_ends: dict[int, tuple[str, float, float]] = {}
        """Of sessions that attend: the worker, and the end of its certificate, since 1970."""

    def attend(self, request: pb.AttendRequest, call: Call) -> Handling:
        self._shard.check_identity(request.shard)
        worker_id = check_name("worker_id", request.worker_id)
        if not request.session:
            raise ArgumentError("session must be a number drawn at random, not 0; got 0")
        host, process, version = request.host, request.process, request.software_version
        if not host or len(host) > HOST_LENGTH_MAX or not host.isprintable():
            raise ArgumentError(
                f"host must be 1 to {HOST_LENGTH_MAX} printable characters; got {host!r:.80}"
            )
        _check_ascii("process", process, PROCESS_LENGTH_MAX)
        _check_ascii("software_version", version, VERSION_LENGTH_MAX)
        session = Session(request.session, host, request.pid, process)
        sessions = self._shard.sessions
        ended = ShardUnavailableError("the shard does not attend this session any more")
        token = sessions.attend(worker_id, session, partial(call.end, ended), call.usage, version)
        call.session = session.number
        end = None if call.certificate_pem is None else first_end(call.certificate_pem)
        if end is not None:
            self.certificate_ends[session.number] = (worker_id, *end)
        try:
            yield Needs.HELD
        finally:
            self.certificate_ends.pop(session.number, None)
            sessions.leave(session, token)

    def heartbeat(self, request: pb.HeartbeatRequest, call: Call) -> pb.HeartbeatResponse:
        shard = self._shard
        shard.check_identity(request.shard)
        if len(request.ended) > _ENDED_COUNT_MAX:
            raise ArgumentError(
                f"a heartbeat names at most {_ENDED_COUNT_MAX} tenures; got {len(request.ended)}"
            )
        shard.sessions.heard(request.session)
        for each in request.ended:
            kind: Kind = "parameter" if each.parameter else "table"
            name = each.parameter or each.table
            call.check(Right.CONTRIBUTE, kind, name)
            found = shard.registry(kind).find(name)
            if found is not None and found.incarnation == each.incarnation:
                found.end_tenure(each.worker_id, each.tenure)
        response = pb.HeartbeatResponse()
        for part in shard.elastic_parts_of(request.session):
            for worker_id, tenure in part.ended_tenures():
                if len(response.ended) < _ENDED_COUNT_MAX:
                    ended = response.ended.add(worker_id=worker_id, tenure=tenure)
                    setattr(ended, part.kind, part.spec.name)
                    ended.incarnation = part.incarnation
        return checksum.seal(response)

    def end_tenure(self, request: pb.EndTenureRequest, call: Call) -> pb.EndTenureResponse:
        self._shard.check_identity(request.shard)
        worker_id = check_name("worker_id", request.worker_id)
        if bool(request.parameter) == bool(request.table):
            raise ArgumentError("give parameter or table, and not both")
        kind: Kind = "parameter" if request.parameter else "table"
        name = request.parameter or request.table
        call.check(Right.ADMIN, kind, name)
        found = self._shard.registry(kind).get(name)
        if found.spec.members is None:
            raise ArgumentError(
                f"{kind} {name!r} has {found.spec.crew}, whom each step needs; workers come and go "
                "where it has members"
            )
        found.dismiss(worker_id, drains=request.drain)
        event = "drained" if request.drain else "removed"
        call.note(event, kind=kind, name=name, member=worker_id)
        _LOG.info(f"member {event}", extra={kind: name, "member": worker_id})
        return pb.EndTenureResponse()

    def end_session(self, request: pb.EndSessionRequest, call: Call) -> pb.EndSessionResponse:
        self._shard.check_identity(request.shard)
        if self._shard.end_session(request.session, call.principal.name):
            self._calls.end_those_of_session(request.session, call, session_ended(request.session))
        return pb.EndSessionResponse()


def _check_ascii(what: str, text: str, length_max: int) -> None:
    if len(text) > length_max or not (text.isascii() and text.isprintable()):
        raise ArgumentError(
            f"{what} must be up to {length_max} printable ASCII characters; got {text!r:.80}"
        )
