"""Goal: each guarantee of docs/guarantees.md names tests, and those exist.

Method: the page's bold beginnings against the rows of its table; the files and functions that a
row names against the tree.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guarantees.md").read_text()
GUARANTEES, _, TABLE = PAGE.partition("## The tests of each")


def rows() -> dict[str, list[str]]:
    """The tests of each guarantee, by its name."""
    cells = (line.strip("| ").split(" | ") for line in TABLE.splitlines() if "`tests/" in line)
    return {name: re.findall(r"`(tests/[^`]+)`", tests) for name, tests in cells}


def test_each_guarantee_names_its_tests() -> None:
    bold = re.findall(r"^- \*\*(.+?)\*\*", GUARANTEES.partition("## The same bits")[0], re.M | re.S)
    names = [" ".join(each.split()).rstrip(".") for each in bold]
    assert len(names) > 10
    assert sorted(rows()) == sorted([*names, "The same bits"])


def test_the_tests_that_guarantees_name_exist() -> None:
    for name, tests in rows().items():
        assert tests, name
        for test in tests:
            file, _, function = test.partition("::")
            defined = {
                node.name
                for node in ast.walk(ast.parse((ROOT / file).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            assert function in defined or not function, test
            assert any(each.startswith("test_") for each in defined), test
