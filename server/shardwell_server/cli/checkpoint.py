"""`shardwell checkpoint`: save a cluster to a directory, restore it, see what there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import shardwell
from shardwell.specs.fragments import versions_words
from shardwell_server.cli import SuggestingGroup
from shardwell_server.cli.options import (
    Decorator,
    GivenPath,
    connected,
    option,
    shards_option,
    timeout_option,
)
from shardwell_server.terminal import console, table


@click.group(cls=SuggestingGroup)
def checkpoint() -> None:
    """Save parameters and tables to a directory, restore them into a cluster, or look at them."""


def _cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option_of in (
        timeout_option(600.0),
        _names_option(
            "--parameter",
            "Only this parameter or family; may be given several times. Default: all, if no "
            "--table.",
        ),
        _names_option(
            "--table",
            "Only this table; may be given several times. Default: all, if no --parameter.",
        ),
        shards_option,
    ):
        command = option_of(command)
    return command


def _names_option(flag: str, what: str) -> Decorator:
    return option(flag, what, name=f"{flag.strip('-')}s", multiple=True, metavar="NAME")


_DIRECTORY = click.argument("directory", type=GivenPath(may_be_url=True))


@checkpoint.command()
@_DIRECTORY
@option(
    "--keep",
    "With {step} in DIRECTORY: remove all but the newest N whole ones. Default: keep all.",
    click.IntRange(1),
    metavar="N",
)
@_cluster_options
def save(
    *,
    directory: str | Path,
    target: str,
    parameters: tuple[str, ...],
    tables: tuple[str, ...],
    keep: int | None,
    timeout_s: float,
) -> None:
    """Write parameters, tables and optimizer state to DIRECTORY, each at one version.

    Training may go on meanwhile. DIRECTORY must not exist; it appears when it is complete. With
    {step} in its name, as in ckpt/{step}, the name has the newest saved version.
    """
    with connected("checkpoint", target, timeout_s) as (client, rest_s):
        made = client.save_checkpoint(
            directory, *_choice(parameters, tables), keep=keep, timeout_s=rest_s
        )
    _print(made)


def _names(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    names: dict[str, str] = {}
    for each in given:
        old, is_pair, new = each.partition("=")
        if not (old and is_pair and new):
            raise click.BadParameter(f"give OLD=NEW; got {each!r:.140}", context, option)
        if names.setdefault(old, new) != new:
            raise click.BadParameter(f"{old!r} can't be both {names[old]!r} and {new!r}", context)
    return names


@checkpoint.command()
@_DIRECTORY
@option(
    "--name",
    "Another name for a parameter, table or family; may be given several times.",
    name="names",
    multiple=True,
    metavar="OLD=NEW",
    callback=_names,
)
@option(
    "--worker-count",
    "Workers that make each step from now on, where a fixed number does; default: as before.",
    click.IntRange(min=1),
)
@_cluster_options
def restore(
    *,
    directory: str | Path,
    target: str,
    parameters: tuple[str, ...],
    tables: tuple[str, ...],
    names: dict[str, str],
    worker_count: int | None,
    timeout_s: float,
) -> None:
    """Create parameters and tables as DIRECTORY has them, in a cluster with any number of shards.

    Before workers start: a parameter that has weights, or a table that has rows, is refused. The
    whole checkpoint is verified first. With {step} in its name, the newest whole one is taken.

    Training goes on with another number of workers by --worker-count; samples that workers were
    dealt by batches() go on where they were.

    To rename a parameter, end its workers, save it, restore it with --name, and delete the old one.
    """
    with connected("checkpoint", target, timeout_s) as (client, rest_s):
        chosen = _choice(parameters, tables)
        made = client.restore_checkpoint(
            directory, *chosen, names=names, worker_count=worker_count, timeout_s=rest_s
        )
        shard_count = client.shard_count
    restored = {entry.name for entry in made.select(chosen[0])}

    def called(name: str) -> str:
        return f"{name} as {names[name]}" if name in names else name

    whole = restored - {each.name for f in made.families for each in f.parameters}
    lines = sorted(map(called, whole))
    lines += [
        f"family {called(family.name)} ({versions_words(family.versions)})"
        for family in made.families
        if restored.issuperset(each.name for each in family.parameters)
    ]
    lines += sorted({f"table {called(entry.name)}" for entry in made.select_tables(chosen[1])})
    click.echo(
        f"restored {', '.join(lines) or 'nothing'} from {made.path} into {shard_count} "
        f"shards; workers go on at next_step"
    )


@checkpoint.command()
@_DIRECTORY
@click.argument("file", type=GivenPath())
@option("--parameter", "Or of a family; may be left out if there is one.", metavar="NAME")
def export(*, directory: str | Path, file: Path, parameter: str | None) -> None:
    """Write weights of a parameter or family to FILE, a .safetensors; needs no cluster.

    Tensors have their names and shapes, so that torch's load_state_dict takes them. With {step} in
    DIRECTORY's name, the newest whole one is taken.
    """
    made = shardwell.export_checkpoint(directory, file, parameter)
    count = made.tensor_count
    click.echo(
        f"wrote {count} tensor{'s' if count > 1 else ''}, {made.size} elements, of "
        f"{made.name} at version {made.version} to {file}"
    )


@checkpoint.command()
@_DIRECTORY
@option("--verify", "Read all files and compare their CRCs.", is_flag=True)
def inspect(*, directory: str | Path, verify: bool) -> None:
    """Show what DIRECTORY holds; needs no cluster.

    Exit code 1 if it is incomplete or damaged.
    """
    _print(shardwell.inspect_checkpoint(directory, verify=verify))
    if verify:
        click.echo("verified: every file is as it was written")


def _choice(
    parameters: tuple[str, ...], tables: tuple[str, ...]
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    return (parameters, tables) if parameters or tables else (None, None)


def _print(made: shardwell.Checkpoint) -> None:
    title = (
        f"{made.path}: cluster {made.cluster_id}, {made.shard_count} shards, "
        f"shardwell {made.software_version}, {made.size_bytes / 1e6:.1f} MB"
    )
    shown = table("", "parameter", ">size", ">version", "optimizer", "tensors", ">files")
    for parameter in made.parameters:
        if parameter.spec.fragment is not None:
            continue
        layout = parameter.spec.layout
        named = "" if layout is None else f" in {len(layout)} tensors"
        shown.add_row(parameter.name, f"{parameter.size}{named}", *_columns(parameter))
    for family in made.families:
        first = family.parameters[0]
        columns = _columns(first)
        file_count = sum(len(each.files) for each in family.parameters)
        shown.add_row(
            f"family {family.name}",
            f"{family.size} in {len(family.parameters)} fragments",
            versions_words(family.versions).partition(" ")[2],
            *columns[1:-1],
            str(file_count),
        )
    for entry in made.tables:
        size = f"{entry.row_count} rows x {entry.spec.dim}"
        shown.add_row(f"table {entry.name}", size, *_columns(entry))
    # Apart from the table, whose width would break the path.
    console().print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    console().print(shown)


def _columns(entry: shardwell.CheckpointParameter | shardwell.CheckpointTable) -> tuple[str, ...]:
    is_one = entry.version == entry.version_max
    rate = "" if entry.learning_rate is None else f" {entry.learning_rate:g}"
    return (
        str(entry.version) if is_one else f"{entry.version} to {entry.version_max}",
        f"{type(entry.spec.optimizer).__name__}{rate}",
        ", ".join(entry.tensor_names),
        str(len(entry.files)),
    )
