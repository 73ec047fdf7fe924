"""A shard's troubles, and groups that wait at it, in words for an operator."""

from __future__ import annotations

import time
from collections.abc import Iterator

from shardwell.group.rendezvous.members import GroupState
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server.admin.metrics import Vitals
from shardwell_server.operations.cluster_status import LONG_WAIT_S, duration, size

_FULL_PART, _FULL_BYTES = 0.01, 1_000_000_000
_RECENT_S = 300.0
_WORDS_LENGTH_MAX = 1000
"""A character takes up to 4 bytes."""
_RANK_COUNT_MAX = 100


def troubles(vitals: Vitals) -> list[pb.Trouble]:
    """Returns the troubles of a shard, the worst first."""
    found = [("", section, words) for section, words in _of_shard(vitals)]
    found += [
        (group.name, "a-group-does-not-form", _of_group(group))
        for group in vitals.groups()
        if group.missing_ranks and group.waited_s >= LONG_WAIT_S
    ]
    return [
        pb.Trouble(name=name, section=section, words=words[:_WORDS_LENGTH_MAX])
        for name, section, words in found
    ]


def _of_shard(vitals: Vitals) -> Iterator[tuple[str, str]]:
    """Yields sections of the runbook, "" for none, and words."""
    disk = vitals.resources()
    free, whole = disk.disk_free_bytes, disk.disk_size_bytes
    if disk.HasField("disk_free_bytes") and free < min(_FULL_PART * whole, _FULL_BYTES):
        yield (
            "a-disk-is-full",
            f"the disk of its files is full: {size(free)} of {size(whole)} are free; free space "
            "there",
        )
    fault = vitals.files_fault()
    if fault is not None:
        yield "its-files-are-gone", fault
    for words in vitals.damages():
        yield "a-damaged-file", f"what was stored is damaged: {words}"
    now_s = vitals.ends.now_s()
    for end in vitals.ends.soon():
        yield "a-token-or-certificate-has-expired", end.words(now_s)
    log = vitals.shard.contribution_log
    if log is not None and log.trouble:
        yield "", log.trouble
    last_s = vitals.turned_away_s()
    if last_s is not None and (ago_s := time.monotonic() - last_s) < _RECENT_S:
        yield (
            "not-let-in",
            f"a client was turned away {duration(ago_s)} ago, for want of a good token, or of a "
            "right; the shard's log says from where",
        )


def _of_group(group: GroupState) -> str:
    ranks = ", ".join(map(str, group.missing_ranks[:_RANK_COUNT_MAX]))
    refused = f"; refused: {'; '.join(group.notes)}" if group.notes else ""
    return (
        f"group {group.name!r} has waited {duration(group.waited_s)} for rank {ranks} of "
        f"{group.size}{refused}"
    )
