from shardwell.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NameKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NAME_KIND_UNSPECIFIED: _ClassVar[NameKind]
    NAME_KIND_PARAMETER: _ClassVar[NameKind]
    NAME_KIND_TABLE: _ClassVar[NameKind]
NAME_KIND_UNSPECIFIED: NameKind
NAME_KIND_PARAMETER: NameKind
NAME_KIND_TABLE: NameKind

class DeleteRequest(_message.Message):
    __slots__ = ("shard", "name", "kind", "stage", "incarnation", "held_incarnation", "force", "session", "worker_id", "crc32c")
    class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STAGE_UNSPECIFIED: _ClassVar[DeleteRequest.Stage]
        STAGE_LOOK: _ClassVar[DeleteRequest.Stage]
        STAGE_MARK: _ClassVar[DeleteRequest.Stage]
        STAGE_REMOVE: _ClassVar[DeleteRequest.Stage]
    STAGE_UNSPECIFIED: DeleteRequest.Stage
    STAGE_LOOK: DeleteRequest.Stage
    STAGE_MARK: DeleteRequest.Stage
    STAGE_REMOVE: DeleteRequest.Stage
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELD_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    name: str
    kind: NameKind
    stage: DeleteRequest.Stage
    incarnation: int
    held_incarnation: int
    force: bool
    session: int
    worker_id: str
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., name: _Optional[str] = ..., kind: _Optional[_Union[NameKind, str]] = ..., stage: _Optional[_Union[DeleteRequest.Stage, str]] = ..., incarnation: _Optional[int] = ..., held_incarnation: _Optional[int] = ..., force: bool = ..., session: _Optional[int] = ..., worker_id: _Optional[str] = ..., crc32c: _Optional[int] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("held", "done", "freed_bytes", "crc32c")
    HELD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[HeldName]
    done: bool
    freed_bytes: int
    crc32c: int
    def __init__(self, held: _Optional[_Iterable[_Union[HeldName, _Mapping]]] = ..., done: bool = ..., freed_bytes: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class HeldName(_message.Message):
    __slots__ = ("kind", "incarnation", "marked", "members")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MARKED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    kind: NameKind
    incarnation: int
    marked: bool
    members: _containers.RepeatedCompositeFieldContainer[NameMember]
    def __init__(self, kind: _Optional[_Union[NameKind, str]] = ..., incarnation: _Optional[int] = ..., marked: bool = ..., members: _Optional[_Iterable[_Union[NameMember, _Mapping]]] = ...) -> None: ...

class NameMember(_message.Message):
    __slots__ = ("worker_id", "host", "pid", "free_in_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FREE_IN_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    host: str
    pid: int
    free_in_ms: int
    def __init__(self, worker_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., free_in_ms: _Optional[int] = ...) -> None: ...
