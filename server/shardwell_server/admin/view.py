"""The state of the cluster, and of one name, as the status page reads them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from shardwell.errors import ShardwellError
from shardwell.rpc.cluster_status import Row, all_rows
from shardwell.rpc.shard_status import (
    ShardStatus,
    TableStatus,
)
from shardwell.specs.fragments import grouped
from shardwell.specs.parameter import ParameterSpec
from shardwell_server.admin.history import Key, version_of
from shardwell_server.admin.vitals import Vitals, troubles
from shardwell_server.operations.cluster_status import (
    Answer,
    as_json,
    blockers,
    given,
    losses,
    told_troubles,
    unfinished,
    verdict,
    workers,
)
from shardwell_server.operations.timeline import closed_steps
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.table.slice import TableSlice

_NAME_COUNT_MAX = 100
_WORKER_COUNT_MAX = 300
_TENSOR_COUNT_MAX = 2000
_STEP_COUNT_MAX = 20
_SPAN_S = 600.0

_SHOWN_ELSEWHERE = ("name", "size", "layout", "fragment")
"""Fields of a spec that are no settings, or that the page has beside."""

_OF_STEP = ("step", "took_s", "last", "waited_s", "worker_count")

_Part: TypeAlias = ParameterSlice | TableSlice


def own_status(vitals: Vitals, address: str) -> ShardStatus:
    """Returns the status of this shard, without a call."""
    shard, found = vitals.shard, vitals.head()
    attending = shard.sessions.by_worker()
    for parameter in shard.parameters.all():
        found.parameters.append(shard.parameters.describe(parameter, _NAME_COUNT_MAX, attending))
    tables = [
        shard.tables.describe(each, _NAME_COUNT_MAX, attending) for each in shard.tables.all()
    ]
    found.troubles.extend(troubles(vitals))
    found.resources.CopyFrom(vitals.resources())
    found.settings.CopyFrom(vitals.settings())
    return ShardStatus.from_proto(
        found, address=address, tables=tuple(map(TableStatus.from_proto, tables))
    )


def view(
    answers: Sequence[Answer], vitals: Vitals, is_shown: Callable[[str], bool]
) -> dict[str, Any]:
    """Returns all that the page shows."""
    statuses = [status for _, status in given(answers)]
    rows, told = all_rows(statuses, is_shown), told_troubles(statuses, is_shown)
    config = vitals.shard.config
    return {
        "cluster": config.cluster_id,
        "shards": [_shard(index, answers) for index in range(len(answers))],
        "lost": losses(statuses) if is_shown("") else [],
        "troubles": [*told, *unfinished(statuses, is_shown)],
        "sections": {words: section for words, section in told.items() if section},
        "endings": _endings(statuses) if is_shown("") else [],
        "waits": [
            {**as_json(each), "words": str(each)}
            for each in blockers(statuses)
            if is_shown(each.name)
        ],
        "parameters": [
            _row(row) | {"reports": _reports(vitals, (row.fragments or [row.name])[0])}
            for row in rows
            if row.kind != "table"
        ],
        "tables": [_row(row) for row in rows if row.kind == "table"],
        "workers": workers(rows)[:_WORKER_COUNT_MAX],
        "groups": [as_json(group) for group in vitals.groups() if is_shown(group.name)],
        "here": {
            "shard_index": config.shard_index,
            "refused": vitals.refusals(),
        },
    }


def _row(row: Row) -> dict[str, Any]:
    shown = {name: value for name, value in vars(row).items() if name != "parts"}
    learners = row.learners[:_NAME_COUNT_MAX]
    found: dict[str, Any] = as_json(shown)
    return found | {
        "members": [dict(vars(member)) for member in row.latest_first],
        "learners": [
            {"worker_id": each.worker_id, "ago_s": each.ago_s, **as_json(each.progress)}
            for each in learners
        ],
    }


def _reports(vitals: Vitals, name: str) -> dict[str, list[list[float | None]]]:
    parameter = vitals.shard.parameters.find(name)
    if parameter is None:
        return {}
    return {
        figure: [[step, mean if math.isfinite(mean) else None] for step, mean in means]
        for figure, means in parameter.reports.means().items()
    }


def _endings(statuses: Sequence[ShardStatus]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for status in statuses:
        for each in status.settings.endings:
            known = found.setdefault((each.kind, each.name), {**as_json(each), "shards": []})
            known["left_s"] = min(known["left_s"], each.left_s)
            if status.shard_index not in known["shards"]:
                known["shards"].append(status.shard_index)
    return sorted(found.values(), key=lambda each: float(each["left_s"]))


def _shard(index: int, answers: Sequence[Answer]) -> dict[str, Any]:
    address, answer = answers[index]
    state, fault = verdict(index, answers)
    found: dict[str, Any] = {"index": index, "address": address, "state": state, "fault": fault}
    if isinstance(answer, ShardwellError):
        return found
    return found | {
        "version": answer.software_version,
        "arithmetic": answer.arithmetic,
        "up_s": answer.uptime_s,
        "stored_bytes": answer.stored_bytes,
        "in_bytes": answer.received_payload_bytes,
        "out_bytes": answer.sent_payload_bytes,
        "streams": answer.open_stream_count,
        "resources": as_json(answer.resources),
        "durability": answer.settings.durability,
        "checkpoint_ago_s": answer.settings.checkpoint_ago_s,
        "limits": {each.name: [each.used, each.most] for each in answer.settings.limits},
    }


def details(vitals: Vitals, is_shown: Callable[[str], bool], key: Key) -> dict[str, Any] | None:
    """Returns the details on the page of one name; None: nothing of that name is shown."""
    kind, name = key
    parts = [part for part in _parts(vitals, kind, name) if is_shown(part.spec.name)]
    if not parts:
        return None
    layouts = [spec.layout for part in parts if isinstance(spec := part.spec, ParameterSpec)]
    return {
        "kind": kind,
        "name": name,
        "shard_index": vitals.shard.config.shard_index,
        "of": parts[0].spec.name,
        "settings": {
            field.name: as_json(getattr(parts[0].spec, field.name))
            for field in dataclasses.fields(parts[0].spec)
            if field.name not in _SHOWN_ELSEWHERE
        },
        "tensors": list(itertools.islice(_tensors(parts), _TENSOR_COUNT_MAX)),
        "tensor_count": sum(len(layout) for layout in layouts if layout is not None),
        "last_steps": _last_steps(vitals, parts),
    }


def _parts(vitals: Vitals, kind: str, name: str) -> Sequence[_Part]:
    if kind == "table":
        table = vitals.shard.tables.find(name)
        return [] if table is None else [table]
    parameter = vitals.shard.parameters.find(name)
    if parameter is not None:
        return [parameter]
    family = grouped(vitals.shard.parameters.all()).families.get(name)
    return [] if family is None else family.all


def _tensors(parts: Sequence[_Part]) -> Iterator[dict[str, Any]]:
    """A vector without a layout, or a table, has none."""
    for spec in (part.spec for part in parts):
        if not isinstance(spec, ParameterSpec) or spec.layout is None:
            continue
        for tensor in spec.layout:
            fields = dataclasses.fields(tensor.options)
            options = {field.name: getattr(tensor.options, field.name) for field in fields}
            yield {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "size": tensor.size,
                "fragment": spec.fragment and spec.fragment.index,
                "options": {
                    f.name: options[f.name] for f in fields if options[f.name] != f.default
                },
            }


def _last_steps(vitals: Vitals, parts: Sequence[_Part]) -> list[dict[str, Any]]:
    spans = vitals.shard.spans
    now_ns = time.monotonic_ns()
    since_ns = now_ns - int(_SPAN_S * 1e9)
    found = [
        step
        for part in parts
        for step in closed_steps(spans.since(since_ns, part.spec.name))
        if part.spec.mode == "async" or step.step < version_of(part)
    ]
    found.sort(key=lambda step: -step.end_ns)
    return [
        {
            "name": step.subject,
            "ago_s": round((now_ns - step.end_ns) / 1e9, 1),
            **{name: getattr(step, name) for name in _OF_STEP},
        }
        for step in found[:_STEP_COUNT_MAX]
    ]
