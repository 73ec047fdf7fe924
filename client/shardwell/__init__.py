"""Shardwell: a sharded parameter server's client, for training code.

with shardwell.connect("127.0.0.1:7070,127.0.0.1:7071", worker_id="w0") as client:
    model = client.parameter("model", size=650, optimizer=shardwell.SGD(learning_rate=0.5))
    model.init(first_weights)
    weights = model.exchange(gradient)
"""

import importlib
import logging
import os
import sys
import typing

# Before gRPC is imported, which reads it then. Unset, one half of gRPC supports forks and the other
# does not: of children that want nothing of it a tenth is aborted (docs/adr/0003-threads.md).
if "grpc._cython.cygrpc" in sys.modules and "GRPC_ENABLE_FORK_SUPPORT" not in os.environ:
    logging.getLogger(__name__).warning(
        "grpc was imported before shardwell, which turned gRPC's support of forks on: processes "
        "that are forked beside a client, such as the workers of a DataLoader, log lines about "
        "it and may hang; import shardwell first, or set GRPC_ENABLE_FORK_SUPPORT=0 before the "
        "program starts"
    )
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Else it prints what befalls its connections, such as a shard's end ("Got goaway"), to standard
# error; of those that are waited for Shardwell tells.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from shardwell.checkpoint.export import ModelExport, TableExport, export_checkpoint
from shardwell.checkpoint.format import (
    Checkpoint,
    CheckpointFamily,
    CheckpointParameter,
    CheckpointTable,
)
from shardwell.checkpoint.steps import inspect_checkpoint
from shardwell.client import Client, connect
from shardwell.connection.tls import Tls
from shardwell.errors import (
    AccessDeniedError,
    ArgumentError,
    AuthenticationError,
    ClosedError,
    CollectiveMismatchError,
    CorruptChunkError,
    DeadlineError,
    DivergedError,
    ForkedError,
    GroupMismatchError,
    InitSupersededError,
    InternalError,
    LimitError,
    MembersAliveError,
    NonFiniteError,
    NotInitializedError,
    OtherIncarnationError,
    RankTakenError,
    SeatsTakenError,
    SessionEndedError,
    SessionUnknownError,
    ShardUnavailableError,
    ShardwellError,
    SpecMismatchError,
    StepOrderError,
    StorageError,
    UnknownParameterError,
    UnknownTableError,
    VersionMismatchError,
    WorkerIdInUseError,
    WorkerLostError,
    WorkersMissingError,
    WorkerUnreachableError,
    WrongShardError,
)
from shardwell.parameter.dealing import Batch
from shardwell.parameter.feedback import Outcome
from shardwell.parameter.open_exchange import OpenExchange
from shardwell.parameter.parameter import Parameter
from shardwell.placement.slices import Slice, slice_of
from shardwell.process.allocator import tune_malloc
from shardwell.process.spans import Traffic
from shardwell.rpc.shard_status import (
    LearnerStatus,
    MemberStatus,
    ParameterStatus,
    SamplesStatus,
    ShardStatus,
    TableStatus,
)
from shardwell.rpc.step_samples import StepSamples
from shardwell.specs.fragments import Fragment
from shardwell.specs.grouped_rate import GroupedRate
from shardwell.specs.initializers import Initializer, Normal, Uniform, Zeros
from shardwell.specs.layout import TensorGroup, TensorLayout, TensorOptions, TensorSpec
from shardwell.specs.learner import LearnerProgress
from shardwell.specs.members import Elastic
from shardwell.specs.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Average,
    Optimizer,
    RMSProp,
    RowWiseAdagrad,
)
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.samples import Samples
from shardwell.specs.table import TableSpec
from shardwell.table.steps import RowOutcome
from shardwell.table.table import Table

if typing.TYPE_CHECKING:
    from shardwell.group.group import Group
    from shardwell.group.join import join_group
    from shardwell.group.schedule.strategies import Centralized, Ring, Strategy, Tree
    from shardwell.outer.outer import Outer
    from shardwell.training.batches import Update, merge_updates, split_batch
    from shardwell.training.gradient_sync import GradientSync, GroupSync, LocalSync, ServerSync
    from shardwell.training.leave_request import LeaveRequest
    from shardwell.training.thread_group import ThreadedSync
    from shardwell.training.trainer import DataParallelTrainer, StepResult

# What members of a group refuse one another is an error of theirs, to be seen by who asks for it.
# "shardwell" itself has no such handler: it has only what a person who waits wants to read, and a
# program without logging of its own prints its warnings, which is the standard library's default.
logging.getLogger("shardwell.group").addHandler(logging.NullHandler())

__version__ = "0.2.0"

_LATER = {
    "Centralized": "group.schedule.strategies",
    "DataParallelTrainer": "training.trainer",
    "GradientSync": "training.gradient_sync",
    "Group": "group.group",
    "GroupSync": "training.gradient_sync",
    "LeaveRequest": "training.leave_request",
    "LocalSync": "training.gradient_sync",
    "Outer": "outer.outer",
    "Ring": "group.schedule.strategies",
    "ServerSync": "training.gradient_sync",
    "StepResult": "training.trainer",
    "Strategy": "group.schedule.strategies",
    "ThreadedSync": "training.thread_group",
    "Tree": "group.schedule.strategies",
    "Update": "training.batches",
    "join_group": "group.join",
    "merge_updates": "training.batches",
    "split_batch": "training.batches",
}
"""The modules of the names that type checkers alone see above. They are imported on first use:
training with shards needs none of them, and they are a tenth of what an import takes."""

__all__ = [
    "FTRL",
    "SGD",
    "AccessDeniedError",
    "Adagrad",
    "Adam",
    "AdamW",
    "ArgumentError",
    "AuthenticationError",
    "Average",
    "Batch",
    "Centralized",
    "Checkpoint",
    "CheckpointFamily",
    "CheckpointParameter",
    "CheckpointTable",
    "Client",
    "ClosedError",
    "CollectiveMismatchError",
    "CorruptChunkError",
    "DataParallelTrainer",
    "DeadlineError",
    "DivergedError",
    "Elastic",
    "ForkedError",
    "Fragment",
    "GradientSync",
    "Group",
    "GroupMismatchError",
    "GroupSync",
    "GroupedRate",
    "InitSupersededError",
    "Initializer",
    "InternalError",
    "LearnerProgress",
    "LearnerStatus",
    "LeaveRequest",
    "LimitError",
    "LocalSync",
    "MemberStatus",
    "MembersAliveError",
    "ModelExport",
    "NonFiniteError",
    "Normal",
    "NotInitializedError",
    "OpenExchange",
    "Optimizer",
    "OtherIncarnationError",
    "Outcome",
    "Outer",
    "Parameter",
    "ParameterSpec",
    "ParameterStatus",
    "RMSProp",
    "RankTakenError",
    "Ring",
    "RowOutcome",
    "RowWiseAdagrad",
    "Samples",
    "SamplesStatus",
    "SeatsTakenError",
    "ServerSync",
    "SessionEndedError",
    "SessionUnknownError",
    "ShardStatus",
    "ShardUnavailableError",
    "ShardwellError",
    "Slice",
    "SpecMismatchError",
    "StepOrderError",
    "StepResult",
    "StepSamples",
    "StorageError",
    "Strategy",
    "Table",
    "TableExport",
    "TableSpec",
    "TableStatus",
    "TensorGroup",
    "TensorLayout",
    "TensorOptions",
    "TensorSpec",
    "ThreadedSync",
    "Tls",
    "Traffic",
    "Tree",
    "Uniform",
    "UnknownParameterError",
    "UnknownTableError",
    "Update",
    "VersionMismatchError",
    "WorkerIdInUseError",
    "WorkerLostError",
    "WorkerUnreachableError",
    "WorkersMissingError",
    "WrongShardError",
    "Zeros",
    "__version__",
    "connect",
    "export_checkpoint",
    "inspect_checkpoint",
    "join_group",
    "merge_updates",
    "slice_of",
    "split_batch",
    "tune_malloc",
]


if not typing.TYPE_CHECKING:  # to whom a module that has it has every name

    def __getattr__(name: str) -> typing.Any:
        module = _LATER.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
