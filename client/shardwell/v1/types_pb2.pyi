from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_FP32: _ClassVar[Codec]
    CODEC_FP16: _ClassVar[Codec]
    CODEC_BF16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_UNSPECIFIED: _ClassVar[Compression]
    COMPRESSION_NONE: _ClassVar[Compression]
    COMPRESSION_LZ4: _ClassVar[Compression]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_SYNC: _ClassVar[Mode]
    MODE_ASYNC: _ClassVar[Mode]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_SEATED: _ClassVar[MemberState]
    MEMBER_STATE_AWAITED: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]
    MEMBER_STATE_OVER: _ClassVar[MemberState]
    MEMBER_STATE_LOST: _ClassVar[MemberState]

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_TCP: _ClassVar[Transport]
    TRANSPORT_UNIX: _ClassVar[Transport]
    TRANSPORT_SHARED_MEMORY: _ClassVar[Transport]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_CODE_NON_FINITE: _ClassVar[ErrorCode]
    ERROR_CODE_CORRUPT_CHUNK: _ClassVar[ErrorCode]
    ERROR_CODE_SPEC_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_PARAMETER: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_INITIALIZED: _ClassVar[ErrorCode]
    ERROR_CODE_INIT_SUPERSEDED: _ClassVar[ErrorCode]
    ERROR_CODE_WRONG_SHARD: _ClassVar[ErrorCode]
    ERROR_CODE_STEP_ORDER: _ClassVar[ErrorCode]
    ERROR_CODE_SEATS_TAKEN: _ClassVar[ErrorCode]
    ERROR_CODE_WORKERS_MISSING: _ClassVar[ErrorCode]
    ERROR_CODE_LIMIT_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_STOPPING: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_STORAGE: _ClassVar[ErrorCode]
    ERROR_CODE_GROUP_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_RANK_TAKEN: _ClassVar[ErrorCode]
    ERROR_CODE_WORKER_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_WORKER_UNREACHABLE: _ClassVar[ErrorCode]
    ERROR_CODE_COLLECTIVE_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_TABLE: _ClassVar[ErrorCode]
    ERROR_CODE_DIVERGED: _ClassVar[ErrorCode]
    ERROR_CODE_WORKER_ID_IN_USE: _ClassVar[ErrorCode]
    ERROR_CODE_SESSION_UNKNOWN: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_PERMISSION_DENIED: _ClassVar[ErrorCode]
    ERROR_CODE_SESSION_ENDED: _ClassVar[ErrorCode]
    ERROR_CODE_OTHER_INCARNATION: _ClassVar[ErrorCode]
    ERROR_CODE_VERSION_MISMATCH: _ClassVar[ErrorCode]
CODEC_UNSPECIFIED: Codec
CODEC_FP32: Codec
CODEC_FP16: Codec
CODEC_BF16: Codec
CODEC_INT8: Codec
COMPRESSION_UNSPECIFIED: Compression
COMPRESSION_NONE: Compression
COMPRESSION_LZ4: Compression
MODE_UNSPECIFIED: Mode
MODE_SYNC: Mode
MODE_ASYNC: Mode
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_SEATED: MemberState
MEMBER_STATE_AWAITED: MemberState
MEMBER_STATE_DRAINING: MemberState
MEMBER_STATE_OVER: MemberState
MEMBER_STATE_LOST: MemberState
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_TCP: Transport
TRANSPORT_UNIX: Transport
TRANSPORT_SHARED_MEMORY: Transport
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_ARGUMENT: ErrorCode
ERROR_CODE_NON_FINITE: ErrorCode
ERROR_CODE_CORRUPT_CHUNK: ErrorCode
ERROR_CODE_SPEC_MISMATCH: ErrorCode
ERROR_CODE_UNKNOWN_PARAMETER: ErrorCode
ERROR_CODE_NOT_INITIALIZED: ErrorCode
ERROR_CODE_INIT_SUPERSEDED: ErrorCode
ERROR_CODE_WRONG_SHARD: ErrorCode
ERROR_CODE_STEP_ORDER: ErrorCode
ERROR_CODE_SEATS_TAKEN: ErrorCode
ERROR_CODE_WORKERS_MISSING: ErrorCode
ERROR_CODE_LIMIT_EXCEEDED: ErrorCode
ERROR_CODE_STOPPING: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_STORAGE: ErrorCode
ERROR_CODE_GROUP_MISMATCH: ErrorCode
ERROR_CODE_RANK_TAKEN: ErrorCode
ERROR_CODE_WORKER_LOST: ErrorCode
ERROR_CODE_WORKER_UNREACHABLE: ErrorCode
ERROR_CODE_COLLECTIVE_MISMATCH: ErrorCode
ERROR_CODE_UNKNOWN_TABLE: ErrorCode
ERROR_CODE_DIVERGED: ErrorCode
ERROR_CODE_WORKER_ID_IN_USE: ErrorCode
ERROR_CODE_SESSION_UNKNOWN: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_PERMISSION_DENIED: ErrorCode
ERROR_CODE_SESSION_ENDED: ErrorCode
ERROR_CODE_OTHER_INCARNATION: ErrorCode
ERROR_CODE_VERSION_MISMATCH: ErrorCode

class ShardIdentity(_message.Message):
    __slots__ = ("cluster_id", "shard_index", "shard_count")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    shard_index: int
    shard_count: int
    def __init__(self, cluster_id: _Optional[str] = ..., shard_index: _Optional[int] = ..., shard_count: _Optional[int] = ...) -> None: ...

class Average(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sgd(_message.Message):
    __slots__ = ("learning_rate", "momentum", "dampening", "nesterov", "weight_decay")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    DAMPENING_FIELD_NUMBER: _ClassVar[int]
    NESTEROV_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    def __init__(self, learning_rate: _Optional[float] = ..., momentum: _Optional[float] = ..., dampening: _Optional[float] = ..., nesterov: bool = ..., weight_decay: _Optional[float] = ...) -> None: ...

class Adagrad(_message.Message):
    __slots__ = ("learning_rate", "epsilon", "initial_accumulator", "weight_decay")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    epsilon: float
    initial_accumulator: float
    weight_decay: float
    def __init__(self, learning_rate: _Optional[float] = ..., epsilon: _Optional[float] = ..., initial_accumulator: _Optional[float] = ..., weight_decay: _Optional[float] = ...) -> None: ...

class RmsProp(_message.Message):
    __slots__ = ("learning_rate", "decay", "epsilon", "momentum", "weight_decay")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    DECAY_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    decay: float
    epsilon: float
    momentum: float
    weight_decay: float
    def __init__(self, learning_rate: _Optional[float] = ..., decay: _Optional[float] = ..., epsilon: _Optional[float] = ..., momentum: _Optional[float] = ..., weight_decay: _Optional[float] = ...) -> None: ...

class Adam(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., epsilon: _Optional[float] = ..., weight_decay: _Optional[float] = ...) -> None: ...

class AdamW(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., epsilon: _Optional[float] = ..., weight_decay: _Optional[float] = ...) -> None: ...

class RowWiseAdagrad(_message.Message):
    __slots__ = ("learning_rate", "epsilon", "initial_accumulator", "weight_decay")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    epsilon: float
    initial_accumulator: float
    weight_decay: float
    def __init__(self, learning_rate: _Optional[float] = ..., epsilon: _Optional[float] = ..., initial_accumulator: _Optional[float] = ..., weight_decay: _Optional[float] = ...) -> None: ...

class Ftrl(_message.Message):
    __slots__ = ("learning_rate", "beta", "l1", "l2")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA_FIELD_NUMBER: _ClassVar[int]
    L1_FIELD_NUMBER: _ClassVar[int]
    L2_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta: float
    l1: float
    l2: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta: _Optional[float] = ..., l1: _Optional[float] = ..., l2: _Optional[float] = ...) -> None: ...

class Optimizer(_message.Message):
    __slots__ = ("average", "sgd", "adagrad", "rms_prop", "adam", "adam_w", "row_wise_adagrad", "ftrl", "clip_value", "clip_norm")
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    SGD_FIELD_NUMBER: _ClassVar[int]
    ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    RMS_PROP_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    ADAM_W_FIELD_NUMBER: _ClassVar[int]
    ROW_WISE_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    FTRL_FIELD_NUMBER: _ClassVar[int]
    CLIP_VALUE_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    average: Average
    sgd: Sgd
    adagrad: Adagrad
    rms_prop: RmsProp
    adam: Adam
    adam_w: AdamW
    row_wise_adagrad: RowWiseAdagrad
    ftrl: Ftrl
    clip_value: float
    clip_norm: float
    def __init__(self, average: _Optional[_Union[Average, _Mapping]] = ..., sgd: _Optional[_Union[Sgd, _Mapping]] = ..., adagrad: _Optional[_Union[Adagrad, _Mapping]] = ..., rms_prop: _Optional[_Union[RmsProp, _Mapping]] = ..., adam: _Optional[_Union[Adam, _Mapping]] = ..., adam_w: _Optional[_Union[AdamW, _Mapping]] = ..., row_wise_adagrad: _Optional[_Union[RowWiseAdagrad, _Mapping]] = ..., ftrl: _Optional[_Union[Ftrl, _Mapping]] = ..., clip_value: _Optional[float] = ..., clip_norm: _Optional[float] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    options: TensorOptions
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., options: _Optional[_Union[TensorOptions, _Mapping]] = ...) -> None: ...

class TensorOptions(_message.Message):
    __slots__ = ("learning_rate_factor", "weight_decay", "frozen", "rate_group")
    LEARNING_RATE_FACTOR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    RATE_GROUP_FIELD_NUMBER: _ClassVar[int]
    learning_rate_factor: float
    weight_decay: float
    frozen: bool
    rate_group: int
    def __init__(self, learning_rate_factor: _Optional[float] = ..., weight_decay: _Optional[float] = ..., frozen: bool = ..., rate_group: _Optional[int] = ...) -> None: ...

class TensorLayout(_message.Message):
    __slots__ = ("tensors", "packed")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    packed: PackedTensors
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., packed: _Optional[_Union[PackedTensors, _Mapping]] = ...) -> None: ...

class PackedTensors(_message.Message):
    __slots__ = ("lz4", "size_bytes")
    LZ4_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    lz4: bytes
    size_bytes: int
    def __init__(self, lz4: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ElasticMembers(_message.Message):
    __slots__ = ("min_count", "max_count", "member_return_s", "member_lease_s", "reference_count")
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_RETURN_S_FIELD_NUMBER: _ClassVar[int]
    MEMBER_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    min_count: int
    max_count: int
    member_return_s: float
    member_lease_s: float
    reference_count: int
    def __init__(self, min_count: _Optional[int] = ..., max_count: _Optional[int] = ..., member_return_s: _Optional[float] = ..., member_lease_s: _Optional[float] = ..., reference_count: _Optional[int] = ...) -> None: ...

class ParameterSpec(_message.Message):
    __slots__ = ("name", "size", "codec", "compression", "mode", "worker_count", "optimizer", "allow_non_finite", "layout", "members", "min_contributors", "grace_s", "fragment", "cuts_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MIN_CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    CUTS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    codec: Codec
    compression: Compression
    mode: Mode
    worker_count: int
    optimizer: Optimizer
    allow_non_finite: bool
    layout: TensorLayout
    members: ElasticMembers
    min_contributors: int
    grace_s: float
    fragment: Fragment
    cuts_blocks: bool
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., codec: _Optional[_Union[Codec, str]] = ..., compression: _Optional[_Union[Compression, str]] = ..., mode: _Optional[_Union[Mode, str]] = ..., worker_count: _Optional[int] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., allow_non_finite: bool = ..., layout: _Optional[_Union[TensorLayout, _Mapping]] = ..., members: _Optional[_Union[ElasticMembers, _Mapping]] = ..., min_contributors: _Optional[int] = ..., grace_s: _Optional[float] = ..., fragment: _Optional[_Union[Fragment, _Mapping]] = ..., cuts_blocks: bool = ...) -> None: ...

class Fragment(_message.Message):
    __slots__ = ("family", "index", "count", "assignment")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    family: str
    index: int
    count: int
    assignment: str
    def __init__(self, family: _Optional[str] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., assignment: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("chunk_index", "element_offset", "element_count", "crc32c", "lz4", "shared")
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    LZ4_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    chunk_index: int
    element_offset: int
    element_count: int
    crc32c: int
    lz4: bool
    shared: Shared
    def __init__(self, chunk_index: _Optional[int] = ..., element_offset: _Optional[int] = ..., element_count: _Optional[int] = ..., crc32c: _Optional[int] = ..., lz4: bool = ..., shared: _Optional[_Union[Shared, _Mapping]] = ...) -> None: ...

class Shared(_message.Message):
    __slots__ = ("offset", "size")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    size: int
    def __init__(self, offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class StepWait(_message.Message):
    __slots__ = ("open_for_s", "workers")
    OPEN_FOR_S_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    open_for_s: float
    workers: _containers.RepeatedCompositeFieldContainer[MissingWorker]
    def __init__(self, open_for_s: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[MissingWorker, _Mapping]]] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("worker_id", "next_step", "lag_s", "idle_s", "state", "from_step", "counted_chunk_count", "late_chunk_count", "host", "pid", "connected", "software_version", "transports")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    COUNTED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LATE_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    next_step: int
    lag_s: float
    idle_s: float
    state: MemberState
    from_step: int
    counted_chunk_count: int
    late_chunk_count: int
    host: str
    pid: int
    connected: bool
    software_version: str
    transports: _containers.RepeatedScalarFieldContainer[Transport]
    def __init__(self, worker_id: _Optional[str] = ..., next_step: _Optional[int] = ..., lag_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., state: _Optional[_Union[MemberState, str]] = ..., from_step: _Optional[int] = ..., counted_chunk_count: _Optional[int] = ..., late_chunk_count: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., connected: bool = ..., software_version: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[Transport, str]]] = ...) -> None: ...

class MissingWorker(_message.Message):
    __slots__ = ("worker_id", "host", "pid", "connected")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    host: str
    pid: int
    connected: bool
    def __init__(self, worker_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., connected: bool = ...) -> None: ...

class StreamOpen(_message.Message):
    __slots__ = ("shard", "parameter", "worker_id", "session", "tenure", "crc32c", "incarnation")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    shard: ShardIdentity
    parameter: str
    worker_id: str
    session: int
    tenure: int
    crc32c: int
    incarnation: int
    def __init__(self, shard: _Optional[_Union[ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., worker_id: _Optional[str] = ..., session: _Optional[int] = ..., tenure: _Optional[int] = ..., crc32c: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class GradientChunk(_message.Message):
    __slots__ = ("chunk", "step", "sample_count", "wait_timeout_ms", "end_of_step", "learning_rate", "counts_only", "after_refusal", "control_crc32c", "rate_factors", "held_version", "samples")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    END_OF_STEP_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    AFTER_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CONTROL_CRC32C_FIELD_NUMBER: _ClassVar[int]
    RATE_FACTORS_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    step: int
    sample_count: int
    wait_timeout_ms: int
    end_of_step: bool
    learning_rate: float
    counts_only: bool
    after_refusal: bool
    control_crc32c: int
    rate_factors: _containers.RepeatedScalarFieldContainer[float]
    held_version: int
    samples: StepSamples
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., step: _Optional[int] = ..., sample_count: _Optional[int] = ..., wait_timeout_ms: _Optional[int] = ..., end_of_step: bool = ..., learning_rate: _Optional[float] = ..., counts_only: bool = ..., after_refusal: bool = ..., control_crc32c: _Optional[int] = ..., rate_factors: _Optional[_Iterable[float]] = ..., held_version: _Optional[int] = ..., samples: _Optional[_Union[StepSamples, _Mapping]] = ...) -> None: ...

class StepSamples(_message.Message):
    __slots__ = ("data", "ranges")
    DATA_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    data: str
    ranges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[str] = ..., ranges: _Optional[_Iterable[int]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "shard_index", "parameter", "worker_id", "missing_worker_ids", "element_index", "rank", "missing_ranks", "table", "init_epoch", "free_in_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MISSING_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INIT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FREE_IN_MS_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    shard_index: int
    parameter: str
    worker_id: str
    missing_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    element_index: int
    rank: int
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    table: str
    init_epoch: int
    free_in_ms: int
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., shard_index: _Optional[int] = ..., parameter: _Optional[str] = ..., worker_id: _Optional[str] = ..., missing_worker_ids: _Optional[_Iterable[str]] = ..., element_index: _Optional[int] = ..., rank: _Optional[int] = ..., missing_ranks: _Optional[_Iterable[int]] = ..., table: _Optional[str] = ..., init_epoch: _Optional[int] = ..., free_in_ms: _Optional[int] = ...) -> None: ...
