from shardwell.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Zeros(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Uniform(_message.Message):
    __slots__ = ("low", "high", "seed")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    low: float
    high: float
    seed: int
    def __init__(self, low: _Optional[float] = ..., high: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class Normal(_message.Message):
    __slots__ = ("mean", "std", "seed")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    mean: float
    std: float
    seed: int
    def __init__(self, mean: _Optional[float] = ..., std: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class Initializer(_message.Message):
    __slots__ = ("zeros", "uniform", "normal")
    ZEROS_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    NORMAL_FIELD_NUMBER: _ClassVar[int]
    zeros: Zeros
    uniform: Uniform
    normal: Normal
    def __init__(self, zeros: _Optional[_Union[Zeros, _Mapping]] = ..., uniform: _Optional[_Union[Uniform, _Mapping]] = ..., normal: _Optional[_Union[Normal, _Mapping]] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "row_count", "dim", "optimizer", "initializer", "codec", "compression", "mode", "worker_count", "allow_non_finite", "members")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    row_count: int
    dim: int
    optimizer: _types_pb2.Optimizer
    initializer: Initializer
    codec: _types_pb2.Codec
    compression: _types_pb2.Compression
    mode: _types_pb2.Mode
    worker_count: int
    allow_non_finite: bool
    members: _types_pb2.ElasticMembers
    def __init__(self, name: _Optional[str] = ..., row_count: _Optional[int] = ..., dim: _Optional[int] = ..., optimizer: _Optional[_Union[_types_pb2.Optimizer, _Mapping]] = ..., initializer: _Optional[_Union[Initializer, _Mapping]] = ..., codec: _Optional[_Union[_types_pb2.Codec, str]] = ..., compression: _Optional[_Union[_types_pb2.Compression, str]] = ..., mode: _Optional[_Union[_types_pb2.Mode, str]] = ..., worker_count: _Optional[int] = ..., allow_non_finite: bool = ..., members: _Optional[_Union[_types_pb2.ElasticMembers, _Mapping]] = ...) -> None: ...

class OpenTableRequest(_message.Message):
    __slots__ = ("shard", "worker_id", "spec", "take_seat", "incarnation", "must_exist", "session", "tenure", "begins_anew", "from_step", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TAKE_SEAT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MUST_EXIST_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    BEGINS_ANEW_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    worker_id: str
    spec: TableSpec
    take_seat: bool
    incarnation: int
    must_exist: bool
    session: int
    tenure: int
    begins_anew: bool
    from_step: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., worker_id: _Optional[str] = ..., spec: _Optional[_Union[TableSpec, _Mapping]] = ..., take_seat: bool = ..., incarnation: _Optional[int] = ..., must_exist: bool = ..., session: _Optional[int] = ..., tenure: _Optional[int] = ..., begins_anew: bool = ..., from_step: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class OpenTableResponse(_message.Message):
    __slots__ = ("created", "rows_per_message_max", "version", "next_step", "counted_part_count", "row_count", "incarnation", "begun", "took_over", "tenure", "has_seat", "needed_step", "rank", "ranked_count", "crc32c")
    CREATED_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_MESSAGE_MAX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    COUNTED_PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    TOOK_OVER_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    HAS_SEAT_FIELD_NUMBER: _ClassVar[int]
    NEEDED_STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    created: bool
    rows_per_message_max: int
    version: int
    next_step: int
    counted_part_count: int
    row_count: int
    incarnation: int
    begun: bool
    took_over: bool
    tenure: int
    has_seat: bool
    needed_step: int
    rank: int
    ranked_count: int
    crc32c: int
    def __init__(self, created: bool = ..., rows_per_message_max: _Optional[int] = ..., version: _Optional[int] = ..., next_step: _Optional[int] = ..., counted_part_count: _Optional[int] = ..., row_count: _Optional[int] = ..., incarnation: _Optional[int] = ..., begun: bool = ..., took_over: bool = ..., tenure: _Optional[int] = ..., has_seat: bool = ..., needed_step: _Optional[int] = ..., rank: _Optional[int] = ..., ranked_count: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class TableOpen(_message.Message):
    __slots__ = ("shard", "table", "worker_id", "incarnation", "session", "tenure", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    table: str
    worker_id: str
    incarnation: int
    session: int
    tenure: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., table: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., session: _Optional[int] = ..., tenure: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("row_count", "crc32c", "lz4")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    LZ4_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    crc32c: int
    lz4: bool
    def __init__(self, row_count: _Optional[int] = ..., crc32c: _Optional[int] = ..., lz4: bool = ...) -> None: ...

class RowGradients(_message.Message):
    __slots__ = ("rows", "step", "part_index", "end_of_step", "sample_count", "wait_timeout_ms", "abandons")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PART_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_OF_STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ABANDONS_FIELD_NUMBER: _ClassVar[int]
    rows: Rows
    step: int
    part_index: int
    end_of_step: bool
    sample_count: int
    wait_timeout_ms: int
    abandons: bool
    def __init__(self, rows: _Optional[_Union[Rows, _Mapping]] = ..., step: _Optional[int] = ..., part_index: _Optional[int] = ..., end_of_step: bool = ..., sample_count: _Optional[int] = ..., wait_timeout_ms: _Optional[int] = ..., abandons: bool = ...) -> None: ...

class RowsFetch(_message.Message):
    __slots__ = ("rows", "min_version", "wait_timeout_ms", "max_version", "unless_late")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    UNLESS_LATE_FIELD_NUMBER: _ClassVar[int]
    rows: Rows
    min_version: int
    wait_timeout_ms: int
    max_version: int
    unless_late: bool
    def __init__(self, rows: _Optional[_Union[Rows, _Mapping]] = ..., min_version: _Optional[int] = ..., wait_timeout_ms: _Optional[int] = ..., max_version: _Optional[int] = ..., unless_late: bool = ...) -> None: ...

class RowsOutcome(_message.Message):
    __slots__ = ("step", "late_part_indexes", "tenure_is_over", "version", "contributor_ids", "is_draining", "superseded_part_indexes", "late_may_have_counted", "crc32c")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LATE_PART_INDEXES_FIELD_NUMBER: _ClassVar[int]
    TENURE_IS_OVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTOR_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_PART_INDEXES_FIELD_NUMBER: _ClassVar[int]
    LATE_MAY_HAVE_COUNTED_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    step: int
    late_part_indexes: _containers.RepeatedScalarFieldContainer[int]
    tenure_is_over: bool
    version: int
    contributor_ids: _containers.RepeatedScalarFieldContainer[str]
    is_draining: bool
    superseded_part_indexes: _containers.RepeatedScalarFieldContainer[int]
    late_may_have_counted: bool
    crc32c: int
    def __init__(self, step: _Optional[int] = ..., late_part_indexes: _Optional[_Iterable[int]] = ..., tenure_is_over: bool = ..., version: _Optional[int] = ..., contributor_ids: _Optional[_Iterable[str]] = ..., is_draining: bool = ..., superseded_part_indexes: _Optional[_Iterable[int]] = ..., late_may_have_counted: bool = ..., crc32c: _Optional[int] = ...) -> None: ...

class RowsCounted(_message.Message):
    __slots__ = ("step", "counted_part_count", "duplicate_part_count", "superseded_part_count", "crc32c")
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNTED_PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    step: int
    counted_part_count: int
    duplicate_part_count: int
    superseded_part_count: int
    crc32c: int
    def __init__(self, step: _Optional[int] = ..., counted_part_count: _Optional[int] = ..., duplicate_part_count: _Optional[int] = ..., superseded_part_count: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ExchangeRowsRequest(_message.Message):
    __slots__ = ("open", "gradient", "fetch", "padding", "payload")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    open: TableOpen
    gradient: RowGradients
    fetch: RowsFetch
    padding: bytes
    payload: bytes
    def __init__(self, open: _Optional[_Union[TableOpen, _Mapping]] = ..., gradient: _Optional[_Union[RowGradients, _Mapping]] = ..., fetch: _Optional[_Union[RowsFetch, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ExchangeRowsResponse(_message.Message):
    __slots__ = ("rows", "counted", "version", "outcome", "padding", "payload")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    rows: Rows
    counted: RowsCounted
    version: int
    outcome: RowsOutcome
    padding: bytes
    payload: bytes
    def __init__(self, rows: _Optional[_Union[Rows, _Mapping]] = ..., counted: _Optional[_Union[RowsCounted, _Mapping]] = ..., version: _Optional[int] = ..., outcome: _Optional[_Union[RowsOutcome, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ScanRowsRequest(_message.Message):
    __slots__ = ("shard", "table", "content", "version", "wait_timeout_ms", "incarnation", "crc32c")
    class Content(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CONTENT_UNSPECIFIED: _ClassVar[ScanRowsRequest.Content]
        CONTENT_IDS: _ClassVar[ScanRowsRequest.Content]
        CONTENT_VALUES: _ClassVar[ScanRowsRequest.Content]
        CONTENT_STATE: _ClassVar[ScanRowsRequest.Content]
    CONTENT_UNSPECIFIED: ScanRowsRequest.Content
    CONTENT_IDS: ScanRowsRequest.Content
    CONTENT_VALUES: ScanRowsRequest.Content
    CONTENT_STATE: ScanRowsRequest.Content
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    table: str
    content: ScanRowsRequest.Content
    version: int
    wait_timeout_ms: int
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., table: _Optional[str] = ..., content: _Optional[_Union[ScanRowsRequest.Content, str]] = ..., version: _Optional[int] = ..., wait_timeout_ms: _Optional[int] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ScanRowsResponse(_message.Message):
    __slots__ = ("rows", "version", "learning_rate", "padding", "payload")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    rows: Rows
    version: int
    learning_rate: float
    padding: bytes
    payload: bytes
    def __init__(self, rows: _Optional[_Union[Rows, _Mapping]] = ..., version: _Optional[int] = ..., learning_rate: _Optional[float] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class LoadRowsRequest(_message.Message):
    __slots__ = ("open", "rows", "version", "learning_rate", "finish", "load_id", "padding", "payload")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    open: TableOpen
    rows: Rows
    version: int
    learning_rate: float
    finish: bool
    load_id: int
    padding: bytes
    payload: bytes
    def __init__(self, open: _Optional[_Union[TableOpen, _Mapping]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ..., version: _Optional[int] = ..., learning_rate: _Optional[float] = ..., finish: bool = ..., load_id: _Optional[int] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class LoadRowsResponse(_message.Message):
    __slots__ = ("row_count", "crc32c")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    crc32c: int
    def __init__(self, row_count: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class EvictRowsRequest(_message.Message):
    __slots__ = ("shard", "table", "older_than_step", "incarnation", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    table: str
    older_than_step: int
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., table: _Optional[str] = ..., older_than_step: _Optional[int] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class EvictRowsResponse(_message.Message):
    __slots__ = ("evicted_row_count", "crc32c")
    EVICTED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    evicted_row_count: int
    crc32c: int
    def __init__(self, evicted_row_count: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SetTableLearningRateRequest(_message.Message):
    __slots__ = ("shard", "table", "learning_rate", "from_step", "incarnation", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    table: str
    learning_rate: float
    from_step: int
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., table: _Optional[str] = ..., learning_rate: _Optional[float] = ..., from_step: _Optional[int] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SetTableLearningRateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTableStatusRequest(_message.Message):
    __slots__ = ("shard", "table", "incarnation", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    table: str
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., table: _Optional[str] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class GetTableStatusResponse(_message.Message):
    __slots__ = ("tables", "crc32c")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    crc32c: int
    def __init__(self, tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("spec", "row_count", "row_capacity", "stored_bytes", "version", "contributed_worker_ids", "missing_worker_ids", "unknown_worker_count", "counted_row_count", "duplicate_part_count", "learning_rate", "loading", "load_id", "incarnation", "done_worker_ids", "wait", "members", "ended", "abandoned_for_s", "marked", "late_part_count", "lost_member_count")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DONE_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FOR_S_FIELD_NUMBER: _ClassVar[int]
    MARKED_FIELD_NUMBER: _ClassVar[int]
    LATE_PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    spec: TableSpec
    row_count: int
    row_capacity: int
    stored_bytes: int
    version: int
    contributed_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    missing_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    unknown_worker_count: int
    counted_row_count: int
    duplicate_part_count: int
    learning_rate: float
    loading: bool
    load_id: int
    incarnation: int
    done_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    wait: _types_pb2.StepWait
    members: _containers.RepeatedCompositeFieldContainer[_types_pb2.MemberStatus]
    ended: bool
    abandoned_for_s: float
    marked: bool
    late_part_count: int
    lost_member_count: int
    def __init__(self, spec: _Optional[_Union[TableSpec, _Mapping]] = ..., row_count: _Optional[int] = ..., row_capacity: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., version: _Optional[int] = ..., contributed_worker_ids: _Optional[_Iterable[str]] = ..., missing_worker_ids: _Optional[_Iterable[str]] = ..., unknown_worker_count: _Optional[int] = ..., counted_row_count: _Optional[int] = ..., duplicate_part_count: _Optional[int] = ..., learning_rate: _Optional[float] = ..., loading: bool = ..., load_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., done_worker_ids: _Optional[_Iterable[str]] = ..., wait: _Optional[_Union[_types_pb2.StepWait, _Mapping]] = ..., members: _Optional[_Iterable[_Union[_types_pb2.MemberStatus, _Mapping]]] = ..., ended: bool = ..., abandoned_for_s: _Optional[float] = ..., marked: bool = ..., late_part_count: _Optional[int] = ..., lost_member_count: _Optional[int] = ...) -> None: ...
