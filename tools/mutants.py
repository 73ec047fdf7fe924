"""Puts known defects into a copy of the code, one at a time, and sees whether the tests tell.

    python tools/mutants.py                 all of tools/mutants.toml
    python tools/mutants.py CRC journal     those whose description has one of these words
    python tools/mutants.py --exhaustive    with the tests that `make test` leaves out

A defect is one line that a programmer might write, or leave out. Each names the tests that are to
fail; a defect that fails none of them is a promise that nothing keeps. The exit code is the number
of those.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "mutants.toml"
TIMEOUT_S = 600


class Mutant(NamedTuple):
    """A defect."""

    what: str
    file: str
    old: str
    new: str
    tests: list[str]


class Copy:
    """A copy of the working tree to spoil."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        names = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(names, cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, directory / name)

    def tests_tell(self, mutant: Mutant | None, tests: list[str], arguments: list[str]) -> bool:
        """Whether the tests fail with a defect in the code; with None: as it is."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        paths = [str(self.directory / part) for part in ("client", "server")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",  # a line that changes may leave size and time as is
        }
        with self._spoiled(mutant) if mutant else contextlib.nullcontext():
            try:
                ended = subprocess.run(
                    [*command, "--timeout=120", *arguments, *tests],
                    cwd=self.directory,
                    env=environment,
                    capture_output=True,
                    timeout=TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                return True
        if ended.returncode not in (0, 1, 2, 3):  # 4, 5: no such tests
            sys.exit(ended.stdout.decode() + ended.stderr.decode())
        return ended.returncode != 0

    def _spoiled(self, mutant: Mutant) -> _Spoiled:
        return _Spoiled(self.directory / mutant.file, mutant)


class _Spoiled:
    """While the block runs, a file has the defect."""

    def __init__(self, path: Path, mutant: Mutant) -> None:
        self._path = path
        self._mutant = mutant
        self._text = path.read_text()

    def __enter__(self) -> None:
        self._path.write_text(self._text.replace(self._mutant.old, self._mutant.new))

    def __exit__(self, *_: object) -> None:
        self._path.write_text(self._text)


def read_mutants(words: list[str]) -> list[Mutant]:
    """Those of the list that have one of the words; each is checked against the code."""
    found = [Mutant(**each) for each in tomllib.loads(LIST.read_text())["mutant"]]
    for each in found:
        count = (ROOT / each.file).read_text().count(each.old)
        if count != 1:
            sys.exit(f"{each.what}: {each.file} has its text {count} times; expected 1")
        for test in each.tests:
            if not (ROOT / test.partition("::")[0]).exists():
                sys.exit(f"{each.what}: there is no {test}")
    return [m for m in found if not words or any(w.lower() in m.what.lower() for w in words)]


def main() -> int:
    """How many defects no test tells."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only those whose description has one of these")
    parser.add_argument("--exhaustive", action="store_true", help="with what make test leaves out")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: 2)")
    options = parser.parse_args()
    mutants = read_mutants(options.words)
    arguments = ["-m", "not soak and not containers"] if options.exhaustive else []
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(Path(scratch) / str(number)))

        def tried(mutant: Mutant) -> tuple[bool, float]:
            copy, began_s = copies.get(), time.monotonic()
            try:
                return copy.tests_tell(mutant, mutant.tests, arguments), time.monotonic() - began_s
            finally:
                copies.put(copy)

        for mutant, (is_caught, took_s) in zip(mutants, pool.map(tried, mutants), strict=True):
            print(
                f"{'caught' if is_caught else 'MISSED'} {took_s:4.0f} s  {mutant.what}", flush=True
            )
            if not is_caught:
                missed.append(mutant.what)
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        if copies.get().tests_tell(None, tests, [*arguments, "-n", "4"]):
            sys.exit("these tests fail without any defect: what they caught above says nothing")
    print(f"{len(mutants) - len(missed)} of {len(mutants)} defects are caught")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
