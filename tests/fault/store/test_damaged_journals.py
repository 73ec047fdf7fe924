"""Goal: damage in a journal is reported by name, and a torn end that was never acknowledged is
none.

Method: bits of journals that parameters and tables need after a loss of power are flipped, all of
its synced part. And journals are torn as disks tear them: each block that was written since the
last sync is on the disk or not, in any order, life after life. Oracle: the synced part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.stories.crash import OtherStart
from harness.stories.images import image_of, restore
from harness.stories.killed import ParameterStory, StoredStory, TableStory
from harness.stories.power import scrambled_at, with_synced
from shardwell import GroupedRate
from shardwell.errors import StorageError
from shardwell_server.store.contract import JournalEntry
from shardwell_server.store.journal import journal
from shardwell_server.store.journal.journal import (
    HEAD_BYTES,
    Journal,
    cut_off,
    segments,
    sync_segments,
)
from shardwell_server.store.journal.parameter_entries import pack_entry, read_entries

SALT = 77
BLOCK_BYTES = 512


def flips(segment: Path, size: int, stride: int) -> Iterator[int]:
    """Writes a segment with one bit flipped, a different one for each byte; whole at the end."""
    whole = segment.read_bytes()
    for offset in [*range(100), *range(100, size, stride)]:
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << (offset * 3 % 8)
        segment.write_bytes(damaged)
        yield offset
    segment.write_bytes(whole)


def refused(use: Callable[[], object], segment: Path, name: str) -> None:
    with pytest.raises(StorageError, match=r"was damaged.* restore the directory") as caught:
        use()
    message = str(caught.value)
    assert f"{segment}: " in message
    assert name in message or "its first bytes" in message


@pytest.mark.parametrize("story", [ParameterStory, TableStory])
def test_every_bit_of_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: type[StoredStory]
) -> None:
    monkeypatch.setattr(journal, "IMAGE_AT_BYTES_MIN", 1 << 30)  # all in one segment
    whole = restore({}, tmp_path / "whole")
    story("step").tell(whole, lambda: None, lambda _: None)
    path = scrambled_at(whole, tmp_path / "damaged")
    image = image_of(path)
    segment = max((path / story.directory).glob("journal-*"), key=lambda each: each.stat().st_size)
    size = segment.stat().st_size
    segment.write_bytes(with_synced(segment.read_bytes(), size))
    assert size > 1000
    for _ in flips(segment, size, 19):
        restore({**image, str(segment.relative_to(path)): segment.read_bytes()}, path)
        refused(lambda: story("step", OtherStart).state_at(path), segment, story.what)


@pytest.mark.parametrize("kept", [0, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 5, -1])
def test_a_journal_that_was_cut(tmp_path: Path, kept: int) -> None:
    entries = write(tmp_path, 4, synced=4)
    (segment,) = segments(tmp_path).values()
    data = segment.read_bytes()
    segment.write_bytes(data[:kept])
    with pytest.raises(StorageError, match=r"journal-000001: its (first bytes|end)"):
        found(tmp_path)
    if kept >= HEAD_BYTES:  # when as much was synced as there is
        segment.write_bytes(with_synced(data[:kept], kept))
        assert found(tmp_path) == entries[: 0 if kept > 0 else 3]


def test_what_is_behind_a_damaged_end_decides_nothing(tmp_path: Path) -> None:
    """Whole entries behind one that is not: only what was noted as synced tells which it is."""
    write(tmp_path, 6, synced=3)
    (segment,) = segments(tmp_path).values()
    data = bytearray(segment.read_bytes())
    ends = [end for _, end in read_entries(segment, "m", SALT)]
    for number in range(6):
        damaged = bytearray(data)
        damaged[ends[number] - 1] ^= 1
        segment.write_bytes(damaged)
        if number < 3:
            with pytest.raises(StorageError, match=f"parameter 'm', .* for chunk {number}"):
                found(tmp_path)
        else:
            assert len(found(tmp_path)) == number


def entry(number: int) -> JournalEntry:
    payload = np.full(40 + number * 37 % 900, number % 251, np.uint8)
    rate = GroupedRate(0.5, [1.0, number]) if number % 2 else 0.5
    return JournalEntry(number, 1, 5, 3, rate, payload, sequence=number + 1)


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, 4, synced=4)
    (segment,) = segments(tmp_path).values()
    for number, (each, _) in enumerate(read_entries(segment, "m", SALT)):
        expected = entry(number)
        assert each._replace(payload=None) == expected._replace(payload=None)
        np.testing.assert_array_equal(each.payload, expected.payload)


def write(directory: Path, count: int, *, synced: int) -> list[int]:
    """A segment of so many entries, of which the first were synced; their chunks' numbers."""
    journal = Journal(directory, lambda _: None)
    journal.begin_segment()
    for number in range(count):
        journal.append(pack_entry(entry(number), SALT), 0)
        if number + 1 == synced:
            journal.sync()
    journal._let_go()  # as good as killed
    return list(range(count))


def found(directory: Path) -> list[int]:
    """The chunks of the entries that are whole."""
    return [
        each.chunk_index
        for path in segments(directory).values()
        for each, _ in read_entries(path, "m", SALT)
    ]


class Disk:
    """Blocks of a segment as they were at its last sync, and as they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drawn: random.Random) -> None:
        self._drawn = drawn
        self._synced: dict[Path, bytes] = {}
        real = Journal._ask_disk

        def ask(journal: Journal) -> None:
            real(journal)
            path = journal._path(journal.number)
            data = bytearray(path.read_bytes())
            data[:HEAD_BYTES] = self._heads.get(path, data[:HEAD_BYTES])  # noted after the sync
            self._synced[path] = bytes(data)
            self._heads[path] = path.read_bytes()[:HEAD_BYTES]

        self._heads: dict[Path, bytes] = {}
        monkeypatch.setattr(Journal, "_ask_disk", ask)

    def lose_power(self, directory: Path) -> None:
        """Each block that changed since the last sync is on disk, or not."""
        for path in segments(directory).values():
            now = path.read_bytes()
            old = self._synced.get(path, with_synced(bytes(HEAD_BYTES)))
            size = self._drawn.choice([len(old), len(now), self._drawn.randint(len(old), len(now))])
            data = bytearray(old.ljust(size, b"\0")[:size])
            for start in range(0, size, BLOCK_BYTES):
                if self._drawn.random() < 0.5:
                    stop = min(start + BLOCK_BYTES, size)
                    data[start:stop] = now[start:stop]
            path.write_bytes(data)
            self._synced[path] = bytes(data)
            self._heads[path] = bytes(data[:HEAD_BYTES])

    def holds(self, directory: Path) -> None:
        """All of it was synced."""
        for path in segments(directory).values():
            self._synced[path] = path.read_bytes()
            self._heads[path] = self._synced[path][:HEAD_BYTES]


@pytest.mark.parametrize("seed", range(150))
def test_blocks_that_are_lost_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Nothing that was synced is lost, and nothing else is called damage, life after life."""
    drawn = random.Random(seed)
    disk = Disk(monkeypatch, drawn)
    standing: list[int] = []
    number = 0
    for _ in range(4):
        sync_segments(tmp_path)
        disk.holds(tmp_path)
        journal = Journal(tmp_path, lambda _: None)
        journal.begin_segment()
        acknowledged = len(standing)
        for _ in range(drawn.randint(0, 12)):
            journal.append(pack_entry(entry(number), SALT), 0)
            standing.append(number)
            number += 1
            if drawn.random() < 0.3:
                journal.sync()
                acknowledged = len(standing)
        journal._let_go()  # as good as killed
        if drawn.random() < 0.3:  # killed in the middle of an entry; the machine stays up
            path = journal._path(journal.number)
            cut = b"".join(pack_entry(entry(number), SALT))
            with path.open("ab") as file:
                file.write(cut[: drawn.randrange(len(cut))])
            continue
        disk.lose_power(tmp_path)
        kept = found(tmp_path)
        assert kept == standing[: len(kept)]
        assert len(kept) >= acknowledged
        standing = kept
        for path in segments(tmp_path).values():
            cut_off(
                path, max((end for _, end in read_entries(path, "m", SALT)), default=HEAD_BYTES)
            )


def test_a_head_is_on_disk_before_its_segment_has_a_name(tmp_path: Path) -> None:
    """Else a page of zeros could be one that was never written."""
    write(tmp_path, 3, synced=3)
    (segment,) = segments(tmp_path).values()
    data = segment.read_bytes()
    for start, stop in ((0, HEAD_BYTES), (0, len(data)), (0, 12), (12, HEAD_BYTES)):
        zeroed = bytearray(data)
        zeroed[start:stop] = bytes(stop - start)
        segment.write_bytes(zeroed)
        with pytest.raises(StorageError, match="its first bytes"):
            found(tmp_path)
