from shardwell.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ArenaOffer(_message.Message):
    __slots__ = ("shard", "size_bytes", "nonce", "member_id")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    size_bytes: int
    nonce: int
    member_id: str
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., size_bytes: _Optional[int] = ..., nonce: _Optional[int] = ..., member_id: _Optional[str] = ...) -> None: ...

class ArenaAnswer(_message.Message):
    __slots__ = ("token", "refusal")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    token: int
    refusal: str
    def __init__(self, token: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...
