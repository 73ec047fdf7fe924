"""A client: the connection of one worker to one cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shardwell.checkpoint import Checkpoint
from shardwell.checkpointing import Checkpointing
from shardwell.closing import Closing
from shardwell.errors import ArgumentError, ClosedError
from shardwell.initializers import Initializer, Uniform
from shardwell.malloc import tune_malloc
from shardwell.names import check_name
from shardwell.opened import Opened
from shardwell.optimizers import Optimizer
from shardwell.parameter import Parameter
from shardwell.row_cache import CACHE_ROW_COUNT_MAX
from shardwell.row_lanes import IdleLanes
from shardwell.shards import connect_shards
from shardwell.specs import (
    SIZE_MAX,
    STEP_MAX,
    WORKER_COUNT_MAX,
    CodecName,
    ModeName,
    ParameterSpec,
)
from shardwell.table import Table
from shardwell.table_export import TableExport
from shardwell.table_spec import DIM_MAX, ROW_COUNT_MAX, TableSpec
from shardwell.traffic import Traffic
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.values import check_integer, check_timeout
from shardwell.watchdog import Watchdog

TARGET_VARIABLE = "SHARDWELL_SHARDS"
WORKER_ID_VARIABLE = "SHARDWELL_WORKER_ID"
_ASYNC_THREAD_COUNT = 8
_INITIALIZER = Uniform()


def connect(
    target: str | None = None,
    *,
    worker_id: str | None = None,
    cluster_id: str | None = None,
    timeout_s: float = 120.0,
    connect_timeout_s: float = 30.0,
    keep_freed_memory: bool = True,
) -> Client:
    """Connects to all shards of a cluster, waiting for those that are still starting.

    Args:
        target: "HOST:PORT,HOST:PORT", in the order of the shards. Default: $SHARDWELL_SHARDS.
        worker_id: This worker's name, unique in the cluster and the same after a restart, because
            gradients are told apart by it. Default: $SHARDWELL_WORKER_ID, else made of host name
            and process id, which will do for a worker that is never restarted.
        cluster_id: What the cluster must be called; default: what its shards say, if they agree.
        timeout_s: Bound of each later call, waiting for other workers included, and for a shard
            that died or is out of reach: until then the call goes on by itself when the shard is
            back. 120 s tolerates a slow worker and a shard's restart, and still ends.
        connect_timeout_s: How long shards are waited for, in all.
        keep_freed_memory: Tune glibc's allocator in this process, so that it keeps up to 64 MiB of
            freed memory; a third faster. See shardwell.malloc.

    Raises:
        ArgumentError: an argument can't be used.
        ShardUnavailableError: a shard did not answer in time; it is named.
        WrongShardError: an address leads to another shard or cluster than its place says.
    """
    if target is None:
        target = os.environ.get(TARGET_VARIABLE)
        if not target:
            raise ArgumentError(f"no target was given, and ${TARGET_VARIABLE} is not set")
    if worker_id is None:
        worker_id = os.environ.get(WORKER_ID_VARIABLE) or f"{socket.gethostname()}-{os.getpid()}"
    return Client(
        target,
        worker_id=check_name("worker_id", worker_id),
        cluster_id=None if cluster_id is None else check_name("cluster_id", cluster_id),
        timeout_s=check_timeout(timeout_s),
        connect_timeout_s=check_timeout(connect_timeout_s),
        keep_freed_memory=keep_freed_memory,
    )


class Client(Closing):
    """Made by `connect`. A context manager; any thread may use it."""

    def __init__(
        self,
        target: str,
        *,
        worker_id: str,
        cluster_id: str | None,
        timeout_s: float,
        connect_timeout_s: float,
        keep_freed_memory: bool,
    ) -> None:
        self.worker_id = worker_id
        """This worker's name."""
        self.traffic = Traffic()
        """Bytes moved so far."""
        if keep_freed_memory:
            tune_malloc()
        self._timeout_s = timeout_s
        self._shards = connect_shards(target, cluster_id=cluster_id, timeout_s=connect_timeout_s)
        self._watchdog = Watchdog()
        self._executor = ThreadPoolExecutor(_ASYNC_THREAD_COUNT, "shardwell-client")
        self._parameters = Opened[Parameter]()
        self._tables = Opened[Table]()
        self._idle_lanes = IdleLanes()
        self._closed = False

    @property
    def shard_count(self) -> int:
        """Shards of the cluster."""
        return len(self._shards.channels)

    @property
    def cluster_id(self) -> str:
        """Name of the cluster."""
        return self._shards.channels[0].identity.cluster_id

    def parameter(
        self,
        name: str,
        *,
        size: int,
        optimizer: Optimizer,
        worker_count: int = 1,
        codec: CodecName = "fp16",
        mode: ModeName = "sync",
        allow_non_finite: bool = False,
    ) -> Parameter:
        """Opens a parameter, creating it if it is new.

        Opening it again gives the same object, which has asked the shards anew for its `next_step`;
        after its `close`, a new one.

        Args:
            name: 1 to 128 letters, digits, `.`, `_`, `-`.
            size: Number of float32 elements, from 1.
            optimizer: The update rule on the shards: SGD, Adagrad, RMSProp, Adam, AdamW, Average.
            worker_count: Synchronous mode: how many workers make a step. Asynchronous mode has no
                use for it.
            codec: "fp32", "fp16" or "bf16", each also with "+lz4".
            mode: "sync" or "async".
            allow_non_finite: Let NaN and infinity through instead of refusing them.

        Raises:
            SpecMismatchError: it exists with another spec; the message lists the differences.
            ShardUnavailableError: a shard did not come back within the client's `timeout_s`.
            ArgumentError, LimitError: it can't be made.
        """
        self._check_open()
        spec = ParameterSpec(
            name=name,
            size=check_integer("size", size, 1, SIZE_MAX),
            optimizer=optimizer,
            worker_count=(
                check_integer("worker_count", worker_count, 1, WORKER_COUNT_MAX)
                if mode == "sync"
                else 0
            ),
            codec=codec,
            mode=mode,
            allow_non_finite=allow_non_finite,
        )
        known = self._parameters.find(name)
        if known is not None and known.spec == spec:
            known.reopen()
            return known
        made = Parameter(
            spec,
            self._shards,
            worker_id=self.worker_id,
            timeout_s=self._timeout_s,
            watchdog=self._watchdog,
            executor=self._executor,
            traffic=self.traffic,
        )
        return self._parameters.keep(name, made)

    def table(
        self,
        name: str,
        *,
        row_count: int | None,
        dim: int,
        optimizer: Optimizer,
        initializer: Initializer = _INITIALIZER,
        worker_count: int = 1,
        codec: CodecName = "fp16",
        mode: ModeName = "sync",
        allow_non_finite: bool = False,
        cache_row_count: int = 0,
        cache_staleness_steps: int = 1,
    ) -> Table:
        """Opens a table, creating it if it is new: a matrix whose rows are spread over the shards.

        Opening it again gives the same object, which has asked the shards anew for its `next_step`;
        after its `close`, a new one.

        Args:
            name: 1 to 128 letters, digits, `.`, `_`, `-`. A parameter may have the same.
            row_count: Ids are 0 to row_count - 1, at most 2^62; None: any 64-bit integer is one.
                Only rows that have had a gradient take room.
            dim: Values of a row, 1 to 65536.
            optimizer: The update rule of rows that have a gradient: SGD, Adagrad, RowWiseAdagrad,
                Adam, AdamW, FTRL.
            initializer: What a row is before its first gradient: Zeros, Uniform (from -0.05 to
                0.05 by default), Normal; the same on any cluster.
            worker_count: See `parameter`.
            codec: See `parameter`.
            mode: See `parameter`.
            allow_non_finite: See `parameter`.
            cache_row_count: Rows that this worker keeps, so as not to fetch them again; 0 (default)
                keeps none. Takes 4 * dim bytes a row.
            cache_staleness_steps: How many steps of this worker's a row that it keeps is used for
                after the one in which it was fetched. A row that it sends a gradient for is
                fetched again; what other workers do to a row is seen so many steps later. Two
                calls of `get_rows` without a gradient between them are two steps. Without
                cache_row_count there is no use for it.

        Raises:
            SpecMismatchError: it exists with another spec; the message lists the differences.
            StepOrderError: a shard has lost what the others have.
            ShardUnavailableError: a shard did not come back within the client's `timeout_s`.
            ArgumentError, LimitError: it can't be made.
        """
        self._check_open()
        spec = TableSpec(
            name=name,
            row_count=(
                None
                if row_count is None
                else check_integer("row_count", row_count, 1, ROW_COUNT_MAX)
            ),
            dim=check_integer("dim", dim, 1, DIM_MAX),
            optimizer=optimizer,
            initializer=initializer,
            worker_count=(
                check_integer("worker_count", worker_count, 1, WORKER_COUNT_MAX)
                if mode == "sync"
                else 0
            ),
            codec=codec,
            mode=mode,
            allow_non_finite=allow_non_finite,
        )
        caching = (
            check_integer("cache_row_count", cache_row_count, 0, CACHE_ROW_COUNT_MAX),
            check_integer("cache_staleness_steps", cache_staleness_steps, 0, STEP_MAX),
        )
        known = self._tables.find(name)
        if known is not None and known.spec == spec:
            if known.caching != caching:
                raise ArgumentError(
                    f"table {name!r} is open with cache_row_count and cache_staleness_steps "
                    f"{known.caching}; got {caching}; close it first"
                )
            known.reopen()
            return known
        made = Table(
            spec,
            self._shards,
            worker_id=self.worker_id,
            timeout_s=self._timeout_s,
            watchdog=self._watchdog,
            executor=self._executor,
            traffic=self.traffic,
            idle_lanes=self._idle_lanes,
            caching=caching,
        )
        return self._tables.keep(name, made)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        parameters: Sequence[str] | None = None,
        tables: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Checkpoint:
        """Writes parameters and tables with optimizer state to a directory, while training goes on.

        Each parameter and each table is taken at one version: what all of it on all shards was
        after the same step. Gradients of an open step are no part of it. Asynchronous ones have no
        such moment; their chunks and rows are taken one after another.

        Args:
            path: The directory, which must not exist; it appears when it is complete.
            parameters: Names; default: all that have first weights.
            tables: Names; default: all.
            timeout_s: Bound of all of it; default: the client's.

        Raises:
            ArgumentError: `path` exists.
            UnknownParameterError, UnknownTableError, NotInitializedError, NonFiniteError: one can't
                be saved.
            WorkersMissingError: chunks or rows stay behind others, because workers are missing.
            DeadlineError, ShardUnavailableError, StorageError: it can't be read or written.
        """
        return self._checkpointing(timeout_s).save(path, parameters, tables)

    def restore_checkpoint(
        self,
        path: str | os.PathLike[str],
        parameters: Sequence[str] | None = None,
        tables: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Checkpoint:
        """Creates what a checkpoint has; the cluster may have any number of shards.

        To be called before workers open parameters and tables. They use the same specs as before,
        and go on at `next_step`. The whole checkpoint is verified first; then each parameter stands
        whole on all shards, or not at all. One with the optimizer Average has nothing that a next
        step could use; it begins anew. A table takes no gradients until it stands; if a restore is
        cut off, restore what does not stand yet again, by name.

        Args:
            path: The checkpoint's directory.
            parameters: Names; default: all.
            tables: Names; default: all.
            timeout_s: Bound of all of it; default: the client's.

        Raises:
            StorageError: the checkpoint is damaged or incomplete; nothing was sent.
            ArgumentError: a parameter has first weights, or a table has rows, already; or there is
                none in the checkpoint.
            SpecMismatchError: a parameter or table exists with another spec.
            LimitError, DeadlineError, ShardUnavailableError: a shard can't take it.
        """
        return self._checkpointing(timeout_s).restore(path, parameters, tables)

    def export_table(
        self, name: str, path: str | os.PathLike[str], *, timeout_s: float | None = None
    ) -> TableExport:
        """Writes a table's ids and rows, sorted by id, to a file for other programs to read.

        All rows are of one version, as in a checkpoint; rows without a gradient are not in it.

        Args:
            name: The table; it need not be open here.
            path: Ends in .safetensors ("ids" and "rows") or .parquet ("id" and "vector"; needs the
                extra `parquet`). Must not exist; it appears when it is complete. Beside it there
                must be room for it and for a checkpoint of the table.
            timeout_s: Bound of all of it; default: the client's.

        Raises:
            ArgumentError: `path` exists, ends otherwise, or needs pyarrow, which is missing.
            UnknownTableError: there is no such table.
            WorkersMissingError, DeadlineError, ShardUnavailableError, StorageError: as with
                `save_checkpoint`.
        """
        return self._checkpointing(timeout_s).export_table(name, path)

    def _checkpointing(self, timeout_s: float | None) -> Checkpointing:
        self._check_open()
        return Checkpointing(
            self._shards,
            worker_id=self.worker_id,
            traffic=self.traffic,
            timeout_s=check_timeout(self._timeout_s if timeout_s is None else timeout_s),
        )

    def status(self, *, timeout_s: float = 5.0) -> list[pb.GetStatusResponse]:
        """What each shard says of itself, in order; one that is away is not waited for.

        Raises:
            ShardUnavailableError, DeadlineError: a shard does not answer; it is named.
        """
        self._check_open()
        return [
            channel.call(
                "GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, timeout_s=timeout_s
            )
            for channel in self._shards.channels
        ]

    def close(self) -> None:
        """Ends all connections; other threads' calls end with ClosedError. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._parameters.close()
        self._tables.close()
        self._idle_lanes.close()
        self._shards.close()
        self._executor.shutdown()
        self._watchdog.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the client was closed; connect again")
