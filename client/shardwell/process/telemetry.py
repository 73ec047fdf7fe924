"""OpenTelemetry's spans of calls and steps, where this process uses it: docs/adr/0021-trace.md.

A program that wants them has imported opentelemetry.trace and set up its SDK; this module imports
nothing of it. The spans of calls are made from those that are kept anyway (spans.py).
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from shardwell.process.span_columns import Span
from shardwell.process.spans import Spans, now_ns
from shardwell.v1 import trace_pb2 as pb

_LOG = logging.getLogger("shardwell")
_MODULE = "opentelemetry.trace"
_FLUSH_MS = 2000
"""The bound of an exporter, whose receiver may be gone."""
_TRACE_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_OF_CALL = (pb.SPAN_KIND_ENCODE, pb.SPAN_KIND_SEND, pb.SPAN_KIND_WAIT, pb.SPAN_KIND_DECODE)
_OF_STEP = (
    pb.SPAN_KIND_ADD,
    pb.SPAN_KIND_UPDATE,
    pb.SPAN_KIND_ENCODE_WEIGHTS,
    pb.SPAN_KIND_FLUSH,
    pb.SPAN_KIND_LATE,
)
_CONTRIBUTIONS = (pb.SPAN_KIND_ADD, pb.SPAN_KIND_UPDATE)


def call_span(verb: str, spans: Spans, worker_id: str, where: dict[str, str]) -> CallSpan | None:
    """A span for a block, with what is noted in it, in the caller's context; None: none is wanted.

    An empty `verb` has no span; `where` is {"parameter": name} or {"table": name}.
    """
    otel = sys.modules.get(_MODULE) if verb else None
    return None if otel is None else CallSpan(otel, verb, spans, worker_id, where)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Guards a block of OpenTelemetry's: no call fails because that does, or is half imported."""
    try:
        yield
    except Exception as error:
        _LOG.debug("OpenTelemetry failed", exc_info=error)


class CallSpan:
    """The OpenTelemetry span of one call, made by `call_span`; a context manager."""

    def __init__(
        self, otel: Any, verb: str, spans: Spans, worker_id: str, where: dict[str, str]
    ) -> None:
        self._otel = otel
        self._verb = verb
        self._spans = spans
        (self._kind, self._name), *_ = where.items()
        self._attributes = {
            "shardwell.worker_id": worker_id,
            f"shardwell.{self._kind}": self._name,
        }
        self._span: Any = None
        self._begin_ns = 0
        self.trace_parent = ""
        """The span's id for the shards, whose spans become its children; empty: no span."""

    def __enter__(self) -> CallSpan:
        with _apart():
            self._begin()
        return self

    def _begin(self) -> None:
        tracer = self._otel.get_tracer("shardwell")
        self._span = tracer.start_span(
            f"shardwell.{self._verb}",
            kind=self._otel.SpanKind.CLIENT,
            attributes=self._attributes,
        )
        if self._span.is_recording():
            self._begin_ns = now_ns()
            context = self._span.get_span_context()
            self.trace_parent = (
                f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._span is None:
            return
        with _apart():
            self._tell(error)
        with _apart():
            self._span.end()

    def _tell(self, error: BaseException | None) -> None:
        if not self._span.is_recording():
            return
        kept = self._spans.since(self._begin_ns, self._name)
        steps = {span.step for span in kept if span.step >= 0}
        if steps:
            self._span.set_attribute("shardwell.step", max(steps))
        _add_children(self._otel, self._span, [s for s in kept if s.kind in _OF_CALL])
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(self._otel.StatusCode.ERROR, str(error))


def flush() -> None:
    """Has what has ended exported, for a process that ends at once. Blocks for seconds at most."""
    otel: Any = sys.modules.get(_MODULE)
    if otel is None:
        return

    def export() -> None:
        with _apart():  # AttributeError where there is no SDK
            otel.get_tracer_provider().force_flush(_FLUSH_MS)

    # The SDK's batches take as long as their exporter does, whatever they are asked for.
    thread = threading.Thread(target=export, name="shardwell-telemetry", daemon=True)
    with contextlib.suppress(RuntimeError):  # the system has no further thread
        thread.start()
        thread.join(_FLUSH_MS / 1000)


class StepSpans:
    """Spans of the steps of one worker's stream on a shard. For one thread at a time."""

    def __init__(
        self, spans: Spans, shard_index: int, worker_id: str, where: dict[str, str]
    ) -> None:
        self._spans = spans
        self._worker_id = worker_id
        (self._kind, self._name), *_ = where.items()
        self._attributes = {
            "shardwell.shard_index": shard_index,
            "shardwell.worker_id": worker_id,
            f"shardwell.{self._kind}": self._name,
        }
        self._trace_parent = ""
        self._step = 0
        self._begin_ns = 0

    @property
    def has_begun(self) -> bool:
        """True if `end` may export a span, which may take any time."""
        return bool(self._trace_parent)

    def begin(self, trace_parent: str, step: int) -> None:
        """A step has come whose worker has a span; it begins now."""
        self._trace_parent, self._step, self._begin_ns = trace_parent, step, now_ns()

    def end(self) -> None:
        """All of the step is answered. Does nothing if it has no span."""
        given, self._trace_parent = self._trace_parent, ""
        found = _TRACE_PARENT.fullmatch(given)
        otel: Any = sys.modules.get(_MODULE)
        if found is not None and otel is not None:
            with _apart():
                self._make(otel, found)

    def _make(self, otel: Any, found: re.Match[str]) -> None:
        trace_id, span_id, flags = (int(part, 16) for part in found.groups())
        parent = otel.SpanContext(
            trace_id, span_id, is_remote=True, trace_flags=otel.TraceFlags(flags)
        )
        span = otel.get_tracer("shardwell").start_span(
            "shardwell.step",
            context=otel.set_span_in_context(otel.NonRecordingSpan(parent)),
            kind=otel.SpanKind.SERVER,
            attributes={**self._attributes, "shardwell.step": self._step},
            start_time=self._begin_ns + _epoch_ns(),
        )
        if span.is_recording():
            kept = [s for s in self._spans.since(self._begin_ns, self._name) if s.kind in _OF_STEP]
            self._tell_wait(span, kept)
            own = [s for s in kept if s.peer in ("", self._worker_id)]
            _add_children(otel, span, own)
        span.end()

    def _tell_wait(self, span: Any, kept: Iterable[Span]) -> None:
        step = [s for s in kept if s.kind in _CONTRIBUTIONS and s.step == self._step and s.peer]
        own = max((s for s in step if s.peer == self._worker_id), key=_end_ns, default=None)
        if own is None or own.kind == pb.SPAN_KIND_UPDATE:  # of asynchronous mode, all are
            return
        last = max(step, key=_end_ns)
        if last is not own:
            span.set_attribute("shardwell.waited_for", last.peer)
            span.set_attribute("shardwell.wait_s", max(last.begin_ns - own.end_ns, 0) / 1e9)


def _end_ns(span: Span) -> int:
    return span.end_ns


def _add_children(otel: Any, parent: Any, kept: Iterable[Span]) -> None:
    """A span for each kind: from the first of it to the last, which may overlap others."""
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
