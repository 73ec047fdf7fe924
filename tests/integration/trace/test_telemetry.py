"""Goal: where a process uses OpenTelemetry, each call has a span, and shards' are its children;
where it does not, or does not sample, there is none, and nothing else changes.

Method: OpenTelemetry's SDK with an exporter in memory, real shards and workers; what is no
traceparent by hand; processes that do not import it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler

import shardwell
from harness.data.table_batches import open_table
from harness.polling import PATIENCE_S
from harness.programs.commands import Program
from harness.threads import together
from shardwell.process import telemetry
from shardwell.process.spans import Spans, now_ns
from shardwell.v1 import trace_pb2 as pb
from shardwell.wire.rows import rows_per_message_max
from shardwell_server import LocalCluster

SGD = shardwell.SGD(learning_rate=1.0)


class Recorder:
    """Records exported spans."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """All that ended, or those of one name, by their begin."""
        found = [
            span
            for span in self._exporter.get_finished_spans()
            if not name or span.name == f"shardwell.{name}"
        ]
        return sorted(found, key=lambda span: span.start_time or 0)

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """By their begin."""
        return [
            span
            for span in self.spans()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]


@pytest.fixture
def recorder(request, monkeypatch) -> Iterator[Recorder]:
    """OpenTelemetry, set up for this test: its own way, which is once a process, has no undoing."""
    sampler: Sampler | None = getattr(request, "param", None)
    made = Recorder(sampler=sampler)
    monkeypatch.setattr(
        trace, "get_tracer", lambda name, *rest, **more: made.provider.get_tracer(name)
    )
    yield made
    made.provider.shutdown()


def trained(running: LocalCluster, connect: Any) -> None:
    """Two workers, one step."""

    def work(rank: int) -> None:
        net = connect(running, f"w{rank}").parameter("net", size=600, optimizer=SGD, worker_count=2)
        net.init(np.zeros(600, np.float32))
        net.exchange(np.ones(600, np.float32))

    together([lambda: work(0), lambda: work(1)])


@pytest.mark.same_host
@pytest.mark.parametrize("same_host", [True, False])
def test_a_step_is_the_child_of_its_call(cluster, connect, recorder, same_host) -> None:
    running = cluster(2, same_host="auto" if same_host else "off", chunk_size_bytes=256)
    trained(running, connect)
    calls = recorder.spans("exchange")
    assert {call.attributes["shardwell.worker_id"] for call in calls} == {"w0", "w1"}
    waited: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    for call in calls:
        assert call.parent is None
        assert call.kind is trace.SpanKind.CLIENT
        assert call.attributes["shardwell.parameter"] == "net"
        assert call.attributes["shardwell.step"] == 0
        children = recorder.children(call)
        assert {"encode", "wait", "decode"} <= {
            child.name.removeprefix("shardwell.") for child in children
        }
        steps = [child for child in children if child.name == "shardwell.step"]
        assert sorted(step.attributes["shardwell.shard_index"] for step in steps) == [0, 1]
        for step in steps:
            assert step.kind is trace.SpanKind.SERVER
            assert step.context.trace_id == call.context.trace_id
            assert step.attributes["shardwell.worker_id"] == call.attributes["shardwell.worker_id"]
            names = [child.name for child in recorder.children(step)]
            assert "shardwell.add" in names or "shardwell.update" in names
            for_whom = step.attributes.get("shardwell.waited_for", "")
            who = step.attributes["shardwell.worker_id"]
            waited[step.attributes["shardwell.shard_index"]].append((who, for_whom))
        for child in children:
            assert call.start_time <= child.start_time <= child.end_time
    for pairs in waited.values():  # on each shard one of the two was last, and waited for no worker
        assert sorted(pairs) in ([("w0", ""), ("w1", "w0")], [("w0", "w1"), ("w1", "")])


def test_in_the_caller_s_context(cluster, connect, recorder) -> None:
    net = connect(cluster(1), "w0").parameter("net", size=6, optimizer=SGD)
    net.init(np.zeros(6, np.float32))
    with recorder.provider.get_tracer("user").start_as_current_span("train") as train:
        net.exchange(np.ones(6, np.float32))
        step = net.put_gradient(np.ones(6, np.float32))
        net.get_weights(min_version=step + 1)
    names = [span.name for span in recorder.spans() if span.parent == train.get_span_context()]
    assert names == ["shardwell.exchange", "shardwell.put_gradient", "shardwell.get_weights"]
    (put,) = recorder.spans("put_gradient")
    assert "shardwell.step" in {child.name for child in recorder.children(put)}


def test_calls_of_tables_have_spans(cluster, connect, recorder) -> None:
    users = connect(cluster(2), "w0").table("users", row_count=90, dim=2, optimizer=SGD)
    users.exchange_rows([1, 2, 3], np.ones((3, 2), np.float32))
    users.put_row_gradients([4], np.ones((1, 2), np.float32))
    users.get_rows([4])
    (exchange,) = recorder.spans("exchange_rows")
    assert exchange.attributes["shardwell.table"] == "users"
    steps = [each for each in recorder.children(exchange) if each.name == "shardwell.step"]
    assert {each.attributes["shardwell.table"] for each in steps} == {"users"}
    assert len(recorder.spans("put_row_gradients")) == len(recorder.spans("get_rows")) == 1


def test_a_call_that_fails_says_so(cluster, connect, recorder) -> None:
    net = connect(cluster(1), "w0").parameter("net", size=6, optimizer=SGD)
    net.init(np.zeros(6, np.float32))
    with pytest.raises(shardwell.NonFiniteError):
        net.exchange(np.full(6, np.nan, np.float32))
    (call,) = recorder.spans("exchange")
    assert call.status.status_code is trace.StatusCode.ERROR
    assert "nan" in call.status.description
    assert [event.name for event in call.events] == ["exception"]
    assert net.exchange(np.ones(6, np.float32))[0] == -1


class FailingProcessor(SpanProcessor):
    """A processor without handling of errors."""

    def __init__(self, when: str) -> None:
        self._when = when

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self._when == "start":
            raise RuntimeError("no span is wanted")

    def on_end(self, span: ReadableSpan) -> None:
        if self._when == "end" or (self._when == "shard" and span.name == "shardwell.step"):
            raise RuntimeError("the exporter failed")


@pytest.mark.parametrize("when", ["start", "end", "shard"])
def test_no_call_fails_because_a_span_does(cluster, connect, recorder, when) -> None:
    recorder.provider.add_span_processor(FailingProcessor(when))
    running = cluster(1)
    net = connect(running, "w0").parameter("net", size=6, optimizer=SGD)
    net.init(np.zeros(6, np.float32))
    assert net.exchange(np.ones(6, np.float32))[0] == -1
    net.put_gradient(np.ones(6, np.float32))
    assert net.get_weights(min_version=2)[0] == -2
    assert not running.servers[0]._endpoint.calls.refusal_counts


def test_no_exporter_holds_up_the_loop(cluster, connect, recorder) -> None:
    """On which all calls of a shard depend, and which short ones are served on."""
    threads: set[str] = set()

    class Noting(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            if span.name == "shardwell.step":
                threads.add(threading.current_thread().name)

    recorder.provider.add_span_processor(Noting())
    client = connect(cluster(1), "w0")
    net = client.parameter("net", size=6, optimizer=SGD)
    net.init(np.zeros(6, np.float32))
    for _ in range(5):
        net.exchange(np.ones(6, np.float32))
    assert threads == {"shardwell-work"}
    threads.clear()
    table = open_table(client, mode="async", row_count=10_000, dim=64, codec="fp16")
    for _ in range(5):
        table.put_row_gradients([1], np.ones((1, 64), np.float32))
        # A message and a few rows: the step ends with a part that is short, and begins before it.
        count = rows_per_message_max(table.spec) + 4
        table.put_row_gradients(range(count), np.ones((count, 64), np.float32))
    assert threads == {"shardwell-work"}


@pytest.mark.parametrize("module", [None, types.ModuleType("opentelemetry.trace")])
def test_while_it_is_imported_there_is_no_span(cluster, connect, monkeypatch, module) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
    net = connect(cluster(1), "w0").parameter("net", size=6, optimizer=SGD)
    net.init(np.zeros(6, np.float32))
    assert net.exchange(np.ones(6, np.float32))[0] == -1
    telemetry.flush()


def test_no_exporter_holds_up_the_end_of_a_process(monkeypatch) -> None:
    is_over, flushed = threading.Event(), threading.Event()

    class Provider:
        def force_flush(self, timeout_millis: int) -> None:
            is_over.wait(PATIENCE_S / 10)
            flushed.set()

    monkeypatch.setattr(trace, "get_tracer_provider", Provider)
    monkeypatch.setattr(telemetry, "_FLUSH_MS", 10)
    telemetry.flush()
    assert not flushed.is_set()
    is_over.set()
    assert flushed.wait(PATIENCE_S)


@pytest.mark.parametrize("other", [pb.SPAN_KIND_UPDATE, pb.SPAN_KIND_ADD])
def test_the_worker_that_closed_a_step_waited_for_no_other(recorder, other) -> None:
    """In asynchronous mode each does, and others' steps have the same numbers."""
    spans = Spans()
    step = telemetry.StepSpans(spans, 0, "w0", {"parameter": "net"})
    step.begin("00-" + "1" * 32 + "-" + "2" * 16 + "-01", 0)
    spans.add(pb.SPAN_KIND_UPDATE, "net", 0, 0, "w0", now_ns())
    spans.add(other, "net", 0, 0, "w1", now_ns())
    step.end()
    (found,) = recorder.spans("step")
    assert "shardwell.waited_for" not in found.attributes


@pytest.mark.parametrize("recorder", [ALWAYS_OFF], indirect=True)
def test_what_is_not_sampled_has_no_children(cluster, connect, recorder, monkeypatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(
        telemetry.StepSpans, "begin", lambda self, parent, step: begun.append(parent)
    )
    trained(cluster(2), connect)
    assert not recorder.spans()
    assert not begun  # nothing was sent


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00-0",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "00-" + "A" * 32 + "-" + "1" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01\n",
        "x" * 5000,
    ],
)
def test_an_invalid_traceparent_has_no_parent(recorder, given) -> None:
    spans = Spans()
    step = telemetry.StepSpans(spans, 0, "w0", {"parameter": "net"})
    step.begin(given, 0)
    spans.add(pb.SPAN_KIND_ADD, "net", 0, 0, "w0", now_ns())
    step.end()
    assert not recorder.spans()


def test_a_step_ends_once(recorder) -> None:
    step = telemetry.StepSpans(Spans(), 0, "w0", {"parameter": "net"})
    step.begin("00-" + "1" * 32 + "-" + "2" * 16 + "-01", 5)
    step.end()
    step.end()
    (found,) = recorder.spans("step")
    assert found.attributes["shardwell.step"] == 5
    assert found.parent.span_id == int("2" * 16, 16)


def test_a_shard_that_ends_has_exported_all_spans(tmp_path) -> None:
    """Its process ends without Python's own end, in which others are flushed."""
    (tmp_path / "sitecustomize.py").write_text("""
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
provider = TracerProvider()
provider.add_span_processor(
    BatchSpanProcessor(
        ConsoleSpanExporter(formatter=lambda span: span.name + "\\n"),
        schedule_delay_millis=60_000,
    )
)
trace.set_tracer_provider(provider)
""")
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    script = f"""
import contextlib, sys, numpy as np, shardwell
from shardwell.rpc import call_scope
class Span(contextlib.nullcontext):
    trace_parent = {parent!r}
call_scope.call_span = lambda *given: Span()
with shardwell.connect(sys.argv[1], worker_id="w0") as client:
    net = client.parameter("net", size=6, optimizer=shardwell.SGD(learning_rate=1.0))
    net.init(np.zeros(6, np.float32))
    net.exchange(np.ones(6, np.float32))
"""
    flags = ("-m", "shardwell_server", "serve", "--shard-index=0", "--shard-count=1")
    with Program(
        *flags, "--listen=127.0.0.1:0", environment={"PYTHONPATH": str(tmp_path)}
    ) as shard:
        address = shard.read_line().removeprefix("serving on ")
        with Program("-c", script, address) as worker:
            assert worker.end() == 0, worker.log
        shard.send(signal.SIGTERM)
        assert shard.end() == 0
        assert "shardwell.step" in shard.lines


def test_who_does_not_use_it_imports_nothing_of_it() -> None:
    script = """
import sys, numpy as np, shardwell
from shardwell_server import LocalCluster
with LocalCluster(1) as running, shardwell.connect(running.target, worker_id="w0") as client:
    net = client.parameter("net", size=6, optimizer=shardwell.SGD(learning_rate=1.0))
    net.init(np.zeros(6, np.float32))
    net.exchange(np.ones(6, np.float32))
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
