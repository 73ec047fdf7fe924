"""`shardwell status`: what a cluster holds, and who is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import click
from rich.table import Table

from shardwell.connection.credentials import Credentials
from shardwell.errors import ShardwellError
from shardwell.rpc.cluster_status import Row, all_rows, rows_of
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ParameterStatus, ShardStatus
from shardwell.specs.fragments import grouped
from shardwell.specs.names import parse_target
from shardwell_server.cli.options import option, shards_option, timeout_option, usage_errors
from shardwell_server.operations.cluster_status import (
    ENDED,
    LONG_WAIT_S,
    Answer,
    abandoned,
    as_json,
    ask,
    blockers,
    duration,
    faults_of,
    given,
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


@click.command()
@shards_option
@option("--all", "Also what all workers have left in order.", name="shows_all", is_flag=True)
@option("--by-shard", "A line for each shard's part of a name.", is_flag=True)
@option("--json", "One JSON object a shard and line.", name="as_json", is_flag=True)
@timeout_option(5.0, "For each shard's answer.")
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
        rows = all_rows(statuses)
        ended = {} if shows_all else {row.key: row for row in rows if row.ended}
        lines = _by_shard(statuses, rows) if by_shard else [(row, "") for row in rows]
        lines = [each for each in lines if each[0].key not in ended]
        if statuses:
            screen.print(_parameter_table(lines, by_shard))
            screen.print(legend(_LEGEND))
        if any(row.learners for row, _ in lines):
            screen.print(learner_table(row for row in rows if row.key not in ended))
            screen.print(legend(LEARNER_LEGEND))
        if any(row.kind == "table" for row, _ in lines):
            screen.print(_tables_table(lines, by_shard))
        for words in reported(rows):
            screen.print(words, markup=False, soft_wrap=True)
        if ended:
            left = ", ".join(name for _, name in sorted(ended))
            words = f"{ENDED} (--all lists them): {left}"
            screen.print(words, markup=False, soft_wrap=True)
        for blocker in blockers(statuses):
            if blocker.open_for_s >= LONG_WAIT_S:
                screen.print(str(blocker), style="yellow", markup=False, soft_wrap=True)
        for words in (*told_troubles(statuses), *unfinished(statuses), *abandoned(rows)):
            screen.print(words, style="yellow", markup=False, soft_wrap=True)
        for fault in faults:
            screen.print(fault, style="red", markup=False, soft_wrap=True)
    if faults:
        raise click.exceptions.Exit(1)


def _arithmetic(answers: list[Answer]) -> str:
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
        groups = grouped(answer.parameters)
        entry |= as_json(answer)
        entry["parameters"] = [as_json(each) for own in groups.alone.values() for each in own]
        entry["families"] = [
            {
                "name": row.name,
                "fragment_count": row.fragment_count,
                "versions": row.versions,
                "learners": as_json(row.learners),
                "fragments": [as_json(each) for each in groups.families[row.name].all],
            }
            for row in rows_of(answer.parameters)
            if row.kind == "family"
        ]
    click.echo(json.dumps(entry))


def learner_table(rows: Iterable[Row]) -> Table:
    """Makes a table with a line a learner, from its own reports."""
    learners = table(
        "learners", "family", "learner", ">inner steps", ">samples", ">offers", ">sent",
        ">received", ">hidden", ">waited", ">overdue", ">kept", ">said"
    )  # fmt: skip
    for row in rows:
        for learner in row.learners:
            found = learner.progress
            learners.add_row(
                row.name,
                learner.worker_id,
                f"{found.inner_steps:,}",
                f"{found.sample_count:,}",
                f"{found.offered_count:,}",
                size(found.sent_bytes),
                size(found.received_bytes),
                f"{found.hidden_s:.1f} s",
                f"{found.waited_s:.1f} s",
                f"{found.overdue_count:,}",
                f"{found.kept_count:,}",
                f"{duration(learner.ago_s)} ago",
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


def _by_shard(statuses: Sequence[ShardStatus], rows: Sequence[Row]) -> list[tuple[Row, str]]:
    found = [(row.name, -1, row) for row in rows if row.kind == "family"]
    for status in statuses:
        of_shard = [*rows_of(status.parameters), *rows_of(status.tables)]
        found += [(row.name, status.shard_index, row) for row in of_shard if row.kind != "family"]
    found.sort(key=lambda each: each[:2])
    return [(row, "all" if index < 0 else str(index)) for _, index, row in found]


def _cells(by_shard: bool, name: str, shard: str, *cells: str) -> list[str]:
    return [name, *([shard] if by_shard else []), *cells]


def _parameter_table(lines: Iterable[tuple[Row, str]], by_shard: bool) -> Table:
    columns = _cells(by_shard, "name", ">shard", "elements", "optimizer", "codec", "open step")
    parameters = table("parameters", *columns)
    for row, shard in lines:
        if row.kind == "table":
            continue
        count = row.tensor_count
        tensors = f" of {count} tensor{'s' * (count > 1)}" if count else ""
        if row.kind == "family":
            elements = f"{row.elements} of {count} tensors, {row.fragment_count} fragments"
        else:
            elements = f"{_range(row) if by_shard else row.elements}{tensors}"
        parameters.add_row(
            *_cells(by_shard, row.name, shard, elements, row.rule_words, row.codec, _open_step(row))
        )
    if not parameters.row_count:
        parameters.add_row("none")
    return parameters


def _range(row: Row) -> str:
    (part,) = row.parts
    assert isinstance(part, ParameterStatus)
    if not part.slice_size:
        return "none"
    return f"{part.slice_offset} to {part.slice_offset + part.slice_size - 1}"


def _tables_table(lines: Iterable[tuple[Row, str]], by_shard: bool) -> Table:
    columns = _cells(by_shard, "name", ">shard", ">rows", ">dim", "optimizer", "codec", "open step")
    tables = table("tables", *columns)
    for row, shard in lines:
        if row.kind == "table":
            cells = (f"{row.rows:,}", str(row.dim), row.rule_words, row.codec, _open_step(row))
            tables.add_row(*_cells(by_shard, row.name, shard, *cells))
    return tables


def _open_step(row: Row) -> str:
    absent = [str(index) for index, version in enumerate(row.versions) if version is None]
    if absent:
        lacks = ", ".join(absent)
        return f"[red]lacks fragment {lacks}: restore it, or delete the family[/red]"
    if not row.ready:
        word = "being restored" if row.kind == "table" else "not initialized"
        return f"[yellow]{word}[/yellow]"
    step = row.versions_words or str(row.step)
    if row.newest != row.step and not row.versions:
        step += f" (newest chunk: {row.newest})"
    if row.abandoned_for_s is not None:
        return f"{step}; [yellow]abandoned for {duration(row.abandoned_for_s)}[/yellow]"
    if row.mode == "async":
        return f"{step}, asynchronous"
    parts = [step]
    if row.in_step:
        parts.append(f"in: {', '.join(row.in_step)}")
    missing = [*row.missing, *filter(None, [row.lacking])]
    if missing:
        parts.append(f"[yellow]missing: {', '.join(missing)}[/yellow]")
    if row.crew_words:
        parts.append(row.crew_words)
    elif row.done:
        parts.append(f"done: {', '.join(row.done)}")
    if row.late:
        parts.append(f"late: {row.late:,} chunks")
    return "; ".join(parts)
