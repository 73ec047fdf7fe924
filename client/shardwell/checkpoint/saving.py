"""Saves a cluster to a checkpoint, and restores it into a cluster, of any size."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from shardwell.checkpoint.capture import ParameterCapture
from shardwell.checkpoint.consistent_version import known_first
from shardwell.checkpoint.directory import whole_directory
from shardwell.checkpoint.export import TableExport
from shardwell.checkpoint.format import Checkpoint, CheckpointParameter, load_id_of
from shardwell.checkpoint.manifest import write_manifest
from shardwell.checkpoint.steps import StepPaths, inspect_checkpoint
from shardwell.checkpoint.table_saving import TableCheckpointing
from shardwell.checkpoint.tensor_files import SliceReader
from shardwell.errors import (
    ArgumentError,
    DivergedError,
    NotInitializedError,
    OtherIncarnationError,
    SpecMismatchError,
    UnknownParameterError,
)
from shardwell.numerics.arguments import check_integer
from shardwell.numerics.codec import Float32
from shardwell.parameter.first_weights import FirstWeights
from shardwell.parameter.opening import ParameterOpening
from shardwell.placement.slices import Slice
from shardwell.process.local_paths import local_path
from shardwell.process.spans import Traffic
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ask_parameters
from shardwell.specs.fragments import (
    Family,
    first_fragment,
    grouped,
)
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec
from shardwell.threads.asking import ask_all, batches
from shardwell.v1 import parameter_server_pb2 as pb


class Checkpointing:
    """One call of one client, on a thread of the client's."""

    def __init__(
        self,
        channels: list[ShardChannel],
        *,
        worker_id: str,
        traffic: Traffic,
        attempts: Attempts,
    ) -> None:
        self._channels = channels
        self._worker_id = worker_id
        self._traffic = traffic
        self._attempts = attempts
        self._tables = TableCheckpointing(
            self._channels, worker_id=worker_id, traffic=traffic, attempts=self._attempts
        )

    # Saving.

    def save(
        self,
        path: str | os.PathLike[str],
        parameters: Sequence[str] | None = None,
        tables: Sequence[str] | None = None,
        *,
        keep: int | None = None,
    ) -> Checkpoint:
        """Saves a checkpoint, as `Client.save_checkpoint` says."""
        parameters, tables = _chosen(parameters, tables)
        target = Path(os.path.abspath(local_path(path)))
        steps = StepPaths.of(target)
        if keep is not None:
            check_integer("keep", keep, 1, 2**31)
            if steps is None:
                raise ArgumentError(
                    f"keep is for a path with {{step}}, as 'ckpt/{{step}}'; got {str(path)!r}"
                )
        same: Checkpoint | None = None

        def becomes() -> Path | None:
            nonlocal same
            same = None if steps is None else steps.make_way(checkpoint)
            return target if same is None else None

        try:
            with whole_directory(target, becomes) as making:
                statuses = ask_all(self._channels, self._status)
                specs = _specs(statuses, parameters)
                entries = self._snapshots(specs, statuses, making)
                table_entries = self._tables.save(making, tables, first_number=len(entries) + 1)
                versions = [entry.version_max for entry in entries]
                versions += [entry.version_max for entry in table_entries]
                step = max(versions, default=0)
                if steps is not None:
                    target = steps.at(step)
                checkpoint = Checkpoint(
                    path=target,
                    cluster_id=self._channels[0].identity.cluster_id,
                    shard_count=len(self._channels),
                    software_version=statuses[0].software_version,
                    parameters=tuple(entries),
                    tables=tuple(table_entries),
                )
                write_manifest(making, checkpoint)
        except DivergedError as error:
            raise _not_saved(error) from None
        if steps is not None and keep is not None:
            steps.prune(keep, step)
        return same or checkpoint

    def _snapshots(
        self,
        specs: Sequence[ParameterSpec],
        statuses: Sequence[pb.GetStatusResponse],
        directory: Path,
    ) -> list[CheckpointParameter]:
        """Writes parameters to a directory: small ones several at once, large ones in turn."""
        known = _versions(entry for status in statuses for entry in status.parameters)

        def newest_version(name: str) -> int:
            found = ask_all(self._channels, partial(self._ask, parameter=name))
            return _versions(e for status in found for e in status.parameters).get(name, 0)

        snapshots = []
        for number, spec in enumerate(specs, 1):
            (directory / f"{number:06d}-{spec.name}").mkdir()
            snapshots.append(
                ParameterCapture(
                    spec,
                    self._channels,
                    known_first(known[spec.name], partial(newest_version, spec.name)),
                    directory,
                    number=number,
                    traffic=self._traffic,
                    attempts=self._attempts.beside(),
                )
            )

        entries = []
        for batch in batches(snapshots, lambda snapshot: snapshot.size_bytes):
            entries += ask_all(batch, ParameterCapture.take_repeatedly)
        return entries

    # Restoring.

    def restore(
        self,
        path: str | os.PathLike[str],
        parameters: Sequence[str] | None = None,
        tables: Sequence[str] | None = None,
    ) -> Checkpoint:
        """Restores a checkpoint, as `Client.restore_checkpoint` says."""
        parameters, tables = _chosen(parameters, tables)
        checkpoint = inspect_checkpoint(path, verify=True)
        selected = checkpoint.select(parameters)
        selected_tables = self._tables.unfinished(checkpoint.select_tables(tables))
        for status in ask_all(self._channels, self._status):
            self._check_free(selected, status)
        specs = {spec.name: spec for spec in ask_all(selected, self._create)}
        with_values = [e for e in selected if not isinstance(e.spec.optimizer, Average)]
        for batch in batches(with_values, _size_bytes):
            ask_all(batch, partial(self._restore, checkpoint.path, specs))
        self._tables.restore(checkpoint.path, selected_tables)
        return checkpoint

    # Tables alone.

    def export_table(self, name: str, path: str | os.PathLike[str]) -> TableExport:
        """Exports a table, as `Client.export_table` says."""
        return self._tables.export(name, Path(os.path.abspath(local_path(path))))

    def _check_free(
        self, entries: Sequence[CheckpointParameter], status: pb.GetStatusResponse
    ) -> None:
        """Refuses parameters that a shard has already, with other values or another spec.

        Values of this checkpoint that nothing has changed since are what a restore left that was
        cut off; it is done again.
        """
        found = {entry.spec.name: entry for entry in status.parameters}
        for entry in entries:
            here = found.get(entry.name)
            if here is None:
                continue
            is_average = isinstance(entry.spec.optimizer, Average)
            has_values = here.version_max if is_average else here.initialized
            if has_values and not _is_restored(entry, here):
                raise self._taken(entry.name)
            differences = ParameterSpec.from_proto(here.spec).differences(entry.spec)
            if differences:
                raise SpecMismatchError(
                    f"parameter {entry.name!r} exists with another spec than the checkpoint's: "
                    f"{'; '.join(differences)}; restore into a cluster without it",
                    shard_index=status.shard.shard_index,
                    parameter=entry.name,
                )

    def _create(self, entry: CheckpointParameter) -> ParameterSpec:
        """Makes a parameter on all shards, and returns the spec that they have."""
        attempts = self._attempts.beside()
        opening = ParameterOpening(entry.spec, self._channels)
        attempts.run(partial(opening.join_all, attempts))
        return opening.spec

    def _restore(
        self, path: Path, specs: dict[str, ParameterSpec], entry: CheckpointParameter
    ) -> None:
        attempts = self._attempts.beside()
        with _CheckpointValues(path, entry) as values:
            first = FirstWeights(
                specs[entry.name],
                values,
                self._channels,
                worker_id=self._worker_id,
                traffic=self._traffic,
                attempts=attempts,
            )
            attempts.run(first.settle)
        if not first.is_own:  # another's, or what this restore set when it was cut off
            for status in ask_all(self._channels, partial(self._ask, parameter=entry.name)):
                if any(each.load_id != load_id_of(entry) for each in status.parameters):
                    raise self._taken(entry.name)

    def _taken(self, name: str) -> ArgumentError:
        return ArgumentError(
            f"parameter {name!r} has first weights already; restore into a cluster without it, "
            "before workers start",
            parameter=name,
        )

    # What they share.

    def _status(self, channel: ShardChannel) -> pb.GetStatusResponse:
        return self._attempts.beside().run(partial(self._ask, channel))

    def _ask(self, channel: ShardChannel, parameter: str = "") -> pb.GetStatusResponse:
        return ask_parameters(channel, self._attempts.rest_s, parameter)


def _is_restored(entry: CheckpointParameter, here: pb.ParameterStatus) -> bool:
    """Whether what a shard holds is as a restore of `entry` left it."""
    if here.load_id != load_id_of(entry):
        return False
    return here.slice_size == 0 or (
        here.version_min == here.version_max == entry.version
        and entry.learning_rate in (None, here.learning_rate)
    )


def _versions(entries: Iterable[pb.ParameterStatus]) -> dict[str, int]:
    """The newest version of any chunk on any shard, by name."""
    newest: dict[str, int] = {}
    for entry in entries:
        newest[entry.spec.name] = max(newest.get(entry.spec.name, 0), entry.version_max)
    return newest


def _size_bytes(entry: CheckpointParameter) -> int:
    return 4 * entry.size * len(entry.tensor_names)


def _specs(
    statuses: Sequence[pb.GetStatusResponse], names: Sequence[str] | None
) -> list[ParameterSpec]:
    """The parameters to save: by default all that shard 0 has first weights of, by name.

    The name of a family is that of all its fragments.

    Raises:
        ArgumentError, UnknownParameterError, NotInitializedError: one of them can't be saved.
        OtherIncarnationError: another shard has some of which shard 0 has none.
    """
    entries = {entry.spec.name: entry for entry in statuses[0].parameters}
    for status in statuses[1:]:
        for entry in status.parameters:
            name, family = entry.spec.name, entry.spec.fragment.family
            is_meant = names is None or name in names or family in names
            if entry.initialized and name not in entries and is_meant:
                raise OtherIncarnationError(
                    f"shard {status.shard.shard_index} has parameter {name!r}, and shard 0 does "
                    "not: shard 0 lost its memory; stop it and start it with its files",
                    shard_index=0,
                    parameter=name,
                )
    specs = {name: ParameterSpec.from_proto(entry.spec) for name, entry in entries.items()}
    groups = grouped(specs.values(), lambda spec: spec)
    begun = [name for name, entry in entries.items() if entry.initialized]
    if names is None:
        wanted = [
            each for each in groups.families.values() if not set(begun).isdisjoint(each.names)
        ]
        for each in wanted:
            each.check_whole("shard 0")
        names = begun
    else:
        known = groups.families
        wanted = [known[name] for name in names if name in known and name not in entries]
        names = groups.names_of(names, "shard 0")
    for each in wanted:
        _check_begun(each, begun)
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
    return [specs[name] for name in names]


def _check_begun(family: Family[ParameterSpec], begun: Sequence[str]) -> None:
    """Refuses a family of which only some fragments have first weights.

    Raises:
        NotInitializedError: it is one.
    """
    named = zip(family.parts, family.names, strict=True)
    empty = [index for index, name in named if name not in begun]
    if empty:
        raise NotInitializedError(
            f"fragment {', '.join(map(str, empty))} of family {family.name!r} has no first weights "
            "yet; nothing was saved; save again once a learner's init has returned",
            parameter=first_fragment(family.name),
        )


def _not_saved(error: DivergedError) -> DivergedError:
    """The same, with what can be done about a whole that is refused for the sake of one value."""
    if error.table is not None:
        advice = f"evict such rows, or leave table {error.table!r} out (tables=, --table)"
    else:
        advice = f"leave parameter {error.parameter!r} out (parameters=, --parameter)"
    return DivergedError(
        f"nothing was saved: {error.message}; to save the rest, {advice}, naming what is to be in",
        element_index=error.element_index,
        shard_index=error.shard_index,
        parameter=error.parameter,
        table=error.table,
    )


def _chosen(
    parameters: Sequence[str] | None, tables: Sequence[str] | None
) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """The same, checked; who names some of one kind alone wants none of the other. None: all."""
    _check_names("parameters", parameters)
    _check_names("tables", tables)
    return (
        () if parameters is None and tables else parameters,
        () if tables is None and parameters else tables,
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
        self.load_id = load_id_of(entry)
        self._path = path
        self._entry = entry
        self._number = -1
        self._reader: SliceReader | None = None
        self._stack = ExitStack()
        self._lock = threading.Lock()

    def read(self, array_index: int, where: Slice) -> Float32:
        """A copy."""
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
