"""State machines of hypothesis: what is killed at a write, and a part of each in `make test`.

All their examples are in `make test-exhaustive`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from harness.stories.crash import SameMachine
from harness.stories.images import Image, image_of, in_memory, restore
from shardwell_server.store.mmap.store import MmapStore

_SHARE = 3
"""One example of so many is in `make test`."""
KILLS = st.none() | st.floats(0, 1, exclude_max=True)
"""Where a call is killed: not at all, or at which of its writes, from the first to the last."""


def cases(
    machine: type[RuleBasedStateMachine], *, max_examples: int, step_count: int
) -> tuple[type, type]:
    """The two tests, to be given names in a module. A longer run repeats the shorter one."""
    shorter = case(machine, max_examples=-(-max_examples // _SHARE), step_count=step_count)
    longer = case(machine, max_examples=max_examples, step_count=step_count)
    return shorter, pytest.mark.exhaustive(longer)


def case(
    machine: type[RuleBasedStateMachine], *, max_examples: int, step_count: int, **fields: Any
) -> Any:
    """A test of a machine whose class has these fields."""
    kind = type(machine.__name__, (machine,), fields)
    given = settings(max_examples=max_examples, stateful_step_count=step_count, deadline=None)
    return type(f"{machine.__name__}Test", (kind.TestCase,), {"settings": given})


class KilledMachine(RuleBasedStateMachine):
    """A machine with files in a directory, whose process is killed at any write of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.open = contextlib.ExitStack()
        fallback = Path(self.open.enter_context(tempfile.TemporaryDirectory()))
        self.path = self.open.enter_context(in_memory(fallback))
        self.images: list[Image] | None = None

    def teardown(self) -> None:
        self.open.close()

    def stored(self) -> MmapStore:
        """What a new process finds: nothing is left of the old one but its files."""
        return MmapStore(self.path, boot=SameMachine(self.path), reached=self.reached)

    def reached(self, point: str) -> None:
        if self.images is not None:
            self.images.append(image_of(self.path))

    def die(self) -> None:
        """Lets go of the process that ends; mostly there is nothing to do."""

    def come_back(self) -> None:
        """Starts a process on the files."""
        raise NotImplementedError

    def call(self, make: Callable[[], Any], kill: float | None) -> Any:
        """Makes a call; killed at one of its writes, the process comes back and it is repeated."""
        self.images = None if kill is None else []
        found = make()
        images, self.images = self.images, None
        if images and kill is not None:
            self.die()
            restore(images[int(kill * len(images))], self.path)
            self.come_back()
            found = make()
        return found
