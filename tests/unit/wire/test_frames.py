"""Goal: frames come out as they went in, however they are cut; what is none is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.errors import CorruptChunkError
from shardwell.wire.frames import FrameKind, FrameReader, head
from shardwell.wire.messages import MESSAGE_SIZE_MAX_BYTES

FRAMES = st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=40)), max_size=8)


def framed(frames: list[tuple[FrameKind, bytes]]) -> bytes:
    return b"".join(head(kind, len(contents)) + contents for kind, contents in frames)


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_frames_that_are_cut_anywhere(frames, cuts) -> None:
    data, reader, found = framed(frames), FrameReader(), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        found.extend(reader.feed(data[start:stop]))
    assert found == frames


def test_the_largest_frame() -> None:
    contents = bytes(range(256)) * (MESSAGE_SIZE_MAX_BYTES // 256)
    data, reader = framed([(FrameKind.MESSAGE, contents)]), FrameReader()
    pieces = [data[start : start + 65_536] for start in range(0, len(data), 65_536)]
    found = [each for piece in pieces for each in reader.feed(piece)]
    assert found == [(FrameKind.MESSAGE, contents)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        head(FrameKind.MESSAGE, MESSAGE_SIZE_MAX_BYTES + 1),
        b"\xff" * 8,
        (3).to_bytes(4, "little") + (3).to_bytes(4, "little"),
    ],
)
def test_what_is_no_frame(bad: bytes, split: bool) -> None:
    reader = FrameReader()
    good = framed([(FrameKind.OPEN, b"abc")])
    found: list[tuple[int, bytes]] = []
    pieces = (good + bad[:5], bad[5:]) if split else (good + bad,)
    with pytest.raises(CorruptChunkError, match="expected at most"):
        found.extend(each for piece in pieces for each in reader.feed(piece))
    assert found == [(FrameKind.OPEN, b"abc")]
