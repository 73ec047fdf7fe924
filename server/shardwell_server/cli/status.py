"""`shardwell status`: what a cluster holds, and who is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

import click
from google.protobuf import json_format
from rich.table import Table

from shardwell.channel import ShardChannel, parse_target
from shardwell.errors import ShardwellError
from shardwell.optimizers import Average
from shardwell.specs import ParameterSpec
from shardwell.table_spec import TableSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import table_pb2
from shardwell_server.cli.tables import console, table


class _Status(NamedTuple):
    """What a shard told of itself."""

    shard: pb.GetStatusResponse
    tables: table_pb2.GetTableStatusResponse


_Answer = tuple[str, _Status | ShardwellError]
"""An address, and what came from there."""


@click.command()
@click.argument("target", envvar="SHARDWELL_SHARDS")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a shard and line.")
@click.option(
    "--timeout-s", type=float, default=5.0, show_default=True, help="For each shard's answer."
)
def status(*, target: str, as_json: bool, timeout_s: float) -> None:
    """Show shards, parameters, tables, versions, and who is missing from the open step.

    TARGET is HOST:PORT[,HOST:PORT...]; default: $SHARDWELL_SHARDS. Exit code 1 if a shard does not
    answer.
    """
    answers: list[_Answer] = []
    for index, address in enumerate(parse_target(target)):
        channel = ShardChannel(index, address)
        try:
            answers.append((address, _ask(channel, timeout_s)))
        except ShardwellError as error:
            answers.append((address, error))
        finally:
            channel.close()
    failed = [answer.message for _, answer in answers if isinstance(answer, ShardwellError)]
    if as_json:
        for address, answer in answers:
            _print_json(address, answer)
    else:
        screen = console()
        screen.print(_shard_table(answers))
        screen.print(_parameter_table(answers))
        if any(status.tables.tables for _, status in _given(answers)):
            screen.print(_tables_table(answers))
        for message in failed:
            screen.print(message, style="red", markup=False, highlight=False)
    if failed:
        raise click.exceptions.Exit(1)


def _ask(channel: ShardChannel, timeout_s: float) -> _Status:
    """Two questions; blocks up to `timeout_s` for each answer."""
    shard = channel.call(
        "GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, timeout_s=timeout_s
    )
    tables = channel.call(
        "GetTableStatus",
        table_pb2.GetTableStatusRequest(shard=shard.shard),
        table_pb2.GetTableStatusResponse,
        timeout_s=timeout_s,
        table="",
    )
    return _Status(shard, tables)


def _given(answers: list[_Answer]) -> list[tuple[str, _Status]]:
    """Those of shards that answered."""
    return [(a, status) for a, status in answers if not isinstance(status, ShardwellError)]


def _print_json(address: str, answer: _Status | ShardwellError) -> None:
    entry: dict[str, object] = {"address": address}
    if isinstance(answer, ShardwellError):
        entry["error"] = answer.message
    else:
        for message in answer:
            entry |= json_format.MessageToDict(
                message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
    click.echo(json.dumps(entry))


def _shard_table(answers: list[_Answer]) -> Table:
    names = {status.shard.shard.cluster_id for _, status in _given(answers)}
    title = f"cluster {', '.join(sorted(names))}" if names else "no shard answers"
    shards = table(title, "shard", "address", "state", ">up", ">stored", ">in", ">out", ">streams")
    for index, (address, answer) in enumerate(answers):
        if isinstance(answer, ShardwellError):
            shards.add_row(str(index), address, "[red]no answer[/red]")
            continue
        status, shard = answer.shard, answer.shard.shard
        right = shard.shard_index == index and shard.shard_count == len(answers)
        shards.add_row(
            f"{shard.shard_index} of {shard.shard_count}",
            address,
            "[green]serving[/green]" if right else "[red]wrong place[/red]",
            _uptime(status.uptime_s),
            _size(status.stored_bytes),
            _size(status.received_payload_bytes),
            _size(status.sent_payload_bytes),
            str(status.open_stream_count),
        )
    return shards


def _parameter_table(answers: list[_Answer]) -> Table:
    parameters = table(
        "parameters", "name", ">shard", "elements", "optimizer", "codec", "open step"
    )
    rows = sorted(
        (parameter.spec.name, status.shard.shard.shard_index, parameter)
        for _, status in _given(answers)
        for parameter in status.shard.parameters
    )
    for name, shard_index, parameter in rows:
        spec = ParameterSpec.from_proto(parameter.spec)
        last = parameter.slice_offset + parameter.slice_size - 1
        rate = "" if isinstance(spec.optimizer, Average) else f" {parameter.learning_rate:g}"
        parameters.add_row(
            name,
            str(shard_index),
            f"{parameter.slice_offset} to {last}" if parameter.slice_size else "none",
            f"{type(spec.optimizer).__name__}{rate}",
            spec.codec,
            _open_step(spec, parameter),
        )
    if not rows:
        parameters.add_row("none")
    return parameters


def _tables_table(answers: list[_Answer]) -> Table:
    tables = table("tables", "name", ">shard", ">rows", ">dim", "optimizer", "codec", "open step")
    rows = sorted(
        (
            (found.spec.name, status.shard.shard.shard_index, found)
            for _, status in _given(answers)
            for found in status.tables.tables
        ),
        key=lambda row: row[:2],
    )
    for name, shard_index, found in rows:
        spec = TableSpec.from_proto(found.spec)
        tables.add_row(
            name,
            str(shard_index),
            f"{found.row_count:,}",
            str(spec.dim),
            f"{type(spec.optimizer).__name__} {found.learning_rate:g}",
            spec.codec,
            "[yellow]being restored[/yellow]"
            if found.loading
            else _taking_part(str(found.version), spec.mode, found),
        )
    return tables


def _open_step(spec: ParameterSpec, parameter: pb.ParameterStatus) -> str:
    """The step that is open (the version of the oldest chunk), and who is in it."""
    if not parameter.initialized:
        return "[yellow]not initialized[/yellow]"
    low, high = parameter.version_min, parameter.version_max
    step = str(low) if low == high else f"{low} (newest chunk: {high})"
    return _taking_part(step, spec.mode, parameter)


def _taking_part(step: str, mode: str, status: pb.ParameterStatus | table_pb2.TableStatus) -> str:
    """A step, and who is in it."""
    if mode == "async":
        return f"{step}, asynchronous"
    missing = _in_order(status.missing_worker_ids)
    if status.unknown_worker_count:
        missing.append(f"{status.unknown_worker_count} never seen")
    parts = [step]
    if status.contributed_worker_ids:
        parts.append(f"in: {', '.join(_in_order(status.contributed_worker_ids))}")
    if missing:
        parts.append(f"[yellow]missing: {', '.join(missing)}[/yellow]")
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
