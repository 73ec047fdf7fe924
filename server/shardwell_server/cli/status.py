"""`shardwell status`: what a cluster holds, and who is missing."""

from __future__ import annotations

import json

import click
from rich.table import Table

from shardwell.connection.credentials import Credentials
from shardwell.errors import ShardwellError
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
    crew_words,
    duration,
    ended_names,
    given,
    in_order,
    lacking,
    losses,
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
    click.echo(json.dumps(entry))


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
            if ("parameter", parameter.spec.name) not in ended
        ),
        key=lambda row: row[:2],
    )
    for name, shard_index, parameter in rows:
        spec = parameter.spec
        last = parameter.slice_offset + parameter.slice_size - 1
        tensors = "" if spec.layout is None else f" of {len(spec.layout)} tensors"
        rate = "" if isinstance(spec.optimizer, Average) else f" {parameter.learning_rate:g}"
        parameters.add_row(
            name,
            str(shard_index),
            f"{parameter.slice_offset} to {last}{tensors}" if parameter.slice_size else "none",
            f"{type(spec.optimizer).__name__}{rate}",
            spec.codec,
            _open_step(parameter),
        )
    if not rows:
        parameters.add_row("none")
    return parameters


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
    if status.abandoned_for_s is not None:
        return f"{step}; [yellow]abandoned for {duration(status.abandoned_for_s)}[/yellow]"
    if status.spec.mode == "async":
        return f"{step}, asynchronous"
    missing = in_order(status.missing_worker_ids)
    is_elastic = status.spec.members is not None
    if status.unknown_worker_count:
        missing.append(lacking(status.unknown_worker_count, is_elastic=is_elastic))
    parts = [step]
    if status.contributed_worker_ids:
        parts.append(f"in: {', '.join(in_order(status.contributed_worker_ids))}")
    if missing:
        parts.append(f"[yellow]missing: {', '.join(missing)}[/yellow]")
    if is_elastic:
        parts.append(crew_words(status, status.members))
    elif status.done_worker_ids:
        parts.append(f"done: {', '.join(in_order(status.done_worker_ids))}")
    if isinstance(status, ParameterStatus) and status.late_chunk_count:
        parts.append(f"late: {status.late_chunk_count:,} chunks")
    return "; ".join(parts)
