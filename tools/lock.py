"""Locks what the images install, and checks that pyproject.toml and the locks agree.

python tools/lock.py                what is missing is added, what is pinned stays
python tools/lock.py --upgrade      everything at its newest
python tools/lock.py --check        looks at files alone; fails where they don't agree

deploy/requirements.txt          the project's dependencies: the image `shardwell`
deploy/requirements-demo.txt     these, at the same versions, and its extra `demo`: `shardwell-demo`
deploy/requirements-build.txt    what builds its wheel, which is in neither

A lock is for the images' Python, on Linux, on x86-64 and arm64. It holds versions and hashes of all
files of a version, and nothing that says where they come from.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
IMAGE_LOCK = Path("deploy/requirements.txt")
DEMO_LOCK = Path("deploy/requirements-demo.txt")
BUILD_LOCK = Path("deploy/requirements-build.txt")
SELECTED = {
    DEMO_LOCK: ("pyproject.toml", "--extra=demo"),
    IMAGE_LOCK: ("pyproject.toml", f"--constraint={DEMO_LOCK}"),
    BUILD_LOCK: ("--group=image-build",),
}
"""By lock: which requirements of pyproject.toml go into it, in uv's words. What the demo takes is
found first, as all that both images have is what is good for both."""
MACHINES = ("x86_64", "aarch64")
HASH = re.compile(r"sha256:[0-9a-f]{64}")


class Pin(NamedTuple):
    """A package of a lock."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        """As package indexes write it."""
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        """The one that is locked."""
        (specifier,) = self.requirement.specifier
        return specifier.version


def read(lock: Path) -> list[Pin]:
    """The packages of a lock.

    Args:
        lock: Its file.

    Raises:
        ValueError: a line is anything but NAME==VERSION with hashes and maybe a marker.
    """
    pins = []
    for line in lock.read_text().replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        what, *hashes = re.split(r"\s--hash=", line)
        hashes = [each.strip() for each in hashes]
        try:
            requirement = Requirement(what.strip())
        except InvalidRequirement:
            raise ValueError(f"not a requirement: {what.strip()}") from None
        operators = [(each.operator, "*" in each.version) for each in requirement.specifier]
        if operators != [("==", False)] or requirement.url or requirement.extras:
            raise ValueError(f"not one version of a package: {what.strip()}")
        if not hashes or not all(HASH.fullmatch(each) for each in hashes):
            raise ValueError(f"without SHA-256 hashes: {what.strip()}")
        pins.append(Pin(requirement, tuple(hashes)))
    return pins


def problems(root: Path) -> list[str]:
    """What keeps pyproject.toml and the locks apart, a line each; nothing is fetched.

    Args:
        root: The repository's.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    dependencies = project["project"]["dependencies"]
    expected = {
        IMAGE_LOCK: dependencies,
        DEMO_LOCK: [*dependencies, *project["project"]["optional-dependencies"]["demo"]],
        BUILD_LOCK: [*project["build-system"]["requires"], *groups["image-build"]],
    }
    found = []
    locked: dict[Path, list[Pin]] = {}
    for lock, requirements in expected.items():
        try:
            pins = read(root / lock)
        except (ValueError, OSError) as error:
            found.append(f"{lock}: {error}")
            continue
        locked[lock] = pins
        if "://" in (root / lock).read_text():
            found.append(f"{lock}: names an address")
        for machine in MACHINES:
            surroundings = _surroundings(_python(root), machine)
            for requirement in map(Requirement, dict.fromkeys(requirements)):
                found += [f"{lock}: {each}" for each in _missing(requirement, pins, surroundings)]
    if {IMAGE_LOCK, DEMO_LOCK} <= locked.keys():
        of_demo = {str(pin.requirement): set(pin.hashes) for pin in locked[DEMO_LOCK]}
        found += [
            f"{DEMO_LOCK}: {pin.requirement} of {IMAGE_LOCK} differs there"
            for pin in locked[IMAGE_LOCK]
            if of_demo.get(str(pin.requirement)) != set(pin.hashes)
        ]
    return list(dict.fromkeys(found))


def _missing(requirement: Requirement, pins: list[Pin], surroundings: dict[str, Any]) -> list[str]:
    """Problems of the pin of a requirement."""
    if requirement.marker and not requirement.marker.evaluate(surroundings):
        return []
    name = canonicalize_name(requirement.name)
    versions = [
        each.version
        for each in pins
        if each.name == name
        and (each.requirement.marker is None or each.requirement.marker.evaluate(surroundings))
    ]
    if len(versions) != 1:
        count = f"{len(versions)} times" if versions else "nowhere"
        return [f"{requirement} is locked {count}"]
    if not requirement.specifier.contains(versions[0], prereleases=True):
        return [f"{requirement} is locked at {versions[0]}"]
    return []


def _surroundings(python: str, machine: str) -> dict[str, Any]:
    """The image's, for markers."""
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def _python(root: Path) -> str:
    """The image's, such as 3.12."""
    found = re.search(
        r"^ARG BASE=python:(\d+\.\d+)", (root / "deploy/Dockerfile").read_text(), re.M
    )
    if found is None:
        raise SystemExit("deploy/Dockerfile names no Python")
    return found[1]


def make(*, is_upgrade: bool) -> None:
    """Writes the locks.

    Args:
        is_upgrade: Pinned versions may become newer, too.
    """
    python = f"--python-version={_python(ROOT)}"
    for lock, selected in SELECTED.items():
        # Wheels alone: what builds an sdist would be fetched without hashes.
        _uv("compile", *selected, "--universal", python, "--only-binary=:all:",
            "--generate-hashes", "--custom-compile-command=make lock", f"--output-file={lock}",
            *(["--upgrade"] if is_upgrade else []))  # fmt: skip
        # That there is a wheel of each for both machines; nothing is installed.
        with tempfile.TemporaryDirectory() as folder:
            for machine in MACHINES:
                _uv("install", "--dry-run", f"--python-platform={machine}-manylinux_2_28", python,
                    "--only-binary=:all:", "--require-hashes", f"--target={folder}",
                    f"--requirements={lock}")  # fmt: skip
        print(f"{lock}: {len(read(ROOT / lock))} packages")


def _uv(*arguments: str) -> None:
    command = [sys.executable, "-m", "uv", "pip", *arguments, "--quiet"]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def main() -> None:
    """Writes or checks the locks, by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="say whether the locks are current")
    choice.add_argument("--upgrade", action="store_true", help="take the newest of everything")
    arguments = parser.parse_args()
    if not arguments.check:
        make(is_upgrade=arguments.upgrade)
    if found := problems(ROOT):
        print(*found, "run 'make lock' and commit deploy/requirements*.txt", sep="\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
