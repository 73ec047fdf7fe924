"""`shardwell trace`: the last steps of all shards and workers, as a timeline."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import secrets
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from shardwell.errors import ShardwellError
from shardwell.process import span_columns
from shardwell.process.spans import now_ns
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ask_status
from shardwell.specs.names import check_name
from shardwell.v1 import types_pb2
from shardwell_server.cli.options import (
    GivenPath,
    asking,
    option,
    shards_option,
    timeout_option,
    usage_errors,
)
from shardwell_server.cli.quantities import Duration
from shardwell_server.operations import timeline
from shardwell_server.terminal import console, legend, table

_LOOKED_AT_BYTES = 4096
_LEGEND = (
    "call: all of exchange, or of put_gradient and get_weights, whose parts overlap; encode, wait, "
    "decode: its parts; between: from a call to the next, mostly computing"
)
_SHOWN_NAME_COUNT = 20
_REST_S = 5.0


@click.command()
@click.argument("file", type=GivenPath())
@shards_option
@option(
    "--last-s",
    "Only of the last so many seconds; default: all that is remembered.",
    Duration(0.001),
)
@option(
    "--parameter",
    "Only of that parameter, table or family; default: of all.",
    name="name",
    metavar="NAME",
)
@timeout_option(2.0, "For workers' answers.")
def trace(
    *, file: Path, target: str, last_s: float | None, name: str | None, timeout_s: float
) -> None:
    """Write the last steps of all shards and workers to FILE, as a timeline.

    An existing FILE is replaced if it is a timeline that this command wrote, or empty. Open it
    at https://ui.perfetto.dev, or in Chrome at chrome://tracing. A name that ends in .gz is
    compressed. Exit code 1 if a shard does not answer.
    """
    with usage_errors():
        if name is not None:
            check_name("--parameter", name)
    if not file.absolute().parent.is_dir():
        raise click.UsageError(f"there is no directory {file.absolute().parent}")
    _check_replaceable(file)
    since_ns = 0 if last_s is None else now_ns() - int(last_s * 1e9)
    with asking(target, partial(_recorded, wait_s=timeout_s, since_ns=since_ns)) as ask_all:
        answers = ask_all()
    processes, silent, faults = _joined(answers)
    if name is not None and processes:
        processes = _of_name(processes, name)
    screen = console()
    if processes:
        made = timeline.chrome_trace(processes)
        _write(file, made)
        screen.print(_summary(file, processes, made), markup=False, soft_wrap=True)
        workers = [each for each in processes if each.shard_index is None]
        if any(timeline.spent(each) for each in workers):
            screen.print(_table(workers))
            screen.print(legend(_LEGEND))
        for last in timeline.lasts(processes):
            screen.print(
                f"{last.worker_id} was last in {last.step_count} of {last.of_count} steps, and "
                f"waited for by {last.median_s * 1000:.3g} ms in the median",
                markup=False,
                soft_wrap=True,
            )
        for wait in _open_waits(processes):
            screen.print(wait, style="yellow", markup=False, soft_wrap=True)
    if silent:
        screen.print(
            f"gave nothing within {timeout_s:g} s: {', '.join(silent)}; what they did is missing",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    for fault in faults:
        screen.print(fault, style="red", markup=False, soft_wrap=True)
    if faults:
        raise click.exceptions.Exit(1)


_Recorded = tuple[list[timeline.Process], list[str]]


def _recorded(channel: ShardChannel, *, wait_s: float, since_ns: int) -> _Recorded | ShardwellError:
    try:
        status = ask_status(channel, _REST_S)
        channel.identity = types_pb2.ShardIdentity(
            cluster_id=status.cluster_id,
            shard_index=status.shard_index,
            shard_count=status.shard_count,
        )
        offset_ns, error_ns = channel.clock_offset(_REST_S)
        processes: list[timeline.Process] = []
        silent: list[str] = []
        for answer in channel.record(wait_s, wait_s + _REST_S):
            silent += answer.silent_worker_ids
            if not answer.HasField("process"):
                continue
            span_columns.check(answer.process)
            is_shard = not processes
            processes.append(
                timeline.Process(
                    answer.process,
                    status.shard_index if is_shard else None,
                    answer.process.clock_offset_ns - offset_ns,
                    answer.process.clock_error_ns + error_ns,
                    since_ns,
                    list(answer.open_steps),
                )
            )
    except ShardwellError as error:
        return error
    return processes, silent


def _joined(
    answers: Sequence[_Recorded | ShardwellError],
) -> tuple[list[timeline.Process], list[str], list[str]]:
    processes: list[timeline.Process] = []
    silent: list[str] = []
    faults: list[str] = []
    for answer in answers:
        if isinstance(answer, ShardwellError):
            faults.append(answer.message)
        else:
            processes += answer[0]
            silent += answer[1]
    # Of workers by name; a sort leaves shards in their order.
    return (
        sorted(processes, key=lambda each: "" if each.shard_index is not None else each.name),
        sorted(silent),
        faults,
    )


def _of_name(processes: Sequence[timeline.Process], name: str) -> list[timeline.Process]:
    found = [timeline.only(process, name) for process in processes]
    if not any(each.message.kinds or each.open_steps for each in found):
        names = sorted({word for each in processes for word in timeline.subjects(each)})
        known = ", ".join(names[:_SHOWN_NAME_COUNT]) or "nothing"
        more = len(names) - _SHOWN_NAME_COUNT
        raise click.ClickException(
            f"no shard and no worker remembers a step of {name!r}; they remember {known}"
            f"{f' and {more} more' if more > 0 else ''}"
        )
    return found


def _write(file: Path, made: dict[str, Any]) -> None:
    """Writes a file as a whole or not at all; a pipe or a device is written to."""
    contents = json.dumps(made, separators=(",", ":")).encode()
    if file.suffix == ".gz":
        contents = gzip.compress(contents)
    try:
        if file.exists() and not file.is_file():
            file.write_bytes(contents)
            return
        _check_replaceable(file)
        target = file.resolve()  # of a link, what it names
        made_file = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with made_file.open("xb") as opened:
                opened.write(contents)
            os.replace(made_file, target)
        except BaseException:
            with contextlib.suppress(OSError):
                made_file.unlink()
            raise
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None


def _check_replaceable(file: Path) -> None:
    """Refuses to replace a file that is not empty, and no timeline of this command's."""
    try:
        if not file.is_file() or not file.stat().st_size:
            return
        with file.open("rb") as opened:
            begin = opened.read(_LOOKED_AT_BYTES)
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None
    if begin.startswith(b"\x1f\x8b"):
        with contextlib.suppress(zlib.error):
            begin = zlib.decompressobj(wbits=31).decompress(begin, _LOOKED_AT_BYTES)
    expected = json.dumps({"otherData": timeline.MADE_BY}, separators=(",", ":"))[:-1]
    if not begin.startswith(expected.encode()):
        raise click.ClickException(
            f"{file} exists, and is no timeline that `shardwell trace` wrote; remove it, "
            "or give another name"
        )


def _summary(file: Path, processes: Sequence[timeline.Process], made: dict[str, Any]) -> str:
    shard_count = sum(each.shard_index is not None for each in processes)
    worker_count = len(processes) - shard_count
    spans = [event for event in made["traceEvents"] if event["ph"] == "X"]
    end_us = max((event["ts"] + event["dur"] for event in spans), default=0.0)
    return (
        f"{file}: {len(spans)} spans of {shard_count} shards and {worker_count} workers, over "
        f"{end_us / 1e6:.3g} s; open it at https://ui.perfetto.dev"
    )


def _table(workers: Sequence[timeline.Process]) -> Table:
    made = table(
        "a step, in ms", "worker", ">steps", ">call", ">encode", ">wait", ">decode", ">between"
    )
    for worker in workers:
        spent = timeline.spent(worker)
        if spent is not None:
            times = (spent.call_s, spent.encode_s, spent.wait_s, spent.decode_s, spent.between_s)
            shown = (f"{1000 * each:.3g}" for each in times)
            made.add_row(spent.worker_id, str(spent.step_count), *shown)
    return made


def _open_waits(processes: Sequence[timeline.Process]) -> list[str]:
    """Each worker counts once for all shards."""
    found = {}
    for process in processes:
        for step in process.open_steps:
            names = ", ".join(each.worker_id for each in step.wait.workers)
            if step.wait.open_for_s >= 1.0:
                found[step.kind, step.name] = (
                    f"step {step.step} of {step.kind} {step.name!r} is open for "
                    f"{step.wait.open_for_s:.3g} s, and waits for {names or 'workers never seen'}"
                )
    return list(found.values())
