"""Tests of hypothesis' state machines: a part in `make test`, all in `make test-exhaustive`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

_SHARE = 3
"""One example of so many is in `make test`."""


def cases(
    machine: type[RuleBasedStateMachine], *, max_examples: int, step_count: int
) -> tuple[type, type]:
    """The two tests, to be given names in a module. A longer run repeats the shorter one."""

    def case(count: int) -> Any:
        given = settings(max_examples=count, stateful_step_count=step_count, deadline=None)
        return type(f"{machine.__name__}Test", (machine.TestCase,), {"settings": given})

    return case(-(-max_examples // _SHARE)), pytest.mark.exhaustive(case(max_examples))
