"""The indexes of a table's rows: from ids to places, many at a time.

Two kinds. `DirectRowIndex` has a number for each row that there can be, of which only pages that
have rows cost memory. `HashRowIndex` takes any 64-bit integers, and 27 to 54 bytes for each.

Invariant: `find` returns the place that `add` noted last for an id and `remove` has not taken back.
One thread may change an index (`add`, `make_room`, `remove`) while no other uses it; any number may
read at once.
"""

from __future__ import annotations

import contextlib
import secrets

import numpy as np
import numpy.typing as npt

from shardwell.errors import StorageError
from shardwell.numerics import row_batches
from shardwell.placement.rows import Ids, RowPlacement
from shardwell.specs.table import TableSpec
from shardwell_server.shard.table.hash_slots import SlotTable
from shardwell_server.shard.table.row_slots import RowSlots
from shardwell_server.store.contract import FREE, Places, TableStorage
from shardwell_server.store.lazy_memory import lazy_zeros


class DirectRowIndex:
    """An index with an entry for every possible id; each must be in range, and of the shard."""

    def __init__(self, placement: RowPlacement) -> None:
        self._placement = placement
        row_count = placement.local_row_count()
        kind = np.int32 if row_count < 2**31 else np.int64
        self._local_rows = placement.local_rows
        # Of each row its place plus 1, so that memory that was never written to says "none".
        self._marks: npt.NDArray[np.signedinteger] = lazy_zeros((row_count,), kind)
        self._count = 0

    def find(self, ids: Ids) -> Places:
        """Returns the place of each id, (n,) int64, -1 where there is none; ids may repeat."""
        return self.locate(ids)[0]

    def locate(self, ids: Ids) -> tuple[Places, int]:
        """Returns the places as `find` does, and how many ids have none."""
        return row_batches.find(ids, self._placement, self._marks)

    def add(self, ids: Ids, places: Places) -> None:
        """Notes places, each once; a known id moves, and of one that repeats the last counts."""
        rows, marks = self._local_rows(ids), places + 1
        is_new = np.take(self._marks, rows, mode="clip") == 0
        self._marks[rows] = marks
        is_new &= np.take(self._marks, rows, mode="clip") == marks
        self._count += int(np.count_nonzero(is_new))

    def make_room(self, count: int) -> None:
        """Does nothing: every id has an entry."""

    def remove(self, ids: Ids) -> None:
        """Forgets rows; unknown ids change nothing. (n,), without repeats."""
        rows = self._local_rows(ids)
        self._count -= int(np.count_nonzero(np.take(self._marks, rows, mode="clip")))
        self._marks[rows] = 0

    def __len__(self) -> int:
        return self._count


_SIZE_BITS_MIN = 10
_LOAD_MAX = 0.6
"""Largest part of slots that are not empty. Nearly all rows are in their first line; each costs 16
bytes by load."""
_LOAD_AFTER_REMOVALS = 0.45
"""When removed rows are cleared away, so much less that it is not soon necessary again."""
_LOAD_MIN = 1 / 16
"""When fewer rows remain, the table shrinks."""
_SHRINKING_MAX = 4
"""How many times smaller the next table may be: more lines than that are not moved for a row."""
_MOVED_ROWS_MIN = 64
"""Fewer new rows move as many lines as these would: a call has its price."""
_BATCH = 2**13
"""Rows that are added together, so that what is worked with stays in the cache."""
_MOVED_LINES = 2**10
"""Lines that are moved together: about as many rows."""
_SALT = 0x6A09E667F3BCC909


class HashRowIndex:
    """A `SlotTable`, and while rows move to one of another size, two.

    Resting: `_old` is None, and `_table` has all rows. When it would be too full, or after removals
    too empty, `_table` becomes `_old`, and an empty one takes its place.

    Moving: lines [0, `_moved`) of `_old` were moved, and are empty; their memory goes back to the
    system meanwhile. Each change moves some more, a line for a row, or up to four when the new
    table is smaller. So all are moved when as many rows have come as an eighth of the slots of the
    smaller table. Those fit into the new one: it was made for a load of 0.45 after removals, and
    else for about 0.3, or for so many new rows that they moved all lines at once. A row is

    - in `_old`, in a line from `_moved` on, until that is moved; what is added while its home there
      was not moved comes in there, too, so that the new table is written from its start to its end
      and memory comes as it is needed, not a page for each row that is added;
    - in `_table` otherwise; also if there was no slot in `_old` from its home to the last line,
      which stays so, because slots are emptied only as lines are moved.

    So `find` looks into `_old`, from a row's home or from `_moved`, and then into `_table`.

    Whatever fails for want of memory leaves all rows where they can be found: a block of lines is
    cleared after its rows are in the new table. If that fails halfway, rows are in both; the place
    in `_old` counts, and `len` has them twice until the block is moved.

    A salt that is drawn at random keeps a client from choosing keys that meet.
    """

    def __init__(self, salt: int = _SALT) -> None:
        self._salt = np.uint64(salt)
        self._table = SlotTable(_SIZE_BITS_MIN, self._salt)
        self._old: SlotTable | None = None
        self._moved = 0
        self._filled = 0
        """Rows of lines [`_moved`, `_filled`) may be in both tables, after a failure."""

    def find(self, ids: Ids) -> Places:
        if self._old is None:
            return self._table.find(ids)
        places = self._old.find(ids, self._moved)
        missing = np.flatnonzero(places < 0)
        places[missing] = self._table.find(ids[missing])
        return places

    def locate(self, ids: Ids) -> tuple[Places, int]:
        places = self.find(ids)
        return places, int(np.count_nonzero(places < 0))

    def add(self, ids: Ids, places: Places) -> None:
        """Moves no more lines than max(n, 64), four times as many after removals."""
        self.make_room(ids.size)
        for start in range(0, ids.size, _BATCH):
            batch = slice(start, start + _BATCH)
            self._add(ids[batch], places[batch] + 1)

    def _add(self, ids: Ids, marks: Ids) -> None:
        if self._old is not None:
            ids, marks = self._add_to_old(self._old, ids, marks)
        self._table.insert(ids, marks)

    def _add_to_old(self, old: SlotTable, ids: Ids, marks: Ids) -> tuple[Ids, Ids]:
        """Adds the rows that belong there; returns the others."""
        left = np.flatnonzero(~old.replace(ids, marks, self._moved))
        ids, marks = ids[left], marks[left]
        is_old = old.homes(ids) >= self._moved
        is_new = ~is_old
        beyond_ids, beyond_marks = old.insert(ids[is_old], marks[is_old], is_ring=False)
        return (
            np.concatenate((ids[is_new], beyond_ids)),
            np.concatenate((marks[is_new], beyond_marks)),
        )

    def make_room(self, count: int) -> None:
        """Grows once for so many more rows, where `add` would grow time and again."""
        left = self._move(max(count, _MOVED_ROWS_MIN))
        if self._old is None and self._table.used_count + count > _LOAD_MAX * self._table.size:
            self._begin(count)
            self._move(left)

    def remove(self, ids: Ids) -> None:
        if self._old is not None:
            self._old.remove(ids, self._moved)
        self._table.remove(ids)
        with contextlib.suppress(MemoryError):  # they are removed, and the next call tries again
            left = self._move(max(ids.size, _MOVED_ROWS_MIN))
            while self._is_too_large():
                self._begin(0)
                left = self._move(left)

    def _is_too_large(self) -> bool:
        table = self._table
        return (
            self._old is None
            and table.count < _LOAD_MIN * table.size
            and table.size > 1 << _SIZE_BITS_MIN
        )

    def __len__(self) -> int:
        return self._table.count + (self._old.count if self._old is not None else 0)

    def _begin(self, new_count: int) -> None:
        """Goes from resting to moving, into a table with room for so many more rows."""
        old = self._table
        needed = old.count + new_count
        load = _LOAD_MAX if old.used_count == old.count else _LOAD_AFTER_REMOVALS
        size = max(old.size // _SHRINKING_MAX, 1 << _SIZE_BITS_MIN)
        while needed > load * size:
            size *= 2
        self._table = SlotTable(size.bit_length() - 1, self._salt)
        self._old, self._moved, self._filled = old, 0, 0

    def _move(self, row_count: int) -> int:
        """Moves the lines that are due for so many rows; returns for how many no line was left."""
        old = self._old
        if old is None:
            return row_count
        lines_per_row = max(old.size // self._table.size, 1)
        due = min(self._moved + row_count * lines_per_row, old.line_count)
        row_count -= -(-(due - self._moved) // lines_per_row)
        while self._moved < due:
            stop = min(self._moved + _MOVED_LINES, due)
            self._move_lines(old, stop)
        if due == old.line_count:
            self._old = None
        return row_count

    def _move_lines(self, old: SlotTable, stop: int) -> None:
        fill = self._table.fill if self._moved == self._filled else self._table.insert
        ids, marks = old.rows(self._moved, stop)
        self._filled = max(self._filled, stop)
        fill(ids, marks)
        old.clear(self._moved, stop)
        self._moved = stop


_DIRECT_ROW_COUNT_MAX = 2**26
"""Rows of a shard up to which an index by row number costs less than a hash table would."""
_RECOVERED_ROW_COUNT = 2**16
"""Rows that are looked at together, so that their keys stay in the cache."""


def rebuild_index(
    spec: TableSpec,
    storage: TableStorage,
    slots: RowSlots,
    placement: RowPlacement,
    shard_index: int,
) -> DirectRowIndex | HashRowIndex:
    """Builds the index of the rows that an earlier process left; refuses ids that can't be here."""
    is_direct = spec.row_count is not None and (
        placement.local_row_count() <= _DIRECT_ROW_COUNT_MAX
    )
    index: DirectRowIndex | HashRowIndex = (
        DirectRowIndex(placement) if is_direct else HashRowIndex(secrets.randbits(64))
    )

    def damaged(what: str) -> StorageError:
        return StorageError(
            f"table {spec.name!r}: its files have {what} can't be on shard {shard_index} of "
            f"{placement.shard_count}; they are damaged: restore a copy or a checkpoint",
            table=spec.name,
        )

    index.make_room(slots.row_count)
    count = 0
    for start in range(0, slots.used, _RECOVERED_ROW_COUNT):
        counts = storage.update_counts[start : min(start + _RECOVERED_ROW_COUNT, slots.used)]
        found = start + np.flatnonzero(counts != FREE)
        keys = storage.keys[found]
        wrong = _first_misplaced(keys, placement, shard_index)
        if wrong is not None:
            raise damaged(f"id {keys[wrong]}, which")
        index.add(keys, found)
        count += found.size
    if len(index) != count:
        raise damaged("an id twice, which")
    return index


def _first_misplaced(keys: Ids, placement: RowPlacement, shard_index: int) -> int | None:
    is_wrong = np.zeros(keys.size, np.bool_)
    if placement.row_count is not None:
        is_wrong |= keys.view(np.uint64) >= placement.row_count
    if placement.shard_count > 1:
        is_wrong |= placement.shards_of(keys) != shard_index
    return int(np.argmax(is_wrong)) if is_wrong.any() else None
