"""What a cluster is like now, as its shards tell it: for `status`, `top` and the status page."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardwell.connection.absence import BUSY
from shardwell.errors import (
    AuthenticationError,
    DeadlineError,
    ShardUnavailableError,
    ShardwellError,
)
from shardwell.rpc.families import Family, families_of
from shardwell.rpc.members import merged_members
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import (
    MemberState,
    MemberStatus,
    MissingWorker,
    ParameterStatus,
    ShardStatus,
    TableStatus,
    ask_status,
)
from shardwell.specs.initializers import Initializer
from shardwell.specs.optimizers import Optimizer

Answer = tuple[str, ShardStatus | ShardwellError]
"""An address, and what came from there."""
ENDED = "ended, all workers have left"
LONG_WAIT_S = 1.0
"""A step that is open for less is one of many, and waits for no worker in particular."""
_STATES: tuple[MemberState, ...] = ("awaited", "seated", "draining", "lost", "over", "unknown")
"""Of members, as they are listed."""
NAME_COUNT_MAX = 100
"""Workers of each kind that are listed for a parameter or table."""


def ask(channel: ShardChannel, timeout_s: float) -> Answer:
    """What a shard says of itself, or why it says nothing; blocks twice `timeout_s` at most."""
    try:
        return channel.address, ask_status(channel, timeout_s)
    except ShardwellError as error:
        return channel.address, _reason(channel, error, timeout_s)


def _reason(channel: ShardChannel, error: ShardwellError, timeout_s: float) -> ShardwellError:
    """Why a shard gives no answer: TLS, a host, a port, or else the error."""
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
    """Those of shards that answered."""
    return [(a, status) for a, status in answers if not isinstance(status, ShardwellError)]


def verdict(index: int, answers: Sequence[Answer]) -> tuple[str, str]:
    """How the shard at a place is, in a word or two, and what is wrong; "": nothing."""
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
    """Faults of shards: each one's own, and parameters and tables that some of them lack."""
    own = [verdict(index, answers)[1] for index in range(len(answers))]
    return [*filter(None, own), *losses([status for _, status in given(answers)])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocker:
    """For whom an open step waits, on all shards together."""

    kind: str
    """"parameter" or "table"."""
    name: str
    """Its name."""
    step: int
    """The step that is open."""
    open_for_s: float
    """Seconds since the first contribution to it on any shard."""
    workers: tuple[MissingWorker, ...]
    """Known workers that are missing on some shard; of very many, some."""
    unknown_count: int
    """Workers of worker_count that never opened it; or members that it lacks of min_count."""
    is_elastic: bool
    """Whether workers come and go."""

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
    """For whom everybody waits; of each parameter and table the oldest open step."""
    found: dict[tuple[str, str], list[ParameterStatus | TableStatus]] = {}
    for status in statuses:
        for parameter in status.parameters:
            found.setdefault(("parameter", parameter.spec.name), []).append(parameter)
        for table in status.tables:
            found.setdefault(("table", table.spec.name), []).append(table)
    return [
        blocker
        for (kind, name), parts in sorted(found.items())
        if (blocker := _blocker(kind, name, parts)) is not None
    ]


def _blocker(
    kind: str, name: str, parts: Sequence[ParameterStatus | TableStatus]
) -> Blocker | None:
    begun = [
        (step_of(part), part.wait.open_for_s, part)
        for part in parts
        if part.wait.open_for_s is not None and (part.wait.workers or part.unknown_worker_count)
    ]
    if not begun:
        return None
    step = min(each for each, _, _ in begun)
    of_step = [(open_for_s, part) for each, open_for_s, part in begun if each == step]
    workers = {worker.worker_id: worker for _, part in of_step for worker in part.wait.workers}
    return Blocker(
        kind=kind,
        name=name,
        step=step,
        open_for_s=max(open_for_s for open_for_s, _ in of_step),
        workers=tuple(workers[worker_id] for worker_id in in_order(workers)),
        unknown_count=max(part.unknown_worker_count for _, part in of_step),
        is_elastic=parts[0].spec.members is not None,
    )


def lacking(count: int, *, is_elastic: bool) -> str:
    """How many workers a step lacks that have no name yet; empty: none."""
    if not count:
        return ""
    if is_elastic:
        return f"{count} more member{'s' * (count > 1)}, as min_count says"
    return f"{count} never seen"


def crew_words(part: ParameterStatus | TableStatus, members: Iterable[MemberStatus]) -> str:
    """How many elastic members are in each state, and of how many; empty: its crew is fixed."""
    if part.spec.members is None:
        return ""
    counts = Counter(member.state for member in members)
    words = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])
    return f"{words or 'nobody'} of {part.spec.crew}"


def losses(statuses: Sequence[ShardStatus]) -> list[str]:
    """Parameters and tables that have begun on some shards, and that others do not have."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for status in statuses:
        for parameter in status.parameters:
            steps = found.setdefault(("parameter", parameter.spec.name), {})
            steps[status.shard_index] = parameter.version_max
        for table in status.tables:
            steps = found.setdefault(("table", table.spec.name), {})
            steps[status.shard_index] = table.version
    words = []
    marked = {
        (each.kind, name) for each in _marked(statuses) for name in (each.name, each.new_name)
    }
    for (kind, name), steps in sorted(found.items()):
        if (kind, name) in marked:  # it is missing where it was deleted or renamed, or not yet
            continue
        lacking = [s.shard_index for s in statuses if s.shard_index not in steps]
        if lacking and any(steps.values()):
            which = ", ".join(map(str, lacking))
            words.append(
                f"{kind} {name!r} has begun, and shard {which} does not have it: it lost its "
                "memory; stop it and start it with its files, or restore a checkpoint"
            )
    return words


class _Marked(NamedTuple):
    """A parameter or table that is being deleted or renamed."""

    kind: str
    name: str
    new_name: str
    """Empty: it is being deleted."""
    shards: list[int]
    """Those that have it under its name still."""

    def __str__(self) -> str:
        doing, command = "deleted", f"delete {self.name}"
        if self.new_name:
            doing, command = f"renamed to {self.new_name!r}", f"rename {self.name} {self.new_name}"
        return (
            f"{self.kind} {self.name!r} is being {doing}, and shard "
            f"{', '.join(map(str, self.shards))} has it still; if that was cut off, finish it: "
            f"shardwell {command}"
        )


def _marked(statuses: Sequence[ShardStatus]) -> list[_Marked]:
    """Parameters and tables that are being deleted or renamed, by kind and name."""
    found: dict[tuple[str, str], list[int]] = {}
    new_names: dict[tuple[str, str], str] = {}
    for status in statuses:
        of_kinds: list[tuple[str, Sequence[ParameterStatus | TableStatus]]] = [
            ("parameter", status.parameters),
            ("table", status.tables),
        ]
        for kind, parts in of_kinds:
            for part in parts:
                key = (kind, part.spec.name)
                found.setdefault(key, []).append(status.shard_index)
                if part.marked:
                    new_names[key] = part.new_name
    return [_Marked(*key, new_names[key], found[key]) for key in sorted(new_names)]


def ended_names(statuses: Sequence[ShardStatus]) -> set[tuple[str, str]]:
    """Kind and name of what all workers have left in order, on all shards; families are one."""
    of_kinds: dict[str, list[dict[str, Any]]] = {
        "parameter": merged(status.parameters for status in statuses),
        "table": merged(status.tables for status in statuses),
    }
    return {
        ("family" if e["fragments"] else kind, e["name"])
        for kind, found in of_kinds.items()
        for e in found
        if e["ended"]
    }


def reported(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """What workers have reported last, a line for each name; ended ones are left out."""
    lines = []
    for each in parts:
        if each["figures"] and not each["ended"]:
            figures = [
                f"{name} {'not finite' if value is None else format(value, '.4g')}"
                for name, value in sorted(each["figures"].items())
            ]
            lines.append(f"reported of {each['name']}: {', '.join(figures)}")
    return lines


def unfinished(
    statuses: Sequence[ShardStatus], is_shown: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Deletions and renamings that were cut off, or are under way."""
    return [str(each) for each in _marked(statuses) if is_shown(each.name)]


def abandoned(
    statuses: Sequence[ShardStatus], is_shown: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Parameters and tables whose workers are all gone for long, though not all left in order."""
    words = []
    of_kinds: dict[str, list[dict[str, Any]]] = {
        "parameter": merged((status.parameters for status in statuses), is_shown),
        "table": merged((status.tables for status in statuses), is_shown),
    }
    for kind, found in of_kinds.items():
        for each in found:
            if each["abandoned_for_s"] is not None:
                what = "family" if each["fragments"] else kind
                words.append(
                    f"{what} {each['name']!r} is abandoned: no worker of it has been connected for "
                    f"{duration(each['abandoned_for_s'])}; start them again, or delete it: "
                    f"shardwell delete {each['name']}"
                )
    return words


def told_troubles(
    statuses: Sequence[ShardStatus], is_shown: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """The troubles that shards report, each with its shard."""
    return [
        each.words if each.name else f"shard {status.shard_index}: {each.words}"
        for status in statuses
        for each in status.troubles
        if is_shown(each.name)
    ]


def merged(
    by_shard: Iterable[Sequence[ParameterStatus | TableStatus]],
    is_shown: Callable[[str], bool] = lambda name: True,
) -> list[dict[str, Any]]:
    """Each parameter, family or table once, by name, as all shards together have it."""
    found: dict[str, list[ParameterStatus | TableStatus]] = {}
    fragments: list[ParameterStatus] = []
    for parts in by_shard:
        for part in parts:
            if not is_shown(part.spec.name):
                continue
            if isinstance(part, ParameterStatus) and part.spec.fragment is not None:
                fragments.append(part)
            else:
                found.setdefault(part.spec.name, []).append(part)
    whole = [_whole(name, parts) for name, parts in found.items()]
    whole += map(_whole_family, families_of(fragments).values())
    return sorted(whole, key=lambda each: str(each["name"]))


def _whole_family(family: Family) -> dict[str, Any]:
    """As of a parameter. The open step is that of the fragment which is due."""
    by_fragment = [_whole(parts[0].spec.name, parts) for parts in family.parts.values()]
    parts = [part for of_fragment in family.parts.values() for part in of_fragment]
    gone = [each["abandoned_for_s"] for each in by_fragment]
    found = merged_members(parts)
    return _whole(family.name, family.due) | {
        "elements": family.size,
        "ready": all(each["ready"] for each in by_fragment) and not family.lacking,
        "members": _latest_first(found)[:NAME_COUNT_MAX],
        "crew_words": crew_words(parts[0], found),
        "ended": all(each["ended"] for each in by_fragment),
        "abandoned_for_s": None if None in gone else min(gone),
        "marked": any(each["marked"] for each in by_fragment),
        "late": sum(each["late"] for each in by_fragment),
        "figures": {k: v for each in by_fragment for k, v in each["figures"].items()},
        "fragments": family.names,
        "fragment_count": family.count,
        "versions": family.versions,
        "versions_words": family.versions_words(),
        "learners": [
            {"worker_id": each.worker_id, "ago_s": each.ago_s} | as_json(each.progress)
            for each in family.learners[:NAME_COUNT_MAX]
        ],
    }


def _whole(name: str, parts: Sequence[ParameterStatus | TableStatus]) -> dict[str, Any]:
    first = parts[0]
    spec = first.spec
    oldest = min(parts, key=step_of)
    missing = {worker for part in parts for worker in part.missing_worker_ids}
    unknown = max(part.unknown_worker_count for part in parts)
    found = merged_members(parts)
    whole: dict[str, Any] = {
        "name": name,
        "mode": spec.mode,
        "codec": spec.codec,
        "optimizer": type(spec.optimizer).__name__,
        "learning_rate": oldest.learning_rate,
        "step": step_of(oldest),
        "worker_count": spec.worker_count,
        "crew": spec.crew if spec.mode == "sync" else "",
        "crew_words": crew_words(first, found),
        "in_step": in_order(set(oldest.contributed_worker_ids) - missing)[:NAME_COUNT_MAX],
        "missing": in_order(missing)[:NAME_COUNT_MAX],
        "unknown": unknown,
        "lacking": lacking(unknown, is_elastic=spec.members is not None),
        "done": in_order({w for part in parts for w in part.done_worker_ids})[:NAME_COUNT_MAX],
    }
    whole["members"] = _latest_first(found)[:NAME_COUNT_MAX]
    whole["ended"] = all(part.ended for part in parts)
    gone = [part.abandoned_for_s for part in parts]
    is_abandoned = not whole["ended"] and all(
        p.ended or p.abandoned_for_s is not None for p in parts
    )
    whole["abandoned_for_s"] = min(filter(None, gone), default=None) if is_abandoned else None
    whole["marked"] = any(part.marked for part in parts)
    whole["figures"] = {}
    whole["fragments"] = []
    whole["new_name"] = next((part.new_name for part in parts if part.new_name), "")
    if isinstance(first, ParameterStatus):
        whole["late"] = sum(p.late_chunk_count for p in parts if isinstance(p, ParameterStatus))
        whole["elements"] = first.spec.size
        whole["ready"] = all(p.initialized for p in parts if isinstance(p, ParameterStatus))
        whole["learners"] = []
        for part in parts:
            whole["figures"] |= as_json(part.figures) if isinstance(part, ParameterStatus) else {}
    else:
        whole["rows"] = sum(part.row_count for part in parts if isinstance(part, TableStatus))
        whole["dim"] = first.spec.dim
        whole["ready"] = not any(p.loading for p in parts if isinstance(p, TableStatus))
    return whole


def _latest_first(members: Iterable[MemberStatus]) -> list[dict[str, Any]]:
    """Workers with seats, as JSON; those that lag most first."""
    whole = [dict(vars(member)) for member in members]
    return sorted(whole, key=lambda member: (-(member["lag_s"] or 0.0), member["worker_id"]))


def workers(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each worker once, as all parameters, families and tables together have it.

    Workers that are not connected come first, then by name as people count.
    """
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        if part["ended"] or part["abandoned_for_s"] is not None:
            continue
        kind = "table" if "rows" in part else "parameter"
        first = max((each["next_step"] for each in part["members"]), default=0)
        for member in part["members"]:
            worker_id = member["worker_id"]
            whole = found.setdefault(
                worker_id,
                {
                    "worker_id": worker_id,
                    "host": member["host"],
                    "pid": member["pid"],
                    "connected": member["connected"],
                    "software_version": member["software_version"],
                    "transports": [],
                    "names": [],
                    "behind_steps": 0,
                    "lag_s": None,
                    "idle_s": None,
                },
            )
            if member["connected"] and not whole["connected"]:
                for key in ("host", "pid", "connected", "software_version"):
                    whole[key] = member[key]
            whole["transports"] = sorted({*whole["transports"], *member["transports"]})
            whole["names"].append([kind, part["name"]])
            behind = first - member["next_step"]
            whole["behind_steps"] = max(whole["behind_steps"], behind)
            whole["lag_s"] = max(_known(whole["lag_s"], member["lag_s"]), default=None)
            whole["idle_s"] = min(_known(whole["idle_s"], member["idle_s"]), default=None)
    return sorted(
        (found[worker_id] for worker_id in in_order(found)), key=lambda each: each["connected"]
    )


def _known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


def step_of(part: ParameterStatus | TableStatus) -> int:
    """The step that is open on a shard."""
    return part.version if isinstance(part, TableStatus) else part.version_min


def in_order(worker_ids: Iterable[str]) -> list[str]:
    """Names as people count: worker-2 before worker-10."""

    def key(worker_id: str) -> list[str | int]:
        parts = re.split(r"([0-9]+)", worker_id)  # words at even places, numbers between
        return [int(part) if place % 2 else part for place, part in enumerate(parts)]

    return sorted(worker_ids, key=key)


def duration(seconds: float) -> str:
    """In two digits for four days."""
    for unit, length_s in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 100 * length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return f"{seconds // 86400:.0f} d"


def size(count: float) -> str:
    """Of bytes, in three digits, from 0.1 MB on."""
    amount, unit = count / 1e6, "MB"
    for larger in ("GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1e3, larger
    return f"{amount:.1f} {unit}" if amount < 99.95 else f"{amount:.0f} {unit}"


def as_json(value: Any) -> Any:
    """Fields by name; of what comes in kinds, such as optimizers, the kind's name too.

    Numbers that are not finite, which JSON has no words for, are None.
    """
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
