"""Goal: no docstring, comment or page speaks of a name that the code has no more.

Method: a repository of three files, in which each kind of name is right once and wrong once; the
real one is `make lint`'s.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
VIEW = '''"""Rows."""

LIMIT = 3


class Base:
    size: int


class View(Base):
    def __init__(self) -> None:
        self.rows = []

    def take(self, row_count: int) -> None:
        """Takes them."""
'''
PROTO = """message Chunk {
  fixed32 crc32c = 1;
  oneof payload {
    bytes lz4 = 2;
  }
}
"""


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import references

    return references


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in {
        "client/shardwell/table/view.py": VIEW,
        "client/shardwell/table/__init__.py": "",
        "protos/chunk.proto": PROTO,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def named(references: ModuleType, root: Path) -> list[str]:
    return [each.name for each in references.findings(root)]


RIGHT = (
    *("`View`", "`View.take`", "`View.rows`", "`View.size`", "`view.take(3)`", "`take()`"),
    *("`view.LIMIT`", "`table.view.View`", "`Chunk.crc32c`", "`Chunk.lz4`", "row_count", "x_i"),
    *("view.py", "table/view.py", "chunk.proto", "`table/`", "`table/view`", "`client/shardwell`"),
    *("`int.from_bytes`", "`sys.exit()`", "`Path.removed`", "`lz4`", "shard-1.json", "`__del__`"),
)
WRONG = (
    *("`Window`", "`View.lost`", "`view.lost`", "`lost()`", "`view.LOST`", "`window.View`"),
    *("`table.window.LIMIT`", "`Chunk.size`", "row_number", "_row_count", "`row_number`"),
    *("window.py", "shard/view.py", "window.proto", "`table/window`", "`client/lost/`"),
)


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("written", ['"""Uses {}."""\n', "x = 1  # uses {}\n"])
def test_a_name_that_the_code_has(references, root: Path, name: str, written: str) -> None:
    imports = "" if written.startswith('"') else "import sys\nfrom pathlib import Path\n"
    (root / "client/shardwell/other.py").write_text(imports + written.format(name))
    assert named(references, root) == []


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(
    "written",
    ['"""Rows.\n\nUses {}."""\n', "x = 1\n\ny = 1  # uses {}\n", 'x = 1\ny = 2\n"""As {}."""\n'],
)
def test_a_name_that_nothing_has(references, root: Path, name: str, written: str) -> None:
    (root / "client/shardwell/other.py").write_text(written.format(name))
    (found,) = references.findings(root)
    assert found.name == name.strip("`").removesuffix("()")
    assert (found.file, found.line) == ("client/shardwell/other.py", 3)


@pytest.mark.parametrize("name", ["`View.lost`", "`lost()`", "row_number", "table/window.py"])
def test_a_page_and_a_proto(references, root: Path, name: str) -> None:
    (root / "docs").mkdir()
    (root / "docs/page.md").write_text(f"# Page\n\nIt uses {name}.\n")
    (root / "protos/other.proto").write_text(f"// Uses {name}.\nmessage Other {{}}\n")
    assert [(each.file, each.line) for each in references.findings(root)] == [
        ("docs/page.md", 3),
        ("protos/other.proto", 1),
    ]


def test_what_a_page_s_example_defines(references, root: Path) -> None:
    (root / "docs").mkdir()
    page = (
        "# Page\n\n`train_step` is `worker.py`'s:\n\n    def train_step(): ...\n\nRun `mine.py`.\n"
    )
    (root / "docs/page.md").write_text(page)
    assert named(references, root) == []


def test_what_was_is_for_the_changelog(references, root: Path) -> None:
    (root / "CHANGELOG.md").write_text("# Changes\n\n`Window` and row_number are no more.\n")
    assert named(references, root) == []


def test_a_word_of_a_docstring_is_no_code(references, root: Path) -> None:
    both = '"""Uses row_number."""\n\n\ndef f():\n    """Of row_number, see `Window`."""\n'
    (root / "client/shardwell/other.py").write_text(both)
    assert named(references, root) == ["row_number", "Window", "row_number"]


def test_an_example_of_a_docstring_is_run_elsewhere(references, root: Path) -> None:
    both = '"""Uses row_number.\n\n>>> my_rows = 1\n... by_row()\n\nOf `Window`.\n"""\n'
    (root / "client/shardwell/other.py").write_text(both)
    found = [(each.line, each.name) for each in references.findings(root)]
    assert found == [(1, "row_number"), (6, "Window")]


def test_it_says_where_and_what_to_do(references, root: Path, monkeypatch, capsys) -> None:
    (root / "client/shardwell/other.py").write_text('"""See `View.lost`."""\n')
    monkeypatch.setattr(references, "ROOT", root)
    assert references.main() == 1
    printed = capsys.readouterr().out
    assert "client/shardwell/other.py:1: View.lost: View has no member lost" in printed
    assert "OTHERS" in printed
