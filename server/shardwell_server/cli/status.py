"""`shardwell status`: what a cluster holds, and who is missing."""

from __future__ import annotations

import json

import click
from google.protobuf import json_format
from rich.table import Table

from shardwell.channel import ShardChannel, parse_target
from shardwell.errors import ShardwellError
from shardwell.optimizers import Average
from shardwell.specs import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server.cli.tables import console, table

_Answer = tuple[str, pb.GetStatusResponse | ShardwellError]
"""An address, and what came from there."""


@click.command()
@click.argument("target", envvar="SHARDWELL_SHARDS")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a shard and line.")
@click.option(
    "--timeout-s", type=float, default=5.0, show_default=True, help="For each shard's answer."
)
def status(*, target: str, as_json: bool, timeout_s: float) -> None:
    """Show shards, parameters, versions, and who is missing from the open step.

    TARGET is HOST:PORT[,HOST:PORT...]; default: $SHARDWELL_SHARDS. Exit code 1 if a shard does not
    answer.
    """
    answers: list[_Answer] = []
    for index, address in enumerate(parse_target(target)):
        channel = ShardChannel(index, address)
        try:
            answers.append(
                (
                    address,
                    channel.call(
                        "GetStatus",
                        pb.GetStatusRequest(),
                        pb.GetStatusResponse,
                        timeout_s=timeout_s,
                    ),
                )
            )
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
        for message in failed:
            screen.print(message, style="red", markup=False, highlight=False)
    if failed:
        raise click.exceptions.Exit(1)


def _print_json(address: str, answer: pb.GetStatusResponse | ShardwellError) -> None:
    if isinstance(answer, ShardwellError):
        entry: dict[str, object] = {"address": address, "error": answer.message}
    else:
        fields = json_format.MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        entry = {"address": address, **fields}
    click.echo(json.dumps(entry))


def _shard_table(answers: list[_Answer]) -> Table:
    names = {a.shard.cluster_id for _, a in answers if not isinstance(a, ShardwellError)}
    title = f"cluster {', '.join(sorted(names))}" if names else "no shard answers"
    shards = table(title, "shard", "address", "state", ">up", ">stored", ">in", ">out", ">streams")
    for index, (address, answer) in enumerate(answers):
        if isinstance(answer, ShardwellError):
            shards.add_row(str(index), address, "[red]no answer[/red]")
            continue
        shard = answer.shard
        right = shard.shard_index == index and shard.shard_count == len(answers)
        shards.add_row(
            f"{shard.shard_index} of {shard.shard_count}",
            address,
            "[green]serving[/green]" if right else "[red]wrong place[/red]",
            f"{answer.uptime_s:.0f} s",
            _megabytes(answer.stored_bytes),
            _megabytes(answer.received_payload_bytes),
            _megabytes(answer.sent_payload_bytes),
            str(answer.open_stream_count),
        )
    return shards


def _parameter_table(answers: list[_Answer]) -> Table:
    parameters = table(
        "parameters", "name", ">shard", "elements", "optimizer", "codec", "open step"
    )
    rows = sorted(
        (parameter.spec.name, answer.shard.shard_index, parameter)
        for _, answer in answers
        if not isinstance(answer, ShardwellError)
        for parameter in answer.parameters
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


def _open_step(spec: ParameterSpec, parameter: pb.ParameterStatus) -> str:
    """The step that is open (the version of the oldest chunk), and who is in it."""
    if not parameter.initialized:
        return "[yellow]not initialized[/yellow]"
    low, high = parameter.version_min, parameter.version_max
    step = str(low) if low == high else f"{low} (newest chunk: {high})"
    if spec.mode == "async":
        return f"{step}, asynchronous"
    missing = list(parameter.missing_worker_ids)
    if parameter.unknown_worker_count:
        missing.append(f"{parameter.unknown_worker_count} never seen")
    parts = [step]
    if parameter.contributed_worker_ids:
        parts.append(f"in: {', '.join(parameter.contributed_worker_ids)}")
    if missing:
        parts.append(f"[yellow]missing: {', '.join(missing)}[/yellow]")
    return "; ".join(parts)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
