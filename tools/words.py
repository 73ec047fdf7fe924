"""Finds words that make a sentence hard to read, and says what to write instead.

python tools/words.py              all; fails where it finds something
python tools/words.py PATH...      what lies below these paths, also below those of NOT_YET

It reads Markdown (without code), docstrings, comments of Python and .proto files, and strings of
Python that have a space: messages and help. Of tests it reads docstrings and comments alone.
Backquoted names are code. It looks for:

words            those of RULES: their sentences hide which part of the code does what
"What is ..."    at the beginning of a sentence that is no question: name the thing
"See X."         as a whole docstring: say what the caller gets, or delete it
Args             an entry that begins with "Of", "Which", "The same", ..: begin with a noun
long lines       of Markdown: over 120 characters, without links, code and tables
first lines      of the product's docstrings: "The rows that one answer holds." or "Returns the norm
                 of a step's mean gradient.", never a clause that begins with what, which or how;
                 a module may begin with a title without an article
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import references

ROOT = Path(__file__).resolve().parent.parent
NOT_YET: tuple[str, ...] = ()
"""Files below these paths still have such words. It only shrinks."""
PRODUCT = ("client/shardwell/", "server/shardwell_server/")
"""Folders of which docstrings are checked by their first lines, without the generated v1."""
LINE_MAX = 120
"""Characters of a line of Markdown."""
RULES = {
    r"\btold\b": "say what returns, raises, logs or reports it",
    r"\bstands\b": "write is, means, holds or remains",
    r"\b[Ww]hoever\b": "name them: the caller, a client, a worker, a reader",
    r"\bis\s+there\b": "write exists, arrived, or where it is",
    r"\b[Ss]omebody\b": "name them: a user, another process, another worker",
    r"\b(?:[Nn]o|[Aa]ny)body\b": "name them: no worker, no caller, any client",
    r"\bits\s+likes?\b": "name them",
    r"\bas\s+far\s+as\s+is\s+known\b": "say who knows it, and from where",
    r"(?:^|[.:!?]\s+|\n\s*\n\s*)What\s+(?:is|are|was|were)\b(?![^.!?]*\?)": "begin with the thing",
}
_RULES = [(re.compile(pattern), advice) for pattern, advice in RULES.items()]
_QUOTED = re.compile(r"(`+)[^`]+?\1")
_TARGET = re.compile(r"\]\([^)\s]*\)|^\[[^\]]+\]: \S+|https?://\S+", re.M)
_ONLY_SEE = re.compile(r"\s*See (?:the )?`?[\w.]+`?\.?\s*")
_ENTRY = re.compile(r"( *)\*{0,2}\w+: (Of|Which|Whose|Who|That|As|The same)\b")

_CLAUSE = re.compile(r"(What|Who|Whose|Which|Whether|How|Why|Where|When|While|The same)\b")
_FRAGMENT = re.compile(
    r"(As|At|Before|Behind|By|For|From|If|In|Of|On|So|Such|Than|That|There|These|Those|To|Until|With"
    r"|Without|It|They|See|Nothing|Its)\b"
)
_ARTICLE = re.compile(
    r"(A|An|The|All|Another|Any|Both|Each|Every|No|One|Several|Some|This|Two|True if)\b"
)
_PLURAL = re.compile(
    r"(?!(?:Checks|Ensures|Knows|Learns|Makes|Notes|Reports|Says|Sees|Takes|Tells)\b)"
    r"[A-Z]\w*s (?:of|that|between|among)\b"
)
_VERB = re.compile(r"[A-Z]\w*s,? \S")
_COMMAND = re.compile(r"\b(command|group)\b")


class Finding(NamedTuple):
    """Something that is hard to read."""

    file: str
    line: int
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.found}: {self.advice}"


class Text(NamedTuple):
    """Sentences that belong together."""

    line: int
    """The first line's number."""
    text: str


def _blank(match: re.Match[str]) -> str:
    """Text of the same shape that no rule finds."""
    return re.sub(r"\S", "_", match[0])


def _in_words(text: Text) -> Iterator[tuple[int, str, str]]:
    """Line, words and advice of what the rules find."""
    prose = _TARGET.sub(_blank, _QUOTED.sub(_blank, text.text))
    for rule, advice in _RULES:
        for match in rule.finditer(prose):
            found = match[0].lstrip(".:!? \n")
            start = match.end() - len(found)
            yield text.line + prose.count("\n", 0, start), " ".join(found.split()), advice


def _in_docstring(text: Text) -> Iterator[tuple[int, str, str]]:
    """The same of what docstrings alone have."""
    if _ONLY_SEE.fullmatch(text.text):
        yield text.line, text.text.strip(), "say what the caller gets, or delete the docstring"
    indent = None
    for number, line in enumerate(text.text.splitlines(), text.line):
        if line.strip() in ("Args:", "Returns:", "Raises:"):
            indent = line.index(line.strip()) + 4 if "Args" in line else None
        elif indent is not None and (match := _ENTRY.match(line)) and len(match[1]) == indent:
            yield number, match[0].strip(), "begin with a noun"


def _comments(lines: list[tuple[int, int, str]]) -> Iterator[Text]:
    """Comments of lines that follow one another are one text.

    Args:
        lines: Line number, column and text of each comment, in order.
    """
    block: list[tuple[int, int, str]] = []
    for comment in [*lines, (-1, -1, "")]:
        if block and (block[-1][0] + 1, block[-1][1]) != comment[:2]:
            yield Text(block[0][0], "\n".join(text for _, _, text in block))
            block = []
        block.append(comment)


def _first_line_advice(line: str, is_title: bool) -> str:
    """Returns what is wrong with the first line of a docstring; "" if nothing is.

    Args:
        line: The line.
        is_title: True for a module, whose name needs no article.
    """
    if _CLAUSE.match(line):
        return "name the thing, or begin with a verb in the third person"
    if is_title or _ARTICLE.match(line):
        return ""
    if _FRAGMENT.match(line):
        return "begin with an article and a noun, or with a verb in the third person"
    if _PLURAL.match(line):
        return "give the noun an article"
    if not _VERB.match(line):
        return "begin with an article, or with a verb in the third person and its object"
    return ""


def _is_command(node: ast.AST) -> bool:
    """Returns True for a command, whose docstring is its help."""
    return any(_COMMAND.search(ast.unparse(each)) for each in getattr(node, "decorator_list", ()))


def _first_lines(source: str) -> Iterator[tuple[int, str, str]]:
    """Finds first lines that are neither a noun phrase nor a verb with an object."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) or not (text := ast.get_docstring(node)):
            continue
        (line, *_) = text.splitlines()
        advice = _first_line_advice(line, isinstance(node, ast.Module))
        if advice and not _is_command(node):
            yield node.body[0].lineno, " ".join(line.split()[:3]), advice


def first_line_findings(root: Path, paths: tuple[str, ...] = ()) -> list[Finding]:
    """Returns wrong first lines.

    Args:
        root: The repository's folder.
        paths: Beginnings of files' paths; none: all files.
    """
    return [
        found
        for path in sorted(each for folder in PRODUCT for each in (root / folder).rglob("*.py"))
        if "v1" not in path.parts
        for file in [path.relative_to(root).as_posix()]
        if file.startswith(paths or "")
        for found in sorted(Finding(file, *each) for each in _first_lines(path.read_text()))
    ]


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _message(node: ast.JoinedStr) -> str:
    """An f-string's own words."""
    return "".join(part.value if _is_string(part) else "_" for part in node.values)  # type: ignore[attr-defined]


def _in_python(source: str, has_messages: bool) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(source)
    seen: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_string(node.value):
            seen.add(node.value)
            text = Text(node.lineno, node.value.value)  # type: ignore[attr-defined]
            yield from _in_words(text)
            yield from _in_docstring(text)
        elif isinstance(node, ast.JoinedStr):
            seen |= set(node.values)
        if not has_messages or node in seen or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        words = _message(node) if isinstance(node, ast.JoinedStr) else node.value
        if isinstance(words, str) and " " in words:
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            for _, found, advice in _in_words(Text(0, words)):
                first = found.split()[0]
                where = next((at for at, line in enumerate(lines) if first in line), 0)
                yield node.lineno + where, found, advice
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    for text in _comments(
        [
            (*each.start, each.string.lstrip("# "))
            for each in tokens
            if each.type == tokenize.COMMENT
        ]
    ):
        yield from _in_words(text)


def _in_page(source: str) -> Iterator[tuple[int, str, str]]:
    lines = [
        (number, 0, line) for number, line, is_code in references.page_lines(source) if not is_code
    ]
    for text in _comments(lines):
        yield from _in_words(text)
    for number, _, line in lines:
        length = len(_QUOTED.sub("", _TARGET.sub("", line)))
        if length > LINE_MAX and not line.lstrip().startswith(("|", "<", "[![")):
            yield number, f"{length} characters", f"end lines at {LINE_MAX}"


def _in_proto(source: str) -> Iterator[tuple[int, str, str]]:
    comments = []
    for number, line in enumerate(source.splitlines(), 1):
        code, mark, comment = line.partition("//")
        if mark:
            comments.append((number, len(code), comment.strip()))
    for text in _comments(comments):
        yield from _in_words(text)


def findings(root: Path, paths: tuple[str, ...] = ()) -> list[Finding]:
    """All that is hard to read, in order of files and lines.

    Args:
        root: The repository's folder.
        paths: Beginnings of files' paths; none: all files but those of NOT_YET.
    """
    found = set()
    for path in references.sources(root):
        file = path.relative_to(root).as_posix()
        if not file.startswith(paths) if paths else file.startswith(NOT_YET):
            continue
        if path.suffix == ".py":
            each = _in_python(path.read_text(), not file.startswith("tests/"))
        elif path.suffix == ".md":
            each = _in_page(path.read_text())
        elif path.suffix == ".proto":
            each = _in_proto(path.read_text())
        else:
            continue
        found |= {Finding(file, *what) for what in each}
    return sorted(found)


def main() -> int:
    """Prints what it finds; 1 if it finds something."""
    paths = tuple(sys.argv[1:])
    found = findings(ROOT, paths) + first_line_findings(ROOT, paths)
    for each in found:
        print(each)
    if found:
        print(
            f"{len(found)} places that are hard to read: a sentence's subject is a thing in the "
            "code, and its verb is active"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
