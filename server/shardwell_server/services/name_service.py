"""NameService: names of parameters and tables are deleted; shard/deletions.py has the states."""

from __future__ import annotations

import logging
import math
from typing import Any

from shardwell.errors import ArgumentError, WrongShardError
from shardwell.specs.names import check_name
from shardwell.v1 import names_pb2 as pb
from shardwell.wire import checksum
from shardwell_server.access.rights import Right
from shardwell_server.services.calls import Call, Calls
from shardwell_server.services.step_stream import Kind
from shardwell_server.shard.registry import Registry
from shardwell_server.shard.shard import Shard

_LOG = logging.getLogger("shardwell_server")
_STAGE = pb.DeleteRequest.Stage
_MEMBER_COUNT_MAX = 100
_WORDS: dict[pb.NameKind, Kind] = {pb.NAME_KIND_PARAMETER: "parameter", pb.NAME_KIND_TABLE: "table"}


class NameService:
    """Handlers, one method an RPC."""

    def __init__(self, shard: Shard, calls: Calls) -> None:
        self._shard = shard
        self._calls = calls

    def delete(self, request: pb.DeleteRequest, call: Call) -> pb.DeleteResponse:
        self._shard.check_identity(request.shard)
        name, by = check_name("name", request.name), check_name("worker_id", request.worker_id)
        # Before the answer says whether the name exists.
        call.ask(Right.CREATE, _WORDS.get(request.kind, "name"), name)
        held = self._held(request)
        for found in held:
            self._check_may(call, found.kind, name)
        response = pb.DeleteResponse(held=held)
        match request.stage:
            case _STAGE.STAGE_LOOK:
                pass
            case _STAGE.STAGE_MARK:
                response.done = self._mark(request, name, by)
                del response.held[:]
                response.held.extend(self._held(request))
            case _STAGE.STAGE_REMOVE:
                registry, word = self._registry(request.kind)
                gone = (request.incarnation, request.held_incarnation)
                freed_bytes = registry.remove(name, *gone, by, lambda: self._end_calls(word, name))
                response.done, response.freed_bytes = True, freed_bytes or 0
                if freed_bytes is not None:
                    call.note("deleted", kind=word, name=name)
                    _LOG.info(f"{word} deleted", extra={word: name, "by": by})
            case _:
                raise ArgumentError(f"stage must be one of DeleteRequest; got {request.stage}")
        response.crc32c = checksum.of_message(response)
        return response

    def _mark(self, request: pb.DeleteRequest, name: str, by: str) -> bool:
        if self._shard.config.shard_index != 0:
            raise WrongShardError("STAGE_MARK is done by shard 0 alone; call it there")
        registry, word = self._registry(request.kind)
        is_marked = registry.mark(
            name, request.incarnation, by, force=request.force, but=request.session
        )
        if is_marked:
            self._end_calls(word, name)
        return is_marked

    def _registry(self, kind: pb.NameKind) -> tuple[Registry[Any, Any, Any, Any], Kind]:
        if kind not in _WORDS:
            raise ArgumentError(f"kind must be that of a parameter or table; got {kind}")
        return self._shard.registry(_WORDS[kind]), _WORDS[kind]

    def _held(self, request: pb.DeleteRequest) -> list[pb.HeldName]:
        found = []
        attending = self._shard.sessions.by_worker()
        for kind in _WORDS if request.kind == pb.NAME_KIND_UNSPECIFIED else (request.kind,):
            registry, _ = self._registry(kind)
            mark, part = registry.mark_of(request.name), registry.find(request.name)
            if part is None and mark is None:
                continue
            entry = pb.HeldName(kind=kind, marked=mark is not None)
            held = mark or part
            assert held is not None
            entry.incarnation = held.incarnation
            living = registry.living_members(request.name, request.session)
            for worker_id, number, alive_for_s in living[:_MEMBER_COUNT_MAX]:
                member = entry.members.add(worker_id=worker_id)
                attendance = attending.get(worker_id)
                if attendance is not None and attendance.session.number == number:
                    session = attendance.session
                    member.host, member.pid = session.host, session.pid
                if alive_for_s != math.inf:
                    member.free_in_ms = int(alive_for_s * 1000) + 1
            found.append(entry)
        return found

    def _check_may(self, call: Call, kind: pb.NameKind, name: str) -> None:
        registry, word = self._registry(kind)
        owner = registry.owner_of(name)
        is_owner = owner is None or (owner != "" and owner == call.principal.name)
        call.ask(Right.CREATE if is_owner else Right.ADMIN, word, name)

    def _end_calls(self, word: str, name: str) -> None:
        """Ends calls that use a name; made again, they hear that the name is gone."""
        self._calls.end_those_with_name(word, name, f"{word} {name!r} is being deleted; call again")
