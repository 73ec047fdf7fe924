"""The metrics of a shard for Prometheus. All are counted anyway, and collected at a scrape.

Names and units follow Prometheus' guide; labels are names of parameters, tables and workers, whose
number the shard's limits bound. Tables of names and help texts are on top, in the order in which
Prometheus gets them; a name that ends in `_total` is a counter's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import shardwell
from shardwell.numerics import native
from shardwell.rpc.shard_status import MEMBER_STATES
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import table_pb2
from shardwell_server.access.ends import End
from shardwell_server.admin.vitals import Vitals
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.step_times import BOUNDS_S, Durations
from shardwell_server.shard.table.slice import TableSlice

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WORKER_COUNT_MAX = 256
_LIMITED = {
    "shardwell_stored_bytes": "Bytes of weights, sums, optimizer state and images.",
    "shardwell_sessions": "Clients that are connected.",
    "shardwell_streams": "Streams that are open.",
    "shardwell_arena_bytes": "Memory that clients of this machine share with the shard.",
    "shardwell_parameters": "Parameters.",
    "shardwell_tables": "Tables.",
}
_SHARD = {
    "shardwell_uptime_seconds": "Since the process began.",
    "shardwell_payload_bytes_total": "Payload moved, by its direction.",
    **{
        f"{name}{suffix}": f"{words}{text}"
        for name, text in _LIMITED.items()
        for suffix, words in (("", ""), ("_limit", "The most there may be. "))
    },
    "shardwell_calls_refused_total": "Calls that ended with an error, by its name.",
}
_DISK = {
    "shardwell_disk_free_bytes": "Room where the shard's files are.",
    "shardwell_disk_size_bytes": "All of it.",
}
_FAULTS = {
    "shardwell_damaged": "Stored pieces that are known to be damaged; of many, a few are counted.",
    "shardwell_files_gone": "1 if the shard's files were removed, moved or replaced while it "
    "served.",
    "shardwell_ends_seconds": "Until a certificate or token ends; below 0 when it has.",
    "shardwell_ends_soon": "1 if it is to be made anew: 30 days before its end, or in the last "
    "third of its life.",
}
_NAMES = {
    "shardwell_version": "Updates that the part which is furthest behind has seen.",
    "shardwell_gradients_counted_total": "Chunks, or rows, of gradients counted.",
    "shardwell_gradients_duplicate_total": "Chunks, or messages of rows, that came again and were "
    "not counted.",
    "shardwell_learning_rate": "The next update's.",
    "shardwell_step_open_seconds": "Since the first contribution to the open step; 0 without one, "
    "or without any worker.",
    "shardwell_ended": "1 if all workers have left in order.",
    "shardwell_abandoned_seconds": "For how long no worker has been connected, once that is "
    "abandoned_after_s; else 0.",
    "shardwell_step_missing_workers": "Workers for whom the open step waits.",
    "shardwell_step_waits_for": "1 for each worker that is missing from an open step which has "
    "begun.",
    "shardwell_worker_lag_seconds": "In a worker's last step, from the first contribution of all "
    "workers to its own.",
    "shardwell_worker_idle_seconds": "Since the last contribution of a worker.",
    "shardwell_worker_steps": "Steps of a worker, in its own count.",
    "shardwell_reported": "What workers reported of the last step, such as a loss: the mean.",
    "shardwell_barrier_wait_seconds": "From the first contribution to a step to its end.",
    "shardwell_step_duration_seconds": "From the end of a step to that of the next.",
    "shardwell_gradients_late_total": "Chunks that came when their step had closed, or their "
    "worker's tenure was over.",
    "shardwell_members_lost_total": "Elastic members that the shard found gone.",
    "shardwell_members": "Elastic members by state.",
    "shardwell_worker_chunks_counted_total": "Chunks of a worker that counted since it joined, "
    "where steps may close without it.",
    "shardwell_worker_chunks_late_total": "The same of those that were late.",
}
_HISTOGRAMS = ("shardwell_barrier_wait_seconds", "shardwell_step_duration_seconds")
_LEARNERS = {
    "shardwell_learner_inner_steps": "Steps that a learner of a family has made by itself.",
    "shardwell_learner_samples_total": "What a learner was trained on.",
    "shardwell_learner_offers_total": "Outer gradients that a learner has offered.",
    "shardwell_learner_bytes_total": "What a learner's client has moved, by its direction.",
    "shardwell_learner_hidden_seconds_total": "Time in which a learner's offers were under way "
    "while training went on.",
    "shardwell_learner_waited_seconds_total": "Time for which a learner's takes have waited.",
    "shardwell_learner_offers_overdue_total": "Offers of a learner whose result had not come in "
    "time.",
    "shardwell_learner_takes_kept_total": "Takes at which a learner has kept work that had not "
    "counted.",
    "shardwell_learner_silent_seconds": "Since a learner said last how far it has come.",
}
_SAMPLES = {
    "shardwell_samples_epoch": "The first epoch of a dataset that has samples left.",
    "shardwell_samples": "Samples of that epoch, by state: done, out or free.",
    "shardwell_samples_left_out_total": "Samples of all epochs that were left out.",
    "shardwell_samples_partial_total": "Gradients whose samples have counted in some chunks, and "
    "will in no others.",
}
_GROUPS = {
    "shardwell_group_ranks": "Ranks that a group is to have.",
    "shardwell_group_missing_ranks": "Ranks that no process has.",
}

_Part: TypeAlias = ParameterSlice | TableSlice
_Status: TypeAlias = pb.ParameterStatus | table_pb2.TableStatus
_Labels: TypeAlias = dict[str, str]
_Sample: TypeAlias = tuple[str, _Labels, float | Durations]


def exposition(vitals: Vitals, is_shown: Callable[[str], bool]) -> bytes:
    """Returns all metrics, as Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ShardCollector(vitals, is_shown))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _ShardCollector(Collector):
    def __init__(self, vitals: Vitals, is_shown: Callable[[str], bool]) -> None:
        self._vitals = vitals
        self._is_shown = is_shown

    def collect(self) -> Iterator[Metric]:
        config = self._vitals.shard.config
        yield InfoMetricFamily(
            "shardwell_build",
            "Version of the software, and what computes.",
            value={"version": shardwell.__version__, "arithmetic": native.describe()},
        )
        yield InfoMetricFamily(
            "shardwell_shard",
            "The shard's place.",
            value={
                "cluster": config.cluster_id,
                "shard_index": str(config.shard_index),
                "shard_count": str(config.shard_count),
                "durability": config.durability.setting,
            },
        )
        yield from _families(_SHARD, self._of_shard())
        resources = self._vitals.resources()
        if resources.HasField("disk_free_bytes"):
            free: _Sample = ("disk_free_bytes", {}, resources.disk_free_bytes)
            size: _Sample = ("disk_size_bytes", {}, resources.disk_size_bytes)
            yield from _families(_DISK, (free, size))
        yield from _families(_FAULTS, self._of_faults())
        yield from _families(_NAMES, self._of_names())
        if config.worker_metrics:
            yield from _families(_LEARNERS, self._of_learners())
        yield from _families(_SAMPLES, self._of_samples())
        yield from _families(_GROUPS, self._of_groups())

    def _of_shard(self) -> Iterator[_Sample]:
        shard = self._vitals.shard
        yield "uptime_seconds", {}, time.monotonic() - shard.started_s
        yield "payload_bytes_total", {"direction": "in"}, shard.traffic.received_bytes
        yield "payload_bytes_total", {"direction": "out"}, shard.traffic.sent_bytes
        for name, (used, most) in self._vitals.limits().items():
            yield name, {}, used
            yield f"{name}_limit", {}, most
        for reason, count in sorted(self._vitals.refusals().items()):
            yield "calls_refused_total", {"reason": reason}, count

    def _of_faults(self) -> Iterator[_Sample]:
        yield "damaged", {}, len(self._vitals.damages())
        yield "files_gone", {}, self._vitals.files_fault() is not None
        now_s = self._vitals.ends.now_s()
        first: dict[tuple[str, str], End] = {}
        for each in self._vitals.ends.all() if self._is_shown("") else ():
            first.setdefault((each.kind, each.name), each)
        for end in first.values():
            named = {"kind": end.kind, "name": end.name}
            yield "ends_seconds", named, end.ends_s - now_s
            yield "ends_soon", named, end.ends_s - now_s <= end.lead_s

    def _of_names(self) -> Iterator[_Sample]:
        shard = self._vitals.shard
        attending = shard.sessions.by_worker()
        for parameter in filter(self._is_named, shard.parameters.all()):
            status = parameter.describe(_WORKER_COUNT_MAX, attending)
            named = {"kind": "parameter", "name": parameter.spec.name}
            missing = status.missing_worker_count + status.unknown_worker_count
            yield "version", named, status.version_min
            yield "gradients_counted_total", named, status.counted_chunk_count
            yield "gradients_duplicate_total", named, status.duplicate_chunk_count
            if parameter.spec.has_open_sets:
                yield "gradients_late_total", named, status.late_chunk_count
            for figure, means in parameter.reports.means().items():
                yield "reported", {**named, "figure": figure}, means[-1][1]
            yield from self._of_part(parameter, status, named, missing)
        for table in filter(self._is_named, shard.tables.all()):
            found = table.describe(_WORKER_COUNT_MAX, attending)
            named = {"kind": "table", "name": table.spec.name}
            missing = len(found.missing_worker_ids) + found.unknown_worker_count
            yield "version", named, found.version
            yield "gradients_counted_total", named, found.counted_row_count
            yield "gradients_duplicate_total", named, found.duplicate_part_count
            yield from self._of_part(table, found, named, missing)

    def _is_named(self, part: _Part) -> bool:
        return self._is_shown(part.spec.name)

    def _of_part(
        self, part: _Part, status: _Status, named: _Labels, missing_count: int
    ) -> Iterator[_Sample]:
        yield "learning_rate", named, status.learning_rate
        yield "step_open_seconds", named, status.wait.open_for_s
        yield "ended", named, status.ended
        yield "abandoned_seconds", named, status.abandoned_for_s
        yield "step_missing_workers", named, missing_count if part.spec.mode == "sync" else 0
        yield "barrier_wait_seconds", named, part.times.waits
        yield "step_duration_seconds", named, part.times.periods
        if part.spec.members is not None:
            yield "members_lost_total", named, status.lost_member_count
            counts = part.count_members()
            for word, state in MEMBER_STATES.items():
                yield "members", {**named, "state": word}, counts[state]
        if self._vitals.shard.config.worker_metrics:
            yield from _of_workers(status, named, counts_chunks=part.spec.has_open_sets)

    def _of_learners(self) -> Iterator[_Sample]:
        for parameter in filter(self._is_named, self._vitals.shard.parameters.all()):
            fragment = parameter.spec.fragment
            if fragment is None:
                continue
            for learner in parameter.reports.learners(_WORKER_COUNT_MAX):
                named = {"kind": "family", "name": fragment.family, "worker": learner.worker_id}
                said = learner.progress
                yield "learner_inner_steps", named, said.inner_steps
                yield "learner_samples_total", named, said.sample_count
                yield "learner_offers_total", named, said.offered_count
                yield "learner_bytes_total", {**named, "direction": "out"}, said.sent_bytes
                yield "learner_bytes_total", {**named, "direction": "in"}, said.received_bytes
                yield "learner_hidden_seconds_total", named, said.hidden_s
                yield "learner_waited_seconds_total", named, said.waited_s
                yield "learner_offers_overdue_total", named, said.overdue_count
                yield "learner_takes_kept_total", named, said.kept_count
                yield "learner_silent_seconds", named, learner.ago_s

    def _of_samples(self) -> Iterator[_Sample]:
        for parameter in filter(self._is_named, self._vitals.shard.parameters.all()):
            for found in parameter.samples.describe():
                named = {
                    "kind": "parameter",
                    "name": parameter.spec.name,
                    "dataset": found.dataset.name,
                }
                yield "samples_epoch", named, found.epoch
                yield "samples", {**named, "state": "done"}, found.done_count
                yield "samples", {**named, "state": "out"}, found.out_count
                yield "samples", {**named, "state": "free"}, found.free_count
                yield "samples_left_out_total", named, found.left_out_count
                yield "samples_partial_total", named, found.partial_count

    def _of_groups(self) -> Iterator[_Sample]:
        for group in self._vitals.groups():
            if self._is_shown(group.name):
                yield "group_ranks", {"group": group.name}, group.size
                yield "group_missing_ranks", {"group": group.name}, len(group.missing_ranks)


def _of_workers(status: _Status, named: _Labels, *, counts_chunks: bool) -> Iterator[_Sample]:
    if status.wait.HasField("open_for_s"):
        for worker in status.wait.workers:
            waited_for = {**named, "worker": worker.worker_id, "host": worker.host}
            yield "step_waits_for", waited_for, 1
    for member in status.members:
        of_member = {**named, "worker": member.worker_id}
        yield "worker_steps", of_member, member.next_step
        if counts_chunks:
            yield "worker_chunks_counted_total", of_member, member.counted_chunk_count
            yield "worker_chunks_late_total", of_member, member.late_chunk_count
        if member.HasField("lag_s"):
            yield "worker_lag_seconds", of_member, member.lag_s
        if member.HasField("idle_s"):
            yield "worker_idle_seconds", of_member, member.idle_s


def _families(texts: Mapping[str, str], samples: Iterable[_Sample]) -> Iterator[Metric]:
    of_name: dict[str, list[tuple[_Labels, Any]]] = {name: [] for name in texts}
    for name, labels, value in samples:
        of_name[f"shardwell_{name}"].append((labels, value))
    for name, found in of_name.items():
        label_names = [*found[0][0]] if found else []
        given = name, texts[name]
        if name in _HISTOGRAMS:
            times = HistogramMetricFamily(*given, labels=label_names)
            for labels, value in found:
                times.add_metric([*labels.values()], _buckets(value), value.total_s)
            yield times
            continue
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(*given, labels=label_names)
        for labels, value in found:
            family.add_metric([*labels.values()], value)
        yield family


def _buckets(times: Durations) -> list[tuple[str, float]]:
    bounds = (*map(str, BOUNDS_S), "+Inf")
    return [*zip(bounds, map(float, accumulate(times.counts)), strict=True)]
