from shardwell.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ImageForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGE_FORM_UNSPECIFIED: _ClassVar[ImageForm]
    IMAGE_FORM_WHOLE: _ClassVar[ImageForm]
    IMAGE_FORM_CHANGE: _ClassVar[ImageForm]
    IMAGE_FORM_SAME: _ClassVar[ImageForm]
    IMAGE_FORM_MEAN: _ClassVar[ImageForm]
IMAGE_FORM_UNSPECIFIED: ImageForm
IMAGE_FORM_WHOLE: ImageForm
IMAGE_FORM_CHANGE: ImageForm
IMAGE_FORM_SAME: ImageForm
IMAGE_FORM_MEAN: ImageForm

class CreateParameterRequest(_message.Message):
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
    spec: _types_pb2.ParameterSpec
    take_seat: bool
    incarnation: int
    must_exist: bool
    session: int
    tenure: int
    begins_anew: bool
    from_step: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., worker_id: _Optional[str] = ..., spec: _Optional[_Union[_types_pb2.ParameterSpec, _Mapping]] = ..., take_seat: bool = ..., incarnation: _Optional[int] = ..., must_exist: bool = ..., session: _Optional[int] = ..., tenure: _Optional[int] = ..., begins_anew: bool = ..., from_step: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class CreateParameterResponse(_message.Message):
    __slots__ = ("created", "slice_offset", "slice_size", "chunk_element_count", "version", "next_step", "initialized", "init_epoch", "incarnation", "begun", "took_over", "tenure", "has_seat", "version_max", "needed_step", "rank", "ranked_count", "cuts_blocks", "crc32c")
    CREATED_FIELD_NUMBER: _ClassVar[int]
    SLICE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLICE_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    INIT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    TOOK_OVER_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    HAS_SEAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    NEEDED_STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CUTS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    created: bool
    slice_offset: int
    slice_size: int
    chunk_element_count: int
    version: int
    next_step: int
    initialized: bool
    init_epoch: int
    incarnation: int
    begun: bool
    took_over: bool
    tenure: int
    has_seat: bool
    version_max: int
    needed_step: int
    rank: int
    ranked_count: int
    cuts_blocks: bool
    crc32c: int
    def __init__(self, created: bool = ..., slice_offset: _Optional[int] = ..., slice_size: _Optional[int] = ..., chunk_element_count: _Optional[int] = ..., version: _Optional[int] = ..., next_step: _Optional[int] = ..., initialized: bool = ..., init_epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., begun: bool = ..., took_over: bool = ..., tenure: _Optional[int] = ..., has_seat: bool = ..., version_max: _Optional[int] = ..., needed_step: _Optional[int] = ..., rank: _Optional[int] = ..., ranked_count: _Optional[int] = ..., cuts_blocks: bool = ..., crc32c: _Optional[int] = ...) -> None: ...

class ClaimInitRequest(_message.Message):
    __slots__ = ("shard", "parameter", "worker_id", "wait_timeout_ms", "above_epoch", "incarnation", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ABOVE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    worker_id: str
    wait_timeout_ms: int
    above_epoch: int
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., worker_id: _Optional[str] = ..., wait_timeout_ms: _Optional[int] = ..., above_epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ClaimInitResponse(_message.Message):
    __slots__ = ("initialized", "granted", "epoch", "version", "crc32c")
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    initialized: bool
    granted: bool
    epoch: int
    version: int
    crc32c: int
    def __init__(self, initialized: bool = ..., granted: bool = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class InitWeightsRequest(_message.Message):
    __slots__ = ("open", "epoch", "chunk", "version", "array_index", "learning_rate", "load_id", "array_count", "padding", "payload")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARRAY_INDEX_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAY_COUNT_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    open: _types_pb2.StreamOpen
    epoch: int
    chunk: _types_pb2.Chunk
    version: int
    array_index: int
    learning_rate: float
    load_id: int
    array_count: int
    padding: bytes
    payload: bytes
    def __init__(self, open: _Optional[_Union[_types_pb2.StreamOpen, _Mapping]] = ..., epoch: _Optional[int] = ..., chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ..., version: _Optional[int] = ..., array_index: _Optional[int] = ..., learning_rate: _Optional[float] = ..., load_id: _Optional[int] = ..., array_count: _Optional[int] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class InitWeightsResponse(_message.Message):
    __slots__ = ("version", "crc32c")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    version: int
    crc32c: int
    def __init__(self, version: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class StepOutcome(_message.Message):
    __slots__ = ("step", "late_chunk_indexes", "tenure_is_over", "version", "contributor_ids", "is_draining", "late_may_have_counted", "crc32c")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LATE_CHUNK_INDEXES_FIELD_NUMBER: _ClassVar[int]
    TENURE_IS_OVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTOR_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    LATE_MAY_HAVE_COUNTED_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    step: int
    late_chunk_indexes: _containers.RepeatedScalarFieldContainer[int]
    tenure_is_over: bool
    version: int
    contributor_ids: _containers.RepeatedScalarFieldContainer[str]
    is_draining: bool
    late_may_have_counted: bool
    crc32c: int
    def __init__(self, step: _Optional[int] = ..., late_chunk_indexes: _Optional[_Iterable[int]] = ..., tenure_is_over: bool = ..., version: _Optional[int] = ..., contributor_ids: _Optional[_Iterable[str]] = ..., is_draining: bool = ..., late_may_have_counted: bool = ..., crc32c: _Optional[int] = ...) -> None: ...

class ConfirmInitRequest(_message.Message):
    __slots__ = ("shard", "parameter", "epoch", "incarnation", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    epoch: int
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ConfirmInitResponse(_message.Message):
    __slots__ = ("version", "crc32c")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    version: int
    crc32c: int
    def __init__(self, version: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class PutGradientRequest(_message.Message):
    __slots__ = ("open", "gradient", "arena", "batch", "padding", "payload")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    open: _types_pb2.StreamOpen
    gradient: _types_pb2.GradientChunk
    arena: int
    batch: _containers.RepeatedScalarFieldContainer[bytes]
    padding: bytes
    payload: bytes
    def __init__(self, open: _Optional[_Union[_types_pb2.StreamOpen, _Mapping]] = ..., gradient: _Optional[_Union[_types_pb2.GradientChunk, _Mapping]] = ..., arena: _Optional[int] = ..., batch: _Optional[_Iterable[bytes]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PutGradientResponse(_message.Message):
    __slots__ = ("counted_chunk_count", "duplicate_chunk_count", "superseded", "outcome", "crc32c")
    COUNTED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    counted_chunk_count: int
    duplicate_chunk_count: int
    superseded: SupersededChunks
    outcome: StepOutcome
    crc32c: int
    def __init__(self, counted_chunk_count: _Optional[int] = ..., duplicate_chunk_count: _Optional[int] = ..., superseded: _Optional[_Union[SupersededChunks, _Mapping]] = ..., outcome: _Optional[_Union[StepOutcome, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SupersededChunks(_message.Message):
    __slots__ = ("step", "chunk_indexes", "crc32c")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEXES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    step: int
    chunk_indexes: _containers.RepeatedScalarFieldContainer[int]
    crc32c: int
    def __init__(self, step: _Optional[int] = ..., chunk_indexes: _Optional[_Iterable[int]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class GetWeightsRequest(_message.Message):
    __slots__ = ("shard", "parameter", "worker_id", "min_version", "wait_timeout_ms", "arena", "max_version", "incarnation", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    worker_id: str
    min_version: int
    wait_timeout_ms: int
    arena: int
    max_version: int
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., worker_id: _Optional[str] = ..., min_version: _Optional[int] = ..., wait_timeout_ms: _Optional[int] = ..., arena: _Optional[int] = ..., max_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class GetWeightsResponse(_message.Message):
    __slots__ = ("chunk", "version", "batch", "image", "padding", "payload")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    chunk: _types_pb2.Chunk
    version: int
    batch: _containers.RepeatedScalarFieldContainer[bytes]
    image: Image
    padding: bytes
    payload: bytes
    def __init__(self, chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ..., version: _Optional[int] = ..., batch: _Optional[_Iterable[bytes]] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("open", "gradient", "arena", "batch", "fetch", "close", "padding", "payload")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    open: _types_pb2.StreamOpen
    gradient: _types_pb2.GradientChunk
    arena: int
    batch: _containers.RepeatedScalarFieldContainer[bytes]
    fetch: WeightsFetch
    close: CloseStepRequest
    padding: bytes
    payload: bytes
    def __init__(self, open: _Optional[_Union[_types_pb2.StreamOpen, _Mapping]] = ..., gradient: _Optional[_Union[_types_pb2.GradientChunk, _Mapping]] = ..., arena: _Optional[int] = ..., batch: _Optional[_Iterable[bytes]] = ..., fetch: _Optional[_Union[WeightsFetch, _Mapping]] = ..., close: _Optional[_Union[CloseStepRequest, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WeightsFetch(_message.Message):
    __slots__ = ("min_version", "wait_timeout_ms", "in_arena", "max_version", "held_versions", "crc32c")
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    IN_ARENA_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    min_version: int
    wait_timeout_ms: int
    in_arena: bool
    max_version: int
    held_versions: _containers.RepeatedScalarFieldContainer[int]
    crc32c: int
    def __init__(self, min_version: _Optional[int] = ..., wait_timeout_ms: _Optional[int] = ..., in_arena: bool = ..., max_version: _Optional[int] = ..., held_versions: _Optional[_Iterable[int]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("form", "base_version", "crc32c")
    FORM_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    form: ImageForm
    base_version: int
    crc32c: int
    def __init__(self, form: _Optional[_Union[ImageForm, str]] = ..., base_version: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("chunk", "version", "batch", "counted", "closed", "superseded", "outcome", "image", "padding", "payload")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    chunk: _types_pb2.Chunk
    version: int
    batch: _containers.RepeatedScalarFieldContainer[bytes]
    counted: PutGradientResponse
    closed: CloseStepResponse
    superseded: SupersededChunks
    outcome: StepOutcome
    image: Image
    padding: bytes
    payload: bytes
    def __init__(self, chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ..., version: _Optional[int] = ..., batch: _Optional[_Iterable[bytes]] = ..., counted: _Optional[_Union[PutGradientResponse, _Mapping]] = ..., closed: _Optional[_Union[CloseStepResponse, _Mapping]] = ..., superseded: _Optional[_Union[SupersededChunks, _Mapping]] = ..., outcome: _Optional[_Union[StepOutcome, _Mapping]] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class CloseStepRequest(_message.Message):
    __slots__ = ("shard", "parameter", "step", "norm", "wait_timeout_ms", "incarnation", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    step: int
    norm: float
    wait_timeout_ms: int
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., step: _Optional[int] = ..., norm: _Optional[float] = ..., wait_timeout_ms: _Optional[int] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class CloseStepResponse(_message.Message):
    __slots__ = ("squares", "norm", "crc32c")
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    squares: _containers.RepeatedScalarFieldContainer[float]
    norm: float
    crc32c: int
    def __init__(self, squares: _Optional[_Iterable[float]] = ..., norm: _Optional[float] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("shard", "parameter", "version", "wait_timeout_ms", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    version: int
    wait_timeout_ms: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., version: _Optional[int] = ..., wait_timeout_ms: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("chunk", "version", "array_index", "array_count", "learning_rate", "samples", "state", "worker_id", "state_step", "state_page", "state_page_count", "padding", "payload")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARRAY_INDEX_FIELD_NUMBER: _ClassVar[int]
    ARRAY_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_PAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    chunk: _types_pb2.Chunk
    version: int
    array_index: int
    array_count: int
    learning_rate: float
    samples: bytes
    state: bytes
    worker_id: str
    state_step: int
    state_page: int
    state_page_count: int
    padding: bytes
    payload: bytes
    def __init__(self, chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ..., version: _Optional[int] = ..., array_index: _Optional[int] = ..., array_count: _Optional[int] = ..., learning_rate: _Optional[float] = ..., samples: _Optional[bytes] = ..., state: _Optional[bytes] = ..., worker_id: _Optional[str] = ..., state_step: _Optional[int] = ..., state_page: _Optional[int] = ..., state_page_count: _Optional[int] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class SetLearningRateRequest(_message.Message):
    __slots__ = ("shard", "parameter", "learning_rate", "from_step", "incarnation", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    learning_rate: float
    from_step: int
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., learning_rate: _Optional[float] = ..., from_step: _Optional[int] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SetLearningRateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("shard", "parameter", "step", "figures", "incarnation", "worker_id", "learner", "session", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    step: int
    figures: _containers.RepeatedCompositeFieldContainer[Figure]
    incarnation: int
    worker_id: str
    learner: LearnerProgress
    session: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., step: _Optional[int] = ..., figures: _Optional[_Iterable[_Union[Figure, _Mapping]]] = ..., incarnation: _Optional[int] = ..., worker_id: _Optional[str] = ..., learner: _Optional[_Union[LearnerProgress, _Mapping]] = ..., session: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Figure(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class LearnerProgress(_message.Message):
    __slots__ = ("inner_steps", "sample_count", "offered_count", "sent_bytes", "received_bytes", "hidden_s", "waited_s", "overdue_count", "kept_count")
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    OFFERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_COUNT_FIELD_NUMBER: _ClassVar[int]
    KEPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    inner_steps: int
    sample_count: int
    offered_count: int
    sent_bytes: int
    received_bytes: int
    hidden_s: float
    waited_s: float
    overdue_count: int
    kept_count: int
    def __init__(self, inner_steps: _Optional[int] = ..., sample_count: _Optional[int] = ..., offered_count: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., hidden_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., overdue_count: _Optional[int] = ..., kept_count: _Optional[int] = ...) -> None: ...

class LearnerStatus(_message.Message):
    __slots__ = ("worker_id", "progress", "ago_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    progress: LearnerProgress
    ago_s: float
    def __init__(self, worker_id: _Optional[str] = ..., progress: _Optional[_Union[LearnerProgress, _Mapping]] = ..., ago_s: _Optional[float] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetContributionsRequest(_message.Message):
    __slots__ = ("shard", "parameter", "step", "incarnation", "first_chunk_index", "crc32c")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    step: int
    incarnation: int
    first_chunk_index: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., step: _Optional[int] = ..., incarnation: _Optional[int] = ..., first_chunk_index: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class GetContributionsResponse(_message.Message):
    __slots__ = ("sets", "next_chunk_index", "crc32c")
    SETS_FIELD_NUMBER: _ClassVar[int]
    NEXT_CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    sets: _containers.RepeatedCompositeFieldContainer[ContributorSet]
    next_chunk_index: int
    crc32c: int
    def __init__(self, sets: _Optional[_Iterable[_Union[ContributorSet, _Mapping]]] = ..., next_chunk_index: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ContributorSet(_message.Message):
    __slots__ = ("chunk_indexes", "worker_ids")
    CHUNK_INDEXES_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    chunk_indexes: _containers.RepeatedScalarFieldContainer[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, chunk_indexes: _Optional[_Iterable[int]] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Dataset(_message.Message):
    __slots__ = ("name", "length", "seed", "shuffles")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SHUFFLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    length: int
    seed: int
    shuffles: bool
    def __init__(self, name: _Optional[str] = ..., length: _Optional[int] = ..., seed: _Optional[int] = ..., shuffles: bool = ...) -> None: ...

class DealSamplesRequest(_message.Message):
    __slots__ = ("shard", "parameter", "stage", "worker_id", "tenure", "dataset", "batch_size", "drop_last", "batch_count", "limit", "ranges", "step", "is_partial", "account", "incarnation", "whole_before", "rank", "next_step", "crc32c")
    class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STAGE_UNSPECIFIED: _ClassVar[DealSamplesRequest.Stage]
        STAGE_DEAL: _ClassVar[DealSamplesRequest.Stage]
        STAGE_RETURN: _ClassVar[DealSamplesRequest.Stage]
        STAGE_END: _ClassVar[DealSamplesRequest.Stage]
        STAGE_SETTLE: _ClassVar[DealSamplesRequest.Stage]
        STAGE_LOAD: _ClassVar[DealSamplesRequest.Stage]
        STAGE_LOOK: _ClassVar[DealSamplesRequest.Stage]
    STAGE_UNSPECIFIED: DealSamplesRequest.Stage
    STAGE_DEAL: DealSamplesRequest.Stage
    STAGE_RETURN: DealSamplesRequest.Stage
    STAGE_END: DealSamplesRequest.Stage
    STAGE_SETTLE: DealSamplesRequest.Stage
    STAGE_LOAD: DealSamplesRequest.Stage
    STAGE_LOOK: DealSamplesRequest.Stage
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    DROP_LAST_FIELD_NUMBER: _ClassVar[int]
    BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    stage: DealSamplesRequest.Stage
    worker_id: str
    tenure: int
    dataset: Dataset
    batch_size: int
    drop_last: bool
    batch_count: int
    limit: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    step: int
    is_partial: bool
    account: bytes
    incarnation: int
    whole_before: int
    rank: int
    next_step: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., stage: _Optional[_Union[DealSamplesRequest.Stage, str]] = ..., worker_id: _Optional[str] = ..., tenure: _Optional[int] = ..., dataset: _Optional[_Union[Dataset, _Mapping]] = ..., batch_size: _Optional[int] = ..., drop_last: bool = ..., batch_count: _Optional[int] = ..., limit: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., is_partial: bool = ..., account: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., whole_before: _Optional[int] = ..., rank: _Optional[int] = ..., next_step: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class DealSamplesResponse(_message.Message):
    __slots__ = ("batches", "again", "out_count", "unsettled", "ranges", "step", "carried", "data", "whole_before", "done_before", "free_count", "counted", "crc32c")
    class Batch(_message.Message):
        __slots__ = ("ranges",)
        RANGES_FIELD_NUMBER: _ClassVar[int]
        ranges: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, ranges: _Optional[_Iterable[int]] = ...) -> None: ...
    class Tenure(_message.Message):
        __slots__ = ("worker_id", "tenure")
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        TENURE_FIELD_NUMBER: _ClassVar[int]
        worker_id: str
        tenure: int
        def __init__(self, worker_id: _Optional[str] = ..., tenure: _Optional[int] = ...) -> None: ...
    class Counted(_message.Message):
        __slots__ = ("worker_id", "data", "ranges")
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        RANGES_FIELD_NUMBER: _ClassVar[int]
        worker_id: str
        data: str
        ranges: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, worker_id: _Optional[str] = ..., data: _Optional[str] = ..., ranges: _Optional[_Iterable[int]] = ...) -> None: ...
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    OUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DONE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    FREE_COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[DealSamplesResponse.Batch]
    again: DealSamplesResponse.Batch
    out_count: int
    unsettled: _containers.RepeatedCompositeFieldContainer[DealSamplesResponse.Tenure]
    ranges: _containers.RepeatedScalarFieldContainer[int]
    step: int
    carried: _containers.RepeatedScalarFieldContainer[int]
    data: str
    whole_before: int
    done_before: int
    free_count: int
    counted: _containers.RepeatedCompositeFieldContainer[DealSamplesResponse.Counted]
    crc32c: int
    def __init__(self, batches: _Optional[_Iterable[_Union[DealSamplesResponse.Batch, _Mapping]]] = ..., again: _Optional[_Union[DealSamplesResponse.Batch, _Mapping]] = ..., out_count: _Optional[int] = ..., unsettled: _Optional[_Iterable[_Union[DealSamplesResponse.Tenure, _Mapping]]] = ..., ranges: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., carried: _Optional[_Iterable[int]] = ..., data: _Optional[str] = ..., whole_before: _Optional[int] = ..., done_before: _Optional[int] = ..., free_count: _Optional[int] = ..., counted: _Optional[_Iterable[_Union[DealSamplesResponse.Counted, _Mapping]]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class KeepStateRequest(_message.Message):
    __slots__ = ("shard", "parameter", "stage", "worker_id", "step", "state", "pages", "incarnation", "crc32c")
    class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STAGE_UNSPECIFIED: _ClassVar[KeepStateRequest.Stage]
        STAGE_PUT: _ClassVar[KeepStateRequest.Stage]
        STAGE_GET: _ClassVar[KeepStateRequest.Stage]
        STAGE_LOAD: _ClassVar[KeepStateRequest.Stage]
        STAGE_PUT_PAGE: _ClassVar[KeepStateRequest.Stage]
        STAGE_GET_PAGE: _ClassVar[KeepStateRequest.Stage]
    STAGE_UNSPECIFIED: KeepStateRequest.Stage
    STAGE_PUT: KeepStateRequest.Stage
    STAGE_GET: KeepStateRequest.Stage
    STAGE_LOAD: KeepStateRequest.Stage
    STAGE_PUT_PAGE: KeepStateRequest.Stage
    STAGE_GET_PAGE: KeepStateRequest.Stage
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    parameter: str
    stage: KeepStateRequest.Stage
    worker_id: str
    step: int
    state: bytes
    pages: _containers.RepeatedScalarFieldContainer[bytes]
    incarnation: int
    crc32c: int
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., parameter: _Optional[str] = ..., stage: _Optional[_Union[KeepStateRequest.Stage, str]] = ..., worker_id: _Optional[str] = ..., step: _Optional[int] = ..., state: _Optional[bytes] = ..., pages: _Optional[_Iterable[bytes]] = ..., incarnation: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class KeepStateResponse(_message.Message):
    __slots__ = ("worker_id", "step", "state", "is_awaited", "pages", "missing", "crc32c")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IS_AWAITED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    step: int
    state: bytes
    is_awaited: bool
    pages: _containers.RepeatedScalarFieldContainer[bytes]
    missing: _containers.RepeatedScalarFieldContainer[int]
    crc32c: int
    def __init__(self, worker_id: _Optional[str] = ..., step: _Optional[int] = ..., state: _Optional[bytes] = ..., is_awaited: bool = ..., pages: _Optional[_Iterable[bytes]] = ..., missing: _Optional[_Iterable[int]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SamplesStatus(_message.Message):
    __slots__ = ("dataset", "epoch", "done_count", "out_count", "free_count", "left_out_count", "partial_count", "partial")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DONE_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FREE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    dataset: Dataset
    epoch: int
    done_count: int
    out_count: int
    free_count: int
    left_out_count: int
    partial_count: int
    partial: _containers.RepeatedCompositeFieldContainer[PartialSamples]
    def __init__(self, dataset: _Optional[_Union[Dataset, _Mapping]] = ..., epoch: _Optional[int] = ..., done_count: _Optional[int] = ..., out_count: _Optional[int] = ..., free_count: _Optional[int] = ..., left_out_count: _Optional[int] = ..., partial_count: _Optional[int] = ..., partial: _Optional[_Iterable[_Union[PartialSamples, _Mapping]]] = ...) -> None: ...

class PartialSamples(_message.Message):
    __slots__ = ("worker_id", "step", "ranges")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    step: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., step: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("identity_only", "parameter", "after", "crc32c", "wire_version")
    IDENTITY_ONLY_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    identity_only: bool
    parameter: str
    after: str
    crc32c: int
    wire_version: int
    def __init__(self, identity_only: bool = ..., parameter: _Optional[str] = ..., after: _Optional[str] = ..., crc32c: _Optional[int] = ..., wire_version: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("shard", "software_version", "uptime_s", "parameters", "stored_bytes", "received_payload_bytes", "sent_payload_bytes", "open_stream_count", "more", "arena_address", "arithmetic", "stream_address", "troubles", "resources", "crc32c", "wire_version", "settings")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAM_COUNT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    ARENA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    STREAM_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.ShardIdentity
    software_version: str
    uptime_s: float
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterStatus]
    stored_bytes: int
    received_payload_bytes: int
    sent_payload_bytes: int
    open_stream_count: int
    more: bool
    arena_address: str
    arithmetic: str
    stream_address: str
    troubles: _containers.RepeatedCompositeFieldContainer[Trouble]
    resources: Resources
    crc32c: int
    wire_version: int
    settings: ShardSettings
    def __init__(self, shard: _Optional[_Union[_types_pb2.ShardIdentity, _Mapping]] = ..., software_version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., parameters: _Optional[_Iterable[_Union[ParameterStatus, _Mapping]]] = ..., stored_bytes: _Optional[int] = ..., received_payload_bytes: _Optional[int] = ..., sent_payload_bytes: _Optional[int] = ..., open_stream_count: _Optional[int] = ..., more: bool = ..., arena_address: _Optional[str] = ..., arithmetic: _Optional[str] = ..., stream_address: _Optional[str] = ..., troubles: _Optional[_Iterable[_Union[Trouble, _Mapping]]] = ..., resources: _Optional[_Union[Resources, _Mapping]] = ..., crc32c: _Optional[int] = ..., wire_version: _Optional[int] = ..., settings: _Optional[_Union[ShardSettings, _Mapping]] = ...) -> None: ...

class ShardSettings(_message.Message):
    __slots__ = ("durability", "limits", "endings", "checkpoint_ago_s")
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENDINGS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_AGO_S_FIELD_NUMBER: _ClassVar[int]
    durability: str
    limits: _containers.RepeatedCompositeFieldContainer[LimitUse]
    endings: _containers.RepeatedCompositeFieldContainer[Ending]
    checkpoint_ago_s: float
    def __init__(self, durability: _Optional[str] = ..., limits: _Optional[_Iterable[_Union[LimitUse, _Mapping]]] = ..., endings: _Optional[_Iterable[_Union[Ending, _Mapping]]] = ..., checkpoint_ago_s: _Optional[float] = ...) -> None: ...

class LimitUse(_message.Message):
    __slots__ = ("name", "used", "most")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    used: int
    most: int
    def __init__(self, name: _Optional[str] = ..., used: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("kind", "name", "left_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    left_s: float
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., left_s: _Optional[float] = ...) -> None: ...

class Resources(_message.Message):
    __slots__ = ("cpu_s", "core_count", "memory_bytes", "disk_used_bytes", "disk_free_bytes", "disk_size_bytes")
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    CORE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    cpu_s: float
    core_count: int
    memory_bytes: int
    disk_used_bytes: int
    disk_free_bytes: int
    disk_size_bytes: int
    def __init__(self, cpu_s: _Optional[float] = ..., core_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., disk_used_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., disk_size_bytes: _Optional[int] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("name", "words", "section")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    words: str
    section: str
    def __init__(self, name: _Optional[str] = ..., words: _Optional[str] = ..., section: _Optional[str] = ...) -> None: ...

class ParameterStatus(_message.Message):
    __slots__ = ("spec", "slice_offset", "slice_size", "initialized", "version_min", "version_max", "contributed_worker_ids", "missing_worker_ids", "unknown_worker_count", "counted_chunk_count", "duplicate_chunk_count", "learning_rate", "contributed_worker_count", "missing_worker_count", "done_worker_ids", "load_id", "wait", "members", "ended", "abandoned_for_s", "marked", "late_chunk_count", "lost_member_count", "learners", "figures", "samples")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SLICE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLICE_SIZE_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTED_WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISSING_WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    DONE_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FOR_S_FIELD_NUMBER: _ClassVar[int]
    MARKED_FIELD_NUMBER: _ClassVar[int]
    LATE_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.ParameterSpec
    slice_offset: int
    slice_size: int
    initialized: bool
    version_min: int
    version_max: int
    contributed_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    missing_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    unknown_worker_count: int
    counted_chunk_count: int
    duplicate_chunk_count: int
    learning_rate: float
    contributed_worker_count: int
    missing_worker_count: int
    done_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    load_id: int
    wait: _types_pb2.StepWait
    members: _containers.RepeatedCompositeFieldContainer[_types_pb2.MemberStatus]
    ended: bool
    abandoned_for_s: float
    marked: bool
    late_chunk_count: int
    lost_member_count: int
    learners: _containers.RepeatedCompositeFieldContainer[LearnerStatus]
    figures: _containers.RepeatedCompositeFieldContainer[Figure]
    samples: _containers.RepeatedCompositeFieldContainer[SamplesStatus]
    def __init__(self, spec: _Optional[_Union[_types_pb2.ParameterSpec, _Mapping]] = ..., slice_offset: _Optional[int] = ..., slice_size: _Optional[int] = ..., initialized: bool = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., contributed_worker_ids: _Optional[_Iterable[str]] = ..., missing_worker_ids: _Optional[_Iterable[str]] = ..., unknown_worker_count: _Optional[int] = ..., counted_chunk_count: _Optional[int] = ..., duplicate_chunk_count: _Optional[int] = ..., learning_rate: _Optional[float] = ..., contributed_worker_count: _Optional[int] = ..., missing_worker_count: _Optional[int] = ..., done_worker_ids: _Optional[_Iterable[str]] = ..., load_id: _Optional[int] = ..., wait: _Optional[_Union[_types_pb2.StepWait, _Mapping]] = ..., members: _Optional[_Iterable[_Union[_types_pb2.MemberStatus, _Mapping]]] = ..., ended: bool = ..., abandoned_for_s: _Optional[float] = ..., marked: bool = ..., late_chunk_count: _Optional[int] = ..., lost_member_count: _Optional[int] = ..., learners: _Optional[_Iterable[_Union[LearnerStatus, _Mapping]]] = ..., figures: _Optional[_Iterable[_Union[Figure, _Mapping]]] = ..., samples: _Optional[_Iterable[_Union[SamplesStatus, _Mapping]]] = ...) -> None: ...
