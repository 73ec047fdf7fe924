from shardwell.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EndTenureRequest(_message.Message):
    __slots__ = ("shard", "parameter", "table", "worker_id", "drain", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    table: str
    worker_id: str
    drain: bool
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., table: _Optional[str] = ..., worker_id: _Optional[str] = ..., drain: bool = ..., crc32c: _Optional[int] = ...) -> None: ...

class EndTenureResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndedTenure(_message.Message):
    __slots__ = ("parameter", "table", "incarnation", "worker_id", "tenure")
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    parameter: str
    table: str
    incarnation: int
    worker_id: str
    tenure: int
    def __init__(self, parameter: _Optional[str] = ..., table: _Optional[str] = ..., incarnation: _Optional[int] = ..., worker_id: _Optional[str] = ..., tenure: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("shard", "session", "ended", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    session: int
    ended: _containers.RepeatedCompositeFieldContainer[EndedTenure]
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., session: _Optional[int] = ..., ended: _Optional[_Iterable[_Union[EndedTenure, _Mapping]]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("ended", "crc32c")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    ended: _containers.RepeatedCompositeFieldContainer[EndedTenure]
    crc32c: int
    def __init__(self, ended: _Optional[_Iterable[_Union[EndedTenure, _Mapping]]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("shard", "worker_id", "session", "host", "pid", "process", "software_version", "crc32c", "wire_version")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    worker_id: str
    session: int
    host: str
    pid: int
    process: str
    software_version: str
    crc32c: int
    wire_version: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., worker_id: _Optional[str] = ..., session: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., process: _Optional[str] = ..., software_version: _Optional[str] = ..., crc32c: _Optional[int] = ..., wire_version: _Optional[int] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("shard", "session", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    session: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., session: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
