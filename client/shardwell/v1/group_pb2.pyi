from shardwell.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupSpec(_message.Message):
    __slots__ = ("name", "size", "strategy", "codec", "allow_non_finite", "min_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    MIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    strategy: str
    codec: _types_pb2.Codec
    allow_non_finite: bool
    min_size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., strategy: _Optional[str] = ..., codec: _Optional[_Union[_types_pb2.Codec, str]] = ..., allow_non_finite: bool = ..., min_size: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("member_id", "address", "description", "arena_address", "stream_address")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ARENA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STREAM_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    address: str
    description: str
    arena_address: str
    stream_address: str
    def __init__(self, member_id: _Optional[str] = ..., address: _Optional[str] = ..., description: _Optional[str] = ..., arena_address: _Optional[str] = ..., stream_address: _Optional[str] = ...) -> None: ...

class UnreachableMember(_message.Message):
    __slots__ = ("rank", "reason")
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    reason: str
    def __init__(self, rank: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LostMember(_message.Message):
    __slots__ = ("rank", "reason", "left", "rebuilds", "expired")
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    REBUILDS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    reason: str
    left: bool
    rebuilds: bool
    expired: bool
    def __init__(self, rank: _Optional[int] = ..., reason: _Optional[str] = ..., left: bool = ..., rebuilds: bool = ..., expired: bool = ...) -> None: ...

class JoinGroupRequest(_message.Message):
    __slots__ = ("spec", "member", "rank", "lease_ms", "previous_generation", "lost_ranks", "replacement_wait_ms", "checked_generation", "unreachable", "previous_member_count", "without_newcomers", "crc32c", "wire_version")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOST_RANKS_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_NEWCOMERS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    spec: GroupSpec
    member: Member
    rank: int
    lease_ms: int
    previous_generation: int
    lost_ranks: _containers.RepeatedScalarFieldContainer[int]
    replacement_wait_ms: int
    checked_generation: int
    unreachable: _containers.RepeatedCompositeFieldContainer[UnreachableMember]
    previous_member_count: int
    without_newcomers: bool
    crc32c: int
    wire_version: int
    def __init__(self, spec: _Optional[_Union[GroupSpec, _Mapping]] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., rank: _Optional[int] = ..., lease_ms: _Optional[int] = ..., previous_generation: _Optional[int] = ..., lost_ranks: _Optional[_Iterable[int]] = ..., replacement_wait_ms: _Optional[int] = ..., checked_generation: _Optional[int] = ..., unreachable: _Optional[_Iterable[_Union[UnreachableMember, _Mapping]]] = ..., previous_member_count: _Optional[int] = ..., without_newcomers: bool = ..., crc32c: _Optional[int] = ..., wire_version: _Optional[int] = ...) -> None: ...

class JoinGroupResponse(_message.Message):
    __slots__ = ("generation", "members", "rank", "ready", "missing_ranks", "refusals", "crc32c", "wire_version")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    rank: int
    ready: bool
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    refusals: _containers.RepeatedScalarFieldContainer[str]
    crc32c: int
    wire_version: int
    def __init__(self, generation: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., rank: _Optional[int] = ..., ready: bool = ..., missing_ranks: _Optional[_Iterable[int]] = ..., refusals: _Optional[_Iterable[str]] = ..., crc32c: _Optional[int] = ..., wire_version: _Optional[int] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("spec", "member", "generation", "rank", "member_count", "lease_ms", "crc32c")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    spec: GroupSpec
    member: Member
    generation: int
    rank: int
    member_count: int
    lease_ms: int
    crc32c: int
    def __init__(self, spec: _Optional[_Union[GroupSpec, _Mapping]] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., member_count: _Optional[int] = ..., lease_ms: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lost", "waiting_count", "crc32c")
    LOST_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedCompositeFieldContainer[LostMember]
    waiting_count: int
    crc32c: int
    def __init__(self, lost: _Optional[_Iterable[_Union[LostMember, _Mapping]]] = ..., waiting_count: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class LeaveGroupRequest(_message.Message):
    __slots__ = ("group", "member_id", "crc32c")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    group: str
    member_id: str
    crc32c: int
    def __init__(self, group: _Optional[str] = ..., member_id: _Optional[str] = ..., crc32c: _Optional[int] = ...) -> None: ...

class LeaveGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
