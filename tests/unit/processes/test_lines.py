"""Cutting workers' output into lines, however it arrives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell_server.processes.output import LINE_SIZE_MAX_BYTES, LineCutter


def _lines_of(*parts: bytes, at_s: float = 0.0) -> list[bytes]:
    cutter = LineCutter()
    lines = [line for part in parts for line in cutter.feed(part, at_s)]
    return lines + cutter.end()


@given(
    st.lists(st.binary(max_size=20).filter(lambda line: not set(line) & set(b"\r\n"))),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
)
def test_lines_are_the_same_however_they_are_cut(lines, line_end, places, is_ended) -> None:
    data = line_end.join(lines) + (line_end if is_ended and lines else b"")
    bounds = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    parts = [data[start:stop] for start, stop in itertools.pairwise(bounds)]
    if not is_ended and lines and not lines[-1]:
        lines = lines[:-1]  # nothing came after the last line end
    assert _lines_of(*parts) == lines


@given(st.lists(st.binary(max_size=50)), st.lists(st.floats(0, 2), min_size=20, max_size=20))
def test_any_bytes_give_lines_without_line_ends(parts, steps_s) -> None:
    cutter, now_s = LineCutter(), 0.0
    lines = []
    for index, part in enumerate(parts):
        now_s += steps_s[index % len(steps_s)]
        lines += cutter.feed(part, now_s)
    lines += cutter.end()
    assert cutter.end() == []
    assert not any(b"\n" in line or b"\r" in line for line in lines)
    told = b"".join(lines)
    if not any(b"\r" in part for part in parts):
        assert told == b"".join(parts).replace(b"\n", b"")


def test_a_last_line_without_an_end_is_told_at_the_end() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"one\ntw", 0.0) == [b"one"]
    assert cutter.feed(b"o", 0.0) == []
    assert cutter.end() == [b"two"]


def test_lines_that_are_too_long_are_cut_and_lose_nothing() -> None:
    text = bytes(range(32, 127)) * (3 * LINE_SIZE_MAX_BYTES // 95)
    cutter = LineCutter()
    lines, held = [], 0
    for start in range(0, len(text), 60_000):
        lines += cutter.feed(text[start : start + 60_000], 0.0)
        held = max(held, start + 60_000 - sum(map(len, lines)))
    assert held <= LINE_SIZE_MAX_BYTES + 60_000
    lines += cutter.feed(b"\n", 0.0)
    assert b"".join(lines) == text
    assert all(len(line) <= LINE_SIZE_MAX_BYTES for line in lines)
    assert _lines_of(text + b"\n") == lines
    assert _lines_of(text + b"\r\n") == lines


def test_a_progress_bar_is_told_once_a_second_and_at_its_end() -> None:
    cutter = LineCutter()
    told = [line for tick in range(101) for line in cutter.feed(b"\r%3d%%" % tick, now_s=tick / 8)]
    assert told == [b"%3d%%" % tick for tick in range(0, 100, 8)]
    assert cutter.feed(b"\n", 12.6) == [b"100%"]
    assert cutter.feed(b"next\n", 12.7) == [b"next"]


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        # Bars that write the return after each state; the end of the line ends the last.
        ([b"1%\r", b"2%\r", b"3%\r\n"], [b"1%", b"3%"]),
        ([b"1%\r", b"2%\r"], [b"1%", b"2%"]),
        ([b"1%\r\n2%\r", b"\n"], [b"1%", b"2%"]),
        # Told already: its end is no empty line.
        ([b"1%\r\r", b"\r", b"x\r", b"\n"], [b"1%", b"x"]),
        ([b"1%\r \r", b"\n"], [b"1%", b" "]),
        ([b"\r\n", b"\n", b"\r", b"\n"], [b"", b"", b""]),
        ([b"\r"], []),
        ([], []),
    ],
)
def test_carriage_returns_end_lines_of_progress(parts, lines) -> None:
    assert _lines_of(*parts) == lines
