"""Goal: what README and docs/ tell people to type does what they say, in the order of a page, in
one directory, on a cluster as the README starts one.

Method: every Python block is run as it is, every indented line by a real shell's words, and
what they print is compared with what the pages say. Each program runs twice, as a reader does who
tries it again on the same cluster. A line that can't be run here is listed with
what checks it; a new line that is neither fails. Links lead to files and headings that there are.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import shardwell
from harness.programs.commands import Program
from harness.programs.ports import free_port
from shardwell_server import LocalCluster

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in (
        "pytorch", "jax", "parameters", "groups", "tables", "checkpoints", "durability", "machines",
        "compose", "guarantees", "errors", "performance", "wire", "architecture", "security",
        "operations", "runbook", "ray", "samples", "members", "outer", "faq", "concepts/README",
        "concepts/step", "concepts/late-worker", "concepts/shard-files", "concepts/threads",
    )),
]  # fmt: skip
CHUNK_SIZE_BYTES = 1 << 20
"""As users have it."""
END_TIMEOUT_S = 120.0
"""Of a block, some of which import PyTorch or compile with JAX beside whatever else is tested."""
EXTRAS = {"accelerate", "flax", "jax", "keras", "lightning", "optax", "torch", "transformers"}
"""Packages that `make test-extras` installs; a program that imports one is not run without it."""
ELSEWHERE = {
    "shardwell members drain w1": "tests/integration/client/test_members.py, with members",
    "shardwell members remove w7 net": "the same",
    "python train.py w0": "test_quickstarts.py",
    "shardwell run -n 2 -- python plain.py": "test_restarts.py, twice",
    "shardwell run -n 2 -- python means.py": "the same",
    "make demo": "test_demo.py, and CI runs it",
    "make test": "CI runs it",
    "pip install '.[ray]'": "make test-ray installs Ray",
    "pip install '.[cloud]'": "make test-extras installs obstore",
    "shardwell checkpoint save 's3://bucket/runs/{step}' --keep 3": "test_object_stores.py",
    "shardwell checkpoint restore 's3://bucket/runs/{step}'": "the same",
    "python on_ray.py": "tests/integration/ray, as make test-ray runs it",
    "sbatch --nodes 4 --ntasks-per-node 2 examples/slurm/train.sbatch python worker.py": (
        "test_train_sbatch.py, where there is Slurm"
    ),
    "git clone URL shardwell && cd shardwell": "tests run in a clone",
    "python3 -m venv env": "tests run in an environment of their own",
    ". env/bin/activate": "the same",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": "make test-extras",
    "pip install .[torch]": "the Dockerfile installs its wheel; tests use an editable installation",
}
"""Lines that are not run here, and what does."""
AFTER = dict.fromkeys(("docs/checkpoints.md", "docs/operations.md"), "docs/parameters.md")
"""By page: another one whose parameters it has."""
ONCE = {"docs/checkpoints.md 1": "it says that its directory must be new"}
"""Programs that do not run twice, and why."""
NEW_SHELL = "(a new shell)"
"""What begins a page and a section: certificates and tokens of the one before are not set."""
CREDENTIALS = ("SHARDWELL_TLS_", "SHARDWELL_TOKEN")
ONES = r"\[ *((1\.0*|0\.999\d*) *){3}\]"
PRINTED = {
    "python worker.py w1": ONES,
    "python mine.py": ONES,
    "python train.py w1": r"(step \d+: loss [\d.]+\n)+loss 0\.[0-4]\d*",
    "python slow_links.py w1": r"loss 0\.[0-4]\d*",
    "python whole_learner.py w1": r"accuracy (0\.9|1\.0)",
    "docs/jax.md 1": r"\['dense/bias', 'dense/kernel'\]\nloss 0\.\d+",
    "docs/parameters.md 2": "640",
    "docs/parameters.md 4": r"2 2\nShardStatus\(.*",
    "shardwell run -n 4 -- python train.py": r"(?s).*\[3\] rank 3 of 4: \[1\.5 1\.5 1\.5\].*",
    "shardwell run -n 2 --with-shards -- python own_shards.py": (
        r"(?s)(?=.*\[0\] 0 to 5: \[0\.9 )(?=.*\[1\] 5 to 10: \[0\.9 ).*"
    ),
    "shardwell run -n 2 -- python own_cluster.py": r"(\[[01]\] 0\.9\d*\n?){2}",
    "python elastic_group.py": rf"{ONES} 1",
    "docs/groups.md 3": rf"\d\.\d+(e-\d+)? {ONES}",
    "python counted.py w1": "epoch 5: 0 of 1000, partial: 0",
    "python elastic.py w1": ONES,
    "python learner.py w1": ONES,
    "docs/outer.md 5": r"loss 0\.[01]\d*",
    "docs/members.md 2": r"all \('w0',\)",
    "docs/tables.md 1": r"\[     7 123456\]",
    "shardwell checkpoint inspect ckpt/step-1000 --verify": r"(?s).*numpy.*",
    "shardwell status": r"(?s).*0 of (2 .* serving .*1 of 2|1) .* serving .*",
}
"""What a line prints, or a block by its page and number."""


def extras_of(program: str) -> set[str]:
    """What a program imports of EXTRAS."""
    names = list[str]()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return EXTRAS.intersection(*[" ".join(names).replace(".", " ").split()])


def missing(program: str) -> list[str]:
    """What a program imports of EXTRAS, and this environment lacks."""
    return sorted(name for name in extras_of(program) if importlib.util.find_spec(name) is None)


def case(value: Any, name: str, program: str) -> Any:
    """A test's parameter that is about a program, with the marks of what the program imports."""
    lacks = missing(program)
    skips = pytest.mark.skipif(bool(lacks), reason=f"make test-extras installs {lacks}")
    marks = (pytest.mark.extras, skips) if extras_of(program) else ()
    return pytest.param(value, id=name, marks=marks)


class Step(NamedTuple):
    """Something that a page tells people to do."""

    name: str
    text: str
    saved_as: str = ""
    """Name of the file that a block is saved as, and not run by itself."""
    is_python: bool = False
    needs: str = ""
    """Text of what it runs, which imports what it needs."""


def steps_of(page: str) -> Iterator[Step]:
    text = (ROOT / page).read_text()
    number, files = 0, dict[str, str]()
    yield Step(page, NEW_SHELL)
    for found in re.finditer(
        r"^```(\w*)\n(.*?)^```|(?<=\n\n)((?:    [^\n]*\n)+)|^(## .*?)$", text, re.M | re.S
    ):
        language, block, lines, heading = found.groups()
        if heading:
            yield Step(f"{page} {heading}", NEW_SHELL)
        elif lines:
            for line in lines.splitlines():
                command = re.sub(r"\s+#.*", "", line.strip()).replace("'.[torch]'", ".[torch]")
                yield Step(
                    command, command, needs="".join(files.get(word, "") for word in command.split())
                )
        elif language == "python":
            number += 1
            before = text[: found.start()].rpartition("\n\n")[0].rpartition("\n\n")[2]
            saved = re.search(r"[Ss]ave this as `(\S+)`", before)
            name = f"{page} {number}"
            if saved:
                files[saved[1]] = block
            yield Step(name, block, saved[1] if saved else "", is_python=True, needs=block)


class Reader:
    """A reader who does all that the pages say."""

    def __init__(self, stack: contextlib.ExitStack, target: str) -> None:
        self._stack = stack
        self._environment: dict[str, str] = {}
        self._home = {"SHARDWELL_SHARDS": target}
        """The cluster that each section begins with, until a line starts another one."""
        self._behind: list[Program] = []
        self._addresses: list[str] = []
        """Of shards that were started one by one."""

    def do(self, step: Step) -> None:
        if missing(step.needs) or step.text in ELSEWHERE:
            return
        if step.text == NEW_SHELL:
            for name in [name for name in self._environment if name.startswith(CREDENTIALS)]:
                del self._environment[name]
            self._environment.update(self._home)
            self._addresses = []
            return
        if step.is_python:
            if step.saved_as:
                Path(step.saved_as).write_text(step.text)
            else:
                self._run_twice(step.name, ["-c", step.text])
            return
        words = shlex.split(step.text)
        match words:
            case ["export", *settings]:
                for setting in settings:
                    name, _, value = setting.partition("=")
                    if name == "SHARDWELL_SHARDS":
                        value, self._addresses = ",".join(self._addresses), []
                    self._environment[name] = value
            case ["shardwell", "cluster", *_]:
                cluster = self._started(words)
                setting = cluster.read_line().removeprefix("export ")
                if "--data-dir" in words:
                    return  # only for those who want shards that survive
                name, _, value = setting.partition("=")
                self._environment[name] = self._home[name] = value
            case ["shardwell", "serve", *_]:
                self._environment.pop("SHARDWELL_SHARDS", None)  # that of another cluster
                options = {"--listen": f"127.0.0.1:{free_port()}", "--admin-listen": "127.0.0.1:0"}
                pairs = zip(["", *words], words, strict=False)
                shard = self._started([options.get(before, word) for before, word in pairs])
                assert shard.read_line() == f"serving on {options['--listen']}"
                self._addresses.append(options["--listen"])
            case ["shardwell", "checkpoint", "restore", *_]:
                with LocalCluster(3) as empty:
                    self._run(step.name, _arguments(words), SHARDWELL_SHARDS=empty.target)
            case ["shardwell", "delete", *names]:
                with LocalCluster(2) as used:
                    with shardwell.connect(used.target) as client:
                        for name in names:
                            client.parameter(name, size=9, optimizer=shardwell.SGD(0.1))
                    self._run(step.name, _arguments(words), SHARDWELL_SHARDS=used.target)
            case ["python", script, *arguments, "&"]:
                self._behind.append(self._started(["python", script, *arguments]))
            case ["python", *_] | ["shardwell", "run", *_]:
                self._run_twice(step.name, _arguments(words))
            case ["shardwell", *_]:
                self._run(step.name, _arguments(words))
            case _:
                raise AssertionError(f"nobody knows how to run {step.text!r}")

    def _started(self, words: list[str]) -> Program:
        arguments, is_script = _arguments(words), words[0] == "python"
        program = Program(*arguments, environment=self._environment, is_forked=is_script)
        return self._stack.enter_context(program)

    def _run_twice(self, name: str, arguments: list[str]) -> None:
        self._run(name, arguments)
        for program in self._behind:
            assert program.end() == 0, program.log
        self._behind.clear()
        if name not in ONCE:
            self._run(f"{name}, again", arguments)

    def _run(self, name: str, arguments: list[str], **environment: str) -> None:
        variables, is_script = self._environment | environment, arguments[0] != "-m"
        with Program(*arguments, environment=variables, is_forked=is_script) as program:
            assert program.end(END_TIMEOUT_S) == 0, (name, program.lines, program.log)
        if name in PRINTED:
            printed = "\n".join(program.lines)
            assert re.fullmatch(PRINTED[name], printed), (name, printed)


def _arguments(words: list[str]) -> list[str]:
    python = [sys.executable if word == "python" else word for word in words]
    return ["-m", "shardwell_server", *python[1:]] if words[0] == "shardwell" else words[1:]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where a reader saves files, and works."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def pages() -> Iterator[Any]:
    """All pages; one with programs that need EXTRAS is read again where they are."""
    for page in PAGES:
        programs = "\n".join(step.needs for step in steps_of(page))
        yield pytest.param(page, marks=pytest.mark.extras if extras_of(programs) else ())


@pytest.mark.parametrize("page", [*pages()])
def test_all_that_a_page_tells_people_to_do(cluster, directory: Path, page: str) -> None:
    with contextlib.ExitStack() as stack:
        reader = Reader(stack, cluster(2, chunk_size_bytes=CHUNK_SIZE_BYTES).target)
        for each in filter(None, (AFTER.get(page), page)):
            for step in steps_of(each):
                reader.do(step)
    assert page != "docs/tables.md" or Path("users.parquet").exists()


def test_what_is_listed_here_is_on_the_pages() -> None:
    names = {step.name for page in PAGES for step in steps_of(page)}
    assert {*PRINTED, *ELSEWHERE, *ONCE} <= names


def test_every_page_is_read() -> None:
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/concepts/*.md")]
    assert {*PAGES} == {"README.md", *(str(path.relative_to(ROOT)) for path in pages)}
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def _headings(path: Path) -> set[str]:
    lines = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        *sorted(
            str(path.relative_to(ROOT))
            for folder in ("quickstart", "tutorial", "migrate")
            for path in ROOT.glob(f"docs/{folder}/*.md")
        ),
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "examples/README.md",
        "docs/adr/README.md",
        *(f"docs/reference/{path.name}" for path in ROOT.glob("docs/reference/*.md")),
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, heading = target.partition("#")
        found = path.parent / name if name else path
        assert found.exists(), f"{page}: {target}"
        assert not heading or heading in _headings(found), f"{page}: {target}"
