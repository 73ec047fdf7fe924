"""Goal: whoever imports what needs an extra, and has it not, is told how to get it."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("extra", ["torch", "jax", "ray"])
def test_an_extra_that_is_not_installed_is_named(monkeypatch, extra) -> None:
    for name in [each for each in sys.modules if each.startswith(f"shardwell.{extra}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'shardwell\[{extra}\]'") as caught:
        importlib.import_module(f"shardwell.{extra}")
    assert caught.value.name == extra
