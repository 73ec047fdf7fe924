"""Goal: an import that needs a package which is missing names the command that installs it here."""

from __future__ import annotations

import importlib
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize("extra", ["torch", "jax", "ray"])
def test_an_extra_that_is_not_installed_is_named(monkeypatch, extra) -> None:
    for name in [each for each in sys.modules if each.startswith(f"shardwell.{extra}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"shardwell.{extra}")
    assert caught.value.name == extra
    # This Python's own pip, and the requirement itself: Shardwell is on no index under its extra.
    command = str(caught.value).partition("; run: ")[2].partition(", ")[0]
    assert shlex.split(command) == [sys.executable, "-m", "pip", "install", *EXTRAS[extra]]
