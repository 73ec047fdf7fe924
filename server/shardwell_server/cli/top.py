"""`shardwell top`: what `status` tells, again and again, with rates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardwell.connection.credentials import Credentials
from shardwell.errors import ShardwellError
from shardwell.rpc.cluster_status import Row, all_rows
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import MemberStatus
from shardwell.specs.names import parse_target
from shardwell_server.cli.options import option, shards_option, timeout_option, usage_errors
from shardwell_server.cli.quantities import Duration
from shardwell_server.cli.status import LEARNER_LEGEND
from shardwell_server.operations.cluster_status import (
    ENDED,
    LONG_WAIT_S,
    Answer,
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

_RATE_S = 5.0
_NAME_COUNT = 4
_LAG_COUNT = 2
_LAG_S_MIN = 0.001
_SHARD_LEGEND = "stored: weights, sums and optimizer state; in/s, out/s: payload"
_LEGEND = (
    "in the open step, missing: workers whose gradients are in it, and those that it still lacks; "
    "lag: how long after the first worker one came in its last step"
)


@click.command()
@shards_option
@option("--interval-s", "Between two looks.", Duration(0.1), default=1.0)
@option("--once", "Look twice, for the rates, print, and end.", is_flag=True)
@timeout_option(2.0, "For each shard's answer.")
def top(*, target: str, interval_s: float, once: bool, timeout_s: float) -> None:
    """Watch a cluster: for whom everybody waits, steps and bytes a second; Ctrl-C ends it.

    Exit code with --once: as of `shardwell status`.
    """
    with usage_errors():
        credentials = Credentials.of()
        addresses = parse_target(target)
        credentials.check_private(addresses)
    channels = [
        ShardChannel(index, address, credentials=credentials)
        for index, address in enumerate(addresses)
    ]
    rates, screen = _Rates(), console()
    with ThreadPoolExecutor(min(len(channels), 16)) as threads:

        def look() -> tuple[Group, list[str]]:
            answers = list(threads.map(partial(ask, timeout_s=timeout_s), channels))
            faults = faults_of(answers)
            return _picture(answers, faults, rates), faults

        first, _ = look()
        if once or not screen.is_terminal:
            time.sleep(interval_s)
            last, faults = look()
            screen.print(last)
            if faults:
                raise click.exceptions.Exit(1)
            return
        with Live(first, console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(look()[0], refresh=True)


class _Rates:
    def __init__(self) -> None:
        self._kept: dict[str, deque[tuple[float, float]]] = {}

    def of(self, key: str, count: float) -> float:
        """Returns a rate a second; 0 as long as it has nothing to compare with."""
        now_s = time.monotonic()
        past = self._kept.setdefault(key, deque())
        if past and count < past[-1][1]:  # it began anew
            past.clear()
        past.append((now_s, count))
        while now_s - past[0][0] > _RATE_S:
            past.popleft()
        first_s, first = past[0]
        return (count - first) / (now_s - first_s) if now_s > first_s else 0.0


def _picture(answers: Sequence[Answer], faults: Sequence[str], rates: _Rates) -> Group:
    statuses = [status for _, status in given(answers)]
    lines = [Text(fault, style="red") for fault in faults]
    troubles = (*told_troubles(statuses), *unfinished(statuses))
    lines += [Text(words, style="yellow") for words in troubles]
    waits = [each for each in blockers(statuses) if each.open_for_s >= LONG_WAIT_S]
    lines += [Text(str(each), style="yellow") for each in waits]
    if not lines:
        lines = [Text("no worker has waited longer than 1 s", style="green")]
    rows = all_rows(statuses)
    shown: list[Table | Text] = [_shards(answers, rates), legend(_SHARD_LEGEND)]
    shown += [_names(rows, rates), legend(_LEGEND)]
    shown += [Text(words) for words in reported(rows)]
    if ended := sorted(row.key for row in rows if row.ended):
        shown += [Text(), Text(f"{ENDED}: {', '.join(name for _, name in ended)}")]
    if any(row.learners for row in rows):
        shown += [_learners(rows, rates), legend(LEARNER_LEGEND)]
    return Group(*lines, Text(), *shown)


def _shards(answers: Sequence[Answer], rates: _Rates) -> Table:
    shards = table("", "shard", "address", "state", ">up", ">stored", ">in/s", ">out/s", ">streams")
    for index, (address, answer) in enumerate(answers):
        state, fault = verdict(index, answers)
        shown = Text(state, style="red" if fault else "green")
        if isinstance(answer, ShardwellError):
            shards.add_row(str(index), address, shown)
            continue
        shards.add_row(
            str(index),
            address,
            shown,
            duration(answer.uptime_s),
            size(answer.stored_bytes),
            size(rates.of(f"in {index}", answer.received_payload_bytes)),
            size(rates.of(f"out {index}", answer.sent_payload_bytes)),
            str(answer.open_stream_count),
        )
    return shards


def _names(rows: Sequence[Row], rates: _Rates) -> Table:
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
            f"{rates.of(name, row.step):.3g}",
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


def _learners(rows: Sequence[Row], rates: _Rates) -> Table:
    shown = table(
        "", "family", "learner", ">inner steps", ">samples/s", ">sent/s", ">received/s", ">hidden",
        ">waited", ">overdue", ">kept", ">said"
    )  # fmt: skip
    for row in rows:
        for learner in row.learners:
            said, key = learner.progress, f"learner {row.name} {learner.worker_id}"
            shown.add_row(
                row.name,
                learner.worker_id,
                f"{said.inner_steps:,}",
                f"{rates.of(f'{key} samples', said.sample_count):.3g}",
                size(rates.of(f"{key} sent", said.sent_bytes)),
                size(rates.of(f"{key} received", said.received_bytes)),
                f"{said.hidden_s:.1f} s",
                f"{said.waited_s:.1f} s",
                f"{said.overdue_count:,}",
                f"{said.kept_count:,}",
                f"{duration(learner.ago_s)} ago",
            )
    return shown


def _lags(members: Sequence[MemberStatus]) -> str:
    late = [(each.worker_id, each.lag_s or 0.0) for each in members]
    late = [(worker_id, lag_s) for worker_id, lag_s in late if lag_s >= _LAG_S_MIN]
    return ", ".join(f"{worker_id} {1000 * lag_s:.0f} ms" for worker_id, lag_s in late[:_LAG_COUNT])


def _some(names: Sequence[str], lacking: str = "") -> str:
    more = len(names) - _NAME_COUNT
    words = [*names[:_NAME_COUNT]] + ([f"{more} more"] if more > 0 else [])
    return ", ".join(words + ([lacking] if lacking else []))
