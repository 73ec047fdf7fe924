"""The state of the cluster as the status page reads it, made of what its shards say."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import shardwell
from shardwell.errors import ShardwellError
from shardwell.numerics import native
from shardwell.rpc.shard_status import (
    ParameterStatus,
    Resources,
    ShardStatus,
    TableStatus,
    Trouble,
)
from shardwell_server.admin.metrics import Vitals
from shardwell_server.admin.troubles import troubles
from shardwell_server.cluster_status import (
    Answer,
    as_json,
    blockers,
    given,
    losses,
    merged,
    told_troubles,
    unfinished,
    verdict,
    workers,
)

_NAME_COUNT_MAX = 100
"""Workers or ranks that are listed for each parameter, table or group."""
_WORKER_COUNT_MAX = 300
"""Workers in the list of all."""


def own_status(vitals: Vitals, address: str) -> ShardStatus:
    """What this shard says of itself, without a call."""
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
    )


def view(
    answers: Sequence[Answer], vitals: Vitals, is_shown: Callable[[str], bool]
) -> dict[str, Any]:
    """All that the page shows.

    Args:
        answers: Answers of all shards, in order.
        vitals: The shard that serves the page.
        is_shown: Whether a parameter or table of that name is shown.
    """
    statuses = [status for _, status in given(answers)]
    parameters = merged((s.parameters for s in statuses), is_shown)
    tables = merged((s.tables for s in statuses), is_shown)
    config, limits = vitals.shard.config, vitals.shard.config.limits
    return {
        "cluster": config.cluster_id,
        "shards": [_shard(index, answers) for index in range(len(answers))],
        "lost": losses(statuses) if is_shown("") else [],
        "troubles": [*told_troubles(statuses, is_shown), *unfinished(statuses, is_shown)],
        "waits": [
            {**as_json(each), "words": str(each)}
            for each in blockers(statuses)
            if is_shown(each.name)
        ],
        "parameters": [
            {**each, "reports": _reports(vitals, (each["fragments"] or [each["name"]])[0])}
            for each in parameters
        ],
        "tables": tables,
        "workers": workers([*parameters, *tables])[:_WORKER_COUNT_MAX],
        "groups": [as_json(group) for group in vitals.groups() if is_shown(group.name)],
        "here": {
            "shard_index": config.shard_index,
            "durability": config.durability.setting,
            "has_files": vitals.data_dir is not None,
            "disk": _disk(vitals),
            "limits": {
                "stored bytes": [vitals.shard.stored_bytes, limits.stored_bytes_max],
                "clients": [vitals.shard.sessions.count, limits.session_count_max],
                "streams": [vitals.stream_count(), limits.stream_count_max],
                "shared memory": [vitals.arena_bytes(), limits.arena_bytes_max],
            },
            "refused": vitals.refusals(),
        },
    }


def _reports(vitals: Vitals, name: str) -> dict[str, list[list[float | None]]]:
    """What workers have reported to this shard: by figure, steps with means; None: not finite."""
    parameter = vitals.shard.parameters.find(name)
    if parameter is None:
        return {}
    return {
        figure: [[step, mean if math.isfinite(mean) else None] for step, mean in means]
        for figure, means in parameter.reports.means().items()
    }


def _disk(vitals: Vitals) -> list[int] | None:
    """Bytes used and there are, where the shard's files are."""
    if vitals.data_dir is None:
        return None
    try:
        usage = shutil.disk_usage(vitals.data_dir)
    except OSError:
        return None
    return [usage.total - usage.free, usage.total]


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
    }
