"""Goal: what the structure costs can fall and can't rise, and a message says where it rose.

Method: a small repository, with a program in place of tools/count_calls.py, that is made worse and
better in one way each; the real one is `make lint`'s.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RECORD = """# Numbers fall.

[allowed]
"modules of a folder" = 2
"modules of client/shardwell/rpc" = 3
"functions of an exchange" = 2
"modules of an exchange" = 2
"functions of put_row_gradients" = 1
"modules of put_row_gradients" = 1
"modules" = 8
"functions with nine or more parameters" = 1
"attributes that one class assigns outside of __init__" = 2
"lines of code" = 5
"docstring lines of internals" = 3
"lines of tests" = 4
"private members that tests read" = 1
"test names in several files" = 0
"""
CLASS = '''import a
from b import (
    c,
)

class Shown:
    """Public.

    More.
    """

    def shown(self):
        """Public, too."""
        self.one = self.two, (self.one) = 1, 2  # said

    def _hidden(self):
        """Internal,
        and long."""

def f(a, b, c, d, e, f, g, h, i):
    """Internal."""
'''
CONTRACT = """
[[tool.importlinter.contracts]]
name = "what is pure has no connections"
source_modules = ["shardwell.wire", "shardwell.rpc.retry"]
"""
COUNTS = """import json, os, sys
assert os.environ["SHARDWELL_NATIVE"] == "off" and "SHARDWELL_SAME_HOST" not in os.environ
assert sys.argv[1:] == ["--json"]
functions = [["shardwell.client", "a"], ["shardwell.rpc.stream", "b"]]
print(json.dumps({"exchange": functions, "put_row_gradients": functions[:1]}))
"""
FILES = {
    "tools/ratchets.toml": RECORD,
    "tools/count_calls.py": COUNTS,
    "pyproject.toml": CONTRACT,
    "docs/reference/client.md": "# Client\n\n::: shardwell.Shown\n",
    "client/shardwell/client.py": CLASS,
    "client/shardwell/wire/__init__.py": '"""Bytes. Pure."""\n',
    "client/shardwell/wire/chunks.py": '"""Chunks. Pure."""\n',
    "client/shardwell/rpc/__init__.py": "",
    "client/shardwell/rpc/retry.py": '"""Attempts.\n\nPure: nothing else.\n"""\n',
    "client/shardwell/rpc/stream.py": "\n",
    "client/shardwell/rpc/arena.py": '"""A place. Pure except its lock."""\n',
    "client/shardwell/v1/types_pb2.py": "\n" * 5000,
    "server/shardwell_server/config.py": "\n",
    "tests/unit/test_a.py": "def test_a(self, b):\n    self._c = b._d._replace(e=1).f\n",
    "tests/unit/test_b.py": "def test_b():\n    super()._g()\n",
    "server/shardwell_server/kernels.c": "int a;\n" * 9,
}


@pytest.fixture
def ratchets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import ratchets

    return ratchets


@pytest.fixture
def root(ratchets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name, text in FILES.items():
        write(tmp_path, name, text)
    monkeypatch.setattr(ratchets, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["ratchets.py"])
    monkeypatch.setenv("SHARDWELL_SAME_HOST", "off")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def record(root: Path) -> str:
    return (root / "tools/ratchets.toml").read_text()


def test_what_is_as_recorded(ratchets, root: Path, capsys) -> None:
    write(root, "server/shardwell_server/config.py", "import os\n\n# said\n" * 11)
    assert ratchets.main() == 0
    printed = capsys.readouterr()
    assert "modules of client/shardwell/rpc: 3 of 3" in printed.out
    assert "lines of code: 5 of 5" in printed.out
    assert "less" not in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("name", "text", "printed"),
    [
        ("client/shardwell/rpc/new.py", "", "modules of client/shardwell/rpc: 4, 3 allowed"),
        ("client/shardwell/wire/a.py", "", None),
        ("server/shardwell_server/cli/__init__.py", "", None),
        (
            "client/shardwell/a.py",
            "class A:\n    def f(self, a, b, c, /, d, e, f, *g, h, **i): ...\n",
            "functions with nine or more parameters: 2, 1 allowed",
        ),
        (
            "client/shardwell/a.py",
            "def f():\n    async def g(a, b, c, d, e, f, g, h, i): ...\n",
            "functions with nine or more parameters: 2, 1 allowed",
        ),
        ("client/shardwell/a.py", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...\n", None),
        ("client/shardwell/a.py", "a\n" * 500, None),
        ("client/shardwell/a.py", "a\n" * 501, "lines of code: 506, 505 allowed"),
        (
            "client/shardwell/a.py",
            "class A:\n    def g(self):\n        self.a = self.b = self.c.d = self.e = 1\n",
            "attributes that one class assigns outside of __init__: 3, 2 allowed; give",
        ),
        (
            "client/shardwell/a.py",
            '"""Not counted.\n\n"""\nA = 1\n' + '"""A number."""\n' * 101,
            "docstring lines of internals: 104, 103 allowed; a private name",
        ),
        ("client/shardwell/wire/rows.py", '"""Rows. Pure."""', None),
        ("client/shardwell/a.py", '"""Purely a module, of pure joy."""', None),
        ("client/shardwell/a.py", '"""A.\n\nPure."""', "add shardwell.a to the contract"),
        ("server/shardwell_server/x/__init__.py", '"""X. Pure."""', "add shardwell_server.x to"),
        (
            "tests/unit/test_b.py",
            "def test_a(): ...\n",
            "test names in several files: 1, 0 allowed; say in the name what the test is about",
        ),
        ("tests/unit/test_b.py", "a._b\n" * 10, None),
        (
            "tests/unit/test_b.py",
            "a._b\n" * 11,
            "private members that tests read: 12, 11 allowed; use a public name",
        ),
        ("tests/unit/test_b.py", "\n" * 1003, "lines of tests: 1005, 1004 allowed; one suite"),
        (
            "tools/count_calls.py",
            COUNTS.replace('"b"]]', '"b"], ["shardwell.rpc.stream", "c"]]'),
            "functions of an exchange: 3, 2 allowed",
        ),
        (
            "tools/count_calls.py",
            COUNTS.replace("functions[:1]", "functions"),
            "modules of put_row_gradients: 2, 1 allowed",
        ),
    ],
)
def test_a_count_that_rises_is_named(
    ratchets, root: Path, capsys, name: str, text: str, printed: str | None
) -> None:
    write(root, name, text)
    assert ratchets.main() == (printed is not None)
    errors = capsys.readouterr().err
    assert (printed or "") in errors
    assert bool(errors) == (printed is not None)


def test_a_ratchet_says_where_and_what_to_do(ratchets, root: Path, capsys) -> None:
    many = "\n\ndef g(a, b, c, d, e, f, g, h, i, j): ...\n"
    write(root, "server/shardwell_server/config.py", many)
    for name in ("a", "b", "c"):
        write(root, f"client/shardwell/wire/{name}.py", "")
    assert ratchets.main() == 1
    errors = capsys.readouterr().err
    assert "modules of client/shardwell/wire: 4, 2 allowed; join modules" in errors
    assert "    chunks.py\n" in errors
    assert "    server/shardwell_server/config.py:3 g (10)\n" in errors
    assert "    client/shardwell/client.py:20 f (9)\n" in errors
    assert "change the number in tools/ratchets.toml, and say why in the commit" in errors


def test_modules_have_a_margin_and_no_more(ratchets, root: Path, capsys) -> None:
    for count, name in enumerate(("a", "b", "c", "d"), 1):
        write(root, f"server/shardwell_server/{name}/{name}.py", "")
        assert ratchets.main() == (count == 4)
    assert "modules: 12, 11 allowed; join modules" in capsys.readouterr().err


def test_what_falls_is_written_down_when_asked(
    ratchets, root: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "client/shardwell/rpc/stream.py").unlink()
    write(root, "client/shardwell/client.py", "")
    assert ratchets.main() == 0
    assert "python tools/ratchets.py --lower" in capsys.readouterr().out
    assert record(root) == RECORD
    monkeypatch.setattr(sys, "argv", ["ratchets.py", "--lower"])
    assert ratchets.main() == 0
    assert record(root) == (
        RECORD.replace('"modules of client/shardwell/rpc" = 3\n', "")
        .replace('parameters" = 1', 'parameters" = 0')
        .replace('"modules" = 8', '"modules" = 7')
        .replace('__init__" = 2', '__init__" = 0')
        .replace('code" = 5', 'code" = 0')
        .replace('internals" = 3', 'internals" = 0')
    )
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["ratchets.py"])
    assert ratchets.main() == 0
    assert "less" not in capsys.readouterr().out


def test_nothing_is_raised_by_lowering(ratchets, root: Path, monkeypatch) -> None:
    write(root, "client/shardwell/rpc/new.py", "\n" * 5000)
    monkeypatch.setattr(sys, "argv", ["ratchets.py", "--lower"])
    assert ratchets.main() == 1
    assert record(root) == RECORD


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("", "no table [allowed] of whole numbers"),
        ('[allowed]\n"lines of code" = "20"\n', "no table [allowed] of whole numbers"),
        (RECORD.replace('"lines of code" = 5\n', ""), 'lacks "lines of code"; add it'),
        (RECORD.replace('"modules of a folder" = 2\n', ""), 'lacks "modules of a folder"'),
    ],
)
def test_a_record_that_is_none(ratchets, root: Path, text: str, printed: str) -> None:
    write(root, "tools/ratchets.toml", text)
    with pytest.raises(ValueError) as caught:
        ratchets.main()
    assert printed in str(caught.value)


def test_a_folder_that_is_gone(ratchets, root: Path, capsys) -> None:
    write(root, "tools/ratchets.toml", RECORD + '"modules of client/shardwell/gone" = 20\n')
    assert ratchets.main() == 1
    assert '"modules of client/shardwell/gone" is of no folder' in capsys.readouterr().err
