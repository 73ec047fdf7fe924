"""Fixtures of the tests of damage: the stories that they cut off, each run once a module."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from harness.stories import killed
from harness.stories.crash import Written
from harness.stories.killed import Story


@pytest.fixture(scope="module")
def writes_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Story], list[Written]]:
    """What every write of a story leaves."""

    @functools.cache
    def writes(story: Story) -> list[Written]:
        found = killed.writes_of(story, tmp_path_factory.mktemp("story"))
        assert len(found) > story.write_count_min
        return found

    return writes
