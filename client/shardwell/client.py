"""A client: the connection of one worker to one cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypedDict, TypeVar, Unpack, overload

from shardwell.checkpoint.cluster import Cluster
from shardwell.checkpoint.export import TableExport, export_table
from shardwell.checkpoint.format import Checkpoint
from shardwell.checkpoint.restore import restore
from shardwell.checkpoint.save import save
from shardwell.connection.credentials import Credentials, TokenFileArgument
from shardwell.connection.tls import TlsArgument
from shardwell.errors import (
    ArgumentError,
    ShardwellError,
    SpecMismatchError,
    UnknownParameterError,
    UnknownTableError,
)
from shardwell.numerics.arguments import check_integer
from shardwell.parameter.opening import find_spec
from shardwell.parameter.parameter import LateName, Parameter, checked_late
from shardwell.parameter.values import NamedArrays
from shardwell.process.allocator import tune_malloc
from shardwell.process.connected import Closing, Connected
from shardwell.process.ending import is_in_order
from shardwell.process.environment import variable, warn_of_misspelt_variables
from shardwell.process.html_table import html_table
from shardwell.process.spans import Traffic
from shardwell.rpc.call_scope import CallScope
from shardwell.rpc.cluster import Shards, connect_shards
from shardwell.rpc.cluster_status import ClusterStatus, merged_members
from shardwell.rpc.deletion import Deletion, delete_family
from shardwell.rpc.members import ask_members, end_tenures, find_family
from shardwell.rpc.retry import Attempts
from shardwell.rpc.session import unique_worker_id
from shardwell.rpc.shard_channel import EXCHANGE, EXCHANGE_ROWS, ShardChannel
from shardwell.rpc.shard_status import MemberStatus, ShardStatus, ask_status
from shardwell.rpc.step_samples import StepSamples, samples_of_step
from shardwell.specs.checks import NotGiven
from shardwell.specs.deadlines import check_timeout
from shardwell.specs.fragments import Fragment, grouped
from shardwell.specs.initializers import Initializer, Uniform
from shardwell.specs.layout import SIZE_MAX, TensorGroup, TensorLayout
from shardwell.specs.members import Elastic
from shardwell.specs.names import check_name, neighbour
from shardwell.specs.optimizers import Optimizer
from shardwell.specs.parameter import (
    STEP_MAX,
    WORKER_COUNT_MAX,
    CodecName,
    ModeName,
    ParameterSpec,
    TrainingSpec,
)
from shardwell.specs.table import DIM_MAX, ROW_COUNT_MAX, TableSpec
from shardwell.steps.handle import Handle
from shardwell.steps.opening import Ranking
from shardwell.table.cache import CACHE_ROW_COUNT_MAX
from shardwell.table.opening import find_table_spec
from shardwell.table.table import Table
from shardwell.threads.asking import ask_all
from shardwell.threads.spread import thread_count
from shardwell.transport.arena import same_host_setting
from shardwell.transport.stream_pool import Connections, IdleStreams

_LOG = logging.getLogger("shardwell")
TARGET_VARIABLE = "SHARDWELL_SHARDS"
WORKER_ID_VARIABLE = "SHARDWELL_WORKER_ID"
_INITIALIZER = Uniform()
_END_STATE_S = 2.0
"""How long a client that ends waits for shard 0 to keep the state behind its last step."""
NOT_GIVEN = NotGiven.NOT_GIVEN
SpecT = TypeVar("SpecT", bound=TrainingSpec)

ResultT = TypeVar("ResultT")
OpenT = TypeVar("OpenT", bound=Handle[Any])


class _Options(TypedDict, total=False):
    optimizer: Optimizer | NotGiven
    worker_count: int | NotGiven
    members: Elastic | NotGiven
    min_contributors: int | NotGiven
    grace_s: float | NotGiven
    late: LateName
    codec: CodecName | NotGiven
    mode: ModeName | NotGiven
    allow_non_finite: bool | NotGiven
    fragment: Fragment | NotGiven


def connect(
    target: str | None = None,
    *,
    worker_id: str | None = None,
    cluster_id: str | None = None,
    timeout_s: float = 120.0,
    connect_timeout_s: float = 30.0,
    keep_freed_memory: bool = True,
    same_host: bool = True,
    threads: int | None = None,
    tls: TlsArgument = None,
    token_file: TokenFileArgument = None,
) -> Client:
    """Connects to all shards of a cluster, waiting for those that are still starting.

    Args:
        target: "HOST:PORT,HOST:PORT", in the order of the shards. Default: $SHARDWELL_SHARDS.
        worker_id: This worker's name, unique in the cluster and the same after a restart, because
            the shards tell its gradients from others' by it. While one process contributes under
            it, another one gets WorkerIdInUseError; a newer client of the same process takes over.
            Default: $SHARDWELL_WORKER_ID, else made of host name, process id
            and a random number, which will do for a worker that is never restarted.
        cluster_id: What the cluster must be called; default: what its shards say, if they agree.
        timeout_s: Bound of each later call, waiting for other workers included, and for a shard
            that died or is out of reach: until then the call goes on by itself when the shard is
            back. 120 s tolerates a slow worker and a shard's restart, and still ends.
        connect_timeout_s: How long shards are waited for, in all.
        keep_freed_memory: Tune glibc's allocator in this process, so that it keeps up to 64 MiB of
            freed memory; a third faster. See shardwell.process.allocator.
        same_host: Share memory with shards that run on this machine, under the same user, for
            large gradients and weights; in about 0.4 of the time, with the same bits. Without
            effect elsewhere. $SHARDWELL_SAME_HOST=off turns it off as well.
        threads: Threads that one call may use, its own among them, for gradients and weights of
            several megabytes: they look at values, encode and decode where cores are free. The bits
            do not depend on it. Default: $SHARDWELL_THREADS, else half as many as cores that this
            process may use, up to 8; 1 uses none beside the call's own.
        tls: `shardwell.Tls(...)`: what this worker proves itself with, and believes of shards.
            Default: the files that $SHARDWELL_TLS_CA, $SHARDWELL_TLS_CERT and $SHARDWELL_TLS_KEY
            name, and no TLS where none is set. False: no TLS.
        token_file: Path of a file that has this worker's token, for shards that refuse clients
            without one; `shardwell token create` writes it. Read again when it changes. Default:
            $SHARDWELL_TOKEN_FILE, and no token where that is not set. False: none. A token is sent
            over TLS, or to this machine.

    Raises:
        ArgumentError: an argument can't be used.
        AuthenticationError: TLS keeps the two sides apart, or the shards do not believe the token;
            says why, and what to give.
        ShardUnavailableError: a shard did not answer in time; it is named.
        WrongShardError: an address leads to another shard or cluster than its place says.

    Examples:
        >>> with shardwell.connect(worker_id="w0") as client:  # the shards of $SHARDWELL_SHARDS
        ...     client.shard_count
        2
    """
    __tracebackhide__ = True  # of notebooks and of pytest
    warn_of_misspelt_variables()
    if target is None:
        target = variable(TARGET_VARIABLE)
        if not target:
            raise ArgumentError(
                f"no target was given, and ${TARGET_VARIABLE} is not set: paste the line that "
                "`shardwell cluster` prints, or give the shards' addresses"
            )
    if worker_id is None:
        worker_id = variable(WORKER_ID_VARIABLE) or unique_worker_id()
    if keep_freed_memory:
        tune_malloc()
    timeout_s = check_timeout(timeout_s)
    shards = connect_shards(
        target,
        worker_id=check_name("worker_id", worker_id),
        cluster_id=None if cluster_id is None else check_name("cluster_id", cluster_id),
        timeout_s=check_timeout(connect_timeout_s, "connect_timeout_s"),
        same_host=same_host_setting(is_wanted=same_host) != "off",
        credentials=Credentials.of(tls, token_file),
        thread_count=thread_count(threads),
    )
    return Client(shards, timeout_s)


class Client(Connected, Closing):
    """A connection to all shards, made by `connect`: a context manager that any thread may use.

    Examples:
        >>> net = client.parameter("net", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init([1.0, 2.0, 3.0])
        >>> net.exchange(np.ones(3))
        array([0.5, 1.5, 2.5], dtype=float32)
    """

    def __init__(self, shards: Shards, timeout_s: float) -> None:
        self.worker_id = shards.worker_id
        """This worker's name."""
        self.traffic = Traffic()
        """Bytes moved so far."""
        self._timeout_s = timeout_s
        self._shards = shards
        shards.launched_rank = _launched_rank
        self._calls = CallScope(self._shards, timeout_s, "the client")
        self._at_step: dict[int, weakref.WeakSet[Handle[Any]]] = {}
        """Parameters and tables that came to be open at a step and are given none since."""
        self._at_step_lock = threading.Lock()
        self._parameters = _Opened[Parameter[Any]]()
        self._tables = _Opened[Table]()
        connections = Connections()
        self._idle_streams = IdleStreams(EXCHANGE, self._shards.channels, connections)
        self._idle_row_streams = IdleStreams(EXCHANGE_ROWS, self._shards.channels, connections)

    def __repr__(self) -> str:
        return f"Client({self.cluster_id!r}, {self.shard_count} shards, worker {self.worker_id!r})"

    def _repr_html_(self) -> str:
        rows = [(each.shard_index, each.address) for each in self._shards.channels]
        heading = f"worker {self.worker_id} of cluster {self.cluster_id}"
        return html_table(heading, ("shard", "address"), rows)

    @property
    def shard_count(self) -> int:
        """The number of shards in the cluster."""
        return len(self._shards.channels)

    @property
    def timeout_s(self) -> float:
        """The bound of each call that is given none."""
        return self._timeout_s

    @property
    def cluster_id(self) -> str:
        """The name of the cluster."""
        return self._shards.channels[0].identity.cluster_id

    @property
    def rank(self) -> int:
        """This worker's 0-based rank; rank 0 saves and evaluates. See `worker_count`.

            if client.rank == 0:
                client.save_checkpoint("runs/{step}")

        A launcher's rank counts (RANK of torchrun and `shardwell run`, mpirun's, srun's). Without
        one, shard 0 ranks workers in the order in which they take their seats in the first
        parameter or table that this client has opened; a worker that is started again under its id
        keeps its rank. The first call takes the seat, which the first gradient would.

        With elastic members shard 0 ranks the members of now, whatever the launcher says: 0 is the
        one that steps await longest. A rank changes when members change, so ask anew each time, and
        take a share of the data by `worker_id`, which stays.

        Raises:
            ArgumentError: no launcher has set a rank, and nothing is open that has ranks; or
                WORLD_SIZE is not the worker_count of what is open.
            NotInitializedError: what is open has no first weights yet.
            SeatsTakenError: worker_count other workers have seats.
            ShardwellError: a shard does not answer within `timeout_s`.
        """
        return self._ranking().rank

    @property
    def worker_count(self) -> int:
        """The number of workers: WORLD_SIZE, `worker_count`, or the elastic members of now.

        Raises:
            ShardwellError: see `rank`.
        """
        return self._ranking().worker_count

    def _ranking(self) -> Ranking:
        # Programs that ask for no rank need nothing of groups.
        from shardwell.group.launch import known_launcher

        opened: list[Handle[Any]] = [*self._parameters.all(), *self._tables.all()]
        opened = [each for each in opened if each.spec.mode == "sync"]
        for each in opened:
            if each.spec.members is not None:
                return each.ranking()
        launcher = known_launcher(os.environ)
        if launcher is None and not opened:
            raise ArgumentError(
                "no launcher has set this worker's rank, and this client has nothing open that has "
                "ranks; open a parameter with worker_count= or members= first, or set RANK and "
                "WORLD_SIZE for each worker, as torchrun and `shardwell run` do"
            )
        if launcher is None:
            return opened[0].ranking()
        count = opened[0].spec.worker_count if opened else launcher.size
        if count != launcher.size:
            raise ArgumentError(
                f"{launcher.source} started {launcher.size} workers, and {opened[0].kind} "
                f"{opened[0].name!r} has worker_count={count}: a rank of one is none of the other; "
                f"start {count} workers, or make it anew with worker_count={launcher.size}, or "
                "unset RANK and WORLD_SIZE for ranks by seats"
            )
        return Ranking(launcher.rank, launcher.size)

    @overload
    def parameter(
        self,
        name: str,
        *,
        tensors: Mapping[str, Any],
        groups: Sequence[TensorGroup] = (),
        **options: Unpack[_Options],
    ) -> Parameter[NamedArrays]: ...

    @overload
    def parameter(
        self,
        name: str,
        *,
        size: int,
        **options: Unpack[_Options],
    ) -> Parameter: ...

    @overload
    def parameter(self, name: str, **options: Unpack[_Options]) -> Parameter[Any]: ...

    def parameter(
        self,
        name: str,
        *,
        size: int | NotGiven = NOT_GIVEN,
        tensors: Mapping[str, Any] | NotGiven = NOT_GIVEN,
        groups: Sequence[TensorGroup] = (),
        optimizer: Optimizer | NotGiven = NOT_GIVEN,
        worker_count: int | NotGiven = NOT_GIVEN,
        members: Elastic | NotGiven = NOT_GIVEN,
        min_contributors: int | NotGiven = NOT_GIVEN,
        grace_s: float | NotGiven = NOT_GIVEN,
        late: LateName = "drop",
        codec: CodecName | NotGiven = NOT_GIVEN,
        mode: ModeName | NotGiven = NOT_GIVEN,
        allow_non_finite: bool | NotGiven = NOT_GIVEN,
        fragment: Fragment | NotGiven = NOT_GIVEN,
    ) -> Parameter[Any]:
        """Opens a parameter, creating it if it is new and all that it needs is given.

        With `size` or `tensors`, and `optimizer`, it is created if there is none, and the other
        arguments that are left out have their defaults. Without them it must exist; then its spec
        is what the shards hold, and arguments that are given must agree with that.

        Opening it again gives the same object, which has asked the shards anew for its `next_step`;
        after its `close`, a new one.

        Args:
            name: 1 to 128 letters, digits, `.`, `_`, `-`; not that of a table or family.
            size: Number of float32 elements, from 1, of one that is a single vector.
            tensors: Shapes by name, of one that has tensors, such as {"w": (20, 64), "b": (64,)};
                or what has shapes, as a model's weights have. They lie in the parameter in this
                order. Names are 1 to 256 printable characters.
            groups: Tensors that are updated in their own way; the first that fits one counts.
            optimizer: The update rule on the shards: any Optimizer but RowWiseAdagrad and FTRL.
            worker_count: Synchronous mode: how many workers make a step; default: 1. Asynchronous
                mode has no use for it.
            members: Synchronous mode, in place of worker_count: workers come and go, see `Elastic`.
            min_contributors: Synchronous mode: a chunk's step closes `grace_s` after so many
                gradients, without those that are missing then; default: 0, it waits for all.
            grace_s: See min_contributors; default: 0.
            late: What becomes of a gradient, or a part of one, whose step has closed without it.
                "drop" (default): nothing. "carry": this worker adds it to its next gradient, and
                keeps the memory of one for that. `Parameter.outcome` says which part it is.
            codec: "fp32", "fp16" (default) or "bf16", each also with "+lz4"; or "int8".
            mode: "sync" (default) or "async".
            allow_non_finite: Let NaN and infinity through instead of refusing them; default: False.
            fragment: Its number in a family of fragments; `Outer` sets it. Default: it is none.

        Raises:
            UnknownParameterError: there is none of that name, and no spec to create it.
            SpecMismatchError: it exists with another spec; the message lists the differences.
            ShardUnavailableError: a shard did not come back within the client's `timeout_s`.
            ArgumentError, LimitError: it can't be made.
        """
        given = _given(
            size=size,
            optimizer=optimizer,
            worker_count=worker_count,
            members=members,
            min_contributors=min_contributors,
            grace_s=grace_s,
            codec=codec,
            mode=mode,
            allow_non_finite=allow_non_finite,
            fragment=fragment,
        )
        if "size" in given:
            given["size"] = check_integer("size", given["size"], 1, SIZE_MAX)
        if not isinstance(tensors, NotGiven):
            given["layout"] = TensorLayout.of(tensors).with_groups(groups)
            given.setdefault("size", given["layout"].size)
        elif groups:
            raise ArgumentError("groups= are of tensors; pass tensors=, too")
        spec = self._spec(_PARAMETERS, _TABLES, name, given)
        known = self._parameters.find(name)
        if known is not None and known.spec == spec:
            known.late = checked_late(late)
            known.reopen()
            return self._gone_on_with(known)
        made = Parameter[Any](
            spec,
            self._shards,
            timeout_s=self._timeout_s,
            traffic=self.traffic,
            idle_streams=self._idle_streams,
            late=late,
        )
        return self._gone_on_with(self._parameters.keep(name, made))

    def table(
        self,
        name: str,
        *,
        row_count: int | NotGiven | None = NOT_GIVEN,
        dim: int | NotGiven = NOT_GIVEN,
        optimizer: Optimizer | NotGiven = NOT_GIVEN,
        initializer: Initializer | NotGiven = NOT_GIVEN,
        worker_count: int | NotGiven = NOT_GIVEN,
        members: Elastic | NotGiven = NOT_GIVEN,
        codec: CodecName | NotGiven = NOT_GIVEN,
        mode: ModeName | NotGiven = NOT_GIVEN,
        allow_non_finite: bool | NotGiven = NOT_GIVEN,
        cache_row_count: int | NotGiven = NOT_GIVEN,
        cache_staleness_steps: int | NotGiven = NOT_GIVEN,
    ) -> Table:
        """Opens a table, creating it if it is new: a matrix whose rows are spread over the shards.

        With `row_count`, `dim` and `optimizer` it is created if there is none, and the other
        arguments that are left out have their defaults. Without them it must exist; then its spec
        is what the shards hold, and arguments that are given must agree with that.

        Opening it again gives the same object, which has asked the shards anew for its `next_step`;
        after its `close`, a new one.

        Args:
            name: 1 to 128 letters, digits, `.`, `_`, `-`; not that of a parameter or family.
            row_count: Ids are 0 to row_count - 1, at most 2^62; None: any 64-bit integer is one.
                Only rows that have had a gradient take room.
            dim: Values of a row, 1 to 65536.
            optimizer: The update rule of rows that have a gradient: SGD, Adagrad, RowWiseAdagrad,
                Adam, AdamW, FTRL.
            initializer: What a row is before its first gradient: Zeros, Uniform (from -0.05 to
                0.05 by default), Normal; the same on any cluster.
            worker_count: See `parameter`.
            members: See `parameter`. A step's set is by shard: docs/tables.md.
            codec: See `parameter`.
            mode: See `parameter`.
            allow_non_finite: See `parameter`.
            cache_row_count: Rows that this worker keeps, so as not to fetch them again; 0 keeps
                none. Takes 4 * dim bytes a row. Default: 0, or as the table is open already.
            cache_staleness_steps: How many steps of this worker's a row that it keeps is used for
                after the one in which it was fetched; default: 1, or as the table is open already.
                A row that it sends a gradient for is fetched again; what other workers do to a row
                is seen at most so many steps later. Two calls of `get_rows` without a gradient
                between them are two steps. While a step that a call began and did not end is open,
                no rows are added. Without cache_row_count there is no use for it.

        Raises:
            UnknownTableError: there is none of that name, and no spec to create it.
            SpecMismatchError: it exists with another spec; the message lists the differences.
            OtherIncarnationError: a shard has lost what the others have.
            ShardUnavailableError: a shard did not come back within the client's `timeout_s`.
            ArgumentError, LimitError: it can't be made.
        """
        given = _given(
            row_count=row_count,
            dim=dim,
            optimizer=optimizer,
            initializer=initializer,
            worker_count=worker_count,
            members=members,
            codec=codec,
            mode=mode,
            allow_non_finite=allow_non_finite,
        )
        if given.get("row_count") is not None:
            given["row_count"] = check_integer("row_count", given["row_count"], 1, ROW_COUNT_MAX)
        if "dim" in given:
            given["dim"] = check_integer("dim", given["dim"], 1, DIM_MAX)
        if "optimizer" in given:
            given.setdefault("initializer", _INITIALIZER)
        spec = self._spec(_TABLES, _PARAMETERS, name, given)
        known = self._tables.find(name)
        row_count_kept, staleness_steps = known.caching if known is not None else (0, 1)
        if not isinstance(cache_row_count, NotGiven):
            row_count_kept = cache_row_count
        if not isinstance(cache_staleness_steps, NotGiven):
            staleness_steps = cache_staleness_steps
        caching = (
            check_integer("cache_row_count", row_count_kept, 0, CACHE_ROW_COUNT_MAX),
            check_integer("cache_staleness_steps", staleness_steps, 0, STEP_MAX),
        )
        if known is not None and known.spec == spec:
            if known.caching != caching:
                raise ArgumentError(
                    f"table {name!r} is open with cache_row_count and cache_staleness_steps "
                    f"{known.caching}; got {caching}; close it first"
                )
            known.reopen()
            return self._gone_on_with(known)
        made = Table(
            spec,
            self._shards,
            timeout_s=self._timeout_s,
            traffic=self.traffic,
            idle_streams=self._idle_row_streams,
            caching=caching,
        )
        return self._gone_on_with(self._tables.keep(name, made))

    def _gone_on_with(self, opened: OpenT) -> OpenT:
        """Has handles that were a step ahead at this worker's kill go back to that step."""
        opened.resume()
        if not opened.is_untouched:
            return opened
        step = opened.resumed_step
        with self._at_step_lock:  # few are a step apart: a call costs no more beside many others
            behind, ahead = (list(self._at_step.get(step + by, ())) for by in (-1, 1))
            self._at_step.setdefault(step, weakref.WeakSet()).add(opened)
        for other in behind:
            if opened.is_step_ahead_of(other):
                opened.give_again(other)
        for other in ahead:
            if other.is_step_ahead_of(opened):
                other.give_again(opened)
        return opened

    def _spec(
        self, kind: _Kind[SpecT], other: _Kind[Any], name: str, given: dict[str, Any]
    ) -> SpecT:
        """Returns the spec of what is opened: made of the arguments, or held by the shards."""
        self._shards.threads.owner.check()
        self._calls.check_open()
        if kind.needed <= given.keys():
            members = given.get("members")
            given.setdefault("worker_count", 1 if members is None else members.max_count)
            if given.get("mode", "sync") != "sync":
                given["worker_count"] = 0
            return kind.make(name=name, **given)
        found = self._calls.run(partial(kind.find, name, self._shards.channels))
        if found is not None:
            return _agreed(found, given, **{kind.name: name})
        namesake = self._calls.run(partial(other.find, name, self._shards.channels))
        is_other = "" if namesake is None else f" ({name!r} is a {other.name})"
        family = self._calls.run(partial(find_family, name, self._shards.channels))
        if family is not None:
            is_other = f" ({name!r} is a family of {family.count} fragments: open shardwell.Outer)"
        where: dict[str, Any] = {kind.name: name}
        raise kind.unknown_error(
            f"no shard has a {kind.name} {name!r}{is_other}; pass {kind.creates_with} to create "
            f"it, or open it when another worker has{self._neighbour(name)}",
            **where,
        )

    def delete(
        self,
        name: str,
        *,
        kind: str | None = None,
        force: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Deletes a parameter, table or family on all shards, with its files; the name is free.

        All fragments of a family are deleted, those that are there where some are missing.

        A deletion that was cut off, by the end of this process or of a shard, is finished by the
        same call, from any client; until then no client can open the name. Other workers of it get
        UnknownParameterError or UnknownTableError, which names who deleted it. Objects of this
        client for it are closed. It needs the right `admin`, or `create` and the token that made
        it.

        Args:
            name: Name of the parameter, table or family.
            kind: "parameter", "table" or "family", where an older version gave two the same name.
            force: Although workers are connected that use it. Default: they are an error, except
                this client itself.
            timeout_s: Bound of all of it; default: the client's.

        Returns:
            Bytes of weights and optimizer state that all shards stored of it.

        Raises:
            UnknownParameterError, UnknownTableError: no shard has it.
            MembersAliveError: workers use it; they are named. Nothing was deleted.
            AccessDeniedError: the token has no right to it.
            ShardUnavailableError, DeadlineError: a shard did not come back in time; call again.
            StorageError: a shard can't remove or note it; call again when its disk is well.
        """
        by: dict[str, Any] = {"worker_id": self.worker_id, "force": force}
        channels, names = self._shards.channels, [name]
        of_kind = None if kind == "family" else kind
        deletion = Deletion(name, of_kind, channels, **by)

        def delete(attempts: Attempts) -> int:
            if kind != "family":
                try:
                    return deletion.run(attempts)
                except UnknownParameterError:
                    family = None if kind else find_family(name, channels, attempts)
                    if family is None:
                        raise
            else:
                family = find_family(name, channels, attempts)
                if family is None:
                    raise UnknownParameterError(
                        f"no shard has a fragment of family {name!r}; nothing is left to delete",
                        parameter=name,
                    )
            names[:] = family.names
            return delete_family(family, channels, attempts, **by)

        freed_bytes = self._calls.run(delete, timeout_s)
        for each in names:
            for handle in self._close_handles(each, of_kind):
                handle.forget_membership()
        return freed_bytes

    def members(self, name: str, *, timeout_s: float | None = None) -> tuple[MemberStatus, ...]:
        """The workers with seats in a parameter, table or family, as all shards have them together.

        Those that take part first, by worker id. Counts of chunks are sums over the shards; the
        next step is the lowest of any, the state the one that is nearest to the end.

        Args:
            name: Name of the parameter, table or family.
            timeout_s: See `Client`.

        Raises:
            UnknownParameterError: no shard has anything of that name.
            ShardUnavailableError, DeadlineError: a shard does not answer.
        """
        found = self._calls.run(partial(ask_members, self._shards.channels, name), timeout_s)
        return merged_members(found)  # of a family, those of its fragments

    def step_samples(
        self, name: str, step: int, *, timeout_s: float | None = None
    ) -> list[StepSamples]:
        """The samples that a step of a parameter has, in the order in which its gradients came.

        Args:
            name: Name of the parameter, whose workers take `Parameter.batches`.
            step: The step; shard 0 knows the last 1,024, since it began.
            timeout_s: See `Client`.

        Raises:
            UnknownParameterError: there is no such parameter.
            StepOrderError: shard 0 does not know the step.
            ShardUnavailableError, DeadlineError: shard 0 does not answer.
        """
        number = check_integer("step", step, 0, STEP_MAX)
        look = partial(samples_of_step, check_name("name", name), number, self._shards.channels[0])
        return self._calls.run(look, timeout_s)

    def drain(
        self, worker_id: str, name: str | None = None, *, timeout_s: float | None = None
    ) -> list[str]:
        """Asks an elastic member to leave after its step, as before its machine is taken away.

        `is_draining` of the worker's Parameter or Table is true from its next gradient on:
        ServerOptimizer then ends as after SIGTERM, and any other loop looks there itself. Until it
        leaves, steps await it. A shard that is started again meanwhile has forgotten it; `members`
        shows who drains. It needs the right `admin`.

        Args:
            worker_id: The member.
            name: The parameter, table or family; None: all in which it takes part.
            timeout_s: See `Client`.

        Returns:
            Names of the parameters and tables.

        Raises:
            ArgumentError: the worker takes part in none of them, or that has a fixed crew.
            UnknownParameterError: no shard has anything of that name.
            AccessDeniedError: the token has no right to it.
            ShardUnavailableError, DeadlineError: a shard did not answer; call again.
        """
        return self._send_away(worker_id, name, timeout_s, drains=True)

    def remove_member(
        self, worker_id: str, name: str | None = None, *, timeout_s: float | None = None
    ) -> list[str]:
        """Ends an elastic member's tenure on all shards: no step awaits it from now on.

        For a worker that hangs, and lives all the same. What it sends in that tenure is late. It
        takes part anew with its next gradient, so end its process, or `drain` it. It needs the
        right `admin`.

        Args:
            worker_id: See `drain`.
            name: See `drain`.
            timeout_s: See `Client`.

        Returns:
            Names of the parameters and tables.

        Raises:
            ShardwellError: see `drain`.
        """
        return self._send_away(worker_id, name, timeout_s, drains=False)

    def _send_away(
        self, worker_id: str, name: str | None, timeout_s: float | None, *, drains: bool
    ) -> list[str]:
        send = partial(end_tenures, self._shards.channels, worker_id, name, drains=drains)
        return [each.name for each in self._calls.run(send, timeout_s)]

    def _close_handles(self, name: str, kind: str | None) -> list[Handle[Any]]:
        kinds: dict[str, _Opened[Any]] = {"parameter": self._parameters, "table": self._tables}
        found = [opened.find(name) for each, opened in kinds.items() if kind in (None, each)]
        closed = [one for one in found if one is not None]
        for one in closed:
            one.close()
        return closed

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        parameters: Sequence[str] | None = None,
        tables: Sequence[str] | None = None,
        *,
        keep: int | None = None,
        timeout_s: float | None = None,
    ) -> Checkpoint:
        """Writes parameters and tables with optimizer state to a directory, while training goes on.

        Each parameter and each table is taken at one version: what all of it on all shards was
        after the same step. Gradients of an open step are no part of it. Asynchronous ones have no
        such moment; their chunks and rows are taken one after another.

        Args:
            path: The directory, or s3://, gs:// or az:// of an object store (`shardwell[cloud]`),
                which must not exist; it appears when it is complete. With
                `{step}` in its name, as "ckpt/{step}", it is the newest version of what is saved,
                and replaces a checkpoint of the same step.
            parameters: Names, of families too; default: all that have first weights, if no tables
                are named.
            tables: Names; default: all, if no parameters are named.
            keep: With `{step}`: how many whole ones up to this one stay; older ones are removed.
                Default: all.
            timeout_s: Bound of all of it; default: the client's.

        Raises:
            ArgumentError: `path` exists, or a family lacks a fragment.
            UnknownParameterError, UnknownTableError, NotInitializedError, DivergedError: one can't
                be saved.
            WorkersMissingError: chunks or rows stay behind others, because workers are missing.
            DeadlineError, ShardUnavailableError, StorageError: it can't be read or written.
        """
        for each in self._parameters.all():  # as between two steps; else others bring theirs
            each.end_state(timeout_s=timeout_s)
        return self._with_cluster(
            lambda cluster: save(cluster, path, parameters, tables, keep=keep), timeout_s
        )

    def open_names(self) -> tuple[list[str], list[str]]:
        """Returns the names of the parameters and of the tables that this client has open.

        A family that has a fragment open is named once, in place of its fragments.
        """
        groups = grouped(self._parameters.all())
        return [*groups.alone, *groups.families], [each.name for each in self._tables.all()]

    def restore_checkpoint(
        self,
        path: str | os.PathLike[str],
        parameters: Sequence[str] | None = None,
        tables: Sequence[str] | None = None,
        *,
        names: Mapping[str, str] | None = None,
        worker_count: int | None = None,
        timeout_s: float | None = None,
    ) -> Checkpoint:
        """Creates what a checkpoint has; the cluster may have any number of shards.

        To be called before workers open parameters and tables. They use the same specs as before,
        and go on at `next_step`. The whole checkpoint is verified first; then each parameter is
        committed whole on all shards, or not at all. One with the optimizer Average has nothing
        that a next step could use; it begins anew. A table takes no gradients until it is
        committed. A restore that was cut off may be made again as it was: tables that it has
        finished already, and that nothing has changed since, are left as they are.

        Args:
            path: The checkpoint's directory; with `{step}` in its name, the newest whole one.
                `s3://`, `gs://` and `az://` as for `save_checkpoint`.
            parameters: Names in the checkpoint, of families too; default: all, if no tables are
                named.
            tables: Names in the checkpoint; default: all, if no parameters are named.
            names: New names, `{"old": "new"}`, of parameters, tables and families of these. Nothing
                may have a new name yet. Default: all keep their names.
            worker_count: The workers that make each step from now on, where a fixed number does.
                Default: as many as before. Samples of `Parameter.batches` go on where they were.
            timeout_s: Bound of all of it; default: the client's.

        Returns:
            The checkpoint as it is on the disk, with the names that it has there.

        Raises:
            StorageError: the checkpoint is damaged or incomplete; nothing was sent.
            ArgumentError: a parameter has first weights, or a table has other rows, already; or
                there is none in the checkpoint, or a fragment of its family is missing there; or
                `names` names what is not restored, or gives one name to two.
            SpecMismatchError: a parameter or table exists with another spec, or something of
                another kind has its name.
            LimitError, DeadlineError, ShardUnavailableError: a shard can't take it.
        """
        return self._with_cluster(
            lambda cluster: restore(cluster, path, parameters, tables, names, worker_count),
            timeout_s,
        )

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
        return self._with_cluster(lambda cluster: export_table(cluster, name, path), timeout_s)

    def _neighbour(self, name: str) -> str:
        held: list[str] = []
        with contextlib.suppress(ShardwellError):
            for shard in self.status():
                held += [parameter.spec.name for parameter in shard.parameters]
                held += [table.spec.name for table in shard.tables]
        return neighbour(name, held)

    def _with_cluster(self, do: Callable[[Cluster], ResultT], timeout_s: float | None) -> ResultT:
        def body(attempts: Attempts) -> ResultT:
            return do(
                Cluster(
                    channels=self._shards.channels,
                    worker_id=self.worker_id,
                    traffic=self.traffic,
                    attempts=attempts,
                )
            )

        return self._calls.run(body, timeout_s)

    def status(self, *, timeout_s: float = 5.0) -> list[ShardStatus]:
        """Returns what each shard says of itself and holds, in order; waits for no lost shard.

        Raises:
            ShardUnavailableError, DeadlineError: a shard does not answer; it is named.
        """

        def ask(attempts: Attempts) -> ClusterStatus:
            return ClusterStatus(
                ask_all(self._shards.channels, lambda channel: ask_status(channel, attempts.rest_s))
            )

        return self._calls.run(ask, timeout_s)

    def close(self) -> None:
        """Ends all connections; other threads' calls end with ClosedError. Safe to repeat.

        Another process may contribute under this worker's id from then on. Other workers that need
        this one for a step of a fixed `worker_count` have an error 1 s later, unless a process has
        connected under its id. An exception that ends a `with` block of the client closes it as
        the death of its process would: they wait for the worker to be started again.

        In a process that was forked from the one that connected, it does nothing.
        """
        self._close(ends_in_order=True, is_whole=True)

    def __exit__(self, *reason: object) -> None:
        self._close(ends_in_order=is_in_order(reason[1]), is_whole=reason[1] is None)

    def _close(self, *, ends_in_order: bool, is_whole: bool) -> None:
        """Ends all; `is_whole`: no error has cut off what the program does behind its last step."""
        if not self._shards.threads.owner.is_here:
            return  # what a fork inherited may be locked for good
        for parameter in self._parameters.all() if ends_in_order else ():
            if is_whole or parameter.spec.members is not None:  # a fixed crew makes it again
                try:
                    parameter.end_state(timeout_s=_END_STATE_S)
                except Exception as error:  # shards may have ended before, and an object may fail
                    _LOG.warning("what %r keeps was not kept at the end: %s", parameter.name, error)
        self._calls.close()
        self._parameters.close()
        self._tables.close()
        self._idle_streams.close()
        self._idle_row_streams.close()
        try:
            if ends_in_order:
                self._shards.end_session()
        finally:  # Ctrl-C comes there too
            self._shards.close()


def check_client(client: object) -> Client:
    """Returns `client`; ArgumentError: it is another object, such as a target."""
    if not isinstance(client, Client):
        raise ArgumentError(f"client must be made by shardwell.connect(...); got {client!r:.80}")
    return client


@dataclass(frozen=True)
class _Kind(Generic[SpecT]):
    name: str
    make: Callable[..., SpecT]
    find: Callable[[str, list[ShardChannel], Attempts], SpecT | None]
    unknown_error: type[ShardwellError]
    needed: frozenset[str]
    """The arguments that create one."""
    creates_with: str


_PARAMETERS = _Kind(
    "parameter",
    ParameterSpec,
    find_spec,
    UnknownParameterError,
    frozenset({"size", "optimizer"}),
    "size= or tensors= and optimizer=",
)
_TABLES = _Kind(
    "table",
    TableSpec,
    find_table_spec,
    UnknownTableError,
    frozenset({"row_count", "dim", "optimizer"}),
    "row_count=, dim= and optimizer=",
)


def _given(**arguments: Any) -> dict[str, Any]:
    given = {name: value for name, value in arguments.items() if value is not NOT_GIVEN}
    if "members" in given:
        if "worker_count" in given:
            raise ArgumentError(
                "worker_count= and members= both say who makes a step; give one of them"
            )
        if not isinstance(given["members"], Elastic):
            raise ArgumentError(f"members must be shardwell.Elastic; got {given['members']!r:.80}")
    if "worker_count" in given and given.get("mode", "sync") == "sync":
        given["worker_count"] = check_integer(
            "worker_count", given["worker_count"], 1, WORKER_COUNT_MAX
        )
    return given


def _agreed(stored: SpecT, given: dict[str, Any], **where: Any) -> SpecT:
    """Returns the stored spec; SpecMismatchError: the arguments do not agree with it."""
    differences = stored.differences(stored.with_given(given))
    if differences:
        ((what, name),) = where.items()
        raise SpecMismatchError(
            f"{what} {name!r} exists with another spec: {'; '.join(differences)}; open it with "
            f"the spec that exists or by its name alone, choose another name, or delete it first "
            f"(shardwell delete {name})",
            **where,
        )
    return stored


class _Opened(Generic[OpenT]):
    """The open handles of one kind by name. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, OpenT] = {}
        self._closed = False

    def find(self, name: str) -> OpenT | None:
        with self._lock:
            return self._open(name)

    def all(self) -> list[OpenT]:
        with self._lock:
            return [each for each in self._objects.values() if not each.is_closed]

    def keep(self, name: str, made: OpenT) -> OpenT:
        """Keeps what was made, except where another thread was faster; returns the kept one.

        One of another spec is of a deleted object, which had the name before.
        """
        with self._lock:
            found = self._open(name)
            is_same = found is not None and found.spec == made.spec
            kept = self._objects[name] = found if found is not None and is_same else made
            kept.on_close = partial(self._forget, name)
            closed = self._closed
        if closed:
            kept.close()
        return kept

    def close(self) -> None:
        with self._lock:
            self._closed = True
            objects = list(self._objects.values())
        for one in objects:
            one.close()

    def _forget(self, name: str) -> None:
        with self._lock:
            if name in self._objects and self._objects[name].is_closed:
                del self._objects[name]

    def _open(self, name: str) -> OpenT | None:
        found = self._objects.get(name)
        return None if found is None or found.is_closed else found


def _launched_rank(worker_count: int) -> int | None:
    from shardwell.group.launch import known_launcher

    with contextlib.suppress(ArgumentError):  # an MPI's that is not read
        launcher = known_launcher(os.environ)
        if launcher is not None and launcher.size == worker_count:
            return launcher.rank
    return None
