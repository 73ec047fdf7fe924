"""`shardwell status`: what a cluster holds, and who is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

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
    LONG_WAIT_S,
    Answer,
    abandoned,
    as_json,
    ask,
    blockers,
    duration,
    ended_names,
    given,
    in_order,
    losses,
    merged,
    size,
    told_troubles,
    unfinished,
    verdict,
)
from shardwell_server.terminal import console, table


@click.command()
@shards_option
@click.option("--all", "shows_all", is_flag=True, help="Also what all workers have left in order.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a shard and line.")
@click.option(
    "--timeout-s", type=Duration(), default=5.0, show_default=True, help="For each shard's answer."
)
def status(*, target: str, shows_all: bool, as_json: bool, timeout_s: float) -> None:
    """Show shards, parameters, tables, versions, and who is missing from the open step.

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
    faults = [verdict(index, answers)[1] for index in range(len(answers))]
    lost = losses([status for _, status in given(answers)])
    if as_json:
        for (address, answer), fault in zip(answers, faults, strict=True):
            _print_json(address, answer, fault)
    else:
        screen = console()
        screen.print(_shard_table(answers))
        if any(status.arithmetic for _, status in given(answers)):
            screen.print(_arithmetic(answers), markup=False, soft_wrap=True)
        statuses = [status for _, status in given(answers)]
        ended = set() if shows_all else ended_names(statuses)
        if statuses:
            screen.print(_parameter_table(answers, ended))
        families = [
            family
            for name, family in _families(answers).items()
            if ("family", name) not in ended and family.learners
        ]
        if families:
            screen.print(learner_table(families))
        if any(("table", t.spec.name) not in ended for status in statuses for t in status.tables):
            screen.print(_tables_table(answers, ended))
        if ended:
            names = ", ".join(name for _, name in sorted(ended))
            words = f"ended, all workers have left (--all lists them): {names}"
            screen.print(words, markup=False, soft_wrap=True)
        for blocker in blockers(status for _, status in given(answers)):
            if blocker.open_for_s >= LONG_WAIT_S:
                screen.print(str(blocker), style="yellow", markup=False, soft_wrap=True)
        for words in (*told_troubles(statuses), *unfinished(statuses), *abandoned(statuses)):
            screen.print(words, style="yellow", markup=False, soft_wrap=True)
        for fault in (*filter(None, faults), *lost):
            screen.print(fault, style="red", markup=False, soft_wrap=True)
    if any(faults) or lost:
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


def _parameter_table(answers: list[Answer], ended: set[tuple[str, str]]) -> Table:
    parameters = table(
        "parameters", "name", ">shard", "elements", "optimizer", "codec", "open step"
    )
    rows = sorted(
        (
            (parameter.spec.name, status.shard_index, parameter)
            for _, status in given(answers)
            for parameter in status.parameters
            if parameter.spec.fragment is None
            if ("parameter", parameter.spec.name) not in ended
        ),
        key=lambda row: row[:2],
    )
    families = [f for name, f in _families(answers).items() if ("family", name) not in ended]
    for name, shard_index, parameter in rows:
        while families and families[0].name < name:
            _add_family(parameters, families.pop(0))
        spec = parameter.spec
        last = parameter.slice_offset + parameter.slice_size - 1
        tensors = "" if spec.layout is None else f" of {len(spec.layout)} tensors"
        parameters.add_row(
            name,
            str(shard_index),
            f"{parameter.slice_offset} to {last}{tensors}" if parameter.slice_size else "none",
            _optimizer(parameter),
            spec.codec,
            _open_step(parameter),
        )
    for family in families:
        _add_family(parameters, family)
    if not parameters.row_count:
        parameters.add_row("none")
    return parameters


def _optimizer(parameter: ParameterStatus) -> str:
    optimizer = parameter.spec.optimizer
    rate = "" if isinstance(optimizer, Average) else f" {parameter.learning_rate:g}"
    return f"{type(optimizer).__name__}{rate}"


def _add_family(parameters: Table, family: Family) -> None:
    """A line: the versions of all fragments, and who is in the open step of the one that is due."""
    of_all = [part for parts in family.parts.values() for part in parts]
    layouts = [parts[0].spec.layout for parts in family.parts.values()]
    tensor_count = sum(len(layout) for layout in layouts if layout is not None)
    (whole,) = merged([of_all])
    if family.lacking:
        names = ", ".join(map(str, family.lacking))
        open_step = f"[red]lacks fragment {names}: restore it, or delete the family[/red]"
    elif not whole["ready"]:
        open_step = "[yellow]not initialized[/yellow]"
    else:
        open_step = _with_crew(family.versions_words(), whole)
    parameters.add_row(
        family.name,
        "all",
        f"{family.size} of {tensor_count} tensors, {family.count} fragments",
        _optimizer(family.due[0]),
        family.due[0].spec.codec,
        open_step,
    )


def _tables_table(answers: list[Answer], ended: set[tuple[str, str]]) -> Table:
    tables = table("tables", "name", ">shard", ">rows", ">dim", "optimizer", "codec", "open step")
    rows = sorted(
        (
            (found.spec.name, status.shard_index, found)
            for _, status in given(answers)
            for found in status.tables
            if ("table", found.spec.name) not in ended
        ),
        key=lambda row: row[:2],
    )
    for name, shard_index, found in rows:
        spec = found.spec
        tables.add_row(
            name,
            str(shard_index),
            f"{found.row_count:,}",
            str(spec.dim),
            f"{type(spec.optimizer).__name__} {found.learning_rate:g}",
            spec.codec,
            "[yellow]being restored[/yellow]"
            if found.loading
            else _taking_part(str(found.version), found),
        )
    return tables


def _open_step(parameter: ParameterStatus) -> str:
    """The step that is open (the version of the oldest chunk), and who is in it."""
    if not parameter.initialized:
        return "[yellow]not initialized[/yellow]"
    low, high = parameter.version_min, parameter.version_max
    step = str(low) if low == high else f"{low} (newest chunk: {high})"
    return _taking_part(step, parameter)


def _taking_part(step: str, status: ParameterStatus | TableStatus) -> str:
    """A step, and who is in it."""
    (whole,) = merged([[status]])
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
