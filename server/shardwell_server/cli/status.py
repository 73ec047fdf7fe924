"""`shardwell status`: what a cluster holds, and who is missing."""

from __future__ import annotations

import click
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table

from shardwell.channel import ShardChannel, parse_target
from shardwell.errors import ShardwellError
from shardwell.specs import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb


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
    answers: list[tuple[str, pb.GetStatusResponse | ShardwellError]] = []
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
    if as_json:
        for address, answer in answers:
            _print_json(address, answer)
    else:
        console = Console()
        console.print(_shard_table(answers))
        console.print(_parameter_table(answers))
    if any(isinstance(answer, ShardwellError) for _, answer in answers):
        raise click.exceptions.Exit(1)


def _print_json(address: str, answer: pb.GetStatusResponse | ShardwellError) -> None:
    import json

    if isinstance(answer, ShardwellError):
        entry: dict[str, object] = {"address": address, "error": answer.message}
    else:
        fields = json_format.MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        entry = {"address": address, **fields}
    click.echo(json.dumps(entry))


def _shard_table(answers: list[tuple[str, pb.GetStatusResponse | ShardwellError]]) -> Table:
    table = Table(title="shards", title_justify="left")
    for column in ("shard", "address", "cluster", "state", "up", "stored", "in", "out", "streams"):
        table.add_column(column, justify="right" if column in _NUMERIC else "left")
    for index, (address, answer) in enumerate(answers):
        if isinstance(answer, ShardwellError):
            table.add_row(str(index), address, "", f"[red]{type(answer).__name__}[/red]")
            continue
        shard = answer.shard
        right = shard.shard_index == index and shard.shard_count == len(answers)
        state = "[green]serving[/green]" if right else "[red]at the wrong place[/red]"
        table.add_row(
            f"{shard.shard_index} of {shard.shard_count}",
            address,
            shard.cluster_id,
            state,
            f"{answer.uptime_s:.0f} s",
            _megabytes(answer.stored_bytes),
            _megabytes(answer.received_payload_bytes),
            _megabytes(answer.sent_payload_bytes),
            str(answer.open_stream_count),
        )
    return table


_NUMERIC = frozenset({"up", "stored", "in", "out", "streams"})


def _parameter_table(answers: list[tuple[str, pb.GetStatusResponse | ShardwellError]]) -> Table:
    table = Table(title="parameters", title_justify="left")
    for column in ("parameter", "shard", "elements", "optimizer", "codec", "version", "open step"):
        table.add_column(column)
    rows = sorted(
        (parameter.spec.name, answer.shard.shard_index, parameter)
        for _, answer in answers
        if not isinstance(answer, ShardwellError)
        for parameter in answer.parameters
    )
    for name, shard_index, parameter in rows:
        spec = ParameterSpec.from_proto(parameter.spec)
        low, high = parameter.version_min, parameter.version_max
        last = parameter.slice_offset + parameter.slice_size - 1
        table.add_row(
            name,
            str(shard_index),
            f"{parameter.slice_offset} to {last}" if parameter.slice_size else "none",
            f"{type(spec.optimizer).__name__}, rate {parameter.learning_rate:g}",
            spec.codec,
            str(low) if low == high else f"{low} to {high}",
            _open_step(spec, parameter),
        )
    return table


def _open_step(spec: ParameterSpec, parameter: pb.ParameterStatus) -> str:
    if not parameter.initialized:
        return "[yellow]not initialized[/yellow]"
    if spec.mode == "async":
        return "asynchronous"
    here = ", ".join(parameter.contributed_worker_ids) or "nobody"
    missing = list(parameter.missing_worker_ids)
    if parameter.unknown_worker_count:
        missing.append(f"{parameter.unknown_worker_count} never seen")
    text = f"{parameter.version_min}: {here} contributed"
    return f"{text}; [yellow]missing: {', '.join(missing)}[/yellow]" if missing else text


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
