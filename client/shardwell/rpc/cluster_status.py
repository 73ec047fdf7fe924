"""The state of a cluster in rows: each parameter, family and table once, as all shards have it.

Each view of a cluster (`shardwell status`, `top` and `members`, the status page, notebooks) shows
these rows.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwell.process.html_table import html_table
from shardwell.rpc.shard_status import (
    LearnerStatus,
    MemberState,
    MemberStatus,
    ParameterStatus,
    SamplesStatus,
    ShardStatus,
    TableStatus,
)
from shardwell.specs.fragments import Family, grouped, versions_words
from shardwell.specs.optimizers import Average

Status: TypeAlias = ParameterStatus | TableStatus
NAME_COUNT_MAX = 100
"""Workers of each kind that a row lists."""
GONE = ("over", "lost")
_STATES: tuple[MemberState, ...] = ("awaited", "seated", "draining", "lost", "over", "unknown")
_BY_WEIGHT = ("lost", "over", "draining", "seated", "awaited", "unknown")
"""The first that any shard reports prevails: it is so on all, or about to be."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A parameter, family or table, as all shards together have it."""

    kind: str
    """"parameter", "family" or "table"."""
    name: str
    parts: tuple[Status, ...]
    """Each shard's part; of a family that of the fragment which is due."""
    mode: str
    codec: str
    optimizer: str
    learning_rate: float
    step: int
    """The open step: the version of the chunk that is furthest behind."""
    newest: int
    """The version of the chunk that is furthest ahead."""
    worker_count: int
    crew: str
    """The workers that make a step, in words; empty in asynchronous mode."""
    crew_words: str
    """The count of elastic members in each state; empty: its crew is fixed."""
    in_step: list[str]
    """Workers whose gradients are in the open step."""
    missing: list[str]
    unknown: int
    """Workers that the step lacks and no shard has seen."""
    lacking: str
    """`unknown` in words."""
    done: list[str]
    """Workers that have left in order."""
    members: tuple[MemberStatus, ...]
    """Workers with seats; those that take part first, by worker id."""
    ended: bool
    abandoned_for_s: float | None
    marked: bool
    ready: bool
    """True once it has its first weights, while it is not being restored."""
    late: int = 0
    """Chunks that came too late."""
    elements: int | None = None
    tensor_count: int = 0
    rows: int | None = None
    dim: int | None = None
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    learners: tuple[LearnerStatus, ...] = ()
    samples: tuple[SamplesStatus, ...] = ()
    """The accounts of its samples, a dataset each."""
    fragments: list[str] = dataclasses.field(default_factory=list)
    """Names of a family's parameters."""
    fragment_count: int = 0
    """Fragments that a family is to have."""
    versions: list[int | None] = dataclasses.field(default_factory=list)
    """Outer steps that each fragment has seen; None: no shard has it."""
    versions_words: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The kind and the name."""
        return self.kind, self.name

    @property
    def rule_words(self) -> str:
        """The optimizer, with its learning rate."""
        has_rate = self.optimizer != Average.__name__
        return f"{self.optimizer} {self.learning_rate:g}" if has_rate else self.optimizer

    @property
    def latest_first(self) -> list[MemberStatus]:
        """Some of the members; those that lag most first."""
        found = sorted(self.members, key=lambda each: (-(each.lag_s or 0.0), each.worker_id))
        return found[:NAME_COUNT_MAX]


def rows_of(
    parts: Iterable[Status], is_shown: Callable[[str], bool] = lambda name: True
) -> list[Row]:
    """The rows of parameters or tables, by name, whose names `is_shown` wants."""
    groups = grouped(part for part in parts if is_shown(part.spec.name))
    rows = [_row(name, own) for name, own in groups.alone.items()]
    rows += map(_family_row, groups.families.values())
    return sorted(rows, key=lambda row: row.name)


def all_rows(
    statuses: Sequence[ShardStatus], is_shown: Callable[[str], bool] = lambda name: True
) -> list[Row]:
    """The rows of parameters and families, then those of tables."""
    parameters = rows_of((each for shard in statuses for each in shard.parameters), is_shown)
    return parameters + rows_of((each for shard in statuses for each in shard.tables), is_shown)


def _row(name: str, parts: Sequence[Status]) -> Row:
    first, spec = parts[0], parts[0].spec
    held = [part for part in parts if not is_empty(part)] or parts
    oldest = min(held, key=step_of)
    missing = {worker_id for part in held for worker_id in part.missing_worker_ids}
    unknown = max(part.unknown_worker_count for part in held)
    members = merged_members(parts)
    has_ended = all(part.ended for part in parts)
    is_abandoned = not has_ended and all(
        part.ended or part.abandoned_for_s is not None for part in parts
    )
    gone = [part.abandoned_for_s for part in parts if part.abandoned_for_s]
    return Row(
        kind="table" if isinstance(first, TableStatus) else "parameter",
        name=name,
        parts=tuple(parts),
        mode=spec.mode,
        codec=spec.codec,
        optimizer=type(spec.optimizer).__name__,
        learning_rate=oldest.learning_rate,
        step=step_of(oldest),
        newest=max(map(newest_of, held)),
        worker_count=spec.worker_count,
        crew=spec.crew if spec.mode == "sync" else "",
        crew_words=_crew_words(first, members),
        in_step=in_order(set(oldest.contributed_worker_ids) - missing)[:NAME_COUNT_MAX],
        missing=in_order(missing)[:NAME_COUNT_MAX],
        unknown=unknown,
        lacking=lacking(unknown, is_elastic=spec.members is not None),
        done=in_order({each for part in parts for each in part.done_worker_ids})[:NAME_COUNT_MAX],
        members=members,
        ended=has_ended,
        abandoned_for_s=min(gone, default=None) if is_abandoned else None,
        marked=any(part.marked for part in parts),
        **_own_fields(parts),
    )


def _own_fields(parts: Sequence[Status]) -> dict[str, Any]:
    tables = [part for part in parts if isinstance(part, TableStatus)]
    if tables:
        return {
            "rows": sum(part.row_count for part in tables),
            "dim": tables[0].spec.dim,
            "ready": not any(part.loading for part in tables),
        }
    parameters = [part for part in parts if isinstance(part, ParameterStatus)]
    spec = parameters[0].spec
    return {
        "elements": spec.size,
        "tensor_count": 0 if spec.layout is None else len(spec.layout),
        "ready": all(part.initialized for part in parameters),
        "late": sum(part.late_chunk_count for part in parameters),
        "figures": {name: value for p in parameters for name, value in p.figures.items()},
        "samples": tuple(each for part in parameters for each in part.samples),
    }


def _family_row(family: Family[Status]) -> Row:
    rows = [_row(family.name, parts) for parts in family.parts.values()]
    due = min(rows, key=lambda row: row.step)
    by_index = {index: row.step for index, row in zip(family.parts, rows, strict=True)}
    versions = [by_index.get(index) for index in range(family.count)]
    members = merged_members(family.all)
    gone = [row.abandoned_for_s for row in rows]
    learners = {
        learner.worker_id: learner
        for part in family.all
        if isinstance(part, ParameterStatus)
        for learner in part.learners
    }
    return dataclasses.replace(
        due,
        kind="family",
        elements=sum(row.elements or 0 for row in rows),
        tensor_count=sum(row.tensor_count for row in rows),
        ready=all(row.ready for row in rows) and not family.lacking,
        members=members,
        crew_words=_crew_words(family.all[0], members),
        ended=all(row.ended for row in rows),
        abandoned_for_s=None if None in gone else min(each for each in gone if each is not None),
        marked=any(row.marked for row in rows),
        late=sum(row.late for row in rows),
        figures={name: value for row in rows for name, value in row.figures.items()},
        samples=tuple(each for row in rows for each in row.samples),
        fragments=family.names,
        fragment_count=family.count,
        versions=versions,
        versions_words=versions_words(versions),
        learners=tuple(learners[worker_id] for worker_id in in_order(learners)),
    )


def step_of(part: Status) -> int:
    """The step that is open on a shard."""
    return part.version if isinstance(part, TableStatus) else part.version_min


def newest_of(part: Status) -> int:
    """The version of the chunk that is furthest ahead on a shard."""
    return part.version if isinstance(part, TableStatus) else part.version_max


def is_empty(part: Any) -> bool:
    """Returns True if a shard has no element of a parameter, and so counts no steps of it."""
    return isinstance(part, ParameterStatus) and not part.slice_size


def merged_members(parts: Iterable[Any]) -> tuple[MemberStatus, ...]:
    """The workers with seats, as all shards have them; those that take part first, by id."""
    found: dict[str, list[MemberStatus]] = {}
    for part in parts:
        for member in () if is_empty(part) else part.members:
            found.setdefault(member.worker_id, []).append(member)
    whole = [_whole_member(found[worker_id]) for worker_id in sorted(found)]
    return tuple(sorted(whole, key=lambda member: member.state in GONE))


def _whole_member(of_shards: Sequence[MemberStatus]) -> MemberStatus:
    lags = [each.lag_s for each in of_shards if each.lag_s is not None]
    idle = [each.idle_s for each in of_shards if each.idle_s is not None]
    joined = [each.joined_at for each in of_shards if each.joined_at is not None]
    known = next((each for each in of_shards if each.connected), of_shards[0])
    return dataclasses.replace(
        known,
        state=min((each.state for each in of_shards), key=_BY_WEIGHT.index),
        next_step=min(each.next_step for each in of_shards),
        joined_at=min(joined, default=None),
        counted_chunk_count=sum(each.counted_chunk_count for each in of_shards),
        late_chunk_count=sum(each.late_chunk_count for each in of_shards),
        lag_s=max(lags, default=None),
        idle_s=min(idle, default=None),
        transports=tuple(sorted({way for each in of_shards for way in each.transports})),
    )


def lacking(count: int, *, is_elastic: bool) -> str:
    """The number of workers that a step lacks and no shard has seen, in words; empty: none."""
    if not count:
        return ""
    if is_elastic:
        return f"{count} more member{'s' * (count > 1)}, as min_count says"
    return f"{count} never seen"


def _crew_words(part: Status, members: Iterable[MemberStatus]) -> str:
    if part.spec.members is None:
        return ""
    counts = Counter(member.state for member in members)
    words = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])
    return f"{words or 'nobody'} of {part.spec.crew}"


def in_order(worker_ids: Iterable[str]) -> list[str]:
    """Sorts ids as people count: worker-2 before worker-10."""

    def key(worker_id: str) -> list[str | int]:
        parts = re.split(r"([0-9]+)", worker_id)  # words at even places, numbers between
        return [int(part) if place % 2 else part for place, part in enumerate(parts)]

    return sorted(worker_ids, key=key)


class ClusterStatus(list[ShardStatus]):
    """The status of each shard of a cluster, in order: a list, which notebooks show whole."""

    def _repr_html_(self) -> str:
        shards = html_table(
            f"cluster {self[0].cluster_id}" if self else "no shards",
            ("shard", "address", "serving since", "stored", "troubles"),
            [
                (
                    f"{each.shard_index} of {each.shard_count}",
                    each.address,
                    f"{each.uptime_s:.0f} s",
                    f"{each.stored_bytes / 1e6:.1f} MB",
                    "; ".join(map(str, each.troubles)),
                )
                for each in self
            ],
        )
        rows = all_rows(self)
        shown = [
            (row.kind, row.name, row.versions_words or str(row.step), ", ".join(row.missing))
            for row in rows
        ]
        held = html_table(
            "parameters and tables", ("kind", "name", "step", "has yet to come"), sorted(shown)
        )
        learners = [
            (
                row.name,
                each.worker_id,
                each.progress.inner_steps,
                each.progress.sample_count,
                f"{each.progress.hidden_s:.1f} s",
                f"{each.progress.waited_s:.1f} s",
                f"{each.ago_s:.0f} s ago",
            )
            for row in rows
            for each in row.learners
        ]
        if not learners:
            return shards + held
        columns = ("family", "learner", "inner steps", "samples", "hidden", "waited", "said")
        return shards + held + html_table("learners", columns, learners)
