"""The mean weighted by samples, in float32 that does not overflow. Pure.

Worker i contributes x_i * w_i / 2^e, with w_i its sample count divided by the greatest common
divisor of all, and e the smallest integer with 2^e >= W, the sum of w_i. The total of these is
divided by W / 2^e. So:

- No partial sum is larger than the largest contribution, because the factors add up to 1 at most.
- Equal counts become factors 1 / 2^e, which are exact: sums of integers below 2^24 are exact, and
  their mean is rounded once (with a power of two of workers, not at all).
- A mean of one is that one, bit for bit, whatever its count and however many have none.
- All counts 0: zeros.

A shard meets contributions one by one, so it knows no common factor: `shift_for` says how far it
scales each of them down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_FLOAT32_MAX = np.finfo(np.float32).max


def divide(total: npt.NDArray[np.float32], divisor: float, out: npt.NDArray[np.float32]) -> None:
    """Writes total / divisor into other memory; rounding never takes it beyond float32."""
    overflows: list[str] = []
    is_float32 = float(np.float32(divisor)) == divisor
    with np.errstate(all="ignore", over="call", call=lambda kind, _: overflows.append(kind)):
        if is_float32:
            np.divide(total, np.float32(divisor), out=out)
        else:
            out[...] = np.divide(total, divisor, dtype=np.float64)
    if overflows:
        beyond = np.isinf(out) & np.isfinite(total)
        out[beyond] = np.copysign(_FLOAT32_MAX, total[beyond])


class MeanFactors:
    """Each worker's factor and the total's divisor; counts are by rank, from 0 to 2^24."""

    def __init__(self, sample_counts: Sequence[int]) -> None:
        divisor = math.gcd(*sample_counts) or 1
        reduced = [count // divisor for count in sample_counts]
        total = sum(reduced)
        scale = 1 << max(total - 1, 0).bit_length()
        nothing = -0.0 if total else 0.0  # which changes no bit of what it is added to
        self._factors = tuple(count / scale if count else nothing for count in reduced)
        self.divisor = total / scale if total else 1.0
        """In (0.5, 1]; 1.0 where nothing need be divided."""

    def __len__(self) -> int:
        return len(self._factors)

    def factor(self, rank: int) -> float:
        """Returns w_i / 2^e, exactly; 0.0, whatever the rank's values are: leave them out.

        All are 0.0 where no rank has samples: the mean is zeros.
        """
        return self._factors[rank]


def shift_for(sample_count: int, worker_count: int) -> int:
    """The exponent by which a step's sum is scaled down for a contribution of that weight.

    With the largest of these, a sum of worker_count contributions stays below the largest
    gradient, so that it can't overflow where their mean does not.
    """
    return sample_count.bit_length() + worker_count.bit_length()
