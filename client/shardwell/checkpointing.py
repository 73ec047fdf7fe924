"""Saves a cluster to a checkpoint, and restores it into a cluster, of any size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from shardwell.channel import ShardChannel
from shardwell.checkpoint import Checkpoint, CheckpointParameter
from shardwell.codec import Float32
from shardwell.errors import (
    ArgumentError,
    NonFiniteError,
    NotInitializedError,
    SpecMismatchError,
    UnknownParameterError,
    WrongShardError,
)
from shardwell.first_weights import FirstWeights
from shardwell.manifest import inspect_checkpoint, write_manifest
from shardwell.optimizers import Average
from shardwell.partition import Slice
from shardwell.shards import Shards
from shardwell.slice_file import SliceReader
from shardwell.snapshots import ParameterSnapshot
from shardwell.specs import ParameterSpec
from shardwell.table_checkpointing import TableCheckpointing
from shardwell.table_export import TableExport
from shardwell.traffic import Traffic
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.whole_directory import whole_directory


class Checkpointing:
    """One call of one client. It blocks until `timeout_s` at the most."""

    def __init__(
        self,
        shards: Shards,
        *,
        worker_id: str,
        traffic: Traffic,
        timeout_s: float,
    ) -> None:
        self._channels = shards.channels
        self._worker_id = worker_id
        self._traffic = traffic
        self._attempts = shards.attempts(timeout_s)
        self._tables = TableCheckpointing(
            self._channels, worker_id=worker_id, traffic=traffic, attempts=self._attempts
        )

    # Saving.

    def save(
        self,
        path: str | os.PathLike[str],
        parameters: Sequence[str] | None = None,
        tables: Sequence[str] | None = None,
    ) -> Checkpoint:
        """See `Client.save_checkpoint`."""
        _check_names("parameters", parameters)
        _check_names("tables", tables)
        target = Path(os.path.abspath(path))
        try:
            with whole_directory(target) as partial:
                status = self._status(self._channels[0])
                entries = []
                for number, spec in enumerate(_specs(status, parameters), 1):
                    (partial / f"{number:06d}-{spec.name}").mkdir()
                    entries.append(self._snapshot(spec, partial, number))
                table_entries = self._tables.save(partial, tables, first_number=len(entries) + 1)
                checkpoint = Checkpoint(
                    path=target,
                    cluster_id=self._channels[0].identity.cluster_id,
                    shard_count=len(self._channels),
                    software_version=status.software_version,
                    parameters=tuple(entries),
                    tables=tuple(table_entries),
                )
                write_manifest(partial, checkpoint)
        except NonFiniteError as error:
            raise _not_saved(error) from None
        return checkpoint

    def _snapshot(self, spec: ParameterSpec, partial: Path, number: int) -> CheckpointParameter:
        def newest_version() -> int:
            statuses = [self._ask(channel, spec.name) for channel in self._channels]
            return max(
                (entry.version_max for status in statuses for entry in status.parameters), default=0
            )

        snapshot = ParameterSnapshot(
            spec,
            self._channels,
            newest_version,
            partial,
            number=number,
            traffic=self._traffic,
            attempts=self._attempts,
        )
        return self._attempts.run(snapshot.take)

    # Restoring.

    def restore(
        self,
        path: str | os.PathLike[str],
        parameters: Sequence[str] | None = None,
        tables: Sequence[str] | None = None,
    ) -> Checkpoint:
        """See `Client.restore_checkpoint`."""
        _check_names("parameters", parameters)
        _check_names("tables", tables)
        checkpoint = inspect_checkpoint(path, verify=True)
        selected = checkpoint.select(parameters)
        selected_tables = checkpoint.select_tables(tables)
        self._tables.check_free(selected_tables)
        for channel in self._channels:
            self._check_free(selected, self._status(channel))
        for entry in selected:
            for channel in self._channels:
                self._attempts.run(partial(self._create, channel, entry.spec))
        for entry in selected:
            if not isinstance(entry.spec.optimizer, Average):
                self._restore(checkpoint.path, entry)
        for table in selected_tables:
            self._tables.restore(checkpoint.path, table)
        return checkpoint

    # Tables alone.

    def export_table(self, name: str, path: str | os.PathLike[str]) -> TableExport:
        """See `Client.export_table`."""
        return self._tables.export(name, Path(os.path.abspath(path)))

    def _check_free(
        self, entries: Sequence[CheckpointParameter], status: pb.GetStatusResponse
    ) -> None:
        """Refuses parameters that a shard has already, with values or another spec."""
        found = {entry.spec.name: entry for entry in status.parameters}
        for entry in entries:
            here = found.get(entry.name)
            if here is None:
                continue
            is_average = isinstance(entry.spec.optimizer, Average)
            if here.version_max if is_average else here.initialized:
                raise self._taken(entry.name)
            differences = ParameterSpec.from_proto(here.spec).differences(entry.spec)
            if differences:
                raise SpecMismatchError(
                    f"parameter {entry.name!r} exists with another spec than the checkpoint's: "
                    f"{'; '.join(differences)}; restore into a cluster without it",
                    shard_index=status.shard.shard_index,
                    parameter=entry.name,
                )

    def _restore(self, path: Path, entry: CheckpointParameter) -> None:
        with _CheckpointValues(path, entry) as values:
            first = FirstWeights(
                entry.name,
                values,
                self._channels,
                worker_id=self._worker_id,
                traffic=self._traffic,
                attempts=self._attempts,
            )
            self._attempts.run(first.settle)
        if not first.is_own:
            raise self._taken(entry.name)

    def _taken(self, name: str) -> ArgumentError:
        return ArgumentError(
            f"parameter {name!r} has first weights already; restore into a cluster without it, "
            "before workers start",
            parameter=name,
        )

    # What they share.

    def _create(self, channel: ShardChannel, spec: ParameterSpec) -> None:
        channel.call(
            "CreateParameter",
            pb.CreateParameterRequest(shard=channel.identity, spec=spec.to_proto()),
            pb.CreateParameterResponse,
            timeout_s=self._attempts.rest_s,
            parameter=spec.name,
        )

    def _status(self, channel: ShardChannel) -> pb.GetStatusResponse:
        return self._attempts.run(partial(self._ask, channel))

    def _ask(self, channel: ShardChannel, parameter: str = "") -> pb.GetStatusResponse:
        status = channel.call(
            "GetStatus",
            pb.GetStatusRequest(parameter=parameter),
            pb.GetStatusResponse,
            timeout_s=self._attempts.rest_s,
        )
        if status.shard != channel.identity:
            raise WrongShardError(
                f"{channel.address} is shard {status.shard.shard_index} of cluster "
                f"{status.shard.cluster_id!r} now; connect again",
                shard_index=channel.shard_index,
            )
        return status


def _specs(status: pb.GetStatusResponse, names: Sequence[str] | None) -> list[ParameterSpec]:
    """What is to be saved: by default all that shard 0 has first weights of, by name."""
    entries = {entry.spec.name: entry for entry in status.parameters}
    if names is None:
        names = [name for name, entry in entries.items() if entry.initialized]
    for name in names:
        if name not in entries:
            raise UnknownParameterError(
                f"shard 0 has no parameter {name!r:.140}; it has {sorted(entries)}",
                shard_index=0,
                parameter=str(name)[:140],
            )
        if not entries[name].initialized:
            raise NotInitializedError(
                f"parameter {name!r} has no first weights; there is nothing to save",
                parameter=name,
            )
    return [ParameterSpec.from_proto(entries[name].spec) for name in dict.fromkeys(names)]


def _not_saved(error: NonFiniteError) -> NonFiniteError:
    """The same, with what can be done about a whole that is refused for the sake of one value."""
    if error.table is not None:
        advice = f"evict such rows, or leave table {error.table!r} out (tables=, --table)"
    else:
        advice = f"leave parameter {error.parameter!r} out (parameters=, --parameter)"
    return NonFiniteError(
        f"nothing was saved: {error.message}; to save the rest, {advice}, naming what is to be in",
        element_index=error.element_index,
        shard_index=error.shard_index,
        parameter=error.parameter,
        table=error.table,
    )


def _check_names(what: str, names: Sequence[str] | None) -> None:
    if isinstance(names, str):
        raise ArgumentError(f"{what} must be a list of names; got {names!r:.140}")


class _CheckpointValues:
    """A parameter's values in files. See FirstValues; a context manager. One file is open."""

    def __init__(self, path: Path, entry: CheckpointParameter) -> None:
        rate = entry.learning_rate
        self.size = entry.size
        self.array_count = len(entry.tensor_names)
        self.version = entry.version
        specified = getattr(entry.spec.optimizer, "learning_rate", None)
        self.learning_rate = None if rate == specified else rate
        self._path = path
        self._entry = entry
        self._number = -1
        self._reader: SliceReader | None = None
        self._stack = ExitStack()

    def read(self, array_index: int, where: Slice) -> Float32:
        """See FirstValues: a copy."""
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
