from shardwell.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_KIND_UNSPECIFIED: _ClassVar[SpanKind]
    SPAN_KIND_EXCHANGE: _ClassVar[SpanKind]
    SPAN_KIND_PUT: _ClassVar[SpanKind]
    SPAN_KIND_GET: _ClassVar[SpanKind]
    SPAN_KIND_ENCODE: _ClassVar[SpanKind]
    SPAN_KIND_SEND: _ClassVar[SpanKind]
    SPAN_KIND_WAIT: _ClassVar[SpanKind]
    SPAN_KIND_DECODE: _ClassVar[SpanKind]
    SPAN_KIND_ADD: _ClassVar[SpanKind]
    SPAN_KIND_UPDATE: _ClassVar[SpanKind]
    SPAN_KIND_ENCODE_WEIGHTS: _ClassVar[SpanKind]
    SPAN_KIND_FLUSH: _ClassVar[SpanKind]
    SPAN_KIND_LATE: _ClassVar[SpanKind]
SPAN_KIND_UNSPECIFIED: SpanKind
SPAN_KIND_EXCHANGE: SpanKind
SPAN_KIND_PUT: SpanKind
SPAN_KIND_GET: SpanKind
SPAN_KIND_ENCODE: SpanKind
SPAN_KIND_SEND: SpanKind
SPAN_KIND_WAIT: SpanKind
SPAN_KIND_DECODE: SpanKind
SPAN_KIND_ADD: SpanKind
SPAN_KIND_UPDATE: SpanKind
SPAN_KIND_ENCODE_WEIGHTS: SpanKind
SPAN_KIND_FLUSH: SpanKind
SPAN_KIND_LATE: SpanKind

class GetClockRequest(_message.Message):
    __slots__ = ("shard",)
    SHARD_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ...) -> None: ...

class GetClockResponse(_message.Message):
    __slots__ = ("now_ns", "clock_id")
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    now_ns: int
    clock_id: str
    def __init__(self, now_ns: _Optional[int] = ..., clock_id: _Optional[str] = ...) -> None: ...

class AwaitRecordingRequest(_message.Message):
    __slots__ = ("shard", "session", "worker_id")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    session: int
    worker_id: str
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., session: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class AwaitRecordingResponse(_message.Message):
    __slots__ = ("recording",)
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    recording: int
    def __init__(self, recording: _Optional[int] = ...) -> None: ...

class GiveSpansRequest(_message.Message):
    __slots__ = ("shard", "session", "recording", "process")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    session: int
    recording: int
    process: ProcessSpans
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., session: _Optional[int] = ..., recording: _Optional[int] = ..., process: _Optional[_Union[ProcessSpans, _Mapping]] = ...) -> None: ...

class GiveSpansResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("shard", "wait_timeout_ms")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    wait_timeout_ms: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., wait_timeout_ms: _Optional[int] = ...) -> None: ...

class RecordResponse(_message.Message):
    __slots__ = ("process", "open_steps", "silent_worker_ids")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    OPEN_STEPS_FIELD_NUMBER: _ClassVar[int]
    SILENT_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    process: ProcessSpans
    open_steps: _containers.RepeatedCompositeFieldContainer[OpenStep]
    silent_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, process: _Optional[_Union[ProcessSpans, _Mapping]] = ..., open_steps: _Optional[_Iterable[_Union[OpenStep, _Mapping]]] = ..., silent_worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenStep(_message.Message):
    __slots__ = ("kind", "name", "step", "begin_ns", "wait")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    step: int
    begin_ns: int
    wait: _types_pb2.StepWait
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., step: _Optional[int] = ..., begin_ns: _Optional[int] = ..., wait: _Optional[_Union[_types_pb2.StepWait, _Mapping]] = ...) -> None: ...

class ProcessSpans(_message.Message):
    __slots__ = ("worker_id", "host", "pid", "now_ns", "clock_offset_ns", "clock_error_ns", "words", "kinds", "subjects", "steps", "chunks", "peers", "begins_ns", "durations_ns")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_NS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_NS_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_NS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    host: str
    pid: int
    now_ns: int
    clock_offset_ns: int
    clock_error_ns: int
    words: _containers.RepeatedScalarFieldContainer[str]
    kinds: _containers.RepeatedScalarFieldContainer[int]
    subjects: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    chunks: _containers.RepeatedScalarFieldContainer[int]
    peers: _containers.RepeatedScalarFieldContainer[int]
    begins_ns: _containers.RepeatedScalarFieldContainer[int]
    durations_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., now_ns: _Optional[int] = ..., clock_offset_ns: _Optional[int] = ..., clock_error_ns: _Optional[int] = ..., words: _Optional[_Iterable[str]] = ..., kinds: _Optional[_Iterable[int]] = ..., subjects: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., chunks: _Optional[_Iterable[int]] = ..., peers: _Optional[_Iterable[int]] = ..., begins_ns: _Optional[_Iterable[int]] = ..., durations_ns: _Optional[_Iterable[int]] = ...) -> None: ...
