"""The state of the cluster as the status page reads it, made of what its shards say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import shardwell
from shardwell.errors import ShardwellError
from shardwell.numerics import native
from shardwell.rpc.cluster_status import Row, all_rows
from shardwell.rpc.shard_status import (
    ParameterStatus,
    Resources,
    ShardSettings,
    ShardStatus,
    TableStatus,
    Trouble,
)
from shardwell_server.admin.metrics import Vitals
from shardwell_server.admin.troubles import troubles
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

_NAME_COUNT_MAX = 100
_WORKER_COUNT_MAX = 300


def own_status(vitals: Vitals, address: str) -> ShardStatus:
    """Returns the status of this shard, without a call."""
    shard, config = vitals.shard, vitals.shard.config
    attending = shard.sessions.by_worker()
    return ShardStatus(
        shard_index=config.shard_index,
        shard_count=config.shard_count,
        cluster_id=config.cluster_id,
        address=address,
        software_version=shardwell.__version__,
        arithmetic=native.describe(),
        uptime_s=time.monotonic() - shard.started_s,
        stored_bytes=shard.stored_bytes,
        received_payload_bytes=shard.traffic.received_bytes,
        sent_payload_bytes=shard.traffic.sent_bytes,
        open_stream_count=vitals.stream_count(),
        parameters=tuple(
            ParameterStatus.from_proto(shard.parameters.describe(each, _NAME_COUNT_MAX, attending))
            for each in shard.parameters.all()
        ),
        tables=tuple(
            TableStatus.from_proto(shard.tables.describe(each, _NAME_COUNT_MAX, attending))
            for each in shard.tables.all()
        ),
        troubles=tuple(map(Trouble.from_proto, troubles(vitals))),
        resources=Resources.from_proto(vitals.resources()),
        settings=ShardSettings.from_proto(vitals.settings()),
    )


def view(
    answers: Sequence[Answer], vitals: Vitals, is_shown: Callable[[str], bool]
) -> dict[str, Any]:
    """Returns all that the page shows."""
    statuses = [status for _, status in given(answers)]
    rows = all_rows(statuses, is_shown)
    config = vitals.shard.config
    return {
        "cluster": config.cluster_id,
        "shards": [_shard(index, answers) for index in range(len(answers))],
        "lost": losses(statuses) if is_shown("") else [],
        "troubles": [*told_troubles(statuses, is_shown), *unfinished(statuses, is_shown)],
        "sections": _sections(statuses),
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


def _sections(statuses: Sequence[ShardStatus]) -> dict[str, str]:
    told = [each for status in statuses for each in status.troubles]
    return {
        words: each.section
        for words, each in zip(told_troubles(statuses), told, strict=True)
        if each.section
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
