"""Fixtures of the tests of stores: their files wait for no disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.stories.images import in_memory


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path
