"""torch's generator of random numbers: a process has one, and its threads take turns here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TURN = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Numbers drawn inside depend on the seed alone; also a decorator."""
    with _TURN:
        torch.manual_seed(seed)
        yield
