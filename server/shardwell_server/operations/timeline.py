"""The latest spans of shards and workers, as one timeline in Chrome's tracing format.

Pure. No process records who waits for whom: it follows from when contributions came.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardwell.process.span_columns import Span, keep_subjects, spans_of
from shardwell.v1 import trace_pb2 as pb

MADE_BY = {"made_by": "shardwell trace"}
"""The first field of a timeline, which distinguishes one from other files."""
_LANE_COUNT_MAX = 64
_FRAGMENT = re.compile(r"\.fragment-[0-9]+\Z")
_CALLS = (pb.SPAN_KIND_EXCHANGE, pb.SPAN_KIND_PUT, pb.SPAN_KIND_GET)
_TO_SHARD = (pb.SPAN_KIND_ENCODE, pb.SPAN_KIND_SEND)
_CONTRIBUTIONS = (pb.SPAN_KIND_ADD, pb.SPAN_KIND_UPDATE)
_LANES: dict[int, str] = {
    pb.SPAN_KIND_WAIT: "answers",
    pb.SPAN_KIND_DECODE: "answers",
    pb.SPAN_KIND_ENCODE_WEIGHTS: "weights",
    pb.SPAN_KIND_FLUSH: "disk",
}


class Wait(NamedTuple):
    """A wait of a worker that had contributed for others that had not; on the timeline's clock."""

    worker_id: str
    subject: str
    step: int
    whom: tuple[str, ...]
    """The workers waited for: of a step that has closed, the one that was last."""
    begin_ns: int
    end_ns: int
    is_over: bool


@dataclasses.dataclass(frozen=True)
class Process:
    """A recorded process, with spans that were checked.

    `offset_ns` is added to its times for those of the timeline's clock, and may be wrong by
    `error_ns` either way. What ended before `since_ns` is left out.
    """

    message: pb.ProcessSpans
    shard_index: int | None
    offset_ns: int
    error_ns: int
    since_ns: int = 0
    open_steps: Sequence[pb.OpenStep] = ()

    @property
    def name(self) -> str:
        """The name of the shard or worker."""
        if self.shard_index is None:
            return self.message.worker_id
        return f"shard {self.shard_index}"

    def spans(self) -> list[Span]:
        """Returns all of them, on the timeline's clock, in the order in which they ended."""
        spans = spans_of(self.message, self.offset_ns)
        return [span for span in spans if span.end_ns >= self.since_ns]


def only(process: Process, name: str) -> Process:
    """Returns the process with spans and open steps of one name alone."""

    def is_wanted(subject: str) -> bool:
        return name in (subject, _FRAGMENT.sub("", subject))

    message = pb.ProcessSpans()
    message.CopyFrom(process.message)
    keep_subjects(message, is_wanted)
    steps = [each for each in process.open_steps if is_wanted(each.name)]
    return dataclasses.replace(process, message=message, open_steps=steps)


def subjects(process: Process) -> set[str]:
    """Returns the names of the parameters and tables that a process has spans of."""
    return {process.message.words[number] for number in set(process.message.subjects)} - {""}


def waits(process: Process) -> list[Wait]:
    """Returns the waits of workers for others on a shard."""
    missing = {
        (each.name, each.step): tuple(one.worker_id for one in each.wait.workers)
        for each in process.open_steps
    }
    now_ns = process.message.now_ns + process.offset_ns
    found = []
    for (subject, step), spans in _by_step(process.spans()).items():
        lasts = _lasts(spans)
        if (subject, step) in missing:
            whom, until_ns, is_over = missing[subject, step], now_ns, False
        elif lasts and any(span.kind == pb.SPAN_KIND_UPDATE for span in spans):
            last = max(lasts.values(), key=lambda span: span.end_ns)
            whom, until_ns, is_over = (last.peer,), last.begin_ns, True
        else:
            continue  # its end is not kept, or is to come
        for worker_id, span in lasts.items():
            # A worker whose last one closed a step waited for no other: in asynchronous mode, each.
            waited = span.kind == pb.SPAN_KIND_ADD and span.end_ns < until_ns
            if waited and worker_id not in whom:
                found.append(Wait(worker_id, subject, step, whom, span.end_ns, until_ns, is_over))
    return found


def chrome_trace(processes: Sequence[Process]) -> dict[str, Any]:
    """Returns the timeline of all processes, as JSON has it; shown in that order."""
    spans = [process.spans() for process in processes]
    begin_ns = min((span.begin_ns for each in spans for span in each), default=0)
    events: list[dict[str, Any]] = []
    for number, (process, own) in enumerate(zip(processes, spans, strict=True), 1):
        message = process.message
        where = f"process {message.pid} on {message.host}"
        clock = f", clock ±{process.error_ns / 1000:.0f} µs" if process.error_ns else ""
        events.append(_named("process_name", number, f"{process.name} ({where}{clock})"))
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        )
        shown = [(_lane(span), *_told(span)) for span in own]
        if process.shard_index is not None:
            shown += [_told_wait(wait) for wait in waits(process)]
        events += _laid_out(number, shown, begin_ns)
    return {"otherData": MADE_BY, "displayTimeUnit": "ms", "traceEvents": events}


_Shown = tuple[str, str, int, int, dict[str, Any]]


def _lane(span: Span) -> str:
    if span.kind in _CALLS:
        return "calls"
    if span.kind in _TO_SHARD:
        return f"to {span.peer}"
    if span.kind in (*_CONTRIBUTIONS, pb.SPAN_KIND_LATE):
        return f"gradients of {span.peer}" if span.peer else "gradients"
    return _LANES.get(span.kind, "other")


def _told(span: Span) -> tuple[str, int, int, dict[str, Any]]:
    told: dict[str, Any] = {"of": span.subject}
    if span.step >= 0:
        told["step"] = span.step
    if span.chunk >= 0:
        told["chunk"] = span.chunk
    if span.peer:
        told["with"] = span.peer
    return _name(span.kind), span.begin_ns, span.end_ns, told


def _name(kind: int) -> str:
    try:
        name = pb.SpanKind.Name(kind)
    except ValueError:
        return f"kind {kind}"  # of a later version
    return name.removeprefix("SPAN_KIND_").replace("_", " ").lower()


def _told_wait(wait: Wait) -> _Shown:
    name = f"waits for {', '.join(wait.whom) or 'workers that were never seen'}"
    told = {"of": wait.subject, "step": wait.step, "is over": wait.is_over}
    return f"{wait.worker_id} waits", name, wait.begin_ns, wait.end_ns, told


def _laid_out(process: int, shown: Iterable[_Shown], begin_ns: int) -> Iterator[dict[str, Any]]:
    lanes: dict[str, list[list[int]]] = {}
    numbers: dict[tuple[str, int], int] = {}
    for label, name, from_ns, to_ns, told in sorted(shown, key=lambda s: (s[2], -s[3])):
        place = _place(lanes.setdefault(label, []), from_ns, to_ns)
        thread = numbers.get((label, place))
        if thread is None:
            thread = numbers[label, place] = len(numbers) + 1
            shown_label = label if place == 0 else f"{label} ({place + 1})"
            yield {**_named("thread_name", process, shown_label), "tid": thread}
        yield {
            "ph": "X",
            "name": name,
            "pid": process,
            "tid": thread,
            "ts": (from_ns - begin_ns) / 1000,
            "dur": (to_ns - from_ns) / 1000,
            "args": told,
        }


def _place(lanes: list[list[int]], from_ns: int, to_ns: int) -> int:
    """Takes the first lane with room, or a new one; beyond the limit, the last."""
    for place, ends in enumerate(lanes):
        while ends and ends[-1] <= from_ns:
            ends.pop()
        if not ends or to_ns <= ends[-1]:
            ends.append(to_ns)
            return place
    if len(lanes) < _LANE_COUNT_MAX:
        lanes.append([to_ns])
    return len(lanes) - 1


def _named(kind: str, process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "args": {"name": name}}


class ClosedStep(NamedTuple):
    """A step as one shard saw it."""

    subject: str
    step: int
    end_ns: int
    took_s: float
    """The time from the begin of its first contribution until then."""
    last: str
    waited_s: float
    """The first worker's wait for the last; 0 of one worker."""
    worker_count: int


def closed_steps(spans: Iterable[Span]) -> list[ClosedStep]:
    """Returns the closed steps of a shard's spans, in the order of their names and steps."""
    found = []
    for (subject, step), of_step in sorted(_by_step(spans).items()):
        lasts = _lasts(of_step)
        if not lasts or not any(span.kind == pb.SPAN_KIND_UPDATE for span in of_step):
            continue
        last = max(lasts.values(), key=lambda span: span.end_ns)
        others = [span.end_ns for span in lasts.values() if span.peer != last.peer]
        waited_ns = max(last.begin_ns - min(others), 0) if others else 0
        begin_ns = min(span.begin_ns for span in of_step)
        took_s = (last.end_ns - begin_ns) / 1e9
        found.append(
            ClosedStep(subject, step, last.end_ns, took_s, last.peer, waited_ns / 1e9, len(lasts))
        )
    return found


def _by_step(spans: Iterable[Span]) -> dict[tuple[str, int], list[Span]]:
    found: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in _CONTRIBUTIONS:
            found[span.subject, span.step].append(span)
    return found


def _lasts(spans: Iterable[Span]) -> dict[str, Span]:
    found: dict[str, Span] = {}
    for span in spans:
        if span.peer:
            found[span.peer] = max(found.get(span.peer, span), span, key=lambda s: s.end_ns)
    return found


@dataclasses.dataclass(frozen=True)
class Spent:
    """The means of a worker's steps, in seconds."""

    worker_id: str
    step_count: int
    call_s: float
    encode_s: float
    wait_s: float
    decode_s: float
    between_s: float
    """The time from a call to the next: computing, mostly."""


def spent(process: Process) -> Spent | None:
    """Returns the means of a worker's steps; None: it made none."""
    calls = [span for span in process.spans() if span.kind in _CALLS and span.step >= 0]
    if not calls:
        return None
    of_calls = {(span.subject, span.step) for span in calls}
    sums: dict[int, int] = defaultdict(int)
    for span in process.spans():
        if (span.subject, span.step) in of_calls:
            sums[span.kind] += span.end_ns - span.begin_ns
    # Calls of several threads overlap: what lies between is where there is none at all.
    gaps_ns, until_ns = [], calls[0].begin_ns
    for span in sorted(calls, key=lambda call: call.begin_ns):
        if span.begin_ns > until_ns:
            gaps_ns.append(span.begin_ns - until_ns)
        until_ns = max(until_ns, span.end_ns)
    steps = len({span.step for span in calls})
    return Spent(
        process.name,
        steps,
        sum(sums[kind] for kind in _CALLS) / steps / 1e9,
        sums[pb.SPAN_KIND_ENCODE] / steps / 1e9,
        sums[pb.SPAN_KIND_WAIT] / steps / 1e9,
        sums[pb.SPAN_KIND_DECODE] / steps / 1e9,
        sum(gaps_ns) / steps / 1e9,
    )


class Last(NamedTuple):
    """The waits of the others for a worker, on whichever shard for longest."""

    worker_id: str
    step_count: int
    of_count: int
    median_s: float
    """The first one's wait for it, in the median of these steps."""


def lasts(processes: Sequence[Process]) -> list[Last]:
    """Returns the workers that others waited for in closed steps; the most frequent one first."""
    longest: dict[tuple[str, int], tuple[str, int]] = {}
    for process in processes:
        if process.shard_index is None:
            continue
        for wait in waits(process):
            key, took_ns = (wait.subject, wait.step), wait.end_ns - wait.begin_ns
            if wait.is_over and took_ns > longest.get(key, ("", -1))[1]:
                longest[key] = wait.whom[0], took_ns
    by_worker: dict[str, list[int]] = defaultdict(list)
    for worker_id, took_ns in longest.values():
        by_worker[worker_id].append(took_ns)
    found = [
        Last(worker_id, len(took), len(longest), statistics.median(took) / 1e9)
        for worker_id, took in by_worker.items()
    ]
    return sorted(found, key=lambda last: (-last.step_count, last.worker_id))
