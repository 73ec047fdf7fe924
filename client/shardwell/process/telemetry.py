"""An exporter of what was recorded (spans.py) to OpenTelemetry: see docs/adr/0021-trace.md.

A program that wants it has imported opentelemetry.trace and set up its SDK; this module imports
nothing of it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from shardwell.process.span_columns import Span
from shardwell.process.spans import NO_STEP, Spans, now_ns
from shardwell.v1 import trace_pb2 as pb

_LOG = logging.getLogger("shardwell")
MODULE = "opentelemetry.trace"
QUIET_S = 1.0
"""After so long without a record of it, a step that has closed is exported."""
_FLUSH_MS = 2000
"""The bound of an exporter, whose receiver may be gone."""
_OF_CALL = (pb.SPAN_KIND_ENCODE, pb.SPAN_KIND_SEND, pb.SPAN_KIND_WAIT, pb.SPAN_KIND_DECODE)
_OF_STEP = (
    pb.SPAN_KIND_ADD,
    pb.SPAN_KIND_UPDATE,
    pb.SPAN_KIND_ENCODE_WEIGHTS,
    pb.SPAN_KIND_FLUSH,
    pb.SPAN_KIND_LATE,
)
_CONTRIBUTIONS = (pb.SPAN_KIND_ADD, pb.SPAN_KIND_UPDATE)
_CLOSING = (pb.SPAN_KIND_UPDATE, pb.SPAN_KIND_LATE)

ResultT = TypeVar("ResultT")


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Guards a block of OpenTelemetry's: no call fails because that does, or is half imported."""
    try:
        yield
    except Exception as error:
        _LOG.debug("OpenTelemetry failed", exc_info=error)


@_apart()
def export_call(
    verb: str,
    spans: Spans,
    worker_id: str,
    where: dict[str, str],
    begin_ns: int,
    failed: BaseException | None,
) -> None:
    """Exports the span of a call, in the caller's context, with the kinds of work in it."""
    otel: Any = sys.modules[MODULE]
    (kind, name), *_ = where.items()
    span = otel.get_tracer("shardwell").start_span(
        f"shardwell.{verb}",
        kind=otel.SpanKind.CLIENT,
        attributes={"shardwell.worker_id": worker_id, f"shardwell.{kind}": name},
        start_time=begin_ns + _epoch_ns(),
    )
    with _apart():
        if span.is_recording():
            kept = spans.since(begin_ns, name)
            step = max((each.step for each in kept), default=NO_STEP)
            if step >= 0:
                span.set_attribute("shardwell.step", step)
            if failed is not None:
                span.record_exception(failed)
                span.set_status(otel.StatusCode.ERROR, str(failed))
            _add_children(otel, span, [each for each in kept if each.kind in _OF_CALL])
    span.end()


def flush() -> None:
    """Has what has ended exported, for a process that ends at once. Blocks for seconds at most."""
    # AttributeError where there is no SDK
    bounded(lambda: sys.modules[MODULE].get_tracer_provider().force_flush(_FLUSH_MS))


def bounded(export: Callable[[], object]) -> None:
    """Exports something, where this process uses OpenTelemetry; blocks for seconds at most.

    The SDK's batches take as long as their exporter does, whatever they are asked for.
    """
    if not sys.modules.get(MODULE):
        return

    def work() -> None:
        with _apart():
            export()

    thread = threading.Thread(target=work, name="shardwell-telemetry", daemon=True)
    with contextlib.suppress(RuntimeError):  # the system has no further thread
        thread.start()
        thread.join(_FLUSH_MS / 1000)


class StepExporter:
    """Exports the steps that a shard has recorded, each once. For one thread at a time."""

    def __init__(self, spans: Spans, shard_index: int, is_table: Callable[[str], bool]) -> None:
        self._spans = spans
        self._shard_index = shard_index
        self._is_table = is_table
        self._done: dict[tuple[str, int, str], int] = {}
        """The end of each exported step that is still recorded, by name, step and worker."""
        self.is_interrupted = False
        """Set, by any thread, to end an export behind the step that is under way."""

    def export(self, quiet_s: float = QUIET_S) -> None:
        """Exports steps that have closed, and that nothing was recorded of for so long.

        An exporter may take any time for it.
        """
        otel: Any = sys.modules.get(MODULE)
        if otel is None:
            return
        recorded: dict[tuple[str, int], list[Span]] = {}
        given: dict[tuple[str, int], set[tuple[str, int]]] = {}
        for span in self._spans.all():
            if span.kind not in _OF_STEP:
                continue
            key = span.subject, span.step
            if span.kind in _CONTRIBUTIONS and span.peer:
                contribution = span.peer, span.chunk
                if contribution in given.setdefault(key, set()):  # its parameter was made anew
                    recorded[key], given[key] = [], set()
                given[key].add(contribution)
            recorded.setdefault(key, []).append(span)
        workers = {
            (*key, span.peer) for key, spans in recorded.items() for span in spans if span.peer
        }
        self._done = {key: end_ns for key, end_ns in self._done.items() if key in workers}
        until_ns = now_ns() - round(quiet_s * 1e9)
        for subject, step, worker_id in sorted(workers):
            if self.is_interrupted:
                return
            spans = recorded[subject, step]
            is_done = spans[0].begin_ns <= self._done.get((subject, step, worker_id), -1)
            is_closed = any(each.kind in _CLOSING for each in spans)
            if is_closed and not is_done and max(map(_end_ns, spans)) <= until_ns:
                self._done[subject, step, worker_id] = max(map(_end_ns, spans))
                flushes = recorded.get((subject, NO_STEP), [])
                with _apart():
                    self._export(otel, worker_id, spans, flushes)

    def _export(
        self, otel: Any, worker_id: str, spans: Sequence[Span], flushes: Iterable[Span]
    ) -> None:
        own = [each for each in spans if each.peer in ("", worker_id)]
        begin_ns, end_ns = min(each.begin_ns for each in own), max(map(_end_ns, own))
        own += [each for each in flushes if begin_ns <= each.begin_ns <= end_ns]
        kind = "table" if self._is_table(own[0].subject) else "parameter"
        epoch_ns = _epoch_ns()
        span = otel.get_tracer("shardwell").start_span(
            "shardwell.step",
            kind=otel.SpanKind.SERVER,
            attributes={
                "shardwell.shard_index": self._shard_index,
                "shardwell.worker_id": worker_id,
                f"shardwell.{kind}": own[0].subject,
                "shardwell.step": own[0].step,
            },
            start_time=begin_ns + epoch_ns,
        )
        with _apart():
            if span.is_recording():
                _tell_wait(span, worker_id, spans)
                _add_children(otel, span, own)
        span.end(end_ns + epoch_ns)


def _tell_wait(span: Any, worker_id: str, spans: Iterable[Span]) -> None:
    given = [each for each in spans if each.kind in _CONTRIBUTIONS and each.peer]
    own = max((each for each in given if each.peer == worker_id), key=_end_ns, default=None)
    if own is None or own.kind == pb.SPAN_KIND_UPDATE:  # of asynchronous mode, all are
        return
    last = max(given, key=_end_ns)
    if last is not own:
        span.set_attribute("shardwell.waited_for", last.peer)
        span.set_attribute("shardwell.wait_s", max(last.begin_ns - own.end_ns, 0) / 1e9)


def _end_ns(span: Span) -> int:
    return span.end_ns


def _add_children(otel: Any, parent: Any, kept: Iterable[Span]) -> None:
    by_kind: dict[Any, list[Span]] = {}
    for span in kept:
        by_kind.setdefault(span.kind, []).append(span)
    tracer, context = otel.get_tracer("shardwell"), otel.set_span_in_context(parent)
    epoch_ns = _epoch_ns()
    for kind, spans in by_kind.items():
        child = tracer.start_span(
            f"shardwell.{pb.SpanKind.Name(kind).removeprefix('SPAN_KIND_').lower()}",
            context=context,
            start_time=min(span.begin_ns for span in spans) + epoch_ns,
            attributes={
                "shardwell.count": len(spans),
                "shardwell.busy_s": sum(span.end_ns - span.begin_ns for span in spans) / 1e9,
            },
        )
        child.end(max(span.end_ns for span in spans) + epoch_ns)


def _epoch_ns() -> int:
    return time.time_ns() - now_ns()  # noqa: TID251 (orders nothing: others' spans have such times)
