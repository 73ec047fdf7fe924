"""The answers of a cluster's shards, judged: for `status`, `top` and the status page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardwell.connection.absence import BUSY
from shardwell.errors import (
    AuthenticationError,
    DeadlineError,
    ShardUnavailableError,
    ShardwellError,
)
from shardwell.rpc.cluster_status import Row, Status, in_order, lacking, newest_of, step_of
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import MemberStatus, MissingWorker, ShardStatus, ask_status
from shardwell.specs.initializers import Initializer
from shardwell.specs.optimizers import Optimizer

Answer = tuple[str, ShardStatus | ShardwellError]
ENDED = "ended, all workers have left"
LONG_WAIT_S = 1.0
"""A step that is open for less is one of many, and waits for no worker in particular."""
_OF_CLIENT = ("host", "pid", "connected", "software_version")


def ask(channel: ShardChannel, timeout_s: float) -> Answer:
    """Returns a shard's status, or the reason for its silence; blocks twice `timeout_s` at most."""
    try:
        return channel.address, ask_status(channel, timeout_s)
    except ShardwellError as error:
        return channel.address, _reason(channel, error, timeout_s)


def _reason(channel: ShardChannel, error: ShardwellError, timeout_s: float) -> ShardwellError:
    if not isinstance(error, ShardUnavailableError):
        return error
    try:
        channel.check_trust(timeout_s)
    except AuthenticationError as apart:
        return apart
    reason = channel.why_absent(timeout_s)
    if reason == BUSY:  # it may have said itself why, such as that it is stopping
        return error
    where = f"shard {channel.shard_index} at {channel.address}"
    return ShardUnavailableError(f"{where}: {reason}", shard_index=channel.shard_index)


def given(answers: Sequence[Answer]) -> list[tuple[str, ShardStatus]]:
    """Returns the answers of shards that gave one."""
    return [(a, status) for a, status in answers if not isinstance(status, ShardwellError)]


def verdict(index: int, answers: Sequence[Answer]) -> tuple[str, str]:
    """Returns the state of the shard at a place, in a word or two, and its fault; "": none."""
    address, answer = answers[index]
    if isinstance(answer, (DeadlineError, ShardUnavailableError)):
        return "no answer", answer.message
    if isinstance(answer, AuthenticationError):
        return "not let in", answer.message
    if isinstance(answer, ShardwellError):
        return "failing", f"{address}: {answer.message}"
    expected_id = given(answers)[0][1].cluster_id
    is_in_place = (answer.shard_index, answer.shard_count) == (index, len(answers))
    if is_in_place and answer.cluster_id == expected_id:
        return "serving", ""
    return "wrong place" if not is_in_place else "other cluster", (
        f"{address} should be shard {index} of {len(answers)} of cluster {expected_id!r}; it is "
        f"shard {answer.shard_index} of {answer.shard_count} of cluster {answer.cluster_id!r}; "
        "give all addresses, in the order of the shards"
    )


def faults_of(answers: Sequence[Answer]) -> list[str]:
    """Returns each shard's faults, and parameters and tables that some shards lack."""
    own = [verdict(index, answers)[1] for index in range(len(answers))]
    return [*filter(None, own), *losses([status for _, status in given(answers)])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocker:
    """The workers for which an open step waits, on all shards together."""

    kind: str
    name: str
    step: int
    open_for_s: float
    workers: tuple[MissingWorker, ...]
    """Known workers that are missing on some shard; of very many, some."""
    unknown_count: int
    """Workers of worker_count that never opened it; or members that it lacks of min_count."""
    is_elastic: bool

    def __str__(self) -> str:
        names = [str(each) for each in self.workers]
        if self.unknown_count and self.is_elastic:
            names.append(lacking(self.unknown_count, is_elastic=True))
        elif self.unknown_count:
            workers = "workers that were" if self.unknown_count > 1 else "worker that was"
            names.append(f"{self.unknown_count} {workers} never seen")
        return (
            f"step {self.step} of {self.kind} {self.name!r} has waited {duration(self.open_for_s)} "
            f"for {', '.join(names)}"
        )


def blockers(statuses: Iterable[ShardStatus]) -> list[Blocker]:
    """Returns the workers that others wait for; of each name the oldest open step."""
    found = []
    for (kind, name), parts in sorted(_held(statuses).items()):
        begun = [
            part
            for part in parts.values()
            if part.wait.open_for_s is not None and (part.wait.workers or part.unknown_worker_count)
        ]
        step = min(map(step_of, begun), default=0)
        begun = [part for part in begun if step_of(part) == step]
        if begun:
            workers = {each.worker_id: each for part in begun for each in part.wait.workers}
            blocker = Blocker(
                kind=kind,
                name=name,
                step=step,
                open_for_s=max(part.wait.open_for_s or 0.0 for part in begun),
                workers=tuple(workers[worker_id] for worker_id in in_order(workers)),
                unknown_count=max(part.unknown_worker_count for part in begun),
                is_elastic=begun[0].spec.members is not None,
            )
            found.append(blocker)
    return found


def _held(statuses: Iterable[ShardStatus]) -> dict[tuple[str, str], dict[int, Status]]:
    found: dict[tuple[str, str], dict[int, Status]] = {}
    for status in statuses:
        for parameter in status.parameters:
            found.setdefault(("parameter", parameter.spec.name), {})[status.shard_index] = parameter
        for table in status.tables:
            found.setdefault(("table", table.spec.name), {})[status.shard_index] = table
    return found


def losses(statuses: Sequence[ShardStatus]) -> list[str]:
    """Returns parameters and tables that have begun on some shards, and that others lack."""
    words = []
    marked = _marked(statuses)
    for (kind, name), parts in sorted(_held(statuses).items()):
        if (kind, name) in marked:  # it is missing where it was deleted
            continue
        absent = [s.shard_index for s in statuses if s.shard_index not in parts]
        if absent and any(map(newest_of, parts.values())):
            which = ", ".join(map(str, absent))
            words.append(
                f"{kind} {name!r} has begun, and shard {which} does not have it: it lost its "
                "memory; stop it and start it with its files, or restore a checkpoint"
            )
    return words


def _marked(statuses: Sequence[ShardStatus]) -> dict[tuple[str, str], list[int]]:
    return {
        key: [*parts]
        for key, parts in sorted(_held(statuses).items())
        if any(part.marked for part in parts.values())
    }


def reported(rows: Iterable[Row]) -> list[str]:
    """Returns the last reports of workers, a line for each name; ended ones are left out."""
    lines = []
    for row in rows:
        if row.figures and not row.ended:
            figures = [
                f"{name} {format(value, '.4g') if math.isfinite(value) else 'not finite'}"
                for name, value in sorted(row.figures.items())
            ]
            lines.append(f"reported of {row.name}: {', '.join(figures)}")
    return lines


def unfinished(
    statuses: Sequence[ShardStatus], is_shown: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Returns the deletions that were cut off, or are under way."""
    return [
        f"{kind} {name!r} is being deleted, and shard {', '.join(map(str, shards))} has it still; "
        f"if that was cut off, finish it: shardwell delete {name}"
        for (kind, name), shards in _marked(statuses).items()
        if is_shown(name)
    ]


def abandoned(rows: Iterable[Row]) -> list[str]:
    """Returns parameters and tables whose workers are gone for long, without having left."""
    return [
        f"{row.kind} {row.name!r} is abandoned: no worker of it has been connected for "
        f"{duration(row.abandoned_for_s)}; start them again, or delete it: "
        f"shardwell delete {row.name}"
        for row in rows
        if row.abandoned_for_s is not None
    ]


def told_troubles(
    statuses: Sequence[ShardStatus], is_shown: Callable[[str], bool] = lambda name: True
) -> dict[str, str]:
    """Returns the troubles that shards report, each with its shard, and their runbook sections."""
    return {
        each.words if each.name else f"shard {status.shard_index}: {each.words}": each.section
        for status in statuses
        for each in status.troubles
        if is_shown(each.name)
    }


def workers(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Returns each worker once, except ended and abandoned ones; disconnected ones first."""
    seats: dict[str, list[tuple[Row, MemberStatus, int]]] = {}
    for row in rows:
        if not row.ended and row.abandoned_for_s is None:
            members = row.latest_first
            newest = max((each.next_step for each in members), default=0)
            for member in members:
                behind = newest - member.next_step
                seats.setdefault(member.worker_id, []).append((row, member, behind))
    found = [_worker(worker_id, seats[worker_id]) for worker_id in in_order(seats)]
    return sorted(found, key=lambda each: each["connected"])


def _worker(worker_id: str, seats: Sequence[tuple[Row, MemberStatus, int]]) -> dict[str, Any]:
    rows, members, behind = zip(*seats, strict=True)
    here = next((each for each in members if each.connected), members[0])
    return {
        "worker_id": worker_id,
        **{name: getattr(here, name) for name in _OF_CLIENT},
        "transports": sorted({each for member in members for each in member.transports}),
        "names": [["table" if row.kind == "table" else "parameter", row.name] for row in rows],
        "behind_steps": max(behind),
        "lag_s": max((each.lag_s for each in members if each.lag_s is not None), default=None),
        "idle_s": min((each.idle_s for each in members if each.idle_s is not None), default=None),
    }


def duration(seconds: float) -> str:
    """Formats a length of time, of two digits for four days."""
    for unit, length_s in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 100 * length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return f"{seconds // 86400:.0f} d"


def size(count: float) -> str:
    """Formats a count of bytes, of three digits, from 0.1 MB on."""
    amount, unit = count / 1e6, "MB"
    for larger in ("GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1e3, larger
    return f"{amount:.1f} {unit}" if amount < 99.95 else f"{amount:.0f} {unit}"


def as_json(value: Any) -> Any:
    """Returns fields by name, and a kind's name; None for numbers that JSON lacks."""
    if isinstance(value, tuple):
        return [as_json(one) for one in value]
    if isinstance(value, Mapping):
        return {name: as_json(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not dataclasses.is_dataclass(value):
        return value
    kind = {"kind": type(value).__name__} if isinstance(value, (Optimizer, Initializer)) else {}
    names = [field.name for field in dataclasses.fields(value)]
    return kind | {name: as_json(getattr(value, name)) for name in names}
