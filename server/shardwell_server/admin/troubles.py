"""A shard's troubles, and groups that wait at it, in words for an operator."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

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
    return [
        *_of_disk(vitals.data_dir),
        *_of_files(vitals),
        *_of_damages(vitals),
        *_of_ends(vitals),
        *_of_contribution_log(vitals),
        *_of_strangers(vitals),
        *_of_groups(vitals),
    ]


def _of_disk(data_dir: Path | None) -> Iterator[pb.Trouble]:
    if data_dir is None:
        return
    try:
        disk = shutil.disk_usage(data_dir)
    except OSError:  # the directory is gone, which /ready tells
        return
    if disk.free < min(_FULL_PART * disk.total, _FULL_BYTES):
        yield pb.Trouble(
            words=f"the disk of its files is full: {size(disk.free)} of {size(disk.total)} are "
            "free; free space there",
            section="a-disk-is-full",
        )


def _of_files(vitals: Vitals) -> Iterator[pb.Trouble]:
    fault = vitals.files_fault()
    if fault is not None:
        yield pb.Trouble(words=fault[:_WORDS_LENGTH_MAX], section="its-files-are-gone")


def _of_damages(vitals: Vitals) -> Iterator[pb.Trouble]:
    for words in vitals.damages():
        yield pb.Trouble(
            words=f"what was stored is damaged: {words}"[:_WORDS_LENGTH_MAX],
            section="a-damaged-file",
        )


def _of_ends(vitals: Vitals) -> Iterator[pb.Trouble]:
    now_s = vitals.ends.now_s()
    for end in vitals.ends.soon():
        yield pb.Trouble(
            words=end.words(now_s)[:_WORDS_LENGTH_MAX],
            section="a-token-or-certificate-has-expired",
        )


def _of_contribution_log(vitals: Vitals) -> Iterator[pb.Trouble]:
    log = vitals.shard.contribution_log
    if log is not None and log.trouble:
        yield pb.Trouble(words=log.trouble[:_WORDS_LENGTH_MAX])


def _of_strangers(vitals: Vitals) -> Iterator[pb.Trouble]:
    last_s = vitals.turned_away_s()
    if last_s is not None and (ago_s := time.monotonic() - last_s) < _RECENT_S:
        yield pb.Trouble(
            words=f"a client was turned away {duration(ago_s)} ago, for want of a good token, or "
            "of a right; the shard's log says from where",
            section="not-let-in",
        )


def _of_groups(vitals: Vitals) -> Iterator[pb.Trouble]:
    for group in vitals.groups():
        words = _of_group(group)
        if words:
            yield pb.Trouble(
                name=group.name, words=words[:_WORDS_LENGTH_MAX], section="a-group-does-not-form"
            )


def _of_group(group: GroupState) -> str:
    if not group.missing_ranks or group.waited_s < LONG_WAIT_S:
        return ""
    ranks = ", ".join(map(str, group.missing_ranks[:_RANK_COUNT_MAX]))
    refused = f"; refused: {'; '.join(group.notes)}" if group.notes else ""
    return (
        f"group {group.name!r} has waited {duration(group.waited_s)} for rank {ranks} of "
        f"{group.size}{refused}"
    )
