"""Which rows may have a sum, in memory: to find them again without looking at all the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwell_server.accumulator.stripe_locks import Stripes
from shardwell_server.store.gradient_rows import Rows
from shardwell_server.store.lazy_memory import lazy_zeros


class TouchedRows:
    """A flag a row, and one a stripe. Whoever calls holds the stripes' locks, but for `stripes`.

    A flag is set before its row gets a sum, and cleared after the row has lost it; so rows without
    a sum may have one.

    Attributes:
        row_count: Rows.
        stripe_count: Stripes of `rows_per_stripe` neighbours; the last may have fewer.
    """

    def __init__(self, row_count: int, rows_per_stripe: int) -> None:
        self._rows_per_stripe = rows_per_stripe
        self.row_count = row_count
        self.stripe_count = -(-row_count // rows_per_stripe)
        shape = (self.stripe_count, rows_per_stripe)
        self._of_rows: npt.NDArray[np.bool_] = lazy_zeros(shape, np.bool_)
        self._of_stripes: npt.NDArray[np.bool_] = lazy_zeros(shape[:1], np.bool_)

    def stripes_of(self, rows: Rows) -> Stripes:
        """Ascending, without repeats: the stripes of rows that ascend."""
        stripes = rows // self._rows_per_stripe
        if stripes.size > 1:
            is_first = stripes[1:] != stripes[:-1]
            if not is_first.all():
                stripes = stripes[np.concatenate(([True], is_first))]
        return stripes

    def touch(self, rows: Rows, stripes: Stripes) -> None:
        """Sets the flags of rows, and of their stripes."""
        self._of_rows.reshape(-1)[rows] = True
        self._of_stripes[stripes] = True

    def clear(self, rows: Rows, stripes: Stripes | None) -> None:
        """Clears the flags of rows that are all touched rows of these stripes; None: of all."""
        self._of_rows.reshape(-1)[rows] = False
        self._of_stripes[self.stripes() if stripes is None else stripes] = False

    def stripes(self) -> Stripes:
        """Ascending: the stripes that may have touched rows. Of those nobody holds, surely all."""
        return np.flatnonzero(self._of_stripes)

    def rows_of(self, stripes: Stripes | None) -> Rows:
        """Ascending: the touched rows of stripes, which ascend; None: of all."""
        if stripes is None:
            return np.flatnonzero(self._of_rows.reshape(-1))
        flags = np.flatnonzero(self._of_rows[stripes].reshape(-1))
        places, numbers = np.divmod(flags, self._rows_per_stripe)
        rows: Rows = stripes[places] * self._rows_per_stripe + numbers
        return rows
