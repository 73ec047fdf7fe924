"""Goal: where a process uses OpenTelemetry, each call has a span, and each step one of each worker
and shard; where it does not, or does not sample, there is none, and nothing else changes.

Method: OpenTelemetry's SDK with an exporter in memory, real shards and workers; spans that are
recorded by hand; processes that do not import it.
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
from harness.inside import endpoint_of
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import Program
from harness.threads import together
from shardwell.process import telemetry
from shardwell.process.spans import Spans, now_ns
from shardwell.v1 import trace_pb2 as pb
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


def steps_of(recorder: Recorder, count: int) -> list[ReadableSpan]:
    """Spans of steps, once so many were exported."""
    eventually("steps are exported", lambda: len(recorder.spans("step")) >= count)
    return recorder.spans("step")


def trained(running: LocalCluster, connect: Any) -> None:
    """Two workers, one step."""

    def work(rank: int) -> None:
        net = connect(running, f"w{rank}").parameter("net", size=600, optimizer=SGD, worker_count=2)
        net.init(np.zeros(600, np.float32))
        net.exchange(np.ones(600, np.float32))

    together([lambda: work(0), lambda: work(1)])


@pytest.mark.same_host
@pytest.mark.parametrize("same_host", [True, False])
def test_a_step_has_a_span_of_each_worker_and_shard(cluster, connect, recorder, same_host) -> None:
    running = cluster(2, same_host="auto" if same_host else "off", chunk_size_bytes=256)
    trained(running, connect)
    calls = recorder.spans("exchange")
    assert {call.attributes["shardwell.worker_id"] for call in calls} == {"w0", "w1"}
    for call in calls:
        assert call.parent is None
        assert call.kind is trace.SpanKind.CLIENT
        assert call.attributes["shardwell.parameter"] == "net"
        assert call.attributes["shardwell.step"] == 0
        children = recorder.children(call)
        assert {"encode", "wait", "decode"} <= {
            child.name.removeprefix("shardwell.") for child in children
        }
        for child in children:
            assert call.start_time <= child.start_time <= child.end_time <= call.end_time
    waited: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    for step in steps_of(recorder, 4):
        assert step.kind is trace.SpanKind.SERVER
        assert step.parent is None
        assert step.attributes["shardwell.parameter"] == "net"
        assert step.attributes["shardwell.step"] == 0
        names = [child.name for child in recorder.children(step)]
        assert "shardwell.add" in names or "shardwell.update" in names
        assert "shardwell.encode_weights" in names
        for_whom = step.attributes.get("shardwell.waited_for", "")
        who = step.attributes["shardwell.worker_id"]
        waited[step.attributes["shardwell.shard_index"]].append((who, for_whom))
        for call in calls:
            assert call.start_time <= step.end_time
            assert step.start_time <= call.end_time
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
    found = [step.attributes["shardwell.step"] for step in steps_of(recorder, 2)]
    assert found == [0, 1]


def test_calls_of_tables_have_spans(cluster, connect, recorder) -> None:
    users = connect(cluster(2), "w0").table("users", row_count=90, dim=2, optimizer=SGD)
    users.exchange_rows([1, 2, 3], np.ones((3, 2), np.float32))
    users.put_row_gradients([4], np.ones((1, 2), np.float32))
    users.get_rows([4])
    (exchange,) = recorder.spans("exchange_rows")
    assert exchange.attributes["shardwell.table"] == "users"
    assert len(recorder.spans("put_row_gradients")) == len(recorder.spans("get_rows")) == 1
    steps = steps_of(recorder, 3)
    assert {each.attributes["shardwell.table"] for each in steps} == {"users"}


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
    assert not endpoint_of(running.servers[0]).calls.refusal_counts
    if when != "start":
        steps_of(recorder, 2)


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
    eventually("steps are exported", lambda: threads)
    assert threads == {"shardwell-work"}
    threads.clear()
    table = open_table(client, mode="async", row_count=10_000, dim=64, codec="fp16")
    table.put_row_gradients([1], np.ones((1, 64), np.float32))
    eventually("steps are exported", lambda: threads)
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


def exporter(spans: Spans) -> telemetry.StepExporter:
    """Of a shard that has no table."""
    return telemetry.StepExporter(spans, 0, lambda name: False)


def noted(spans: Spans, kind: int, worker_id: str, step: int = 0) -> None:
    """Records work on a chunk of "net"."""
    spans.add(kind, "net", step, 0, worker_id, now_ns())


@pytest.mark.parametrize("other", [pb.SPAN_KIND_UPDATE, pb.SPAN_KIND_ADD])
def test_the_worker_that_closed_a_step_waited_for_no_other(recorder, other) -> None:
    """In asynchronous mode each does, and others' steps have the same numbers."""
    spans = Spans()
    noted(spans, pb.SPAN_KIND_UPDATE, "w0")
    noted(spans, other, "w1")
    exporter(spans).export(0.0)
    found = {each.attributes["shardwell.worker_id"]: each for each in recorder.spans("step")}
    assert sorted(found) == ["w0", "w1"]
    assert "shardwell.waited_for" not in found["w0"].attributes


@pytest.mark.parametrize("recorder", [ALWAYS_OFF], indirect=True)
def test_what_is_not_sampled_has_no_span(cluster, connect, recorder) -> None:
    running = cluster(2)
    trained(running, connect)
    running.close()
    assert not recorder.spans()


def test_a_step_is_exported_once_when_it_has_closed_and_is_quiet(recorder) -> None:
    spans = Spans()
    exports = exporter(spans)
    noted(spans, pb.SPAN_KIND_ADD, "w0", 5)
    exports.export(0.0)
    assert not recorder.spans()
    noted(spans, pb.SPAN_KIND_UPDATE, "w1", 5)
    exports.export(PATIENCE_S)
    assert not recorder.spans()
    exports.export(0.0)
    noted(spans, pb.SPAN_KIND_ENCODE_WEIGHTS, "", 5)
    exports.export(0.0)
    found = recorder.spans("step")
    assert [each.attributes["shardwell.worker_id"] for each in found] == ["w0", "w1"]
    assert {each.attributes["shardwell.step"] for each in found} == {5}
    assert found[0].attributes["shardwell.waited_for"] == "w1"


def test_a_step_of_a_parameter_that_was_made_anew_is_exported_too(recorder) -> None:
    """Its number is that of a step before, whose spans are still recorded."""
    spans = Spans()
    exports = exporter(spans)
    for _ in range(2):
        noted(spans, pb.SPAN_KIND_ADD, "w0")
        noted(spans, pb.SPAN_KIND_UPDATE, "w1")
        exports.export(0.0)
        exports.export(0.0)
    found = recorder.spans("step")
    workers = [each.attributes["shardwell.worker_id"] for each in found]
    assert workers == ["w0", "w1", "w0", "w1"]
    for step in found:
        assert {child.attributes["shardwell.count"] for child in recorder.children(step)} == {1}


def test_who_was_late_has_a_span_too(recorder) -> None:
    spans = Spans()
    noted(spans, pb.SPAN_KIND_UPDATE, "w0")
    exports = exporter(spans)
    exports.export(0.0)
    noted(spans, pb.SPAN_KIND_LATE, "w1")
    exports.export(0.0)
    late = recorder.spans("step")[1]
    assert late.attributes["shardwell.worker_id"] == "w1"
    assert [child.name for child in recorder.children(late)] == ["shardwell.late"]


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
    script = """
import sys, numpy as np, shardwell
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
