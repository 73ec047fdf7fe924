"""Suites that take long: which of them have not passed with the files that they are about.

    python tools/suites.py changed        their names, one a line
    python tools/suites.py passed NAME    notes in .ci/passed that one passed with these files

Every suite runs in `.ci/nightly`. `.ci/run` runs those whose files differ from what .ci/passed
has.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSED = Path(".ci/passed")
"""A line a suite: its name, and the digest of its files."""
FILES = {
    "ray": (
        "client/shardwell/ray.py",
        "docs/ray.md",
        "examples/ray_torch_trainer.py",
        "server/shardwell_server/ray_cluster.py",
        "tests/integration/ray",
    ),
    "helm": ("deploy", "docker-compose.yml", "examples/kubernetes", "tests/integration/deploy"),
}


def digest(root: Path, suite: str) -> str:
    """Of the names and contents of a suite's files, as git lists them."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    listed = subprocess.run(
        [*listing, *FILES[suite]], cwd=root, capture_output=True, check=True
    ).stdout
    found = hashlib.sha256()
    for name in sorted(set(filter(None, listed.decode().split("\0")))):
        if (root / name).is_file():
            content = hashlib.sha256((root / name).read_bytes())
            found.update(f"{name}\0{content.hexdigest()}\n".encode())
    return found.hexdigest()


def passed(root: Path) -> dict[str, str]:
    """The digest with which each suite passed."""
    path = root / PASSED
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split() for line in lines)


def changed(root: Path) -> list[str]:
    """Suites whose files are others than those they passed with."""
    noted = passed(root)
    return [suite for suite in FILES if noted.get(suite) != digest(root, suite)]


def note(root: Path, suite: str) -> None:
    """Writes that a suite passed with its files as they are."""
    noted = passed(root) | {suite: digest(root, suite)}
    (root / PASSED).write_text("".join(f"{name} {noted[name]}\n" for name in sorted(noted)))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("changed")
    commands.add_parser("passed").add_argument("suite", choices=FILES)
    given = parser.parse_args()
    if given.command == "passed":
        note(ROOT, given.suite)
    else:
        print("\n".join(changed(ROOT)))


if __name__ == "__main__":
    main()
