"""The state of a shard's process: settings, troubles, and the use that it makes of its machine."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardwell.errors import ShardwellError
from shardwell.group.rendezvous.members import GroupState
from shardwell.threads.spread import core_count
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server.access.ends import Ends
from shardwell_server.operations.cluster_status import LONG_WAIT_S, duration, size
from shardwell_server.shard.shard import Shard

_LIMITS_IN_STATUS = {
    "stored_bytes": "stored bytes",
    "sessions": "clients",
    "streams": "streams",
    "arena_bytes": "shared memory",
}
_FULL_PART, _FULL_BYTES = 0.01, 1_000_000_000
_RECENT_S = 300.0
_WORDS_LENGTH_MAX = 1000
"""A character takes up to 4 bytes."""
_RANK_COUNT_MAX = 100
_KEPT_S = 30.0
"""The bytes of files are remembered for so long: each file is looked at to learn them."""
_BLOCK_BYTES = 512
"""The unit of stat for files, whatever the disk's blocks are."""
_STATM = Path("/proc/self/statm")


class Vitals(NamedTuple):
    """A shard, and its server's knowledge of it."""

    shard: Shard
    stream_count: Callable[[], int]
    arena_bytes: Callable[[], int]
    refusals: Callable[[], dict[str, int]]
    turned_away_s: Callable[[], float | None]
    """The last refusal for want of a token or right, on time.monotonic's clock."""
    damages: Callable[[], list[str]]
    ends: Ends
    data_dir: Path | None
    groups: Callable[[], list[GroupState]]
    resources: Callable[[], pb.Resources]
    head: Callable[[], pb.GetStatusResponse]
    """The shard's status, without what it holds."""

    def settings(self) -> pb.ShardSettings:
        """Returns the shard's settings, limits, and certificates and tokens that end."""
        shard, now_s = self.shard, self.ends.now_s()
        found = pb.ShardSettings(
            durability="" if self.data_dir is None else shard.config.durability.setting
        )
        limits = self.limits()
        for metric, words in _LIMITS_IN_STATUS.items():
            used, most = limits[metric]
            found.limits.add(name=words, used=used, most=most)
        for end in self.ends.all():
            found.endings.add(kind=end.kind, name=end.name, left_s=end.ends_s - now_s)
        if shard.copied_s is not None:
            found.checkpoint_ago_s = time.monotonic() - shard.copied_s
        return found

    def limits(self) -> dict[str, tuple[int, int]]:
        """Returns what is used and the most there may be, by the names of metrics."""
        shard, limits = self.shard, self.shard.config.limits
        return {
            "stored_bytes": (shard.stored_bytes, limits.stored_bytes_max),
            "sessions": (shard.sessions.count, limits.session_count_max),
            "streams": (self.stream_count(), limits.stream_count_max),
            "arena_bytes": (self.arena_bytes(), limits.arena_bytes_max),
            "parameters": (shard.parameters.count, limits.parameter_count_max),
            "tables": (shard.tables.count, limits.table_count_max),
        }

    def files_fault(self) -> str | None:
        """Returns why the shard goes on without its files; None: it has them."""
        try:
            self.shard.check_files()
        except ShardwellError as error:
            return error.message
        return None


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


class ResourceMeter:
    """Reads the process's use of its machine. Any thread may call it."""

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._lock = threading.Lock()
        self._measured_s = -_KEPT_S
        self._disk_used_bytes: int | None = None
        self._core_count = core_count()

    def read(self) -> pb.Resources:
        """Reads all that the machine reports."""
        found = pb.Resources(cpu_s=time.process_time(), core_count=self._core_count)
        with suppress(OSError, ValueError, IndexError):  # not Linux
            found.memory_bytes = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if self._data_dir is not None:
            with suppress(OSError):  # the directory is gone, which /ready tells
                disk = shutil.disk_usage(self._data_dir)
                found.disk_size_bytes, found.disk_free_bytes = disk.total, disk.free
                used_bytes = self._files(self._data_dir)
                if used_bytes is not None:
                    found.disk_used_bytes = used_bytes
        return found

    def _files(self, data_dir: Path) -> int | None:
        """Returns the files' bytes; one caller looks at a time, as a disk may hang."""
        if time.monotonic() - self._measured_s >= _KEPT_S and self._lock.acquire(blocking=False):
            try:
                self._disk_used_bytes = sum(_occupied(os.fspath(data_dir)))
                self._measured_s = time.monotonic()
            finally:
                self._lock.release()
        return self._disk_used_bytes


def _occupied(directory: str) -> Iterator[int]:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _occupied(entry.path)
            else:
                yield entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
