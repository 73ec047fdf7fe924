"""Restores a checkpoint into a cluster of any size, under the names that it has or others.

A parameter is committed whole on all shards, or not at all. Of a table, the files are read once,
block by block, and each row goes to the stream of its shard. All shards have begun, and refuse
gradients, before the first finishes; the first finishes after all have all rows. When a shard or
the restoring client fails, any client restores again: on the shards that had not finished, if the
others have finished this checkpoint, where workers may have gone on meanwhile; else on all, which
take it as long as no gradient was counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np

from shardwell.checkpoint.cluster import Cluster, Contents
from shardwell.checkpoint.format import (
    Checkpoint,
    CheckpointParameter,
    CheckpointTable,
    load_id_of,
)
from shardwell.checkpoint.save import chosen_names
from shardwell.checkpoint.steps import inspect_checkpoint
from shardwell.checkpoint.tensor_files import RowsReader, SliceReader
from shardwell.errors import (
    ArgumentError,
    DeadlineError,
    SpecMismatchError,
    StorageError,
)
from shardwell.numerics.codec import Float32
from shardwell.parameter.first_weights import FirstWeights
from shardwell.parameter.opening import ParameterOpening
from shardwell.placement.rows import RowPlacement
from shardwell.placement.slices import Slice
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.names import check_name
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell.threads.asking import ask_all, batches
from shardwell.transport.call_group import CallGroup
from shardwell.v1 import parameter_server_pb2
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.row_state import RowState, RowStateCodec, empty_state

_WAITING_COUNT_MAX = 4
"""Messages of up to 1 MiB that wait for a shard."""
_LOOK_S = 0.2
"""A thread that waits for a shard looks so often whether one has failed."""
_OTHERWISE = "restore into a cluster without it, or under another name (names=, --name)"
Entry: TypeAlias = CheckpointParameter | CheckpointTable


def restore(
    cluster: Cluster,
    path: str | os.PathLike[str],
    parameters: Sequence[str] | None = None,
    tables: Sequence[str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Restores a checkpoint, as `Client.restore_checkpoint` says."""
    parameters, tables = chosen_names(parameters, tables)
    checkpoint = inspect_checkpoint(path, verify=True)
    every = _under_names(
        checkpoint.path,
        [*checkpoint.select(parameters), *checkpoint.select_tables(tables)],
        {} if names is None else names,
    )
    entries = [each for each in every if isinstance(each, CheckpointParameter)]
    table_entries = [each for each in every if isinstance(each, CheckpointTable)]
    contents = cluster.contents()
    _check_names_free(every, contents)
    unfinished = [each for each in table_entries if not _is_table_whole(each, contents)]
    for shard in contents:
        _check_parameters_free(entries, shard)

    def create(entry: CheckpointParameter) -> ParameterSpec:
        """Makes a parameter on all shards, and returns the spec that they have."""
        attempts = cluster.attempts.beside()
        opening = ParameterOpening(entry.spec, cluster.channels)
        attempts.run(partial(opening.join_all, attempts))
        return opening.spec

    specs = {spec.name: spec for spec in ask_all(entries, create)}
    with_values = [each for each in entries if not isinstance(each.spec.optimizer, Average)]
    for batch in batches(with_values, lambda each: 4 * each.size * len(each.tensor_names)):
        ask_all(batch, lambda each: _restore_parameter(cluster, checkpoint.path, specs, each))
    for tables_of in batches(unfinished, lambda each: sum(file.size_bytes for file in each.files)):
        ask_all(tables_of, lambda each: _restore_table(cluster, checkpoint.path, each))
    return checkpoint


def _called(entry: Entry) -> tuple[str, str]:
    """The kind and name of what a user calls by one name: of a fragment, those of its family."""
    if isinstance(entry, CheckpointTable):
        return "table", entry.name
    fragment = entry.spec.fragment
    return ("parameter", entry.name) if fragment is None else ("family", fragment.family)


def _under_names(path: Path, entries: Sequence[Entry], names: Mapping[str, str]) -> list[Entry]:
    if not isinstance(names, Mapping):
        raise ArgumentError(f'names must be a dict, as {{"old": "new"}}; got {names!r:.140}')
    for old, new in names.items():
        check_name(f"the new name of {old!r:.140}", new)
    by_name: dict[str, set[str]] = {}
    """Kind and old name of all that would be called by a name."""
    found = []
    for entry in entries:
        kind, old = _called(entry)
        found.append(_named(entry, names.get(old, old)))
        for name in {names.get(old, old), found[-1].name}:
            by_name.setdefault(name, set()).add(f"{kind} {old!r}")
    known = {name: kind for kind, name in map(_called, entries)}
    families = {entry.name: _called(entry)[1] for entry in entries}
    for old in names:
        if old not in known and old in families:
            raise ArgumentError(
                f"{old!r} is a fragment of family {families[old]!r}, which has one name; give the "
                "family another one"
            )
        if old not in known:
            raise ArgumentError(
                f"names has {old!r:.140}, which is not restored; of {path} are: {sorted(known)}"
            )
    for name, olds in by_name.items():
        if names and len(olds) > 1:
            raise ArgumentError(
                f"{' and '.join(sorted(olds))} would both be restored as {name!r}; give one of "
                "them another name, or restore one of them alone"
            )
    return found


def _named(entry: Entry, name: str) -> Entry:
    fragment = entry.spec.fragment if isinstance(entry, CheckpointParameter) else None
    changes: dict[str, Any] = {"name": name}
    if fragment is not None:
        fragment = dataclasses.replace(fragment, family=name)
        changes = {"name": fragment.parameter, "fragment": fragment}
    spec: Any = dataclasses.replace(entry.spec, **changes)
    return dataclasses.replace(entry, spec=spec)


def _check_names_free(entries: Sequence[Entry], contents: Sequence[Contents]) -> None:
    """Refuses names of things of another kind on the cluster before anything is made."""
    held: dict[str, str] = {}
    for shard in contents:
        for each in shard.parameters.values():
            held[each.spec.name] = "parameter"
            if each.spec.fragment.family:
                held[each.spec.fragment.family] = "family"
        held |= dict.fromkeys(shard.tables, "table")
    for entry in entries:
        own_kind = "parameter" if isinstance(entry, CheckpointParameter) else "table"
        for kind, name in (_called(entry), (own_kind, entry.name)):
            if held.get(name, kind) == kind:
                continue
            where: dict[str, Any] = {own_kind: entry.name}
            raise SpecMismatchError(
                f"{name!r} is a {held[name]} on this cluster, and the checkpoint has a {kind} for "
                f"that name; nothing was restored; {_OTHERWISE}",
                **where,
            )


def _check_parameters_free(entries: Sequence[CheckpointParameter], shard: Contents) -> None:
    """Refuses parameters that a shard has already, with other values or another spec.

    Values of this checkpoint that nothing has changed since are what a restore left that was cut
    off; it is done again.
    """
    for entry in entries:
        here = shard.parameters.get(entry.name)
        if here is None:
            continue
        is_average = isinstance(entry.spec.optimizer, Average)
        has_values = here.version_max if is_average else here.initialized
        if has_values and not _is_parameter_whole(entry, here):
            raise _taken(entry.name)
        differences = ParameterSpec.from_proto(here.spec).differences(entry.spec)
        if differences:
            raise SpecMismatchError(
                f"parameter {entry.name!r} exists with another spec than the checkpoint's: "
                f"{'; '.join(differences)}; {_OTHERWISE}",
                shard_index=shard.shard_index,
                parameter=entry.name,
            )


def _taken(name: str) -> ArgumentError:
    return ArgumentError(
        f"parameter {name!r} has first weights already; {_OTHERWISE}, before workers start",
        parameter=name,
    )


def _is_parameter_whole(
    entry: CheckpointParameter, here: parameter_server_pb2.ParameterStatus
) -> bool:
    if here.load_id != load_id_of(entry):
        return False
    return here.slice_size == 0 or (
        here.version_min == here.version_max == entry.version
        and entry.learning_rate in (None, here.learning_rate)
    )


def _is_table_whole(entry: CheckpointTable, contents: Sequence[Contents]) -> bool:
    """Returns True for a table that is as a restore of `entry` left it that was cut off."""
    here = [shard.tables[entry.name] for shard in contents if entry.name in shard.tables]
    for table in here:
        differences = TableSpec.from_proto(table.spec).differences(entry.spec)
        if differences:
            raise SpecMismatchError(
                f"table {entry.name!r} exists with another spec than the checkpoint's: "
                f"{'; '.join(differences)}; {_OTHERWISE}",
                table=entry.name,
            )
    # Where some stand and others do not, a restore was cut off; it is done again.
    if len(here) < len(contents) or any(table.loading for table in here):
        return False
    rows_move_at_once = entry.spec.worker_count < 2
    if sum(table.row_count for table in here) == entry.row_count and all(
        table.load_id == load_id_of(entry)
        and table.version == entry.version
        and entry.learning_rate in (None, table.learning_rate)
        and not (rows_move_at_once and table.counted_row_count)
        for table in here
    ):
        return True
    if any(table.version or table.row_count for table in here):
        raise ArgumentError(
            f"table {entry.name!r} has rows already; {_OTHERWISE}, before workers start",
            table=entry.name,
        )
    return False


# Parameters.


def _restore_parameter(
    cluster: Cluster, path: Path, specs: dict[str, ParameterSpec], entry: CheckpointParameter
) -> None:
    attempts = cluster.attempts.beside()
    with _CheckpointValues(path, entry) as values:
        first = FirstWeights(
            specs[entry.name],
            values,
            cluster.channels,
            worker_id=cluster.worker_id,
            traffic=cluster.traffic,
            attempts=attempts,
        )
        attempts.run(first.settle)
    is_own = first.is_own  # else another's, or what this restore set when it was cut off
    if not is_own and any(e.load_id != load_id_of(entry) for e in cluster.parameter(entry.name)):
        raise _taken(entry.name)


class _CheckpointValues:
    """A parameter's values in files, as FirstValues. A context manager; one file is open."""

    def __init__(self, path: Path, entry: CheckpointParameter) -> None:
        rate = entry.learning_rate
        self.size = entry.size
        self.array_count = len(entry.tensor_names)
        self.version = entry.version
        specified = getattr(entry.spec.optimizer, "learning_rate", None)
        self.learning_rate = None if rate == specified else rate
        self.load_id = load_id_of(entry)
        self._path = path
        self._entry = entry
        self._number = -1
        self._reader: SliceReader | None = None
        self._stack = ExitStack()
        self._lock = threading.Lock()

    def read(self, array_index: int, where: Slice) -> Float32:
        """Returns a copy."""
        with self._lock:
            return self._read(array_index, where)

    def _read(self, array_index: int, where: Slice) -> Float32:
        values = np.empty(where.size, np.float32)
        for number, file in enumerate(self._entry.files):
            start, stop = max(where.offset, file.offset), min(where.stop, file.offset + file.size)
            if start < stop:
                values[start - where.offset : stop - where.offset] = self._opened(number).read(
                    array_index, start - file.offset, stop - file.offset
                )
        return values

    def _opened(self, number: int) -> SliceReader:
        if self._reader is None or number != self._number:
            self._stack.close()
            file = self._entry.files[number]
            reader = SliceReader(self._path / file.path, self._entry.tensor_names, file.size)
            self._reader, self._number = self._stack.enter_context(reader), number
        return self._reader

    def __enter__(self) -> _CheckpointValues:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# Tables.


def _restore_table(cluster: Cluster, path: Path, entry: CheckpointTable) -> None:
    attempts = cluster.attempts.beside()

    def create(channel: ShardChannel) -> pb.OpenTableResponse:
        own = cluster.attempts.beside()
        request = pb.OpenTableRequest(shard=channel.identity, spec=entry.spec.to_proto())
        return own.run(
            lambda: channel.call(
                "OpenTable",
                request,
                pb.OpenTableResponse,
                timeout_s=own.rest_s,
                table=entry.name,
            )
        )

    made = ask_all(cluster.channels, create)
    attempts.run(TableRestore(path, entry, cluster, made[0].incarnation, attempts).restore)


class TableRestore:
    """The restore of one table from files into all shards, on which it was created."""

    def __init__(
        self,
        path: Path,
        entry: CheckpointTable,
        cluster: Cluster,
        incarnation: int,
        attempts: Attempts,
    ) -> None:
        self._path = path
        self._entry = entry
        self._cluster = cluster
        self._channels = cluster.channels
        self._traffic = cluster.traffic
        self._attempts = attempts
        self._codec = RowStateCodec(entry.spec)
        self._placement = RowPlacement(entry.spec.row_count, len(cluster.channels))
        specified = getattr(entry.spec.optimizer, "learning_rate", None)
        self._header = pb.LoadRowsRequest(
            open=pb.TableOpen(
                table=entry.name, worker_id=cluster.worker_id, incarnation=incarnation
            ),
            version=entry.version,
            learning_rate=None if entry.learning_rate == specified else entry.learning_rate,
            load_id=load_id_of(entry),
        )
        self._context = checksum.rows_load_context(self._header)

    def restore(self) -> None:
        """Makes one attempt; blocks until the table is committed on all shards."""
        unfinished = self._unfinished()
        for beginning in unfinished:
            ask_all(beginning, self._begin)
        channels = [channel for beginning in unfinished for channel in beginning]
        streams: list[_UploadStream] = []
        with CallGroup() as call_group:
            try:
                for channel in channels:
                    streams.append(
                        _UploadStream(channel, self._opening(channel), self._timeout_s())
                    )
                    call_group.add(channel, streams[-1].call)
                for file in self._entry.files:
                    path = self._path / file.path
                    with RowsReader(path, self._entry.spec, file.row_count) as reader:
                        self._send(reader, file.row_count, streams, call_group)
                end = self._message(
                    pb.LoadRowsRequest(finish=True), empty_state(self._entry.spec, 0)
                )
                for stream in streams:
                    self._put(stream, end, call_group)
                    self._put(stream, None, call_group)
                for stream in streams:
                    self._check_count(stream, self._result(stream, call_group))
            finally:
                for stream in streams:
                    stream.stop()

    def _unfinished(self) -> list[list[ShardChannel]]:
        """The shards that it is to be done on; those of one list may begin at once.

        Shards that load nothing and have a past come first: if they have counted gradients, they
        refuse before any other has begun. So no later restore takes those for what one left that
        was cut off.
        """
        every = list(zip(self._channels, self._cluster.table(self._entry.name), strict=True))
        if all(status.load_id == self._header.load_id for _, status in every):
            begun = [channel for channel, status in every if status.loading]
            if begun:
                return [begun]

        def turn(one: tuple[ShardChannel, pb.TableStatus]) -> tuple[bool, bool]:
            return one[1].loading, not _has_past(one[1])

        return [
            [channel for channel, _ in group]
            for _, group in itertools.groupby(sorted(every, key=turn), turn)
        ]

    def _begin(self, channel: ShardChannel) -> None:
        """Makes a shard take no gradients, by a stream that only opens."""
        with channel.translated(table=self._entry.name):
            channel.result_of(
                channel.load_rows.future(iter([self._opening(channel)]), timeout=self._timeout_s())
            )

    def _check_count(self, stream: _UploadStream, row_count: int) -> None:
        if row_count != stream.row_count:
            raise StorageError(
                f"table {self._entry.name!r} has {row_count} rows on shard "
                f"{stream.channel.shard_index} after it was restored; {stream.row_count} were sent",
                shard_index=stream.channel.shard_index,
                table=self._entry.name,
            )

    def _opening(self, channel: ShardChannel) -> bytes:
        header = pb.LoadRowsRequest()
        header.CopyFrom(self._header)
        header.open.shard.CopyFrom(channel.identity)
        checksum.seal(header.open)
        return self._message(header, empty_state(self._entry.spec, 0))

    def _message(self, header: pb.LoadRowsRequest, state: RowState) -> bytes:
        start = checksum.rows_load(self._context, finish=header.finish)
        return self._codec.encode(header, header.rows, state, start=start)

    def _send(
        self,
        reader: RowsReader,
        row_count: int,
        streams: list[_UploadStream],
        call_group: CallGroup,
    ) -> None:
        block = self._codec.row_count_max * self._placement.shard_count
        for start in range(0, row_count, block):
            state = reader.read(start, min(start + block, row_count))
            self._check_ids(state)
            shards = self._placement.shards_of(state.ids)
            for stream in streams:
                index = stream.channel.shard_index
                part = state.take(shards == index) if self._placement.shard_count > 1 else state
                stream.row_count += part.ids.size
                for piece in part.pieces(self._codec.row_count_max):
                    message = self._message(pb.LoadRowsRequest(), piece)
                    self._put(stream, message, call_group)
                    self._traffic.add_sent(len(message), piece.weights.size)

    def _check_ids(self, state: RowState) -> None:
        row_count = self._placement.row_count
        if row_count is not None:
            is_bad = (state.ids < 0) | (state.ids >= row_count)
            if is_bad.any():
                raise ArgumentError(
                    f"{self._path}: table {self._entry.name!r} has row id {state.ids[is_bad][0]}; "
                    f"its ids are 0 to {row_count - 1}",
                    table=self._entry.name,
                )

    def _put(self, stream: _UploadStream, message: bytes | None, call_group: CallGroup) -> None:
        while not stream.offer(message):
            if not stream.call.is_active():
                self._result(stream, call_group)
            self._timeout_s()

    def _result(self, stream: _UploadStream, call_group: CallGroup) -> int:
        try:
            answer = stream.channel.received(stream.call.result(), table=self._entry.name)
            row_count: int = answer.row_count
        except grpc.RpcError as error:
            channel, first = call_group.failure(stream.channel, error)
            raise channel.translate(first, table=self._entry.name) from None
        except grpc.FutureCancelledError:
            channel, first = call_group.failure(stream.channel, stream.call)
            raise channel.translate(first, table=self._entry.name) from None
        return row_count

    def _timeout_s(self) -> float:
        remaining_s = self._attempts.remaining_s
        if remaining_s <= 0:
            raise DeadlineError(
                f"table {self._entry.name!r} was not restored within "
                f"{self._attempts.timeout_s:g} s; raise timeout_s",
                table=self._entry.name,
            )
        return remaining_s


def _has_past(status: pb.TableStatus) -> bool:
    return bool(status.load_id or status.version or status.row_count)


class _UploadStream:
    """The stream to one shard; gRPC takes messages from it on a thread of its own."""

    def __init__(self, channel: ShardChannel, opening: bytes, timeout_s: float) -> None:
        self.channel = channel
        self.row_count = 0
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING_COUNT_MAX)
        self._is_stopped = False
        with channel.translated():
            self.call: Any = channel.load_rows.future(self._messages(opening), timeout=timeout_s)

    def offer(self, message: bytes | None) -> bool:
        """Takes a message, None being the end; False if there is no room yet."""
        try:
            self._waiting.put(message, timeout=_LOOK_S)
        except queue.Full:
            return False
        return True

    def stop(self) -> None:
        """Ends the messages, and so lets go of gRPC's thread."""
        self._is_stopped = True

    def _messages(self, opening: bytes) -> Iterator[bytes]:
        yield opening
        while not self._is_stopped:
            try:
                message = self._waiting.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if message is None:
                return
            yield message
