"""TraceService: what the shard and its clients did last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardwell.errors import SessionUnknownError, ShardUnavailableError, WrongShardError
from shardwell.process import span_columns
from shardwell.process.spans import clock_id, now_ns
from shardwell.specs.names import check_name
from shardwell.v1 import trace_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server.services.calls import Call, Handling
from shardwell_server.shard.deadline import deadline_of, until
from shardwell_server.shard.shard import Shard

_WAIT_S_MAX = 60.0
_WORKER_COUNT_MAX = 100


class TraceService:
    """Handlers, one method an RPC."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._recordings = shard.recordings

    def get_clock(self, request: pb.GetClockRequest, call: Call) -> pb.GetClockResponse:
        self._shard.check_identity(request.shard)
        return pb.GetClockResponse(now_ns=now_ns(), clock_id=clock_id())

    def await_recording(self, request: pb.AwaitRecordingRequest, call: Call) -> Handling:
        self._check_first(request.shard)
        worker_id = check_name("worker_id", request.worker_id)
        try:
            self._shard.sessions.check(request.session, worker_id, call.principal.name)
        except SessionUnknownError:  # its client attends at the same time, and asks again
            return pb.AwaitRecordingResponse()
        deadline = deadline_of(self._shard, call, 0)
        ended = ShardUnavailableError("another call of this session waits for recordings")
        with self._recordings.asking(request.session, partial(call.end, ended)):
            number = yield from until(self._recordings.news, request.session, deadline)
        return pb.AwaitRecordingResponse(recording=number)

    def give_spans(self, request: pb.GiveSpansRequest, call: Call) -> pb.GiveSpansResponse:
        self._check_first(request.shard)
        process = request.process
        span_columns.check(process)
        worker_id = check_name("worker_id", process.worker_id)
        session = self._shard.sessions.check(request.session, worker_id, call.principal.name)
        process.host, process.pid = session.host, session.pid
        self._recordings.give(request.recording, request.session, process)
        return pb.GiveSpansResponse()

    def record(self, request: pb.RecordRequest, call: Call) -> Handling:
        self._shard.check_identity(request.shard)

        def is_shown(name: str) -> bool:
            return bool(call.principal.best(name))

        known: set[str] = set()

        def is_worker_shown(worker_id: str) -> bool:
            return is_shown("") or worker_id in known

        wait_s = min(request.wait_timeout_ms / 1000, _WAIT_S_MAX)
        asks = bool(wait_s) and self._shard.config.shard_index == 0
        sessions = self._shard.sessions
        there = {each.session.number for each in sessions.by_worker().values()}
        number = self._recordings.begin(there, wait_s) if asks else 0
        given: set[int] = set()
        try:
            own = pb.RecordResponse(process=self._shard.spans.to_proto())
            span_columns.keep_subjects(own.process, is_shown)
            own.open_steps.extend(self._open_steps(is_shown))
            known = _workers_of(own)
            yield own.SerializeToString()
            deadline = deadline_of(self._shard, call, wait_s)
            while asks:
                process = yield from until(self._recordings.next, number, deadline)
                if process is None:
                    break
                span_columns.keep_subjects(process, is_shown)
                if process.kinds or is_worker_shown(process.worker_id):
                    yield pb.RecordResponse(process=process).SerializeToString()
        finally:
            if asks:
                given = self._recordings.end(number)
        if asks:
            attending = sessions.by_worker().items()
            silent = [
                worker
                for worker, attendance in attending
                if attendance.session.number not in given and is_worker_shown(worker)
            ]
            last = pb.RecordResponse(silent_worker_ids=silent[:_WORKER_COUNT_MAX])
            yield last.SerializeToString()

    def _check_first(self, meant: types_pb2.ShardIdentity) -> None:
        self._shard.check_identity(meant)
        if self._shard.config.shard_index != 0:
            raise WrongShardError("clients are asked for spans by shard 0 alone; call it there")

    def _open_steps(self, is_shown: Callable[[str], bool]) -> list[pb.OpenStep]:
        attending = self._shard.sessions.by_worker()
        found = []
        parts: list[Any] = [*self._shard.parameters.all(), *self._shard.tables.all()]
        for part in parts:
            if is_shown(part.spec.name):
                of = part.describe(_WORKER_COUNT_MAX, attending)
                if of.wait.HasField("open_for_s"):
                    kind = part.kind
                    step = of.version_min if kind == "parameter" else of.version
                    begin_ns = max(now_ns() - int(of.wait.open_for_s * 1e9), 0)
                    where = {"kind": kind, "name": part.spec.name, "step": step}
                    found.append(pb.OpenStep(**where, begin_ns=begin_ns, wait=of.wait))
        return found


def _workers_of(own: pb.RecordResponse) -> set[str]:
    process = own.process
    named = {process.words[number] for number in set(process.peers)}
    return named.union(worker.worker_id for step in own.open_steps for worker in step.wait.workers)
