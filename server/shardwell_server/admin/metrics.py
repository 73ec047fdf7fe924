"""The metrics of a shard for Prometheus. All are counted anyway, and collected at a scrape.

Names and units follow Prometheus' guide; labels are names of parameters, tables and workers, whose
number the shard's limits bound.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

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
from shardwell.errors import ShardwellError
from shardwell.group.rendezvous.members import GroupState
from shardwell.numerics import native
from shardwell.rpc.shard_status import MEMBER_STATES
from shardwell.v1 import parameter_server_pb2, table_pb2
from shardwell.v1.types_pb2 import StepWait
from shardwell_server.access.ends import End, Ends
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.step_times import BOUNDS_S, Durations
from shardwell_server.shard.table.slice import TableSlice

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WORKER_COUNT_MAX = 256


_Part: TypeAlias = ParameterSlice | TableSlice
_Status: TypeAlias = parameter_server_pb2.ParameterStatus | table_pb2.TableStatus


class _Figures(NamedTuple):
    """The figures that parameters and tables call by other names."""

    version: int
    counted: int
    again: int
    missing: int


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
    resources: Callable[[], parameter_server_pb2.Resources]

    def settings(self) -> parameter_server_pb2.ShardSettings:
        """Returns the shard's settings, limits, and certificates and tokens that end."""
        shard, limits, now_s = self.shard, self.shard.config.limits, self.ends.now_s()
        found = parameter_server_pb2.ShardSettings(
            durability="" if self.data_dir is None else shard.config.durability.setting
        )
        for name, used, most in (
            ("stored bytes", shard.stored_bytes, limits.stored_bytes_max),
            ("clients", shard.sessions.count, limits.session_count_max),
            ("streams", self.stream_count(), limits.stream_count_max),
            ("shared memory", self.arena_bytes(), limits.arena_bytes_max),
        ):
            found.limits.add(name=name, used=used, most=most)
        for end in self.ends.all():
            found.endings.add(kind=end.kind, name=end.name, left_s=end.ends_s - now_s)
        if shard.copied_s is not None:
            found.checkpoint_ago_s = time.monotonic() - shard.copied_s
        return found

    def files_fault(self) -> str | None:
        """Returns why the shard goes on without its files; None: it has them."""
        try:
            self.shard.check_files()
        except ShardwellError as error:
            return error.message
        return None


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
        yield from self._of_shard()
        yield from self._of_disk()
        yield from self._of_faults()
        yield from self._of_names()
        if self._vitals.shard.config.worker_metrics:
            yield from self._of_learners()
        yield from self._of_groups()

    def _of_shard(self) -> Iterator[Metric]:
        shard = self._vitals.shard
        config, limits = shard.config, shard.config.limits
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
        up_s = time.monotonic() - shard.started_s
        yield GaugeMetricFamily("shardwell_uptime_seconds", "Since the process began.", up_s)
        traffic = CounterMetricFamily(
            "shardwell_payload_bytes", "Payload moved, by its direction.", labels=["direction"]
        )
        traffic.add_metric(["in"], shard.traffic.received_bytes)
        traffic.add_metric(["out"], shard.traffic.sent_bytes)
        yield traffic
        yield from _with_limit(
            "stored_bytes",
            "Bytes of weights, sums, optimizer state and images.",
            shard.stored_bytes,
            limits.stored_bytes_max,
        )
        yield from _with_limit(
            "sessions",
            "Clients that are connected.",
            shard.sessions.count,
            limits.session_count_max,
        )
        yield from _with_limit(
            "streams",
            "Streams that are open.",
            self._vitals.stream_count(),
            limits.stream_count_max,
        )
        yield from _with_limit(
            "arena_bytes",
            "Memory that clients of this machine share with the shard.",
            self._vitals.arena_bytes(),
            limits.arena_bytes_max,
        )
        yield from _with_limit(
            "parameters", "Parameters.", len(shard.parameters.all()), limits.parameter_count_max
        )
        yield from _with_limit("tables", "Tables.", len(shard.tables.all()), limits.table_count_max)
        refusals = CounterMetricFamily(
            "shardwell_calls_refused",
            "Calls that ended with an error, by its name.",
            labels=["reason"],
        )
        for reason, count in sorted(self._vitals.refusals().items()):
            refusals.add_metric([reason], count)
        yield refusals

    def _of_disk(self) -> Iterator[Metric]:
        if self._vitals.data_dir is None:
            return
        try:
            usage = shutil.disk_usage(self._vitals.data_dir)
        except OSError:  # the directory is gone, which /ready tells
            return
        yield GaugeMetricFamily(
            "shardwell_disk_free_bytes", "Room where the shard's files are.", usage.free
        )
        yield GaugeMetricFamily("shardwell_disk_size_bytes", "All of it.", usage.total)

    def _of_faults(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "shardwell_damaged",
            "Stored pieces that are known to be damaged; of many, a few are counted.",
            len(self._vitals.damages()),
        )
        yield GaugeMetricFamily(
            "shardwell_files_gone",
            "1 if the shard's files were removed, moved or replaced while it served.",
            0 if self._vitals.files_fault() is None else 1,
        )
        ends = GaugeMetricFamily(
            "shardwell_ends_seconds",
            "Until a certificate or token ends; below 0 when it has.",
            labels=["kind", "name"],
        )
        soon = GaugeMetricFamily(
            "shardwell_ends_soon",
            "1 if it is to be made anew: 30 days before its end, or in the last third of its life.",
            labels=["kind", "name"],
        )
        now_s = self._vitals.ends.now_s()
        first: dict[tuple[str, str], End] = {}
        for each in self._vitals.ends.all() if self._is_shown("") else ():
            first.setdefault((each.kind, each.name), each)
        for labels, end in first.items():
            ends.add_metric(labels, end.ends_s - now_s)
            soon.add_metric(labels, end.ends_s - now_s <= end.lead_s)
        yield ends
        yield soon

    def _of_groups(self) -> Iterator[Metric]:
        label = ["group"]
        size = GaugeMetricFamily(
            "shardwell_group_ranks", "Ranks that a group is to have.", labels=label
        )
        missing = GaugeMetricFamily(
            "shardwell_group_missing_ranks", "Ranks that no process has.", labels=label
        )
        for group in self._vitals.groups():
            if self._is_shown(group.name):
                size.add_metric([group.name], group.size)
                missing.add_metric([group.name], len(group.missing_ranks))
        yield from (size, missing)

    def _of_names(self) -> Iterator[Metric]:
        label = ["kind", "name"]
        version = GaugeMetricFamily(
            "shardwell_version",
            "Updates that the part which is furthest behind has seen.",
            labels=label,
        )
        counted = CounterMetricFamily(
            "shardwell_gradients_counted", "Chunks, or rows, of gradients counted.", labels=label
        )
        again = CounterMetricFamily(
            "shardwell_gradients_duplicate",
            "Chunks, or messages of rows, that came again and were not counted.",
            labels=label,
        )
        late = CounterMetricFamily(
            "shardwell_gradients_late",
            "Chunks that came when their step had closed, or their worker's tenure was over.",
            labels=label,
        )
        lost = CounterMetricFamily(
            "shardwell_members_lost", "Elastic members that the shard found gone.", labels=label
        )
        members = GaugeMetricFamily(
            "shardwell_members", "Elastic members by state.", labels=[*label, "state"]
        )
        rate = GaugeMetricFamily("shardwell_learning_rate", "The next update's.", labels=label)
        open_for = GaugeMetricFamily(
            "shardwell_step_open_seconds",
            "Since the first contribution to the open step; 0 without one, or without any worker.",
            labels=label,
        )
        ended = GaugeMetricFamily(
            "shardwell_ended", "1 if all workers have left in order.", labels=label
        )
        abandoned = GaugeMetricFamily(
            "shardwell_abandoned_seconds",
            "For how long no worker has been connected, once that is abandoned_after_s; else 0.",
            labels=label,
        )
        missing = GaugeMetricFamily(
            "shardwell_step_missing_workers", "Workers for whom the open step waits.", labels=label
        )
        waited_for = GaugeMetricFamily(
            "shardwell_step_waits_for",
            "1 for each worker that is missing from an open step which has begun.",
            labels=[*label, "worker", "host"],
        )
        of_worker = [*label, "worker"]
        lag = GaugeMetricFamily(
            "shardwell_worker_lag_seconds",
            "In a worker's last step, from the first contribution of all workers to its own.",
            labels=of_worker,
        )
        idle = GaugeMetricFamily(
            "shardwell_worker_idle_seconds",
            "Since the last contribution of a worker.",
            labels=of_worker,
        )
        steps = GaugeMetricFamily(
            "shardwell_worker_steps", "Steps of a worker, in its own count.", labels=of_worker
        )
        worker_counted = CounterMetricFamily(
            "shardwell_worker_chunks_counted",
            "Chunks of a worker that counted since it joined, where steps may close without it.",
            labels=of_worker,
        )
        worker_late = CounterMetricFamily(
            "shardwell_worker_chunks_late", "The same of those that were late.", labels=of_worker
        )
        waits = HistogramMetricFamily(
            "shardwell_barrier_wait_seconds",
            "From the first contribution to a step to its end.",
            labels=label,
        )
        periods = HistogramMetricFamily(
            "shardwell_step_duration_seconds",
            "From the end of a step to that of the next.",
            labels=label,
        )
        reported = GaugeMetricFamily(
            "shardwell_reported",
            "What workers reported of the last step, such as a loss: the mean.",
            labels=[*label, "figure"],
        )
        for kind, part, status, figures in self._parts():
            names = [kind, part.spec.name]
            version.add_metric(names, figures.version)
            counted.add_metric(names, figures.counted)
            again.add_metric(names, figures.again)
            rate.add_metric(names, status.learning_rate)
            if isinstance(status, parameter_server_pb2.ParameterStatus) and part.spec.has_open_sets:
                late.add_metric(names, status.late_chunk_count)
            if part.spec.members is not None:
                lost.add_metric(names, status.lost_member_count)
                counts = part.count_members()
                for word, state in MEMBER_STATES.items():
                    members.add_metric([*names, word], counts[state])
            missing.add_metric(names, figures.missing if part.spec.mode == "sync" else 0)
            open_for.add_metric(names, status.wait.open_for_s)
            ended.add_metric(names, status.ended)
            abandoned.add_metric(names, status.abandoned_for_s)
            if self._vitals.shard.config.worker_metrics:
                _add_missing(waited_for, names, status.wait)
                for member in status.members:
                    of_member = [*names, member.worker_id]
                    steps.add_metric(of_member, member.next_step)
                    if part.spec.has_open_sets:
                        worker_counted.add_metric(of_member, member.counted_chunk_count)
                        worker_late.add_metric(of_member, member.late_chunk_count)
                    if member.HasField("lag_s"):
                        lag.add_metric(of_member, member.lag_s)
                    if member.HasField("idle_s"):
                        idle.add_metric(of_member, member.idle_s)
            _add_times(waits, names, part.times.waits)
            _add_times(periods, names, part.times.periods)
            if isinstance(part, ParameterSlice):
                for figure, means in part.reports.means().items():
                    reported.add_metric([*names, figure], means[-1][1])
        yield from (
            version, counted, again, rate, open_for, ended, abandoned, missing, waited_for, lag,
            idle, steps, reported, waits, periods, late, lost, members, worker_counted,
            worker_late,
        )  # fmt: skip

    def _of_learners(self) -> Iterator[Metric]:
        label = ["kind", "name", "worker"]
        steps = GaugeMetricFamily(
            "shardwell_learner_inner_steps",
            "Steps that a learner of a family has made by itself.",
            labels=label,
        )
        samples = CounterMetricFamily(
            "shardwell_learner_samples", "What a learner was trained on.", labels=label
        )
        offers = CounterMetricFamily(
            "shardwell_learner_offers", "Outer gradients that a learner has offered.", labels=label
        )
        moved = CounterMetricFamily(
            "shardwell_learner_bytes",
            "What a learner's client has moved, by its direction.",
            labels=[*label, "direction"],
        )
        hidden = CounterMetricFamily(
            "shardwell_learner_hidden_seconds",
            "Time in which a learner's offers were under way while training went on.",
            labels=label,
        )
        waited = CounterMetricFamily(
            "shardwell_learner_waited_seconds",
            "Time for which a learner's takes have waited.",
            labels=label,
        )
        overdue = CounterMetricFamily(
            "shardwell_learner_offers_overdue",
            "Offers of a learner whose result had not come in time.",
            labels=label,
        )
        kept = CounterMetricFamily(
            "shardwell_learner_takes_kept",
            "Takes at which a learner has kept work that had not counted.",
            labels=label,
        )
        silent = GaugeMetricFamily(
            "shardwell_learner_silent_seconds",
            "Since a learner said last how far it has come.",
            labels=label,
        )
        for parameter in self._vitals.shard.parameters.all():
            fragment = parameter.spec.fragment
            if fragment is None or not self._is_shown(parameter.spec.name):
                continue
            for learner in parameter.reports.learners(_WORKER_COUNT_MAX):
                of_learner = ["family", fragment.family, learner.worker_id]
                said = learner.progress
                steps.add_metric(of_learner, said.inner_steps)
                samples.add_metric(of_learner, said.sample_count)
                offers.add_metric(of_learner, said.offered_count)
                moved.add_metric([*of_learner, "out"], said.sent_bytes)
                moved.add_metric([*of_learner, "in"], said.received_bytes)
                hidden.add_metric(of_learner, said.hidden_s)
                waited.add_metric(of_learner, said.waited_s)
                overdue.add_metric(of_learner, said.overdue_count)
                kept.add_metric(of_learner, said.kept_count)
                silent.add_metric(of_learner, learner.ago_s)
        yield from (steps, samples, offers, moved, hidden, waited, overdue, kept, silent)

    def _parts(self) -> Iterator[tuple[str, _Part, _Status, _Figures]]:
        shard = self._vitals.shard
        attending = shard.sessions.by_worker()
        for parameter in shard.parameters.all():
            if self._is_shown(parameter.spec.name):
                status = parameter.describe(_WORKER_COUNT_MAX, attending)
                yield (
                    "parameter",
                    parameter,
                    status,
                    _Figures(
                        status.version_min,
                        status.counted_chunk_count,
                        status.duplicate_chunk_count,
                        status.missing_worker_count + status.unknown_worker_count,
                    ),
                )
        for table in shard.tables.all():
            if self._is_shown(table.spec.name):
                found = table.describe(_WORKER_COUNT_MAX, attending)
                yield (
                    "table",
                    table,
                    found,
                    _Figures(
                        found.version,
                        found.counted_row_count,
                        found.duplicate_part_count,
                        len(found.missing_worker_ids) + found.unknown_worker_count,
                    ),
                )


def _with_limit(name: str, text: str, now: float, limit: float) -> Iterator[Metric]:
    yield GaugeMetricFamily(f"shardwell_{name}", text, now)
    yield GaugeMetricFamily(f"shardwell_{name}_limit", f"The most there may be. {text}", limit)


def _add_missing(waited_for: GaugeMetricFamily, names: list[str], wait: StepWait) -> None:
    if wait.HasField("open_for_s"):
        for worker in wait.workers:
            waited_for.add_metric([*names, worker.worker_id, worker.host], 1)


def _add_times(family: HistogramMetricFamily, names: list[str], times: Durations) -> None:
    total, buckets = 0, []
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), list(times.counts), strict=True):
        total += count
        buckets.append((bound, float(total)))
    family.add_metric(names, buckets, times.total_s)
