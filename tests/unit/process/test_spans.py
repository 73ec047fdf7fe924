"""Goal: the last spans are kept, whatever their number, and fit a message.

Method: more than are kept, names as long as they may be, and what a message says of them.
"""

from __future__ import annotations

from shardwell.process.span_columns import SPAN_COUNT_MAX, check, keep_subjects, spans_of
from shardwell.process.spans import LONG_NS, Spans, clock_id, now_ns
from shardwell.v1 import trace_pb2 as pb
from shardwell.wire.messages import MESSAGE_SIZE_MAX_BYTES


def test_noted_spans_are_written_column_by_column() -> None:
    spans = Spans()
    begin_ns = now_ns()
    middle_ns = spans.add(pb.SPAN_KIND_ENCODE, "net", 7, 2, "shard 1", begin_ns)
    end_ns = spans.add(pb.SPAN_KIND_SEND, "net", 7, 2, "", middle_ns)
    made = spans.to_proto()
    assert begin_ns <= middle_ns <= end_ns <= made.now_ns
    assert list(made.words) == ["", "net", "shard 1"]
    assert [
        *zip(
            made.kinds,
            made.subjects,
            made.steps,
            made.chunks,
            made.peers,
            strict=True,
        )
    ] == [
        (pb.SPAN_KIND_ENCODE, 1, 7, 2, 2),
        (pb.SPAN_KIND_SEND, 1, 7, 2, 0),
    ]
    assert list(made.begins_ns) == [begin_ns, middle_ns]
    assert list(made.durations_ns) == [middle_ns - begin_ns, end_ns - middle_ns]


def test_no_spans_make_an_empty_message() -> None:
    made = Spans().to_proto()
    assert not made.kinds
    assert list(made.words) == [""]


def test_the_oldest_give_way() -> None:
    spans = Spans()
    for step in range(SPAN_COUNT_MAX + 5):
        spans.add(pb.SPAN_KIND_ADD, "net", step, 0, "w0", now_ns())
    made = spans.to_proto()
    assert list(made.steps) == list(range(5, SPAN_COUNT_MAX + 5))
    assert made.ByteSize() < MESSAGE_SIZE_MAX_BYTES


def test_what_no_message_holds_is_halved() -> None:
    spans = Spans()
    for number in range(SPAN_COUNT_MAX):
        spans.add(pb.SPAN_KIND_ADD, f"{number:0128}", number, 0, "w0", now_ns())
    made = spans.to_proto()
    assert made.ByteSize() < MESSAGE_SIZE_MAX_BYTES
    assert SPAN_COUNT_MAX // 4 <= len(made.steps) < SPAN_COUNT_MAX
    assert made.steps[-1] == SPAN_COUNT_MAX - 1
    assert made.words[made.subjects[-1]] == f"{SPAN_COUNT_MAX - 1:0128}"


def test_only_what_took_long_is_worth_a_look() -> None:
    spans = Spans()
    spans.add_long(pb.SPAN_KIND_FLUSH, "net", now_ns())
    assert not spans.to_proto().kinds
    spans.add_long(pb.SPAN_KIND_FLUSH, "net", now_ns() - LONG_NS)
    assert list(spans.to_proto().kinds) == [pb.SPAN_KIND_FLUSH]
    assert list(spans.to_proto().steps) == [-1]


def test_a_process_has_one_clock() -> None:
    assert clock_id() == clock_id() != ""


def test_a_written_message_is_read_again() -> None:
    spans = Spans()
    for step in range(3):
        spans.add(pb.SPAN_KIND_WAIT, f"net{step % 2}", step, -1, "shard 1", 100 + step)
    made = spans.to_proto()
    check(made)
    read = spans_of(made, offset_ns=1000)
    assert [span[:6] for span in read] == [
        (pb.SPAN_KIND_WAIT, f"net{step % 2}", step, -1, "shard 1", 1100 + step) for step in range(3)
    ]
    assert all(1100 < span.end_ns <= made.now_ns + 1000 for span in read)


def test_of_other_subjects_nothing_is_left() -> None:
    spans = Spans()
    spans.add(pb.SPAN_KIND_ADD, "mine", 0, 0, "w0", now_ns())
    spans.add(pb.SPAN_KIND_ADD, "theirs", 1, 0, "w1", now_ns())
    spans.add(pb.SPAN_KIND_ADD, "mine", 2, 0, "w2", now_ns())
    made = spans.to_proto()
    host, whole = made.host, spans_of(made)
    keep_subjects(made, lambda word: word != "theirs")
    check(made)
    assert spans_of(made) == [whole[0], whole[2]]
    assert set(made.words) == {"", "mine", "w0", "w2"}
    assert made.host == host
