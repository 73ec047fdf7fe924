"""Counts what the structure costs, and compares it with what tools/ratchets.toml allows.

python tools/ratchets.py             counts; fails where something is more than it may be
python tools/ratchets.py --lower     the same, and writes down what has become less

Product code is client/shardwell and server/shardwell_server, without the generated v1.

modules                   of Python, with each __init__.py
modules of a folder       without __init__.py; folders above the limit of all have one of their own
functions and modules of an exchange, and of put_row_gradients      see tools/count_calls.py
functions with nine or more parameters      self and cls do not count
attributes that one class assigns outside of __init__       of the class that has the most
lines of code             of Python, without docstrings, comments, empty lines and imports
lines of tests            of Python, all of them
private members that tests read     of the product, on other objects than self
test names in several files         of functions that pytest collects
docstring lines of internals        on classes, functions and attributes that are on no page of
                          docs/reference, nor members of what is

And each module whose docstring says that it is pure has to be in the contract of pyproject.toml
that says what pure means.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeGuard

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path("tools/ratchets.toml")
PACKAGES = ("client/shardwell", "server/shardwell_server")
OF_A_FOLDER = "modules of a folder"
MODULES = "modules"
PARAMETERS = "functions with nine or more parameters"
ATTRIBUTES = "attributes that one class assigns outside of __init__"
LINES = "lines of code"
DOCSTRINGS = "docstring lines of internals"
TEST_LINES = "lines of tests"
TEST_PRIVATE = "private members that tests read"
TEST_NAMES = "test names in several files"
PARAMETER_COUNT = 9
MARGINS = {LINES: 500, DOCSTRINGS: 100, MODULES: 3, TEST_LINES: 1000, TEST_PRIVATE: 10}
"""What may be exceeded by some: about one feature with its help and messages. Without a margin each
commit that adds a line would change the record, and those of several people at once would conflict
there."""
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit", "_repr_html_", "_current_frames"}
"""Names of Python, and of notebooks, that are public in spite of their underscore."""
CALLS = {"exchange": "an exchange", "put_row_gradients": "put_row_gradients"}
ADVICE = {
    OF_A_FOLDER: "join modules that only one other imports, or make a folder of those of one idea",
    MODULES: "join modules that only one other imports",
    PARAMETERS: "pass one record instead of what belongs together",
    ATTRIBUTES: "give what changes together an object of its own, with its states in a table",
    DOCSTRINGS: "a private name has a docstring only if it says why; one line says what it is",
    TEST_LINES: "one suite a promise, parametrised by kind; one program with a plan",
    TEST_PRIVATE: "use a public name, or one function of tests/harness/inside.py",
    TEST_NAMES: "say in the name what the test is about: rows, members, ..",
    LINES: "extend the mechanism that exists rather than write a second one",
    **dict.fromkeys(
        (f"{what} of {name}" for what in ("functions", "modules") for name in CALLS.values()),
        "`SHARDWELL_NATIVE=off python tools/count_calls.py -v` names them; compare with main's",
    ),
}


Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Count(NamedTuple):
    """A count."""

    name: str
    """As the record has it."""
    found: int
    where: tuple[str, ...] = ()
    """What it consists of, where that helps."""


def _is_product(path: Path) -> bool:
    return "v1" not in path.parts and path.suffix in (".py", ".c", ".h")


def sources(root: Path) -> list[Path]:
    """The files of product code, relative to root."""
    return sorted(
        path.relative_to(root)
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and _is_product(path.relative_to(root))
    )


def modules_of_folders(files: list[Path]) -> list[Count]:
    """Each folder with its modules."""
    folders: dict[str, list[str]] = {}
    for path in files:
        if path.suffix == ".py" and path.name != "__init__.py":
            folders.setdefault(path.parent.as_posix(), []).append(path.name)
    return [
        Count(f"modules of {folder}", len(names), tuple(names)) for folder, names in folders.items()
    ]


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[int, str, int]]:
    """Line, name and number of parameters of each function, with those inside of others."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given, name = node.args, f"{prefix}{node.name}"
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            if isinstance(tree, ast.ClassDef) and names[:1] in (["self"], ["cls"]):
                del names[0]
            stars = sum(each is not None for each in (given.vararg, given.kwarg))
            yield node.lineno, name, len(names) + stars
            name += "."
        elif isinstance(node, ast.ClassDef):
            name = f"{prefix}{node.name}."
        yield from _functions(node, name)


def functions_with_many_parameters(root: Path, files: list[Path]) -> Count:
    """Those with nine or more, the largest first."""
    found = sorted(
        (-count, f"{path}:{line} {name} ({count})")
        for path in files
        if path.suffix == ".py"
        for line, name, count in _functions(ast.parse((root / path).read_text()))
        if count >= PARAMETER_COUNT
    )
    return Count(PARAMETERS, len(found), tuple(text for _, text in found))


def attributes_that_change(root: Path, files: list[Path]) -> Count:
    """The count of the class that assigns the most attributes of self outside of `__init__`."""
    classes = [
        (len(names), f"{path}:{node.lineno} {node.name}: {', '.join(sorted(names))}")
        for path in files
        if path.suffix == ".py"
        for node in ast.walk(ast.parse((root / path).read_text()))
        if isinstance(node, ast.ClassDef)
        for names in [_assigned(node)]
    ]
    count, where = max(classes, default=(0, ""))
    return Count(ATTRIBUTES, count, (where,))


def _assigned(node: ast.ClassDef) -> set[str]:
    return {
        each.attr
        for method in node.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method.name != "__init__"
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if isinstance(each.value, ast.Name) and each.value.id == "self"
    }


def _is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def lines_of_code(root: Path, files: list[Path]) -> Count:
    """Of Python, without docstrings, comments, empty lines and imports."""
    count = 0
    for path in files:
        if path.suffix != ".py":
            continue
        text = (root / path).read_text()
        lines = {
            line
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type not in _NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
        for node in ast.walk(ast.parse(text)):
            if _is_text(node) or isinstance(node, (ast.Import, ast.ImportFrom)):
                lines.difference_update(_lines_of(node))
        count += len(lines)
    return Count(LINES, count)


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstrings_of_internals(root: Path, files: list[Path]) -> Count:
    """Lines of docstrings on names that users do not see."""
    public = {
        name
        for page in (root / "docs/reference").glob("*.md")
        for name in re.findall(r"^::: \S+\.(\w+)$", page.read_text(), re.MULTILINE)
    }
    found = sorted(
        (-_docstring_lines(ast.parse((root / path).read_text()), public), str(path))
        for path in files
        if path.suffix == ".py"
    )
    most = tuple(f"{path}: {-count}" for count, path in found[:10])
    return Count(DOCSTRINGS, -sum(count for count, _ in found), most)


def _docstring_lines(node: ast.Module | Definition, public: set[str]) -> int:
    count = 0
    for index, each in enumerate(node.body):
        if _is_text(each):
            is_of_module = index == 0 and isinstance(node, ast.Module)
            count += 0 if is_of_module else len(_lines_of(each))
        elif isinstance(each, Definition):
            is_listed = isinstance(node, ast.Module) and each.name in public
            count += _hidden_lines(each) if is_listed else _docstring_lines(each, public)
    return count


def _hidden_lines(node: Definition) -> int:
    """Counts those inside of a listed name that start with an underscore.

    Attributes that `__init__` assigns are on the reference's pages, too.
    """
    return sum(
        _docstring_lines(each, set())
        for each in node.body
        if isinstance(each, Definition) and each.name.startswith("_") and each.name != "__init__"
    )


def _reads_private(node: ast.AST) -> bool:
    """Returns True for a private member of anything but self, cls and super()."""
    if not isinstance(node, ast.Attribute) or node.attr in PUBLIC:
        return False
    own = node.value.func if isinstance(node.value, ast.Call) else node.value
    is_own = isinstance(own, ast.Name) and own.id in ("self", "cls", "super")
    return node.attr.startswith("_") and not node.attr.startswith("__") and not is_own


def counts_of_tests(root: Path) -> list[Count]:
    """The counts of what below tests/ is Python."""
    files = sorted((root / "tests").rglob("*.py"))
    private: dict[str, int] = {}
    names: dict[str, set[str]] = {}
    for path in files:
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if _reads_private(node):
                private[name] = private.get(name, 0) + 1
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names.setdefault(node.name, set()).add(name)
    twice = [f"{name}: {', '.join(sorted(of))}" for name, of in names.items() if len(of) > 1]
    return [
        Count(TEST_LINES, sum(path.read_bytes().count(b"\n") for path in files)),
        Count(TEST_PRIVATE, sum(private.values()), tuple(f"{n}: {c}" for n, c in private.items())),
        Count(TEST_NAMES, len(twice), tuple(sorted(twice))),
    ]


def functions_of_calls(root: Path) -> list[Count]:
    """What tools/count_calls.py counts, in a process of its own."""
    if not sys.platform.startswith("linux"):
        print("functions of a call are not counted: what workers share with shards needs Linux")
        return []
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SHARDWELL_")
    }
    printed = subprocess.run(
        [sys.executable, root / "tools/count_calls.py", "--json"],
        env=environment | {"SHARDWELL_NATIVE": "off"},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    counts = []
    for what, functions in json.loads(printed).items():
        modules = {module for module, _ in functions}
        counts.append(Count(f"functions of {CALLS[what]}", len(functions)))
        counts.append(Count(f"modules of {CALLS[what]}", len(modules)))
    return counts


def allowed(record: str) -> dict[str, int]:
    """What a record allows, by name.

    Raises:
        ValueError: it is not a table of numbers.
    """
    table = tomllib.loads(record).get("allowed", {})
    if not table or not all(isinstance(number, int) for number in table.values()):
        raise ValueError(f"{RECORD} has no table [allowed] of whole numbers")
    return table


def limit_of(count: Count, limits: Mapping[str, int]) -> int:
    """What may be counted at most.

    Raises:
        ValueError: the record lacks it.
    """
    name = count.name
    if name not in limits and name.startswith("modules of ") and "/" in name:
        name = OF_A_FOLDER
    if name not in limits:
        raise ValueError(f'{RECORD} lacks "{name}"; add it with what is found: {count.found}')
    return limits[name] + MARGINS.get(name, 0)


def problems(counts: list[Count], limits: Mapping[str, int]) -> list[str]:
    """Counts that exceed their limits: what, found, allowed, where, and what to do."""
    found = []
    for count in counts:
        limit = limit_of(count, limits)
        if count.found > limit:
            where = "".join(f"\n    {each}" for each in count.where)
            advice = ADVICE.get(count.name, ADVICE[OF_A_FOLDER])
            found.append(f"{count.name}: {count.found}, {limit} allowed; {advice}{where}")
    for name in limits.keys() - {OF_A_FOLDER} - {count.name for count in counts}:
        if name.startswith("modules of ") and "/" in name:
            found.append(f'{RECORD}: "{name}" is of no folder with modules; delete the line')
    return found


def improvements(counts: list[Count], limits: Mapping[str, int]) -> dict[str, int | None]:
    """What the record may be lowered to, by name; None: its line is not needed any more."""
    lower: dict[str, int | None] = {}
    for count in counts:
        if count.found < limits.get(count.name, 0):
            is_usual = "/" in count.name and count.found <= limits[OF_A_FOLDER]
            lower[count.name] = None if is_usual else count.found
    return lower


def lowered(record: str, lower: Mapping[str, int | None]) -> str:
    """The record with what has become less; everything else as it is."""
    for name, number in lower.items():
        line = re.compile(rf'^"{re.escape(name)}" = \d+\n', re.M)
        record = line.sub("" if number is None else f'"{name}" = {number}\n', record)
    return record


def loose_pure_modules(root: Path, files: list[Path]) -> list[str]:
    """Modules that say they are pure, and are not held to it."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    held = [
        module
        for contract in contracts["contracts"]
        if contract["name"].startswith("what is pure")
        for module in contract["source_modules"]
    ]
    loose = []
    for path in files:
        if path.suffix != ".py":
            continue
        said = ast.get_docstring(ast.parse((root / path).read_text())) or ""
        parts = path.with_suffix("").parts[1:]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        is_held = any(name == module or name.startswith(module + ".") for module in held)
        if re.search(r"\bPure\b(?! except)", said) and not is_held:
            loose.append(
                f"{path} says that it is pure, and is not held to it: add {name} to the contract "
                '"what is pure ..." in pyproject.toml'
            )
    return loose


def main() -> int:
    """Prints what was counted; 1 if something is more than it may be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lower", action="store_true", help="write down what has become less")
    lower_asked = parser.parse_args().lower
    files = sources(ROOT)
    counts = [
        *modules_of_folders(files),
        Count(MODULES, sum(path.suffix == ".py" for path in files)),
        *functions_of_calls(ROOT),
        functions_with_many_parameters(ROOT, files),
        attributes_that_change(ROOT, files),
        lines_of_code(ROOT, files),
        docstrings_of_internals(ROOT, files),
        *counts_of_tests(ROOT),
    ]
    record = (ROOT / RECORD).read_text()
    limits = allowed(record)
    for count in counts:
        if count.name in limits:
            print(f"{count.name}: {count.found} of {limits[count.name]}")
    lower = improvements(counts, limits)
    if lower_asked and lower:
        (ROOT / RECORD).write_text(lowered(record, lower))
        print(f"{RECORD} is lowered: {', '.join(lower)}")
    elif lower:
        print(
            f"less than recorded: {', '.join(lower)}; run `python tools/ratchets.py --lower`, and "
            f"commit {RECORD}"
        )
    found = problems(counts, limits) + loose_pure_modules(ROOT, files)
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        print(
            f"where it can't be helped, change the number in {RECORD}, and say why in the commit",
            file=sys.stderr,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
