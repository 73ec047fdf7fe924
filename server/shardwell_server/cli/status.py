"""`shardwell status`: what a cluster holds, and who is missing."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any

import click
from rich.table import Table

from shardwell.errors import (
    AuthenticationError,
    DeadlineError,
    ShardUnavailableError,
    ShardwellError,
)
from shardwell.rpc.credentials import Credentials
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ParameterStatus, ShardStatus, TableStatus, ask_status
from shardwell.specs.initializers import Initializer
from shardwell.specs.names import parse_target
from shardwell.specs.optimizers import Average, Optimizer
from shardwell_server.cli.duration import Duration
from shardwell_server.cli.options import shards_option, usage_errors
from shardwell_server.cli.tables import table
from shardwell_server.terminal import console

_Answer = tuple[str, ShardStatus | ShardwellError]
"""An address, and what came from there."""


@click.command()
@shards_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object a shard and line.")
@click.option(
    "--timeout-s", type=Duration(), default=5.0, show_default=True, help="For each shard's answer."
)
def status(*, target: str, as_json: bool, timeout_s: float) -> None:
    """Show shards, parameters, tables, versions, and who is missing from the open step.

    Exit code 1 if a shard does not answer, or is not the one that its place in the list says.
    """
    answers: list[_Answer] = []
    with usage_errors():
        credentials = Credentials.of()
        credentials.check_private(parse_target(target))
    for index, address in enumerate(parse_target(target)):
        channel = ShardChannel(index, address, credentials=credentials)
        try:
            answers.append((address, ask_status(channel, timeout_s)))
        except ShardwellError as error:
            answers.append((address, _reason(channel, error, timeout_s)))
        finally:
            channel.close()
    faults = [_verdict(index, answers)[1] for index in range(len(answers))]
    if as_json:
        for (address, answer), fault in zip(answers, faults, strict=True):
            _print_json(address, answer, fault)
    else:
        screen = console()
        screen.print(_shard_table(answers))
        if any(status.arithmetic for _, status in _given(answers)):
            screen.print(_arithmetic(answers), markup=False, soft_wrap=True)
        if _given(answers):
            screen.print(_parameter_table(answers))
        if any(status.tables for _, status in _given(answers)):
            screen.print(_tables_table(answers))
        for fault in filter(None, faults):
            screen.print(fault, style="red", markup=False, soft_wrap=True)
    if any(faults):
        raise click.exceptions.Exit(1)


def _reason(channel: ShardChannel, error: ShardwellError, timeout_s: float) -> ShardwellError:
    """Why a shard gives no answer: TLS, where that keeps the two sides apart, else the error."""
    try:
        if isinstance(error, ShardUnavailableError):
            channel.check_trust(timeout_s)
    except AuthenticationError as apart:
        return apart
    return error


def _arithmetic(answers: list[_Answer]) -> str:
    """What computes on the shards, in a line."""
    found: dict[str, list[str]] = {}
    for _, status in _given(answers):
        found.setdefault(status.arithmetic, []).append(str(status.shard_index))
    if len(found) == 1:
        return f"computed by {next(iter(found))}"
    words = [f"{what} on {', '.join(indices)}" for what, indices in found.items()]
    return f"computed by {'; '.join(words)}"


def _given(answers: list[_Answer]) -> list[tuple[str, ShardStatus]]:
    """Those of shards that answered."""
    return [(a, status) for a, status in answers if not isinstance(status, ShardwellError)]


def _verdict(index: int, answers: list[_Answer]) -> tuple[str, str]:
    """How the shard at a place is, as its cell says it, and what is wrong; "": nothing."""
    address, answer = answers[index]
    if isinstance(answer, (DeadlineError, ShardUnavailableError)):
        return "no answer", answer.message
    if isinstance(answer, AuthenticationError):
        return "not let in", answer.message
    if isinstance(answer, ShardwellError):
        return "failing", f"{address}: {answer.message}"
    expected_id = _given(answers)[0][1].cluster_id
    is_in_place = (answer.shard_index, answer.shard_count) == (index, len(answers))
    if is_in_place and answer.cluster_id == expected_id:
        return "serving", ""
    return "wrong place" if not is_in_place else "other cluster", (
        f"{address} should be shard {index} of {len(answers)} of cluster {expected_id!r}; it is "
        f"shard {answer.shard_index} of {answer.shard_count} of cluster {answer.cluster_id!r}; "
        "give all addresses, in the order of the shards"
    )


def _print_json(address: str, answer: ShardStatus | ShardwellError, fault: str) -> None:
    entry: dict[str, object] = {"address": address}
    if fault:
        entry["error"] = fault
    if not isinstance(answer, ShardwellError):
        entry |= _as_json(answer)
    click.echo(json.dumps(entry))


def _as_json(value: Any) -> Any:
    """Fields by name; of what comes in kinds, such as optimizers, the kind's name too."""
    if isinstance(value, tuple):
        return [_as_json(one) for one in value]
    if not dataclasses.is_dataclass(value):
        return value
    kind = {"kind": type(value).__name__} if isinstance(value, (Optimizer, Initializer)) else {}
    names = [field.name for field in dataclasses.fields(value)]
    return kind | {name: _as_json(getattr(value, name)) for name in names}


def _shard_table(answers: list[_Answer]) -> Table:
    names = {status.cluster_id for _, status in _given(answers)}
    title = f"cluster {', '.join(sorted(names))}" if names else "no shard of a cluster"
    shards = table(title, "shard", "address", "state", ">up", ">stored", ">in", ">out", ">streams")
    for index, (address, answer) in enumerate(answers):
        state, fault = _verdict(index, answers)
        state = f"[red]{state}[/red]" if fault else f"[green]{state}[/green]"
        if isinstance(answer, ShardwellError):
            shards.add_row(str(index), address, state)
            continue
        shards.add_row(
            f"{answer.shard_index} of {answer.shard_count}",
            address,
            state,
            _uptime(answer.uptime_s),
            _size(answer.stored_bytes),
            _size(answer.received_payload_bytes),
            _size(answer.sent_payload_bytes),
            str(answer.open_stream_count),
        )
    return shards


def _parameter_table(answers: list[_Answer]) -> Table:
    parameters = table(
        "parameters", "name", ">shard", "elements", "optimizer", "codec", "open step"
    )
    rows = sorted(
        (
            (parameter.spec.name, status.shard_index, parameter)
            for _, status in _given(answers)
            for parameter in status.parameters
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


def _tables_table(answers: list[_Answer]) -> Table:
    tables = table("tables", "name", ">shard", ">rows", ">dim", "optimizer", "codec", "open step")
    rows = sorted(
        (
            (found.spec.name, status.shard_index, found)
            for _, status in _given(answers)
            for found in status.tables
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
    if status.spec.mode == "async":
        return f"{step}, asynchronous"
    missing = _in_order(status.missing_worker_ids)
    if status.unknown_worker_count:
        missing.append(f"{status.unknown_worker_count} never seen")
    parts = [step]
    if status.contributed_worker_ids:
        parts.append(f"in: {', '.join(_in_order(status.contributed_worker_ids))}")
    if missing:
        parts.append(f"[yellow]missing: {', '.join(missing)}[/yellow]")
    if status.done_worker_ids:
        parts.append(f"done: {', '.join(_in_order(status.done_worker_ids))}")
    return "; ".join(parts)


def _in_order(worker_ids: Iterable[str]) -> list[str]:
    """Names as people count: worker-2 before worker-10."""

    def key(worker_id: str) -> list[str | int]:
        parts = re.split(r"([0-9]+)", worker_id)  # words at even places, numbers between
        return [int(part) if place % 2 else part for place, part in enumerate(parts)]

    return sorted(worker_ids, key=key)


def _uptime(seconds: float) -> str:
    """In two digits for four days; --json has it exactly."""
    for unit, length_s in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 100 * length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return f"{seconds // 86400:.0f} d"


def _size(count: int) -> str:
    """In three digits, from 0.1 MB on."""
    amount, unit = count / 1e6, "MB"
    for larger in ("GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1e3, larger
    return f"{amount:.1f} {unit}" if amount < 99.95 else f"{amount:.0f} {unit}"
