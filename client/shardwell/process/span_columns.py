"""Spans as a message has them: column by column, with names by their number. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from shardwell.errors import ArgumentError
from shardwell.v1 import trace_pb2 as pb

SPAN_COUNT_MAX = 16_384
"""Kept of one client or shard: about a hundred steps of 64 MB, or thousands of small ones."""
_WORD_LENGTH_MAX = 256
_COLUMNS = ("kinds", "subjects", "steps", "chunks", "peers", "begins_ns", "durations_ns")


class Span(NamedTuple):
    """A piece of work that a process did."""

    kind: int
    """A SpanKind; a later version has more of them."""
    subject: str
    step: int
    """-1: of none."""
    chunk: int
    """-1: of all."""
    peer: str
    begin_ns: int
    end_ns: int


def to_message(spans: Iterable[tuple[int, str, int, int, str, int, int]]) -> pb.ProcessSpans:
    """A message with nothing but these, each as a Span is."""
    numbers = {"": 0}
    message = pb.ProcessSpans()
    rows = list(spans)
    if rows:
        kinds, subjects, steps, chunks, peers, begins_ns, ends_ns = zip(*rows, strict=True)
        message.kinds.extend(kinds)
        message.subjects.extend([numbers.setdefault(word, len(numbers)) for word in subjects])
        message.steps.extend(steps)
        message.chunks.extend(chunks)
        message.peers.extend([numbers.setdefault(word, len(numbers)) for word in peers])
        message.begins_ns.extend(begins_ns)
        message.durations_ns.extend(
            [end_ns - begin_ns for begin_ns, end_ns in zip(begins_ns, ends_ns, strict=True)]
        )
    message.words.extend(numbers)
    return message


def check(message: pb.ProcessSpans) -> None:
    """Raises ArgumentError for spans that `spans_of` could not read, or that would mislead."""
    counts = {name: len(getattr(message, name)) for name in _COLUMNS}
    if len(set(counts.values())) > 1 or counts["kinds"] > SPAN_COUNT_MAX:
        raise ArgumentError(
            f"columns of spans must be of one length, up to {SPAN_COUNT_MAX}; got {counts}"
        )
    word_count = len(message.words)
    for name in ("subjects", "peers"):
        if max(getattr(message, name), default=-1) >= word_count:
            raise ArgumentError(
                f"{name} of spans are numbers of words, below {word_count}; got a larger one"
            )
    for word in message.words:
        if len(word) > _WORD_LENGTH_MAX or not word.isprintable():
            raise ArgumentError(
                f"words of spans have up to {_WORD_LENGTH_MAX} printable characters; "
                f"got {word!r:.80}"
            )


def spans_of(message: pb.ProcessSpans, offset_ns: int = 0) -> list[Span]:
    """The spans of a checked message, in its order; `offset_ns` is added to all times."""
    words = list(message.words)
    columns = [getattr(message, name) for name in _COLUMNS]
    return [
        Span(
            kind,
            words[subject],
            step,
            chunk,
            words[peer],
            begin_ns + offset_ns,
            begin_ns + offset_ns + duration_ns,
        )
        for kind, subject, step, chunk, peer, begin_ns, duration_ns in zip(*columns, strict=True)
    ]


def keep_subjects(message: pb.ProcessSpans, is_kept: Callable[[str], bool]) -> None:
    """Takes spans of other subjects out of a message that was checked, and their words too."""
    kept = {word for word in message.words if is_kept(word)}
    spans = [span for span in spans_of(message) if span.subject in kept]
    if len(spans) == len(message.kinds):
        return
    rest = to_message(spans)
    for name in (*_COLUMNS, "words"):
        message.ClearField(name)
    message.MergeFrom(rest)
