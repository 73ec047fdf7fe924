from shardwell.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_UNSPECIFIED: _ClassVar[Operation]
    OPERATION_ALL_REDUCE: _ClassVar[Operation]
    OPERATION_REDUCE: _ClassVar[Operation]
    OPERATION_BROADCAST: _ClassVar[Operation]
    OPERATION_REDUCE_SCATTER: _ClassVar[Operation]
    OPERATION_ALL_GATHER: _ClassVar[Operation]
    OPERATION_BARRIER: _ClassVar[Operation]
    OPERATION_JOIN: _ClassVar[Operation]
    OPERATION_STATE: _ClassVar[Operation]

class Reduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCTION_UNSPECIFIED: _ClassVar[Reduction]
    REDUCTION_SUM: _ClassVar[Reduction]
    REDUCTION_MEAN: _ClassVar[Reduction]
    REDUCTION_MAX: _ClassVar[Reduction]
    REDUCTION_MIN: _ClassVar[Reduction]

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    STAGE_PARTIAL: _ClassVar[Stage]
    STAGE_FINAL: _ClassVar[Stage]
OPERATION_UNSPECIFIED: Operation
OPERATION_ALL_REDUCE: Operation
OPERATION_REDUCE: Operation
OPERATION_BROADCAST: Operation
OPERATION_REDUCE_SCATTER: Operation
OPERATION_ALL_GATHER: Operation
OPERATION_BARRIER: Operation
OPERATION_JOIN: Operation
OPERATION_STATE: Operation
REDUCTION_UNSPECIFIED: Reduction
REDUCTION_SUM: Reduction
REDUCTION_MEAN: Reduction
REDUCTION_MAX: Reduction
REDUCTION_MIN: Reduction
STAGE_UNSPECIFIED: Stage
STAGE_PARTIAL: Stage
STAGE_FINAL: Stage

class PeerOpen(_message.Message):
    __slots__ = ("group", "generation", "from_member_id", "from_rank", "to_member_id")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FROM_MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_RANK_FIELD_NUMBER: _ClassVar[int]
    TO_MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    group: str
    generation: int
    from_member_id: str
    from_rank: int
    to_member_id: str
    def __init__(self, group: _Optional[str] = ..., generation: _Optional[int] = ..., from_member_id: _Optional[str] = ..., from_rank: _Optional[int] = ..., to_member_id: _Optional[str] = ...) -> None: ...

class GreetRequest(_message.Message):
    __slots__ = ("group", "member_id")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    group: str
    member_id: str
    def __init__(self, group: _Optional[str] = ..., member_id: _Optional[str] = ...) -> None: ...

class GreetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CollectiveCall(_message.Message):
    __slots__ = ("call_index", "operation", "reduction", "codec", "element_count", "root", "sample_count", "wait_timeout_ms", "problem", "admits", "retries")
    CALL_INDEX_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ADMITS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    call_index: int
    operation: Operation
    reduction: Reduction
    codec: _types_pb2.Codec
    element_count: int
    root: int
    sample_count: int
    wait_timeout_ms: int
    problem: Failure
    admits: bool
    retries: bool
    def __init__(self, call_index: _Optional[int] = ..., operation: _Optional[_Union[Operation, str]] = ..., reduction: _Optional[_Union[Reduction, str]] = ..., codec: _Optional[_Union[_types_pb2.Codec, str]] = ..., element_count: _Optional[int] = ..., root: _Optional[int] = ..., sample_count: _Optional[int] = ..., wait_timeout_ms: _Optional[int] = ..., problem: _Optional[_Union[Failure, _Mapping]] = ..., admits: bool = ..., retries: bool = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("detail", "message", "rebuilding", "expired")
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REBUILDING_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    detail: _types_pb2.ErrorDetail
    message: str
    rebuilding: bool
    expired: bool
    def __init__(self, detail: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ..., message: _Optional[str] = ..., rebuilding: bool = ..., expired: bool = ...) -> None: ...

class LeavingRank(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MadeCall(_message.Message):
    __slots__ = ("call_index",)
    CALL_INDEX_FIELD_NUMBER: _ClassVar[int]
    call_index: int
    def __init__(self, call_index: _Optional[int] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("generation", "made_count", "moved_count")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MADE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MOVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    made_count: int
    moved_count: int
    def __init__(self, generation: _Optional[int] = ..., made_count: _Optional[int] = ..., moved_count: _Optional[int] = ...) -> None: ...

class Standings(_message.Message):
    __slots__ = ("standings",)
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    standings: _containers.RepeatedCompositeFieldContainer[Standing]
    def __init__(self, standings: _Optional[_Iterable[_Union[Standing, _Mapping]]] = ...) -> None: ...

class AgreeRequest(_message.Message):
    __slots__ = ("open", "call", "leaving", "giving_up", "made", "standings")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    GIVING_UP_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    open: PeerOpen
    call: CollectiveCall
    leaving: LeavingRank
    giving_up: Failure
    made: MadeCall
    standings: Standings
    def __init__(self, open: _Optional[_Union[PeerOpen, _Mapping]] = ..., call: _Optional[_Union[CollectiveCall, _Mapping]] = ..., leaving: _Optional[_Union[LeavingRank, _Mapping]] = ..., giving_up: _Optional[_Union[Failure, _Mapping]] = ..., made: _Optional[_Union[MadeCall, _Mapping]] = ..., standings: _Optional[_Union[Standings, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("call_index", "operation", "failure", "active_ranks", "sample_counts", "last_rank", "regroup", "made")
    CALL_INDEX_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LAST_RANK_FIELD_NUMBER: _ClassVar[int]
    REGROUP_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    call_index: int
    operation: Operation
    failure: Failure
    active_ranks: _containers.RepeatedScalarFieldContainer[int]
    sample_counts: _containers.RepeatedScalarFieldContainer[int]
    last_rank: int
    regroup: bool
    made: bool
    def __init__(self, call_index: _Optional[int] = ..., operation: _Optional[_Union[Operation, str]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., active_ranks: _Optional[_Iterable[int]] = ..., sample_counts: _Optional[_Iterable[int]] = ..., last_rank: _Optional[int] = ..., regroup: bool = ..., made: bool = ...) -> None: ...

class AgreeResponse(_message.Message):
    __slots__ = ("verdict", "end", "leaving", "standings")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    end: Failure
    leaving: LeavingRank
    standings: Standings
    def __init__(self, verdict: _Optional[_Union[Verdict, _Mapping]] = ..., end: _Optional[_Union[Failure, _Mapping]] = ..., leaving: _Optional[_Union[LeavingRank, _Mapping]] = ..., standings: _Optional[_Union[Standings, _Mapping]] = ...) -> None: ...

class ReceiveChunksRequest(_message.Message):
    __slots__ = ("open", "arena")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    open: PeerOpen
    arena: int
    def __init__(self, open: _Optional[_Union[PeerOpen, _Mapping]] = ..., arena: _Optional[int] = ...) -> None: ...

class ReceiveChunksResponse(_message.Message):
    __slots__ = ("call_index", "stage", "chunk", "last", "batch", "padding", "payload")
    CALL_INDEX_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    call_index: int
    stage: Stage
    chunk: _types_pb2.Chunk
    last: bool
    batch: _containers.RepeatedScalarFieldContainer[bytes]
    padding: bytes
    payload: bytes
    def __init__(self, call_index: _Optional[int] = ..., stage: _Optional[_Union[Stage, str]] = ..., chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ..., last: bool = ..., batch: _Optional[_Iterable[bytes]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
