"""The status of a shard and of all that it holds, as values to read and print."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from shardwell.errors import CorruptChunkError, ShardwellError, WrongShardError
from shardwell.placement.ranges import NumberRanges
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.deadlines import TIMEOUT_S_MIN
from shardwell.specs.learner import LearnerProgress
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell.specs.wire_form import Form, Record
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import table_pb2, types_pb2

MemberState = Literal["seated", "awaited", "draining", "over", "lost", "unknown"]
MEMBER_STATES: dict[MemberState, types_pb2.MemberState] = {
    "seated": types_pb2.MEMBER_STATE_SEATED,
    "awaited": types_pb2.MEMBER_STATE_AWAITED,
    "draining": types_pb2.MEMBER_STATE_DRAINING,
    "over": types_pb2.MEMBER_STATE_OVER,
    "lost": types_pb2.MEMBER_STATE_LOST,
}
Transport = Literal["tcp", "unix", "shared memory"]
_TRANSPORTS: dict[types_pb2.Transport, Transport] = {
    types_pb2.TRANSPORT_TCP: "tcp",
    types_pb2.TRANSPORT_UNIX: "unix",
    types_pb2.TRANSPORT_SHARED_MEMORY: "shared memory",
}
_MEMBER_STATES = {state: word for word, state in MEMBER_STATES.items()}


@dataclass(frozen=True, kw_only=True)
class MissingWorker(Record[types_pb2.MissingWorker]):
    """A worker for whom a step waits, and where it is."""

    worker_id: str
    host: str
    """The machine of its process, or of the last one; empty: not known."""
    pid: int
    """0: not known."""
    connected: bool
    """True also for a process that computes, or was stopped."""

    def __str__(self) -> str:
        place = f"process {self.pid} on {self.host!r}" if self.pid else ""
        if not self.connected:
            place += ", not connected any more" if place else "not connected"
        return f"{self.worker_id!r} ({place})" if place else f"{self.worker_id!r}"


@dataclass(frozen=True, kw_only=True)
class StepWait(Record[types_pb2.StepWait]):
    """The workers for which an open step waits."""

    open_for_s: float | None
    """Seconds since the first contribution to it on the shard; None: there is none."""
    workers: tuple[MissingWorker, ...]
    """The missing workers; of very many, some."""

    FORMS: ClassVar[Mapping[str, Any]] = {"workers": MissingWorker}


@dataclass(frozen=True, kw_only=True)
class MemberStatus(Record[types_pb2.MemberStatus]):
    """A worker with a seat, and how it keeps up on one shard.

    Examples:
        >>> net = client.parameter(
        ...     "crew", size=3, optimizer=shardwell.SGD(lr=0.5), members=shardwell.Elastic()
        ... )
        >>> net.init(np.zeros(3))
        >>> net.join()
        >>> members = [
        ...     member
        ...     for shard in client.status()
        ...     for each in shard.parameters
        ...     if each.spec.name == "crew"
        ...     for member in each.members
        ... ]
        >>> members[0].worker_id, members[0].state
        ('w0', 'awaited')
    """

    worker_id: str
    """The worker's id."""
    next_step: int
    """The step that it is to contribute next, in its own count."""
    lag_s: float | None
    """In the last step that it contributed to, seconds from any worker's first contribution to
    its last; None: asynchronous mode, or it has not since the shard's process began."""
    idle_s: float | None
    """Seconds since its last contribution; None: the same."""
    state: MemberState
    """"seated": it joins and no step awaits it yet, or asynchronous mode; "awaited": steps await
    it; "draining": the same, and it was asked to leave; "over": it left, its client was closed, or
    another shard found it to be gone; "lost": this shard found that; "unknown": the shard does not
    say."""
    joined_at: int | None
    """The first step that awaits it, or did, of an elastic member; None: none does yet."""
    counted_chunk_count: int
    """Where steps may close without a worker: chunks of its gradients that counted, since it joined
    and the shard's process began."""
    late_chunk_count: int
    """The number of chunks that were late."""
    host: str = ""
    """Name of the machine where its process is, or was last; empty: the shard does not know it."""
    pid: int = 0
    """The process on that machine; 0: the shard does not know it."""
    connected: bool = False
    """Whether its client is connected."""
    software_version: str = ""
    """Version of its client's software; empty: it is not connected, or the client did not say."""
    transports: tuple[Transport, ...] = ()
    """How its gradients come: "shared memory", "unix" or "tcp"; several, where rows of
    tables come beside, or shards are on several machines; none: it has sent none since it
    connected."""

    FORMS: ClassVar[Mapping[str, Any]] = {
        "state": Form(lambda found: _MEMBER_STATES.get(found.state, "unknown")),
        "joined_at": Form(lambda found: found.from_step if found.HasField("from_step") else None),
        "transports": Form(
            lambda found: tuple(
                sorted({_TRANSPORTS[each] for each in found.transports if each in _TRANSPORTS})
            )
        ),
    }


@dataclass(frozen=True, kw_only=True)
class LearnerStatus(Record[pb.LearnerStatus]):
    """The last report of a learner in outer training.

    Examples:
        >>> [
        ...     learner.progress.inner_steps
        ...     for shard in client.status()
        ...     for parameter in shard.parameters
        ...     for learner in parameter.learners
        ... ]
        []
    """

    worker_id: str
    """The worker's id."""
    progress: LearnerProgress
    """What."""
    ago_s: float
    """Seconds since."""

    FORMS: ClassVar[Mapping[str, Any]] = {"progress": LearnerProgress}


@dataclass(frozen=True, kw_only=True)
class PartialSamples(Record[pb.PartialSamples]):
    """The samples of a gradient that has counted in some chunks, and will in no others."""

    worker_id: str
    step: int
    ranges: NumberRanges
    """Their positions: the first of each range, and the one behind its last."""

    FORMS: ClassVar[Mapping[str, Any]] = {
        "ranges": Form(
            lambda found: tuple(
                (start, start + size)
                for start, size in zip(found.ranges[::2], found.ranges[1::2], strict=False)
            )
        ),
    }


@dataclass(frozen=True, kw_only=True)
class SamplesStatus(Record[pb.SamplesStatus]):
    """The account of a dataset's samples: which of its epoch have counted.

    Examples:
        >>> net = client.parameter("account", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> batches = net.batches(shardwell.Samples(10, batch_size=4, shuffle=False), epochs=1)
        >>> weights = net.exchange(np.ones(3), batch=next(batches))
        >>> found = net.samples["train"]
        >>> found.epoch, found.done_count, found.free_count
        (0, 4, 6)
    """

    name: str
    """The name of the `Samples`."""
    length: int
    """Samples of the dataset."""
    epoch: int
    """The first epoch of which not all have counted, from 0."""
    done_count: int
    """Samples of it that have counted, or were left out."""
    out_count: int
    """Those that workers have, or that are in the open step. A fixed crew's are free until then."""
    free_count: int
    """The rest of it."""
    left_out_count: int
    """Samples of all epochs that were left out, as `drop_last` says."""
    partial_count: int
    """Gradients that have counted in some chunks, and will in no others, of all epochs."""
    partial: tuple[PartialSamples, ...]
    """The last of these, each with its samples."""

    FORMS: ClassVar[Mapping[str, Any]] = {
        "name": Form(lambda found: found.dataset.name),
        "length": Form(lambda found: found.dataset.length),
        "partial": PartialSamples,
    }


@dataclass(frozen=True, kw_only=True)
class ParameterStatus(Record[pb.ParameterStatus]):
    """The part of a parameter that one shard holds.

    Examples:
        >>> net = client.parameter("saved", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> shard = client.status()[0]
        >>> [each.version_min for each in shard.parameters if each.spec.name == "saved"]
        [0]
    """

    spec: ParameterSpec
    """What all workers agreed on, the name among it."""
    slice_offset: int
    """First element of the shard's slice."""
    slice_size: int
    """Elements of the slice; 0 where a parameter has fewer elements than there are shards."""
    initialized: bool
    """Whether it has its first weights."""
    version_min: int
    """Updates that the chunk which is furthest behind has seen; also the oldest open step."""
    version_max: int
    """Updates that the chunk which is furthest ahead has seen."""
    contributed_worker_ids: tuple[str, ...]
    """Workers that have contributed all of step `version_min`; of very many, some."""
    missing_worker_ids: tuple[str, ...]
    """Known workers that have not; of very many, some."""
    done_worker_ids: tuple[str, ...]
    """Workers whose clients were closed, and that others need not wait for; of very many, some."""
    contributed_worker_count: int
    """How many have."""
    missing_worker_count: int
    """How many known ones have not."""
    unknown_worker_count: int
    """Workers of worker_count that never opened the parameter."""
    counted_chunk_count: int
    """Gradient chunks that were counted."""
    duplicate_chunk_count: int
    """Gradient chunks that came again and were not counted."""
    late_chunk_count: int
    """Gradient chunks that came too late, where steps may close without a worker."""
    lost_member_count: int
    """Elastic members that the shard found to be gone."""
    learning_rate: float
    """The next update's; 0 where the optimizer has none."""
    load_id: int
    """Id of the checkpoint that its first weights came from; 0: none."""
    wait: StepWait
    """What step `version_min` waits for."""
    members: tuple[MemberStatus, ...]
    """Workers with seats; of very many, those that lag most."""
    ended: bool
    """Whether all workers have left in order, so that no step waits for any."""
    abandoned_for_s: float | None
    """Seconds for which none of its workers has been connected, though not all left in order; None:
    less than the shard's `abandoned_after_s`. No step waits for them."""
    marked: bool
    """Whether its deletion was begun and is not finished; shard 0 knows."""
    learners: tuple[LearnerStatus, ...]
    """What learners in outer training said of themselves last, by worker, on shard 0 of their
    family's fragment 0; of very many, some."""
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Of each figure that workers `report`, such as a loss, the mean of the newest step that has
    it, on shard 0."""
    samples: tuple[SamplesStatus, ...] = ()
    """The accounts of its workers' samples, by dataset, on shard 0."""

    FORMS: ClassVar[Mapping[str, Any]] = {
        "spec": ParameterSpec,
        "wait": StepWait,
        "members": MemberStatus,
        "learners": LearnerStatus,
        "figures": Form(lambda found: {each.name: each.value for each in found.figures}),
        "samples": SamplesStatus,
    }


@dataclass(frozen=True, kw_only=True)
class TableStatus(Record[table_pb2.TableStatus]):
    """The part of a table that one shard holds.

    Examples:
        >>> rule = shardwell.Adagrad(lr=0.1)
        >>> users = client.table("looked_at", row_count=None, dim=2, optimizer=rule)
        >>> step = users.put_row_gradients([7], np.ones((1, 2)))
        >>> sum(
        ...     table.row_count
        ...     for shard in client.status()
        ...     for table in shard.tables
        ...     if table.spec.name == "looked_at"
        ... )
        1
    """

    spec: TableSpec
    """What all workers agreed on, the name among it."""
    row_count: int
    """Rows that exist on the shard."""
    row_capacity: int
    """Rows that there is disk or memory for without asking for more."""
    stored_bytes: int
    """Bytes of rows and their optimizer state."""
    version: int
    """Synchronous mode: steps that have closed. Asynchronous mode: steps that were counted."""
    contributed_worker_ids: tuple[str, ...]
    """Synchronous mode: workers that have ended the open step; of very many, some."""
    missing_worker_ids: tuple[str, ...]
    """Synchronous mode: known workers that have not; of very many, some."""
    done_worker_ids: tuple[str, ...]
    """Workers whose clients were closed, and that others need not wait for; of very many, some."""
    unknown_worker_count: int
    """Workers of worker_count that never opened the table."""
    counted_row_count: int
    """Rows of gradients that were counted."""
    duplicate_part_count: int
    """Messages with gradients that came again and were not counted."""
    late_part_count: int
    """Parts that came too late, of elastic members."""
    lost_member_count: int
    """Elastic members that the shard found to be gone."""
    learning_rate: float
    """The next update's; 0 where the optimizer has none."""
    loading: bool
    """Whether a checkpoint is being restored into it."""
    load_id: int
    """Id of the newest restore, finished or not; 0: none."""
    incarnation: int
    """Tells it from other tables that had its name; where shards differ, one lost its memory."""
    wait: StepWait
    """What step `version` waits for, in synchronous mode."""
    members: tuple[MemberStatus, ...]
    """Workers with seats; of very many, those that lag most."""
    ended: bool
    """Whether all workers have left in order, so that no step waits for any."""
    abandoned_for_s: float | None
    """Seconds for which none of its workers has been connected, though not all left in order; None:
    less than the shard's `abandoned_after_s`. No step waits for them."""
    marked: bool
    """Whether its deletion was begun and is not finished; shard 0 knows."""

    FORMS: ClassVar[Mapping[str, Any]] = {
        "spec": TableSpec,
        "wait": StepWait,
        "members": MemberStatus,
    }


@dataclass(frozen=True, kw_only=True)
class Trouble(Record[pb.Trouble]):
    """A problem that an operator should know."""

    name: str
    """Name of the group that it is about; empty: the shard."""
    words: str
    section: str = ""
    """Section of the runbook that is about it, as its anchor; empty: none is."""


@dataclass(frozen=True, kw_only=True)
class Resources(Record[pb.Resources]):
    """The use that a shard's process makes of its machine; None: the machine does not say."""

    cpu_s: float | None = None
    """Seconds of all its cores that the process has used since it began."""
    core_count: int | None = None
    memory_bytes: int | None = None
    """Files that it maps are included."""
    disk_used_bytes: int | None = None
    """Bytes of the shard's files; None, as all of the disk: it has no files."""
    disk_free_bytes: int | None = None
    disk_size_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class LimitUse(Record[pb.LimitUse]):
    """A limit of a shard, and how much of it is used."""

    name: str
    """Such as "stored bytes"."""
    used: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Ending(Record[pb.Ending]):
    """The end of a certificate or token."""

    kind: str
    """"certificate", "authority", "token", or "certificate of worker"."""
    name: str
    """Path of the file; name of the token or worker."""
    left_s: float
    """Seconds until it ends; below 0: it has."""


@dataclass(frozen=True, kw_only=True)
class ShardSettings(Record[pb.ShardSettings]):
    """The settings of a shard, its limits, and its certificates and tokens that end."""

    durability: str = ""
    """What --durability says; empty: the shard keeps everything in memory alone."""
    limits: tuple[LimitUse, ...] = ()
    endings: tuple[Ending, ...] = ()
    """The certificates and tokens that end first; empty for a token with a prefix."""
    checkpoint_ago_s: float | None = None
    """Seconds since a parameter or table was last copied whole; None: not since the start."""

    FORMS: ClassVar[Mapping[str, Any]] = {"limits": LimitUse, "endings": Ending}


@dataclass(frozen=True, kw_only=True)
class ShardStatus(Record[pb.GetStatusResponse]):
    """The status of one shard.

    Examples:
        >>> [(shard.shard_index, shard.shard_count) for shard in client.status()]
        [(0, 2), (1, 2)]
    """

    shard_index: int
    """Its place among the shards."""
    shard_count: int
    """Shards of the cluster."""
    cluster_id: str
    """Name of the cluster."""
    address: str
    """HOST:PORT at which it was asked."""
    software_version: str
    """Version of the shard's software."""
    arithmetic: str
    """What computes there, in words: native code and its instructions, or NumPy and why."""
    uptime_s: float
    """Seconds since the process began to serve."""
    stored_bytes: int
    """Bytes of weights, sums, optimizer state and room for rows."""
    received_payload_bytes: int
    """Bytes of gradients and first weights that came in."""
    sent_payload_bytes: int
    """Bytes of weights and rows that went out."""
    open_stream_count: int
    """Streams that are open now."""
    parameters: tuple[ParameterStatus, ...]
    """What it holds of each parameter, by name."""
    tables: tuple[TableStatus, ...]
    """What it holds of each table, by name."""
    troubles: tuple[Trouble, ...]
    """Its problems, and what waits there: a full disk, damaged files, clients that were
    turned away, certificates and tokens that end, groups that wait."""
    resources: Resources = Resources()
    """What its process uses of its machine."""
    settings: ShardSettings = ShardSettings()
    """How it is set, its limits, and what ends."""

    FORMS: ClassVar[Mapping[str, Any]] = {
        "shard_index": Form(lambda found: found.shard.shard_index),
        "shard_count": Form(lambda found: found.shard.shard_count),
        "cluster_id": Form(lambda found: found.shard.cluster_id),
        "parameters": ParameterStatus,
        "troubles": Trouble,
        "resources": Resources,
        "settings": ShardSettings,
    }


def ask_parameters(channel: ShardChannel, timeout_s: float, name: str = "") -> pb.GetStatusResponse:
    """The status of a shard of the cluster and of its parameters, or of one, if it has it."""
    status = _ask_parameters(channel, timeout_s, name)
    if status.shard != channel.identity:
        raise WrongShardError(
            f"{channel.address} is shard {status.shard.shard_index} of cluster "
            f"{status.shard.cluster_id!r} now; it was shard {channel.shard_index} of "
            f"{channel.identity.cluster_id!r}; connect again",
            shard_index=channel.shard_index,
        )
    return status


def _ask_parameters(
    channel: ShardChannel, timeout_s: float, name: str = ""
) -> pb.GetStatusResponse:
    """Asks a shard of any cluster, again where an answer has no room for all parameters."""
    deadline_s = time.monotonic() + timeout_s
    status = pb.GetStatusResponse(more=True)
    while status.more:
        after = status.parameters[-1].spec.name if status.parameters else ""
        answer = channel.call(
            "GetStatus",
            pb.GetStatusRequest(parameter=name, after=after),
            pb.GetStatusResponse,
            timeout_s=max(deadline_s - time.monotonic(), TIMEOUT_S_MIN),
            parameter=name or None,
        )
        names = [after, *(entry.spec.name for entry in answer.parameters)]
        if (after and names != sorted(set(names))) or (answer.more and len(names) == 1):
            raise CorruptChunkError(
                f"shard {channel.shard_index} lists parameters {names!r:.200}, which do not follow "
                "one another; run the same version everywhere",
                shard_index=channel.shard_index,
            )
        status.more = False
        status.MergeFrom(answer)
    return status


def ask_tables(
    channel: ShardChannel,
    timeout_s: float,
    name: str = "",
    incarnation: int = 0,
    shard: types_pb2.ShardIdentity | None = None,
) -> Sequence[table_pb2.TableStatus]:
    """The statuses of a shard's tables, or of one; UnknownTableError: it was deleted."""
    shard = shard or channel.identity
    answer = channel.call(
        "GetTableStatus",
        table_pb2.GetTableStatusRequest(shard=shard, table=name, incarnation=incarnation),
        table_pb2.GetTableStatusResponse,
        timeout_s=timeout_s,
        table=name,
    )
    return answer.tables


def ask_status(channel: ShardChannel, timeout_s: float) -> ShardStatus:
    """Asks a shard for parameters and for tables, and waits up to `timeout_s` for each answer."""
    found = _ask_parameters(channel, timeout_s)
    tables = map(TableStatus.from_proto, ask_tables(channel, timeout_s, shard=found.shard))
    return ShardStatus.from_proto(found, address=channel.address, tables=tuple(tables))


def missing_words(
    channels: Sequence[ShardChannel], timeout_s: float, *, parameter: str = "", table: str = ""
) -> str:
    """The workers for which an open step waits, in words, of shards that answer; empty: none."""
    workers: dict[str, MissingWorker] = {}
    unknown_count, deadline_s = 0, time.monotonic() + timeout_s
    for channel in channels if parameter or table else ():
        rest_s = max(deadline_s - time.monotonic(), TIMEOUT_S_MIN)
        with contextlib.suppress(ShardwellError):
            parts: Sequence[pb.ParameterStatus | table_pb2.TableStatus] = (
                ask_tables(channel, rest_s, table)
                if table
                else ask_parameters(channel, rest_s, parameter).parameters
            )
            for part in parts:
                waits = StepWait.from_proto(part.wait)
                workers |= {worker.worker_id: worker for worker in waits.workers}
                unknown_count = max(unknown_count, part.unknown_worker_count)
    words = [str(workers[worker_id]) for worker_id in sorted(workers)]
    if unknown_count:
        words.append(f"{unknown_count} more worker{'s' * (unknown_count > 1)}")
    return ", ".join(words)
