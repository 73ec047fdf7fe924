"""Goal: `make lint` refuses each kind of sentence that hides which part of the code does what.

Method: a repository of four files, with a line for each kind that is found and each that is not;
the real one is `make lint`'s.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = '''"""Rows that are told
apart."""

from log import LOG, told


def read(row, told):
    """Reads `told` rows; the file is
    there.

    Args:
        row: Of the table.
        count: As many.

    Returns:
        The same rows.
    """
    LOG.info("whoever reads")
    if told["is there"]:  # nobody
        # reads, and somebody
        # writes
        raise KeyError(
            f"row {row!r} "
            f"is there"
        )
    return "stands"


def write(row):
    """See `read`."""


def erase(row):
    """See `read`; blocks."""
'''
PAGE = """# What is a row?

What is read is kept. What is a table? `told` and

```
told
```

[a page](https://example.org/told) that anybody
reads.

| told |

"""
PROTO = """message Chunk {
  // What is summed. The shard that
  // stands still.
  string told = 1;  // a value
}
"""
TEST = '''"""Whoever reads."""


def test_told():
    assert message == "nobody is there"
'''


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import words

    return words


def found(words: ModuleType, root: Path, file: str, text: str) -> list[tuple[int, str]]:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    findings = words.findings(root, (file,))
    assert {each.file for each in findings} <= {file}
    return [(each.line, each.found) for each in findings]


def test_code_is_read_in_docstrings_comments_and_messages(
    words: ModuleType, tmp_path: Path
) -> None:
    assert found(words, tmp_path, "client/shardwell/rows.py", PYTHON) == [
        (1, "told"),
        (8, "is there"),
        (12, "row: Of"),
        (13, "count: As"),
        (18, "whoever"),
        (19, "is there"),
        (19, "nobody"),
        (20, "somebody"),
        (24, "is there"),
        (30, "See `read`."),
    ]


def test_tests_are_read_in_docstrings_alone(words: ModuleType, tmp_path: Path) -> None:
    assert found(words, tmp_path, "tests/unit/test_rows.py", TEST) == [(1, "Whoever")]


def test_pages_are_read_without_code_and_questions(words: ModuleType, tmp_path: Path) -> None:
    assert found(words, tmp_path, "docs/rows.md", PAGE) == [
        (3, "What is"),
        (9, "anybody"),
        (12, "told"),
    ]


def test_comments_of_messages_are_read(words: ModuleType, tmp_path: Path) -> None:
    assert found(words, tmp_path, "protos/rows.proto", PROTO) == [(2, "What is"), (3, "stands")]


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("a" * 120, False),
        ("a" * 121, True),
        ("a" * 100 + "](" + "b" * 100 + ")", False),
        ("| " + "a" * 130 + " |", False),
        ("    " + "a" * 130, False),
    ],
)
def test_lines_of_pages_are_bounded(
    words: ModuleType, tmp_path: Path, line: str, is_found: bool
) -> None:
    assert bool(found(words, tmp_path, "docs/rows.md", f"Rows:\n\n{line}\n")) == is_found


def test_only_files_that_are_not_yet_swept_are_left_out(words: ModuleType, tmp_path: Path) -> None:
    words.NOT_YET = ("docs/old/",)
    for folder in ("old", "new"):
        found(words, tmp_path, f"docs/{folder}/rows.md", "A row is told.\n")
    assert [each.file for each in words.findings(tmp_path)] == ["docs/new/rows.md"]


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("The rows that one answer holds.", False),
        ("A row.", False),
        ("No shard has answered.", False),
        ("True if a row has a sum.", False),
        ("Returns the norm of a step's mean gradient.", False),
        ("Notes that a worker has left.", False),
        ("Closes, and waits.", False),
        ("What one shard holds.", True),
        ("Which rows are kept.", True),
        ("Whether a row is kept.", True),
        ("How many rows there are.", True),
        ("The same for tables.", True),
        ("As `read`, for tables.", True),
        ("Rows of a table.", True),
        ("Number of rows.", True),
        ("See `read`.", True),
        ("Runs.", True),
    ],
)
def test_first_lines_of_docstrings(
    words: ModuleType, tmp_path: Path, line: str, is_refused: bool
) -> None:
    rows = tmp_path / "client/shardwell/rows.py"
    rows.parent.mkdir(parents=True)
    rows.write_text(f'"""Rows, by their ids."""\n\n\ndef rows():\n    """{line}"""\n')
    found = words.first_line_findings(tmp_path)
    assert [(each.file, each.line) for each in found] == (
        [("client/shardwell/rows.py", 5)] if is_refused else []
    )


def test_commands_and_generated_code_have_other_first_lines(
    words: ModuleType, tmp_path: Path
) -> None:
    for file in ("server/shardwell_server/cli/show.py", "client/shardwell/v1/rows_pb2.py"):
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text('@click.command()\ndef show():\n    """Show a row."""\n')
    assert words.first_line_findings(tmp_path) == []
    path.with_name("rows.py").write_text('"""What v1 is."""\n')
    (tmp_path / "client/shardwell/rows.py").write_text('"""What rows are."""\n')
    assert [each.file for each in words.first_line_findings(tmp_path)] == [
        "client/shardwell/rows.py"
    ]
