"""The last hour of this shard, in memory: what it uses, and how fast its parameters and tables go.

A thread of its own takes a sample each PERIOD_S from counters that are kept anyway, so that a step
does nothing for it. A shard that is started again begins with nothing. It occupies at most
`BYTES_MAX`: each series is an array of SAMPLE_COUNT numbers, and of names there are NAME_COUNT_MAX.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from shardwell.rpc.shard_status import Resources
from shardwell_server.admin.vitals import Vitals
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.table.slice import TableSlice

_LOG = logging.getLogger("shardwell_server")
PERIOD_S = 5.0
_FIRST_PERIOD_S = 1.0
"""Between the first ones: a page that is opened with a cluster soon has lines to draw."""
_FIRST_COUNT = 5
SAMPLE_COUNT = 720
NAME_COUNT_MAX = 256
"""Parameters and tables with a history; of more, those whose version changed last."""
_SHARD_SERIES = ("cores", "memory_bytes", "disk_free_bytes", "in_bytes_s", "out_bytes_s")
_NAME_SERIES = ("steps_s", "wait_s")
BYTES_MAX = SAMPLE_COUNT * (8 + 4 * (len(_SHARD_SERIES) + len(_NAME_SERIES) * NAME_COUNT_MAX))
_SHOWN_COUNT_MAX = 8
_DIGITS = 4

_Part: TypeAlias = ParameterSlice | TableSlice
Key: TypeAlias = tuple[str, str]


class _Series:
    """The last numbers, the oldest first; NaN for unknown ones."""

    def __init__(self) -> None:
        self._values = array("f", [math.nan]) * SAMPLE_COUNT

    def put(self, place: int, value: float | None) -> None:
        self._values[place] = math.nan if value is None else value

    def last(self, place: int, count: int) -> list[float | None]:
        values = [self._values[(place - back) % SAMPLE_COUNT] for back in reversed(range(count))]
        return [None if math.isnan(each) else float(f"{each:.{_DIGITS}g}") for each in values]

    def total(self) -> float:
        return sum(each for each in self._values if not math.isnan(each))


class _Counts(NamedTuple):
    version: int
    wait_count: int
    wait_s: float


class _Name:
    def __init__(self, counts: _Counts) -> None:
        self.counts = counts
        self.changed_at = 0
        self.series = {name: _Series() for name in _NAME_SERIES}


class History:
    """The samples of one shard. Any thread may call it."""

    def __init__(self, vitals: Vitals, now_s: Callable[[], float] = time.monotonic) -> None:
        self._vitals = vitals
        self._now_s = now_s
        self._lock = threading.Lock()
        self._times_s = array("d", [0.0]) * SAMPLE_COUNT
        self._count = 0
        self._shard = {name: _Series() for name in _SHARD_SERIES}
        first = itertools.islice(self._parts(), NAME_COUNT_MAX)
        self._names = {key: _Name(_counts(part)) for key, part in first}
        self._left_out: dict[Key, int] = {}
        self._before = self._totals()
        self._before_s = now_s()
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="shardwell-admin-history", daemon=True
        )

    def start(self) -> None:
        """Takes samples from now on."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Safe to repeat."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(_FIRST_PERIOD_S if self._count < _FIRST_COUNT else PERIOD_S):
            try:
                self.sample()
            except Exception:  # the next one may be taken all the same
                _LOG.exception("a sample of the shard's history can't be taken")

    def sample(self) -> None:
        """Takes one sample."""
        with self._lock:
            now_s, totals = self._now_s(), self._totals()
            passed_s = max(now_s - self._before_s, 1e-3)
            place = self._count % SAMPLE_COUNT
            resources = Resources.from_proto(self._vitals.resources())
            cores, *bytes_s = (
                max(after - before, 0.0) / passed_s
                for before, after in zip(self._before, totals, strict=True)
            )
            found = (cores, resources.memory_bytes, resources.disk_free_bytes, *bytes_s)
            for series, value in zip(self._shard.values(), found, strict=True):
                series.put(place, value)
            self._sample_names(place, passed_s)
            self._times_s[place] = now_s
            self._before, self._before_s = totals, now_s
            self._count += 1

    def _totals(self) -> tuple[float, float, float]:
        traffic = self._vitals.shard.traffic
        return time.process_time(), traffic.received_bytes, traffic.sent_bytes

    def _sample_names(self, place: int, passed_s: float) -> None:
        gone, left_out = set(self._names), self._left_out
        self._left_out = {}
        for key, part in self._parts():
            gone.discard(key)
            counts, known = _counts(part), self._names.get(key)
            if known is None:
                if len(self._names) >= NAME_COUNT_MAX:
                    has_changed = left_out.get(key, counts.version) != counts.version
                    if not has_changed or not self._forget_idlest():
                        self._left_out[key] = counts.version
                        continue
                # A new parameter begins at version 0, a restored one at its own.
                known = self._names[key] = _Name(_Counts(counts.version, 0, 0.0))
                known.changed_at = self._count
            steps = max(counts.version - known.counts.version, 0)
            waits = counts.wait_count - known.counts.wait_count
            waited_s = counts.wait_s - known.counts.wait_s
            if steps:
                known.changed_at = self._count
            known.series["steps_s"].put(place, steps / passed_s)
            known.series["wait_s"].put(place, max(waited_s, 0.0) / waits if waits > 0 else None)
            known.counts = counts
        for key in gone:  # deleted
            del self._names[key]

    def _forget_idlest(self) -> bool:
        """Makes room for a name; False: the versions of all changed a moment ago."""
        idlest = min(self._names, key=lambda key: self._names[key].changed_at)
        if self._names[idlest].changed_at >= self._count - 1:
            return False
        del self._names[idlest]
        return True

    def _parts(self) -> Iterator[tuple[Key, _Part]]:
        shard = self._vitals.shard
        yield from ((("parameter", each.spec.name), each) for each in shard.parameters.all())
        yield from ((("table", each.spec.name), each) for each in shard.tables.all())

    def view(self, is_shown: Callable[[str], bool], only: Key | None = None) -> dict[str, Any]:
        """Returns the history that the page draws."""
        with self._lock:
            count = min(self._count, SAMPLE_COUNT)
            place = (self._count - 1) % SAMPLE_COUNT

            def last(given: dict[str, _Series]) -> dict[str, list[float | None]]:
                return {name: series.last(place, count) for name, series in given.items()}

            now_s = self._now_s()
            ages = [
                round(now_s - self._times_s[(place - back) % SAMPLE_COUNT], 1)
                for back in reversed(range(count))
            ]
            shown = [key for key in self._names if is_shown(key[1]) and only in (None, key)]
            shown.sort(key=lambda key: (-self._names[key].series["steps_s"].total(), key))
            names = [
                {"kind": kind, "name": name, **last(self._names[kind, name].series)}
                for kind, name in shown[:_SHOWN_COUNT_MAX]
            ]
            found: dict[str, Any] = {"period_s": PERIOD_S, "ages_s": ages, "names": names}
            if only is None:
                found["left_out"] = max(len(shown) - _SHOWN_COUNT_MAX, 0)
                found["shard_index"] = self._vitals.shard.config.shard_index
                found["shard"] = last(self._shard)
            return found


def version_of(part: _Part) -> int:
    """Returns the updates that all of a parameter's slice has seen, or a table."""
    return part.version_min if isinstance(part, ParameterSlice) else part.version


def _counts(part: _Part) -> _Counts:
    waits = part.times.waits
    return _Counts(version_of(part), sum(waits.counts), waits.total_s)
