"""`shardwell samples`: the account of a parameter's samples, and what a step had of them."""

from __future__ import annotations

import json

import click

from shardwell.errors import UnknownParameterError
from shardwell.rpc.shard_status import SamplesStatus
from shardwell.rpc.step_samples import StepSamples
from shardwell_server.cli.options import connected, option, shards_option, timeout_option
from shardwell_server.operations.cluster_status import as_json
from shardwell_server.terminal import console, table

_INDEX_COUNT = 8
"""Samples that a row names."""


@click.command()
@click.argument("name")
@option("--step", "What this step had: one of the last 1,024.", click.IntRange(min=0))
@option("--json", "One JSON object a line.", name="prints_json", is_flag=True)
@shards_option
@timeout_option(60.0)
def samples(
    *, name: str, step: int | None, prints_json: bool, target: str, timeout_s: float
) -> None:
    """List the account of the samples of parameter NAME, or with --step what a step had.

    Exit code 1 if there is no such parameter or step, or shard 0 does not answer.
    """
    with connected("samples", target, timeout_s) as (client, rest_s):
        if step is not None:
            _print_step(client.step_samples(name, step, timeout_s=rest_s), step, prints_json)
            return
        [first, *_] = client.status(timeout_s=rest_s)
        accounts = [each.samples for each in first.parameters if each.spec.name == name]
        if not accounts:
            raise UnknownParameterError(f"there is no parameter {name!r}", parameter=name)
        _print_accounts(name, accounts[0], prints_json)


def _print_step(found: list[StepSamples], step: int, prints_json: bool) -> None:
    if prints_json:
        for each in found:
            facts = {"worker": each.worker_id, "dataset": each.name, "epoch": each.epoch}
            places = {"positions": each.ranges, "samples": each.indices.tolist()}
            click.echo(json.dumps({"step": step, **facts, **places}))
        return
    rows = table(f"samples of step {step}", "worker", "dataset", ">epoch", ">count", "samples")
    for each in found:
        shown = ", ".join(map(str, each.indices[:_INDEX_COUNT].tolist()))
        more = ", ..." if len(each.indices) > _INDEX_COUNT else ""
        count = f"{len(each.indices):,}"
        rows.add_row(each.worker_id, each.name, str(each.epoch), count, shown + more)
    if not found:
        rows.add_row("none")
    console().print(rows)


def _print_accounts(name: str, found: tuple[SamplesStatus, ...], prints_json: bool) -> None:
    if prints_json:
        for each in found:
            click.echo(json.dumps({"parameter": name, **as_json(each)}))
        return
    rows = table(
        f"samples of {name}", "dataset", ">epoch", ">done", ">out", ">free", ">left out", ">partial"
    )
    for each in found:
        counts = (each.done_count, each.out_count, each.free_count, each.left_out_count)
        rows.add_row(
            each.name, str(each.epoch), *(f"{n:,}" for n in counts), f"{each.partial_count:,}"
        )
    if not found:
        rows.add_row("none")
    screen = console()
    screen.print(rows)
    for each in found:
        for partial in each.partial:
            places = ", ".join(f"{start} to {stop - 1}" for start, stop in partial.ranges)
            screen.print(
                f"partial: step {partial.step} of {partial.worker_id}, dataset {each.name}, "
                f"positions {places}"
            )
