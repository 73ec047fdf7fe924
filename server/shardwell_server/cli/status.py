"""`shardwell status`: what a cluster holds, and who is missing; `top`: with rates."""

from __future__ import annotations

import json
import math
import operator
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardwell.errors import ShardwellError
from shardwell.rpc.cluster_status import Row, all_rows, rows_of
from shardwell.rpc.shard_status import MemberStatus, ParameterStatus, ShardStatus
from shardwell.specs.fragments import grouped
from shardwell_server.cli.options import asking, option, shards_option, timeout_option
from shardwell_server.cli.quantities import Duration
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
_LEARNER_LEGEND = (
    "hidden: offers travelled while the learner computed; waited: it did nothing else; overdue: "
    "offers whose result came too late; kept: takes that kept uncounted work"
)
_SAMPLES_LEGEND = (
    "done, out, free: samples of the epoch that have counted, that workers have, the rest; left "
    "out: as drop_last says; partial: gradients that have counted in some chunks, and will in no "
    "others"
)
_TOP_SHARD_LEGEND = "stored: weights, sums and optimizer state; in/s, out/s: payload"
_TOP_LEGEND = (
    "in the open step, missing: workers whose gradients are in it, and those that it still lacks; "
    "lag: how long after the first worker one came in its last step"
)
_RATE_S = 5.0
_NAME_COUNT = 4
_LAG_COUNT = 2
_LAG_S_MIN = 0.001


@click.command()
@shards_option
@option("--all", "Also what all workers have left in order.", name="shows_all", is_flag=True)
@option("--by-shard", "A line for each shard's part of a name.", is_flag=True)
@option("--json", "One JSON object a shard and line.", name="prints_json", is_flag=True)
@timeout_option(5.0, "For each shard's answer.")
def status(
    *, target: str, shows_all: bool, by_shard: bool, prints_json: bool, timeout_s: float
) -> None:
    """Show shards, parameters, tables, versions, and who is missing from the open step.

    A parameter or table is one line over all shards, or one for each with --by-shard.

    A family of outer training is one line, with the version of each fragment; below are its
    learners. Datasets whose samples are dealt have a line each, with the epoch, and how many of
    its samples have counted.

    What all workers have left in order is one line, without --all.

    Exit code 1 if a shard does not answer, is not the one that its place in the list says, or lacks
    what others have.
    """
    with asking(target, partial(ask, timeout_s=timeout_s)) as ask_all:
        answers = ask_all()
    faults = faults_of(answers)
    if prints_json:
        for index, (address, answer) in enumerate(answers):
            _print_json(address, answer, verdict(index, answers)[1])
    else:
        _print_tables(answers, faults, shows_all=shows_all, by_shard=by_shard)
    if faults:
        raise click.exceptions.Exit(1)


@click.command()
@shards_option
@option("--interval-s", "Between two looks.", Duration(0.1), default=1.0)
@option("--once", "Look twice, for the rates, print, and end.", is_flag=True)
@timeout_option(2.0, "For each shard's answer.")
def top(*, target: str, interval_s: float, once: bool, timeout_s: float) -> None:
    """Watch a cluster: for whom everybody waits, steps and bytes a second; Ctrl-C ends it.

    Exit code with --once: as of `shardwell status`.
    """
    rates, screen = Rates(), console()
    with asking(target, partial(ask, timeout_s=timeout_s)) as ask_all:
        first = _picture(ask_all(), rates)
        if once or not screen.is_terminal:
            time.sleep(interval_s)
            answers = ask_all()
            screen.print(_picture(answers, rates))
            if faults_of(answers):
                raise click.exceptions.Exit(1)
            return
        with Live(first, console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(_picture(ask_all(), rates), refresh=True)


class Rates:
    """The rates of counts, over the last seconds in which they were looked at."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[tuple[float, Sequence[float]]]] = {}

    def of(self, key: str, *counts: float) -> list[float]:
        """Returns rates a second; zeros as long as it has nothing to compare with."""
        now_s = time.monotonic()
        past = self._kept.setdefault(key, deque())
        if past and any(map(operator.lt, counts, past[-1][1])):  # it began anew
            past.clear()
        past.append((now_s, counts))
        while now_s - past[0][0] > _RATE_S:
            past.popleft()
        first_s, first = past[0]
        passed_s = now_s - first_s or math.inf
        return [(new - old) / passed_s for new, old in zip(counts, first, strict=True)]


def _print_tables(
    answers: Sequence[Answer], faults: Sequence[str], *, shows_all: bool, by_shard: bool
) -> None:
    screen = console()
    statuses = [status for _, status in given(answers)]
    rows = all_rows(statuses)
    ended = {} if shows_all else {row.key: row for row in rows if row.ended}
    lines = _by_shard(statuses, rows) if by_shard else [(row, "") for row in rows]
    lines = [each for each in lines if each[0].key not in ended]
    screen.print(_shard_table(answers))
    if any(status.arithmetic for status in statuses):
        screen.print(_arithmetic(answers), markup=False, soft_wrap=True)
    if statuses:
        screen.print(_parameter_table(lines, by_shard))
        screen.print(legend(_LEGEND))
    if any(row.learners for row, _ in lines):
        screen.print(_learner_table(row for row in rows if row.key not in ended))
        screen.print(legend(_LEARNER_LEGEND))
    if any(row.samples for row, _ in lines):
        screen.print(_samples_table(row for row in rows if row.key not in ended))
        screen.print(legend(_SAMPLES_LEGEND))
    if any(row.kind == "table" for row, _ in lines):
        screen.print(_tables_table(lines, by_shard))
    told = reported(rows)
    if ended:
        left = ", ".join(name for _, name in sorted(ended))
        told.append(f"{ENDED} (--all lists them): {left}")
    warnings = [*_waits(statuses), *_troubles(statuses), *abandoned(rows)]
    for style, said in (("", told), ("yellow", warnings), ("red", faults)):
        for words in said:
            screen.print(words, style=style, markup=False, soft_wrap=True)


def _picture(answers: Sequence[Answer], rates: Rates) -> Group:
    statuses = [status for _, status in given(answers)]
    lines = [Text(fault, style="red") for fault in faults_of(answers)]
    warnings = (*_troubles(statuses), *_waits(statuses))
    lines += [Text(words, style="yellow") for words in warnings]
    if not lines:
        lines = [Text("no worker has waited longer than 1 s", style="green")]
    rows = all_rows(statuses)
    shown: list[Table | Text] = [_shard_table(answers, rates), legend(_TOP_SHARD_LEGEND)]
    shown += [_names(rows, rates), legend(_TOP_LEGEND)]
    shown += [Text(words) for words in reported(rows)]
    if ended := sorted(row.key for row in rows if row.ended):
        shown += [Text(), Text(f"{ENDED}: {', '.join(name for _, name in ended)}")]
    if any(row.learners for row in rows):
        shown += [_learner_table(rows, rates), legend(_LEARNER_LEGEND)]
    if any(row.samples for row in rows):
        shown += [_samples_table(rows), legend(_SAMPLES_LEGEND)]
    return Group(*lines, Text(), *shown)


def _troubles(statuses: Sequence[ShardStatus]) -> list[str]:
    return [*told_troubles(statuses), *unfinished(statuses)]


def _waits(statuses: Sequence[ShardStatus]) -> list[str]:
    return [str(each) for each in blockers(statuses) if each.open_for_s >= LONG_WAIT_S]


def _arithmetic(answers: Sequence[Answer]) -> str:
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


def _learner_table(rows: Iterable[Row], rates: Rates | None = None) -> Table:
    title, columns = "", [">samples/s", ">sent/s", ">received/s"]
    if rates is None:
        title, columns = "learners", [">samples", ">offers", ">sent", ">received"]
    ends = (">hidden", ">waited", ">overdue", ">kept", ">said")
    learners = table(title, "family", "learner", ">inner steps", *columns, *ends)
    for row in rows:
        for learner in row.learners:
            found = learner.progress
            moved = (found.sample_count, found.sent_bytes, found.received_bytes)
            if rates is None:
                flows = [f"{moved[0]:,}", f"{found.offered_count:,}", *map(size, moved[1:])]
            else:
                a_second = rates.of(f"learner {row.name} {learner.worker_id}", *moved)
                flows = [f"{a_second[0]:.3g}", *map(size, a_second[1:])]
            learners.add_row(
                row.name,
                learner.worker_id,
                f"{found.inner_steps:,}",
                *flows,
                f"{found.hidden_s:.1f} s",
                f"{found.waited_s:.1f} s",
                f"{found.overdue_count:,}",
                f"{found.kept_count:,}",
                f"{duration(learner.ago_s)} ago",
            )
    return learners


def _samples_table(rows: Iterable[Row]) -> Table:
    counts = (">done", ">out", ">free", ">left out", ">partial")
    samples = table("samples", "name", "dataset", ">epoch", *counts)
    for row in rows:
        for found in row.samples:
            samples.add_row(
                row.name,
                found.name,
                str(found.epoch),
                f"{found.done_count:,} of {found.length:,}",
                f"{found.out_count:,}",
                f"{found.free_count:,}",
                f"{found.left_out_count:,}",
                f"{found.partial_count:,}",
            )
    return samples


def _shard_table(answers: Sequence[Answer], rates: Rates | None = None) -> Table:
    names = ", ".join(sorted({status.cluster_id for _, status in given(answers)}))
    title = f"cluster {names}" if names else "no shard of a cluster"
    flows = (">in", ">out") if rates is None else (">in/s", ">out/s")
    shards = table(
        title if rates is None else "",
        *("shard", "address", "state", ">up", ">stored", *flows, ">streams"),
    )
    for index, (address, answer) in enumerate(answers):
        state, fault = verdict(index, answers)
        shown = Text(state, style="red" if fault else "green")
        if isinstance(answer, ShardwellError):
            shards.add_row(str(index), address, shown)
            continue
        place = str(index)
        moved: Sequence[float] = (answer.received_payload_bytes, answer.sent_payload_bytes)
        if rates is None:
            place = f"{answer.shard_index} of {answer.shard_count}"
        else:
            moved = rates.of(f"shard {index}", *moved)
        shards.add_row(
            place,
            address,
            shown,
            duration(answer.uptime_s),
            size(answer.stored_bytes),
            *map(size, moved),
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


def _names(rows: Sequence[Row], rates: Rates) -> Table:
    names = table(
        "", "name", ">step", ">steps/s", "optimizer", "in the open step", "missing", "lag"
    )
    for row in rows:
        if row.ended:
            continue
        name = row.name + (" (table)" if row.kind == "table" else "")
        names.add_row(
            name,
            row.versions_words or f"{row.step:,}",
            f"{rates.of(name, row.step)[0]:.3g}",
            row.rule_words,
            _some(row.in_step),
            f"abandoned for {duration(row.abandoned_for_s)}"
            if row.abandoned_for_s is not None
            else "asynchronous"
            if row.mode == "async"
            else _some(row.missing, row.lacking),
            _lags(row.latest_first),
        )
    if not rows:
        names.add_row("none")
    return names


def _lags(members: Sequence[MemberStatus]) -> str:
    late = [(each.worker_id, each.lag_s or 0.0) for each in members]
    late = [(worker_id, lag_s) for worker_id, lag_s in late if lag_s >= _LAG_S_MIN]
    return ", ".join(f"{worker_id} {1000 * lag_s:.0f} ms" for worker_id, lag_s in late[:_LAG_COUNT])


def _some(names: Sequence[str], lacking: str = "") -> str:
    more = len(names) - _NAME_COUNT
    words = [*names[:_NAME_COUNT]] + ([f"{more} more"] if more > 0 else [])
    return ", ".join(words + ([lacking] if lacking else []))
