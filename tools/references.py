"""Finds names in docstrings, comments and pages that nothing in the code has any more.

python tools/references.py

It reads docstrings and comments of all Python files, comments of .proto files, and Markdown except
CHANGELOG.md, which names what is gone. In these it looks at:

CLASS.member     in backquotes: our class, or message of protos/, has the member, or inherits it
module.NAME      in backquotes: our module defines it; of a variable, anything of ours has the
                 attribute
CamelCase, function(), and words with an underscore: the word occurs somewhere in the code
names of .py, .proto, .c, .h files, and of .md in code: a file's path ends like that
folder/          in backquotes: a folder's path ends like that, or a file's without its suffix

Names of other projects that no code here has are in OTHERS. Lines of an example (`>>>`) are code: a
test runs them.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "client",
    "server",
    "protos",
    "tests",
    "tools",
    "examples",
    "benchmarks",
    "docs",
    "deploy",
    ".ci",
)
PACKAGES = ("shardwell", "shardwell_server", "harness", "embeddings")
OTHERS = frozenset(
    {
        *("clock_getcpuclockid", "mpirun_rsh"),  # the C library, MPI
        "Python.h",
        *("record_batch", "ignore_data_skip"),  # Horovod, transformers
        *("random.py", "token.py"),  # files that hide a module of Python's library
        "sitecustomize.py",
        *("accelerator", "lightning", "transformers", "ddp_backend", "process_group_backend"),
        *(
            "monitored_barrier",
            "max_epochs",
            "load_best_model_at_end",
            "test_ddp_comm_hook",
            "test_merge_weights",
        ),
        *("equinox", "lax", "nnx", "optax", "value_and_grad", "clip_by_global_norm"),  # with JAX
        *("schedule_free", "conditionally_mask"),  # optax
        "flatten_dict",
        *("JaxRuntimeError", "loss_fn"),
        *("env_vars", "runtime_env", "max_retries"),  # Ray
        *("max_connection_age", "allow_indirect_imports"),  # gRPC, import-linter
        *("credentials_file", "tls_config", "ca_file"),  # Prometheus
        *("hvd", "skip_synchronize", "broadcast_optimizer_state", "backward_passes_per_step"),
        *("ElasticSampler", "SyncBatchNorm"),  # Horovod, torch
        *("MyRank", "Push", "Pull", "PushPull", "dist_async", "row_sparse_pull"),  # ps-lite, MXNet
        *("variable_partitioner", "should_commit", "manager", "LocalSGD"),  # TensorFlow, torchft
    }
)
_EXAMPLE = re.compile(r"(?<=>>> ).*|(?<=\.\.\. ).*")
"""A line of a docstring's example, after its prompt."""
_SOURCES = {
    ".py",
    ".md",
    ".proto",
    ".c",
    ".h",
    ".toml",
    ".yaml",
    ".yml",
    ".sh",
    ".sbatch",
    ".tpl",
    ".txt",
}
_GENERATED = ("_pb2.py", "_pb2_grpc.py", ".pyi")
_WORD = re.compile(r"[A-Za-z_]\w*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_QUOTED = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?")
_SNAKE = re.compile(
    r"(?<![\w$./<>-])_{0,2}[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w*-]|\.(?:py|proto|c|h|md)\b)"
)
_PATH = re.compile(r"(?<![\w/.<>*$~-])(?:[\w-]+/)*[\w-]+\.(?:py|proto|c|h|md)(?![\w.]\w)")
_OTHER_FILE = re.compile(r"[A-Z]+\.\w+|.*\.(?:json|jsonl|toml|pem|log|removed|partial)")
_FOLDER = re.compile(r"(?:[a-z][\w-]*/)+(?:[a-z][\w-]*)?")
_FIELD = re.compile(
    r"^\s*(?:(?:repeated|optional)\s+)?[\w.]+\s+(\w+)\s*=\s*\d+|^\s*(?:rpc|oneof)\s+(\w+)"
)
_CLOSED_BASES = {"object", "Protocol", "Generic", "ABC", "NamedTuple", "Enum", "IntEnum"}
_OF_ALL_CLASSES = {*dir(type), "name", "value"}


class Text(NamedTuple):
    """Something that people read."""

    file: str
    line: int
    """Of its beginning."""
    text: str


class Finding(NamedTuple):
    """A name that nothing has."""

    file: str
    line: int
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}: {self.why}"


class Code:
    """The names that the code has, and all texts that may speak of them.

    Args:
        root: The repository's folder.
    """

    def __init__(self, root: Path) -> None:
        self.texts: list[Text] = []
        self.words = {*dir(builtins), *sys.stdlib_module_names}
        self.attributes: set[str] = set()
        """Members of any class or message."""
        self.modules: dict[str, list[set[str]]] = {}
        """What each defines, by its last name."""
        self.classes: dict[str, list[tuple[set[str], list[str]]]] = {}
        """Members and bases, of each class or message with the name."""
        self.others = {*sys.stdlib_module_names, *dir(builtins)}
        """Names imported from other projects, or Python's."""
        self.aliases: dict[str, str] = {}
        """Names under which modules are imported."""
        self.dotted: set[str] = set()
        """Names with dots in strings."""
        self.files: set[str] = set()
        self.folders: set[str] = set()
        self._root = root
        for path in sources(root):
            name = path.relative_to(root).as_posix()
            self.files.add(name)
            parts = Path(name).parts[:-1]
            self.folders |= {
                "/".join(parts[i:j])
                for i in range(len(parts))
                for j in range(i + 1, len(parts) + 1)
            }
            self.words |= {*parts, Path(name).stem}
            if path.suffix == ".py":
                self._add_python(name, path.read_text())
            elif path.suffix == ".md":
                self._add_page(name, path.read_text())
            elif path.suffix == ".proto":
                self._add_proto(name, path.read_text())
            else:
                self.words |= set(_WORD.findall(path.read_text()))
        for alias, name in self.aliases.items():
            self.modules.setdefault(alias, []).extend(self.modules.get(name, ()))
        for members in (members for found in self.classes.values() for members, _ in found):
            self.attributes |= members
        self.words |= self.attributes

    def _add_python(self, file: str, source: str) -> None:
        tree = ast.parse(source)
        path = Path(file)
        stem = path.parent.name if path.stem == "__init__" else path.stem
        self.modules.setdefault(stem, []).append(_defined(tree.body))
        documentation = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                if isinstance(node.value.value, str):
                    documentation.add(node.value)
                    prose = _EXAMPLE.sub("", node.value.value)
                    self.texts.append(Text(file, node.lineno, prose))
            elif isinstance(node, ast.ClassDef):
                found = (_members(node), [_last_name(base) for base in node.bases])
                self.classes.setdefault(node.name, []).append(found)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                origin = getattr(node, "module", None) or node.names[0].name
                is_ours = origin.split(".")[0] in PACKAGES
                if not is_ours:
                    self.others.add(origin.split(".")[0])
                for each in node.names:
                    if not is_ours:
                        self.others.add((each.asname or each.name).split(".")[0])
                    elif each.asname:
                        self.aliases[each.asname] = each.name.rpartition(".")[2]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node in documentation:
                continue
            self.words |= set(_words(node))
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.dotted |= set(_DOTTED.findall(node.value))
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                self.texts.append(Text(file, token.start[0], token.string))

    def _add_page(self, file: str, source: str) -> None:
        """What its examples define counts as code, so that the page may speak of it."""
        for number, line, is_code in page_lines(source):
            if is_code:
                self.words |= set(_WORD.findall(line))
                self.files |= set(_PATH.findall(line))
            elif file != "CHANGELOG.md":
                self.texts.append(Text(file, number, line))

    def _add_proto(self, file: str, source: str) -> None:
        opened: list[str] = []
        for number, line in enumerate(source.splitlines(), 1):
            code, _, comment = line.partition("//")
            self.words |= set(_WORD.findall(code))
            if comment:
                self.texts.append(Text(file, number, comment))
            if block := re.match(r"\s*(?:message|enum|service|oneof|rpc)\s+(\w+).*\{\s*$", code):
                if block[0].split()[0] not in ("oneof", "rpc"):
                    self.classes.setdefault(block[1], []).append((set(), []))
                opened.append(block[1])
            elif "}" in code and "{" not in code and opened:
                opened.pop()
            if field := _FIELD.match(code):
                for name in opened:
                    if name in self.classes:
                        self.classes[name][-1][0].add(field[1] or field[2])

    def has_member(self, name: str, member: str, seen: tuple[str, ...] = ()) -> bool:
        """Whether a class of that name has the member, or a base that is not ours may have it."""
        if name in seen or name in _CLOSED_BASES or member in _OF_ALL_CLASSES:
            return member in _OF_ALL_CLASSES
        if name not in self.classes:
            return True
        return any(
            member in members or any(self.has_member(base, member, (*seen, name)) for base in bases)
            for members, bases in self.classes[name]
        )

    def lacks(self, name: str) -> str | None:
        """Why a name, which may have dots, is none of the code's; None: it is."""
        first, *_ = name.split(".")
        *_, owner, last = ("", *name.split("."))
        if not owner:
            return (
                None
                if {last, last.removesuffix("_total")} & self.words
                else "no code has this name"
            )
        if first in self.others or first in OTHERS or name in self.dotted:
            return None
        if any(last in defined for defined in self.modules.get(owner, ())) or last in self.modules:
            return None
        if owner in self.classes:
            return None if self.has_member(owner, last) else f"{owner} has no member {last}"
        if owner not in self.words:
            return f"no code has the name {owner}"
        if last[:1].isupper():
            return f"no module {owner} of this project defines {last}"
        return (
            None if last in self.attributes else f"nothing of this project has an attribute {last}"
        )

    def has_file(self, path: str) -> bool:
        """Whether a file's path is this one, or ends with it."""
        return any(file == path or file.endswith("/" + path) for file in self.files)

    def has_folder(self, path: str) -> bool:
        """The same of a folder, or of a file without its suffix."""
        path = path.rstrip("/")
        return (
            (self._root / path).is_dir()
            or path in self.folders
            or any(self.has_file(path + suffix) for suffix in ("", *_SOURCES))
        )


def sources(root: Path) -> Iterator[Path]:
    """The files that are read, in order."""
    yield from sorted(path for path in root.iterdir() if path.is_file() and path.suffix in _SOURCES)
    yield from (path for name in ("Makefile", "Dockerfile") if (path := root / name).is_file())
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in _SOURCES and not path.name.endswith(_GENERATED):
                yield path


def page_lines(source: str) -> Iterator[tuple[int, str, bool]]:
    """Numbers and lines of a page of Markdown, and whether each is code."""
    is_fenced = is_indented = in_list = False
    was_blank = True
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
            continue
        if not line.startswith(" ") and line.strip():
            in_list = re.match(r"[-*+]|\d+\.", line) is not None
        is_indented = line.startswith("    ") and not in_list and (was_blank or is_indented)
        was_blank = not line.strip()
        yield number, line, is_fenced or is_indented


def _words(node: ast.AST) -> Iterator[str]:
    """Names that a node uses or makes, and words of a string."""
    for field in ("id", "attr", "arg", "name", "asname", "module"):
        if isinstance(word := getattr(node, field, None), str):
            yield from word.split(".")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _WORD.findall(node.value)


def _defined(body: Iterable[ast.stmt]) -> set[str]:
    """Names that statements bind, without those inside functions and classes."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(each.asname or each.name).split(".")[0] for each in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
            }
        else:
            for field in ("body", "orelse", "finalbody", "handlers"):
                names |= _defined(getattr(node, field, ()))
    return names


def _members(node: ast.ClassDef) -> set[str]:
    """What a class binds, its instances' attributes, and its constructor's parameters."""
    names = _defined(node.body)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and _last_name(inner.value) in ("self", "cls"):
            names.add(inner.attr)
        elif isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            names |= {each.arg for each in (*inner.args.args, *inner.args.kwonlyargs)}
    return names


def _last_name(node: ast.expr) -> str:
    """Of `a.b.C[D]`: C."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return getattr(node, "id", None) or getattr(node, "attr", "")


def _names(text: Text) -> Iterator[tuple[int, str, str]]:
    """Where in a text what is named: "name", "path" or "folder"."""
    for match in _PATH.finditer(text.text):
        is_link = text.file.endswith(".md") and match[0].endswith(".md")  # tested where pages are
        is_readers = text.file.endswith(".md") and "/" not in match[0] and "adr/" not in text.file
        if not is_link and not is_readers:
            yield match.start(), "path", match[0]
    for match in _SNAKE.finditer(text.text):
        yield match.start(), "name", match[0]
    for match in _QUOTED.finditer(text.text):
        quoted, name = match[1], _NAME.fullmatch(match[1])
        if _FOLDER.fullmatch(quoted):
            yield match.start(), "folder", quoted
        elif name and not _PATH.fullmatch(quoted) and not _OTHER_FILE.fullmatch(quoted):
            is_camel = re.search("[A-Z]", name[1]) and re.search("[a-z]", name[1])
            if "." in name[1] or name[2] or is_camel:
                yield match.start(), "name", name[1]


def _is_subscript(name: str) -> bool:
    """Whether it is a symbol of a formula: n_i."""
    return len(name.rpartition("_")[2]) == 1


def findings(root: Path) -> list[Finding]:
    """The names that nothing has, in order of files and lines."""
    code = Code(root)
    found = set()
    for text in code.texts:
        for offset, kind, name in _names(text):
            if name in OTHERS or (name.startswith("__") and name.endswith("__")):
                continue
            why: str | None = None
            if kind == "name" and not _is_subscript(name):
                why = code.lacks(name)
            elif kind == "path" and not code.has_file(name):
                why = "no file has this path, or one that ends like it"
            elif (
                kind == "folder"
                and name.split("/")[0] in code.folders
                and not code.has_folder(name)
            ):
                why = "no folder has this path, or one that ends like it"
            if why is not None:
                line = text.line + text.text.count("\n", 0, offset)
                found.add(Finding(text.file, line, name, why))
    return sorted(found)


def main() -> int:
    """Prints what it finds; 1 if there is anything."""
    found = findings(ROOT)
    for each in found:
        print(each)
    if found:
        print(
            f"{len(found)} names that nothing has: write what they are called now, or, where they "
            "belong to another project, add them to OTHERS in tools/references.py"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
