"""The rows' checks in their files: written with every change, compared before rows are believed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardwell.errors import StorageError
from shardwell.numerics.codec import Float32
from shardwell_server.store.contract import Places, TableLayout
from shardwell_server.store.files.layout import Home
from shardwell_server.store.lazy_memory import lazy_zeros
from shardwell_server.store.row_arrays import RowArrays, Rows, WrittenRows, gather
from shardwell_server.store.row_checks import Checks, RowChecks

_WEIGHTS = 3
_KEYS_PER_PASS = 1 << 18
_VALUES_PER_PASS = 1 << 20


class RowGuard:
    """The checks of one table.

    `arrays` are those that a change may write, checks too, in a fixed order; `of_values` and
    `of_sums` are their numbers in each kind of change.
    """

    def __init__(
        self,
        home: Home,
        arrays: RowArrays,
        array: Callable[[str, tuple[int, ...], npt.DTypeLike], Rows],
    ) -> None:
        layout: TableLayout = home.layout
        shape = (layout.row_capacity,)
        self._row_checks: Checks = array("row_checks", shape, np.uint64)
        self._key_checks: Checks = array("key_checks", shape, np.uint64)
        values = [*arrays.of_values, self._row_checks, self._key_checks]
        sums: list[Rows] = []
        if arrays.sums is not None:
            self._sum_checks: Checks = array("sum_checks", shape, np.uint64)
            sums = [*arrays.of_sums, self._sum_checks]
        self.arrays = [*values, *sums]
        self.of_values = range(len(values))
        self.of_sums = range(len(values), len(self.arrays))
        self._directory = home.path
        self.table = layout.name
        self._rows_per_pass = max(_VALUES_PER_PASS // max(layout.dim, *layout.slot_widths, 1), 1)
        self._rows = arrays
        self._checks = RowChecks(layout, home.salt)
        self._lock = threading.Lock()
        self._left_count = 0
        self._verified: npt.NDArray[np.bool_] | None = None

    def numbered(
        self, weights: Float32 | None, slots: Sequence[Float32], sums: Float32 | None
    ) -> list[tuple[int, Float32]]:
        found = list(enumerate(slots, start=_WEIGHTS + 1))
        if weights is not None:
            found.append((_WEIGHTS, weights))
        return found if sums is None else [*found, (self.of_sums.start, sums)]

    def write(
        self,
        places: Places,
        copies: RowArrays,
        row_used: int,
        given: Mapping[int, Rows],
        *,
        values: bool,
        sums: bool,
    ) -> WrittenRows:
        """Writes the checks of rows as they lie; returns the rows, without new ones.

        Rows from `row_used` on are left to `write_new`. `given` has rows by number of their array;
        the others are gathered in `copies`.
        """
        if places.size and places.max() >= row_used:
            is_old = places < row_used
            places, given = places[is_old], {n: rows[is_old] for n, rows in given.items()}

        def rows_of(number: int, array: Rows, into: Rows) -> Rows:
            rows = given.get(number)
            return gather(array, places, into) if rows is None else rows

        batch: list[Rows] = []
        summed: list[Rows] = []
        if values:
            pairs = zip(self._rows.of_values, copies.of_values, strict=True)
            batch = [rows_of(number, *pair) for number, pair in enumerate(pairs)]
            self._row_checks[places] = self._checks.of_values(places, *batch)
            self._key_checks[places] = self._checks.of_keys(places, *batch[:2])
        if sums and self._rows.sums is not None and copies.sums is not None:
            has_sum = gather(self._rows.has_sum, places, copies.has_sum)
            if has_sum.any():
                rows = rows_of(self.of_sums.start, self._rows.sums, copies.sums)
                self._sum_checks[places] = self._checks.of_sums(places, has_sum, rows)
                summed = [rows, has_sum]
            else:
                self._sum_checks[places] = self._checks.of_no_sums(places)
        return WrittenRows(places, batch, summed, sums and not summed, row_used, [])

    def write_new(self, start: int, stop: int) -> list[Rows]:
        for part, places in _passes(start, stop, self._rows_per_pass):
            batch = [array[part] for array in self._rows.of_values]
            self._row_checks[part] = self._checks.of_values(places, *batch)
            self._key_checks[part] = self._checks.of_keys(places, *batch[:2])
            if self._rows.sums is not None:
                self._sum_checks[part] = self._checks.of_sums(
                    places, self._rows.has_sum[part], self._rows.sums[part]
                )
        every = self._rows.of_values if self._rows.sums is None else self._rows.all
        return [array[start:stop] for array in every]

    def check_keys(self, row_used: int) -> None:
        rows = self._rows
        for part, places in _passes(0, row_used, _KEYS_PER_PASS):
            found = self._checks.of_keys(places, rows.keys[part], rows.update_counts[part])
            self._compare("keys", places, found, self._key_checks[part])
            if rows.sums is not None:
                flags = rows.has_sum[part].view(np.uint8)
                without = np.flatnonzero(flags == 0)
                none = self._checks.of_no_sums(places[without])
                self._compare("has_sum", places[without], none, self._sum_checks[part][without])
        self._left_count = row_used
        self._verified = lazy_zeros((row_used,), np.bool_)

    def verify(self, places: Places) -> None:
        verified = self._verified
        if verified is None:
            return
        places = places[places < verified.size]
        places = places[~verified[places]]
        for start in range(0, places.size, self._rows_per_pass):
            self._verify_rows(places[start : start + self._rows_per_pass])
        with self._lock:
            self._left_count -= int(places.size - np.count_nonzero(verified[places]))
            verified[places] = True
            if self._left_count <= 0:
                self._verified = None

    def _verify_rows(self, places: Places) -> None:
        rows = self._rows
        batch = [np.take(array, places, axis=0) for array in rows.of_values]
        found = self._checks.of_values(places, *batch)
        self._compare("weights", places, found, self._row_checks[places])
        if rows.sums is not None:
            places = places[rows.has_sum[places]]
            flags, sums = rows.has_sum[places], np.take(rows.sums, places, axis=0)
            found = self._checks.of_sums(places, flags, sums)
            self._compare("sums", places, found, self._sum_checks[places])

    def _compare(self, name: str, places: Places, found: Checks, expected: Checks) -> None:
        bad = np.flatnonzero(found != expected)
        if bad.size:
            place = places[bad[0]]
            raise StorageError(
                f"{self._directory / name}: the row at place {place} (id {self._rows.keys[place]}) "
                f"of table {self.table!r}, or what is about it in a file beside, was "
                f"damaged: check {found[bad[0]]:#018x}, expected {expected[bad[0]]:#018x}; restore "
                "the directory from a copy or a checkpoint",
                table=self.table,
            )


def _passes(start: int, stop: int, size: int) -> Iterator[tuple[slice, Places]]:
    for begin in range(start, stop, size):
        end = min(begin + size, stop)
        yield slice(begin, end), np.arange(begin, end)
