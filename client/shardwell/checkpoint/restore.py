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
import json
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from shardwell.checkpoint.cluster import Cluster, Contents
from shardwell.checkpoint.format import (
    Checkpoint,
    CheckpointParameter,
    CheckpointTable,
    Entry,
    SliceFile,
    load_id_of,
    opened,
)
from shardwell.checkpoint.save import chosen_names
from shardwell.checkpoint.steps import verified
from shardwell.checkpoint.stores import Place
from shardwell.checkpoint.tensor_files import TensorsReader, read_bytes, read_rows
from shardwell.errors import (
    ArgumentError,
    DeadlineError,
    SpecMismatchError,
    StorageError,
)
from shardwell.numerics.codec import Float32
from shardwell.parameter.first_weights import FirstWeights, load_beside
from shardwell.parameter.opening import ParameterOpening
from shardwell.placement.rows import RowPlacement
from shardwell.placement.slices import Slice
from shardwell.process.connected import Closing
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.names import check_name
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec
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


def restore(
    cluster: Cluster,
    path: str | os.PathLike[str],
    parameters: Sequence[str] | None = None,
    tables: Sequence[str] | None = None,
    names: Mapping[str, str] | None = None,
    worker_count: int | None = None,
) -> Checkpoint:
    """Restores a checkpoint, as `Client.restore_checkpoint` says."""
    parameters, tables = chosen_names(parameters, tables)
    with verified(path) as (checkpoint, folder):
        _restore(cluster, checkpoint, folder, (parameters, tables), names, worker_count)
    return checkpoint


def _restore(
    cluster: Cluster,
    checkpoint: Checkpoint,
    folder: Path,
    chosen: tuple[Sequence[str] | None, Sequence[str] | None],
    names: Mapping[str, str] | None,
    worker_count: int | None,
) -> None:
    parameters, tables = chosen
    every = _under_names(
        checkpoint.path,
        [*checkpoint.select(parameters), *checkpoint.select_tables(tables)],
        {} if names is None else names,
    )
    if worker_count is not None:
        every = [_made_by(each, worker_count) for each in every]
    entries = [each for each in every if isinstance(each, CheckpointParameter)]
    table_entries = [each for each in every if isinstance(each, CheckpointTable)]
    contents = cluster.contents()
    _check_names_free(every, contents)
    unfinished = [each for each in table_entries if not _is_table_whole(each, contents)]
    for each in entries:
        _check_parameter_free(each, contents)

    def create(entry: CheckpointParameter) -> ParameterSpec:
        """Makes a parameter on all shards, and returns the spec that they have."""
        attempts = cluster.attempts.beside()
        opening = ParameterOpening(entry.spec, cluster.channels)
        attempts.run(partial(opening.join_all, attempts))
        return opening.spec

    specs = {spec.name: spec for spec in ask_all(entries, create)}
    with_values = [each for each in entries if not isinstance(each.spec.optimizer, Average)]
    for each in entries:
        if each not in with_values:  # its steps are counted from 0 anew
            states = [(name, 0, state) for name, _, state in _states_of(folder, each)]
            attempts = cluster.attempts.beside()
            shard = cluster.channels[0]
            load = partial(load_beside, each.name, shard, _account_of(each), states, 0, attempts)
            attempts.run(load)
    for batch in batches(with_values, lambda each: 4 * each.size * len(each.tensor_names)):
        ask_all(batch, lambda each: _restore_parameter(cluster, folder, specs, each))
    for tables_of in batches(unfinished, lambda each: sum(file.size_bytes for file in each.files)):
        ask_all(tables_of, lambda each: _restore_table(cluster, folder, each))


def _called(entry: Entry) -> tuple[str, str]:
    """The kind and name of what a user calls by one name: of a fragment, those of its family."""
    if isinstance(entry, CheckpointTable):
        return "table", entry.name
    fragment = entry.spec.fragment
    return ("parameter", entry.name) if fragment is None else ("family", fragment.family)


def _under_names(path: Place, entries: Sequence[Entry], names: Mapping[str, str]) -> list[Entry]:
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


def _made_by(entry: Entry, worker_count: int) -> Entry:
    """Returns an entry whose steps so many workers make from now on, if it has a fixed crew."""
    if entry.spec.mode != "sync" or entry.spec.members is not None:
        return entry
    spec: Any = dataclasses.replace(entry.spec, worker_count=worker_count)
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
        own_kind = _kind_of(entry)
        for kind, name in (_called(entry), (own_kind, entry.name)):
            if held.get(name, kind) == kind:
                continue
            where: dict[str, Any] = {own_kind: entry.name}
            raise SpecMismatchError(
                f"{name!r} is a {held[name]} on this cluster, and the checkpoint has a {kind} for "
                f"that name; nothing was restored; {_OTHERWISE}",
                **where,
            )


def _check_parameter_free(entry: CheckpointParameter, contents: Sequence[Contents]) -> None:
    """Refuses a parameter that a shard has already, with other values or another spec.

    Values of this checkpoint that nothing has changed since are what a restore left that was cut
    off; it is done again.
    """
    is_average = isinstance(entry.spec.optimizer, Average)
    for shard in contents:
        for here in shard.parts_of(entry.spec):
            has_values = here.version_max if is_average else here.initialized
            if has_values and not _is_parameter_whole(entry, here):
                raise _taken(entry)
            _check_spec(entry, here, shard_index=shard.shard_index)


def _check_spec(entry: Entry, here: Any, **where: Any) -> None:
    spec: Any = entry.spec
    differences = type(spec).from_proto(here.spec).differences(spec)
    if differences:
        kind = _kind_of(entry)
        raise SpecMismatchError(
            f"{kind} {entry.name!r} exists with another spec than the checkpoint's: "
            f"{'; '.join(differences)}; {_OTHERWISE}",
            **{kind: entry.name, **where},
        )


def _kind_of(entry: Entry) -> str:
    return "table" if isinstance(entry, CheckpointTable) else "parameter"


def _taken(entry: Entry) -> ArgumentError:
    kind = _kind_of(entry)
    where: dict[str, Any] = {kind: entry.name}
    has = "rows" if kind == "table" else "first weights"
    return ArgumentError(
        f"{kind} {entry.name!r} has {has} already; {_OTHERWISE}, before workers start", **where
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
    here = [table for shard in contents for table in shard.parts_of(entry.spec)]
    for table in here:
        _check_spec(entry, table)
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
        raise _taken(entry)
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
    if not is_own and any(e.load_id != load_id_of(entry) for e in cluster.parts_of(entry.spec)):
        raise _taken(entry)


def _account_of(entry: CheckpointParameter) -> bytes:
    return json.dumps(entry.samples).encode() if entry.samples else b""


def _states_of(path: Path, entry: CheckpointParameter) -> Iterator[tuple[str, int, bytes]]:
    for each in entry.states:  # one by one, as each may be large
        data = read_bytes(path / each.path, each.size_bytes, each.crc32c)
        yield each.worker_id, each.step, data


class _CheckpointValues(Closing):
    """A parameter's values in files, as FirstValues. A context manager; one file is open."""

    def __init__(self, path: Path, entry: CheckpointParameter) -> None:
        rate = entry.learning_rate
        self.size = entry.size
        self.array_count = len(entry.tensor_names)
        self.version = entry.version
        specified = getattr(entry.spec.optimizer, "learning_rate", None)
        self.learning_rate = None if rate == specified else rate
        self.load_id = load_id_of(entry)
        self.samples = _account_of(entry)
        self._path = path
        self._entry = entry
        self._file: SliceFile | None = None
        """The file that is open."""
        self._reader: TensorsReader | None = None
        self._lock = threading.Lock()

    @property
    def states(self) -> Iterator[tuple[str, int, bytes]]:
        """The states of workers beside the weights."""
        return _states_of(self._path, self._entry)

    def read(self, array_index: int, where: Slice) -> Float32:
        """Returns a copy."""
        values = np.empty(where.size, np.float32)
        name = self._entry.tensor_names[array_index]
        with self._lock:
            for file in self._entry.files:
                start = max(where.offset, file.offset)
                stop = min(where.stop, file.offset + file.size)
                if start < stop:
                    values[start - where.offset : stop - where.offset] = self._opened(file).read(
                        name, start - file.offset, stop - file.offset
                    )
        return values

    def _opened(self, file: SliceFile) -> TensorsReader:
        if self._reader is None or file is not self._file:
            self.close()
            self._reader, self._file = opened(self._path, self._entry, file), file
        return self._reader

    def close(self) -> None:
        """Closes the file."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


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
        with CallGroup() as call_group:
            streams = [
                _UploadStream(
                    channel, self._entry.name, self._opening(channel), self._timeout_s(), call_group
                )
                for channel in itertools.chain(*unfinished)
            ]
            for file in self._entry.files:
                with opened(self._path, self._entry, file) as reader:
                    self._send(reader, file.row_count, streams)
            end = self._message(pb.LoadRowsRequest(finish=True), empty_state(self._entry.spec, 0))
            for stream in streams:
                self._put(stream, end)
                self._put(stream, None)
            for stream in streams:
                self._check_count(stream, stream.result())

    def _unfinished(self) -> list[list[ShardChannel]]:
        """The shards that it is to be done on; those of one list may begin at once.

        Shards that load nothing and have a past come first: if they have counted gradients, they
        refuse before any other has begun. So no later restore takes those for what one left that
        was cut off.
        """
        every = list(zip(self._channels, self._cluster.parts_of(self._entry.spec), strict=True))
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
                channel.streaming("LoadRows").future(
                    iter([self._opening(channel)]), timeout=self._timeout_s()
                )
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

    def _send(self, reader: TensorsReader, row_count: int, streams: list[_UploadStream]) -> None:
        block = self._codec.row_count_max * self._placement.shard_count
        for start in range(0, row_count, block):
            stop = min(start + block, row_count)
            state = read_rows(reader, self._entry.spec, start, stop)
            self._check_ids(state)
            shards = self._placement.shards_of(state.ids)
            for stream in streams:
                index = stream.channel.shard_index
                part = state.take(shards == index) if self._placement.shard_count > 1 else state
                stream.row_count += part.ids.size
                for piece in part.pieces(self._codec.row_count_max):
                    message = self._message(pb.LoadRowsRequest(), piece)
                    self._put(stream, message)
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

    def _put(self, stream: _UploadStream, message: bytes | None) -> None:
        while not stream.offer(message):
            if not stream.call.is_active():
                stream.result()
            self._timeout_s()

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

    def __init__(
        self,
        channel: ShardChannel,
        table: str,
        opening: bytes,
        timeout_s: float,
        call_group: CallGroup,
    ) -> None:
        self.channel = channel
        self.row_count = 0
        self._table = table
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING_COUNT_MAX)
        self._call_group = call_group
        self.call: Any = None
        with channel.translated():
            self.call = channel.streaming("LoadRows").future(
                self._messages(opening), timeout=timeout_s
            )
        call_group.add(channel, self.call)

    def offer(self, message: bytes | None) -> bool:
        """Takes a message, None being the end; False if there is no room yet."""
        try:
            self._waiting.put(message, timeout=_LOOK_S)
        except queue.Full:
            return False
        return True

    def result(self) -> int:
        """Waits for the rows that the shard has of the table."""
        try:
            answer = self.channel.received(self.call.result(), table=self._table)
            row_count: int = answer.row_count
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            failed = error if isinstance(error, grpc.RpcError) else self.call
            channel, first = self._call_group.failure(self.channel, failed)
            raise channel.translate(first, table=self._table) from None
        return row_count

    def _messages(self, opening: bytes) -> Iterator[bytes]:
        yield opening
        while self.call is None or self.call.is_active():
            try:
                message = self._waiting.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if message is None:
                return
            yield message
