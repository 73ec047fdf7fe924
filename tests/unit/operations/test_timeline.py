"""Goal: a timeline says when what was done, on one clock, and who waited for whom.

Method: spans written by hand, clocks that are apart, and drawn spans for how they are laid out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardwell.process.span_columns import Span
from shardwell.v1 import trace_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server.operations.timeline import (
    Process,
    chrome_trace,
    closed_steps,
    lasts,
    spent,
    waits,
)

MS = 1_000_000


def process_of(*spans: Span, shard: int | None = None, **fields: Any) -> Process:
    """A process that gave these spans, in its own clock."""
    words = ["", *sorted({word for span in spans for word in (span.subject, span.peer)} - {""})]
    message = pb.ProcessSpans(
        worker_id="" if shard is not None else fields.pop("worker_id", "w0"),
        host="h",
        pid=1,
        now_ns=fields.pop("now_ns", 1000 * MS),
        words=words,
        kinds=[span.kind for span in spans],
        subjects=[words.index(span.subject) for span in spans],
        steps=[span.step for span in spans],
        chunks=[span.chunk for span in spans],
        peers=[words.index(span.peer) for span in spans],
        begins_ns=[span.begin_ns for span in spans],
        durations_ns=[span.end_ns - span.begin_ns for span in spans],
    )
    defaults: dict[str, Any] = {"offset_ns": 0, "error_ns": 0}
    return Process(message, shard, **{**defaults, **fields})


def add(worker_id: str, step: int, begin_ms: float, end_ms: float, **other: Any) -> Span:
    kind = pb.SPAN_KIND_UPDATE if other.pop("closes", False) else pb.SPAN_KIND_ADD
    chunk = other.pop("chunk", 0)
    return Span(kind, "net", step, chunk, worker_id, int(begin_ms * MS), int(end_ms * MS))


def call(step: int, begin_ms: float, end_ms: float, kind: int = pb.SPAN_KIND_EXCHANGE) -> Span:
    return Span(kind, "net", step, -1, "", int(begin_ms * MS), int(end_ms * MS))


# Who waits for whom.


def test_the_last_worker_is_waited_for() -> None:
    shard = process_of(
        add("w0", 3, 0, 1), add("w2", 3, 1, 2), add("w1", 3, 10, 12, closes=True), shard=0
    )
    found = {(wait.worker_id, wait.whom, wait.begin_ns, wait.end_ns) for wait in waits(shard)}
    assert found == {("w0", ("w1",), 1 * MS, 10 * MS), ("w2", ("w1",), 2 * MS, 10 * MS)}
    assert all(wait.is_over and wait.step == 3 for wait in waits(shard))
    (last,) = lasts([shard])
    assert (last.worker_id, last.step_count, last.of_count, last.median_s) == ("w1", 1, 1, 9e-3)


def test_a_worker_waits_from_its_last_chunk_to_the_last_of_all() -> None:
    shard = process_of(
        add("w0", 0, 0, 1, chunk=0),
        add("w1", 0, 1, 2, chunk=0, closes=True),
        add("w0", 0, 2, 3, chunk=1),
        add("w1", 0, 8, 9, chunk=1, closes=True),
        shard=0,
    )
    (wait,) = waits(shard)
    assert (wait.worker_id, wait.begin_ns, wait.end_ns) == ("w0", 3 * MS, 8 * MS)


def test_a_step_that_is_open_waits_for_whom_the_shard_names() -> None:
    missing = types_pb2.StepWait(
        open_for_s=1.0, workers=[types_pb2.MissingWorker(worker_id="w1", connected=True)]
    )
    step = pb.OpenStep(kind="parameter", name="net", step=4, begin_ns=1, wait=missing)
    shard = process_of(add("w0", 4, 5, 6), shard=0, now_ns=100 * MS, open_steps=[step])
    (wait,) = waits(shard)
    assert (wait.whom, wait.begin_ns, wait.end_ns, wait.is_over) == (
        ("w1",),
        6 * MS,
        100 * MS,
        False,
    )
    assert not lasts([shard])
    names = {event["name"] for event in chrome_trace([shard])["traceEvents"]}
    assert "waits for w1" in names


def test_in_asynchronous_mode_no_worker_waits() -> None:
    """Steps have numbers of their workers' own there, and each closes by itself."""
    shard = process_of(
        add("w0", 3, 0, 1, chunk=0, closes=True),
        add("w0", 3, 1, 2, chunk=1, closes=True),
        add("w1", 3, 500, 501, chunk=0, closes=True),
        add("w1", 3, 501, 502, chunk=1, closes=True),
        shard=0,
    )
    assert not waits(shard)
    assert not lasts([shard])


def test_a_single_worker_waits_for_no_other() -> None:
    assert not waits(process_of(add("w0", 0, 0, 1, closes=True), shard=0))
    assert not waits(process_of(add("w0", 0, 0, 1), shard=0))  # the end is not kept


def test_who_is_last_most_often_comes_first() -> None:
    spans = []
    for step in range(5):
        late = "w1" if step < 4 else "w0"
        other = "w0" if step < 4 else "w1"
        spans += [add(other, step, 20 * step, 20 * step + 1)]
        spans += [add(late, step, 20 * step + 5, 20 * step + 6, closes=True)]
    found = lasts([process_of(*spans, shard=0), process_of(worker_id="w0")])
    assert [(last.worker_id, last.step_count, last.of_count) for last in found] == [
        ("w1", 4, 5),
        ("w0", 1, 5),
    ]


# What steps are spent on.


def test_a_step_is_spent_on_what_it_has() -> None:
    worker = process_of(
        call(0, 0, 10),
        Span(pb.SPAN_KIND_ENCODE, "net", 0, 0, "shard 0", 0, 2 * MS),
        Span(pb.SPAN_KIND_WAIT, "net", 0, 0, "shard 0", 2 * MS, 9 * MS),
        Span(pb.SPAN_KIND_DECODE, "net", 0, 0, "shard 0", 9 * MS, 10 * MS),
        call(1, 30, 40),
    )
    found = spent(worker)
    assert found is not None
    assert (found.step_count, found.call_s, found.between_s) == (2, 10e-3, 10e-3)
    assert (found.encode_s, found.wait_s, found.decode_s) == (1e-3, 3.5e-3, 0.5e-3)
    assert spent(process_of(call(-1, 0, 1))) is None


def test_between_calls_that_overlap_there_is_nothing() -> None:
    worker = process_of(call(0, 0, 10), call(0, 5, 20, pb.SPAN_KIND_GET), call(1, 20, 30))
    found = spent(worker)
    assert found is not None
    assert found.between_s == 0


# The timeline.


def shown(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_all_times_are_those_of_one_clock() -> None:
    shard = process_of(add("w0", 0, 1000, 1001), shard=0)
    worker = process_of(call(0, 5, 7), offset_ns=994 * MS, error_ns=250_000)
    trace = chrome_trace([shard, worker])
    assert [(event["name"], event["ts"], event["dur"]) for event in shown(trace)] == [
        ("add", 1000.0, 1000.0),
        ("exchange", 0.0, 2000.0),
    ]
    named = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert named == {1: "shard 0 (process 1 on h)", 2: "w0 (process 1 on h, clock ±250 µs)"}
    json.dumps(trace)


def test_what_ended_before_is_left_out() -> None:
    worker = process_of(call(0, 0, 10), call(1, 20, 30), since_ns=15 * MS)
    (event,) = shown(chrome_trace([worker]))
    assert event["args"]["step"] == 1


def test_what_a_later_version_knows_is_shown_too() -> None:
    (event,) = shown(chrome_trace([process_of(Span(99, "net", 0, 0, "", 0, MS))]))
    assert event["name"] == "kind 99"


def test_nothing_makes_an_empty_timeline() -> None:
    assert not shown(chrome_trace([]))
    assert not shown(chrome_trace([process_of(shard=0)]))


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from(["shard 0", "shard 1"])),
        max_size=40,
    )
)
def test_in_a_lane_each_lies_beside_or_inside_another(drawn: list[tuple[int, int, str]]) -> None:
    spans = [
        Span(pb.SPAN_KIND_ENCODE, "net", 0, 0, peer, begin, begin + duration)
        for begin, duration, peer in drawn
    ]
    events = shown(chrome_trace([process_of(*spans)]))
    assert len(events) == len(spans)
    lanes: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        lane = lanes[event["tid"]]
        lane.append((event["ts"], event["ts"] + event["dur"], event["args"]["with"]))
    for lane in lanes.values():
        assert len({peer for _, _, peer in lane}) == 1
        for number, (begin, end, _) in enumerate(lane):
            for other_begin, other_end, _ in lane[number + 1 :]:
                # Times are divided by 1000: what touches may differ in the last bit.
                is_beside = other_begin >= end - 1e-6 or begin >= other_end - 1e-6
                is_inside = (other_begin >= begin - 1e-6 and other_end <= end + 1e-6) or (
                    begin >= other_begin - 1e-6 and end <= other_end + 1e-6
                )
                assert is_beside or is_inside


def test_lanes_are_bounded() -> None:
    crossing = [Span(pb.SPAN_KIND_ENCODE, "net", 0, 0, "", n, n + 10_000) for n in range(5000)]
    events = shown(chrome_trace([process_of(*crossing)]))
    assert len(events) == 5000
    assert len({event["tid"] for event in events}) == 64


def test_closed_steps_say_who_was_last_and_for_how_long() -> None:
    """Of each worker its last chunk counts; what has not closed, or waits, is left out."""
    spans = [
        add("w0", 1, 10, 11),
        add("w1", 1, 11, 12, chunk=1),
        add("w0", 1, 12, 13, chunk=1),
        add("w1", 1, 43, 45, closes=True),
        add("w0", 2, 60, 61, closes=True),
        add("w0", 3, 70, 71),
        Span(pb.SPAN_KIND_FLUSH, "net", -1, -1, "", 80 * MS, 90 * MS),
    ]
    first, second = closed_steps(spans)
    assert (first.subject, first.step, first.last, first.worker_count) == ("net", 1, "w1", 2)
    assert (first.end_ns, first.took_s, first.waited_s) == (45 * MS, 0.035, 0.03)
    assert (second.step, second.last, second.waited_s, second.worker_count) == (2, "w0", 0.0, 1)
    assert closed_steps([]) == []
