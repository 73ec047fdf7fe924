"""`shardwell status`: what a cluster holds, and who is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import click
from rich.table import Table

from shardwell.connection.credentials import Credentials
from shardwell.errors import ShardwellError
from shardwell.rpc.families import Family, families_of
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ParameterStatus, ShardStatus, TableStatus
from shardwell.specs.names import parse_target
from shardwell.specs.optimizers import Average
from shardwell_server.cli.options import shards_option, usage_errors
from shardwell_server.cli.quantities import Duration
from shardwell_server.cluster_status import (
    ENDED,
    LONG_WAIT_S,
    Answer,
    abandoned,
    as_json,
    ask,
    blockers,
    duration,
    ended_names,
    faults_of,
    given,
    in_order,
    merged,
    reported,
    size,
    told_troubles,
    unfinished,
    verdict,
)
from shardwell_server.terminal import console, legend, table

_LEGEND = "open step: its number, workers whose gradients are in it, and those that it still lacks"
LEARNER_LEGEND = (
    "hidden: offers travelled while the learner computed; waited: it did nothing else; overdue: "
    "offers whose result came too late; kept: takes that kept uncounted work"
)


class _Names(NamedTuple):
    """How parameters, families and tables are listed."""

    ended: set[tuple[str, str]]
    """Kind and name of what has no line."""
    are_by_shard: bool
    """Whether each shard's part of a name has a line."""


@click.command()
@shards_option
@click.option("--all", "shows_all", is_flag=True, help="Also what all workers have left in order.")
@click.option("--by-shard", is_flag=True, help="A line for each shard's part of a name.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a shard and line.")
@click.option(
    "--timeout-s", type=Duration(), default=5.0, show_default=True, help="For each shard's answer."
)
def status(
    *, target: str, shows_all: bool, by_shard: bool, as_json: bool, timeout_s: float
) -> None:
    """Show shards, parameters, tables, versions, and who is missing from the open step.

    A parameter or table is one line over all shards, or one for each with --by-shard.

    A family of outer training is one line, with the version of each fragment; below are its
    learners.

    What all workers have left in order is one line, without --all.

    Exit code 1 if a shard does not answer, is not the one that its place in the list says, or lacks
    what others have.
    """
    answers: list[Answer] = []
    with usage_errors():
        credentials = Credentials.of()
        credentials.check_private(parse_target(target))
    for index, address in enumerate(parse_target(target)):
        channel = ShardChannel(index, address, credentials=credentials)
        try:
            answers.append(ask(channel, timeout_s))
        finally:
            channel.close()
    faults = faults_of(answers)
    if as_json:
        for index, (address, answer) in enumerate(answers):
            _print_json(address, answer, verdict(index, answers)[1])
    else:
        screen = console()
        screen.print(_shard_table(answers))
        if any(status.arithmetic for _, status in given(answers)):
            screen.print(_arithmetic(answers), markup=False, soft_wrap=True)
        statuses = [status for _, status in given(answers)]
        ended = set() if shows_all else ended_names(statuses)
        names = _Names(ended, by_shard)
        if statuses:
            screen.print(_parameter_table(answers, names))
            screen.print(legend(_LEGEND))
        families = [
            family
            for name, family in _families(answers).items()
            if ("family", name) not in ended and family.learners
        ]
        if families:
            screen.print(learner_table(families))
            screen.print(legend(LEARNER_LEGEND))
        if any(("table", t.spec.name) not in ended for status in statuses for t in status.tables):
            screen.print(_tables_table(answers, names))
        for words in reported(merged(status.parameters for status in statuses)):
            screen.print(words, markup=False, soft_wrap=True)
        if ended:
            left = ", ".join(name for _, name in sorted(ended))
            words = f"{ENDED} (--all lists them): {left}"
            screen.print(words, markup=False, soft_wrap=True)
        for blocker in blockers(status for _, status in given(answers)):
            if blocker.open_for_s >= LONG_WAIT_S:
                screen.print(str(blocker), style="yellow", markup=False, soft_wrap=True)
        for words in (*told_troubles(statuses), *unfinished(statuses), *abandoned(statuses)):
            screen.print(words, style="yellow", markup=False, soft_wrap=True)
        for fault in faults:
            screen.print(fault, style="red", markup=False, soft_wrap=True)
    if faults:
        raise click.exceptions.Exit(1)


def _arithmetic(answers: list[Answer]) -> str:
    """What computes on the shards, in a line."""
    found: dict[str, list[str]] = {}
    for _, status in given(answers):
        found.setdefault(status.arithmetic, []).append(str(status.shard_index))
    if len(found) == 1:
        return f"computed by {next(iter(found))}"
    words = [f"{what} on {', '.join(indices)}" for what, indices in found.items()]
    return f"computed by {'; '.join(words)}"


def _print_json(address: str, answer: ShardStatus | ShardwellError, fault: str) -> None:
    entry: dict[str, object] = {"address": address}
    if fault:
        entry["error"] = fault
    if not isinstance(answer, ShardwellError):
        entry |= as_json(answer)
        entry["parameters"] = [
            as_json(each) for each in answer.parameters if each.spec.fragment is None
        ]
        entry["families"] = [_family_json(f) for f in families_of(answer.parameters).values()]
    click.echo(json.dumps(entry))


def _family_json(family: Family) -> dict[str, object]:
    """A family as one shard has it."""
    return {
        "name": family.name,
        "fragment_count": family.count,
        "versions": family.versions,
        "learners": [as_json(each) for each in family.learners],
        "fragments": [as_json(part) for parts in family.parts.values() for part in parts],
    }


def _families(answers: list[Answer]) -> dict[str, Family]:
    return families_of(each for _, status in given(answers) for each in status.parameters)


def learner_table(families: Iterable[Family]) -> Table:
    """A line a learner, as it said itself."""
    learners = table(
        "learners", "family", "learner", ">inner steps", ">samples", ">offers", ">sent",
        ">received", ">hidden", ">waited", ">overdue", ">kept", ">said"
    )  # fmt: skip
    for family in families:
        by_worker = {learner.worker_id: learner for learner in family.learners}
        for worker_id in in_order(by_worker):
            found = by_worker[worker_id].progress
            learners.add_row(
                family.name,
                worker_id,
                f"{found.inner_steps:,}",
                f"{found.sample_count:,}",
                f"{found.offered_count:,}",
                size(found.sent_bytes),
                size(found.received_bytes),
                f"{found.hidden_s:.1f} s",
                f"{found.waited_s:.1f} s",
                f"{found.overdue_count:,}",
                f"{found.kept_count:,}",
                f"{duration(by_worker[worker_id].ago_s)} ago",
            )
    return learners


def _shard_table(answers: list[Answer]) -> Table:
    names = {status.cluster_id for _, status in given(answers)}
    title = f"cluster {', '.join(sorted(names))}" if names else "no shard of a cluster"
    shards = table(title, "shard", "address", "state", ">up", ">stored", ">in", ">out", ">streams")
    for index, (address, answer) in enumerate(answers):
        state, fault = verdict(index, answers)
        state = f"[red]{state}[/red]" if fault else f"[green]{state}[/green]"
        if isinstance(answer, ShardwellError):
            shards.add_row(str(index), address, state)
            continue
        shards.add_row(
            f"{answer.shard_index} of {answer.shard_count}",
            address,
            state,
            duration(answer.uptime_s),
            size(answer.stored_bytes),
            size(answer.received_payload_bytes),
            size(answer.sent_payload_bytes),
            str(answer.open_stream_count),
        )
    return shards


_Found = TypeVar("_Found", ParameterStatus, TableStatus)


def _entries(
    kind: str, by_shard: Iterable[tuple[int, Sequence[_Found]]], names: _Names
) -> list[tuple[str, str, list[_Found]]]:
    """What lines are of, in order: a name, its shard or nothing, and what shards have of it."""
    found: dict[tuple[str, int], list[_Found]] = {}
    for index, parts in by_shard:
        for part in parts:
            is_fragment = isinstance(part, ParameterStatus) and part.spec.fragment is not None
            if not is_fragment and (kind, part.spec.name) not in names.ended:
                key = part.spec.name, index if names.are_by_shard else -1
                found.setdefault(key, []).append(part)
    return [
        (name, str(index) if names.are_by_shard else "", found[name, index])
        for name, index in sorted(found)
    ]


def _cells(names: _Names, name: str, shard: str, *cells: str) -> list[str]:
    """A line's cells; the second is the shard, where each has a line."""
    return [name, *([shard] if names.are_by_shard else []), *cells]


def _parameter_table(answers: list[Answer], names: _Names) -> Table:
    columns = _cells(names, "name", ">shard", "elements", "optimizer", "codec", "open step")
    parameters = table("parameters", *columns)
    by_shard = [(status.shard_index, status.parameters) for _, status in given(answers)]
    families = [f for name, f in _families(answers).items() if ("family", name) not in names.ended]
    for name, shard, parts in _entries("parameter", by_shard, names):
        while families and families[0].name < name:
            _add_family(parameters, families.pop(0), names)
        spec = parts[0].spec
        tensor_count = 0 if spec.layout is None else len(spec.layout)
        tensors = f" of {tensor_count} tensor{'s' * (tensor_count > 1)}" if tensor_count else ""
        parameters.add_row(
            *_cells(
                names,
                name,
                shard,
                f"{_range(parts[0]) if names.are_by_shard else spec.size}{tensors}",
                _optimizer(parts[0]),
                spec.codec,
                _open_step(parts),
            )
        )
    for family in families:
        _add_family(parameters, family, names)
    if not parameters.row_count:
        parameters.add_row("none")
    return parameters


def _range(parameter: ParameterStatus) -> str:
    """The elements that a shard has."""
    if not parameter.slice_size:
        return "none"
    return f"{parameter.slice_offset} to {parameter.slice_offset + parameter.slice_size - 1}"


def _optimizer(parameter: ParameterStatus) -> str:
    optimizer = parameter.spec.optimizer
    rate = "" if isinstance(optimizer, Average) else f" {parameter.learning_rate:g}"
    return f"{type(optimizer).__name__}{rate}"


def _add_family(parameters: Table, family: Family, names: _Names) -> None:
    """A line: the versions of all fragments, and who is in the open step of the one that is due."""
    of_all = [part for parts in family.parts.values() for part in parts]
    layouts = [parts[0].spec.layout for parts in family.parts.values()]
    tensor_count = sum(len(layout) for layout in layouts if layout is not None)
    (whole,) = merged([of_all])
    if family.lacking:
        lacking = ", ".join(map(str, family.lacking))
        open_step = f"[red]lacks fragment {lacking}: restore it, or delete the family[/red]"
    elif not whole["ready"]:
        open_step = "[yellow]not initialized[/yellow]"
    else:
        open_step = _with_crew(family.versions_words(), whole)
    parameters.add_row(
        *_cells(
            names,
            family.name,
            "all",
            f"{family.size} of {tensor_count} tensors, {family.count} fragments",
            _optimizer(family.due[0]),
            family.due[0].spec.codec,
            open_step,
        )
    )


def _tables_table(answers: list[Answer], names: _Names) -> Table:
    columns = _cells(names, "name", ">shard", ">rows", ">dim", "optimizer", "codec", "open step")
    tables = table("tables", *columns)
    by_shard = [(status.shard_index, status.tables) for _, status in given(answers)]
    for name, shard, parts in _entries("table", by_shard, names):
        spec = parts[0].spec
        tables.add_row(
            *_cells(
                names,
                name,
                shard,
                f"{sum(part.row_count for part in parts):,}",
                str(spec.dim),
                f"{type(spec.optimizer).__name__} {parts[0].learning_rate:g}",
                spec.codec,
                "[yellow]being restored[/yellow]"
                if any(part.loading for part in parts)
                else _taking_part(str(min(part.version for part in parts)), parts),
            )
        )
    return tables


def _open_step(parts: Sequence[ParameterStatus]) -> str:
    """The step that is open (the version of the oldest chunk), and who is in it."""
    if not all(part.initialized for part in parts):
        return "[yellow]not initialized[/yellow]"
    low = min(part.version_min for part in parts)
    high = max(part.version_max for part in parts)
    step = str(low) if low == high else f"{low} (newest chunk: {high})"
    return _taking_part(step, parts)


def _taking_part(step: str, parts: Sequence[ParameterStatus | TableStatus]) -> str:
    """A step, and who is in it."""
    (whole,) = merged([parts])
    return _with_crew(step, whole)


def _with_crew(step: str, whole: Mapping[str, Any]) -> str:
    """A step, and who is in it, as `merged` has it."""
    if whole["abandoned_for_s"] is not None:
        return f"{step}; [yellow]abandoned for {duration(whole['abandoned_for_s'])}[/yellow]"
    if whole["mode"] == "async":
        return f"{step}, asynchronous"
    parts = [step]
    if whole["in_step"]:
        parts.append(f"in: {', '.join(whole['in_step'])}")
    missing = [*whole["missing"], *filter(None, [whole["lacking"]])]
    if missing:
        parts.append(f"[yellow]missing: {', '.join(missing)}[/yellow]")
    if whole["crew_words"]:
        parts.append(whole["crew_words"])
    elif whole["done"]:
        parts.append(f"done: {', '.join(whole['done'])}")
    if whole.get("late"):
        parts.append(f"late: {whole['late']:,} chunks")
    return "; ".join(parts)
