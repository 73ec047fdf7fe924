"""Saves a cluster to a checkpoint, while training goes on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shardwell.checkpoint.capture import Capture, ParameterCapture, TableCapture
from shardwell.checkpoint.cluster import Cluster, Contents
from shardwell.checkpoint.directory import whole_directory
from shardwell.checkpoint.format import Checkpoint, CheckpointParameter, CheckpointTable, below
from shardwell.checkpoint.manifest import write_manifest
from shardwell.checkpoint.steps import StepPaths
from shardwell.checkpoint.stores import (
    MANIFEST_NAME,
    Place,
    StorePath,
    place_of,
    whole_objects,
)
from shardwell.errors import (
    ArgumentError,
    DivergedError,
    NotInitializedError,
    OtherIncarnationError,
    UnknownParameterError,
    UnknownTableError,
)
from shardwell.numerics.arguments import check_integer
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
    target = place_of(path)
    steps = StepPaths.of(target)
    if keep is not None:
        check_integer("keep", keep, 1, 2**31)
        if steps is None:
            raise ArgumentError(
                f"keep is for a path with {{step}}, as 'ckpt/{{step}}'; got {str(path)!r}"
            )
    same: Checkpoint | None = None

    def becomes() -> Any:
        nonlocal same
        same = None if steps is None else steps.make_way(checkpoint)
        return target if same is None else None

    try:
        with _making(target, becomes) as (making, folder):
            contents = cluster.contents()
            entries, table_entries = capture_all(
                cluster,
                contents,
                [*_parameter_specs(contents, parameters), *table_specs(contents, tables)],
                making / folder,
            )
            entries = [below(folder, each) for each in entries]
            table_entries = [below(folder, each) for each in table_entries]
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
        kind, name = ("table", error.table) if error.table else ("parameter", error.parameter)
        advice = "evict such rows, or " if error.table else ""
        error.message = (
            f"nothing was saved: {error.message}; to save the rest, {advice}leave {kind} {name!r} "
            f"out ({kind}s=, --{kind}), naming what is to be in"
        )
        raise
    if steps is not None and keep is not None:
        steps.prune(keep, step)
    return same or checkpoint


def _making(target: Place, becomes: Callable[[], Any]) -> AbstractContextManager[tuple[Path, str]]:
    """Gives a directory to make a checkpoint in, and the one in it that its files are in."""
    if isinstance(target, StorePath):
        if (target / MANIFEST_NAME).exists():
            raise ArgumentError(f"{target} exists already; remove it, or give another name")
        return whole_objects(becomes)
    return _in_directory(target, becomes)


@contextlib.contextmanager
def _in_directory(target: Path, becomes: Callable[[], Any]) -> Iterator[tuple[Path, str]]:
    with whole_directory(target, becomes) as making:
        yield making, ""


def capture_all(
    cluster: Cluster,
    contents: Sequence[Contents],
    specs: Sequence[ParameterSpec | TableSpec],
    directory: Path,
) -> tuple[list[CheckpointParameter], list[CheckpointTable]]:
    """Writes all to a directory: small ones several at once, large ones in turn."""
    captures: list[Capture[Any]] = []
    for number, spec in enumerate(specs, 1):
        (directory / f"{number:06d}-{spec.name}").mkdir()
        parts = [part for each in contents for part in each.parts_of(spec)]
        kind: Any = TableCapture if isinstance(spec, TableSpec) else ParameterCapture
        captures.append(kind(spec, cluster, parts, directory, number))
    entries: list[Any] = []
    for batch in batches(captures, lambda capture: capture.size_bytes):
        entries += ask_all(batch, lambda capture: capture.take_repeatedly())
        for capture in captures:
            capture.known_version = None  # of before the batch, which took a while
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


def chosen_names(
    parameters: Sequence[str] | None, tables: Sequence[str] | None
) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """Returns both, checked; one kind named alone excludes the other. None: all."""
    for what, names in (("parameters", parameters), ("tables", tables)):
        if isinstance(names, str):
            raise ArgumentError(f"{what} must be a list of names; got {names!r:.140}")
    return (
        () if parameters is None and tables else parameters,
        () if tables is None and parameters else tables,
    )
