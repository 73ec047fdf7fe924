"""The marks of a slice when its files are opened again.

What a killed process left half written is written again from the chunks' records. Marks, records
and events tell of the same seats; where they do not, one of the files is not the slice's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwell.errors import StorageError
from shardwell_server.store.chunk_records import StoredRecord
from shardwell_server.store.marks import Marks


def recover_marks(
    marks: Marks, stored: Sequence[StoredRecord], seat_count: int, directory: Path, *, is_torn: bool
) -> None:
    """Opens the marks, and makes them what the records say.

    Args:
        marks: Not opened yet.
        stored: The record of each chunk.
        seat_count: How many the events tell of.
        directory: Of the slice, for messages.
        is_torn: The files are an image, and seats may have been taken after it.

    Raises:
        StorageError: a file was truncated, or is not of this slice.
    """
    marks.open()
    if is_torn:
        marks.make_room(seat_count)
        for seat_index in range(seat_count):
            marks.begin(seat_index)
    if stored and seat_count > marks.row_capacity:
        raise StorageError(
            f"{directory / 'marks'} has {marks.row_capacity} rows for {seat_count} seats: it was "
            "truncated; restore the directory from a copy"
        )
    for index, record in enumerate(stored):
        if record.seat_index >= seat_count:
            raise StorageError(
                f"{directory / 'records'}: chunk {index} has a gradient of seat "
                f"{record.seat_index}, and {directory / 'events'} {seat_count} seats: one of them "
                "was replaced; restore the directory from a copy"
            )
        if record.seat_index >= 0:
            marks.put(record.seat_index, index, record.step)
    if stored:
        for row in range(seat_count, marks.row_capacity):
            if not marks.is_blank(row):
                raise StorageError(
                    f"{directory / 'marks'} has steps of seat {row}, and {directory / 'events'} "
                    f"{seat_count} seats: one of them was replaced; restore the directory from a "
                    "copy"
                )
