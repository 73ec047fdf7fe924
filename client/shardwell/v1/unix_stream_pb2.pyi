from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class UnixStreamOpen(_message.Message):
    __slots__ = ("method", "authorization", "wire_version")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZATION_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    method: str
    authorization: str
    wire_version: int
    def __init__(self, method: _Optional[str] = ..., authorization: _Optional[str] = ..., wire_version: _Optional[int] = ...) -> None: ...

class UnixStreamEnd(_message.Message):
    __slots__ = ("code", "details", "error")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    error: bytes
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., error: _Optional[bytes] = ...) -> None: ...
