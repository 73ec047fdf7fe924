"""NaN of several bits, and which bits those have that come back."""

from __future__ import annotations

import numpy as np

CANONICAL = 0x7FC00000
ODD_NANS = np.array([0x7FC00001, 0xFFC12345, 0x7FFFFFFF, 0xFFC00000, 0x7F800001], np.uint32).view(
    np.float32
)
"""Quiet ones of both signs, and a signalling one."""


def nan_bits(values: np.ndarray) -> set[int]:
    """The bits of all NaN in an array of float32."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    return set(flat.view(np.uint32)[np.isnan(flat)].tolist())
