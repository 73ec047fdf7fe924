"""Finds the rows that an earlier process left in a table's storage: the index, made anew."""

from __future__ import annotations

import secrets

import numpy as np

from shardwell.errors import StorageError
from shardwell.placement.rows import Ids, RowPlacement
from shardwell.specs.table import TableSpec
from shardwell_server.shard.table.index import DirectRowIndex, HashRowIndex
from shardwell_server.shard.table.row_slots import RowSlots
from shardwell_server.store import FREE, TableStorage

_DIRECT_ROW_COUNT_MAX = 2**26
"""Rows of a shard up to which an index by row number costs less than a hash table would."""
_RECOVERED_ROW_COUNT = 2**16
"""Rows that are looked at together, so that their keys stay in the cache."""


def index_of(
    spec: TableSpec,
    storage: TableStorage,
    places: RowSlots,
    placement: RowPlacement,
    shard_index: int,
) -> DirectRowIndex | HashRowIndex:
    """An index of the rows that there are.

    Raises:
        StorageError: the storage has ids that can't be here.
    """
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

    index.make_room(places.row_count)
    count = 0
    for start in range(0, places.used, _RECOVERED_ROW_COUNT):
        counts = storage.update_counts[start : min(start + _RECOVERED_ROW_COUNT, places.used)]
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
    """Place of the first that can't be on a shard; None: all can."""
    is_wrong = np.zeros(keys.size, np.bool_)
    if placement.row_count is not None:
        is_wrong |= keys.view(np.uint64) >= placement.row_count
    if placement.shard_count > 1:
        is_wrong |= placement.shards_of(keys) != shard_index
    return int(np.argmax(is_wrong)) if is_wrong.any() else None
