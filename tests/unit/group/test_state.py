"""Goal: the state of a group travels whole, and takes no memory of a member that has it."""

from __future__ import annotations

import tracemalloc

import numpy as np

from shardwell.group.state import SharedState

SIZE = 5_000_001


def test_memory_for_the_state_of_another_is_that_of_who_needs_it() -> None:
    source = {"w": np.arange(SIZE, dtype=np.float32), "n": np.array([7], np.uint8)}
    target = {name: np.zeros_like(array) for name, array in source.items()}
    tracemalloc.start()
    try:
        given = SharedState(source)
        assert tracemalloc.get_traced_memory()[1] < SIZE
    finally:
        tracemalloc.stop()
    taken = SharedState(target)
    for start, stop in given.pieces():
        taken.take(start, given.words(start, stop))
    assert not target["w"].any()
    taken.write()
    for name, array in source.items():
        assert (target[name] == array).all()
