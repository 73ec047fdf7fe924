"""Goal: what knows a format of elements by its name are the files that docs/architecture.md says.

Method: names in the code of all modules, comments and docstrings aside: of Python by its syntax, of
C and Protocol Buffers by their text. What the compiler of protos has made is no module of ours.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwell.numerics.codec import CODECS, SUMMED_CODECS

ROOT = Path(__file__).parents[3]
FILES = {
    "protos/shardwell/v1/types.proto",
    "client/shardwell/specs/parameter.py",
    "client/shardwell/numerics/codec.py",
    "client/shardwell/numerics/elementwise.py",
    "client/shardwell/numerics/native/kernels.h",
    "client/shardwell/numerics/native/kernels.c",
}
DEFAULTS = {"fp16", "fp32"}
"""Formats that others name as well, because they choose one."""
OUTER = {
    "client/shardwell/outer/outer.py",
    "server/shardwell_server/operations/outer_time.py",
    "server/shardwell_server/cli/plan.py",
}
"""What chooses for outer training: int8, and not bf16."""


def words_of_python(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    documentation = {
        id(each.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for each in node.body
        if isinstance(each, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in documentation:
                yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            if ast.unparse(node.value) != "np":  # whose types have names of their own
                yield node.attr
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name


def code_of(path: Path) -> str:
    """Its code, without comments and docstrings."""
    text = path.read_text()
    if path.suffix == ".py":
        return "\n".join(words_of_python(text))
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def modules() -> Iterator[Path]:
    for folder in ("client", "server", "protos"):
        for path in sorted((ROOT / folder).rglob("*")):
            is_made = path.is_relative_to(ROOT / "client" / "shardwell" / "v1")
            if path.suffix in (".py", ".c", ".h", ".proto") and not is_made:
                yield path


@pytest.mark.parametrize("name", sorted(set(SUMMED_CODECS) - DEFAULTS))
def test_a_format_is_named_where_it_is_defined(name: str) -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in modules()
        if re.search(name, code_of(path), re.IGNORECASE)
    }
    assert found - OUTER == FILES


@pytest.mark.parametrize("name", sorted(set(CODECS) - set(SUMMED_CODECS)))
def test_a_codec_of_blocks_is_named_where_it_is_defined(name: str) -> None:
    """And nothing else knows more of it than that it writes blocks."""
    found = {
        str(path.relative_to(ROOT))
        for path in modules()
        if re.search(f"(?<![a-z]){name}(?!_t)", code_of(path), re.IGNORECASE)
    }
    assert found - OUTER == {
        "protos/shardwell/v1/types.proto",
        "client/shardwell/specs/parameter.py",
        "client/shardwell/numerics/codec.py",
        f"client/shardwell/numerics/{name}.py",
    }


def test_the_guide_names_these_files() -> None:
    guide = (ROOT / "docs" / "architecture.md").read_text()
    (item,) = re.findall(r"- \*\*a codec\*\*.*?\n- ", guide, re.DOTALL)
    for path in FILES:
        assert path.rpartition("/")[2] in item
    assert "six files" in item
