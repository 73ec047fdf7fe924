"""Saves a cluster to a checkpoint, while training goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwell.checkpoint.capture import Capture, ParameterCapture, TableCapture
from shardwell.checkpoint.cluster import Cluster, Contents, newest_of_parameter, newest_of_table
from shardwell.checkpoint.directory import whole_directory
from shardwell.checkpoint.format import Checkpoint, CheckpointParameter, CheckpointTable
from shardwell.checkpoint.manifest import write_manifest
from shardwell.checkpoint.steps import StepPaths
from shardwell.errors import (
    ArgumentError,
    DivergedError,
    NotInitializedError,
    OtherIncarnationError,
    UnknownParameterError,
    UnknownTableError,
)
from shardwell.numerics.arguments import check_integer
from shardwell.process.local_paths import local_path
from shardwell.specs.fragments import Family, first_fragment, grouped
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell.threads.asking import ask_all, batches


def save(
    cluster: Cluster,
    path: str | os.PathLike[str],
    parameters: Sequence[str] | None = None,
    tables: Sequence[str] | None = None,
    *,
    keep: int | None = None,
) -> Checkpoint:
    """Saves a checkpoint, as `Client.save_checkpoint` says."""
    parameters, tables = chosen_names(parameters, tables)
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
            contents = cluster.contents()
            entries, table_entries = capture_all(
                cluster,
                contents,
                [*_parameter_specs(contents, parameters), *table_specs(contents, tables)],
                making,
            )
            versions = [each.version_max for each in entries]
            step = max(versions + [each.version_max for each in table_entries], default=0)
            if steps is not None:
                target = steps.at(step)
            checkpoint = Checkpoint(
                path=target,
                cluster_id=cluster.channels[0].identity.cluster_id,
                shard_count=len(cluster.channels),
                software_version=contents[0].software_version,
                parameters=tuple(entries),
                tables=tuple(table_entries),
            )
            write_manifest(making, checkpoint)
    except DivergedError as error:
        raise _not_saved(error) from None
    if steps is not None and keep is not None:
        steps.prune(keep, step)
    return same or checkpoint


def capture_all(
    cluster: Cluster,
    contents: Sequence[Contents],
    specs: Sequence[ParameterSpec | TableSpec],
    directory: Path,
) -> tuple[list[CheckpointParameter], list[CheckpointTable]]:
    """Writes all to a directory: small ones several at once, large ones in turn."""
    captures: list[Capture[Any, Any, Any]] = []
    for number, spec in enumerate(specs, 1):
        (directory / f"{number:06d}-{spec.name}").mkdir()
        if isinstance(spec, TableSpec):
            here = [each.tables[spec.name] for each in contents if spec.name in each.tables]
            newest, row_count = newest_of_table(spec.name, here), sum(e.row_count for e in here)
            captures.append(
                TableCapture(spec, cluster, newest, directory, number, row_count=row_count)
            )
        else:
            held = [e.parameters[spec.name] for e in contents if spec.name in e.parameters]
            newest = newest_of_parameter(held)
            captures.append(ParameterCapture(spec, cluster, newest, directory, number))
    entries: list[Any] = []
    for batch in batches(captures, lambda capture: capture.size_bytes):
        entries += ask_all(batch, lambda capture: capture.take_repeatedly())
    of_tables = [each for each in entries if isinstance(each, CheckpointTable)]
    return [each for each in entries if isinstance(each, CheckpointParameter)], of_tables


def table_specs(contents: Sequence[Contents], names: Sequence[str] | None) -> list[TableSpec]:
    """The tables to save: by default all that shard 0 has, by name."""
    held = contents[0].tables
    chosen = list(dict.fromkeys(held if names is None else names))
    for name in chosen:
        if name not in held:
            raise UnknownTableError(
                f"shard 0 has no table {name!r:.140}; it has {sorted(held)}",
                shard_index=0,
                table=str(name)[:140],
            )
    return [TableSpec.from_proto(held[name].spec) for name in chosen]


def _parameter_specs(
    contents: Sequence[Contents], names: Sequence[str] | None
) -> list[ParameterSpec]:
    """The parameters to save: by default all that shard 0 has first weights of, by name."""
    entries = contents[0].parameters
    for shard in contents[1:]:
        for name, entry in shard.parameters.items():
            family = entry.spec.fragment.family
            is_meant = names is None or name in names or family in names
            if entry.initialized and name not in entries and is_meant:
                raise OtherIncarnationError(
                    f"shard {shard.shard_index} has parameter {name!r}, and shard 0 does "
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
    named = zip(family.parts, family.names, strict=True)
    empty = [index for index, name in named if name not in begun]
    if empty:
        raise NotInitializedError(
            f"fragment {', '.join(map(str, empty))} of family {family.name!r} has no first weights "
            "yet; nothing was saved; save again once a learner's init has returned",
            parameter=first_fragment(family.name),
        )


def _not_saved(error: DivergedError) -> DivergedError:
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


def chosen_names(
    parameters: Sequence[str] | None, tables: Sequence[str] | None
) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """Returns both, checked; one kind named alone excludes the other. None: all."""
    _check_names("parameters", parameters)
    _check_names("tables", tables)
    return (
        () if parameters is None and tables else parameters,
        () if tables is None and parameters else tables,
    )


def _check_names(what: str, names: Sequence[str] | None) -> None:
    if isinstance(names, str):
        raise ArgumentError(f"{what} must be a list of names; got {names!r:.140}")
