"""Benchmarks use names that the code has: no test runs all of them."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FILES = sorted(path.relative_to(BENCHMARKS).as_posix() for path in BENCHMARKS.rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_its_imports_of_us_exist(name: str) -> None:
    for node in ast.walk(ast.parse((BENCHMARKS / name).read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
            continue
        if node.module.split(".")[0] not in ("shardwell", "shardwell_server"):
            continue
        module = importlib.import_module(node.module)
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")
